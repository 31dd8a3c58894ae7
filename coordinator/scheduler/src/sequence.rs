//! A sequence: its log, how far it is computed and planned, and which blocks it holds.

use crate::drafting::UNTRIED;
use crate::table::BlockTable;
use crate::tenants::TenantIdx;
use crate::waiting::QueueKey;
use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;
use types::cache::blocks_for;
use types::{BLOCK_TOKENS, BlockHash, Goal, PrefixReuse, Request, RequestId, Token, Want};

pub(crate) type SequenceIdx = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SequenceState {
    Waiting,
    Running,
    /// Ended, with slices in flight that still write its blocks.
    Ending,
}

/// `[0, n_sure) computed · [n_sure, n_computed) in flight · [n_computed, n_known) to plan · n_drawing in flight`
///
/// A step visits all running sequences, several times. The fields that it reads stand together at the front, in this
/// order; the others are behind pointers.
#[repr(C, align(64))]
pub(crate) struct Sequence {
    /// The tokens of the log.
    n_known: u32,
    n_prompt: u32,
    /// The log never grows beyond this: its whole length, or what the ranks have room for.
    pub length_max: u32,
    /// Positions planned so far, or found in the prefix cache.
    pub n_computed: u32,
    /// The most tokens that slices in flight may draw.
    pub n_drawing: u32,
    /// The entries of each of its tables.
    n_entries: u32,
    /// The length of its slice in the step that is being planned, zero between steps.
    pub n_planned: u32,
    /// The longest slice since its last start.
    pub chunk_max: u32,
    pub n_slices_in_flight: u32,
    /// Positions that are computed for good: their slices have come back, and no slice will compute them again.
    pub n_sure: u32,
    /// The entries of each of its tables that the ranks have; zero until a step carries its start.
    pub n_sent: u32,
    /// The tokens of its turn in the step being planned; zero if it has none.
    pub turn: u32,
    /// How many of its planned tokens are drafts, while a step is planned.
    pub n_drafts: u32,
    /// The drafts that its next slice should have, as of its last answer.
    pub n_drafts_target: u32,
    /// The tokens that were guessed behind its log, as of its last answer.
    pub n_guess: u32,
    /// How probable it is that a guess holds, as far as guesses were tried.
    pub acceptance: u32,
    pub tenant: TenantIdx,
    goal: Goal,
    pub state: SequenceState,
    /// Whether some token may end it before its log is full.
    has_stops: bool,
    /// The step of its last slice since its last start.
    pub last_step: u64,
    /// A new number for each admission; zero while it waits. Results planned for another number are dropped.
    pub generation: u64,
    /// How many of its slices in flight, the oldest, were planned behind a draw that did not come.
    pub n_stale: u32,
    pub id: RequestId,
    pub n_cached: u32,
    pub reuse: PrefixReuse,
    /// The blocks at the front of its log that full groups knew when it was last admitted.
    pub n_branch: u32,
    /// Its full blocks, of which the last has a name until there is another.
    pub n_passing: u32,
    /// The longest log that the request may reach.
    length_whole: u32,
    /// The weights of the lost steps that it was in since its last token.
    pub suspicion: u32,
    /// Whether the ranks hold it: a step has carried its start and none its end.
    pub held: bool,
    /// Whether it was ever admitted.
    pub admitted: bool,
    /// Its output grows: `prompt ++ output` is the log.
    pub request: Box<Request>,
    /// One table per cache group. All have equally many entries.
    pub tables: Vec<BlockTable>,
    /// The hashes of the first full blocks of the log, each computed once; never more than the log has.
    pub hashes: Vec<BlockHash>,
    root: BlockHash,
    pub key: QueueKey,
    /// Its order among the running sequences of all tenants, as of the last change among them: the lowest is served
    /// first.
    pub rank: u64,
}

/// Tokens that count in a log's length and need no place: a pooled request draws none behind its prompt.
pub(crate) fn undrawn(goal: Goal) -> u32 {
    u32::from(goal == Goal::Pool)
}

