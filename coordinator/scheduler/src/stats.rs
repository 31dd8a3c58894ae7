//! The scheduler's load and counters, for metrics and tests.

use core::ops::Deref;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    pub n_waiting: u32,
    pub n_running: u32,
    pub n_steps_in_flight: u32,
    pub waiting_tokens: u64,
    /// Summed over all cache groups, as are the next two.
    pub blocks_total: u32,
    /// Blocks of all pools that the ranks have memory for.
    pub blocks_committed: u32,
    /// Blocks that some sequence holds.
    pub blocks_used: u32,
    /// Blocks that no sequence holds and that still have a name.
    pub blocks_cached: u32,
    pub counters: Counters,
}

/// Counters since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub steps: u64,
    pub slices: u64,
    /// Steps whose duration was predicted and measured, and those of them whose prediction was within a fifth.
    pub steps_predicted: u64,
    pub steps_as_predicted: u64,
    /// Positions planned to be computed.
    pub tokens_computed: u64,
    /// Tokens that were sent to clients.
    pub tokens_drawn: u64,
    /// Tokens that came back for an ended sequence (planned past a stop, or cancelled) or behind a draw that did not
    /// come.
    pub tokens_discarded: u64,
    /// Tokens that came back for a preempted sequence; they are drawn again.
    pub tokens_redrawn: u64,
    /// Draws that came back without a token; they are planned again.
    pub draws_late: u64,
    /// Drafts in slices, and those of them that became tokens of their logs.
    pub drafts: u64,
    pub drafts_accepted: u64,
    pub slices_ahead: u64,
    /// Steps in which a sequence computes a token that one of the `n_stages - 1` steps before draws: then some stage
    /// has to wait, because fewer sequences decode than there are stages or they have just bunched.
    pub steps_early: u64,
    /// Steps in which prompts got fewer tokens than they have left, by what limited them: the time of a step, its
    /// tokens, and blocks.
    pub cut_by_time: u64,
    pub cut_by_tokens: u64,
    pub cut_by_blocks: u64,
    /// How often there was room in flight and nothing to plan, because all running sequences were in flight. Asking
    /// again before anything has changed does not count.
    pub starved: u64,
    pub admissions: u64,
    pub preemptions: u64,
    /// Sequences that lost their workers and wait again.
    pub requeued: u64,
    /// Positions that these had computed, and compute again.
    pub tokens_requeued: u64,
    pub prefix_hit_tokens: u64,
    /// How often a waiting sequence was held back because a running one computes the same prefix.
    pub prefixes_awaited: u64,
    /// Blocks that a running sequence released because they lay behind the window of their group.
    pub blocks_passed: u64,
    /// Pages of recurrent states that got a name, to be found by others.
    pub states_kept: u64,
    /// Fetches from the tier; those that would take longer than to compute; those that were given up as late.
    pub fetches: u64,
    pub fetches_refused: u64,
    pub fetches_late: u64,
    /// Pages that fetches have brought, and those that they have not found.
    pub pages_fetched: u64,
    pub pages_missing: u64,
    /// Blocks that lost their name because their room was needed.
    pub evictions: u64,
    pub running_peak: u32,
}

impl Deref for Stats {
    type Target = Counters;

    fn deref(&self) -> &Counters {
        &self.counters
    }
}
