//! The time until a loss is detected, on virtual time and under load: within 100 ms for a process that dies, by its
//! connections; within a second for one that is stopped, by its silence. A coordinator names the lost rank; every
//! router names the lost coordinator.
//!
//! Read from the roles' log, at the times of its entries.

use crate::cast::Stage;
use crate::client;
use crate::record::Record;
use crate::registry::Registry;
use crate::rules::Rules;
use crate::script::{CLIENTS, Fault, Host, ROUTERS, ReplicaPlan, Script, What};
use crate::weather::Weather;
use crate::world::network;
use std::collections::BTreeSet;
use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record as Fields};
use tracing::{Event, Level, Metadata, Subscriber};

const SEEDS: u64 = 6;
const DEATH_MILLIS: u64 = 100;
const STOP_MILLIS: u64 = 1000;
/// How long after a fault the log is read.
const WATCHED_MILLIS: u64 = 2500;
const GRID: (u16, u16) = (2, 2);

/// A process's warning, and its time.
#[derive(Clone, Debug)]
struct Warning {
    at_millis: u64,
    host: String,
    text: String,
}

/// Collects the warnings of this thread's simulation.
#[derive(Clone, Default)]
struct WarningCollector(Arc<Mutex<WarningLog>>);

#[derive(Default)]
struct WarningLog {
    /// The host that the simulation runs at this moment.
    current_host: String,
    warnings: Vec<Warning>,
}

/// The name of the simulation's span around a host's turn.
const TURN: &str = "node";

impl WarningCollector {
    fn lock_log(&self) -> MutexGuard<'_, WarningLog> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscriber for WarningCollector {
    fn enabled(&self, of: &Metadata<'_>) -> bool {
        of.name() == TURN || of.is_event() && *of.level() == Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let Some(elapsed) = turmoil::sim_elapsed() else { return };
        let mut fields = FieldText::default();
        event.record(&mut fields);
        let mut log = self.lock_log();
        let warning = Warning { at_millis: elapsed.as_millis() as u64, host: log.current_host.clone(), text: fields.0 };
        log.warnings.push(warning);
    }

    /// A span is entered immediately, and ends before the next begins.
    fn new_span(&self, turn: &Attributes<'_>) -> Id {
        let mut fields = FieldText::default();
        turn.record(&mut fields);
        self.lock_log().current_host = fields.0;
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Fields<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// `name=value` of every field, concatenated.
#[derive(Default)]
struct FieldText(String);

impl Visit for FieldText {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{}={value:?} ", field.name()).expect("a string takes everything");
    }
}

/// Runs one fault in a cluster in which every worker has a rank; returns its time and the warnings after it.
fn warnings(seed: u64, what: impl Fn(Host) -> What, host: Host) -> (u64, Vec<Warning>) {
    // At a different moment between two heartbeats for each seed.
    let at_millis = 6000 + 17 * seed;
    let (tp, pp) = GRID;
    let replica = || ReplicaPlan { tp, pp, n_workers: usize::from(tp * pp) };
    let fault = Fault { at_millis, lasts_millis: 10_000, what: what(host) };
    let script = Script { replicas: vec![replica(), replica()], faults: vec![fault], ..Script::of(seed) };
    let ear = WarningCollector::default();
    tracing::subscriber::with_default(ear.clone(), || simulate(seed, &script, at_millis + WATCHED_MILLIS)).unwrap();
    let all = std::mem::take(&mut ear.lock_log().warnings);
    (at_millis, all.into_iter().filter(|warning| warning.at_millis >= at_millis).collect())
}

fn simulate(seed: u64, script: &Script, until_millis: u64) -> turmoil::Result {
    let mut sim = network(seed, until_millis);
    let (record, rules) = (Record::new(false), Arc::new(Rules { script: script.clone() }));
    let registry = Registry::new(record.clone(), script.lag_millis);
    let stage = Stage { script: Arc::new(script.clone()), record: record.clone(), registry };
    stage.open(&mut sim);
    for client in 0..CLIENTS {
        sim.client(Host::Client(client).name(), client::play(client, rules.clone(), record.clone()));
    }
    let mut weather = Weather::new(script, record.clone());
    while sim.elapsed() < Duration::from_millis(until_millis) {
        sim.step()?;
        weather.pass(&mut sim);
    }
    let violations = record.seen().violations.clone();
    assert!(violations.is_empty(), "{violations:?}");
    Ok(())
}

/// The first loss must be that of the faulty rank, with this cause and in time. No loss of another rank may follow.
#[track_caller]
fn check_rank(seed: u64, what: impl Fn(Host) -> What, cause: &str, within_millis: u64) {
    let host = Host::Worker(0, seed as usize % usize::from(GRID.0 * GRID.1));
    let (at_millis, all) = warnings(seed, what, host);
    let losses: Vec<_> = all.iter().filter(|warning| warning.text.contains("a worker is lost")).collect();
    let [loss] = losses[..] else { panic!("seed {seed}: {losses:?} of {all:?}") };
    let words = [format!("host={} ", host.name()), format!("kind={cause} "), "rank=".to_owned()];
    let is_named = words.iter().all(|word| loss.text.contains(word)) && loss.host.contains("coordinator-0");
    assert!(is_named, "seed {seed}: {loss:?}, not {words:?}");
    let took = loss.at_millis - at_millis;
    println!("seed {seed}: {} known after {took} ms", loss.text);
    assert!(took <= within_millis, "seed {seed}: known after {took} ms");
}

/// Every router must report the loss in time.
#[track_caller]
fn check_coordinator(seed: u64, what: impl Fn(Host) -> What, words: &str, within_millis: u64) {
    let (at_millis, all) = warnings(seed, what, Host::Coordinator(seed as usize % 2));
    let in_time = |warning: &&Warning| warning.text.contains(words) && warning.at_millis - at_millis <= within_millis;
    let matching: Vec<&Warning> = all.iter().filter(in_time).collect();
    let routers: BTreeSet<&str> = matching.iter().map(|warning| warning.host.as_str()).collect();
    println!(
        "seed {seed}: {:?} after {at_millis}",
        matching.iter().map(|warning| warning.at_millis).collect::<Vec<_>>()
    );
    assert_eq!(routers.len(), ROUTERS, "seed {seed}: {matching:?} of {all:?}");
    assert!(routers.iter().all(|router| router.contains("router-")), "seed {seed}: {routers:?}");
}

#[test]
fn a_rank_that_dies_is_named_within_100_ms() {
    (0..SEEDS).for_each(|seed| check_rank(seed, What::Kill, "gone", DEATH_MILLIS));
}

#[test]
fn a_rank_that_is_stopped_is_named_within_a_second() {
    (0..SEEDS).for_each(|seed| check_rank(seed, What::Freeze, "silent", STOP_MILLIS));
}

#[test]
fn a_coordinator_that_dies_is_known_to_routers_within_100_ms() {
    (0..SEEDS).for_each(|seed| check_coordinator(seed, What::Kill, "no coordinator", DEATH_MILLIS));
}

#[test]
fn a_coordinator_that_is_stopped_is_known_to_routers_within_a_second() {
    (0..SEEDS).for_each(|seed| check_coordinator(seed, What::Freeze, "a replica is silent", STOP_MILLIS));
}
