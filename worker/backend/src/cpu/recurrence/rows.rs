//! The arithmetic of a block: its rows, and the state that they leave.
//!
//! With S the state at the block's start and G the sum of the logarithms of decays up to a row:
//!
//! ```text
//! u_t  = step_t (v_t - e^G_t S'k_t - sum over s < t of e^(G_t - G_s) (k_s · k_t) u_s)      the delta rule
//! u_t  = step_t v_t                                                                        Mamba-2
//! o_t  = e^G_t S'q_t + sum over s <= t of e^(G_t - G_s) (k_s · q_t) u_s
//! S    <- e^G_15 S + sum over s of e^(G_15 - G_s) k_s u_s'
//! ```
#![allow(clippy::needless_range_loop, reason = "an index into several arrays of registers")]

use super::RecurrenceJob;
use super::page::{DIM_MAX, HeadWidths, POSITIONS, StatePage};
use crate::StateRule;
use crate::cpu::between::sum_of_squares;
use crate::cpu::lanes::{LANES, Lanes};
use crate::cpu::math::{exp, sigmoid, silu, softplus};
use std::ops::Range;

/// Columns of V that one run over the state has in registers.
const WIDE: usize = 4;
/// What keeps the length of a key from zero.
const LENGTH_EPS: f32 = 1e-6;

/// Of a block's rows: what the state is multiplied by (the query, and under the delta rule the key), what comes out,
/// and the values. [16 * n_probes, key], [16 * n_probes, value], [16, value]
struct ProbeRows<'a> {
    n_probes: usize,
    probes: &'a mut [f32],
    answers: &'a mut [f32],
    values: &'a mut [f32],
    steps: [f32; POSITIONS],
}

impl ProbeRows<'_> {
    #[inline(always)]
    fn of(work: &mut [f32], HeadWidths { key, value, .. }: HeadWidths, n_probes: usize) -> ProbeRows<'_> {
        let (probes, rest) = work.split_at_mut(POSITIONS * n_probes * key);
        let (answers, rest) = rest.split_at_mut(POSITIONS * n_probes * value);
        ProbeRows { n_probes, probes, answers, values: &mut rest[..POSITIONS * value], steps: [0.0; POSITIONS] }
    }
}

/// The state at a block's start, and the inputs before it, from the whole page of the block before.
#[inline(always)]
pub fn carry_state<L: Lanes>(before: &StatePage<'_>, page: &mut StatePage<'_>, work: &mut [f32]) {
    let HeadWidths { key, value, .. } = page.shape;
    let n_before = page.shape.n_before();
    page.inputs[..n_before].copy_from_slice(&before.inputs[before.inputs.len() - n_before..]);
    let last = before.decays[POSITIONS - 1];
    let mut weights = [0.0; LANES];
    exp(L::splat(last).sub(L::load(before.decays))).store(&mut weights);
    let scaled = &mut work[..POSITIONS * value];
    for ((to, from), weight) in scaled.chunks_exact_mut(value).zip(before.values.chunks_exact(value)).zip(weights) {
        for (to, from) in to.as_chunks_mut::<LANES>().0.iter_mut().zip(from.as_chunks::<LANES>().0) {
            L::load(from).mul(L::splat(weight)).store(to);
        }
    }
    let decay = exp(last);
    for column in (0..value).step_by(LANES) {
        for i in (0..key).step_by(WIDE) {
            carry_state_rows::<L>(before, page, scaled, decay, i, column);
        }
    }
}

/// `WIDE` rows of the state in sixteen columns.
#[inline(always)]
fn carry_state_rows<L: Lanes>(
    before: &StatePage<'_>,
    page: &mut StatePage<'_>,
    scaled: &[f32],
    decay: f32,
    i: usize,
    column: usize,
) {
    let HeadWidths { key, value, .. } = page.shape;
    let mut sums = [L::splat(0.0); WIDE];
    for n in 0..WIDE {
        sums[n] = lanes::<L>(before.state, (i + n) * value + column).mul(L::splat(decay));
    }
    for s in 0..POSITIONS {
        let scaled = lanes::<L>(scaled, s * value + column);
        for n in 0..WIDE {
            sums[n] = L::splat(before.keys[s * key + i + n]).fma(scaled, sums[n]);
        }
    }
    for n in 0..WIDE {
        store(sums[n], page.state, (i + n) * value + column);
    }
}

