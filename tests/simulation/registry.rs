//! The cluster's store as each process sees it: with a delay, and unreachable while the link to the store is cut. A
//! process that is cut off for longer than a lease is invisible to the others. Has no knowledge of the processes.

use crate::record::Record;
use crate::script::{Host, replica_name};
use cluster::{Claim, Member, MemoryStore};
use std::time::Duration;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

const LEASE_MILLIS: u64 = 5_000;

#[derive(Clone)]
pub struct Registry {
    store: MemoryStore,
    record: Record,
    lag: Duration,
}

impl Registry {
    pub fn new(record: Record, lag_millis: u64) -> Registry {
        Registry { store: MemoryStore::starting_at(1), record, lag: Duration::from_millis(lag_millis) }
    }

    /// A process's view, until it stops.
    pub fn view(&self, host: Host, stop: &CancellationToken) -> MemoryStore {
        let (view, registry, stop) = (self.store.remote_view(), self.clone(), stop.clone());
        registry.look(host, &view);
        let looked = view.clone();
        tokio::spawn(async move {
            while !stop.is_cancelled() {
                sleep(registry.lag).await;
                registry.look(host, &looked);
            }
        });
        view
    }

    fn look(&self, host: Host, view: &MemoryStore) {
        if !self.is_cut_off(host) {
            view.refresh(|member| self.has_lapsed(member));
        }
    }

    fn is_cut_off(&self, host: Host) -> bool {
        let seen = self.record.seen();
        seen.is_store_away || seen.cut_off.contains_key(&host.name())
    }

    fn has_lapsed(&self, member: &Member) -> bool {
        let now = crate::client::millis();
        let since = self.record.seen().cut_off.get(&member.registration.address).copied();
        since.is_some_and(|since| now >= since + LEASE_MILLIS)
    }

    /// Claims the replica's name, as soon as the store can be reached.
    pub async fn claim(&self, host: Host, replica: usize, view: &MemoryStore) -> Claim {
        while self.is_cut_off(host) {
            sleep(self.lag).await;
        }
        view.claim(&replica_name(replica), &host.name())
    }
}
