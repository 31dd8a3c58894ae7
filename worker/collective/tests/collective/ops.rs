//! The operations, over every wire, for random layouts: the same bits as one rank alone.

use crate::common;
use crate::common::{Rng, each};
use backend::Memory;
use backend::cpu::Cpu;
use collective::{Error, Mesh, Ranks};
use std::ops::Range;
use types::leaves::{aligned_runs, sum_runs};
use types::{Layout, StepId};

/// The values of all leaves: [n_leaves, n_rows, n_cols]
struct Leaves {
    n_leaves: u32,
    n_rows: usize,
    n_cols: usize,
    values: Vec<f32>,
}

impl Leaves {
    fn random(rng: &mut Rng, n_leaves: u32, n_rows: usize, n_cols: usize) -> Leaves {
        Leaves { n_leaves, n_rows, n_cols, values: rng.floats(n_leaves as usize * n_rows * n_cols) }
    }

    fn size(&self) -> usize {
        self.n_rows * self.n_cols
    }

    /// Returns one plane: the tree sums an aligned run with the run's first leaf as zero.
    fn plane(&self, run: &Range<u32>) -> Vec<f32> {
        let leaf = |i: u32, at: usize| (i - run.start..i - run.start + 1, self.values[i as usize * self.size() + at]);
        (0..self.size()).map(|at| sum_runs(&run.clone().map(|i| leaf(i, at)).collect::<Vec<_>>())).collect()
    }

    /// Sums a rank's share, and returns the bits of the result.
    fn sum(&self, rank: &mut Ranks<Cpu>, cpu: &Cpu) -> Vec<u32> {
        let runs = aligned_runs(rank.owned_units(self.n_leaves), self.n_leaves);
        let mut planes = cpu.buffer(runs.len().max(1) * self.n_rows, self.n_cols).unwrap();
        for (i, run) in runs.iter().enumerate() {
            cpu.write(&mut planes, i * self.n_rows, &self.plane(run));
        }
        rank.all_reduce(cpu, &mut planes, &runs, self.n_leaves, self.n_rows).unwrap();
        bits(cpu, &planes, self.n_rows, self.n_cols)
    }

    fn reference(&self) -> Vec<u32> {
        self.plane(&(0..self.n_leaves)).iter().map(|value| value.to_bits()).collect()
    }
}

fn bits(cpu: &Cpu, buffer: &<Cpu as Memory>::Buffer, n_rows: usize, n_cols: usize) -> Vec<u32> {
    let mut values = vec![0.0; n_rows * n_cols];
    cpu.read(buffer, 0..n_rows, &mut values);
    values.iter().map(|value| value.to_bits()).collect()
}

fn filled(cpu: &Cpu, n_rows: usize, n_cols: usize, value: impl Fn(usize, usize) -> f32) -> <Cpu as Memory>::Buffer {
    let mut buffer = cpu.buffer(n_rows, n_cols).unwrap();
    let values: Vec<f32> = (0..n_rows * n_cols).map(|i| value(i / n_cols, i % n_cols)).collect();
    cpu.write(&mut buffer, 0, &values);
    buffer
}

/// Returns a number that identifies its place.
fn mark(row: usize, col: usize) -> f32 {
    (row * 100_003 + col) as f32 + 0.5
}

/// Small sums, sums as large as one frame, and large ones, one after another on the same ranks.
const SUMS: &[(u32, usize, usize)] =
    &[(1, 1, 5), (9, 1, 576), (16, 3, 100), (16, 1, 16384), (7, 40, 576), (8, 65, 333), (43, 2, 9), (3, 7, 40_000)];

#[test]
fn sums_have_the_bits_of_one_rank() {
    let mut rng = Rng(1);
    let sums: Vec<Leaves> = SUMS.iter().map(|(n, rows, cols)| Leaves::random(&mut rng, *n, *rows, *cols)).collect();
    let references: Vec<_> = sums.iter().map(Leaves::reference).collect();
    for tp in [2, 2, 3, 4, 5] {
        let layout = rng.layout(tp, 1);
        for (wire, ranks) in common::wires(&layout) {
            let all = each(ranks, |rank, cpu| sums.iter().map(|sum| sum.sum(rank, cpu)).collect::<Vec<_>>());
            for (rank, sums) in all.iter().enumerate() {
                assert!(*sums == references, "rank {rank} of {layout:?} over {wire}");
            }
        }
    }
}

#[test]
fn rows_come_from_their_owners() {
    const N_COLS: usize = 700;
    let mut rng = Rng(2);
    for tp in 2..=4u16 {
        let layout = rng.layout(tp.into(), 1);
        for (wire, ranks) in common::wires(&layout) {
            each(ranks, |rank, cpu| {
                for n_rows in [0, 1, 5, 90] {
                    let owner = |row: usize| (row * 7 % 5 % usize::from(tp)) as u32;
                    let me = rank.stage_rank();
                    let mut buffer =
                        filled(cpu, 90, N_COLS, |row, col| if owner(row) == me { mark(row, col) } else { -1.0 });
                    rank.share_rows(cpu, &mut buffer, owner, n_rows).unwrap();
                    let whole = filled(cpu, 90, N_COLS, mark);
                    assert!(
                        bits(cpu, &buffer, n_rows, N_COLS) == bits(cpu, &whole, n_rows, N_COLS),
                        "{n_rows} rows, {wire}"
                    );
                }
            });
        }
    }
}

