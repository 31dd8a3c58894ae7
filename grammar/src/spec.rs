//! The constraints that a client can put on an answer. Knows nothing of how they are compiled.

use serde_json::Value;

/// One kind of constraint, as a face read it from a request.
#[derive(Clone, Debug, PartialEq)]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema accepts. The whole schema is enforced, or refused by name.
    JsonSchema(Value),
    /// The whole answer matches this regular expression.
    Regex(String),
    /// The answer is one of these texts.
    Choice(Vec<String>),
    /// Lark, as the engine reads it.
    Lark(String),
    /// EBNF in the form that vLLM and XGrammar read.
    Ebnf(String),
    /// llama.cpp's form of BNF.
    Gbnf(String),
    /// Free text and constrained parts in turns: the older form with `structures` and `triggers`, or the one with
    /// `format`.
    StructuralTag(Value),
}
