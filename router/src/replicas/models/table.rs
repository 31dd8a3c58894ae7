//! Which model a request means, and which version of it answers. Knows names, weights and replicas' reports; no tokens
//! and no streams.
//!
//! A router that was given one model serves it, whatever name its replicas have for it. A router with several models,
//! or with routes, goes by names: a replica with a model that has no name here gets no requests, because the router
//! could not read its tokens.

use crate::board::pick::VersionId;
use crate::link::versions::ServedVersion;
use crate::link::view::ReplicaInfo;
use crate::refusal::{Refusal, ResumeError};
use crate::replicas::models::routes::{ModelRoutes, RouteTable, VersionPattern, VersionShare, heaviest, route};
use crate::replicas::models::text::ModelText;
use crate::replicas::pool::Replicas;
use proto::v1;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use types::PolicyDigest;

/// How many characters of an unknown name an error repeats.
const NAME_CHARS_MAX: usize = 100;
const ANY_NAME: &str = "*";
/// How many known names an error lists.
const NAMES_LISTED_MAX: usize = 20;

/// The tokenizer and template of each model that a router serves.
pub struct ModelTexts {
    main: Arc<ModelText>,
    others: BTreeMap<String, Arc<ModelText>>,
}

impl From<ModelText> for ModelTexts {
    fn from(main: ModelText) -> ModelTexts {
        ModelTexts { main: Arc::new(main), others: BTreeMap::new() }
    }
}

impl ModelTexts {
    /// Adds the text of replicas that serve `name`.
    #[must_use]
    pub fn and(mut self, name: String, text: ModelText) -> ModelTexts {
        self.others.insert(name, Arc::new(text));
        self
    }
}

pub struct ModelTable {
    texts: ModelTexts,
    /// The names of the main model; the first is the one that replies carry.
    names: Vec<String>,
    /// Whether it goes by any other name too.
    has_any_name: bool,
    routes: ModelRoutes,
    /// Versions that this router cannot read, and that were logged already.
    strangers: Mutex<BTreeSet<VersionId>>,
}

/// How one of several versions is chosen.
#[derive(Clone, Copy, Debug)]
pub enum VersionSelector {
    /// By a request's key: the same key gets the same version.
    Key(u64),
    /// By the digest of a resumed stream: no other version would give the same tokens.
    Digest(PolicyDigest),
    /// The version with the most weight: for questions without a request.
    Weight,
}

/// The model that a request means.
#[derive(Clone)]
pub struct ResolvedModel {
    /// The name that replies carry.
    pub name: String,
    pub text: Arc<ModelText>,
    /// A replica that serves it.
    pub replica: Arc<ReplicaInfo>,
    /// The version that may answer. None: any, because there is one model.
    pub version: Option<VersionId>,
    pub is_ready: bool,
}

/// A name's versions, as `/cluster` shows them.
pub struct ModelOffer {
    pub name: String,
    pub shares: Vec<OfferedShare>,
}

pub struct OfferedShare {
    pub weight: u32,
    pub model: String,
    /// None if no replica serves it.
    pub version: Option<ServedVersion>,
    /// A served version that a route may have meant with one that no replica serves.
    pub like: Option<String>,
}

impl ModelTable {
    /// Among the names, `*` is any.
    pub fn new(texts: ModelTexts, mut names: Vec<String>, routes: ModelRoutes) -> ModelTable {
        let has_any_name = names.iter().any(|name| name == ANY_NAME);
        names.retain(|name| name != ANY_NAME);
        ModelTable { texts, names, has_any_name, routes, strangers: Mutex::default() }
    }

    fn is_main(&self, name: &str) -> bool {
        self.has_any_name || self.names.iter().any(|known| known == name)
    }

    fn has_one_model(&self, table: &RouteTable) -> bool {
        self.texts.others.is_empty() && table.is_empty()
    }

