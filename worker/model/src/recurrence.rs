//! Recurrent layers: projections, the recurrence over paged states with its convolution, and the output's projection.
//! Ranks divide the value heads, and each has the key heads that its own read.

use crate::convolution::taps_of_channels;
use crate::ctx::Ctx;
use crate::error::Result;
use crate::layers::{ColumnParallel, OwnedHeads, RowParallel};
use crate::limits::PassLimits;
use crate::spread::{GatheredRows, parts_of_stage};
use crate::weights::{MatrixRows, WeightLoader};
use backend::{AttentionHeads, Device, Memory, RecurrenceCall, RecurrentHeads, RecurrentWeights, StateRule};
use checkpoint::{ModelSpec, RecurrenceRule, RecurrenceSpec, RecurrenceStorage, StateSpaceRule};
use std::ops::Range;
use types::{DeviceClass, Leaves, RankPart};

pub struct Recurrent<M: Memory> {
    input: ColumnParallel<M>, // q_proj, k_proj, v_proj, z_proj, b_proj, a_proj [n_cols, hidden]
    weights: RecurrentWeights<M::Vector>,
    norm: Option<GroupedHeadNorm<M>>,
    output: RowParallel<M>, // out_proj [hidden, n_heads * value_dim]
    heads: RecurrentHeads,
    /// The cache group, and this layer's index among the rank's layers of that group.
    place: (usize, usize),
}

/// Norms of the heads of each key head together, some of which other ranks may have.
struct GroupedHeadNorm<M: Memory> {
    groups: Vec<GroupNorm<M>>,
    /// The columns that each rank of the stage has.
    ranks: Vec<Range<usize>>,
    eps: f32,
}

struct GroupNorm<M: Memory> {
    /// Columns of the whole row, and those of them that this rank has, counted from its own first.
    columns: Range<usize>,
    own: Range<usize>,
    weight: M::Vector,
}

/// The buffers that a recurrent layer works in.
pub struct RecurrentScratch<M: Memory> {
    projected: M::Buffer, // [rows_max, n_cols]
    out: M::Buffer,       // [rows_max, n_heads * value_dim]
    norm: Option<NormScratch<M>>,
}

struct NormScratch<M: Memory> {
    parts: GatheredRows<M>,
    whole: M::Buffer, // [rows_max, columns of a group]
}

/// A rank's heads of recurrent layers.
pub struct OwnedRecurrentHeads {
    pub heads: RecurrentHeads,
    pub keys: Range<usize>,
    pub values: Range<usize>,
    /// The leaves of the sum of `out_proj`, over all value heads.
    pub leaves: Leaves,
}

impl OwnedRecurrentHeads {
    pub fn of(class: DeviceClass, part: &RankPart, spec: &RecurrenceSpec) -> OwnedRecurrentHeads {
        let value_dim = spec.value_dim as usize;
        let whole = AttentionHeads::whole(spec.n_heads as usize, spec.n_key_heads as usize, value_dim, 1.0);
        let OwnedHeads { heads, query, kv, leaves } = OwnedHeads::of(class, part, whole);
        let in_heads = |columns: Range<usize>| columns.start / value_dim..columns.end / value_dim;
        let values = in_heads(query);
        // Where the value heads of a key head are spread, a run of them reads all key heads.
        let (keys, per_key, first) = match are_spread(spec) {
            false => (in_heads(kv), heads.per_kv, heads.first),
            true => (0..spec.n_key_heads as usize, 1, values.start),
        };
        let heads =
            RecurrentHeads { n_heads: values.len(), n_key_heads: keys.len(), per_key, first, ..whole_heads(spec) };
        OwnedRecurrentHeads { heads, keys, values, leaves }
    }
}

/// Whether the value heads that read one key head are not neighbours.
fn are_spread(spec: &RecurrenceSpec) -> bool {
    spec.storage == RecurrenceStorage::GgufTiled && spec.n_heads > spec.n_key_heads
}

/// The heads of a whole layer.
pub fn whole_heads(spec: &RecurrenceSpec) -> RecurrentHeads {
    RecurrentHeads {
        n_heads: spec.n_heads as usize,
        n_key_heads: spec.n_key_heads as usize,
        per_key: if are_spread(spec) { 1 } else { (spec.n_heads / spec.n_key_heads) as usize },
        first: 0,
        key_dim: spec.key_dim as usize,
        value_dim: spec.value_dim as usize,
        taps: spec.taps as usize,
        has_steps: spec.rule.has_steps(),
    }
}

/// Whether outputs are normed over the heads of a key head together.
fn has_grouped_norm(spec: &RecurrenceSpec) -> bool {
    matches!(spec.rule, RecurrenceRule::StateSpace(rule) if rule.has_norm)
}

