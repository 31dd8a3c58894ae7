//! Where a link dials, and under which claim it expects an answer. Knows no store.

use tonic::transport::Channel;

#[derive(Clone, Debug)]
pub struct Target {
    pub channel: Channel,
    /// Of the last claim that the store tells of: who answers under an older one is refused, and who answers under a
    /// later one has overtaken the store. It falls only where a store has lost its memory.
    pub incarnation: u64,
    /// The store has it. If not, the link ends when its stream has and nobody waits there.
    pub is_listed: bool,
}

impl Target {
    /// False where nothing changes for a link: most of what coordinators say of themselves is not for it.
    pub fn becomes(&mut self, new: Target) -> bool {
        let is_same = new.incarnation == self.incarnation && new.is_listed == self.is_listed;
        *self = new;
        !is_same
    }
}
