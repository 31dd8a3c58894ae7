//! Granite 4, some of whose layers are Mamba-2.

use super::definition::{ConfigKeys, ConfigReaders, ConfigRules, FamilyDefinition, GgufRules, TensorTables};
use super::experts::{n_gguf_experts, softmax_experts};
use super::granite::{GRANITE, GRANITE_EXPERTS};
use super::llama::KEYS;
use super::{experts, mamba};
use crate::config::gguf::keys::GgufKeys;
use crate::config::json::keys::JsonKeys;
use crate::config::{ExpertsSpec, LayerSpec, MixerSpec, PositionEncoding};
use crate::error::ParseError;
use crate::names::rows::Dim::{Hidden, Inner, SharedInner};
use crate::names::rows::{Dim, TensorMapping, TensorSource, part, stored, whole};

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
    gguf: GgufRules { experts: gguf_experts, layer: gguf_layer, ..GRANITE.gguf },
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

fn gguf_experts(keys: &GgufKeys<'_>, inner: u32) -> Result<Option<ExpertsSpec>, ParseError> {
    if n_gguf_experts(keys)? == 0 {
        return Ok(None);
    }
    let shared = keys.optional("expert_shared_feed_forward_length")?.unwrap_or(0);
    Ok(Some(ExpertsSpec { shared, ..experts::gguf_experts(keys, inner)? }))
}

/// A file without a rope sets the key to false. Bamba's files have the same architecture and a rope on half of a head,
/// but the converter orders the numbers of a head as for a rope on all of it.
fn gguf_layer(keys: &GgufKeys<'_>, layer: u32, usual: LayerSpec) -> Result<LayerSpec, ParseError> {
    if !keys.bool("rope.scaling.finetuned")?.unwrap_or(true) {
        return mamba::gguf_layer(keys, layer, LayerSpec { positions: PositionEncoding::None, ..usual });
    }
    let head_dim = keys.length("embedding_length")? / keys.length("attention.head_count")?.max(1);
    match keys.optional("rope.dimension_count")?.is_some_and(|turned| turned != head_dim) {
        true => ParseError::unsupported("a GGUF of Bamba, whose heads are in an order that does not fit its rope,"),
        false => mamba::gguf_layer(keys, layer, usual),
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
    split("mlp.shared_experts.gate_proj.weight", SharedInner, part(GRANITE_IN, &[], SHARED), "ffn_gate_shexp.weight"),
    split(
        "mlp.shared_experts.up_proj.weight",
        SharedInner,
        part(GRANITE_IN, &[SharedInner], SHARED),
        "ffn_up_shexp.weight",
    ),
    stored("mlp.shared_experts.down_proj.weight", [Hidden, SharedInner], whole(GRANITE_OUT), "ffn_down_shexp.weight"),
];
/// Without experts, what they would share is the MLP.
const GRANITE_MLP: &[TensorMapping] = &[
    split("mlp.gate_proj.weight", Inner, part(GRANITE_IN, &[], &[Inner, Inner]), "ffn_gate.weight"),
    split("mlp.up_proj.weight", Inner, part(GRANITE_IN, &[Inner], &[Inner, Inner]), "ffn_up.weight"),
    stored("mlp.down_proj.weight", [Hidden, Inner], whole(GRANITE_OUT), "ffn_down.weight"),
];
/// A part of a folder's tensor that is a tensor of its own in a GGUF.
const fn split(name: &'static str, rows: Dim, folder: TensorSource, gguf: &'static str) -> TensorMapping {
    TensorMapping { name, dims: [rows, Hidden], folder, gguf: whole(gguf) }
}

const GRANITE_OUT: &str = "shared_mlp.output_linear.weight";
const GRANITE_IN: &str = "shared_mlp.input_linear.weight";
const SHARED: &[Dim] = &[SharedInner, SharedInner];
