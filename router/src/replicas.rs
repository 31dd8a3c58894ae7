//! The replicas behind this router: a link to each, one table of what is known of them, and the choice of one for each
//! request. Knows no text and no tokens' values.

use crate::board::{self, Facts, Salt, Scratch};
use crate::budget::Budget;
use crate::config::{Config, Waits};
use crate::link::{Link, Replica, Submit, View};
use crate::models::{Version, version_of};
use crate::peers::Peers;
use crate::pick::{Need, Policy, Row, Standing, VersionId, Wish, equal};
use crate::refusal::Refusal;
use crate::resume::{Handle, NoResume};
use crate::roster::{Membership, Roster};
use crate::ticket::Ticket;
use crate::topology::{self, StoreView};
use cluster::Health;
use proto::cluster::state::Phase;
use proto::v1;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use types::{PolicyDigest, TenantId, Token};

/// Of all replicas, in the order in which they came.
pub struct Replicas {
    peers: Peers,
    views: watch::Receiver<Vec<View>>,
    /// Where they are known from: which kind of store, and whether it is there. None where they were given.
    store: Option<(&'static str, watch::Receiver<Health>)>,
    /// It has been said that one of them gets nothing.
    told_strangers: AtomicBool,
    retry_after: Duration,
    policy: Policy,
    n_picked: AtomicU64,
    scratch: Mutex<Scratch>,
}

/// What matters of a request for who gets it.
pub struct Asking<'a> {
    pub n_prompt: usize,
    /// By which caches are looked up.
    pub prompt: &'a [Token],
    pub tenant: TenantId,
    pub session: Option<u64>,
    pub reads_cache: bool,
    /// Whose replicas may have it; None: all that serve.
    pub version: Option<VersionId>,
}

/// Who serves a request, with all of its prompts and choices: they share what is cached.
pub struct Picked {
    link: Link,
    pub replica: Arc<Replica>,
    /// Of the prompt, what its cache is said to have.
    pub n_cached: u32,
}

impl Picked {
    pub fn wait(&self, n_tokens: u64) -> Option<Duration> {
        self.link.wait(n_tokens)
    }

    pub fn keys(&self, n: u64) -> u64 {
        self.link.keys(n)
    }

    pub fn submit(&self, submit: Submit) -> Result<Ticket, Refusal> {
        self.link.submit(submit)
    }
}

/// The links, and what begins and ends them, which is to be run.
pub fn attach(membership: Membership, config: &Config, end: CancellationToken) -> (Replicas, Roster) {
    let store = match &membership {
        Membership::Given(_) => None,
        Membership::Followed { store, .. } => Some((store.kind(), store.health())),
    };
    let peers = Peers::new(Budget::new(config.limits.requests_max, Instant::now()));
    let roster = Roster::new(membership, peers.clone(), config, end);
    let Waits { retry_after, .. } = config.waits;
    let views = peers.views();
    let replicas = Replicas {
        peers,
        views,
        store,
        told_strangers: AtomicBool::new(false),
        retry_after,
        policy: config.policy,
        n_picked: AtomicU64::new(0),
        scratch: Mutex::default(),
    };
    (replicas, roster)
}

impl Replicas {
    pub fn views(&self) -> watch::Receiver<Vec<View>> {
        self.views.clone()
    }

    /// The live cluster, as people look at it: the page that begins at a place.
    pub fn topology(&self, from: u64, models: Vec<v1::ModelTopology>) -> v1::Topology {
        let store = self.store.as_ref().map(|(kind, health)| StoreView { kind, health: health.borrow().clone() });
        topology::topology(&self.views.borrow(), from, store, models)
    }

    /// False: whoever is picked would refuse.
    pub fn has_room(&self) -> bool {
        self.peers.has_room()
    }

    pub fn is_any_ready(&self) -> bool {
        self.views.borrow().iter().any(View::is_ready)
    }

    pub fn versions(&self) -> Arc<[Version]> {
        self.peers.versions()
    }

    /// Whoever is away could be anybody.
    pub fn is_any_away(&self) -> bool {
        self.views.borrow().iter().any(|view| view.replica.is_none())
    }

    /// One that has said what it serves.
    pub fn any(&self) -> Option<Arc<Replica>> {
        let views = self.views.borrow();
        let ready = views.iter().find(|view| view.is_ready());
        ready.or_else(|| views.iter().find(|view| view.replica.is_some()))?.replica.clone()
    }

