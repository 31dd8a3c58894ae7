//! The roles: what each is built from, and each in a process by itself. Whatever starts them, they send each other the
//! same frames.

pub mod coordinator;
pub mod handover;
mod keys;
mod page;
mod presence;
pub mod process;
pub mod router;
mod routes;
mod whereabouts;
pub mod worker;
