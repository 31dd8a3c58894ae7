//! The part of a layer that works on each row alone: an MLP, a mixture of experts, or both side by side.

use crate::ctx::Ctx;
use crate::error::Result;
use crate::layers::{ColumnParallel, RowParallel, owned_inner};
use crate::limits::PassLimits;
use crate::mlp_pair::{MlpPair, PairScratch};
use crate::weights::{MatrixRows, WeightLoader};
use backend::{Clamp, Device, ElementOp, Expert, ExpertStack, Gate, Memory, MlpActivation, Routing, Scoring};
use checkpoint::{Activation, ClampedSilu, ExpertScores, ExpertsSpec, LayerSpec, ModelMultipliers, ModelSpec};
use std::ops::Range;
use types::leaves::aligned_runs;

pub enum Mlp<M: Memory> {
    /// With the number of its width among those of the model.
    Dense(Dense<M>, usize),
    Mixture(ExpertMixture<M>),
    Pair(MlpPair<M>),
}

pub struct Dense<M: Memory> {
    up: ColumnParallel<M>, // gate_proj, up_proj [2 * inner, hidden]; without a gate up_proj [inner, hidden]
    down: RowParallel<M>,  // down_proj [hidden, inner]
    activation: MlpActivation,
    /// This rank's columns.
    n_columns: usize,
    /// What the gate and the output are multiplied by.
    gate_factor: Option<f32>,
    factor: Option<f32>,
}

/// A mixture of experts, spread over the ranks of a stage as leaves are: each rank has a run of whole experts.
pub struct ExpertMixture<M: Memory> {
    router: M::Matrix,              // gate [n_experts, hidden], on every rank
    router_bias: Option<M::Vector>, // gate.bias [n_experts]
    /// Added to scores for the choice alone.
    correction: Option<M::Vector>, // gate.e_score_correction_bias [n_experts]
    /// The weights of chosen experts are multiplied by theirs.
    factors: Option<M::Vector>, // gate.factors [n_experts]
    experts: ExpertStack<M>,        // experts.{e}.gate_proj, up_proj, down_proj
    /// The expert that all rows use besides.
    shared: Option<Dense<M>>, // shared_experts
    /// That one's output is multiplied by its sigmoid.
    shared_gate: Option<M::Matrix>, // shared_expert_gate [1, hidden], on every rank
    runs: Vec<Range<u32>>,
    n_experts: u32,
}

/// The buffers that an MLP or a mixture works in.
pub struct MlpScratch<M: Memory> {
    /// For each width.
    pub dense: Vec<DenseScratch<M>>,
    pub mixture: Option<MixtureScratch<M>>,
    pub pair: Option<PairScratch<M>>,
}

pub struct MixtureScratch<M: Memory> {
    scores: M::Buffer, // [rows_max, n_experts]
    routes: M::Routes,
    shared: Option<SharedExpertScratch<M>>,
}

struct SharedExpertScratch<M: Memory> {
    dense: DenseScratch<M>,
    out: M::Buffer,  // [n_planes * rows_max, hidden]
    gate: M::Buffer, // [rows_max, 1]
}

pub struct DenseScratch<M: Memory> {
    gate_up: M::Buffer, // [rows_max, 2 * inner]
    inner: M::Buffer,   // [rows_max, inner]
}

impl<M: Memory> Mlp<M> {
    /// `at` is the layer, whose MLP is `mlp`.
    pub fn load(at: &WeightLoader<'_, M>, spec: &ModelSpec, of: &LayerSpec, activation: Activation) -> Result<Mlp<M>> {
        let (in_mlp, hidden, inner) = (at.at_path("mlp"), spec.hidden as usize, spec.inner_of(of));
        let width = widths(spec).iter().position(|width| *width == inner).unwrap_or(0);
        let ModelMultipliers { mlp_gate: gate_factor, mlp: factor, .. } = spec.factors;
        let dense = || -> Result<Dense<M>> {
            Ok(Dense { gate_factor, factor, ..Dense::load(&in_mlp, hidden, inner as usize, activation)? })
        };
        let mixture = |experts| ExpertMixture::load(&in_mlp, hidden, experts, activation);
        match spec.experts.as_ref().filter(|_| of.has_experts) {
            None => Ok(Mlp::Dense(dense()?, width)),
            Some(experts) if experts.is_beside_mlp => {
                MlpPair::load(at, spec, (dense()?, width), mixture(experts)?).map(Mlp::Pair)
            }
            Some(experts) => mixture(experts).map(Mlp::Mixture),
        }
    }

