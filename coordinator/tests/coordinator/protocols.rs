//! Builds of consecutive protocols in one cluster, and builds that have none in common.

use crate::common::{Cluster, attach, config, request, router_frame, sim};
use coordinator::{DraftPolicy, Limits, Speculation};
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::cluster::refused::Reason;
use proto::cluster::state::Phase;
use proto::cluster::{self as wire, Protocols, router_frame};
use proto::{NEWEST, OLDEST, ProtocolRange, since};
use std::time::Duration;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

/// A build that speaks this protocol and the one before it.
fn build(newest: u32) -> ProtocolRange {
    ProtocolRange::of(&format!("0.{newest}.0"), Some(Protocols { oldest: newest - 1, newest }))
}

fn cluster(newest: u32) -> Cluster {
    Cluster::start(coordinator::Config { speaks: build(newest), ..config(64, 128, 16) })
}

fn hello(newest: u32) -> wire::RouterFrame {
    let ProtocolRange { version, protocols } = build(newest);
    router_frame(router_frame::Frame::Hello(wire::RouterHello { version, protocols, former: None }))
}

/// A real worker of this build; its end, if it does not end by itself, is the test's.
fn worker(cluster: &Cluster, newest: u32) -> impl Future<Output = Result<(), worker::Error>> + Send + use<> {
    worker_of(cluster, build(newest), CancellationToken::new())
}

fn worker_of(
    cluster: &Cluster,
    speaks: ProtocolRange,
    stop: CancellationToken,
) -> impl Future<Output = Result<(), worker::Error>> + Send + use<> {
    let config = worker::Config { device: "sim".into(), memory_bytes: 1 << 30, speaks, ..worker::Config::default() };
    // Slow enough to be disturbed.
    let sim = worker::sim::SimModel { step_micros: 3_000, ..sim() };
    worker::serve(cluster.dialer.channel(), Box::new(sim), config, stop)
}

/// A router's hello of the build that speaks no more than this.
fn hello_up_to(newest: u32) -> wire::RouterFrame {
    let ProtocolRange { version, protocols } = ProtocolRange::up_to(newest);
    router_frame(router_frame::Frame::Hello(wire::RouterHello { version, protocols, former: None }))
}

/// A cluster with guesses, of a coordinator that speaks no more than this.
fn guessing(newest: u32) -> Cluster {
    let speculation = Speculation { drafting: DraftPolicy::Fixed(4), ..Speculation::default() };
    let config = config(64, 128, 16);
    let limits = Limits { speculation, ..config.limits };
    Cluster::start(coordinator::Config { speaks: ProtocolRange::up_to(newest), limits, ..config })
}

fn with_grammar(tokens_max: u32) -> types::Request {
    types::Request { grammar: Some(types::Grammar::new("a")), ..request(vec![1, 2, 3], tokens_max) }
}

fn apart() -> types::Request {
    types::Request { cache_apart: true, ..request(vec![1], 4) }
}

fn with_window() -> types::Request {
    let request = request(vec![1], 4);
    let penalties = types::Penalties { repetition: 1.1, window: 64, ..types::Penalties::default() };
    types::Request { sampling: types::Sampling { penalties, ..request.sampling.clone() }, ..request }
}

fn naming_tokens() -> types::Request {
    let request = request(vec![1], 4);
    types::Request { sampling: types::Sampling { logprob_token_ids: vec![3], ..request.sampling.clone() }, ..request }
}

/// The features of a number are a fact about builds that run: they stay, whatever comes with the next number.
#[test]
fn what_came_with_a_number_came_with_no_other() {
    let came = [
        ("grammars", since::GRAMMARS),
        ("guesses", since::GUESSES),
        ("parts of KV caches", since::KV_PARTS),
        ("requests apart from caches", since::APART),
        ("logprobs of named tokens", since::NAMED_LOGPROBS),
        ("penalty windows", since::PENALTY_WINDOWS),
    ];
    for (what, number) in came {
        assert_eq!(number, 2, "{what}");
    }
    assert_eq!(proto::needed(&request(vec![1], 4)), OLDEST);
    for newer_request in [with_grammar(4), apart(), naming_tokens(), with_window()] {
        assert_eq!(proto::needed(&newer_request), 2, "{newer_request:?}");
    }
}

