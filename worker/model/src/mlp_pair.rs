//! An MLP and a mixture of experts side by side. Both read the stream, each through a norm of its own, and the sum of
//! their normed outputs is the output. The router reads the stream through a third norm.
//!
//! Each part is summed over the ranks before the norm behind it, by the tree of its own leaves. So all ranks norm the
//! same rows, and the result does not depend on how many there are.

use crate::ctx::Ctx;
use crate::error::Result;
use crate::layers::Norm;
use crate::limits::PassLimits;
use crate::mlp::{Dense, ExpertMixture, MlpScratch};
use crate::weights::WeightLoader;
use backend::{Device, Memory};
use checkpoint::{ModelSpec, NormKind};

pub struct MlpPair<M: Memory> {
    dense: Dense<M>, // mlp
    /// The number of the MLP's width among those of the model.
    width: usize,
    mixture: ExpertMixture<M>, // mlp.gate, mlp.experts
    norms: PairNorms<M>,
}

/// [hidden] each
struct PairNorms<M: Memory> {
    before_dense: Norm<M>,   // pre_feedforward_layernorm
    behind_dense: Norm<M>,   // post_feedforward_layernorm_1
    before_router: Norm<M>,  // mlp.gate.norm / sqrt(hidden)
    before_experts: Norm<M>, // pre_feedforward_layernorm_2
    behind_experts: Norm<M>, // post_feedforward_layernorm_2
}

/// The buffers that a pair works in, besides those of its parts.
pub struct PairScratch<M: Memory> {
    x: M::Buffer,    // [rows_max, hidden], a part's normed input
    part: M::Buffer, // [n_planes * rows_max, hidden], a part's output
}

impl<M: Memory> MlpPair<M> {
    /// `at` is the layer.
    pub fn load(
        at: &WeightLoader<'_, M>,
        spec: &ModelSpec,
        (dense, width): (Dense<M>, usize),
        mixture: ExpertMixture<M>,
    ) -> Result<MlpPair<M>> {
        let norm = |name| Norm::load(at, name, spec, NormKind::Rms);
        let norms = PairNorms {
            before_dense: norm("pre_feedforward_layernorm")?,
            behind_dense: norm("post_feedforward_layernorm_1")?,
            before_router: router_norm(at, spec)?,
            before_experts: norm("pre_feedforward_layernorm_2")?,
            behind_experts: norm("post_feedforward_layernorm_2")?,
        };
        Ok(MlpPair { dense, width, mixture, norms })
    }
}

/// The norm of the router's input. Its weights are divided by the root of the width once, as they are loaded.
fn router_norm<M: Memory>(at: &WeightLoader<'_, M>, spec: &ModelSpec) -> Result<Norm<M>> {
    let (name, hidden) = ("mlp.gate.norm", spec.hidden as usize);
    let factor = 1.0 / (hidden as f32).sqrt();
    let weights: Vec<f32> = at.numbers(name, [1, hidden])?.into_iter().map(|weight| weight * factor).collect();
    Ok(Norm::of(at.vector(name, &weights)?, spec.norm_eps))
}

impl<M: Memory> PairScratch<M> {
    /// `n_planes` is the largest number that a part's sum needs.
    pub fn new(device: &M, hidden: usize, n_planes: usize, limits: PassLimits) -> Result<PairScratch<M>> {
        let part = device.buffer(n_planes * limits.rows_max, hidden)?;
        Ok(PairScratch { x: device.buffer(limits.rows_max, hidden)?, part })
    }
}

impl<D: Device> MlpPair<D> {
    /// stream: [n_rows, hidden], before any norm -> out: [n_rows, hidden]
    pub fn forward(
        &self,
        ctx: &mut Ctx<'_, D>,
        stream: &D::Buffer,
        scratch: &mut MlpScratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        let MlpScratch { dense, mixture: Some(of_experts), pair: Some(PairScratch { x, part }) } = scratch else {
            unreachable!("a spec with experts beside MLPs has a scratch for them")
        };
        let (device, n_rows, norms) = (ctx.device, ctx.n_rows(), &self.norms);
        norms.before_dense.plain(device, stream, n_rows, x);
        self.dense.forward(ctx, x, &mut dense[self.width], part)?; // [n_rows, hidden]
        norms.behind_dense.plain(device, part, n_rows, out);
        norms.before_router.plain(device, stream, n_rows, x);
        self.mixture.route(ctx, x, of_experts);
        norms.before_experts.plain(device, stream, n_rows, x);
        self.mixture.apply(ctx, x, of_experts, part)?; // [n_rows, hidden]
        norms.behind_experts.plain(device, part, n_rows, x);
        device.add(x, out, n_rows);
        Ok(())
    }
}
