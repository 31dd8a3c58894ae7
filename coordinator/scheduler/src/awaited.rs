//! Prefixes that a running sequence is about to compute. A waiting sequence with the same prefix is not admitted before
//! they are in the cache: the choices of one request compute its prompt once, and so do requests that begin alike and
//! come together.
//!
//! No sequence belongs to another: if the one that computes is cancelled, preempted or lost, the first that waits is
//! admitted like any other, and computes.

use crate::pools::BlockPools;
use crate::running::RunningSet;
use crate::sequence_index::{AwaitedPrefix, SequenceIdx};
use crate::slab::SequenceSlab;
use types::BLOCK_TOKENS;

/// For fewer blocks than these no request waits a step.
const BLOCKS_MIN: u32 = 4;

/// Finds a running sequence that computes more of this waiting one's prefix than its `n_hits` blocks in the cache.
pub(crate) fn awaited_prefix(
    idx: SequenceIdx,
    n_hits: u32,
    running: &RunningSet,
    sequences: &mut SequenceSlab,
    pools: &BlockPools,
) -> Option<AwaitedPrefix> {
    let sequence = &mut sequences[idx];
    let n_least = n_hits + BLOCKS_MIN;
    if !pools.has_names() || sequence.n_sharable() < n_least {
        return None;
    }
    let (name, key) = (sequence.hash(n_least - 1), sequence.key);
    for &of in running.order() {
        let other = &mut sequences[of];
        // One that is served later would be waited for longer than its blocks take.
        if other.key > key || !other.will_name(n_least - 1) || other.hash(n_least - 1) != name {
            continue;
        }
        let n_common = n_common_blocks(idx, of, n_least, sequences);
        let n_blocks = pools.n_resumable(&sequences[of], n_common);
        if n_blocks >= n_least {
            let generation = sequences[of].progress().generation;
            return Some(AwaitedPrefix { of, generation, position: n_blocks * BLOCK_TOKENS });
        }
    }
    None
}

/// How many full blocks at the front of both logs are the same. The first `n_known` are.
fn n_common_blocks(idx: SequenceIdx, other: SequenceIdx, n_known: u32, sequences: &mut SequenceSlab) -> u32 {
    let n_max = sequences[idx].n_sharable();
    let is_same = |n: &u32| sequences[other].will_name(*n) && sequences[other].hash(*n) == sequences[idx].hash(*n);
    n_known + (n_known..n_max).take_while(is_same).count() as u32
}
