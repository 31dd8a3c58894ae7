//! The tier of one stage: pages by name, with the content that their blocks had, and reads that go on beside the steps.
//! It outlives the workers.

use super::rng::Rng;
use super::worker::{BlockContent, Cell};
use std::collections::{BTreeMap, BTreeSet};
use types::{BLOCK_TOKENS, BlockHash, FetchId, PageFetch, PageKey};

#[derive(Default)]
pub struct SimulatedDisk {
    pages: BTreeMap<PageKey, StoredPage>,
    reads: Vec<PageRead>,
    /// The fetches that this stage has begun.
    begun: BTreeSet<FetchId>,
    /// The number of the step that its stage runs, counted over all epochs.
    step: u64,
    /// The last position of the block that each name stands for.
    ends: BTreeMap<BlockHash, Cell>,
    /// Names whose pages a failed request may have damaged, with the last step before the failure.
    damaged: BTreeMap<BlockHash, u64>,
}

struct StoredPage {
    content: BlockContent,
    /// The step that brought it.
    step: u64,
}

/// A fetch that this stage has not answered.
struct PageRead {
    fetch: PageFetch,
    n_read: usize,
    missing: Vec<u32>,
}

/// The answer of one stage to a fetch.
pub struct ReadDone {
    pub id: FetchId,
    pub missing: Vec<u32>,
}

impl SimulatedDisk {
    /// The empty disk of one more stage.
    pub fn beside(other: &SimulatedDisk) -> SimulatedDisk {
        SimulatedDisk { ends: other.ends.clone(), damaged: other.damaged.clone(), ..SimulatedDisk::default() }
    }

    /// What the name of a block stands for.
    pub fn add_name(&mut self, name: BlockHash, end: Cell) {
        let before = self.ends.insert(name, end);
        assert!(before.is_none_or(|before| before == end), "a name stands for one log");
    }

    /// The page with this name may be damaged in all steps up to this one.
    pub fn add_damage(&mut self, name: BlockHash, step: u64) {
        self.damaged.insert(name, step);
    }

    pub fn begin_step(&mut self, step: u64) {
        self.step = step;
    }

    /// The workers are gone, and with them what they read.
    pub fn lose_workers(&mut self) {
        self.reads.clear();
        self.begun.clear();
    }

    pub fn store(&mut self, key: PageKey, content: BlockContent) {
        let end = self.ends.get(&key.name).expect("a stored page has the name of some log's block");
        assert!(content.is_full_up_to(*end), "a page is full and final when it is stored");
        self.pages.insert(key, StoredPage { content, step: self.step });
    }

    pub fn remove(&mut self, key: &PageKey) {
        self.pages.remove(key);
    }

    pub fn begin(&mut self, fetch: PageFetch) {
        assert!(self.begun.insert(fetch.id), "a fetch has its own number");
        for page in &fetch.pages {
            let damaged = self.damaged.get(&page.key.name);
            let is_sound = |stored: &StoredPage| damaged.is_none_or(|last| stored.step > *last);
            assert!(self.pages.get(&page.key).is_none_or(is_sound), "a damaged page is removed before it is fetched");
        }
        self.reads.push(PageRead { fetch, n_read: 0, missing: Vec::new() });
    }

    pub fn cancel(&mut self, id: FetchId) {
        assert!(self.begun.contains(&id), "only a fetch that has begun is cancelled");
        self.reads.retain(|read| read.fetch.id != id);
    }

    /// Reads some pages of a fetch that `is_ready`. Returns the answer, if these were the last.
    pub fn read(
        &mut self,
        rng: &mut Rng,
        is_ready: impl Fn(FetchId) -> bool,
        mut write: impl FnMut(u8, usize, BlockContent),
    ) -> Option<ReadDone> {
        let ready: Vec<usize> = (0..self.reads.len()).filter(|&i| is_ready(self.reads[i].fetch.id)).collect();
        let nth = (!ready.is_empty()).then(|| rng.below(ready.len() as u64) as usize)?;
        let read = &mut self.reads[ready[nth]];
        let n_pages = read.fetch.pages.len();
        let until = (read.n_read + rng.between(1, 6) as usize).min(n_pages);
        for (i, page) in read.fetch.pages.iter().enumerate().take(until).skip(read.n_read) {
            match self.pages.get(&page.key) {
                Some(stored) => write(page.key.group, page.block.0 as usize, stored.content),
                None => read.missing.push(i as u32),
            }
        }
        read.n_read = until;
        let is_done = until == n_pages;
        is_done.then(|| self.reads.remove(ready[nth])).map(|read| ReadDone { id: read.fetch.id, missing: read.missing })
    }

    /// Loses a page, or all of them.
    pub fn lose_pages(&mut self, rng: &mut Rng, all: bool) {
        if all {
            return self.pages.clear();
        }
        let nth = rng.below(self.pages.len() as u64 + 1) as usize;
        let lost = self.pages.keys().nth(nth).copied();
        lost.iter().for_each(|key| self.remove(key));
    }

    pub fn keys(&self) -> impl Iterator<Item = &PageKey> {
        self.pages.keys()
    }

    pub fn has(&self, key: &PageKey) -> bool {
        self.pages.contains_key(key)
    }
}

impl BlockContent {
    /// Whether it has all positions of one block, of which this is the last.
    fn is_full_up_to(&self, end: Cell) -> bool {
        let first = end.position + 1 - BLOCK_TOKENS;
        let follows = |(position, cell): (u32, &Option<Cell>)| cell.is_some_and(|cell| cell.position == position);
        self.cells[BLOCK_TOKENS as usize - 1] == Some(end)
            && (first..).zip(&self.cells).all(follows)
            && self.state == self.cells[0]
    }
}