#[inline(always)]
fn lanes<L: Lanes>(from: &[f32], at: usize) -> L {
    L::load(from[at..].first_chunk().expect("widths are multiples of sixteen"))
}

#[inline(always)]
fn store<L: Lanes>(lanes: L, to: &mut [f32], at: usize) {
    lanes.store(to[at..].first_chunk_mut().expect("widths are multiples of sixteen"));
}

/// Where a head's numbers are in a projected row.
struct HeadColumns {
    /// Of Q, K and V, which are also the channels.
    qkv: [usize; 3],
    z: usize,
    b: usize,
    a: usize,
}

impl RecurrenceJob<'_> {
    /// Computes the rows of some slots of a block, of which the first is `row` of the pass.
    #[inline(always)]
    pub fn compute_rows<L: Lanes>(
        &self,
        head: usize,
        row: usize,
        slots: Range<usize>,
        page: &mut StatePage<'_>,
        work: &mut [f32],
    ) {
        let n_probes = if self.call.heads.has_steps { 2 } else { 1 };
        let (columns, mut parts) = (self.columns(head), ProbeRows::of(work, self.shape, n_probes));
        for (row, slot) in (row..).zip(slots.clone()) {
            self.prepare_row::<L>(head, self.row(row), &columns, slot, page, &mut parts);
        }
        self.multiply_probes::<L>(slots.clone(), page, &mut parts);
        for (row, slot) in (row..).zip(slots) {
            self.solve::<L>(slot, page, &parts);
            self.finish::<L>(head, row, self.row(row), slot, page, &parts);
        }
    }

    #[inline(always)]
    fn row(&self, row: usize) -> &[f32] {
        let n = self.call.heads.n_cols();
        &self.x[row * n..][..n]
    }

    #[inline(always)]
    fn columns(&self, head: usize) -> HeadColumns {
        let heads = self.call.heads;
        let (key, n_keys) = (heads.key_head_of(head) * heads.key_dim, heads.n_key_heads * heads.key_dim);
        let (value, n_values) = (head * heads.value_dim, heads.n_heads * heads.value_dim);
        let z = heads.n_channels() + value;
        let b = heads.n_channels() + n_values + head;
        let a = if heads.has_steps { b + heads.n_heads } else { b };
        HeadColumns { qkv: [key, n_keys + key, 2 * n_keys + value], z, b, a }
    }

    /// Keeps a row's inputs, convolves them, and makes its key, query, value, decay and step.
    #[inline(always)]
    fn prepare_row<L: Lanes>(
        &self,
        head: usize,
        x: &[f32],
        columns: &HeadColumns,
        slot: usize,
        page: &mut StatePage<'_>,
        parts: &mut ProbeRows<'_>,
    ) {
        let HeadWidths { key, value, taps } = self.shape;
        let channels = self.shape.channels();
        let own = &mut page.inputs[(taps - 1 + slot) * channels..][..channels];
        let widths = [(0, key), (key, key), (2 * key, value)];
        for ((at, n), from) in widths.into_iter().zip(columns.qkv) {
            own[at..at + n].copy_from_slice(&x[from..from + n]);
        }
        let seen = &page.inputs[slot * channels..][..taps * channels];
        let (query, probe) = parts.probes[slot * parts.n_probes * key..][..parts.n_probes * key].split_at_mut(key);
        let its_key = &mut page.keys[slot * key..][..key];
        self.convolve::<L>(seen, 0, columns.qkv[0], query);
        self.convolve::<L>(seen, key, columns.qkv[1], its_key);
        self.convolve::<L>(seen, 2 * key, columns.qkv[2], &mut parts.values[slot * value..][..value]);
        let weights = self.weights;
        let soft = softplus(weights.rule.a_factor() * x[columns.a] + weights.rate_bias[head]);
        let soft = match &weights.rule {
            StateRule::Delta { step_max, .. } => {
                scale_to::<L>(query, 1.0 / (key as f32).sqrt());
                scale_to::<L>(its_key, 1.0);
                probe.copy_from_slice(its_key);
                parts.steps[slot] = step_max * sigmoid(x[columns.b]);
                soft
            }
            StateRule::StateSpace { step_min, step_max, .. } => {
                parts.steps[slot] = soft.clamp(*step_min, *step_max);
                parts.steps[slot]
            }
        };
        let before = slot.checked_sub(1).map_or(0.0, |before| page.decays[before]);
        page.decays[slot] = before + weights.rate[head] * soft;
    }

    /// silu(convolution) of some channels. seen: [taps, channels of the head]
    #[inline(always)]
    fn convolve<L: Lanes>(&self, seen: &[f32], at: usize, channel: usize, out: &mut [f32]) {
        let (n_channels, own) = (self.call.heads.n_channels(), self.shape.channels());
        for (i, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let i = i * LANES;
            let bias = self.weights.conv_bias.as_ref();
            let mut sum = bias.map_or(L::splat(0.0), |bias| lanes::<L>(bias, channel + i));
            for tap in 0..self.shape.taps {
                let weight = lanes::<L>(&self.weights.conv, tap * n_channels + channel + i);
                sum = weight.fma(lanes::<L>(seen, tap * own + at + i), sum);
            }
            silu(sum).store(out);
        }
    }

    /// The state times the probes of some rows: it is read once for up to four of them.
    #[inline(always)]
    fn multiply_probes<L: Lanes>(&self, slots: Range<usize>, page: &StatePage<'_>, parts: &mut ProbeRows<'_>) {
        let (mut at, end) = (slots.start * parts.n_probes, slots.end * parts.n_probes);
        while at < end {
            match end - at {
                1 => at += multiply::<L, 1>(page, at, parts),
                2 | 3 => at += multiply::<L, 2>(page, at, parts),
                _ => at += multiply::<L, 4>(page, at, parts),
            }
        }
    }

    /// A row's value: what it adds to the state under its key.
    #[inline(always)]
    fn solve<L: Lanes>(&self, slot: usize, page: &mut StatePage<'_>, parts: &ProbeRows<'_>) {
        let HeadWidths { key, value, .. } = self.shape;
        let (solved, own) = page.values.split_at_mut(slot * value);
        let step = L::splat(parts.steps[slot]);
        let (keys, own_key) = page.keys.split_at(slot * key);
        let products = match self.weights.rule {
            StateRule::Delta { .. } => weighted_dots::<L>(keys, &own_key[..key], page.decays, slot, slot),
            StateRule::StateSpace { .. } => [0.0; POSITIONS],
        };
        for column in (0..value).step_by(LANES) {
            let mut left = lanes::<L>(parts.values, slot * value + column);
            if parts.n_probes == 2 {
                let known = lanes::<L>(parts.answers, (2 * slot + 1) * value + column);
                left = L::splat(-exp(page.decays[slot])).fma(known, left);
                for (s, product) in products[..slot].iter().enumerate() {
                    left = L::splat(-product).fma(lanes::<L>(solved, s * value + column), left);
                }
            }
            store(step.mul(left), own, column);
        }
    }

    /// A row's output.
    #[inline(always)]
    fn finish<L: Lanes>(
        &self,
        head: usize,
        row: usize,
        x: &[f32],
        slot: usize,
        page: &StatePage<'_>,
        parts: &ProbeRows<'_>,
    ) {
        let HeadWidths { key, value, .. } = self.shape;
        let query = &parts.probes[slot * parts.n_probes * key..][..key];
        let products = weighted_dots::<L>(page.keys, query, page.decays, slot, slot + 1);
        let decay = L::splat(exp(page.decays[slot]));
        let mut sums = [0.0; DIM_MAX];
        let sums = &mut sums[..value];
        for column in (0..value).step_by(LANES) {
            let mut sum = decay.mul(lanes::<L>(parts.answers, slot * parts.n_probes * value + column));
            for (s, product) in products[..=slot].iter().enumerate() {
                sum = L::splat(*product).fma(lanes::<L>(page.values, s * value + column), sum);
            }
            store(sum, sums, column);
        }
        let z = &x[self.columns(head).z..][..value];
        // SAFETY: the op checked the shape; one item, and so one thread, has this head of this row.
        let out = unsafe { self.out.part((row * self.call.heads.n_heads + head) * value, value) };
        match &self.weights.rule {
            StateRule::Delta { norm, eps, .. } => {
                let scale = L::splat(1.0 / (sum_of_squares::<L>(sums) / value as f32 + eps).sqrt());
                for column in (0..value).step_by(LANES) {
                    let normed = lanes::<L>(sums, column).mul(scale).mul(lanes::<L>(norm, column));
                    store(normed.mul(silu(lanes::<L>(z, column))), out, column);
                }
            }
            StateRule::StateSpace { skip, z_factor, .. } => {
                let z_factor = L::splat(*z_factor);
                let (skip, values) = (L::splat(skip[head]), &parts.values[slot * value..][..value]);
                for column in (0..value).step_by(LANES) {
                    let sum = skip.fma(lanes::<L>(values, column), lanes::<L>(sums, column));
                    store(sum.mul(silu(z_factor.mul(lanes::<L>(z, column)))), out, column);
                }
            }
        }
    }
}

