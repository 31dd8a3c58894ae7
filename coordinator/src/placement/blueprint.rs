//! The operator's policy, and a replica's layout. Plain data.

use super::unplaceable::UnplaceableReason;
use crate::WorkerId;
use std::ops::Range;
use types::{Activations, BLOCK_TOKENS, CacheGroup, Grid, GridPlace, KvDtype, Layout, Rank};

/// The operator's requirements for a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementPolicy {
    pub grid: Grid,
    pub activations: Activations,
    pub kv_dtype: KvDtype,
    /// KV bytes per rank. None: what eight full contexts need, at most a quarter of the machine's memory; on GPUs,
    /// nearly all that the weights leave.
    pub kv_memory: Option<u64>,
    /// Thousandths of each machine's memory for weights and KV together. Without effect beside `kv_memory`.
    pub memory_permille: Option<u16>,
    /// The bytes per rank, on an even cut, for states of recurrent layers that the prefix cache keeps; a part of the KV
    /// bytes. None: as many as keys and values have.
    pub state_cache: Option<u64>,
    /// None: the model's context, or as much of it as the KV memory holds.
    pub context: Option<u32>,
    pub running_max: u32,
    /// The most tokens of one slice: with a window, a sequence holds their blocks besides the window's.
    pub slice_max: u32,
}

/// A replica's layout, with the same figures for all readers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blueprint {
    pub grid: Grid,
    /// Sent to every rank, which computes from it what it holds.
    pub layout: Layout,
    pub context: u32,
    /// Present if the context is shorter than configured or, without a configured one, than the model's.
    pub shortened: Option<ShortenedContext>,
    /// For each cache group of the model, one pool of block ids for all ranks.
    pub pools: Vec<PoolSize>,
    /// One shard per rank.
    pub shards: Vec<Shard>,
}

/// A context that the memory for KV shortens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the context is {has} instead of {requested}: {why}")]
pub struct ShortenedContext {
    pub requested: u32,
    pub has: u32,
    pub why: UnplaceableReason,
}

/// Block ids that the layers of one cache group share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSize {
    pub group: CacheGroup,
    pub n_blocks: u32,
}

impl PoolSize {
    pub fn n_tokens(&self) -> u64 {
        u64::from(self.n_blocks) * u64::from(BLOCK_TOKENS)
    }
}

impl Blueprint {
    /// One entry per pool.
    pub fn n_blocks(&self) -> Vec<u32> {
        self.pools.iter().map(|pool| pool.n_blocks).collect()
    }
}

/// One rank's part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    pub rank: Rank,
    pub place: GridPlace,
    pub worker: WorkerId,
    pub host: String,
    pub layers: Range<u32>,
    pub heads: Range<u32>,
    pub kv_heads: Range<u32>,
    pub weight_bytes: u64,
    pub kv_bytes: u64,
    /// For each pool, how many positions' K and V it keeps: zero if its stage has no layer of that pool.
    pub kv_tokens: Vec<u64>,
}

impl Shard {
    /// The most positions that some layer of it keeps.
    pub fn kv_tokens_max(&self) -> u64 {
        self.kv_tokens.iter().copied().max().unwrap_or(0)
    }
}
