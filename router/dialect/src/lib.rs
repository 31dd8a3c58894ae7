//! How a family of models writes tool calls and thoughts: reads them out of a text that comes in pieces, and says which
//! text a call must have. Knows nothing of tokens, prompts, HTTP or time.
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
pub use piece::Piece;
pub use speech::Speech;
pub use thoughts::Opening;
pub use tools::{Tool, ToolChoice, Tools};
