//! How long streams stand still after a loss, on virtual time: at most a second, and 1.3 times the prefill of their
//! logs in the steps that the ranks count; fifteen seconds if two ranks lose only each other. `make chaos` measures the
//! same on the real clock.

use crate::cast::Stage;
use crate::net::channel;
use crate::operator::rest;
use crate::record::Record;
use crate::registry::Registry;
use crate::script::{CLIENTS, END, Fault, Host, ReplicaPlan, Script, What};
use crate::weather::Weather;
use crate::world::{network, recorded};
use proto::v1;
use proto::v1::generate_reply::Event;
use proto::v1::inference_client::InferenceClient;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use tonic::Status;
use tonic::transport::Channel;
use types::Tokens;

const N_STREAMS: u32 = 4;
const N_TOKENS: u32 = 300;
const BEGUN_MILLIS: u64 = 6_000;
const STRUCK_MILLIS: u64 = 7_000;
const MILLIS_MAX: u64 = 60_000;
/// A worker is lost. Its replica continues without it ten seconds later, and would return to two ranks ten seconds
/// after the worker is back.
const NARROWED_MILLIS: u64 = 4_000;
const BACK_MILLIS: u64 = 16_000;
const LONG_BEGUN_MILLIS: u64 = 18_000;
const LONG_TOKENS: u32 = 900;
/// The seeds of this test in CI; `SIMULATION_SEEDS` for more.
const REGROWTHS: u64 = 12;
const STEP_MICROS: u64 = 10_000;
const TOKEN_MICROS: u64 = 500;
const CHUNK: u64 = 512;
/// The longest that a stream may stand still, besides its replay.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The same if two ranks lose each other while the coordinator has both. A step without an answer shows it after three
/// seconds, and the ranks may fail to meet before one of the two is left out. The wire is cut for longer.
const PAUSE_BETWEEN_RANKS_MAX: Duration = Duration::from_secs(15);
/// The most by which a replay may be slower than a prefill of as many tokens, in tenths.
const REPLAY_TENTHS: u32 = 13;
/// Longer than any pause without a loss.
const HIT: Duration = Duration::from_millis(70);

/// A stream's longest pause, and the length of its log then.
#[derive(Clone, Copy, Debug, Default)]
struct Gap {
    lasted: Duration,
    n_known: u64,
    at: Duration,
}

fn script(seed: u64, n_replicas: usize, what: What) -> Script {
    let (tp, pp) = [(1, 1), (2, 1), (1, 2), (2, 2)][seed as usize % 4];
    let mut script = Script::of(seed);
    script.sim.step_micros = STEP_MICROS;
    script.sim.token_micros = TOKEN_MICROS;
    Script {
        replicas: vec![ReplicaPlan { tp, pp, n_workers: usize::from(tp * pp) + 1 }; n_replicas],
        faults: vec![Fault { at_millis: STRUCK_MILLIS, lasts_millis: 20_000, what }],
        n_blocks: 160,
        running_max: 8,
        lag_millis: 20,
        ..script
    }
}

/// When the streams begin, and how long each is.
#[derive(Clone, Copy)]
struct Course {
    begun_millis: u64,
    n_tokens: u32,
}

fn simulate(
    seed: u64,
    (script, course): (&Arc<Script>, Course),
    record: &Record,
    gaps: &Arc<Mutex<Vec<Gap>>>,
) -> turmoil::Result {
    let mut sim = network(seed, MILLIS_MAX);
    let registry = Registry::new(record.clone(), script.lag_millis);
    let stage = Stage { script: script.clone(), record: record.clone(), registry };
    stage.open(&mut sim);
    let (n_replicas, client_record, gaps) = (script.replicas.len(), record.clone(), gaps.clone());
    sim.client(Host::Client(0).name(), async move {
        match watch(n_replicas, course).await {
            Ok(seen) => *gaps.lock().unwrap() = seen,
            Err(why) => client_record.violation(why),
        }
        let epochs = client_record.seen().epochs.clone();
        client_record.seen().epochs_of_streams = epochs;
        Ok(())
    });
    // The end of a fault repairs the wires of all clients.
    (1..CLIENTS).for_each(|client| sim.client(Host::Client(client).name(), async { Ok(()) }));
    let mut weather = Weather::new(script, record.clone());
    while !sim.step()? {
        weather.pass(&mut sim);
    }
    Ok(())
}

