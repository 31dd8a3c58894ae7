//! Nemotron-H: each layer is one sublayer behind one norm, which is a recurrence, attention without positions, an MLP
//! or a mixture of experts. MLPs have no gate: what is positive is squared.

use super::definition::{ConfigKeys, ConfigReaders, ConfigRules, FamilyDefinition, GgufRules, TensorTables};
use super::experts::{grouped_scores, n_gguf_experts, sigmoid_gguf_experts, softmax_experts};
use super::llama::{HALVES, KEYS, LLAMA};
use super::mamba;
use crate::config::gguf::keys::GgufKeys;
use crate::config::json::keys::JsonKeys;
use crate::config::{
    Activation, BlockNorms, DecoderForm, ExpertsSpec, LAYERS_MAX, LayerSpec, MixerSpec, Norms, RecurrenceRule,
    RecurrenceSpec, RecurrenceStorage, StateSpaceRule, length,
};
use crate::error::ParseError;
use crate::names::rows::Dim::{ExpertInner, Experts, Heads, Hidden, Inner, KvHeads, One, SharedInner, Vocab};
use crate::names::rows::{EMBEDDING, HEAD, NORM, TensorMapping, expert, renamed, row};

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
    gguf: GgufRules { also: Some("nemotron_h_moe"), experts: gguf_experts, layer: gguf_layer, ..HALVES },
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
        has_mlp: matches!(of, Sublayer::Mlp | Sublayer::Experts),
        has_experts: of == Sublayer::Experts,
        ..LayerSpec::EMPTY
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
    Ok(RecurrenceSpec {
        n_heads: keys.length("mamba_num_heads")?,
        n_key_heads: keys.optional("n_groups")?.unwrap_or(8),
        key_dim: keys.optional("ssm_state_size")?.unwrap_or(128),
        value_dim: keys.optional("mamba_head_dim")?.unwrap_or(64),
        taps: keys.optional("conv_kernel")?.unwrap_or(4),
        rule: RecurrenceRule::StateSpace(StateSpaceRule::normed(mamba::step_limits(keys)?)),
        storage: RecurrenceStorage::Folder,
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

fn gguf_experts(keys: &GgufKeys<'_>, inner: u32) -> Result<Option<ExpertsSpec>, ParseError> {
    if n_gguf_experts(keys)? == 0 {
        return Ok(None);
    }
    if let Some(width) = keys.optional("moe_latent_size")?.filter(|width| *width > 0) {
        return ParseError::unsupported(format!("experts with a moe_latent_size of {width}"));
    }
    let n_shared = keys.optional("expert_shared_count")?.unwrap_or(1);
    if n_shared != 1 {
        return ParseError::unsupported(format!("an expert_shared_count of {n_shared}"));
    }
    let shared = keys.length("expert_shared_feed_forward_length")?;
    Ok(Some(ExpertsSpec { shared, ..sigmoid_gguf_experts(keys, inner)? }))
}

/// A layer without heads of K is an MLP if it has a width, and else a recurrence.
fn gguf_layer(keys: &GgufKeys<'_>, layer: u32, usual: LayerSpec) -> Result<LayerSpec, ParseError> {
    let n_heads = keys.of_layer("attention.head_count_kv", layer)?.unwrap_or(0);
    let inner = keys.of_layer("feed_forward_length", layer)?.unwrap_or(0);
    let mixer = match (n_heads, inner) {
        (0, 0) => MixerSpec::Recurrence(mamba::gguf_recurrence(keys, mamba::UNLIMITED)?),
        (0, _) => MixerSpec::None,
        (_, 0) => MixerSpec::Attention,
        _ => return ParseError::unsupported(format!("layer {layer}, of attention and an MLP, in this architecture")),
    };
    let (has_mlp, has_experts) = (inner > 0, inner > 0 && usual.has_experts);
    Ok(LayerSpec { mixer, has_mlp, has_experts, ..LayerSpec::EMPTY })
}

/// Whatever a layer is, it is called a mixer.
const NEMOTRON_NORM: &[TensorMapping] = &[row("norm.weight", [One, Hidden], "attn_norm.weight")];
const NEMOTRON_MAMBA: &[TensorMapping] = mamba::rows!("mixer");
const NEMOTRON_ATTENTION: &[TensorMapping] = &[
    renamed("self_attn.q_proj.weight", [Heads, Hidden], "mixer.q_proj.weight", "attn_q.weight"),
    renamed("self_attn.k_proj.weight", [KvHeads, Hidden], "mixer.k_proj.weight", "attn_k.weight"),
    renamed("self_attn.v_proj.weight", [KvHeads, Hidden], "mixer.v_proj.weight", "attn_v.weight"),
    renamed("self_attn.o_proj.weight", [Hidden, Heads], "mixer.o_proj.weight", "attn_output.weight"),
];
const NEMOTRON_MLP: &[TensorMapping] = &[
    renamed("mlp.up_proj.weight", [Inner, Hidden], "mixer.up_proj.weight", "ffn_up.weight"),
    renamed("mlp.down_proj.weight", [Hidden, Inner], "mixer.down_proj.weight", "ffn_down.weight"),
];
const NEMOTRON_EXPERTS: &[TensorMapping] = &[
    renamed("mlp.gate.weight", [Experts, Hidden], "mixer.gate.weight", "ffn_gate_inp.weight"),
    renamed(
        "mlp.gate.e_score_correction_bias",
        [One, Experts],
        "mixer.gate.e_score_correction_bias",
        "exp_probs_b.bias",
    ),
    expert(
        "mlp.experts.{e}.up_proj.weight",
        [ExpertInner, Hidden],
        "mixer.experts.{e}.up_proj.weight",
        "ffn_up_exps.weight",
    ),
    expert(
        "mlp.experts.{e}.down_proj.weight",
        [Hidden, ExpertInner],
        "mixer.experts.{e}.down_proj.weight",
        "ffn_down_exps.weight",
    ),
    renamed(
        "mlp.shared_experts.up_proj.weight",
        [SharedInner, Hidden],
        "mixer.shared_experts.up_proj.weight",
        "ffn_up_shexp.weight",
    ),
    renamed(
        "mlp.shared_experts.down_proj.weight",
        [Hidden, SharedInner],
        "mixer.shared_experts.down_proj.weight",
        "ffn_down_shexp.weight",
    ),
];
const NEMOTRON_OUTER: &[TensorMapping] = &[
    renamed(EMBEDDING, [Vocab, Hidden], "backbone.embeddings.weight", "token_embd.weight"),
    renamed(NORM, [One, Hidden], "backbone.norm_f.weight", "output_norm.weight"),
    row(HEAD, [Vocab, Hidden], "output.weight"),
];
