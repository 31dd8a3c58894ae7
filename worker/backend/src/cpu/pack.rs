//! Weights packed for the kernels: tiles of sixteen rows, one per lane, read along K.
//!
//! ```text
//! F32, F16         per k:      16 elements
//! BF16             per two k:  16 pairs
//! quantized        per 32 k:   16 × scales (and minima) of two bytes each · digits of 16 × 32 numbers
//!                  digits:     8 bits: 8 groups of 16 × 4 bytes, group g being k = 4g .. 4g+4
//!                              4 bits: 4 × 64 bytes, low nibbles group 2i, high nibbles group 2i+1
//!                              2 bits: 2 × 64 bytes, two bits of four groups in a byte
//!                              3, 5 and 6 bits: the lowest 2 or 4 bits, then the upper bits
//! F8_E4M3          per 32 k:   16 × scales of four bytes · 32 × 16 numbers
//! Q2_K to IQ3_S    per block:  16 × (d, and minus m) before the steps of a block of 256
//! groups           per group:  16 × scales of two or four bytes · 16 × (the digits' middle - zero), if there are any
//! ```
//! Rows are padded to sixteen with zeros. A matrix is a list of parts, each with a type of its own.

use super::blocks::{group_header, sub_block};
use super::digits::{Width, pack_digits};
use super::formats::packing;
use super::lanes::LANES;
use super::memory::{HostMemory, SharedPtr};
use super::pairs::pack_row;
use super::quants::{COLUMN_BYTES, Packing, ScaleHeaderForm};
use super::team::Team;
use crate::{Error, FillPiece, MatrixShape, PACKED_PIECE_BYTES, Result, StoredMatrix};
use std::ops::Range;
use std::sync::Arc;
use types::leaves::{Fold, aligned_runs};
use types::{Dtype, GroupedDtype, Leaves};

/// The version of all packed forms, on which no instruction set has an influence. Raise it when the packed bytes of any
/// type change: files of packed weights are then written anew.
pub const PACKING_VERSION: u32 = 1;

/// A packed weight matrix, `[n_out, k]`.
pub struct Matrix {
    pub(crate) k: usize,
    pub(crate) n_out: usize,
    pub(crate) parts: Vec<MatrixPart>,
    pub(crate) leaves: Vec<LeafEnd>,
    pub(crate) n_runs: usize,
    pub(crate) pages: Arc<HostMemory>,
    pub(crate) n_bytes: usize,
}

/// The rows that come from one stored matrix.
#[derive(Clone, Debug)]
pub(crate) struct MatrixPart {
    pub dtype: Dtype,
    pub rows: usize,
    /// The output column of the first row.
    pub first_out: usize,
    /// The index of its first tile among those of all parts.
    pub first_tile: usize,
    /// The first element's position within its block of the file.
    pub first: usize,
    /// The byte offset of its first tile.
    pub start: usize,
    pub tile_bytes: usize,
}

impl MatrixPart {
    pub fn n_tiles(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    pub fn header_form(&self) -> ScaleHeaderForm {
        packing(self.dtype).head
    }
}

/// What a kernel does at the end of a leaf: push the sum, merge, and perhaps write out a finished run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeafEnd {
    /// Where the leaf ends, in columns of this matrix.
    pub k_end: usize,
    pub n_merges: u32,
    pub ends_run: bool,
}

/// The depth of the stack of partial sums: enough for 2^11 leaves.
pub(crate) const DEPTH_MAX: usize = 12;

