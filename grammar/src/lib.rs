//! Schemas, regular expressions and grammars to masks: which tokens may come next. Knows nothing of requests, text
//! decoding, sampling or clocks, and is the only crate that knows the grammar engine.
//!
//! ```text
//! router:  GrammarSpec ── compile ──▶ types::Grammar, checked
//! worker:  Vocabulary + Grammar ──▶ Matcher ──▶ Mask
//! ```

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic"))]

mod compile;
mod ebnf;
mod engine;
mod lark;
mod limits;
mod mask;
mod matcher;
mod refused;
mod relax;
mod rules;
mod schema;
mod spec;
mod specials;
mod tags;
mod thinking;
mod vocabulary;
mod words;

pub use compile::compile;
pub use engine::{ENGINE, digest};
pub use limits::GrammarLimits;
pub use mask::TokenMask;
pub use matcher::{Matcher, MatcherError};
pub use refused::GrammarRefused;
pub use spec::GrammarSpec;
pub use thinking::ThinkingBudget;
pub use vocabulary::{BadVocabulary, Vocabulary};
