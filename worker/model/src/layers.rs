//! The layers of all families, cut over the ranks of a grid. Each layer loads only the weights that this rank owns and
//! does its own communication. So a family's file reads like its paper and contains neither ranks nor stages.
//!
//! ```text
//! layer           loads                                            communicates
//! Embedding       its rows of the vocabulary, on the first stage   shares the rows; later stages receive them
//! ColumnParallel  the rows of the heads or columns that it owns    nothing
//! RowParallel     the columns of the leaves that it owns           sums over the stage
//! Norm            all                                              nothing
//! LmHead            its rows of the vocabulary, on the last stage    gathers logits; earlier stages send their rows on
//! ```
//!
//! How a decoder uses them (`decoder.rs`):
//!
//! - `load` needs no more than a `Memory`: `Weights` carries the device and the rank's `Part`. It makes the layers
//!   `part.layers`, and numbers them from 0 for the KV cache.
//! - `OwnedHeads::of` returns which rows of Q, K and V are this rank's and which `Heads` its attention has;
//!   `owned_inner` returns the columns of an MLP. Both may be empty: then a buffer has no columns, and operations do
//!   nothing.
//! - `Residual` is the stream between sublayers. A sublayer writes to `residual.due(..)`; the next `Norm::forward` adds
//!   that and normalizes in one pass over the row. A norm of a sublayer's own output is `Norm::plain`.
//! - A bias is added where the checkpoint has one: `q_proj.bias` beside `q_proj.weight`.
//! - A sublayer's output in `due` is the same on all ranks of the stage: a `RowParallel` has summed it.

use crate::ctx::Ctx;
use crate::error::Result;
use crate::limits::PassLimits;
use crate::weights::{MatrixRows, WeightLoader};
use backend::{AttentionHeads, Device, Memory, RunOutcome};
use checkpoint::{ModelSpec, NormKind};
use std::ops::Range;
use types::leaves::aligned_runs;
use types::{DeviceClass, Leaves, RankPart};

/// The residual stream of a pass: its sum so far, and the last sublayer's output, which is not added yet.
pub struct Residual<M: Memory> {
    sum: M::Buffer, // [rows_max, hidden]
    due: M::Buffer, // [n_planes * rows_max, hidden]
    is_due: bool,
}

impl<M: Memory> Residual<M> {
    /// Makes a stream with room for the planes of the sublayers' row-parallel products.
    pub fn new(device: &M, limits: PassLimits, hidden: usize, n_planes: usize) -> Result<Residual<M>> {
        let PassLimits { rows_max, .. } = limits;
        let due = device.buffer(rows_max * n_planes.max(1), hidden)?;
        Ok(Residual { sum: device.buffer(rows_max, hidden)?, due, is_due: false })
    }

    /// The buffer to which a sublayer writes its output. [n_rows, hidden]
    pub fn due(&mut self) -> &mut M::Buffer {
        self.is_due = true;
        &mut self.due
    }

    /// The buffer in which the stream begins. [n_rows, hidden]
    pub fn begin(&mut self) -> &mut M::Buffer {
        self.is_due = false;
        &mut self.sum
    }
}

