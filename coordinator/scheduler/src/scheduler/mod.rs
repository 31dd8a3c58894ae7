//! The scheduler's owners, and the life of a request: it is submitted, waits and runs, and ends. `plan.rs` plans
//! the steps, `apply.rs` applies their answers, and `requeue.rs` handles a loss of the workers.

mod apply;
mod check;
mod plan;
mod requeue;

use crate::acceptance::{AcceptanceLimits, waiting_to_displace};
use crate::config::Config;
use crate::costs::{StepCost, StepCosts, StepTiming};
use crate::in_flight::StepsInFlight;
use crate::journal::BlockNameChange;
use crate::output::RequestOutput;
use crate::pools::BlockPools;
use crate::refusal::RequestRejection;
use crate::request_index::RequestIndex;
use crate::running::RunningSet;
use crate::sequence::{Sequence, SequenceState};
use crate::sequence_index::Awaited;
use crate::slab::{SequenceIdx, SequenceSlab};
use crate::stats::{Counters, Stats};
use crate::step_plan::StepPlan;
use crate::tenants::Tenants;
use crate::waiting::WaitingQueue;
use alloc::vec::Vec;
use core::ops::Range;
use types::{BlockHash, Epoch, FetchDone, FetchId, Finish, Micros, PageKey, Request, RequestId, Unsupported};

pub struct Scheduler {
    config: Config,
    acceptance: AcceptanceLimits,
    sequences: SequenceSlab,
    /// Waiting and running sequences.
    live: RequestIndex,
    waiting: WaitingQueue,
    running: RunningSet,
    /// What waiting and running sequences take of each tenant's share.
    tenants: Tenants,
    pools: BlockPools,
    plan: StepPlan,
    costs: StepCosts,
    /// Of the step that was answered last.
    timing: Option<StepTiming>,
    in_flight: StepsInFlight,
    counters: Counters,
}

impl Scheduler {
    pub fn new(config: Config, epoch: Epoch) -> Result<Scheduler, Unsupported> {
        config.supported()?;
        Ok(Scheduler {
            acceptance: AcceptanceLimits::new(&config),
            sequences: SequenceSlab::default(),
            live: RequestIndex::default(),
            waiting: WaitingQueue::default(),
            running: RunningSet::new(config.running_max),
            tenants: Tenants::new(config.tenants_max),
            pools: BlockPools::new(&config),
            plan: StepPlan::new(config.running_max),
            costs: StepCosts::default(),
            timing: None,
            in_flight: StepsInFlight::new(epoch, config.steps_in_flight_max, config.running_max),
            counters: Counters::default(),
            config,
        })
    }

    pub fn submit(&mut self, request: Request, now: Micros) -> Result<(), RequestRejection> {
        let is_duplicate = self.live.find(request.id).is_some();
        let length_whole = self.acceptance.accepted_length(&request, &self.config, now, is_duplicate)?;
        let displaced = waiting_to_displace(&request, &self.config, &self.waiting, &self.tenants, &self.sequences)?;
        for idx in displaced {
            self.waiting.displace(self.sequences[idx].id);
            self.end(idx);
        }
        let key = self.waiting.next_key(request.priority, now, self.config.aging_micros);
        let root = BlockHash::root(&self.config.policy, request.cache_owner(), &self.config.salt);
        let tenant = self.tenants.find_or_insert(request.tenant, request.weight);
        let mut sequence = Sequence::new(request, tenant, key, length_whole, root, self.pools.n_groups());
        sequence.limit_length(self.acceptance.room_for(&sequence.request));
        let idx = self.sequences.insert(sequence);
        self.enqueue(idx);
        self.live.insert(&self.sequences[idx].request, idx);
        Ok(())
    }

    /// A request that was accepted and has lost its place in the queue to another tenant, or None. It has ended without
    /// an output: its client must be informed that the queue is full.
    pub fn take_displaced(&mut self) -> Option<RequestId> {
        self.waiting.take_displaced()
    }

