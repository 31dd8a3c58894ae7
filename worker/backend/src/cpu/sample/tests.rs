//! Each parameter against a definition without short cuts, and the same bits on each instruction set.

use super::noise::mix;
use super::*;
use std::collections::BTreeMap;
use types::{Dry, Penalties, Sampling, Tokens, Xtc};

/// Some logits, most of them small, with a few equal ones.
fn logits(n: usize, seed: u64) -> Vec<f32> {
    (0..n as u64).map(|i| ((mix(seed ^ mix(i)) >> 40) as f32 / 65536.0 - 128.0).floor() / 8.0).collect()
}

fn draw(row: &[f32], sampling: &Sampling, position: u32) -> Option<TokenOut> {
    let prompt = vec![0; position as usize];
    draw_row(
        row,
        &Draw { sampling, prompt: &prompt, output: &[], score: None, mask: DrawMask::Open },
        &mut SampleScratch::new(0),
    )
    .ok()
}

fn token(row: &[f32], sampling: &Sampling, position: u32) -> Token {
    draw(row, sampling, position).unwrap().token
}

fn hot(temperature: f32) -> Sampling {
    Sampling { temperature, seed: 7, ..Sampling::default() }
}

/// The survivors of the filters by definition, without short cuts, most likely first.
fn survivors(row: &[f32], sampling: &Sampling, position: u32) -> Vec<Token> {
    let mut order: Vec<usize> = (0..row.len()).filter(|&i| row[i] > f32::NEG_INFINITY).collect();
    order.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).unwrap().then(a.cmp(&b)));
    let largest = row[order[0]];
    if sampling.top_n_sigma > 0.0 {
        let n = order.len() as f64;
        let mean = order.iter().map(|&i| f64::from(row[i])).sum::<f64>() / n;
        let variance = order.iter().map(|&i| (f64::from(row[i]) - mean).powi(2)).sum::<f64>() / n;
        order.retain(|&i| f64::from(row[i]) >= f64::from(largest) - f64::from(sampling.top_n_sigma) * variance.sqrt());
    }
    let weight = |i: usize| (f64::from(row[i] - largest) / f64::from(sampling.temperature)).exp();
    order.retain(|&i| weight(i) >= f64::from(sampling.min_p));
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k as usize);
    }
    let sum = |order: &[usize]| order.iter().map(|&i| weight(i)).sum::<f64>();
    let reach = |order: &[usize], share: f64| {
        let (mut reached, target) = (0.0, share * sum(order));
        let enough = |&i: &usize| {
            reached += weight(i);
            reached >= target
        };
        order.iter().position(enough).map_or(order.len(), |n| n + 1)
    };
    if sampling.typical_p < 1.0 {
        let total = sum(&order);
        let surprise = |i: usize| -(weight(i) / total).ln();
        let entropy: f64 = order.iter().map(|&i| weight(i) / total * surprise(i)).sum();
        let nearness = |i: usize| (surprise(i) - entropy).abs() as f32;
        order.sort_by(|&a, &b| nearness(a).partial_cmp(&nearness(b)).unwrap().then(a.cmp(&b)));
        order.truncate(reach(&order, sampling.typical_p.into()));
        order.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).unwrap().then(a.cmp(&b)));
    }
    if sampling.top_p < 1.0 {
        order.truncate(reach(&order, sampling.top_p.into()));
    }
    let Xtc { probability: chance, threshold } = sampling.xtc;
    if Noise::new(sampling.seed, sampling.choice, position).coin() < f64::from(chance) {
        let total = sum(&order);
        let n_top = order.iter().filter(|&&i| weight(i) / total >= f64::from(threshold)).count();
        order.drain(..n_top.max(1) - 1);
    }
    order.into_iter().map(|i| i as Token).collect()
}

fn naive(row: &[f32], sampling: &Sampling, position: u32) -> Token {
    let noise = Noise::new(sampling.seed, sampling.choice, position);
    let largest = largest_of(Isa::Plain, row).unwrap();
    let scale = 1.0 / f64::from(sampling.temperature);
    let score = |t: Token| f64::from(row[t as usize] - largest) * scale + noise.gumbel(t);
    let better = |a: Token, b: Token| if (score(b), a) > (score(a), b) { b } else { a };
    survivors(row, sampling, position).into_iter().reduce(better).unwrap()
}

