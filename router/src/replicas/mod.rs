//! Which replicas there are, and which one gets a request: links begin and end here as the store reports, and a request
//! finds the model, the version and the replica that answer it.
//!
//! Knows no client and no token's text. Read `roster` (which replicas there are), `pool` (which one gets a request),
//! `models/` (by which name and version), `topology` (the view for people).

mod compare;
pub mod models;
pub mod pool;
pub mod roster;
pub mod topology;
