//! Commands for operators: plan a placement, look at a running cluster, and change it.

mod plan;
pub mod scale;
mod status;
pub mod top;

pub use plan::PlanCommand;
pub use status::StatusCommand;
