//! Products: the kernel for the kind of weight and the number of rows. All of them give the same bits.

use super::driver::Shape;
use super::kernels::arguments;
use super::weights::{Kind, Part};
use super::{Buffer, Cuda, Matrix, by_row};
use crate::Linear;

const FLOAT: u64 = 4;

/// By kind, for at most 8, 16 and 32 rows, and for more.
fn names(kind: Kind) -> [&'static str; 4] {
    match kind {
        Kind::Bf16 => ["linear_bf16_r8", "linear_bf16_r16", "linear_bf16_r32", "linear_bf16_r64"],
        Kind::W8 => ["linear_w8_r8", "linear_w8_r16", "linear_w8_r32", "linear_w8_r64"],
        Kind::W8h => ["linear_w8h_r8", "linear_w8h_r16", "linear_w8h_r32", "linear_w8h_r64"],
        Kind::W4 => ["linear_w4_r8", "linear_w4_r16", "linear_w4_r32", "linear_w4_r64"],
        Kind::W4h => ["linear_w4h_r8", "linear_w4h_r16", "linear_w4h_r32", "linear_w4h_r64"],
    }
}

/// Tiles that a block of the kernels for few rows computes.
pub(super) fn tiles_per_block(n_pieces: u32) -> usize {
    8 / n_pieces.next_power_of_two() as usize
}

fn kernel(part: &Part, n_pieces: u32, n_rows: usize) -> (&'static str, Shape) {
    let few = [8, 16, 32];
    let choice = few.iter().position(|rows| n_rows <= *rows).unwrap_or(few.len());
    let grid = match few.get(choice) {
        Some(rows) => [part.n_tiles().div_ceil(tiles_per_block(n_pieces)), n_rows.div_ceil(*rows)],
        None => [part.rows.div_ceil(128), n_rows.div_ceil(64)],
    };
    let grid = [grid[0] as u32, grid[1] as u32, 1];
    (names(part.kind)[choice], Shape { grid, ..by_row(0) })
}

impl Cuda {
    fn product(&self, x: &Buffer, w: &Matrix, n_rows: usize, out: &Buffer) {
        x.check(n_rows, w.k);
        out.check(w.n_runs * n_rows, w.n_out);
        if n_rows == 0 || w.n_out == 0 || w.n_runs == 0 {
            return;
        }
        let x = self.in_bf16(x, n_rows);
        out.becomes_bf16(false);
        for part in &w.parts {
            let (name, shape) = kernel(part, w.pieces.n, n_rows);
            let (digits, scales) = (part.digits.at(0), part.scales.at(0));
            let to = out.at() + part.first_out as u64 * FLOAT;
            let (ld_out, n_out, n_rows) = (w.n_out as u32, part.rows as u32, n_rows as u32);
            let args = arguments![digits, scales, x, to, ld_out, n_out, n_rows, w.pieces];
            // SAFETY: the packer laid the part out for its kind, x has so many rows of k, and out was seen to hold all
            // planes.
            unsafe { self.launch(name, shape, args) };
        }
    }
}

impl Linear for Cuda {
    fn linear(&self, x: &Buffer, w: &Matrix, n_rows: usize, out: &mut Buffer) {
        assert_eq!(w.n_runs, 1, "the product of a matrix of leaves that ends in one run");
        self.product(x, w, n_rows, out);
    }

    fn linear_runs(&self, x: &Buffer, w: &Matrix, n_rows: usize, out: &mut Buffer) {
        self.product(x, w, n_rows, out);
    }
}
