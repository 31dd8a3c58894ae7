//! The whole course of a simulation, drawn from the seed before anything runs: the hosts, the clients' calls, and the
//! faults. Plain data, so that a failing seed can be read.

use crate::random::Random;
use proto::v1;
use types::{Request, Sampling, Token, Tokens};
use worker::sim::SimModel;

/// The tokenizer's vocabulary, including its end token.
pub const VOCAB: u32 = 258;
pub const END: Token = 257;
pub const CONTEXT: u32 = 1024;
pub const ROUTERS: usize = 2;
pub const CLIENTS: usize = 2;
/// Requests and faults begin before this; faults last at most until `CALM`.
const BUSY_MILLIS: u64 = 12_000;
/// From here on all faults have ended, and none begins.
pub const CALM_MILLIS: u64 = 18_000;
/// More tokens than any simulation generates: if the cancel of such a request is lost, its work remains.
const ENDLESS_TOKENS: u32 = 950;

#[derive(Clone, Debug)]
pub struct Script {
    pub replicas: Vec<ReplicaPlan>,
    pub sim: SimModel,
    pub n_blocks: u64,
    pub running_max: u32,
    pub prefix_cache: bool,
    /// Whether the context is set; otherwise it is as long as the ranks' memory allows.
    pub is_context_set: bool,
    /// How long a request waits for a replica, where that is not the default.
    pub failover_millis: Option<u64>,
    /// The delay with which a process sees the store.
    pub lag_millis: u64,
    pub calls: Vec<PlannedCall>,
    /// The faults, in the order of their beginnings.
    pub faults: Vec<Fault>,
}

#[derive(Clone, Debug)]
pub struct ReplicaPlan {
    pub tp: u16,
    pub pp: u16,
    pub n_workers: usize,
}

/// One call of one client.
#[derive(Clone, Debug)]
pub struct PlannedCall {
    pub at_millis: u64,
    pub client: usize,
    /// The first router of the call; after a failure the client tries another one.
    pub router: usize,
    pub prompt: Tokens,
    pub sampling: v1::Sampling,
    pub choice: u32,
    pub priority: i32,
    pub deadline_millis: Option<u64>,
    /// The number of tokens after which the client leaves.
    pub leaves_at: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Host {
    Router(usize),
    Coordinator(usize),
    /// A second coordinator of a replica, which exists only as a fault.
    Rival(usize),
    Worker(usize, usize),
    Client(usize),
}

/// The replica's name in the store.
pub fn replica_name(replica: usize) -> String {
    format!("replica-{replica}")
}

impl Host {
    pub fn name(self) -> String {
        match self {
            Host::Router(router) => format!("router-{router}"),
            Host::Coordinator(replica) => format!("coordinator-{replica}"),
            Host::Rival(replica) => format!("rival-{replica}"),
            Host::Worker(replica, worker) => format!("worker-{replica}-{worker}"),
            Host::Client(client) => format!("client-{client}"),
        }
    }

