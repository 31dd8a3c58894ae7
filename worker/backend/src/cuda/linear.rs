//! Products: a kernel for each kind of weight and number of rows. All of them give the same bits. Under `fast`,
//! cuBLASLt computes products of many rows with plain weights, with bits of its own; `f8.rs` has those of eight bits.

use super::buffer::Buffer;
use super::device::Cuda;
use super::driver::LaunchShape;
use super::kernels::{SplitPieces, SumPieces, WIDE_SHARED_BYTES, arguments, by_row};
use super::lt::{LtProduct, NumberType};
use super::table::Kernel;
use super::tiled::{TILE_OUTPUTS, row_blocks};
use super::weights::{GROUP, Matrix, MatrixPart, TILE_ROWS, WeightKind};
use crate::Linear;
use std::ops::Range;

pub(super) const FLOAT: u64 = 4;

/// Returns how many warps of a block compute pieces of different tiles, in the kernels for few rows.
pub(super) fn tiles_per_block(n_pieces: u32) -> usize {
    8 / n_pieces.next_power_of_two() as usize
}

/// The number of rows from which the library is used: with fewer, the time goes into reading the weights.
const MANY_ROWS: usize = 33;

/// Rows and outputs of a block of the kernels for many rows.
const TALL: [usize; 2] = [64, 128];
const WIDE: [usize; 2] = [128, 256];
/// The rows up to which the pieces of a product may have blocks of their own.
const SPLIT_ROWS_MAX: usize = 512;

/// About what a job of tiles takes for each group, what it takes to launch another kernel, and how fast memory is. They
/// decide whether a sum is split.
const GROUP_NANOS: usize = 460;
const FOLD_NANOS: usize = 4000;
const BYTES_PER_NANO: usize = 3500;

/// The blocks of threads that compute a product; all of them give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blocks {
    /// Of 8, 16 or 32 rows, by their place in `FEW`.
    Few(usize),
    Tall,
    Wide,
    /// By the kernel for tiles of rows.
    Tiled(Kernel),
}

