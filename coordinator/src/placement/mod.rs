//! Which machine holds what: a pure function from the machines to a blueprint, or to the figures of why there is none.
//!
//! Read `plan` (the way from machines to a blueprint), with `assign` (which machine takes which rank), `cut` (where the
//! model is cut), `pools` and `shape` (what that takes); then `fewer` (a smaller grid) and `predict` with `roofline`
//! (how fast it will be).

mod assign;
mod blueprint;
mod cut;
mod draft;
mod fewer;
mod machine;
mod plan;
mod pools;
mod predict;
mod roofline;
mod shape;
mod table;
#[cfg(test)]
mod tests;
mod unplaceable;

pub use blueprint::{Blueprint, PlacementPolicy, PoolSize, Shard, ShortenedContext};
pub use draft::DraftModelCost;
pub use fewer::plan_fewer;
pub use machine::{Inventory, Machine};
pub use plan::plan;
pub use predict::{Bottleneck, Prediction, predict};
pub use roofline::{Link, Links, Roofline, Speed, StageTime, StepWork};
pub use shape::{ExpertShape, ModelShape};
pub use unplaceable::{STAGES_MAX, Unplaceable, UnplaceableReason};