    /// Planes that `out` needs: at least one, the sum.
    pub fn n_planes(&self) -> usize {
        match self {
            Mlp::Dense(dense, _) => dense.down.n_planes(),
            Mlp::Mixture(mixture) => mixture.runs.len().max(1),
            Mlp::Pair(_) => 1,
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
            (Mlp::Dense(dense, width), _) => dense.forward(ctx, x, &mut scratch.dense[*width], out),
            (Mlp::Pair(pair), _) => pair.forward(ctx, x, scratch, out),
            (Mlp::Mixture(mixture), Some(scratch)) => mixture.forward(ctx, x, scratch, out),
            (Mlp::Mixture(_), None) => unreachable!("a spec with experts has a scratch for them"),
        }
    }
}

impl<M: Memory> Dense<M> {
    fn load(at: &WeightLoader<'_, M>, hidden: usize, inner: usize, activation: Activation) -> Result<Dense<M>> {
        let (owned, leaves) = owned_inner(at.device().class(), at.part(), inner);
        let rows = |name| MatrixRows { name, n: inner, owned: owned.clone() };
        let up = match activation.has_gate() {
            true => vec![rows("gate_proj"), rows("up_proj")],
            false => vec![rows("up_proj")],
        };
        Ok(Dense {
            up: ColumnParallel::load(at, hidden, &up)?,
            down: RowParallel::load(at, "down_proj", hidden, &leaves)?,
            activation: mlp_activation(activation),
            n_columns: owned.len(),
            gate_factor: None,
            factor: None,
        })
    }
}

impl<D: Device> Dense<D> {
    /// x: [n_rows, hidden] -> out: [n_rows, hidden], the same on all ranks
    pub fn forward(
        &self,
        ctx: &mut Ctx<'_, D>,
        x: &D::Buffer,
        scratch: &mut DenseScratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        let (device, n_rows, DenseScratch { gate_up, inner }) = (ctx.device, ctx.n_rows(), scratch);
        match self.activation {
            MlpActivation::Gated(gate) => {
                self.up.forward(device, x, n_rows, gate_up); // [n_rows, 2 * inner]
                self.scale_gate(ctx, gate_up, inner);
                device.apply_gate(gate_up, gate, n_rows, inner); // [n_rows, inner]
            }
            MlpActivation::Plain(op) => {
                self.up.forward(device, x, n_rows, inner); // [n_rows, inner]
                device.map(inner, op, n_rows);
            }
        }
        self.down.forward(ctx, inner, out)?;
        self.factor.iter().for_each(|factor| device.map(out, ElementOp::Scale(*factor), n_rows));
        Ok(())
    }

    /// Multiplies the gate by its factor, if it has one. gate_up: [n_rows, 2 * inner]
    fn scale_gate(&self, ctx: &Ctx<'_, D>, gate_up: &mut D::Buffer, inner: &mut D::Buffer) {
        let (device, n_rows, columns) = (ctx.device, ctx.n_rows(), 0..self.n_columns);
        if let Some(factor) = self.gate_factor {
            device.copy_columns(gate_up, 0..n_rows, columns.clone(), inner, 0, 0);
            device.map(inner, ElementOp::Scale(factor), n_rows);
            device.copy_columns(inner, 0..n_rows, columns, gate_up, 0, 0);
        }
    }
}

impl<M: Memory> ExpertMixture<M> {
    fn load(
        at: &WeightLoader<'_, M>,
        hidden: usize,
        spec: &ExpertsSpec,
        activation: Activation,
    ) -> Result<ExpertMixture<M>> {
        let owned = at.part().owned(spec.n);
        let inner = spec.inner as usize;
        let expert = |e: u32| {
            let at = at.at_path("experts").at_path(e);
            let gate = activation.has_gate().then(|| MatrixRows::all("gate_proj", inner));
            let gate_up: Vec<_> = gate.into_iter().chain([MatrixRows::all("up_proj", inner)]).collect();
            let down = [MatrixRows::all("down_proj", hidden)];
            Ok(Expert { gate_up: at.rows(hidden, &gate_up)?, down: at.rows(inner, &down)? })
        };
        let n = spec.n as usize;
        let bias = |name: &str| -> Result<Option<M::Vector>> {
            at.bias(name, n, 0..n)?.map(|bias| at.vector(&format!("{name}.bias"), &bias)).transpose()
        };
        Ok(ExpertMixture {
            router_bias: if spec.has_bias { bias("gate")? } else { None },
            correction: match spec.scores {
                ExpertScores::Softmax => None,
                ExpertScores::Sigmoid { .. } => Some(at.vector_part("gate.e_score_correction_bias", n, 0..n)?),
            },
            factors: match spec.is_beside_mlp {
                true => Some(at.vector_part("gate.factors", n, 0..n)?),
                false => None,
            },
            shared: match spec.shared {
                0 => None,
                inner => Some(Dense::load(&at.at_path("shared_experts"), hidden, inner as usize, activation)?),
            },
            shared_gate: match spec.has_shared_gate {
                true => Some(at.rows(hidden, &[MatrixRows::all("shared_expert_gate", 1)])?),
                false => None,
            },
            router: at.rows(hidden, &[MatrixRows::all("gate", spec.n as usize)])?,
            experts: ExpertStack {
                all: owned.clone().map(expert).collect::<Result<_>>()?,
                activation: expert_activation(spec, activation),
                biases: if spec.has_bias { Some(biases(at, hidden, spec, owned.clone())?) } else { None },
            },
            runs: aligned_runs(owned, spec.n),
            n_experts: spec.n,
        })
    }
}