impl Sequence {
    pub fn new(
        request: Request,
        tenant: TenantIdx,
        key: QueueKey,
        length_whole: u32,
        root: BlockHash,
        n_groups: usize,
    ) -> Sequence {
        Sequence {
            n_known: request.n_tokens() as u32,
            n_prompt: request.prompt.len() as u32,
            length_max: length_whole,
            n_computed: 0,
            n_drawing: 0,
            n_entries: 0,
            n_planned: 0,
            chunk_max: 0,
            n_slices_in_flight: 0,
            n_sure: 0,
            n_sent: 0,
            turn: 0,
            n_drafts: 0,
            n_drafts_target: 0,
            n_guess: 0,
            acceptance: UNTRIED,
            tenant,
            goal: request.goal,
            state: SequenceState::Waiting,
            has_stops: !request.sampling.stop.is_empty(),
            last_step: 0,
            generation: 0,
            n_stale: 0,
            id: request.id,
            n_cached: 0,
            reuse: PrefixReuse::default(),
            n_branch: 0,
            n_passing: 0,
            length_whole,
            suspicion: 0,
            held: false,
            admitted: false,
            request: Box::new(request),
            tables: vec![BlockTable::default(); n_groups],
            hashes: Vec::new(),
            root,
            key,
            rank: 0,
        }
    }

    /// Whether it was in a lost step and has got no token since: it may be what broke the ranks.
    #[inline]
    pub fn is_suspect(&self) -> bool {
        self.suspicion > 0
    }

    /// Whether it has no output and never ran, here or elsewhere: no client has part of its answer.
    pub fn is_untouched(&self) -> bool {
        !self.admitted && self.n_output() == 0
    }

    /// The tokens of the log.
    #[inline]
    pub fn n_known(&self) -> u32 {
        self.n_known
    }

    /// The ranks hold only `room` tokens of a log, so this one may not grow beyond.
    pub fn limit_length(&mut self, room: u32) {
        self.length_max = self.length_whole.min(room.saturating_add(undrawn(self.goal)));
    }

    /// Whether it could become longer with more ranks.
    #[inline]
    pub fn is_length_limited(&self) -> bool {
        self.length_max < self.length_whole
    }

    /// The tokens of its prompt.
    #[inline]
    pub fn n_prompt(&self) -> u32 {
        self.n_prompt
    }

    /// Tokens generated so far.
    #[inline]
    pub fn n_output(&self) -> u32 {
        self.n_known - self.n_prompt
    }

    /// The log grows by a token that a slice has drawn.
    #[inline]
    pub fn append(&mut self, token: Token) {
        self.n_known += 1;
        self.request.output.push(token);
    }

    /// A slice up to `end` has come back, and the log has taken `n_drawn` tokens of the `draws_max` that it might have
    /// drawn. If some are missing, the log's last position is computed again, and later slices in flight are stale.
    ///
    /// `[.., end - draws_max] known before · (end - draws_max, end) drafts`
    #[inline]
    pub fn apply_returned_slice(&mut self, end: u32, draws_max: u32, n_drawn: u32) {
        let n_lacking = draws_max - n_drawn;
        self.n_sure = end - n_lacking;
        self.n_drawing -= draws_max;
        if n_lacking > 0 {
            self.n_computed = self.n_sure;
            self.n_drawing = 0;
            self.n_stale = self.n_slices_in_flight;
        }
    }

    /// Whether it may stop at this token, the last of its log.
    #[inline]
    pub fn stops_at(&self, token: Token) -> bool {
        self.has_stops && {
            let sampling = &self.request.sampling;
            sampling.is_stop(token) && self.n_output() > sampling.tokens_min
        }
    }

    /// Positions that can be planned now and are not. The last token that a log can have is drawn and never computed.
    #[inline]
    pub fn n_missing(&self, slices_ahead_max: u32) -> u32 {
        let n_ready = self.n_known() + self.n_drawing.min(slices_ahead_max);
        n_ready.min(self.length_max - 1).saturating_sub(self.n_computed)
    }

    /// Whether its next slice is a chunk of a prefill: more of its log is missing than the last token.
    #[inline]
    pub fn is_chunk(&self) -> bool {
        self.n_known() > self.n_computed + 1
    }

    /// Whether it draws in each of its steps, or will after the one that is missing or in flight. False once its last
    /// slice is in flight.
    #[inline]
    pub fn is_decoding(&self) -> bool {
        !self.is_chunk() && self.n_computed < self.length_max - 1
    }

    /// No slice to come begins before this position. Even if all draws in flight come back without a token, only the
    /// log's last position is computed again.
    #[inline]
    pub fn earliest_start(&self) -> u32 {
        self.n_computed.min(self.n_known() - 1)
    }

    /// Whether its next position is that of a token that a step in flight draws.
    #[inline]
    pub fn awaits_draw(&self) -> bool {
        self.n_computed >= self.n_known()
    }