/// Runs the layers of a pass, which are the only operations in `run`, or replays the device's record of a pass of the
/// same shape. Nothing is replayed where ranks sum or share rows through the host.
pub fn run_or_replay_layers<D: Device>(
    ctx: &mut Ctx<'_, D>,
    residual: &mut Residual<D>,
    only_sums: bool,
    mut run: impl FnMut(&mut Ctx<'_, D>, &mut Residual<D>) -> Result<()>,
) -> Result<()> {
    if !only_sums || !ctx.ranks.adds_on_device() {
        return run(ctx, residual);
    }
    let (device, was_due) = (ctx.device, residual.is_due);
    loop {
        let repeated = device.run_or_replay(|| {
            residual.is_due = was_due;
            run(ctx, residual)
        })?;
        match repeated {
            RunOutcome::Done => return Ok(()),
            RunOutcome::Begun => {
                // The last sublayer's output is not added yet.
                residual.is_due = true;
                return Ok(ctx.ranks.note_replay(device)?);
            }
            // All ranks see the same steps, so all of them record here.
            RunOutcome::Recorded => ctx.ranks.stage_barrier()?,
        }
    }
}

impl<D: Device> Residual<D> {
    /// Returns the whole sum, with the same bits as in the next norm. [n_rows, hidden]
    pub fn sum_with_due(&mut self, device: &D, n_rows: usize) -> &mut D::Buffer {
        if std::mem::take(&mut self.is_due) {
            device.add(&self.due, &mut self.sum, n_rows);
        }
        &mut self.sum
    }

    /// The stream, and the buffer to which a sublayer that reads it writes its output. [n_rows, hidden] each
    pub fn sum_and_due(&mut self, device: &D, n_rows: usize) -> (&D::Buffer, &mut D::Buffer) {
        self.sum_with_due(device, n_rows);
        self.is_due = true;
        (&self.sum, &mut self.due)
    }

    /// The stream becomes the norm of itself. `x` is as large as the stream, and is overwritten.
    pub fn replace_by_norm(&mut self, norm: &Norm<D>, device: &D, n_rows: usize, x: &mut D::Buffer) {
        norm.plain(device, self.sum_with_due(device, n_rows), n_rows, x);
        std::mem::swap(&mut self.sum, x);
    }
}

/// RMS norm with its weight, or LayerNorm with a bias.
pub struct Norm<M: Memory> {
    weight: M::Vector,       // [hidden]
    bias: Option<M::Vector>, // [hidden]
    eps: f32,
}

impl<M: Memory> Norm<M> {
    pub fn load(at: &WeightLoader<'_, M>, name: &str, spec: &ModelSpec, kind: NormKind) -> Result<Norm<M>> {
        let hidden = spec.hidden as usize;
        let bias = match kind {
            NormKind::Rms => None,
            NormKind::Layer => {
                let bias = at.bias(name, hidden, 0..hidden)?.unwrap_or_else(|| vec![0.0; hidden]);
                Some(at.vector(&format!("{name}.bias"), &bias)?)
            }
        };
        Ok(Norm { weight: at.vector_plus(name, hidden, spec.norm_offset)?, bias, eps: spec.norm_eps })
    }

    /// An RMS norm of these weights.
    pub fn of(weight: M::Vector, eps: f32) -> Norm<M> {
        Norm { weight, bias: None, eps }
    }
}

impl<D: Device> Norm<D> {
    /// Returns the norm of the stream, after the due output has been added to it. out: [n_rows, hidden]
    pub fn forward(&self, device: &D, residual: &mut Residual<D>, n_rows: usize, out: &mut D::Buffer) {
        if self.bias.is_none() && std::mem::take(&mut residual.is_due) {
            device.add_rms_norm(&residual.due, &mut residual.sum, &self.weight, self.eps, n_rows, out);
        } else {
            self.plain(device, residual.sum_with_due(device, n_rows), n_rows, out);
        }
    }

    /// x: [n_rows, hidden] -> out: [n_rows, hidden]
    pub fn plain(&self, device: &D, x: &D::Buffer, n_rows: usize, out: &mut D::Buffer) {
        match &self.bias {
            None => device.rms_norm(x, &self.weight, self.eps, n_rows, out),
            Some(bias) => device.layer_norm(x, &self.weight, bias, self.eps, n_rows, out),
        }
    }
}

/// A rank's query heads, and the KV heads that they read. A KV head whose group is cut by a boundary is held on both
/// sides.
///
/// ```text
/// query heads  0 1 2 | 3 4 5 | 6 7 8      per_kv = 3
/// KV heads       0   |   1   |   2
/// rank 1               [4 ...... 8]       query 4..9, KV 1..3, first = 1
/// ```
pub struct OwnedHeads {
    pub heads: AttentionHeads,
    /// Rows of `q_proj`, which are also columns of `o_proj`.
    pub query: Range<usize>,
    /// Rows of `k_proj` and of `v_proj`.
    pub kv: Range<usize>,
    /// The leaves of the sum of `o_proj`, over all heads.
    pub leaves: Leaves,
}

impl OwnedHeads {
    /// `whole` has the heads of the whole layer.
    pub fn of(class: DeviceClass, part: &RankPart, whole: AttentionHeads) -> OwnedHeads {
        let AttentionHeads { n_heads, head_dim, per_kv, .. } = whole;
        let leaves = Leaves::o_proj(class, n_heads as u32, head_dim as u32);
        let owned = part.owned_heads(&leaves, head_dim as u32);
        let (start, end) = (owned.start as usize, owned.end as usize);
        let query = start * head_dim..end * head_dim;
        let kv = if start < end { start / per_kv..(end - 1) / per_kv + 1 } else { 0..0 };
        let heads = AttentionHeads { n_heads: end - start, n_kv_heads: kv.len(), first: start % per_kv, ..whole };
        OwnedHeads { heads, query, kv: kv.start * head_dim..kv.end * head_dim, leaves }
    }

    /// The KV heads, as the layer numbers them.
    pub fn kv_heads(&self) -> Range<u32> {
        let head_dim = self.heads.head_dim;
        (self.kv.start / head_dim) as u32..(self.kv.end / head_dim) as u32
    }
}

/// Returns a rank's columns of an MLP, and the leaves of the sum of `down_proj` over all columns.
pub fn owned_inner(class: DeviceClass, part: &RankPart, inner: usize) -> (Range<usize>, Leaves) {
    let leaves = Leaves::down_proj(class, inner as u32);
    (elements(&leaves, part), leaves)
}

fn elements(leaves: &Leaves, part: &RankPart) -> Range<usize> {
    let elements = leaves.elements(&part.owned(leaves.len() as u32));
    elements.start as usize..elements.end as usize
}

/// Matrices with the same input. Each rank holds the rows that make its own columns of the output.
pub struct ColumnParallel<M: Memory> {
    weight: M::Matrix,       // [n_out, k]
    bias: Option<M::Vector>, // [n_out]
}

impl<M: Memory> ColumnParallel<M> {
    /// The output has the owned rows of each part, one part after another.
    pub fn load(at: &WeightLoader<'_, M>, k: usize, parts: &[MatrixRows<'_>]) -> Result<ColumnParallel<M>> {
        Ok(ColumnParallel { weight: at.rows(k, parts)?, bias: stacked_bias(at, parts)? })
    }
}

