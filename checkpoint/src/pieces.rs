//! Where a weight is cut into pieces, each with its own hash. Depends on the model's shapes and the stored type, never
//! on a grid: no rank of any grid or device reads part of a piece.
//!
//! ```text
//! cut among rows       [ r0 .. r1 )[ r1 .. r2 ) ..      heads of a projection, columns of an MLP's input
//! cut among columns    all rows, strips of stored blocks; a block that a leaf cuts is a strip of its own
//! ```

use crate::config::ModelSpec;
use crate::tensor::Tensor;
use std::ops::Range;
use types::{DeviceClass, Dtype, Leaves};

/// Rows of a vocabulary per piece: a share may end at any row, and its rank then reads the piece to its end.
const VOCABULARY_ROWS: usize = 64;

/// The unit by which ranks divide a dimension of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CutUnit {
    Heads,
    KvHeads,
    /// Heads of K of recurrent layers.
    Keys,
    /// Heads of V of recurrent layers, and runs of a short convolution's channels.
    Values,
    /// Values that exist once for each V head.
    StateHeads,
    Inner,
    SharedInner,
    Vocabulary,
}

/// The pieces of one weight: runs of rows, or strips of columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightPieces {
    /// The bounds of the runs of rows.
    rows: Vec<usize>,
    /// The bounds of the strips, in bytes of a row.
    strips: Vec<usize>,
}

impl CutUnit {
    fn bounds(self, spec: &ModelSpec, n: usize) -> Vec<usize> {
        // Leaves differ between devices: a piece ends wherever a leaf of any device does.
        let of_leaves = |leaves: fn(DeviceClass, &ModelSpec, u32) -> Leaves| {
            let of_class =
                |class| leaves(class, spec, n as u32).bounds().iter().map(|bound| *bound as usize).collect::<Vec<_>>();
            sort_and_dedup([DeviceClass::Cpu, DeviceClass::Cuda].into_iter().flat_map(of_class).collect())
        };
        match self {
            CutUnit::Heads => of_leaves(|class, spec, n| Leaves::o_proj(class, spec.n_heads, n / spec.n_heads)),
            CutUnit::Inner | CutUnit::SharedInner => of_leaves(|class, _, n| Leaves::down_proj(class, n)),
            CutUnit::KvHeads => step_bounds(n, spec.head_dim as usize),
            CutUnit::Keys => step_bounds(n, spec.recurrence().map_or(n, |of| of.key_dim as usize)),
            CutUnit::Values => {
                of_leaves(|class, spec, _| spec.state_heads().map_or(Leaves::whole(0), |of| of.leaves(class)))
            }
            CutUnit::StateHeads => step_bounds(n, 1),
            CutUnit::Vocabulary => step_bounds(n, VOCABULARY_ROWS),
        }
    }
}

impl WeightPieces {
    /// The pieces of a tensor whose rows and columns are divided by these units.
    pub(crate) fn of(spec: &ModelSpec, [rows, cols]: [Option<CutUnit>; 2], tensor: &Tensor<'_>) -> WeightPieces {
        let strips = cols.map(|by| byte_bounds(&by.bounds(spec, tensor.cols()), tensor.dtype));
        WeightPieces {
            rows: rows.map_or_else(|| vec![0, tensor.rows()], |by| by.bounds(spec, tensor.rows())),
            strips: strips.unwrap_or_else(|| vec![0, tensor.row_bytes()]),
        }
    }

    pub fn n(&self) -> usize {
        (self.rows.len() - 1) * self.n_strips()
    }

    pub(crate) fn n_strips(&self) -> usize {
        self.strips.len() - 1
    }

    /// The runs that contain these rows.
    pub(crate) fn runs_with(&self, rows: &Range<usize>) -> Range<usize> {
        covering(&self.rows, rows)
    }

    /// The strips that contain these bytes of a row.
    pub(crate) fn strips_with(&self, bytes: &Range<usize>) -> Range<usize> {
        covering(&self.strips, bytes)
    }

    pub(crate) fn run_rows(&self, i: usize) -> Range<usize> {
        self.rows[i]..self.rows[i + 1]
    }

    pub(crate) fn strip(&self, i: usize) -> Range<usize> {
        self.strips[i]..self.strips[i + 1]
    }
}

/// Bounds at the multiples of `step`, and at the end.
fn step_bounds(n: usize, step: usize) -> Vec<usize> {
    (0..n).step_by(step.max(1)).chain([n]).collect()
}

/// The bounds, in bytes, of the stored blocks in or between which the elements' bounds fall.
fn byte_bounds(bounds: &[usize], dtype: Dtype) -> Vec<usize> {
    let (block, block_bytes) = (dtype.block(), dtype.block_bytes());
    let of_bound = |bound: &usize| [bound / block * block_bytes, bound.div_ceil(block) * block_bytes];
    sort_and_dedup(bounds.iter().flat_map(of_bound).collect())
}

fn sort_and_dedup(mut bounds: Vec<usize>) -> Vec<usize> {
    bounds.sort_unstable();
    bounds.dedup();
    bounds
}

/// Returns the intervals between `bounds` that overlap the range `range`.
fn covering(bounds: &[usize], range: &Range<usize>) -> Range<usize> {
    if range.is_empty() {
        return 0..0;
    }
    let first = bounds.partition_point(|bound| *bound <= range.start) - 1;
    first..bounds.partition_point(|bound| *bound < range.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_that_cover() {
        let bounds = [0, 64, 128, 130];
        for (range, covers) in [(0..130, 0..3), (64..128, 1..2), (63..65, 0..2), (129..130, 2..3), (5..5, 0..0)] {
            assert_eq!(covering(&bounds, &range), covers, "{range:?}");
        }
    }

    #[test]
    fn a_block_that_a_leaf_cuts_is_a_strip() {
        // Leaves of 96 in blocks of 256 numbers and 144 bytes.
        assert_eq!(byte_bounds(&[0, 96, 192, 256, 512], Dtype::Q4K), [0, 144, 288]);
        assert_eq!(byte_bounds(&[0, 384, 768], Dtype::Q4K), [0, 144, 288, 432]);
        assert_eq!(byte_bounds(&[0, 96, 192], Dtype::Q4_1), [0, 60, 120]);
        assert_eq!(step_bounds(130, 64), [0, 64, 128, 130]);
    }
}
