//! How much of their KV caches the ranks that grow should have memory for. Knows neither ranks nor requests: the caller
//! passes the needs, and the time.

use types::{Epoch, Micros};

/// Positions with memory and without use. If there are fewer than the first, more is requested, up to the second.
pub(crate) const AHEAD_MIN: u32 = 1024;
pub(crate) const AHEAD: u32 = 2 * AHEAD_MIN;

/// The last target of the ranks that grow, in parts of their pools.
pub(crate) struct KvTarget {
    parts: u32,
    /// The number of the frame.
    n: u32,
    /// Since when a lower target has been possible.
    less_since: Option<Micros>,
}

/// The needs of blocks in use, cached ones and requests, in parts of the pools.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvNeeds {
    /// With `AHEAD` positions to spare, and with twice as many.
    pub target: u32,
    pub spare: u32,
    /// The parts that hold blocks in use or cached ones.
    pub held: u32,
}

impl KvTarget {
    pub fn new(parts: u32) -> KvTarget {
        KvTarget { parts, n: 0, less_since: None }
    }

    pub fn parts(&self) -> u32 {
        self.parts
    }

    pub fn set(&mut self, parts: u32) {
        (self.parts, self.n, self.less_since) = (parts, self.n + 1, None);
    }

    /// Returns the lower target that is due: memory above it has been unused for `release_after`, and is worth a frame.
    pub fn lower(&mut self, needs: KvNeeds, now: Micros, release_after: u64) -> Option<u32> {
        let least = self.parts.saturating_sub(needs.spare - needs.target);
        if needs.spare >= self.parts || needs.held > least {
            self.less_since = None;
            return None;
        }
        let since = *self.less_since.get_or_insert(now);
        (now.since(since).0 >= release_after).then(|| needs.target.max(needs.held))
    }

    /// The number of the last target.
    pub fn n(&self) -> u32 {
        self.n
    }

    pub fn frame(&self, epoch: Epoch) -> proto::cluster::KvTarget {
        let Epoch { incarnation: epoch_incarnation, n: epoch_n } = epoch;
        proto::cluster::KvTarget { epoch_incarnation, epoch_n, parts: self.parts, n: self.n }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_is_lowered_after_a_while_unless_blocks_are_held() {
        let mut target = KvTarget::new(1000);
        let needs = |needed: u32, held: u32| KvNeeds { target: needed, spare: needed + 100, held };
        assert_eq!(target.lower(needs(200, 50), Micros(0), 10), None, "not yet");
        assert_eq!(target.lower(needs(950, 50), Micros(9), 10), None, "the blocks are needed again");
        assert_eq!(target.lower(needs(200, 50), Micros(10), 10), None);
        assert_eq!(target.lower(needs(200, 950), Micros(19), 10), None, "a block is held near the end");
        assert_eq!(target.lower(needs(200, 50), Micros(20), 10), None);
        assert_eq!(target.lower(needs(200, 300), Micros(30), 10), Some(300));
        target.set(300);
        assert_eq!((target.parts(), target.n()), (300, 1));
    }
}
