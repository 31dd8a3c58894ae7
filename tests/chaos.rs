//! Faults under load, with real processes: every role is killed, stopped, cut off, restarted and changed while
//! thirty-two streams run. Each stream must equal its undisturbed run.
//!
//! `make chaos` runs it with the default model, in several rounds, and writes how long the streams stood still to
//! `benches/results/chaos.md`, with `LOCKSTEP_CHAOS_MODEL=tiny` to `chaos_tiny.md`. `LOCKSTEP_CHAOS_ROWS` names a file
//! that keeps rounds, so that later runs add to it. `make soak-hour` continues for an hour and checks for leaks.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "chaos/city.rs"]
mod city;
#[path = "chaos/client.rs"]
mod client;
#[path = "common/etcd.rs"]
mod etcd;
#[path = "common/machine.rs"]
mod machine;
#[path = "common/node.rs"]
mod node;
#[path = "common/ports.rs"]
mod ports;
#[path = "chaos/report.rs"]
mod report;
#[path = "chaos/soak.rs"]
mod soak;
#[path = "common/star.rs"]
mod star;
#[path = "chaos/upgrades.rs"]
mod upgrades;

use city::{City, Model, Tally};
use client::{Choice, StreamOutcome, StreamRequest, n_under_way, requests, start_streams};
use node::Node;
use report::{Report, Row};
use rustix::process::Signal;
use star::Star;
use std::io::Write;
use std::time::{Duration, Instant};

const N_STREAMS: usize = 32;
/// How often a fault is repeated if it hits no stream.
const TRIES: usize = 4;

/// A fault, as done to a cluster.
#[derive(Clone, Copy)]
enum Strike {
    /// Returns how long its roles take to detect the loss.
    Missed(fn(&mut City, &mut Dice) -> Duration),
    /// A fault that no role has to detect.
    Seen(fn(&mut City, &mut Dice)),
}
use Strike::{Missed, Seen};

struct Fault {
    name: &'static str,
    strike: Strike,
    /// The fault cuts links.
    needs_hosts: bool,
    /// The fault never hits the spared processes.
    spares: bool,
    /// Clients lose a connection, and resume with their handle.
    of_routers: bool,
    /// Whether a round shows that the fault has hit a stream.
    has_hit: fn(&Row) -> bool,
}

/// Tokens were computed again: for a stream that a replica lost, or that moved to the other one.
fn has_replayed(row: &Row) -> bool {
    row.n_replayed > 0
}

fn has_resumed(row: &Row) -> bool {
    row.n_resumed > 0
}

/// The process ended only when its streams had.
fn has_drained(row: &Row) -> bool {
    row.n_drained > 0
}

/// Each router had streams, so the stopped one had.
fn has_waited(row: &Row) -> bool {
    row.n_at_each_router > 0
}

/// A stream had begun before the fault, and went on after it had its whole effect.
fn has_continued(row: &Row) -> bool {
    row.n_across > 0
}

const ANY: Fault = Fault {
    name: "nothing",
    strike: Seen(|_, _| ()),
    needs_hosts: false,
    spares: true,
    of_routers: false,
    has_hit: has_replayed,
};

