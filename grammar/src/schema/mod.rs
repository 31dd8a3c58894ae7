//! JSON Schema to rules. Everything in a schema is enforced exactly or refused by its path; nothing is fetched.
//!
//! ```text
//! document ── places ──▶ claims on values ── expand ──▶ ways, each a list of facts ── writer ──▶ rules
//! ```
//!
//! A rule represents a set of claims on one value: `(schema, holds)`. The requirements on a value's parts are again a
//! set of claims. So references, also circular ones, end at a rule that already exists: `RuleQueue` returns it for
//! claims that it knows. `expand` refuses a reference that leads only to itself.
//!
//! `ClaimRules` owns the rules and those that are still to be defined. `ClaimSolver` answers which values satisfy
//! claims, and counts the work. `writer`, `arrays`, `unique` and `objects` are functions over these two. For the rule
//! of a part they need only its number, so none of them calls back.

mod arrays;
mod blank;
mod claims;
mod decimal;
mod document;
mod expand;
mod facts;
pub(crate) mod formats;
pub(crate) mod keywords;
mod multiples;
mod negative;
mod objects;
mod places;
mod positive;
mod read;
mod solver;
mod structures;
mod text;
mod unique;
mod values;
mod writer;

pub(crate) use writer::{write, write_parts};
