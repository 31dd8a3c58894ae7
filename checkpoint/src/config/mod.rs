//! A model's hyperparameters: from a GGUF's metadata or a folder's `config.json`. Knows no tensor's bytes.
//!
//! `json` and `gguf` each read one format, by the rules that a family's definition has for it. The values that both
//! return are checked here.

mod encoder;
mod form;
pub(crate) mod gguf;
pub(crate) mod json;
mod mixer;
mod parts;
mod sampling;

pub use crate::families::Family;
pub use encoder::{
    EmbeddingPrefixes, EncoderSpec, PooledActivation, PooledLayer, Pooling, PoolingSpec, ScoreActivation,
};
pub use form::{Activation, BlockNorms, DecoderForm, NormKind, Norms};
pub use mixer::{
    ConvolutionSpec, MixerSpec, ProjectionFactors, RecurrenceRule, RecurrenceSpec, RecurrenceStorage, StateHeads,
    StateSpaceRule,
};
pub use parts::{
    AttentionSpec, ClampedSilu, ExpertScores, ExpertsSpec, KvHeads, LayerSpec, ModelMultipliers, PositionEncoding,
    QueryKeyNorms, QueryTemperature, RopeScaling, RopeSpec,
};
pub(crate) use parts::{LAYERS_MAX, LENGTH_MAX, are_groups, is_positive, length, yarn_magnitude};
pub use sampling::SamplingDefaults;

use crate::error::ParseError;
use std::ops::Range;
use types::{KvLayout, LayerGroups, Token};

#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    pub family: Family,
    /// The model's name in its file, or the file's name. For people: nothing depends on it.
    pub name: String,
    pub hidden: u32,
    pub n_layers: u32,
    pub n_heads: u32,
    pub n_kv_heads: u32,
    pub head_dim: u32,
    /// The width of the MLP.
    pub inner: u32,
    /// The width of the input that each layer has of its own for each token; 0: there is none.
    pub layer_input: u32,
    /// Rows of the embedding. The tokenizer may know fewer.
    pub vocab: u32,
    /// The context length that the model was trained for.
    pub context: u32,
    pub norm_eps: f32,
    /// Added to a norm's weights before use: 1 where the file holds them less one.
    pub norm_offset: f32,
    pub attention: AttentionSpec,
    /// The experts of layers with `has_experts`.
    pub experts: Option<ExpertsSpec>,
    /// What differs between layers; one entry per layer.
    pub layers: Vec<LayerSpec>,
    pub rope: RopeSpec,
    /// The rope of layers with a window, if it differs.
    pub local_rope: Option<RopeSpec>,
    /// Logits become `cap * tanh(logit / cap)`.
    pub logits_cap: Option<f32>,
    pub factors: ModelMultipliers,
    /// Attention and MLP both see the stream as it was before the layer.
    pub is_parallel: bool,
    /// The head is the embedding matrix; there is no `lm_head.weight`.
    pub tied_embeddings: bool,
    /// A position sees those behind it, and the model has no head: it draws no token.
    pub encoder: Option<EncoderSpec>,
    pub pooling: PoolingSpec,
    pub bos: Option<Token>,
    /// Tokens that end an answer, the main one first.
    pub eos: Vec<Token>,
}

const EXPERTS_MAX: u32 = 2048;
const EOS_MAX: usize = 64;

impl ModelSpec {
    /// Returns the decoder that runs the model.
    pub fn form(&self) -> DecoderForm {
        self.family.definition().form(self.is_parallel, self.has_experts_beside_mlps())
    }

    /// What each layer keeps of earlier positions. A window at least as long as the context counts as none.
    pub fn cache_groups(&self) -> LayerGroups {
        let heads = |layer: &LayerSpec| {
            let KvHeads { n, dim, .. } = self.kv_heads_of(layer);
            KvLayout::heads(n, dim)
        };
        let attention = |layer: &LayerSpec| match layer.window.filter(|window| *window < self.context) {
            // The positions of a text are computed at once, and nothing is kept of them.
            _ if self.encoder.is_some() => None,
            _ if !layer.mixer.has_attention() || layer.kv_of.is_some() => None,
            Some(window) => Some(heads(layer).with_window(window)),
            None => Some(heads(layer)),
        };
        LayerGroups::of_layers(self.layers.iter().map(|layer| [attention(layer), layer.mixer.state_layout()]))
    }

    /// The heads of a layer's keys and values.
    pub fn kv_heads_of(&self, layer: &LayerSpec) -> KvHeads {
        layer.kv_heads.unwrap_or(KvHeads { n: self.n_kv_heads, dim: self.head_dim, values_are_keys: false })
    }

    fn has_experts_beside_mlps(&self) -> bool {
        self.experts.is_some_and(|of| of.is_beside_mlp)
    }

    /// The width of a layer's MLP.
    pub fn inner_of(&self, layer: &LayerSpec) -> u32 {
        layer.inner.unwrap_or(self.inner)
    }

