//! A published config at a size that a test can serve: the same keys, forms and order of layers, with small numbers.

use serde_json::{Map, Value, json};

const N_LAYERS: usize = 8;
const HEAD_DIM: u64 = 16;
const N_HEADS: u64 = 4;
/// The vocabulary of the tests' tokenizer.
const VOCAB: u64 = 264;
/// Keys, and the number that replaces any other than zero.
const NUMBERS: &[(&str, u64)] = &[
    ("hidden_size", N_HEADS * HEAD_DIM),
    ("n_embd", N_HEADS * HEAD_DIM),
    ("block_dim", N_HEADS * HEAD_DIM),
    ("conv_dim", N_HEADS * HEAD_DIM),
    ("num_attention_heads", N_HEADS),
    ("num_heads", N_HEADS),
    ("n_head", N_HEADS),
    ("head_dim", HEAD_DIM),
    ("attention_head_dim", HEAD_DIM),
    ("intermediate_size", 96),
    ("shared_intermediate_size", 96),
    ("moe_intermediate_size", 32),
    ("shared_expert_intermediate_size", 32),
    ("moe_shared_expert_intermediate_size", 64),
    ("num_hidden_layers", N_LAYERS as u64),
    ("n_layer", N_LAYERS as u64),
    ("vocab_size", VOCAB),
    ("num_experts", 8),
    ("num_local_experts", 8),
    ("n_routed_experts", 8),
    ("num_experts_per_tok", 2),
    ("experts_per_token", 2),
    ("linear_num_key_heads", 2),
    ("linear_key_head_dim", 16),
    ("linear_value_head_dim", 16),
    ("mamba_n_heads", 8),
    ("mamba_num_heads", 8),
    ("mamba_d_head", HEAD_DIM),
    ("mamba_head_dim", HEAD_DIM),
    ("mamba_d_state", 16),
    ("ssm_state_size", 16),
];
/// Keys whose number keeps its ratio to another's: the other key, and what that becomes.
const RATIOS: &[(&str, &str, u64)] = &[
    ("num_key_value_heads", "num_attention_heads", N_HEADS),
    ("linear_num_value_heads", "linear_num_key_heads", 2),
    ("n_groups", "mamba_num_heads", 8),
];

/// Returns the small config. A model within another has its numbers in a part.
pub fn small_config(config: &Value) -> Value {
    let mut small = config.clone();
    match small.get_mut("text_config").and_then(Value::as_object_mut) {
        Some(text) => shrink(text),
        None => small.as_object_mut().into_iter().for_each(shrink),
    }
    small_ids(&mut small);
    small
}

/// Replaces the ids of tokens, on all levels, by one that the vocabulary has.
pub fn small_ids(value: &mut Value) {
    for (key, value) in value.as_object_mut().into_iter().flatten() {
        match value {
            Value::Number(_) if key.ends_with("token_id") => *value = 2.into(),
            Value::Array(_) if key.ends_with("token_id") => *value = json!([2]),
            inner => small_ids(inner),
        }
    }
}

fn shrink(config: &mut Map<String, Value>) {
    let number = |key: &str| config.get(key).and_then(Value::as_u64);
    let n_layers = number("num_hidden_layers").or(number("n_layer")).unwrap_or(0) as usize;
    let ratio = |(key, to, new): &(&str, &str, u64)| Some((key.to_string(), (number(key)? * new / number(to)?).max(1)));
    let ratios: Vec<(String, u64)> = RATIOS.iter().filter_map(ratio).collect();
    let of_hidden = || Some(number("hidden_size")? / number("num_attention_heads")?);
    let head_dim = number("head_dim").or_else(of_hidden).unwrap_or(HEAD_DIM);
    let first = first_kept_layer(config);
    for (key, value) in config.iter_mut() {
        let small = NUMBERS.iter().find(|(name, _)| name == key).map(|(_, n)| *n);
        match value {
            Value::Number(n) if n.as_u64() != Some(0) => {
                let of_ratio = ratios.iter().find(|(name, _)| name == key).map(|(_, n)| *n);
                small.or(of_ratio).into_iter().for_each(|n| *value = n.into());
            }
            Value::Array(layers) if layers.len() == n_layers && n_layers > 0 => {
                *layers = layers[first..][..N_LAYERS].to_vec();
            }
            Value::String(pattern) if key == "hybrid_override_pattern" => pattern.truncate(N_LAYERS),
            Value::Object(rope) if key.starts_with("rope") => shrink_factors(rope, head_dim),
            _ => {}
        }
    }
}

/// Returns the first of the layers that stay: so that one with attention is among them.
fn first_kept_layer(config: &Map<String, Value>) -> usize {
    let types = config.get("layer_types").and_then(Value::as_array);
    let is_full = |kind: &Value| kind.as_str().is_some_and(|kind| kind == "attention" || kind == "full_attention");
    types.and_then(|types| types.iter().position(is_full)).map_or(0, |at| (at + 2).saturating_sub(N_LAYERS))
}

/// A rope with a factor for each pair of numbers that it turns.
fn shrink_factors(rope: &mut Map<String, Value>, head_dim: u64) {
    for (_, value) in rope.iter_mut().filter(|(key, _)| key.ends_with("_factor")) {
        let Some(factors) = value.as_array_mut() else { continue };
        factors.truncate(factors.len() * HEAD_DIM as usize / head_dim as usize);
    }
}
