//! The replicas behind this router: a link to each, a table of what is known of them, and the choice of one for each
//! request. Knows no text and no tokens' values.

use crate::board::pick::{ContinuationNeed, PickInfo, PickPolicy, ReplicaRow, ReplicaStanding, pick_equivalent};
use crate::board::{self, ChoiceBuffers, Salt};
use crate::config::{Config, Timeouts};
use crate::link::budget::RetryBudget;
use crate::link::handle::ReplicaLink;
use crate::link::peers::ReplicaLinks;
use crate::link::versions::{ServedVersion, most_common};
use crate::link::view::{ReplicaInfo, ReplicaView};
use crate::refusal::{Refusal, ResumeError};
use crate::replicas::roster::{LinkSupervisor, Membership};
use crate::replicas::topology::{self, StoreView};
use cluster::StoreHealth;
use proto::cluster::state::Phase;
use proto::v1;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use types::{CacheOwner, PolicyDigest, Token};

/// All replicas, in order of arrival.
pub struct Replicas {
    peers: ReplicaLinks,
    views: watch::Receiver<Vec<ReplicaView>>,
    /// The kind of the store that lists them, and whether it is reachable. None if they were given as flags.
    store: Option<(&'static str, watch::Receiver<StoreHealth>)>,
    /// Whether it has been logged that a replica gets no requests.
    has_warned_stranger: AtomicBool,
    retry_after: Duration,
    policy: PickPolicy,
    n_picked: AtomicU64,
    scratch: Mutex<ChoiceBuffers>,
}

/// The replica for a request with all of its prompts and choices, which share what is cached.
pub struct PickedReplica {
    pub link: ReplicaLink,
    pub replica: Arc<ReplicaInfo>,
    /// How much of the prompt its cache probably has.
    pub n_cached: u32,
}

/// A replica that had nothing to do when it was picked.
pub struct IdleReplica {
    pub link: ReplicaLink,
    pub replica: Arc<ReplicaInfo>,
    place: usize,
    /// Its placement: the next one may have other ranks.
    epoch: u32,
}

impl IdleReplica {
    /// Whether it has requests beside the one that it was picked for.
    pub fn has_other_requests(&self) -> bool {
        let ledger = self.link.ledger();
        ledger.loads().n_own() > 1 || ledger.loads().n_running() > 1
    }
}

/// The replicas, and the roster that begins and ends their links, which the caller has to run.
pub fn attach(membership: Membership, config: &Config, end: CancellationToken) -> (Replicas, LinkSupervisor) {
    let store = match &membership {
        Membership::Given(_) => None,
        Membership::Followed { store, .. } => Some((store.kind(), store.health())),
    };
    let peers = ReplicaLinks::new(RetryBudget::new(config.limits.requests_max, Instant::now()));
    let roster = LinkSupervisor::new(membership, peers.clone(), config, end);
    let Timeouts { retry_after, .. } = config.timeouts;
    let views = peers.views();
    let replicas = Replicas {
        peers,
        views,
        store,
        has_warned_stranger: AtomicBool::new(false),
        retry_after,
        policy: config.policy,
        n_picked: AtomicU64::new(0),
        scratch: Mutex::default(),
    };
    (replicas, roster)
}

impl Replicas {
    pub fn views(&self) -> watch::Receiver<Vec<ReplicaView>> {
        self.views.clone()
    }

    /// Returns the live cluster for people: the page that begins at the place `from`.
    pub fn topology(&self, from: u64, models: Vec<v1::ModelTopology>) -> v1::Topology {
        let store = self.store.as_ref().map(|(kind, health)| StoreView { kind, health: health.borrow().clone() });
        topology::topology(&self.views.borrow(), from, store, models)
    }

    /// Returns whether the link of at least one replica has room for another request. Also true without any link.
    pub fn has_room(&self) -> bool {
        self.peers.has_room()
    }

    pub fn is_any_ready(&self) -> bool {
        self.views.borrow().iter().any(ReplicaView::is_ready)
    }

    /// Waits until each replica has reported whether it serves.
    pub async fn wait_until_known(&self) {
        let mut views = self.views();
        // An error: the links have ended, and no report comes any more.
        let _known = views.wait_for(|views| !views.is_empty() && views.iter().all(ReplicaView::is_known)).await;
    }

    pub fn versions(&self) -> Arc<[ServedVersion]> {
        self.peers.versions()
    }

    /// Whether any replica is away: it could serve any version.
    pub fn is_any_away(&self) -> bool {
        self.views.borrow().iter().any(|view| view.replica.is_none())
    }

    /// Returns a replica that has reported what it serves: one of the ready version that most replicas have, if any is
    /// ready.
    pub fn any(&self) -> Option<Arc<ReplicaInfo>> {
        let versions = self.versions();
        most_common(versions.iter()).or(versions.first()).map(|version| version.replica.clone())
    }

    /// Picks a replica for a request that has been read, as late as possible. `cached` is the prompt to look up in
    /// caches, if any.
    pub fn pick(&self, info: PickInfo, cached: Option<&[Token]>, owner: CacheOwner) -> Result<PickedReplica, Refusal> {
        let info = PickInfo { n_before: self.n_picked.fetch_add(1, Relaxed), ..info };
        let names =
            cached.map(|prompt| move |digest: &PolicyDigest, salt: &Salt| board::names(prompt, owner, digest, salt));
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let chosen = self.peers.choose(self.policy, &info, names, &mut scratch);
        drop(scratch);
        let picked = chosen.and_then(|(chosen, link)| {
            self.warn_stranger(chosen.stranger);
            let replica = self.view(chosen.place, |view| view.replica.clone())??;
            Some(PickedReplica { link, replica, n_cached: chosen.n_cached })
        });
        picked.ok_or_else(|| self.refusal())
    }

