//! Gemma 4: heads that are longer in global layers, layers that read the keys and values of an earlier one, and an
//! input of its own for each layer, from a table by token and from the embedding.

use super::definition::{
    ConfigReaders, ConfigRules, FamilyDefinition, FamilyRules, GgufRules, LocalTheta, TensorTables, WindowPattern,
    WindowUse,
};
use super::gemma::{GEMMA_NORMS, GEMMA3};
use super::llama::HALVES;
use crate::config::gguf::keys::GgufKeys;
use crate::config::json::keys::JsonKeys;
use crate::config::{DecoderForm, KvHeads, LayerSpec};
use crate::error::ParseError;
use crate::names::rows::Dim::{Hidden, LayerInput, LayerInputs, One, Vocab};
use crate::names::rows::{LAYER_INPUTS, TensorMapping, row};
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
    readers: ConfigReaders { scale: |_, _| Ok(1.0), adjust_layers, layer_input, ..GEMMA3.readers },
    gguf: GgufRules {
        window_pattern: WindowPattern::List,
        layers_differ: true,
        scale: Some(1.0),
        adjust_layers: adjust_gguf_layers,
        layer_input: Some("embedding_length_per_layer_input"),
        ..HALVES
    },
    tensors: TensorTables {
        norms: &[GEMMA_NORMS, GEMMA4_SCALE],
        layer_inputs: GEMMA4_INPUTS,
        layer_input: &[GEMMA4_INPUT],
        ..GEMMA3.tensors
    },
    form: DecoderForm { scales_layers: true, ..GEMMA3.form },
    ..GEMMA3
};

/// Longer heads of global layers, keys and values of earlier layers, and wider MLPs where a layer reads those.
fn adjust_layers(keys: &JsonKeys<'_>, mut layers: Vec<LayerSpec>) -> Result<Vec<LayerSpec>, ParseError> {
    if keys.bool("enable_moe_block")?.unwrap_or(false) {
        return ParseError::unsupported("a model with enable_moe_block");
    }
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
    if keys.gguf.tensor("blk.0.ffn_gate_inp.weight").is_some() {
        return ParseError::unsupported("a model with experts in this architecture");
    }
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
    use crate::config::ModelSpec;
    use serde_json::{Value, json};

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

    #[test]
    fn what_cannot_be_shared_is_refused() {
        for (key, value) in [
            ("num_kv_shared_layers", json!(36)),
            ("num_kv_shared_layers", json!(31)),
            ("enable_moe_block", json!(true)),
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
