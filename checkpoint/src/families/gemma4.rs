//! Gemma 4: heads that are longer in global layers, layers that read the keys and values of an earlier one, an input of
//! its own for each layer, from a table by token and from the embedding, and experts beside the MLP.

use super::definition::{
    ConfigReaders, ConfigRules, FamilyDefinition, FamilyRules, GgufRules, LocalTheta, TensorTables, WindowPattern,
    WindowUse,
};
use super::experts::{SOFTMAX, gguf_experts, n_gguf_experts};
use super::gemma::{GEMMA_NORMS, GEMMA3};
use super::llama::HALVES;
use crate::config::gguf::keys::GgufKeys;
use crate::config::json::keys::JsonKeys;
use crate::config::{BlockNorms, DecoderForm, ExpertsSpec, KvHeads, LayerSpec, Norms};
use crate::error::ParseError;
use crate::names::rows::Dim::{self, ExpertInner, Experts, Hidden, LayerInput, LayerInputs, One, Vocab};
use crate::names::rows::{LAYER_INPUTS, MLP, OF_EXPERT, TensorMapping, expert_part, renamed, row, stacked_expert};
use serde_json::Value;

pub const GEMMA4: FamilyDefinition = FamilyDefinition {
    name: "Gemma 4",
    architecture: "gemma4",
    rules: FamilyRules {
        norms_values: true,
        has_caps: true,
        local_theta: Some(LocalTheta::Own("rope_local_base_freq", 10_000.0)),
        ..GEMMA3.rules
    },
    config: ConfigRules {
        class: "Gemma4ForCausalLM",
        model_type: "gemma4_text",
        norm_offset: 0.0,
        window: WindowUse::Always { absent: Some(512) },
        ..GEMMA3.config
    },
    readers: ConfigReaders { scale: |_, _| Ok(1.0), experts, adjust_layers, layer_input, ..GEMMA3.readers },
    gguf: GgufRules {
        window_pattern: WindowPattern::List,
        layers_differ: true,
        scale: Some(1.0),
        experts: gguf_experts_beside_mlp,
        adjust_layers: adjust_gguf_layers,
        layer_input: Some("embedding_length_per_layer_input"),
        ..HALVES
    },
    tensors: TensorTables {
        norms: &[GEMMA_NORMS, GEMMA4_SCALE],
        experts: &[MLP, GEMMA4_EXPERTS],
        layer_inputs: GEMMA4_INPUTS,
        layer_input: &[GEMMA4_INPUT],
        ..GEMMA3.tensors
    },
    form: DecoderForm { scales_layers: true, ..GEMMA3.form },
    norms_beside_experts: Some(BlockNorms::InTurn {
        attention: Norms::Around { before: "input_layernorm", behind: "post_attention_layernorm" },
        // Each part norms the stream for itself.
        mlp: Norms::Behind("post_feedforward_layernorm"),
    }),
    ..GEMMA3
};

/// Mixtures in all layers, if the model has any.
fn experts(keys: &JsonKeys<'_>) -> Result<Option<ExpertsSpec>, ParseError> {
    if !keys.bool("enable_moe_block")?.unwrap_or(false) {
        return Ok(None);
    }
    let [n, n_used, inner] = ["num_experts", "top_k_experts", "moe_intermediate_size"].map(|key| keys.length(key));
    Ok(Some(ExpertsSpec { n: n?, n_used: n_used?, inner: inner?, is_beside_mlp: true, ..SOFTMAX }))
}

fn gguf_experts_beside_mlp(keys: &GgufKeys<'_>, inner: u32) -> Result<Option<ExpertsSpec>, ParseError> {
    match n_gguf_experts(keys)? {
        0 => Ok(None),
        _ => Ok(Some(ExpertsSpec { is_beside_mlp: true, ..gguf_experts(keys, inner)? })),
    }
}

