//! Clients' names for models, and the versions behind each with their weights. The choice of a version is a pure
//! function of a request's key, the weights and which versions are ready: every router of a cluster chooses alike.
//! Knows no requests, and replicas only by version.

use crate::board::pick::scatter;
use crate::lines::{self, BadLine, nearest};
use crate::link::versions::{ServedVersion, most_common};
use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::sync::{Arc, PoisonError, RwLock};

/// The most names: each is a label of metrics.
const ROUTES_MAX: usize = 100;
/// The most versions of one name.
const SHARES_MAX: usize = 16;
const WEIGHT_MAX: u32 = 1_000_000;
/// An odd number near 2^64 divided by the golden ratio: multiplied by it, consecutive keys spread evenly over a scale.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// All routes; clones share them. Without any, models have their own names.
#[derive(Clone, Debug, Default)]
pub struct ModelRoutes(Arc<RwLock<Arc<RouteTable>>>);

pub type RouteTable = BTreeMap<String, Vec<VersionShare>>;

/// A version's share of the requests for a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionShare {
    pub of: VersionPattern,
    pub weight: u32,
}

/// Selects versions by their replicas' model name, and where that does not suffice, by digest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionPattern {
    pub model: String,
    /// The beginning of the digest, as `/cluster` shows it. Empty: any digest.
    pub digest: String,
}

impl VersionPattern {
    pub fn named(model: &str) -> VersionPattern {
        VersionPattern { model: model.into(), digest: String::new() }
    }

    /// Returns, among several matching versions, the ready one that most replicas have, and of equals the first: so one
    /// version answers under a name, and one replica with a damaged file never does.
    pub fn pick_version<'a>(&self, versions: &'a [ServedVersion]) -> Option<&'a ServedVersion> {
        let meant = || versions.iter().filter(|version| self.matches(version));
        most_common(meant()).or_else(|| meant().next())
    }

    pub fn matches(&self, version: &ServedVersion) -> bool {
        let is_of_it = || version.digest().to_string().starts_with(&self.digest);
        version.model() == self.model && (self.digest.is_empty() || is_of_it())
    }

    /// Returns a served version that this one may mean, if no replica serves this one: the operator may have misspelt
    /// it.
    pub fn similar_version(&self, versions: &[ServedVersion]) -> Option<String> {
        let of_its_name = versions.iter().find(|version| version.model() == self.model);
        let other_digest = of_its_name.map(|version| format!("{}@{}", version.model(), version.digest()));
        other_digest.or_else(|| nearest(&self.model, versions.iter().map(ServedVersion::model)).map(str::to_owned))
    }
}

impl Display for VersionPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.digest.as_str() {
            "" => f.write_str(&self.model),
            digest => write!(f, "{}@{digest}", self.model),
        }
    }
}

impl ModelRoutes {
    /// A line is `NAME = VERSION:WEIGHT, VERSION:WEIGHT`; empty lines and those that begin with `#` do not count. A
    /// version is the model name of its replicas, with `@` and the beginning of a policy digest if several versions
    /// have that name. The default weight is 1.
    pub fn parse(text: &str) -> Result<ModelRoutes, BadLine> {
        Ok(ModelRoutes(Arc::new(RwLock::new(Arc::new(parse(text)?)))))
    }

    /// Replaces the routes by the file's present content. A file that does not parse changes nothing.
    pub fn replace(&self, text: &str) -> Result<(), BadLine> {
        let table = parse(text)?;
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
        Ok(())
    }

