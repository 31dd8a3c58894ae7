//! Whole clusters on virtual time over a simulated network: the real router, coordinator, scheduler and worker, with
//! ranks that model their time, under every fault. A run is determined by its seed. Clocks that differ are not
//! simulated, because no role reads one (`tests/tidy/tidy.rs`).
//!
//! Bugs planted in a scratch copy, and the first seed seen to catch each:
//!
//! | planted | seed | how |
//! |---|---:|---|
//! | a coordinator ignores the loss of its claim | 0 | its replica is not served at the end |
//! | a full block is named after the one before it in the prefix index | 2 | a rank reads another's block |
//! | a coordinator loses a frame of outputs | 6 | a stream breaks at a router without a fault |
//! | one sequence is forgotten when ranks are lost | 8 | a call does not end |
//! | a log that is requeued repeats its last token | 9 | a rank computes behind a token that it does not have |
//! | a router forgets to hold the requests of a lost coordinator | 13 | a call does not end |
//! | a router that takes over sends a token too few | 13 | tokens from 8 on, behind 7 |
//! | a coordinator ignores cancels | 27 | cancelled requests are held |
//! | every fortieth answer of a rank is lost | 27 | ranks are placed again in a cluster without faults |
//!
//! Not caught, because another mechanism covers each: a planner that takes answers of former epochs (members reject
//! them before), a rank that takes steps of other epochs (its session has ended), blocks that are free while a slice in
//! flight still reads them (ranks take steps in order), a router that keeps its former number (its streams time out), a
//! ticket that is dropped without a cancel (its closed channel has the same effect), silence that is not counted (the
//! lack of progress is noticed later), a router that accepts a coordinator with an older claim (a coordinator that lost
//! its claim ends).
//!
//! `SIMULATION_SEED=7` prints the events of one seed. `SIMULATION_SEEDS=10000` runs as many seeds, from
//! `SIMULATION_FIRST` on, and writes what happened in them to `benches/results/simulation.md`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod cast;
mod client;
mod detection;
mod gaps;
#[path = "../common/machine.rs"]
mod machine;
#[path = "../../router/faces/tests/router/model.rs"]
mod model;
mod net;
mod operator;
mod peace;
mod random;
mod rank;
mod record;
mod registry;
mod rules;
mod script;
mod stranded;
mod superseded;
mod weather;
mod world;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;
use world::{Outcome, run};

/// The seeds that CI runs, within a minute.
const SEEDS: u64 = 200;
/// A run of fewer seeds writes no result.
const WRITTEN_SEEDS_MIN: u64 = 10_000;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text:?}")))
}

/// Panics with all violations, and the command that repeats them.
#[track_caller]
fn check(seed: u64) -> Outcome {
    let outcome = run(seed, false);
    assert!(outcome.violations.is_empty(), "{}", failure_text(seed, &outcome));
    outcome
}

fn failure_text(seed: u64, outcome: &Outcome) -> String {
    let violations = outcome.violations.join("\n  ");
    format!("\nSIMULATION_SEED={seed} cargo test --test simulation seeds -- --nocapture\n  {violations}\n")
}

#[test]
fn seeds() {
    if let Some(seed) = number("SIMULATION_SEED") {
        let outcome = run(seed, true);
        println!("trace {:016x} of {} lines, {:?}", outcome.hash, outcome.n_lines, outcome.counts);
        assert!(outcome.violations.is_empty(), "{}", failure_text(seed, &outcome));
        return;
    }
    let began = Instant::now();
    let ran = check_all(failure_text, |seed| run(seed, false));
    if ran.n_seeds >= WRITTEN_SEEDS_MIN {
        machine::write_result("simulation.md", &ran.page(began.elapsed().as_secs()));
    }
}

/// Seeds that broke no rule, and the number of each kind of event in them.
struct SeedRun {
    first: u64,
    n_seeds: u64,
    counts: BTreeMap<&'static str, u64>,
}

impl SeedRun {
    fn page(&self, seconds: u64) -> String {
        let lines = self.counts.iter().map(|(what, n)| format!("| {what} | {n} |\n"));
        format!(
            "# Simulated clusters\n\n\
            `make soak SEEDS={}`: {} seeds from {} on, **no violation**, in {seconds} seconds on {}, {} at its end. \
            The build is optimized and checks its assertions.\n\n\
            | event | number |\n|---|---:|\n{}\n\
            `tests/simulation/main.rs` lists the bugs that were planted to try the checker, each with the first seed \
            that caught it.\n",
            self.n_seeds,
            self.n_seeds,
            self.first,
            machine::machine(),
            machine::load(),
            lines.collect::<String>(),
        )
    }
}

/// Simulates the requested number of seeds, on all cores; panics with those that broke a rule.
fn check_all(describe: impl Fn(u64, &Outcome) -> String + Sync, run: impl Fn(u64) -> Outcome + Sync) -> SeedRun {
    let (first, n_seeds) = (number("SIMULATION_FIRST").unwrap_or(0), number("SIMULATION_SEEDS").unwrap_or(SEEDS));
    let (next, failed) = (AtomicU64::new(first), Mutex::new(Vec::new()));
    let counts = Mutex::new(BTreeMap::<&str, u64>::new());
    let work = || {
        loop {
            let seed = next.fetch_add(1, Relaxed);
            if seed >= first + n_seeds {
                break;
            }
            let outcome = run(seed);
            let mut counts = counts.lock().unwrap();
            outcome.counts.iter().for_each(|(what, n)| *counts.entry(what).or_default() += n);
            if !outcome.violations.is_empty() {
                println!("{}", describe(seed, &outcome));
                failed.lock().unwrap().push(seed);
            }
        }
    };
    std::thread::scope(|scope| {
        let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
        (0..n_threads).for_each(|_| drop(scope.spawn(work)));
    });
    let (counts, failed) = (counts.into_inner().unwrap(), failed.into_inner().unwrap());
    println!("{n_seeds} seeds from {first} on: {counts:?}");
    assert!(failed.is_empty(), "{} of {n_seeds} seeds fail: {failed:?}", failed.len());
    SeedRun { first, n_seeds, counts }
}

#[test]
fn the_same_seed_is_the_same_story() {
    for seed in [1, 2, 3] {
        let (first, again) = (check(seed), check(seed));
        assert_eq!((first.hash, first.n_lines), (again.hash, again.n_lines), "seed {seed}");
    }
}