/// Longer heads of global layers, keys and values of earlier layers, and wider MLPs where a layer reads those.
fn adjust_layers(keys: &JsonKeys<'_>, mut layers: Vec<LayerSpec>) -> Result<Vec<LayerSpec>, ParseError> {
    let values_are_keys = keys.bool("attention_k_eq_v")?.unwrap_or(false);
    let usual = keys.length("num_key_value_heads")?;
    let n = keys.optional("num_global_key_value_heads")?.filter(|_| values_are_keys).unwrap_or(usual);
    let dim = keys.optional("global_head_dim")?.unwrap_or(512);
    for (i, layer) in layers.iter_mut().enumerate().filter(|(_, layer)| layer.window.is_none()) {
        // Later files list the values of each layer that differs.
        let listed = keys.object("per_layer_config").and_then(|all| JsonKeys(all).object(&i.to_string()));
        let own = JsonKeys(listed.unwrap_or(&Value::Null));
        let (n, dim) = (own.optional("num_key_value_heads")?.unwrap_or(n), own.optional("head_dim")?.unwrap_or(dim));
        layer.kv_heads = Some(KvHeads { n, dim, values_are_keys });
    }
    let inner = match keys.bool("use_double_wide_mlp")?.unwrap_or(false) {
        true => Some(keys.length("intermediate_size")?.saturating_mul(2)),
        false => None,
    };
    let n_shared = keys.optional("num_kv_shared_layers")?.unwrap_or(0);
    share_kv(&mut layers, n_shared)?;
    for layer in layers.iter_mut().filter(|layer| layer.kv_of.is_some()) {
        layer.inner = inner;
    }
    Ok(layers)
}

/// The last `n_shared` layers read the keys and values of the last layer of their kind before them.
fn share_kv(layers: &mut [LayerSpec], n_shared: u32) -> Result<(), ParseError> {
    let Some(n_own) = layers.len().checked_sub(n_shared as usize) else {
        return ParseError::malformed(format!("{n_shared} of {} layers share keys and values", layers.len()));
    };
    let (own, shared) = layers.split_at_mut(n_own);
    for layer in shared {
        match own.iter().rposition(|of| of.window == layer.window) {
            Some(of) => layer.kv_of = Some(of as u32),
            None => return ParseError::malformed("no layer has the keys and values that others share"),
        }
    }
    Ok(())
}

/// The width of each layer's own input. Its table has a row for each token of the vocabulary.
fn layer_input(keys: &JsonKeys<'_>) -> Result<u32, ParseError> {
    let width = keys.optional("hidden_size_per_layer_input")?.unwrap_or(256);
    let n_rows = keys.optional("vocab_size_per_layer_input")?;
    match n_rows.filter(|n| width > 0 && Some(*n) != keys.optional("vocab_size").ok().flatten()) {
        Some(n) => ParseError::unsupported(format!("a vocab_size_per_layer_input of {n}, unlike vocab_size")),
        None => Ok(width),
    }
}

fn adjust_gguf_layers(keys: &GgufKeys<'_>, mut layers: Vec<LayerSpec>) -> Result<Vec<LayerSpec>, ParseError> {
    let usual_inner = keys.of_layer("feed_forward_length", 0)?;
    let dim = keys.length("attention.key_length")?;
    let n_usual = keys.length("attention.head_count")?;
    let n_shared = keys.optional("attention.shared_kv_layers")?.unwrap_or(0);
    share_kv(&mut layers, n_shared)?;
    for (i, layer) in (0..).zip(&mut layers) {
        if layer.window.is_none() {
            let n = keys.of_layer("attention.head_count_kv", i)?.unwrap_or(n_usual);
            let values_are_keys = keys.gguf.tensor(&format!("blk.{i}.attn_v.weight")).is_none();
            layer.kv_heads = Some(KvHeads { n, dim, values_are_keys });
        }
        let inner = keys.of_layer("feed_forward_length", i)?;
        layer.inner = inner.filter(|_| inner != usual_inner);
    }
    Ok(layers)
}

