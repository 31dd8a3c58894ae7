//! The decoder that all families share: an embedding, blocks of attention and an MLP beside a residual stream, a head.
//! The differences between families are fields of `Form`; differences inside a sublayer are in `Attention`, `Mlp` and
//! the spec.

use crate::attention::{self, SelfAttention};
use crate::ctx::Ctx;
use crate::error::Result;
use crate::kv::KvCache;
use crate::layers::{Embedding, LmHead, Norm, Residual, repeat};
use crate::limits::PassLimits;
use crate::mlp::{self, Activation, Mlp};
use crate::rope::Ropes;
use crate::weights::{MatrixRows, Weights};
use backend::{Device, Memory, Pass};
use checkpoint::ModelSpec;
use collective::Ranks;

/// How a family differs from the others.
pub struct Form {
    pub activation: Activation,
    pub norms: BlockNorms,
    /// The embedding is multiplied by the square root of its width.
    pub scales_embedding: bool,
    /// Learned positions are added to the embedding.
    pub learns_positions: bool,
    pub caps_logits: bool,
}

/// The names of a block's norms. A norm after a sublayer applies to its output, before that is added to the stream.
pub struct BlockNorms {
    pub before_attention: &'static str,
    pub behind_attention: Option<&'static str>,
    pub before_mlp: &'static str,
    pub behind_mlp: Option<&'static str>,
}

impl BlockNorms {
    fn are_behind(&self) -> bool {
        self.behind_attention.is_some() || self.behind_mlp.is_some()
    }
}

pub struct Decoder<M: Memory> {
    embed_tokens: Embedding<M>, // model.embed_tokens.weight [n_vocab, hidden]
    /// A table of learned positions, added to the embedding.
    embed_positions: Option<M::Matrix>, // model.embed_positions.weight [context, hidden]
    blocks: Vec<Block<M>>,      // model.layers.{i}
    norm: Norm<M>,              // model.norm [hidden]
    lm_head: LmHead<M>,         // lm_head.weight [n_vocab, hidden], or the embedding again
    ropes: Ropes<M>,
    residual: Residual<M>,
    scratch: Scratch<M>,
}

struct Block<M: Memory> {
    before_attention: Norm<M>,   // [hidden]
    attention: SelfAttention<M>, // self_attn
    behind_attention: Option<Norm<M>>,
    before_mlp: Norm<M>, // [hidden]
    mlp: Mlp<M>,         // mlp
    behind_mlp: Option<Norm<M>>,
}

/// The buffers that a pass works in, allocated once for the largest.
struct Scratch<M: Memory> {
    x: M::Buffer,   // [rows_max, hidden]
    out: M::Buffer, // [n_planes * rows_max, hidden], what a sublayer made that has a norm behind it; or no rows
    attention: attention::AttentionScratch<M>,
    mlp: mlp::MlpScratch<M>,
}

impl<M: Memory> Decoder<M> {
    pub fn load(all: &Weights<'_, M>, spec: &ModelSpec, form: &Form, limits: PassLimits) -> Result<Decoder<M>> {
        let (device, model, hidden) = (all.device(), all.under("model"), spec.hidden as usize);
        let blocks = all.layers(|at, layer| Block::load(at, spec, form, layer))?;
        let (embed_tokens, lm_head) = LmHead::with_embedding(all, spec, limits)?;
        let embed_positions = match form.learns_positions && all.part().is_first() {
            true => Some(model.rows(hidden, &[MatrixRows::all("embed_positions", spec.context as usize)])?),
            false => None,
        };
        let n_planes = blocks.iter().map(Block::n_planes).max().unwrap_or(1);
        let (n_planes_due, n_planes_out) = if form.norms.are_behind() { (1, n_planes) } else { (n_planes, 0) };
        Ok(Decoder {
            embed_tokens: if form.scales_embedding { embed_tokens.times((hidden as f32).sqrt()) } else { embed_tokens },
            embed_positions,
            blocks,
            norm: Norm::load(&model, "norm", spec)?,
            lm_head: lm_head.capped(spec.logits_cap.filter(|_| form.caps_logits)),
            ropes: Ropes::load(device, spec, limits.context)?,
            residual: Residual::new(device, limits, hidden, n_planes_due)?,
            scratch: Scratch {
                x: device.buffer(limits.rows_max, hidden)?,
                out: device.buffer(limits.rows_max * n_planes_out, hidden)?,
                attention: attention::AttentionScratch::new(all, spec, limits)?,
                mlp: mlp::MlpScratch::new(all, spec, limits)?,
            },
        })
    }

