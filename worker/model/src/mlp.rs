//! The part of a layer that works on each row alone: an MLP, or a mixture of experts.

use crate::ctx::Ctx;
use crate::error::Result;
use crate::layers::{ColumnParallel, RowParallel, owned_inner};
use crate::limits::PassLimits;
use crate::weights::{MatrixRows, Weights};
use backend::{Device, Expert, Memory, Routing};
use checkpoint::{ExpertsSpec, LayerSpec, ModelSpec};
use std::ops::Range;
use types::leaves::aligned_runs;

/// The activation between an MLP's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// silu(gate) * up
    Silu,
    /// gelu(gate) * up
    Gelu,
    /// gelu(up), without a gate
    PlainGelu,
}

pub enum Mlp<M: Memory> {
    Dense(Dense<M>),
    Mixture(Mixture<M>),
}

pub struct Dense<M: Memory> {
    up: ColumnParallel<M>, // gate_proj, up_proj [2 * inner, hidden]; without a gate up_proj [inner, hidden]
    down: RowParallel<M>,  // down_proj [hidden, inner]
    activation: Activation,
}

/// A mixture of experts, spread over the ranks of a stage as leaves are: each rank has a run of whole experts.
pub struct Mixture<M: Memory> {
    router: M::Matrix,       // gate [n_experts, hidden], on every rank
    experts: Vec<Expert<M>>, // experts.{e}.gate_proj, up_proj, down_proj
    runs: Vec<Range<u32>>,
    n_experts: u32,
}

/// The buffers that an MLP or a mixture works in.
pub struct MlpScratch<M: Memory> {
    gate_up: M::Buffer, // [rows_max, 2 * inner]
    inner: M::Buffer,   // [rows_max, inner]
    mixture: Option<MixtureScratch<M>>,
}

struct MixtureScratch<M: Memory> {
    scores: M::Buffer, // [rows_max, n_experts]
    routes: M::Routes,
}

impl<M: Memory> Mlp<M> {
    pub fn load(at: &Weights<'_, M>, spec: &ModelSpec, of: &LayerSpec, activation: Activation) -> Result<Mlp<M>> {
        match spec.experts.as_ref().filter(|_| of.has_experts) {
            Some(experts) => Mixture::load(at, spec.hidden as usize, experts).map(Mlp::Mixture),
            None => Dense::load(at, spec, activation).map(Mlp::Dense),
        }
    }

    pub fn n_planes(&self) -> usize {
        match self {
            Mlp::Dense(dense) => dense.down.n_planes(),
            Mlp::Mixture(mixture) => mixture.runs.len().max(1),
        }
    }
}

impl<D: Device> Mlp<D> {
    /// x: [n_rows, hidden] -> out: [n_rows, hidden]
    pub fn forward(
        &self,
        ctx: &mut Ctx<'_, D>,
        x: &D::Buffer,
        scratch: &mut MlpScratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        match (self, &mut scratch.mixture) {
            (Mlp::Dense(dense), _) => dense.forward(ctx, x, scratch, out),
            (Mlp::Mixture(mixture), Some(scratch)) => mixture.forward(ctx, x, scratch, out),
            (Mlp::Mixture(_), None) => unreachable!("a spec with experts made room for them"),
        }
    }
}

impl<M: Memory> Dense<M> {
    fn load(at: &Weights<'_, M>, spec: &ModelSpec, activation: Activation) -> Result<Dense<M>> {
        let (hidden, inner) = (spec.hidden as usize, spec.inner as usize);
        let (owned, leaves) = owned_inner(at.device().class(), at.part(), inner);
        let rows = |name| MatrixRows { name, n: inner, owned: owned.clone() };
        let up = match activation {
            Activation::Silu | Activation::Gelu => vec![rows("gate_proj"), rows("up_proj")],
            Activation::PlainGelu => vec![rows("up_proj")],
        };
        Ok(Dense {
            up: ColumnParallel::load(at, hidden, &up)?,
            down: RowParallel::load(at, "down_proj", hidden, &leaves)?,
            activation,
        })
    }
}

