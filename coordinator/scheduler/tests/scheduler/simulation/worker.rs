//! A stage of workers that runs steps faithfully and has no model: its "KV" of a position is which token of which log
//! it is.
//!
//! It knows what a real worker knows: starts, slices and their blocks, the rows from the stage before, and at the first
//! stage the tokens that the last has drawn. It reads every position of a slice's sequence through its block table; a
//! block that was shared, freed, named or written wrongly shows there.

use super::disk::{ReadDone, SimulatedDisk};
use super::reference::{draw, extend, root};
use super::rng::{Rng, mix};
use std::collections::{BTreeMap, BTreeSet};
use types::{
    BLOCK_TOKENS, BlockId, CacheGroup, DRAFT_ROWS_MAX, Epoch, Failure, FetchId, Request, RequestId, Slice, SliceDone,
    Step, StepDone, StepId, TierWork, Token, TokenOut, Want,
};

/// The content of one position of a layer's cache: all that its bits would depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub position: u32,
    /// The hash of the log up to and including this position.
    pub prefix: u64,
}

/// Output of a stage for each slice.
pub type Hidden = Vec<Rows>;

pub enum Rows {
    /// The log's hash at each of the slice's positions.
    Computed(Vec<u64>),
    /// The slice was planned behind a draw that did not come: nothing is computed.
    Void,
    Failed,
}

/// A token that no client may receive.
const VOID: TokenOut = TokenOut { token: 1 << 20, logprob: None, top: Vec::new() };

struct Held {
    request: Request,
    /// The step that started it.
    since: StepId,
    /// The log's hash at each position, as far as this stage knows it.
    prefixes: Vec<u64>,
    /// One table per cache group; entries behind a window stay and go stale.
    tables: Vec<Vec<BlockId>>,
    n_computed: Option<u32>,
    /// The last draw did not come: the log's last position is computed again, and slices behind it are void.
    is_late: bool,
    /// Whether its slice in the present step is void.
    is_void: bool,
    failed: bool,
    /// The guess of the last stage behind the log, which it has sent to the first.
    guess: Vec<Token>,
    /// The drafts of the last slice, whose outcome this stage does not know.
    n_unsettled: u32,
}

#[derive(Clone, Copy)]
pub struct Limits {
    pub batch_tokens_max: u32,
    pub chunk_tokens_max: u32,
    pub running_max: u32,
    /// Whether it clears released blocks, as when no sequences share blocks.
    pub clears: bool,
    /// How many of a hundred draws come late.
    pub late: u64,
    /// The most tokens that are guessed, and how many of a hundred guesses are right.
    pub guesses_max: u64,
    pub right: u64,
}

pub struct Worker {
    epoch: Epoch,
    n_steps: u64,
    limits: Limits,
    held: BTreeMap<RequestId, Held>,
    caches: Vec<Cache>,
    /// For each group, the blocks behind the windows of the last step's slices.
    passed: Vec<Vec<BlockId>>,
}

/// The layers of one cache group.
struct Cache {
    group: CacheGroup,
    blocks: Vec<BlockContent>,
    /// The blocks that have memory: those with the lowest ids.
    n_committed: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BlockContent {
    /// Of a recurrence: what all positions before the block's first have come to, as that position was computed.
    pub state: Option<Cell>,
    pub cells: [Option<Cell>; BLOCK_TOKENS as usize],
}

const EMPTY: BlockContent = BlockContent { state: None, cells: [None; BLOCK_TOKENS as usize] };

impl Worker {
    pub fn new(epoch: Epoch, groups: &[CacheGroup], n_blocks: &[u32], limits: Limits) -> Worker {
        let blocks = |n_blocks| vec![EMPTY; n_blocks as usize];
        let caches = groups
            .iter()
            .zip(n_blocks)
            .map(|(&group, &n)| Cache { group, blocks: blocks(n), n_committed: n as usize })
            .collect();
        let passed = vec![Vec::new(); groups.len()];
        Worker { epoch, n_steps: 0, limits, held: BTreeMap::new(), caches, passed }
    }

    pub fn n_held(&self) -> usize {
        self.held.len()
    }

    /// Whether the first stage has all tokens of a step: those of its starts, and those that steps before have drawn.
    pub fn is_ready(&self, step: &Step) -> bool {
        let starts = |id| step.starts.iter().any(|request| request.id == id);
        let knows = |slice: &Slice| {
            let held = &self.held[&slice.id];
            held.failed || held.is_behind(slice) || slice.first_drawn() as usize <= held.prefixes.len()
        };
        step.slices.iter().all(|slice| starts(slice.id) || knows(slice))
    }

