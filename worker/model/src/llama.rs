//! The Llama family: pre-norm decoder layers, grouped-query attention with rotary positions, a gated MLP.

use crate::layers::{Norm, RowParallel};
use crate::weights::Weights;
use crate::{Limits, Result, rope};
use backend::{Batch, Device, Heads};
use checkpoint::{Checkpoint, ModelSpec};
use collective::Collective;
use types::{DeviceClass, Leaves};

/// All layers share one cache group.
const GROUP: usize = 0;

pub struct Llama<D: Device> {
    embed_tokens: D::Matrix, // model.embed_tokens.weight [n_vocab, hidden]
    layers: Vec<Layer<D>>,   // model.layers.{i}
    norm: Norm<D>,           // model.norm.weight [hidden]
    /// None where the embedding is used again.
    lm_head: Option<D::Matrix>, // lm_head.weight [n_vocab, hidden]
    rope: D::Rope,
    scratch: Scratch<D>,
}

struct Layer<D: Device> {
    input_norm: Norm<D>,     // input_layernorm.weight [hidden]
    attention: Attention<D>, // self_attn
    post_norm: Norm<D>,      // post_attention_layernorm.weight [hidden]
    mlp: Mlp<D>,             // mlp
}

struct Attention<D: Device> {
    qkv: D::Matrix,         // q_proj, k_proj, v_proj [(n_heads + 2 * n_kv_heads) * head_dim, hidden]
    output: RowParallel<D>, // o_proj [hidden, n_heads * head_dim]
    heads: Heads,
    layer: usize,
}

struct Mlp<D: Device> {
    gate_up: D::Matrix,   // gate_proj, up_proj [2 * inner, hidden]
    down: RowParallel<D>, // down_proj [hidden, inner]
}

/// What a pass works in, made once for the largest.
struct Scratch<D: Device> {
    residual: D::Buffer,  // [rows_max, hidden]
    x: D::Buffer,         // [rows_max, hidden]
    qkv: D::Buffer,       // [rows_max, qkv_cols]
    attended: D::Buffer,  // [rows_max, n_heads * head_dim]
    attention: D::Buffer, // [n_planes * rows_max, hidden]
    gate_up: D::Buffer,   // [rows_max, 2 * inner]
    inner: D::Buffer,     // [rows_max, inner]
    mlp: D::Buffer,       // [n_planes * rows_max, hidden]
    wanted: D::Buffer,    // [outputs_max, hidden]
    logits: D::Buffer,    // [outputs_max, n_vocab]
}

impl<D: Device> Llama<D> {
    pub fn load(checkpoint: &Checkpoint, device: &D, collective: &Collective, limits: Limits) -> Result<Llama<D>> {
        let spec = checkpoint.spec();
        check(spec)?;
        let shape = &Shape::of(spec);
        let all = Weights::new(checkpoint);
        let model = all.under("model");
        let layers = (0..spec.n_layers as usize)
            .map(|i| Layer::load(&model.under("layers").under(i), shape, i, device, collective))
            .collect::<Result<Vec<_>>>()?;
        let Shape { n_vocab, hidden, .. } = *shape;
        let embed_tokens = device.matrix(&[model.matrix("embed_tokens", n_vocab, hidden)?])?;
        let lm_head = match spec.tied_embeddings {
            true => None,
            false => Some(device.matrix(&[all.matrix("lm_head", n_vocab, hidden)?])?),
        };
        Ok(Llama {
            embed_tokens,
            norm: Norm { weight: model.vector("norm", hidden, device)?, eps: spec.norm_eps },
            lm_head,
            rope: rope::load(device, &spec.rope, limits.context)?,
            scratch: Scratch::new(device, shape, &layers, limits)?,
            layers,
        })
    }