    fn warn_stranger(&self, place: Option<usize>) {
        let Some(place) = place.filter(|_| !self.has_warned_stranger.swap(true, Relaxed)) else { return };
        let replica = self.view(place, |view| view.name.clone()).unwrap_or_default();
        tracing::warn!(replica, "gets no requests: its policy differs, so its answers could differ from the others'");
    }

    fn view<T>(&self, place: usize, of: impl FnOnce(&ReplicaView) -> T) -> Option<T> {
        let views = self.views.borrow();
        let at = views.binary_search_by_key(&place, |view| view.place).ok()?;
        Some(of(&views[at]))
    }

    /// Picks a replica for a resumed stream: the one that has it, or else one that gives the same tokens.
    pub fn pick_resumed(
        &self,
        need: ContinuationNeed,
        has_it: impl Fn(&ReplicaInfo) -> bool,
    ) -> Result<PickedReplica, Refusal> {
        let (places, rows) = self.peers.rows();
        let had_it = |(place, row): (&usize, &ReplicaRow)| {
            let is_it = |view: &ReplicaView| view.replica.as_deref().is_some_and(&has_it);
            row.standing <= ReplicaStanding::Shunned && row.meets(need) && self.view(*place, is_it) == Some(true)
        };
        let idx = places.iter().zip(&rows).position(had_it);
        let idx = idx.or_else(|| pick_equivalent(&rows, need, ReplicaStanding::Unplaced));
        let picked = idx.and_then(|idx| {
            let (link, replica) =
                (self.peers.link(places[idx])?, self.view(places[idx], |view| view.replica.clone())??);
            Some(PickedReplica { link, replica, n_cached: 0 })
        });
        picked.ok_or_else(|| match rows.iter().any(|row| row.may_come_for(need)) {
            true => Refusal::NotReady { retry_after: self.retry_after, why: String::new() },
            false => ResumeError::OtherPolicy.into(),
        })
    }

    /// Returns a ready replica that has no requests and meets the need. One with a name in `besides` is returned only
    /// if there is no other, busy or not.
    pub fn idle(&self, need: ContinuationNeed, besides: &[&str]) -> Option<IdleReplica> {
        let (places, rows) = self.peers.rows();
        let views = self.views.borrow();
        let able =
            places.into_iter().zip(rows).filter(|(_, row)| row.standing == ReplicaStanding::Ready && row.meets(need));
        let seen = |(place, row): (usize, ReplicaRow)| {
            let at = views.binary_search_by_key(&place, |view| view.place).ok()?;
            Some((row, &views[at], views[at].replica.as_ref()?))
        };
        let able: Vec<_> = able.filter_map(seen).collect();
        let is_other = |name: &str| !besides.contains(&name);
        let wants_other = able.iter().any(|(_, _, replica)| is_other(&replica.name));
        able.into_iter().filter(|(_, _, replica)| !wants_other || is_other(&replica.name)).find_map(
            |(row, view, replica)| {
                let link = self.peers.link(view.place)?;
                let is_idle = row.work == 0 && row.n_running == 0 && link.ledger().loads().n_own() == 0;
                is_idle.then(|| IdleReplica { link, replica: replica.clone(), place: view.place, epoch: epoch(view) })
            },
        )
    }

    /// Whether it serves under the same placement as when it was picked.
    pub fn is_unchanged(&self, idle: &IdleReplica) -> bool {
        let is_same = |view: &ReplicaView| {
            let replica = view.replica.as_deref();
            let is_it = replica
                .is_some_and(|now| (&now.name, now.incarnation) == (&idle.replica.name, idle.replica.incarnation));
            is_it && view.is_ready() && epoch(view) == idle.epoch
        };
        self.view(idle.place, is_same).unwrap_or(false)
    }

    /// Returns the hosts and devices of the ranks of the replica with this name, each once.
    pub fn ranks_of(&self, name: &str) -> String {
        let views = self.views.borrow();
        let named = views.iter().filter(|view| view.replica.as_ref().is_some_and(|replica| replica.name == name));
        let ranks = named.filter_map(|view| view.state.as_ref()).flat_map(|state| &state.ranks);
        let mut places: Vec<String> = ranks.map(|rank| format!("{} on {}", rank.device, rank.host)).collect();
        places.sort();
        places.dedup();
        places.join(", ")
    }

    /// Returns why no replica takes requests.
    pub fn refusal(&self) -> Refusal {
        let retry_after = self.retry_after;
        let views = self.views.borrow();
        let drains = views.iter().any(|view| view.phase() == Phase::Draining);
        let all_drain = drains && views.iter().all(|view| matches!(view.phase(), Phase::Draining | Phase::Unspecified));
        // A replica that has never served waits for its ranks, and reports what it lacks.
        let unplaced = views.iter().find_map(|view| Some((&view.name, view.state.as_ref()?.unplaced.as_ref()?)));
        let why = unplaced.map_or_else(String::new, |(name, unplaced)| format!("`{name}` waits: {}", unplaced.why));
        if all_drain { Refusal::Draining { retry_after } } else { Refusal::NotReady { retry_after, why } }
    }
}

fn epoch(view: &ReplicaView) -> u32 {
    view.state.as_ref().map_or(0, |state| state.epoch_n)
}
