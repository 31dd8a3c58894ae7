//! Faults under load, with real processes: every role is killed, stopped, restarted and changed while thirty-two
//! streams run, and each of them says what it says undisturbed.
//!
//! `make chaos` runs it with the default model, in several rounds, and says how long the streams stood still.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "chaos/city.rs"]
mod city;
#[path = "chaos/client.rs"]
mod client;
#[path = "common/node.rs"]
mod node;

use city::{City, Model, stop_and_go_on};
use client::{Told, ask_all, requests};
use node::Node;
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// What is done to a city, and how long until its roles know; None where nobody is to be found out.
type Fault = fn(&mut City, &mut Dice) -> Option<Duration>;

const FAULTS: [(&str, Fault); 12] = [
    ("nothing", |_, _| None),
    ("worker killed", |city, dice| Some(city.kill_worker(dice.below(city.n_workers())))),
    ("worker stopped", |city, dice| Some(city.stop_worker(dice.below(city.n_workers())))),
    ("worker told to end", |city, dice| {
        city.end_worker(dice.below(city.n_workers()));
        None
    }),
    ("three workers killed in a row", |city, _| {
        (0..3).map(|_| city.kill_worker(0)).max()
    }),
    ("coordinator killed", |city, dice| {
        city.kill_coordinator(dice.below(2));
        None
    }),
    ("coordinator stopped and woken", |city, dice| {
        stop_and_go_on(city.coordinator(dice.below(2)), Duration::from_millis(2500));
        None
    }),
    ("coordinator told to end", |city, dice| {
        city.end_coordinator(dice.below(2));
        None
    }),
    ("router killed", |city, dice| {
        city.kill_router(dice.below(2));
        None
    }),
    ("router told to end", |city, dice| {
        city.end_router(dice.below(2));
        None
    }),
    ("both coordinators killed", |city, _| {
        city.kill_coordinator(0);
        city.kill_coordinator(1);
        None
    }),
    ("every role restarted in turn", |city, _| {
        city.roll();
        None
    }),
];

/// Small numbers from a seed, so that a run can be repeated.
pub struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// A row of the table: what was seen in one round.
struct Row {
    fault: &'static str,
    found_out: Option<Duration>,
    stood_still: Duration,
    n_resumed: usize,
    took: Duration,
}

#[test]
fn streams_outlive_what_happens_to_any_role() {
    let rounds: usize = std::env::var("LOCKSTEP_CHAOS").map_or(1, |n| n.parse().expect("a number of rounds"));
    let model = if rounds > 1 { Model::smollm2() } else { Model::tiny() };
    let mut dice = Dice(std::env::var("LOCKSTEP_SEED").map_or(11, |n| n.parse().expect("a seed")));
    let asked = requests(model.tokens_max);
    let expected: Vec<Told> = {
        let mut alone = Node::start(&[&["serve", &model.path], &model.numerics[..], &city::DOORS].concat());
        let http = alone.http();
        alone.until_ready(&http);
        ask_all(std::slice::from_ref(&http), &asked).wait()
    };
    let mut city = City::start(model);
    let mut rows = Vec::new();
    for _ in 0..rounds {
        for (fault, strike) in FAULTS {
            rows.push(round(&mut city, &mut dice, fault, strike, &asked, &expected));
            city.heal();
        }
    }
    table(&rows);
}

/// All streams at once, and the fault in their midst.
fn round(
    city: &mut City,
    dice: &mut Dice,
    fault: &'static str,
    strike: Fault,
    asked: &[serde_json::Value],
    expected: &[Told],
) -> Row {
    let begun = Instant::now();
    let streams = ask_all(&city.doors(), asked);
    let n_expected: usize = expected.iter().map(Told::n_tokens).sum();
    streams.until_told(n_expected * (10 + dice.below(50)) / 100);
    let found_out = strike(city, dice);
    let told = streams.wait();
    for (i, (told, expected)) in told.iter().zip(expected).enumerate() {
        assert_eq!(told.choices, expected.choices, "{fault}: request {i}, resumed {} times", told.n_resumed);
    }
    let stood_still = told.iter().map(|told| told.stood_still).max().unwrap_or_default();
    let n_resumed = told.iter().map(|told| told.n_resumed).sum();
    Row { fault, found_out, stood_still, n_resumed, took: begun.elapsed() }
}

/// To standard output, which the harness shows on demand.
fn table(rows: &[Row]) {
    println!("| fault | rounds | found out, ms (worst) | longest gap of any stream, ms | resumed by clients | a round, ms |");
    println!("|---|---|---|---|---|---|");
    for (fault, _) in FAULTS {
        let of: Vec<&Row> = rows.iter().filter(|row| row.fault == fault).collect();
        let worst = of.iter().filter_map(|row| row.found_out).max();
        let found_out = worst.map_or("-".into(), |worst| worst.as_millis().to_string());
        let gap = of.iter().map(|row| row.stood_still.as_millis()).max().unwrap_or_default();
        let resumed: usize = of.iter().map(|row| row.n_resumed).sum();
        let took = of.iter().map(|row| row.took.as_millis()).max().unwrap_or_default();
        println!("| {fault} | {} | {found_out} | {gap} | {resumed} | {took} |", of.len());
    }
}

/// What a signal is sent to is a process of this test's own.
pub fn signal(pid: u32, signal: Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}
