//! Gemma 2 and 3: norms on both sides of each sublayer, a scaled embedding, layers that look only at what is near
//! between those that see all, a GELU for a gate. Gemma 2 caps scores and logits; Gemma 3 norms its heads instead, and
//! its local layers turn by a rope of their own.

use crate::attention::{self, Attention};
use crate::layers::{Embedding, Head, Norm, Residual, repeat};
use crate::mlp::{self, Activation, Mlp};
use crate::rope::Ropes;
use crate::weights::Weights;
use crate::{KvCache, Limits, Result};
use backend::{Device, Memory, Pass};
use checkpoint::{Checkpoint, ModelSpec};
use collective::Ranks;

pub struct Gemma<M: Memory> {
    embed_tokens: Embedding<M>, // model.embed_tokens.weight [n_vocab, hidden], times sqrt(hidden)
    layers: Vec<Layer<M>>,      // model.layers.{i}
    norm: Norm<M>,              // model.norm.weight [hidden]
    lm_head: Head<M>,           // the embedding again, its logits capped
    ropes: Ropes<M>,
    residual: Residual<M>,
    scratch: Scratch<M>,
}

struct Layer<M: Memory> {
    input_norm: Norm<M>,            // input_layernorm.weight [hidden]
    attention: Attention<M>,        // self_attn
    post_attention_norm: Norm<M>,   // post_attention_layernorm.weight [hidden]
    pre_feedforward_norm: Norm<M>,  // pre_feedforward_layernorm.weight [hidden]
    mlp: Mlp<M>,                    // mlp
    post_feedforward_norm: Norm<M>, // post_feedforward_layernorm.weight [hidden]
}

/// What a pass works in, made once for the largest.
struct Scratch<M: Memory> {
    x: M::Buffer,   // [rows_max, hidden]
    out: M::Buffer, // [n_planes * rows_max, hidden], what a sublayer made
    attention: attention::Room<M>,
    mlp: mlp::Room<M>,
}

impl<M: Memory> Gemma<M> {
    pub fn load(all: &Weights<'_, M>, checkpoint: &Checkpoint, limits: Limits) -> Result<Gemma<M>> {
        let (spec, device) = (checkpoint.spec(), all.device());
        let hidden = spec.hidden as usize;
        let layers = all.layers(|at, layer| Layer::load(at, spec, layer))?;
        let (embed_tokens, lm_head) = Head::with_embedding(all, spec, limits)?;
        let n_planes = layers.iter().map(Layer::n_planes).max().unwrap_or(1);
        Ok(Gemma {
            embed_tokens: embed_tokens.times((hidden as f32).sqrt()),
            norm: Norm::load(&all.under("model"), "norm", spec)?,
            lm_head: lm_head.capped(spec.logits_cap),
            ropes: Ropes::load(device, spec, limits.context)?,
            residual: Residual::new(device, limits, hidden, 1)?,
            scratch: Scratch {
                x: device.buffer(limits.rows_max, hidden)?,
                out: device.buffer(limits.rows_max * n_planes, hidden)?,
                attention: attention::Room::new(all, spec, limits)?,
                mlp: mlp::Room::new(all, spec, limits)?,
            },
            layers,
        })
    }
}

impl<D: Device> Gemma<D> {
    /// The logits of the pass's outputs, on the rank that samples: [n_outputs, n_vocab]
    pub fn forward(
        &mut self,
        device: &D,
        collective: &mut Ranks<D>,
        pass: &Pass<'_>,
        kv: &mut KvCache<D>,
    ) -> Result<Option<&D::Buffer>> {
        let (residual, ropes, n_rows) = (&mut self.residual, &self.ropes, pass.n_rows());
        let Scratch { x, out, attention, mlp } = &mut self.scratch;
        self.embed_tokens.forward(device, collective, pass, residual)?; // [n_rows, hidden]
        let layers = &self.layers;
        repeat(device, collective, residual, |collective, residual| {
            for layer in layers {
                layer.input_norm.forward(device, residual, n_rows, x);
                layer.attention.forward(device, collective, pass, ropes, kv, x, attention, out)?;
                layer.post_attention_norm.plain(device, out, n_rows, residual.due());
                layer.pre_feedforward_norm.forward(device, residual, n_rows, x);
                layer.mlp.forward(device, collective, x, n_rows, mlp, out)?;
                layer.post_feedforward_norm.plain(device, out, n_rows, residual.due());
            }
            Ok(())
        })?;
        self.lm_head.forward(device, collective, &self.norm, pass, residual) // [n_outputs, n_vocab]
    }
}

impl<M: Memory> Gemma<M> {
    pub fn hidden(&self) -> Option<&M::Buffer> {
        self.lm_head.hidden()
    }
}

impl<M: Memory> Layer<M> {
    fn load(at: &Weights<'_, M>, spec: &ModelSpec, layer: usize) -> Result<Layer<M>> {
        Ok(Layer {
            input_norm: Norm::load(at, "input_layernorm", spec)?,
            attention: Attention::load(&at.under("self_attn"), spec, layer)?,
            post_attention_norm: Norm::load(at, "post_attention_layernorm", spec)?,
            pre_feedforward_norm: Norm::load(at, "pre_feedforward_layernorm", spec)?,
            mlp: Mlp::load(&at.under("mlp"), spec, &spec.layers[layer], Activation::Gelu)?,
            post_feedforward_norm: Norm::load(at, "post_feedforward_layernorm", spec)?,
        })
    }

    fn n_planes(&self) -> usize {
        self.attention.n_planes().max(self.mlp.n_planes())
    }
}
