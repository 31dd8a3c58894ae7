//! The stream to a coordinator: one task owns it, and the table of this router's requests at the replica. Knows tokens
//! and positions, no text and no clients.
//!
//! When a coordinator is lost, no client loses its stream. The table holds each request's token log, and any replica
//! with the same policy digest can continue from prompt and output so far. Another replica that is ready gets the
//! request; if there is none, the first that becomes ready, perhaps the same one. A request's entry has all that
//! another link needs to continue it.
//!
//! Read `handle` (for the rest of the router), `request` (a running request), `task` (the loop) with `event` (what
//! wakes it), `receive` (what frames mean) and `moves` (which requests are sent, and which leave), then the owners
//! that the task consists of: `connection` and `outbox` (the stream), `replica` (what is known of it), `table` (the
//! requests, and how one gets to another link) and `place` with `peers` (what links know of each other).

mod absence;
mod beats;
pub mod budget;
mod condition;
mod connection;
mod event;
pub mod handle;
mod moves;
mod outbox;
pub mod peers;
mod place;
mod receive;
mod replica;
pub mod request;
mod table;
pub mod target;
pub mod task;
#[cfg(test)]
mod tests;
pub mod ticket;
pub mod versions;
pub mod view;
