//! Weights in the kernels' layout: tiles of sixteen outputs, groups of thirty-two along k, digits of 4, 8 or 16 bits
//! with a scale and a minimum for each thirty-two or sixteen. `kernels/kernels.cuh` draws the layout.
//!
//! Every stored type becomes one of a few kinds. Types of 5 and 6 bits and those with codebooks grow to 8, those of 2
//! and 3 bits to 4. MXFP4, whose powers of two an f16 does not hold, groups, whose minima it would round, and
//! unquantized weights become bf16. Numbers of eight bits stay unchanged, with an f32 for each thirty-two.

use super::driver::{Context, DeviceMemory};
use super::kernels::{PIECES_MAX, SumPieces};
use crate::cpu::blocks::{SubBlock, group_scale, sub_block};
use crate::cpu::formats::digit_meaning;
use crate::cpu::memory::SharedPtr;
use crate::cpu::team::Team;
use crate::{Error, Result, StoredMatrix};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::Arc;
use types::leaves::{Fold, aligned_runs};
use types::{Dtype, Leaves, NumericsMode};

pub(super) const TILE: usize = 16;
/// The rows of a tile of inputs, for kernels that read tiles.
pub(super) const TILE_ROWS: usize = 256;
pub(super) const GROUP: usize = 32;
/// The bytes that are packed before each copy to the device.
const STRETCH_BYTES: usize = 16 << 20;
/// The number of strands of products without other cuts.
const STRANDS: u32 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WeightKind {
    Bf16,
    /// Consecutive rows, which a library can read too.
    Plain,
    W8,
    W8h,
    W4,
    W4h,
    F8,
    /// In rows, as `Plain`.
    F8Plain,
}

impl WeightKind {
    pub fn of(dtype: Dtype, mode: NumericsMode) -> WeightKind {
        match dtype {
            Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::MXFP4 | Dtype::Grouped(_) => match mode {
                NumericsMode::Lockstep => WeightKind::Bf16,
                NumericsMode::Fast => WeightKind::Plain,
            },
            Dtype::Q4_0 | Dtype::Q4_1 | Dtype::Q4K | Dtype::TQ1_0 | Dtype::TQ2_0 => WeightKind::W4,
            Dtype::Q2K | Dtype::Q3K => WeightKind::W4h,
            Dtype::Q5_0 | Dtype::Q5_1 | Dtype::Q8_0 | Dtype::Q5K => WeightKind::W8,
            Dtype::IQ4NL | Dtype::IQ4XS | Dtype::IQ1S | Dtype::IQ2XXS | Dtype::IQ3XXS | Dtype::IQ3S => WeightKind::W8,
            Dtype::Q6K | Dtype::IQ1M | Dtype::IQ2XS | Dtype::IQ2S => WeightKind::W8h,
            Dtype::F8E4M3 => match mode {
                NumericsMode::Lockstep => WeightKind::F8,
                NumericsMode::Fast => WeightKind::F8Plain,
            },
        }
    }

    /// The digits of a tile's group.
    const fn digit_bytes(self) -> usize {
        match self {
            WeightKind::Bf16 | WeightKind::Plain => 1024,
            WeightKind::W8 | WeightKind::W8h | WeightKind::F8 | WeightKind::F8Plain => 512,
            WeightKind::W4 | WeightKind::W4h => 256,
        }
    }

    const fn scale_bytes(self) -> usize {
        match self {
            WeightKind::Bf16 | WeightKind::Plain => 0,
            WeightKind::W8 | WeightKind::W4 | WeightKind::F8 | WeightKind::F8Plain => 64,
            WeightKind::W8h | WeightKind::W4h => 128,
        }
    }
}

/// `[n_out, k]` on the device.
pub struct Matrix {
    pub(super) k: usize,
    pub(super) n_out: usize,
    pub(super) n_runs: usize,
    pub(super) pieces: SumPieces,
    pub(super) parts: Vec<MatrixPart>,
    pub(super) n_bytes: usize,
}

