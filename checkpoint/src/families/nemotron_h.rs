//! Nemotron-H: each layer is one sublayer behind one norm, which is a recurrence, attention without positions, an MLP
//! or a mixture of experts. MLPs have no gate: what is positive is squared. Its GGUFs are not read.

use super::definition::{ConfigKeys, ConfigReaders, ConfigRules, FamilyDefinition, TensorTables};
use super::experts::{grouped_scores, softmax_experts};
use super::llama::{KEYS, LLAMA, UNREAD};
use super::mamba;
use crate::config::json::keys::JsonKeys;
use crate::config::{
    Activation, BlockNorms, DecoderForm, ExpertsSpec, LAYERS_MAX, LayerSpec, MixerSpec, Norms, PositionEncoding,
    RecurrenceRule, RecurrenceSpec, length,
};
use crate::error::ParseError;
use crate::names::rows::Dim::{ExpertInner, Experts, Heads, Hidden, Inner, KvHeads, One, SharedInner, Vocab};
use crate::names::rows::{EMBEDDING, HEAD, NORM, TensorMapping, same, tensor, whole};

pub const NEMOTRON_H: FamilyDefinition = FamilyDefinition {
    name: "Nemotron-H",
    architecture: "nemotron_h",
    config: ConfigRules {
        class: "NemotronHForCausalLM",
        model_type: "nemotron_h",
        keys: &ConfigKeys { eps: "layer_norm_epsilon", activation: "mlp_hidden_act", ..KEYS },
        activations: &["relu2"],
        eps: 1e-5,
        ..LLAMA.config
    },
    readers: ConfigReaders { n_layers, head_dim, experts, layers: Some(layers), ..LLAMA.readers },
    gguf: UNREAD,
    tensors: TensorTables {
        outer: NEMOTRON_OUTER,
        layers: "backbone.layers",
        norms: &[NEMOTRON_NORM],
        attention: &[NEMOTRON_ATTENTION],
        recurrence: &[NEMOTRON_MAMBA],
        mlp: &[NEMOTRON_MLP],
        experts: &[NEMOTRON_EXPERTS],
        ..LLAMA.tensors
    },
    form: DecoderForm {
        activation: Activation::SquaredRelu,
        norms: BlockNorms::Alone(Norms::Before("norm")),
        ..LLAMA.form
    },
    ..LLAMA
};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sublayer {
    Recurrence,
    Attention,
    Mlp,
    Experts,
}

fn sublayers(keys: &JsonKeys<'_>) -> Result<Vec<Sublayer>, ParseError> {
    let listed = match keys.texts("layers_block_type")? {
        None => keys.texts("layer_types")?,
        listed => listed,
    };
    let one = |name: &str| match name {
        "M" | "mamba" | "linear_attention" => Ok(Sublayer::Recurrence),
        "*" | "attention" | "full_attention" => Ok(Sublayer::Attention),
        "-" | "mlp" => Ok(Sublayer::Mlp),
        "E" | "moe" => Ok(Sublayer::Experts),
        other => ParseError::unsupported(format!("a layer of the type {other}")),
    };
    let all: Vec<Sublayer> = match (listed, keys.text("hybrid_override_pattern")) {
        (Some(names), _) => names.into_iter().map(one).collect::<Result<_, _>>()?,
        (None, Some(letters)) => {
            letters.chars().map(|letter| one(letter.encode_utf8(&mut [0; 4]))).collect::<Result<_, _>>()?
        }
        (None, None) => return ParseError::malformed("layers_block_type is missing in config.json"),
    };
    if all.len() as u64 > LAYERS_MAX {
        return ParseError::malformed(format!("{} layers exceed the limit of {LAYERS_MAX}", all.len()));
    }
    if !all.contains(&Sublayer::Recurrence) {
        return ParseError::unsupported("a Nemotron-H without recurrent layers");
    }
    Ok(all)
}

fn n_layers(keys: &JsonKeys<'_>, _: &ConfigKeys) -> Result<u32, ParseError> {
    length("the number of layers", sublayers(keys)?.len() as u64)
}

/// Returns the layers. None of them has positions.
fn layers(keys: &JsonKeys<'_>) -> Result<Vec<LayerSpec>, ParseError> {
    let recurrence = recurrence(keys)?;
    let layer = |of: Sublayer| LayerSpec {
        mixer: match of {
            Sublayer::Recurrence => MixerSpec::Recurrence(recurrence),
            Sublayer::Attention => MixerSpec::Attention,
            Sublayer::Mlp | Sublayer::Experts => MixerSpec::None,
        },
        window: None,
        positions: PositionEncoding::None,
        has_mlp: matches!(of, Sublayer::Mlp | Sublayer::Experts),
        has_experts: of == Sublayer::Experts,
    };
    Ok(sublayers(keys)?.into_iter().map(layer).collect())
}

