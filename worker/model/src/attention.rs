//! Attention of most families: grouped queries over paged K and V, and the variants of families. The layer's spec
//! selects among these.

use crate::ctx::Ctx;
use crate::error::Result;
use crate::layers::{ColumnParallel, OwnedHeads, RowParallel};
use crate::limits::PassLimits;
use crate::spread::{GatheredRows, parts_of_stage};
use crate::weights::{MatrixRows, WeightLoader};
use backend::{AttentionCall, AttentionHeads, Device, HeadNorms, Memory, ScoreTerms};
use checkpoint::{KvHeads, LayerSpec, ModelSpec, PositionEncoding, QueryKeyNorms};
use std::ops::Range;
use types::{DeviceClass, RankPart};

pub struct SelfAttention<M: Memory> {
    qkv: ColumnParallel<M>, // q_proj, k_proj, v_proj [(n_heads + 2 * n_kv_heads) * head_dim, hidden]
    norms: QueryKeyNorm<M>,
    /// Which of the buffers it works in.
    shape: usize,
    /// A score for each of this rank's query heads. [n_heads]
    sinks: Option<M::Vector>,
    /// The output is multiplied by its sigmoid.
    gate: Option<ColumnParallel<M>>, // g_proj [n_heads * head_dim, hidden]
    output: RowParallel<M>, // o_proj [hidden, n_heads * head_dim]
    heads: AttentionHeads,
    positions: PositionEncoding,
    /// The cache group, and this layer's index among the rank's layers of that group.
    place: (usize, usize),
}

/// Norms of Q and of K, applied before the rope.
enum QueryKeyNorm<M: Memory> {
    None,
    Heads(NormPair<M>),           // q_norm.weight, k_norm.weight [head_dim]
    Projection(CrossRankNorm<M>), // [n_heads * head_dim], [n_kv_heads * head_dim]
}

struct NormPair<M: Memory> {
    q: M::Vector,
    /// That of Q, where K is another layer's.
    k: M::Vector,
    /// Ones, where each head of V is divided by its root mean square.
    v: Option<M::Vector>,
    eps: f32,
}

/// Norms over all heads together, which are spread over the ranks: each rank has the weights of its own heads.
struct CrossRankNorm<M: Memory> {
    own: NormPair<M>,
    /// The columns of Q and of K that each rank of the stage has.
    ranks: Vec<[Range<usize>; 2]>,
}

/// The buffers that attention works in, for each shape of heads.
pub struct AttentionScratch<M: Memory> {
    shapes: Vec<HeadsScratch<M>>,
    wide: Option<CrossRankScratch<M>>,
}

struct HeadsScratch<M: Memory> {
    qkv: M::Buffer,          // [rows_max, (n_heads + 2 * n_kv_heads) * head_dim]
    attended: M::Buffer,     // [rows_max, n_heads * head_dim]
    gate: Option<M::Buffer>, // the same
}

/// Q and K of all ranks.
struct CrossRankScratch<M: Memory> {
    parts: GatheredRows<M>,
    q: M::Buffer, // [rows_max, n_heads * head_dim of the model]
    k: M::Buffer, // [rows_max, n_kv_heads * head_dim of the model]
}

/// Returns the heads of a whole layer, apart from its window.
pub fn heads(spec: &ModelSpec, layer: &LayerSpec) -> AttentionHeads {
    let KvHeads { n, dim, .. } = spec.kv_heads_of(layer);
    let whole = AttentionHeads::whole(spec.n_heads as usize, n as usize, dim as usize, spec.attention.scale);
    let is_causal = spec.encoder.is_none();
    AttentionHeads { cap: spec.attention.cap, is_reader: layer.kv_of.is_some(), is_causal, ..whole }
}

/// Returns each shape of heads that some layer has.
pub fn shapes(spec: &ModelSpec) -> Vec<AttentionHeads> {
    let mut shapes = Vec::new();
    for layer in spec.layers.iter().filter(|layer| layer.mixer.has_attention()) {
        let heads = heads(spec, layer);
        if !shapes.contains(&heads) {
            shapes.push(heads);
        }
    }
    shapes
}