const GEMMA4_SCALE: &[TensorMapping] = &[row("layer_scalar", [One, One], "layer_output_scale.weight")];
const GEMMA4_GATE_UP: [&str; 2] = ["experts.gate_up_proj", "ffn_gate_up_exps.weight"];
const GEMMA4_EXPERTS: &[TensorMapping] = &[
    row("pre_feedforward_layernorm_2.weight", [One, Hidden], "pre_ffw_norm_2.weight"),
    row("post_feedforward_layernorm_1.weight", [One, Hidden], "post_ffw_norm_1.weight"),
    row("post_feedforward_layernorm_2.weight", [One, Hidden], "post_ffw_norm_2.weight"),
    renamed("mlp.gate.weight", [Experts, Hidden], "router.proj.weight", "ffn_gate_inp.weight"),
    renamed("mlp.gate.norm", [One, Hidden], "router.scale", "ffn_gate_inp.scale"),
    renamed("mlp.gate.factors", [One, Experts], "router.per_expert_scale", "ffn_down_exps.scale"),
    half("mlp.experts.{e}.gate_proj.weight", &[]),
    half("mlp.experts.{e}.up_proj.weight", &[ExpertInner]),
    stacked_expert(
        "mlp.experts.{e}.down_proj.weight",
        [Hidden, ExpertInner],
        "experts.down_proj",
        "ffn_down_exps.weight",
    ),
];

/// An expert's gate or up: the rows after `before` in both files.
const fn half(name: &'static str, before: &'static [Dim]) -> TensorMapping {
    let [folder, gguf] = GEMMA4_GATE_UP;
    TensorMapping {
        name,
        dims: [ExpertInner, Hidden],
        folder: expert_part(folder, before, OF_EXPERT),
        gguf: expert_part(gguf, before, OF_EXPERT),
    }
}

const GEMMA4_INPUTS: &[TensorMapping] = &[
    row(LAYER_INPUTS, [Vocab, LayerInputs], "per_layer_token_embd.weight"),
    row("model.per_layer_model_projection.weight", [LayerInputs, Hidden], "per_layer_model_proj.weight"),
    row("model.per_layer_projection_norm.weight", [One, LayerInput], "per_layer_proj_norm.weight"),
];
const GEMMA4_INPUT: &[TensorMapping] = &[
    row("per_layer_input_gate.weight", [LayerInput, Hidden], "inp_gate.weight"),
    row("per_layer_projection.weight", [Hidden, LayerInput], "proj.weight"),
    row("post_per_layer_input_norm.weight", [One, Hidden], "post_norm.weight"),
];

#[cfg(test)]
mod tests {
    use crate::config::{BlockNorms, ModelSpec, Norms};
    use crate::names::required_tensors;
    use crate::small_files::read_json;
    use serde_json::{Value, json};
    use std::path::PathBuf;

