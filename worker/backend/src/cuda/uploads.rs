//! What a pass tells the device: positions, where their KV lies, tables, tokens. Written to pinned memory and copied in
//! the stream, so that the host does not wait; two halves take turns, so that it does not write what is still read.

use super::driver::{Bytes, Context, Event, Pinned, Stream};
use crate::{Batch, BatchLimits, Error, Result};
use std::sync::Arc;
use types::cache::blocks_for;
use types::{BLOCK_TOKENS, BlockId};

/// Where no limits were told: for an operation by itself.
pub(super) const BYTES_MIN: usize = 256 << 10;
const WORD: usize = 4;
/// Kernels are given addresses that are multiples of this.
const ALIGNMENT: usize = 16;
/// Beside what is for each row or block: lists of runs, and what ends on the alignment.
const SPARE: usize = 16 << 10;

/// Rows of one sequence that threads attend together; as in the header.
pub(super) const ITEM_WORDS: usize = 4;

/// What the largest batch takes.
pub(super) fn bytes_for(limits: BatchLimits) -> Option<usize> {
    let BatchLimits { rows_max, context, n_groups } = limits;
    // A row has a token, a position, perhaps an output and two draws; in a group a slot, perhaps a table of its own,
    // and two items.
    let of_group = (1 + 2 * ITEM_WORDS).checked_add(blocks_for(context) as usize)?;
    let of_row = n_groups.checked_mul(of_group)?.checked_add(24)?;
    rows_max.checked_mul(of_row)?.checked_mul(WORD)?.checked_add(SPARE)?.checked_add(BYTES_MIN)
}

pub(super) struct Uploads {
    halves: [Half; 2],
    turn: usize,
    /// On the device; written in the order of the stream, so one is enough.
    device: Bytes,
    /// Where the next goes, in bytes.
    end: usize,
    pub batch: OnDevice,
}

struct Half {
    pinned: Pinned,
    /// Behind the pass that it was written for.
    passed: Event,
}

/// The batch of the pass.
#[derive(Default)]
pub(super) struct OnDevice {
    pub n_rows: usize,
    pub positions: u64,
    pub groups: Vec<Tables>,
    /// Of each group and number of rows at most: where they are, and how many.
    items: Vec<((usize, u32), (u64, u32))>,
}

#[derive(Clone, Copy)]
pub(super) struct Tables {
    pub slots: u64,
    pub blocks: u64,
}

impl Uploads {
    pub fn new(context: &Arc<Context>, n_bytes: usize) -> Result<Uploads> {
        let n_bytes = n_bytes.next_multiple_of(ALIGNMENT);
        let half = || -> Result<Half> {
            Ok(Half { pinned: Pinned::zeroed(context, "what a pass tells", n_bytes)?, passed: Event::new(context)? })
        };
        let device = Bytes::new(context, "what a pass tells", n_bytes)?;
        Ok(Uploads { halves: [half()?, half()?], turn: 0, device, end: 0, batch: OnDevice::default() })
    }

    /// Starts over with another pass.
    pub fn begin(&mut self, stream: &Stream, batch: &Batch) -> Result<()> {
        self.halves[self.turn].passed.record(stream)?;
        self.turn = 1 - self.turn;
        self.halves[self.turn].passed.wait()?;
        self.end = 0;
        self.batch.n_rows = batch.n_rows();
        self.batch.items.clear();
        self.batch.groups.clear();
        assert!(batch.is_tiled(), "each row belongs to one slice");
        self.batch.positions = self.put(stream, batch.n_rows(), |to| to.copy_from_slice(&batch.positions))?;
        for group in 0..batch.tables.len() {
            let slots = self.put(stream, batch.n_rows(), |to| slots(batch, group, to))?;
            let of_group = &batch.tables[group].blocks;
            let blocks = self.put(stream, of_group.len(), |to| {
                // What no query sees may be anywhere, but it must be somewhere.
                let number = |block: &BlockId| if *block == BlockId::NONE { 0 } else { block.0 };
                to.iter_mut().zip(of_group).for_each(|(to, block)| *to = number(block));
            })?;
            self.batch.groups.push(Tables { slots, blocks });
        }
        Ok(())
    }

    /// Room for words that `fill` writes, and where they will be on the device.
    pub fn put(&mut self, stream: &Stream, n_words: usize, fill: impl FnOnce(&mut [u32])) -> Result<u64> {
        let (start, n_bytes) = (self.end, n_words * WORD);
        let half = &mut self.halves[self.turn];
        let Some(to) = half.pinned.bytes_mut().get_mut(start..start + n_bytes) else {
            return Err(Error::OutOfMemory { what: "what a pass tells", n: start + n_bytes });
        };
        fill(bytemuck::cast_slice_mut(to));
        if n_bytes > 0 {
            // SAFETY: this half is not written again before the stream has passed `passed`.
            unsafe { stream.write(&self.device, start, to) }?;
        }
        self.end = (start + n_bytes).next_multiple_of(ALIGNMENT);
        Ok(self.device.at(start))
    }

    /// The rows of the batch in items of at most `rows_max`, and how many items there are.
    pub fn items(&mut self, stream: &Stream, batch: &Batch, group: usize, rows_max: u32) -> Result<(u64, u32)> {
        let key = (group, rows_max);
        if let Some((_, found)) = self.batch.items.iter().find(|(of, _)| *of == key) {
            return Ok(*found);
        }
        let n_items = batch.slices.iter().map(|slice| slice.rows.len().div_ceil(rows_max as usize)).sum::<usize>();
        let at = self.put(stream, n_items * ITEM_WORDS, |to| {
            let cut = batch.slices.iter().zip(&batch.tables[group].bounds).flat_map(|(slice, table)| {
                slice.rows.clone().step_by(rows_max as usize).map(move |row| {
                    let n_rows = rows_max.min(slice.rows.end - row);
                    [row, n_rows, slice.start + (row - slice.rows.start), *table]
                })
            });
            to.as_chunks_mut::<ITEM_WORDS>().0.iter_mut().zip(cut).for_each(|(to, item)| *to = item);
        })?;
        self.batch.items.push((key, (at, n_items as u32)));
        Ok((at, n_items as u32))
    }
}

/// Where each row's K and V go.
fn slots(batch: &Batch, group: usize, to: &mut [u32]) {
    for (i, slice) in batch.slices.iter().enumerate() {
        let table = batch.tables[group].of(i);
        for row in slice.rows.clone() {
            let position = batch.positions[row as usize];
            let block = table[(position / BLOCK_TOKENS) as usize];
            to[row as usize] = block.0 * BLOCK_TOKENS + position % BLOCK_TOKENS;
        }
    }
}
