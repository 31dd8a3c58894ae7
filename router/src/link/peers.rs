//! What the links of a router know of each other, and the table from which a choice picks one. Knows no tokens' values
//! and no clients.

use crate::board::caches::ReportGap;
use crate::board::circuit::CircuitChange;
use crate::board::ledger::Ledger;
use crate::board::pick::{self, ContinuationNeed, PickInfo, PickPolicy, ReplicaRow, ReplicaStanding, hashed};
use crate::board::{ChoiceBuffers, ReplicaChoice, ReplicaFacts, ReplicaTable, Salt};
use crate::link::budget::RetryBudget;
use crate::link::handle::ReplicaLink;
use crate::link::versions::{ServedVersion, version_of, versions};
use crate::link::view::{ReplicaInfo, ReplicaView};
use proto::cluster as wire;
use proto::cluster::state::Phase;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use types::PolicyDigest;

/// The links and their views, each under its own number, its place. Replicas come and go; no place is reused.
#[derive(Clone)]
pub struct ReplicaLinks {
    table: Arc<RwLock<LinkTable>>,
    /// In order of arrival, which is the order of their places.
    views: Arc<watch::Sender<Vec<ReplicaView>>>,
    /// The versions that the replicas serve. Changes together with the views, under their lock.
    versions: Arc<RwLock<Arc<[ServedVersion]>>>,
    pub budget: Arc<RetryBudget>,
}

#[derive(Default)]
struct LinkTable {
    links: BTreeMap<usize, ReplicaLink>,
    board: ReplicaTable,
}

impl ReplicaLinks {
    pub fn new(budget: RetryBudget) -> ReplicaLinks {
        let (table, views, versions) = (Arc::default(), Arc::default(), Arc::default());
        ReplicaLinks { table, views, versions, budget: Arc::new(budget) }
    }

    /// Adds a view. Its link follows by `add_link`.
    pub fn add_view(&self, view: ReplicaView) {
        self.views.send_modify(|views| views.push(view));
    }

    /// The ledger of a new link.
    pub fn ledger(&self) -> Arc<Ledger> {
        self.write().board.ledger()
    }

    /// Adds a link at the place of its view.
    pub fn add_link(&self, place: usize, link: ReplicaLink) {
        let mut table = self.write();
        table.board.add_replica(place, link.ledger());
        table.links.insert(place, link);
    }

    pub fn remove(&self, place: usize) {
        self.views.send_modify(|views| {
            views.retain(|view| view.place != place);
            self.update_versions(views);
        });
        let mut table = self.write();
        table.board.remove_replica(place);
        table.links.remove(&place);
    }

    pub fn views(&self) -> watch::Receiver<Vec<ReplicaView>> {
        self.views.subscribe()
    }

    pub fn update_view(&self, place: usize, change: impl FnOnce(&mut ReplicaView)) {
        let mut shown = None;
        self.views.send_if_modified(|views| {
            let Ok(at) = views.binary_search_by_key(&place, |view| view.place) else { return false };
            let before = views[at].serving();
            change(&mut views[at]);
            if views[at].serving() != before {
                self.update_versions(views);
            }
            shown = Some(facts(&views[at]));
            true
        });
        if let Some(facts) = shown {
            self.write().board.update_facts(place, &facts);
        }
    }

    /// The name, for people, of the replica at a place.
    pub fn name(&self, place: usize) -> String {
        let views = self.views.borrow();
        let at = views.binary_search_by_key(&place, |view| view.place);
        at.map_or_else(|_| String::new(), |at| views[at].name.clone())
    }

    fn update_versions(&self, views: &[ReplicaView]) {
        *self.versions.write().unwrap_or_else(PoisonError::into_inner) = versions(views);
    }

