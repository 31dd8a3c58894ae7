//! The layers that all families share, decoders and encoders: an embedding, blocks of attention or a recurrence and an
//! MLP beside a residual stream, a head. The differences between families are fields of `DecoderForm`; differences
//! inside a sublayer are in `Mixer`, `Mlp` and the spec.

use crate::ctx::Ctx;
use crate::distances;
use crate::error::Result;
use crate::kv::KvCache;
use crate::layer_inputs::{LayerInput, LayerInputs};
use crate::layers::{Norm, Residual, run_or_replay_layers};
use crate::limits::PassLimits;
use crate::mixer::{Mixer, MixerScratch};
use crate::mlp::{self, Mlp};
use crate::pooling::PooledLayers;
use crate::rope::Ropes;
use crate::vocabulary::{Embedding, LmHead};
use crate::weights::{MatrixRows, WeightLoader};
use backend::{Device, ElementOp, Memory, Pass};
use checkpoint::{BlockNorms, DecoderForm, ModelSpec, Norms};
use collective::Ranks;
use std::sync::Arc;

pub struct Decoder<M: Memory> {
    embed_tokens: Embedding<M>, // model.embed_tokens.weight [n_vocab, hidden]
    /// A table of learned positions, added to the embedding.
    embed_positions: Option<M::Matrix>, // model.embed_positions.weight [context, hidden]
    /// A table of kinds of tokens, added to the embedding.
    embed_types: Option<M::Matrix>, // model.embed_types.weight [n_token_types, hidden]
    embed_norm: Option<Norm<M>>, // model.embed_norm [hidden]
    /// The inputs that layers have of their own.
    layer_inputs: Option<LayerInputs<M>>,
    blocks: Vec<Block<M>>, // model.layers.{i}
    norm: Option<Norm<M>>, // model.norm [hidden]
    lm_head: LmHead<M>,    // lm_head.weight [n_vocab, hidden], or the embedding again
    pooled_layers: PooledLayers<M>,
    ropes: Ropes<M>,
    residual: Residual<M>,
    scratch: DecoderScratch<M>,
}

pub struct Block<M: Memory> {
    norms: BlockNorms<Norm<M>>, // [hidden] each
    mixer: Option<Mixer<M>>,    // self_attn or linear_attn
    mlp: Option<Mlp<M>>,        // mlp
    /// Adds what comes of the layer's own input.
    input: Option<LayerInput<M>>,
    /// What a sublayer's output is multiplied by.
    factor: Option<f32>,
    /// What the stream is multiplied by behind the layer.
    scale: Option<f32>, // layer_scalar
}

/// The buffers that a pass works in, allocated once for the largest.
pub struct DecoderScratch<M: Memory> {
    x: M::Buffer,   // [rows_max, hidden]
    out: M::Buffer, // [n_planes * rows_max, hidden], what does not go straight to the stream; or no rows
    mixer: MixerScratch<M>,
    mlp: mlp::MlpScratch<M>,
}

impl<M: Memory> Decoder<M> {
    pub fn load(
        all: &WeightLoader<'_, M>,
        spec: &ModelSpec,
        form: &DecoderForm,
        limits: PassLimits,
    ) -> Result<Decoder<M>> {
        let (device, model, hidden) = (all.device(), all.at_path("model"), spec.hidden as usize);
        let blocks = all.layers(|at, layer| Block::load(at, spec, form, layer))?;
        let (embed_tokens, lm_head) = LmHead::with_embedding(all, spec, limits)?;
        let embed_positions = match form.learns_positions && all.part().is_first() {
            true => Some(model.rows(hidden, &[MatrixRows::all("embed_positions", spec.context as usize)])?),
            false => None,
        };
        let embed_types = match spec.encoder.map_or(0, |of| of.n_token_types as usize) {
            n if n > 0 && all.part().is_first() => Some(model.rows(hidden, &[MatrixRows::all("embed_types", n)])?),
            _ => None,
        };
        let norm = |is_there: bool, name| match is_there {
            true => Norm::load(&model, name, spec, form.norm_kind).map(Some),
            false => Ok(None),
        };
        let n_planes = blocks.iter().map(Block::n_planes).max().unwrap_or(1);
        Ok(Decoder {
            embed_tokens,
            layer_inputs: match spec.layer_input {
                0 => None,
                _ => Some(LayerInputs::load(&model, spec, limits)?),
            },
            embed_positions,
            embed_types,
            embed_norm: norm(form.norms_embedding && all.part().is_first(), "embed_norm")?,
            blocks,
            norm: norm(form.norms_output, "norm")?,
            pooled_layers: PooledLayers::load(all, spec)?,
            lm_head: lm_head.capped(spec.logits_cap).scaled_by(spec.factors.logits),
            ropes: Ropes::load(all, spec, limits.context, distances::load(all, spec)?)?,
            residual: Residual::new(device, limits, hidden, n_planes)?,
            scratch: DecoderScratch::new(all, spec, form, limits, n_planes)?,
        })
    }

