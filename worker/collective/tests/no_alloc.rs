//! Checks that a steady step allocates nothing, however it waits.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../../tests/common/allocations.rs"]
mod allocations;
mod common;

use allocations::n_allocations;
use backend::Memory;
use common::each;
use std::sync::Barrier;
use types::leaves::aligned_runs;
use types::{Grid, StepId};

#[test]
fn ops_allocate_nothing() {
    const N_STEPS: u64 = 20;
    let layout = types::Layout::even(Grid { pp: 2, tp: 2 }, 2).unwrap();
    for (wire, ranks) in common::wires(&layout) {
        let barrier = Barrier::new(ranks.len());
        each(ranks, |rank, cpu| {
            let runs = aligned_runs(rank.owned_units(9), 9);
            let mut planes = cpu.buffer(runs.len() * 40, 1024).unwrap();
            let (mine, mut whole) = (cpu.buffer(4, 64).unwrap(), cpu.buffer(4, 100).unwrap());
            let (part, mut tokens) = (rank.part().clone(), Vec::with_capacity(8));
            let mut before = 0;
            for step in 0..N_STEPS {
                if step == 3 {
                    // All ranks have run every operation once.
                    barrier.wait();
                    before = n_allocations();
                    barrier.wait();
                }
                if part.is_first() {
                    rank.share_rows(cpu, &mut planes, |row| row as u32 % 2, 5).unwrap();
                } else {
                    rank.recv_rows(cpu, &mut planes, 40).unwrap();
                }
                rank.all_reduce(cpu, &mut planes, &runs, 9, 1).unwrap();
                rank.all_reduce(cpu, &mut planes, &runs, 9, 40).unwrap();
                if part.is_first() {
                    rank.send_rows(cpu, &planes, 40).unwrap();
                    rank.recv_tokens(StepId(step), &mut tokens).unwrap();
                } else {
                    rank.gather_columns(cpu, &mine, &mut whole, 100, 4).unwrap();
                }
                if part.is_sampler() {
                    rank.send_tokens(StepId(step), &[Some(1), None]).unwrap();
                }
            }
            barrier.wait();
            let after = n_allocations();
            barrier.wait();
            assert_eq!(after - before, 0, "{wire}");
        });
    }
}
