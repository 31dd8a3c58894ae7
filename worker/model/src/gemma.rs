//! Gemma 2 and 3: norms on both sides of each sublayer, a scaled embedding, local layers between those that attend to
//! everything, GELU as the gate. Gemma 2 caps scores and logits; Gemma 3 norms its heads instead, and its local layers
//! have a rope of their own.

use crate::decoder::{BlockNorms, Form};
use crate::mlp::Activation;

pub const FORM: Form = Form {
    activation: Activation::Gelu,
    norms: BlockNorms {
        before_attention: "input_layernorm",
        behind_attention: Some("post_attention_layernorm"),
        before_mlp: "pre_feedforward_layernorm",
        behind_mlp: Some("post_feedforward_layernorm"),
    },
    scales_embedding: true,
    learns_positions: false,
    caps_logits: true,
};
