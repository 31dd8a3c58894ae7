//! The parts of a spec, and the checks that a file's values must pass. Knows no family.

use crate::config::MixerSpec;
use crate::error::ParseError;

/// What parts of a pass are multiplied by, where it is not one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ModelMultipliers {
    /// Rows of the embedding.
    pub embedding: Option<f32>,
    /// A sublayer's output, before it is added to the stream.
    pub residual: Option<f32>,
    pub logits: Option<f32>,
    /// The outputs of attention and of a recurrence, before they are added.
    pub attention: Option<f32>,
    pub recurrence: Option<f32>,
    /// The gate of an MLP before its activation, and the MLP's output.
    pub mlp_gate: Option<f32>,
    pub mlp: Option<f32>,
}

impl ModelMultipliers {
    pub const NONE: ModelMultipliers = ModelMultipliers {
        embedding: None,
        residual: None,
        logits: None,
        attention: None,
        recurrence: None,
        mlp_gate: None,
        mlp: None,
    };

    pub(super) fn all(&self) -> [Option<f32>; 7] {
        let ModelMultipliers { embedding, residual, logits, attention, recurrence, mlp_gate, mlp } = *self;
        [embedding, residual, logits, attention, recurrence, mlp_gate, mlp]
    }
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
    /// Each head of V is divided by its root mean square.
    pub norms_values: bool,
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
    /// They are beside the layer's MLP, not in its place. Both parts read the stream, and each has norms of its own.
    pub is_beside_mlp: bool,
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

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerSpec {
    pub mixer: MixerSpec,
    /// A query attends to this many positions, its own among them. None: to all.
    pub window: Option<u32>,
    pub positions: PositionEncoding,
    /// There is an MLP behind the mixer, or alone.
    pub has_mlp: bool,
    /// Its MLP is a mixture of experts.
    pub has_experts: bool,
    /// The heads of its keys and values, where they are not the model's.
    pub kv_heads: Option<KvHeads>,
    /// The layer whose keys and values it reads, in place of its own.
    pub kv_of: Option<u32>,
    /// The width of its MLP, where it is not the model's.
    pub inner: Option<u32>,
}

impl LayerSpec {
    /// A layer with nothing in it.
    pub const EMPTY: LayerSpec = LayerSpec {
        mixer: MixerSpec::None,
        window: None,
        positions: PositionEncoding::None,
        has_mlp: false,
        has_experts: false,
        kv_heads: None,
        kv_of: None,
        inner: None,
    };
}

/// The heads of a layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvHeads {
    pub n: u32,
    /// Their length, which is also that of query heads.
    pub dim: u32,
    /// Values are the keys before norm and rope: they have no projection.
    pub values_are_keys: bool,
}

/// The length of the heads that the main rope rotates.
pub fn rope_head_dim(layers: &[LayerSpec], head_dim: u32) -> u32 {
    let rotated = layers.iter().find(|layer| layer.positions == PositionEncoding::Rope);
    rotated.and_then(|layer| layer.kv_heads).map_or(head_dim, |heads| heads.dim)
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

/// Larger than in any model, and small enough that no product of two overflows.
pub const LENGTH_MAX: u64 = 1 << 24;
pub const LAYERS_MAX: u64 = 4096;

/// Equal groups of at least two, of which enough are used.
pub fn are_groups(n: u32, n_used: u32, groups: u32, of_groups: u32) -> bool {
    let size = n.checked_div(groups).unwrap_or(0);
    size * groups == n && (1..=groups).contains(&of_groups) && n_used <= size * of_groups && (groups == 1 || size > 1)
}

pub fn is_positive(number: &f32) -> bool {
    number.is_finite() && *number > 0.0
}

impl RopeSpec {
    pub(super) fn check(&self, head_dim: u32) -> Result<(), ParseError> {
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
    /// Stands for infinity in the files of llama.cpp: a pair with this divisor does not turn.
    pub const NEVER: f32 = 1e30;

    /// Only the first `n` of all pairs turn, each as far as it would among all.
    pub fn of_first_pairs(n: u32, all: u32) -> RopeScaling {
        RopeScaling::Divisors((0..all).map(|i| if i < n { 1.0 } else { RopeScaling::NEVER }).collect())
    }

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
pub fn yarn_magnitude(factor: f32, scale: f32) -> f32 {
    if factor <= 1.0 { 1.0 } else { (0.1 * f64::from(scale) * libm::log(f64::from(factor)) + 1.0) as f32 }
}

pub fn length(name: &str, number: u64) -> Result<u32, ParseError> {
    match u32::try_from(number) {
        Ok(small) if number <= LENGTH_MAX => Ok(small),
        _ => ParseError::malformed(format!("{name} is {number}, which exceeds the limit of {LENGTH_MAX}")),
    }
}
