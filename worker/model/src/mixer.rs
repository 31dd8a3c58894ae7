//! What takes a layer's positions together: attention, a recurrence or a convolution.

use crate::attention::{AttentionScratch, SelfAttention};
use crate::convolution::{ConvolutionScratch, ShortConvolution};
use crate::ctx::Ctx;
use crate::error::Result;
use crate::limits::PassLimits;
use crate::recurrence::{Recurrent, RecurrentScratch};
use crate::weights::WeightLoader;
use backend::{Device, Memory};
use checkpoint::{MixerSpec, ModelSpec};

pub enum Mixer<M: Memory> {
    Attention(SelfAttention<M>),      // self_attn
    Recurrence(Recurrent<M>),         // linear_attn
    Convolution(ShortConvolution<M>), // conv
}

/// The buffers that mixers work in.
pub struct MixerScratch<M: Memory> {
    attention: AttentionScratch<M>,
    state: Option<StateScratch<M>>,
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
        let state = match spec.state_mixer() {
            Some(MixerSpec::Recurrence(of)) => Some(StateScratch::Recurrence(RecurrentScratch::new(all, &of, limits)?)),
            Some(MixerSpec::Convolution(of)) => {
                Some(StateScratch::Convolution(ConvolutionScratch::new(all, &of, limits)?))
            }
            _ => None,
        };
        Ok(MixerScratch { attention: AttentionScratch::new(all, spec, limits)?, state })
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
            _ => unreachable!("the scratch is made for the layers of the model"),
        }
    }
}