    pub fn replica(self) -> Option<usize> {
        match self {
            Host::Coordinator(replica) | Host::Rival(replica) | Host::Worker(replica, _) => Some(replica),
            Host::Router(_) | Host::Client(_) => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub at_millis: u64,
    /// The time until it is mended.
    pub lasts_millis: u64,
    pub what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The process dies, and is restarted.
    Kill(Host),
    /// The process receives a stop signal, and is restarted.
    Drain(Host),
    /// Nothing passes in either direction, and all of it arrives later: a stopped process, or a lossy wire under TCP.
    Stall(Host, Host),
    /// As `Stall`, with every other host.
    Freeze(Host),
    /// Everything sent meanwhile is lost: connections over the wire are dead without notice.
    Cut(Host, Host),
    /// As `Cut`, only from the first to the second.
    Mute(Host, Host),
    Slow(Host, Host),
    /// The rank sends heartbeats and does not compute.
    Hang(Host),
    /// The store answers no process.
    StoreAway,
    /// One process cannot reach the store.
    StoreCut(Host),
    /// A second coordinator is started with the replica's name on another host: the first one loses its claim.
    Rival(usize),
    /// An operator requests another grid.
    Scale {
        replica: usize,
        tp: u16,
        pp: u16,
    },
}

impl Fault {
    pub fn end_millis(&self) -> u64 {
        self.at_millis + self.lasts_millis
    }
}

impl Script {
    pub fn of(seed: u64) -> Script {
        let mut random = Random::new(seed);
        let replicas = vec![replica(&mut random, true), replica(&mut random, false)];
        let sim = SimModel {
            vocab: VOCAB,
            step_micros: random.between(1_000, 12_000),
            token_micros: random.between(0, 50),
            ..SimModel::default()
        };
        let mut faults = faults(&mut random, &replicas);
        let calls = draw_calls(&mut random);
        let mut of_store = Random::new(seed ^ 0x5707);
        faults.extend(store_faults(&mut of_store, &replicas));
        faults.sort_by_key(|fault| fault.at_millis);
        Script {
            lag_millis: *of_store.one_of(&[20, 200, 1500]),
            replicas,
            sim,
            n_blocks: *random.one_of(&[66, 96, 160]),
            running_max: random.between(3, 12) as u32,
            prefix_cache: !random.once_in(4),
            is_context_set: true,
            failover_millis: None,
            calls,
            faults,
        }
    }

    pub fn hosts(&self) -> Vec<Host> {
        let workers = |(replica, plan): (usize, &ReplicaPlan)| {
            (0..plan.n_workers).map(move |worker| Host::Worker(replica, worker)).collect::<Vec<_>>()
        };
        let coordinators = (0..self.replicas.len()).map(Host::Coordinator);
        let is_disputed = |replica: &usize| self.faults.iter().any(|fault| fault.what == What::Rival(*replica));
        let rivals = (0..self.replicas.len()).filter(is_disputed).map(Host::Rival);
        let workers = self.replicas.iter().enumerate().flat_map(workers);
        coordinators.chain(rivals).chain((0..ROUTERS).map(Host::Router)).chain(workers).collect()
    }
}

fn replica(random: &mut Random, is_large: bool) -> ReplicaPlan {
    const GRIDS: [(u16, u16); 4] = [(1, 1), (2, 1), (1, 2), (2, 2)];
    let (tp, pp) = *random.one_of(if is_large { &GRIDS } else { &GRIDS[..3] });
    let n_spares = usize::from(!random.once_in(3));
    ReplicaPlan { tp, pp, n_workers: usize::from(tp * pp) + n_spares }
}

// -- the faults

fn faults(random: &mut Random, replicas: &[ReplicaPlan]) -> Vec<Fault> {
    let n_faults = random.between(0, 7);
    let mut faults: Vec<Fault> = (0..n_faults)
        .map(|_| {
            let at_millis = random.between(500, BUSY_MILLIS);
            let what = what(random, replicas);
            // Short ones fit between two heartbeats; long ones exceed every limit except that of a load.
            let longest = *random.one_of(&[300, 1500, 6000, 14_000]);
            let lasts_millis = random.between(20, longest).min(CALM_MILLIS - at_millis);
            Fault { at_millis, lasts_millis, what }
        })
        .collect();
    faults.sort_by_key(|fault| fault.at_millis);
    faults
}

/// Faults of membership. They begin after all processes have met once.
fn store_faults(random: &mut Random, replicas: &[ReplicaPlan]) -> Vec<Fault> {
    const SETTLED_MILLIS: u64 = 4_000;
    if !random.once_in(2) {
        return Vec::new();
    }
    let n_faults = random.between(1, 3);
    let fault = |_| {
        let at_millis = random.between(SETTLED_MILLIS, BUSY_MILLIS);
        let longest = *random.one_of(&[300, 3000, 14_000]);
        let replica = random.below(replicas.len() as u64) as usize;
        let worker = Host::Worker(replica, random.below(replicas[replica].n_workers as u64) as usize);
        let router = Host::Router(random.below(ROUTERS as u64) as usize);
        let cut = *random.one_of(&[worker, Host::Coordinator(replica), Host::Coordinator(replica), router]);
        let what = *random.one_of(&[What::StoreAway, What::StoreCut(cut), What::StoreCut(cut), What::Rival(replica)]);
        Fault { at_millis, lasts_millis: random.between(20, longest).min(CALM_MILLIS - at_millis), what }
    };
    (0..n_faults).map(fault).collect()
}

fn what(random: &mut Random, replicas: &[ReplicaPlan]) -> What {
    let replica = random.below(replicas.len() as u64) as usize;
    let worker = Host::Worker(replica, random.below(replicas[replica].n_workers as u64) as usize);
    let (router, coordinator) = (Host::Router(random.below(ROUTERS as u64) as usize), Host::Coordinator(replica));
    let anybody = *random.one_of(&[worker, worker, coordinator, router]);
    let (from, to) = link(random, worker, coordinator, router);
    match random.below(12) {
        0..=3 => What::Kill(anybody),
        4 => What::Drain(anybody),
        5 => What::Stall(from, to),
        6 => What::Freeze(anybody),
        7 => What::Cut(from, to),
        8 => What::Mute(from, to),
        9 => What::Slow(from, to),
        10 => What::Hang(worker),
        _ => {
            let (tp, pp) = *random.one_of(&[(1, 1), (2, 1), (1, 2), (2, 2)]);
            What::Scale { replica, tp, pp }
        }
    }
}

/// Returns two hosts with a connection between them, in any order.
fn link(random: &mut Random, worker: Host, coordinator: Host, router: Host) -> (Host, Host) {
    let client = Host::Client(random.below(CLIENTS as u64) as usize);
    let mate = match worker {
        Host::Worker(replica, worker) if worker > 0 => Host::Worker(replica, worker - 1),
        _ => coordinator,
    };
    let pairs = [(worker, coordinator), (worker, mate), (router, coordinator), (client, router)];
    let (a, b) = *random.one_of(&pairs);
    if random.once_in(2) { (a, b) } else { (b, a) }
}

// -- the clients' calls

fn draw_calls(random: &mut Random) -> Vec<PlannedCall> {
    let n_calls = random.between(6, 22);
    let mut calls = Vec::new();
    for _ in 0..n_calls {
        let call = draw_call(random);
        if random.once_in(6) {
            // Two answers to one prompt.
            calls.push(PlannedCall { choice: 1, ..call.clone() });
        }
        calls.push(call);
    }
    calls
}

fn draw_call(random: &mut Random) -> PlannedCall {
    let leaves_at = random.once_in(6).then(|| random.below(12) as usize);
    let longest = *random.one_of(&[4, 30, 120]);
    let max_tokens = if leaves_at.is_some() { ENDLESS_TOKENS } else { random.between(1, longest) as u32 };
    let n_stop = if leaves_at.is_some() { 0 } else { *random.one_of(&[0, 0, 2, 12]) };
    let letter = char::from(b'A' + random.below(4) as u8);
    let penalty = |random: &mut Random| if random.once_in(4) { 0.5 } else { 0.0 };
    let sampling = v1::Sampling {
        temperature: Some(if random.once_in(4) { 0.0 } else { 0.7 }),
        seed: Some(random.below(1000)),
        max_tokens: Some(max_tokens),
        min_tokens: random.below(4).min(max_tokens.into()) as u32,
        stop_token_ids: (0..n_stop).map(|_| random.below(VOCAB.into()) as u32).collect(),
        stop: if random.once_in(6) && leaves_at.is_none() { vec![letter.into()] } else { Vec::new() },
        ignore_eos: leaves_at.is_some(),
        logprobs: random.once_in(8).then_some(2),
        presence_penalty: penalty(random),
        frequency_penalty: penalty(random),
        repetition_penalty: Some(1.0 + penalty(random)),
        ..v1::Sampling::default()
    };
    PlannedCall {
        at_millis: random.between(0, BUSY_MILLIS),
        client: random.below(CLIENTS as u64) as usize,
        router: random.below(ROUTERS as u64) as usize,
        prompt: prompt(random),
        sampling,
        choice: 0,
        priority: random.between(0, 2) as i32,
        deadline_millis: random.once_in(6).then(|| random.between(300, 8000)),
        leaves_at,
    }
}

/// A few groups of prompts have a common beginning, so that the prefix cache is used.
fn prompt(random: &mut Random) -> Tokens {
    let (family, n_shared, n_own) = (random.below(3) as u32, 16 * random.below(4) as u32, random.between(1, 20));
    let shared = (0..n_shared).map(|i| (i * 7 + family) % 256);
    shared.chain((0..n_own).map(|_| random.below(256) as u32)).collect()
}

impl PlannedCall {
    pub fn request(&self) -> v1::GenerateRequest {
        let ids = v1::TokenIds { ids: self.prompt.clone() };
        v1::GenerateRequest {
            input: Some(v1::generate_request::Input::TokenIds(ids)),
            sampling: Some(self.sampling.clone()),
            choice: self.choice,
            priority: self.priority,
            ..v1::GenerateRequest::default()
        }
    }

    /// Returns the correct answer: its tokens, and whether it stops before its length.
    pub fn reference(&self, sim: &SimModel) -> (Tokens, v1::finished::Reason) {
        let requested = &self.sampling;
        let end = (!requested.ignore_eos).then_some(END);
        let sampling = Sampling {
            seed: requested.seed.unwrap_or_default(),
            choice: self.choice,
            tokens_max: requested.max_tokens.unwrap_or(CONTEXT),
            tokens_min: requested.min_tokens,
            stop: requested.stop_token_ids.iter().copied().chain(end).collect(),
            ..Sampling::default()
        };
        let request = Request { prompt: self.prompt.clone(), sampling, ..Request::default() };
        let mut tokens = sim.reference(&request);
        let letters: Tokens = requested.stop.iter().flat_map(|stop| stop.bytes()).map(Token::from).collect();
        let is_letter = |(at, token): (usize, &Token)| at >= requested.min_tokens as usize && letters.contains(token);
        if let Some(at) = tokens.iter().enumerate().position(is_letter) {
            tokens.truncate(at + 1);
            return (tokens, v1::finished::Reason::Stop);
        }
        let stops = tokens.last().is_some_and(|last| request.sampling.is_stop(*last))
            && tokens.len() as u32 > request.sampling.tokens_min;
        (tokens, if stops { v1::finished::Reason::Stop } else { v1::finished::Reason::Length })
    }
}
