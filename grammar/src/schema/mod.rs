//! JSON Schema to rules. What a schema says is enforced exactly or refused by its path; nothing is fetched.
//!
//! ```text
//! document ── places ──▶ claims on values ── expand ──▶ ways, each a list of facts ── writer ──▶ rules
//! ```
//!
//! A rule stands for a set of claims on one value: `(schema, holds)`. What a value's parts must satisfy is again a
//! set of claims, so that references, also circular ones, end at a rule that is there already.

mod arrays;
mod decimal;
mod expand;
mod facts;
pub(crate) mod formats;
mod judge;
pub(crate) mod keywords;
mod multiples;
mod negative;
mod objects;
mod places;
mod positive;
mod read;
mod structures;
mod text;
mod unique;
mod values;
mod writer;

use structures::Structures;
pub(crate) use writer::{write, write_parts};
