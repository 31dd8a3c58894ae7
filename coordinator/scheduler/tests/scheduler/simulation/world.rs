//! Clients, a scheduler, workers and what happens to them, all drawn from one seed.

use super::disk::SimulatedDisk;
use super::facts::Facts;
use super::memory::CommittedMemory;
use super::pipeline::Pipeline;
use super::reference::{DEADLY, Expected, POISONED, is_deadly, length_max, run_alone};
use super::rng::{Rng, mix};
use super::tier::SimulatedTier;
use super::worker::{Limits, Worker};
use scheduler::{
    Config, DraftPolicy, RequestOutput, RequestRejection, RowCost, Scheduler, StaleAnswer, StepPace, WorkerLoss,
};
use std::collections::{BTreeMap, BTreeSet};
use types::{
    BlockId, CacheGroup, CacheHint, DRAFT_ROWS_MAX, Epoch, Finish, Grammar, Micros, PolicyDigest, Priority, Request,
    RequestId, Sampling, Slice, Step, StepDone, TenantId, TenantWeight, Token, TokenOut, Want,
};

const REQUESTS_MAX: u64 = 24;
/// Far more than the longest run needs; a run that reaches it makes no progress.
const TICKS_MAX: u64 = 50_000;

/// How rough a run is, each field in percent of ticks.
struct Weather {
    cancels: u64,
    losses: u64,
    deadlines: u64,
    submits: u64,
    /// Ticks that plan, of those that plan or answer: many fill the pipeline, few leave it empty.
    plans: u64,
    /// Tokens that a prompt has in common with others, at most.
    shared_max: u32,
    /// The prompts of a hundred that have few tokens in common with others.
    short: u64,
    tenants: Crowd,
    /// Draws that come back without a token, of a hundred.
    late: u64,
    /// The most tokens that workers guess at a time, and how many of a hundred guesses are right.
    guesses_max: u64,
    right: u64,
}

/// The tenants of the requests.
#[derive(Clone, Copy)]
enum Crowd {
    /// One tenant sends nearly all.
    OneHeavy,
    /// This many tenants that send equally much.
    Alike(u64),
}

impl Crowd {
    fn draw(self, rng: &mut Rng) -> u64 {
        match self {
            Crowd::OneHeavy => rng.below(8) / 7,
            Crowd::Alike(n) => rng.below(n),
        }
    }
}

struct Client {
    request: Request,
    expected: Expected,
    tokens: Vec<Token>,
    live: bool,
    cancelled: bool,
    /// The losses that it may have caused, since its last token.
    suspicion: u32,
}

pub struct World {
    rng: Rng,
    weather: Weather,
    config: Config,
    /// Tokens of a log that the workers hold.
    room: u32,
    memory: CommittedMemory,
    tier: SimulatedTier,
    scheduler: Scheduler,
    /// Stages, and the steps that are planned and not yet answered.
    pipeline: Pipeline,
    epoch: Epoch,
    now: Micros,
    clients: BTreeMap<RequestId, Client>,
    n_submitted: u64,
    /// In some worlds, the request that breaks the ranks.
    deadly: Option<u64>,
    bases: Vec<Vec<Token>>,
    draining: bool,
    facts: Facts,
    /// A hash of every step, so that two runs can be compared.
    pub trace: u64,
}

