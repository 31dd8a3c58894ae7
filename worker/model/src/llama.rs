//! The Llama family: pre-norm decoder layers, grouped-query attention with rotary positions, a gated MLP.

use crate::layers::{ColumnParallel, Embedding, Head, Norm, OwnedHeads, Residual, RowParallel, Rows, owned_inner};
use crate::weights::Weights;
use crate::{Limits, Result, rope};
use backend::{Batch, Device, Heads, Memory};
use checkpoint::{Checkpoint, ModelSpec};
use collective::Collective;

/// All layers share one cache group.
const GROUP: usize = 0;

pub struct Llama<M: Memory> {
    embed_tokens: Embedding<M>, // model.embed_tokens.weight [n_vocab, hidden]
    layers: Vec<Layer<M>>,      // model.layers.{i}
    norm: Norm<M>,              // model.norm.weight [hidden]
    lm_head: Head<M>,           // lm_head.weight [n_vocab, hidden], or the embedding again
    rope: M::Rope,
    residual: Residual<M>,
    scratch: Scratch<M>,
}

struct Layer<M: Memory> {
    input_norm: Norm<M>,     // input_layernorm.weight [hidden]
    attention: Attention<M>, // self_attn
    post_norm: Norm<M>,      // post_attention_layernorm.weight [hidden]
    mlp: Mlp<M>,             // mlp
}

struct Attention<M: Memory> {
    qkv: ColumnParallel<M>, // q_proj, k_proj, v_proj [(n_heads + 2 * n_kv_heads) * head_dim, hidden]
    output: RowParallel<M>, // o_proj [hidden, n_heads * head_dim]
    heads: Heads,
    /// In the cache.
    layer: usize,
}

struct Mlp<M: Memory> {
    gate_up: ColumnParallel<M>, // gate_proj, up_proj [2 * inner, hidden]
    down: RowParallel<M>,       // down_proj [hidden, inner]
}

/// What a pass works in, made once for the largest.
struct Scratch<M: Memory> {
    x: M::Buffer,        // [rows_max, hidden]
    qkv: M::Buffer,      // [rows_max, (n_heads + 2 * n_kv_heads) * head_dim]
    attended: M::Buffer, // [rows_max, n_heads * head_dim]
    gate_up: M::Buffer,  // [rows_max, 2 * inner]
    inner: M::Buffer,    // [rows_max, inner]
}

impl<M: Memory> Llama<M> {
    pub fn load(all: &Weights<'_, M>, checkpoint: &Checkpoint, limits: Limits) -> Result<Llama<M>> {
        let spec = checkpoint.spec();
        check(spec)?;
        let shape = &Shape::of(spec);
        let Shape { n_vocab, hidden, .. } = *shape;
        let model = all.under("model");
        let load = |(layer, i): (usize, u32)| Layer::load(&model.under("layers").under(i), shape, layer);
        let layers = (0..).zip(all.part().layers.clone()).map(load).collect::<Result<Vec<_>>>()?;
        let embed_tokens = Embedding::load(&model, "embed_tokens", n_vocab, hidden)?;
        let lm_head = match spec.tied_embeddings {
            true => Head::tied(&embed_tokens, &model, "embed_tokens", n_vocab, hidden, limits)?,
            false => Head::load(all, "lm_head", n_vocab, hidden, limits)?,
        };
        let n_planes = layers.iter().map(Layer::n_planes).max().unwrap_or(1);
        Ok(Llama {
            embed_tokens,
            norm: Norm::load(&model, "norm", hidden, spec.norm_eps)?,
            lm_head,
            rope: rope::load(all.device(), &spec.rope, limits.context)?,
            residual: Residual::new(all.device(), limits, hidden, n_planes)?,
            scratch: Scratch::new(all, shape, limits)?,
            layers,
        })
    }
}

impl<D: Device> Llama<D> {
    /// The logits of the batch's outputs, on the rank that samples: [batch.outputs.len(), n_vocab]
    pub fn forward(
        &mut self,
        device: &D,
        collective: &mut Collective,
        batch: &Batch,
        kv: &mut D::Kv,
    ) -> Result<Option<&D::Buffer>> {
        let (residual, s, n_rows) = (&mut self.residual, &mut self.scratch, batch.n_rows());
        self.embed_tokens.forward(device, collective, &batch.tokens, residual)?; // [n_rows, hidden]
        for layer in &self.layers {
            layer.input_norm.forward(device, residual, n_rows, &mut s.x);
            layer.attention.forward(device, collective, batch, &self.rope, kv, s, residual.due())?;
            layer.post_norm.forward(device, residual, n_rows, &mut s.x);
            layer.mlp.forward(device, collective, n_rows, s, residual.due())?;
        }
        self.lm_head.forward(device, collective, &self.norm, batch, residual) // [n_outputs, n_vocab]
    }
}