#[test]
fn columns_gather_on_the_first_rank() {
    let mut rng = Rng(3);
    for (tp, n_units, n_rows) in [(2, 49_152, 3), (3, 1000, 9), (4, 3, 2), (3, 100_000, 1)] {
        let layout = rng.layout(tp, 1);
        for (wire, ranks) in common::wires(&layout) {
            each(ranks, |rank, cpu| {
                let owned = rank.owned_units(n_units);
                let mine = filled(cpu, n_rows, owned.len().max(1), |row, col| mark(row, owned.start as usize + col));
                let mut whole = cpu.buffer(n_rows, n_units as usize).unwrap();
                rank.gather_columns(cpu, &mine, &mut whole, n_units, n_rows).unwrap();
                let expected = filled(cpu, n_rows, n_units as usize, mark);
                let same =
                    bits(cpu, &whole, n_rows, n_units as usize) == bits(cpu, &expected, n_rows, n_units as usize);
                assert_eq!(same, rank.stage_rank() == 0, "{wire}, {layout:?}");
            });
        }
    }
}

/// A pipeline whose tokens circulate: rows come from the same rank of the previous stage, in order.
#[test]
fn stages_hand_on_rows_and_tokens() {
    const N_STEPS: u64 = 5;
    let mut rng = Rng(4);
    for (tp, pp) in [(1, 2), (2, 2), (1, 3), (3, 2), (2, 3)] {
        let layout = rng.layout(tp, pp);
        for (wire, ranks) in common::wires(&layout) {
            each(ranks, |rank, cpu| {
                for step in 0..N_STEPS {
                    pipeline_step(rank, cpu, step, &layout, wire);
                }
            });
        }
    }
}

fn pipeline_step(rank: &mut Ranks<Cpu>, cpu: &Cpu, step: u64, layout: &Layout, wire: &str) {
    const N_COLS: usize = 576;
    let n_rows = [1, 9, 400][step as usize % 3];
    let (part, tp) = (rank.part().clone(), rank.stage_rank() as usize);
    let stream = filled(cpu, n_rows, N_COLS, |row, col| mark(row, col) + (step * 1000) as f32 + tp as f32);
    if !part.is_first() {
        let mut received = cpu.buffer(n_rows, N_COLS).unwrap();
        rank.recv_rows(cpu, &mut received, n_rows).unwrap();
        assert!(bits(cpu, &received, n_rows, N_COLS) == bits(cpu, &stream, n_rows, N_COLS), "{wire} {layout:?}");
    }
    if !part.is_last() {
        rank.send_rows(cpu, &stream, n_rows).unwrap();
    }
    let drawn = [Some(step as u32), None, Some(77)];
    let drawn = &drawn[..step as usize % 4];
    if part.is_sampler() {
        rank.send_tokens(StepId(step), drawn).unwrap();
    } else if part.is_first() {
        let mut tokens = vec![Some(9)];
        rank.recv_tokens(StepId(step), &mut tokens).unwrap();
        assert_eq!(tokens, drawn, "{wire} {layout:?}");
    }
}

#[test]
fn tokens_go_to_the_whole_stage_where_there_is_one() {
    let layout = Rng(5).layout(3, 1);
    for (_, ranks) in common::wires(&layout) {
        each(ranks, |rank, cpu| pipeline_step(rank, cpu, 2, &layout, "one stage"));
    }
}

#[test]
fn what_a_rank_does_not_have_is_refused() {
    let mut solo = Ranks::solo(2);
    let cpu = common::cpu();
    let mut buffer = filled(&cpu, 2, 3, mark);
    assert!(matches!(solo.send_rows(&cpu, &buffer, 1), Err(Error::NoPeer(_))));
    assert!(matches!(solo.recv_rows(&cpu, &mut buffer, 1), Err(Error::NoPeer(_))));
    assert!(matches!(solo.recv_tokens(StepId(0), &mut Vec::new()), Err(Error::NoPeer(_))));
    assert!(matches!(solo.all_reduce(&cpu, &mut buffer, &[], 2, 1), Err(Error::LeavesMissing { .. })));
    let mut whole = cpu.buffer(2, 3).unwrap();
    solo.gather_columns(&cpu, &buffer, &mut whole, 3, 2).unwrap();
    assert_eq!(bits(&cpu, &whole, 2, 3), bits(&cpu, &buffer, 2, 3));
    for mut rank in common::over_host(Mesh::in_process(&Rng(6).layout(2, 1))) {
        assert!(matches!(rank.send_rows(&cpu, &buffer, 1), Err(Error::NoPeer(_))));
        assert!(matches!(rank.share_rows(&cpu, &mut buffer, |_| 2, 1), Err(Error::NoPeer(_))));
        let wrong = [0..1, 2..9];
        let refused = rank.all_reduce(&cpu, &mut buffer, &wrong, 9, 1);
        assert!(matches!(refused, Err(Error::LeavesMissing { n_leaves: 9, .. })));
    }
}
