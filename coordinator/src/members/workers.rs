//! The workers that have joined: which rank each holds, and whether it was heard of lately. Knows no requests.

use crate::WorkerId;
use crate::members::hangs::Testimony;
use crate::members::slow::Slowness;
use crate::outbound::Outbound;
use crate::placement::{Blueprint, Machine, Shard};
use bytes::Bytes;
use proto::{Malformed, cluster as wire};
use std::collections::BTreeMap;
use tonic::Status;
use types::{DeviceKind, Micros, PolicyDigest, Rank};

/// In the order in which they joined.
#[derive(Default)]
pub(crate) struct Members {
    workers: BTreeMap<WorkerId, Member>,
}

/// Why a worker is refused that would join.
pub(crate) enum NotTaken {
    /// Its collective stands where this one's does: peers would take one for the other.
    SamePlace(WorkerId),
    /// What it says that it computes on.
    Unknown(Malformed),
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
    /// Why it has not read the model again, if it was to.
    unread: String,
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
    /// Waits until all others have loaded too.
    Loaded {
        rank: Rank,
        facts: Facts,
    },
    Meeting {
        rank: Rank,
        facts: Facts,
        since: Micros,
    },
    Ready {
        rank: Rank,
        facts: Facts,
    },
}

/// For how long a rank may be on its way to being ready.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowed {
    pub load_micros: u64,
    pub meet_micros: u64,
}

/// What a rank said when it had loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    pub policy: PolicyDigest,
    pub weight_bytes: u64,
}

/// A peer says that this worker did not answer. It is cleared by what only its computing thread can change.
struct Suspicion {
    /// As which it was named.
    rank: Option<Rank>,
    told: wire::Heartbeat,
    why: String,
}

/// What a worker that was let go had been.
pub(crate) struct Dismissed {
    pub role: Role,
    /// The rank as which its peers had named it, if its epoch ended by that.
    pub blamed_as: Option<Rank>,
    pub host: String,
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
            Role::Loading { rank, .. }
            | Role::Loaded { rank, .. }
            | Role::Meeting { rank, .. }
            | Role::Ready { rank, .. } => Some(rank),
        }
    }

    fn facts(self) -> Option<Facts> {
        match self {
            Role::Spare | Role::Loading { .. } => None,
            Role::Loaded { facts, .. } | Role::Meeting { facts, .. } | Role::Ready { facts, .. } => Some(facts),
        }
    }
}

impl Members {
    pub fn join(
        &mut self,
        worker: WorkerId,
        hello: wire::WorkerHello,
        frames: Outbound<wire::RankFrame>,
    ) -> Result<(), NotTaken> {
        let device = match hello.device() {
            Ok(device) => device,
            Err(unknown) => {
                frames.close(Status::invalid_argument(unknown.to_string()));
                return Err(NotTaken::Unknown(unknown));
            }
        };
        let wire::WorkerHello { host, pid, memory_bytes, threads, mesh_address, cores, .. } = hello;
        let is_same = |member: &&Member| !mesh_address.is_empty() && member.mesh_address == mesh_address;
        if let Some(other) = self.workers.values().find(is_same) {
            frames.close(Status::already_exists(format!(
                "{} of {} has the mesh address {mesh_address} already",
                other.machine.worker, other.machine.host
            )));
            return Err(NotTaken::SamePlace(other.machine.worker));
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
            unread: String::new(),
            n_blames: 0,
            window: Window::default(),
        };
        self.workers.insert(worker, member);
        Ok(())
    }

    /// Lets go of a worker; its stream ends with the reason. What it was, if it was here.
    pub fn dismiss(&mut self, worker: WorkerId, why: Status) -> Option<Dismissed> {
        let Member { frames, role, suspicion, machine, .. } = self.workers.remove(&worker)?;
        frames.close(why);
        Some(Dismissed { role, blamed_as: suspicion.and_then(|suspicion| suspicion.rank), host: machine.host })
    }

    /// Those that were never blamed come first: a spare is the better peer.
    pub fn inventory(&self) -> Vec<Machine> {
        let (good, blamed): (Vec<_>, Vec<_>) = self.workers.values().partition(|member| member.n_blames == 0);
        good.into_iter().chain(blamed).map(|member| member.machine.clone()).collect()
    }

