//! The tool calls and thoughts of each family of models: reads them from a text that arrives in pieces, and builds the
//! structural tag that enforces a call. Has no knowledge of tokens, prompts, HTTP or time.
//!
//! ```text
//! template ──▶ Dialect ──▶ Speech ── push(text) ──▶ Piece, Piece, ..
//!                 └──────▶ enforced(tools, choice) ──▶ a structural tag
//! ```

mod dialect;
mod enforce;
mod families;
mod forms;
mod json;
mod marker;
mod names;
mod piece;
mod sink;
mod speech;
mod styles;
mod tag;
mod thoughts;
mod tools;

pub use dialect::{Dialect, ThoughtTexts, UnknownDialect};
pub use json::StringDecoder;
pub use piece::AnswerPiece;
pub use speech::AnswerParser;
pub use thoughts::AnswerStart;
pub use tools::{Tool, ToolChoice, Tools};