    pub fn versions(&self) -> Arc<[ServedVersion]> {
        self.versions.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Another stream to the replica begins: it reports anew what its cache has.
    pub fn reset_reports(&self, place: usize) {
        self.write().board.reset_reports(place);
    }

    pub fn apply_report(&self, place: usize, report: &wire::Cached) -> Result<(), ReportGap> {
        self.write().board.apply_report(place, report)
    }

    pub fn judge(&self, second: u64) -> Vec<(usize, CircuitChange)> {
        self.write().board.judge(second)
    }

    pub fn link(&self, place: usize) -> Option<ReplicaLink> {
        self.read().links.get(&place).cloned()
    }

    /// Returns whether at least one link has room for another request. Also true without any link.
    pub fn has_room(&self) -> bool {
        let table = self.read();
        table.links.is_empty() || table.links.values().any(ReplicaLink::has_room)
    }

    pub fn choose<I: Iterator<Item = u64>>(
        &self,
        policy: PickPolicy,
        info: &PickInfo,
        names: Option<impl Fn(&PolicyDigest, &Salt) -> I>,
        scratch: &mut ChoiceBuffers,
    ) -> Option<(ReplicaChoice, ReplicaLink)> {
        let table = self.read();
        let chosen = table.board.choose(policy, info, names, scratch)?;
        Some((chosen, table.links.get(&chosen.place)?.clone()))
    }

    /// The places and rows of all links.
    pub fn rows(&self) -> (Vec<usize>, Vec<ReplicaRow>) {
        self.read().board.rows().unzip()
    }

    /// All links but one, as they are now.
    pub fn links_besides(&self, place: usize) -> Neighbours {
        let (places, rows) = self.read().board.rows().filter(|(of, _)| *of != place).unzip();
        Neighbours { rows, places, peers: self.clone() }
    }

    fn read(&self) -> RwLockReadGuard<'_, LinkTable> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, LinkTable> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The other links, as they were at one moment.
pub struct Neighbours {
    rows: Vec<ReplicaRow>,
    places: Vec<usize>,
    peers: ReplicaLinks,
}

impl Neighbours {
    /// A link that can continue a request at once. Earlier results of this call count as the links' work.
    pub fn ready_for(&mut self, need: ContinuationNeed, n_tokens: u64) -> Option<ReplicaLink> {
        let idx = pick::pick_equivalent(&self.rows, need, ReplicaStanding::Shunned)?;
        self.rows[idx].work += n_tokens;
        self.peers.link(self.places[idx])
    }

    pub fn is_any_ready_for(&self, need: ContinuationNeed) -> bool {
        pick::pick_equivalent(&self.rows, need, ReplicaStanding::Shunned).is_some()
    }

    /// Takes one retry of the budget of all links. If there is none, the error is how long to wait.
    pub fn take_retry(&self, now: Instant) -> Result<(), Duration> {
        self.peers.budget.take(now)
    }

    /// Whether any link may become able to continue it. An absent replica could turn out to be any.
    pub fn may_come_for(&self, need: ContinuationNeed) -> bool {
        self.rows.iter().any(|row| row.may_come_for(need))
    }
}

/// The facts about a replica that a choice needs, from its view.
fn facts(view: &ReplicaView) -> ReplicaFacts {
    let standing = match (&view.replica, view.phase()) {
        (None, _) => ReplicaStanding::Absent,
        (Some(_), Phase::Recovering | Phase::Loading) if view.is_unplaced() => ReplicaStanding::Unplaced,
        (Some(_), Phase::Ready) if view.is_suspected => ReplicaStanding::Recovering,
        (Some(_), Phase::Ready) => ReplicaStanding::Ready,
        (Some(_), Phase::Draining) => ReplicaStanding::Draining,
        (Some(_), Phase::Recovering | Phase::Loading | Phase::Unspecified) => ReplicaStanding::Recovering,
    };
    let of = |replica: &Arc<ReplicaInfo>| (replica.digest, replica.context, replica.salt);
    let (digest, context, salt) = view.replica.as_ref().map(of).unwrap_or_default();
    let version = view.replica.as_deref().map(version_of).unwrap_or_default();
    let (room, protocol) = (view.room(), view.protocol());
    ReplicaFacts { standing, digest, version, context, room, salt, id: hashed(&view.name), protocol }
}
