//! The data with which a rank joins the others.

use crate::wait::WaitPolicy;
use std::fmt;
use std::time::Duration;
use types::{Epoch, Layout, Rank};

/// One rank's place in one epoch of a replica, and the addresses of the others.
#[derive(Clone, PartialEq, Eq)]
pub struct MeshPlan {
    pub epoch: Epoch,
    pub rank: Rank,
    pub layout: Layout,
    /// The listeners' addresses, `host:port`, one per rank.
    pub peers: Vec<String>,
    /// The secret of this epoch. A connection without it is rejected.
    pub secret: [u8; 32],
    pub wire: WireChoice,
    /// The same for all ranks: a peer with another setting is rejected.
    pub encryption: LinkEncryption,
    pub timeouts: MeshTimeouts,
    /// Whether to spin before sleeping. Use it only if there are at most as many threads as cores.
    pub spin: bool,
}

/// The wires over which pairs of ranks may communicate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WireChoice {
    /// Shared memory if two ranks can share it, otherwise sockets.
    #[default]
    Any,
    /// Shared memory, or the join fails.
    Memory,
    Socket,
}

/// Whether others can read the data on a connection between ranks. In either mode they cannot change it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkEncryption {
    #[default]
    Off,
    On,
}

impl LinkEncryption {
    /// Returns the setting of a rank that does not have this one.
    pub(crate) fn other(self) -> LinkEncryption {
        if self == LinkEncryption::On { LinkEncryption::Off } else { LinkEncryption::On }
    }
}

impl fmt::Display for LinkEncryption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == LinkEncryption::On { "on" } else { "off" })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeshTimeouts {
    /// Time until all peers have met.
    pub join: Duration,
    /// Time for one operation, from its call on: it includes the other stages' compute time.
    pub op: Duration,
}

impl Default for MeshTimeouts {
    fn default() -> MeshTimeouts {
        MeshTimeouts { join: Duration::from_secs(30), op: WaitPolicy::default().deadline }
    }
}

impl MeshPlan {
    pub fn new(epoch: Epoch, rank: Rank, layout: Layout, peers: Vec<String>, secret: [u8; 32]) -> MeshPlan {
        let (wire, encryption) = (WireChoice::default(), LinkEncryption::default());
        let (timeouts, spin) = (MeshTimeouts::default(), false);
        MeshPlan { epoch, rank, layout, peers, secret, wire, encryption, timeouts, spin }
    }

    /// Returns the plan for ranks that also share `key`: an eavesdropper with the epoch's secret alone cannot join.
    pub fn with_key(self, key: &[u8; 32]) -> MeshPlan {
        let secret = *blake3::keyed_hash(key, &self.secret).as_bytes();
        MeshPlan { secret, ..self }
    }
}

impl fmt::Debug for MeshPlan {
    /// Leaves the secret out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MeshPlan")
            .field("epoch", &self.epoch)
            .field("rank", &self.rank)
            .field("layout", &self.layout)
            .field("peers", &self.peers)
            .field("wire", &self.wire)
            .field("encryption", &self.encryption)
            .field("timeouts", &self.timeouts)
            .field("spin", &self.spin)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_beside_the_secret_makes_another_secret() {
        let plan = MeshPlan::new(Epoch::default(), Rank(0), Layout::solo(1), vec![], [213; 32]);
        let secrets =
            [plan.clone(), plan.clone().with_key(&[1; 32]), plan.clone().with_key(&[2; 32])].map(|plan| plan.secret);
        assert!(secrets[0] != secrets[1] && secrets[1] != secrets[2] && secrets[0] != secrets[2]);
        assert_eq!(plan.clone().with_key(&[1; 32]), plan.with_key(&[1; 32]));
    }

    #[test]
    fn a_secret_is_not_printed() {
        let plan = MeshPlan::new(Epoch::default(), Rank(0), Layout::solo(1), vec![], [213; 32]);
        let printed = format!("{plan:?}");
        assert!(!printed.contains("213") && !printed.contains("secret") && printed.contains("peers"));
    }
}
