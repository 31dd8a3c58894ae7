//! The workers that have joined: which rank each holds, and whether it was heard of lately. Knows no requests.

use crate::WorkerId;
use crate::outbound::Outbound;
use crate::placement::{Blueprint, Machine, Shard};
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
    mesh_address: String,
    frames: Outbound<wire::RankFrame>,
    beats_missed: u32,
    /// Its counters as it told them last.
    told: wire::Heartbeat,
    /// Steps that it had done when it took its rank.
    steps_before: u64,
    role: Role,
    suspicion: Option<Suspicion>,
    /// Peers have named it so often as the one that did not answer.
    n_blames: u32,
    window: Window,
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
    pub weight_bytes: u64,
}

/// A peer says that this worker did not answer. It is cleared by what only its computing thread can change.
struct Suspicion {
    told: wire::Heartbeat,
    why: String,
}

/// Where its time went, between two looks.
#[derive(Default)]
struct Window {
    since: Micros,
    from: wire::Heartbeat,
    in_flight_from: u64,
    last: wire::RankTimes,
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
    /// Refused: a worker whose collective stands where another's does would be taken for it by their peers.
    pub fn join(
        &mut self,
        worker: WorkerId,
        hello: wire::WorkerHello,
        frames: Outbound<wire::RankFrame>,
    ) -> Result<(), WorkerId> {
        let wire::WorkerHello { host, pid, device, memory_bytes, threads, mesh_address, cores, .. } = hello;
        let is_same = |member: &&Member| !mesh_address.is_empty() && member.mesh_address == mesh_address;
        if let Some(other) = self.workers.values().find(is_same) {
            frames.close(Status::already_exists(format!(
                "{} of {} has the mesh address {mesh_address} already",
                other.machine.worker, other.machine.host
            )));
            return Err(other.machine.worker);
        }
        let machine = Machine { worker, host, device, memory_bytes, threads, cores };
        let member = Member {
            machine,
            pid,
            mesh_address,
            frames,
            beats_missed: 0,
            told: wire::Heartbeat::default(),
            steps_before: 0,
            role: Role::Spare,
            suspicion: None,
            n_blames: 0,
            window: Window::default(),
        };
        self.workers.insert(worker, member);
        Ok(())
    }

    /// Lets go of a worker; its stream ends with the reason. The role and the host that it had, if it was here.
    pub fn dismiss(&mut self, worker: WorkerId, why: Status) -> Option<(Role, String)> {
        let member = self.workers.remove(&worker)?;
        member.frames.close(why);
        Some((member.role, member.machine.host))
    }

    /// Those that were never blamed come first: a spare is the better peer.
    pub fn inventory(&self) -> Vec<Machine> {
        let (good, blamed): (Vec<_>, Vec<_>) = self.workers.values().partition(|member| member.n_blames == 0);
        good.into_iter().chain(blamed).map(|member| member.machine.clone()).collect()
    }

    pub fn role(&self, worker: WorkerId) -> Option<Role> {
        self.workers.get(&worker).map(|member| member.role)
    }

    pub fn host(&self, worker: WorkerId) -> &str {
        self.workers.get(&worker).map_or("", |member| &member.machine.host)
    }

    pub fn mesh_address(&self, worker: WorkerId) -> String {
        self.workers.get(&worker).map(|member| member.mesh_address.clone()).unwrap_or_default()
    }

    pub fn n_spares(&self) -> usize {
        self.workers.values().filter(|member| member.role == Role::Spare).count()
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
        member.suspicion.take_if(|suspicion| suspicion.told != *beat);
        Some(grown(&told, beat))
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

    // -- suspicion

    /// A peer named it. From its next place on, its computing thread must move.
    pub fn suspect(&mut self, worker: WorkerId, why: String) {
        if let Some(member) = self.workers.get_mut(&worker) {
            member.n_blames += 1;
            member.suspicion = Some(Suspicion { told: member.told, why });
        }
    }

    pub fn is_suspect(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|member| member.suspicion.is_some())
    }

    /// Those that were blamed, were given a place for so long and have not moved: they beat, and no longer compute.
    pub fn unmoved(&self, now: Micros, suspect_max_micros: u64) -> Vec<(WorkerId, String)> {
        let is_unmoved = |member: &Member| match member.role {
            Role::Loading { since, .. } => now.since(since).0 > suspect_max_micros,
            Role::Spare | Role::Ready { .. } => false,
        };
        let why = |member: &Member| {
            let suspicion = member.suspicion.as_ref().filter(|_| is_unmoved(member))?;
            Some((member.machine.worker, suspicion.why.clone()))
        };
        self.workers.values().filter_map(why).collect()
    }