/// Consecutive rows of one kind.
pub(super) struct MatrixPart {
    pub kind: WeightKind,
    pub rows: usize,
    /// The output column of the first row.
    pub first_out: usize,
    pub digits: DeviceMemory,
    pub scales: DeviceMemory,
    /// For F8: each row has one scale, which may be applied after the product.
    pub is_scaled_by_row: bool,
}

impl MatrixPart {
    pub fn n_tiles(&self) -> usize {
        self.rows.div_ceil(TILE)
    }
}

/// Copies bytes to a place on the device, and returns when the copy is complete.
type Write<'a> = dyn Fn(&DeviceMemory, usize, &[u8]) -> Result<()> + 'a;

/// The context for packing weights.
pub(super) struct Packer<'a> {
    pub context: &'a Arc<Context>,
    pub team: &'a Team,
    pub mode: NumericsMode,
    pub write: &'a Write<'a>,
}

impl Packer<'_> {
    /// Stacks rows with the same input.
    pub fn stack(&self, parts: &[StoredMatrix<'_>]) -> Result<Matrix> {
        let k = parts.first().map_or(0, |part| part.k);
        self.pack(parts, k, strands(k))
    }

    pub fn of_leaves(&self, stored: StoredMatrix<'_>, leaves: &Leaves, owned: Range<u32>) -> Result<Matrix> {
        if owned.start > owned.end || owned.end as usize > leaves.len() || leaves.len() > PIECES_MAX {
            return Err(Error::Shape(format!("leaves {owned:?} of {}", leaves.len())));
        }
        let k = leaves.elements(&owned).len();
        self.pack(&[stored], k, pieces_of(leaves, owned)?)
    }

    fn pack(&self, stored: &[StoredMatrix<'_>], k: usize, (pieces, n_runs): (SumPieces, usize)) -> Result<Matrix> {
        stored.iter().try_for_each(|stored| check(stored, k))?;
        let mut parts: Vec<MatrixPart> = Vec::new();
        let (mut first_out, mut n_bytes) = (0, 0);
        // Adjacent rows of one kind are one part: one launch computes them.
        let kind = |stored: &StoredMatrix<'_>| WeightKind::of(stored.dtype, self.mode);
        for run in stored.chunk_by(|a, b| kind(a) == kind(b)) {
            let part = self.part(run, k, first_out)?;
            first_out += part.rows;
            n_bytes += part.digits.len() + part.scales.len();
            parts.push(part);
        }
        parts.retain(|part| part.rows > 0);
        Ok(Matrix { k, n_out: first_out, n_runs, pieces, parts, n_bytes })
    }

    fn part(&self, stored: &[StoredMatrix<'_>], k: usize, first_out: usize) -> Result<MatrixPart> {
        let kind = stored.first().map_or(WeightKind::Bf16, |stored| WeightKind::of(stored.dtype, self.mode));
        let rows = stored.iter().try_fold(0usize, |n, stored| n.checked_add(stored.rows));
        let too_big = || Error::Shape(format!("a matrix of k {k} that does not fit an address space"));
        let rows = rows.ok_or_else(too_big)?;
        let n_groups = k.div_ceil(GROUP);
        let cells = rows.div_ceil(TILE).checked_mul(n_groups).ok_or_else(too_big)?;
        let bytes = |each: usize| cells.checked_mul(each).ok_or_else(too_big);
        let digits = DeviceMemory::new(self.context, "weights", bytes(kind.digit_bytes())?)?;
        let scales = DeviceMemory::new(self.context, "scales", bytes(kind.scale_bytes())?)?;
        let is_scaled_by_row = stored.iter().all(StoredMatrix::is_scaled_by_row);
        let part = MatrixPart { kind, rows, first_out, digits, scales, is_scaled_by_row };
        if cells > 0 {
            self.fill(&part, &StoredRows { stored, k, n_groups })?;
        }
        Ok(part)
    }

    /// Works in stretches, so that the host never holds a whole matrix twice.
    fn fill(&self, part: &MatrixPart, rows: &StoredRows<'_>) -> Result<()> {
        let (digit_bytes, scale_bytes) =
            (rows.n_groups * part.kind.digit_bytes(), rows.n_groups * part.kind.scale_bytes());
        let tiles_max = (STRETCH_BYTES / digit_bytes).clamp(1, part.n_tiles());
        let (mut digits, mut scales) = (vec![0u8; tiles_max * digit_bytes], vec![0u8; tiles_max * scale_bytes]);
        for first in (0..part.n_tiles()).step_by(tiles_max) {
            let n = tiles_max.min(part.n_tiles() - first);
            digits[..n * digit_bytes].fill(0);
            scales[..n * scale_bytes].fill(0);
            let (to_digits, to_scales) = (SharedPtr::new(digits.as_mut_ptr()), SharedPtr::new(scales.as_mut_ptr()));
            self.team.run(n, &|tiles| {
                for tile in tiles {
                    // SAFETY: there is room for `tiles_max` tiles; one thread has each.
                    let (digits, scales) = unsafe {
                        (
                            to_digits.part(tile * digit_bytes, digit_bytes),
                            to_scales.part(tile * scale_bytes, scale_bytes),
                        )
                    };
                    rows.pack_tile(part.kind, part.rows, first + tile, digits, scales);
                }
            });
            (self.write)(&part.digits, first * digit_bytes, &digits[..n * digit_bytes])?;
            (self.write)(&part.scales, first * scale_bytes, &scales[..n * scale_bytes])?;
        }
        Ok(())
    }
}

fn check(stored: &StoredMatrix<'_>, k: usize) -> Result<()> {
    if stored.k != k {
        return Err(Error::Shape(format!("a matrix of {} x {} where k is {k}", stored.rows, stored.k)));
    }
    if stored.rows > 1 && stored.row_stride < stored.row_bytes() {
        return Err(Error::Shape(format!("rows of {} bytes every {}", stored.row_bytes(), stored.row_stride)));
    }
    // A rank without leaves holds no columns, and its bytes are not checked.
    if stored.rows > 0 && k > 0 { stored.check() } else { Ok(()) }
}

/// Returns the cut of a sum that no rank shares.
fn strands(k: usize) -> (SumPieces, usize) {
    let n_groups = k.div_ceil(GROUP) as u32;
    let n = STRANDS.min(n_groups);
    let mut pieces = SumPieces { n, n_groups, ..SumPieces::default() };
    for i in 0..n {
        let strand = i as usize;
        pieces.end[strand] = ((u64::from(i) + 1) * u64::from(n_groups) / u64::from(n)) as u32;
        // Each is added to the previous ones, and the last ends the only run.
        (pieces.merges[strand], pieces.ends_run[strand]) = (u8::from(i > 0), u8::from(i + 1 == n));
    }
    // A product of nothing is one plane too.
    (pieces, 1)
}

/// Returns the pieces of the leaves `owned`, and the number of runs.
fn pieces_of(leaves: &Leaves, owned: Range<u32>) -> Result<(SumPieces, usize)> {
    let elements = leaves.elements(&owned);
    let mut pieces =
        SumPieces { n: owned.len() as u32, n_groups: elements.len().div_ceil(GROUP) as u32, ..SumPieces::default() };
    for (leaf, end) in owned.clone().zip(&mut pieces.end) {
        let at = leaves.leaf(leaf as usize).end - elements.start;
        if !at.is_multiple_of(GROUP as u32) && leaf as usize + 1 != leaves.len() {
            return Err(Error::Shape(format!("a leaf that ends at {at}")));
        }
        *end = at.div_ceil(GROUP as u32);
    }
    let runs = aligned_runs(owned.clone(), leaves.len() as u32);
    let runs: Vec<Range<u32>> = runs.iter().map(|run| run.start - owned.start..run.end - owned.start).collect();
    push_runs(&mut pieces, &runs);
    Ok((pieces, runs.len()))
}

/// The order of pushes and merges within each run of pieces.
fn push_runs(pieces: &mut SumPieces, runs: &[Range<u32>]) {
    for run in runs {
        let (mut fold, mut depth) = (Fold::default(), 0);
        for piece in run.clone() {
            let at = piece - run.start;
            let mut merges = fold.push(&(at..at + 1)) as usize;
            depth = depth + 1 - merges;
            let ends_run = piece + 1 == run.end;
            if ends_run {
                merges += Fold::n_last(depth);
            }
            pieces.merges[piece as usize] = merges as u8;
            pieces.ends_run[piece as usize] = ends_run.into();
        }
    }
}

/// The rows of several stored matrices, one after another.
struct StoredRows<'a> {
    stored: &'a [StoredMatrix<'a>],
    k: usize,
    n_groups: usize,
}