impl World {
    pub fn new(seed: u64) -> World {
        let mut rng = Rng(mix(seed));
        let is_crowd = rng.chance(30);
        let config = if is_crowd { draw_crowd(&mut rng) } else { draw_config(&mut rng) };
        let weather = if is_crowd {
            Weather { submits: 25, plans: 50, losses: 0, shared_max: 40, ..draw_weather(&mut rng) }
        } else {
            draw_weather(&mut rng)
        };
        let mut of_draws = Rng(mix(!seed));
        let late = of_draws.below(3) * 15;
        let guesses_max = of_draws.below(2) * of_draws.below(10);
        let weather = Weather { late, guesses_max, right: 20 + of_draws.below(81), ..weather };
        let pace = StepPace { micros: of_draws.below(30_000), decode_costs: of_draws.below(3) };
        let config = Config { drafting: draw_drafting(&mut of_draws), pace, ..config };
        let epoch = Epoch { incarnation: 1, n: 0 };
        let deadly = rng.chance(40).then(|| rng.below(REQUESTS_MAX));
        let mut bases: Vec<Vec<Token>> = (0..3).map(|_| (0..90).map(|_| rng.below(1000) as Token).collect()).collect();
        let mut tier = SimulatedTier::new(seed);
        let config = tier.configure(config, &mut bases, draw_n_blocks);
        let weather = if tier.is_on() { draw_tier_weather(&mut of_draws, &config, weather) } else { weather };
        let (mut scheduler, mut memory) = (Scheduler::new(config.clone(), epoch).unwrap(), CommittedMemory::new(seed));
        memory.begin(&mut scheduler);
        World {
            scheduler,
            memory,
            tier,
            pipeline: Pipeline::new(stages(&config, &weather, epoch)),
            weather,
            rng,
            room: config.context_max,
            config,
            epoch,
            now: Micros(1),
            clients: BTreeMap::new(),
            n_submitted: 0,
            deadly,
            bases,
            draining: false,
            facts: Facts::default(),
            trace: seed,
        }
    }

    /// Runs until everything has ended, and returns what happened on the way.
    pub fn run(&mut self) -> Facts {
        while self.n_submitted < REQUESTS_MAX || !self.scheduler.is_idle() || self.is_fetching() {
            self.tick();
            self.scheduler.check();
            self.facts.ticks += 1;
            assert!(self.facts.ticks < TICKS_MAX, "no progress: {:?}", self.scheduler.stats());
        }
        self.check_end();
        self.facts
    }

    /// Whether a fetch of a request that has ended still has blocks.
    fn is_fetching(&self) -> bool {
        self.tier.is_on() && self.scheduler.stats().blocks_used > 0
    }

    fn tick(&mut self) {
        let passed = self.rng.below(50)
            + self.tier.tick(self.now, self.epoch, &mut self.pipeline, &mut self.scheduler, &mut self.facts);
        self.now = self.now.plus(passed);
        self.memory.change(&mut self.scheduler, &mut self.facts);
        let Weather { cancels, losses, submits, plans, .. } = self.weather;
        match self.rng.below(100) {
            at if at < submits => self.submit(),
            at if at < submits + cancels => self.cancel(),
            at if at < submits + cancels + losses && self.rng.chance(25) => self.change_grid(),
            at if at < submits + cancels + losses => self.lose_workers(WorkerLoss::Unexplained),
            30..31 => self.submit_again(),
            31..33 => self.answer_wrongly(),
            33..37 => self.expire(),
            at if at < 37 + plans => self.plan(),
            _ => self.answer(),
        }
        if !self.draining && self.n_submitted == REQUESTS_MAX && self.rng.chance(2) {
            self.scheduler.drain();
            self.draining = true;
        }
    }

    fn check_end(&mut self) {
        let stats = self.scheduler.stats();
        assert_eq!((stats.blocks_used, stats.n_running, stats.n_waiting), (0, 0, 0), "a block leaked");
        assert_eq!(self.pipeline.n_held(), 0, "the workers have dropped all requests");
        assert_eq!(self.pipeline.len(), 0);
        assert!(self.clients.values().all(|client| !client.live), "every stream has ended");
        self.facts.count(&stats);
    }

