//! A replica's name, held by one coordinator until a later claim. Does not know where it is stored.

use crate::memory::MemoryStore;
use crate::others::OtherReplicas;
use crate::state::Registration;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::DropGuard;

/// How long a release waits for the store to delete the entry; otherwise it lapses with its lease.
const RELEASE_MAX: Duration = Duration::from_secs(3);

/// Another coordinator has claimed the replica later: whatever this process does under its own epochs is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("claim lost: {by} has claimed replica {replica:?} later, as incarnation {theirs}; this one was {ours}")]
pub struct ClaimLost {
    pub replica: String,
    /// The address of the later claim.
    pub by: String,
    pub ours: u64,
    pub theirs: u64,
}

/// Holds a replica's entry until it is released, dropped or lost.
#[derive(Debug)]
pub struct Claim {
    incarnation: u64,
    others: OtherReplicas,
    kind: ClaimKind,
}

#[derive(Debug)]
enum ClaimKind {
    Memory(MemoryClaim),
    /// The entry is kept in an external store by a keeper's task.
    Kept(KeeperHandle),
}

/// The entry goes when this is dropped.
#[derive(Debug)]
struct MemoryClaim {
    store: MemoryStore,
    replica: String,
    incarnation: u64,
    registration: Registration,
}

impl Drop for MemoryClaim {
    fn drop(&mut self) {
        self.store.release(&self.replica, self.incarnation);
    }
}

/// A claim's handle to its keeper's task.
#[derive(Debug)]
pub(crate) struct KeeperHandle {
    pub registration_tx: watch::Sender<Registration>,
    pub lost: watch::Receiver<Option<ClaimLost>>,
    pub keeper: JoinHandle<()>,
    pub end: DropGuard,
}

impl Claim {
    pub(crate) fn in_memory(store: MemoryStore, replica: &str, incarnation: u64, registration: Registration) -> Claim {
        let others = store.others(replica);
        let hold = MemoryClaim { store, replica: replica.into(), incarnation, registration };
        Claim { incarnation, others, kind: ClaimKind::Memory(hold) }
    }

    pub(crate) fn from_keeper(incarnation: u64, others: OtherReplicas, kept: KeeperHandle) -> Claim {
        Claim { incarnation, others, kind: ClaimKind::Kept(kept) }
    }

    /// The incarnation of all epochs under this claim. Later claims have higher ones; a lease that is made anew keeps
    /// it.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// The other replicas of this one's model.
    pub fn others(&self) -> OtherReplicas {
        self.others.clone()
    }

    /// Changes the registration that others read, unless the claim is lost.
    pub fn update_registration(&mut self, change: impl FnOnce(&mut Registration)) {
        match &mut self.kind {
            ClaimKind::Memory(hold) => {
                change(&mut hold.registration);
                hold.store.update_registration(&hold.replica, hold.incarnation, &hold.registration);
            }
            ClaimKind::Kept(kept) => {
                kept.registration_tx.send_if_modified(|registration| {
                    let before = registration.clone();
                    change(registration);
                    *registration != before
                });
            }
        }
    }

    /// Waits for a later claim. Safe to drop at any point.
    pub async fn wait_lost(&mut self) -> ClaimLost {
        match &mut self.kind {
            ClaimKind::Memory(hold) => hold.store.wait_lost(&hold.replica, hold.incarnation).await,
            ClaimKind::Kept(kept) => {
                let lost = kept.lost.wait_for(Option::is_some).await.ok().and_then(|lost| lost.clone());
                match lost {
                    Some(lost) => lost,
                    // The keeper has ended, as it does at the end of the runtime.
                    None => std::future::pending().await,
                }
            }
        }
    }

    /// Deletes the entry and waits until that is done, for at most `RELEASE_MAX`.
    pub async fn release(self) {
        match self.kind {
            ClaimKind::Memory(hold) => drop(hold),
            ClaimKind::Kept(KeeperHandle { keeper, end, .. }) => {
                end.disarm().cancel();
                // Too late: the entry lapses with its lease.
                let _late = timeout(RELEASE_MAX, keeper).await;
            }
        }
    }
}