/// Elements of some heads.
fn of_heads(heads: &Range<usize>, dim: usize) -> Range<usize> {
    heads.start * dim..heads.end * dim
}

impl<M: Memory> Recurrent<M> {
    /// `layer` is its number in the model.
    pub fn load(at: &WeightLoader<'_, M>, spec: &ModelSpec, of: &RecurrenceSpec, layer: usize) -> Result<Recurrent<M>> {
        let (hidden, whole) = (spec.hidden as usize, whole_heads(of));
        let OwnedRecurrentHeads { heads, keys, values, leaves } =
            OwnedRecurrentHeads::of(at.device().class(), at.part(), of);
        let rows = |name, n: usize, owned: &Range<usize>, dim: usize| MatrixRows {
            name,
            n: n * dim,
            owned: of_heads(owned, dim),
        };
        let mut parts = vec![
            rows("q_proj", whole.n_key_heads, &keys, heads.key_dim),
            rows("k_proj", whole.n_key_heads, &keys, heads.key_dim),
            rows("v_proj", whole.n_heads, &values, heads.value_dim),
            rows("z_proj", whole.n_heads, &values, heads.value_dim),
        ];
        parts.extend(heads.has_steps.then(|| rows("b_proj", whole.n_heads, &values, 1)));
        parts.push(rows("a_proj", whole.n_heads, &values, 1));
        let norm = match has_grouped_norm(of) {
            true => Some(GroupedHeadNorm::load(at, spec, of)?),
            false => None,
        };
        Ok(Recurrent {
            input: ColumnParallel::load(at, hidden, &parts)?,
            weights: load_weights(at, spec, of, [&keys, &values])?,
            norm,
            output: RowParallel::load(at, "out_proj", hidden, &leaves)?,
            heads,
            place: spec.cache_groups().state_place(&at.part().layers, layer as u32),
        })
    }

    pub fn n_planes(&self) -> usize {
        self.output.n_planes()
    }

    /// Whether ranks show each other rows in here, besides sums.
    pub fn shares_rows(&self) -> bool {
        self.norm.as_ref().is_some_and(|norm| norm.ranks.len() > 1)
    }
}

/// What a layer has besides its matrices, of this rank's heads.
fn load_weights<M: Memory>(
    at: &WeightLoader<'_, M>,
    spec: &ModelSpec,
    of: &RecurrenceSpec,
    [keys, values]: [&Range<usize>; 2],
) -> Result<RecurrentWeights<M::Vector>> {
    let (n_heads, n_keys) = (of.n_heads as usize, of.n_key_heads as usize);
    let [key, value, taps] = [of.key_dim, of.value_dim, of.taps].map(|n| n as usize);
    // A multiplied input of a convolution is the same as a multiplied weight.
    let factors = of.rule.factors();
    let parts = [
        ("conv_q", n_keys * key, of_heads(keys, key), factors.q),
        ("conv_k", n_keys * key, of_heads(keys, key), factors.k),
        ("conv_v", n_heads * value, of_heads(values, value), factors.v),
    ];
    let (mut channels, mut bias) = (Vec::new(), Vec::new());
    for (name, n, owned, factor) in parts {
        let all = at.numbers(&format!("{name}.weight"), [n, taps])?;
        channels.extend(all[owned.start * taps..owned.end * taps].iter().map(|weight| weight * factor));
        bias.extend(at.bias(name, n, owned)?);
    }
    let conv = taps_of_channels(&channels, taps);
    let bias = bias.concat();
    let rates = at.numbers("A_log", [1, n_heads])?;
    let rate = |stored: &f32| match of.storage {
        RecurrenceStorage::Folder => -libm::exp(f64::from(*stored)) as f32,
        RecurrenceStorage::Gguf | RecurrenceStorage::GgufTiled => *stored,
    };
    let rates: Vec<f32> = rates[values.clone()].iter().map(rate).collect();
    let rule = match of.rule {
        RecurrenceRule::Delta { step_max, eps } => {
            StateRule::Delta { norm: at.vector_plus("norm", value, 0.0)?, eps: eps.unwrap_or(spec.norm_eps), step_max }
        }
        RecurrenceRule::StateSpace(StateSpaceRule { step_min, step_max, factors, .. }) => StateRule::StateSpace {
            skip: at.vector_part("D", n_heads, values.clone())?,
            step_min,
            step_max,
            z_factor: factors.z,
            a_factor: factors.a,
        },
    };
    Ok(RecurrentWeights {
        conv: at.vector("conv_q+conv_k+conv_v.weight", &conv)?,
        conv_bias: if bias.is_empty() { None } else { Some(at.vector("conv_q+conv_k+conv_v.bias", &bias)?) },
        rate: at.vector("A_log", &rates)?,
        rate_bias: at.vector_part("dt_bias", n_heads, values.clone())?,
        rule,
    })
}

