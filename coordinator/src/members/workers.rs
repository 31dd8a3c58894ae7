//! The workers that have joined: each one's description, the time of its last frame, and its peers' reports of it.
//! Knows no requests; the caller passes which rank each holds.

use crate::WorkerId;
use crate::config::{Timings, micros};
use crate::members::distrusted::DistrustedHosts;
use crate::members::hangs::RankReport;
use crate::members::ranks::{RankHolders, Readiness};
use crate::members::unreachable::{ExcludedWorker, MissedPeer, UnreachableWorkers};
use crate::members::window::{TimeWindow, heartbeat_growth};
use crate::outbound::Outbound;
use crate::placement::{Blueprint, Machine, Shard};
use ::wire::rate_limit::LogRateLimit;
use bytes::Bytes;
use proto::{Malformed, cluster as wire};
use std::collections::BTreeMap;
use tonic::Status;
use types::{DeviceKind, Micros, Rank};

/// Machines in the order in which they joined.
#[derive(Default)]
pub(crate) struct JoinedWorkers {
    workers: BTreeMap<WorkerId, WorkerEntry>,
    /// Of two workers that do not reach each other, the one that is left out.
    unreachable: UnreachableWorkers,
    /// Those whose hosts have loaded other weights than the replica serves.
    distrusted: DistrustedHosts,
    /// Refused workers that claim another's address; all workers of unknown devices share one entry.
    refusals: LogRateLimit<Option<WorkerId>>,
}

/// The workers that may be given a rank now, best first.
pub(crate) struct Candidates {
    machines: Vec<Machine>,
    /// The number of candidates before those of distrusted hosts, which are taken only if nothing can be placed without
    /// them.
    n_trusted: usize,
}

impl Candidates {
    pub fn all(&self) -> &[Machine] {
        &self.machines
    }

    /// Returns the candidates to try first, if those are not all.
    pub fn trusted(&self) -> Option<&[Machine]> {
        (self.n_trusted < self.machines.len()).then(|| &self.machines[..self.n_trusted])
    }
}

/// Why a worker may not join.
enum WorkerRefusal {
    /// Its collective has the same address as this worker's: peers would confuse the two.
    SamePlace(WorkerId),
    /// The device that it names is unknown.
    Unknown(Malformed),
}

struct WorkerEntry {
    machine: Machine,
    pid: u32,
    mesh_address: String,
    /// The protocol that its stream speaks.
    protocol: u32,
    frames: Outbound<wire::RankFrame>,
    beats_missed: u32,
    /// The counters of its last heartbeat.
    last_beat: wire::Heartbeat,
    suspicion: Option<Suspicion>,
    /// How often peers have named it as the one that did not answer.
    n_blames: u32,
    window: TimeWindow,
}

/// A peer reports that this worker did not answer. Only progress of its computing thread clears this.
struct Suspicion {
    /// The rank that it had when it was named.
    rank: Option<Rank>,
    last_beat: wire::Heartbeat,
    why: String,
}

/// The known facts about a dismissed worker.
pub(crate) struct DismissedWorker {
    /// The rank under which its peers had blamed it, if its epoch ended by that.
    pub blamed_as: Option<Rank>,
    pub host: String,
    pub pid: u32,
}

impl JoinedWorkers {
    /// False: the worker is refused, and its stream ends with the reason.
    pub fn join(
        &mut self,
        worker: WorkerId,
        (hello, protocol): (wire::WorkerHello, u32),
        frames: Outbound<wire::RankFrame>,
        now: Micros,
    ) -> bool {
        let (host, pid, device) = (hello.host.clone(), hello.pid, hello.device.clone());
        let version = hello.version.clone();
        match self.try_join(worker, (hello, protocol), frames) {
            Ok(()) => tracing::info!(%worker, host, pid, device, version, protocol, "a worker joins"),
            Err(why) => {
                self.log_refused(worker, (&host, pid), &why, now);
                return false;
            }
        }
        true
    }

