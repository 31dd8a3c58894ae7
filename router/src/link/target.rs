//! The address that a link dials, and the claim that it expects there. Knows no store.

use tokio::sync::watch;
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

/// The present target of a link, and the claim that its last dial expected.
pub(super) struct AimedTarget {
    target: watch::Receiver<LinkTarget>,
    /// The last known incarnation when this link dialled.
    aimed: u64,
}

impl AimedTarget {
    pub fn new(target: watch::Receiver<LinkTarget>) -> AimedTarget {
        AimedTarget { target, aimed: 0 }
    }

    /// Waits until the target has changed. Safe to drop at any point.
    pub async fn changed(&mut self) -> Result<(), watch::error::RecvError> {
        self.target.changed().await
    }

    /// Returns the channel to dial now.
    pub fn aim(&mut self) -> Channel {
        let LinkTarget { channel, incarnation, .. } = self.target.borrow_and_update().clone();
        self.aimed = incarnation;
        channel
    }

    /// Whether another coordinator has claimed the replica later than the attached one, or else the one last dialled.
    pub fn is_claimed_after(&mut self, attached: Option<u64>) -> bool {
        let incarnation = self.target.borrow_and_update().incarnation;
        attached.unwrap_or(self.aimed) < incarnation
    }

    /// Whether the store reports a later claim than this one.
    pub fn is_later_than(&self, incarnation: u64) -> bool {
        incarnation < self.target.borrow().incarnation
    }

    pub fn is_listed(&self) -> bool {
        self.target.borrow().is_listed
    }
}
