//! Reads a Nemotron-H's `config.json`: each of its layers is one sublayer, in a list or as a letter.

use super::keys::JsonKeys;
use super::recurrence::step_limits;
use crate::config::{
    ExpertScores, ExpertsSpec, LAYERS_MAX, LayerSpec, MixerKind, PositionEncoding, RecurrenceRule, RecurrenceSpec,
    length,
};
use crate::error::ParseError;

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

pub(super) fn n_layers(keys: &JsonKeys<'_>) -> Result<u32, ParseError> {
    length("the number of layers", sublayers(keys)?.len() as u64)
}

/// Returns the layers. None of them has positions.
pub(super) fn layers(keys: &JsonKeys<'_>) -> Result<Vec<LayerSpec>, ParseError> {
    let layer = |of: Sublayer| LayerSpec {
        mixer: match of {
            Sublayer::Recurrence => MixerKind::Recurrence,
            Sublayer::Attention => MixerKind::Attention,
            Sublayer::Mlp | Sublayer::Experts => MixerKind::None,
        },
        window: None,
        positions: PositionEncoding::None,
        has_mlp: matches!(of, Sublayer::Mlp | Sublayer::Experts),
        has_experts: of == Sublayer::Experts,
    };
    Ok(sublayers(keys)?.into_iter().map(layer).collect())
}

/// The first files had another name for it.
pub(super) fn head_dim(keys: &JsonKeys<'_>) -> Result<u32, ParseError> {
    let given = keys.optional("head_dim")?.map_or_else(|| keys.optional("attention_head_dim"), |dim| Ok(Some(dim)))?;
    Ok(given.unwrap_or(128))
}

pub(super) fn state_space(keys: &JsonKeys<'_>) -> Result<RecurrenceSpec, ParseError> {
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
    let [step_min, step_max] = step_limits(keys)?;
    Ok(RecurrenceSpec {
        n_heads: keys.length("mamba_num_heads")?,
        n_key_heads: keys.optional("n_groups")?.unwrap_or(8),
        key_dim: keys.optional("ssm_state_size")?.unwrap_or(128),
        value_dim: keys.optional("mamba_head_dim")?.unwrap_or(64),
        taps: keys.optional("conv_kernel")?.unwrap_or(4),
        rule: RecurrenceRule::StateSpace { step_min, step_max },
    })
}

/// `plain` makes the experts of most families from their number, their width and whether weights sum to one.
pub(super) fn experts(
    keys: &JsonKeys<'_>,
    plain: impl Fn(u32, u32, bool) -> Result<ExpertsSpec, ParseError>,
) -> Result<Option<ExpertsSpec>, ParseError> {
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
    let groups = [keys.optional("n_group")?, keys.optional("topk_group")?].map(|n| n.unwrap_or(1));
    let normalized = keys.bool("norm_topk_prob")?.unwrap_or(true);
    Ok(Some(ExpertsSpec {
        scores: ExpertScores::Sigmoid { n: groups[0], n_used: groups[1] },
        factor: keys.float("routed_scaling_factor")?.unwrap_or(1.0),
        shared: keys.length("moe_shared_expert_intermediate_size")?,
        ..plain(keys.length("n_routed_experts")?, keys.length("moe_intermediate_size")?, normalized)?
    }))
}
