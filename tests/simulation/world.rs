//! One simulation from its seed: the hosts, the clients, the faults, and the checks at the end.

use crate::cast::Stage;
use crate::record::Record;
use crate::registry::Registry;
use crate::rules::Rules;
use crate::script::{CLIENTS, Host, Script};
use crate::weather::{LATENCY_MAX, LATENCY_MIN, Weather};
use crate::{client, operator};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Once};
use std::time::{Duration, UNIX_EPOCH};
use turmoil::Sim;

/// Messages arrive between two ticks; timers are exact.
const TICK: Duration = Duration::from_millis(5);
const MILLIS_MAX: u64 = 150_000;

/// The result of a seed.
pub struct Outcome {
    pub hash: u64,
    pub n_lines: u64,
    pub violations: Vec<String>,
    pub counts: BTreeMap<&'static str, u64>,
}

thread_local! {
    /// Panics in tasks of this thread's simulation, which their runtimes would hide.
    static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Runs the simulation of a seed. `is_printed` prints all of its events.
pub fn run(seed: u64, is_printed: bool) -> Outcome {
    let script = Script::of(seed);
    if is_printed {
        println!("{script:#?}");
    }
    recorded(is_printed, |record| simulate(seed, &script, record))
}

/// The result of a simulation, including its hosts' panics.
pub fn recorded(is_printed: bool, simulate: impl FnOnce(&Record) -> turmoil::Result) -> Outcome {
    record_panics();
    let record = Record::new(is_printed);
    let ran = catch_unwind(AssertUnwindSafe(|| simulate(&record)));
    for panic in PANICS.take() {
        record.violation(format!("a panic: {panic}"));
    }
    if let Ok(Err(error)) = ran {
        record.violation(format!("the simulation ended: {error}"));
    }
    let hash = record.hash();
    let seen = record.seen();
    let (violations, counts) = (seen.violations.clone(), seen.counts.clone());
    Outcome { hash, n_lines: seen.n_lines, violations, counts }
}

/// A network without hosts, which runs for at least `millis`.
pub fn network<'a>(seed: u64, millis: u64) -> Sim<'a> {
    turmoil::Builder::new()
        .rng_seed(seed)
        .epoch(UNIX_EPOCH)
        .simulation_duration(Duration::from_millis(millis * 2))
        .tick_duration(TICK)
        .min_message_latency(LATENCY_MIN)
        .max_message_latency(LATENCY_MAX)
        .tcp_capacity(4096)
        .udp_capacity(4096)
        .build()
}

fn simulate(seed: u64, script: &Script, record: &Record) -> turmoil::Result {
    let mut sim = network(seed, MILLIS_MAX);
    let rules = Arc::new(Rules { script: script.clone() });
    let registry = Registry::new(record.clone(), script.lag_millis);
    let stage = Stage { script: Arc::new(script.clone()), record: record.clone(), registry };
    stage.open(&mut sim);
    for client in 0..CLIENTS {
        sim.client(Host::Client(client).name(), client::play(client, rules.clone(), record.clone()));
    }
    sim.client("operator", operator::play(rules.clone(), record.clone()));
    let mut weather = Weather::new(script, record.clone());
    while !sim.step()? && !is_too_late(&rules, record, sim.elapsed()) {
        weather.pass(&mut sim);
    }
    Ok(())
}

/// Whether a call has not ended in time.
fn is_too_late(rules: &Rules, record: &Record, elapsed: Duration) -> bool {
    let now = elapsed.as_millis() as u64;
    let open = record.seen().open.clone();
    let late: Vec<usize> = open.into_iter().filter(|call| rules.ends_by(&rules.script.calls[*call]) < now).collect();
    if !late.is_empty() {
        record.violation(format!("calls {late:?} do not end"));
    } else if now > MILLIS_MAX {
        record.violation("the simulation does not end".into());
    }
    !late.is_empty() || now > MILLIS_MAX
}

fn record_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.with_borrow_mut(|panics| panics.push(panic.to_string()));
            before(panic);
        }));
    });
}