/// Streams through the fault, spread over replicas. All have the requested length.
async fn watch(n_replicas: usize, course: Course) -> Result<Vec<Gap>, String> {
    let begun = Instant::now();
    let router = channel(&Host::Router(0).name());
    sleep_until(begun + Duration::from_millis(course.begun_millis)).await;
    rest(std::slice::from_ref(&router), n_replicas).await?;
    let mut streams = JoinSet::new();
    (0..N_STREAMS).for_each(|i| drop(streams.spawn(stream(router.clone(), i, begun, course.n_tokens))));
    let mut gaps = Vec::new();
    while let Some(ended) = streams.join_next().await {
        gaps.push(ended.map_err(|error| error.to_string())?.map_err(|status| format!("{status:?}"))?);
    }
    Ok(gaps)
}

async fn stream(router: Channel, i: u32, begun: Instant, n_tokens: u32) -> Result<Gap, Status> {
    let prompt: Tokens = (0..40).map(|token| (token * 3 + i) % END).collect();
    let sampling =
        v1::Sampling { max_tokens: Some(n_tokens), ignore_eos: true, seed: Some(i.into()), ..v1::Sampling::default() };
    let n_prompt = prompt.len() as u64;
    let ids = v1::TokenIds { ids: prompt };
    let input = Some(v1::generate_request::Input::TokenIds(ids));
    let request = v1::GenerateRequest { input, sampling: Some(sampling), ..v1::GenerateRequest::default() };
    let mut replies = InferenceClient::new(router).generate(request).await?.into_inner();
    let (mut longest, mut n_received, mut last_token_at) = (Gap::default(), 0, None);
    while let Some(reply) = replies.message().await? {
        let Some(Event::Delta(delta)) = reply.event else { continue };
        let lasted = last_token_at.replace(Instant::now()).map_or(Duration::ZERO, |last: Instant| last.elapsed());
        if lasted > longest.lasted {
            longest = Gap { lasted, n_known: n_prompt + n_received, at: begun.elapsed() };
        }
        n_received += delta.token_ids.len() as u64;
    }
    match n_received == u64::from(n_tokens) {
        true => Ok(longest),
        false => Err(Status::internal(format!("{n_received} tokens of {n_tokens}"))),
    }
}

/// Returns the time of a prefill of all these logs.
fn replay(gaps: &[Gap]) -> Duration {
    let micros = |gap: &Gap| gap.n_known * TOKEN_MICROS + gap.n_known.div_ceil(CHUNK) * STEP_MICROS;
    Duration::from_micros(gaps.iter().map(micros).sum())
}

fn pause_max(what: What) -> Duration {
    match what {
        What::Cut(Host::Worker(..), Host::Worker(..)) => PAUSE_BETWEEN_RANKS_MAX,
        _ => PAUSE_MAX,
    }
}

/// Returns the streams that a fault has hit: those that stood still after it, within the limit.
fn hit_by(seed: u64, n_replicas: usize, what: What) -> Vec<Gap> {
    let script = Arc::new(script(seed, n_replicas, what));
    let gaps = Arc::default();
    let course = Course { begun_millis: BEGUN_MILLIS, n_tokens: N_TOKENS };
    let outcome = recorded(false, |record| simulate(seed, (&script, course), record, &gaps));
    assert!(outcome.violations.is_empty(), "seed {seed}, {what:?}: {:?}", outcome.violations);
    assert_eq!(outcome.counts.get(what.label()), Some(&1), "seed {seed}: {what:?} began");
    let gaps = gaps.lock().unwrap().clone();
    assert_eq!(gaps.len(), N_STREAMS as usize, "seed {seed}, {what:?}");
    let is_hit = |gap: &&Gap| gap.lasted >= HIT && gap.at >= Duration::from_millis(STRUCK_MILLIS);
    let hit: Vec<Gap> = gaps.iter().filter(is_hit).copied().collect();
    let allowed = pause_max(what) + replay(&hit) * REPLAY_TENTHS / 10;
    assert!(hit.iter().all(|gap| gap.lasted <= allowed), "seed {seed}, {what:?}: beyond {allowed:?}: {hit:?}");
    hit
}

/// Does the same for the first of these faults that hits a stream: another may be that of a spare.
fn check(seed: u64, n_replicas: usize, faults: impl IntoIterator<Item = What>) -> Vec<Gap> {
    let all = faults.into_iter().map(|what| hit_by(seed, n_replicas, what));
    all.into_iter().find(|hit| !hit.is_empty()).unwrap_or_else(|| panic!("seed {seed}: no fault hit a stream"))
}

