//! The settings of the connection to etcd: addresses, certificates and time limits. Knows no key.

use std::time::Duration;

#[derive(Clone)]
pub struct EtcdConfig {
    /// `host:port`, optionally with http:// or https:// before it.
    pub endpoints: Vec<String>,
    /// The prefix of all keys. Clusters with different prefixes do not see each other.
    pub prefix: String,
    pub tls: Option<EtcdTls>,
    /// A name and its password.
    pub user: Option<(String, String)>,
    pub waits: EtcdTimings,
}

/// As PEM.
#[derive(Clone)]
pub struct EtcdTls {
    /// The authority that signed etcd's certificates.
    pub authority: Vec<u8>,
    /// A certificate and its key, if etcd requires one.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

#[derive(Clone, Debug)]
pub struct EtcdTimings {
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

impl EtcdTimings {
    pub fn with_lease(lease: Duration) -> EtcdTimings {
        EtcdTimings { lease, beat_every: lease / 4, ..EtcdTimings::default() }
    }
}

impl Default for EtcdTimings {
    fn default() -> Self {
        EtcdTimings {
            lease: Duration::from_secs(10),
            beat_every: Duration::from_millis(2500),
            call_max: Duration::from_secs(3),
            retry_min: Duration::from_millis(100),
            retry_max: Duration::from_secs(2),
        }
    }
}
