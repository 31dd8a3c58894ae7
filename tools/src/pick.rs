//! The flag for the choice of a replica, of a router and of a simulated one.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// How a router picks a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PickChoice {
    /// The one that should give the first token soonest, by its prefix cache and its queue
    Prefix,
    /// The one with the least work
    LeastWork,
    /// Of two random ones, the one with less work
    PowerOfTwo,
    /// One after the other
    RoundRobin,
    /// The same one for all requests of a session; by prefix for requests without a session
    Affinity,
}

impl From<PickChoice> for router::PickPolicy {
    fn from(policy: PickChoice) -> router::PickPolicy {
        match policy {
            PickChoice::Prefix => router::PickPolicy::Prefix,
            PickChoice::LeastWork => router::PickPolicy::LeastWork,
            PickChoice::PowerOfTwo => router::PickPolicy::PowerOfTwo,
            PickChoice::RoundRobin => router::PickPolicy::RoundRobin,
            PickChoice::Affinity => router::PickPolicy::Affinity,
        }
    }
}