    /// The layers that no boundary between stages may part: some read what others keep, or all have inputs of their
    /// own, for which later stages lack the tokens.
    pub fn joined_layers(&self) -> Range<u32> {
        if self.layer_input > 0 {
            return 0..self.n_layers;
        }
        let readers = || (0..).zip(&self.layers).filter_map(|(i, layer)| Some((i, layer.kv_of?)));
        match (readers().map(|(_, of)| of).min(), readers().last()) {
            (Some(first), Some((last, _))) => first..last + 1,
            _ => 0..0,
        }
    }

    /// The mixer of its layers with a state, which are alike.
    pub fn state_mixer(&self) -> Option<MixerSpec> {
        self.state_mixers().next()
    }

    /// The heads of its layers with a state, which are alike.
    pub fn state_heads(&self) -> Option<StateHeads> {
        self.state_mixer().and_then(|mixer| mixer.state_heads())
    }

    /// The shape of its recurrent layers, which are alike.
    pub(crate) fn recurrence(&self) -> Option<RecurrenceSpec> {
        self.state_mixer().and_then(|mixer| mixer.recurrence().copied())
    }

    fn state_mixers(&self) -> impl Iterator<Item = MixerSpec> {
        self.layers.iter().map(|layer| layer.mixer).filter(|mixer| mixer.state_heads().is_some())
    }

    /// The numbers in its matrices. For people: norms and biases, a thousandth of them, are left out.
    pub fn n_parameters(&self) -> u64 {
        let hidden = u64::from(self.hidden);
        let form = self.form();
        // Up and down; a gate where there is one.
        let n_mlp = if form.activation.has_gate() { 3 } else { 2 };
        let experts = self.experts.as_ref().map_or(0, |of| {
            u64::from(of.n) * (n_mlp * hidden * u64::from(of.inner) + hidden) + n_mlp * hidden * u64::from(of.shared)
        });
        let mlps = self.layers.iter().filter(|layer| layer.has_mlp).map(|layer| {
            let dense = n_mlp * hidden * u64::from(self.inner_of(layer));
            match (layer.has_experts, self.has_experts_beside_mlps()) {
                (true, true) => experts + dense,
                (true, false) => experts,
                (false, _) => dense,
            }
        });
        let attention = |layer: &LayerSpec| {
            let KvHeads { n, dim, values_are_keys } = self.kv_heads_of(layer);
            let n_kv = if layer.kv_of.is_some() { 0 } else { n * (2 - u32::from(values_are_keys)) };
            let n_wide = self.n_heads * (2 + u32::from(self.attention.has_gate));
            hidden * u64::from(n_wide + n_kv) * u64::from(dim)
        };
        let recurrence = |of: RecurrenceSpec| hidden * u64::from(of.n_cols() + of.n_heads * of.value_dim);
        let mixers = self.layers.iter().map(|layer| match layer.mixer {
            MixerSpec::Attention => attention(layer),
            MixerSpec::Recurrence(of) => recurrence(of),
            MixerSpec::Both(of) => attention(layer) + recurrence(of),
            MixerSpec::Convolution(_) => 4 * hidden * hidden,
            MixerSpec::None => 0,
        });
        let n_tables = if self.tied_embeddings || self.encoder.is_some() { 1 } else { 2 };
        let positions = if form.learns_positions { u64::from(self.context) } else { 0 };
        // A row of a table for each token, and in each layer two products and one of the embedding.
        let inputs = u64::from(self.layer_input) * u64::from(self.n_layers) * (u64::from(self.vocab) + 3 * hidden);
        hidden * (n_tables * u64::from(self.vocab) + positions) + mixers.sum::<u64>() + mlps.sum::<u64>() + inputs
    }

    /// Checks that the values agree with each other; the refusal names those that do not.
    pub(crate) fn checked(self) -> Result<ModelSpec, ParseError> {
        let lengths = [
            ("hidden size", self.hidden),
            ("number of layers", self.n_layers),
            ("number of heads", self.n_heads),
            ("number of KV heads", self.n_kv_heads),
            ("head dimension", self.head_dim),
            ("MLP width", self.inner),
            ("vocabulary", self.vocab),
            ("context length", self.context),
            ("rope dimension", self.rope.dim),
        ];
        if let Some((name, _)) = lengths.iter().find(|(_, length)| *length == 0) {
            return ParseError::malformed(format!("the {name} is zero"));
        }
        if u64::from(self.n_layers) > LAYERS_MAX {
            return ParseError::malformed(format!("{} layers exceed the limit of {LAYERS_MAX}", self.n_layers));
        }
        let (heads, kv_heads) = (self.n_heads, self.n_kv_heads);
        if !heads.is_multiple_of(kv_heads) {
            return ParseError::malformed(format!("{heads} heads cannot share {kv_heads} KV heads evenly"));
        }
        if u64::from(heads) * u64::from(self.head_dim) > LENGTH_MAX {
            return ParseError::malformed(format!(
                "{heads} heads of {} exceed the width limit of {LENGTH_MAX}",
                self.head_dim
            ));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            return ParseError::malformed(format!("the norm's epsilon is {}", self.norm_eps));
        }
        self.rope.check(self.rope_head_dim())?;
        self.local_rope.iter().try_for_each(|rope| rope.check(self.head_dim))?;
        self.check_families()?;
        self.encoder.iter().try_for_each(EncoderSpec::check)?;
        if let Some(token) = self.bos.iter().chain(&self.eos).find(|token| **token >= self.vocab) {
            return ParseError::malformed(format!(
                "the special token {token} is outside the vocabulary of {}",
                self.vocab
            ));
        }
        Ok(self)
    }
}

