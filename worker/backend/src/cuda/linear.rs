//! Products: a kernel for each kind of weight and number of rows. All of them give the same bits. Under `fast`,
//! cuBLASLt computes products of many rows with plain weights, with bits of its own; `f8.rs` has those of eight bits.

use super::buffer::Buffer;
use super::device::Cuda;
use super::driver::LaunchShape;
use super::kernels::{WIDE_SHARED_BYTES, arguments, by_row};
use super::lt::{LtProduct, NumberType};
use super::table::Kernel;
use super::weights::{GROUP, Matrix, MatrixPart, WeightKind};
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

/// How a product is computed; all plans give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProductPlan {
    /// Blocks of 8, 16 or 32 rows, by their place in this list.
    Few(usize),
    Tall,
    Wide,
    /// Each piece of the sum has blocks of its own, and another kernel adds their results.
    Split,
}

impl ProductPlan {
    const FEW: [usize; 3] = [8, 16, 32];
    /// The tiles that a warp computes. With many rows, reading them takes longer than reading the weights of one tile.
    const TILES: [usize; 3] = [1, 1, 2];

    /// `scratch` is the room for the results of pieces, in bytes.
    fn of(rows: usize, n_pieces: u32, n_rows: usize, multiprocessors: usize, scratch: usize) -> ProductPlan {
        if let Some(few) = ProductPlan::FEW.iter().position(|most| n_rows <= *most) {
            return ProductPlan::Few(few);
        }
        let n_blocks = |[of_rows, of_outputs]: [usize; 2]| n_rows.div_ceil(of_rows) * rows.div_ceil(of_outputs);
        let split_bytes = n_pieces as usize * n_rows * rows * size_of::<f32>();
        match n_blocks(WIDE) {
            // Most multiprocessors have a block.
            n if 4 * n >= 3 * multiprocessors => ProductPlan::Wide,
            _ if n_pieces > 1 && n_rows <= SPLIT_ROWS_MAX && split_bytes <= scratch => ProductPlan::Split,
            n if 3 * n >= multiprocessors => ProductPlan::Wide,
            _ => ProductPlan::Tall,
        }
    }

    fn launch(self, part: &MatrixPart, n_pieces: u32, n_rows: usize) -> (Kernel, LaunchShape) {
        let kernels = Kernel::linear(part.kind);
        let wide = |depth: u32| {
            let grid = [n_rows.div_ceil(WIDE[0]) as u32, part.rows.div_ceil(WIDE[1]) as u32, depth];
            (kernels[4], LaunchShape { grid, shared_bytes: WIDE_SHARED_BYTES, ..by_row(0) })
        };
        let other =
            |kernel, grid: [usize; 2]| (kernel, LaunchShape { grid: [grid[0] as u32, grid[1] as u32, 1], ..by_row(0) });
        match self {
            ProductPlan::Few(few) => {
                let n_columns = part.n_tiles().div_ceil(ProductPlan::TILES[few] * tiles_per_block(n_pieces));
                other(kernels[few], [n_columns, n_rows.div_ceil(ProductPlan::FEW[few])])
            }
            ProductPlan::Tall => other(kernels[3], [part.rows.div_ceil(TALL[1]), n_rows.div_ceil(TALL[0])]),
            ProductPlan::Wide => wide(1),
            ProductPlan::Split => wide(n_pieces),
        }
    }
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
        let (sums, n_sm) = (&scratch.partial, self.card.multiprocessors as usize);
        let plan = ProductPlan::of(part.rows, w.pieces.n, n_rows, n_sm, sums.len());
        let (kernel, shape) = plan.launch(part, w.pieces.n, n_rows);
        let (digits, scales) = (part.digits.address(0), part.scales.address(0));
        let (ld_out, n_out, rows) = (w.n_out as u32, part.rows as u32, n_rows as u32);
        if plan != ProductPlan::Split {
            let args = arguments![digits, scales, x, to, ld_out, n_out, rows, w.pieces];
            // SAFETY: the packer laid the part out for its kind, x has this many rows of k, and out was checked to hold
            // all planes.
            return unsafe { self.launch(kernel, shape, args) };
        }
        let sums = sums.address(0);
        let args = arguments![digits, scales, x, sums, n_out, n_out, rows, w.pieces];
        // SAFETY: as above; the plan checked that the scratch has room for all pieces.
        unsafe { self.launch(kernel, shape, args) };
        let fold = LaunchShape { grid: [n_out.div_ceil(256), rows, 1], ..by_row(0) };
        let args = arguments![sums, rows, n_out, to, ld_out, w.pieces];
        // SAFETY: the kernel before wrote all pieces, and out was checked to hold all planes.
        unsafe { self.launch(Kernel::FoldSplit, fold, args) };
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

    #[test]
    fn plans_fill_the_device() {
        let of = |rows, n_pieces, n_rows| ProductPlan::of(rows, n_pieces, n_rows, 132, 32 << 20);
        assert_eq!([1, 8, 9, 32].map(|n_rows| of(4096, 8, n_rows)), [0, 0, 1, 2].map(ProductPlan::Few));
        assert_eq!([128, 2048].map(|n_rows| of(28672, 4, n_rows)), [ProductPlan::Wide; 2]);
        assert_eq!([64, 128, 256].map(|n_rows| of(4096, 8, n_rows)), [ProductPlan::Split; 3]);
        assert_eq!([512, 2048].map(|n_rows| of(4096, 8, n_rows)), [ProductPlan::Wide; 2], "no room for the pieces");
        assert_eq!(of(4096, 1, 64), ProductPlan::Tall);
    }
}
