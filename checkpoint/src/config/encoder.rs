//! What distinguishes encoders, and what a request for a prompt's hidden states returns. Knows no weights.

use crate::error::ParseError;
use std::fmt;

/// More kinds of tokens, positions before the first, or buckets than in any model.
const ROWS_MAX: u32 = 1 << 16;

/// An encoder: each position of a text sees all others, and all are computed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncoderSpec {
    /// The rows of a table of kinds of tokens, which is added to the embedding: the second text of a pair has the
    /// kind 1, everything else the kind 0. Zero: there is no table.
    pub n_token_types: u32,
    /// The rows of a folder's table of positions before that of the first token.
    pub n_rows_before_first: u32,
    /// The rows of a table of numbers that are added to scores by the distance between query and key. Zero: there is
    /// no table.
    pub n_distance_buckets: u32,
    /// The first layer's attention reads the stream without a norm.
    pub skips_first_norm: bool,
}

impl EncoderSpec {
    pub const PLAIN: EncoderSpec =
        EncoderSpec { n_token_types: 0, n_rows_before_first: 0, n_distance_buckets: 0, skips_first_norm: false };

    pub(super) fn check(&self) -> Result<(), ParseError> {
        let lengths = [self.n_token_types, self.n_rows_before_first, self.n_distance_buckets];
        match lengths.into_iter().find(|length| *length > ROWS_MAX) {
            Some(length) => ParseError::malformed(format!("a table of an encoder has {length} rows")),
            None => Ok(()),
        }
    }
}

/// How the hidden states of a prompt become one vector, and what follows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolingSpec {
    pub kind: Pooling,
    /// The layers that the pooled vector goes through, in order.
    pub layers: Vec<PooledLayer>,
    /// The last layer's outputs are scores of these labels. Empty: the outputs are an embedding.
    pub labels: Vec<String>,
    pub scores: ScoreActivation,
    pub prefixes: EmbeddingPrefixes,
}

/// Which beginnings of an embedding are embeddings too: models are trained for that, or not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EmbeddingPrefixes {
    #[default]
    None,
    OfAnyLength,
    OfLengths(Vec<u32>),
}

impl EmbeddingPrefixes {
    /// Whether the first `n` of an embedding's `own` numbers are one.
    pub fn contain(&self, n: u32, own: u32) -> bool {
        let is_prefix = match self {
            EmbeddingPrefixes::None => false,
            EmbeddingPrefixes::OfAnyLength => (1..own).contains(&n),
            EmbeddingPrefixes::OfLengths(all) => all.contains(&n) && n < own,
        };
        is_prefix || n == own
    }
}

impl fmt::Display for EmbeddingPrefixes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EmbeddingPrefixes::None => f.write_str("the model has no shorter embeddings"),
            EmbeddingPrefixes::OfAnyLength => f.write_str("or less"),
            EmbeddingPrefixes::OfLengths(all) => write!(f, "or one of {all:?}"),
        }
    }
}

impl PoolingSpec {
    /// The length of the vector that a request gets, of a model with hidden states of this length.
    pub fn n_outputs(&self, hidden: u32) -> u32 {
        self.layers.last().map_or(hidden, |layer| layer.n_outputs)
    }

    /// Whether the outputs are scores of labels.
    pub fn is_classifier(&self) -> bool {
        !self.labels.is_empty()
    }
}

/// How a classifier's outputs become scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScoreActivation {
    /// They are the scores.
    #[default]
    None,
    Sigmoid,
    /// They sum to one.
    Softmax,
}

impl ScoreActivation {
    /// That of a classifier with so many labels, where no file names one.
    pub fn of_labels(n: usize) -> ScoreActivation {
        if n == 1 { ScoreActivation::Sigmoid } else { ScoreActivation::Softmax }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    #[default]
    Mean,
    /// The state of the first position.
    First,
    /// The state of the last position.
    Last,
    /// The largest of each number.
    Max,
}

/// A product, an activation and a norm, each on one vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PooledLayer {
    /// The file's name for the matrix and its bias, without `.weight` and `.bias`.
    pub product: String,
    pub n_inputs: u32,
    pub n_outputs: u32,
    pub activation: PooledActivation,
    /// The file's name for a LayerNorm, without `.weight`.
    pub norm: Option<String>,
    /// Whether the file has a bias of the product, and one of the norm.
    pub biases: [bool; 2],
}

impl PooledLayer {
    /// A product with this name in the file.
    pub fn product(name: &str, n_inputs: u32, n_outputs: u32) -> PooledLayer {
        let activation = PooledActivation::None;
        PooledLayer { product: name.to_owned(), n_inputs, n_outputs, activation, norm: None, biases: [false; 2] }
    }

    /// The same layer with an activation.
    #[must_use]
    pub fn with(self, activation: PooledActivation) -> PooledLayer {
        PooledLayer { activation, ..self }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PooledActivation {
    None,
    Tanh,
    GeluErf,
}