    fn draw_request(&mut self) -> Request {
        let rng = &mut self.rng;
        let context_max = self.config.context_max;
        let base = &self.bases[rng.below(3) as usize];
        let n_shared_max =
            if rng.chance(self.weather.short) { 18 } else { self.weather.shared_max.min(context_max - 2) };
        let n_shared = rng.between(0, n_shared_max) as usize;
        let mut prompt = base[..n_shared].to_vec();
        let n_own = rng.between(u32::from(n_shared == 0), 12);
        prompt.extend((0..n_own).map(|_| rng.below(1000) as Token));
        let tokens_max = if rng.chance(50) { 12 } else { 100 };
        if rng.chance(10) {
            // Later blocks then hold the same tokens after another prefix.
            prompt[0] = rng.below(1000) as Token;
        }
        let choice = match rng.chance(5) {
            _ if self.deadly == Some(self.n_submitted) => DEADLY,
            true => POISONED,
            false => 0,
        };
        Request {
            id: RequestId::new(7, self.n_submitted).unwrap(),
            tenant: TenantId(self.weather.tenants.draw(rng)),
            weight: TenantWeight(rng.between(0, 4) as u16),
            prompt,
            sampling: Sampling {
                seed: rng.next(),
                choice,
                tokens_max: if rng.chance(5) { 0 } else { rng.between(1, tokens_max) },
                tokens_min: if rng.chance(20) { rng.between(0, 10) } else { 0 },
                stop: if rng.chance(50) { vec![3] } else { vec![] },
                ..Sampling::default()
            },
            priority: Priority(rng.below(3) as i8 - 1),
            deadline: rng.chance(self.weather.deadlines).then(|| self.now.plus(rng.below(4000).saturating_sub(100))),
            cache_bypass: rng.chance(10),
            cache_hint: [CacheHint::None, CacheHint::Retain, CacheHint::Demote][self.n_submitted as usize % 3],
            // Only these may be late for a caller whose ranks have masks to wait for.
            grammar: self.n_submitted.is_multiple_of(2).then(|| Grammar::new("any")),
            ..Request::default()
        }
    }

    fn submit(&mut self) {
        if self.n_submitted >= REQUESTS_MAX {
            return;
        }
        let request = self.draw_request();
        self.n_submitted += 1;
        let expected = run_alone(&request, self.config.context_max);
        self.tier.add_names(&request, &expected.tokens, &self.config, &mut self.pipeline);
        let tokens = Vec::new();
        let client = Client { request: request.clone(), expected, tokens, live: false, cancelled: false, suspicion: 0 };
        self.clients.insert(request.id, client);
        self.offer(request);
    }

    /// A client resubmits its request with its output: too early, after the end, or after a loss.
    fn submit_again(&mut self) {
        let Some(id) = self.draw_client() else { return };
        let client = &self.clients[&id];
        let mut request = client.request.clone();
        if request.sampling.choice == DEADLY {
            return; // A request that is resubmitted again and again can break anything.
        }
        request.output = client.tokens.clone();
        request.deadline = None;
        self.offer(request);
    }

    fn offer(&mut self, request: Request) {
        let before = self.scheduler.stats();
        match self.scheduler.submit(request.clone(), self.now) {
            Ok(()) => {
                self.facts.resumed += u64::from(!request.output.is_empty());
                let client = self.clients.get_mut(&request.id).unwrap();
                assert!(!client.live && !self.draining);
                client.live = true;
                client.cancelled = false;
                client.suspicion = 0;
                client.request.deadline = request.deadline;
                self.apply_displaced(&request);
            }
            Err(rejected) => {
                assert_eq!(self.scheduler.stats(), before, "a refusal changes nothing");
                self.check_refusal(&request, rejected);
            }
        }
    }

    /// A displaced request had waited, has no output, and belongs to another tenant.
    fn apply_displaced(&mut self, by: &Request) {
        let tenants: BTreeSet<TenantId> = self.clients.values().map(|client| client.request.tenant).collect();
        let is_crowded = tenants.len() > self.config.tenants_max as usize;
        while let Some(id) = self.scheduler.take_displaced() {
            let client = self.clients.get_mut(&id).unwrap();
            assert!(client.live && client.tokens.is_empty());
            assert!(client.request.tenant != by.tenant || is_crowded, "a request does not displace itself");
            client.live = false;
            self.facts.displaced += 1;
        }
        let stats = self.scheduler.stats();
        let (n, n_tokens) = (u64::from(stats.n_waiting), stats.waiting_tokens);
        let n_before = stats.requeued + stats.preemptions;
        assert!(n_before > 0 || n <= self.config.waiting_max.into() && n_tokens <= self.config.waiting_tokens_max);
    }

