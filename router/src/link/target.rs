//! The address that a link dials, and the claim that it expects there. Knows no store.

use tonic::transport::Channel;

#[derive(Clone, Debug)]
pub struct LinkTarget {
    pub channel: Channel,
    /// The incarnation of the last claim in the store. A coordinator under an older one is refused; one under a later
    /// one is ahead of the store. The number falls only if a store has lost its data.
    pub incarnation: u64,
    /// Whether the store lists the replica. If not, the link ends when its stream has ended and no request waits there.
    pub is_listed: bool,
}

impl LinkTarget {
    /// Takes over the new target. False if nothing changes for the link: most of a coordinator's registration is not
    /// for it.
    pub fn becomes(&mut self, new: LinkTarget) -> bool {
        let is_same = new.incarnation == self.incarnation && new.is_listed == self.is_listed;
        *self = new;
        !is_same
    }
}