    /// Who of the ranks has done the fewest steps since it took its rank: all others wait for it.
    pub fn furthest_behind(&self) -> Option<WorkerId> {
        let ranks = self.workers.values().filter(|member| member.role.rank().is_some());
        let behind = ranks.min_by_key(|member| member.told.steps_done.saturating_sub(member.steps_before));
        behind.map(|member| member.machine.worker)
    }

    // -- ranks

    /// False: there is no room for the frame, or no such worker.
    pub fn assign(&mut self, worker: WorkerId, rank: Rank, assign: wire::Assign, now: Micros) -> bool {
        let Some(member) = self.workers.get_mut(&worker) else { return false };
        member.role = Role::Loading { rank, since: now };
        member.frames.send(frame(wire::rank_frame::Frame::Assign(assign)))
    }

    pub fn ready(&mut self, worker: WorkerId, rank: Rank, facts: Facts) {
        if let Some(member) = self.workers.get_mut(&worker) {
            member.role = Role::Ready { rank, facts };
            member.suspicion = None;
            member.steps_before = member.told.steps_done;
        }
    }

    /// The policy of any rank that is ready.
    pub fn policy(&self) -> Option<PolicyDigest> {
        self.workers.values().find_map(|member| match member.role {
            Role::Ready { facts, .. } => Some(facts.policy),
            Role::Spare | Role::Loading { .. } => None,
        })
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

    // -- views

    /// Where each rank's time went since the last look; `in_flight_micros` counts for how long steps were in flight.
    /// Call about once a second.
    pub fn look(&mut self, now: Micros, in_flight_micros: u64) -> Vec<(Rank, wire::RankTimes)> {
        let ranks = self.workers.values_mut().filter_map(|member| Some((member.role.rank()?, member)));
        ranks.map(|(rank, member)| (rank, member.window.close(&member.told, now, in_flight_micros))).collect()
    }

    pub fn states(&self, blueprint: Option<&Blueprint>) -> Vec<wire::RankState> {
        let shards = blueprint.iter().flat_map(|blueprint| &blueprint.shards);
        shards.filter_map(|shard| Some(self.workers.get(&shard.worker)?.state(shard))).collect()
    }
}

impl Member {
    fn state(&self, shard: &Shard) -> wire::RankState {
        let (state, weight_bytes) = match self.role {
            Role::Ready { facts, .. } => ("ready", facts.weight_bytes.max(1)),
            Role::Spare | Role::Loading { .. } => ("loading", shard.weight_bytes),
        };
        wire::RankState {
            rank: shard.rank.0.into(),
            stage: shard.place.stage.into(),
            tp: shard.place.tp.into(),
            pid: self.pid,
            state: state.into(),
            host: self.machine.host.clone(),
            device: self.machine.device.clone(),
            threads: self.machine.threads,
            layer_start: shard.layers.start,
            layer_end: shard.layers.end,
            head_start: shard.heads.start,
            head_end: shard.heads.end,
            kv_heads: shard.kv_heads.len() as u32,
            memory_bytes: self.machine.memory_bytes,
            weight_bytes,
            kv_bytes: shard.kv_bytes,
            kv_tokens: shard.kv_tokens_max(),
            times: Some(self.window.last),
        }
    }
}

impl Window {
    fn close(&mut self, told: &wire::Heartbeat, now: Micros, in_flight: u64) -> wire::RankTimes {
        let grown = grown(&self.from, told);
        let wall_micros = now.since(self.since).0;
        // A step that took long is told at its end, and may have begun in the window before.
        let compute_micros = grown.compute_micros.min(wall_micros);
        let wait_micros = grown.wait_micros.min(wall_micros - compute_micros);
        self.last = wire::RankTimes {
            steps: grown.steps_done,
            wall_micros,
            compute_micros,
            wait_micros,
            idle_micros: wall_micros - compute_micros - wait_micros,
            in_flight_micros: in_flight.saturating_sub(self.in_flight_from).min(wall_micros),
        };
        (self.since, self.from, self.in_flight_from) = (now, *told, in_flight);
        self.last
    }
}

fn grown(from: &wire::Heartbeat, to: &wire::Heartbeat) -> wire::Heartbeat {
    wire::Heartbeat {
        steps_done: to.steps_done.saturating_sub(from.steps_done),
        compute_micros: to.compute_micros.saturating_sub(from.compute_micros),
        idle_micros: to.idle_micros.saturating_sub(from.idle_micros),
        wait_micros: to.wait_micros.saturating_sub(from.wait_micros),
    }
}

fn frame(frame: wire::rank_frame::Frame) -> wire::RankFrame {
    wire::RankFrame { frame: Some(frame) }
}
