//! Granite 4, some of whose layers are Mamba-2. Its GGUFs are not read.

use super::definition::{ConfigKeys, ConfigReaders, ConfigRules, FamilyDefinition, TensorTables};
use super::experts::softmax_experts;
use super::granite::{GRANITE, GRANITE_EXPERTS};
use super::llama::{KEYS, UNREAD};
use super::mamba;
use crate::config::json::keys::JsonKeys;
use crate::config::{ExpertsSpec, MixerSpec, PositionEncoding};
use crate::error::ParseError;
use crate::names::rows::Dim::{Hidden, Inner, SharedInner};
use crate::names::rows::{Dim, TensorMapping, part, tensor, whole};

pub const GRANITE_HYBRID: FamilyDefinition = FamilyDefinition {
    name: "Granite 4",
    architecture: "granitehybrid",
    config: ConfigRules {
        class: "GraniteMoeHybridForCausalLM",
        model_type: "granitemoehybrid",
        keys: &ConfigKeys { inner: "shared_intermediate_size", ..KEYS },
        attention_names: &["full_attention", "attention"],
        ..GRANITE.config
    },
    readers: ConfigReaders { experts, mixer, positions, ..GRANITE.readers },
    gguf: UNREAD,
    tensors: TensorTables {
        recurrence: &[MAMBA],
        mlp: &[GRANITE_MLP],
        experts: &[GRANITE_EXPERTS, GRANITE_SHARED],
        ..GRANITE.tensors
    },
    ..GRANITE
};

fn experts(keys: &JsonKeys<'_>) -> Result<Option<ExpertsSpec>, ParseError> {
    match keys.optional("num_local_experts")?.unwrap_or(0) {
        0 => Ok(None),
        n => {
            let shared = keys.length("shared_intermediate_size")?;
            let of = softmax_experts(keys, n, keys.length("intermediate_size")?, true)?;
            Ok(Some(ExpertsSpec { shared, ..of }))
        }
    }
}

fn mixer(keys: &JsonKeys<'_>, _: u32, listed: Option<&str>) -> Result<MixerSpec, ParseError> {
    match listed {
        Some(name) => mamba::listed_mixer(keys, name),
        None => ParseError::malformed("layer_types is missing in config.json"),
    }
}

fn positions(keys: &JsonKeys<'_>, _: u32, rope: PositionEncoding) -> Result<PositionEncoding, ParseError> {
    Ok(if keys.text("position_embedding_type") == Some("rope") { rope } else { PositionEncoding::None })
}

const MAMBA: &[TensorMapping] = mamba::rows!("mamba");
const GRANITE_SHARED: &[TensorMapping] = &[
    tensor("mlp.shared_experts.gate_proj.weight", [SharedInner, Hidden], part(GRANITE_IN, &[], SHARED)),
    tensor("mlp.shared_experts.up_proj.weight", [SharedInner, Hidden], part(GRANITE_IN, &[SharedInner], SHARED)),
    tensor("mlp.shared_experts.down_proj.weight", [Hidden, SharedInner], whole("shared_mlp.output_linear.weight")),
];
/// Without experts, what they would share is the MLP.
const GRANITE_MLP: &[TensorMapping] = &[
    tensor("mlp.gate_proj.weight", [Inner, Hidden], part(GRANITE_IN, &[], &[Inner, Inner])),
    tensor("mlp.up_proj.weight", [Inner, Hidden], part(GRANITE_IN, &[Inner], &[Inner, Inner])),
    tensor("mlp.down_proj.weight", [Hidden, Inner], whole("shared_mlp.output_linear.weight")),
];
const GRANITE_IN: &str = "shared_mlp.input_linear.weight";
const SHARED: &[Dim] = &[SharedInner, SharedInner];
