//! Mixtures of experts: the choice of experts, and their weighted sum for each row.
//!
//! Rows are grouped by expert only to speed up the products: a row's bits do not depend on its neighbours. The outputs
//! of a row's experts are added by the leaves' tree, whose leaves are the experts; absent ones are skipped.

use super::rows::{largest, sum_exp};
use super::{Buffer, Cpu, Isa};
use crate::cpu::math::exp;
use crate::cpu::memory::Shared;
use crate::{Error, Expert, Experts, Memory, Pointwise, Result, Routing};
use std::ops::Range;

/// The chosen experts of a pass, and the buffers to compute with them.
pub struct Routes {
    routing: Routing,
    n_rows: usize,
    /// [rows_max, n_used]: each row's chosen experts in ascending order, with their weights.
    chosen: Vec<u32>,
    weights: Vec<f32>,
    /// The choices in order of expert, then row: `order[starts[e]..starts[e + 1]]` are those of expert e.
    order: Vec<u32>,
    starts: Vec<u32>,
    x: Buffer,       // [rows_max, hidden], the rows of one expert
    gate_up: Buffer, // [rows_max, 2 * inner]
    inner: Buffer,   // [rows_max, inner]
    y: Buffer,       // [rows_max, hidden]
    made: Buffer,    // [rows_max * n_used, hidden], by choice
}

impl Routes {
    pub(crate) fn new(cpu: &Cpu, rows_max: usize, hidden: usize, inner: usize, routing: Routing) -> Result<Routes> {
        let Routing { n_experts, n_used, .. } = routing;
        let too_big = || Error::Shape(format!("{n_used} of {n_experts} experts for {rows_max} rows"));
        let n_choices = rows_max.checked_mul(n_used).filter(|n| u32::try_from(*n).is_ok()).ok_or_else(too_big)?;
        if n_used == 0 || n_used > n_experts {
            return Err(too_big());
        }
        Ok(Routes {
            routing,
            n_rows: 0,
            chosen: vec![0; n_choices],
            weights: vec![0.0; n_choices],
            order: vec![0; n_choices],
            starts: vec![0; n_experts + 1],
            x: cpu.buffer(rows_max, hidden)?,
            gate_up: cpu.buffer(rows_max, 2 * inner)?,
            inner: cpu.buffer(rows_max, inner)?,
            y: cpu.buffer(rows_max, hidden)?,
            made: cpu.buffer(n_choices, hidden)?,
        })
    }

    /// A row's chosen experts in ascending order, and their weights.
    pub fn of(&self, row: usize) -> (&[u32], &[f32]) {
        let n = self.routing.n_used;
        (&self.chosen[row * n..][..n], &self.weights[row * n..][..n])
    }

    /// A counting sort of the choices by expert.
    fn group(&mut self) {
        let chosen = &self.chosen[..self.n_rows * self.routing.n_used];
        self.starts.fill(0);
        chosen.iter().for_each(|expert| self.starts[*expert as usize + 1] += 1);
        for expert in 0..self.routing.n_experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        for (choice, expert) in (0..).zip(chosen) {
            let place = &mut self.starts[*expert as usize];
            self.order[*place as usize] = choice;
            *place += 1;
        }
        // Each start has moved to the next one's position.
        self.starts.rotate_right(1);
        self.starts[0] = 0;
    }

    fn of_expert(&self, expert: u32) -> Range<usize> {
        self.starts[expert as usize] as usize..self.starts[expert as usize + 1] as usize
    }
}

/// Softmax over all scores of a row, then the best ones; the lower id where two are equal.
fn choose(isa: Isa, scores: &[f32], routing: &Routing, chosen: &mut [u32], weights: &mut [f32]) {
    let shift = largest(isa, scores);
    let sum = sum_exp(isa, scores, shift, 1.0);
    for i in 0..routing.n_used {
        let mut best: Option<u32> = None;
        for expert in (0..scores.len() as u32).filter(|expert| !chosen[..i].contains(expert)) {
            if best.is_none_or(|best| is_better(scores[expert as usize], scores[best as usize])) {
                best = Some(expert);
            }
        }
        chosen[i] = best.unwrap_or(0);
    }
    chosen.sort_unstable();
    let mut total = 0.0;
    for (expert, weight) in chosen.iter().zip(weights.iter_mut()) {
        *weight = exp(scores[*expert as usize] - shift) / sum;
        total += *weight;
    }
    if routing.normalized {
        weights.iter_mut().for_each(|weight| *weight /= total);
    }
}

/// A NaN is chosen only where there is nothing else.
fn is_better(score: f32, best: f32) -> bool {
    score > best || best.is_nan() && !score.is_nan()
}