    /// The hidden states of the last pass, after the final norm: `[n_rows, hidden]`. On the last stage only.
    pub fn hidden(&self) -> Option<&M::Buffer> {
        self.lm_head.hidden()
    }
}

impl<D: Device> Decoder<D> {
    /// The logits of the pass's outputs, on the rank that samples: [n_outputs, n_vocab]
    pub fn forward(
        &mut self,
        device: &D,
        ranks: &mut Ranks<D>,
        pass: &Pass<'_>,
        kv: &mut KvCache<D>,
    ) -> Result<Option<&D::Buffer>> {
        let Decoder { embed_tokens, embed_positions, blocks, norm, lm_head, ropes, residual, scratch } = self;
        let ctx = &mut Ctx { device, ranks, pass, kv, ropes };
        embed_tokens.forward(ctx, residual)?; // [n_rows, hidden]
        if let Some(table) = embed_positions {
            device.embed(table, 0, pass.rows.positions, residual.due()); // [n_rows, hidden]
        }
        repeat(ctx, residual, |ctx, residual| {
            blocks.iter().try_for_each(|block| block.forward(ctx, residual, scratch))
        })?;
        lm_head.forward(ctx, norm, residual) // [n_outputs, n_vocab]
    }
}

impl<M: Memory> Block<M> {
    fn load(at: &Weights<'_, M>, spec: &ModelSpec, form: &Form, layer: usize) -> Result<Block<M>> {
        let BlockNorms { before_attention, behind_attention, before_mlp, behind_mlp } = form.norms;
        let norm = |name: &str| Norm::load(at, name, spec);
        Ok(Block {
            before_attention: norm(before_attention)?,
            attention: SelfAttention::load(&at.under("self_attn"), spec, layer)?,
            behind_attention: behind_attention.map(norm).transpose()?,
            before_mlp: norm(before_mlp)?,
            mlp: Mlp::load(&at.under("mlp"), spec, &spec.layers[layer], form.activation)?,
            behind_mlp: behind_mlp.map(norm).transpose()?,
        })
    }

    fn n_planes(&self) -> usize {
        self.attention.n_planes().max(self.mlp.n_planes())
    }
}

impl<D: Device> Block<D> {
    /// The stream, to which the MLP's output is yet to be added. [n_rows, hidden]
    fn forward(&self, ctx: &mut Ctx<'_, D>, residual: &mut Residual<D>, scratch: &mut Scratch<D>) -> Result<()> {
        let (device, n_rows) = (ctx.device, ctx.n_rows());
        let Scratch { x, out, attention, mlp } = scratch;
        self.before_attention.forward(device, residual, n_rows, x);
        match &self.behind_attention {
            None => self.attention.forward(ctx, x, attention, residual.due())?,
            Some(norm) => {
                self.attention.forward(ctx, x, attention, out)?;
                norm.plain(device, out, n_rows, residual.due());
            }
        }
        self.before_mlp.forward(device, residual, n_rows, x);
        match &self.behind_mlp {
            None => self.mlp.forward(ctx, x, mlp, residual.due())?,
            Some(norm) => {
                self.mlp.forward(ctx, x, mlp, out)?;
                norm.plain(device, out, n_rows, residual.due());
            }
        }
        Ok(())
    }
}
