//! Where a link dials, and under which claim it expects an answer. Knows no store.

use tonic::transport::Channel;

#[derive(Clone, Debug)]
pub struct Target {
    pub channel: Channel,
    /// The incarnation of the last claim that the store tells of. A coordinator that answers under an older one is
    /// refused; one that answers under a later one has overtaken the store. The number falls only where a store has
    /// lost its memory.
    pub incarnation: u64,
    /// Whether the store lists the replica. If not, the link ends when its stream has ended and no request waits there.
    pub is_listed: bool,
}

impl Target {
    /// Takes over the new target. False where nothing changes for the link: most of what coordinators tell of
    /// themselves is not for it.
    pub fn becomes(&mut self, new: Target) -> bool {
        let is_same = new.incarnation == self.incarnation && new.is_listed == self.is_listed;
        *self = new;
        !is_same
    }
}
