//! Names of things. A newtype each, so that a block is never taken for a rank.

use alloc::vec::Vec;
use core::fmt;

/// A token id of the model's vocabulary.
pub type Token = u32;
pub type Tokens = Vec<Token>;

/// Time as the pure parts see it: microseconds since some start that the caller chose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Micros(pub u64);

impl Micros {
    pub fn since(self, earlier: Micros) -> Micros {
        Micros(self.0.saturating_sub(earlier.0))
    }

    pub fn plus(self, micros: u64) -> Micros {
        Micros(self.0.saturating_add(micros))
    }
}

/// A request, unique within one incarnation of a replica. The upper 24 bits name the router (the coordinator numbers
/// routers as they attach), the lower 40 count its requests. So an id shows its router.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl RequestId {
    const COUNTER_BITS: u32 = 40;
    pub const ROUTERS_MAX: u32 = 1 << 24;

    /// None when either number is out of range: a router's number comes over the wire.
    pub fn new(router: u32, counter: u64) -> Option<RequestId> {
        let fits = router < Self::ROUTERS_MAX && counter < 1 << Self::COUNTER_BITS;
        fits.then_some(RequestId(u64::from(router) << Self::COUNTER_BITS | counter))
    }

    pub fn router(self) -> u32 {
        (self.0 >> Self::COUNTER_BITS) as u32
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}-{}", self.router(), self.0 & ((1 << Self::COUNTER_BITS) - 1))
    }
}

/// Steps of one epoch, counted from zero without gaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepId(pub u64);

/// One page of the KV cache; the same id names the same page on every rank of a replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

impl BlockId {
    /// Stands in a table for a page behind a window: never read, never owned.
    pub const NONE: BlockId = BlockId(u32::MAX);
}

/// A worker's number within its replica, counted stage by stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u16);

/// The tenant whose prefix cache a request may share. Zero stands for all clients without a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u64);

/// A span of a replica's life between two losses. A frame of an older epoch is refused wherever it arrives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch {
    /// From the cluster store's revision: grows with each coordinator that claims the replica.
    pub incarnation: u64,
    /// Grows with each new placement under one coordinator.
    pub n: u32,
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.incarnation, self.n)
    }
}
