//! Which worker holds which rank in one epoch, and how far each has come to being ready. Dropped with its epoch.

use crate::WorkerId;
use std::collections::BTreeMap;
use types::{KV_PARTS, Micros, PolicyDigest, Rank};

/// In the order in which the workers joined.
#[derive(Debug, Default)]
pub(crate) struct RankHolders {
    holders: BTreeMap<WorkerId, Holder>,
}

#[derive(Debug)]
struct Holder {
    rank: Rank,
    readiness: Readiness,
    /// Why it has not read the model again, if a reload was requested.
    unread: String,
    /// Its count of steps when it became ready.
    steps_before: u64,
    kv: RankMemory,
}

/// How much of a rank's KV cache there is memory for.
#[derive(Clone, Copy, Debug)]
struct RankMemory {
    parts: u32,
    /// Whether it grows and shrinks to the targets that it is sent.
    grows: bool,
    /// The number of the last target that was below the committed memory. Earlier reports include memory that is given
    /// back.
    lowered: u32,
}

impl RankMemory {
    const ALL: RankMemory = RankMemory { parts: KV_PARTS, grows: false, lowered: 0 };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    Loading {
        since: Micros,
    },
    /// Waits until all others have loaded too.
    Loaded(RankFacts),
    Meeting {
        facts: RankFacts,
        since: Micros,
    },
    Ready(RankFacts),
}

/// A rank's report when it had loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RankFacts {
    pub policy: PolicyDigest,
    pub weight_bytes: u64,
}

/// How long a rank may take to become ready.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadyTimeouts {
    pub load_micros: u64,
    pub meet_micros: u64,
}

impl Readiness {
    pub fn facts(self) -> Option<RankFacts> {
        match self {
            Readiness::Loading { .. } => None,
            Readiness::Loaded(facts) | Readiness::Meeting { facts, .. } | Readiness::Ready(facts) => Some(facts),
        }
    }
}

impl RankHolders {
    pub fn assign(&mut self, worker: WorkerId, rank: Rank, now: Micros) {
        let readiness = Readiness::Loading { since: now };
        self.holders
            .insert(worker, Holder { rank, readiness, unread: String::new(), steps_before: 0, kv: RankMemory::ALL });
    }

    pub fn workers(&self) -> impl Iterator<Item = WorkerId> {
        self.holders.keys().copied()
    }

    pub fn rank(&self, worker: WorkerId) -> Option<Rank> {
        self.holders.get(&worker).map(|holder| holder.rank)
    }

    pub fn readiness(&self, worker: WorkerId) -> Option<Readiness> {
        self.holders.get(&worker).map(|holder| holder.readiness)
    }

    /// The policy of any rank that has loaded.
    pub fn policy(&self) -> Option<PolicyDigest> {
        self.holders.values().find_map(|holder| Some(holder.readiness.facts()?.policy))
    }

    pub fn steps_before(&self, worker: WorkerId) -> u64 {
        self.holders.get(&worker).map_or(0, |holder| holder.steps_before)
    }

    /// Returns why it has not read the model again, if a reload was requested.
    pub fn reload_failure(&self, worker: WorkerId) -> Option<&str> {
        self.holders.get(&worker).map(|holder| holder.unread.as_str()).filter(|why| !why.is_empty())
    }

    /// The workers that take too long to become ready, each with its present stage.
    pub fn overdue(&self, now: Micros, allowed: ReadyTimeouts) -> Vec<(WorkerId, &'static str)> {
        let overdue = |holder: &Holder| match holder.readiness {
            Readiness::Loading { since } if now.since(since).0 > allowed.load_micros => Some("to load"),
            Readiness::Meeting { since, .. } if now.since(since).0 > allowed.meet_micros => {
                Some("to connect to its peers")
            }
            _ => None,
        };
        self.holders.iter().filter_map(|(worker, holder)| Some((*worker, overdue(holder)?))).collect()
    }

    pub fn loads_for_longer(&self, worker: WorkerId, now: Micros, max_micros: u64) -> bool {
        matches!(self.readiness(worker), Some(Readiness::Loading { since }) if now.since(since).0 > max_micros)
    }

    pub fn record_loaded(&mut self, worker: WorkerId, facts: RankFacts, unread: &str) {
        if let Some(holder) = self.holders.get_mut(&worker) {
            unread.clone_into(&mut holder.unread);
            holder.readiness = Readiness::Loaded(facts);
        }
    }

    pub fn all_loaded(&self) -> bool {
        self.holders.values().all(|holder| matches!(holder.readiness, Readiness::Loaded(_)))
    }

    /// Records that a loaded rank was sent `Meet`.
    pub fn record_meeting(&mut self, worker: WorkerId, now: Micros) {
        if let Some(holder) = self.holders.get_mut(&worker)
            && let Readiness::Loaded(facts) = holder.readiness
        {
            holder.readiness = Readiness::Meeting { facts, since: now };
        }
    }

    /// Only a rank that meets can become ready. `steps_done` counts over all epochs.
    pub fn record_ready(&mut self, worker: WorkerId, steps_done: u64) {
        if let Some(holder) = self.holders.get_mut(&worker)
            && let Readiness::Meeting { facts, .. } = holder.readiness
        {
            holder.readiness = Readiness::Ready(facts);
            holder.steps_before = steps_done;
        }
    }

    /// Records the memory with which a rank became ready. `None`: all of it.
    pub fn record_kv_start(&mut self, worker: WorkerId, parts: Option<u32>, grows: bool) {
        if let Some(holder) = self.holders.get_mut(&worker) {
            holder.kv = RankMemory { parts: parts.unwrap_or(KV_PARTS), grows, lowered: 0 };
        }
    }

    /// Records a rank's report of its memory, after the target with this number.
    pub fn record_kv_committed(&mut self, worker: WorkerId, parts: u32, target: u32) {
        if let Some(holder) = self.holders.get_mut(&worker).filter(|holder| target >= holder.kv.lowered) {
            holder.kv.parts = parts;
        }
    }

    /// Records that the ranks that grow were sent a target below their memory.
    pub fn record_kv_lowered(&mut self, parts: u32, target: u32) {
        for kv in self.holders.values_mut().map(|holder| &mut holder.kv).filter(|kv| kv.grows) {
            (kv.parts, kv.lowered) = (kv.parts.min(parts), target);
        }
    }

    pub fn some_grow(&self) -> bool {
        self.growing_workers().next().is_some()
    }

    pub fn growing_workers(&self) -> impl Iterator<Item = WorkerId> {
        self.holders.iter().filter(|(_, holder)| holder.kv.grows).map(|(worker, _)| *worker)
    }

    /// How much of each pool every rank has memory for.
    pub fn kv_parts(&self) -> u32 {
        self.holders.values().map(|holder| holder.kv.parts).min().unwrap_or(KV_PARTS)
    }

    pub fn is_ready(&self, worker: WorkerId) -> bool {
        matches!(self.readiness(worker), Some(Readiness::Ready(_)))
    }

    pub fn all_ready(&self) -> bool {
        self.workers().all(|worker| self.is_ready(worker))
    }
}