/// Of each kernel for few rows: its rows, and the tiles that a warp computes. With many rows, reading them takes longer
/// than reading the weights of one tile.
const FEW: [(usize, usize); 3] = [(8, 1), (16, 1), (32, 2)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProductPlan {
    blocks: Blocks,
    /// Several blocks compute a sum, and another kernel adds their results.
    split: Option<SplitPieces>,
}

/// What the device has for a product.
#[derive(Clone, Copy, Debug)]
struct ProductRoom {
    multiprocessors: usize,
    /// Bytes for the results of pieces.
    sums: usize,
    /// The kernel for tiles of rows, if there is one, and room for the tiles.
    tiled: Option<Kernel>,
}

impl ProductRoom {
    fn plan(self, rows: usize, pieces: &SumPieces, n_rows: usize) -> ProductPlan {
        if let Some(few) = FEW.iter().position(|(most, _)| n_rows <= *most) {
            return ProductPlan { blocks: Blocks::Few(few), split: None };
        }
        if let Some(kernel) = self.tiled.filter(|_| n_rows > WIDE[0]) {
            return ProductPlan { blocks: Blocks::Tiled(kernel), split: self.split_of_tiles(rows, pieces, n_rows) };
        }
        let n_blocks = n_rows.div_ceil(WIDE[0]) * rows.div_ceil(WIDE[1]);
        let each =
            pieces.split(1).filter(|split| pieces.n > 1 && n_rows <= SPLIT_ROWS_MAX && self.fits(rows, split, n_rows));
        match n_blocks {
            // Most multiprocessors have a block.
            n if 4 * n >= 3 * self.multiprocessors => ProductPlan { blocks: Blocks::Wide, split: None },
            n if each.is_some() || 3 * n >= self.multiprocessors => ProductPlan { blocks: Blocks::Wide, split: each },
            _ => ProductPlan { blocks: Blocks::Tall, split: None },
        }
    }

    fn fits(self, rows: usize, split: &SplitPieces, n_rows: usize) -> bool {
        split.sums.n as usize * n_rows * rows * size_of::<f32>() <= self.sums
    }

    /// Returns the split that takes the least time, if that is less than without one.
    fn split_of_tiles(self, rows: usize, pieces: &SumPieces, n_rows: usize) -> Option<SplitPieces> {
        let n_blocks = n_rows.div_ceil(TILE_ROWS) * rows.div_ceil(TILE_OUTPUTS);
        let nanoseconds = |n_jobs: u32| {
            let rounds = (n_blocks * n_jobs as usize).div_ceil(self.multiprocessors);
            rounds * pieces.n_groups as usize / n_jobs as usize * GROUP_NANOS
        };
        let jobs = (2..=pieces.n).filter(|n_jobs| pieces.n.is_multiple_of(*n_jobs));
        let splits = jobs.filter_map(|n_jobs| Some((n_jobs, pieces.split(pieces.n / n_jobs)?)));
        let timed = splits.filter(|(_, split)| self.fits(rows, split, n_rows)).map(|(n_jobs, split)| {
            let moved = 2 * split.sums.n as usize * n_rows * rows * size_of::<f32>();
            (nanoseconds(n_jobs) + FOLD_NANOS + moved / BYTES_PER_NANO, split)
        });
        timed.min_by_key(|(nanos, _)| *nanos).filter(|(nanos, _)| *nanos < nanoseconds(1)).map(|(_, split)| split)
    }
}

/// A product of one part of a matrix, by a kernel.
pub(super) struct PartProduct<'a> {
    pub w: &'a Matrix,
    pub part: &'a MatrixPart,
    /// The address of rows of bf16, and their number.
    pub x: u64,
    pub n_rows: usize,
    /// The address of the first result, and the distance between two rows of them.
    pub to: u64,
    pub ld: u32,
    pub split: Option<SplitPieces>,
}

impl Cuda {
    fn multiply(&self, x: &Buffer, w: &Matrix, n_rows: usize, out: &Buffer) {
        x.check(n_rows, w.k);
        out.check(w.n_runs * n_rows, w.n_out);
        if n_rows == 0 || w.n_out == 0 || w.n_runs == 0 {
            return;
        }
        let x = self.in_bf16(x, n_rows);
        out.set_bf16(false);
        for part in &w.parts {
            if n_rows >= MANY_ROWS && self.product_by_library(x, w, part, n_rows, out) {
                continue;
            }
            self.product_by_kernel(x, w, part, n_rows, out.address() + part.first_out as u64 * FLOAT);
        }
    }

    fn product_by_kernel(&self, x: u64, w: &Matrix, part: &MatrixPart, n_rows: usize, to: u64) {
        let scratch = self.scratch();
        let room = ProductRoom {
            multiprocessors: self.card.multiprocessors as usize,
            sums: scratch.partial.len(),
            tiled: Kernel::tiled(part.kind).filter(|_| row_blocks(scratch.tiles.len(), w.k) > 0),
        };
        let ProductPlan { blocks, split } = room.plan(part.rows, &w.pieces, n_rows);
        let (n_out, ld_out) = (part.rows as u32, w.n_out as u32);
        let (to_product, ld) = split.map_or((to, ld_out), |_| (scratch.partial.address(0), n_out));
        let product = PartProduct { w, part, x, n_rows, to: to_product, ld, split };
        let (kernels, n_pieces) = (Kernel::linear(part.kind), w.pieces.n);
        match blocks {
            Blocks::Few(few) => {
                let (rows, tiles) = FEW[few];
                let n_columns = part.n_tiles().div_ceil(tiles * tiles_per_block(n_pieces));
                self.product_of_rows(&product, kernels[few], [n_columns, n_rows.div_ceil(rows), 1], 0);
            }
            Blocks::Tall => {
                let grid = [part.rows.div_ceil(TALL[1]), n_rows.div_ceil(TALL[0]), 1];
                self.product_of_rows(&product, kernels[3], grid, 0);
            }
            Blocks::Wide => {
                let n_jobs = split.map_or(1, |_| n_pieces as usize);
                let grid = [n_rows.div_ceil(WIDE[0]), part.rows.div_ceil(WIDE[1]), n_jobs];
                self.product_of_rows(&product, kernels[4], grid, WIDE_SHARED_BYTES);
            }
            Blocks::Tiled(kernel) => self.product_of_tiles(&product, kernel, &scratch.tiles),
        }
        if let Some(SplitPieces { sums, .. }) = split {
            let rows = n_rows as u32;
            let fold = LaunchShape { grid: [n_out.div_ceil(256), rows, 1], ..by_row(0) };
            let args = arguments![to_product, rows, n_out, to, ld_out, sums];
            // SAFETY: the kernel before wrote all sums, and `multiply` checked that out holds all planes.
            unsafe { self.launch(Kernel::FoldSplit, fold, args) };
        }
    }

