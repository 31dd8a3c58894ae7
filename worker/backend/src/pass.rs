//! What one forward pass computes, said once: which token stands at which position of which sequence, what is wanted
//! of it, and where its KV lies. Devices and models see a `Pass`; the memory that it shows is a `Batch`.

use std::ops::Range;
use types::{BlockId, Token, Want};

/// What a device and a model see of a step.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    pub rows: Rows<'a>,
    pub slices: &'a [PassSlice],
    pub tables: Tables<'a>,
}

/// One for each token of the pass.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    pub tokens: &'a [Token],
    /// Of each row, within its own sequence.
    pub positions: &'a [u32],
    /// Those whose logits are wanted, ascending.
    pub outputs: &'a [u32],
    /// Those whose token the device has drawn in the pass before, and nobody else knows yet: which of its draws.
    pub drawn: &'a [(u32, u32)],
    /// The last ones, if so many, are of no slice: they make the pass as long as others were. Nothing of them is kept.
    pub n_padding: u32,
}

/// Consecutive rows of one sequence, at consecutive positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassSlice {
    pub rows: Range<u32>,
    /// Their positions: `[0, range.start) is in the cache · range is computed now`.
    pub range: Range<u32>,
    pub want: Want,
}

/// The block tables of all cache groups.
#[derive(Clone, Copy, Debug)]
pub struct Tables<'a> {
    groups: &'a [BlockTables],
}

/// The block tables of all slices, one after another. `blocks[bounds[i]..bounds[i + 1]]` is slice i's: entry j holds
/// positions `[j * BLOCK_TOKENS, (j + 1) * BLOCK_TOKENS)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockTables {
    pub blocks: Vec<BlockId>,
    pub bounds: Vec<u32>,
}

/// Built from a step and the sequences, once per step, in memory that is kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    pub tokens: Vec<Token>,
    pub positions: Vec<u32>,
    pub slices: Vec<PassSlice>,
    /// One per cache group of the model.
    pub tables: Vec<BlockTables>,
    pub outputs: Vec<u32>,
    pub drawn: Vec<(u32, u32)>,
    pub n_padding: u32,
}

impl Pass<'_> {
    pub fn n_rows(&self) -> usize {
        self.rows.tokens.len()
    }

    /// The hidden states of rows are wanted, whether or not their logits are.
    pub fn wants_hidden(&self) -> bool {
        self.slices.iter().any(|slice| slice.want == Want::Pool)
    }

    /// Whether the slices' rows follow each other and are all there are but padding: then no row has two writers.
    pub fn is_tiled(&self) -> bool {
        let next = self.slices.iter().try_fold(0, |at, slice| (slice.rows.start == at).then_some(slice.rows.end));
        next == Some(self.n_rows() as u32 - self.rows.n_padding)
    }
}

impl PassSlice {
    /// Rows whose first is at `start`.
    pub fn new(rows: Range<u32>, start: u32, want: Want) -> PassSlice {
        PassSlice { range: start..start + (rows.end - rows.start), rows, want }
    }
}

impl<'a> Tables<'a> {
    pub fn n_groups(&self) -> usize {
        self.groups.len()
    }

    pub fn group(&self, group: usize) -> &'a BlockTables {
        &self.groups[group]
    }
}

impl BlockTables {
    pub fn of(&self, slice: usize) -> &[BlockId] {
        &self.blocks[self.bounds[slice] as usize..self.bounds[slice + 1] as usize]
    }
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

    /// What devices and models see of it.
    pub fn pass(&self) -> Pass<'_> {
        let Batch { tokens, positions, slices, tables, outputs, drawn, n_padding } = self;
        let rows = Rows { tokens, positions, outputs, drawn, n_padding: *n_padding };
        Pass { rows, slices, tables: Tables { groups: tables } }
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
        self.drawn.clear();
        self.n_padding = 0;
        for table in &mut self.tables {
            table.blocks.clear();
            table.bounds.clear();
            table.bounds.push(0);
        }
    }
}
