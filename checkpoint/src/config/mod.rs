//! A model's hyperparameters: from a GGUF's metadata or a folder's `config.json`. Knows no tensor's bytes.
//!
//! `json.rs` and `gguf.rs` each have one table of the names and meanings of a family's values. The rules that the
//! values must satisfy are checked here, for both.

mod family;
mod gguf;
mod json;
mod recurrence;

pub use family::Family;
pub use recurrence::{ConvolutionSpec, MixerKind, RecurrenceRule, RecurrenceSpec, StateHeads};

use crate::error::ParseError;
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
    /// What the layers are whose mixer is a recurrence.
    pub recurrence: Option<RecurrenceSpec>,
    /// What the layers are whose mixer is a convolution.
    pub convolution: Option<ConvolutionSpec>,
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
    pub bos: Option<Token>,
    /// Tokens that end an answer, the main one first.
    pub eos: Vec<Token>,
}

/// What parts of a pass are multiplied by, where it is not one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ModelMultipliers {
    /// Rows of the embedding.
    pub embedding: Option<f32>,
    /// A sublayer's output, before it is added to the stream.
    pub residual: Option<f32>,
    pub logits: Option<f32>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionSpec {
    /// The factor for the product of query and key.
    pub scale: f32,
    /// Scores become `cap * tanh(score / cap)`.
    pub cap: Option<f32>,
    /// Q, K and V have a bias.
    pub has_bias: bool,
    pub query_key_norms: QueryKeyNorms,
    /// Queries grow with their positions.
    pub temperature: Option<QueryTemperature>,
    /// Each query head has one more score, whose value is nothing.
    pub has_sinks: bool,
    /// What comes out is multiplied by the sigmoid of a projection as wide.
    pub has_gate: bool,
}

/// What Q and K are normed over, before the rope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryKeyNorms {
    None,
    /// Each head, all with the same weights.
    Heads,
    /// All heads together.
    Projection,
}

/// A query at position `p` is multiplied by `1 + beta * ln(1 + floor(p / every))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryTemperature {
    pub beta: f32,
    pub every: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsSpec {
    pub n: u32,
    /// How many of them a token uses.
    pub n_used: u32,
    /// The width of one expert.
    pub inner: u32,
    /// The weights of the used experts are scaled to sum to one.
    pub normalized: bool,
    pub scores: ExpertScores,
    /// The weights are multiplied by this.
    pub factor: f32,
    /// The width of the expert that each token uses besides; 0: there is none.
    pub shared: u32,
    /// That one's output is multiplied by the sigmoid of one more product.
    pub has_shared_gate: bool,
    /// The gate's clamps, where it has some: `ClampedSilu`.
    pub clamp: Option<ClampedSilu>,
    /// Router and experts have a bias.
    pub has_bias: bool,
}

/// How the router's products become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertScores {
    Softmax,
    /// A sigmoid each. A stored correction is added for the choice alone, which is made within the best `n_used` of `n`
    /// equal groups.
    Sigmoid {
        n: u32,
        n_used: u32,
    },
}

/// `(up + 1) * gate * sigmoid(alpha * gate)` of a gate that is at most `limit` and an `up` that is at most as far from
/// zero.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClampedSilu {
    pub alpha: f32,
    pub limit: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    pub mixer: MixerKind,
    /// A query attends to this many positions, its own among them. None: to all.
    pub window: Option<u32>,
    pub positions: PositionEncoding,
    /// There is an MLP behind the mixer, or alone.
    pub has_mlp: bool,
    /// Its MLP is a mixture of experts.
    pub has_experts: bool,
}

/// How positions enter a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PositionEncoding {
    Rope,
    LocalRope,
    /// Only through the embedding, or not at all.
    None,
}

#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    pub theta: f32,
    /// How many numbers at the front of a head are rotated.
    pub dim: u32,
    /// Number `2i` is rotated with `2i + 1` (a GGUF's Llama, whose Q and K rows are permuted for it); otherwise `i`
    /// with `i + dim / 2`.
    pub pairs: bool,
    pub scaling: RopeScaling,
}