    /// Runs a step on this stage's layers. The first stage has the rows from its logs, the others from the one before.
    pub fn run(&mut self, step: &Step, input: Option<&Hidden>, disk: &mut SimulatedDisk) -> Hidden {
        self.check_step(step);
        self.n_steps += 1;
        self.clear_passed();
        for id in &step.ends {
            let left = self.held.remove(id);
            self.clear(&left.unwrap_or_else(|| panic!("{id} ends and is not held")));
        }
        self.apply_tier(&step.tier, disk);
        for request in &step.starts {
            let replaced = self.held.insert(request.id, Held::new(request.clone(), step.id, self.caches.len()));
            replaced.iter().for_each(|held| self.clear(held));
        }
        assert!(self.held.len() as u32 <= self.limits.running_max, "a rank never holds more than may run");
        let mut blocks = step.blocks.iter().copied();
        for (i, slice) in step.slices.iter().enumerate() {
            self.go_on(slice, input.map(|hidden| &hidden[i]));
            self.take_blocks(slice, &mut blocks);
        }
        assert_eq!(blocks.next(), None, "every block belongs to a slice");
        if let Some(hidden) = input {
            step.slices.iter().zip(hidden).for_each(|(slice, rows)| self.receive(slice, rows));
        }
        // A layer writes the rows of all slices before any of them reads.
        step.slices.iter().for_each(|slice| self.write(slice));
        step.slices.iter().map(|slice| self.read(slice)).collect()
    }

    fn apply_tier(&self, work: &TierWork, disk: &mut SimulatedDisk) {
        for page in &work.stores {
            disk.store(page.key, self.caches[usize::from(page.key.group)].blocks[page.block.0 as usize]);
        }
        work.cancels.iter().for_each(|&id| disk.cancel(id));
        work.removals.iter().for_each(|key| disk.remove(key));
        work.fetches.iter().for_each(|fetch| disk.begin(fetch.clone()));
    }

    /// Reads some pages of a fetch into their blocks, whatever these hold. Returns the answer, if these were the last.
    pub fn read_pages(
        &mut self,
        disk: &mut SimulatedDisk,
        rng: &mut Rng,
        is_ready: impl Fn(FetchId) -> bool,
    ) -> Option<ReadDone> {
        disk.read(rng, is_ready, |group, block, content| {
            let cache = &mut self.caches[usize::from(group)];
            assert!(block < cache.n_committed, "a page is read into a block that has memory");
            cache.blocks[block] = content;
        })
    }

    /// Memory of the other blocks is given back: what they held is gone.
    pub fn set_memory(&mut self, n_blocks: &[u32]) {
        for (cache, &n) in self.caches.iter_mut().zip(n_blocks) {
            cache.n_committed = n as usize;
            cache.blocks[n as usize..].fill(EMPTY);
        }
    }

    fn clear_passed(&mut self) {
        for (cache, passed) in self.caches.iter_mut().zip(&mut self.passed) {
            passed.drain(..).for_each(|block| cache.blocks[block.0 as usize] = EMPTY);
        }
    }

    /// Clears all that a sequence held, except what it released before.
    fn clear(&mut self, left: &Held) {
        let n_computed = left.n_computed.unwrap_or(0);
        for (cache, table) in self.caches.iter_mut().zip(&left.tables).filter(|_| self.limits.clears) {
            let held = &table[(cache.group.n_passed(n_computed) as usize).min(table.len())..];
            let held = held.iter().filter(|block| **block != BlockId::NONE);
            held.for_each(|block| cache.blocks[block.0 as usize] = EMPTY);
        }
    }

    /// The answer to the step that this stage, the last, has just run.
    pub fn draw(&mut self, step: &Step) -> StepDone {
        let late = |slice: &Slice| mix(step.id.0 ^ mix(slice.id.0)) % 100 < self.limits.late;
        let limits = self.limits;
        let draw = |slice: &Slice| {
            let held = self.held.get_mut(&slice.id).expect("its slice has just run");
            let done = held.draw(slice, late(slice));
            held.guess_behind(done, limits)
        };
        StepDone { id: step.id, epoch: step.epoch, slices: step.slices.iter().map(draw).collect(), micros: 1 }
    }