impl Matrix {
    pub(crate) fn stack(parts: &[StoredMatrix<'_>], team: &Team) -> Result<Matrix> {
        Matrix::pack(parts, whole_sum(parts), 1, team)
    }

    pub(crate) fn of_leaves(
        stored: StoredMatrix<'_>,
        leaves: &Leaves,
        owned: Range<u32>,
        team: &Team,
    ) -> Result<Matrix> {
        let (walk, n_runs) = checked_merge_order(leaves, owned)?;
        Matrix::pack(&[stored], walk, n_runs, team)
    }

    fn pack(stored: &[StoredMatrix<'_>], leaves: Vec<LeafEnd>, n_runs: usize, team: &Team) -> Result<Matrix> {
        // A rank without leaves holds no columns, and its bytes are not checked.
        stored.iter().filter(|of| of.rows > 0 && of.k > 0).try_for_each(StoredMatrix::check)?;
        let matrix = Matrix::zeroed(stored, leaves, n_runs)?;
        for (stored, part) in stored.iter().zip(&matrix.parts).filter(|_| matrix.k > 0) {
            let place = SharedPtr::new(matrix.pages.start());
            team.run(part.n_tiles(), &|tiles| {
                for tile in tiles {
                    // SAFETY: `lay_out` gave every tile its own bytes inside `pages`; one thread has each tile.
                    let to = unsafe { place.part(part.start + tile * part.tile_bytes, part.tile_bytes) };
                    pack_tile(stored, tile * LANES, to);
                }
            });
        }
        Ok(matrix)
    }

    /// A matrix that was packed before. `fill` gets each of its pieces once. None if its packed form has another
    /// number of bytes.
    pub(crate) fn of_packed(
        shape: &MatrixShape<'_>,
        n_bytes: usize,
        fill: &FillPiece<'_>,
        team: &Team,
    ) -> Result<Option<Matrix>> {
        let (walk, n_runs) = match &shape.leaves {
            Some((leaves, owned)) => checked_merge_order(leaves, owned.clone())?,
            None => (whole_sum(shape.parts), 1),
        };
        let matrix = Matrix::zeroed(shape.parts, walk, n_runs)?;
        if matrix.n_bytes != n_bytes {
            return Ok(None);
        }
        let place = SharedPtr::new(matrix.pages.start());
        team.run(n_bytes.div_ceil(PACKED_PIECE_BYTES), &|pieces| {
            for at in pieces.map(|piece| piece * PACKED_PIECE_BYTES) {
                // SAFETY: `pages` has `n_bytes`, pieces do not overlap, and one thread has each.
                fill(at, unsafe { place.part(at, PACKED_PIECE_BYTES.min(n_bytes - at)) });
            }
        });
        Ok(Some(matrix))
    }

    /// Checks the shapes, and allocates what their packed form needs.
    fn zeroed(stored: &[StoredMatrix<'_>], leaves: Vec<LeafEnd>, n_runs: usize) -> Result<Matrix> {
        let k = leaves.last().map_or(0, |leaf| leaf.k_end);
        stored.iter().try_for_each(|stored| check(stored, k, &leaves))?;
        let (parts, n_bytes) = lay_out(stored, k)?;
        let n_out = parts.iter().map(|part| part.rows).sum();
        let pages = Arc::new(HostMemory::zeroed("a matrix", n_bytes)?);
        Ok(Matrix { k, n_out, parts, leaves, n_runs, pages, n_bytes })
    }

    pub(crate) fn n_tiles(&self) -> usize {
        self.parts.last().map_or(0, |part| part.first_tile + part.n_tiles())
    }
}

/// One leaf: a sum that no rank shares.
fn whole_sum(parts: &[StoredMatrix<'_>]) -> Vec<LeafEnd> {
    vec![LeafEnd { k_end: parts.first().map_or(0, |part| part.k), n_merges: 0, ends_run: true }]
}

fn checked_merge_order(leaves: &Leaves, owned: Range<u32>) -> Result<(Vec<LeafEnd>, usize)> {
    if owned.start > owned.end || owned.end as usize > leaves.len() {
        return Err(Error::Shape(format!("leaves {owned:?} of {}", leaves.len())));
    }
    merge_order(leaves, owned)
}

/// The order of pushes and merges over the leaves of `owned`, and the number of runs that it ends.
fn merge_order(leaves: &Leaves, owned: Range<u32>) -> Result<(Vec<LeafEnd>, usize)> {
    let total = leaves.len() as u32;
    let runs = aligned_runs(owned.clone(), total);
    let origin = if owned.is_empty() { 0 } else { leaves.leaf(owned.start as usize).start };
    let mut walk = Vec::with_capacity(owned.len());
    for run in &runs {
        let mut fold = Fold::default();
        let mut depth = 0;
        for leaf in run.clone() {
            let at = leaf - run.start;
            let ends_run = leaf + 1 == run.end;
            let mut n_merges = fold.push(&(at..at + 1));
            depth = depth + 1 - n_merges as usize;
            if ends_run {
                n_merges += Fold::n_last(depth) as u32;
            }
            if depth + n_merges as usize > DEPTH_MAX {
                return Err(Error::Shape(format!("a sum of {total} leaves is deeper than {DEPTH_MAX}")));
            }
            let k_end = (leaves.leaf(leaf as usize).end - origin) as usize;
            walk.push(LeafEnd { k_end, n_merges, ends_run });
        }
    }
    Ok((walk, runs.len()))
}

/// Checks a shape. The packed form depends on nothing else; `StoredMatrix::check` looks at the bytes.
fn check(stored: &StoredMatrix<'_>, k: usize, leaves: &[LeafEnd]) -> Result<()> {
    let (rows, dtype) = (stored.rows, stored.dtype);
    let unit = dtype.unit();
    if stored.k != k {
        return Err(Error::Shape(format!("a matrix of {rows} x {} where k is {k}", stored.k)));
    }
    if leaves.iter().any(|leaf| !leaf.k_end.is_multiple_of(unit)) {
        return Err(Error::Shape(format!("{dtype:?} of {rows} x {k}: a row or a leaf is no multiple of {unit}")));
    }
    let row_bytes = stored.row_bytes();
    if rows > 1 && stored.row_stride < row_bytes {
        return Err(Error::Shape(format!("rows of {row_bytes} bytes every {} bytes", stored.row_stride)));
    }
    Ok(())
}

fn lay_out(stored: &[StoredMatrix<'_>], k: usize) -> Result<(Vec<MatrixPart>, usize)> {
    let mut parts = Vec::with_capacity(stored.len());
    let (mut first_out, mut first_tile, mut start) = (0usize, 0, 0usize);
    for stored in stored {
        let too_big = || Error::Shape(format!("a matrix of {} x {k} does not fit an address space", stored.rows));
        let StoredMatrix { dtype, rows, first, .. } = *stored;
        let tile_bytes = packing(dtype).tile_bytes(first, k).ok_or_else(too_big)?;
        let part = MatrixPart { dtype, rows, first_out, first_tile, first, start, tile_bytes };
        let n_bytes = part.n_tiles().checked_mul(tile_bytes).ok_or_else(too_big)?;
        first_out = first_out.checked_add(stored.rows).ok_or_else(too_big)?;
        first_tile += part.n_tiles();
        start = start.checked_add(n_bytes).and_then(|end| end.checked_next_multiple_of(64)).ok_or_else(too_big)?;
        parts.push(part);
    }
    Ok((parts, start))
}

/// Packs the tile whose first row is `row` into zeroed memory.
fn pack_tile(stored: &StoredMatrix<'_>, row: usize, to: &mut [u8]) {
    let packing = packing(stored.dtype);
    if matches!(packing.width, Width::Element | Width::Pair) {
        return pack_element_tile(stored, row, packing, to);
    }
    if packing.width == Width::E4M3 {
        return pack_e4m3(stored, row, packing, to);
    }
    let mut rest = to;
    let mut k = 0;
    // All rows of a stretch before the next, so that the packed bytes stay in the L1 cache.
    while k < stored.k {
        let end = stored.k.min((stored.first + k + 1).next_multiple_of(packing.head.every()) - stored.first);
        let n_bytes = packing.head.bytes() + (end - k) / packing.unit * packing.step_bytes;
        let (stretch, after) = rest.split_at_mut(n_bytes);
        for lane in 0..LANES.min(stored.rows - row) {
            pack_lane(
                stored.dtype,
                packing,
                stored.row(row + lane),
                stored.first + k..stored.first + end,
                lane,
                stretch,
            );
        }
        (rest, k) = (after, end);
    }
}

/// The elements `range` of a row's blocks, all under one head.
fn pack_lane(dtype: Dtype, packing: Packing, row: &[u8], range: Range<usize>, lane: usize, to: &mut [u8]) {
    let (head, steps) = to.split_at_mut(packing.head.bytes());
    let (block, block_bytes) = (dtype.block(), dtype.block_bytes());
    for (i, step) in steps.chunks_exact_mut(packing.step_bytes).enumerate() {
        let at = range.start + i * packing.unit;
        let from = &row[at / block * block_bytes..][..block_bytes];
        let sub = sub_block(dtype, from, at % block / packing.unit);
        let (scales, digits) = step.split_at_mut(packing.scale_columns * COLUMN_BYTES);
        put_columns(&sub.scales, lane, scales);
        match dtype {
            _ if i > 0 => {}
            Dtype::Grouped(grouped) => put_group_header(grouped, from, lane, head),
            _ => put_columns(&sub.head, lane, head),
        }
        pack_digits(packing.width, &sub.q, lane, digits);
    }
}

fn put_columns(columns: &[[u8; 2]], lane: usize, to: &mut [u8]) {
    for (value, to) in columns.iter().zip(to.as_chunks_mut::<COLUMN_BYTES>().0) {
        to[2 * lane..][..2].copy_from_slice(value);
    }
}

fn put_group_header(grouped: GroupedDtype, block: &[u8], lane: usize, to: &mut [u8]) {
    let (scale, shift) = group_header(grouped, block);
    let (scales, shifts) = to.split_at_mut(LANES * scale.len());
    scales[lane * scale.len()..][..scale.len()].copy_from_slice(scale);
    if grouped.has_zeros {
        put_columns(&[shift.to_le_bytes()], lane, shifts);
    }
}

/// Steps along K that are packed for all sixteen rows before the next.
const STRETCH: usize = 256;

fn pack_element_tile(stored: &StoredMatrix<'_>, row: usize, packing: Packing, to: &mut [u8]) {
    let size = packing.step_bytes / LANES;
    for (i, to) in to.chunks_mut(STRETCH * LANES * size).enumerate() {
        for lane in 0..LANES.min(stored.rows - row) {
            let from = &stored.row(row + lane)[i * STRETCH * size..];
            match (packing.width, size) {
                (Width::Pair, _) => pack_row(from, lane, to),
                (_, 4) => spread::<4>(from, lane, to),
                _ => spread::<2>(from, lane, to),
            }
        }
    }
}

fn pack_e4m3(stored: &StoredMatrix<'_>, row: usize, packing: Packing, to: &mut [u8]) {
    for (group, step) in to.chunks_exact_mut(packing.step_bytes).enumerate() {
        let (scales, numbers) = step.split_at_mut(packing.scale_columns * COLUMN_BYTES);
        for lane in 0..LANES.min(stored.rows - row) {
            let from = &stored.row(row + lane)[group * packing.unit..][..packing.unit];
            scales[4 * lane..][..4].copy_from_slice(&stored.scale(row + lane, group).to_le_bytes());
            spread::<1>(from, lane, numbers);
        }
    }
}

fn spread<const SIZE: usize>(row: &[u8], lane: usize, to: &mut [u8]) {
    let (elements, _) = row.as_chunks::<SIZE>();
    let (cells, _) = to.as_chunks_mut::<SIZE>();
    for (element, cells) in elements.iter().zip(cells.chunks_exact_mut(LANES)) {
        cells[lane] = *element;
    }
}