    /// The tokens of the turn that it could have in the next step, `distance` steps behind their draw; zero if none.
    #[inline]
    pub fn turn_tokens(&self, slices_ahead_max: u32, n_steps: u64, distance: u32) -> u32 {
        let is_near = || self.awaits_draw() && n_steps - self.last_step < u64::from(distance);
        if self.is_chunk() || is_near() { 0 } else { self.n_missing(slices_ahead_max) }
    }

    /// The most tokens that a slice with this end may draw: it draws if it ends with the last token that is known or
    /// being drawn, or with drafts behind that.
    #[inline]
    pub fn draws_max_at(&self, end: u32) -> u32 {
        let draws = self.goal != Goal::Pool && end == self.n_known() + self.n_drawing + self.n_drafts;
        if draws { 1 + self.n_drafts } else { 0 }
    }

    /// Whether a slice that begins at `n_computed` has rows to score: those that another token of the prompt follows.
    #[inline]
    pub fn has_rows_to_score(&self) -> bool {
        matches!(self.goal, Goal::Score { .. }) && self.n_computed + 1 < self.n_prompt
    }

    /// Returns the purpose of a slice that begins at `n_computed`.
    #[inline]
    pub fn want(&self, draws: bool) -> Want {
        match self.goal {
            Goal::Pool => Want::Pool,
            Goal::Score { top_n } if self.has_rows_to_score() => Want::All { top_n },
            Goal::Score { .. } | Goal::Generate if draws => Want::Last,
            Goal::Score { .. } | Goal::Generate => Want::Nothing,
        }
    }

    /// Whether it was pooled: all that it was for is done, and no token follows.
    #[inline]
    pub fn is_pooled(&self) -> bool {
        self.goal == Goal::Pool && self.n_sure >= self.n_known()
    }

    /// Whether the step being planned carries its start.
    #[inline]
    pub fn is_starting(&self) -> bool {
        self.n_sent == 0
    }

    /// The entries of each of its tables.
    #[inline]
    pub fn n_entries(&self) -> u32 {
        self.n_entries
    }

    /// Its tables have grown to `n_entries`.
    #[inline]
    pub fn set_n_entries(&mut self, n_entries: u32) {
        debug_assert!(self.tables.iter().all(|table| table.blocks.len() as u32 == n_entries));
        self.n_entries = n_entries;
    }

    /// Whether its tables are too short to have `n_tokens` positions computed.
    #[inline]
    pub fn lacks_blocks(&self, n_tokens: u32) -> bool {
        blocks_for(n_tokens) > self.n_entries
    }

    /// How many blocks it may take from the prefix cache: full ones, and at least one token is left to compute.
    pub fn n_sharable(&self) -> u32 {
        let needs_all = self.request.cache_bypass || self.has_private_blocks() || self.goal != Goal::Generate;
        if needs_all { 0 } else { (self.n_known() - 1) / BLOCK_TOKENS }
    }

    /// Whether its blocks get no names, so that no other request reads them.
    #[inline]
    pub fn has_private_blocks(&self) -> bool {
        self.request.cache_apart
    }

    /// The name of its block `i`, which is full.
    pub fn hash(&mut self, i: u32) -> BlockHash {
        while self.hashes.len() as u32 <= i {
            let parent = self.hashes.last().unwrap_or(&self.root);
            let first = self.hashes.len() * BLOCK_TOKENS as usize;
            let hash = parent.child(tokens(&self.request, first..first + BLOCK_TOKENS as usize));
            self.hashes.push(hash);
        }
        self.hashes[i as usize]
    }

    /// Allocates the memory of its whole life, so that its steps allocate none.
    pub fn reserve(&mut self) {
        let n_blocks_max = blocks_for(self.length_max - 1) as usize;
        for table in &mut self.tables {
            table.blocks.reserve_exact(n_blocks_max - table.blocks.len().min(n_blocks_max));
        }
        self.hashes.reserve_exact(n_blocks_max - self.hashes.len().min(n_blocks_max));
        self.request.output.reserve_exact((self.length_max - self.n_known()) as usize);
    }

    /// Forgets everything planned: it waits and will begin again from its log. Its tables are empty by now.
    pub fn rewind(&mut self) {
        debug_assert!(self.tables.iter().all(|table| table.blocks.is_empty() && table.n_passed == 0));
        self.state = SequenceState::Waiting;
        self.n_entries = 0;
        self.generation = 0;
        self.n_sure = 0;
        self.n_sent = 0;
        self.n_stale = 0;
        self.n_computed = 0;
        self.n_drawing = 0;
        self.n_slices_in_flight = 0;
        self.last_step = 0;
        self.n_planned = 0;
        self.turn = 0;
        self.n_drafts = 0;
        self.n_drafts_target = 0;
        self.n_guess = 0;
        self.n_passing = 0;
    }
}