/// The edited row by definition, token by token.
fn edited(row: &[f32], sampling: &Sampling, prompt: &[Token], output: &[Token]) -> Vec<f32> {
    let count = |of: &[Token], token| of.iter().filter(|t| **t == token).count() as f32;
    let repeated = repetitions(&[prompt, output].concat(), &sampling.dry);
    let one = |(token, logit): (usize, &f32)| {
        let (token, mut logit) = (token as Token, *logit);
        let ends = |word: &Tokens| word.last() == Some(&token) && output.ends_with(&word[..word.len() - 1]);
        let is_hidden = sampling.stop.contains(&token) && (output.len() as u32) < sampling.tokens_min;
        let is_allowed = sampling.allowed.is_empty() || sampling.allowed.contains(&token);
        if is_hidden || !is_allowed || sampling.bad_words.iter().any(ends) {
            return f32::NEG_INFINITY;
        }
        logit += sampling.bias.iter().filter(|(t, _)| *t == token).map(|(_, bias)| bias).sum::<f32>();
        let Penalties { presence, frequency, repetition, window } = sampling.penalties;
        let log = [prompt, output].concat();
        let last = &log[log.len().saturating_sub(window as usize)..];
        // Repetition looks at the first, the others at the second.
        let (of_repetition, of_others) = if window > 0 { (last, last) } else { (&log[..], output) };
        if of_repetition.contains(&token) {
            logit = if logit > 0.0 { logit / repetition } else { logit * repetition };
        }
        logit -= frequency * count(of_others, token);
        logit -= if of_others.contains(&token) { presence } else { 0.0 };
        let Dry { multiplier, base, length_allowed, .. } = sampling.dry;
        match repeated.get(&token) {
            Some(n) if multiplier > 0.0 && *n >= length_allowed => {
                logit - multiplier * f64::from(base).powi((n - length_allowed) as i32) as f32
            }
            _ => logit,
        }
    };
    row.iter().enumerate().map(one).collect()
}

/// For each token, the length of the repetition that it would continue.
fn repetitions(log: &[Token], dry: &Dry) -> BTreeMap<Token, u32> {
    let broken = |end: &usize| dry.breakers.iter().any(|breaker| log[..*end].ends_with(breaker));
    let since_breaker = log.len() - (1..=log.len()).rev().find(broken).unwrap_or(0);
    let mut longest = BTreeMap::new();
    for (at, &token) in log.iter().enumerate() {
        let is_same = |n: &usize| *n <= at && log[at - n..at] == log[log.len() - n..];
        let same = (1..=since_breaker.min(edits::REPETITION_MAX)).take_while(is_same).count() as u32;
        let so_far = longest.entry(token).or_insert(0);
        *so_far = same.max(*so_far);
    }
    longest
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
fn filters_match_naive_sampler() {
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
        // Rare ones too, with many leading ones.
        let bits = mix(i) | !(u64::MAX >> (i % 64));
        let gumbel = Noise::gumbel_of(bits);
        assert!(gumbel <= Noise::gumbel_bound(bits) && gumbel < Noise::MAX, "{bits:x}");
        assert!(gumbel.is_finite());
    }
    assert!(Noise::gumbel_of(0).is_finite() && Noise::gumbel_of(u64::MAX).is_finite());
}

