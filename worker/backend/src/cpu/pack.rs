//! Weights as kernels want them: tiles of sixteen rows, a lane each, walked along K.
//!
//! ```text
//! F32, F16, BF16   per k:          16 elements
//! Q8_0             per 32 k:       16 f16 scales · 8 groups of 16 × 4 bytes (q + 128)
//! Q4_1             per 32 k:       16 f16 scales · 16 f16 minima · 4 groups of 16 × 4 bytes
//!                                  (group g: low nibbles are k = 8g .. 8g+4, high nibbles 8g+4 .. 8g+8)
//! ```
//! Rows are padded to sixteen with zeros. A matrix is a list of parts, each with a type of its own.

use super::lanes::LANES;
use super::memory::{Pages, Shared};
use super::team::Team;
use crate::{Error, Result, Stored, StoredType};
use std::ops::Range;
use types::Leaves;
use types::leaves::{Fold, aligned_runs};

/// `[n_out, k]`, packed.
pub struct Matrix {
    pub(crate) k: usize,
    pub(crate) n_out: usize,
    pub(crate) parts: Vec<Part>,
    pub(crate) leaves: Vec<Leaf>,
    pub(crate) n_runs: usize,
    pub(crate) pages: Pages,
    pub(crate) n_bytes: usize,
}

/// The rows of one stored matrix.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub dtype: StoredType,
    pub rows: usize,
    /// The column of the product that the first row gives.
    pub first_out: usize,
    /// The number of its first tile, counted over all parts.
    pub first_tile: usize,
    /// Where its first tile begins, in bytes.
    pub start: usize,
    pub tile_bytes: usize,
}

impl Part {
    pub fn n_tiles(&self) -> usize {
        self.rows.div_ceil(LANES)
    }
}

/// What a kernel does at the end of a leaf: push the sum, merge, and perhaps hand over a finished run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Leaf {
    /// Within the columns that this matrix holds.
    pub k_end: usize,
    pub n_merges: u32,
    pub ends_run: bool,
}

/// How deep the stack of partial sums may become: 2^11 leaves.
pub(crate) const DEPTH_MAX: usize = 12;

/// Elements along K, and bytes of sixteen rows of them.
pub(crate) const fn tile_unit(dtype: StoredType) -> (usize, usize) {
    match dtype {
        StoredType::F32 => (1, 64),
        StoredType::F16 | StoredType::BF16 => (1, 32),
        StoredType::Q8_0 => (32, 544),
        StoredType::Q4_1 => (32, 320),
    }
}

impl Matrix {
    pub(crate) fn stack(parts: &[Stored<'_>], team: &Team) -> Result<Matrix> {
        let k = parts.first().map_or(0, |part| part.k);
        let whole = vec![Leaf { k_end: k, n_merges: 0, ends_run: true }];
        Matrix::pack(parts, whole, 1, team)
    }

    pub(crate) fn of_leaves(stored: Stored<'_>, leaves: &Leaves, owned: Range<u32>, team: &Team) -> Result<Matrix> {
        if owned.start > owned.end || owned.end as usize > leaves.len() {
            return Err(Error::Shape(format!("leaves {owned:?} of {}", leaves.len())));
        }
        let (walk, n_runs) = walk(leaves, owned)?;
        Matrix::pack(&[stored], walk, n_runs, team)
    }

    fn pack(stored: &[Stored<'_>], leaves: Vec<Leaf>, n_runs: usize, team: &Team) -> Result<Matrix> {
        let k = leaves.last().map_or(0, |leaf| leaf.k_end);
        stored.iter().try_for_each(|stored| check(stored, k, &leaves))?;
        let (parts, n_bytes) = lay_out(stored, k)?;
        let n_out = parts.iter().map(|part| part.rows).sum();
        let pages = Pages::zeroed("a matrix", n_bytes)?;
        for (stored, part) in stored.iter().zip(&parts).filter(|_| k > 0) {
            let place = Shared::new(pages.start());
            team.run(part.n_tiles(), &|tiles| {
                for tile in tiles {
                    // SAFETY: `lay_out` gave every tile its own bytes inside `pages`; one thread has each tile.
                    let to = unsafe { place.part(part.start + tile * part.tile_bytes, part.tile_bytes) };
                    pack_tile(stored, tile * LANES, to);
                }
            });
        }
        Ok(Matrix { k, n_out, parts, leaves, n_runs, pages, n_bytes })
    }

    pub(crate) fn n_tiles(&self) -> usize {
        self.parts.last().map_or(0, |part| part.first_tile + part.n_tiles())
    }
}

/// The order of pushes and merges over the leaves of `owned`, and the number of runs that it ends.
fn walk(leaves: &Leaves, owned: Range<u32>) -> Result<(Vec<Leaf>, usize)> {
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
            walk.push(Leaf { k_end, n_merges, ends_run });
        }
    }
    Ok((walk, runs.len()))
}