impl<D: Device> ExpertMixture<D> {
    /// x: [n_rows, hidden] -> out: [n_rows, hidden], the same on all ranks
    fn forward(
        &self,
        ctx: &mut Ctx<'_, D>,
        x: &D::Buffer,
        scratch: &mut MixtureScratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        self.route(ctx, x, scratch);
        self.apply(ctx, x, scratch, out)
    }

    /// Chooses the experts of each row. x: [n_rows, hidden]
    pub fn route(&self, ctx: &Ctx<'_, D>, x: &D::Buffer, scratch: &mut MixtureScratch<D>) {
        let (device, n_rows) = (ctx.device, ctx.n_rows());
        device.linear(x, &self.router, n_rows, &mut scratch.scores); // [n_rows, n_experts]
        if let Some(bias) = &self.router_bias {
            device.add_bias(&mut scratch.scores, bias, n_rows);
        }
        device.route(&scratch.scores, self.correction.as_ref(), n_rows, &mut scratch.routes);
        if let Some(factors) = &self.factors {
            device.scale_choices(factors, &mut scratch.routes);
        }
    }

    /// Sums the outputs of the chosen experts. x: [n_rows, hidden] -> out: [n_rows, hidden], the same on all ranks
    pub fn apply(
        &self,
        ctx: &mut Ctx<'_, D>,
        x: &D::Buffer,
        scratch: &mut MixtureScratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        let (device, n_rows) = (ctx.device, ctx.n_rows());
        // [runs * n_rows, hidden]
        device.apply_experts(x, &self.experts, &self.runs, n_rows, &mut scratch.routes, out);
        ctx.ranks.all_reduce(device, out, &self.runs, self.n_experts, n_rows)?;
        if let (Some(shared), Some(SharedExpertScratch { dense, out: its, gate })) = (&self.shared, &mut scratch.shared)
        {
            shared.forward(ctx, x, dense, its)?; // [n_rows, hidden]
            if let Some(weight) = &self.shared_gate {
                device.linear(x, weight, n_rows, gate); // [n_rows, 1]
                device.sigmoid_mul(gate, n_rows, its);
            }
            device.add(its, out, n_rows);
        }
        Ok(())
    }
}

fn mlp_activation(activation: Activation) -> MlpActivation {
    match activation {
        Activation::Silu => MlpActivation::Gated(Gate::Silu),
        Activation::Gelu => MlpActivation::Gated(Gate::Gelu),
        Activation::GeluErf => MlpActivation::Gated(Gate::GeluErf),
        Activation::PlainGelu => MlpActivation::Plain(ElementOp::Gelu),
        Activation::PlainGeluErf => MlpActivation::Plain(ElementOp::GeluErf),
        Activation::SquaredRelu => MlpActivation::Plain(ElementOp::ReluSquared),
    }
}

fn expert_activation(spec: &ExpertsSpec, activation: Activation) -> MlpActivation {
    match spec.clamp {
        Some(ClampedSilu { alpha, limit }) => MlpActivation::Gated(Gate::Clamped(Clamp { alpha, limit })),
        None => mlp_activation(activation),
    }
}