    /// Passes the last stage's tokens to the first, and which draws are late. Ignores void tokens, and those of a
    /// sequence that has ended here.
    pub fn learn(&mut self, step: &Step, last: &Hidden, done: &StepDone) {
        let drawn = step.slices.iter().zip(&done.slices).zip(last).filter(|(_, rows)| !matches!(rows, Rows::Void));
        for ((slice, done), _) in drawn {
            let Some(held) = self.held.get_mut(&slice.id).filter(|held| held.since <= step.id) else { continue };
            held.failed |= done.failed.is_some();
            if slice.want == Want::Last && done.tokens.is_empty() && done.failed.is_none() {
                held.rewind(slice);
            }
            if slice.n_draft > 0 {
                held.prefixes.truncate(slice.first_drawn() as usize);
            }
            if held.prefixes.len() as u32 == slice.first_drawn() {
                done.tokens.iter().for_each(|drawn| held.push(drawn.token));
                held.settle_drafts();
                held.guess = held.guesses(done.n_guess, self.limits);
            }
        }
    }

    fn check_step(&self, step: &Step) {
        step.supported().unwrap();
        assert_eq!((step.epoch, step.id.0), (self.epoch, self.n_steps));
        assert!(step.n_tokens() as u32 <= self.limits.batch_tokens_max);
        assert!(step.n_drafts() as u32 <= DRAFT_ROWS_MAX);
        assert!(step.slices.len() as u32 <= self.limits.running_max);
        assert!(step.slices.iter().all(|slice| slice.range.len() as u32 <= self.limits.chunk_tokens_max));
        let with_slice: BTreeSet<_> = step.slices.iter().map(|slice| slice.id).collect();
        assert_eq!(with_slice.len(), step.slices.len(), "one slice of a sequence in a step");
        assert!(step.ends.iter().all(|id| !with_slice.contains(id)), "an ended sequence has no slice");
        assert!(step.starts.iter().all(|request| with_slice.contains(&request.id)), "a started sequence has a slice");
        let has_work = !step.ends.is_empty() || step.tier.is_urgent();
        assert!(!step.slices.is_empty() || has_work, "a step is not empty");
    }

    /// A slice begins where the one before has ended. Only behind a draw that did not come is a position computed
    /// again: the first and the last stage see which, those between receive the void slices.
    fn go_on(&mut self, slice: &Slice, input: Option<&Rows>) {
        let may_be_late = self.limits.late > 0 && slice.want == Want::Last && slice.range.len() == 1;
        let held = self.held.get_mut(&slice.id).expect("a slice of a sequence that started");
        assert!(!slice.range.is_empty());
        held.is_void = input.map_or(!held.failed && held.is_behind(slice), |rows| matches!(rows, Rows::Void));
        if held.is_void {
            return;
        }
        if let Some(n_computed) = held.n_computed.filter(|_| held.n_unsettled > 0) {
            let behind = n_computed.saturating_sub(slice.range.start);
            assert!(behind <= held.n_unsettled, "only drafts are computed again");
            held.prefixes.truncate(slice.range.start as usize);
            held.n_computed = Some(slice.range.start);
        }
        let is_again = |n_computed: u32| may_be_late && input.is_some() && n_computed == slice.range.start + 1;
        let follows = |n_computed| n_computed == slice.range.start || is_again(n_computed);
        assert!(held.n_computed.is_none_or(follows), "slices follow one another");
        let is_hit = held.n_computed.is_none() && slice.range.start > 0;
        assert!(!(is_hit && held.request.cache_bypass), "a request that must not read the cache has read it");
        held.n_computed = Some(slice.range.end);
        held.is_late = false;
        let n_draft = usize::from(slice.n_draft);
        held.n_unsettled = n_draft as u32;
        let knows = held.prefixes.len() as u32 == slice.first_drawn() && !held.failed && n_draft > 0;
        // The stages between learn the log's hashes from the rows.
        if knows && (input.is_none() || held.guess.len() >= n_draft) {
            assert!(n_draft <= held.guess.len(), "a slice has more drafts than were guessed");
            let drafts: Vec<Token> = held.guess.drain(..n_draft).collect();
            drafts.into_iter().for_each(|draft| held.push(draft));
        }
    }

