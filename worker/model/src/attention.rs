//! Attention as most families have it: grouped queries over paged K and V, and the variants of families. The layer's
//! spec says which of these it has.

use crate::ctx::Ctx;
use crate::error::Result;
use crate::layers::{ColumnParallel, OwnedHeads, RowParallel};
use crate::limits::PassLimits;
use crate::weights::{MatrixRows, Weights};
use backend::{AttentionCall, Device, Heads, Memory};
use checkpoint::{LayerSpec, ModelSpec, Positions};

pub struct SelfAttention<M: Memory> {
    qkv: ColumnParallel<M>, // q_proj, k_proj, v_proj [(n_heads + 2 * n_kv_heads) * head_dim, hidden]
    head_norms: Option<HeadNorms<M>>,
    output: RowParallel<M>, // o_proj [hidden, n_heads * head_dim]
    heads: Heads,
    positions: Positions,
    /// The cache group, and this layer's index among the rank's layers of that group.
    place: (usize, usize),
}

/// Norms of every head of Q and of K, applied before the rope.
struct HeadNorms<M: Memory> {
    q: M::Vector, // q_norm.weight [head_dim]
    k: M::Vector, // k_norm.weight [head_dim]
    eps: f32,
}

/// The buffers that attention works in.
pub struct AttentionScratch<M: Memory> {
    qkv: M::Buffer,      // [rows_max, (n_heads + 2 * n_kv_heads) * head_dim]
    attended: M::Buffer, // [rows_max, n_heads * head_dim]
}

/// The heads of a whole layer without a window.
pub fn heads(spec: &ModelSpec) -> Heads {
    let head_dim = spec.head_dim as usize;
    let whole = Heads::whole(spec.n_heads as usize, spec.n_kv_heads as usize, head_dim, spec.attention.scale);
    Heads { cap: spec.attention.cap, ..whole }
}

impl<M: Memory> SelfAttention<M> {
    /// `layer` is its number in the model.
    pub fn load(at: &Weights<'_, M>, spec: &ModelSpec, layer: usize) -> Result<SelfAttention<M>> {
        let of: &LayerSpec = &spec.layers[layer];
        let (hidden, whole) = (spec.hidden as usize, heads(spec));
        let OwnedHeads { query, kv, leaves, heads } = OwnedHeads::of(at.device().class(), at.part(), whole);
        let q = MatrixRows { name: "q_proj", n: whole.n_heads * whole.head_dim, owned: query };
        let k = MatrixRows { name: "k_proj", n: whole.n_kv_heads * whole.head_dim, owned: kv.clone() };
        let v = MatrixRows { name: "v_proj", n: whole.n_kv_heads * whole.head_dim, owned: kv };
        Ok(SelfAttention {
            qkv: ColumnParallel::load(at, hidden, &[q, k, v])?,
            head_norms: if spec.attention.has_head_norms { Some(HeadNorms::load(at, spec)?) } else { None },
            output: RowParallel::load(at, "o_proj", hidden, &leaves)?,
            heads: Heads { window: of.window.map(|window| window as usize), ..heads },
            positions: of.positions,
            place: spec.cache_groups().place(&at.part().layers, layer as u32),
        })
    }

    pub fn n_planes(&self) -> usize {
        self.output.n_planes()
    }
}

impl<M: Memory> HeadNorms<M> {
    fn load(at: &Weights<'_, M>, spec: &ModelSpec) -> Result<HeadNorms<M>> {
        let norm = |name| at.vector_plus(name, spec.head_dim as usize, spec.norm_offset);
        Ok(HeadNorms { q: norm("q_norm")?, k: norm("k_norm")?, eps: spec.norm_eps })
    }
}

impl<M: Memory> AttentionScratch<M> {
    pub fn new(all: &Weights<'_, M>, spec: &ModelSpec, limits: PassLimits) -> Result<AttentionScratch<M>> {
        let heads = OwnedHeads::of(all.device().class(), all.part(), heads(spec)).heads;
        let rows = |cols| all.device().buffer(limits.rows_max, cols);
        Ok(AttentionScratch { qkv: rows(heads.qkv_cols())?, attended: rows(heads.n_heads * heads.head_dim)? })
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
        let kv = &mut ctx.kv.groups[group];
        self.qkv.forward(device, x, n_rows, &mut scratch.qkv); // [n_rows, qkv_cols]
        if let Some(norms) = &self.head_norms {
            device.norm_heads(&mut scratch.qkv, &self.heads, &norms.q, &norms.k, norms.eps, n_rows);
        }
        let call = AttentionCall { pass, heads: &self.heads, group, layer };
        device.rope_store(&mut scratch.qkv, ropes.of(self.positions), &call, kv);
        // [n_rows, n_heads * head_dim]
        device.attend(&mut scratch.qkv, kv, &call, &mut scratch.attended);
        self.output.forward(ctx, &scratch.attended, out)
    }
}
