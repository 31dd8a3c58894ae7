//! Models as clients name them: the versions behind each name, and how each is read and written.
//!
//! Knows what replicas say that they serve, and no stream. Read `routes` (names, versions and weights), `text` (how one
//! model is read), then `table` (which model a request means).

pub mod routes;
pub mod table;
#[cfg(test)]
mod tests;
pub mod text;
