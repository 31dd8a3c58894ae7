//! The description of one forward pass: the token and position of each row, the requested outputs, and the blocks of
//! the KV cache. Devices and models see a `Pass`, which borrows from a `Batch`.

use std::ops::Range;
use types::{BLOCK_TOKENS, BlockId, Token, Want};

/// A step as devices and models see it.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    pub rows: Rows<'a>,
    pub slices: &'a [PassSlice],
    pub tables: GroupBlockTables<'a>,
}

/// The rows of a pass, one per token.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    pub tokens: &'a [Token],
    /// The position of each row within its sequence.
    pub positions: &'a [u32],
    /// The kind of each row's token, of models with a table for it: 1 in the second text of a pair, else 0.
    pub types: &'a [u32],
    /// Rows whose logits are requested, in ascending order.
    pub outputs: &'a [u32],
    /// Rows whose token the device drew in the previous pass and the host does not know yet: (row, index of the draw).
    pub drawn: &'a [(u32, u32)],
    /// The number of padding rows at the end, which bring the pass to a known shape. Nothing of them is kept.
    pub n_padding: u32,
}

/// Consecutive rows of one sequence, at consecutive positions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassSlice {
    pub rows: Range<u32>,
    /// The rows' positions: `[0, range.start) is in the cache · range is computed now`.
    pub range: Range<u32>,
    pub want: Want,
}

/// The block tables of all cache groups.
#[derive(Clone, Copy, Debug)]
pub struct GroupBlockTables<'a> {
    groups: &'a [BlockTables],
}

/// The block tables of all slices, one after another. `blocks[bounds[i]..bounds[i + 1]]` is slice i's: entry j holds
/// positions `[j * BLOCK_TOKENS, (j + 1) * BLOCK_TOKENS)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockTables {
    pub blocks: Vec<BlockId>,
    pub bounds: Vec<u32>,
}

/// The memory of a pass, filled from a step and the sequences once per step and reused.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    pub tokens: Vec<Token>,
    pub positions: Vec<u32>,
    pub types: Vec<u32>,
    pub slices: Vec<PassSlice>,
    /// One table per cache group of the model.
    pub tables: Vec<BlockTables>,
    pub outputs: Vec<u32>,
    pub drawn: Vec<(u32, u32)>,
    pub n_padding: u32,
}

impl Pass<'_> {
    pub fn n_rows(&self) -> usize {
        self.rows.tokens.len()
    }

    /// Whether hidden states of rows are requested, with or without their logits.
    pub fn wants_hidden(&self) -> bool {
        self.slices.iter().any(|slice| slice.want == Want::Pool)
    }

    /// Whether the slices' rows are consecutive and all rows but the padding: then no row has two writers.
    pub fn is_tiled(&self) -> bool {
        let next = self.slices.iter().try_fold(0, |at, slice| (slice.rows.start == at).then_some(slice.rows.end));
        next == Some(self.n_rows() as u32 - self.rows.n_padding)
    }
}

impl PassSlice {
    /// Rows of which the first is at position `start`.
    pub fn new(rows: Range<u32>, start: u32, want: Want) -> PassSlice {
        PassSlice { range: start..start + (rows.end - rows.start), rows, want }
    }
}

impl<'a> GroupBlockTables<'a> {
    pub fn n_groups(&self) -> usize {
        self.groups.len()
    }

    pub fn group(&self, group: usize) -> &'a BlockTables {
        &self.groups[group]
    }
}

impl BlockTables {
    pub fn blocks_of(&self, slice: usize) -> &[BlockId] {
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

    /// The view for devices and models.
    pub fn pass(&self) -> Pass<'_> {
        let Batch { tokens, positions, types, slices, tables, outputs, drawn, n_padding } = self;
        let rows = Rows { tokens, positions, types, outputs, drawn, n_padding: *n_padding };
        Pass { rows, slices, tables: GroupBlockTables { groups: tables } }
    }

    /// Pads the batch to `n_rows` rows, with any token at any position and of no sequence.
    pub fn pad(&mut self, n_rows: usize) {
        self.n_padding += n_rows.saturating_sub(self.n_rows()) as u32;
        self.tokens.resize(n_rows.max(self.tokens.len()), 0);
        self.positions.resize(n_rows.max(self.positions.len()), 0);
    }

    /// Gives each slice blocks of its own, in the only table: of memory that only this pass uses.
    pub fn lay_out_own_blocks(&mut self) {
        let Some(table) = self.tables.first_mut() else { return };
        let mut n_blocks = 0;
        for slice in &self.slices {
            let of_slice = n_blocks..n_blocks + (slice.rows.end - slice.rows.start).div_ceil(BLOCK_TOKENS);
            n_blocks = of_slice.end;
            table.blocks.extend(of_slice.map(BlockId));
            table.bounds.push(n_blocks);
        }
    }

    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.types.clear();
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