    fn check_refusal(&mut self, request: &Request, rejected: RequestRejection) {
        let client = &self.clients[&request.id];
        let stats = self.scheduler.stats();
        let n_tokens = request.n_tokens() as u64;
        match rejected {
            RequestRejection::Draining => assert!(self.draining),
            RequestRejection::Duplicate => assert!(client.live),
            RequestRejection::Deadline => assert!(request.deadline.unwrap() <= self.now),
            RequestRejection::Full { limit: "waiting_max", max } => assert!(u64::from(stats.n_waiting) >= max),
            RequestRejection::Full { max, .. } => assert!(stats.waiting_tokens + n_tokens > max),
            RequestRejection::TooLong { limit: "context_max", .. } => {
                assert!(n_tokens >= self.config.context_max.into())
            }
            RequestRejection::TooLong { .. } => assert!(!self.fits(request)),
            RequestRejection::Outgrown { room, .. } => {
                assert!(room == u64::from(self.room) && n_tokens >= room && self.room < self.config.context_max);
            }
            RequestRejection::Finished(finish) => {
                assert_eq!((&client.expected.tokens, client.expected.finish), (&request.output, finish));
            }
            RequestRejection::Empty
            | RequestRejection::Encoder
            | RequestRejection::TooLarge { .. }
            | RequestRejection::OlderRanks => {
                panic!("{rejected}")
            }
        }
        self.facts.refuse(rejected);
    }

    fn fits(&self, request: &Request) -> bool {
        let n_tokens = length_max(request, self.room) - 1;
        let slice_max = self.config.chunk_tokens_max.min(self.config.batch_tokens_max);
        let mut pools = self.config.groups.iter().zip(&self.config.n_blocks);
        pools.all(|(group, &n_blocks)| group.n_held_max(n_tokens, slice_max) <= n_blocks)
    }

    fn draw_client(&mut self) -> Option<RequestId> {
        let n_clients = self.clients.len() as u64;
        let nth = (n_clients > 0).then(|| self.rng.below(n_clients) as usize)?;
        self.clients.keys().nth(nth).copied()
    }

    fn cancel(&mut self) {
        let Some(id) = self.draw_client() else { return };
        let (before, mut out) = (self.scheduler.stats(), Vec::new());
        let client = self.clients.get_mut(&id).unwrap();
        let was_live = client.live;
        client.cancelled = true;
        self.scheduler.cancel(id, &mut out);
        assert_eq!(out.len(), usize::from(was_live), "a cancel ends a live request exactly once");
        let after = self.scheduler.stats();
        self.facts.cancelled_waiting += u64::from(before.n_waiting - after.n_waiting);
        self.facts.cancelled_running += u64::from(before.n_running - after.n_running);
        self.apply_outputs(&out, None);
    }

    fn expire(&mut self) {
        let mut out = Vec::new();
        self.scheduler.expire(self.now, &mut out);
        self.facts.expired += out.len() as u64;
        let late = |client: &Client| client.live && client.request.deadline.is_some_and(|at| at <= self.now);
        assert_eq!(self.clients.values().filter(|client| late(client)).count(), out.len());
        self.apply_outputs(&out, None);
    }

    fn plan(&mut self) {
        let mut step = Step::default();
        if !self.scheduler.next_step(self.now, &mut step) {
            assert!(step.slices.is_empty() && step.starts.is_empty() && step.ends.is_empty() && step.tier.is_empty());
            return;
        }
        let number = self.tier.plan(&step, &self.config, self.now, &mut self.facts);
        self.tier.check_deadlines(&self.config, self.now);
        assert!(step.starts.iter().all(|request| request.deadline.is_none()), "no step carries a deadline");
        self.trace = trace(self.trace, &step);
        self.facts.ends_only += u64::from(step.slices.is_empty());
        let in_flight: BTreeSet<RequestId> = self.pipeline.slices().map(|slice| slice.id).collect();
        self.facts.restarted_in_flight +=
            step.starts.iter().filter(|start| in_flight.contains(&start.id)).count() as u64;
        let chunks = step.slices.iter().filter(|slice| slice.want == Want::Nothing);
        self.facts.chunks_in_flight += chunks.filter(|slice| in_flight.contains(&slice.id)).count() as u64;
        let has_states = self.config.groups.iter().any(CacheGroup::is_state);
        let is_hit = |slice: &&Slice| step.starts.iter().any(|start| start.id == slice.id) && slice.range.start > 0;
        let n_hits = step.slices.iter().filter(is_hit).count() as u64;
        self.facts.state_hits += if has_states { n_hits } else { 0 };
        let lacks = u64::from(step.blocks.contains(&BlockId::NONE));
        *(if has_states { &mut self.facts.states_carried } else { &mut self.facts.windowed_hits }) += lacks;
        self.pipeline.push(step, self.memory.n_blocks(&self.config), number);
        self.facts.in_flight_peak = self.facts.in_flight_peak.max(self.pipeline.len() as u64);
        assert!(self.pipeline.len() <= self.config.steps_in_flight_max as usize);
    }