    fn product_of_rows(&self, product: &PartProduct<'_>, kernel: Kernel, grid: [usize; 3], shared_bytes: u32) {
        let &PartProduct { w, part, x, n_rows, to, ld, .. } = product;
        let shape = LaunchShape { grid: grid.map(|n| n as u32), shared_bytes, ..by_row(0) };
        let (digits, scales, n_out, rows) =
            (part.digits.address(0), part.scales.address(0), part.rows as u32, n_rows as u32);
        let args = arguments![digits, scales, x, to, ld, n_out, rows, w.pieces];
        // SAFETY: the packer laid the part out for its kind, and x has this many rows of k. `multiply` checked that out
        // holds all planes, and the plan that the scratch has room for all pieces.
        unsafe { self.launch(kernel, shape, args) };
    }

    /// Returns false if the library does not take such a product, or has no algorithm for it: then the kernels compute
    /// it.
    fn product_by_library(&self, x: u64, w: &Matrix, part: &MatrixPart, n_rows: usize, out: &Buffer) -> bool {
        match part.kind {
            WeightKind::Plain => self.products_of_runs(&Operands::plain(x, w, part, n_rows, out), w),
            WeightKind::F8Plain => self.product_in_f8(x, w, part, n_rows, out),
            _ => false,
        }
    }

    /// Computes a product for each run of pieces, over its part of k. Returns false if the library has no algorithm.
    pub(super) fn products_of_runs(&self, operands: &Operands, w: &Matrix) -> bool {
        let Some(library) = self.lt.as_ref().filter(|_| self.is_well()) else { return false };
        for (plane, run) in w.pieces.runs().enumerate() {
            // SAFETY: the packer gave the rows this distance and padded them with zeros, as are those of x; out was
            // checked to hold all planes, and all of it lives until the stream has finished.
            let begun = unsafe { library.multiply(&self.stream, &operands.product(plane, run)) };
            match self.keep_error(begun) {
                // The kernel overwrites planes that were begun, in the order of the stream.
                Some(false) => return false,
                Some(true) => {}
                None => return true,
            }
        }
        true
    }
}

/// The operands of a library product: rows of x with rows of weights, into columns of out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    pub number: NumberType,
    pub x: u64,
    pub n_rows: usize,
    pub w: u64,
    pub n_out: usize,
    /// The column of the first row of weights, and the distance to the next plane.
    pub out: u64,
    pub plane: usize,
    pub ld: usize,
    pub ld_out: usize,
}

impl Operands {
    pub fn plain(x: u64, w: &Matrix, part: &MatrixPart, n_rows: usize, out: &Buffer) -> Operands {
        Operands {
            number: NumberType::Bf16,
            x,
            n_rows,
            w: part.digits.address(0),
            n_out: part.rows,
            out: out.address() + part.first_out as u64 * FLOAT,
            plane: n_rows * w.n_out,
            ld: w.pieces.n_groups as usize * GROUP,
            ld_out: w.n_out,
        }
    }

