//! The router's decisions: its own replica table, ledgers and policies, with loads and caches as coordinators report
//! them. Has no knowledge of time.

use proto::cluster::{Cached, Load};
use router::PickPolicy;
use router::board::ledger::{Ledger, RemainingWork};
use router::board::pick::{PickInfo, ReplicaStanding, VersionId};
use router::board::{ChoiceBuffers, ReplicaFacts, ReplicaTable, Salt, names};
use scheduler::{BlockNameChange, Scheduler};
use std::sync::Arc;
use types::{CacheOwner, PolicyDigest, Token};

pub struct SimulatedRouter {
    policy: PickPolicy,
    board: ReplicaTable,
    seats: Vec<RoutedReplica>,
    scratch: ChoiceBuffers,
    n_picked: u64,
    changes: Vec<BlockNameChange>,
}

struct RoutedReplica {
    ledger: Arc<Ledger>,
    /// The number of the last report of its cache.
    sequence: u64,
}

impl SimulatedRouter {
    pub fn new(policy: PickPolicy, n_replicas: usize, planner: &scheduler::Config) -> SimulatedRouter {
        let mut board = ReplicaTable::default();
        let seat = |place: usize| {
            let ledger = board.ledger();
            board.add_replica(place, ledger.clone());
            let (digest, context, salt) = (planner.policy, planner.context_max, planner.salt);
            let (standing, version, protocol) = (ReplicaStanding::Ready, VersionId::default(), proto::NEWEST);
            let (room, id) = (u32::MAX, place as u64);
            board.update_facts(place, &ReplicaFacts { standing, digest, version, context, room, salt, id, protocol });
            RoutedReplica { ledger, sequence: 0 }
        };
        let seats = (0..n_replicas).map(seat).collect();
        SimulatedRouter { policy, board, seats, scratch: ChoiceBuffers::default(), n_picked: 0, changes: Vec::new() }
    }

    /// Picks the replica for a prompt. The item counts as work at the router until it is dropped.
    pub fn pick_replica(&mut self, prompt: &[Token], session: Option<u64>) -> Option<(usize, RemainingWork)> {
        let (n_prompt, protocol) = (prompt.len() as u32, proto::OLDEST);
        let pick_info =
            PickInfo { n_prompt, session, apart_from: None, n_before: self.n_picked, version: None, protocol };
        self.n_picked += 1;
        let called = |digest: &PolicyDigest, salt: &Salt| names(prompt, CacheOwner::default(), digest, salt);
        let chosen = self.board.choose(self.policy, &pick_info, Some(called), &mut self.scratch)?;
        Some((chosen.place, self.seats[chosen.place].ledger.add_work(prompt.len() as u64)))
    }

    /// Applies a coordinator's report, several times a second: its load, and the changes of names in its cache.
    pub fn apply_report(&mut self, replica: usize, planner: &mut Scheduler) {
        let stats = planner.stats();
        self.seats[replica].ledger.apply_load(&Load {
            n_waiting: stats.n_waiting,
            n_running: stats.n_running,
            backlog_tokens: planner.backlog_tokens(),
            running_tokens: planner.running_tokens(),
            blocks_used: stats.blocks_used,
            blocks_total: stats.blocks_total,
        });
        // A policy that reads caches does so at least for requests without a session.
        if self.policy.reads_caches(&PickInfo::default()) {
            self.apply_name_changes(replica, planner);
        }
    }

    fn apply_name_changes(&mut self, replica: usize, planner: &mut Scheduler) {
        let seat = &mut self.seats[replica];
        let is_known = planner.name_changes(&mut self.changes);
        if is_known && self.changes.is_empty() {
            return;
        }
        seat.sequence += 1;
        let mut cached_names = Cached { sequence: seat.sequence, anew: !is_known, ..Cached::default() };
        if is_known {
            collect_changes(&mut self.changes, &mut cached_names);
        } else {
            planner.append_names(0..u32::MAX, &mut cached_names.added);
        }
        // The simulation loses no report.
        self.board.apply_report(replica, &cached_names).expect("every word follows the one before");
    }
}

/// Adds only the last change of each name, because a name may be added and removed in between.
fn collect_changes(changes: &mut [BlockNameChange], cached_names: &mut Cached) {
    changes.sort_by_key(|change| change.name);
    for of_name in changes.chunk_by(|a, b| a.name == b.name) {
        match of_name.last() {
            Some(BlockNameChange { name, is_added: true }) => cached_names.added.push(*name),
            Some(BlockNameChange { name, is_added: false }) => cached_names.dropped.push(*name),
            None => {}
        }
    }
}
