//! The parts that a tokenizer is made of, whatever file they are read from.

use crate::tokenizer::pieces::TokenBytes;
use tokenizers::pipeline::PipelineTokenizer;
use types::Tokens;

pub(super) struct TokenizerParts {
    pub pipeline: PipelineTokenizer,
    pub pieces: TokenBytes,
    /// The tokens that `add_special` puts before a text if the pipeline does not.
    pub before: Tokens,
    pub after: Tokens,
    /// Whether `after` stands twice between the texts of a pair, as in XLM-R.
    pub doubles_end: bool,
}