    fn try_join(
        &mut self,
        worker: WorkerId,
        (hello, protocol): (wire::WorkerHello, u32),
        frames: Outbound<wire::RankFrame>,
    ) -> Result<(), WorkerRefusal> {
        let device = match hello.device() {
            Ok(device) => device,
            Err(unknown) => {
                frames.close(Status::invalid_argument(unknown.to_string()));
                return Err(WorkerRefusal::Unknown(unknown));
            }
        };
        let wire::WorkerHello { host, pid, memory_bytes, threads, mesh_address, cores, .. } = hello;
        let is_same = |member: &&WorkerEntry| !mesh_address.is_empty() && member.mesh_address == mesh_address;
        if let Some(other) = self.workers.values().find(is_same) {
            frames.close(Status::already_exists(format!(
                "{} of {} already has the mesh address {mesh_address}",
                other.machine.worker, other.machine.host
            )));
            return Err(WorkerRefusal::SamePlace(other.machine.worker));
        }
        let member = WorkerEntry {
            machine: Machine { worker, host, device, memory_bytes, threads, cores },
            pid,
            mesh_address,
            protocol,
            frames,
            beats_missed: 0,
            last_beat: wire::Heartbeat::default(),
            suspicion: None,
            n_blames: 0,
            window: TimeWindow::default(),
        };
        self.workers.insert(worker, member);
        Ok(())
    }

    /// Logs a refused worker. It may come again at once, any number of times, so the log is limited.
    fn log_refused(&mut self, worker: WorkerId, (host, pid): (&str, u32), why: &WorkerRefusal, now: Micros) {
        let by = match why {
            WorkerRefusal::SamePlace(other) => Some(*other),
            WorkerRefusal::Unknown(_) => None,
        };
        let Some(unsaid) = self.refusals.admit(by, 1, &worker, now) else { return };
        let unsaid = unsaid.count();
        match why {
            WorkerRefusal::SamePlace(other) => {
                tracing::warn!(%worker, host, pid, %other, unsaid, "refused: its mesh address is another worker's");
            }
            WorkerRefusal::Unknown(why) => {
                tracing::warn!(%worker, host, pid, %why, unsaid, "refused: its device is unknown");
            }
        }
    }

    /// Removes a worker; its stream ends with the reason. None if it was not here.
    pub fn dismiss(&mut self, worker: WorkerId, why: Status) -> Option<DismissedWorker> {
        let WorkerEntry { frames, suspicion, machine, pid, .. } = self.workers.remove(&worker)?;
        frames.close(why);
        self.unreachable.forget(worker);
        Some(DismissedWorker { blamed_as: suspicion.and_then(|suspicion| suspicion.rank), host: machine.host, pid })
    }

    /// Workers that were never blamed come first: a spare is the better peer. Those of distrusted hosts come last.
    /// Workers that are left out are not among them.
    pub fn candidates(&self, now: Micros) -> Candidates {
        let is_out = |machine: &Machine| {
            self.unreachable.is_excluded(machine.worker, now) || self.distrusted.is_excluded(&machine.host, now)
        };
        let there = self.inventory().into_iter().filter(|machine| !is_out(machine));
        let (mut machines, distrusted): (Vec<_>, Vec<_>) =
            there.partition(|machine| !self.distrusted.has(&machine.host));
        let n_trusted = machines.len();
        machines.extend(distrusted);
        Candidates { machines, n_trusted }
    }

    /// When the next worker that is left out has another chance.
    pub fn next_chance(&self, now: Micros) -> Option<Micros> {
        let apart = self.excluded(now).map(|(_, out)| out.until).min();
        [apart, self.distrusted.next(now)].into_iter().flatten().min()
    }