fn check(stored: &Stored<'_>, k: usize, leaves: &[Leaf]) -> Result<()> {
    let (rows, dtype) = (stored.rows, stored.dtype);
    let (block, _) = dtype.block();
    if stored.k != k {
        return Err(Error::Shape(format!("a matrix of {rows} x {} where k is {k}", stored.k)));
    }
    if leaves.iter().any(|leaf| !leaf.k_end.is_multiple_of(block)) {
        return Err(Error::Shape(format!("{dtype:?} of {rows} x {k}: a row or a leaf is not whole blocks of {block}")));
    }
    let row_bytes = dtype.row_bytes(k);
    if rows > 1 && stored.row_stride < row_bytes {
        return Err(Error::Shape(format!("rows of {row_bytes} bytes every {} bytes", stored.row_stride)));
    }
    // A rank without leaves holds no columns, and nothing of the file.
    if rows > 0 && k > 0 { stored.check() } else { Ok(()) }
}

fn lay_out(stored: &[Stored<'_>], k: usize) -> Result<(Vec<Part>, usize)> {
    let mut parts = Vec::with_capacity(stored.len());
    let (mut first_out, mut first_tile, mut start) = (0usize, 0, 0usize);
    for stored in stored {
        let too_big = || Error::Shape(format!("a matrix of {} x {k} does not fit an address space", stored.rows));
        let (unit, unit_bytes) = tile_unit(stored.dtype);
        let tile_bytes = (k / unit).checked_mul(unit_bytes).ok_or_else(too_big)?;
        let part = Part { dtype: stored.dtype, rows: stored.rows, first_out, first_tile, start, tile_bytes };
        let n_bytes = part.n_tiles().checked_mul(tile_bytes).ok_or_else(too_big)?;
        first_out = first_out.checked_add(stored.rows).ok_or_else(too_big)?;
        first_tile += part.n_tiles();
        start = start.checked_add(n_bytes).and_then(|end| end.checked_next_multiple_of(64)).ok_or_else(too_big)?;
        parts.push(part);
    }
    Ok((parts, start))
}

/// Writes the tile whose first row is `row` over zeros.
fn pack_tile(stored: &Stored<'_>, row: usize, to: &mut [u8]) {
    for lane in 0..LANES.min(stored.rows - row) {
        let from = stored.row(row + lane);
        match stored.dtype {
            StoredType::F32 => pack_elements::<4>(from, lane, to),
            StoredType::F16 | StoredType::BF16 => pack_elements::<2>(from, lane, to),
            StoredType::Q8_0 => pack_q8_0(from, lane, to),
            StoredType::Q4_1 => pack_q4_1(from, lane, to),
        }
    }
}

fn pack_elements<const SIZE: usize>(row: &[u8], lane: usize, to: &mut [u8]) {
    let (elements, _) = row.as_chunks::<SIZE>();
    let (cells, _) = to.as_chunks_mut::<SIZE>();
    for (element, cells) in elements.iter().zip(cells.chunks_exact_mut(LANES)) {
        cells[lane] = *element;
    }
}

fn pack_q8_0(row: &[u8], lane: usize, to: &mut [u8]) {
    for (from, to) in row.as_chunks::<34>().0.iter().zip(to.as_chunks_mut::<544>().0) {
        to[2 * lane..][..2].copy_from_slice(&from[..2]);
        for (group, four) in from[2..].as_chunks::<4>().0.iter().enumerate() {
            put(to, 32 + 64 * group + 4 * lane, u32::from_le_bytes(*four) ^ 0x8080_8080);
        }
    }
}

fn pack_q4_1(row: &[u8], lane: usize, to: &mut [u8]) {
    const LOW: u32 = 0x0f0f_0f0f;
    for (from, to) in row.as_chunks::<20>().0.iter().zip(to.as_chunks_mut::<320>().0) {
        to[2 * lane..][..2].copy_from_slice(&from[..2]);
        to[32 + 2 * lane..][..2].copy_from_slice(&from[2..4]);
        // The file's byte i holds elements i (low nibble) and i + 16 (high nibble).
        for (pair, eight) in from[4..].as_chunks::<8>().0.iter().enumerate() {
            let [a, b, c, d, e, f, g, h] = *eight;
            let (first, second) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
            let at = 64 + 64 * pair + 4 * lane;
            put(to, at, first & LOW | (second & LOW) << 4);
            put(to, at + 128, first >> 4 & LOW | second & !LOW);
        }
    }
}

fn put(to: &mut [u8], at: usize, word: u32) {
    to[at..at + 4].copy_from_slice(&word.to_le_bytes());
}