#[test]
fn a_stream_stands_still_for_a_second_and_its_replay_at_most() {
    let workers = [Host::Worker(0, 0), Host::Worker(0, 1)];
    let coordinators = [Host::Coordinator(0), Host::Coordinator(1)];
    let (mut n_hit, mut longest) = (0, Duration::ZERO);
    for seed in 0..4 {
        for strike in [What::Kill, What::Freeze] {
            for (n_replicas, hosts) in [(1, workers), (2, coordinators)] {
                let hit = check(seed, n_replicas, hosts.map(strike));
                n_hit += hit.len();
                longest = longest.max(hit.iter().map(|gap| gap.lasted).max().unwrap_or_default());
            }
        }
    }
    println!("{n_hit} streams hit, the longest gap {longest:?}");
}

/// A worker that leaves, and wires that lose everything: between a router and a coordinator, between a coordinator and
/// a worker, and between two ranks.
#[test]
fn drains_and_cut_wires_keep_the_limit() {
    let workers = [Host::Worker(0, 0), Host::Worker(0, 1)];
    let coordinators = [Host::Coordinator(0), Host::Coordinator(1)];
    let mut n_hit = 0;
    for seed in 0..8 {
        n_hit += check(seed, 1, workers.map(What::Drain)).len();
        n_hit += check(seed, 1, workers.map(|worker| What::Cut(Host::Coordinator(0), worker))).len();
        n_hit += check(seed, 2, coordinators.map(|coordinator| What::Cut(Host::Router(0), coordinator))).len();
        // A single rank has no other one.
        if seed % 4 > 0 {
            let pairs = [(0, 1), (0, 2), (1, 2)];
            n_hit += check(seed, 1, pairs.map(|(a, b)| What::Cut(Host::Worker(0, a), Host::Worker(0, b)))).len();
        }
    }
    println!("{n_hit} streams hit");
}

/// Running streams do not need the store, and a coordinator that drains waits for them.
#[test]
fn a_store_fault_or_a_coordinators_drain_stops_no_stream() {
    let host = Host::Coordinator(0);
    for seed in 0..8 {
        for what in [What::StoreAway, What::StoreCut(host), What::StoreCut(Host::Router(0)), What::Drain(host)] {
            let hit = hit_by(seed, 2, what);
            assert!(hit.is_empty(), "seed {seed}, {what:?}: {hit:?}");
        }
    }
}

/// The streams of the reduced replica and those that it takes over have no second pause: it returns to two ranks later.
#[test]
fn a_takeover_is_followed_by_no_change_that_can_wait() {
    let course = Course { begun_millis: LONG_BEGUN_MILLIS, n_tokens: LONG_TOKENS };
    for seed in 0..crate::number("SIMULATION_SEEDS").unwrap_or(REGROWTHS) {
        let lost = Fault {
            at_millis: NARROWED_MILLIS,
            lasts_millis: BACK_MILLIS - NARROWED_MILLIS,
            what: What::Kill(Host::Worker(0, 1)),
        };
        let struck = Fault {
            at_millis: 20_000 + seed * 37 % 5_000,
            lasts_millis: 30_000,
            what: What::Kill(Host::Coordinator(1)),
        };
        let replicas = vec![ReplicaPlan { tp: 2, pp: 1, n_workers: 2 }; 2];
        let script = Script { replicas, faults: vec![lost, struck], n_blocks: 320, ..script(seed, 2, struck.what) };
        let (script, gaps) = (Arc::new(script), Arc::default());
        let mut epochs = BTreeMap::<u64, usize>::new();
        let outcome = recorded(false, |record| {
            let ended = simulate(seed, (&script, course), record, &gaps);
            record.seen().epochs_of_streams.iter().for_each(|(of, _)| *epochs.entry(*of).or_default() += 1);
            ended
        });
        assert!(outcome.violations.is_empty(), "seed {seed}: {:?}", outcome.violations);
        // The full grid and the reduced one; of the other replica only the first.
        let n_epochs: Vec<usize> = epochs.into_values().collect();
        assert!([vec![1, 2], vec![2, 1]].contains(&n_epochs), "seed {seed}: {n_epochs:?}");
        let gaps = gaps.lock().unwrap().clone();
        let allowed = PAUSE_MAX + replay(&gaps) * REPLAY_TENTHS / 10;
        assert!(gaps.iter().all(|gap| gap.lasted <= allowed), "seed {seed}: beyond {allowed:?}: {gaps:?}");
    }
}
