//! The Llama family and those that took its form: pre-norm decoder layers, grouped-query attention, a gated MLP.
//!
//! Mistral looks back over a window, Qwen2 has a bias on Q, K and V, Qwen3 norms its heads, SmolLM3 leaves positions
//! out of some layers, Phi-3 stores its matrices fused; Mixtral and Qwen3-MoE have experts for an MLP. All of that is
//! in `Attention`, `Mlp` and the spec: the layer is the same.

use crate::attention::{self, Attention};
use crate::layers::{Embedding, Head, Norm, Residual, repeat};
use crate::mlp::{self, Activation, Mlp};
use crate::rope::Ropes;
use crate::weights::Weights;
use crate::{KvCache, Limits, Result};
use backend::{Device, Memory, Pass};
use checkpoint::{Checkpoint, ModelSpec};
use collective::Ranks;

pub struct Llama<M: Memory> {
    embed_tokens: Embedding<M>, // model.embed_tokens.weight [n_vocab, hidden]
    layers: Vec<Layer<M>>,      // model.layers.{i}
    norm: Norm<M>,              // model.norm.weight [hidden]
    lm_head: Head<M>,           // lm_head.weight [n_vocab, hidden], or the embedding again
    ropes: Ropes<M>,
    residual: Residual<M>,
    scratch: Scratch<M>,
}

struct Layer<M: Memory> {
    input_norm: Norm<M>,     // input_layernorm.weight [hidden]
    attention: Attention<M>, // self_attn
    post_norm: Norm<M>,      // post_attention_layernorm.weight [hidden]
    mlp: Mlp<M>,             // mlp
}

/// What a pass works in, made once for the largest.
struct Scratch<M: Memory> {
    x: M::Buffer, // [rows_max, hidden]
    attention: attention::Room<M>,
    mlp: mlp::Room<M>,
}

impl<M: Memory> Llama<M> {
    pub fn load(all: &Weights<'_, M>, checkpoint: &Checkpoint, limits: Limits) -> Result<Llama<M>> {
        let spec = checkpoint.spec();
        let hidden = spec.hidden as usize;
        let layers = all.layers(|at, layer| Layer::load(at, spec, layer))?;
        let (embed_tokens, lm_head) = Head::with_embedding(all, spec, limits)?;
        let n_planes = layers.iter().map(Layer::n_planes).max().unwrap_or(1);
        Ok(Llama {
            embed_tokens,
            norm: Norm::load(&all.under("model"), "norm", spec)?,
            lm_head,
            ropes: Ropes::load(all.device(), spec, limits.context)?,
            residual: Residual::new(all.device(), limits, hidden, n_planes)?,
            scratch: Scratch {
                x: all.device().buffer(limits.rows_max, hidden)?,
                attention: attention::Room::new(all, spec, limits)?,
                mlp: mlp::Room::new(all, spec, limits)?,
            },
            layers,
        })
    }
}

impl<D: Device> Llama<D> {
    /// The logits of the pass's outputs, on the rank that samples: [n_outputs, n_vocab]
    pub fn forward(
        &mut self,
        device: &D,
        collective: &mut Ranks<D>,
        pass: &Pass<'_>,
        kv: &mut KvCache<D>,
    ) -> Result<Option<&D::Buffer>> {
        let (residual, ropes, n_rows) = (&mut self.residual, &self.ropes, pass.n_rows());
        let Scratch { x, attention, mlp } = &mut self.scratch;
        self.embed_tokens.forward(device, collective, pass, residual)?; // [n_rows, hidden]
        let layers = &self.layers;
        repeat(device, collective, residual, |collective, residual| {
            for layer in layers {
                layer.input_norm.forward(device, residual, n_rows, x);
                layer.attention.forward(device, collective, pass, ropes, kv, x, attention, residual.due())?;
                layer.post_norm.forward(device, residual, n_rows, x);
                layer.mlp.forward(device, collective, x, n_rows, mlp, residual.due())?;
            }
            Ok(())
        })?;
        self.lm_head.forward(device, collective, &self.norm, pass, residual) // [n_outputs, n_vocab]
    }
}

impl<M: Memory> Llama<M> {
    pub fn hidden(&self) -> Option<&M::Buffer> {
        self.lm_head.hidden()
    }
}

impl<M: Memory> Layer<M> {
    fn load(at: &Weights<'_, M>, spec: &ModelSpec, layer: usize) -> Result<Layer<M>> {
        Ok(Layer {
            input_norm: Norm::load(at, "input_layernorm", spec)?,
            attention: Attention::load(&at.under("self_attn"), spec, layer)?,
            post_norm: Norm::load(at, "post_attention_layernorm", spec)?,
            mlp: Mlp::load(&at.under("mlp"), spec, &spec.layers[layer], Activation::Silu)?,
        })
    }

    fn n_planes(&self) -> usize {
        self.attention.n_planes().max(self.mlp.n_planes())
    }
}
