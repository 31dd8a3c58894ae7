//! The requests of the routers that are attached, and what those are told. Knows no ranks.

mod adopt;
pub mod names;
pub mod pace;
pub mod routers;
pub mod traces;
