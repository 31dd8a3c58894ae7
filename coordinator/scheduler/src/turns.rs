//! Which decoding sequences are in a step. With several stages, as many steps run at once, and a sequence has one
//! position at a time: so they are spread evenly over the steps, and each has its turn in every `steps_per_turn`-th.
//!
//! ```text
//! five sequences, two stages:  a b c | d e | a b c | d e | ..    stage 1 draws for d e while stage 0 runs a b c
//! ```
//!
//! No sequence is bound to a group. The one that has waited longest goes first and a step takes no more than its share,
//! so groups arise, and even out again when sequences come and go. With one stage every step is every sequence's turn.

use crate::scheduler::Scheduler;

/// A sequence that is a candidate for a turn; the lowest goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TurnCandidate {
    /// It needs a block, there is none, and no later running sequence could be preempted. Its turn would be wasted, so
    /// others go first; otherwise all could wait for blocks that only others can release.
    is_stuck: bool,
    n_slices_in_flight: u32,
    last_step: u64,
    /// Its place among the running: the order of the keys.
    at: usize,
    n_tokens: u32,
}

impl Scheduler {
    /// The number of steps in which each sequence has one turn: one per stage, as far as steps may be in flight.
    pub(crate) fn steps_per_turn(&self) -> u32 {
        self.config.n_stages.min(self.n_steps_allowed())
    }

    /// Gives turns in this step to sequences that decode, and counts their tokens. A token that is being drawn can be
    /// computed `distance` steps behind its draw.
    pub(crate) fn give_turns(&mut self, distance: u32) -> u32 {
        if self.steps_per_turn() == 1 { self.give_all_a_turn(distance) } else { self.give_some_a_turn(distance) }
    }

    /// With one stage no sequence waits for another's turn.
    fn give_all_a_turn(&mut self, distance: u32) -> u32 {
        let (ahead_max, n_steps) = (self.ahead_max, self.n_steps);
        let mut n_given = 0;
        for &idx in &self.running {
            let sequence = &mut self.sequences[idx];
            sequence.turn = sequence.turn_tokens(ahead_max, n_steps, distance);
            n_given += sequence.turn;
        }
        n_given
    }

    fn give_some_a_turn(&mut self, distance: u32) -> u32 {
        let (ahead_max, n_steps) = (self.ahead_max, self.n_steps);
        let mut n_decoding = 0;
        self.turns.clear();
        for (at, &idx) in self.running.iter().enumerate() {
            self.sequences[idx].turn = 0;
            let sequence = &self.sequences[idx];
            n_decoding += u32::from(sequence.is_decoding());
            let n_tokens = sequence.turn_tokens(ahead_max, n_steps, distance);
            if n_tokens > 0 {
                let end = sequence.n_computed + n_tokens;
                let is_stuck = at + 1 == self.running.len() && !self.has_blocks(idx, end);
                let (n_slices_in_flight, last_step) = (sequence.n_slices_in_flight, sequence.last_step);
                self.turns.push(TurnCandidate { is_stuck, n_slices_in_flight, last_step, at, n_tokens });
            }
        }
        let n_given = self.n_turns_of_step(n_decoding) as usize;
        if n_given < self.turns.len() {
            self.turns.select_nth_unstable(n_given);
            self.turns.truncate(n_given);
        }
        for turn in &self.turns {
            self.sequences[self.running[turn.at]].turn = turn.n_tokens;
        }
        self.turns.iter().map(|turn| turn.n_tokens).sum()
    }

    /// This step's share: any `steps_per_turn` steps together have all of them, and two steps differ by one at most.
    fn n_turns_of_step(&self, n_decoding: u32) -> u32 {
        let n_turns = self.steps_per_turn();
        let has_one_more = self.n_steps % u64::from(n_turns) < u64::from(n_decoding % n_turns);
        (n_decoding / n_turns + u32::from(has_one_more)).max(1)
    }
}