    pub fn role(&self, worker: WorkerId) -> Option<Role> {
        self.workers.get(&worker).map(|member| member.role)
    }

    /// What it computes on, as it says.
    pub fn device(&self, worker: WorkerId) -> Option<&DeviceKind> {
        self.workers.get(&worker).map(|member| &member.machine.device)
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

    /// Who takes too long to become ready, and at what.
    pub fn overdue(&self, now: Micros, allowed: Allowed) -> Vec<(WorkerId, &'static str)> {
        let overdue = |member: &Member| match member.role {
            Role::Loading { since, .. } if now.since(since).0 > allowed.load_micros => Some("to load"),
            Role::Meeting { since, .. } if now.since(since).0 > allowed.meet_micros => Some("to meet the others"),
            _ => None,
        };
        self.workers.values().filter_map(|member| Some((member.machine.worker, overdue(member)?))).collect()
    }

    // -- suspicion

    /// A peer named it. From its next place on, its computing thread must move.
    pub fn suspect(&mut self, worker: WorkerId, why: String) {
        if let Some(member) = self.workers.get_mut(&worker) {
            member.n_blames += 1;
            member.suspicion = Some(Suspicion { rank: member.role.rank(), told: member.told, why });
        }
    }

    pub fn is_suspect(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|member| member.suspicion.is_some())
    }

    /// Those that were blamed, were given a place for so long and have not moved: they beat, and no longer compute.
    pub fn unmoved(&self, now: Micros, suspect_max_micros: u64) -> Vec<(WorkerId, String)> {
        let is_unmoved = |member: &Member| match member.role {
            Role::Loading { since, .. } => now.since(since).0 > suspect_max_micros,
            _ => false,
        };
        let why = |member: &Member| {
            let suspicion = member.suspicion.as_ref().filter(|_| is_unmoved(member))?;
            Some((member.machine.worker, suspicion.why.clone()))
        };
        self.workers.values().filter_map(why).collect()
    }

    /// What each rank said of itself last.
    pub fn testimonies(&self, sampler: Rank) -> Vec<Testimony> {
        let testimony = |member: &Member| {
            let rank = member.role.rank()?;
            Some(Testimony {
                worker: member.machine.worker,
                rank,
                n_steps: member.told.steps_done.saturating_sub(member.steps_before),
                in_step: member.told.in_step,
                waits_for: member.told.waits_for.and_then(|rank| u16::try_from(rank).ok()).map(Rank),
                is_sampler: rank == sampler,
            })
        };
        self.workers.values().filter_map(testimony).collect()
    }

    // -- ranks

    /// False: there is no room for the frame, or no such worker.
    pub fn assign(&mut self, worker: WorkerId, rank: Rank, assign: wire::Assign, now: Micros) -> bool {
        let Some(member) = self.workers.get_mut(&worker) else { return false };
        member.role = Role::Loading { rank, since: now };
        member.frames.send(frame(wire::rank_frame::Frame::Assign(assign)))
    }

    pub fn loaded(&mut self, worker: WorkerId, rank: Rank, facts: Facts, unread: &str) {
        if let Some(member) = self.workers.get_mut(&worker) {
            unread.clone_into(&mut member.unread);
            member.role = Role::Loaded { rank, facts };
            member.suspicion = None;
        }
    }

    pub fn all_loaded(&self, blueprint: &Blueprint) -> bool {
        let is_loaded = |shard: &Shard| matches!(self.role(shard.worker), Some(Role::Loaded { .. }));
        blueprint.shards.iter().all(is_loaded)
    }

    /// Tells all that have loaded to meet. The first that has no room for the word.
    pub fn meet(&mut self, meet: wire::Meet, now: Micros) -> Result<(), WorkerId> {
        for member in self.workers.values_mut() {
            let Role::Loaded { rank, facts } = member.role else { continue };
            member.role = Role::Meeting { rank, facts, since: now };
            if !member.frames.send(frame(wire::rank_frame::Frame::Meet(meet))) {
                return Err(member.machine.worker);
            }
        }
        Ok(())
    }