    /// The text model of Gemma 4 E2B.
    fn e2b() -> Value {
        let layers: Vec<&str> =
            (0..35).map(|i| if i % 5 == 4 { "full_attention" } else { "sliding_attention" }).collect();
        json!({
            "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 1536,
            "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
            "global_head_dim": 512, "num_global_key_value_heads": null, "attention_k_eq_v": false,
            "sliding_window": 512, "vocab_size": 262_144, "vocab_size_per_layer_input": 262_144,
            "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20, "use_double_wide_mlp": true,
            "intermediate_size": 6144, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "layer_types": layers,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            },
        })
    }

    fn spec_of(config: &Value) -> Result<ModelSpec, crate::error::ParseError> {
        ModelSpec::from_config(config, &Value::Null, &Value::Null, "e2b")
    }

    #[test]
    fn later_layers_read_the_last_layer_of_their_kind() {
        let spec = spec_of(&e2b()).unwrap();
        let of: Vec<Option<u32>> = spec.layers.iter().map(|layer| layer.kv_of).collect();
        assert!(of[..15].iter().all(Option::is_none));
        assert!((15..35).all(|i| of[i] == Some(if i % 5 == 4 { 14 } else { 13 })));
        assert_eq!((spec.joined_layers(), spec.inner_of(&spec.layers[14])), (0..35, 6144));
        let without_inputs = ModelSpec { layer_input: 0, ..spec.clone() };
        assert_eq!(without_inputs.joined_layers(), 13..35);
        assert_eq!((spec.inner_of(&spec.layers[15]), spec.kv_heads_of(&spec.layers[19]).dim), (12_288, 512));
        assert_eq!((spec.rope.dim, spec.local_rope.as_ref().unwrap().dim), (512, 256));
        // Its makers call it a model of 5.1 billion parameters, embeddings included.
        let n = spec.n_parameters();
        assert!((4_600_000_000..5_200_000_000).contains(&n), "{n}");
    }

    /// Gemma 4 26B-A4B, with the text model's config changed.
    fn a4b(change: (&str, Value)) -> Result<ModelSpec, crate::error::ParseError> {
        let path = [env!("CARGO_MANIFEST_DIR"), "../tests/hub/gemma-4-26b-a4b.json"].iter().collect::<PathBuf>();
        let mut config = read_json(&path).unwrap()["config"].take();
        config["text_config"][change.0] = change.1;
        spec_of(&config)
    }

    #[test]
    fn experts_are_beside_mlps() {
        let spec = a4b(("use_cache", json!(true))).unwrap();
        assert!(spec.layers.iter().all(|layer| layer.has_experts && spec.inner_of(layer) == 2112));
        let of = spec.experts.unwrap();
        assert_eq!((of.n, of.n_used, of.inner, of.normalized, of.is_beside_mlp), (128, 8, 704, true, true));
        // Its makers call it a model of 25.2 billion parameters, of which a token meets 3.8.
        let n = spec.n_parameters();
        assert!((25_150_000_000..25_250_000_000).contains(&n), "{n}");
        let numbers: usize = required_tensors(&spec).iter().map(|tensor| tensor.shape[0] * tensor.shape[1]).sum();
        assert!(numbers as u64 > n && numbers as u64 - n < n / 1000, "{numbers} in tensors");
        let of_layer = |name: &str| required_tensors(&spec).iter().any(|t| t.name == format!("model.layers.0.{name}"));
        assert!(of_layer("mlp.up_proj.weight") && of_layer("mlp.experts.127.up_proj.weight"));
        let dense = a4b(("enable_moe_block", json!(false))).unwrap();
        assert!(dense.experts.is_none() && dense.n_parameters() < 3_000_000_000);
        let norms = |spec: &ModelSpec| match spec.form().norms {
            BlockNorms::InTurn { mlp, .. } => mlp,
            other => panic!("{other:?}"),
        };
        assert!(matches!(norms(&spec), Norms::Behind(_)) && matches!(norms(&dense), Norms::Around { .. }));
    }

    #[test]
    fn experts_that_cannot_be_served_are_refused() {
        for (key, value, refusal) in [
            ("num_experts", Value::Null, "num_experts"),
            ("top_k_experts", json!(129), "129 of 128 experts"),
            ("moe_intermediate_size", json!(0), "experts of the width 0"),
            ("mlp_only_layers", json!([3]), "layers without experts"),
        ] {
            let error = a4b((key, value)).unwrap_err();
            assert!(format!("{error:?}").contains(refusal), "{key}: {error:?}");
        }
    }

    #[test]
    fn what_cannot_be_shared_is_refused() {
        for (key, value) in [
            ("num_kv_shared_layers", json!(36)),
            ("num_kv_shared_layers", json!(31)),
            ("vocab_size_per_layer_input", json!(1000)),
            ("global_head_dim", json!(300)),
            ("hidden_size_per_layer_input", json!(1 << 20)),
        ] {
            let mut config = e2b();
            config[key] = value;
            assert!(spec_of(&config).is_err(), "{key}");
        }
    }
}