    /// Stages compute, in any possible order; then the oldest step is answered, if it has passed all of them.
    fn answer(&mut self) {
        for _ in 0..self.rng.below(3 * self.pipeline.n_stages() as u64 + 1) {
            let movable = self.pipeline.movable();
            if movable.is_empty() {
                break;
            }
            let at = movable[self.rng.below(movable.len() as u64) as usize];
            let (step, is_last) = self.pipeline.next_of(at);
            // A stage may break on a step while the steps before are still on their way.
            if self.breaks(step) && (is_last || self.rng.chance(30)) {
                return self.break_workers();
            }
            self.pipeline.advance(at);
            self.facts.stages_busy_peak = self.facts.stages_busy_peak.max(self.pipeline.n_inside() as u64);
        }
        let Some((step, done)) = self.pipeline.deliver() else { return };
        let answers = step.slices.iter().zip(&done.slices).filter(|(slice, _)| slice.want == Want::Last);
        let late = answers.filter(|(_, done)| done.tokens.is_empty() && done.failed.is_none());
        let is_ahead = |id| self.pipeline.slices().any(|slice| slice.id == id);
        self.facts.planned_behind_late += late.clone().filter(|(slice, _)| is_ahead(slice.id)).count() as u64;
        let has_grammar = |id: &RequestId| self.clients[id].request.grammar.is_some();
        let first = late.map(|(slice, _)| slice.id).find(|id| !has_grammar(id));
        let slice = step.slices.iter().position(|slice| Some(slice.id) == first);
        assert_eq!(self.scheduler.check_all_drawn(&done).err(), slice.map(|slice| StaleAnswer::NoToken { slice }));
        let mut out = Vec::new();
        let took = Micros(self.rng.below(50_000));
        self.scheduler.apply(&done, took, &mut out).unwrap();
        self.note_failures(&out, &step, &done);
        self.apply_outputs(&out, Some(&done));
    }

    /// What failed requests have computed may be damaged.
    fn note_failures(&mut self, out: &[RequestOutput], step: &Step, done: &StepDone) {
        for output in out.iter().filter(|output| done.slices[output.slice].failed.is_some()) {
            let Client { request, expected, .. } = &self.clients[&output.id];
            let n_sure = step.slices[output.slice].range.start;
            self.tier.fail(request, &expected.tokens, n_sure, &self.config, &mut self.pipeline);
        }
    }

    /// Answers to no step, or not to the oldest: refused, and nothing has changed.
    fn answer_wrongly(&mut self) {
        let oldest = self.pipeline.oldest_answer();
        let mut done = oldest.clone().unwrap_or_default();
        let wrong = self.rng.below(4);
        match wrong {
            0 => done.epoch.n += 1,
            1 => done.id.0 += 1,
            2 => done.slices.push(Default::default()),
            _ => match done.slices.iter_mut().find(|slice| slice.failed.is_none()) {
                Some(slice) => slice.tokens.extend(vec![TokenOut::default(); 2 + DRAFT_ROWS_MAX as usize]),
                None => return,
            },
        }
        let (before, mut out) = (self.scheduler.stats(), Vec::new());
        let stale = self.scheduler.apply(&done, Micros(0), &mut out).unwrap_err();
        let expected = match (wrong, &oldest) {
            (0, _) => matches!(stale, StaleAnswer::Epoch { .. }),
            (1, _) | (_, None) => matches!(stale, StaleAnswer::Step { .. } | StaleAnswer::Epoch { .. }),
            (2, _) => matches!(stale, StaleAnswer::SliceCount { .. }),
            _ => matches!(stale, StaleAnswer::TokenCount { .. }),
        };
        assert!(expected && out.is_empty() && self.scheduler.stats() == before, "{stale}");
        self.facts.stale += 1;
    }