impl<M: Memory> SelfAttention<M> {
    /// `layer` is its number in the model.
    pub fn load(at: &WeightLoader<'_, M>, spec: &ModelSpec, layer: usize) -> Result<SelfAttention<M>> {
        let of: &LayerSpec = &spec.layers[layer];
        let (hidden, whole) = (spec.hidden as usize, heads(spec, of));
        let OwnedHeads { query, kv, leaves, heads } = OwnedHeads::of(at.device().class(), at.part(), whole);
        let q = MatrixRows { name: "q_proj", n: whole.n_heads * whole.head_dim, owned: query.clone() };
        let k = MatrixRows { name: "k_proj", n: whole.n_kv_heads * whole.head_dim, owned: kv.clone() };
        let gate = MatrixRows { name: "g_proj", n: whole.n_heads * whole.head_dim, owned: query.clone() };
        let name = if spec.kv_heads_of(of).values_are_keys { "k_proj" } else { "v_proj" };
        let v = MatrixRows { name, n: whole.n_kv_heads * whole.head_dim, owned: kv };
        let qkv = if whole.is_reader { vec![q] } else { vec![q, k, v] };
        let of_cache = of.kv_of.unwrap_or(layer as u32);
        Ok(SelfAttention {
            qkv: ColumnParallel::load(at, hidden, &qkv)?,
            norms: QueryKeyNorm::load(at, spec, whole)?,
            shape: shapes(spec).iter().position(|shape| *shape == whole).unwrap_or(0),
            sinks: match spec.attention.has_sinks {
                true => Some(at.vector_part("sinks", whole.n_heads, heads_of_rows(&query, whole.head_dim))?),
                false => None,
            },
            gate: match spec.attention.has_gate {
                true => Some(ColumnParallel::load(at, hidden, &[gate])?),
                false => None,
            },
            output: RowParallel::load(at, "o_proj", hidden, &leaves)?,
            heads: AttentionHeads { window: of.window.map(|window| window as usize), ..heads },
            positions: of.positions,
            place: match spec.encoder {
                // All layers write the same memory, one after another.
                Some(_) => (0, 0),
                None => spec.cache_groups().attention_place(&at.part().layers, of_cache),
            },
        })
    }

    pub fn n_planes(&self) -> usize {
        self.output.n_planes()
    }

    /// Whether ranks exchange rows here, besides sums.
    pub fn shares_rows(&self) -> bool {
        matches!(&self.norms, QueryKeyNorm::Projection(norm) if norm.ranks.len() > 1)
    }
}

/// Returns the heads of these rows.
pub fn heads_of_rows(rows: &Range<usize>, head_dim: usize) -> Range<usize> {
    rows.start / head_dim..rows.end / head_dim
}

/// Returns the columns of Q and of K that each rank of the stage has.
fn columns_of_ranks(class: DeviceClass, part: &RankPart, whole: AttentionHeads) -> Vec<[Range<usize>; 2]> {
    let of_rank = |its: RankPart| {
        let OwnedHeads { query, kv, .. } = OwnedHeads::of(class, &its, whole);
        [query, kv]
    };
    parts_of_stage(part).map(of_rank).collect()
}

impl<M: Memory> QueryKeyNorm<M> {
    fn load(at: &WeightLoader<'_, M>, spec: &ModelSpec, whole: AttentionHeads) -> Result<QueryKeyNorm<M>> {
        let eps = spec.norm_eps;
        match spec.attention.query_key_norms {
            QueryKeyNorms::None => Ok(QueryKeyNorm::None),
            QueryKeyNorms::Heads => {
                let norm = |name| at.vector_plus(name, whole.head_dim, spec.norm_offset);
                let k = norm(if whole.is_reader { "q_norm" } else { "k_norm" })?;
                let v = match spec.attention.norms_values && !whole.is_reader {
                    true => Some(at.vector("v_norm.weight", &vec![1.0; whole.head_dim])?),
                    false => None,
                };
                Ok(QueryKeyNorm::Heads(NormPair { q: norm("q_norm")?, k, v, eps }))
            }
            QueryKeyNorms::Projection => {
                let part = at.part();
                let ranks = columns_of_ranks(at.device().class(), part, whole);
                let [query, kv] = ranks[usize::from(part.place.tp)].clone();
                let [n_q, n_k] = [whole.n_heads, whole.n_kv_heads].map(|n| n * whole.head_dim);
                let q = at.vector_part("q_norm.weight", n_q, query)?;
                let own = NormPair { q, k: at.vector_part("k_norm.weight", n_k, kv)?, v: None, eps };
                Ok(QueryKeyNorm::Projection(CrossRankNorm { own, ranks }))
            }
        }
    }
}

impl<M: Memory> CrossRankScratch<M> {
    fn new(all: &WeightLoader<'_, M>, whole: AttentionHeads, limits: PassLimits) -> Result<CrossRankScratch<M>> {
        let (device, part) = (all.device(), all.part());
        let ranks = columns_of_ranks(device.class(), part, whole);
        Ok(CrossRankScratch {
            parts: GatheredRows::new(device, limits, ranks.iter().map(|[query, kv]| query.len() + kv.len()))?,
            q: device.buffer(limits.rows_max, whole.n_heads * whole.head_dim)?,
            k: device.buffer(limits.rows_max, whole.n_kv_heads * whole.head_dim)?,
        })
    }
}

