//! The rows of one forward pass: which token stands at which position of which sequence, and where its KV lies.

use std::ops::Range;
use types::{BlockId, Token};

/// Built from a step and the sequences, once per step, in memory that is kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    pub tokens: Vec<Token>,
    /// Of each row, within its own sequence.
    pub positions: Vec<u32>,
    pub slices: Vec<BatchSlice>,
    /// One per cache group of the model.
    pub tables: Vec<BlockTables>,
    /// The rows whose logits are wanted, ascending.
    pub outputs: Vec<u32>,
    /// The hidden states of rows are wanted, whether or not their logits are.
    pub wants_hidden: bool,
    /// Rows whose token the device has drawn in the pass before, and nobody else knows yet: which of its draws.
    pub drawn: Vec<(u32, u32)>,
    /// The last rows, if so many, are of no slice: they make the batch as long as others were. Nothing of them is kept.
    pub n_padding: u32,
}

/// Consecutive rows of one sequence, at consecutive positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSlice {
    pub rows: Range<u32>,
    /// Position of the first row: `[0, start) is in the cache · rows are computed now`.
    pub start: u32,
}

/// The block tables of all slices, one after another. `blocks[bounds[i]..bounds[i + 1]]` is slice i's: entry j holds
/// positions `[j * BLOCK_TOKENS, (j + 1) * BLOCK_TOKENS)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockTables {
    pub blocks: Vec<BlockId>,
    pub bounds: Vec<u32>,
}

impl Default for BlockTables {
    fn default() -> BlockTables {
        BlockTables { blocks: Vec::new(), bounds: vec![0] }
    }
}

impl Batch {
    pub fn n_rows(&self) -> usize {
        self.tokens.len()
    }

    /// Whether the slices' rows follow each other and are all there are but padding: then no row has two writers.
    pub fn is_tiled(&self) -> bool {
        let next = self.slices.iter().try_fold(0, |at, slice| (slice.rows.start == at).then_some(slice.rows.end));
        next == Some(self.n_rows() as u32 - self.n_padding)
    }

    /// So many rows in all: any token, at any position, of nobody.
    pub fn pad(&mut self, n_rows: usize) {
        self.n_padding += n_rows.saturating_sub(self.n_rows()) as u32;
        self.tokens.resize(n_rows.max(self.tokens.len()), 0);
        self.positions.resize(n_rows.max(self.positions.len()), 0);
    }

    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slices.clear();
        self.outputs.clear();
        self.wants_hidden = false;
        self.n_padding = 0;
        self.drawn.clear();
        for table in &mut self.tables {
            table.blocks.clear();
            table.bounds.clear();
            table.bounds.push(0);
        }
    }
}

impl BlockTables {
    pub fn of(&self, slice: usize) -> &[BlockId] {
        &self.blocks[self.bounds[slice] as usize..self.bounds[slice + 1] as usize]
    }
}