/// How the frequencies `theta^(-2i / dim)` are scaled.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    None,
    /// All are divided by the factor.
    Linear {
        factor: f32,
    },
    /// Long wavelengths are divided by the factor, short ones kept, and those between interpolated.
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_context: u32,
    },
    /// Like Llama3 with a ramp over the index, and the rotated numbers are also multiplied by `magnitude`.
    Yarn {
        factor: f32,
        /// Frequencies with at least `beta_fast` turns in the original context are kept; up to `beta_slow`, divided.
        beta_fast: f32,
        beta_slow: f32,
        original_context: u32,
        magnitude: f32,
        /// The ramp begins and ends at whole indices.
        truncate: bool,
    },
    /// Each is divided by a number of its own: one set for contexts up to the original, one beyond.
    Long {
        short: Vec<f32>,
        long: Vec<f32>,
        original_context: u32,
        magnitude: f32,
    },
    /// Each is divided by its own number: a GGUF's `rope_freqs.weight`, `dim / 2` of them.
    Divisors(Vec<f32>),
}

/// The sampling that the model's makers recommend, if any.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    /// The last so many tokens that penalties look at.
    pub penalty_window: Option<u32>,
}

/// Larger than in any model, and small enough that no product of two overflows.
const LENGTH_MAX: u64 = 1 << 24;
const LAYERS_MAX: u64 = 4096;
const EXPERTS_MAX: u32 = 2048;
const EOS_MAX: usize = 64;

impl ModelSpec {
    /// What each layer keeps of earlier positions. A window at least as long as the context counts as none.
    pub fn cache_groups(&self) -> LayerGroups {
        let heads = KvLayout::heads(self.n_kv_heads, self.head_dim);
        let state = self.recurrence.as_ref().map_or(heads, RecurrenceSpec::layout);
        let layout = |layer: &LayerSpec| match (layer.mixer, layer.window.filter(|window| *window < self.context)) {
            (MixerKind::None, _) => None,
            (MixerKind::Recurrence, _) => Some(state),
            (MixerKind::Convolution, _) => self.convolution.as_ref().map(ConvolutionSpec::layout),
            (MixerKind::Attention, Some(window)) => Some(heads.with_window(window)),
            (MixerKind::Attention, None) => Some(heads),
        };
        LayerGroups::of_some(self.layers.iter().map(layout))
    }

    /// The heads of its layers with a state, which are alike.
    pub fn state_heads(&self) -> Option<StateHeads> {
        let of_recurrence = self.recurrence.map(|of| StateHeads { n: of.n_heads, dim: of.value_dim });
        of_recurrence.or(self.convolution.map(|of| StateHeads { n: of.n, dim: of.width }))
    }

    /// The numbers in its matrices. For people: norms and biases, a thousandth of them, are left out.
    pub fn n_parameters(&self) -> u64 {
        let [hidden, head_dim] = [self.hidden, self.head_dim].map(u64::from);
        let (width, kv_width) = (u64::from(self.n_heads) * head_dim, u64::from(self.n_kv_heads) * head_dim);
        let is_gpt2 = self.family == Family::Gpt2;
        // Up and down; a gate where there is one.
        let n_mlp = if matches!(self.family, Family::Gpt2 | Family::GptNeox | Family::NemotronH) { 2 } else { 3 };
        let dense = n_mlp * hidden * u64::from(self.inner);
        let experts = self.experts.as_ref().map_or(0, |of| {
            u64::from(of.n) * (n_mlp * hidden * u64::from(of.inner) + hidden) + n_mlp * hidden * u64::from(of.shared)
        });
        let mlps = self
            .layers
            .iter()
            .filter(|layer| layer.has_mlp)
            .map(|layer| if layer.has_experts { experts } else { dense });
        let attention = hidden * (2 * width + 2 * kv_width + if self.attention.has_gate { width } else { 0 });
        let recurrence = self.recurrence.map_or(0, |of| hidden * u64::from(of.n_cols() + of.n_heads * of.value_dim));
        let mixers = self.layers.iter().map(|layer| match layer.mixer {
            MixerKind::Attention => attention,
            MixerKind::Recurrence => recurrence,
            MixerKind::Convolution => 4 * hidden * hidden,
            MixerKind::None => 0,
        });
        let n_tables = if self.tied_embeddings { 1 } else { 2 };
        let positions = if is_gpt2 { u64::from(self.context) } else { 0 };
        hidden * (n_tables * u64::from(self.vocab) + positions) + mixers.sum::<u64>() + mlps.sum::<u64>()
    }