/// The first files had another name for it.
fn head_dim(keys: &JsonKeys<'_>, _: u32) -> Result<u32, ParseError> {
    let given = keys.optional("head_dim")?.map_or_else(|| keys.optional("attention_head_dim"), |dim| Ok(Some(dim)))?;
    Ok(given.unwrap_or(128))
}

fn recurrence(keys: &JsonKeys<'_>) -> Result<RecurrenceSpec, ParseError> {
    if keys.bool("use_conv_bias")? == Some(false) {
        return ParseError::unsupported("a model without use_conv_bias");
    }
    for switch in ["use_bias", "mamba_proj_bias"] {
        if keys.bool(switch)?.unwrap_or(false) {
            return ParseError::unsupported(format!("a model with {switch}"));
        }
    }
    if let Some(other) = keys.text("mamba_hidden_act").filter(|name| !matches!(*name, "silu" | "swish")) {
        return ParseError::unsupported(format!("the mamba_hidden_act {other}"));
    }
    let [step_min, step_max] = mamba::step_limits(keys)?;
    Ok(RecurrenceSpec {
        n_heads: keys.length("mamba_num_heads")?,
        n_key_heads: keys.optional("n_groups")?.unwrap_or(8),
        key_dim: keys.optional("ssm_state_size")?.unwrap_or(128),
        value_dim: keys.optional("mamba_head_dim")?.unwrap_or(64),
        taps: keys.optional("conv_kernel")?.unwrap_or(4),
        rule: RecurrenceRule::StateSpace { step_min, step_max },
    })
}

fn experts(keys: &JsonKeys<'_>) -> Result<Option<ExpertsSpec>, ParseError> {
    if !sublayers(keys)?.contains(&Sublayer::Experts) {
        return Ok(None);
    }
    if let Some(width) = keys.optional("moe_latent_size")? {
        return ParseError::unsupported(format!("experts with a moe_latent_size of {width}"));
    }
    let n_shared = keys.optional("n_shared_experts")?.unwrap_or(1);
    if n_shared != 1 {
        return ParseError::unsupported(format!("n_shared_experts of {n_shared}"));
    }
    let scores = grouped_scores(keys)?;
    let normalized = keys.bool("norm_topk_prob")?.unwrap_or(true);
    Ok(Some(ExpertsSpec {
        scores,
        factor: keys.float("routed_scaling_factor")?.unwrap_or(1.0),
        shared: keys.length("moe_shared_expert_intermediate_size")?,
        ..softmax_experts(keys, keys.length("n_routed_experts")?, keys.length("moe_intermediate_size")?, normalized)?
    }))
}

/// Whatever a layer is, it is called a mixer.
const NEMOTRON_NORM: &[TensorMapping] = &[same("norm.weight", [One, Hidden])];
const NEMOTRON_MAMBA: &[TensorMapping] = mamba::rows!("mixer");
const NEMOTRON_ATTENTION: &[TensorMapping] = &[
    tensor("self_attn.q_proj.weight", [Heads, Hidden], whole("mixer.q_proj.weight")),
    tensor("self_attn.k_proj.weight", [KvHeads, Hidden], whole("mixer.k_proj.weight")),
    tensor("self_attn.v_proj.weight", [KvHeads, Hidden], whole("mixer.v_proj.weight")),
    tensor("self_attn.o_proj.weight", [Hidden, Heads], whole("mixer.o_proj.weight")),
];
const NEMOTRON_MLP: &[TensorMapping] = &[
    tensor("mlp.up_proj.weight", [Inner, Hidden], whole("mixer.up_proj.weight")),
    tensor("mlp.down_proj.weight", [Hidden, Inner], whole("mixer.down_proj.weight")),
];
const NEMOTRON_EXPERTS: &[TensorMapping] = &[
    tensor("mlp.gate.weight", [Experts, Hidden], whole("mixer.gate.weight")),
    tensor("mlp.gate.e_score_correction_bias", [One, Experts], whole("mixer.gate.e_score_correction_bias")),
    tensor("mlp.experts.{e}.up_proj.weight", [ExpertInner, Hidden], whole("mixer.experts.{e}.up_proj.weight")),
    tensor("mlp.experts.{e}.down_proj.weight", [Hidden, ExpertInner], whole("mixer.experts.{e}.down_proj.weight")),
    tensor("mlp.shared_experts.up_proj.weight", [SharedInner, Hidden], whole("mixer.shared_experts.up_proj.weight")),
    tensor(
        "mlp.shared_experts.down_proj.weight",
        [Hidden, SharedInner],
        whole("mixer.shared_experts.down_proj.weight"),
    ),
];
const NEMOTRON_OUTER: &[TensorMapping] = &[
    tensor(EMBEDDING, [Vocab, Hidden], whole("backbone.embeddings.weight")),
    tensor(NORM, [One, Hidden], whole("backbone.norm_f.weight")),
    same(HEAD, [Vocab, Hidden]),
];