impl StoredRows<'_> {
    fn find(&self, row: usize) -> Option<(&StoredMatrix<'_>, usize)> {
        let mut row = row;
        for stored in self.stored {
            if row < stored.rows {
                return Some((stored, row));
            }
            row -= stored.rows;
        }
        None
    }

    /// Packs a tile into zeroed memory.
    fn pack_tile(&self, kind: WeightKind, n_rows: usize, tile: usize, digits: &mut [u8], scales: &mut [u8]) {
        for r in 0..TILE.min(n_rows - tile * TILE) {
            let Some((stored, row)) = self.find(tile * TILE + r) else { return };
            let bytes = stored.row(row);
            for group in 0..self.n_groups {
                let elements = || elements(stored, bytes, group * GROUP, GROUP.min(self.k - group * GROUP));
                match kind {
                    WeightKind::Bf16 => {
                        put_in_tile(&elements(), r, &mut digits[2 * group * TILE * GROUP..]);
                    }
                    WeightKind::Plain => {
                        put_elements(&elements(), &mut digits[2 * (r * self.n_groups + group) * GROUP..])
                    }
                    WeightKind::F8 | WeightKind::F8Plain => {
                        let at = (group * TILE + r % 8 * 2 + r / 8) * size_of::<f32>();
                        scales[at..][..size_of::<f32>()].copy_from_slice(&stored.scale(row, group).to_le_bytes());
                        self.put_floats(kind, &bytes.as_chunks().0[group], group, r, digits);
                    }
                    WeightKind::W8 | WeightKind::W8h | WeightKind::W4 | WeightKind::W4h => {
                        let digits = &mut digits[group * kind.digit_bytes()..][..kind.digit_bytes()];
                        let scales = &mut scales[group * kind.scale_bytes()..][..kind.scale_bytes()];
                        put_group(kind, &group_of(stored, bytes, group), r, digits, scales);
                    }
                }
            }
        }
    }

    /// Writes thirty-two numbers of eight bits for row `r` of a tile.
    fn put_floats(&self, kind: WeightKind, numbers: &[u8; GROUP], group: usize, r: usize, digits: &mut [u8]) {
        if kind == WeightKind::F8Plain {
            return digits[(r * self.n_groups + group) * GROUP..][..GROUP].copy_from_slice(numbers);
        }
        for (i, eight) in by_lane(numbers).chunks_exact(8).enumerate() {
            let at = group * kind.digit_bytes() + (r % 8 * 4 + i) * 16 + r / 8 * 8;
            digits[at..][..8].copy_from_slice(eight);
        }
    }
}