impl Experts for Cpu {
    fn route(&self, scores: &Buffer, n_rows: usize, routes: &mut Routes) {
        let Routing { n_experts, n_used, .. } = routes.routing;
        let scores = scores.rows(n_rows, n_experts);
        assert!(n_rows * n_used <= routes.chosen.len(), "{n_rows} rows of choices in room for fewer");
        routes.n_rows = n_rows;
        let (chosen, weights) = (Shared::new(routes.chosen.as_mut_ptr()), Shared::new(routes.weights.as_mut_ptr()));
        let (routing, isa) = (routes.routing, self.config.isa);
        self.team.run(n_rows, &|rows| {
            for row in rows {
                // SAFETY: there is room for so many rows; one thread has each.
                let (chosen, weights) =
                    unsafe { (chosen.part(row * n_used, n_used), weights.part(row * n_used, n_used)) };
                choose(isa, &scores[row * n_experts..][..n_experts], &routing, chosen, weights);
            }
        });
        routes.group();
    }

    fn experts(
        &self,
        x: &Buffer,
        experts: &[Expert<Cpu>],
        runs: &[Range<u32>],
        n_rows: usize,
        routes: &mut Routes,
        out: &mut Buffer,
    ) {
        assert_eq!(routes.n_rows, n_rows, "the rows were routed");
        let first = runs.first().map_or(0, |run| run.start);
        for (id, expert) in (first..).zip(experts) {
            let choices = routes.of_expert(id);
            if !choices.is_empty() {
                self.expert(x, expert, choices, routes);
            }
        }
        self.fold(runs, n_rows, routes, out);
    }
}

impl Cpu {
    /// One expert's output for the rows that chose it, times its weight in each.
    fn expert(&self, x: &Buffer, expert: &Expert<Cpu>, choices: Range<usize>, routes: &mut Routes) {
        let (n, n_used, hidden) = (choices.len(), routes.routing.n_used, x.cols());
        let Routes { order, weights, x: mine, gate_up, inner, y, made, .. } = routes;
        let order = &order[choices];
        for (choice, to) in order.iter().zip(mine.rows_mut(n, hidden).chunks_exact_mut(hidden)) {
            to.copy_from_slice(x.row(*choice as usize / n_used));
        }
        self.product(mine, &expert.gate_up, n, gate_up); // [n, 2 * inner]
        self.silu_mul(gate_up, n, inner); // [n, inner]
        self.product(inner, &expert.down, n, y); // [n, hidden]
        let made = made.shared(made.rows_max, hidden);
        let y = y.rows(n, hidden);
        self.team.run(n, &|rows| {
            for row in rows {
                let choice = order[row] as usize;
                // SAFETY: a choice belongs to one row of one expert, and `made` has room for all of them.
                let to = unsafe { made.part(choice * hidden, hidden) };
                to.iter_mut().zip(&y[row * hidden..]).for_each(|(to, y)| *to = y * weights[choice]);
            }
        });
    }

    /// One plane for each run of experts. out: [n_runs * n_rows, hidden]
    fn fold(&self, runs: &[Range<u32>], n_rows: usize, routes: &mut Routes, out: &mut Buffer) {
        let (n_used, hidden) = (routes.routing.n_used, out.cols());
        let Routes { chosen, made, .. } = routes;
        let made = made.shared(n_rows * n_used, hidden);
        let out = out.shared(runs.len() * n_rows, hidden);
        self.team.run(n_rows, &|rows| {
            for row in rows {
                // SAFETY: the choices of a row and its rows of the planes are one thread's.
                let made = unsafe { made.part(row * n_used * hidden, n_used * hidden) };
                let chosen = &chosen[row * n_used..][..n_used];
                for (plane, run) in runs.iter().enumerate() {
                    // SAFETY: as above.
                    let to = unsafe { out.part((plane * n_rows + row) * hidden, hidden) };
                    let of = |id: u32| chosen.partition_point(|expert| *expert < id);
                    let (start, end) = (of(run.start), of(run.end));
                    sum_experts(&chosen[start..end], &mut made[start * hidden..end * hidden], run, hidden, to);
                }
            }
        });
    }
}

/// The run's part of the tree; negative zeros where no expert of it was chosen.
fn sum_experts(chosen: &[u32], made: &mut [f32], run: &Range<u32>, hidden: usize, out: &mut [f32]) {
    if chosen.is_empty() {
        out.fill(-0.0);
        return;
    }
    add_up(chosen, made, run.start, (run.end - run.start).next_power_of_two(), hidden);
    out.copy_from_slice(&made[..hidden]);
}

/// Adds the chosen experts of `[first, first + size)` into the first of them: the lower half of the tree, then the
/// upper.
fn add_up(chosen: &[u32], made: &mut [f32], first: u32, size: u32, hidden: usize) {
    if chosen.len() < 2 {
        return;
    }
    let middle = first + size / 2;
    let cut = chosen.partition_point(|expert| *expert < middle);
    let (lower, upper) = made.split_at_mut(cut * hidden);
    add_up(&chosen[..cut], lower, first, size / 2, hidden);
    add_up(&chosen[cut..], upper, middle, size / 2, hidden);
    if cut > 0 && cut < chosen.len() {
        lower[..hidden].iter_mut().zip(upper).for_each(|(lower, upper)| *lower += *upper);
    }
}
