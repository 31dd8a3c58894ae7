//! How the answer to a chat is read: which dialect the model writes, which tools it may call, and where the prompt
//! ends. Knows no tokens of an answer.

use checkpoint::Tokenizer;
use dialect::{AnswerParser, AnswerStart, Dialect, ThoughtTexts, ToolChoice, Tools};
use grammar::ThinkingBudget;
use serde_json::{Value, json};
use std::sync::Arc;
use types::Token;

/// Where a tool of a chat has the schema of its arguments.
pub const PARAMETERS: &str = "function.parameters";

/// What the reading of an answer depends on, beside its tokens. Cheap to clone.
#[derive(Clone)]
pub struct AnswerParseContext {
    pub dialect: Dialect,
    /// Empty if no calls are read.
    pub tools: Tools,
    pub choice: ToolChoice,
    pub is_parallel: bool,
    pub includes_reasoning: bool,
    pub opening: AnswerStart,
    /// Whether an answer that does not continue a thought may begin with one.
    pub may_open_thought: bool,
    /// The most tokens of thought, if the client limits them.
    pub thinking_token_budget: Option<u32>,
    /// Special tokens that the dialect reads, even if they are not shown.
    pub markers: Arc<[Token]>,
}

impl AnswerParseContext {
    /// Returns a reader for one answer, or None if an answer is text and nothing else.
    pub fn answer_parser(&self) -> Option<AnswerParser> {
        let reads_calls = self.dialect.has_calls() && !self.tools.is_empty();
        let reads = reads_calls || self.dialect.has_thoughts();
        reads.then(|| self.dialect.answer_parser(&self.tools, self.opening))
    }

    /// Whether the answer may begin with a thought, or continues one.
    pub fn may_think(&self) -> bool {
        self.dialect.has_thoughts() && (self.opening == AnswerStart::Thought || self.may_open_thought)
    }

    /// Returns the limit of the answer's thought, or None if it has no limit or can have no thought.
    pub fn thinking_budget(&self) -> Option<ThinkingBudget> {
        let tokens_max = self.thinking_token_budget.filter(|_| self.may_think())?;
        let ThoughtTexts { opens, closes, repeats } = self.dialect.thought_texts()?;
        let owned = |texts: Vec<&str>| texts.into_iter().map(str::to_owned).collect();
        let is_open = self.opening == AnswerStart::Thought;
        Some(ThinkingBudget { tokens_max, is_open, repeats, opens: owned(opens), closes: owned(closes) })
    }

    /// Returns the structural tag of an answer with these calls, or None if every text is allowed.
    pub fn structural_tag(&self, choice: &ToolChoice) -> Option<Value> {
        self.dialect.structural_tag(&self.tools, choice, self.is_parallel, self.opening, self.may_open_thought)
    }

    /// Returns the format of at least one call, without a thought before it.
    pub fn calls_format(&self) -> Option<Value> {
        let choice = ToolChoice::Required;
        let tag = self.dialect.structural_tag(&self.tools, &choice, self.is_parallel, AnswerStart::Answer, false);
        tag.map(|mut tag| tag["format"].take())
    }

    /// Returns the structural tag of a format behind the thought that the answer has, or may have.
    pub fn put_after_thought(&self, format: Value) -> Value {
        let format = self.dialect.put_after_thought(format, self.opening, self.may_open_thought);
        json!({ "type": "structural_tag", "format": format })
    }

    /// Returns the client's settings for the reading, for the request's fingerprint.
    pub fn fingerprint_text(&self) -> String {
        format!("{:?} {} {}", self.choice, self.is_parallel, self.includes_reasoning)
    }
}

/// Returns the tokens of a dialect's markers.
pub(super) fn markers(dialect: &Dialect, tokenizer: &Tokenizer) -> Arc<[Token]> {
    dialect.markers().into_iter().filter_map(|marker| tokenizer.added_token(marker)).collect()
}

/// Whether an answer to this prompt may begin with a thought: not if the prompt ends with one that is over.
pub(super) fn may_open_thought(dialect: &Dialect, opening: AnswerStart, prompt: &str) -> bool {
    let end = prompt.trim_end();
    let is_over = opening == AnswerStart::Answer && dialect.markers().iter().any(|marker| end.ends_with(marker));
    dialect.has_thoughts() && !is_over
}
