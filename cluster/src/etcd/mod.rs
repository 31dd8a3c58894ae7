//! Membership in etcd: one watch of all entries under a prefix, and a lease for each claim of this process.
//!
//! ```text
//! PREFIX/claims/NAME    the name's holder; stays, so that a claim that was lost never comes back      no lease
//! PREFIX/members/NAME   what the holder registers; written only while the claim stands               its lease
//! PREFIX/posts/NAME     the text of a process for the others                                         its lease
//! ```
//! etcd may be away for any time: then no member joins or leaves, and nothing here ends. A lost stream, lease or leader
//! is replaced.

mod config;
mod follow;
mod keep;
mod keys;
mod line;
mod posting;
mod written;

pub use config::{EtcdConfig, EtcdTimings, EtcdTls};

use crate::Error;
use crate::claim::{Claim, KeeperHandle};
use crate::others::OtherReplicas;
use crate::post::{Post, PostKind};
use crate::state::{MemberWatch, Registration, StoreHealth, StoreState};
use follow::StoreFollower;
use keep::ClaimKeeper;
use line::EtcdConnection;
use posting::PostKeeper;
use std::fmt;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Clones share one store. The watch ends with the last of them.
#[derive(Clone)]
pub struct EtcdStore {
    shared: Arc<EtcdShared>,
}

struct EtcdShared {
    line: Arc<EtcdConnection>,
    state: watch::Receiver<StoreState>,
    health: watch::Receiver<StoreHealth>,
    follower: JoinHandle<()>,
}

impl Drop for EtcdShared {
    fn drop(&mut self) {
        self.follower.abort();
    }
}

impl fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdStore").field("keys", &self.shared.line.keys).finish_non_exhaustive()
    }
}

impl EtcdStore {
    /// Opens a store without a connection: refuses a config that could never work, and begins to follow.
    pub async fn open(config: EtcdConfig) -> Result<EtcdStore, Error> {
        let line = Arc::new(EtcdConnection::new(config).await?);
        let (state, health) = (watch::Sender::new(StoreState::default()), watch::Sender::new(line::unreached_health()));
        let (of_state, of_health) = (state.subscribe(), health.subscribe());
        let follower = tokio::spawn(StoreFollower { line: line.clone(), state, health }.run());
        Ok(EtcdStore { shared: Arc::new(EtcdShared { line, state: of_state, health: of_health, follower }) })
    }

    pub fn health(&self) -> watch::Receiver<StoreHealth> {
        self.shared.health.clone()
    }

    /// The watch lasts as long as the store.
    pub fn watch(&self) -> MemberWatch {
        MemberWatch::new(self.shared.state.clone())
    }

    /// The text is kept by a task until the result is dropped.
    pub fn post(&self, name: &str) -> Post {
        let (text, text_rx) = watch::channel(None);
        let end = CancellationToken::new();
        let (line, state) = (self.shared.line.clone(), self.shared.state.clone());
        let posting = PostKeeper { line, state, name: name.into(), text: text_rx, lease: None, written: None };
        // Holds the store, so that posts arrive without the caller's clone of it.
        let (store, ended) = (self.clone(), end.clone());
        tokio::spawn(async move {
            posting.run(ended).await;
            drop(store);
        });
        let kind = PostKind::Kept { text, _end: end.drop_guard() };
        Post::new(name, (self.shared.state.clone(), self.shared.health.clone()), kind)
    }

    /// Waits while etcd is away.
    pub async fn claim(&self, replica: &str, registration: Registration) -> Result<Claim, Error> {
        let line = self.shared.line.clone();
        let taken = keep::take_claim(&line, replica, &registration.address).await?;
        let incarnation = taken.incarnation;
        let (registration_tx, registration_rx) = watch::channel(registration);
        let (lost_tx, lost) = watch::channel(None);
        let end = CancellationToken::new();
        let keeper = ClaimKeeper::new(line, self.shared.state.clone(), registration_rx, lost_tx, replica, taken);
        // Holds the store, so that a claim goes on without the caller's clone of it.
        let (store, ended) = (self.clone(), end.clone());
        let keeper = tokio::spawn(async move {
            keeper.run(ended).await;
            drop(store);
        });
        let others = OtherReplicas::new(self.shared.state.clone(), replica);
        Ok(Claim::from_keeper(
            incarnation,
            others,
            KeeperHandle { registration_tx, lost, keeper, end: end.drop_guard() },
        ))
    }
}