/// The biases of these experts, one after another: of gate and up, and of down.
fn biases<M: Memory>(
    at: &WeightLoader<'_, M>,
    hidden: usize,
    spec: &ExpertsSpec,
    owned: Range<u32>,
) -> Result<[M::Vector; 2]> {
    let inner = spec.inner as usize;
    let (mut gate_up, mut down) = (Vec::new(), Vec::new());
    for e in owned {
        let at = at.at_path("experts").at_path(e);
        let all =
            |name: &str, n: usize| -> Result<Vec<f32>> { Ok(at.bias(name, n, 0..n)?.unwrap_or_else(|| vec![0.0; n])) };
        gate_up.extend([all("gate_proj", inner)?, all("up_proj", inner)?].concat());
        down.extend(all("down_proj", hidden)?);
    }
    let at = at.at_path("experts");
    Ok([at.vector("gate_proj+up_proj.bias", &gate_up)?, at.vector("down_proj.bias", &down)?])
}

/// Returns each width that some layer's MLP has.
fn widths(spec: &ModelSpec) -> Vec<u32> {
    let mut widths: Vec<u32> = spec.layers.iter().map(|layer| spec.inner_of(layer)).collect();
    widths.sort_unstable();
    widths.dedup();
    widths
}

impl<M: Memory> MlpScratch<M> {
    pub fn new(all: &WeightLoader<'_, M>, spec: &ModelSpec, limits: PassLimits) -> Result<MlpScratch<M>> {
        let mixture = match &spec.experts {
            Some(experts) => Some(MixtureScratch::new(all, spec.hidden as usize, experts, limits)?),
            None => None,
        };
        let dense = widths(spec).into_iter().map(|inner| DenseScratch::new(all, inner as usize, limits));
        let pair = match &spec.experts {
            Some(experts) if experts.is_beside_mlp => {
                let of_dense = widths(spec).into_iter().map(|inner| n_dense_planes(all, inner as usize)).max();
                let n_planes = n_planes(all, experts.n).max(of_dense.unwrap_or(1));
                Some(PairScratch::new(all.device(), spec.hidden as usize, n_planes, limits)?)
            }
            _ => None,
        };
        Ok(MlpScratch { dense: dense.collect::<Result<_>>()?, mixture, pair })
    }
}

/// Planes of a sum of so many leaves, on this rank.
fn n_planes<M: Memory>(all: &WeightLoader<'_, M>, n_leaves: u32) -> usize {
    aligned_runs(all.part().owned(n_leaves), n_leaves).len().max(1)
}

/// Planes of the output of an MLP. `inner` is the width on all ranks together.
fn n_dense_planes<M: Memory>(all: &WeightLoader<'_, M>, inner: usize) -> usize {
    n_planes(all, owned_inner(all.device().class(), all.part(), inner).1.len() as u32)
}

impl<M: Memory> DenseScratch<M> {
    /// `inner` is the width on all ranks together.
    fn new(all: &WeightLoader<'_, M>, inner: usize, limits: PassLimits) -> Result<DenseScratch<M>> {
        let device = all.device();
        let inner = owned_inner(device.class(), all.part(), inner).0.len();
        Ok(DenseScratch {
            gate_up: device.buffer(limits.rows_max, 2 * inner)?,
            inner: device.buffer(limits.rows_max, inner)?,
        })
    }
}

impl<M: Memory> SharedExpertScratch<M> {
    fn new(
        all: &WeightLoader<'_, M>,
        hidden: usize,
        inner: usize,
        limits: PassLimits,
    ) -> Result<SharedExpertScratch<M>> {
        let device = all.device();
        let out = device.buffer(n_dense_planes(all, inner) * limits.rows_max, hidden)?;
        let gate = device.buffer(limits.rows_max, 1)?;
        Ok(SharedExpertScratch { dense: DenseScratch::new(all, inner, limits)?, out, gate })
    }
}

impl<M: Memory> MixtureScratch<M> {
    fn new(
        all: &WeightLoader<'_, M>,
        hidden: usize,
        spec: &ExpertsSpec,
        limits: PassLimits,
    ) -> Result<MixtureScratch<M>> {
        let device = all.device();
        let scoring = match spec.scores {
            ExpertScores::Softmax => Scoring::Softmax,
            ExpertScores::Sigmoid { n, n_used } => {
                Scoring::Sigmoid { n_groups: n as usize, n_used: n_used as usize, factor: spec.factor }
            }
        };
        let (n_experts, n_used) = (spec.n as usize, spec.n_used as usize);
        let routing = Routing { n_experts, n_used, normalized: spec.normalized, scoring };
        Ok(MixtureScratch {
            scores: device.buffer(limits.rows_max, routing.n_experts)?,
            routes: device.routes(limits.rows_max, hidden, spec.inner as usize, routing)?,
            shared: match spec.shared {
                0 => None,
                inner => Some(SharedExpertScratch::new(all, hidden, inner as usize, limits)?),
            },
        })
    }
}
