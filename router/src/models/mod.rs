//! Which model a request means, and which version of it answers. Knows names, weights and what replicas say of
//! themselves; no tokens and no streams.
//!
//! A router that was told of one model serves that, whatever its replicas call it. One that was told of more, or of
//! routes, goes by names, and who serves a name that nobody told it of gets nothing: it could not read its tokens.

mod read;
mod routes;
#[cfg(test)]
mod tests;
mod versions;

pub use routes::Routes;
pub use versions::{Version, version_of, versions};

use crate::Text;
use crate::link::Replica;
use crate::pick::VersionId;
use crate::refusal::Refusal;
use crate::replicas::Replicas;
use crate::resume::NoResume;
use proto::v1;
use routes::{Pattern, Share, Table, heaviest, route};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use types::PolicyDigest;

/// Of a model's name that is not known, as an error repeats it.
const NAME_CHARS_MAX: usize = 100;
/// Of names that are known, as an error lists them.
const NAMES_LISTED_MAX: usize = 20;

/// What turns text into tokens and back, of each model that a router serves.
pub struct Texts {
    main: Arc<Text>,
    others: BTreeMap<String, Arc<Text>>,
}

impl From<Text> for Texts {
    fn from(main: Text) -> Texts {
        Texts { main: Arc::new(main), others: BTreeMap::new() }
    }
}

impl Texts {
    /// What replicas that serve `name` are read and written with.
    #[must_use]
    pub fn and(mut self, name: String, text: Text) -> Texts {
        self.others.insert(name, Arc::new(text));
        self
    }
}

pub struct Models {
    texts: Texts,
    /// Of the first model; the first is the one that replies carry.
    names: Vec<String>,
    routes: Routes,
    /// Versions of which it was said that nobody here can read them.
    strangers: Mutex<BTreeSet<VersionId>>,
}

/// By what one of several versions is chosen.
#[derive(Clone, Copy, Debug)]
pub enum By {
    /// Of a request: the same one is the same version's.
    Key(u64),
    /// Of a stream that is gone on with: nobody else would say the same.
    Digest(PolicyDigest),
    /// Nothing is to be answered by it: the one with the most weight.
    Weight,
}

/// A model as a request means it.
#[derive(Clone)]
pub struct Model {
    /// As replies carry it.
    pub name: String,
    pub text: Arc<Text>,
    /// One that serves it.
    pub replica: Arc<Replica>,
    /// Who may answer. None: whoever is there, because there is one model.
    pub version: Option<VersionId>,
    pub is_ready: bool,
}

/// A name's versions, as people look at them.
pub struct Offer {
    pub name: String,
    pub shares: Vec<Offered>,
}

pub struct Offered {
    pub weight: u32,
    pub model: String,
    /// None where nobody serves it.
    pub version: Option<Version>,
}

impl Models {
    pub fn new(texts: Texts, names: Vec<String>, routes: Routes) -> Models {
        Models { texts, names, routes, strangers: Mutex::default() }
    }

    fn is_one(&self, table: &Table) -> bool {
        self.texts.others.is_empty() && table.is_empty()
    }

    /// What a request is read, answered and written by.
    pub fn model(&self, asked: &str, by: By, replicas: &Replicas) -> Result<Model, Refusal> {
        let table = self.routes.table();
        if self.is_one(&table) {
            return self.one(asked, replicas);
        }
        let versions = replicas.versions();
        self.tell_strangers(&table, &versions);
        let (name, shares) = self.shares(&table, asked).ok_or_else(|| self.unknown(&table, asked))?;
        let version = match by {
            By::Key(key) => route(&shares, &versions, key),
            By::Weight => heaviest(&shares, &versions),
            By::Digest(digest) => {
                let version = self.under(&table, &shares, &versions, digest);
                if version.is_none() && !replicas.is_any_away() {
                    return Err(NoResume::OtherPolicy.into());
                }
                version
            }
        };
        let readable = version.and_then(|version| Some((version, self.text_of(&table, version.model())?)));
        let (version, text) = readable.ok_or_else(|| replicas.refusal())?;
        let (replica, is_ready) = (version.replica.clone(), version.is_ready());
        Ok(Model { name: name.to_owned(), text: text.clone(), replica, version: Some(version.id), is_ready })
    }