    /// Checks that the values agree with each other; the refusal names those that do not.
    fn checked(self) -> Result<ModelSpec, ParseError> {
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
        [Some(&self.rope), self.local_rope.as_ref()]
            .into_iter()
            .flatten()
            .try_for_each(|rope| rope.check(self.head_dim))?;
        self.check_families()?;
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
    /// Checks what only some families have.
    fn check_families(&self) -> Result<(), ParseError> {
        if self.layers.len() != self.n_layers as usize {
            return ParseError::malformed(format!(
                "{} layers are described, but the model has {}",
                self.layers.len(),
                self.n_layers
            ));
        }
        self.recurrence.as_ref().map_or(Ok(()), RecurrenceSpec::check)?;
        self.convolution.as_ref().map_or(Ok(()), ConvolutionSpec::check)?;
        if self.layers.iter().any(|layer| layer.window == Some(0)) {
            return ParseError::malformed("a layer has a window of 0 positions");
        }
        let ModelMultipliers { embedding, residual, logits } = self.factors;
        let clamps = self.experts.iter().flat_map(|of| of.clamp).flat_map(|clamp| [clamp.alpha, clamp.limit]);
        let caps = [Some(self.attention.scale), self.attention.cap, self.logits_cap, embedding, residual, logits];
        let caps = caps.into_iter().flatten().chain(clamps).chain(self.experts.map(|of| of.factor));
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
            None if self.layers.iter().any(|layer| layer.has_experts) => {
                ParseError::malformed("layers use experts, but the model has none")
            }
            _ => Ok(()),
        }
    }
}

/// Equal groups of at least two, of which enough are used.
fn are_groups(n: u32, n_used: u32, groups: u32, of_groups: u32) -> bool {
    let size = n.checked_div(groups).unwrap_or(0);
    size * groups == n && (1..=groups).contains(&of_groups) && n_used <= size * of_groups && (groups == 1 || size > 1)
}

fn is_positive(number: &f32) -> bool {
    number.is_finite() && *number > 0.0
}

impl RopeSpec {
    fn check(&self, head_dim: u32) -> Result<(), ParseError> {
        if self.dim > head_dim || !self.dim.is_multiple_of(2) {
            return ParseError::malformed(format!("a rope of {} does not fit heads of {head_dim}", self.dim));
        }
        if !(self.theta.is_finite() && self.theta >= 1.0) {
            return ParseError::malformed(format!("the rope's base is {}", self.theta));
        }
        match &self.scaling {
            RopeScaling::Long { short, long, .. }
                if [short, long].iter().any(|set| set.len() != self.dim as usize / 2) =>
            {
                ParseError::malformed(format!("{} and {} factors for a rope of {}", short.len(), long.len(), self.dim))
            }
            scaling => scaling.check(),
        }
    }
}

impl RopeScaling {
    fn check(&self) -> Result<(), ParseError> {
        let positive = is_positive;
        let sound = match self {
            RopeScaling::None => true,
            RopeScaling::Linear { factor } => positive(factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                [factor, low_freq_factor, high_freq_factor].into_iter().all(positive)
                    && high_freq_factor > low_freq_factor
                    && *original_context > 0
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, magnitude, .. } => {
                [factor, beta_fast, beta_slow, magnitude].into_iter().all(positive) && *original_context > 0
            }
            RopeScaling::Long { short, long, original_context, magnitude } => {
                short.iter().chain(long).chain([magnitude]).all(positive) && *original_context > 0
            }
            RopeScaling::Divisors(divisors) => divisors.iter().all(positive),
        };
        if sound { Ok(()) } else { ParseError::malformed(format!("the rope scaling {self:?} is invalid")) }
    }
}

/// The factor for rotated numbers under YaRN.
fn yarn_magnitude(factor: f32, scale: f32) -> f32 {
    if factor <= 1.0 { 1.0 } else { (0.1 * f64::from(scale) * libm::log(f64::from(factor)) + 1.0) as f32 }
}

fn length(name: &str, number: u64) -> Result<u32, ParseError> {
    match u32::try_from(number) {
        Ok(small) if number <= LENGTH_MAX => Ok(small),
        _ => ParseError::malformed(format!("{name} is {number}, which exceeds the limit of {LENGTH_MAX}")),
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
