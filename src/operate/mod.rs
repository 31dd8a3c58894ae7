//! What an operator asks: how a model would be placed, how a cluster that runs is, and to change it.

mod plan;
pub mod scale;
mod status;
pub mod top;

pub use plan::PlanCommand;
pub use status::StatusCommand;
