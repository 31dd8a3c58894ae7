//! Which decoding sequences are in a step. With several stages, as many steps run at once, and a sequence has one
//! position at a time: so they are spread evenly over the steps, and each has its turn in every `steps_per_turn`-th.
//!
//! ```text
//! five sequences, two stages:  a b c | d e | a b c | d e | ..    stage 1 draws for d e while stage 0 runs a b c
//! ```
//!
//! No sequence is bound to a group. The one that has waited longest goes first and a step takes no more than its share,
//! so groups arise, and even out again when sequences come and go. With one stage every step is every sequence's turn.

use crate::pools::BlockPools;
use crate::sequence::Sequence;
use crate::slab::{SequenceIdx, SequenceSlab};
use alloc::vec::Vec;

/// When a sequence may have a turn in a step.
#[derive(Clone, Copy, Default)]
pub(crate) struct TurnRule {
    /// The steps before this one.
    pub n_steps: u64,
    /// The slices of a sequence that the step may have ahead of known tokens.
    pub ahead_max: u32,
    /// The number of steps in which each sequence has one turn.
    pub steps_per_turn: u32,
    /// How many steps behind its draw a token can be computed.
    pub distance: u32,
}

impl TurnRule {
    #[inline]
    pub fn n_tokens(&self, sequence: &Sequence) -> u32 {
        sequence.turn_tokens(self.ahead_max, self.n_steps, self.distance)
    }

    /// This step's share: any `steps_per_turn` steps together have all of them, and two steps differ by one at most.
    fn n_turns_of_step(&self, n_decoding: u32) -> u32 {
        let n_turns = self.steps_per_turn;
        let has_one_more = self.n_steps % u64::from(n_turns) < u64::from(n_decoding % n_turns);
        (n_decoding / n_turns + u32::from(has_one_more)).max(1)
    }
}

/// A sequence that is a candidate for a turn; the lowest goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TurnCandidate {
    /// It needs a block, there is none, and no later running sequence could be preempted. Its turn would be wasted, so
    /// others go first; otherwise all could wait for blocks that only others can release.
    is_stuck: bool,
    n_slices_in_flight: u32,
    last_step: u64,
    /// Its place among the running: the order of the keys.
    pub at: usize,
    pub n_tokens: u32,
}

/// Leaves in `turns` the sequences that have a turn. Their number is limited to the step's share.
pub(crate) fn choose_turns(
    turns: &mut Vec<TurnCandidate>,
    rule: &TurnRule,
    running: &[SequenceIdx],
    sequences: &SequenceSlab,
    pools: &BlockPools,
) {
    let mut n_decoding = 0;
    turns.clear();
    for (at, &idx) in running.iter().enumerate() {
        let sequence = &sequences[idx];
        n_decoding += u32::from(sequence.is_decoding());
        let n_tokens = rule.n_tokens(sequence);
        if n_tokens > 0 {
            let is_last = at + 1 == running.len();
            let is_stuck = is_last && !pools.has_blocks(sequence, sequence.slice_end(n_tokens), 0);
            let (n_slices_in_flight, last_step) =
                (sequence.progress().n_slices_in_flight, sequence.progress().last_step);
            turns.push(TurnCandidate { is_stuck, n_slices_in_flight, last_step, at, n_tokens });
        }
    }
    let n_given = rule.n_turns_of_step(n_decoding) as usize;
    if n_given < turns.len() {
        turns.select_nth_unstable(n_given);
        turns.truncate(n_given);
    }
}