/// The columns of V that each rank of the stage has.
fn columns_of_ranks(class: DeviceClass, part: &RankPart, of: &RecurrenceSpec) -> Vec<Range<usize>> {
    let of_rank = |its: RankPart| of_heads(&OwnedRecurrentHeads::of(class, &its, of).values, of.value_dim as usize);
    parts_of_stage(part).map(of_rank).collect()
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

impl<M: Memory> GroupedHeadNorm<M> {
    fn load(at: &WeightLoader<'_, M>, spec: &ModelSpec, of: &RecurrenceSpec) -> Result<GroupedHeadNorm<M>> {
        let ranks = columns_of_ranks(at.device().class(), at.part(), of);
        let mine = ranks[usize::from(at.part().place.tp)].clone();
        let (n, n_groups) = ((of.n_heads * of.value_dim) as usize, of.n_key_heads as usize);
        let group = |i: usize| {
            let columns = n / n_groups * i..n / n_groups * (i + 1);
            let owned = overlap(&columns, &mine);
            let own = owned.start - mine.start.min(owned.start)..owned.end - mine.start.min(owned.start);
            Ok(GroupNorm { columns, own, weight: at.vector_part("norm.weight", n, owned)? })
        };
        let groups = (0..n_groups).map(group).collect::<Result<Vec<_>>>()?;
        let groups = groups.into_iter().filter(|group| !group.own.is_empty()).collect();
        Ok(GroupedHeadNorm { groups, ranks, eps: spec.norm_eps })
    }
}

impl<M: Memory> RecurrentScratch<M> {
    pub fn new(all: &WeightLoader<'_, M>, of: &RecurrenceSpec, limits: PassLimits) -> Result<RecurrentScratch<M>> {
        let (device, part) = (all.device(), all.part());
        let heads = OwnedRecurrentHeads::of(device.class(), part, of).heads;
        let rows = |cols| device.buffer(limits.rows_max, cols);
        let norm = match has_grouped_norm(of) {
            false => None,
            true => {
                let ranks = columns_of_ranks(device.class(), part, of);
                let parts = GatheredRows::new(device, limits, ranks.iter().map(ExactSizeIterator::len))?;
                let of_group = of.n_heads / of.n_key_heads * of.value_dim;
                Some(NormScratch { parts, whole: rows(of_group as usize)? })
            }
        };
        Ok(RecurrentScratch { projected: rows(heads.n_cols())?, out: rows(heads.n_heads * heads.value_dim)?, norm })
    }
}

impl<D: Device> Recurrent<D> {
    /// x: [n_rows, hidden] -> out: [n_rows, hidden]
    pub fn forward(
        &self,
        ctx: &mut Ctx<'_, D>,
        x: &D::Buffer,
        scratch: &mut RecurrentScratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        let (device, pass, n_rows, (group, layer)) = (ctx.device, ctx.pass, ctx.n_rows(), self.place);
        self.input.forward(device, x, n_rows, &mut scratch.projected); // [n_rows, n_cols]
        let call = RecurrenceCall { pass, heads: &self.heads, group, layer };
        // [n_rows, n_heads * value_dim]
        device.recur(&scratch.projected, &self.weights, &call, &mut ctx.kv.groups[group], &mut scratch.out);
        if let (Some(norm), Some(its)) = (&self.norm, &mut scratch.norm) {
            norm.forward(ctx, &mut scratch.out, its)?;
        }
        self.output.forward(ctx, &scratch.out, out)
    }
}

impl<D: Device> GroupedHeadNorm<D> {
    /// Norms this rank's columns by the rows of all ranks.
    fn forward(&self, ctx: &mut Ctx<'_, D>, x: &mut D::Buffer, scratch: &mut NormScratch<D>) -> Result<()> {
        let (device, n_rows, NormScratch { parts, whole }) = (ctx.device, ctx.n_rows(), scratch);
        let me = ctx.ranks.stage_rank() as usize;
        parts.gather(ctx, x, self.ranks[me].len())?;
        for GroupNorm { columns, own, weight } in &self.groups {
            for (rank, its) in self.ranks.iter().enumerate() {
                let (from, rows) = parts.rows_of_rank(x, rank, n_rows);
                let of_group = overlap(its, columns);
                let (start, to) = (of_group.start - its.start, of_group.start - columns.start);
                if !of_group.is_empty() {
                    device.copy_columns(from, rows, start..start + of_group.len(), whole, 0, to);
                }
            }
            device.norm_columns(x, own.clone(), whole, weight, self.eps, n_rows);
        }
        Ok(())
    }
}