impl<D: Device> Dense<D> {
    fn forward(
        &self,
        ctx: &mut Ctx<'_, D>,
        x: &D::Buffer,
        scratch: &mut MlpScratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        let (device, n_rows, MlpScratch { gate_up, inner, .. }) = (ctx.device, ctx.n_rows(), scratch);
        match self.activation {
            Activation::Silu => {
                self.up.forward(device, x, n_rows, gate_up); // [n_rows, 2 * inner]
                device.silu_mul(gate_up, n_rows, inner); // [n_rows, inner]
            }
            Activation::Gelu => {
                self.up.forward(device, x, n_rows, gate_up); // [n_rows, 2 * inner]
                device.gelu_mul(gate_up, n_rows, inner); // [n_rows, inner]
            }
            Activation::PlainGelu => {
                self.up.forward(device, x, n_rows, inner); // [n_rows, inner]
                device.gelu(inner, n_rows);
            }
        }
        self.down.forward(ctx, inner, out)
    }
}

impl<M: Memory> Mixture<M> {
    fn load(at: &Weights<'_, M>, hidden: usize, spec: &ExpertsSpec) -> Result<Mixture<M>> {
        let owned = at.part().owned(spec.n);
        let inner = spec.inner as usize;
        let expert = |e: u32| {
            let at = at.under("experts").under(e);
            let gate_up = [MatrixRows::all("gate_proj", inner), MatrixRows::all("up_proj", inner)];
            let down = [MatrixRows::all("down_proj", hidden)];
            Ok(Expert { gate_up: at.rows(hidden, &gate_up)?, down: at.rows(inner, &down)? })
        };
        Ok(Mixture {
            router: at.rows(hidden, &[MatrixRows::all("gate", spec.n as usize)])?,
            experts: owned.clone().map(expert).collect::<Result<_>>()?,
            runs: aligned_runs(owned, spec.n),
            n_experts: spec.n,
        })
    }
}

impl<D: Device> Mixture<D> {
    fn forward(
        &self,
        ctx: &mut Ctx<'_, D>,
        x: &D::Buffer,
        scratch: &mut MixtureScratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        let (device, n_rows) = (ctx.device, ctx.n_rows());
        device.linear(x, &self.router, n_rows, &mut scratch.scores); // [n_rows, n_experts]
        device.route(&scratch.scores, n_rows, &mut scratch.routes);
        device.experts(x, &self.experts, &self.runs, n_rows, &mut scratch.routes, out); // [runs * n_rows, hidden]
        Ok(ctx.ranks.all_reduce(device, out, &self.runs, self.n_experts, n_rows)?)
    }
}

impl<M: Memory> MlpScratch<M> {
    pub fn new(all: &Weights<'_, M>, spec: &ModelSpec, limits: PassLimits) -> Result<MlpScratch<M>> {
        let (device, rows_max) = (all.device(), limits.rows_max);
        let inner = owned_inner(device.class(), all.part(), spec.inner as usize).0.len();
        let mixture = match &spec.experts {
            Some(experts) => Some(MixtureScratch::new(device, spec.hidden as usize, experts, limits)?),
            None => None,
        };
        Ok(MlpScratch { gate_up: device.buffer(rows_max, 2 * inner)?, inner: device.buffer(rows_max, inner)?, mixture })
    }
}

impl<M: Memory> MixtureScratch<M> {
    fn new(device: &M, hidden: usize, spec: &ExpertsSpec, limits: PassLimits) -> Result<MixtureScratch<M>> {
        let routing = Routing { n_experts: spec.n as usize, n_used: spec.n_used as usize, normalized: spec.normalized };
        Ok(MixtureScratch {
            scores: device.buffer(limits.rows_max, routing.n_experts)?,
            routes: device.routes(limits.rows_max, hidden, spec.inner as usize, routing)?,
        })
    }
}
