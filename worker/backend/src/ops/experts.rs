//! Mixtures of experts: the router's choice, and the weighted sum over the chosen experts.

use super::Memory;
use std::ops::Range;

/// How a router's scores become a choice of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    pub n_experts: usize,
    /// Number of experts chosen for a row.
    pub n_used: usize,
    /// Whether the chosen experts' weights are divided by their sum.
    pub normalized: bool,
}

/// The gated MLP of one expert.
pub struct Expert<M: Memory + ?Sized> {
    pub gate_up: M::Matrix, // [2 * inner, hidden]
    pub down: M::Matrix,    // [hidden, inner]
}

pub trait Experts: Memory {
    /// Softmax over each row's scores, then the best of them, the lower id where two are equal.
    /// scores: [n_rows, n_experts]
    fn route(&self, scores: &Self::Buffer, n_rows: usize, routes: &mut Self::Routes);
    /// Each row's weighted sum over its experts, by the tree whose leaves are the experts: one plane for each aligned
    /// run that this rank owns. `experts` are those of the runs, in order.
    /// x: [n_rows, hidden], out: [n_runs * n_rows, hidden]
    fn experts(
        &self,
        x: &Self::Buffer,
        experts: &[Expert<Self>],
        runs: &[Range<u32>],
        n_rows: usize,
        routes: &mut Self::Routes,
        out: &mut Self::Buffer,
    );
}