    /// Whether the ranks break on a step. They break at a place of a log, not at one of its drafts: otherwise a culprit
    /// would go on without drafts and be cleared each time.
    fn breaks(&self, step: &Step) -> bool {
        step.slices.iter().any(|slice| is_deadly(&self.clients[&slice.id].request, slice.first_drawn()))
    }

    fn break_workers(&mut self) {
        self.facts.breaks += 1;
        let loss = if self.rng.chance(50) { WorkerLoss::Reported } else { WorkerLoss::Unexplained };
        self.lose_workers(loss);
    }

    /// Steps in flight are lost with the caches; the new workers may have more room, or less.
    fn lose_workers(&mut self, loss: WorkerLoss) {
        for slice in self.pipeline.oldest().iter().flat_map(|on_its_way| &on_its_way.step.slices) {
            self.clients.get_mut(&slice.id).unwrap().suspicion += loss.weight();
        }
        self.epoch.n += 1;
        let mut out = Vec::new();
        if self.rng.chance(50) {
            self.scheduler.requeue_all(self.epoch, loss, &mut out);
        } else {
            self.config.n_blocks = draw_n_blocks(&mut self.rng, &self.config);
            let context_max = self.config.context_max;
            self.room = if self.rng.chance(70) { context_max } else { self.rng.between(2, context_max) };
            self.scheduler.limit_log_length(self.room, true);
            self.scheduler.requeue_into(self.epoch, &self.config.n_blocks, loss, &mut out);
        }
        self.replace_workers();
        self.facts.losses += 1;
        self.apply_outputs(&out, None);
    }

    /// New workers begin, with the disks of the lost ones.
    fn replace_workers(&mut self) {
        let mut disks = std::mem::take(&mut self.pipeline.disks);
        while disks.len() < self.config.n_stages as usize {
            disks.push(SimulatedDisk::beside(&disks[0]));
        }
        self.pipeline = Pipeline::with_disks(stages(&self.config, &self.weather, self.epoch), disks);
        self.tier.lose_workers();
        self.tier.begin_epoch(&mut self.scheduler, &self.pipeline);
        self.memory.begin(&mut self.scheduler);
    }

    /// An operator's change: nothing broke, so no request becomes more suspicious.
    fn change_grid(&mut self) {
        self.epoch.n += 1;
        let mut out = Vec::new();
        self.scheduler.requeue_all(self.epoch, WorkerLoss::Planned, &mut out);
        self.config.n_stages = self.rng.between(1, 4);
        self.config.steps_in_flight_max = self.rng.between(1, self.config.n_stages + 2);
        self.scheduler.reshape(self.config.n_stages, self.config.steps_in_flight_max).unwrap();
        self.replace_workers();
        self.facts.grids += 1;
        self.apply_outputs(&out, None);
    }

    /// Every token equals that of the request run alone, at the next position, and nothing follows an end.
    fn apply_outputs(&mut self, out: &[RequestOutput], done: Option<&StepDone>) {
        for output in out {
            let client = self.clients.get_mut(&output.id).expect("the output belongs to a submitted request");
            assert!(client.live, "{} returns output after its end", output.id);
            assert_eq!(output.position as usize, client.tokens.len(), "positions have no gap");
            assert!(output.n_cached as usize <= client.request.prompt.len() + client.expected.tokens.len());
            assert!(output.reuse.fetched <= output.n_cached);
            self.facts.fetched_outputs += u64::from(output.reuse.fetched > 0);
            let drawn_tokens =
                done.map_or(&[][..], |done| &done.slices[output.slice].tokens[..output.n_tokens as usize]);
            assert_eq!(drawn_tokens.len(), output.n_tokens as usize);
            client.suspicion = if drawn_tokens.is_empty() { client.suspicion } else { 0 };
            client.tokens.extend(drawn_tokens.iter().map(|drawn| drawn.token));
            assert!(
                client.expected.tokens.starts_with(&client.tokens),
                "{} returns the same tokens as when it runs alone",
                output.id
            );
            self.facts.tokens += drawn_tokens.len() as u64;
            if let Some(finish) = output.finish {
                let n_drawn = done.map_or(0, |done| done.slices[output.slice].tokens.len());
                self.facts.stopped_in_drafts += u64::from(finish == Finish::Stop && n_drawn > output.n_tokens as usize);
                self.finish(output.id, finish);
            }
        }
    }