    /// Records that it has loaded other weights than the replica serves.
    pub fn distrust(&mut self, worker: WorkerId, now: Micros, waits: &Timings) {
        let host = self.host(worker).to_owned();
        let until = self.distrusted.record_refusal(&host, now, [micros(waits.replace_min), micros(waits.replace_max)]);
        let millis = until.since(now).0 / 1000;
        tracing::warn!(%worker, host, millis, "a host loaded weights that differ: its workers are chosen last");
    }

    fn inventory(&self) -> Vec<Machine> {
        let (good, blamed): (Vec<_>, Vec<_>) = self.workers.values().partition(|member| member.n_blames == 0);
        good.into_iter().chain(blamed).map(|member| member.machine.clone()).collect()
    }

    /// The device of the first of them.
    pub fn first_device(&self) -> Option<DeviceKind> {
        self.inventory().into_iter().next().map(|machine| machine.device)
    }

    /// The device that the worker named.
    pub fn device(&self, worker: WorkerId) -> Option<&DeviceKind> {
        self.workers.get(&worker).map(|member| &member.machine.device)
    }

    pub fn host(&self, worker: WorkerId) -> &str {
        self.workers.get(&worker).map_or("", |member| &member.machine.host)
    }

    pub fn mesh_address(&self, worker: WorkerId) -> String {
        self.workers.get(&worker).map(|member| member.mesh_address.clone()).unwrap_or_default()
    }

    /// The number of workers without a rank.
    pub fn n_spares(&self, ranks: Option<&RankHolders>) -> usize {
        let is_spare = |worker: &&WorkerId| ranks.is_none_or(|ranks| ranks.rank(**worker).is_none());
        self.workers.keys().filter(is_spare).count()
    }

    /// The newest protocol that all of these speak.
    pub fn protocol(&self, workers: impl Iterator<Item = WorkerId>) -> Option<u32> {
        workers.filter_map(|worker| self.workers.get(&worker)).map(|member| member.protocol).min()
    }

    pub fn mark_alive(&mut self, worker: WorkerId) {
        if let Some(member) = self.workers.get_mut(&worker) {
            member.beats_missed = 0;
        }
    }

    /// Takes a heartbeat, and returns the growth of its counters.
    pub fn beat(&mut self, worker: WorkerId, beat: &wire::Heartbeat) -> Option<wire::Heartbeat> {
        let member = self.workers.get_mut(&worker)?;
        member.beats_missed = 0;
        // That memory is committed does not show that its computing thread moves.
        let beat = wire::Heartbeat { kv: None, ..*beat };
        let last_beat = std::mem::replace(&mut member.last_beat, beat);
        member.suspicion.take_if(|suspicion| suspicion.last_beat != beat);
        Some(heartbeat_growth(&last_beat, &beat))
    }

    pub fn steps_done(&self, worker: WorkerId) -> u64 {
        self.workers.get(&worker).map_or(0, |member| member.last_beat.steps_done)
    }

    /// Call once per beat. Beats are counted and not timed, so that a loop that stood still blames no worker.
    pub fn find_silent(&mut self, beats_missed_max: u32) -> Vec<WorkerId> {
        self.workers.values_mut().for_each(|member| member.beats_missed += 1);
        let is_silent = |member: &&WorkerEntry| member.beats_missed > beats_missed_max;
        self.workers.values().filter(is_silent).map(|member| member.machine.worker).collect()
    }

    // -- suspicion

    /// A peer blamed it, under this rank. From its next rank on, its computing thread must move.
    pub fn mark_suspect(&mut self, worker: WorkerId, rank: Option<Rank>, why: String) {
        if let Some(member) = self.workers.get_mut(&worker) {
            member.n_blames += 1;
            member.suspicion = Some(Suspicion { rank, last_beat: member.last_beat, why });
        }
    }