    fn take_blocks(&mut self, slice: &Slice, blocks: &mut impl Iterator<Item = BlockId>) {
        let held = self.held.get_mut(&slice.id).expect("go_on has just found it");
        for ((cache, table), passed) in self.caches.iter().zip(&mut held.tables).zip(&mut self.passed) {
            let first = table.len() as u32;
            let n_missing = (cache.group.n_blocks(slice.range.end) as usize).saturating_sub(table.len());
            let new: Vec<BlockId> = blocks.by_ref().take(n_missing).collect();
            assert_eq!(new.len(), n_missing, "a block for every position");
            for (i, &block) in (first..).zip(&new) {
                let may_lack = cache.group.may_lack(i, &slice.range, slice.n_draft.into());
                assert!(block != BlockId::NONE || may_lack, "only a block that no query will read is NONE");
                let is_behind = i < cache.group.n_passed(slice.range.start);
                assert!(block == BlockId::NONE || !is_behind, "a block that no query will read is NONE");
            }
            let is_clean = |block: &BlockId| *block == BlockId::NONE || cache.blocks[block.0 as usize] == EMPTY;
            assert!(!self.limits.clears || new.iter().all(is_clean), "a new block has not been cleared");
            table.extend(new);
            if self.limits.clears {
                let behind = cache.group.n_passed(slice.range.start)..cache.group.n_passed(slice.range.end);
                let behind = &table[behind.start as usize..behind.end as usize];
                passed.extend(behind.iter().filter(|block| **block != BlockId::NONE));
            }
        }
    }

    /// Rows of the stage before: beyond the log that the start brought, nothing else is known of it.
    fn receive(&mut self, slice: &Slice, rows: &Rows) {
        let held = self.held.get_mut(&slice.id).expect("it was there when blocks were taken");
        held.failed |= matches!(rows, Rows::Failed);
        let Rows::Computed(rows) = rows else { return };
        for (position, &prefix) in slice.range.clone().zip(rows) {
            if held.prefixes.len() as u32 == position {
                held.prefixes.push(prefix);
            }
            assert_eq!(held.prefixes.get(position as usize), Some(&prefix), "stages agree on {}", slice.id);
        }
    }

    fn write(&mut self, slice: &Slice) {
        let held = &self.held[&slice.id];
        for position in slice.range.clone().filter(|_| !held.failed && !held.is_void) {
            let prefix = *held.prefixes.get(position as usize).expect("the token is in the log when its slice runs");
            for (cache, table) in self.caches.iter_mut().zip(&held.tables) {
                let block = table[(position / BLOCK_TOKENS) as usize];
                if block == BlockId::NONE {
                    assert!(cache.group.is_state(), "keys and values are written for every position");
                    continue;
                }
                let page = &mut cache.blocks[block.0 as usize];
                let cell = Some(Cell { position, prefix });
                page.cells[(position % BLOCK_TOKENS) as usize] = cell;
                if position.is_multiple_of(BLOCK_TOKENS) {
                    page.state = cell;
                }
            }
        }
    }

    fn read(&self, slice: &Slice) -> Rows {
        let held = &self.held[&slice.id];
        if held.failed {
            return Rows::Failed;
        }
        if held.is_void {
            return Rows::Void;
        }
        for (cache, table) in self.caches.iter().zip(&held.tables) {
            let cell = |position: u32| Cell { position, prefix: held.prefixes[position as usize] };
            let page = |position: u32| &cache.blocks[table[(position / BLOCK_TOKENS) as usize].0 as usize];
            let first = cache.group.first_read(slice.range.start);
            // A recurrence carries what it has from there on, with the state and all rows of the first one's block; the
            // others read everything, and the first query reads farthest back.
            let (first, end) = match cache.group.is_state() {
                true => (first / BLOCK_TOKENS * BLOCK_TOKENS, slice.range.start),
                false => (first, slice.range.end),
            };
            for position in first..end {
                let found = page(position).cells[(position % BLOCK_TOKENS) as usize];
                assert_eq!(found, Some(cell(position)), "{} reads another sequence's rows", slice.id);
            }
            if cache.group.is_state() && first < end {
                assert_eq!(
                    page(first).state,
                    Some(cell(first)),
                    "{} continues from another sequence's state",
                    slice.id
                );
            }
        }
        Rows::Computed(held.prefixes[slice.range.start as usize..slice.range.end as usize].to_vec())
    }
}

impl Held {
    fn new(request: Request, since: StepId, n_groups: usize) -> Held {
        let mut prefix = root(request.tenant);
        let log = request.prompt.iter().chain(&request.output);
        let prefixes = log.map(|&token| {
            prefix = extend(prefix, token);
            prefix
        });
        let tables = vec![Vec::new(); n_groups];
        let (n_computed, is_late, is_void, failed, n_unsettled) = (None, false, false, false, 0);
        let (prefixes, guess) = (prefixes.collect(), Vec::new());
        Held { prefixes, request, since, tables, n_computed, is_late, is_void, failed, guess, n_unsettled }
    }

