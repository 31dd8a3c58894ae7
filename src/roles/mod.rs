//! The roles: how each is built from settings, and how each runs in a process of its own. They exchange the same frames
//! however they are started.

mod api_tls;
pub mod coordinator;
mod coordinator_source;
pub mod drafts;
pub mod handover;
mod keys;
mod page;
mod presence;
pub mod process;
pub mod router;
mod routes;
mod text;
pub mod worker;
