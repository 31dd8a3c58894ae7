//! What takes a layer's positions together: attention, a recurrence, both of them or a convolution.

use crate::attention::{AttentionScratch, SelfAttention};
use crate::convolution::{ConvolutionScratch, ShortConvolution};
use crate::ctx::Ctx;
use crate::error::Result;
use crate::limits::PassLimits;
use crate::recurrence::{Recurrent, RecurrentScratch};
use crate::weights::WeightLoader;
use backend::{Device, ElementOp, Memory};
use checkpoint::{MixerSpec, ModelSpec};

pub enum Mixer<M: Memory> {
    Attention(SelfAttention<M>),      // self_attn
    Recurrence(Recurrent<M>),         // linear_attn
    Convolution(ShortConvolution<M>), // conv
    Both(Box<AttentionAndRecurrence<M>>),
}

/// Attention and a recurrence side by side, whose outputs are added.
pub struct AttentionAndRecurrence<M: Memory> {
    attention: SelfAttention<M>, // self_attn
    recurrence: Recurrent<M>,    // linear_attn
    /// What their outputs are multiplied by.
    factors: [Option<f32>; 2],
}

/// The buffers that mixers work in.
pub struct MixerScratch<M: Memory> {
    attention: AttentionScratch<M>,
    state: Option<StateScratch<M>>,
    /// The recurrence's output, where it is beside attention.
    beside: Option<M::Buffer>, // [n_planes * rows_max, hidden]
}

/// The buffers of layers with a state, which are alike.
enum StateScratch<M: Memory> {
    Recurrence(RecurrentScratch<M>),
    Convolution(ConvolutionScratch<M>),
}

impl<M: Memory> Mixer<M> {
    /// Returns the mixer of a layer that has one. `layer` is its number in the model.
    pub fn load(at: &WeightLoader<'_, M>, spec: &ModelSpec, layer: usize) -> Result<Option<Mixer<M>>> {
        Ok(Some(match &spec.layers[layer].mixer {
            MixerSpec::None => return Ok(None),
            MixerSpec::Attention => Mixer::Attention(SelfAttention::load(&at.at_path("self_attn"), spec, layer)?),
            MixerSpec::Recurrence(of) => {
                Mixer::Recurrence(Recurrent::load(&at.at_path("linear_attn"), spec, of, layer)?)
            }
            MixerSpec::Both(of) => Mixer::Both(Box::new(AttentionAndRecurrence {
                attention: SelfAttention::load(&at.at_path("self_attn"), spec, layer)?,
                recurrence: Recurrent::load(&at.at_path("linear_attn"), spec, of, layer)?,
                factors: [spec.factors.attention, spec.factors.recurrence],
            })),
            MixerSpec::Convolution(of) => {
                Mixer::Convolution(ShortConvolution::load(&at.at_path("conv"), spec, of, layer)?)
            }
        }))
    }

    pub fn n_planes(&self) -> usize {
        match self {
            Mixer::Attention(attention) => attention.n_planes(),
            Mixer::Recurrence(recurrence) => recurrence.n_planes(),
            Mixer::Convolution(convolution) => convolution.n_planes(),
            Mixer::Both(both) => both.attention.n_planes().max(both.recurrence.n_planes()),
        }
    }

    /// Whether ranks show each other rows in here, besides sums.
    pub fn shares_rows(&self) -> bool {
        match self {
            Mixer::Attention(attention) => attention.shares_rows(),
            Mixer::Recurrence(recurrence) => recurrence.shares_rows(),
            Mixer::Convolution(_) => false,
            Mixer::Both(both) => both.attention.shares_rows() || both.recurrence.shares_rows(),
        }
    }
}

impl<M: Memory> MixerScratch<M> {
    /// Makes the buffers, with room for the planes of the mixers' row-parallel products.
    pub fn new(
        all: &WeightLoader<'_, M>,
        spec: &ModelSpec,
        limits: PassLimits,
        n_planes: usize,
    ) -> Result<MixerScratch<M>> {
        let mixer = spec.state_mixer();
        let state = match mixer {
            Some(MixerSpec::Recurrence(of) | MixerSpec::Both(of)) => {
                Some(StateScratch::Recurrence(RecurrentScratch::new(all, &of, limits)?))
            }
            Some(MixerSpec::Convolution(of)) => {
                Some(StateScratch::Convolution(ConvolutionScratch::new(all, &of, limits)?))
            }
            _ => None,
        };
        let beside = match mixer {
            Some(MixerSpec::Both(_)) => Some(all.device().buffer(limits.rows_max * n_planes, spec.hidden as usize)?),
            _ => None,
        };
        Ok(MixerScratch { attention: AttentionScratch::new(all, spec, limits)?, state, beside })
    }
}

impl<D: Device> Mixer<D> {
    /// x: [n_rows, hidden] -> out: [n_rows, hidden]
    pub fn forward(
        &self,
        ctx: &mut Ctx<'_, D>,
        x: &D::Buffer,
        scratch: &mut MixerScratch<D>,
        out: &mut D::Buffer,
    ) -> Result<()> {
        match (self, &mut scratch.state) {
            (Mixer::Attention(attention), _) => attention.forward(ctx, x, &mut scratch.attention, out),
            (Mixer::Recurrence(recurrence), Some(StateScratch::Recurrence(of))) => recurrence.forward(ctx, x, of, out),
            (Mixer::Convolution(convolution), Some(StateScratch::Convolution(of))) => {
                convolution.forward(ctx, x, of, out)
            }
            (Mixer::Both(both), Some(StateScratch::Recurrence(of))) => {
                let beside = scratch.beside.as_mut().expect("the scratch is made for the layers of the model");
                both.attention.forward(ctx, x, &mut scratch.attention, out)?;
                both.recurrence.forward(ctx, x, of, beside)?;
                both.add(ctx, beside, out);
                Ok(())
            }
            _ => unreachable!("the scratch is made for the layers of the model"),
        }
    }
}

impl<D: Device> AttentionAndRecurrence<D> {
    /// The multiplied output of attention, `out`, plus that of the recurrence. [n_rows, hidden] each
    fn add(&self, ctx: &Ctx<'_, D>, beside: &mut D::Buffer, out: &mut D::Buffer) {
        let (device, n_rows, [of_attention, of_recurrence]) = (ctx.device, ctx.n_rows(), self.factors);
        of_attention.iter().for_each(|factor| device.map(out, ElementOp::Scale(*factor), n_rows));
        of_recurrence.iter().for_each(|factor| device.map(beside, ElementOp::Scale(*factor), n_rows));
        device.add(beside, out, n_rows);
    }
}