    fn finish(&mut self, id: RequestId, finish: Finish) {
        let fits = self.fits(&self.clients[&id].request);
        let (room, context_max) = (self.room as usize, self.config.context_max);
        let (suspicion_max, is_calm) = (self.config.suspicion_max, self.weather.losses == 0);
        let client = self.clients.get_mut(&id).unwrap();
        client.live = false;
        match finish {
            Finish::Cancelled => assert!(client.cancelled),
            Finish::Deadline => assert!(client.request.deadline.unwrap() <= self.now),
            Finish::Outgrown => {
                assert!(client.request.prompt.len() + client.tokens.len() >= room);
                assert!(room < length_max(&client.request, context_max) as usize, "the request would continue");
            }
            Finish::Failed if !fits => self.facts.outgrown += 1,
            Finish::Failed if client.suspicion >= suspicion_max => {
                let is_culprit = client.request.sampling.choice == DEADLY;
                // A neighbour is in two losses at most.
                let is_strict = suspicion_max <= 2 * WorkerLoss::Reported.weight();
                assert!(is_culprit || !is_calm || is_strict, "{id} fails because of another request");
                self.facts.given_up += 1;
            }
            _ => assert_eq!((&client.tokens, finish), (&client.expected.tokens, client.expected.finish)),
        }
        let is_ahead = self.pipeline.slices().any(|slice| slice.id == id);
        self.facts.stopped_ahead += u64::from(is_ahead && finish == Finish::Stop);
        self.facts.finish(finish);
    }
}

fn draw_weather(rng: &mut Rng) -> Weather {
    Weather {
        cancels: rng.below(3),
        losses: rng.below(8) / 7,
        deadlines: rng.below(3) * 10,
        submits: u64::from(rng.between(5, 25)),
        plans: u64::from(rng.between(15, 50)),
        shared_max: rng.between(20, 80),
        short: 50,
        tenants: if rng.chance(50) { Crowd::OneHeavy } else { Crowd::Alike(rng.between(1, 9).into()) },
        late: 0,
        guesses_max: 0,
        right: 0,
    }
}

/// Long prompts that are much alike, some of them among losses.
fn draw_tier_weather(rng: &mut Rng, config: &Config, weather: Weather) -> Weather {
    Weather {
        shared_max: rng.between(80, config.context_max - 10),
        short: 20,
        losses: weather.losses.max(rng.below(4) / 3),
        tenants: if rng.chance(80) { Crowd::Alike(1) } else { weather.tenants },
        ..weather
    }
}

fn draw_n_blocks(rng: &mut Rng, config: &Config) -> Vec<u32> {
    let slice_max = config.chunk_tokens_max.min(config.batch_tokens_max);
    let draw = |group: &CacheGroup| {
        let least = group.n_held_max(config.context_max - 1, slice_max);
        match rng.below(10) {
            0 => rng.between(least.div_ceil(2), least),
            1..8 => rng.between(least, least + 6),
            _ => rng.between(least, 40),
        }
    };
    config.groups.iter().map(draw).collect()
}

