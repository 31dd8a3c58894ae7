//! A cluster on virtual time: the real planner and the router's real choice of replicas, with a roofline in place of
//! workers. One queue of events, ordered by time and then number; no clock, no thread, no randomness.

use super::front::SimulatedRouter;
use super::measure::{MeasurementWindow, SampledMean, TimeHistogram, TimeWeightedCount};
use super::traffic::{Arrival, Nanos, Traffic, token};
use coordinator::{Roofline, StepWork};
use router::PickPolicy;
use router::board::ledger::RemainingWork;
use scheduler::{RequestOutput, Scheduler, Stats};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use types::{CacheGroup, Epoch, Micros, Request, RequestId, Sampling, SliceDone, Step, StepDone, TokenOut, Want};

/// Time from a client through the router to a coordinator, and the same back.
const ROUTER_NANOS: Nanos = 150_000;
/// Time from a coordinator to its ranks, and the same back.
const RANKS_NANOS: Nanos = 50_000;
/// Interval at which a coordinator reports its load and its cache to routers.
const BEAT_NANOS: Nanos = 100_000_000;
/// Interval between samples of each replica.
const LOOK_NANOS: Nanos = 500_000_000;

pub struct SimSetup {
    pub n_replicas: usize,
    pub policy: PickPolicy,
    pub planner: scheduler::Config,
    pub roofline: Roofline,
    /// Time per pass through a stage beyond the roofline: launches, the draw.
    pub overhead: Nanos,
    pub window: MeasurementWindow,
    pub slo: Slo,
}

/// Limits within which a request counts as served well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slo {
    pub ttft: Nanos,
    /// A request's mean time per token after the first.
    pub itl: Nanos,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SimEvent {
    Arrive,
    Deliver { replica: u32, request: u32 },
    Answer { replica: u32 },
    Beat { replica: u32 },
    Look,
}

/// A request from its arrival to its end.
struct SimRequest {
    arrival: Arrival,
    n_delivered: u32,
    /// The part of them that was delivered within the window.
    n_in_window: u32,
    first_at: Nanos,
    last_at: Nanos,
    /// When its last drawn token reaches the first stage.
    drawn_at: Nanos,
    /// The work that the router counts for it until it has ended.
    work: Option<RemainingWork>,
}

impl SimRequest {
    fn new(arrival: Arrival, work: RemainingWork) -> SimRequest {
        SimRequest { arrival, n_delivered: 0, n_in_window: 0, first_at: 0, last_at: 0, drawn_at: 0, work: Some(work) }
    }
}

struct SimReplica {
    planner: Scheduler,
    /// The time at which each stage has finished all its steps.
    free_at: Vec<Nanos>,
    /// Answers in flight.
    answers: VecDeque<StepDone>,
    /// Since when the oldest of them is awaited.
    awaited_since: Nanos,
}

/// The result of a run.
#[derive(Default)]
pub struct SimOutcome {
    pub n_arrived: u64,
    pub n_ended: u64,
    pub n_refused: u64,
    /// Requests that arrived within the window.
    pub n_counted: u64,
    pub n_good: u64,
    pub tokens: SimTokens,
    pub ttft: TimeHistogram,
    pub itl: TimeHistogram,
    pub e2e: TimeHistogram,
    pub work: SimWork,
    pub open: TimeWeightedCount,
    pub samples: ReplicaSamples,
    pub n_preemptions: u64,
    pub n_steps: u64,
    pub n_events: u64,
}

/// Numbers of tokens.
#[derive(Default)]
pub struct SimTokens {
    /// All tokens of the whole run, as planners count them.
    pub drawn: u64,
    pub delivered: u64,
    /// Tokens delivered within the window.
    pub output: u64,
    /// The part of the output tokens that belongs to requests within both limits.
    pub good: u64,
    /// Tokens of requests that arrived within the window.
    pub counted: u64,
    /// Prompt tokens, computed and cached, of requests that began within the window.
    pub prompt: u64,
    pub cached: u64,
}

/// What the GPUs did within the window.
#[derive(Default)]
pub struct SimWork {
    /// Busy time of all stages of all replicas.
    pub busy: Nanos,
    pub bytes_read: f64,
    pub operations: f64,
}

