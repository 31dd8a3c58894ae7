//! Models by name, without their files: the figures of their `config.json`, and the size of their weights. Knows no
//! devices.

use crate::settings::hub::{self, Hub};
use anyhow::Context;
use checkpoint::{Checkpoint, ModelSpec, Sizes, catalogue, names};
use clap::ValueEnum;
use coordinator::ModelShape;
use serde_json::{Value, json};
use std::path::Path;
use types::Dtype;

/// What matrices of layers are stored in. Embedding and head stay bf16, as checkpoints of these formats have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WeightFormat {
    /// Two bytes per weight
    Bf16,
    /// One byte per weight; products in fp8 if the GPU has them
    Fp8,
    /// Four bits per weight and a 16-bit scale for each 32; products in bf16
    Int4,
}

impl WeightFormat {
    fn bits(self) -> u64 {
        match self {
            WeightFormat::Bf16 => 16,
            WeightFormat::Fp8 => 8,
            // Four, and half a bit of scales.
            WeightFormat::Int4 => 4,
        }
    }

    fn bytes_of(self, tensor: &names::Expected) -> u64 {
        let n = (tensor.shape[0] * tensor.shape[1]) as u64;
        let is_wide = tensor.layer.is_none() || tensor.shape[0] == 1;
        match (is_wide, self) {
            (true, _) => 2 * n,
            (false, WeightFormat::Int4) => n * self.bits() / 8 + n / 16,
            (false, _) => n * self.bits() / 8,
        }
    }
}

/// The facts of a model that the simulation needs.
#[derive(Clone, Debug)]
pub struct SimulatedModel {
    pub name: String,
    pub shape: ModelShape,
    /// The weight format as given, or as the file has it.
    pub weights: String,
    pub is_fp8: bool,
}

impl SimulatedModel {
    fn sized(name: &str, spec: &ModelSpec, weights: WeightFormat) -> SimulatedModel {
        let shape = ModelShape::sized(spec, Sizes::measured(spec, |tensor| weights.bytes_of(tensor)));
        let told = weights.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        SimulatedModel { name: name.to_owned(), shape, weights: told, is_fp8: weights == WeightFormat::Fp8 }
    }

    /// Finds a model by name, by a `config.json`, or by files that are here; nothing is fetched. Without `weights`,
    /// files have their real size and all others are bf16.
    pub fn find(name: &str, weights: Option<WeightFormat>, hub: &Hub) -> anyhow::Result<SimulatedModel> {
        if let Some(row) = ROWS.iter().find(|row| row.name.eq_ignore_ascii_case(name)) {
            return Ok(SimulatedModel::sized(row.name, &row.spec()?, weights.unwrap_or(WeightFormat::Bf16)));
        }
        let path = Path::new(name);
        if path.extension().is_some_and(|extension| extension == "json") {
            let spec = ModelSpec::open(path)?;
            return Ok(SimulatedModel::sized(&spec.name, &spec, weights.unwrap_or(WeightFormat::Bf16)));
        }
        let located = catalogue::locate(name, &hub::sources(hub)?)
            .with_context(|| format!("{name} is no file that is here, no config.json, and none of {}", known()))?;
        let checkpoint = Checkpoint::open(&located.path)?;
        if let Some(weights) = weights {
            return Ok(SimulatedModel::sized(&located.name, checkpoint.spec(), weights));
        }
        let kinds = checkpoint.quantization();
        let is_fp8 = kinds.first() == Some(&Dtype::F8E4M3);
        let kinds: Vec<&str> = kinds.iter().map(|dtype| dtype.name()).collect();
        let shape = ModelShape::of(&checkpoint);
        Ok(SimulatedModel { name: located.name, shape, weights: kinds.join("+"), is_fp8 })
    }
}

pub fn known() -> String {
    ROWS.iter().map(|row| row.name).collect::<Vec<_>>().join(", ")
}

/// The figures of one `config.json`.
struct Row {
    name: &'static str,
    architecture: &'static str,
    hidden: u32,
    n_layers: u32,
    n_heads: u32,
    n_kv_heads: u32,
    head_dim: u32,
    inner: u32,
    vocab: u32,
    context: u32,
    is_tied: bool,
    /// The number of experts, how many a token uses, and the width of one.
    experts: Option<(u32, u32, u32)>,
}

const LLAMA: Row = Row {
    name: "",
    architecture: "LlamaForCausalLM",
    hidden: 4096,
    n_layers: 32,
    n_heads: 32,
    n_kv_heads: 8,
    head_dim: 128,
    inner: 14_336,
    vocab: 128_256,
    context: 131_072,
    is_tied: false,
    experts: None,
};
const QWEN3: Row = Row { architecture: "Qwen3ForCausalLM", vocab: 151_936, context: 40_960, ..LLAMA };
const QWEN3_MOE: Row = Row { architecture: "Qwen3MoeForCausalLM", n_kv_heads: 4, ..QWEN3 };
const MIXTRAL: Row = Row { architecture: "MixtralForCausalLM", vocab: 32_000, context: 32_768, ..LLAMA };
const QWEN2: Row = Row { architecture: "Qwen2ForCausalLM", vocab: 152_064, context: 32_768, ..LLAMA };