/// Most models keep everything; some have windows or recurrences too, or nothing but those.
fn draw_groups(rng: &mut Rng) -> Vec<CacheGroup> {
    let window = |rng: &mut Rng| {
        let n_positions_max = if rng.chance(50) { 20 } else { 70 };
        CacheGroup::FULL.with_window(rng.between(1, n_positions_max))
    };
    match rng.below(14) {
        0..4 => vec![CacheGroup::FULL],
        4 => vec![CacheGroup::FULL, CacheGroup::FULL],
        5..7 => vec![CacheGroup::FULL, window(rng)],
        7..9 => vec![window(rng)],
        9 => vec![window(rng), CacheGroup::FULL, window(rng)],
        10..12 => vec![CacheGroup::STATE, CacheGroup::FULL],
        12 => vec![window(rng), CacheGroup::STATE, CacheGroup::FULL, CacheGroup::STATE],
        _ => vec![CacheGroup::STATE],
    }
}

fn draw_config(rng: &mut Rng) -> Config {
    let context_max = rng.between(20, 120);
    let running_max = rng.between(1, 8);
    let config = Config {
        groups: draw_groups(rng),
        context_max,
        running_max,
        waiting_max: rng.between(1, 12),
        waiting_tokens_max: u64::from(120 + rng.between(0, 600)),
        tenants_max: rng.between(1, 8),
        batch_tokens_max: running_max + rng.between(0, 60),
        chunk_tokens_max: rng.between(1, 50),
        chunk_tokens_min: rng.between(1, 50),
        n_stages: rng.between(1, 4),
        steps_in_flight_max: rng.between(1, 5),
        slices_ahead_max: rng.between(0, 1),
        aging_micros: rng.below(1000),
        suspicion_max: if rng.chance(70) { 6 } else { rng.between(1, 12) },
        prefix_cache: rng.chance(90),
        state_stride: rng.between(0, 4) * 16,
        policy: PolicyDigest([1; 32]),
        salt: [2; 16],
        ..Config::default()
    };
    Config { n_blocks: draw_n_blocks(rng, &config), ..config }
}

/// Many short sequences in a pool that never suffices, with a full pipeline: a preempted one is soon back, while slices
/// that were planned for it before are still in flight.
fn draw_crowd(rng: &mut Rng) -> Config {
    let context_max = rng.between(40, 60);
    let groups = draw_groups(rng);
    Config {
        n_blocks: groups.iter().map(|_| rng.between(6, 16)).collect(),
        groups,
        waiting_max: 24,
        waiting_tokens_max: 10_000,
        context_max,
        running_max: rng.between(3, 8),
        batch_tokens_max: 64,
        chunk_tokens_max: 64,
        steps_in_flight_max: 5,
        slices_ahead_max: 1,
        ..draw_config(rng)
    }
}

fn draw_drafting(rng: &mut Rng) -> DraftPolicy {
    match rng.below(4) {
        0 => DraftPolicy::Off,
        1 => DraftPolicy::Fixed(rng.below(10) as u16),
        2 => DraftPolicy::Adaptive { max: 8, row: RowCost::Learned(rng.below(4) as u32 * 60) },
        _ => DraftPolicy::Adaptive { max: 8, row: RowCost::Fixed(rng.below(4) as u32 * 60) },
    }
}

fn stages(config: &Config, weather: &Weather, epoch: Epoch) -> Vec<Worker> {
    let &Weather { late, guesses_max, right, .. } = weather;
    let Config { batch_tokens_max, chunk_tokens_max, running_max, .. } = *config;
    // A rank clears a block behind a slice's window at once, which it must not where the slice may run again.
    let clears = !config.prefix_cache && late == 0 && guesses_max == 0;
    let limits = Limits { batch_tokens_max, chunk_tokens_max, running_max, clears, late, guesses_max, right };
    let stage = |_| Worker::new(epoch, &config.groups, &config.n_blocks, limits);
    (0..config.n_stages).map(stage).collect()
}

fn trace(before: u64, step: &Step) -> u64 {
    let slices = step.slices.iter().flat_map(|slice| [slice.id.0, slice.range.start.into(), slice.range.end.into()]);
    let blocks = step.blocks.iter().map(|block| u64::from(block.0));
    let ends = step.ends.iter().map(|id| id.0);
    let fetched = step.tier.fetches.iter().flat_map(|fetch| &fetch.pages);
    let pages = step.tier.stores.iter().chain(fetched).map(|page| page.key.name.short());
    slices.chain(blocks).chain(ends).chain(pages).fold(before, |trace, x| mix(trace ^ x))
}