    pub fn table(&self) -> Arc<RouteTable> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn parse(text: &str) -> Result<RouteTable, BadLine> {
    let mut table = RouteTable::new();
    for (number, line) in lines::counted(text) {
        let bad = |problem| BadLine { line: number, problem };
        let (name, shares) = route_of(line).map_err(bad)?;
        if table.len() == ROUTES_MAX {
            return Err(bad(format!("there are more than {ROUTES_MAX} names")));
        }
        if table.insert(name.to_owned(), shares).is_some() {
            return Err(bad(format!("an earlier line already has `{name}`")));
        }
    }
    Ok(table)
}

fn route_of(line: &str) -> Result<(&str, Vec<VersionShare>), String> {
    let (name, shares) = line.split_once('=').ok_or("a line is `NAME = VERSION:WEIGHT, VERSION:WEIGHT`")?;
    let name = name.trim();
    if name.is_empty() {
        return Err("there is no name before `=`".into());
    }
    let shares: Vec<VersionShare> = shares.split(',').map(share_of).collect::<Result<_, _>>()?;
    if shares.len() > SHARES_MAX {
        return Err(format!("`{name}` has more than {SHARES_MAX} versions"));
    }
    let twice = shares.iter().enumerate().find(|(i, share)| shares[..*i].iter().any(|before| before.of == share.of));
    if let Some((_, VersionShare { of, .. })) = twice {
        return Err(format!("`{name}` has `{}` twice", of.model));
    }
    if shares.iter().all(|share| share.weight == 0) {
        return Err(format!("all versions of `{name}` have weight 0"));
    }
    Ok((name, shares))
}

fn share_of(word: &str) -> Result<VersionShare, String> {
    let word = word.trim();
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    // A model's own name may have a colon, as `smollm2:Q4_K_M` has; what looks like a number is taken as a weight.
    let is_like_one = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.".contains(&byte));
    if let Some((version, weight)) = word.rsplit_once(':').filter(|(_, end)| is_like_one(end) && !is_number(end)) {
        return Err(format!("the weight of `{version}` must be a whole number, got `{weight}`"));
    }
    let (version, weight) = match word.rsplit_once(':').filter(|(_, weight)| is_number(weight)) {
        Some((version, weight)) => (version, weight.parse().unwrap_or(u32::MAX)),
        None => (word, 1),
    };
    if weight > WEIGHT_MAX {
        return Err(format!("the weight of `{version}` is more than {WEIGHT_MAX}"));
    }
    let (model, digest) = version.rsplit_once('@').unwrap_or((version, ""));
    if model.is_empty() {
        return Err("a version has no name".into());
    }
    if version.contains('@') && (digest.is_empty() || !digest.bytes().all(|byte| byte.is_ascii_hexdigit())) {
        return Err(format!("`{digest}` is not the start of a policy digest (see `lockstep status`)"));
    }
    let of = VersionPattern { model: model.into(), digest: digest.to_ascii_lowercase() };
    Ok(VersionShare { of, weight })
}

/// Returns the version that answers. The key falls on a scale that the weights divide, in their order: so a version
/// with a growing weight keeps its keys. While no replica of a version is ready, its share goes to the others by their
/// weights. If no version is ready at all, requests wait for the one of their key.
pub fn route<'a>(shares: &[VersionShare], versions: &'a [ServedVersion], key: u64) -> Option<&'a ServedVersion> {
    let meant = || shares.iter().map(|share| (share.weight, share.of.pick_version(versions)));
    let drawn = at(meant().map(|(weight, _)| weight), key.wrapping_mul(GOLDEN));
    let drawn = drawn.and_then(|idx| meant().nth(idx)?.1);
    if drawn.is_some_and(ServedVersion::is_ready) {
        return drawn;
    }
    let weight_if_ready = |(weight, version): (u32, Option<&ServedVersion>)| {
        let is_ready = version.is_some_and(ServedVersion::is_ready);
        if is_ready { weight } else { 0 }
    };
    // The number differs from the one before: all keys that come here fell on the same part of the scale.
    let other = at(meant().map(weight_if_ready), scatter(key)).and_then(|idx| meant().nth(idx)?.1);
    other.or(drawn).or_else(|| meant().filter(|(weight, _)| *weight > 0).find_map(|(_, version)| version))
}

/// Returns the version with the most requests: for questions about a name without a request.
pub fn heaviest<'a>(shares: &[VersionShare], versions: &'a [ServedVersion]) -> Option<&'a ServedVersion> {
    let mut meant: Vec<_> =
        shares.iter().filter_map(|share| Some((share.weight, share.of.pick_version(versions)?))).collect();
    meant.sort_by_key(|(weight, version)| (!version.is_ready(), std::cmp::Reverse(*weight)));
    meant.first().map(|(_, version)| *version)
}

/// Returns the index of the part of the scale on which a number falls.
fn at(weights: impl Iterator<Item = u32> + Clone, number: u64) -> Option<usize> {
    let total: u128 = weights.clone().map(u128::from).sum();
    let mut left = (u128::from(number) * total) >> 64;
    for (idx, weight) in weights.map(u128::from).enumerate() {
        if left < weight {
            return Some(idx);
        }
        left -= weight;
    }
    None
}