/// Samples of each replica at intervals.
#[derive(Default)]
pub struct ReplicaSamples {
    /// The used part of the cache, between 0 and 1.
    pub cache_used: SampledMean,
    /// Running requests of a replica.
    pub running: SampledMean,
    pub waiting: SampledMean,
}

impl ReplicaSamples {
    fn add(&mut self, stats: &Stats) {
        self.cache_used.add(f64::from(stats.blocks_used) / f64::from(stats.blocks_total));
        self.running.add(stats.n_running.into());
        self.waiting.add(stats.n_waiting.into());
    }
}

pub struct SimulatedCluster {
    setup: SimSetup,
    traffic: Traffic,
    next: Option<Arrival>,
    queue: BinaryHeap<Reverse<(Nanos, u64, SimEvent)>>,
    n_pushed: u64,
    front: SimulatedRouter,
    replicas: Vec<SimReplica>,
    tickets: Vec<SimRequest>,
    groups: Vec<CacheGroup>,
    step: Step,
    work: StepWork,
    outputs: Vec<RequestOutput>,
    spare: Vec<StepDone>,
    outcome: SimOutcome,
}

impl SimulatedCluster {
    pub fn new(setup: SimSetup, traffic: Traffic) -> Result<SimulatedCluster, types::Unsupported> {
        let replica = || {
            Ok(SimReplica {
                planner: Scheduler::new(setup.planner.clone(), Epoch::default())?,
                free_at: vec![0; setup.roofline.n_stages()],
                answers: VecDeque::new(),
                awaited_since: 0,
            })
        };
        let replicas = (0..setup.n_replicas).map(|_| replica()).collect::<Result<Vec<_>, types::Unsupported>>()?;
        Ok(SimulatedCluster {
            front: SimulatedRouter::new(setup.policy, setup.n_replicas, &setup.planner),
            groups: setup.planner.groups.clone(),
            setup,
            traffic,
            next: None,
            queue: BinaryHeap::new(),
            n_pushed: 0,
            replicas,
            tickets: Vec::new(),
            step: Step::default(),
            work: StepWork::default(),
            outputs: Vec::new(),
            spare: Vec::new(),
            outcome: SimOutcome::default(),
        })
    }

    /// Runs until the last request has ended. Calls `progress` with the virtual time at intervals.
    pub fn run(mut self, mut progress: impl FnMut(Nanos)) -> SimOutcome {
        self.schedule_next_arrival();
        let MeasurementWindow { from, until } = self.setup.window;
        (from..until).step_by(LOOK_NANOS as usize).for_each(|at| self.push(at, SimEvent::Look));
        // Coordinators start at different times, so their reports are staggered.
        for replica in 0..self.setup.n_replicas as u32 {
            let at = BEAT_NANOS * u64::from(replica) / self.setup.n_replicas as u64;
            self.push(at, SimEvent::Beat { replica });
        }
        while let Some(Reverse((now, _, event))) = self.queue.pop() {
            self.outcome.n_events += 1;
            match event {
                SimEvent::Arrive => self.arrive(now),
                SimEvent::Deliver { replica, request } => self.deliver(now, replica as usize, request),
                SimEvent::Answer { replica } => self.handle_answer(now, replica as usize),
                SimEvent::Beat { replica } => self.handle_report(now, replica),
                SimEvent::Look => {
                    self.sample_replicas();
                    progress(now);
                }
            }
        }
        let planned = |of: fn(&Stats) -> u64| self.replicas.iter().map(|r| of(&r.planner.stats())).sum();
        self.outcome.n_preemptions = planned(|stats| stats.preemptions);
        self.outcome.n_steps = planned(|stats| stats.steps);
        self.outcome.tokens.drawn = planned(|stats| stats.tokens_drawn);
        debug_assert!(self.replicas.iter().all(|replica| replica.planner.is_idle()));
        self.outcome
    }

    fn push(&mut self, at: Nanos, event: SimEvent) {
        self.n_pushed += 1;
        self.queue.push(Reverse((at, self.n_pushed, event)));
    }

