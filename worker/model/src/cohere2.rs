//! Cohere 2: attention and MLP side by side behind one LayerNorm without a bias; windows with a rope, and layers
//! without either.

use crate::decoder::{BlockNorms, DecoderVariant};
use crate::layers::NormKind;
use crate::mlp::Activation;

pub const FORM: DecoderVariant = DecoderVariant {
    activation: Activation::Silu,
    norms: BlockNorms::SideBySide { attention: "input_layernorm", mlp: None },
    norm_kind: NormKind::Layer,
    learns_positions: false,
};
