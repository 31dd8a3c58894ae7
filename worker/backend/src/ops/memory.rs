//! The memory of a device, and how data gets there.

use super::{KvPages, Routing, Weights};
use crate::Result;
use std::ops::Range;
use types::{DeviceClass, DeviceKind, NumericsMode};

/// The memory of a device: weights, pages, and the buffers between operations. Everything is allocated at load; a step
/// allocates nothing.
pub trait Memory: Weights + KvPages {
    /// Activations in f32: `[rows_max, cols]`.
    type Buffer: Send;
    /// The experts chosen for the rows of a pass, and the buffers to compute with them.
    type Routes: Send;

    /// The device class, which decides how sums are cut.
    fn class(&self) -> DeviceClass;
    /// Devices of equal kind agree in every bit: the class and, for a GPU, its architecture.
    fn device_kind(&self) -> DeviceKind {
        self.class().into()
    }
    /// The numerics mode, on devices that have a choice.
    fn numerics_mode(&self) -> NumericsMode {
        NumericsMode::Lockstep
    }

    fn buffer(&self, rows_max: usize, cols: usize) -> Result<Self::Buffer>;
    /// Allocates routes for passes of up to `rows_max` rows through experts of `[inner, hidden]`.
    fn routes(&self, rows_max: usize, hidden: usize, inner: usize, routing: Routing) -> Result<Self::Routes>;

    /// Reads rows back, for collectives and tests.
    fn read(&self, buffer: &Self::Buffer, rows: Range<usize>, out: &mut [f32]);
    /// Writes rows, for stage hand-off and tests.
    fn write(&self, buffer: &mut Self::Buffer, row: usize, values: &[f32]);
    /// The number of columns that `buffer` was made with.
    fn cols(&self, buffer: &Self::Buffer) -> usize;
    /// Reads columns of one row from `col` on.
    fn read_part(&self, buffer: &Self::Buffer, row: usize, col: usize, out: &mut [f32]);
    /// Writes columns of one row from `col` on.
    fn write_part(&self, buffer: &mut Self::Buffer, row: usize, col: usize, values: &[f32]);
}