    /// The logits of the batch's outputs: [batch.outputs.len(), n_vocab]
    pub fn forward(
        &mut self,
        device: &D,
        collective: &Collective,
        batch: &Batch,
        kv: &mut D::Kv,
    ) -> Result<&D::Buffer> {
        let s = &mut self.scratch;
        let n_rows = batch.n_rows();
        device.embed(&self.embed_tokens, &batch.tokens, &mut s.residual); // [n_rows, hidden]
        for (i, layer) in self.layers.iter().enumerate() {
            match i {
                0 => layer.input_norm.forward(device, &s.residual, n_rows, &mut s.x),
                _ => layer.input_norm.add(device, &s.mlp, &mut s.residual, n_rows, &mut s.x),
            }
            layer.attention.forward(device, collective, batch, &self.rope, kv, s)?; // x -> attention
            layer.post_norm.add(device, &s.attention, &mut s.residual, n_rows, &mut s.x);
            layer.mlp.forward(device, collective, n_rows, s)?; // x -> mlp
        }
        self.norm.add(device, &s.mlp, &mut s.residual, n_rows, &mut s.x); // [n_rows, hidden]
        if !batch.outputs.is_empty() {
            let lm_head = self.lm_head.as_ref().unwrap_or(&self.embed_tokens);
            device.gather(&s.x, &batch.outputs, &mut s.wanted); // [n_outputs, hidden]
            device.linear(&s.wanted, lm_head, batch.outputs.len(), &mut s.logits); // [n_outputs, n_vocab]
        }
        Ok(&s.logits)
    }

    pub fn weight_bytes(&self, device: &D) -> usize {
        let of_layer = |layer: &Layer<D>| layer.bytes(device);
        let lm_head = self.lm_head.as_ref().map_or(0, |lm_head| device.matrix_bytes(lm_head));
        device.matrix_bytes(&self.embed_tokens) + lm_head + self.layers.iter().map(of_layer).sum::<usize>()
    }
}

impl<D: Device> Layer<D> {
    fn load(at: &Weights<'_>, shape: &Shape, layer: usize, device: &D, collective: &Collective) -> Result<Layer<D>> {
        let norm = |name| -> Result<Norm<D>> {
            Ok(Norm { weight: at.vector(name, shape.hidden, device)?, eps: shape.norm_eps })
        };
        Ok(Layer {
            input_norm: norm("input_layernorm")?,
            attention: Attention::load(&at.under("self_attn"), shape, layer, device, collective)?,
            post_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(&at.under("mlp"), shape, device, collective)?,
        })
    }

    fn bytes(&self, device: &D) -> usize {
        device.matrix_bytes(&self.attention.qkv)
            + self.attention.output.bytes(device)
            + device.matrix_bytes(&self.mlp.gate_up)
            + self.mlp.down.bytes(device)
    }
}

impl<D: Device> Attention<D> {
    fn load(
        at: &Weights<'_>,
        shape: &Shape,
        layer: usize,
        device: &D,
        collective: &Collective,
    ) -> Result<Attention<D>> {
        let Shape { hidden, n_heads, n_kv_heads, head_dim, .. } = *shape;
        let q = at.matrix("q_proj", n_heads * head_dim, hidden)?;
        let k = at.matrix("k_proj", n_kv_heads * head_dim, hidden)?;
        let v = at.matrix("v_proj", n_kv_heads * head_dim, hidden)?;
        let o = at.matrix("o_proj", hidden, n_heads * head_dim)?;
        let leaves = Leaves::o_proj(DeviceClass::Cpu, n_heads as u32, head_dim as u32);
        Ok(Attention {
            qkv: device.matrix(&[q, k, v])?,
            output: RowParallel::load(device, collective, o, &leaves)?,
            heads: Heads::whole(n_heads, n_kv_heads, head_dim, 1.0 / (head_dim as f32).sqrt()),
            layer,
        })
    }