    /// For a request that has been read, and as late as can be.
    pub fn pick(&self, asking: &Asking<'_>) -> Result<Picked, Refusal> {
        let n_prompt = u32::try_from(asking.n_prompt).unwrap_or(u32::MAX);
        let n_before = self.n_picked.fetch_add(1, Relaxed);
        let wish = Wish { n_prompt, session: asking.session, n_before, version: asking.version };
        let named = |digest: &PolicyDigest, salt: &Salt| board::names(asking.prompt, asking.tenant, digest, salt);
        let names = asking.reads_cache.then_some(named);
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let chosen = self.peers.choose(self.policy, &wish, names, &mut scratch);
        drop(scratch);
        let picked = chosen.and_then(|(chosen, link)| {
            self.tell_stranger(chosen.stranger);
            let replica = self.view(chosen.place, |view| view.replica.clone())??;
            Some(Picked { link, replica, n_cached: chosen.n_cached })
        });
        picked.ok_or_else(|| self.refusal())
    }

    fn tell_stranger(&self, place: Option<usize>) {
        let Some(place) = place.filter(|_| !self.told_strangers.swap(true, Relaxed)) else { return };
        let replica = self.view(place, |view| view.name.clone()).unwrap_or_default();
        tracing::warn!(replica, "gets no requests: its policy differs, and it would answer otherwise than the rest");
    }

    fn view<T>(&self, place: usize, of: impl FnOnce(&View) -> T) -> Option<T> {
        let views = self.views.borrow();
        let at = views.binary_search_by_key(&place, |view| view.place).ok()?;
        Some(of(&views[at]))
    }

    /// For a stream that is gone on with: who had it, or else who says the same.
    pub fn pick_again(&self, need: Need, before: &Handle) -> Result<Picked, Refusal> {
        let (places, rows) = self.peers.rows();
        let had_it = |(place, row): (&usize, &Row)| {
            let is_it = |view: &View| view.replica.as_ref().is_some_and(|of| before.is_of(&of.name, of.incarnation));
            row.standing <= Standing::Shunned && row.meets(need) && self.view(*place, is_it) == Some(true)
        };
        let idx = places.iter().zip(&rows).position(had_it);
        let idx = idx.or_else(|| equal(&rows, need, Standing::Recovering));
        let picked = idx.and_then(|idx| {
            let (link, replica) =
                (self.peers.link(places[idx])?, self.view(places[idx], |view| view.replica.clone())??);
            Some(Picked { link, replica, n_cached: 0 })
        });
        picked.ok_or_else(|| match rows.iter().any(|row| row.may_come_for(need)) {
            true => Refusal::NotReady { retry_after: self.retry_after },
            false => NoResume::OtherPolicy.into(),
        })
    }

    /// Why nobody takes requests.
    pub fn refusal(&self) -> Refusal {
        let retry_after = self.retry_after;
        let views = self.views.borrow();
        let drains = views.iter().any(|view| view.phase() == Phase::Draining);
        let all_drain = drains && views.iter().all(|view| matches!(view.phase(), Phase::Draining | Phase::Unspecified));
        if all_drain { Refusal::Draining { retry_after } } else { Refusal::NotReady { retry_after } }
    }
}

/// What a choice has to know of a replica, as far as its view says it.
pub fn facts(view: &View) -> Facts {
    let standing = match (&view.replica, view.phase()) {
        (None, _) => Standing::Absent,
        (Some(_), Phase::Ready) if view.is_suspected => Standing::Recovering,
        (Some(_), Phase::Ready) => Standing::Ready,
        (Some(_), Phase::Draining) => Standing::Draining,
        (Some(_), Phase::Recovering | Phase::Loading | Phase::Unspecified) => Standing::Recovering,
    };
    let of = |replica: &Arc<Replica>| (replica.digest, replica.context, replica.salt);
    let (digest, context, salt) = view.replica.as_ref().map(of).unwrap_or_default();
    let version = view.replica.as_deref().map(version_of).unwrap_or_default();
    Facts { standing, digest, version, context, salt, id: hashed(&view.name) }
}

/// The same at every router, as a session's key and a replica's name have to be.
pub fn hashed(word: &str) -> u64 {
    // FNV-1a: short words, and nothing that an attacker could gain but an uneven share of the work of his own.
    word.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