    fn push(&mut self, token: Token) {
        self.prefixes.push(extend(*self.prefixes.last().expect("a log has tokens"), token));
    }

    /// The log is known again: what it holds of the drafts is computed.
    fn settle_drafts(&mut self) {
        if std::mem::take(&mut self.n_unsettled) > 0 {
            self.n_computed = Some(self.prefixes.len() as u32 - 1);
        }
    }

    /// The tokens behind the log, some of them wrong.
    fn guesses(&self, n: u16, limits: Limits) -> Vec<Token> {
        let mut before = *self.prefixes.last().expect("a log has tokens");
        let mut guess = |position: u32| {
            let is_right = mix(before) % 100 < limits.right;
            let token = draw(&self.request, position, before).filter(|_| is_right).unwrap_or(VOID.token);
            before = extend(before, token);
            token
        };
        (self.prefixes.len() as u32..).take(n.into()).map(&mut guess).collect()
    }

    /// On the last stage: guesses what follows, where something was drawn, and counts what was guessed before.
    fn guess_behind(&mut self, mut done: SliceDone, limits: Limits) -> SliceDone {
        if limits.guesses_max == 0 || done.tokens.is_empty() || self.is_void {
            return done;
        }
        let last = *self.prefixes.last().expect("a log has tokens");
        done.n_guess = (mix(!last) % (limits.guesses_max + 1)) as u16;
        done.n_hit = (done.tokens.len() - 1) as u16;
        self.guess = self.guesses(done.n_guess, limits);
        done
    }

    /// Whether the slice was planned behind a draw that did not come.
    fn is_behind(&self, slice: &Slice) -> bool {
        self.is_late && self.n_computed.is_some_and(|n_computed| n_computed < slice.range.start)
    }

    /// The draw at the end of the slice has not come: its last position is computed again.
    fn rewind(&mut self, slice: &Slice) {
        self.n_computed = Some(slice.range.end - 1);
        self.is_late = true;
    }

    fn draw(&mut self, slice: &Slice, is_late: bool) -> SliceDone {
        if self.is_void {
            // A token from nothing, or a failure: a device may return either.
            return match slice.range.end % 3 {
                0 => SliceDone { failed: Some(Failure::Computation), ..SliceDone::default() },
                1 => SliceDone { tokens: vec![VOID], ..SliceDone::default() },
                _ => SliceDone::default(),
            };
        }
        if self.failed {
            return SliceDone { tokens: Vec::new(), failed: Some(Failure::Computation), ..SliceDone::default() };
        }
        let n_log = self.prefixes.len() as u32;
        if slice.want == Want::Nothing {
            assert!(slice.range.end < n_log, "the last position of the log is requested");
            return SliceDone::default();
        }
        assert_eq!((slice.want, slice.range.end), (Want::Last, n_log), "a draw is at the end of the log");
        if slice.n_draft > 0 {
            return self.verify(slice);
        }
        if is_late {
            self.rewind(slice);
            return SliceDone::default();
        }
        let before = *self.prefixes.last().expect("a log has tokens");
        let Some(token) = draw(&self.request, slice.range.end, before) else {
            self.failed = true;
            return SliceDone { tokens: Vec::new(), failed: Some(Failure::Computation), ..SliceDone::default() };
        };
        self.prefixes.push(extend(before, token));
        SliceDone { tokens: vec![TokenOut { token, ..TokenOut::default() }], failed: None, ..SliceDone::default() }
    }

    /// Draws behind each draft, as long as drafts are what is drawn. A draw that fails behind one comes again alone.
    fn verify(&mut self, slice: &Slice) -> SliceDone {
        let drafts = self.prefixes.split_off(slice.first_drawn() as usize);
        let mut done = SliceDone::default();
        for at in 0..=drafts.len() {
            let before = *self.prefixes.last().expect("a log has tokens");
            let Some(token) = draw(&self.request, slice.first_drawn() + at as u32, before) else { break };
            self.push(token);
            done.tokens.push(TokenOut { token, ..TokenOut::default() });
            if drafts.get(at) != self.prefixes.last() {
                break;
            }
        }
        self.failed = done.tokens.is_empty();
        done.failed = self.failed.then_some(Failure::Computation);
        self.settle_drafts();
        done
    }
}
