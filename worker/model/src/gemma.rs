//! Gemma 2 and 3: norms on both sides of each sublayer, a scaled embedding, local layers between those that attend to
//! everything, GELU as the gate. Gemma 2 caps scores and logits; Gemma 3 norms its heads instead, and its local layers
//! have a rope of their own.

use crate::decoder::{BlockNorms, DecoderVariant, Norms};
use crate::layers::NormKind;
use crate::mlp::Activation;

pub const FORM: DecoderVariant = DecoderVariant {
    activation: Activation::Gelu,
    norms: BlockNorms::InTurn {
        attention: Norms::Around { before: "input_layernorm", behind: "post_attention_layernorm" },
        mlp: Norms::Around { before: "pre_feedforward_layernorm", behind: "post_feedforward_layernorm" },
    },
    norm_kind: NormKind::Rms,
    learns_positions: false,
};
