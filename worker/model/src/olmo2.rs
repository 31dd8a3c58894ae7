//! OLMo 2 and 3: norms behind each sublayer and none before, Q and K normed over all heads together. OLMo 3 has windows
//! on three layers of four.

use crate::decoder::{BlockNorms, DecoderVariant, Norms};
use crate::layers::NormKind;
use crate::mlp::Activation;

pub const FORM: DecoderVariant = DecoderVariant {
    activation: Activation::Silu,
    norms: BlockNorms::InTurn {
        attention: Norms::Behind("post_attention_layernorm"),
        mlp: Norms::Behind("post_feedforward_layernorm"),
    },
    norm_kind: NormKind::Rms,
    learns_positions: false,
};
