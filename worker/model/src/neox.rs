//! GPT-NeoX, which Pythia is: attention and MLP each behind a LayerNorm of its own, side by side or in turn.

use crate::decoder::{BlockNorms, DecoderVariant, Norms};
use crate::layers::NormKind;
use crate::mlp::Activation;

pub const IN_TURN: DecoderVariant = DecoderVariant {
    activation: Activation::PlainGeluErf,
    norms: BlockNorms::InTurn {
        attention: Norms::Before("input_layernorm"),
        mlp: Norms::Before("post_attention_layernorm"),
    },
    norm_kind: NormKind::Layer,
    learns_positions: false,
};

pub const SIDE_BY_SIDE: DecoderVariant = DecoderVariant {
    activation: Activation::PlainGeluErf,
    norms: BlockNorms::SideBySide { attention: "input_layernorm", mlp: Some("post_attention_layernorm") },
    norm_kind: NormKind::Layer,
    learns_positions: false,
};