const FAULTS: [Fault; 23] = [
    Fault { has_hit: |_| true, ..ANY },
    Fault { name: "worker killed", strike: Missed(|city, dice| city.kill_worker(city.any_worker(dice))), ..ANY },
    Fault { name: "worker stopped", strike: Missed(|city, dice| city.stop_worker(city.any_worker(dice))), ..ANY },
    Fault { name: "worker terminated", strike: Seen(|city, dice| city.end_worker(city.any_worker(dice))), ..ANY },
    Fault { name: "worker cut off", strike: Missed(|city, _| city.cut_worker()), needs_hosts: true, ..ANY },
    Fault {
        name: "three workers killed in a row",
        strike: Missed(|city, _| {
            let kills = city.first_workers(3).into_iter().map(|which| city.kill_worker(which));
            kills.max().unwrap_or_default()
        }),
        ..ANY
    },
    Fault { name: "four workers killed", strike: Missed(|city, _| city.kill_four_workers()), ..ANY },
    Fault {
        name: "two workers and their coordinator killed during recovery",
        strike: Missed(|city, dice| city.kill_in_recovery(city.any_coordinator(dice))),
        ..ANY
    },
    Fault {
        name: "coordinator killed",
        strike: Missed(|city, dice| city.kill_coordinator(city.any_coordinator(dice))),
        ..ANY
    },
    Fault {
        name: "coordinator stopped",
        strike: Missed(|city, dice| city.stop_coordinator(city.any_coordinator(dice))),
        ..ANY
    },
    Fault {
        name: "coordinator terminated",
        strike: Seen(|city, dice| city.end_coordinator(city.any_coordinator(dice))),
        has_hit: has_drained,
        ..ANY
    },
    Fault { name: "replica cut off", strike: Missed(|city, _| city.cut_replica()), needs_hosts: true, ..ANY },
    Fault {
        name: "router killed",
        strike: Seen(|city, dice| city.kill_router(city.any_router(dice))),
        of_routers: true,
        has_hit: has_resumed,
        ..ANY
    },
    Fault {
        name: "both routers killed",
        strike: Seen(|city, _| city.kill_all_routers()),
        spares: false,
        of_routers: true,
        has_hit: has_resumed,
        ..ANY
    },
    Fault {
        name: "router stopped",
        strike: Seen(|city, dice| city.stop_router(city.any_router(dice))),
        has_hit: has_waited,
        ..ANY
    },
    Fault {
        name: "router terminated",
        strike: Seen(|city, dice| city.end_router(city.any_router(dice))),
        of_routers: true,
        has_hit: has_drained,
        ..ANY
    },
    Fault {
        name: "etcd's leader killed",
        strike: Seen(|city, _| {
            city.kill_etcds_leader();
            city.until_etcd_has_a_leader();
        }),
        has_hit: has_continued,
        ..ANY
    },
    Fault { name: "etcd killed and wiped", strike: Seen(|city, _| city.wipe_etcd()), has_hit: has_continued, ..ANY },
    Fault {
        name: "etcd's leader and a coordinator killed",
        strike: Missed(|city, dice| {
            city.kill_etcds_leader();
            city.kill_coordinator(city.any_coordinator(dice))
        }),
        ..ANY
    },
    Fault {
        name: "worker, coordinator and router killed in a row",
        strike: Seen(|city, dice| city.kill_three_roles(city.any_worker(dice), city.any_router(dice))),
        of_routers: true,
        has_hit: |row| has_replayed(row) && has_resumed(row),
        ..ANY
    },
    Fault {
        name: "both coordinators killed",
        strike: Seen(|city, _| city.kill_all_coordinators()),
        spares: false,
        ..ANY
    },
    Fault { name: "scaled to three grids", strike: Seen(|city, dice| city.scale(city.any_coordinator(dice))), ..ANY },
    Fault {
        name: "every role restarted in turn",
        strike: Seen(|city, _| city.roll()),
        spares: false,
        of_routers: true,
        ..ANY
    },
];

/// The faults for the model with a recurrent state.
const OF_STATES: [&str; 5] =
    ["worker killed", "coordinator killed", "router killed", "both coordinators killed", "scaled to three grids"];

/// Small random numbers from a seed, so that a run can be repeated.
pub struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

#[test]
fn streams_outlive_what_happens_to_any_role() {
    let number = |name: &str| std::env::var(name).ok().map(|n| n.parse::<u64>().expect("a number"));
    let dice = Dice(number("LOCKSTEP_CHAOS_SEED").unwrap_or(11));
    let star = hosts();
    match (number("LOCKSTEP_SOAK_MINUTES"), number("LOCKSTEP_CHAOS")) {
        (Some(minutes), _) => soak::run(Duration::from_secs(60 * minutes), dice, star),
        (None, Some(n_rounds)) => {
            // The machine's speed varies, and with it the time that a replay may take.
            let rate = |city: &City| client::prefill_rate(&city.doors());
            let is_tiny = std::env::var("LOCKSTEP_CHAOS_MODEL").is_ok_and(|name| name == "tiny");
            let model = if is_tiny { Model::tiny() } else { Model::smollm2() };
            rounds(n_rounds, model, dice, star, rate, Report::write).judge();
        }
        // Only counts and bits: times on a busy machine are no measure of this program.
        (None, None) => drop(rounds(1, Model::tiny(), dice, star, |_| f64::INFINITY, Report::print)),
    }
}

