//! The requests of the attached routers: which router has which, the scheduler that runs them, and the frames for
//! routers. Knows no ranks.
//!
//! A request is accepted or refused (`submit`), its steps are planned and answered here, and its tokens are an output
//! (`outputs`) for its router (`routers`). `attached` has the frames about the replica that every router gets.

mod adopt;
mod attached;
mod histories;
mod names;
mod outputs;
mod pace;
mod passages;
mod progress;
mod routers;
mod submit;
mod times;
mod traces;

use crate::Config;
use crate::epoch_start::EpochStart;
use crate::requests::histories::RequestHistories;
use crate::requests::names::BlockNameChanges;
use crate::requests::routers::Routers;
use bytes::Bytes;
use proto::cluster as wire;
use proto::{ProtocolRange, since};
use scheduler::{RequestOutput, Scheduler, Stats, WorkerLoss};
use telemetry::metrics::ReplicaLabel;
use types::{Epoch, FetchDone, Micros, PageKey, PolicyDigest, RequestId, Step, Unsupported};

/// The most pages of the disks behind the pools that are found. Their names take 17 bytes each.
const TIER_PAGES_MAX: u32 = 1 << 18;

pub(crate) struct LiveRequests {
    /// The label of its metrics.
    of: ReplicaLabel,
    vocab: u32,
    /// The protocols of this build.
    speaks: ProtocolRange,
    /// The first frame to a router. Its context and policy are fixed when the replica first serves.
    welcome: wire::Welcome,
    routers: Routers,
    /// Present from the first time that all ranks were ready. It outlives them.
    planner: Option<StepPlanner>,
    /// Whether new requests are refused.
    is_draining: bool,
    /// When a request last came with tokens of another replica.
    taken_over: Option<Micros>,
    histories: RequestHistories,
    /// Reused for its memory.
    step: Step,
    /// Empty between calls; reused for its memory.
    outputs: Vec<RequestOutput>,
    /// Changes of the cache's names since the last beat.
    name_changes: BlockNameChanges,
}

struct StepPlanner {
    scheduler: Scheduler,
    policy: PolicyDigest,
}

impl LiveRequests {
    pub fn new(config: &Config, of: ReplicaLabel, incarnation: u64) -> LiveRequests {
        let welcome = wire::Welcome {
            version: config.speaks.version.clone(),
            protocols: config.speaks.protocols,
            router: 0,
            replica: config.replica.clone(),
            model: config.model.clone(),
            context: 0,
            policy_digest: Vec::new(),
            policy_meant: Vec::new(),
            vocab: config.shape.vocab,
            incarnation,
            salt: config.salt.to_vec(),
            beat_millis: u32::try_from(config.waits.beat_every.as_millis()).unwrap_or(0),
        };
        LiveRequests {
            vocab: config.shape.vocab,
            speaks: config.speaks.clone(),
            welcome,
            routers: Routers::default(),
            planner: None,
            is_draining: false,
            taken_over: None,
            histories: RequestHistories::new(of.clone()),
            of,
            step: Step::default(),
            outputs: Vec::new(),
            name_changes: BlockNameChanges::default(),
        }
    }

    pub fn has_served(&self) -> bool {
        self.planner.is_some()
    }

    /// The policy that has been served; no other can be.
    pub fn policy(&self) -> Option<PolicyDigest> {
        self.planner.as_ref().map(|planner| planner.policy)
    }

    /// The context that was promised to the routers that were welcomed.
    pub fn promised_context(&self) -> Option<u32> {
        self.planner.as_ref().map(|planner| planner.scheduler.config().context_max)
    }

    pub fn stats(&self) -> Stats {
        self.planner.as_ref().map(|planner| planner.scheduler.stats()).unwrap_or_default()
    }

    pub fn backlog_tokens(&self) -> u64 {
        self.planner.as_ref().map_or(0, |planner| planner.scheduler.backlog_tokens())
    }

    /// What the scheduler has learned about the duration of steps.
    pub fn step_speed(&self) -> Option<wire::StepSpeed> {
        let scheduler = &self.planner.as_ref()?.scheduler;
        let counters = scheduler.stats().counters;
        let costs = scheduler.step_costs().map(|cost| wire::StepCost { rows: cost.rows, micros: cost.micros.0 });
        Some(wire::StepSpeed {
            costs: costs.collect(),
            predicted: counters.steps_predicted,
            as_predicted: counters.steps_as_predicted,
            cut_by_time: counters.cut_by_time,
            cut_by_tokens: counters.cut_by_tokens,
            cut_by_blocks: counters.cut_by_blocks,
        })
    }

    pub fn last_takeover(&self) -> Option<Micros> {
        self.taken_over
    }

    pub fn is_idle(&self) -> bool {
        self.planner.as_ref().is_none_or(|planner| planner.scheduler.is_idle())
    }

