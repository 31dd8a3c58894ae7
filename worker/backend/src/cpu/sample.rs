//! Draws a token from a row of logits. Knows rows and what was asked of each; nothing of sequences.
//!
//! ```text
//! logits -> stop tokens masked before tokens_min
//!        -> the k largest -> the smallest set of them that reaches top_p -> what is at least min_p of the largest
//!        -> the survivor with the largest (logit - largest) / temperature + noise(seed, choice, position, token)
//! ```
//! Where a filter cuts among equals, the lower id stays. Nothing here depends on an order of work, so rows may be drawn
//! by any thread, and candidates visited in any way.

use super::memory::Shared;
use super::{Buffer, Cpu, Isa, math, rows};
use crate::{Draw, Sample};
use std::sync::{Mutex, PoisonError};
use types::{Sampling, Token, TokenLogprob, TokenOut};

impl Sample for Cpu {
    fn draw(&self, logits: &Buffer, draws: &[Draw<'_>], out: &mut Vec<Option<TokenOut>>) {
        out.clear();
        out.resize_with(draws.len(), || None);
        self.samplers.prepare(self.config().threads, logits.cols());
        let drawn = Shared::new(out.as_mut_ptr());
        self.team.run(draws.len(), &|rows| {
            let mut scratch = self.samplers.take(self.config().isa);
            for row in rows {
                // SAFETY: `out` is as long as `draws`, and one thread has this row.
                let to = unsafe { drawn.part(row, 1) };
                to[0] = draw_row(logits.row(row), &draws[row], &mut scratch);
            }
            self.samplers.put(scratch);
        });
    }
}

/// A scratch for every thread that may draw at once, made before they do.
#[derive(Default)]
pub(super) struct Samplers(Mutex<Vec<Scratch>>);

impl Samplers {
    fn prepare(&self, n_threads: usize, n_vocab: usize) {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < n_threads || free.iter().any(|scratch| scratch.keys.capacity() < n_vocab) {
            free.clear();
            free.resize_with(n_threads, || Scratch::new(n_vocab));
        }
    }

    fn take(&self, isa: Isa) -> Scratch {
        let free = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        Scratch { isa, ..free.unwrap_or_else(|| Scratch::new(0)) }
    }

    fn put(&self, scratch: Scratch) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(scratch);
    }
}

/// What one thread needs to draw; its memory is kept.
struct Scratch {
    isa: Isa,
    keys: Vec<Key>,
    masked: Vec<f32>,
}

impl Scratch {
    fn new(n_vocab: usize) -> Scratch {
        Scratch { isa: Isa::Plain, keys: Vec::with_capacity(n_vocab), masked: Vec::with_capacity(n_vocab) }
    }
}

/// None if the row holds something that is no number, or nothing that can be drawn.
fn draw_row(row: &[f32], draw: &Draw<'_>, scratch: &mut Scratch) -> Option<TokenOut> {
    let Scratch { isa, keys, masked } = scratch;
    let isa = *isa;
    let sampling = draw.sampling;
    let largest = largest_of(isa, row)?;
    let hides_stops = draw.n_output() < sampling.tokens_min && !sampling.stop.is_empty();
    let token = match hides_stops {
        false => drawn(row, largest, draw, isa, keys),
        true => {
            mask(row, &sampling.stop, masked);
            drawn(masked, largest_of(isa, masked)?, draw, isa, keys)
        }
    };
    let mut out = TokenOut { token, logprob: None, top: Vec::new() };
    if let Some(n_top) = sampling.logprobs {
        let log_sum = largest + math::ln(rows::sum_exp(isa, row, largest, 1.0));
        out.logprob = Some(row[token as usize] - log_sum);
        if n_top > 0 {
            select_largest(row, usize::from(n_top), keys);
            let logprob = |token: Token| TokenLogprob { token, logprob: row[token as usize] - log_sum };
            out.top.extend(keys.iter().map(|key| logprob(key.token())));
        }
    }
    Some(out)
}

