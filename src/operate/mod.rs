//! Commands for operators: plan a placement, and change a running cluster.

mod fit;
mod plan;
pub mod scale;

pub use fit::fit;
pub use plan::PlanCommand;
