//! Commands for operators: plan a placement, look at a running cluster, and change it.

mod fit;
mod logs;
mod plan;
mod ps;
pub mod scale;
mod server;
mod status;
pub mod top;

pub use fit::fit;
pub use logs::LogsCommand;
pub use plan::PlanCommand;
pub use ps::PsCommand;
pub use status::StatusCommand;