/// x / |x| * length
#[inline(always)]
fn scale_to<L: Lanes>(x: &mut [f32], length: f32) {
    let scale = L::splat(length / (sum_of_squares::<L>(x) + LENGTH_EPS).sqrt());
    for x in x.as_chunks_mut::<LANES>().0 {
        L::load(x).mul(scale).store(x);
    }
}

/// (k_s · x) e^(G_t - G_s) for the first `n` rows s.
#[inline(always)]
fn weighted_dots<L: Lanes>(keys: &[f32], x: &[f32], decays: &[f32; POSITIONS], t: usize, n: usize) -> [f32; POSITIONS] {
    let mut weights = [0.0; POSITIONS];
    exp(L::splat(decays[t]).sub(L::load(decays))).store(&mut weights);
    for (weight, key) in weights[..n].iter_mut().zip(keys.chunks_exact(x.len())) {
        let mut sum = L::splat(0.0);
        for (key, x) in key.as_chunks::<LANES>().0.iter().zip(x.as_chunks::<LANES>().0) {
            sum = L::load(key).fma(L::load(x), sum);
        }
        *weight *= sum.sum();
    }
    weights
}

/// N probes from `at` on times the state, all columns. Returns N.
#[inline(always)]
fn multiply<L: Lanes, const N: usize>(page: &StatePage<'_>, at: usize, parts: &mut ProbeRows<'_>) -> usize {
    let HeadWidths { key, value, .. } = page.shape;
    let probes: [&[f32]; N] = std::array::from_fn(|n| &parts.probes[(at + n) * key..][..key]);
    let wide = value / (WIDE * LANES) * (WIDE * LANES);
    for column in (0..wide).step_by(WIDE * LANES) {
        products::<L, N, WIDE>(page, column, probes, &mut parts.answers[at * value..]);
    }
    for column in (wide..value).step_by(LANES) {
        products::<L, N, 1>(page, column, probes, &mut parts.answers[at * value..]);
    }
    N
}

/// Sums over the rows of the state in ascending order, in N * V registers.
#[inline(always)]
fn products<L: Lanes, const N: usize, const V: usize>(
    page: &StatePage<'_>,
    column: usize,
    probes: [&[f32]; N],
    answers: &mut [f32],
) {
    let value = page.shape.value;
    let mut sums = [[L::splat(0.0); V]; N];
    for (i, row) in page.state.chunks_exact(value).enumerate() {
        let row = &row[column..].as_chunks::<LANES>().0[..V];
        for n in 0..N {
            let x = L::splat(probes[n][i]);
            for v in 0..V {
                sums[n][v] = x.fma(L::load(&row[v]), sums[n][v]);
            }
        }
    }
    for n in 0..N {
        for v in 0..V {
            store(sums[n][v], answers, n * value + column + v * LANES);
        }
    }
}
