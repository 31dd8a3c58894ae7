//! GLM-4: norms around each sublayer, pairs of neighbours turned on half of a head.

use crate::decoder::{BlockNorms, DecoderVariant, Norms};
use crate::layers::NormKind;
use crate::mlp::Activation;

pub const FORM: DecoderVariant = DecoderVariant {
    activation: Activation::Silu,
    norms: BlockNorms::InTurn {
        attention: Norms::Around { before: "input_layernorm", behind: "post_self_attn_layernorm" },
        mlp: Norms::Around { before: "post_attention_layernorm", behind: "post_mlp_layernorm" },
    },
    norm_kind: NormKind::Rms,
    learns_positions: false,
};
