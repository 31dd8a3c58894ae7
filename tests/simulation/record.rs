//! What is seen of a simulation: a trace, of which a hash is kept, and what broke a rule. Shared by all hosts,
//! beside the network that is simulated.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio_util::sync::CancellationToken;

#[derive(Clone, Default)]
pub struct Record(Arc<Mutex<Seen>>);

#[derive(Default)]
pub struct Seen {
    is_told: bool,
    hasher: DefaultHasher,
    pub n_lines: u64,
    pub violations: Vec<String>,
    /// How often what happened, of what is worth counting.
    pub counts: BTreeMap<&'static str, u64>,
    /// Calls that have not ended.
    pub open: BTreeSet<usize>,
    /// When the others did.
    pub ended_millis: BTreeMap<usize, u64>,
    /// In which a rank has begun to load: a replica that nobody disturbs has one.
    pub epochs: BTreeSet<(u64, u32)>,
    /// How each process that runs is asked to stop.
    pub stops: BTreeMap<String, CancellationToken>,
    /// Ranks that do not compute for now.
    pub hung: BTreeSet<String>,
    /// Replicas that somebody else coordinates too, by order.
    pub rivals: BTreeSet<usize>,
    /// Nobody reaches the store.
    pub is_store_away: bool,
    /// Who does not reach it, and since when.
    pub cut_off: BTreeMap<String, u64>,
    /// How often a process has begun there.
    pub starts: BTreeMap<String, u64>,
}

impl Record {
    /// `is_told`: each line is printed as it comes.
    pub fn new(is_told: bool) -> Record {
        Record(Arc::new(Mutex::new(Seen { is_told, ..Seen::default() })))
    }

    pub fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn note(&self, who: &str, what: impl AsRef<str>) {
        let millis = turmoil::sim_elapsed().unwrap_or_default().as_millis();
        self.seen().note(millis, who, what.as_ref());
    }

    pub fn count(&self, what: &'static str) {
        *self.seen().counts.entry(what).or_default() += 1;
    }

    pub fn violation(&self, what: String) {
        let mut seen = self.seen();
        if seen.is_told {
            println!("VIOLATION {what}");
        }
        seen.violations.push(what);
    }

    pub fn hash(&self) -> u64 {
        self.seen().hasher.finish()
    }
}

impl Seen {
    pub fn note(&mut self, millis: u128, who: &str, what: &str) {
        self.n_lines += 1;
        (millis, who, what).hash(&mut self.hasher);
        if self.is_told {
            println!("{:>3}.{:03} {who}: {what}", millis / 1000, millis % 1000);
        }
    }
}
