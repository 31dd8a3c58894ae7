//! Grammars from outside: what is wanted, through a matcher, over a vocabulary.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
mod kinds;