impl<M: Memory> Layer<M> {
    fn load(at: &Weights<'_, M>, shape: &Shape, layer: usize) -> Result<Layer<M>> {
        let norm = |name| Norm::load(at, name, shape.hidden, shape.norm_eps);
        Ok(Layer {
            input_norm: norm("input_layernorm")?,
            attention: Attention::load(&at.under("self_attn"), shape, layer)?,
            post_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(&at.under("mlp"), shape)?,
        })
    }

    fn n_planes(&self) -> usize {
        self.attention.output.n_planes().max(self.mlp.down.n_planes())
    }
}

impl<M: Memory> Attention<M> {
    fn load(at: &Weights<'_, M>, shape: &Shape, layer: usize) -> Result<Attention<M>> {
        let Shape { hidden, heads, .. } = *shape;
        let OwnedHeads { query, kv, leaves, heads: owned } = OwnedHeads::of(at.part(), heads);
        let q = Rows { name: "q_proj", n: heads.n_heads * heads.head_dim, owned: query };
        let k = Rows { name: "k_proj", n: heads.n_kv_heads * heads.head_dim, owned: kv.clone() };
        let v = Rows { name: "v_proj", n: heads.n_kv_heads * heads.head_dim, owned: kv };
        Ok(Attention {
            qkv: ColumnParallel::load(at, hidden, &[q, k, v])?,
            output: RowParallel::load(at, "o_proj", hidden, &leaves)?,
            heads: owned,
            layer,
        })
    }
}

impl<D: Device> Attention<D> {
    /// s.x: [n_rows, hidden] -> out: [n_rows, hidden]
    #[expect(clippy::too_many_arguments, reason = "what a pass works with, and one layer's in and out")]
    fn forward(
        &self,
        device: &D,
        collective: &mut Collective,
        batch: &Batch,
        rope: &D::Rope,
        kv: &mut D::Kv,
        s: &mut Scratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        let n_rows = batch.n_rows();
        self.qkv.forward(device, &s.x, n_rows, &mut s.qkv); // [n_rows, qkv_cols]
        device.rope_store(&mut s.qkv, rope, &self.heads, batch, GROUP, self.layer, kv);
        // [n_rows, n_heads * head_dim]
        device.attend(&s.qkv, kv, &self.heads, batch, GROUP, self.layer, &mut s.attended);
        self.output.forward(device, collective, &s.attended, n_rows, out)
    }
}

impl<M: Memory> Mlp<M> {
    fn load(at: &Weights<'_, M>, shape: &Shape) -> Result<Mlp<M>> {
        let Shape { hidden, inner, .. } = *shape;
        let (owned, leaves) = owned_inner(at.part(), inner);
        let rows = |name| Rows { name, n: inner, owned: owned.clone() };
        Ok(Mlp {
            gate_up: ColumnParallel::load(at, hidden, &[rows("gate_proj"), rows("up_proj")])?,
            down: RowParallel::load(at, "down_proj", hidden, &leaves)?,
        })
    }
}

impl<D: Device> Mlp<D> {
    /// s.x: [n_rows, hidden] -> out: [n_rows, hidden]
    fn forward(
        &self,
        device: &D,
        collective: &mut Collective,
        n_rows: usize,
        s: &mut Scratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        self.gate_up.forward(device, &s.x, n_rows, &mut s.gate_up); // [n_rows, 2 * inner]
        device.silu_mul(&s.gate_up, n_rows, &mut s.inner); // [n_rows, inner]
        self.down.forward(device, collective, &s.inner, n_rows, out)
    }
}

impl<M: Memory> Scratch<M> {
    fn new(all: &Weights<'_, M>, shape: &Shape, limits: Limits) -> Result<Scratch<M>> {
        let heads = OwnedHeads::of(all.part(), shape.heads).heads;
        let inner = owned_inner(all.part(), shape.inner).0.len();
        let rows = |cols| all.device().buffer(limits.rows_max, cols);
        Ok(Scratch {
            x: rows(shape.hidden)?,
            qkv: rows(heads.qkv_cols())?,
            attended: rows(heads.n_heads * heads.head_dim)?,
            gate_up: rows(2 * inner)?,
            inner: rows(inner)?,
        })
    }
}

/// The numbers of a spec, of the whole model.
struct Shape {
    hidden: usize,
    heads: Heads,
    inner: usize,
    n_vocab: usize,
    norm_eps: f32,
}

impl Shape {
    fn of(spec: &ModelSpec) -> Shape {
        Shape {
            hidden: spec.hidden as usize,
            heads: heads(spec),
            inner: spec.inner as usize,
            n_vocab: spec.vocab as usize,
            norm_eps: spec.norm_eps,
        }
    }
}

/// All heads of a layer.
pub fn heads(spec: &ModelSpec) -> Heads {
    let head_dim = spec.head_dim as usize;
    Heads::whole(spec.n_heads as usize, spec.n_kv_heads as usize, head_dim, 1.0 / (head_dim as f32).sqrt())
}

/// What a checkpoint may say and no operation here does.
fn check(spec: &ModelSpec) -> Result<()> {
    if spec.rope.dim != spec.head_dim {
        return Err(types::Unsupported("rotary positions on a part of the head").into());
    }
    Ok(())
}
