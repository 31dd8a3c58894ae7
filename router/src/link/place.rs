//! The place of a link among the links of its router: what it reports to them, and what it learns of them. Knows no
//! requests and no stream.

use crate::board::caches::ReportGap;
use crate::board::ledger::Ledger;
use crate::link::peers::{Neighbours, ReplicaLinks};
use crate::link::view::ReplicaView;
use proto::cluster as wire;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

pub(super) struct LinkPlace {
    /// Its number among the links.
    number: usize,
    peers: ReplicaLinks,
    views: watch::Receiver<Vec<ReplicaView>>,
    ledger: Arc<Ledger>,
}

impl LinkPlace {
    pub fn new(number: usize, peers: ReplicaLinks, ledger: Arc<Ledger>) -> LinkPlace {
        LinkPlace { number, views: peers.views(), peers, ledger }
    }

    pub fn number(&self) -> usize {
        self.number
    }

    /// The name, for people, of the replica.
    pub fn name(&self) -> String {
        self.peers.name(self.number)
    }

    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The other links, as they are now.
    pub fn others(&self) -> Neighbours {
        self.peers.links_besides(self.number)
    }

    /// Waits until the view of any replica has changed. Safe to drop at any point.
    pub async fn views_changed(&mut self) -> Result<(), watch::error::RecvError> {
        self.views.changed().await
    }

    pub fn update_view(&self, change: impl FnOnce(&mut ReplicaView)) {
        self.peers.update_view(self.number, change);
    }

    pub fn apply_report(&self, report: &wire::Cached) -> Result<(), ReportGap> {
        self.peers.apply_report(self.number, report)
    }

    /// Withdraws all that was known of the replica.
    pub fn reset(&self) {
        self.update_view(|view| (view.replica, view.state, view.is_suspected) = (None, None, false));
        self.peers.reset_reports(self.number);
        self.ledger.reset_measurements();
    }

    /// Takes one retry of the budget of all links. If there is none, the error is how long to wait.
    pub fn take_retry(&self, now: Instant) -> Result<(), Duration> {
        self.peers.budget.take(now)
    }

    pub fn record_answer(&self) {
        self.peers.budget.record_answer();
    }
}
