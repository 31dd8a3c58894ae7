//! Routing, grouping and summing of experts: the CPU backend's choices, the stable order, the leaves' tree.

use super::device::{Launch, Memory, ORDERS, UNWRITTEN};
use super::linear::grouped;
use crate::arguments;
use crate::numbers::{Rng, assert_bits, cpu, filled};
use backend::cpu::{Isa, Vector};
use backend::{Experts, Memory as _, Routing, Scoring};
use types::Activations;
use types::leaves::{aligned_runs, sum_runs};

#[test]
fn choices_are_the_cpus() {
    // Some of the scores are equal, some are no numbers.
    for (i, (n_rows, n_experts, n_used, normalized)) in
        [(1, 1, 1, false), (7, 8, 2, true), (17, 60, 4, false), (5, 128, 8, true), (3, 33, 32, true)]
            .into_iter()
            .enumerate()
    {
        let rng = &mut Rng(i as u64);
        let mut scores: Vec<f32> = (0..n_rows * n_experts).map(|_| (rng.unit() * 8.0).floor() / 2.0).collect();
        scores.iter_mut().step_by(23).skip(1).for_each(|score| *score = f32::NAN);
        let cpu = cpu(Isa::Plain, 1, Activations::F32);
        let mut routes =
            cpu.routes(n_rows, 32, 32, Routing { n_experts, n_used, normalized, scoring: Scoring::Softmax }).unwrap();
        cpu.route(&filled(&cpu, n_rows, &scores), None, n_rows, &mut routes);
        for order in ORDERS {
            let (chosen, weights) =
                (Memory::filled(n_rows * n_used, 99u32), Memory::filled(n_rows * n_used, UNWRITTEN));
            let (at, experts, used) = (Memory::of(&scores), n_experts as u32, n_used as u32);
            Launch { order, ..Launch::new([n_rows, 1, 1], 32) }.ok(
                "route",
                arguments![at.start(), experts, used, u32::from(normalized), chosen.start(), weights.start()],
            );
            for (row, (chosen, weights)) in chosen.read().chunks(n_used).zip(weights.read().chunks(n_used)).enumerate()
            {
                let (expected_chosen, expected) = routes.choices_of_row(row);
                assert_eq!(chosen, expected_chosen, "row {row} of {n_experts}");
                if expected.iter().all(|weight| !weight.is_nan()) {
                    assert_bits(&format!("row {row} of {n_experts}"), weights, expected);
                } else {
                    assert!(weights.iter().any(|weight| weight.is_nan()));
                }
            }
        }
    }
}

/// Choices of some rows, ascending in each.
fn choices(rng: &mut Rng, n_rows: usize, n_used: usize, n_experts: usize) -> Vec<u32> {
    let mut chosen = Vec::new();
    for _ in 0..n_rows {
        let mut row: Vec<u32> = Vec::new();
        while row.len() < n_used {
            let expert = rng.below(n_experts) as u32;
            if !row.contains(&expert) {
                row.push(expert);
            }
        }
        row.sort_unstable();
        chosen.extend(row);
    }
    chosen
}

#[test]
fn choices_are_grouped_by_expert() {
    for (i, (n_rows, n_used, n_experts)) in [(1, 1, 1), (1, 2, 5), (17, 4, 12), (70, 2, 3)].into_iter().enumerate() {
        let chosen = choices(&mut Rng(i as u64), n_rows, n_used, n_experts);
        let n = chosen.len();
        let at = Memory::of(&chosen);
        let (starts, order, place) =
            (Memory::filled(n_experts + 1, 7u32), Memory::filled(n, 7u32), Memory::filled(n, 7u32));
        Launch { order: ORDERS[i], ..Launch::new([n_experts, 1, 1], 32) }
            .ok("group_choices", arguments![at.start(), n as u32, starts.start(), order.start(), place.start()]);
        assert_eq!((starts.read(), order.read(), place.read()), grouped(&chosen, n_experts));
    }
}

#[test]
fn experts_add_up_by_the_tree() {
    let (n_rows, cols) = (6, 300);
    for (n_experts, n_used) in [(1, 1), (6, 3), (8, 8), (60, 4), (128, 8), (256, 5)] {
        let rng = &mut Rng(n_experts as u64);
        let chosen = choices(rng, n_rows, n_used, n_experts);
        let (_, _, place) = grouped(&chosen, n_experts);
        let (y, weights) = (rng.floats(n_rows * n_used * cols), rng.floats(n_rows * n_used));
        let n = n_experts as u32;
        let made = |choice: usize, column: usize| y[place[choice] as usize * cols + column] * weights[choice];
        for cut in [0, n / 3, n] {
            let runs: Vec<_> = [0..cut, cut..n].into_iter().flat_map(|owned| aligned_runs(owned, n)).collect();
            let planes = fold(&runs, (n_rows, n_used, cols), &y, &place, &chosen, &weights);
            for i in 0..n_rows * cols {
                let (row, column) = (i / cols, i % cols);
                // By definition every expert is a leaf, and absent ones add nothing.
                let leaf = |expert: u32| {
                    let choice = (row * n_used..(row + 1) * n_used).find(|choice| chosen[*choice] == expert);
                    (expert..expert + 1, choice.map_or(-0.0, |choice| made(choice, column)))
                };
                let whole = sum_runs(&(0..n).map(leaf).collect::<Vec<_>>());
                let of_planes: Vec<_> =
                    runs.iter().enumerate().map(|(j, run)| (run.clone(), planes[j * n_rows * cols + i])).collect();
                assert_eq!(sum_runs(&of_planes).to_bits(), whole.to_bits(), "{n_experts} experts cut at {cut}");
            }
        }
    }
}

