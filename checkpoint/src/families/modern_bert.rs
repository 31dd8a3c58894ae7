//! ModernBERT: an encoder with norms before its sublayers, a gated MLP, and a rope of their own for layers with a
//! window. The first layer's attention has no norm.

use super::definition::{
    ConfigKeys, ConfigReaders, ConfigRules, EncoderReaders, FamilyDefinition, FamilyRules, GgufRules, LayerPositions,
    LocalTheta, TensorTables, WindowUse,
};
use super::llama::{HALVES, KEYS, LLAMA};
use crate::config::gguf::keys::GgufKeys;
use crate::config::json::keys::JsonKeys;
use crate::config::{
    Activation, DecoderForm, EncoderSpec, LayerSpec, NormKind, PooledActivation, PooledLayer, Pooling, PositionEncoding,
};
use crate::error::ParseError;
use crate::names::rows::Dim::{Heads, Hidden, Inner, KvHeads, One, Vocab};
use crate::names::rows::{
    Dim, EMBEDDING, EMBEDDING_NORM, GATE_UP, NORM, QKV, TensorMapping, TensorSource, part, renamed,
};

pub const MODERN_BERT: FamilyDefinition = FamilyDefinition {
    name: "ModernBERT",
    architecture: "modern-bert",
    rules: FamilyRules {
        positions: LayerPositions { local: PositionEncoding::LocalRope, ..LLAMA.rules.positions },
        local_theta: Some(LocalTheta::Own("local_rope_theta", 10_000.0)),
        ..LLAMA.rules
    },
    config: ConfigRules {
        class: "ModernBertModel",
        other_classes: &["ModernBertForMaskedLM", "ModernBertForSequenceClassification"],
        model_type: "modernbert",
        keys: &ConfigKeys { eps: "norm_eps", activation: "hidden_activation", theta: "global_rope_theta", ..KEYS },
        activations: &["gelu"],
        eps: 1e-5,
        theta: 160_000.0,
        window: WindowUse::Always { absent: None },
        ..LLAMA.config
    },
    readers: ConfigReaders {
        is_local: |keys, layer, _| {
            let period = keys.optional("global_attn_every_n_layers")?.unwrap_or(3).max(1);
            Ok(!layer.is_multiple_of(period))
        },
        adjust_layers: |keys, layers| Ok(with_windows(layers, keys.optional("local_attention")?.unwrap_or(128))),
        ..LLAMA.readers
    },
    gguf: GgufRules { layer: gguf_layer, ..HALVES },
    encoder: EncoderReaders { config: encoder, gguf: |_| Ok(Some(ENCODER)), classifier },
    tensors: TensorTables {
        outer: MODERN_OUTER,
        layers: "layers",
        norms: &[MODERN_NORMS],
        attention: &[MODERN_ATTENTION],
        mlp: &[MODERN_MLP],
        ..LLAMA.tensors
    },
    form: DecoderForm {
        activation: Activation::GeluErf,
        norm_kind: NormKind::Layer,
        norms_embedding: true,
        ..LLAMA.form
    },
    ..LLAMA
};

const ENCODER: EncoderSpec = EncoderSpec { skips_first_norm: true, ..EncoderSpec::PLAIN };

fn encoder(keys: &JsonKeys<'_>) -> Result<Option<EncoderSpec>, ParseError> {
    match keys.bool("norm_bias")?.unwrap_or(false) {
        true => ParseError::unsupported("norms with a bias in this architecture"),
        false => Ok(Some(ENCODER)),
    }
}

/// `whole` counts the positions on both sides, and a window its own and those on one.
fn with_windows(layers: Vec<LayerSpec>, whole: u32) -> Vec<LayerSpec> {
    let of_layer = |layer: LayerSpec| {
        let is_local = layer.positions == PositionEncoding::LocalRope;
        LayerSpec { window: is_local.then_some(whole / 2 + 1), ..layer }
    };
    layers.into_iter().map(of_layer).collect()
}

fn gguf_layer(keys: &GgufKeys<'_>, layer: u32, usual: LayerSpec) -> Result<LayerSpec, ParseError> {
    let period = keys.optional("attention.sliding_window_pattern")?.unwrap_or(3).max(1);
    let whole = keys.optional("attention.sliding_window")?.unwrap_or(128);
    Ok(match layer.is_multiple_of(period) {
        true => LayerSpec { window: None, positions: PositionEncoding::Rope, ..usual },
        false => LayerSpec { window: Some(whole / 2 + 1), positions: PositionEncoding::LocalRope, ..usual },
    })
}

fn classifier(keys: &JsonKeys<'_>, hidden: u32, n: u32) -> Result<(Pooling, Vec<PooledLayer>), ParseError> {
    let kind = match keys.text("classifier_pooling") {
        None | Some("cls") => Pooling::First,
        Some("mean") => Pooling::Mean,
        Some(other) => return ParseError::unsupported(format!("classifier_pooling {other}")),
    };
    if keys.text("classifier_activation").is_some_and(|activation| activation != "gelu") {
        return ParseError::unsupported("a classifier_activation other than gelu");
    }
    let dense = PooledLayer::product("head.dense", hidden, hidden).with(PooledActivation::GeluErf);
    let dense = PooledLayer { norm: Some("head.norm".to_owned()), ..dense };
    Ok((kind, vec![dense, PooledLayer::product("classifier", hidden, n)]))
}

const MODERN_OUTER: &[TensorMapping] = &[
    renamed(EMBEDDING, [Vocab, Hidden], "embeddings.tok_embeddings.weight", "token_embd.weight"),
    renamed(EMBEDDING_NORM, [One, Hidden], "embeddings.norm.weight", "token_embd_norm.weight"),
    renamed(NORM, [One, Hidden], "final_norm.weight", "output_norm.weight"),
];
const MODERN_NORMS: &[TensorMapping] = &[
    renamed("input_layernorm.weight", [One, Hidden], "attn_norm.weight", "attn_norm.weight"),
    renamed("post_attention_layernorm.weight", [One, Hidden], "mlp_norm.weight", "ffn_norm.weight"),
];

const fn rows(name: &'static str, n: Dim, files: [TensorSource; 2]) -> TensorMapping {
    let [folder, gguf] = files;
    TensorMapping { name, dims: [n, Hidden], folder, gguf }
}

const fn of_qkv(before: &'static [Dim]) -> [TensorSource; 2] {
    [part("attn.Wqkv.weight", before, QKV), part("attn_qkv.weight", before, QKV)]
}

const fn of_gate_up(before: &'static [Dim]) -> [TensorSource; 2] {
    [part("mlp.Wi.weight", before, GATE_UP), part("ffn_up.weight", before, GATE_UP)]
}

const MODERN_ATTENTION: &[TensorMapping] = &[
    rows("self_attn.q_proj.weight", Heads, of_qkv(&[])),
    rows("self_attn.k_proj.weight", KvHeads, of_qkv(&[Heads])),
    rows("self_attn.v_proj.weight", KvHeads, of_qkv(&[Heads, KvHeads])),
    renamed("self_attn.o_proj.weight", [Hidden, Heads], "attn.Wo.weight", "attn_output.weight"),
];
const MODERN_MLP: &[TensorMapping] = &[
    rows("mlp.gate_proj.weight", Inner, of_gate_up(&[])),
    rows("mlp.up_proj.weight", Inner, of_gate_up(&[Inner])),
    renamed("mlp.down_proj.weight", [Hidden, Inner], "mlp.Wo.weight", "ffn_down.weight"),
];
