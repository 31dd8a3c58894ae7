//! Products with weights.

use super::Memory;

/// Products with packed weights. A rank may own no rows, heads or leaves of a matrix: every operation, here and in the
/// other traits, accepts empty matrices and buffers and does nothing with them.
pub trait Linear: Memory {
    /// `out = x · wᵀ` for the first `n_rows` rows. x: [n_rows, k], out: [n_rows, n_out].
    fn linear(&self, x: &Self::Buffer, w: &Self::Matrix, n_rows: usize, out: &mut Self::Buffer);
    /// The row-parallel product: one plane for each aligned run that this rank owns.
    /// x: [n_rows, k of the owned leaves], out: [n_runs * n_rows, n_out], plane after plane.
    fn linear_runs(&self, x: &Self::Buffer, w: &Self::Matrix, n_rows: usize, out: &mut Self::Buffer);
}
