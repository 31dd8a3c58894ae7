//! Structural tags: free text and constrained parts by turns. A value in vLLM's older form, or XGrammar's with
//! `format`, to rules.

mod free;
mod literal;
mod parameters;
mod write;

pub(crate) use write::write;