    /// Returns the product over the pieces of one run.
    pub fn product(&self, plane: usize, run: Range<u32>) -> LtProduct {
        let size = match self.number {
            NumberType::Bf16 => 2,
            NumberType::F8 => 1,
        };
        let start = u64::from(run.start) * (GROUP * size) as u64;
        LtProduct {
            number: self.number,
            shape: [self.n_out, self.n_rows, run.len() * GROUP],
            w: self.w + start,
            x: self.x + start,
            out: self.out + (plane * self.plane) as u64 * FLOAT,
            ld: self.ld,
            ld_out: self.ld_out,
        }
    }
}

impl Linear for Cuda {
    fn linear(&self, x: &Buffer, w: &Matrix, n_rows: usize, out: &mut Buffer) {
        assert_eq!(w.n_runs, 1, "`linear` requires a matrix whose leaves end in one run");
        self.multiply(x, w, n_rows, out);
    }

    fn linear_runs(&self, x: &Buffer, w: &Matrix, n_rows: usize, out: &mut Buffer) {
        self.multiply(x, w, n_rows, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of eight leaves, or strands.
    fn pieces(n: u32) -> SumPieces {
        let merges = if n == 8 { [0, 1, 0, 2, 0, 1, 0, 3] } else { [0, 1, 1, 1, 0, 0, 0, 0] };
        let mut pieces = SumPieces { n, n_groups: 128, merges, ..SumPieces::default() };
        pieces.ends_run[n as usize - 1] = 1;
        pieces
    }

    const TILED: Blocks = Blocks::Tiled(Kernel::LinearBf16R256);

    /// Returns the blocks of a plan, and the number of sums that are stored if it is split.
    fn plan_of(tiled: Option<Kernel>, rows: usize, n_pieces: u32, n_rows: usize) -> (Blocks, Option<u32>) {
        let room = ProductRoom { multiprocessors: 132, sums: 32 << 20, tiled };
        let ProductPlan { blocks, split } = room.plan(rows, &pieces(n_pieces), n_rows);
        (blocks, split.map(|split| split.sums.n))
    }

    #[test]
    fn plans_fill_the_device() {
        let of = |rows, n_pieces, n_rows| plan_of(None, rows, n_pieces, n_rows);
        assert_eq!([1, 8, 9, 32].map(|n_rows| of(4096, 8, n_rows)), [0, 0, 1, 2].map(|few| (Blocks::Few(few), None)));
        assert_eq!([128, 2048].map(|n_rows| of(28672, 4, n_rows)), [(Blocks::Wide, None); 2]);
        assert_eq!([64, 128, 256].map(|n_rows| of(4096, 8, n_rows)), [(Blocks::Wide, Some(8)); 3]);
        assert_eq!([512, 2048].map(|n_rows| of(4096, 8, n_rows)), [(Blocks::Wide, None); 2], "no room for the pieces");
        assert_eq!(of(4096, 1, 64), (Blocks::Tall, None));
    }

    #[test]
    fn many_rows_are_tiled_where_a_kernel_reads_tiles() {
        let of = |rows, n_pieces, n_rows| plan_of(Some(Kernel::LinearBf16R256), rows, n_pieces, n_rows);
        assert_eq!([32, 128].map(|n_rows| of(4096, 8, n_rows)), [(Blocks::Few(2), None), (Blocks::Wide, Some(8))]);
        // 16, 32 and 64 jobs for 132 multiprocessors, and then 256.
        assert_eq!([of(2048, 8, 129), of(4096, 8, 256)], [8, 4].map(|n| (TILED, Some(n))));
        assert_eq!([512, 2048].map(|n_rows| of(4096, 8, n_rows)), [(TILED, Some(2)), (TILED, None)]);
        assert_eq!(of(6144, 4, 512), (TILED, None), "96 jobs are one round, and halves would be two");
    }
}