    /// Ends a request that its client has given up. If it has already ended, nothing happens.
    pub fn cancel(&mut self, id: RequestId, out: &mut Vec<RequestOutput>) {
        if let Some(idx) = self.live.find(id) {
            self.end_early(idx, Finish::Cancelled, out);
        }
    }

    /// Ends every request whose deadline has come.
    pub fn expire(&mut self, now: Micros, out: &mut Vec<RequestOutput>) {
        while let Some(idx) = self.live.first_expired(now) {
            self.end_early(idx, Finish::Deadline, out);
        }
    }

    /// Nothing new is accepted from now on; running requests finish.
    pub fn drain(&mut self) {
        self.acceptance.drain();
    }

    /// A sequence waits: it is new, or was preempted, or lost its workers.
    fn enqueue(&mut self, idx: SequenceIdx) {
        let sequence = &self.sequences[idx];
        self.waiting.insert(idx, sequence);
        self.tenants.add_waiting(sequence.tenant, sequence.n_known());
    }

    fn end_early(&mut self, idx: SequenceIdx, finish: Finish, out: &mut Vec<RequestOutput>) {
        out.push(RequestOutput { finish: Some(finish), ..RequestOutput::of(&self.sequences[idx]) });
        self.end(idx);
    }

    /// Nothing more is planned for it, so the next step ends it on the ranks.
    fn end(&mut self, idx: SequenceIdx) {
        self.sequences.clear_suspicion(idx);
        let sequence = &mut self.sequences[idx];
        let before = sequence.end();
        if sequence.is_held() {
            self.in_flight.end(sequence.id);
        }
        self.live.remove(&sequence.request);
        match before {
            SequenceState::Waiting => {
                self.waiting.remove(sequence);
                self.tenants.remove_waiting(sequence.tenant, sequence.n_known());
            }
            SequenceState::Running => {
                self.running.remove(idx);
                self.tenants.remove_running(sequence.tenant);
            }
            SequenceState::Ending => debug_assert!(false, "a request ends once"),
        }
        self.forget_if_landed(idx);
    }

    /// Frees the blocks of an ended sequence once its last slice in flight has come back.
    fn forget_if_landed(&mut self, idx: SequenceIdx) {
        let sequence = &mut self.sequences[idx];
        if sequence.progress().n_slices_in_flight == 0 {
            self.pools.release(sequence);
            self.sequences.remove(idx);
        }
    }

    /// Sets how many pages the tier behind the pools may have; zero if the ranks have none. Call when an epoch begins.
    pub fn set_tier_pages(&mut self, n_pages: u32) {
        if n_pages != self.config.tier_pages_max {
            self.config.tier_pages_max = n_pages;
            self.pools.tier.resize(n_pages);
        }
    }

    /// The tier has these pages, as a rank reports.
    pub fn add_tier_pages(&mut self, keys: impl IntoIterator<Item = PageKey>) {
        keys.into_iter().for_each(|key| self.pools.tier.insert(key));
    }

    /// All ranks have answered a fetch. The answer to one that was cancelled is ignored.
    pub fn fetched(&mut self, done: &FetchDone) {
        if done.epoch != self.epoch() {
            return;
        }
        let Some(fetch) = self.pools.finish_fetch(done) else { return };
        self.counters.pages_fetched += fetch.pages.len().saturating_sub(done.missing.len()) as u64;
        self.counters.pages_missing += done.missing.len() as u64;
        self.end_wait_for(fetch.id);
    }

