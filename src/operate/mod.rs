//! Commands for operators: plan a placement, and change a running cluster.

mod plan;
pub mod scale;

pub use plan::PlanCommand;
