//! Draws: the CPU backend's tokens and logprobs, bit for bit.

use super::device::{Launch, Memory, ORDERS};
use crate::arguments;
use crate::numbers::{Rng, cpu, filled};
use backend::cpu::Isa;
use backend::{Draw, DrawMask, Sample};
use types::{Activations, Sampling, TokenOut};

/// As `DrawRow`.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct DrawRow {
    key: u64,
    scale: f64,
    least: f64,
    is_greedy: u32,
    wants_logprob: u32,
}

/// As `Drawn`.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Drawn {
    token: u32,
    logprob: f32,
    largest: f32,
    log_sum: f32,
}

/// As `FilterRow`.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct FilterRow {
    key: u64,
    scale: f64,
    least: f64,
    top_p: f64,
    scale_f32: f32,
    top_k: u32,
    wants_logprob: u32,
    unused: u32,
}

const NONE: u32 = u32::MAX;
const BY_HOST: u32 = u32::MAX - 1;

fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl DrawRow {
    fn of(sampling: &Sampling, position: u32) -> DrawRow {
        let place = u64::from(sampling.choice) << 32 | u64::from(position);
        let least = if sampling.min_p > 0.0 { libm::log(f64::from(sampling.min_p)) } else { f64::NEG_INFINITY };
        DrawRow {
            key: mix(mix(sampling.seed.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ place),
            scale: 1.0 / f64::from(sampling.temperature),
            least,
            is_greedy: u32::from(sampling.is_greedy()),
            wants_logprob: u32::from(sampling.logprobs.is_some()),
        }
    }
}

impl FilterRow {
    fn of(sampling: &Sampling, position: u32) -> FilterRow {
        let DrawRow { key, scale, least, wants_logprob, .. } = DrawRow::of(sampling, position);
        FilterRow {
            key,
            scale,
            least,
            top_p: f64::from(sampling.top_p),
            scale_f32: (1.0 / sampling.temperature).min(f32::MAX),
            top_k: sampling.top_k,
            wants_logprob,
            unused: 0,
        }
    }
}

/// Draws from one row of logits per sampling, each at a position of its own.
fn check(name: &str, logits: &[Vec<f32>], samplings: &[Sampling], orders: &[i32]) {
    let rows = |draws: &[Draw<'_>]| draws.iter().map(|draw| DrawRow::of(draw.sampling, draw.position())).collect();
    check_kernel::<DrawRow>(name, "draw", logits, samplings, orders, rows);
}

/// As `check`, by the kernel that filters. Returns how many rows it left to the host.
fn check_filtered(name: &str, logits: &[Vec<f32>], samplings: &[Sampling], orders: &[i32]) -> usize {
    let rows = |draws: &[Draw<'_>]| draws.iter().map(|draw| FilterRow::of(draw.sampling, draw.position())).collect();
    check_kernel::<FilterRow>(name, "draw_filtered", logits, samplings, orders, rows)
}

fn check_kernel<Row: bytemuck::Pod>(
    name: &str,
    kernel: &str,
    logits: &[Vec<f32>],
    samplings: &[Sampling],
    orders: &[i32],
    rows: impl Fn(&[Draw<'_>]) -> Vec<Row>,
) -> usize {
    let n_vocab = logits[0].len();
    let all: Vec<f32> = logits.iter().flatten().copied().collect();
    let prompts: Vec<Vec<u32>> = (0..logits.len()).map(|i| vec![0; 3 * i + 1]).collect();
    let of = |(sampling, prompt)| Draw { sampling, prompt, output: &[], score: None, mask: DrawMask::Open };
    let draws: Vec<Draw<'_>> =
        samplings.iter().zip(&prompts).map(|(sampling, prompt)| of((sampling, &prompt[..]))).collect();
    let cpu = cpu(Isa::Plain, 1, Activations::F32);
    let mut expected = Vec::new();
    cpu.draw(&filled(&cpu, logits.len(), &all), &draws, &mut expected);
    let rows = Memory::of(&rows(&draws));
    let mut n_by_host = 0;
    for order in orders {
        let none = Drawn { token: 7, logprob: 7.0, largest: 7.0, log_sum: 7.0 };
        let (at, out) = (Memory::of(&all), Memory::filled(logits.len(), none));
        Launch { order: *order, ..Launch::new([logits.len(), 1, 1], 512) }
            .ok(kernel, arguments![at.start(), n_vocab as u32, rows.start(), out.start()]);
        let left = |drawn: &(usize, Drawn)| drawn.1.token == BY_HOST;
        let (by_host, drawn): (Vec<_>, Vec<_>) = out.read().into_iter().enumerate().partition(left);
        n_by_host = by_host.len();
        for (i, drawn) in drawn {
            let token = |out: &TokenOut| (out.token, out.logprob.map(f32::to_bits));
            let logprob = samplings[i].logprobs.map(|_| drawn.logprob.to_bits());
            let drawn = (drawn.token != NONE).then_some((drawn.token, logprob));
            assert_eq!(drawn, expected[i].as_ref().ok().map(token), "{name}: row {i} in order {order}");
        }
    }
    n_by_host
}

/// Some numbers, many of them equal.
fn logits(seed: u64, n: usize) -> Vec<f32> {
    let rng = &mut Rng(seed);
    (0..n).map(|_| (rng.unit() * 60.0).floor() / 4.0).collect()
}

#[test]
fn tokens_and_logprobs_are_the_cpus() {
    let greedy = Sampling { temperature: 0.0, logprobs: Some(0), ..Sampling::default() };
    let of = |temperature, min_p, seed| Sampling { temperature, min_p, seed, logprobs: Some(0), ..Sampling::default() };
    let samplings =
        [greedy, of(1.0, 0.0, 5), of(0.3, 0.0, 6), of(30.0, 0.0, u64::MAX), of(1.5, 0.05, 8), of(9.0, 1.0, 9)];
    for n_vocab in [1, 7, 513, 9001] {
        let rows: Vec<_> = (0..samplings.len()).map(|i| logits(i as u64, n_vocab)).collect();
        let orders = if n_vocab < 9000 { &ORDERS[..] } else { &ORDERS[2..3] };
        check(&format!("a vocabulary of {n_vocab}"), &rows, &samplings, orders);
    }
}

#[test]
fn many_draws_are_the_cpus() {
    let samplings: Vec<Sampling> = (0..40)
        .map(|seed| Sampling { temperature: 2.0, seed, choice: seed as u32 % 3, ..Sampling::default() })
        .collect();
    let rows: Vec<_> = (0..40).map(|i| logits(100 + i, 700)).collect();
    check("many", &rows, &samplings, &[4]);
}

#[test]
fn masks_are_not_drawn_and_no_number_draws_nothing() {
    let hot = Sampling { temperature: 5.0, seed: 3, ..Sampling::default() };
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let mut masked = vec![f32::NEG_INFINITY; 600];
    (masked[599], masked[300]) = (-5.0, -5.5);
    let with = |at: usize, x: f32| {
        let mut row = logits(1, 600);
        row[at] = x;
        row
    };
    let rows = [
        masked.clone(),
        masked,
        vec![f32::NEG_INFINITY; 600],
        with(555, f32::NAN),
        with(0, f32::INFINITY),
        vec![-0.0; 600],
        with(3, -f32::MAX),
    ];
    let samplings: Vec<Sampling> = [&hot, &greedy, &hot, &greedy, &hot, &greedy, &hot].into_iter().cloned().collect();
    check("special rows", &rows, &samplings, &ORDERS[..3]);
}

#[test]
fn filters_keep_what_the_cpus_keep() {
    let base = Sampling { temperature: 1.3, logprobs: Some(0), ..Sampling::default() };
    let of = |top_k, top_p, min_p, seed| Sampling { top_k, top_p, min_p, seed, ..base.clone() };
    let samplings = [
        of(1, 1.0, 0.0, 1),
        of(2, 1.0, 0.0, 2),
        of(40, 0.9, 0.0, 3),
        of(0, 0.5, 0.0, 4),
        of(0, 0.9, 0.02, 5),
        of(50, 0.95, 0.1, 6),
        of(1024, 1.0, 0.0, 7),
        of(0, 1e-6, 0.0, 8),
        of(300, 0.999, 1.0, 9),
        Sampling { temperature: 1e-40, ..of(5, 0.9, 0.0, 10) },
    ];
    for n_vocab in [1, 7, 513, 3001] {
        let rows: Vec<_> = (0..samplings.len()).map(|i| logits(200 + i as u64, n_vocab)).collect();
        let orders = if n_vocab < 600 { &ORDERS[2..] } else { &ORDERS[3..] };
        assert_eq!(check_filtered(&format!("a vocabulary of {n_vocab}"), &rows, &samplings, orders), 0);
    }
    // Rows of many equal numbers, of masks, of nothing, and with NaN.
    let mut masked = vec![f32::NEG_INFINITY; 600];
    (masked[599], masked[300], masked[301]) = (-5.0, -5.5, -0.0);
    let rows = [vec![1.0; 600], masked, vec![f32::NEG_INFINITY; 600], vec![f32::NAN; 600]];
    check_filtered("special rows", &rows, &samplings[3..7], &ORDERS[..2]);
}

#[test]
fn what_reaches_top_p_exactly_is_enough() {
    let of = |seed| Sampling { temperature: 1.0, top_p: 0.5, seed, ..Sampling::default() };
    let (rows, samplings): (Vec<_>, Vec<_>) = (0..20).map(|seed| (vec![2.0; 2], of(seed))).unzip();
    assert_eq!(check_filtered("two of equal weight", &rows, &samplings, &[0]), 0);
}

#[test]
fn what_needs_more_than_the_device_sorts_is_the_hosts() {
    let base = Sampling { temperature: 1.0, seed: 1, ..Sampling::default() };
    let many = [
        Sampling { top_k: 1025, ..base.clone() },
        Sampling { top_p: 0.9, ..base.clone() },
        Sampling { top_p: 0.9, min_p: 0.5, ..base.clone() },
        Sampling { top_k: 1024, top_p: 0.9, ..base.clone() },
        Sampling { top_k: 2000, min_p: 0.99, ..base },
    ];
    let mut peaked = vec![0.0; 1500];
    peaked[77] = 3.0;
    let rows = [vec![0.5; 1500], vec![0.5; 1500], vec![0.5; 1500], vec![0.5; 1500], peaked];
    assert_eq!(check_filtered("flat rows", &rows, &many, &[0]), 3);
}
