//! JSON Schema to rules. Everything in a schema is enforced exactly or refused by its path; nothing is fetched.
//!
//! ```text
//! document ── places ──▶ claims on values ── expand ──▶ ways, each a list of facts ── writer ──▶ rules
//! ```
//!
//! A rule represents a set of claims on one value: `(schema, holds)`. The requirements on a value's parts are again a
//! set of claims. So references, also circular ones, end at a rule that already exists.

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

use structures::ValueSchemas;
pub(crate) use writer::{write, write_parts};
