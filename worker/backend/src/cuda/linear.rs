//! Products: a kernel for each kind of weight and number of rows. All of them give the same bits. Under `fast`,
//! cuBLASLt computes products of many rows with plain weights, with bits of its own; `f8.rs` has those of eight bits.

use super::buffer::Buffer;
use super::device::Cuda;
use super::driver::LaunchShape;
use super::kernels::{arguments, by_row};
use super::lt::{LtProduct, NumberType};
use super::table::Kernel;
use super::weights::{GROUP, Matrix, MatrixPart, WeightKind};
use crate::Linear;
use std::ops::Range;

pub(super) const FLOAT: u64 = 4;

/// Returns how many tiles a block of the kernels for few rows computes.
pub(super) fn tiles_per_block(n_pieces: u32) -> usize {
    8 / n_pieces.next_power_of_two() as usize
}

/// The number of rows from which the library is used: with fewer, the time goes into reading the weights.
const MANY_ROWS: usize = 33;

fn kernel(part: &MatrixPart, n_pieces: u32, n_rows: usize) -> (Kernel, LaunchShape) {
    let few = [8, 16, 32];
    let choice = few.iter().position(|rows| n_rows <= *rows).unwrap_or(few.len());
    let grid = match few.get(choice) {
        Some(rows) => [part.n_tiles().div_ceil(tiles_per_block(n_pieces)), n_rows.div_ceil(*rows)],
        None => [part.rows.div_ceil(128), n_rows.div_ceil(64)],
    };
    let grid = [grid[0] as u32, grid[1] as u32, 1];
    (Kernel::linear(part.kind)[choice], LaunchShape { grid, ..by_row(0) })
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
            let (kernel, shape) = kernel(part, w.pieces.n, n_rows);
            let (digits, scales) = (part.digits.address(0), part.scales.address(0));
            let to = out.address() + part.first_out as u64 * FLOAT;
            let (ld_out, n_out, n_rows) = (w.n_out as u32, part.rows as u32, n_rows as u32);
            let args = arguments![digits, scales, x, to, ld_out, n_out, n_rows, w.pieces];
            // SAFETY: the packer laid the part out for its kind, x has this many rows of k, and out was checked to hold
            // all planes.
            unsafe { self.launch(kernel, shape, args) };
        }
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