/// Returns some numbers of a row, each rounded once to the nearest bf16.
fn elements(stored: &StoredMatrix<'_>, row: &[u8], at: usize, n: usize) -> [bf16; GROUP] {
    let mut out = [bf16::ZERO; GROUP];
    let two = |i: usize| [row[2 * (at + i)], row[2 * (at + i) + 1]];
    let out_n = out.iter_mut().enumerate().take(n);
    match stored.dtype {
        Dtype::BF16 => out_n.for_each(|(i, out)| *out = bf16::from_le_bytes(two(i))),
        Dtype::F16 => out_n.for_each(|(i, out)| *out = bf16::from_f32(f16::from_le_bytes(two(i)).to_f32())),
        Dtype::F32 => out_n.for_each(|(i, out)| {
            let at = 4 * (at + i);
            *out = bf16::from_f32(f32::from_le_bytes([row[at], row[at + 1], row[at + 2], row[at + 3]]));
        }),
        Dtype::Grouped(grouped) => {
            let (block, sub) = block_of(stored, row, at / GROUP);
            let (scale, zero) = group_scale(grouped, block);
            out_n.for_each(|(i, out)| *out = bf16::from_f32(scale * (f32::from(sub.q[i]) - zero)));
        }
        _ => {
            let group = group_of(stored, row, at / GROUP);
            let number = |i: usize| f32::from(group.digits[i]).mul_add(group.scales[0].0, group.scales[0].1);
            out_n.for_each(|(i, out)| *out = bf16::from_f32(number(i)));
        }
    }
    out
}

