//! The data that a pass sends to the device: tokens, positions, the places of their KV, tables. It is written to pinned
//! memory and copied in the stream, so that the host does not wait. Two halves alternate, so that the next pass can be
//! written while this one runs, without changing data that is still read.
//!
//! All data that is known when a pass begins goes in one copy. On the device it always begins at the same address, and
//! for passes of one outline each part has the same place: recorded kernels find it where it was.
//!
//! ```text
//! tokens · positions · per group: slots · per group: items, where each slice is a row · per group: tables · the rest
//! ```

use super::driver::{Context, CudaEvent, DeviceMemory, PinnedMemory, Stream};
use super::outline::PassOutline;
use crate::{BatchLimits, Error, Pass, Result};
use std::ops::Range;
use std::sync::Arc;
use types::cache::blocks_for;
use types::{BLOCK_TOKENS, BlockId};

/// The size without given limits: for an operation by itself.
pub(super) const BYTES_MIN: usize = 256 << 10;
const WORD: usize = 4;
/// Kernels get addresses that are multiples of this.
const ALIGNMENT: usize = 16;
/// Space beside the data of each row or block: lists of runs, and padding for the alignment.
const SPARE: usize = 16 << 10;
/// The slot of a row without a sequence: nothing is stored. As in the header.
const NO_SLOT: u32 = u32::MAX;

/// Rows of one sequence that threads attend together; as in the header.
pub(super) const ITEM_WORDS: usize = 4;

/// Returns the bytes of the largest batch.
pub(super) fn bytes_for(limits: BatchLimits) -> Option<usize> {
    let BatchLimits { rows_max, context, n_groups } = limits;
    // A row has a token, perhaps from elsewhere, a position, perhaps an output and two draws. In a group it has a slot,
    // perhaps a table of its own, and two items.
    let of_group = (1 + 2 * ITEM_WORDS).checked_add(blocks_for(context) as usize)?;
    let of_row = n_groups.checked_mul(of_group)?.checked_add(28)?;
    rows_max.checked_mul(of_row)?.checked_mul(WORD)?.checked_add(SPARE)?.checked_add(BYTES_MIN)
}

pub(super) struct Uploads {
    halves: [UploadBuffer; 2],
    turn: usize,
    /// On the device; written in the order of the stream, so one is enough.
    device: DeviceMemory,
    /// The place of the next data, in bytes.
    end: usize,
    pub batch: UploadedPass,
}

struct UploadBuffer {
    pinned: PinnedMemory,
    /// Marks the point behind the pass that it was written for.
    passed: CudaEvent,
}

/// The pass, as uploaded to the device.
#[derive(Default)]
pub(super) struct UploadedPass {
    pub n_rows: usize,
    /// Its shared shape; None where no other pass is like it.
    pub outline: Option<PassOutline>,
    pub tokens: u64,
    pub positions: u64,
    /// Pairs of a row and an entry of the drawn tokens: the address, and how many.
    pub taken: (u64, u32),
    pub groups: Vec<UploadedGroup>,
    /// For each group and largest number of rows: the address of the items, and how many.
    items: Vec<((usize, u32), (u64, u32))>,
}

#[derive(Clone, Copy)]
pub(super) struct UploadedGroup {
    pub slots: u64,
    /// The address from which items count.
    pub blocks: u64,
    /// The offset from there to the group's tables.
    first: u32,
    /// The address of one item per row, where every slice is a row. Padding items have no rows.
    single: Option<u64>,
}

impl Uploads {
    pub fn new(context: &Arc<Context>, n_bytes: usize) -> Result<Uploads> {
        let n_bytes = n_bytes.next_multiple_of(ALIGNMENT);
        let half = || -> Result<UploadBuffer> {
            Ok(UploadBuffer {
                pinned: PinnedMemory::zeroed(context, "the upload of a pass", n_bytes)?,
                passed: CudaEvent::new(context)?,
            })
        };
        let device = DeviceMemory::new(context, "the upload of a pass", n_bytes)?;
        Ok(Uploads { halves: [half()?, half()?], turn: 0, device, end: 0, batch: UploadedPass::default() })
    }

    /// Starts over with another pass. `entries` has the place of each draw of the previous pass.
    pub fn begin(&mut self, stream: &Stream, pass: &Pass<'_>, entries: &[u32]) -> Result<()> {
        assert!(pass.is_tiled(), "each row belongs to one slice, or is padding after them");
        self.halves[self.turn].passed.record(stream)?;
        self.turn = 1 - self.turn;
        let passed = &self.halves[self.turn].passed;
        // It is passed, unless two passes were begun since and the host waited for neither.
        if !passed.is_passed()? {
            passed.wait()?;
        }
        (self.end, self.batch) = (0, UploadedPass { n_rows: pass.n_rows(), ..std::mem::take(&mut self.batch) });
        self.batch.outline = PassOutline::of(pass);
        self.batch.items.clear();
        self.batch.groups.clear();
        self.batch.tokens = self.reserve(pass.n_rows(), |to| to.copy_from_slice(pass.rows.tokens))?;
        self.batch.positions = self.reserve(pass.n_rows(), |to| to.copy_from_slice(pass.rows.positions))?;
        self.lay_groups(pass)?;
        let pairs = self.reserve(2 * pass.rows.drawn.len(), |to| {
            let pair = |(row, draw): &(u32, u32)| [*row, entries[*draw as usize]];
            to.as_chunks_mut::<2>().0.iter_mut().zip(pass.rows.drawn).for_each(|(to, drawn)| *to = pair(drawn));
        })?;
        self.batch.taken = (pairs, pass.rows.drawn.len() as u32);
        self.send(stream, 0..self.end)
    }