    /// Whoever says the same, whatever weighs how much by now: a route may have changed while the stream ran.
    fn under<'a>(
        &self,
        table: &Table,
        shares: &[Share],
        versions: &'a [Version],
        digest: PolicyDigest,
    ) -> Option<&'a Version> {
        let able = |version: &&Version| version.digest() == digest && self.text_of(table, version.model()).is_some();
        let is_routed = |version: &&Version| shares.iter().any(|share| share.of.means(version));
        let routed = versions.iter().filter(able).find(is_routed);
        routed.or_else(|| versions.iter().find(able))
    }

    /// There is one model, whatever its replicas call it.
    fn one(&self, asked: &str, replicas: &Replicas) -> Result<Model, Refusal> {
        let replica = replicas.any().ok_or_else(|| replicas.refusal())?;
        let name = self.names.first().unwrap_or(&replica.model).clone();
        if !asked.is_empty() && asked != replica.model && !self.names.iter().any(|name| name == asked) {
            return Err(refused(asked, vec![name]));
        }
        let is_ready = replicas.is_any_ready();
        Ok(Model { name, text: self.texts.main.clone(), replica, version: None, is_ready })
    }

    /// The same for what needs no replica: the text alone.
    pub fn text(&self, asked: &str, replicas: &Replicas) -> Result<Arc<Text>, Refusal> {
        let table = self.routes.table();
        match self.model(asked, By::Weight, replicas) {
            Ok(model) => Ok(model.text),
            Err(refusal @ Refusal::NoModel { .. }) => Err(refusal),
            Err(refusal) if self.is_one(&table) => {
                let is_its_name = asked.is_empty() || self.names.iter().any(|name| name == asked);
                if is_its_name { Ok(self.texts.main.clone()) } else { Err(refusal) }
            }
            Err(refusal) => {
                let shares = self.shares(&table, asked).map(|(_, shares)| shares).unwrap_or_default();
                let most = shares.iter().rev().max_by_key(|share| share.weight);
                most.and_then(|share| self.text_of(&table, &share.of.model)).cloned().ok_or(refusal)
            }
        }
    }

    /// The name that replies carry, and what stands behind it.
    fn shares<'a>(&'a self, table: &'a Table, asked: &'a str) -> Option<(&'a str, Cow<'a, [Share]>)> {
        let asked = if asked.is_empty() { self.names.first()? } else { asked };
        if let Some(shares) = table.get(asked) {
            return Some((asked, Cow::Borrowed(shares)));
        }
        let alone = |model: &str| Share { of: Pattern::named(model), weight: 1 };
        if self.texts.others.contains_key(asked) {
            return Some((asked, Cow::Owned(vec![alone(asked)])));
        }
        // One model under several names: whoever says any of them.
        let is_main = self.names.iter().any(|name| name == asked);
        let served = self.names.first().filter(|_| is_main)?;
        Some((served, Cow::Owned(self.names.iter().map(|name| alone(name)).collect())))
    }

    /// None: nobody told this router how to read it.
    fn text_of(&self, table: &Table, model: &str) -> Option<&Arc<Text>> {
        let is_routed = || table.values().flatten().any(|share| share.of.model == model);
        let is_main = || self.names.iter().any(|name| name == model) || is_routed();
        self.texts.others.get(model).or_else(|| is_main().then_some(&self.texts.main))
    }

    fn unknown(&self, table: &Table, asked: &str) -> Refusal {
        refused(asked, self.all(table))
    }

    /// Every name that a client may say: routes first.
    fn all(&self, table: &Table) -> Vec<String> {
        let mut names: Vec<String> = table.keys().cloned().collect();
        for name in self.names.iter().chain(self.texts.others.keys()) {
            if !names.contains(name) {
                names.push(name.clone());
            }
        }
        names
    }

    fn tell_strangers(&self, table: &Table, versions: &[Version]) {
        for version in versions.iter().filter(|version| self.text_of(table, version.model()).is_none()) {
            let mut told = self.strangers.lock().unwrap_or_else(PoisonError::into_inner);
            if told.insert(version.id) {
                let (model, digest) = (version.model(), version.digest());
                tracing::warn!(model, %digest, "gets no requests: neither --text nor a route names this model");
            }
        }
    }

    /// All names, and who serves them.
    pub fn offers(&self, replicas: &Replicas) -> Vec<Offer> {
        let table = self.routes.table();
        if self.is_one(&table) {
            return self.one_offer(replicas).into_iter().collect();
        }
        let versions = replicas.versions();
        let offer = |name: String| {
            let shares = self.shares(&table, &name).map(|(_, shares)| shares.into_owned()).unwrap_or_default();
            let offered = |share: Share| Offered {
                weight: share.weight,
                version: share.of.among(&versions).cloned(),
                model: share.of.model,
            };
            let shares: Vec<Offered> = shares.into_iter().map(offered).collect();
            Offer { name, shares }
        };
        self.all(&table).into_iter().map(offer).collect()
    }

    /// The digest of who is ready first is in force; who has another gets nothing.
    fn one_offer(&self, replicas: &Replicas) -> Option<Offer> {
        let replica = replicas.any()?;
        let weight = |version: &Version| u32::from(version.digest() == replica.digest);
        let offered = |version: &Version| Offered {
            weight: weight(version),
            model: version.model().to_owned(),
            version: Some(version.clone()),
        };
        let shares = replicas.versions().iter().map(offered).collect();
        Some(Offer { name: self.names.first().unwrap_or(&replica.model).clone(), shares })
    }

    /// Names that are listed, and what each means; those that nobody serves are not.
    pub fn listed(&self, replicas: &Replicas) -> Vec<(String, Model)> {
        let names = match self.is_one(&self.routes.table()) {
            true if self.names.is_empty() => replicas.any().iter().map(|replica| replica.model.clone()).collect(),
            true => self.names.clone(),
            false => self.all(&self.routes.table()),
        };
        let listed = |name: String| {
            let model = self.model(&name, By::Weight, replicas).ok()?;
            Some((name, model))
        };
        names.into_iter().filter_map(listed).collect()
    }
}

fn refused(asked: &str, served: Vec<String>) -> Refusal {
    let model = asked.chars().take(NAME_CHARS_MAX).collect();
    Refusal::NoModel { model, served: served.into_iter().take(NAMES_LISTED_MAX).collect() }
}

/// As people look at it.
pub fn offers(offers: Vec<Offer>) -> Vec<v1::ModelTopology> {
    let share = |offered: Offered| v1::model_topology::Share {
        model: offered.model,
        policy_digest: offered.version.as_ref().map(|version| version.digest().0.to_vec()).unwrap_or_default(),
        weight: offered.weight,
        n_ready: offered.version.as_ref().map_or(0, |version| version.n_ready as u32),
        n_replicas: offered.version.as_ref().map_or(0, |version| version.n_replicas as u32),
    };
    let model = |Offer { name, shares }| v1::ModelTopology { name, shares: shares.into_iter().map(share).collect() };
    offers.into_iter().map(model).collect()
}
