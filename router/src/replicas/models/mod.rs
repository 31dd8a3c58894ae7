//! Models by clients' names for them: the versions behind each name, and each model's tokenizer and template.
//!
//! Knows what replicas report to serve, and no stream. Read `routes` (names, versions and weights), `unserved` (those
//! that nobody serves), `text` (tokenizer and template of one model), then `table` (which model a request means).

pub mod routes;
pub mod table;
#[cfg(test)]
mod tests;
pub mod text;
pub mod unserved;
