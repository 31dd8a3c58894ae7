//! Derives from a model's figures, without its files, its spec and its shape for placement. Has no knowledge of model
//! names.

use checkpoint::catalogue::{CatalogueEntry, ConfigFigures};
use checkpoint::{ModelSizes, ModelSpec};
use coordinator::ModelShape;
use serde_json::{Value, json};

/// Parses the figures like a real `config.json`, so that a missing figure gets the family's default.
pub fn spec(figures: &ConfigFigures, name: &str) -> anyhow::Result<ModelSpec> {
    Ok(ModelSpec::of_config(&config(figures), name)?)
}

/// Returns the shape of a model of the catalogue. The bytes of all its weights together are those of its file.
pub fn shape(entry: &CatalogueEntry) -> anyhow::Result<ModelShape> {
    let spec = spec(&entry.figures, entry.name)?;
    let n_numbers = ModelSizes::measured(&spec, |tensor| (tensor.shape[0] * tensor.shape[1]) as u64).total().max(1);
    let bytes_of = |n: u64| (u128::from(n) * u128::from(entry.bytes)).div_ceil(u128::from(n_numbers)) as u64;
    let sizes = ModelSizes::measured(&spec, |tensor| bytes_of((tensor.shape[0] * tensor.shape[1]) as u64));
    Ok(ModelShape::from_sizes(&spec, sizes))
}

fn config(figures: &ConfigFigures) -> Value {
    let mut config = json!({
        "architectures": [figures.architecture],
        "hidden_size": figures.hidden,
        "num_hidden_layers": figures.n_layers,
        "num_attention_heads": figures.n_heads,
        "num_key_value_heads": figures.n_kv_heads,
        "head_dim": figures.head_dim,
        "intermediate_size": figures.inner,
        "vocab_size": figures.vocab,
        "max_position_embeddings": figures.context,
        "tie_word_embeddings": figures.is_tied,
        "sliding_window": figures.window,
        "eos_token_id": 0,
    });
    if let Some((n, n_used, inner)) = figures.experts {
        config["num_local_experts"] = n.into();
        config["num_experts_per_tok"] = n_used.into();
        config["moe_intermediate_size"] = inner.into();
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;
    use checkpoint::catalogue::CATALOGUE;

    /// The published parameters in billions; of gemma3 only those of its text model.
    #[test]
    fn catalogue_models_have_their_published_parameter_counts() {
        let published = [
            ("smollm2", 0.1345),
            ("smollm2:360m", 0.362),
            ("qwen2.5:0.5b", 0.494),
            ("qwen3:0.6b", 0.6),
            ("gemma3:1b", 1.0),
            ("llama3.2:1b", 1.24),
            ("smollm2:1.7b", 1.71),
            ("qwen2.5:1.5b", 1.54),
            ("granite3.3:2b", 2.53),
            ("qwen3:1.7b", 1.72),
            ("smollm3:3b", 3.08),
            ("llama3.2:3b", 3.21),
            ("gemma3:4b", 3.88),
            ("phi4-mini:3.8b", 3.84),
            ("qwen3:4b", 4.02),
            ("mistral:7b", 7.25),
            ("olmo2:7b", 7.3),
            ("qwen2.5:7b", 7.62),
            ("llama3.1:8b", 8.03),
            ("qwen3:8b", 8.19),
            ("gemma3:12b", 11.77),
            ("mistral-nemo:12b", 12.25),
            ("qwen3:14b", 14.8),
            ("phi4:14b", 14.66),
            ("gpt-oss:20b", 20.9),
            ("qwen3:30b", 30.5),
            ("qwen3:32b", 32.8),
            ("llama3.3:70b", 70.6),
        ];
        assert_eq!(CATALOGUE.map(|entry| entry.name), published.map(|(name, _)| name));
        for (entry, (name, billions)) in CATALOGUE.iter().zip(published) {
            let spec = spec(&entry.figures, name).unwrap();
            let numbers = ModelSizes::measured(&spec, |tensor| (tensor.shape[0] * tensor.shape[1]) as u64);
            let got = numbers.total() as f64 / 1e9;
            assert!((got / billions - 1.0).abs() < 0.012, "{name}: {got} of {billions}");
            // Between the bits of Q4 and of Q8.
            let bits = 8.0 * entry.bytes as f64 / 1e9 / got;
            assert!((4.0..9.0).contains(&bits), "{name}: {bits} bits a number");
            let shape = shape(entry).unwrap();
            // Each tensor is rounded to whole bytes.
            assert!(shape.sizes.total().abs_diff(entry.bytes) < 1 << 16, "{name}: {}", shape.sizes.total());
        }
    }

    #[test]
    fn layers_with_a_window_keep_less() {
        let pools = |name| shape(checkpoint::catalogue::entry(name).unwrap()).unwrap().cache.groups().len();
        assert_eq!((pools("gemma3:4b"), pools("gpt-oss"), pools("qwen3:4b")), (2, 2, 1));
    }
}