#[test]
fn stop_tokens_wait_for_tokens_min() {
    let row = [0.0, 9.0, 1.0];
    let sampling = Sampling { tokens_min: 2, stop: vec![1, 77], ..Sampling::default() };
    let after = |output: &[Token]| {
        let draw = Draw { sampling: &sampling, prompt: &[1, 1, 1], output, score: None, mask: DrawMask::Open };
        draw_row(&row, &draw, &mut SampleScratch::new(0)).unwrap().token
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
    let ranked = survivors(&row, &Sampling { top_k: 3, ..hot(1.0) }, 2);
    assert_eq!(out.top.iter().map(|top| top.token).collect::<Vec<_>>(), ranked);
    assert!(out.top.iter().all(|top| close(top.token, top.logprob)));
    assert_eq!(draw(&row, &hot(3.0), 2).unwrap().logprob, None);
    let of_tokens = Sampling { logprob_token_ids: vec![2999, 0, 7], ..sampling };
    let reported = draw(&row, &of_tokens, 2).unwrap();
    assert_eq!(reported.top.iter().map(|top| top.token).collect::<Vec<_>>(), [out.token, 2999, 0, 7]);
    assert!(reported.token == out.token && reported.top.iter().all(|top| close(top.token, top.logprob)));
    let sampling = Sampling { logprob_token_ids: vec![5], logprobs: Some(0), ..Sampling::default() };
    let alone = Draw { sampling: &sampling, prompt: &[], output: &[], score: None, mask: DrawMask::Open };
    assert!(unedited(&alone).is_none(), "a device reports only the drawn token");
}

/// Every filter alone and some together.
fn filters() -> Vec<Sampling> {
    let xtc = |probability, threshold| Xtc { probability, threshold };
    vec![
        Sampling { typical_p: 0.5, ..hot(1.0) },
        Sampling { typical_p: 0.95, top_k: 40, ..hot(0.7) },
        Sampling { top_n_sigma: 1.0, ..hot(1.5) },
        Sampling { top_n_sigma: 2.5, top_p: 0.9, ..hot(3.0) },
        Sampling { xtc: xtc(1.0, 0.02), ..hot(1.0) },
        Sampling { xtc: xtc(0.5, 0.01), top_p: 0.95, ..hot(1.0) },
        Sampling { xtc: xtc(0.5, 0.0), min_p: 0.02, ..hot(2.0) },
        Sampling { min_p: 0.1, top_p: 0.8, ..hot(1.0) },
        Sampling {
            min_p: 0.01,
            top_p: 0.9,
            top_k: 100,
            typical_p: 0.9,
            top_n_sigma: 3.0,
            xtc: xtc(0.5, 0.05),
            ..hot(1.3)
        },
    ]
}

#[test]
fn every_filter_matches_naive_sampler() {
    for (i, sampling) in filters().into_iter().enumerate() {
        let mut distinct = std::collections::BTreeSet::new();
        for seed in 0..4 {
            let row = logits(if seed < 2 { 700 } else { 3000 }, seed + 10 * i as u64);
            for position in 0..12 {
                let sampling = Sampling { seed, ..sampling.clone() };
                let drawn = token(&row, &sampling, position);
                assert_eq!(drawn, naive(&row, &sampling, position), "{sampling:?} at {position}");
                distinct.insert((seed, drawn));
            }
        }
        assert!(distinct.len() > 8, "{sampling:?} always draws the same tokens");
    }
}

#[test]
fn xtc_excludes_top_choices_by_chance() {
    let mut row = vec![-20.0; 300];
    (row[7], row[9], row[11]) = (3.0, 2.5, 2.0);
    let with = |probability| Sampling { xtc: Xtc { probability, threshold: 0.1 }, ..hot(1.0) };
    assert!((0..100).all(|position| token(&row, &with(1.0), position) == 11));
    let n = (0..4000).filter(|position| token(&row, &with(0.25), *position) == 11).count();
    // XTC drops the token in a quarter of the draws; otherwise it is drawn with probability 0.19.
    assert!((1400..1750).contains(&n), "{n}");
    assert!((0..100).any(|position| token(&row, &with(0.0), position) == 7));
}

/// Every edit alone and all together.
fn edits() -> Vec<Sampling> {
    let greedy = Sampling::default();
    let penalties = |presence, frequency, repetition| Penalties { presence, frequency, repetition, window: 0 };
    let dry = Dry { multiplier: 0.8, base: 1.75, length_allowed: 2, breakers: vec![vec![3], vec![5, 1]] };
    vec![
        Sampling { penalties: penalties(0.7, 0.0, 1.0), ..greedy.clone() },
        Sampling { penalties: penalties(0.0, 0.3, 1.0), ..greedy.clone() },
        Sampling { penalties: penalties(-0.5, -0.25, 1.0), ..greedy.clone() },
        Sampling { penalties: penalties(0.0, 0.0, 1.3), ..greedy.clone() },
        Sampling { penalties: Penalties { window: 5, ..penalties(0.7, 0.3, 1.3) }, ..greedy.clone() },
        Sampling { penalties: Penalties { window: u32::MAX, ..penalties(0.0, 0.3, 1.0) }, ..greedy.clone() },
        Sampling { dry: Dry { breakers: vec![], ..dry.clone() }, ..greedy.clone() },
        Sampling { dry: dry.clone(), ..greedy.clone() },
        Sampling { bias: vec![(2, 5.5), (4, -100.0), (999, 1.0)], ..greedy.clone() },
        Sampling { allowed: vec![1, 4, 999], ..greedy.clone() },
        Sampling { bad_words: vec![vec![2], vec![1, 4], vec![4, 1, 0], vec![999]], ..greedy.clone() },
        Sampling { stop: vec![0, 6], tokens_min: 9, ..greedy.clone() },
        Sampling {
            penalties: penalties(0.2, 0.1, 1.2),
            dry,
            bias: vec![(1, 0.5)],
            allowed: vec![0, 1, 2, 3, 4, 5, 6],
            bad_words: vec![vec![6, 6]],
            stop: vec![2],
            tokens_min: 4,
            ..greedy
        },
    ]
}

#[test]
fn edits_match_reference() {
    for (i, sampling) in edits().iter().enumerate() {
        let mut n_changed = 0;
        let mut scratch = SampleScratch::new(0);
        for seed in 0..60u64 {
            let row: Vec<f32> = logits(8, seed).iter().map(|logit| logit / 4.0).collect();
            // Few tokens, so that there are repetitions.
            let log: Vec<Token> = (0..30 + seed).map(|at| (mix(seed ^ mix(at)) % 7) as Token).collect();
            let (prompt, output) = log.split_at((mix(seed) % (log.len() as u64 + 1)) as usize);
            let draw = Draw { sampling, prompt, output, score: None, mask: DrawMask::Open };
            edits::edit(&row, &draw, &mut scratch.edited, &mut scratch.marks);
            let expected = edited(&row, sampling, prompt, output);
            assert_eq!(scratch.edited, expected, "{sampling:?} after {prompt:?} {output:?}");
            assert!(scratch.marks.iter().all(|mark| *mark == 0), "marks are cleared");
            n_changed += usize::from(row != expected);
        }
        assert!(n_changed > 5, "edit {i} changed {n_changed} rows");
        assert!(!edits::is_plain(&Draw { sampling, prompt: &[1], output: &[], score: None, mask: DrawMask::Open }));
    }
    assert!(edits::is_plain(&Draw {
        sampling: &hot(1.0),
        prompt: &[1],
        output: &[],
        score: None,
        mask: DrawMask::Open
    }));
}

#[test]
fn endless_repetition_has_finite_penalty() {
    let dry = Dry { multiplier: 100.0, base: 10.0, length_allowed: 1, breakers: vec![] };
    let sampling = Sampling { dry, ..Sampling::default() };
    let output = [5; 3000];
    let draw = Draw { sampling: &sampling, prompt: &[5], output: &output, score: None, mask: DrawMask::Open };
    let out = draw_row(&[1.0, 0.0, 0.0, 0.0, 0.0, 9.0], &draw, &mut SampleScratch::new(0));
    assert_eq!(out.unwrap().token, 0);
    // The only allowed token is drawn even if it is penalized.
    let only = Sampling { allowed: vec![5], ..sampling.clone() };
    let draw = Draw { sampling: &only, ..draw };
    let out = draw_row(&[1.0, 0.0, 0.0, 0.0, 0.0, 9.0], &draw, &mut SampleScratch::new(0));
    assert_eq!(out.unwrap().token, 5);
}

#[test]
fn where_all_is_forbidden_nothing_is_drawn() {
    let row = logits(50, 1);
    assert_eq!(draw(&row, &Sampling { allowed: vec![50, 51], ..hot(1.0) }, 0), None);
    let bad_words = (0..50).map(|token| vec![token]).collect();
    assert_eq!(draw(&row, &Sampling { bad_words, ..Sampling::default() }, 0), None);
}

/// A mask of about one token in `one_in`.
fn mask(n_vocab: usize, seed: u64, one_in: u64) -> Vec<u32> {
    let bit = |i: u64, bit: u64| u32::from(mix(seed ^ mix(32 * i + bit)).is_multiple_of(one_in)) << bit;
    (0..n_vocab.div_ceil(32) as u64).map(|i| (0..32).fold(0, |word, at| word | bit(i, at))).collect()
}

fn allows(words: &[u32], token: usize) -> bool {
    words.get(token / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// A masked draw is a draw from a row that never had the other logits; its logprobs are those of the whole row.
#[test]
fn a_mask_comes_before_everything_but_logprobs() {
    let hot_edits = edits().into_iter().map(|sampling| Sampling { temperature: 1.2, ..sampling });
    for sampling in filters().into_iter().chain(edits()).chain(hot_edits) {
        let sampling = Sampling { logprobs: Some(3), ..sampling };
        let plain = Sampling { temperature: 0.0, logprobs: Some(3), ..Sampling::default() };
        for seed in 0..12 {
            let row = logits(300, seed);
            // The last tokens have no word.
            let words = mask(290, seed, [1, 3, 60][seed as usize % 3]);
            let hidden: Vec<f32> = (0..row.len())
                .map(|token| if allows(&words, token) { row[token] } else { f32::NEG_INFINITY })
                .collect();
            let log: Vec<Token> = (0..40).map(|at| (mix(seed ^ mix(at)) % 7) as Token).collect();
            let draw = Draw {
                sampling: &sampling,
                prompt: &log[..15],
                output: &log[15..],
                score: None,
                mask: DrawMask::Of(&words),
            };
            let (scratch, open) = (&mut SampleScratch::new(0), Draw { mask: DrawMask::Open, ..draw });
            let masked = draw_row(&row, &draw, scratch);
            let expected = draw_row(&hidden, &open, scratch);
            let token = |out: &Result<TokenOut, DrawError>| out.as_ref().ok().map(|out| out.token);
            assert_eq!(token(&masked), token(&expected), "{sampling:?}");
            let Ok(out) = masked else { continue };
            assert!(allows(&words, out.token as usize));
            let score = Some(crate::ScoreRequest { token: out.token, n_top: 3 });
            assert_eq!(
                Ok(out),
                draw_row(&row, &Draw { sampling: &plain, score, ..open }, scratch),
                "logprobs are of the whole row"
            );
        }
    }
}

#[test]
fn a_token_that_is_alone_in_its_mask_is_taken_without_a_draw() {
    let row = logits(100, 3);
    for sampling in filters().into_iter().chain([Sampling::default()]) {
        for only in [0, 31, 32, 99] {
            let mut words = vec![0; 4];
            words[only as usize / 32] = 1 << (only % 32);
            assert_eq!(DrawMask::Of(&words).only(), Some(only));
            let draw =
                Draw { sampling: &sampling, prompt: &[1], output: &[2], score: None, mask: DrawMask::Of(&words) };
            assert_eq!(draw_row(&row, &draw, &mut SampleScratch::new(0)).unwrap().token, only);
            // The long way draws the same.
            assert_eq!(drawn_edited(&row, &draw, &mut SampleScratch::new(0)), Ok(only), "{sampling:?}");
        }
    }
    for words in [&[][..], &[0, 0], &[3, 0], &[1, 1]] {
        assert_eq!(DrawMask::Of(words).only(), None, "{words:?}");
    }
}

#[test]
fn undrawn_row_reports_its_cause() {
    let row = logits(64, 1);
    let none = [0, 0];
    let (one, two) = ([1 << 5, 0], [1 << 5 | 1 << 6, 0]);
    let allowed = |tokens: &[Token]| Sampling { allowed: tokens.to_vec(), ..Sampling::default() };
    let bad_words = Sampling { bad_words: vec![vec![5], vec![9, 6]], ..Sampling::default() };
    let stops = Sampling { stop: vec![5, 6], tokens_min: 9, ..hot(1.0) };
    type Case<'a> = (&'a [u32], Sampling, &'a [Token], Result<Token, DrawError>);
    let cases: [Case<'_>; 9] = [
        (&none, Sampling::default(), &[], Err(DrawError::NothingLeft)),
        (&[], hot(1.0), &[], Err(DrawError::NothingLeft)),
        (&one, allowed(&[4, 6]), &[], Err(DrawError::NothingLeft)),
        (&two, allowed(&[4, 6]), &[], Ok(6)),
        (&one, bad_words.clone(), &[], Err(DrawError::NothingLeft)),
        (&two, bad_words.clone(), &[], Ok(6)),
        (&two, bad_words, &[9], Err(DrawError::NothingLeft)),
        (&two, stops.clone(), &[9], Err(DrawError::NothingLeft)),
        (&one, stops, &[9; 9], Ok(5)),
    ];
    for (words, sampling, output, expected) in &cases {
        let draw = Draw { sampling, prompt: &[1], output, score: None, mask: DrawMask::Of(words) };
        let token = |row: &[f32], draw: &Draw<'_>| draw_row(row, draw, &mut SampleScratch::new(0)).map(|out| out.token);
        assert_eq!(token(&row, &draw), *expected, "{words:?} {sampling:?} {output:?}");
        let late = Draw { mask: DrawMask::Late, ..draw };
        assert_eq!(token(&row, &late), Err(DrawError::Late));
        let mut broken = row.clone();
        broken[40] = f32::NAN;
        assert_eq!(token(&broken, &draw), Err(DrawError::NotNumbers), "a mask hides no NaN");
    }
    assert!(
        unedited(&Draw { sampling: &hot(1.0), prompt: &[1], output: &[], score: None, mask: DrawMask::Of(&one) })
            .is_none()
    );
    assert!(
        unedited(&Draw { sampling: &hot(1.0), prompt: &[1], output: &[], score: None, mask: DrawMask::Late }).is_none()
    );
}

#[test]
fn every_instruction_set_draws_the_same_bits() {
    let isas: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.is_supported()).collect();
    let hot_edits = edits().into_iter().map(|sampling| Sampling { temperature: 0.9, top_p: 0.9, ..sampling });
    for sampling in filters().into_iter().chain(edits()).chain(hot_edits) {
        let sampling = Sampling { logprobs: Some(4), ..sampling };
        for seed in 0..8 {
            let row = logits(997, seed);
            let log: Vec<Token> = (0..40).map(|at| (mix(seed ^ mix(at)) % 7) as Token).collect();
            let draw =
                Draw { sampling: &sampling, prompt: &log[..15], output: &log[15..], score: None, mask: DrawMask::Open };
            let plain = draw_row(&row, &draw, &mut SampleScratch::new(0));
            for &isa in &isas {
                let mut scratch = SampleScratch { isa, ..SampleScratch::new(0) };
                assert_eq!(draw_row(&row, &draw, &mut scratch), plain, "{isa:?} {sampling:?}");
            }
        }
    }
}

#[test]
fn known_token_is_reported_not_drawn() {
    let row = logits(500, 4);
    let sampling = Sampling { allowed: vec![3], logprobs: Some(5), ..hot(1.0) };
    let score = Some(crate::ScoreRequest { token: 77, n_top: 2 });
    let draw = Draw { sampling: &sampling, prompt: &[1], output: &[], score, mask: DrawMask::Open };
    let out = draw_row(&row, &draw, &mut SampleScratch::new(0)).unwrap();
    let log_sum = row.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
    assert_eq!((out.token, out.top.len()), (77, 2));
    assert!((f64::from(out.logprob.unwrap()) - (f64::from(row[77]) - log_sum)).abs() < 1e-5);
}
