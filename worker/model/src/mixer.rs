//! What takes a layer's positions together: attention, a recurrence or a convolution.

use crate::attention::{AttentionScratch, SelfAttention};
use crate::convolution::{ConvolutionScratch, ShortConvolution};
use crate::ctx::Ctx;
use crate::error::Result;
use crate::limits::PassLimits;
use crate::recurrence::{Recurrent, RecurrentScratch};
use crate::weights::WeightLoader;
use backend::{Device, Memory};
use checkpoint::{MixerKind, ModelSpec};

pub enum Mixer<M: Memory> {
    Attention(SelfAttention<M>),      // self_attn
    Recurrence(Recurrent<M>),         // linear_attn
    Convolution(ShortConvolution<M>), // conv
}

/// The buffers that mixers work in.
pub struct MixerScratch<M: Memory> {
    attention: AttentionScratch<M>,
    recurrence: Option<RecurrentScratch<M>>,
    convolution: Option<ConvolutionScratch<M>>,
}

impl<M: Memory> Mixer<M> {
    /// Returns the mixer of a layer that has one. `layer` is its number in the model.
    pub fn load(at: &WeightLoader<'_, M>, spec: &ModelSpec, layer: usize) -> Result<Option<Mixer<M>>> {
        Ok(Some(match (spec.layers[layer].mixer, &spec.recurrence, &spec.convolution) {
            (MixerKind::None, ..) => return Ok(None),
            (MixerKind::Attention, ..) => Mixer::Attention(SelfAttention::load(&at.at_path("self_attn"), spec, layer)?),
            (MixerKind::Recurrence, Some(of), _) => {
                Mixer::Recurrence(Recurrent::load(&at.at_path("linear_attn"), spec, of, layer)?)
            }
            (MixerKind::Convolution, _, Some(of)) => {
                Mixer::Convolution(ShortConvolution::load(&at.at_path("conv"), spec, of, layer)?)
            }
            (MixerKind::Recurrence, None, _) | (MixerKind::Convolution, _, None) => {
                unreachable!("a checked spec has the shapes of its mixers")
            }
        }))
    }

    pub fn n_planes(&self) -> usize {
        match self {
            Mixer::Attention(attention) => attention.n_planes(),
            Mixer::Recurrence(recurrence) => recurrence.n_planes(),
            Mixer::Convolution(convolution) => convolution.n_planes(),
        }
    }

    /// Whether ranks show each other rows in here, besides sums.
    pub fn shares_rows(&self) -> bool {
        match self {
            Mixer::Attention(attention) => attention.shares_rows(),
            Mixer::Recurrence(recurrence) => recurrence.shares_rows(),
            Mixer::Convolution(_) => false,
        }
    }
}

impl<M: Memory> MixerScratch<M> {
    pub fn new(all: &WeightLoader<'_, M>, spec: &ModelSpec, limits: PassLimits) -> Result<MixerScratch<M>> {
        let recurrence = spec.recurrence.as_ref().map(|of| RecurrentScratch::new(all, of, limits)).transpose()?;
        let convolution = spec.convolution.as_ref().map(|of| ConvolutionScratch::new(all, of, limits)).transpose()?;
        Ok(MixerScratch { attention: AttentionScratch::new(all, spec, limits)?, recurrence, convolution })
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
        let MixerScratch { attention: of_attention, recurrence: of_recurrence, convolution: of_convolution } = scratch;
        match (self, of_recurrence, of_convolution) {
            (Mixer::Attention(attention), ..) => attention.forward(ctx, x, of_attention, out),
            (Mixer::Recurrence(recurrence), Some(scratch), _) => recurrence.forward(ctx, x, scratch, out),
            (Mixer::Convolution(convolution), _, Some(scratch)) => convolution.forward(ctx, x, scratch, out),
            _ => unreachable!("a spec with such layers has a scratch for them"),
        }
    }
}