/// The tokens at these positions: `[start, n_prompt) of the prompt · [n_prompt, end) of the output`.
fn tokens(request: &Request, positions: Range<usize>) -> impl Iterator<Item = Token> + '_ {
    let Request { prompt, output, .. } = request;
    let n_prompt = prompt.len();
    let of_prompt = &prompt[positions.start.min(n_prompt)..positions.end.min(n_prompt)];
    let of_output = &output[positions.start.saturating_sub(n_prompt)..positions.end.saturating_sub(n_prompt)];
    of_prompt.iter().chain(of_output).copied()
}

/// Sequences by index; an index is reused after its sequence is gone.
#[derive(Default)]
pub(crate) struct SequenceSlab {
    slots: Vec<Option<Sequence>>,
    vacant: Vec<SequenceIdx>,
}

impl SequenceSlab {
    pub fn insert(&mut self, sequence: Sequence) -> SequenceIdx {
        match self.vacant.pop() {
            Some(idx) => {
                self.slots[idx as usize] = Some(sequence);
                idx
            }
            None => {
                self.slots.push(Some(sequence));
                (self.slots.len() - 1) as SequenceIdx
            }
        }
    }

    pub fn remove(&mut self, idx: SequenceIdx) {
        debug_assert!(self.slots[idx as usize].is_some());
        self.slots[idx as usize] = None;
        self.vacant.push(idx);
    }

    /// The sequence that a slice was planned for, unless it has been dropped since.
    #[inline]
    pub fn of_generation(&mut self, idx: SequenceIdx, generation: u64) -> Option<&mut Sequence> {
        self.slots.get_mut(idx as usize)?.as_mut().filter(|sequence| sequence.generation == generation)
    }

    pub fn is_empty(&self) -> bool {
        self.vacant.len() == self.slots.len()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sequence> {
        self.slots.iter_mut().flatten()
    }

    pub fn iter(&self) -> impl Iterator<Item = (SequenceIdx, &Sequence)> + Clone {
        self.slots.iter().enumerate().filter_map(|(idx, slot)| Some((idx as SequenceIdx, slot.as_ref()?)))
    }
}

impl core::ops::Index<SequenceIdx> for SequenceSlab {
    type Output = Sequence;

    #[inline]
    fn index(&self, idx: SequenceIdx) -> &Sequence {
        self.slots[idx as usize].as_ref().expect("an index in use names a sequence")
    }
}

impl core::ops::IndexMut<SequenceIdx> for SequenceSlab {
    #[inline]
    fn index_mut(&mut self, idx: SequenceIdx) -> &mut Sequence {
        self.slots[idx as usize].as_mut().expect("an index in use names a sequence")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::Micros;

    /// Ten tokens are known, the slice ends with up to two drafts, and two more slices are in flight behind it.
    #[test]
    fn a_slice_is_settled_by_how_many_tokens_came_back() {
        // (drafts, tokens drawn, sure, computed, still being drawn, stale)
        let cases = [
            (0, 1, 10, 12, 2, 0),
            (0, 0, 9, 9, 0, 2),
            (2, 3, 12, 14, 2, 0),
            (2, 2, 11, 11, 0, 2),
            (2, 1, 10, 10, 0, 2),
            (2, 0, 9, 9, 0, 2),
        ];
        for (n_drafts, n_drawn, n_sure, n_computed, n_drawing, n_stale) in cases {
            let request = Request { prompt: vec![1; 10], ..Request::default() };
            let key = QueueKey::new(request.priority, Micros(0), 0, 0);
            let mut sequence = Sequence::new(request, 0, key, 100, BlockHash([0; 16]), 1);
            let (end, draws_max) = (10 + n_drafts, 1 + n_drafts);
            (sequence.n_computed, sequence.n_drawing, sequence.n_slices_in_flight) = (end + 2, draws_max + 2, 2);
            (0..n_drawn).for_each(|_| sequence.append(7));
            assert_eq!(sequence.earliest_start(), 9 + n_drawn);
            sequence.apply_returned_slice(end, draws_max, n_drawn);
            let Sequence { n_stale: stale, n_drawing: drawing, .. } = sequence;
            let counts = (sequence.n_sure, sequence.n_computed, drawing, stale);
            assert_eq!(counts, (n_sure, n_computed, n_drawing, n_stale), "{n_drafts} drafts, {n_drawn} drawn");
        }
    }
}
