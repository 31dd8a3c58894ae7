//! Buffers and vectors: numbers of the device, and the form that they have.

use super::device::Cuda;
use super::driver::DeviceMemory;
use super::kernels::{arguments, by_row_part};
use super::table::Kernel;
use super::weights::GROUP;
use std::sync::atomic::{AtomicBool, Ordering};

/// `[rows_max, cols]`, in f32 or, where a product is what reads it, in bf16.
pub struct Buffer {
    pub(super) bytes: DeviceMemory,
    pub(super) rows_max: usize,
    pub(super) cols: usize,
    pub(super) is_bf16: AtomicBool,
}

impl Buffer {
    pub(super) fn is_bf16(&self) -> bool {
        self.is_bf16.load(Ordering::Relaxed)
    }

    /// What an operation is about to write.
    pub(super) fn set_bf16(&self, is_bf16: bool) {
        self.is_bf16.store(is_bf16, Ordering::Relaxed);
    }

    pub(super) fn row_bytes(&self) -> usize {
        if self.is_bf16() { padded(self.cols) * 2 } else { self.cols * 4 }
    }

    /// An operation that does not fit its buffers is a bug of its caller.
    pub(super) fn check(&self, n_rows: usize, cols: usize) {
        let fits = n_rows <= self.rows_max && cols == self.cols;
        assert!(fits, "{n_rows} rows of {cols} in a buffer of {} x {}", self.rows_max, self.cols);
    }

    pub(super) fn address(&self) -> u64 {
        self.bytes.address(0)
    }
}

/// A vector of f32.
pub struct Vector {
    pub(super) bytes: DeviceMemory,
    pub(super) len: usize,
}

impl Vector {
    pub(super) fn address(&self) -> u64 {
        self.bytes.address(0)
    }
}

/// The numbers that a row of bf16 has room for.
pub(super) fn padded(cols: usize) -> usize {
    cols.next_multiple_of(GROUP)
}

impl Cuda {
    /// Begins to copy the first rows of a buffer to another.
    pub fn copy_rows(&self, from: &Buffer, to: &mut Buffer, n_rows: usize) {
        from.check(n_rows, to.cols);
        to.check(n_rows, to.cols);
        to.set_bf16(from.is_bf16());
        self.keep_error(self.stream.copy(&to.bytes, 0, &from.bytes, 0, n_rows * from.row_bytes()));
    }

    /// The rows in bf16: where they are, or rounded into the scratch. Another such call takes that away.
    pub(super) fn in_bf16(&self, x: &Buffer, n_rows: usize) -> u64 {
        if x.is_bf16() {
            return x.address();
        }
        let (from, cols, to) = (x.address(), x.cols as u32, self.scratch().rows.address(0));
        // SAFETY: x has so many rows, and `buffer` made the scratch as large as any buffer's rows in bf16.
        unsafe { self.launch(Kernel::RoundRows, by_row_part(n_rows, cols as usize), arguments![from, cols, to]) };
        to
    }

    /// Makes the rows f32 where they stand.
    pub(super) fn to_f32(&self, x: &Buffer, n_rows: usize) {
        if !x.is_bf16() {
            return;
        }
        let scratch = self.scratch();
        if n_rows > 0 && x.cols > 0 {
            self.keep_error(self.stream.copy(&scratch.rows, 0, &x.bytes, 0, n_rows * x.row_bytes()));
            let (from, cols, to) = (scratch.rows.address(0), x.cols as u32, x.address());
            // SAFETY: the scratch has the rows in bf16, and x is as large in f32.
            unsafe { self.launch(Kernel::WidenRows, by_row_part(n_rows, cols as usize), arguments![from, cols, to]) };
        }
        x.set_bf16(false);
    }
}