    pub fn is_suspect(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|member| member.suspicion.is_some())
    }

    /// Its computing thread has made progress, so the suspicion ends.
    pub fn clear_suspicion(&mut self, worker: WorkerId) {
        if let Some(member) = self.workers.get_mut(&worker) {
            member.suspicion = None;
        }
    }

    /// Blamed workers that have had a rank for longer than the limit and have not moved: they send heartbeats, and no
    /// longer compute.
    pub fn stuck_suspects(&self, ranks: &RankHolders, now: Micros, suspect_max_micros: u64) -> Vec<(WorkerId, String)> {
        let why = |member: &WorkerEntry| {
            let worker = member.machine.worker;
            let is_unmoved = ranks.loads_for_longer(worker, now, suspect_max_micros);
            let suspicion = member.suspicion.as_ref().filter(|_| is_unmoved)?;
            Some((worker, suspicion.why.clone()))
        };
        self.workers.values().filter_map(why).collect()
    }

    /// Each rank's last report.
    pub fn reports(&self, ranks: &RankHolders, sampler: Rank) -> Vec<RankReport> {
        let report = |member: &WorkerEntry| {
            let worker = member.machine.worker;
            let rank = ranks.rank(worker)?;
            Some(RankReport {
                worker,
                rank,
                n_steps: member.last_beat.steps_done.saturating_sub(ranks.steps_before(worker)),
                in_step: member.last_beat.in_step,
                waits_for: member.last_beat.waits_for.and_then(|rank| u16::try_from(rank).ok()).map(Rank),
                is_sampler: rank == sampler,
            })
        };
        self.workers.values().filter_map(report).collect()
    }

    // -- workers that do not reach each other

    /// Two ranks have loaded and did not meet. True if one of them is now left out, because it was not the first time;
    /// the first exclusion lasts `out_min`.
    pub fn record_miss(&mut self, miss: MissedPeer, now: Micros, out_min: u64) -> bool {
        let Some((worker, out)) = self.unreachable.record_miss(miss, now, out_min) else { return false };
        let (host, address) = (self.host(worker), self.mesh_address(worker));
        let (from, from_host) = (self.mesh_address(out.from), self.host(out.from));
        let (seconds, why) = (out.until.since(now).0 / 1_000_000, &out.why);
        tracing::warn!(
            %worker, host, address, other = %out.from, other_host = from_host, other_address = from, seconds, why,
            "two workers do not reach each other: the first is excluded"
        );
        true
    }

    /// These ranks have met.
    pub fn record_met(&mut self, ranks: &RankHolders) {
        self.unreachable.record_met(ranks.workers());
        self.distrusted.record_met();
    }

    /// The workers that are left out now.
    pub fn excluded(&self, now: Micros) -> impl Iterator<Item = (WorkerId, &ExcludedWorker)> {
        self.unreachable.excluded(now)
    }

    // -- frames

    /// False: the queue is full, or there is no such worker.
    pub fn assign(&self, worker: WorkerId, assign: wire::Assign) -> bool {
        let protocol = self.workers.get(&worker).map_or(0, |member| member.protocol);
        let assign = wire::Assign { protocol, ..assign };
        self.send(worker, wire::rank_frame::Frame::Assign(assign))
    }

    /// Sends `Meet` to all ranks that have loaded. Err is the first worker whose queue is full.
    pub fn meet(&self, ranks: &mut RankHolders, meet: wire::Meet, now: Micros) -> Result<(), WorkerId> {
        let workers: Vec<WorkerId> = ranks.workers().collect();
        for worker in workers {
            ranks.record_meeting(worker, now);
            if !self.send(worker, wire::rank_frame::Frame::Meet(meet)) {
                return Err(worker);
            }
        }
        Ok(())
    }

    /// The epoch of these ranks is over: each ends its work for it.
    pub fn release(&self, ranks: &RankHolders) {
        for worker in ranks.workers() {
            // A worker whose queue is too full even for this will have no room for its next rank either.
            let _sent = self.send(worker, wire::rank_frame::Frame::Release(wire::Release {}));
        }
    }

    /// Sends the same bytes to every rank. Err is the first worker whose queue is full.
    pub fn send_step(&self, ranks: &RankHolders, step: &Bytes) -> Result<(), WorkerId> {
        let mut workers = ranks.workers();
        match workers.find(|worker| !self.send(*worker, wire::rank_frame::Frame::Step(step.clone()))) {
            Some(worker) => Err(worker),
            None => Ok(()),
        }
    }

    /// Sends ranks that grow the target for the memory of their KV caches. Err is the first worker whose queue is full.
    pub fn send_kv_target(&self, ranks: &RankHolders, target: wire::KvTarget) -> Result<(), WorkerId> {
        let mut workers = ranks.growing_workers();
        match workers.find(|worker| !self.send(*worker, wire::rank_frame::Frame::KvTarget(target))) {
            Some(worker) => Err(worker),
            None => Ok(()),
        }
    }

    /// False: the queue is full, or there is no such worker. A worker that is gone is lost when its reader reports it:
    /// `Deaf` here would make the cause depend on which of the two comes first.
    fn send(&self, worker: WorkerId, frame: wire::rank_frame::Frame) -> bool {
        let frame = wire::RankFrame { frame: Some(frame) };
        self.workers.get(&worker).is_some_and(|member| !member.frames.is_full_for(frame))
    }

    pub fn leave_all(&mut self, reason: &str) {
        for (_, member) in std::mem::take(&mut self.workers) {
            let leave = wire::rank_frame::Frame::Leave(wire::Leave { reason: reason.into() });
            // A rank whose queue is full sees the stream's end all the same.
            let _sent = member.frames.send(wire::RankFrame { frame: Some(leave) });
            member.frames.close(Status::unavailable(reason));
        }
    }

    // -- views

    /// Ranks that have not read the model again in spite of a reload.
    pub fn reload_failures(&self, ranks: &RankHolders) -> Vec<wire::Unread> {
        let unread = |worker: WorkerId| {
            let (rank, why) = (ranks.rank(worker)?, ranks.reload_failure(worker)?);
            Some(wire::Unread { rank: rank.0.into(), host: self.host(worker).to_owned(), why: why.to_owned() })
        };
        ranks.workers().filter_map(unread).collect()
    }

    /// How each rank spent its time since the last look; `in_flight_micros` is how long steps were in flight. Call
    /// about once a second.
    pub fn close_time_windows(
        &mut self,
        ranks: &RankHolders,
        now: Micros,
        in_flight_micros: u64,
    ) -> Vec<(Rank, wire::RankTimes)> {
        let held = self.workers.iter_mut().filter_map(|(worker, member)| Some((ranks.rank(*worker)?, member)));
        held.map(|(rank, member)| (rank, member.window.close(&member.last_beat, now, in_flight_micros))).collect()
    }

    pub fn pid(&self, worker: WorkerId) -> u32 {
        self.workers.get(&worker).map_or(0, |member| member.pid)
    }

    pub fn states(
        &self,
        blueprint: &Blueprint,
        ranks: &RankHolders,
        is_slow: impl Fn(Rank) -> bool,
    ) -> Vec<wire::RankState> {
        let state = |shard: &Shard| {
            let readiness = ranks.readiness(shard.worker)?;
            Some(self.workers.get(&shard.worker)?.state(shard, readiness, is_slow(shard.rank)))
        };
        blueprint.shards.iter().filter_map(state).collect()
    }
}

impl WorkerEntry {
    fn state(&self, shard: &Shard, readiness: Readiness, is_slow: bool) -> wire::RankState {
        let state = match readiness {
            Readiness::Ready(_) if is_slow => "slow",
            Readiness::Ready(_) => "ready",
            Readiness::Loaded(_) | Readiness::Meeting { .. } => "meeting",
            Readiness::Loading { .. } => "loading",
        };
        let weight_bytes = readiness.facts().map_or(shard.weight_bytes, |facts| facts.weight_bytes.max(1));
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