impl<D: Device> ColumnParallel<D> {
    /// x: [n_rows, k] -> out: [n_rows, n_out]
    pub fn forward(&self, device: &D, x: &D::Buffer, n_rows: usize, out: &mut D::Buffer) {
        device.linear(x, &self.weight, n_rows, out);
        if let Some(bias) = &self.bias {
            device.add_bias(out, bias, n_rows);
        }
    }
}

/// None where no part has a bias; a part without one gets zeros.
fn stacked_bias<M: Memory>(at: &WeightLoader<'_, M>, parts: &[MatrixRows<'_>]) -> Result<Option<M::Vector>> {
    let bias = |part: &MatrixRows<'_>| at.bias(part.name, part.n, part.owned.clone());
    let found = parts.iter().map(bias).collect::<Result<Vec<_>>>()?;
    if found.iter().all(Option::is_none) {
        return Ok(None);
    }
    let of_part =
        |(part, bias): (&MatrixRows<'_>, Option<Vec<f32>>)| bias.unwrap_or_else(|| vec![0.0; part.owned.len()]);
    let stacked: Vec<f32> = parts.iter().zip(found).flat_map(of_part).collect();
    let names = parts.iter().map(|part| part.name).collect::<Vec<_>>().join("+");
    Ok(Some(at.vector(&format!("{names}.bias"), &stacked)?))
}

/// A matrix whose input is spread over the ranks of a stage: `o_proj` and `down_proj`. Each rank has the columns of its
/// leaves; the sum over all ranks is completed here, by the leaves' own tree.
pub struct RowParallel<M: Memory> {
    weight: M::Matrix,       // [n_out, k of the owned leaves]
    bias: Option<M::Vector>, // [n_out]
    runs: Vec<Range<u32>>,
    n_leaves: u32,
}

impl<M: Memory> RowParallel<M> {
    /// `{name}.weight` is [n_out, leaves.k()].
    pub fn load(at: &WeightLoader<'_, M>, name: &str, n_out: usize, leaves: &Leaves) -> Result<RowParallel<M>> {
        let n_leaves = leaves.len() as u32;
        let owned = at.part().owned(n_leaves);
        let weight = at.leaves(name, n_out, leaves, owned.clone())?;
        let bias = at.bias(name, n_out, 0..n_out)?.map(|bias| at.vector(&format!("{name}.bias"), &bias)).transpose()?;
        Ok(RowParallel { weight, bias, runs: aligned_runs(owned, n_leaves), n_leaves })
    }

    /// Planes that `out` needs for its rows of input: at least one, the sum.
    pub fn n_planes(&self) -> usize {
        self.runs.len().max(1)
    }
}

impl<D: Device> RowParallel<D> {
    /// x: [n_rows, k of the owned leaves] -> the first n_rows of out: [n_rows, n_out], the same on all ranks
    pub fn forward(&self, ctx: &mut Ctx<'_, D>, x: &D::Buffer, out: &mut D::Buffer) -> Result<()> {
        let (device, n_rows) = (ctx.device, ctx.n_rows());
        device.linear_runs(x, &self.weight, n_rows, out); // [runs * n_rows, n_out]
        ctx.ranks.all_reduce(device, out, &self.runs, self.n_leaves, n_rows)?;
        if let Some(bias) = &self.bias {
            device.add_bias(out, bias, n_rows);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{Layout, Rank, Shares, Stage};

    fn parts(bounds: &[u32]) -> Vec<RankPart> {
        let shares = Shares::new(bounds.iter().map(|bound| bound * (Shares::WHOLE / 16)).collect()).unwrap();
        let layout = Layout::new(vec![Stage { layers: 0..1, shares }]).unwrap();
        (0..layout.grid().n_ranks()).map(|rank| layout.part(Rank(rank))).collect()
    }

    #[test]
    fn each_query_head_is_owned_once_and_reads_its_own_kv_head() {
        let shapes = [(9, 3, 64), (6, 2, 16), (32, 8, 80), (4, 4, 8), (7, 1, 128), (40, 8, 128)];
        let classes = [DeviceClass::Cpu, DeviceClass::Cuda];
        for (class, (n_heads, n_kv_heads, head_dim)) in classes.into_iter().flat_map(|c| shapes.map(|s| (c, s))) {
            let whole = AttentionHeads::whole(n_heads, n_kv_heads, head_dim, 1.0);
            for bounds in [&[0, 16][..], &[0, 8, 16], &[0, 5, 11, 16], &[0, 0, 1, 15, 16]] {
                let mut next = 0;
                for part in parts(bounds) {
                    let OwnedHeads { heads, query, kv, .. } = OwnedHeads::of(class, &part, whole);
                    assert_eq!((query.start, query.len()), (next * head_dim, heads.n_heads * head_dim));
                    assert_eq!(kv.len(), heads.n_kv_heads * head_dim);
                    for head in 0..heads.n_heads {
                        assert_eq!(kv.start / head_dim + heads.kv_head_of(head), whole.kv_head_of(next + head));
                        assert!(heads.kv_head_of(head) < heads.n_kv_heads);
                    }
                    next += heads.n_heads;
                }
                assert_eq!(next, n_heads);
            }
        }
    }

    #[test]
    fn rank_without_leaves_owns_no_heads_or_columns() {
        let [_, none, _] = parts(&[0, 8, 8, 16]).try_into().unwrap();
        let owned = OwnedHeads::of(DeviceClass::Cpu, &none, AttentionHeads::whole(6, 2, 16, 1.0));
        assert!(owned.query.is_empty() && owned.kv.is_empty() && owned.heads.qkv_cols() == 0);
        assert!(owned_inner(DeviceClass::Cpu, &none, 224).0.is_empty());
    }
}