    /// Whether each pass from now on leaves its hidden states.
    pub fn keep_hidden(&mut self, keeps_hidden: bool) {
        self.lm_head.keep_hidden(keeps_hidden);
    }

    /// The tables of the embedding and of the head, where this rank has all of their rows.
    pub fn whole_tables(&self) -> [Option<Arc<M::Matrix>>; 2] {
        [self.embed_tokens.whole_table(), self.lm_head.whole_table()]
    }

    /// The hidden states of the last pass, after the final norm: `[n_rows, hidden]`. On the last stage only.
    pub fn hidden(&self) -> Option<&M::Buffer> {
        self.lm_head.hidden()
    }
}

impl<D: Device> Decoder<D> {
    /// Replaces a pooled vector by what the layers behind pooling make of it.
    pub fn finish_pooled(&mut self, device: &D, pooled: &mut Vec<f32>) {
        self.pooled_layers.forward(device, pooled);
    }

    /// The logits of the pass's outputs, on the rank that samples: [n_outputs, n_vocab]
    pub fn forward(
        &mut self,
        device: &D,
        ranks: &mut Ranks<D>,
        pass: &Pass<'_>,
        kv: &mut KvCache<D>,
    ) -> Result<Option<&D::Buffer>> {
        let Decoder { layer_inputs, blocks, lm_head, residual, scratch, .. } = self;
        let ctx = &mut Ctx { device, ranks, pass, kv, ropes: &self.ropes };
        self.embed_tokens.forward(ctx, residual)?; // [n_rows, hidden]
        if let Some(inputs) = layer_inputs {
            inputs.compute(ctx, residual)?; // [n_rows, n_layers * width]
        }
        if let Some(table) = &self.embed_positions {
            device.embed(table, 0, pass.rows.positions, residual.due()); // [n_rows, hidden]
        }
        if let Some(table) = &self.embed_types {
            residual.sum_with_due(device, pass.n_rows());
            device.embed(table, 0, pass.rows.types, residual.due()); // [n_rows, hidden]
        }
        if let Some(norm) = &self.embed_norm {
            residual.replace_by_norm(norm, device, pass.n_rows(), &mut scratch.x);
        }
        let only_sums = blocks.iter().all(|block| !block.mixer.as_ref().is_some_and(Mixer::shares_rows));
        run_or_replay_layers(ctx, residual, only_sums, |ctx, residual| {
            blocks.iter().enumerate().try_for_each(|(i, block)| {
                block.forward(ctx, residual, scratch)?;
                block.finish(ctx, residual, layer_inputs.as_mut(), i, &mut scratch.out);
                Ok(())
            })
        })?;
        lm_head.forward(ctx, self.norm.as_ref(), residual) // [n_outputs, n_vocab]
    }
}

impl<M: Memory> DecoderScratch<M> {
    /// Makes the buffers, with room for the planes of the sublayers' row-parallel products.
    pub fn new(
        all: &WeightLoader<'_, M>,
        spec: &ModelSpec,
        form: &DecoderForm,
        limits: PassLimits,
        n_planes: usize,
    ) -> Result<DecoderScratch<M>> {
        let (device, hidden) = (all.device(), spec.hidden as usize);
        let n_planes_out = if form.has_all_norms_before() { 0 } else { n_planes };
        Ok(DecoderScratch {
            x: device.buffer(limits.rows_max, hidden)?,
            out: device.buffer(limits.rows_max * n_planes_out, hidden)?,
            mixer: MixerScratch::new(all, spec, limits, n_planes)?,
            mlp: mlp::MlpScratch::new(all, spec, limits)?,
        })
    }
}

impl<M: Memory> Block<M> {
    pub fn load(at: &WeightLoader<'_, M>, spec: &ModelSpec, form: &DecoderForm, layer: usize) -> Result<Block<M>> {
        let of = &spec.layers[layer];
        let norms = match spec.encoder.is_some_and(|of| of.skips_first_norm) && layer == 0 {
            true => form.norms_of(&of.mixer).without_first(),
            false => form.norms_of(&of.mixer),
        };
        Ok(Block {
            norms: norms.map(|name| Norm::load(at, name, spec, form.norm_kind))?,
            mixer: Mixer::load(at, spec, layer)?,
            mlp: match of.has_mlp {
                true => Some(Mlp::load(at, spec, of, form.activation)?),
                false => None,
            },
            input: match spec.layer_input {
                0 => None,
                _ => Some(LayerInput::load(at, spec)?),
            },
            factor: spec.factors.residual,
            scale: match form.scales_layers {
                true => Some(at.numbers("layer_scalar", [1, 1])?[0]),
                false => None,
            },
        })
    }

