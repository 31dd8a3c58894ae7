//! Ranks that die, hang, abort or get out of step: the others receive an error that names the rank, and never hang.

use crate::common;
use crate::common::{cpu, each, plans};
use backend::Memory;
use backend::cpu::Cpu;
use collective::{Error, Ranks, WireChoice};
use std::time::Duration;
use types::{Grid, Layout, Rank, StepId};

fn layout(tp: u16, pp: u16) -> Layout {
    Layout::even(Grid { pp, tp }, u32::from(pp)).unwrap()
}

/// Shares rows with all ranks; every rank owns one.
fn share(rank: &mut Ranks<Cpu>, cpu: &Cpu, n_cols: usize) -> Result<(), Error> {
    let n_rows = rank.stage_size() as usize;
    let mut buffer = cpu.buffer(n_rows, n_cols).unwrap();
    rank.share_rows(cpu, &mut buffer, |row| row as u32, n_rows)
}

#[test]
fn finished_rank_may_leave() {
    for (wire, ranks) in common::wires(&layout(1, 3)) {
        let run = |rank: &mut Ranks<Cpu>, cpu: &Cpu| {
            let mut buffer = cpu.buffer(1, 10).unwrap();
            match rank.part().place.stage {
                0 => {
                    rank.send_rows(cpu, &buffer, 1)?;
                    // Waits longer than rank 1 exists.
                    rank.recv_tokens(StepId(0), &mut Vec::new())
                }
                1 => {
                    rank.recv_rows(cpu, &mut buffer, 1)?;
                    rank.send_rows(cpu, &buffer, 1)
                }
                _ => {
                    std::thread::sleep(Duration::from_millis(50));
                    rank.recv_rows(cpu, &mut buffer, 1)?;
                    rank.send_tokens(StepId(0), &[])
                }
            }
        };
        let results = each(ranks, run);
        assert!(results.iter().all(Result::is_ok), "{results:?} over {wire}");
    }
}

/// Larger than any ring or socket's buffer.
const LARGE: usize = 20_000_000;

#[test]
fn lost_rank_is_named_by_all() {
    for n_cols in [10, LARGE] {
        for (wire, mut ranks) in common::wires(&layout(3, 1)) {
            drop(ranks.remove(1));
            for error in each(ranks, |rank, cpu| share(rank, cpu, n_cols).unwrap_err()) {
                assert!(matches!(error, Error::PeerLost { rank: Rank(1) }), "{error:?} over {wire}");
            }
        }
    }
}

#[test]
fn chain_names_the_rank_that_broke_it() {
    // Rank 0 has no link to rank 2; its peer passes the number on.
    for (wire, mut ranks) in common::wires(&layout(1, 4)) {
        drop(ranks.remove(2));
        let errors = each(ranks, |rank, cpu| {
            let mut buffer = cpu.buffer(1, 10).unwrap();
            let stage = rank.part().place.stage;
            let wait = |rank: &mut Ranks<Cpu>, buffer: &mut <Cpu as Memory>::Buffer| match stage {
                0 => rank.recv_tokens(StepId(0), &mut Vec::new()),
                _ => rank.recv_rows(cpu, buffer, 1),
            };
            if stage == 0 {
                // Rank 1 receives nothing from this rank and must finally report rank 2; then this rank reports rank 3.
                return wait(rank, &mut buffer).unwrap_err();
            }
            if stage == 1 {
                let mut large = cpu.buffer(1000, 10_000).unwrap();
                cpu.write(&mut large, 0, &[1.0; 10_000]);
                return rank.send_rows(cpu, &large, 1000).unwrap_err();
            }
            wait(rank, &mut buffer).unwrap_err()
        });
        for error in errors {
            assert!(matches!(error, Error::PeerLost { rank: Rank(2) }), "{error:?} over {wire}");
        }
    }
}

#[test]
fn silent_rank_is_named_at_the_deadline() {
    for wire in [WireChoice::Memory, WireChoice::Socket] {
        let mut plans = plans(&layout(2, 1), wire);
        plans.iter_mut().for_each(|(_, plan)| plan.timeouts.op = Duration::from_millis(100));
        let mut ranks = common::over_host(common::join_all(plans).into_iter().map(Result::unwrap).collect());
        let silent = ranks.pop().unwrap();
        for n_cols in [10, LARGE] {
            let error = share(&mut ranks[0], &cpu(), n_cols).unwrap_err();
            let is_first = n_cols == 10;
            // A failed rank cannot get back into step.
            let is_named = matches!(error, Error::Deadline { rank: Rank(1) });
            assert!(if is_first { is_named } else { matches!(error, Error::Aborted) }, "{error:?} over {wire:?}");
        }
        drop(silent);
    }
}

#[test]
fn an_abort_ends_waits_on_all_sides() {
    for n_cols in [10, LARGE] {
        for (wire, mut ranks) in common::wires(&layout(3, 1)) {
            // Rank 2 never comes; rank 0 is cancelled.
            let absent = ranks.pop();
            let handle = ranks[0].abort_handle();
            let errors = std::thread::scope(|scope| {
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis(30));
                    handle.abort();
                });
                each(ranks, |rank, cpu| share(rank, cpu, n_cols).unwrap_err())
            });
            assert!(matches!(errors[0], Error::Aborted), "{:?} over {wire}", errors[0]);
            assert!(matches!(errors[1], Error::PeerLost { rank: Rank(0) }), "{:?} over {wire}", errors[1]);
            drop(absent);
        }
    }
}

#[test]
fn an_abort_before_an_operation_is_kept() {
    for (_, mut ranks) in common::wires(&layout(2, 1)) {
        ranks[0].abort_handle().abort();
        assert!(matches!(share(&mut ranks[0], &cpu(), 10), Err(Error::Aborted)));
        assert!(matches!(share(&mut ranks[1], &cpu(), 10), Err(Error::PeerLost { rank: Rank(0) })));
    }
}

#[test]
fn ranks_out_of_step_never_get_wrong_numbers() {
    for (wire, ranks) in common::wires(&layout(2, 1)) {
        let errors = each(ranks, |rank, cpu| match rank.stage_rank() {
            0 => share(rank, cpu, 10).unwrap_err(),
            _ => {
                let mut planes = cpu.buffer(2, 10).unwrap();
                let owned = rank.owned_units(4);
                rank.all_reduce(cpu, &mut planes, &[owned], 4, 1).unwrap_err()
            }
        });
        // Either rank may detect it first; the other one receives that its peer gave up.
        let sees = |error: &Error| matches!(error, Error::OutOfStep { .. });
        assert!(errors.iter().any(sees), "{errors:?} over {wire}");
        assert!(errors.iter().all(|error| error.rank().is_some()), "{errors:?} over {wire}");
    }
}

#[test]
fn tokens_of_another_step_are_refused() {
    for (wire, ranks) in common::wires(&layout(1, 2)) {
        let errors = each(ranks, |rank, _| {
            if rank.part().is_sampler() {
                rank.send_tokens(StepId(4), &[Some(1)]).unwrap();
                return None;
            }
            rank.recv_tokens(StepId(5), &mut Vec::new()).err()
        });
        assert!(matches!(errors[0], Some(Error::OutOfStep { rank: Rank(1), .. })), "{errors:?} over {wire}");
    }
}
