//! A sequence: its log, how far it is computed and planned, and which blocks it holds.

use crate::block_names::BlockNames;
use crate::config::Config;
use crate::drafts::Guesses;
use crate::progress::SequenceProgress;
use crate::queue_key::QueueKey;
use crate::sequence_index::Awaited;
use crate::table::BlockTable;
use crate::tenants::TenantIdx;
use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;
use types::cache::blocks_for;
use types::{
    BLOCK_TOKENS, BlockHash, BlockId, CacheGroup, Goal, PrefixReuse, Priority, Request, RequestId, Token, Want,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SequenceState {
    Waiting,
    Running,
    /// Ended, with slices in flight that still write its blocks.
    Ending,
}

/// The tokens of a log.
#[derive(Clone, Copy)]
#[repr(C)]
struct LogLength {
    n_known: u32,
    n_prompt: u32,
    /// The log never grows beyond this: its whole length, or what the ranks have room for.
    max: u32,
    /// The longest log that the request may reach.
    whole: u32,
}

/// What the prefix cache has for a sequence.
#[derive(Clone, Copy, Default)]
pub(crate) struct FoundPrefix {
    /// The blocks at the front of its log that full groups knew when it was last looked up.
    pub n_branch: u32,
    /// The tokens that it began behind when it was first admitted.
    pub n_cached: u32,
    /// Why there were no more.
    pub reuse: PrefixReuse,
    /// The tokens that the pools had before it waited for the tier.
    n_before_tier: Option<u32>,
    /// Whether the tier was read for it since it last began to wait.
    pub is_tier_read: bool,
    /// The blocks at the front of its log that pools and tier had then.
    pub n_in_tier: u32,
}

impl FoundPrefix {
    /// It waits for the tier. The pools have `n_tokens` of its log.
    pub fn await_tier(&mut self, n_tokens: u32) {
        self.n_before_tier.get_or_insert(n_tokens);
    }

    /// It begins to wait: what the tier has is not known.
    pub fn forget_tier(&mut self) {
        (self.n_before_tier, self.is_tier_read, self.n_in_tier) = (None, false, 0);
    }
}

/// A step visits all running sequences, several times. The fields that it reads stand together at the front, in this
/// order; the others are behind pointers.
#[repr(C, align(64))]
pub(crate) struct Sequence {
    length: LogLength,
    pub guesses: Guesses,
    pub tenant: TenantIdx,
    progress: SequenceProgress,
    goal: Goal,
    state: SequenceState,
    /// Whether some token may end it before its log is full.
    has_stops: bool,
    /// Whether the ranks hold it: a step has carried its start and none its end.
    held: bool,
    /// Whether it was ever admitted.
    admitted: bool,
    /// The weights of the lost steps that it was in since its last token.
    suspicion: u32,
    pub id: RequestId,
    pub found: FoundPrefix,
    /// Its output grows: `prompt ++ output` is the log.
    pub request: Box<Request>,
    /// One table per cache group. All have equally many entries.
    pub tables: Vec<BlockTable>,
    names: BlockNames,
    pub key: QueueKey,
    pub awaited: Option<Awaited>,
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
        let n_known = request.n_tokens() as u32;
        let n_prompt = request.prompt.len() as u32;
        Sequence {
            length: LogLength { n_known, n_prompt, max: length_whole, whole: length_whole },
            guesses: Guesses::default(),
            tenant,
            progress: SequenceProgress::default(),
            goal: request.goal,
            state: SequenceState::Waiting,
            has_stops: !request.sampling.stop.is_empty(),
            held: false,
            admitted: false,
            suspicion: 0,
            id: request.id,
            found: FoundPrefix::default(),
            request: Box::new(request),
            tables: vec![BlockTable::default(); n_groups],
            names: BlockNames::new(root),
            key,
            awaited: None,
            rank: 0,
        }
    }

    /// How far it is computed.
    #[inline]
    pub fn progress(&self) -> &SequenceProgress {
        &self.progress
    }

    #[inline]
    pub fn state(&self) -> SequenceState {
        self.state
    }

    /// Whether the ranks hold it.
    pub fn is_held(&self) -> bool {
        self.held
    }

    /// Whether its tokens should come at an even pace: its priority is not later than the usual one.
    pub fn is_paced(&self) -> bool {
        self.request.priority <= Priority::default()
    }

    /// Whether it was ever admitted.
    pub fn was_admitted(&self) -> bool {
        self.admitted
    }

    /// It begins to run behind `n_hits` blocks that others have computed. Returns whether it never ran before.
    ///
    /// `[0, n_hits blocks) computed by others · the rest is computed in slices of at most chunk_max`
    pub fn start(&mut self, generation: u64, n_hits: u32, config: &Config) -> bool {
        let n_computed = n_hits * BLOCK_TOKENS;
        // A prompt is cut for all stages, so that it keeps them busy and none has the whole of it at once.
        let share = (self.n_known() - n_computed).div_ceil(config.n_stages);
        self.progress.n_computed = n_computed;
        self.progress.n_sure = n_computed;
        self.progress.generation = generation;
        self.progress.chunk_max = match config.keeps_nothing() {
            true => u32::MAX,
            false => share.max(config.chunk_tokens_min).min(config.chunk_tokens_max),
        };
        self.state = SequenceState::Running;
        self.held = true;
        self.awaited = None;
        let is_first = !core::mem::replace(&mut self.admitted, true);
        if is_first {
            self.found.n_cached = n_computed;
            self.found.reuse.fetched = self.found.n_before_tier.map_or(0, |n| n_computed.saturating_sub(n));
        }
        is_first
    }

    /// Its next slice has `n_tokens` and may draw `draws_max`. Returns the slice's positions.
    #[inline]
    pub fn add_slice(&mut self, step: u64, n_tokens: u32, draws_max: u32) -> Range<u32> {
        self.progress.add_slice(step, n_tokens, draws_max)
    }

    /// Appends the entries of its tables that the ranks lack.
    #[inline]
    pub fn send_entries(&mut self, out: &mut Vec<BlockId>) {
        let SequenceProgress { n_sent, n_entries, .. } = self.progress;
        if n_sent < n_entries {
            self.tables.iter().for_each(|table| out.extend_from_slice(&table.blocks[n_sent as usize..]));
            self.progress.n_sent = n_entries;
        }
    }

    /// A slice has come back.
    #[inline]
    pub fn land_slice(&mut self) {
        self.progress.n_slices_in_flight -= 1;
    }

    /// Whether the slice that has come back was planned behind a draw that did not come.
    #[inline]
    pub fn drops_slice(&mut self) -> bool {
        self.progress.drops_slice()
    }

    /// Nothing more is planned for it. Returns its state before.
    pub fn end(&mut self) -> SequenceState {
        core::mem::replace(&mut self.state, SequenceState::Ending)
    }

    /// Whether it was in a lost step and has got no token since: it may be what broke the ranks.
    #[inline]
    pub fn is_suspect(&self) -> bool {
        self.suspicion > 0
    }

    /// The weights of the lost steps that it was in since its last token.
    pub fn suspicion(&self) -> u32 {
        self.suspicion
    }

    /// It was in a lost step of this weight. Returns whether that makes it a suspect.
    pub fn accuse(&mut self, weight: u32) -> bool {
        let was_suspect = self.is_suspect();
        self.suspicion += weight;
        self.is_suspect() && !was_suspect
    }

    /// Returns whether it was a suspect.
    #[inline]
    pub fn clear_suspicion(&mut self) -> bool {
        core::mem::take(&mut self.suspicion) > 0
    }

    /// Whether it has no output and never ran, here or elsewhere: no client has part of its answer.
    pub fn is_untouched(&self) -> bool {
        !self.admitted && self.n_output() == 0
    }

    /// The tokens of the log.
    #[inline]
    pub fn n_known(&self) -> u32 {
        self.length.n_known
    }

    /// The ranks hold only `room` tokens of a log, so this one may not grow beyond.
    pub fn limit_length(&mut self, room: u32) {
        self.length.max = self.length.whole.min(room.saturating_add(undrawn(self.goal)));
    }

    /// Whether it could become longer with more ranks.
    #[inline]
    pub fn is_length_limited(&self) -> bool {
        self.length.max < self.length.whole
    }

    /// The log never grows beyond this.
    #[inline]
    pub fn length_max(&self) -> u32 {
        self.length.max
    }

    /// The tokens of its prompt.
    #[inline]
    pub fn n_prompt(&self) -> u32 {
        self.length.n_prompt
    }

    /// Tokens generated so far.
    #[inline]
    pub fn n_output(&self) -> u32 {
        self.length.n_known - self.length.n_prompt
    }

    /// The log grows by a token that a slice has drawn.
    #[inline]
    pub fn append(&mut self, token: Token) {
        self.length.n_known += 1;
        self.request.output.push(token);
    }

    /// A slice up to `end` has come back, and the log has taken `n_drawn` tokens of the `draws_max` that it might have
    /// drawn.
    #[inline]
    pub fn apply_returned_slice(&mut self, end: u32, draws_max: u32, n_drawn: u32) {
        self.progress.apply_returned_slice(end, draws_max, n_drawn);
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
        let n_ready = self.n_known() + self.progress.n_drawing.min(slices_ahead_max);
        n_ready.min(self.length.max - 1).saturating_sub(self.progress.n_computed)
    }

    /// The tokens of its next chunk.
    #[inline]
    pub fn chunk_tokens(&self, slices_ahead_max: u32) -> u32 {
        self.n_missing(slices_ahead_max).min(self.progress.chunk_max)
    }

    /// The end of its next slice, if that has `n_tokens`.
    #[inline]
    pub fn slice_end(&self, n_tokens: u32) -> u32 {
        self.progress.n_computed + n_tokens
    }

    /// Returns the drafts of its next slice, if that has `n_tokens` without them.
    #[inline]
    pub fn n_drafts_behind(&self, n_tokens: u32) -> u32 {
        // The slice is the log's last token, and nothing of it is in flight: the guesses stand behind that token.
        let is_settled = n_tokens == 1 && !self.awaits_draw();
        let n_fitting = (self.length.max - 1).saturating_sub(self.n_known());
        if is_settled { self.guesses.n_target().min(n_fitting) } else { 0 }
    }

    /// Whether its next slice is a chunk of a prefill: more of its log is missing than the last token.
    #[inline]
    pub fn is_chunk(&self) -> bool {
        self.n_known() > self.progress.n_computed + 1
    }

    /// Whether it draws in each of its steps, or will after the one that is missing or in flight. False once its last
    /// slice is in flight.
    #[inline]
    pub fn is_decoding(&self) -> bool {
        !self.is_chunk() && self.progress.n_computed < self.length.max - 1
    }

    /// No slice to come begins before this position. Even if all draws in flight come back without a token, only the
    /// log's last position is computed again.
    #[inline]
    pub fn earliest_start(&self) -> u32 {
        self.progress.n_computed.min(self.n_known() - 1)
    }

    /// Whether its next position is that of a token that a step in flight draws.
    #[inline]
    pub fn awaits_draw(&self) -> bool {
        self.progress.n_computed >= self.n_known()
    }

    /// The tokens of the turn that it could have in the next step, `distance` steps behind their draw; zero if none.
    #[inline]
    pub fn turn_tokens(&self, slices_ahead_max: u32, n_steps: u64, distance: u32) -> u32 {
        let is_near = || self.awaits_draw() && n_steps - self.progress.last_step < u64::from(distance);
        if self.is_chunk() || is_near() { 0 } else { self.n_missing(slices_ahead_max) }
    }

    /// The most tokens that a slice with this end may draw: it draws if it ends with the last token that is known or
    /// being drawn, or with its drafts behind that.
    #[inline]
    pub fn draws_max_at(&self, end: u32, n_drafts: u32) -> u32 {
        let draws = self.goal != Goal::Pool && end == self.n_known() + self.progress.n_drawing + n_drafts;
        if draws { 1 + n_drafts } else { 0 }
    }

    /// Whether a slice that begins at `n_computed` has rows to score: those that another token of the prompt follows.
    #[inline]
    pub fn has_rows_to_score(&self) -> bool {
        matches!(self.goal, Goal::Score { .. }) && self.progress.n_computed + 1 < self.length.n_prompt
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
        self.goal == Goal::Pool && self.progress.n_sure >= self.n_known()
    }

    /// Whether the step being planned carries its start.
    #[inline]
    pub fn is_starting(&self) -> bool {
        self.progress.n_sent == 0
    }

    /// The entries of each of its tables.
    #[inline]
    pub fn n_entries(&self) -> u32 {
        self.progress.n_entries
    }

    /// Its tables have grown to `n_entries`.
    #[inline]
    pub fn set_n_entries(&mut self, n_entries: u32) {
        debug_assert!(self.tables.iter().all(|table| table.blocks.len() as u32 == n_entries));
        self.progress.n_entries = n_entries;
    }

    /// Whether its tables are too short to have `n_tokens` positions computed.
    #[inline]
    pub fn lacks_blocks(&self, n_tokens: u32) -> bool {
        blocks_for(n_tokens) > self.progress.n_entries
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
        self.names.name(i, &self.request)
    }

    /// Whether its block `i` will be full and get a name by what it has yet to compute.
    #[inline]
    pub fn will_name(&self, i: u32) -> bool {
        let end = (i + 1) * BLOCK_TOKENS;
        !self.has_private_blocks() && self.progress.n_sure < end && end <= self.n_known()
    }

    /// The names of its first full blocks, as far as they are computed.
    pub fn hashes(&self) -> &[BlockHash] {
        self.names.known()
    }

    /// The names of the blocks that a query of this group behind its first `n_blocks` blocks reads. They are computed.
    pub fn hashes_read_behind(&self, group: CacheGroup, n_blocks: u32) -> &[BlockHash] {
        &self.hashes()[group.n_passed(n_blocks * BLOCK_TOKENS) as usize..n_blocks as usize]
    }

    /// Its first `n_full` blocks are full. Returns the name of the one that was the last before, if that is another.
    pub fn pass_full_blocks(&mut self, n_full: u32) -> Option<&BlockHash> {
        if self.progress.n_passing >= n_full {
            return None;
        }
        let n_before = core::mem::replace(&mut self.progress.n_passing, n_full);
        self.name_before(n_before)
    }

    /// Returns the name of its last full block, once.
    pub fn take_last_full(&mut self) -> Option<&BlockHash> {
        let n_before = core::mem::take(&mut self.progress.n_passing);
        self.name_before(n_before)
    }

    fn name_before(&self, n_blocks: u32) -> Option<&BlockHash> {
        n_blocks.checked_sub(1).and_then(|i| self.hashes().get(i as usize))
    }

    /// Allocates the memory of its whole life, so that its steps allocate none.
    pub fn reserve(&mut self) {
        let n_blocks_max = blocks_for(self.length.max - 1) as usize;
        for table in &mut self.tables {
            table.blocks.reserve_exact(n_blocks_max - table.blocks.len().min(n_blocks_max));
        }
        self.names.reserve(n_blocks_max);
        self.request.output.reserve_exact((self.length.max - self.n_known()) as usize);
    }

    /// Forgets everything planned: it waits and will begin again from its log, on ranks that do not hold it. Its tables
    /// are empty by now.
    pub fn rewind(&mut self) {
        debug_assert!(self.tables.iter().all(|table| table.blocks.is_empty() && table.n_passed == 0));
        self.state = SequenceState::Waiting;
        self.held = false;
        self.progress = SequenceProgress::default();
        self.found.forget_tier();
        self.guesses.clear();
    }
}