fn fold(
    runs: &[std::ops::Range<u32>],
    (n_rows, n_used, cols): (usize, usize, usize),
    y: &[f32],
    place: &[u32],
    chosen: &[u32],
    weights: &[f32],
) -> Vec<f32> {
    let bounds: Vec<u32> = runs.iter().flat_map(|run| [run.start, run.end]).collect();
    let (y, place, chosen) = (Memory::of(y), Memory::of(place), Memory::of(chosen));
    let (weights, bounds) = (Memory::of(weights), Memory::of(&bounds));
    let out = Memory::filled(runs.len() * n_rows * cols, UNWRITTEN);
    Launch { order: 1, ..Launch::new([cols.div_ceil(256), n_rows, runs.len()], 256) }.ok(
        "fold_experts",
        arguments![
            y.start(),
            place.start(),
            chosen.start(),
            weights.start(),
            n_used as u32,
            bounds.start(),
            cols as u32,
            out.start(),
        ],
    );
    out.read()
}

#[test]
fn sigmoids_are_chosen_as_on_the_cpu() {
    for (i, (n_experts, n_used, n_groups, of_groups, normalized)) in
        [(6, 3, 3, 2, true), (4, 2, 1, 1, false), (128, 8, 1, 1, true), (160, 6, 8, 3, true), (1024, 32, 32, 4, false)]
            .into_iter()
            .enumerate()
    {
        let rng = &mut Rng(70 + i as u64);
        // Some are equal.
        let scores: Vec<f32> = (0..9 * n_experts).map(|_| (rng.unit() * 8.0).floor() / 2.0).collect();
        let correction = rng.floats(n_experts);
        let cpu = cpu(Isa::Plain, 1, Activations::F32);
        let scoring = Scoring::Sigmoid { n_groups, n_used: of_groups, factor: 2.5 };
        let mut routes = cpu.routes(9, 32, 32, Routing { n_experts, n_used, normalized, scoring }).unwrap();
        cpu.route(&filled(&cpu, 9, &scores), Some(&Vector::new(&correction)), 9, &mut routes);
        for order in ORDERS {
            let (chosen, weights) = (Memory::filled(9 * n_used, 99u32), Memory::filled(9 * n_used, UNWRITTEN));
            let (at, by) = (Memory::of(&scores), Memory::of(&correction));
            let sizes = [n_experts, n_used, n_groups, of_groups].map(|n| n as u32);
            Launch { order, ..Launch::new([9, 1, 1], 32) }.ok(
                "route_sigmoid",
                arguments![
                    at.start(),
                    by.start(),
                    sizes[0],
                    sizes[1],
                    sizes[2],
                    sizes[3],
                    u32::from(normalized),
                    2.5f32,
                    chosen.start(),
                    weights.start()
                ],
            );
            let rows = chosen.read().into_iter().zip(weights.read()).collect::<Vec<_>>();
            for (row, got) in rows.chunks(n_used).enumerate() {
                let (ids, expected) = routes.choices_of_row(row);
                assert_eq!(got.iter().map(|(id, _)| *id).collect::<Vec<_>>(), ids, "row {row} of {n_experts}");
                let weights: Vec<f32> = got.iter().map(|(_, weight)| *weight).collect();
                assert_bits(&format!("row {row} of {n_experts}"), &weights, expected);
            }
        }
    }
}

#[test]
fn choices_get_the_bias_of_their_expert() {
    let (n_rows, n_used, n_experts, cols) = (11, 3, 7, 300);
    let rng = &mut Rng(80);
    let chosen = choices(rng, n_rows, n_used, n_experts);
    let (_, order, _) = grouped(&chosen, n_experts);
    let (x, bias) = (rng.floats(n_rows * n_used * cols), rng.floats(3 * cols));
    let (out, at, order_at, bias_at) = (Memory::of(&x), Memory::of(&chosen), Memory::of(&order), Memory::of(&bias));
    // Of experts 2, 3 and 4.
    Launch { order: 2, ..Launch::new([n_rows * n_used, 1, 1], 256) }.ok(
        "add_expert_bias",
        arguments![out.start(), cols as u32, at.start(), order_at.start(), 2u32, 3u32, bias_at.start()],
    );
    let expected = |i: usize| match chosen[order[i / cols] as usize] {
        expert @ 2..5 => x[i] + bias[(expert as usize - 2) * cols + i % cols],
        _ => x[i],
    };
    assert_bits("biases", &out.read(), &(0..x.len()).map(expected).collect::<Vec<_>>());
}
