//! A worker that runs steps faithfully and has no model: its "KV" of a position is which token of which log it is.
//!
//! It knows what a real worker knows: starts, slices and their blocks. Before it draws it reads every position of the
//! slice's sequence through its block table; a block that was shared, freed, named or written wrongly shows there.

use crate::reference::{draw, extend, root};
use std::collections::{BTreeMap, BTreeSet};
use types::cache::blocks_for;
use types::{BLOCK_TOKENS, BlockId, Epoch, Request, RequestId, Slice, SliceDone, Step, StepDone, TokenOut, Want};

/// What one position of a layer's cache holds: all that its bits would depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cell {
    position: u32,
    /// Of the log up to and with this position.
    prefix: u64,
}

struct Held {
    request: Request,
    /// Of the log up to and with each position; as long as the log.
    prefixes: Vec<u64>,
    table: Vec<BlockId>,
    n_computed: Option<u32>,
    failed: bool,
}

pub struct Limits {
    pub batch_tokens_max: u32,
    pub chunk_tokens_max: u32,
    pub running_max: u32,
}

pub struct Worker {
    epoch: Epoch,
    n_steps: u64,
    limits: Limits,
    held: BTreeMap<RequestId, Held>,
    cache: Vec<[Option<Cell>; BLOCK_TOKENS as usize]>,
}

impl Worker {
    pub fn new(epoch: Epoch, n_blocks: u32, limits: Limits) -> Worker {
        let cache = vec![[None; BLOCK_TOKENS as usize]; n_blocks as usize];
        Worker { epoch, n_steps: 0, limits, held: BTreeMap::new(), cache }
    }

    pub fn n_held(&self) -> usize {
        self.held.len()
    }

    pub fn run(&mut self, step: &Step) -> StepDone {
        self.check_step(step);
        self.n_steps += 1;
        for id in &step.ends {
            assert!(self.held.remove(id).is_some(), "{id} ends and is not held");
        }
        for request in &step.starts {
            self.held.insert(request.id, Held::new(request.clone()));
        }
        assert!(self.held.len() as u32 <= self.limits.running_max, "a rank never holds more than may run");
        let mut blocks = step.blocks.iter().copied();
        step.slices.iter().for_each(|slice| self.take_blocks(slice, &mut blocks));
        assert_eq!(blocks.next(), None, "every block belongs to a slice");
        // A layer writes the rows of all slices before any of them reads.
        step.slices.iter().for_each(|slice| self.write(slice));
        let slices = step.slices.iter().map(|slice| self.read_and_draw(slice)).collect();
        StepDone { id: step.id, epoch: step.epoch, slices, micros: 1 }
    }

    fn check_step(&self, step: &Step) {
        step.supported().unwrap();
        assert_eq!((step.epoch, step.id.0), (self.epoch, self.n_steps));
        assert!(step.n_tokens() as u32 <= self.limits.batch_tokens_max);
        assert!(step.slices.len() as u32 <= self.limits.running_max);
        assert!(step.slices.iter().all(|slice| slice.range.len() as u32 <= self.limits.chunk_tokens_max));
        let with_slice: BTreeSet<_> = step.slices.iter().map(|slice| slice.id).collect();
        assert_eq!(with_slice.len(), step.slices.len(), "one slice of a sequence in a step");
        assert!(step.ends.iter().all(|id| !with_slice.contains(id)), "who ends has no slice any more");
        assert!(step.starts.iter().all(|request| with_slice.contains(&request.id)), "who starts has a slice");
        assert!(!step.slices.is_empty() || !step.ends.is_empty(), "a step says something");
    }

    fn take_blocks(&mut self, slice: &Slice, blocks: &mut impl Iterator<Item = BlockId>) {
        let held = self.held.get_mut(&slice.id).expect("a slice of a sequence that started");
        assert!(!slice.range.is_empty());
        assert!(held.n_computed.is_none_or(|n_computed| n_computed == slice.range.start), "slices follow one another");
        let is_hit = held.n_computed.is_none() && slice.range.start > 0;
        assert!(!(is_hit && held.request.cache_bypass), "a request that must not read the cache has read it");
        held.n_computed = Some(slice.range.end);
        while (held.table.len() as u32) < blocks_for(slice.range.end) {
            held.table.push(blocks.next().expect("a block for every position"));
        }
    }

    fn write(&mut self, slice: &Slice) {
        let held = &self.held[&slice.id];
        for position in slice.range.clone().filter(|_| !held.failed) {
            let prefix = *held.prefixes.get(position as usize).expect("the token is in the log when its slice runs");
            let block = &mut self.cache[held.table[(position / BLOCK_TOKENS) as usize].0 as usize];
            block[(position % BLOCK_TOKENS) as usize] = Some(Cell { position, prefix });
        }
    }

    fn read_and_draw(&mut self, slice: &Slice) -> SliceDone {
        let held = self.held.get_mut(&slice.id).expect("it was there when blocks were taken");
        if held.failed {
            return SliceDone { tokens: Vec::new(), failed: true, ..SliceDone::default() };
        }
        for position in 0..slice.range.end {
            let block = &self.cache[held.table[(position / BLOCK_TOKENS) as usize].0 as usize];
            let expected = Cell { position, prefix: held.prefixes[position as usize] };
            let found = block[(position % BLOCK_TOKENS) as usize];
            assert_eq!(found, Some(expected), "{} reads what is not its own", slice.id);
        }
        held.draw(slice)
    }
}

impl Held {
    fn new(request: Request) -> Held {
        let mut prefix = root(request.tenant);
        let log = request.prompt.iter().chain(&request.output);
        let prefixes = log.map(|&token| {
            prefix = extend(prefix, token);
            prefix
        });
        Held { prefixes: prefixes.collect(), request, table: Vec::new(), n_computed: None, failed: false }
    }

    fn draw(&mut self, slice: &Slice) -> SliceDone {
        let n_log = self.prefixes.len() as u32;
        if slice.want == Want::Nothing {
            assert!(slice.range.end < n_log, "the last position of a log is wanted");
            return SliceDone::default();
        }
        assert_eq!((slice.want, slice.range.end), (Want::Last, n_log), "a draw stands at the end of the log");
        let before = *self.prefixes.last().expect("a log has tokens");
        let Some(token) = draw(&self.request, slice.range.end, before) else {
            self.failed = true;
            return SliceDone { tokens: Vec::new(), failed: true, ..SliceDone::default() };
        };
        self.prefixes.push(extend(before, token));
        SliceDone { tokens: vec![TokenOut { token, ..TokenOut::default() }], failed: false, ..SliceDone::default() }
    }
}