/// The largest logit of a row that has only numbers; -infinity counts as one, being a mask.
fn largest_of(isa: Isa, row: &[f32]) -> Option<f32> {
    let holds_nan = row.iter().fold(false, |holds, logit| holds | logit.is_nan());
    let largest = rows::largest(isa, row);
    (!holds_nan && largest.is_finite()).then_some(largest)
}

fn mask(row: &[f32], stop: &[Token], masked: &mut Vec<f32>) {
    masked.clear();
    masked.extend_from_slice(row);
    for &token in stop {
        if let Some(logit) = masked.get_mut(token as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

fn drawn(row: &[f32], largest: f32, draw: &Draw<'_>, isa: Isa, keys: &mut Vec<Key>) -> Token {
    let first = first_of(row, largest);
    let sampling = draw.sampling;
    let is_hot = sampling.temperature > 0.0;
    if !is_hot {
        return first;
    }
    let scale = 1.0 / f64::from(sampling.temperature);
    let scaled = |token: Token| f64::from(row[token as usize] - largest) * scale;
    let least = if sampling.min_p > 0.0 { libm::log(f64::from(sampling.min_p)) } else { f64::NEG_INFINITY };
    let noise = Noise::new(sampling.seed, sampling.choice, draw.position());
    // The most likely survives every filter, and raises the bar that the rest must pass.
    let mut best = Best { token: first, score: noise.gumbel(first) };
    let mut offer = |token: Token| {
        let scaled = scaled(token);
        if scaled >= least {
            best.offer(token, scaled, &noise);
        }
    };
    let top_k = if sampling.top_k == 0 { row.len() } else { row.len().min(sampling.top_k as usize) };
    if top_k == row.len() && sampling.top_p >= 1.0 {
        (0..row.len() as Token).for_each(offer);
    } else {
        let n = select(row, largest, top_k, sampling, isa, keys);
        keys[..n].iter().for_each(|key| offer(key.token()));
    }
    best.token
}

fn first_of(row: &[f32], largest: f32) -> Token {
    row.iter().position(|logit| *logit == largest).map_or(0, |token| token as Token)
}

/// Fills `keys` with the most likely tokens in order, of which the first so many pass top_k and top_p.
fn select(row: &[f32], largest: f32, top_k: usize, sampling: &Sampling, isa: Isa, keys: &mut Vec<Key>) -> usize {
    /// Most distributions have their top_p in so few.
    const FIRST_LOOK: usize = 64;
    // Of the smallest temperatures the inverse is infinite, and zero times that is no number.
    let scale = (1.0 / sampling.temperature).min(f32::MAX);
    let weight = |key: &Key| f64::from(math::exp((row[key.token() as usize] - largest) * scale));
    if sampling.top_p >= 1.0 {
        select_largest(row, top_k, keys);
        return keys.len();
    }
    let total = if top_k < row.len() {
        select_largest(row, top_k, keys);
        keys.iter().map(weight).sum()
    } else {
        f64::from(rows::sum_exp(isa, row, largest, scale))
    };
    let wanted = total * f64::from(sampling.top_p);
    let mut n_seen = if top_k < row.len() { top_k } else { FIRST_LOOK.min(top_k) };
    loop {
        select_largest(row, n_seen, keys);
        let mut reached = 0.0;
        for (i, key) in keys.iter().enumerate() {
            reached += weight(key);
            if reached >= wanted {
                return i + 1;
            }
        }
        if n_seen == top_k {
            return keys.len();
        }
        n_seen = (n_seen * 8).min(top_k);
    }
}

/// A logit and its token as one number: the smaller, the more likely, and among equals the lower id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key(u64);

impl Key {
    fn new(token: usize, logit: f32) -> Key {
        // Adding zero makes -0 equal to 0. The bits of a positive float grow with it, those of a negative one fall.
        let bits = (logit + 0.0).to_bits();
        let falling = if bits >> 31 == 0 { !bits & 0x7fff_ffff } else { bits };
        Key(u64::from(falling) << 32 | token as u64)
    }

    fn token(self) -> Token {
        self.0 as Token
    }
}

/// The k largest of a row in order. One pass: whatever cannot be among them is not looked at twice.
fn select_largest(row: &[f32], k: usize, keys: &mut Vec<Key>) {
    let room = row.len().min((2 * k).max(256));
    keys.clear();
    let mut bar = Key(u64::MAX);
    for (token, &logit) in row.iter().enumerate() {
        let key = Key::new(token, logit);
        if key < bar {
            keys.push(key);
            if keys.len() == room && room < row.len() {
                keys.select_nth_unstable(k - 1);
                keys.truncate(k);
                bar = keys[k - 1];
            }
        }
    }
    keys.sort_unstable();
    keys.truncate(k);
}

struct Best {
    token: Token,
    score: f64,
}

impl Best {
    fn offer(&mut self, token: Token, scaled: f64, noise: &Noise) {
        // Bounds first: almost no token of a vocabulary needs its logarithms.
        if scaled + Noise::MAX < self.score {
            return;
        }
        let bits = noise.bits(token);
        if scaled + Noise::bound(bits) < self.score {
            return;
        }
        let score = scaled + Noise::gumbel_of(bits);
        if score > self.score || (score == self.score && token < self.token) {
            *self = Best { token, score };
        }
    }
}

/// Gumbel noise without a state: a hash of what it is for.
struct Noise {
    key: u64,
}

impl Noise {
    /// No noise is larger.
    const MAX: f64 = 37.0;
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    fn new(seed: u64, choice: u32, position: u32) -> Noise {
        let place = u64::from(choice) << 32 | u64::from(position);
        Noise { key: mix(mix(seed.wrapping_add(Noise::STEP)) ^ place) }
    }

    fn bits(&self, token: Token) -> u64 {
        mix(self.key.wrapping_add(Noise::STEP.wrapping_mul(u64::from(token) + 1)))
    }

    fn gumbel(&self, token: Token) -> f64 {
        Noise::gumbel_of(self.bits(token))
    }

    /// `-ln(-ln u)` for u = (2r + 1) / 2^53 of the upper 52 bits r: never 0, never 1.
    fn gumbel_of(bits: u64) -> f64 {
        let u = ((bits >> 11) | 1) as f64 * (1.0 / (1u64 << 53) as f64);
        -libm::log(-libm::log(u))
    }

    /// At least `gumbel_of(bits)`: -ln u >= 1 - u, and 1 - u has as many zeros in front as u has ones.
    fn bound(bits: u64) -> f64 {
        const MORE_THAN_LN_2: f64 = 0.693_148;
        f64::from((bits & !0xfff).leading_ones() + 1) * MORE_THAN_LN_2
    }
}

/// Spreads every bit of x over all bits of the result, and is its own inverse's only argument: a bijection
/// (splitmix64).
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some logits, most of them small, with a few equal ones.
    fn logits(n: usize, seed: u64) -> Vec<f32> {
        (0..n as u64).map(|i| ((mix(seed ^ mix(i)) >> 40) as f32 / 65536.0 - 128.0).floor() / 8.0).collect()
    }

    fn draw(row: &[f32], sampling: &Sampling, position: u32) -> Option<TokenOut> {
        let prompt = vec![0; position as usize];
        draw_row(row, &Draw { sampling, prompt: &prompt, output: &[] }, &mut Scratch::new(0))
    }

    fn token(row: &[f32], sampling: &Sampling, position: u32) -> Token {
        draw(row, sampling, position).unwrap().token
    }

    fn hot(temperature: f32) -> Sampling {
        Sampling { temperature, seed: 7, ..Sampling::default() }
    }

    /// What the filters mean, without any of the short cuts: the survivors, most likely first.
    fn survivors(row: &[f32], sampling: &Sampling) -> Vec<Token> {
        let mut order: Vec<_> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).unwrap().then(a.cmp(&b)));
        if sampling.top_k > 0 {
            order.truncate(sampling.top_k as usize);
        }
        let largest = row[order[0]];
        let weight = |i: usize| (f64::from(row[i] - largest) / f64::from(sampling.temperature)).exp();
        let total: f64 = order.iter().map(|&i| weight(i)).sum();
        let mut reached = 0.0;
        let n = order.iter().position(|&i| {
            reached += weight(i);
            reached >= total * f64::from(sampling.top_p)
        });
        if sampling.top_p < 1.0 {
            order.truncate(n.unwrap() + 1);
        }
        order.retain(|&i| weight(i) >= f64::from(sampling.min_p));
        order.into_iter().map(|i| i as Token).collect()
    }

    fn naive(row: &[f32], sampling: &Sampling, position: u32) -> Token {
        let noise = Noise::new(sampling.seed, sampling.choice, position);
        let largest = largest_of(Isa::Plain, row).unwrap();
        let scale = 1.0 / f64::from(sampling.temperature);
        let score = |t: Token| f64::from(row[t as usize] - largest) * scale + noise.gumbel(t);
        let better = |a: Token, b: Token| if (score(b), a) > (score(a), b) { b } else { a };
        survivors(row, sampling).into_iter().reduce(better).unwrap()
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let greedy = Sampling::default();
        assert_eq!(token(&[1.0, 3.0, -2.0, 3.0], &greedy, 0), 1);
        assert_eq!(token(&[-0.0, 0.0], &greedy, 0), 0);
        for n in [1, 15, 16, 17, 1000] {
            let mut row = logits(n, 3);
            row[n - 1] = 1e9;
            assert_eq!(token(&row, &greedy, 0), n as Token - 1);
        }
    }

    #[test]
    fn a_row_that_holds_no_number_draws_nothing() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
            for at in [0, 15, 16, 99, 100] {
                let mut row = logits(101, 1);
                row[at] = bad;
                assert_eq!(draw(&row, &Sampling::default(), 0), None);
                assert_eq!(draw(&row, &hot(1.0), 0), None);
            }
        }
        assert_eq!(draw(&[f32::NEG_INFINITY; 20], &hot(1.0), 0), None);
    }

    #[test]
    fn what_is_masked_is_never_drawn() {
        let mut row = vec![f32::NEG_INFINITY; 50];
        row[31] = -1e30;
        for sampling in [Sampling::default(), hot(1.0), hot(1e-42), Sampling { top_p: 0.9, ..hot(2.0) }] {
            assert_eq!(token(&row, &sampling, 5), 31);
        }
    }

    #[test]
    fn filters_keep_what_they_say() {
        for seed in 0..6 {
            let row = logits(if seed < 3 { 700 } else { 5000 }, seed);
            for (top_k, top_p, min_p) in [
                (0, 1.0, 0.0),
                (1, 1.0, 0.0),
                (40, 1.0, 0.0),
                (0, 0.9, 0.0),
                (0, 0.0, 0.0),
                (0, 1.0, 0.05),
                (300, 0.95, 0.01),
            ] {
                for temperature in [0.3, 1.0, 5.0] {
                    let sampling = Sampling { temperature, top_k, top_p, min_p, seed, ..Sampling::default() };
                    for position in 0..8 {
                        let expected = naive(&row, &sampling, position);
                        assert_eq!(token(&row, &sampling, position), expected, "{sampling:?} at {position}");
                    }
                }
            }
        }
    }

    #[test]
    fn ties_at_a_boundary_keep_the_lower_ids() {
        let row = [2.0; 600];
        let sampling = Sampling { top_k: 3, ..hot(1.0) };
        assert!((0..200).all(|position| token(&row, &sampling, position) < 3));
        let sampling = Sampling { top_p: 0.01, ..hot(1.0) };
        let drawn: Vec<_> = (0..200).map(|position| token(&row, &sampling, position)).collect();
        assert_eq!(drawn.iter().max(), Some(&5));
    }

    #[test]
    fn draws_follow_the_softmax() {
        let row = [0.0, 1.0, 2.0, -1.0, 0.5, 2.0, -3.0, 1.5];
        let n = 40_000;
        for temperature in [0.7, 1.0, 1.8] {
            let mut seen = [0u32; 8];
            (0..n).for_each(|position| seen[token(&row, &hot(temperature), position) as usize] += 1);
            let weights = row.map(|logit: f32| f64::from(logit / temperature).exp());
            let total: f64 = weights.iter().sum();
            let chi_square: f64 = weights
                .iter()
                .zip(seen)
                .map(|(weight, seen)| {
                    let expected = f64::from(n) * weight / total;
                    (f64::from(seen) - expected).powi(2) / expected
                })
                .sum();
            // Seven degrees of freedom: above 24.3 once in a thousand; the seed is fixed.
            assert!(chi_square < 24.3, "{chi_square} at {temperature}");
        }
    }

    #[test]
    fn seed_choice_position_and_token_all_matter() {
        let bits = |seed, choice, position, token| Noise::new(seed, choice, position).bits(token);
        let all = [bits(1, 2, 3, 4), bits(2, 2, 3, 4), bits(1, 3, 3, 4), bits(1, 2, 4, 4), bits(1, 2, 3, 5)];
        let distinct: std::collections::BTreeSet<_> = all.into_iter().collect();
        assert_eq!(distinct.len(), all.len());
    }

    /// Replicas of different builds must agree: these bits change only with `Numerics::VERSION`.
    #[test]
    fn the_noise_is_the_same_for_ever() {
        let noise = Noise::new(1, 2, 3);
        assert_eq!(noise.bits(4), GOLDEN_BITS);
        assert_eq!(noise.gumbel(4).to_bits(), GOLDEN_GUMBEL);
    }

    const GOLDEN_BITS: u64 = 0xfded_72c0_fd70_4eae;
    const GOLDEN_GUMBEL: u64 = 0x4013_3fdf_772c_d9d8;

    #[test]
    fn no_noise_passes_its_bound() {
        for i in 0..20_000u64 {
            // Also rare ones, with many ones in front.
            let bits = mix(i) | !(u64::MAX >> (i % 64));
            let gumbel = Noise::gumbel_of(bits);
            assert!(gumbel <= Noise::bound(bits) && gumbel < Noise::MAX, "{bits:x}");
            assert!(gumbel.is_finite());
        }
        assert!(Noise::gumbel_of(0).is_finite() && Noise::gumbel_of(u64::MAX).is_finite());
    }

    #[test]
    fn stop_tokens_wait_for_tokens_min() {
        let row = [0.0, 9.0, 1.0];
        let sampling = Sampling { tokens_min: 2, stop: vec![1, 77], ..Sampling::default() };
        let after = |output: &[Token]| {
            let draw = Draw { sampling: &sampling, prompt: &[1, 1, 1], output };
            draw_row(&row, &draw, &mut Scratch::new(0)).unwrap().token
        };
        assert_eq!(after(&[0]), 2);
        assert_eq!(after(&[0, 0]), 1);
    }

    #[test]
    fn logprobs_are_of_the_row_before_temperature_and_filters() {
        let row = logits(3000, 9);
        let sampling = Sampling { top_k: 5, logprobs: Some(3), ..hot(3.0) };
        let out = draw(&row, &sampling, 2).unwrap();
        let log_sum = row.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
        let close =
            |token: Token, logprob: f32| (f64::from(row[token as usize]) - log_sum - f64::from(logprob)).abs() < 1e-5;
        assert!(close(out.token, out.logprob.unwrap()));
        let ranked = survivors(&row, &Sampling { top_k: 3, ..hot(1.0) });
        assert_eq!(out.top.iter().map(|top| top.token).collect::<Vec<_>>(), ranked);
        assert!(out.top.iter().all(|top| close(top.token, top.logprob)));
        assert_eq!(draw(&row, &hot(3.0), 2).unwrap().logprob, None);
    }
}
