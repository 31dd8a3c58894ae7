//! The workers that have joined: which rank each holds, and whether it was heard of lately. Knows no requests.

use crate::WorkerId;
use crate::outbound::Outbound;
use crate::placement::{Blueprint, Machine};
use bytes::Bytes;
use proto::cluster as wire;
use std::collections::BTreeMap;
use tonic::Status;
use types::{Micros, PolicyDigest, Rank};

/// In the order in which they joined.
#[derive(Default)]
pub(crate) struct Members {
    workers: BTreeMap<WorkerId, Member>,
}

pub(crate) struct Member {
    machine: Machine,
    pid: u32,
    frames: Outbound<wire::RankFrame>,
    beats_missed: u32,
    /// Its counters as it told them last.
    told: wire::Heartbeat,
    role: Role,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Takes a rank when one is lost.
    Spare,
    Loading {
        rank: Rank,
        since: Micros,
    },
    Ready {
        rank: Rank,
        facts: Facts,
    },
}

/// What a rank said when it had loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub policy: PolicyDigest,
    pub n_blocks: u32,
}

impl Role {
    pub fn rank(self) -> Option<Rank> {
        match self {
            Role::Spare => None,
            Role::Loading { rank, .. } | Role::Ready { rank, .. } => Some(rank),
        }
    }
}

impl Members {
    pub fn join(&mut self, worker: WorkerId, hello: wire::WorkerHello, frames: Outbound<wire::RankFrame>) {
        let wire::WorkerHello { host, pid, device, memory_bytes, .. } = hello;
        let machine = Machine { worker, host, device, memory_bytes };
        self.workers.insert(
            worker,
            Member { machine, pid, frames, beats_missed: 0, told: wire::Heartbeat::default(), role: Role::Spare },
        );
    }

    /// Lets go of a worker; its stream ends with the reason. The role that it had, if it was here.
    pub fn dismiss(&mut self, worker: WorkerId, why: Status) -> Option<Role> {
        let member = self.workers.remove(&worker)?;
        member.frames.close(why);
        Some(member.role)
    }

    pub fn inventory(&self) -> Vec<Machine> {
        self.workers.values().map(|member| member.machine.clone()).collect()
    }

    pub fn role(&self, worker: WorkerId) -> Option<Role> {
        self.workers.get(&worker).map(|member| member.role)
    }

    pub fn heard(&mut self, worker: WorkerId) {
        if let Some(member) = self.workers.get_mut(&worker) {
            member.beats_missed = 0;
        }
    }

    /// Takes a beat, and gives what its counters have grown by.
    pub fn beat(&mut self, worker: WorkerId, beat: &wire::Heartbeat) -> Option<wire::Heartbeat> {
        let member = self.workers.get_mut(&worker)?;
        member.beats_missed = 0;
        let told = std::mem::replace(&mut member.told, *beat);
        Some(wire::Heartbeat {
            steps_done: beat.steps_done.saturating_sub(told.steps_done),
            compute_micros: beat.compute_micros.saturating_sub(told.compute_micros),
            idle_micros: beat.idle_micros.saturating_sub(told.idle_micros),
            wait_micros: beat.wait_micros.saturating_sub(told.wait_micros),
        })
    }

    /// Call once per beat. Beats are counted and not timed, so that a loop that stood still blames nobody for it.
    pub fn silent(&mut self, beats_missed_max: u32) -> Vec<WorkerId> {
        self.workers.values_mut().for_each(|member| member.beats_missed += 1);
        let is_silent = |member: &&Member| member.beats_missed > beats_missed_max;
        self.workers.values().filter(is_silent).map(|member| member.machine.worker).collect()
    }

    pub fn overdue(&self, now: Micros, load_max_micros: u64) -> Vec<WorkerId> {
        let is_overdue = |member: &&Member| match member.role {
            Role::Loading { since, .. } => now.since(since).0 > load_max_micros,
            Role::Spare | Role::Ready { .. } => false,
        };
        self.workers.values().filter(is_overdue).map(|member| member.machine.worker).collect()
    }

    /// False: there is no room for the frame, or no such worker.
    pub fn assign(&mut self, worker: WorkerId, rank: Rank, assign: wire::Assign, now: Micros) -> bool {
        let Some(member) = self.workers.get_mut(&worker) else { return false };
        member.role = Role::Loading { rank, since: now };
        member.frames.send(frame(wire::rank_frame::Frame::Assign(assign)))
    }

    pub fn ready(&mut self, worker: WorkerId, rank: Rank, facts: Facts) {
        if let Some(member) = self.workers.get_mut(&worker) {
            member.role = Role::Ready { rank, facts };
        }
    }

    /// What the ranks of a blueprint said, if all of them are ready.
    pub fn all_ready(&self, blueprint: &Blueprint) -> Option<Vec<Facts>> {
        let facts = |worker| match self.role(worker) {
            Some(Role::Ready { facts, .. }) => Some(facts),
            _ => None,
        };
        blueprint.shards.iter().map(|shard| facts(shard.worker)).collect()
    }

    /// The blueprint is void: nobody holds a rank.
    pub fn release_all(&mut self) {
        self.workers.values_mut().for_each(|member| member.role = Role::Spare);
    }

    /// The same bytes to every rank. The first worker that has no room for them.
    pub fn send_step(&self, step: &Bytes) -> Result<(), WorkerId> {
        let ranks = self.workers.values().filter(|member| member.role.rank().is_some());
        for member in ranks {
            if !member.frames.send(frame(wire::rank_frame::Frame::Step(step.clone()))) {
                return Err(member.machine.worker);
            }
        }
        Ok(())
    }

    pub fn leave_all(&mut self, reason: &str) {
        for (_, member) in std::mem::take(&mut self.workers) {
            // A rank whose queue is full sees the stream's end all the same.
            let _told =
                member.frames.send(frame(wire::rank_frame::Frame::Leave(wire::Leave { reason: reason.into() })));
            member.frames.close(Status::unavailable(reason));
        }
    }

    pub fn states(&self, blueprint: Option<&Blueprint>) -> Vec<wire::RankState> {
        let state = |member: &Member| {
            let (rank, state) = match member.role {
                Role::Spare => return None,
                Role::Loading { rank, .. } => (rank, "loading"),
                Role::Ready { rank, .. } => (rank, "ready"),
            };
            let place = blueprint?.grid.place(rank);
            Some(wire::RankState {
                rank: rank.0.into(),
                stage: place.stage.into(),
                tp: place.tp.into(),
                pid: member.pid,
                state: state.into(),
                host: member.machine.host.clone(),
            })
        };
        self.workers.values().filter_map(state).collect()
    }
}

fn frame(frame: wire::rank_frame::Frame) -> wire::RankFrame {
    wire::RankFrame { frame: Some(frame) }
}