    /// Checks that nothing is held when nothing runs.
    pub fn check_when_idle(&self) {
        let idle = self.planner.as_ref().filter(|planner| planner.scheduler.is_idle());
        if let Some(planner) = idle.filter(|_| cfg!(debug_assertions)) {
            planner.scheduler.check();
            assert_eq!(planner.scheduler.stats().blocks_used, 0, "an idle replica holds no block");
        }
    }

    /// New requests are refused from now on; running ones finish.
    pub fn drain(&mut self) {
        self.is_draining = true;
        if let Some(planner) = &mut self.planner {
            planner.scheduler.drain();
        }
    }

    pub fn expire(&mut self, now: Micros) {
        if let Some(planner) = &mut self.planner {
            planner.scheduler.expire(now, &mut self.outputs);
            self.outputs_without_step(now);
        }
    }

    pub fn cancel_all(&mut self, ids: Vec<RequestId>, now: Micros) {
        let Some(planner) = &mut self.planner else { return };
        for id in ids {
            planner.scheduler.cancel(id, &mut self.outputs);
        }
        self.outputs_without_step(now);
    }

    // -- epochs

    pub fn epoch_begins(&mut self, config: &Config, start: &EpochStart<'_>, now: Micros) -> Result<(), Unsupported> {
        let EpochStart { epoch, blueprint, protocol, meant, policy, kv_parts, has_tier } = *start;
        let (grid, supports_newest_features) = (blueprint.grid, protocol >= since::NEWEST_OF_REQUESTS);
        match &mut self.planner {
            Some(planner) => {
                planner.scheduler.reshape(grid.pp.into(), config.steps_in_flight_max(grid))?;
                planner.scheduler.limit_log_length(blueprint.context, supports_newest_features);
                planner.scheduler.requeue_into(epoch, &blueprint.n_blocks(), WorkerLoss::Planned, &mut self.outputs);
            }
            None => {
                let mut scheduler = Scheduler::new(config.scheduler(blueprint, policy), epoch)?;
                scheduler.limit_log_length(blueprint.context, supports_newest_features);
                if self.is_draining {
                    scheduler.drain();
                }
                self.welcome.context = scheduler.config().context_max;
                self.welcome.policy_digest = policy.0.to_vec();
                self.welcome.policy_meant = meant.0.to_vec();
                self.planner = Some(StepPlanner { scheduler, policy });
            }
        }
        if let Some(planner) = &mut self.planner {
            planner.scheduler.set_tier_pages(if has_tier { TIER_PAGES_MAX } else { 0 });
        }
        self.outputs_without_step(now);
        self.kv_committed(kv_parts);
        Ok(())
    }

    /// All ranks have ended a fetch.
    pub fn pages_fetched(&mut self, done: &FetchDone) {
        if let Some(planner) = &mut self.planner {
            planner.scheduler.fetched(done);
        }
    }

    /// The disks behind the pools have these pages.
    pub fn add_tier_pages(&mut self, keys: Vec<PageKey>) {
        if let Some(planner) = &mut self.planner {
            planner.scheduler.add_tier_pages(keys);
        }
    }

    /// Commits these parts of the ranks' pools, which have memory.
    pub fn kv_committed(&mut self, parts: u32) {
        if let Some(planner) = &mut self.planner {
            planner.scheduler.set_committed_parts(parts);
        }
    }

    /// Returns how much of the ranks' pools should have memory, with `ahead` positions to spare.
    pub fn kv_target(&self, ahead: u32) -> u32 {
        self.planner.as_ref().map_or(0, |planner| planner.scheduler.parts_target(ahead))
    }

    /// Returns how much of the pools holds blocks that are in use or cached.
    pub fn kv_held(&self) -> u32 {
        self.planner.as_ref().map_or(0, |planner| planner.scheduler.parts_held())
    }

    /// All running requests wait for the next placement, in an epoch without workers.
    pub fn epoch_ended(&mut self, next: Epoch, loss: WorkerLoss, now: Micros) {
        self.histories.epoch_ended(now);
        if let Some(planner) = &mut self.planner {
            planner.scheduler.requeue_all(next, loss, &mut self.outputs);
            self.outputs_without_step(now);
        }
    }

    // -- steps

    /// Plans a step, if one more may be in flight and there is work: the bytes for every rank.
    pub fn next_step(&mut self, now: Micros) -> Option<Bytes> {
        let planner = self.planner.as_mut()?;
        if !planner.scheduler.next_step(now, &mut self.step) {
            return None;
        }
        let (progress, traceparent) = self.histories.step_planned(&self.step, now);
        progress.into_iter().for_each(|output| self.routers.push(output));
        Some(proto::encode_traced_step(&self.step, traceparent))
    }

    /// The step that was planned last.
    pub fn last_step(&self) -> &Step {
        &self.step
    }
}
