//! How a family of models writes tool calls and thoughts: reads them out of a text that comes in pieces, and says which
//! text a call must have. Knows nothing of tokens, prompts, HTTP or time.
//!
//! ```text
//! template ──▶ Dialect ──▶ Speech ── push(text) ──▶ Piece, Piece, ..
//!                 └──────▶ enforced(tools, choice) ──▶ a structural tag
//! ```

mod dialect;
mod enforce;
mod forms;
mod json;
mod marker;
mod names;
mod piece;
mod sink;
mod speech;
mod styles;
mod thoughts;
mod tools;

pub use dialect::{Dialect, Opening, UnknownDialect};
pub use piece::Piece;
pub use speech::Speech;
pub use tools::{Tool, ToolChoice, Tools};
