//! What families are built of, where it is more than one operation of the device. The all-reduce lives in here.

use crate::Result;
use backend::{Device, Stored};
use collective::Collective;
use std::ops::Range;
use types::Leaves;
use types::leaves::aligned_runs;

/// RMS norm with its weight.
pub struct Norm<D: Device> {
    pub weight: D::Vector, // [hidden]
    pub eps: f32,
}

impl<D: Device> Norm<D> {
    /// x: [n_rows, hidden] -> out: [n_rows, hidden]
    pub fn forward(&self, device: &D, x: &D::Buffer, n_rows: usize, out: &mut D::Buffer) {
        device.rms_norm(x, &self.weight, self.eps, n_rows, out);
    }

    /// residual += x, then its norm. All: [n_rows, hidden]
    pub fn add(&self, device: &D, x: &D::Buffer, residual: &mut D::Buffer, n_rows: usize, out: &mut D::Buffer) {
        device.add_rms_norm(x, residual, &self.weight, self.eps, n_rows, out);
    }
}

/// A matrix whose input is spread over the ranks of a stage: `o_proj` and `down_proj`. Each rank has the columns of its
/// leaves; the sum over all ranks is finished in here, by the leaves' own tree.
pub struct RowParallel<D: Device> {
    weight: D::Matrix, // [n_out, k of the owned leaves]
    runs: Vec<Range<u32>>,
    n_leaves: u32,
}

impl<D: Device> RowParallel<D> {
    /// `whole`: [n_out, k], of which this rank keeps the columns of the leaves that it owns.
    pub fn load(device: &D, collective: &Collective, whole: Stored<'_>, leaves: &Leaves) -> Result<RowParallel<D>> {
        RowParallel::load_owned(device, whole, leaves, collective.owned(leaves.len() as u32))
    }

    fn load_owned(device: &D, whole: Stored<'_>, leaves: &Leaves, owned: Range<u32>) -> Result<RowParallel<D>> {
        let n_leaves = leaves.len() as u32;
        let elements = leaves.elements(&owned);
        let stored = whole.columns(elements.start as usize..elements.end as usize)?;
        let weight = device.matrix_leaves(stored, leaves, owned.clone())?;
        Ok(RowParallel { weight, runs: aligned_runs(owned, n_leaves), n_leaves })
    }

    /// Rows that `out` needs for each row of input.
    pub fn n_planes(&self) -> usize {
        self.runs.len()
    }

    pub fn bytes(&self, device: &D) -> usize {
        device.matrix_bytes(&self.weight)
    }

    /// x: [n_rows, k of the owned leaves] -> the first n_rows of out: [n_rows, n_out]
    pub fn forward(
        &self,
        device: &D,
        collective: &Collective,
        x: &D::Buffer,
        n_rows: usize,
        out: &mut D::Buffer,
    ) -> Result<()> {
        device.linear_runs(x, &self.weight, n_rows, out); // [n_planes * n_rows, n_out]
        Ok(collective.sum_leaves(device, out, &self.runs, self.n_leaves, n_rows)?)
    }
}
