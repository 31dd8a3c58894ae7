//! Mixtures of experts: the choice of experts, and their weighted sum for each row.
//!
//! Rows are grouped by expert only to speed up the products: a row's bits do not depend on its neighbours. The outputs
//! of a row's experts are added by the leaves' tree, whose leaves are the experts; absent ones are skipped.

use super::between::AddBias;
use super::rows::{largest, sum_exp};
use super::{Buffer, Cpu, Isa, Vector};
use crate::cpu::math::exp;
use crate::cpu::memory::SharedPtr;
use crate::{Error, Expert, ExpertStack, Experts, Memory, MlpActivation, Pointwise, Result, Routing, Scoring};
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
    /// [rows_max, 2 * n_experts]: sigmoids, and what the choice sees of them.
    sigmoids: Vec<f32>,
}

impl Routes {
    pub(crate) fn new(cpu: &Cpu, rows_max: usize, hidden: usize, inner: usize, routing: Routing) -> Result<Routes> {
        let Routing { n_experts, n_used, .. } = routing;
        let too_big = || Error::Shape(format!("{n_used} of {n_experts} experts for {rows_max} rows"));
        let n_choices = rows_max.checked_mul(n_used).filter(|n| u32::try_from(*n).is_ok()).ok_or_else(too_big)?;
        if !routing.is_possible() {
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
            sigmoids: match routing.scoring {
                Scoring::Softmax => Vec::new(),
                Scoring::Sigmoid { .. } => vec![0.0; rows_max * 2 * n_experts],
            },
        })
    }

    /// A row's chosen experts in ascending order, and their weights.
    pub fn choices_of_row(&self, row: usize) -> (&[u32], &[f32]) {
        let n = self.routing.n_used;
        (&self.chosen[row * n..][..n], &self.weights[row * n..][..n])
    }

    /// A counting sort of the choices by expert.
    fn group_by_expert(&mut self) {
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

/// Sigmoids of a row's scores, then the best ones of the best groups, as the correction has them.
fn choose_corrected(
    scores: &[f32],
    correction: Option<&[f32]>,
    routing: &Routing,
    sigmoids: &mut [f32],
    chosen: &mut [u32],
    weights: &mut [f32],
) {
    let Scoring::Sigmoid { n_groups, n_used, factor } = routing.scoring else { return };
    let (sigmoids, seen) = sigmoids.split_at_mut(scores.len());
    for (i, score) in scores.iter().enumerate() {
        sigmoids[i] = 1.0 / (1.0 + exp(0.0 - score));
        seen[i] = sigmoids[i] + correction.map_or(0.0, |correction| correction[i]);
    }
    let size = scores.len() / n_groups;
    let group_score = |group: u32| two_best(&seen[group as usize * size..][..size]);
    // As bits: there are at most 32.
    let mut is_used = 0u64;
    for _ in 0..n_used {
        let free = (0..n_groups as u32).filter(|group| is_used >> group & 1 == 0);
        is_used |= best_of(free, group_score).map_or(0, |group| 1 << group);
    }
    for i in 0..routing.n_used {
        let in_group = |expert: &u32| is_used >> (*expert as usize / size) & 1 == 1;
        let free = (0..scores.len() as u32).filter(in_group).filter(|expert| !chosen[..i].contains(expert));
        chosen[i] = best_of(free, |expert| seen[expert as usize]).unwrap_or(0);
    }
    chosen.sort_unstable();
    let mut total = 0.0;
    for (expert, weight) in chosen.iter().zip(weights.iter_mut()) {
        *weight = sigmoids[*expert as usize];
        total += *weight;
    }
    for weight in weights {
        *weight = if routing.normalized { *weight / (total + 1e-20) } else { *weight } * factor;
    }
}

/// The sum of the two largest, the larger first.
fn two_best(seen: &[f32]) -> f32 {
    let (mut best, mut next) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for x in seen {
        if *x > best {
            (best, next) = (*x, best);
        } else if *x > next {
            next = *x;
        }
    }
    if seen.len() > 1 { best + next } else { best }
}

/// The best, of equals the first.
fn best_of(candidates: impl Iterator<Item = u32>, score: impl Fn(u32) -> f32) -> Option<u32> {
    candidates.reduce(|best, other| if is_better(score(other), score(best)) { other } else { best })
}

/// A NaN is chosen only where there is nothing else.
fn is_better(score: f32, best: f32) -> bool {
    score > best || best.is_nan() && !score.is_nan()
}

impl Experts for Cpu {
    fn route(&self, scores: &Buffer, correction: Option<&Vector>, n_rows: usize, routes: &mut Routes) {
        let Routing { n_experts, n_used, .. } = routes.routing;
        let scores = scores.rows(n_rows, n_experts);
        assert!(n_rows * n_used <= routes.chosen.len(), "{n_rows} rows of choices in room for fewer");
        routes.n_rows = n_rows;
        let (chosen, weights) =
            (SharedPtr::new(routes.chosen.as_mut_ptr()), SharedPtr::new(routes.weights.as_mut_ptr()));
        let (routing, isa) = (routes.routing, self.config.isa);
        let (sigmoids, correction) = (SharedPtr::new(routes.sigmoids.as_mut_ptr()), correction.map(|of| &**of));
        assert!(correction.is_none_or(|of| of.len() == n_experts), "a correction for each expert");
        self.team.run(n_rows, &|rows| {
            for row in rows {
                // SAFETY: there is room for so many rows; one thread has each.
                let (chosen, weights) =
                    unsafe { (chosen.part(row * n_used, n_used), weights.part(row * n_used, n_used)) };
                let scores = &scores[row * n_experts..][..n_experts];
                if routing.scoring == Scoring::Softmax {
                    choose(isa, scores, &routing, chosen, weights);
                    continue;
                }
                // SAFETY: likewise, and there is room for two numbers of each expert.
                let sigmoids = unsafe { sigmoids.part(row * 2 * n_experts, 2 * n_experts) };
                choose_corrected(scores, correction, &routing, sigmoids, chosen, weights);
            }
        });
        routes.group_by_expert();
    }

    fn scale_choices(&self, factors: &Vector, routes: &mut Routes) {
        let Routing { n_experts, n_used, .. } = routes.routing;
        assert_eq!(factors.len(), n_experts, "a factor for each expert");
        let choices = routes.chosen.iter().zip(&mut routes.weights);
        choices.take(routes.n_rows * n_used).for_each(|(expert, weight)| *weight *= factors[*expert as usize]);
    }

    fn apply_experts(
        &self,
        x: &Buffer,
        experts: &ExpertStack<Cpu>,
        runs: &[Range<u32>],
        n_rows: usize,
        routes: &mut Routes,
        out: &mut Buffer,
    ) {
        assert_eq!(routes.n_rows, n_rows, "the rows differ from those that were routed");
        let first = runs.first().map_or(0, |run| run.start);
        for (i, expert) in experts.all.iter().enumerate() {
            let choices = routes.of_expert(first + i as u32);
            if !choices.is_empty() {
                self.expert(x, expert, (experts, i), choices, routes);
            }
        }
        self.fold(runs, n_rows, routes, out);
    }
}

impl Cpu {
    /// One expert's output for the rows that chose it, times its weight in each.
    fn expert(
        &self,
        x: &Buffer,
        expert: &Expert<Cpu>,
        (stack, i): (&ExpertStack<Cpu>, usize),
        choices: Range<usize>,
        routes: &mut Routes,
    ) {
        let (n, n_used, hidden) = (choices.len(), routes.routing.n_used, x.cols());
        let Routes { order, weights, x: mine, gate_up, inner, y, made, .. } = routes;
        let order = &order[choices];
        for (choice, to) in order.iter().zip(mine.rows_mut(n, hidden).chunks_exact_mut(hidden)) {
            to.copy_from_slice(x.row(*choice as usize / n_used));
        }
        let bias = stack.biases.as_ref().map(|biases| &biases[0]);
        match stack.activation {
            MlpActivation::Plain(op) => {
                self.multiply(mine, &expert.gate_up, n, inner); // [n, inner]
                self.add_own_bias(inner, bias, i, n);
                self.map(inner, op, n);
            }
            MlpActivation::Gated(gate) => {
                self.multiply(mine, &expert.gate_up, n, gate_up); // [n, 2 * inner]
                self.add_own_bias(gate_up, bias, i, n);
                self.apply_gate(gate_up, gate, n, inner); // [n, inner]
            }
        }
        self.multiply(inner, &expert.down, n, y); // [n, hidden]
        self.add_own_bias(y, stack.biases.as_ref().map(|biases| &biases[1]), i, n);
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

    /// The bias of this rank's expert number `i`, if experts have some. x: [n, cols], biases: [experts, cols]
    fn add_own_bias(&self, x: &mut Buffer, biases: Option<&Vector>, i: usize, n: usize) {
        let cols = x.cols();
        if let Some(biases) = biases {
            let (bias, x) = (&biases[i * cols..][..cols], x.shared(n, cols));
            self.run_on_team(n, |rows| AddBias { x, bias, rows });
        }
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
