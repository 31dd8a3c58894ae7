//! Joins the programs of the crate `tools` to the settings of this machine, and to a private server where they need one.

pub mod simulate;
pub mod verify;
