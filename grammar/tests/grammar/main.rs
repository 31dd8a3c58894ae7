//! Tests grammars from outside: a constraint, through a matcher, over a vocabulary.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
mod ebnf;
mod hostile;
mod kinds;
mod relaxed;
mod schemas;
mod tags;
mod thinking;
mod walks;
