//! What the links of a router know of each other, and the table from which one is chosen. Knows no tokens' values and
//! no clients.

use crate::board::{Board, Chosen, Salt, Scratch};
use crate::budget::Budget;
use crate::caches::Gap;
use crate::circuit::Turn;
use crate::ledger::Ledger;
use crate::link::{Link, View};
use crate::models::{Version, versions};
use crate::pick::{self, Need, Policy, Row, Standing, Wish};
use crate::replicas::facts;
use proto::cluster as wire;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::sync::watch;
use types::PolicyDigest;

/// The links and their views, each at its own place. Replicas come and go; no place is given twice.
#[derive(Clone)]
pub struct Peers {
    table: Arc<RwLock<Table>>,
    /// In the order in which they came, and so of their places.
    views: Arc<watch::Sender<Vec<View>>>,
    /// What they serve: changed with the views and under their lock.
    versions: Arc<RwLock<Arc<[Version]>>>,
    pub budget: Arc<Budget>,
}

#[derive(Default)]
struct Table {
    links: BTreeMap<usize, Link>,
    board: Board,
}

impl Peers {
    pub fn new(budget: Budget) -> Peers {
        let (table, views, versions) = (Arc::default(), Arc::default(), Arc::default());
        Peers { table, views, versions, budget: Arc::new(budget) }
    }

    /// A view, whose link comes next.
    pub fn sit(&self, view: View) {
        self.views.send_modify(|views| views.push(view));
    }

    /// For a link that comes.
    pub fn ledger(&self) -> Arc<Ledger> {
        self.write().board.ledger()
    }

    /// A link, at the place of its view.
    pub fn introduce(&self, place: usize, link: Link) {
        let mut table = self.write();
        table.board.sit(place, link.ledger());
        table.links.insert(place, link);
    }

    pub fn leave(&self, place: usize) {
        self.views.send_modify(|views| {
            views.retain(|view| view.place != place);
            self.tell_versions(views);
        });
        let mut table = self.write();
        table.board.leave(place);
        table.links.remove(&place);
    }

    pub fn views(&self) -> watch::Receiver<Vec<View>> {
        self.views.subscribe()
    }

    pub fn show(&self, place: usize, change: impl FnOnce(&mut View)) {
        let mut shown = None;
        self.views.send_if_modified(|views| {
            let Ok(at) = views.binary_search_by_key(&place, |view| view.place) else { return false };
            let before = views[at].serves();
            change(&mut views[at]);
            if views[at].serves() != before {
                self.tell_versions(views);
            }
            shown = Some(facts(&views[at]));
            true
        });
        if let Some(facts) = shown {
            self.write().board.show(place, &facts);
        }
    }

    fn tell_versions(&self, views: &[View]) {
        *self.versions.write().unwrap_or_else(PoisonError::into_inner) = versions(views);
    }

    pub fn versions(&self) -> Arc<[Version]> {
        self.versions.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Another stream to the replica: what its cache has is told anew.
    pub fn hear_anew(&self, place: usize) {
        self.write().board.hear_anew(place);
    }

    pub fn hear(&self, place: usize, told: &wire::Cached) -> Result<(), Gap> {
        self.write().board.hear(place, told)
    }

    pub fn judge(&self, second: u64) -> Vec<(usize, Turn)> {
        self.write().board.judge(second)
    }

    pub fn link(&self, place: usize) -> Option<Link> {
        self.read().links.get(&place).cloned()
    }

    /// False: none of them would take another request.
    pub fn has_room(&self) -> bool {
        let table = self.read();
        table.links.is_empty() || table.links.values().any(Link::has_room)
    }

    pub fn choose<I: Iterator<Item = u64>>(
        &self,
        policy: Policy,
        wish: &Wish,
        names: Option<impl Fn(&PolicyDigest, &Salt) -> I>,
        scratch: &mut Scratch,
    ) -> Option<(Chosen, Link)> {
        let table = self.read();
        let chosen = table.board.choose(policy, wish, names, scratch)?;
        Some((chosen, table.links.get(&chosen.place)?.clone()))
    }

    /// Of all, with their places.
    pub fn rows(&self) -> (Vec<usize>, Vec<Row>) {
        self.read().board.rows().unzip()
    }

    /// All but one, as they are now.
    pub fn besides(&self, place: usize) -> Others {
        let (places, rows) = self.read().board.rows().filter(|(of, _)| *of != place).unzip();
        Others { rows, places, peers: self.clone() }
    }

    fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The other links at one moment.
pub struct Others {
    rows: Vec<Row>,
    places: Vec<usize>,
    peers: Peers,
}

impl Others {
    /// Who can go on with a request at once. What was given to it before counts.
    pub fn ready_for(&mut self, need: Need, n_tokens: u64) -> Option<Link> {
        let idx = pick::equal(&self.rows, need, Standing::Shunned)?;
        self.rows[idx].work += n_tokens;
        self.peers.link(self.places[idx])
    }

    pub fn is_any_ready_for(&self, need: Need) -> bool {
        pick::equal(&self.rows, need, Standing::Shunned).is_some()
    }

    /// Whether somebody may come to be able to: who is away could be anybody.
    pub fn may_come_for(&self, need: Need) -> bool {
        self.rows.iter().any(|row| row.may_come_for(need))
    }
}
