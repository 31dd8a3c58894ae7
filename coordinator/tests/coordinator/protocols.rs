//! Builds of consecutive protocols in one cluster, and builds that have none in common.

use crate::common::{Cluster, attach, config, router_frame, sim};
use proto::Speaks;
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::cluster::{self as wire, Protocols, router_frame};
use std::time::Duration;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

/// A build that speaks this protocol and the one before it.
fn build(newest: u32) -> Speaks {
    Speaks::of(&format!("0.{newest}.0"), Some(Protocols { oldest: newest - 1, newest }))
}

fn cluster(newest: u32) -> Cluster {
    Cluster::start(coordinator::Config { speaks: build(newest), ..config(64, 128, 16) })
}

fn hello(newest: u32) -> wire::RouterFrame {
    let Speaks { version, protocols } = build(newest);
    router_frame(router_frame::Frame::Hello(wire::RouterHello { version, protocols, former: None }))
}

/// A real worker of this build; its end, if it does not end by itself, is the test's.
fn worker(cluster: &Cluster, newest: u32) -> impl Future<Output = Result<(), worker::Error>> + Send + use<> {
    let speaks = build(newest);
    let config = worker::Config { device: "sim".into(), memory_bytes: 1 << 30, speaks, ..worker::Config::default() };
    worker::serve(cluster.dialer.channel(), Box::new(sim()), config, CancellationToken::new())
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
            let mut router = cluster.router_that_says(hello(others)).await;
            let theirs = Speaks::of(&router.welcome.version, router.welcome.protocols);
            assert_eq!(theirs, build(of_coordinator));
            assert_eq!(build(others).meet(theirs), Ok(of_coordinator.min(others)));
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
    let Speaks { version, protocols } = build(6);
    let refused = |status: Status| check_refused(&status, 4, 6);
    let scale = wire::ScaleRequest { version: version.clone(), tp: 1, pp: 1, protocols };
    refused(client.scale(scale).await.unwrap_err());
    refused(client.reload(wire::ReloadRequest { version: version.clone(), protocols }).await.unwrap_err());
    refused(client.get_model(wire::GetModelRequest { version: version.clone(), protocols }).await.unwrap_err());
    let hashes = wire::GetHashesRequest { version, weight: String::new(), protocols };
    refused(client.get_hashes(hashes).await.unwrap_err());
    cluster.stop().await;
}
