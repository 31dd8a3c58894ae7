//! Models by name, without their files: the figures of their `config.json`, and the size of their weights. Knows no
//! devices.

use crate::figures::spec;
use anyhow::Context;
use checkpoint::catalogue::{self, ConfigFigures, ModelSources, figures};
use checkpoint::{Checkpoint, ModelSizes, ModelSpec, names};
use clap::ValueEnum;
use coordinator::ModelShape;
use std::path::Path;
use types::Dtype;

/// The storage format of the matrices in layers. Embedding and head stay bf16, as in checkpoints of these formats.
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
            // Four bits, and half a bit for the scales.
            WeightFormat::Int4 => 4,
        }
    }

    fn bytes_of(self, tensor: &names::RequiredTensor) -> u64 {
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
        let shape = ModelShape::from_sizes(spec, ModelSizes::measured(spec, |tensor| weights.bytes_of(tensor)));
        let weights_name = weights.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        SimulatedModel { name: name.to_owned(), shape, weights: weights_name, is_fp8: weights == WeightFormat::Fp8 }
    }

    /// Returns a model whose figures are known by its name or by a `config.json`, without its weights.
    pub fn of_figures(name: &str, weights: Option<WeightFormat>) -> anyhow::Result<Option<SimulatedModel>> {
        let weights = weights.unwrap_or(WeightFormat::Bf16);
        if let Some((name, figures)) = ROWS.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)) {
            return Ok(Some(SimulatedModel::sized(name, &spec(figures, name)?, weights)));
        }
        let path = Path::new(name);
        if path.extension().is_none_or(|extension| extension != "json") {
            return Ok(None);
        }
        let spec = ModelSpec::open(path)?;
        Ok(Some(SimulatedModel::sized(&spec.name, &spec, weights)))
    }

    /// Finds a model by name, by a `config.json`, or by local files. Fetches nothing. Without `weights`, files have
    /// their real size and all others are bf16.
    pub fn find(
        name: &str,
        weights: Option<WeightFormat>,
        sources: impl FnOnce() -> anyhow::Result<ModelSources>,
    ) -> anyhow::Result<SimulatedModel> {
        if let Some(model) = SimulatedModel::of_figures(name, weights)? {
            return Ok(model);
        }
        let located = catalogue::locate(name, &sources()?)
            .with_context(|| format!("{name} is neither a local model, a config.json nor one of {}", known()))?;
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
    ROWS.map(|(name, _)| name).join(", ")
}

/// Models under the names of their makers.
const ROWS: [(&str, ConfigFigures); 19] = [
    ("llama-3.2-1b", figures::LLAMA3_2_1B),
    ("llama-3.2-3b", figures::LLAMA3_2_3B),
    ("llama-3.1-8b", figures::LLAMA3_1_8B),
    ("llama-3.1-70b", figures::LLAMA3_70B),
    ("llama-3.1-405b", figures::LLAMA3_1_405B),
    ("mistral-7b", figures::MISTRAL_7B),
    ("qwen2.5-7b", figures::QWEN2_5_7B),
    ("qwen2.5-72b", figures::QWEN2_5_72B),
    ("qwen3-0.6b", figures::QWEN3_0_6B),
    ("qwen3-1.7b", figures::QWEN3_1_7B),
    ("qwen3-4b", figures::QWEN3_4B),
    ("qwen3-8b", figures::QWEN3_8B),
    ("qwen3-14b", figures::QWEN3_14B),
    ("qwen3-32b", figures::QWEN3_32B),
    ("qwen3-30b-a3b", figures::QWEN3_30B),
    ("qwen3-235b-a22b", figures::QWEN3_235B),
    ("mixtral-8x7b", figures::MIXTRAL_8X7B),
    ("mixtral-8x22b", figures::MIXTRAL_8X22B),
    ("smollm2-135m", figures::SMOLLM2_135M),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// The published parameters in billions.
    #[test]
    fn known_models_have_their_published_parameter_counts() {
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
        for ((known, figures), (name, billions)) in ROWS.iter().zip(cases) {
            assert_eq!(*known, name);
            let model = SimulatedModel::sized(name, &spec(figures, name).unwrap(), WeightFormat::Bf16);
            let got = model.shape.sizes.total() as f64 / 2e9;
            assert!((got / billions - 1.0).abs() < 0.01, "{name}: {got} of {billions}");
        }
    }

    #[test]
    fn smaller_formats_weigh_less_where_matrices_of_layers_are() {
        let spec = spec(&figures::LLAMA3_1_8B, "llama-3.1-8b").unwrap();
        let of = |weights| SimulatedModel::sized("llama-3.1-8b", &spec, weights).shape.sizes;
        let (bf16, fp8, int4) = (of(WeightFormat::Bf16), of(WeightFormat::Fp8), of(WeightFormat::Int4));
        assert_eq!((bf16.embedding, bf16.head), (int4.embedding, int4.head));
        let mlp = |sizes: &ModelSizes| sizes.layers[0].mlp;
        assert_eq!((2 * mlp(&fp8), 32 * mlp(&int4)), (mlp(&bf16), 9 * mlp(&bf16)));
    }
}
