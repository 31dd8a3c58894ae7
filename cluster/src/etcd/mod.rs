//! Membership in etcd: one watch of all that stands under a prefix, and a lease for each claim of this process.
//!
//! ```text
//! PREFIX/claims/NAME    who holds the name; stays, so that a claim that was lost never comes back     no lease
//! PREFIX/members/NAME   what the holder registers; written only while the claim stands               its lease
//! ```
//! etcd may be away for as long as it likes: then nobody joins or leaves, and nothing here ends. A lost stream, lease
//! or leader is replaced.

mod follow;
mod keep;
mod keys;
mod line;

use crate::Error;
use crate::claim::{Claim, Kept};
use crate::state::{Health, Registration, State, Watch};
use follow::Follower;
use keep::Keeper;
use line::Line;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

#[derive(Clone)]
pub struct EtcdConfig {
    /// `host:port`, optionally with http:// or https:// before it.
    pub endpoints: Vec<String>,
    /// The prefix of all keys. Clusters with different prefixes do not see each other.
    pub prefix: String,
    pub tls: Option<EtcdTls>,
    /// A name and its password.
    pub user: Option<(String, String)>,
    pub waits: EtcdWaits,
}

/// Certificates and keys, as PEM.
#[derive(Clone)]
pub struct EtcdTls {
    /// The authority that signed etcd's certificates.
    pub authority: Vec<u8>,
    /// A certificate and its key, if etcd asks for one.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

#[derive(Clone, Debug)]
pub struct EtcdWaits {
    /// An entry disappears when its coordinator is silent for this long.
    pub lease: Duration,
    /// The interval between signs of life, which keep the lease.
    pub beat_every: Duration,
    /// The time limit for etcd's answer to one call.
    pub call_max: Duration,
    /// The pause between attempts while etcd is away: doubles from the first to the second.
    pub retry_min: Duration,
    pub retry_max: Duration,
}

impl EtcdWaits {
    pub fn with_lease(lease: Duration) -> EtcdWaits {
        EtcdWaits { lease, beat_every: lease / 4, ..EtcdWaits::default() }
    }
}

impl Default for EtcdWaits {
    fn default() -> Self {
        EtcdWaits {
            lease: Duration::from_secs(10),
            beat_every: Duration::from_millis(2500),
            call_max: Duration::from_secs(3),
            retry_min: Duration::from_millis(100),
            retry_max: Duration::from_secs(2),
        }
    }
}

/// Clones share one store. The watch ends with the last of them.
#[derive(Clone)]
pub struct EtcdStore {
    shared: Arc<Shared>,
}

struct Shared {
    line: Arc<Line>,
    state: watch::Receiver<State>,
    health: watch::Receiver<Health>,
    follower: JoinHandle<()>,
}

impl Drop for Shared {
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
    /// Dials nobody yet: refuses a config that could never work, and begins to follow.
    pub async fn open(config: EtcdConfig) -> Result<EtcdStore, Error> {
        let line = Arc::new(Line::new(config).await?);
        let (state, health) = (watch::Sender::new(State::default()), watch::Sender::new(line::not_yet()));
        let (of_state, of_health) = (state.subscribe(), health.subscribe());
        let follower = tokio::spawn(Follower { line: line.clone(), state, health }.run());
        Ok(EtcdStore { shared: Arc::new(Shared { line, state: of_state, health: of_health, follower }) })
    }

    pub fn health(&self) -> watch::Receiver<Health> {
        self.shared.health.clone()
    }

    /// The watch lasts as long as the store.
    pub fn watch(&self) -> Watch {
        Watch::new(self.shared.state.clone())
    }

    /// Waits while etcd is away.
    pub async fn claim(&self, replica: &str, registration: Registration) -> Result<Claim, Error> {
        let line = self.shared.line.clone();
        let taken = keep::take(&line, replica, &registration.address).await?;
        let incarnation = taken.incarnation;
        let (says, said) = watch::channel(registration);
        let (tell, lost) = watch::channel(None);
        let end = CancellationToken::new();
        let keeper = Keeper::new(line, self.shared.state.clone(), said, tell, replica, taken);
        // Holds the store, so that a claim goes on without the caller's clone of it.
        let (store, ended) = (self.clone(), end.clone());
        let keeper = tokio::spawn(async move {
            keeper.run(ended).await;
            drop(store);
        });
        Ok(Claim::kept(incarnation, Kept { says, lost, keeper, end: end.drop_guard() }))
    }
}
