//! Bamba: Granite 4's form by other names, without experts. Its GGUFs have Granite 4's architecture,
//! and that family refuses them.

use super::definition::{ConfigReaders, ConfigRules, FamilyDefinition, TensorTables};
use super::llama::{LLAMA, UNREAD};
use super::mamba;
use crate::config::MixerSpec;
use crate::config::json::keys::JsonKeys;
use crate::error::ParseError;
use crate::names::rows::Dim::{Hidden, Inner, One, Vocab};
use crate::names::rows::{EMBEDDING, HEAD, NORM, TensorMapping, same, tensor, whole};

pub const BAMBA: FamilyDefinition = FamilyDefinition {
    name: "Bamba",
    architecture: "bamba",
    config: ConfigRules { class: "BambaForCausalLM", model_type: "bamba", eps: 1e-5, turned: 0.5, ..LLAMA.config },
    readers: ConfigReaders { mixer, ..LLAMA.readers },
    gguf: UNREAD,
    tensors: TensorTables {
        outer: BAMBA_OUTER,
        norms: &[NORMS_AND_MLP],
        recurrence: &[MAMBA],
        mlp: &[],
        ..LLAMA.tensors
    },
    ..LLAMA
};

fn mixer(keys: &JsonKeys<'_>, layer: u32, listed: Option<&str>) -> Result<MixerSpec, ParseError> {
    if let Some(name) = listed {
        return mamba::listed_mixer(keys, name);
    }
    let is_attention = keys.lengths("attn_layer_indices")?.is_some_and(|indices| indices.contains(&layer));
    if is_attention { Ok(MixerSpec::Attention) } else { mamba::mixer(keys) }
}

const MAMBA: &[TensorMapping] = mamba::rows!("mamba");
const NORMS_AND_MLP: &[TensorMapping] = &[
    same("input_layernorm.weight", [One, Hidden]),
    tensor("post_attention_layernorm.weight", [One, Hidden], whole("pre_ff_layernorm.weight")),
    tensor("mlp.gate_proj.weight", [Inner, Hidden], whole("feed_forward.gate_proj.weight")),
    tensor("mlp.up_proj.weight", [Inner, Hidden], whole("feed_forward.up_proj.weight")),
    tensor("mlp.down_proj.weight", [Hidden, Inner], whole("feed_forward.down_proj.weight")),
];
const BAMBA_OUTER: &[TensorMapping] = &[
    same(EMBEDDING, [Vocab, Hidden]),
    tensor(NORM, [One, Hidden], whole("model.final_layernorm.weight")),
    same(HEAD, [Vocab, Hidden]),
];