fn check_refused(status: &Status, coordinator: u32, peer: u32) {
    assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    for build in [build(coordinator), build(peer)] {
        assert!(status.message().contains(&build.to_string()), "{build}: {status:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn consecutive_protocols_serve_together_and_further_ones_are_refused() {
    for of_coordinator in [4, 5] {
        let cluster = cluster(of_coordinator);
        for others in [4, 5] {
            let worker = tokio::spawn(worker(&cluster, others));
            let mut router = cluster.router_with_hello(hello(others)).await;
            let theirs = ProtocolRange::of(&router.welcome.version, router.welcome.protocols);
            assert_eq!(theirs, build(of_coordinator));
            assert_eq!(build(others).newest_common(theirs), Ok(of_coordinator.min(others)));
            // Behind the hellos of these builds everything is as ever.
            router.check_one(&sim()).await;
            worker.abort();
        }
        for newest in [of_coordinator - 2, of_coordinator + 2] {
            check_refused(&attach(&cluster.dialer, &[hello(newest)]).await.unwrap_err(), of_coordinator, newest);
            // Its process ends: another attempt would be refused too.
            let ended = timeout(Duration::from_secs(60), worker(&cluster, newest)).await.unwrap();
            let Err(worker::Error::Refused(why)) = ended else { panic!("{ended:?}") };
            check_refused(&Status::failed_precondition(why), of_coordinator, newest);
        }
        cluster.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_is_refused_that_has_no_protocol_in_common() {
    let cluster = cluster(4);
    let mut client = CoordinatorClient::new(cluster.dialer.channel());
    let ProtocolRange { version, protocols } = build(6);
    let refused = |status: Status| check_refused(&status, 4, 6);
    let scale = wire::ScaleRequest { version: version.clone(), tp: 1, pp: 1, protocols };
    refused(client.scale(scale).await.unwrap_err());
    refused(client.reload(wire::ReloadRequest { version: version.clone(), protocols }).await.unwrap_err());
    refused(client.get_model(wire::GetModelRequest { version: version.clone(), protocols }).await.unwrap_err());
    let hashes = wire::GetHashesRequest { version, weight: String::new(), protocols };
    refused(client.get_hashes(hashes).await.unwrap_err());
    cluster.stop().await;
}

/// A worker that is sent what its protocol does not have ends its rank: then nothing would be answered here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_came_with_a_number_waits_for_the_last_rank_that_speaks_it() {
    let cluster = guessing(NEWEST);
    let start = |newest: u32| {
        let stop = CancellationToken::new();
        (tokio::spawn(worker_of(&cluster, ProtocolRange::up_to(newest), stop.clone())), stop)
    };
    let (old, old_stops) = start(OLDEST);
    let mut router = cluster.router_with_hello(hello_up_to(NEWEST)).await;
    router.receive_until(|state| state.protocol == OLDEST).await;
    router.check_one(&sim()).await;
    for newer_request in [with_grammar(4), naming_tokens(), with_window()] {
        router.submit(newer_request).await;
        let refused = router.receive_refusal().await;
        assert_eq!(refused.reason(), Reason::NotReady, "{refused:?}");
        assert!(refused.message.contains("older build"), "{refused:?}");
    }

    let (new, new_stops) = start(NEWEST);
    router.receive_until(|state| state.n_spares == 1).await;
    old_stops.cancel();
    old.await.unwrap().unwrap();
    router.receive_until(|state| state.phase() == Phase::Ready && state.protocol == NEWEST).await;
    // It comes to the rank, which is simulated and has no vocabulary to follow it with.
    let taken = router.submit(with_grammar(4)).await;
    router.receive_all().await;
    assert_eq!(
        router.streams.remove(&taken).unwrap().finish,
        Some(types::Finish::Grammar(types::GrammarFault::Broken))
    );

    // Back again, under load.
    let plain = router.submit(request(vec![7; 3], 60)).await;
    while router.streams[&plain].output.is_empty() {
        router.receive().await;
    }
    let (_old, _stop) = start(OLDEST);
    new_stops.cancel();
    new.await.unwrap().unwrap();
    router.receive_all().await;
    router.streams.remove(&plain).unwrap().check(&sim());
    router.receive_until(|state| state.protocol == OLDEST).await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_of_the_protocol_before_refuses_what_it_does_not_know() {
    let cluster = guessing(since::GRAMMARS - 1);
    let _worker = tokio::spawn(worker_of(&cluster, ProtocolRange::default(), CancellationToken::new()));
    let mut router = cluster.router_with_hello(hello_up_to(NEWEST)).await;
    router.check_one(&sim()).await;
    for newer_request in [with_grammar(4), apart(), naming_tokens(), with_window()] {
        router.submit(newer_request).await;
        let refused = router.receive_refusal().await;
        assert_eq!(refused.reason(), Reason::Unsupported, "{refused:?}");
    }
    cluster.stop().await;
}