/// Orders elements so that each of four lanes finds its elements of both steps of sixteen side by side; as `by_lane` of
/// the kernels.
fn by_lane<T: Copy + Default>(elements: &[T; GROUP]) -> [T; GROUP] {
    let mut out = [T::default(); GROUP];
    for (e, element) in elements.iter().enumerate() {
        out[e / 4 % 4 * 8 + e / 16 * 4 + e % 4] = *element;
    }
    out
}

/// Writes elements of row `r` of a tile where the lanes of the tensor cores find their operand of each step.
fn put_in_tile(elements: &[bf16; GROUP], r: usize, digits: &mut [u8]) {
    for (e, element) in elements.iter().enumerate() {
        let (lane, word) = (r % 8 * 4 + e / 4 % 4, e % 4 / 2 * 2 + r / 8);
        let at = ((e / 16 * 32 + lane) * 4 + word) * 2 + e % 2;
        digits[2 * at..][..2].copy_from_slice(&element.to_le_bytes());
    }
}

fn put_elements(elements: &[bf16], digits: &mut [u8]) {
    digits.as_chunks_mut::<2>().0.iter_mut().zip(elements).for_each(|(to, element)| *to = element.to_le_bytes());
}

/// Thirty-two numbers of a row: digits, and a scale and a minimum for each half.
struct DigitGroup {
    digits: [u8; GROUP],
    scales: [(f32, f32); 2],
}

/// Returns the block with these thirty-two numbers, and its unpacked description of them.
fn block_of<'a>(stored: &StoredMatrix<'_>, row: &'a [u8], group: usize) -> (&'a [u8], SubBlock) {
    let (block, block_bytes) = (stored.dtype.block(), stored.dtype.block_bytes());
    let at = stored.first + group * GROUP;
    let from = &row[at / block * block_bytes..][..block_bytes];
    (from, sub_block(stored.dtype, from, at % block / GROUP))
}

fn group_of(stored: &StoredMatrix<'_>, row: &[u8], group: usize) -> DigitGroup {
    let (_, sub) = block_of(stored, row, group);
    let Some(meaning) = digit_meaning(stored.dtype) else { unreachable!("numbers, not digits") };
    let digits = meaning.codebook.map_or(sub.q, |book| sub.q.map(|name| book[usize::from(name)]));
    let scales = [0, 1].map(|half| match scale(stored.dtype, &sub, half) {
        (scale, Some(minimum)) => (scale, minimum),
        (scale, None) => (scale, -meaning.offset * scale),
    });
    DigitGroup { digits, scales }
}

