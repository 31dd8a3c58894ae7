//! Products of many rows with weights of eight bits, under `fast`. Where each row of the weights has one scale they are
//! cuBLASLt's in eight bits: the rows that meet them are rounded likewise, each by its own largest number, and what
//! comes out is multiplied by both scales. Otherwise, or where the library or the device has no way, the weights are
//! widened to bf16 some at a time, and the library multiplies those; if there are enough rows for that to take less
//! time than the kernels.

use super::buffer::Buffer;
use super::device::Cuda;
use super::driver::LaunchShape;
use super::kernels::{arguments, by_row};
use super::linear::{FLOAT, Operands};
use super::lt::NumberType;
use super::scratch::WIDENED_BYTES;
use super::table::Kernel;
use super::weights::{GROUP, Matrix, MatrixPart, TILE, WeightKind};
use crate::Result;

/// The first GPUs whose tensor cores take numbers of eight bits.
const CAPABILITY: (u32, u32) = (8, 9);
/// From so many rows on weights are widened. Widening moves five bytes for each weight where the kernels read one,
/// which is as much time as they lose to the library over some hundreds of rows; reckoned, not measured.
const WIDENED_ROWS: usize = 512;

impl Cuda {
    /// Behind a matrix that was packed.
    pub(super) fn with_f8_scratch(&self, matrix: Matrix) -> Result<Matrix> {
        if matrix.parts.iter().any(|part| part.kind == WeightKind::F8Plain) && !self.scratch().f8.is_made() {
            self.forget_graphs();
            self.scratch().reserve_f8(&self.context)?;
        }
        Ok(matrix)
    }

    /// x: bf16 rows. False: the kernels are to compute it.
    pub(super) fn product_in_f8(&self, x: u64, w: &Matrix, part: &MatrixPart, n_rows: usize, out: &Buffer) -> bool {
        let plain = Operands::plain(x, w, part, n_rows, out);
        let can = self.card.capability >= CAPABILITY && part.is_scaled_by_row;
        (can && self.in_f8(&plain, w, part)) || (n_rows >= WIDENED_ROWS && self.widened(&plain, w, part))
    }

    fn in_f8(&self, plain: &Operands, w: &Matrix, part: &MatrixPart) -> bool {
        let scratch = self.scratch();
        let (Some(places), Some(library)) = (scratch.f8.places(), &self.lt) else { return false };
        let (to, of_rows) = (places.rows.address(0), places.scales.address(0));
        let operands = Operands { number: NumberType::F8, x: to, ..*plain };
        let mut products = w.pieces.runs().enumerate().map(|(plane, run)| operands.product(plane, run));
        if !products.all(|product| self.keep_error(library.has_algorithm(&product)).unwrap_or(false)) {
            return false;
        }
        let (from, n_groups) = (plain.x, w.pieces.n_groups);
        // SAFETY: x has so many rows, and the room is as large as any buffer's rows in eight bits.
        unsafe { self.launch(Kernel::QuantizeRows, by_row(plain.n_rows), arguments![from, n_groups, to, of_rows]) };
        if !self.products_of_runs(&operands, w) {
            return false;
        }
        let (ld_out, n_out, scales) = (plain.ld_out as u32, plain.n_out as u32, part.scales.address(0));
        let shape = LaunchShape { grid: [n_out.div_ceil(1024), plain.n_rows as u32, 1], ..by_row(0) };
        for plane in 0..w.n_runs {
            let out = plain.out + (plane * plain.plane) as u64 * FLOAT;
            let args = arguments![out, ld_out, n_out, scales, n_groups, of_rows];
            // SAFETY: the product has just been written there, and each row of the part has a scale.
            unsafe { self.launch(Kernel::ScaleProduct, shape, args) };
        }
        true
    }

    /// Whole tiles of the weights at a time.
    fn widened(&self, plain: &Operands, w: &Matrix, part: &MatrixPart) -> bool {
        let scratch = self.scratch();
        let Some(places) = scratch.f8.places() else { return false };
        let (to, n_groups) = (places.widened.address(0), w.pieces.n_groups);
        let rows_each = WIDENED_BYTES.checked_div(2 * plain.ld).unwrap_or(0) / TILE * TILE;
        if rows_each == 0 {
            return false;
        }
        (0..part.rows).step_by(rows_each).all(|first| {
            let n = rows_each.min(part.rows - first);
            let (digits, scales) =
                (part.digits.address(first * plain.ld), part.scales.address(first * n_groups as usize * 4));
            let args = arguments![digits, scales, n_groups, to];
            // SAFETY: the part has so many rows from there on, a tile's first; there is room for them in bf16.
            unsafe { self.launch(Kernel::WidenWeights, by_row(n), args) };
            let out = plain.out + first as u64 * FLOAT;
            self.products_of_runs(&Operands { w: to, n_out: n, out, ..*plain }, w)
        })
    }
}

const _: () = assert!(GROUP == 32, "a scale of four bytes for each group of a row");