/// Figures from the makers' repositories on the hub.
const ROWS: [Row; 19] = [
    Row { name: "llama-3.2-1b", hidden: 2048, n_layers: 16, head_dim: 64, inner: 8192, is_tied: true, ..LLAMA },
    Row { name: "llama-3.2-3b", hidden: 3072, n_layers: 28, n_heads: 24, inner: 8192, is_tied: true, ..LLAMA },
    Row { name: "llama-3.1-8b", ..LLAMA },
    Row { name: "llama-3.1-70b", hidden: 8192, n_layers: 80, n_heads: 64, inner: 28_672, ..LLAMA },
    Row { name: "llama-3.1-405b", hidden: 16_384, n_layers: 126, n_heads: 128, inner: 53_248, ..LLAMA },
    Row { name: "mistral-7b", vocab: 32_768, context: 32_768, ..LLAMA },
    Row { name: "qwen2.5-7b", hidden: 3584, n_layers: 28, n_heads: 28, n_kv_heads: 4, inner: 18_944, ..QWEN2 },
    Row { name: "qwen2.5-72b", hidden: 8192, n_layers: 80, n_heads: 64, inner: 29_568, ..QWEN2 },
    Row { name: "qwen3-0.6b", hidden: 1024, n_layers: 28, n_heads: 16, inner: 3072, is_tied: true, ..QWEN3 },
    Row { name: "qwen3-1.7b", hidden: 2048, n_layers: 28, n_heads: 16, inner: 6144, is_tied: true, ..QWEN3 },
    Row { name: "qwen3-4b", hidden: 2560, n_layers: 36, inner: 9728, is_tied: true, ..QWEN3 },
    Row { name: "qwen3-8b", n_layers: 36, inner: 12_288, ..QWEN3 },
    Row { name: "qwen3-14b", hidden: 5120, n_layers: 40, n_heads: 40, inner: 17_408, ..QWEN3 },
    Row { name: "qwen3-32b", hidden: 5120, n_layers: 64, n_heads: 64, inner: 25_600, ..QWEN3 },
    Row { name: "qwen3-30b-a3b", hidden: 2048, n_layers: 48, inner: 6144, experts: Some((128, 8, 768)), ..QWEN3_MOE },
    Row {
        name: "qwen3-235b-a22b",
        n_layers: 94,
        n_heads: 64,
        inner: 12_288,
        experts: Some((128, 8, 1536)),
        ..QWEN3_MOE
    },
    Row { name: "mixtral-8x7b", experts: Some((8, 2, 14_336)), ..MIXTRAL },
    Row {
        name: "mixtral-8x22b",
        hidden: 6144,
        n_layers: 56,
        n_heads: 48,
        inner: 16_384,
        vocab: 32_768,
        context: 65_536,
        experts: Some((8, 2, 16_384)),
        ..MIXTRAL
    },
    Row { name: "smollm2-135m", hidden: 576, n_layers: 30, n_heads: 9, n_kv_heads: 3, head_dim: 64, ..SMOLLM2 },
];

const SMOLLM2: Row = Row { inner: 1536, vocab: 49_152, context: 8192, is_tied: true, ..LLAMA };

impl Row {
    /// Parsed like the real file, so that a missing figure has the family's default.
    fn spec(&self) -> anyhow::Result<ModelSpec> {
        Ok(ModelSpec::of_config(&self.config(), self.name)?)
    }

    fn config(&self) -> Value {
        let mut config = json!({
            "architectures": [self.architecture],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": self.is_tied,
            "sliding_window": null,
            "eos_token_id": 0,
        });
        if let Some((n, n_used, inner)) = self.experts {
            config["num_local_experts"] = n.into();
            config["num_experts_per_tok"] = n_used.into();
            config["moe_intermediate_size"] = inner.into();
        }
        config
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Billions of parameters, as published.
    #[test]
    fn names_weigh_what_their_makers_say() {
        let cases = [
            ("llama-3.2-1b", 1.24),
            ("llama-3.2-3b", 3.21),
            ("llama-3.1-8b", 8.03),
            ("llama-3.1-70b", 70.6),
            ("llama-3.1-405b", 405.9),
            ("mistral-7b", 7.25),
            ("qwen2.5-7b", 7.62),
            ("qwen2.5-72b", 72.7),
            ("qwen3-0.6b", 0.6),
            ("qwen3-1.7b", 1.72),
            ("qwen3-4b", 4.02),
            ("qwen3-8b", 8.19),
            ("qwen3-14b", 14.8),
            ("qwen3-32b", 32.8),
            ("qwen3-30b-a3b", 30.5),
            ("qwen3-235b-a22b", 235.1),
            ("mixtral-8x7b", 46.7),
            ("mixtral-8x22b", 140.6),
            ("smollm2-135m", 0.1345),
        ];
        assert_eq!(cases.len(), ROWS.len());
        for (row, (name, billions)) in ROWS.iter().zip(cases) {
            assert_eq!(row.name, name);
            let model = SimulatedModel::sized(name, &row.spec().unwrap(), WeightFormat::Bf16);
            let got = model.shape.sizes.total() as f64 / 2e9;
            assert!((got / billions - 1.0).abs() < 0.01, "{name}: {got} of {billions}");
        }
    }

    #[test]
    fn smaller_formats_weigh_less_where_matrices_of_layers_are() {
        let row = ROWS.iter().find(|row| row.name == "llama-3.1-8b").unwrap();
        let of = |weights| SimulatedModel::sized(row.name, &row.spec().unwrap(), weights).shape.sizes;
        let (bf16, fp8, int4) = (of(WeightFormat::Bf16), of(WeightFormat::Fp8), of(WeightFormat::Int4));
        assert_eq!((bf16.embedding, bf16.head), (int4.embedding, int4.head));
        let mlp = |sizes: &Sizes| sizes.layers[0].mlp;
        assert_eq!((2 * mlp(&fp8), 32 * mlp(&int4)), (mlp(&bf16), 9 * mlp(&bf16)));
    }
}