    pub fn ready(&mut self, worker: WorkerId) {
        if let Some(member) = self.workers.get_mut(&worker)
            && let Role::Meeting { rank, facts, .. } = member.role
        {
            member.role = Role::Ready { rank, facts };
            member.steps_before = member.told.steps_done;
        }
    }

    /// Ranks that have not read the model again, though they were to.
    pub fn unread(&self) -> Vec<wire::Unread> {
        let unread = |member: &Member| {
            let rank = member.role.rank().filter(|_| !member.unread.is_empty())?;
            Some(wire::Unread { rank: rank.0.into(), host: member.machine.host.clone(), why: member.unread.clone() })
        };
        self.workers.values().filter_map(unread).collect()
    }

    /// The policy of any rank that has loaded.
    pub fn policy(&self) -> Option<PolicyDigest> {
        self.workers.values().find_map(|member| Some(member.role.facts()?.policy))
    }

    /// What the ranks of a blueprint said, if all of them are ready.
    pub fn all_ready(&self, blueprint: &Blueprint) -> Option<Vec<Facts>> {
        let facts = |worker| match self.role(worker) {
            Some(Role::Ready { facts, .. }) => Some(facts),
            _ => None,
        };
        blueprint.shards.iter().map(|shard| facts(shard.worker)).collect()
    }

    /// The blueprint is void: nobody holds a rank, and whoever did ends what it does for it.
    pub fn release_all(&mut self) {
        for member in self.workers.values_mut().filter(|member| member.role != Role::Spare) {
            member.role = Role::Spare;
            // One that has no room even for this will have none for its next place.
            let _told = member.frames.send(frame(wire::rank_frame::Frame::Release(wire::Release {})));
        }
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

    pub fn states(&self, blueprint: Option<&Blueprint>, slowness: &Slowness) -> Vec<wire::RankState> {
        let shards = blueprint.iter().flat_map(|blueprint| &blueprint.shards);
        let state = |shard: &Shard| Some(self.workers.get(&shard.worker)?.state(shard, slowness.is_slow(shard.rank)));
        shards.filter_map(state).collect()
    }
}

impl Member {
    fn state(&self, shard: &Shard, is_slow: bool) -> wire::RankState {
        let state = match self.role {
            Role::Ready { .. } if is_slow => "slow",
            Role::Ready { .. } => "ready",
            Role::Loaded { .. } | Role::Meeting { .. } => "meeting",
            Role::Spare | Role::Loading { .. } => "loading",
        };
        let weight_bytes = self.role.facts().map_or(shard.weight_bytes, |facts| facts.weight_bytes.max(1));
        wire::RankState {
            rank: shard.rank.0.into(),
            stage: shard.place.stage.into(),
            tp: shard.place.tp.into(),
            pid: self.pid,
            state: state.into(),
            host: self.machine.host.clone(),
            device: self.machine.device.to_string(),
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
        let (compute_micros, wait_micros) = within(wall_micros, grown.compute_micros, grown.wait_micros);
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

/// A step that took long is told at its end, and may have begun in the window before: then its parts keep their ratio.
fn within(wall: u64, compute: u64, wait: u64) -> (u64, u64) {
    let busy = compute.saturating_add(wait);
    if busy <= wall {
        return (compute, wait);
    }
    let scaled = (u128::from(compute) * u128::from(wall) / u128::from(busy)) as u64;
    (scaled, wall - scaled)
}

fn grown(from: &wire::Heartbeat, to: &wire::Heartbeat) -> wire::Heartbeat {
    wire::Heartbeat {
        steps_done: to.steps_done.saturating_sub(from.steps_done),
        compute_micros: to.compute_micros.saturating_sub(from.compute_micros),
        idle_micros: to.idle_micros.saturating_sub(from.idle_micros),
        wait_micros: to.wait_micros.saturating_sub(from.wait_micros),
        ..*to
    }
}

fn frame(frame: wire::rank_frame::Frame) -> wire::RankFrame {
    wire::RankFrame { frame: Some(frame) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_window_fill_no_more_than_it() {
        assert_eq!(within(100, 30, 20), (30, 20));
        assert_eq!(within(100, 120, 80), (60, 40));
        assert_eq!(within(100, 0, 300), (0, 100));
        assert_eq!(within(0, 5, 5), (0, 0));
    }
}
