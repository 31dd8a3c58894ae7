//! Joins the programs of the crate `tools` to this machine's settings, and to a private server where they need one.

pub mod run;
pub mod simulate;
pub mod verify;