/// Returns the scale of one half, and its minimum, if the type has one.
fn scale(dtype: Dtype, sub: &SubBlock, half: usize) -> (f32, Option<f32>) {
    let number = |bytes: [u8; 2]| f16::from_le_bytes(bytes).to_f32();
    let head = |scale: f32| number(sub.head[0]) * scale;
    // Signed scales are stored with 128 added.
    let signed = |part: f32| (rounded(head((f32::from(sub.scales[0][half]) - 128.0) * part)), None);
    let pair = |scale: u8, minimum: u8| (head(scale.into()), Some(number(sub.head[1]) * f32::from(minimum)));
    match dtype {
        Dtype::Q4_0 | Dtype::Q5_0 | Dtype::Q8_0 | Dtype::IQ4NL => (number(sub.scales[0]), None),
        Dtype::Q4_1 | Dtype::Q5_1 => (number(sub.scales[0]), Some(number(sub.scales[1]))),
        Dtype::MXFP4 => (bf16::from_le_bytes(sub.scales[0]).to_f32(), None),
        Dtype::Q4K | Dtype::Q5K => pair(sub.scales[0][0], sub.scales[0][1]),
        Dtype::Q2K => pair(sub.scales[0][half] & 15, sub.scales[0][half] >> 4),
        Dtype::Q3K | Dtype::Q6K | Dtype::IQ4XS | Dtype::IQ3S => signed(1.0),
        Dtype::IQ3XXS => signed(0.25),
        Dtype::IQ1S | Dtype::IQ1M | Dtype::IQ2XXS | Dtype::IQ2XS | Dtype::IQ2S => signed(0.125),
        Dtype::TQ1_0 | Dtype::TQ2_0 => (head(1.0), None),
        Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F8E4M3 | Dtype::Grouped(_) => {
            unreachable!("numbers, not digits")
        }
    }
}

/// Rounds to the stored form, so that its multiples are exact.
fn rounded(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

fn put_group(kind: WeightKind, group: &DigitGroup, r: usize, digits: &mut [u8], scales: &mut [u8]) {
    let h = r / 8;
    for (i, eight) in by_lane(&group.digits).as_chunks::<8>().0.iter().enumerate() {
        let lane = r % 8 * 4 + i;
        match kind {
            WeightKind::W4 | WeightKind::W4h => {
                let word = eight.iter().rev().fold(0u32, |word, digit| word << 4 | u32::from(*digit));
                digits[(lane * 2 + h) * 4..][..4].copy_from_slice(&word.to_le_bytes());
            }
            _ => digits[lane * 16 + h * 8..][..8].copy_from_slice(eight),
        }
    }
    let n_halves = kind.scale_bytes() / 64;
    for (half, (scale, minimum)) in group.scales.iter().enumerate().take(n_halves) {
        let to = &mut scales[((r % 8 * n_halves + half) * 2 + h) * 4..][..4];
        to[..2].copy_from_slice(&f16::from_f32(*scale).to_le_bytes());
        to[2..].copy_from_slice(&f16::from_f32(*minimum).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaves_of(k: u32, n: u32) -> Leaves {
        Leaves::on_grain(k, n)
    }

    #[test]
    fn strands_are_quarters_of_the_groups() {
        let (pieces, n_runs) = strands(32 * 10);
        assert_eq!((pieces.n, pieces.n_groups, n_runs), (4, 10, 1));
        assert_eq!(pieces.end[..4], [2, 5, 7, 10]);
        assert_eq!((&pieces.merges[..4], &pieces.ends_run[..4]), (&[0, 1, 1, 1][..], &[0, 0, 0, 1][..]));
        let (pieces, _) = strands(70);
        assert_eq!((pieces.n, pieces.end[..3].to_vec()), (3, vec![1, 2, 3]));
        assert_eq!(pieces.merges[..3], [0, 1, 1]);
        assert_eq!(strands(0).0.n, 0);
    }

    #[test]
    fn a_rank_owns_runs_of_leaves() {
        let leaves = leaves_of(32 * 16, 8);
        let (pieces, n_runs) = pieces_of(&leaves, 3..8).unwrap();
        assert_eq!((pieces.n, pieces.n_groups, n_runs), (5, 10, 2));
        assert_eq!(pieces.end[..5], [2, 4, 6, 8, 10]);
        assert_eq!((&pieces.merges[..5], &pieces.ends_run[..5]), (&[0, 0, 1, 0, 2][..], &[1, 0, 0, 0, 1][..]));
        let (pieces, n_runs) = pieces_of(&leaves, 2..2).unwrap();
        assert_eq!((pieces.n, n_runs), (0, 0));
    }
}