    /// Sequences wait for this fetch no longer.
    fn end_wait_for(&mut self, fetch: FetchId) {
        for sequence in self.sequences.iter_mut() {
            if matches!(sequence.awaited, Some(Awaited::Fetch(awaited)) if awaited == fetch) {
                sequence.awaited = None;
            }
        }
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn epoch(&self) -> Epoch {
        self.in_flight.epoch()
    }

    /// True if nothing waits, runs, is fetched or in flight, and the ranks hold nothing.
    pub fn is_idle(&self) -> bool {
        let has_fetches = !self.pools.tier.fetches().is_empty() || self.pools.tier.is_urgent();
        self.sequences.is_empty() && self.in_flight.is_empty() && self.in_flight.ends().is_empty() && !has_fetches
    }

    /// A request that has not ended, with its output so far.
    pub fn request(&self, id: RequestId) -> Option<&Request> {
        self.live.find(id).map(|idx| &*self.sequences[idx].request)
    }

    /// How many steps may be in flight: one while there is a suspect, so that it is known which step was lost.
    fn n_steps_allowed(&self) -> u32 {
        if self.sequences.n_suspects() > 0 { 1 } else { self.config.steps_in_flight_max }
    }

    /// The number of steps in which each sequence has one turn: one per stage, as far as steps may be in flight.
    fn steps_per_turn(&self) -> u32 {
        self.config.n_stages.min(self.n_steps_allowed())
    }

    /// The durations of the step that was answered last, if both are known.
    pub fn step_timing(&self) -> Option<StepTiming> {
        self.timing
    }

    /// What steps of the widths so far cost, the narrowest first.
    pub fn step_costs(&self) -> impl Iterator<Item = StepCost> {
        self.costs.known()
    }

    /// Tokens to compute before one more request could begin: the logs of waiting sequences, and the known but not
    /// computed tokens of running ones.
    pub fn backlog_tokens(&self) -> u64 {
        let missing = |sequence: &Sequence| u64::from(sequence.n_known().saturating_sub(sequence.progress().n_sure));
        self.waiting.n_tokens() + self.running_sequences().map(missing).sum::<u64>()
    }

    /// The tokens in the logs of all running sequences.
    pub fn running_tokens(&self) -> u64 {
        self.running_sequences().map(|sequence| u64::from(sequence.n_known())).sum()
    }

    fn running_sequences(&self) -> impl Iterator<Item = &Sequence> {
        self.running.order().iter().map(|&idx| &self.sequences[idx])
    }

    /// The changes among the names of full blocks since the last call, in order. False: some are missing, and `names`
    /// gives all. Covers the group by which prefixes are found: a full one, if there is one.
    pub fn name_changes(&mut self, out: &mut Vec<BlockNameChange>) -> bool {
        self.pools.name_changes(out)
    }

    /// The names of full and computed blocks in this range, in the same group. False: there are no blocks behind it.
    pub fn append_names(&self, blocks: Range<u32>, out: &mut Vec<u64>) -> bool {
        self.pools.append_names(blocks, out)
    }

    /// Sets how much of each pool has memory. A request waits for blocks that have none yet. Call when an epoch begins,
    /// when there is more, and before there is less: no pool shrinks below `parts_held`.
    pub fn set_committed_parts(&mut self, parts: u32) {
        self.pools.set_committed_parts(parts);
    }

    /// How much of the pools should have memory for what they hold, for all requests, and for `ahead` more positions.
    pub fn parts_target(&self, ahead: u32) -> u32 {
        let promised = self.pools.promised(self.running_sequences().map(|sequence| (sequence, sequence.slice_end(0))));
        self.pools.parts_target(promised, &self.waiting, self.config.context_max, ahead)
    }

    /// The parts that hold every block which is in use or cached.
    pub fn parts_held(&self) -> u32 {
        self.pools.parts_held()
    }

    pub fn stats(&self) -> Stats {
        Stats {
            n_waiting: self.waiting.len() as u32,
            n_running: self.running.len() as u32,
            n_steps_in_flight: self.in_flight.len() as u32,
            waiting_tokens: self.waiting.n_tokens(),
            counters: self.counters,
            ..self.pools.stats()
        }
    }

    /// Panics at the first invariant that does not hold. For tests and simulations, which call it each tick.
    pub fn check(&self) {
        check::check(self);
    }
}