    /// Finds the model for a request, with its text.
    pub fn model(&self, requested: &str, by: VersionSelector, replicas: &Replicas) -> Result<ResolvedModel, Refusal> {
        let table = self.routes.table();
        if self.has_one_model(&table) {
            return self.only_model(requested, replicas);
        }
        let versions = replicas.versions();
        self.warn_strangers(&table, &versions);
        let (name, shares) = self.shares(&table, requested).ok_or_else(|| self.unknown_model(&table, requested))?;
        let version = match by {
            VersionSelector::Key(key) => route(&shares, &versions, key),
            VersionSelector::Weight => heaviest(&shares, &versions),
            VersionSelector::Digest(digest) => {
                let version = self.version_of_digest(&table, &shares, &versions, digest);
                if version.is_none() && !replicas.is_any_away() {
                    return Err(ResumeError::OtherPolicy.into());
                }
                version
            }
        };
        let readable = version.and_then(|version| Some((version, self.text_of(&table, version.model())?)));
        let (version, text) = readable.ok_or_else(|| replicas.refusal())?;
        let (replica, is_ready) = (version.replica.clone(), version.is_ready());
        Ok(ResolvedModel { name: name.to_owned(), text: text.clone(), replica, version: Some(version.id), is_ready })
    }

    /// A version that gives the same tokens, whatever its weight is by now: the route may have changed while the stream
    /// ran.
    fn version_of_digest<'a>(
        &self,
        table: &RouteTable,
        shares: &[VersionShare],
        versions: &'a [ServedVersion],
        digest: PolicyDigest,
    ) -> Option<&'a ServedVersion> {
        let able =
            |version: &&ServedVersion| version.digest() == digest && self.text_of(table, version.model()).is_some();
        let is_routed = |version: &&ServedVersion| shares.iter().any(|share| share.of.matches(version));
        let routed = versions.iter().filter(able).find(is_routed);
        routed.or_else(|| versions.iter().find(able))
    }

    /// The model if there is only one, whatever name its replicas have for it.
    fn only_model(&self, requested: &str, replicas: &Replicas) -> Result<ResolvedModel, Refusal> {
        let replica = replicas.any().ok_or_else(|| replicas.refusal())?;
        let name = self.names.first().unwrap_or(&replica.model).clone();
        if !requested.is_empty() && requested != replica.model && !self.is_main(requested) {
            return Err(no_model(requested, vec![name]));
        }
        let is_ready = replicas.is_any_ready();
        Ok(ResolvedModel { name, text: self.texts.main.clone(), replica, version: None, is_ready })
    }

    /// The tokenizer and template alone, for requests that need no replica.
    pub fn text(&self, requested: &str, replicas: &Replicas) -> Result<Arc<ModelText>, Refusal> {
        let table = self.routes.table();
        match self.model(requested, VersionSelector::Weight, replicas) {
            Ok(model) => Ok(model.text),
            Err(refusal @ Refusal::NoModel { .. }) => Err(refusal),
            Err(refusal) if self.has_one_model(&table) => {
                if requested.is_empty() || self.is_main(requested) {
                    Ok(self.texts.main.clone())
                } else {
                    Err(refusal)
                }
            }
            Err(refusal) => {
                let shares = self.shares(&table, requested).map(|(_, shares)| shares).unwrap_or_default();
                let most = shares.iter().rev().max_by_key(|share| share.weight);
                most.and_then(|share| self.text_of(&table, &share.of.model)).cloned().ok_or(refusal)
            }
        }
    }

    /// The name that replies carry, and the versions behind it.
    fn shares<'a>(&'a self, table: &'a RouteTable, requested: &'a str) -> Option<(&'a str, Cow<'a, [VersionShare]>)> {
        let requested = if requested.is_empty() { self.names.first()? } else { requested };
        if let Some(shares) = table.get(requested) {
            return Some((requested, Cow::Borrowed(shares)));
        }
        let alone = |model: &str| VersionShare { of: VersionPattern::named(model), weight: 1 };
        if self.texts.others.contains_key(requested) {
            return Some((requested, Cow::Owned(vec![alone(requested)])));
        }
        // The main model has several names: replicas may report any of them.
        let served = self.names.first().filter(|_| self.is_main(requested))?;
        Some((served, Cow::Owned(self.names.iter().map(|name| alone(name)).collect())))
    }

    /// A model's tokenizer and template. None if this router was not given them.
    fn text_of(&self, table: &RouteTable, model: &str) -> Option<&Arc<ModelText>> {
        let is_routed = || table.values().flatten().any(|share| share.of.model == model);
        let is_main = || self.names.iter().any(|name| name == model) || is_routed();
        self.texts.others.get(model).or_else(|| is_main().then_some(&self.texts.main))
    }

    fn unknown_model(&self, table: &RouteTable, requested: &str) -> Refusal {
        no_model(requested, self.all(table))
    }

    /// All names that a client may use, those of routes first.
    fn all(&self, table: &RouteTable) -> Vec<String> {
        let mut names: Vec<String> = table.keys().cloned().collect();
        for name in self.names.iter().chain(self.texts.others.keys()) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }

    fn warn_strangers(&self, table: &RouteTable, versions: &[ServedVersion]) {
        for version in versions.iter().filter(|version| self.text_of(table, version.model()).is_none()) {
            let mut warned = self.strangers.lock().unwrap_or_else(PoisonError::into_inner);
            if warned.insert(version.id) {
                let (model, digest) = (version.model(), version.digest());
                tracing::warn!(model, %digest, "gets no requests: neither --text nor a route names this model");
            }
        }
    }

    /// All names, and the versions behind each.
    pub fn offers(&self, replicas: &Replicas) -> Vec<ModelOffer> {
        let table = self.routes.table();
        if self.has_one_model(&table) {
            return self.one_offer(replicas).into_iter().collect();
        }
        let versions = replicas.versions();
        let offer = |name: String| {
            let shares = self.shares(&table, &name).map(|(_, shares)| shares.into_owned()).unwrap_or_default();
            let is_routed = table.contains_key(&name);
            let offered = |share: VersionShare| {
                let version = share.of.pick_version(&versions).cloned();
                let like = if is_routed && version.is_none() { share.of.similar_version(&versions) } else { None };
                OfferedShare { weight: share.weight, version, like, model: share.of.model }
            };
            let shares: Vec<OfferedShare> = shares.into_iter().map(offered).collect();
            ModelOffer { name, shares }
        };
        self.all(&table).into_iter().map(offer).collect()
    }

    /// The digest of the first ready replica is in force: replicas with another one get no requests.
    fn one_offer(&self, replicas: &Replicas) -> Option<ModelOffer> {
        let replica = replicas.any()?;
        let weight = |version: &ServedVersion| u32::from(version.digest() == replica.digest);
        let offered = |version: &ServedVersion| OfferedShare {
            weight: weight(version),
            model: version.model().to_owned(),
            version: Some(version.clone()),
            like: None,
        };
        let shares = replicas.versions().iter().map(offered).collect();
        Some(ModelOffer { name: self.names.first().unwrap_or(&replica.model).clone(), shares })
    }

    /// The listed names, with the model of each. Names that no replica serves are left out.
    pub fn listed(&self, replicas: &Replicas) -> Vec<(String, ResolvedModel)> {
        let names = match self.has_one_model(&self.routes.table()) {
            true if self.names.is_empty() => replicas.any().iter().map(|replica| replica.model.clone()).collect(),
            true => self.names.clone(),
            false => self.all(&self.routes.table()),
        };
        let listed = |name: String| {
            let model = self.model(&name, VersionSelector::Weight, replicas).ok()?;
            Some((name, model))
        };
        names.into_iter().filter_map(listed).collect()
    }
}

fn no_model(requested: &str, served: Vec<String>) -> Refusal {
    let model = requested.chars().take(NAME_CHARS_MAX).collect();
    Refusal::NoModel { model, served: served.into_iter().take(NAMES_LISTED_MAX).collect() }
}

/// The offers as `lockstep.v1` messages.
pub fn offers(offers: Vec<ModelOffer>) -> Vec<v1::ModelTopology> {
    let share = |offered: OfferedShare| v1::model_topology::Share {
        model: offered.model,
        policy_digest: offered.version.as_ref().map(|version| version.digest().0.to_vec()).unwrap_or_default(),
        weight: offered.weight,
        n_ready: offered.version.as_ref().map_or(0, |version| version.n_ready as u32),
        n_replicas: offered.version.as_ref().map_or(0, |version| version.n_replicas as u32),
        like: offered.like.unwrap_or_default(),
    };
    let model =
        |ModelOffer { name, shares }| v1::ModelTopology { name, shares: shares.into_iter().map(share).collect() };
    offers.into_iter().map(model).collect()
}
