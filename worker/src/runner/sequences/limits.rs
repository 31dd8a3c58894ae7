//! What a rank can hold and run at once, and how a step violates it or contradicts the rank's state. Has no knowledge
//! of sequences.

use crate::runner::guesses::GuessConfig;
use checkpoint::Pooling;
use types::{CacheGroup, DRAFT_ROWS_MAX, RequestId, SCORED_ROWS_MAX, Token};

/// The limits of what this rank can hold and run at once. A step beyond them breaks the protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceLimits {
    pub n_vocab: u32,
    /// Positions of one sequence.
    pub context: u32,
    pub groups: Vec<CacheGroup>,
    /// The size of each group's pool.
    pub n_blocks: Vec<u32>,
    /// The most rows of one step.
    pub rows_max: usize,
    /// The most sequences held, and so the most slices of one step.
    pub running_max: usize,
    /// Whether freed blocks are cleared, and therefore never shared.
    pub zero_kv: bool,
    /// How the sampling rank guesses.
    pub guesses: GuessConfig,
    /// How the hidden states of a prompt become one vector.
    pub pooling: Pooling,
}

impl SequenceLimits {
    /// Returns the most rows of one step whose logits are needed: one per slice, as no slice is empty, and the rows
    /// that are scored or that draw behind a draft.
    pub fn outputs_max(&self) -> usize {
        self.rows_max.min(self.running_max + SCORED_ROWS_MAX as usize)
    }

    /// Whether nothing is kept of a request's positions: each request is one slice.
    pub fn keeps_nothing(&self) -> bool {
        self.groups.is_empty()
    }

    /// Returns the most words of a message on all draws of a step.
    pub fn message_words_max(&self) -> usize {
        // Each slice has a token and two ends; the rest is drafts that held, and guesses.
        3 * self.running_max + DRAFT_ROWS_MAX as usize + self.guesses.n_max_in_step()
    }

    /// Returns whether positions can be computed again after a late draw or a rejected draft. They cannot if blocks
    /// behind windows are cleared at once, because a repeated pass may still read those.
    pub fn can_recompute(&self) -> bool {
        !self.zero_kv || self.groups.iter().all(CacheGroup::keeps_all)
    }
}

/// How a step contradicts this rank's state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepViolation {
    #[error("this rank does not have request {0}")]
    Unknown(RequestId),
    #[error("request {id} continues at {start}, but {n_computed} positions are computed")]
    Gap { id: RequestId, start: u32, n_computed: u32 },
    #[error("request {id} has an empty slice at {start}")]
    Empty { id: RequestId, start: u32 },
    #[error("request {id} draws position {position} again, which was not late")]
    NotLate { id: RequestId, position: u32 },
    #[error("request {id} has a slice with {n_draft} drafts, but {n_guess} tokens are guessed")]
    NotGuessed { id: RequestId, n_draft: u16, n_guess: usize },
    #[error("request {id} has a slice up to {end}, but its log has {n_tokens} tokens")]
    NotInLog { id: RequestId, end: u32, n_tokens: u32 },
    #[error("request {id} of {n_tokens} tokens has a slice up to {end} that is not the whole of it")]
    NotWhole { id: RequestId, end: u32, n_tokens: u32 },
    #[error("request {0} has two slices in one step")]
    TwoSlices(RequestId),
    #[error("request {id} reaches {end} positions, but the context has {context}")]
    TooLong { id: RequestId, end: u32, context: u32 },
    #[error("request {0} starts without tokens")]
    NoTokens(RequestId),
    #[error("request {id} has token {token}, but the vocabulary has {n_vocab}")]
    NoSuchToken { id: RequestId, token: Token, n_vocab: u32 },
    #[error("request {id} gets block {block}, but there are {n_blocks}")]
    NoSuchBlock { id: RequestId, block: u32, n_blocks: u32 },
    #[error("two slices write block {block}, the second of request {id}")]
    WrittenTwice { id: RequestId, block: u32 },
    #[error("request {id} needs {needed} more blocks, but {n_left} are left")]
    TooFewBlocks { id: RequestId, needed: usize, n_left: usize },
    #[error("step {step} has {n_draws} draws, but {n} words arrived for its drawn tokens")]
    NotAsManyTokens { step: u64, n: usize, n_draws: usize },
    #[error("the step has {0} blocks too many")]
    BlocksLeftOver(usize),
    #[error("the step has {n} rows, but at most {rows_max} are allowed")]
    TooManyRows { n: usize, rows_max: usize },
    #[error("the step has {n} rows with logits, but at most {outputs_max} are allowed")]
    TooManyOutputs { n: usize, outputs_max: usize },
    #[error("the step has {n} sequences, but at most {running_max} are allowed")]
    TooManySequences { n: usize, running_max: usize },
}