    fn schedule_next_arrival(&mut self) {
        self.next = self.traffic.next();
        if let Some(arrival) = self.next {
            self.push(arrival.at, SimEvent::Arrive);
        }
    }

    fn arrive(&mut self, now: Nanos) {
        let Some(arrival) = self.next.take() else { return };
        let request = self.tickets.len() as u32;
        self.outcome.n_arrived += 1;
        self.outcome.n_counted += u64::from(self.setup.window.contains(now));
        self.outcome.open.change(1, now, &self.setup.window);
        let prompt = arrival.prompt(request.into());
        // Requests with the same prefix share a session.
        let session = Some(arrival.prefix).filter(|_| arrival.n_prefix > 0);
        let (replica, work) = self.front.pick_replica(&prompt, session).expect("every replica is ready");
        self.tickets.push(SimRequest::new(arrival, work));
        self.push(now + ROUTER_NANOS, SimEvent::Deliver { replica: replica as u32, request });
        self.schedule_next_arrival();
    }

    fn deliver(&mut self, now: Nanos, replica: usize, request: u32) {
        let arrival = self.tickets[request as usize].arrival;
        let sampling = Sampling { tokens_max: arrival.n_output, ..Sampling::default() };
        let id = RequestId(request.into());
        let planner_request = Request { id, prompt: arrival.prompt(request.into()), sampling, ..Request::default() };
        let taken = self.replicas[replica].planner.submit(planner_request, micros(now));
        let displaced = std::iter::from_fn(|| self.replicas[replica].planner.take_displaced()).map(|id| id.0 as u32);
        for refused in displaced.chain(taken.err().map(|_| request)).collect::<Vec<_>>() {
            self.outcome.n_refused += 1;
            self.end_request(now + ROUTER_NANOS, refused);
        }
        self.plan(now, replica);
    }

    /// Plans as many steps as may be in flight. The time of each answer is known immediately.
    fn plan(&mut self, now: Nanos, replica: usize) {
        while self.replicas[replica].planner.next_step(micros(now), &mut self.step) {
            let done_at = self.run_step(now, replica);
            let mut done = self.spare.pop().unwrap_or_default();
            self.draw_tokens(&mut done, done_at);
            let replica_state = &mut self.replicas[replica];
            if replica_state.answers.is_empty() {
                replica_state.awaited_since = now;
            }
            replica_state.answers.push_back(done);
            self.push(done_at + RANKS_NANOS, SimEvent::Answer { replica: replica as u32 });
        }
    }

    /// Passes the step through all stages, each as soon as it is free, but not before the tokens that the step computes
    /// are drawn.
    fn run_step(&mut self, now: Nanos, replica: usize) -> Nanos {
        self.work.clear();
        let mut ready = now + RANKS_NANOS;
        for slice in &self.step.slices {
            self.work.add(&self.groups, &slice.range, slice.want == Want::Last);
            ready = ready.max(self.tickets[slice.id.0 as usize].drawn_at);
        }
        if self.step.slices.is_empty() {
            return ready;
        }
        let is_counted = self.setup.window.contains(ready);
        for (stage, free_at) in self.replicas[replica].free_at.iter_mut().enumerate() {
            let took = self.setup.roofline.stage(stage, &self.work);
            let from = ready.max(*free_at);
            ready = from + (took.micros() * 1e3).round() as Nanos + self.setup.overhead;
            *free_at = ready;
            self.outcome.work.busy += self.setup.window.overlap(from, ready);
            if is_counted {
                self.outcome.work.bytes_read += took.bytes_read;
                self.outcome.work.operations += took.operations;
            }
        }
        ready
    }

    /// Gives each slice that draws a token that no other request has at this position.
    fn draw_tokens(&mut self, done: &mut StepDone, done_at: Nanos) {
        (done.id, done.epoch) = (self.step.id, self.step.epoch);
        done.slices.resize_with(self.step.slices.len(), SliceDone::default);
        for (slice, answer) in self.step.slices.iter().zip(&mut done.slices) {
            answer.tokens.clear();
            if slice.want == Want::Last {
                let token = token(slice.id.0 ^ (1 << 62), slice.range.end);
                answer.tokens.push(TokenOut { token, ..TokenOut::default() });
                self.tickets[slice.id.0 as usize].drawn_at = done_at;
            }
        }
    }

