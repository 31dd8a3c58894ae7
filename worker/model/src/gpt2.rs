//! GPT-2: learned positions added to the embedding, LayerNorm (its norms have a bias), a bias on every product, an MLP
//! without a gate.

use crate::decoder::{BlockNorms, Form};
use crate::mlp::Activation;

pub const FORM: Form = Form {
    activation: Activation::PlainGelu,
    norms: BlockNorms {
        before_attention: "input_layernorm",
        behind_attention: None,
        before_mlp: "post_attention_layernorm",
        behind_mlp: None,
    },
    scales_embedding: false,
    learns_positions: true,
    caps_logits: false,
};