    pub fn n_planes(&self) -> usize {
        let of_mixer = self.mixer.as_ref().map_or(1, Mixer::n_planes);
        of_mixer.max(self.mlp.as_ref().map_or(1, Mlp::n_planes))
    }
}

impl<D: Device> Block<D> {
    /// The stream, to which the last sublayer's output is yet to be added. [n_rows, hidden]
    pub fn forward(
        &self,
        ctx: &mut Ctx<'_, D>,
        residual: &mut Residual<D>,
        scratch: &mut DecoderScratch<D>,
    ) -> Result<()> {
        let DecoderScratch { x, out, mixer, mlp } = scratch;
        match &self.norms {
            BlockNorms::InTurn { attention: of_attention, mlp: of_mlp } => {
                self.sublayer(ctx, of_attention, residual, x, out, |ctx, x, out| self.mix(ctx, x, mixer, out))?;
                self.sublayer(ctx, of_mlp, residual, x, out, |ctx, x, out| self.apply_mlp(ctx, x, mlp, out))
            }
            BlockNorms::Alone(of) => self.sublayer(ctx, of, residual, x, out, |ctx, x, out| {
                self.mix(ctx, x, mixer, out)?;
                self.apply_mlp(ctx, x, mlp, out)
            }),
            BlockNorms::SideBySide { attention: of_attention, mlp: of_mlp } => {
                let (device, n_rows) = (ctx.device, ctx.n_rows());
                of_attention.forward(device, residual, n_rows, x);
                self.mix(ctx, x, mixer, out)?;
                if let Some(norm) = of_mlp {
                    norm.forward(device, residual, n_rows, x);
                }
                self.apply_mlp(ctx, x, mlp, residual.due())?;
                device.add(out, residual.due(), n_rows);
                self.scale(ctx, residual);
                Ok(())
            }
        }
    }

    /// Behind the sublayers: adds what comes of the layer's own input, and scales the stream.
    fn finish(
        &self,
        ctx: &Ctx<'_, D>,
        residual: &mut Residual<D>,
        inputs: Option<&mut LayerInputs<D>>,
        i: usize,
        out: &mut D::Buffer,
    ) {
        if let (Some(input), Some(inputs)) = (&self.input, inputs) {
            input.forward(ctx, residual, inputs, i, out);
        }
        if let Some(scale) = self.scale {
            let n_rows = ctx.n_rows();
            ctx.device.map(residual.sum_with_due(ctx.device, n_rows), ElementOp::Scale(scale), n_rows);
        }
    }

    /// The mixer, if the block has one. x: [n_rows, hidden] -> out: [n_rows, hidden]
    fn mix(
        &self,
        ctx: &mut Ctx<'_, D>,
        x: &D::Buffer,
        scratch: &mut MixerScratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        self.mixer.iter().try_for_each(|mixer| mixer.forward(ctx, x, scratch, out))
    }

    /// The MLP, if the block has one. x: [n_rows, hidden] -> out: [n_rows, hidden]
    fn apply_mlp(
        &self,
        ctx: &mut Ctx<'_, D>,
        x: &D::Buffer,
        scratch: &mut mlp::MlpScratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        self.mlp.iter().try_for_each(|mlp| mlp.forward(ctx, x, scratch, out))
    }

    /// One sublayer between its norms; its output is what the stream is due.
    fn sublayer(
        &self,
        ctx: &mut Ctx<'_, D>,
        norms: &Norms<Norm<D>>,
        residual: &mut Residual<D>,
        x: &mut D::Buffer,
        out: &mut D::Buffer,
        run: impl FnOnce(&mut Ctx<'_, D>, &D::Buffer, &mut D::Buffer) -> Result<()>,
    ) -> Result<()> {
        let (device, n_rows) = (ctx.device, ctx.n_rows());
        match norms {
            Norms::Before(before) => {
                before.forward(device, residual, n_rows, x);
                run(ctx, x, residual.due())?;
            }
            Norms::Around { before, behind } => {
                before.forward(device, residual, n_rows, x);
                run(ctx, x, out)?;
                behind.plain(device, out, n_rows, residual.due());
            }
            Norms::Behind(behind) => {
                run(ctx, residual.sum_with_due(device, n_rows), out)?;
                behind.plain(device, out, n_rows, residual.due());
            }
            Norms::OfSum(norm) => {
                let (sum, due) = residual.sum_and_due(device, n_rows);
                run(ctx, sum, due)?;
                residual.replace_by_norm(norm, device, n_rows, x);
                return Ok(());
            }
            Norms::None => {
                let (sum, due) = residual.sum_and_due(device, n_rows);
                run(ctx, sum, due)?;
            }
        }
        self.scale(ctx, residual);
        Ok(())
    }

    fn scale(&self, ctx: &Ctx<'_, D>, residual: &mut Residual<D>) {
        if let Some(factor) = self.factor {
            ctx.device.map(residual.due(), ElementOp::Scale(factor), ctx.n_rows());
        }
    }
}