    fn handle_answer(&mut self, now: Nanos, replica: usize) {
        let Some(done) = self.replicas[replica].answers.pop_front() else { return };
        let mut outputs = std::mem::take(&mut self.outputs);
        let took = micros(now - std::mem::replace(&mut self.replicas[replica].awaited_since, now));
        self.replicas[replica].planner.apply(&done, took, &mut outputs).expect("answers come in the order of steps");
        self.spare.push(done);
        for output in outputs.drain(..) {
            self.apply_output(now + ROUTER_NANOS, &output);
        }
        self.outputs = outputs;
        self.plan(now, replica);
    }

    fn apply_output(&mut self, at: Nanos, output: &RequestOutput) {
        let request = output.id.0 as u32;
        if output.n_tokens > 0 {
            self.count_tokens(at, request, output);
        }
        if output.finish.is_some() {
            self.end_request(at, request);
        }
    }

    fn count_tokens(&mut self, at: Nanos, request: u32, output: &RequestOutput) {
        let (window, outcome) = (&self.setup.window, &mut self.outcome);
        let ticket = &mut self.tickets[request as usize];
        let is_counted = window.contains(ticket.arrival.at);
        if ticket.n_delivered == 0 {
            ticket.first_at = at;
            ticket.work.iter_mut().for_each(RemainingWork::mark_prompt_computed);
            if window.contains(at) {
                outcome.tokens.prompt += u64::from(ticket.arrival.n_prompt);
                outcome.tokens.cached += u64::from(output.n_cached);
            }
            if is_counted {
                outcome.ttft.add(at - ticket.arrival.at);
            }
        } else if is_counted {
            outcome.itl.add(at - ticket.last_at);
        }
        ticket.last_at = at;
        ticket.n_delivered += output.n_tokens;
        outcome.tokens.delivered += u64::from(output.n_tokens);
        if window.contains(at) {
            outcome.tokens.output += u64::from(output.n_tokens);
            ticket.n_in_window += output.n_tokens;
        }
    }

    /// Ends a request that was rejected or has all its tokens. Each request ends once.
    fn end_request(&mut self, at: Nanos, request: u32) {
        let (window, outcome) = (&self.setup.window, &mut self.outcome);
        let ticket = &mut self.tickets[request as usize];
        assert!(ticket.work.take().is_some(), "request {request} ends twice");
        let has_begun = ticket.n_delivered > 0;
        outcome.n_ended += 1;
        // The coordinator's time: the client's time `at` is one hop later, and not in the order of events.
        outcome.open.change(-1, at - ROUTER_NANOS, window);
        let itl = (ticket.last_at - ticket.first_at) / u64::from(ticket.n_delivered.saturating_sub(1)).max(1);
        let slo = &self.setup.slo;
        let is_good = has_begun && ticket.first_at - ticket.arrival.at <= slo.ttft && itl <= slo.itl;
        // A part of the window's output tokens. Requests from before the window have such tokens too.
        outcome.tokens.good += if is_good { u64::from(ticket.n_in_window) } else { 0 };
        if !has_begun || !window.contains(ticket.arrival.at) {
            return;
        }
        outcome.e2e.add(at - ticket.arrival.at);
        outcome.tokens.counted += u64::from(ticket.n_delivered);
        outcome.n_good += u64::from(is_good);
    }

    /// Handles a report at the time of its arrival. Reports continue as long as requests arrive.
    fn handle_report(&mut self, now: Nanos, replica: u32) {
        self.front.apply_report(replica as usize, &mut self.replicas[replica as usize].planner);
        if self.next.is_some() {
            self.push(now + BEAT_NANOS, SimEvent::Beat { replica });
        }
    }

    fn sample_replicas(&mut self) {
        for replica in &self.replicas {
            self.outcome.samples.add(&replica.planner.stats());
        }
    }
}

fn micros(at: Nanos) -> Micros {
    Micros(at / 1000)
}
