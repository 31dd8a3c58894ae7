//! Mixtures of experts: the router's choice, and the weighted sum over the chosen experts.

use super::{Memory, MlpActivation};
use std::ops::Range;

/// How a router's scores become a choice of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    pub n_experts: usize,
    /// Number of experts chosen for a row.
    pub n_used: usize,
    /// Whether the chosen experts' weights are divided by their sum.
    pub normalized: bool,
    pub scoring: Scoring,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scoring {
    Softmax,
    /// A sigmoid each. The choice is made within the best `n_used` of `n_groups` equal groups, each of which counts as
    /// much as its two best; weights are multiplied by `factor`.
    Sigmoid {
        n_groups: usize,
        n_used: usize,
        factor: f32,
    },
}

/// More groups than any router has.
const GROUPS_MAX: usize = 32;

impl Routing {
    /// Whether a choice can always be made.
    pub(crate) fn is_possible(&self) -> bool {
        let Routing { n_experts, n_used, scoring, .. } = *self;
        let within = match scoring {
            Scoring::Softmax => n_experts,
            Scoring::Sigmoid { n_groups, n_used, .. } => {
                let size = n_experts.checked_div(n_groups).unwrap_or(0);
                let is_cut = size * n_groups == n_experts && n_used <= n_groups && n_groups <= GROUPS_MAX;
                if is_cut { size * n_used } else { 0 }
            }
        };
        n_used > 0 && n_used <= within
    }
}

/// This rank's experts of a layer.
pub struct ExpertStack<M: Memory + ?Sized> {
    pub all: Vec<Expert<M>>,
    pub activation: MlpActivation,
    /// Of all of them, one after another: [n, 2 * inner] and [n, hidden].
    pub biases: Option<[M::Vector; 2]>,
}

/// The products of one expert.
pub struct Expert<M: Memory + ?Sized> {
    pub gate_up: M::Matrix, // [2 * inner, hidden], or without a gate [inner, hidden]
    pub down: M::Matrix,    // [hidden, inner]
}

pub trait Experts: Memory {
    /// Softmax over each row's scores, or a sigmoid of each, then the best of them, the lower id where two are equal.
    /// scores: [n_rows, n_experts]; correction: [n_experts], added to sigmoids for the choice alone.
    fn route(&self, scores: &Self::Buffer, correction: Option<&Self::Vector>, n_rows: usize, routes: &mut Self::Routes);
    /// Multiplies the weight of each choice by its expert's factor: the last rounding of the weights. After `route`.
    /// factors: [n_experts]
    fn scale_choices(&self, factors: &Self::Vector, routes: &mut Self::Routes);
    /// Each row's weighted sum over its experts, by the tree whose leaves are the experts: one plane for each aligned
    /// run that this rank owns. `experts` are those of the runs, in order.
    /// x: [n_rows, hidden], out: [n_runs * n_rows, hidden]
    fn apply_experts(
        &self,
        x: &Self::Buffer,
        experts: &ExpertStack<Self>,
        runs: &[Range<u32>],
        n_rows: usize,
        routes: &mut Self::Routes,
        out: &mut Self::Buffer,
    );
}