impl<M: Memory> AttentionScratch<M> {
    pub fn new(all: &WeightLoader<'_, M>, spec: &ModelSpec, limits: PassLimits) -> Result<AttentionScratch<M>> {
        let shapes = shapes(spec);
        let wide = match (spec.attention.query_key_norms, shapes.first()) {
            (QueryKeyNorms::Projection, Some(whole)) => Some(CrossRankScratch::new(all, *whole, limits)?),
            _ => None,
        };
        let of_shape = |whole: &AttentionHeads| HeadsScratch::new(all, *whole, spec.attention.has_gate, limits);
        Ok(AttentionScratch { shapes: shapes.iter().map(of_shape).collect::<Result<_>>()?, wide })
    }
}

impl<M: Memory> HeadsScratch<M> {
    fn new(
        all: &WeightLoader<'_, M>,
        whole: AttentionHeads,
        has_gate: bool,
        limits: PassLimits,
    ) -> Result<HeadsScratch<M>> {
        let heads = OwnedHeads::of(all.device().class(), all.part(), whole).heads;
        let rows = |cols| all.device().buffer(limits.rows_max, cols);
        let width = heads.n_heads * heads.head_dim;
        let gate = if has_gate { Some(rows(width)?) } else { None };
        Ok(HeadsScratch { qkv: rows(heads.qkv_cols())?, attended: rows(width)?, gate })
    }
}

impl<D: Device> SelfAttention<D> {
    /// x: [n_rows, hidden] -> out: [n_rows, hidden]
    pub fn forward(
        &self,
        ctx: &mut Ctx<'_, D>,
        x: &D::Buffer,
        scratch: &mut AttentionScratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        let Ctx { device, pass, ropes, .. } = *ctx;
        let (n_rows, (group, layer)) = (ctx.n_rows(), self.place);
        let AttentionScratch { shapes, wide } = scratch;
        let scratch = &mut shapes[self.shape];
        self.qkv.forward(device, x, n_rows, &mut scratch.qkv); // [n_rows, qkv_cols]
        match (&self.norms, wide) {
            (QueryKeyNorm::Heads(NormPair { q, k, v, eps }), _) => {
                let norms = HeadNorms { q, k, v: v.as_ref(), eps: *eps };
                device.norm_heads(&mut scratch.qkv, &self.heads, &norms, n_rows);
            }
            (QueryKeyNorm::Projection(norm), Some(wide)) => norm.forward(ctx, &mut scratch.qkv, wide)?,
            _ => {}
        }
        if let Some(factors) = ropes.query_factors.as_ref().filter(|_| self.heads.n_heads > 0) {
            device.scale_queries(&mut scratch.qkv, &self.heads, factors, pass);
        }
        let kv = &mut ctx.kv.groups[group];
        let call = AttentionCall { pass, heads: &self.heads, group, layer };
        device.rope_store(&mut scratch.qkv, ropes.rope_for(self.positions), &call, kv);
        // [n_rows, n_heads * head_dim]
        let terms = ScoreTerms { sinks: self.sinks.as_ref(), distances: ropes.distances.as_ref() };
        device.attend(&mut scratch.qkv, kv, &call, &terms, &mut scratch.attended);
        if let (Some(gate), Some(its)) = (&self.gate, &mut scratch.gate) {
            gate.forward(device, x, n_rows, its); // [n_rows, n_heads * head_dim]
            device.sigmoid_mul(its, n_rows, &mut scratch.attended);
        }
        self.output.forward(ctx, &scratch.attended, out)
    }
}

impl<D: Device> CrossRankNorm<D> {
    /// Norms this rank's columns of Q and K by the rows of all ranks.
    fn forward(&self, ctx: &mut Ctx<'_, D>, qkv: &mut D::Buffer, scratch: &mut CrossRankScratch<D>) -> Result<()> {
        let (device, n_rows, CrossRankScratch { parts, q, k }) = (ctx.device, ctx.n_rows(), scratch);
        let me = ctx.ranks.stage_rank() as usize;
        let [own_q, own_k] = [0, 1].map(|of| self.ranks[me][of].len());
        parts.gather(ctx, qkv, own_q + own_k)?;
        for (rank, [of_q, of_k]) in self.ranks.iter().enumerate() {
            let (from, rows) = parts.rows_of_rank(qkv, rank, n_rows);
            device.copy_columns(from, rows.clone(), 0..of_q.len(), q, 0, of_q.start);
            let of_keys = of_q.len()..of_q.len() + of_k.len();
            device.copy_columns(from, rows, of_keys, k, 0, of_k.start);
        }
        let NormPair { q: of_q, k: of_k, eps, .. } = &self.own;
        device.norm_columns(qkv, 0..own_q, q, of_q, *eps, n_rows);
        device.norm_columns(qkv, own_q..own_q + own_k, k, of_k, *eps, n_rows);
        Ok(())
    }
}