    /// s.x: [n_rows, hidden] -> s.attention: [n_rows, hidden]
    fn forward(
        &self,
        device: &D,
        collective: &Collective,
        batch: &Batch,
        rope: &D::Rope,
        kv: &mut D::Kv,
        s: &mut Scratch<D>,
    ) -> Result<()> {
        let n_rows = batch.n_rows();
        device.linear(&s.x, &self.qkv, n_rows, &mut s.qkv); // [n_rows, qkv_cols]
        device.rope_store(&mut s.qkv, rope, &self.heads, batch, GROUP, self.layer, kv);
        // [n_rows, n_heads * head_dim]
        device.attend(&s.qkv, kv, &self.heads, batch, GROUP, self.layer, &mut s.attended);
        self.output.forward(device, collective, &s.attended, n_rows, &mut s.attention)
    }
}

impl<D: Device> Mlp<D> {
    fn load(at: &Weights<'_>, shape: &Shape, device: &D, collective: &Collective) -> Result<Mlp<D>> {
        let Shape { hidden, inner, .. } = *shape;
        let gate = at.matrix("gate_proj", inner, hidden)?;
        let up = at.matrix("up_proj", inner, hidden)?;
        let down = at.matrix("down_proj", hidden, inner)?;
        let leaves = Leaves::down_proj(DeviceClass::Cpu, inner as u32);
        Ok(Mlp { gate_up: device.matrix(&[gate, up])?, down: RowParallel::load(device, collective, down, &leaves)? })
    }

    /// s.x: [n_rows, hidden] -> s.mlp: [n_rows, hidden]
    fn forward(&self, device: &D, collective: &Collective, n_rows: usize, s: &mut Scratch<D>) -> Result<()> {
        device.linear(&s.x, &self.gate_up, n_rows, &mut s.gate_up); // [n_rows, 2 * inner]
        device.silu_mul(&s.gate_up, n_rows, &mut s.inner); // [n_rows, inner]
        self.down.forward(device, collective, &s.inner, n_rows, &mut s.mlp)
    }
}

impl<D: Device> Scratch<D> {
    fn new(device: &D, shape: &Shape, layers: &[Layer<D>], limits: Limits) -> Result<Scratch<D>> {
        let Shape { hidden, n_heads, n_kv_heads, head_dim, inner, n_vocab, .. } = *shape;
        let Limits { rows_max, outputs_max, .. } = limits;
        let planes = |of: fn(&Layer<D>) -> &RowParallel<D>| {
            rows_max * layers.iter().map(|layer| of(layer).n_planes()).max().unwrap_or(1)
        };
        Ok(Scratch {
            residual: device.buffer(rows_max, hidden)?,
            x: device.buffer(rows_max, hidden)?,
            qkv: device.buffer(rows_max, (n_heads + 2 * n_kv_heads) * head_dim)?,
            attended: device.buffer(rows_max, n_heads * head_dim)?,
            attention: device.buffer(planes(|layer| &layer.attention.output), hidden)?,
            gate_up: device.buffer(rows_max, 2 * inner)?,
            inner: device.buffer(rows_max, inner)?,
            mlp: device.buffer(planes(|layer| &layer.mlp.down), hidden)?,
            wanted: device.buffer(outputs_max, hidden)?,
            logits: device.buffer(outputs_max, n_vocab)?,
        })
    }
}

/// The numbers of a spec, as lengths.
struct Shape {
    hidden: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    inner: usize,
    n_vocab: usize,
    norm_eps: f32,
}

impl Shape {
    fn of(spec: &ModelSpec) -> Shape {
        Shape {
            hidden: spec.hidden as usize,
            n_heads: spec.n_heads as usize,
            n_kv_heads: spec.n_kv_heads as usize,
            head_dim: spec.head_dim as usize,
            inner: spec.inner as usize,
            n_vocab: spec.vocab as usize,
            norm_eps: spec.norm_eps,
        }
    }
}

/// What a checkpoint may say and no operation here does.
fn check(spec: &ModelSpec) -> Result<()> {
    if spec.rope.dim != spec.head_dim {
        return Err(types::Unsupported("rotary positions on a part of the head").into());
    }
    Ok(())
}