    fn lay_groups(&mut self, pass: &Pass<'_>) -> Result<()> {
        let (n_rows, n_groups, blocks) = (pass.n_rows(), pass.tables.n_groups(), self.device.address(0));
        for group in 0..n_groups {
            let slots = self.reserve(n_rows, |to| slots(pass, group, to))?;
            self.batch.groups.push(UploadedGroup { slots, blocks, first: 0, single: None });
        }
        let n_items = if self.batch.outline.is_some() { n_rows } else { 0 };
        // The groups' tables follow all data that has a fixed place in an outline.
        let (mut first, is_single) = (self.end / WORD, n_items > 0);
        first += n_groups * (n_items * ITEM_WORDS);
        for group in 0..n_groups {
            let single = self.reserve(n_items * ITEM_WORDS, |to| items(pass, group, (1, first as u32), to))?;
            self.batch.groups[group].single = is_single.then_some(single);
            self.batch.groups[group].first = first as u32;
            first += pass.tables.group(group).blocks.len().next_multiple_of(ALIGNMENT / WORD);
        }
        for group in 0..n_groups {
            let of_group = &pass.tables.group(group).blocks;
            let at = self.reserve(of_group.len(), |to| {
                // A block that no query sees may be anywhere, but it must exist.
                let number = |block: &BlockId| if *block == BlockId::NONE { 0 } else { block.0 };
                to.iter_mut().zip(of_group).for_each(|(to, block)| *to = number(block));
            })?;
            debug_assert_eq!(at, blocks + u64::from(self.batch.groups[group].first) * WORD as u64);
        }
        Ok(())
    }

    /// Reserves words that `fill` writes, and returns their address on the device once they are sent.
    fn reserve(&mut self, n_words: usize, fill: impl FnOnce(&mut [u32])) -> Result<u64> {
        let (start, n_bytes) = (self.end, n_words * WORD);
        let half = &mut self.halves[self.turn];
        let Some(to) = half.pinned.bytes_mut().get_mut(start..start + n_bytes) else {
            return Err(Error::OutOfMemory { what: "the upload of a pass", n: start + n_bytes });
        };
        fill(bytemuck::cast_slice_mut(to));
        self.end = (start + n_bytes).next_multiple_of(ALIGNMENT);
        Ok(self.device.address(start))
    }

    fn send(&self, stream: &Stream, range: Range<usize>) -> Result<()> {
        let from = &self.halves[self.turn].pinned.bytes()[range.clone()];
        // SAFETY: this half is not written again before the stream has passed `passed`; until then only behind this
        // data.
        unsafe { stream.write(&self.device, range.start, from) }
    }

    /// Uploads words that were not known when the pass began, and returns their address on the device.
    pub fn put(&mut self, stream: &Stream, n_words: usize, fill: impl FnOnce(&mut [u32])) -> Result<u64> {
        let start = self.end;
        let at = self.reserve(n_words, fill)?;
        self.send(stream, start..start + n_words * WORD)?;
        Ok(at)
    }

    /// Returns the rows of the pass in items of at most `rows_max`, and how many items there are.
    pub fn items(&mut self, stream: &Stream, pass: &Pass<'_>, group: usize, rows_max: u32) -> Result<(u64, u32)> {
        let UploadedGroup { single, first, .. } = self.batch.groups[group];
        if let Some(single) = single {
            return Ok((single, self.batch.n_rows as u32));
        }
        let key = (group, rows_max);
        if let Some((_, found)) = self.batch.items.iter().find(|(of, _)| *of == key) {
            return Ok(*found);
        }
        let n_items = pass.slices.iter().map(|slice| slice.rows.len().div_ceil(rows_max as usize)).sum::<usize>();
        let at = self.put(stream, n_items * ITEM_WORDS, |to| items(pass, group, (rows_max, first), to))?;
        self.batch.items.push((key, (at, n_items as u32)));
        Ok((at, n_items as u32))
    }
}

/// Writes items of at most `rows_max` rows, in tables that begin at `first`; the rest of `to` gets no rows.
fn items(pass: &Pass<'_>, group: usize, (rows_max, first): (u32, u32), to: &mut [u32]) {
    let cut = pass.slices.iter().zip(&pass.tables.group(group).bounds).flat_map(|(slice, table)| {
        slice.rows.clone().step_by(rows_max as usize).map(move |row| {
            let n_rows = rows_max.min(slice.rows.end - row);
            [row, n_rows, slice.range.start + (row - slice.rows.start), first + *table]
        })
    });
    let rest = std::iter::repeat([0; ITEM_WORDS]);
    to.as_chunks_mut::<ITEM_WORDS>().0.iter_mut().zip(cut.chain(rest)).for_each(|(to, item)| *to = item);
}

/// Writes the slots where each row's K and V go.
fn slots(pass: &Pass<'_>, group: usize, to: &mut [u32]) {
    to.fill(NO_SLOT);
    for (i, slice) in pass.slices.iter().enumerate() {
        let table = pass.tables.group(group).blocks_of(i);
        for row in slice.rows.clone() {
            let position = pass.rows.positions[row as usize];
            let block = table[(position / BLOCK_TOKENS) as usize];
            to[row as usize] = block.0 * BLOCK_TOKENS + position % BLOCK_TOKENS;
        }
    }
}
