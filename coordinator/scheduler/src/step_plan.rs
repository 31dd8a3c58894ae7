//! The step that is being planned: what each running sequence has in it, and what is left of its limits.

use crate::config::Config;
use crate::costs::StepSize;
use crate::drafting::DraftPolicy;
use crate::pools::BlockPools;
use crate::slab::{SequenceIdx, SequenceSlab};
use crate::turns::{TurnCandidate, TurnRule, choose_turns};
use alloc::vec::Vec;
use types::{DRAFT_ROWS_MAX, SCORED_ROWS_MAX};

/// What a running sequence has in the step.
#[derive(Clone, Copy, Default)]
pub(crate) struct SlicePlan {
    /// The tokens of its turn; zero if it has none.
    pub turn: u32,
    /// The length of its slice, once that is planned.
    pub n_tokens: u32,
    /// How many of its tokens are drafts.
    pub n_drafts: u32,
}

/// What a step has before chunks are added.
#[derive(Clone, Copy, Default)]
pub(crate) struct DecodingRows {
    pub size: StepSize,
    /// Whether some running sequence decodes at a pace that chunks may not slow down.
    pub is_paced: bool,
    /// How far the first running sequence with a chunk is computed.
    pub first_chunk: Option<u32>,
    /// The computed positions of all running sequences.
    pub n_positions: u64,
}

/// The rest of a step.
#[derive(Clone, Copy, Default)]
pub(crate) struct StepBudget {
    pub n_tokens: u32,
    /// Rows that may still be scored.
    pub n_scores: u32,
    /// Bytes of the frame for requests that start.
    pub start_bytes: usize,
    /// A sequence was preempted or got no blocks: a newly admitted one would soon be preempted.
    pub short: bool,
}

/// The step that is being planned; between steps it has no meaning. Its memory is reused.
pub(crate) struct StepPlan {
    /// One for each running sequence, in their order.
    slices: Vec<SlicePlan>,
    candidates: Vec<TurnCandidate>,
    pub rule: TurnRule,
    pub left: StepBudget,
    /// Whether the step has fewer tokens than it may have, so that it ends in time.
    pub is_short_of_time: bool,
}

impl StepPlan {
    pub fn new(running_max: u32) -> StepPlan {
        StepPlan {
            slices: Vec::with_capacity(running_max as usize),
            candidates: Vec::with_capacity(running_max as usize),
            rule: TurnRule::default(),
            left: StepBudget::default(),
            is_short_of_time: false,
        }
    }

    /// Gives turns in this step to sequences that decode, and counts their tokens.
    pub fn give_turns(&mut self, running: &[SequenceIdx], sequences: &SequenceSlab, pools: &BlockPools) -> u32 {
        self.slices.clear();
        if self.rule.steps_per_turn == 1 {
            // No sequence waits for another's turn.
            let turns = running.iter().map(|&idx| self.rule.n_tokens(&sequences[idx]));
            self.slices.extend(turns.map(|turn| SlicePlan { turn, ..SlicePlan::default() }));
            return self.slices.iter().map(|slice| slice.turn).sum();
        }
        self.slices.resize(running.len(), SlicePlan::default());
        choose_turns(&mut self.candidates, &self.rule, running, sequences, pools);
        for turn in &self.candidates {
            self.slices[turn.at].turn = turn.n_tokens;
        }
        self.candidates.iter().map(|turn| turn.n_tokens).sum()
    }

    /// Adds drafts to the turns. Returns how many, which leaves at least half of the tokens that are not needed for
    /// turns to chunks.
    pub fn give_drafts(&mut self, running: &[SequenceIdx], sequences: &SequenceSlab, config: &Config) -> u32 {
        if config.drafting == DraftPolicy::Off {
            return 0;
        }
        let n_spare = (config.batch_tokens_max - running.len() as u32) / 2;
        let n_all = DRAFT_ROWS_MAX.min(n_spare);
        let slice_max = config.slice_max() - 1;
        let mut n_left = n_all;
        for (slice, &idx) in self.slices.iter_mut().zip(running) {
            slice.n_drafts = sequences[idx].n_drafts_behind(slice.turn).min(n_left).min(slice_max);
            slice.turn += slice.n_drafts;
            n_left -= slice.n_drafts;
        }
        n_all - n_left
    }

    /// Returns what is planned besides chunks.
    pub fn decoding(&self, running: &[SequenceIdx], sequences: &SequenceSlab) -> DecodingRows {
        let mut found = DecodingRows::default();
        for (slice, &idx) in self.slices.iter().zip(running) {
            let sequence = &sequences[idx];
            let n_computed = sequence.progress().n_computed;
            found.n_positions += u64::from(n_computed);
            if sequence.is_chunk() {
                found.first_chunk.get_or_insert(n_computed);
            } else {
                found.size.add(n_computed, slice.turn);
                found.is_paced = found.is_paced || sequence.is_paced();
            }
        }
        found
    }

    /// Nothing is taken of the step's `n_tokens` and other limits yet, except the rows of drafts.
    pub fn fill_budget(&mut self, config: &Config, n_tokens: u32, n_drafts: u32) {
        let start_bytes = config.starts_bytes_max;
        self.left = StepBudget { n_tokens, n_scores: SCORED_ROWS_MAX - n_drafts, start_bytes, short: false };
    }

    #[inline]
    pub fn slice(&self, at: usize) -> SlicePlan {
        self.slices[at]
    }

    /// The running sequence `at` goes on without drafts.
    pub fn drop_drafts(&mut self, at: usize) {
        let slice = &mut self.slices[at];
        slice.turn -= core::mem::take(&mut slice.n_drafts);
    }

    /// The slice of the running sequence `at` gets `n_tokens`; `scores`: each is a row to score.
    #[inline]
    pub fn take_tokens(&mut self, at: usize, n_tokens: u32, scores: bool) {
        let slice = &mut self.slices[at];
        slice.n_tokens += n_tokens;
        slice.n_drafts = slice.n_drafts.min(slice.n_tokens);
        self.left.n_tokens -= n_tokens;
        self.left.n_scores -= if scores { n_tokens } else { 0 };
    }

    /// A sequence begins to run at this place.
    pub fn insert(&mut self, at: usize) {
        self.slices.insert(at, SlicePlan::default());
    }

    /// The sequence at this place runs no longer. Its tokens are free for others. Returns how many.
    pub fn remove(&mut self, at: usize) -> u32 {
        let n_tokens = self.slices.remove(at).n_tokens;
        self.left.n_tokens += n_tokens;
        n_tokens
    }

    pub fn has_slices(&self) -> bool {
        self.slices.iter().any(|slice| slice.n_tokens > 0)
    }

    pub fn slices(&self) -> &[SlicePlan] {
        &self.slices
    }

    /// The slices, to be taken as they are written.
    pub fn slices_mut(&mut self) -> &mut [SlicePlan] {
        &mut self.slices
    }
}
