//! Models by clients' names for them: the versions behind each name, and each model's tokenizer and template.
//!
//! Knows what replicas report to serve, and no stream. Read `routes` (names, versions and weights), `unserved`
//! (versions without a replica), `text` (tokenizer, template and dialect of one model), then `table` (which model a
//! request means). `text` uses `conversation` and `prompted_tools`, which read a chat for its template, `truncation`,
//! which cuts a prompt, and `talk`, how the answer is read.

mod conversation;
mod prompted_tools;
pub mod routes;
pub mod table;
pub mod talk;
#[cfg(test)]
mod tests;
pub mod text;
pub mod truncation;
pub mod unserved;