#[test]
fn streams_of_recurrent_states_and_guesses_outlive_losses() {
    let load = Load::new(&Model::hybrid(), requests(N_STREAMS / 2, Model::hybrid().tokens_max));
    let (mut city, mut dice) = (City::start(Model::hybrid(), None, 0), Dice(12));
    for fault in FAULTS.iter().filter(|fault| OF_STATES.contains(&fault.name)) {
        let row = load.until_hit(&mut city, &mut dice, fault, f64::INFINITY);
        println!("{}: {} tokens replayed, {} streams resumed", row.fault, row.n_replayed, row.n_resumed);
    }
}

/// Runs each fault `n` times, in turns. Results are written after each turn, in case the run is interrupted.
fn rounds(
    n: u64,
    model: Model,
    mut dice: Dice,
    star: Option<Star>,
    rate: fn(&City) -> f64,
    write_report: fn(&Report),
) -> Report {
    let load = Load::new(&model, requests(N_STREAMS, model.tokens_max));
    let mut report = Report::new(model.name, std::env::var_os("LOCKSTEP_CHAOS_ROWS").map(Into::into));
    let mut city = City::start(model, star, 0);
    let faults: Vec<&Fault> = FAULTS.iter().filter(|fault| city.has_hosts() || !fault.needs_hosts).collect();
    let faults = selected_faults(faults);
    let begun = Instant::now();
    for _ in 0..n {
        for fault in &faults {
            if begun.elapsed() > time_max() {
                write_report(&report);
                return report;
            }
            let rate = rate(&city);
            report.add(load.until_hit(&mut city, &mut dice, fault, rate));
        }
        write_report(&report);
    }
    report
}

/// No round begins after `LOCKSTEP_CHAOS_SECONDS`.
fn time_max() -> Duration {
    let seconds = std::env::var("LOCKSTEP_CHAOS_SECONDS").ok().map(|seconds| seconds.parse().unwrap());
    seconds.map_or(Duration::MAX, Duration::from_secs)
}

