//! The record of a simulation: a trace, kept as a hash, and broken rules. Shared by all hosts, outside the simulated
//! network.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio_util::sync::CancellationToken;

#[derive(Clone, Default)]
pub struct Record(Arc<Mutex<Seen>>);

#[derive(Default)]
pub struct Seen {
    is_printed: bool,
    hasher: DefaultHasher,
    pub n_lines: u64,
    pub violations: Vec<String>,
    /// How often each event happened.
    pub counts: BTreeMap<&'static str, u64>,
    /// Calls that have not ended.
    pub open: BTreeSet<usize>,
    /// The ends of the other calls.
    pub ended_millis: BTreeMap<usize, u64>,
    /// Epochs in which a rank has begun to load: an undisturbed replica has one.
    pub epochs: BTreeSet<(u64, u32)>,
    /// The same, when the streams of a story about pauses had ended.
    pub epochs_of_streams: BTreeSet<(u64, u32)>,
    /// The stop signal of each running process.
    pub stops: BTreeMap<String, CancellationToken>,
    /// Hosts whose rank does not compute for now.
    pub hung: BTreeSet<String>,
    /// Replicas that have a second coordinator, by index.
    pub rivals: BTreeSet<usize>,
    /// Whether the store is unreachable for all.
    pub is_store_away: bool,
    /// Hosts that do not reach the store, and since when.
    pub cut_off: BTreeMap<String, u64>,
    /// How often a process has started on each host.
    pub starts: BTreeMap<String, u64>,
}

impl Record {
    /// `is_printed`: each line is printed immediately.
    pub fn new(is_printed: bool) -> Record {
        Record(Arc::new(Mutex::new(Seen { is_printed, ..Seen::default() })))
    }

    pub fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn note(&self, source: &str, what: impl AsRef<str>) {
        let millis = turmoil::sim_elapsed().unwrap_or_default().as_millis();
        self.seen().note(millis, source, what.as_ref());
    }

    pub fn count(&self, what: &'static str) {
        *self.seen().counts.entry(what).or_default() += 1;
    }

    pub fn violation(&self, what: String) {
        let mut seen = self.seen();
        if seen.is_printed {
            println!("VIOLATION {what}");
        }
        seen.violations.push(what);
    }

    pub fn hash(&self) -> u64 {
        self.seen().hasher.finish()
    }
}

impl Seen {
    pub fn note(&mut self, millis: u128, source: &str, what: &str) {
        self.n_lines += 1;
        (millis, source, what).hash(&mut self.hasher);
        if self.is_printed {
            println!("{:>3}.{:03} {source}: {what}", millis / 1000, millis % 1000);
        }
    }
}
