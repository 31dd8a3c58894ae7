//! GPT-2: learned positions added to the embedding, LayerNorm (its norms have a bias), a bias on every product, an MLP
//! without a gate.

use crate::decoder::{BlockNorms, DecoderVariant, Norms};
use crate::layers::NormKind;
use crate::mlp::Activation;

pub const FORM: DecoderVariant = DecoderVariant {
    activation: Activation::PlainGelu,
    norms: BlockNorms::InTurn {
        attention: Norms::Before("input_layernorm"),
        mlp: Norms::Before("post_attention_layernorm"),
    },
    norm_kind: NormKind::Layer,
    learns_positions: true,
};