/// The faults named in `LOCKSTEP_FAULTS`, separated by commas; all faults without it.
fn selected_faults(faults: Vec<&'static Fault>) -> Vec<&'static Fault> {
    let Ok(names) = std::env::var("LOCKSTEP_FAULTS") else { return faults };
    let names: Vec<&str> = names.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    let unknown = names.iter().find(|name| FAULTS.iter().all(|fault| fault.name != **name));
    assert_eq!(unknown, None, "an unknown fault");
    faults.into_iter().filter(|fault| names.is_empty() || names.contains(&fault.name)).collect()
}

/// Network namespaces around this thread.
fn hosts() -> Option<Star> {
    let star = Star::new(2);
    match &star {
        Some(star) => star.enter(),
        // Directly to stderr: the harness shows a test's output only when it fails.
        None => {
            std::io::stderr().write_all(b"NOT RUN: links that are cut; namespaces are not permitted here\n").unwrap()
        }
    }
    star
}

/// The requests, and their undisturbed answers.
struct Load {
    requests: Vec<StreamRequest>,
    expected: Vec<StreamOutcome>,
}

impl Load {
    fn new(model: &Model, requests: Vec<StreamRequest>) -> Load {
        let flags = [&model.numerics[..], &city::CHATS, &city::DOORS].concat();
        let mut alone = Node::start(&[&["serve", &model.path], &flags[..]].concat());
        let http = alone.http();
        alone.until_ready(&http);
        let expected = start_streams(std::slice::from_ref(&http), &requests).wait();
        for (request, outcome) in requests.iter().zip(&expected) {
            let has = |content: fn(&Choice) -> &String| outcome.choices.values().all(|of| !content(of).is_empty());
            let is_of_its_kind = match request.kind {
                "call" => has(|choice| &choice.calls),
                "thought" => has(|choice| &choice.thought),
                _ => has(|choice| &choice.text),
            };
            assert!(is_of_its_kind, "{}: {outcome:?}", request.kind);
        }
        Load { requests, expected }
    }

    /// Runs rounds until one shows that the fault has hit a stream: those of the lost process may have ended, or been
    /// at another one.
    fn until_hit(&self, city: &mut City, dice: &mut Dice, fault: &Fault, rate: f64) -> Row {
        let once = |_| {
            let row = self.round(city, dice, fault, rate);
            city.heal();
            row
        };
        let row = (0..TRIES).map(once).find(fault.has_hit);
        row.unwrap_or_else(|| panic!("{}: it hit no stream in {TRIES} tries", fault.name))
    }

    /// Runs all streams at once, and the fault in the middle of them.
    fn round(&self, city: &mut City, dice: &mut Dice, fault: &Fault, rate: f64) -> Row {
        let (begun, before) = (Instant::now(), city.tally());
        let streams = start_streams(&city.doors(), &self.requests);
        let expected: Vec<usize> = self.expected.iter().map(StreamOutcome::n_tokens).collect();
        let n_each = streams.wait_for_tokens(expected.iter().sum::<usize>() * (10 + dice.below(50)) / 100);
        let (n_received, n_under_way) = (n_each.iter().sum(), n_under_way(&n_each, &expected));
        assert!(n_under_way > 0, "{}: no stream is running: {n_each:?}", fault.name);
        let found_out = match fault.strike {
            Missed(strike) => Some(strike(city, dice)),
            Seen(strike) => {
                strike(city, dice);
                None
            }
        };
        let n_across = client::n_under_way(&streams.n_received(), &expected);
        let outcomes = streams.wait();
        for (i, (outcome, expected)) in outcomes.iter().zip(&self.expected).enumerate() {
            let n_resumed = outcome.n_resumed;
            assert_eq!(outcome.choices, expected.choices, "{}: request {i}, resumed {n_resumed} times", fault.name);
        }
        let n_resumed = outcomes.iter().map(|outcome| outcome.n_resumed).sum();
        let after = city.tally();
        let n_replayed = self.n_replayed(before, after, n_resumed, n_received);
        assert!(fault.of_routers || n_resumed == 0, "{}: {n_resumed} streams broke", fault.name);
        let gaps = outcomes.iter().map(|outcome| outcome.stood_still);
        let (slowest, stood_still) = gaps.enumerate().max_by_key(|(_, gap)| *gap).expect("streams");
        Row {
            fault: fault.name.into(),
            found_out,
            stood_still,
            kind: self.requests[slowest].kind.into(),
            n_replayed,
            n_under_way,
            n_at_each_router: n_at_each_router(&n_each, &expected),
            n_across,
            n_drained: after.n_drained - before.n_drained,
            rate,
            n_resumed,
            n_refused: outcomes.iter().map(|outcome| outcome.n_refused).sum(),
            took: begun.elapsed(),
        }
    }

    /// Positions that replicas recomputed; and, of streams that were resumed elsewhere, those that had been sent by
    /// then.
    fn n_replayed(&self, before: Tally, after: Tally, n_resumed: usize, n_received: usize) -> u64 {
        let n_choices: usize = self.expected.iter().map(|outcome| outcome.choices.len()).sum();
        let n_elsewhere = (after.n_moved - before.n_moved + n_resumed as u64).min(n_choices as u64);
        after.n_replayed - before.n_replayed + n_elsewhere * n_received as u64 / n_choices as u64
    }
}

/// The fewest running streams of a router. Clients begin at the routers in turn.
fn n_at_each_router(n_received: &[usize], expected: &[usize]) -> usize {
    let every_second = |of: &[usize], first: usize| of.iter().skip(first).step_by(2).copied().collect::<Vec<_>>();
    let at = |first| n_under_way(&every_second(n_received, first), &every_second(expected, first));
    at(0).min(at(1))
}

/// Sends a signal to a process of this test's own.
pub fn signal(pid: u32, signal: Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}
