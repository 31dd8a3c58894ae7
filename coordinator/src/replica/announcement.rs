//! The replica's announcement of itself in the cluster store.

use cluster::Registration;
use types::PolicyDigest;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Announcement {
    pub policy: Option<PolicyDigest>,
    pub tp: u16,
    pub pp: u16,
    pub ranks_ready: u16,
}

impl Announcement {
    pub fn write(&self, registration: &mut Registration) {
        if let Some(policy) = self.policy {
            registration.policy_digest = policy.to_string();
        }
        (registration.tp, registration.pp, registration.ranks_ready) = (self.tp, self.pp, self.ranks_ready);
    }
}
