//! Where etcd is, who it is to believe, and how long anything there may take. Knows no key.

use std::time::Duration;

#[derive(Clone)]
pub struct EtcdConfig {
    /// `host:port`, or with http:// or https:// before it.
    pub endpoints: Vec<String>,
    /// Of all keys. Clusters with prefixes of their own do not see each other.
    pub prefix: String,
    pub tls: Option<EtcdTls>,
    /// A name and its password.
    pub user: Option<(String, String)>,
    pub waits: EtcdWaits,
}

/// As PEM.
#[derive(Clone)]
pub struct EtcdTls {
    /// Who has signed etcd's certificates.
    pub authority: Vec<u8>,
    /// A certificate and its key, where etcd asks for one.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

#[derive(Clone, Debug)]
pub struct EtcdWaits {
    /// An entry whose coordinator is not heard of for so long goes away.
    pub lease: Duration,
    /// Between signs of life, which keep the lease.
    pub beat_every: Duration,
    /// For etcd's answer to one question.
    pub call_max: Duration,
    /// Between attempts while it is away: doubles from the first to the second.
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