impl ModelSpec {
    /// The length of the heads that the model's main rope rotates.
    fn rope_head_dim(&self) -> u32 {
        parts::rope_head_dim(&self.layers, self.head_dim)
    }

    /// Checks layers that differ from the model's usual shapes.
    fn check_layers(&self) -> Result<(), ParseError> {
        for (i, layer) in self.layers.iter().enumerate() {
            let KvHeads { n, dim, .. } = self.kv_heads_of(layer);
            let is_even = n > 0 && self.n_heads.is_multiple_of(n) && dim > 0 && dim.is_multiple_of(self.head_dim);
            if !is_even || u64::from(self.n_heads) * u64::from(dim) > LENGTH_MAX {
                return ParseError::malformed(format!(
                    "layer {i} has {n} KV heads of {dim} for {} heads",
                    self.n_heads
                ));
            }
            let is_like = |of: &LayerSpec| {
                let same = self.kv_heads_of(of).n == n && self.kv_heads_of(of).dim == dim && of.window == layer.window;
                same && of.mixer == MixerSpec::Attention && of.kv_of.is_none()
            };
            if layer.kv_of.is_some_and(|of| of as usize >= i || !is_like(&self.layers[of as usize])) {
                return ParseError::malformed(format!("layer {i} cannot read the keys and values of another layer"));
            }
            if self.inner_of(layer) == 0 {
                return ParseError::malformed(format!("the MLP of layer {i} has the width 0"));
            }
        }
        Ok(())
    }

    /// Checks what only some families have.
    fn check_families(&self) -> Result<(), ParseError> {
        if self.layers.len() != self.n_layers as usize {
            return ParseError::malformed(format!(
                "{} layers are described, but the model has {}",
                self.layers.len(),
                self.n_layers
            ));
        }
        if u64::from(self.layer_input) * u64::from(self.n_layers) > LENGTH_MAX {
            return ParseError::malformed(format!("inputs of {} for each layer exceed the limit", self.layer_input));
        }
        self.check_layers()?;
        self.layers.iter().try_for_each(|layer| layer.mixer.check())?;
        if self.state_mixers().any(|mixer| Some(mixer) != self.state_mixer()) {
            return ParseError::malformed("the layers with a state differ in shape");
        }
        if self.layers.iter().any(|layer| layer.window == Some(0)) {
            return ParseError::malformed("a layer has a window of 0 positions");
        }
        let multipliers = self.factors.all();
        let clamps = self.experts.iter().flat_map(|of| of.clamp).flat_map(|clamp| [clamp.alpha, clamp.limit]);
        let caps = [Some(self.attention.scale), self.attention.cap, self.logits_cap];
        let caps = caps.into_iter().chain(multipliers).flatten().chain(clamps).chain(self.experts.map(|of| of.factor));
        if let Some(number) = caps.into_iter().find(|number| !is_positive(number)) {
            return ParseError::malformed(format!("a scale or a cap is {number}, and must be positive"));
        }
        match self.attention.temperature {
            Some(QueryTemperature { beta, every }) if every == 0 || !(beta.is_finite() && beta >= 0.0) => {
                return ParseError::malformed(format!(
                    "the query temperature is invalid: {beta} every {every} positions"
                ));
            }
            _ => {}
        }
        match &self.experts {
            Some(ExpertsSpec { n, n_used, inner, .. })
                if *n_used == 0 || n_used > n || *n > EXPERTS_MAX || *inner == 0 =>
            {
                ParseError::malformed(format!("cannot use {n_used} of {n} experts of the width {inner}"))
            }
            Some(ExpertsSpec { n, n_used, scores: ExpertScores::Sigmoid { n: groups, n_used: of_groups }, .. })
                if !are_groups(*n, *n_used, *groups, *of_groups) =>
            {
                ParseError::malformed(format!("cannot use {n_used} of {n} experts in {of_groups} of {groups} groups"))
            }
            Some(of) if of.is_beside_mlp && self.layers.iter().any(|layer| layer.has_mlp && !layer.has_experts) => {
                ParseError::unsupported("layers without experts among layers that have them beside their MLPs")
            }
            None if self.layers.iter().any(|layer| layer.has_experts) => {
                ParseError::malformed("layers use experts, but the model has none")
            }
            _ => Ok(()),
        }
    }
}

fn dedup_eos(tokens: Vec<Token>) -> Result<Vec<Token>, ParseError> {
    let mut seen = Vec::new();
    for token in tokens {
        if !seen.contains(&token) {
            seen.push(token);
        }
        if seen.len() > EOS_MAX {
            return ParseError::malformed(format!("more than {EOS_MAX} end tokens"));
        }
    }
    Ok(seen)
}
