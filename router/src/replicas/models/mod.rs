//! Models by clients' names for them: the versions behind each name, and each model's tokenizer and template.
//!
//! Knows what replicas report to serve, and no stream. Read `routes` (names, versions and weights), `unserved`
//! (versions without a replica), `text` (tokenizer, template and dialect of one model, with `conversation` and
//! `prompted_tools`, which read a chat for its template, and `talk`, how the answer is read), then `table` (which model
//! a request means).

mod conversation;
mod prompted_tools;
pub mod routes;
pub mod table;
pub mod talk;
#[cfg(test)]
mod tests;
pub mod text;
pub mod unserved;
