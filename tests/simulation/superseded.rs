//! A coordinator that is the only process without the store: it continues to serve until another coordinator claims its
//! replica, even long after the end of its lease. When another claims it, workers and routers go there, and the replica
//! serves.

use crate::cast::Stage;
use crate::net::channel;
use crate::operator::{rest, topology};
use crate::record::Record;
use crate::registry::Registry;
use crate::script::{CLIENTS, Fault, Host, PlannedCall, ReplicaPlan, Script, What};
use crate::weather::Weather;
use crate::world::{network, recorded};
use proto::v1::generate_reply::Event;
use proto::v1::inference_client::InferenceClient;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};
use tonic::Status;
use tonic::transport::Channel;
use types::Tokens;

const SEEDS: u64 = 4;
const CUT_OFF_MILLIS: u64 = 6_000;
/// A lease lasts five seconds.
const LAPSED_MILLIS: u64 = 14_000;
const CLAIMED_MILLIS: u64 = 15_000;
/// Long enough for all roles to read the store, and for the ranks to load and meet.
const YIELDED_MILLIS: u64 = 3_000;
const MILLIS_MAX: u64 = 60_000;

fn script(seed: u64) -> Script {
    let (tp, pp) = [(1, 1), (2, 1), (1, 2), (2, 2)][seed as usize % 4];
    let fault = |at_millis, what| Fault { at_millis, lasts_millis: MILLIS_MAX, what };
    Script {
        // There is no spare worker: the coordinator with these workers has the replica.
        replicas: vec![ReplicaPlan { tp, pp, n_workers: usize::from(tp * pp) }],
        faults: vec![
            fault(CUT_OFF_MILLIS, What::StoreCut(Host::Coordinator(0))),
            fault(CLAIMED_MILLIS, What::Rival(0)),
        ],
        ..Script::of(seed)
    }
}

fn simulate(seed: u64, script: &Arc<Script>, record: &Record) -> turmoil::Result {
    let mut sim = network(seed, MILLIS_MAX);
    let registry = Registry::new(record.clone(), script.lag_millis);
    let stage = Stage { script: script.clone(), record: record.clone(), registry };
    stage.open(&mut sim);
    let (of_client, client_record) = (script.clone(), record.clone());
    sim.client(Host::Client(0).name(), async move {
        if let Err(why) = watch(&of_client).await {
            client_record.violation(why);
        }
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

/// Sends a request and checks the state at both moments.
async fn watch(script: &Script) -> Result<(), String> {
    let begun = Instant::now();
    let router = channel(&Host::Router(0).name());
    sleep_until(begun + Duration::from_millis(LAPSED_MILLIS)).await;
    let first = serves(script, &router).await.map_err(|why| format!("cut off and unclaimed: {why}"))?;
    sleep_until(begun + Duration::from_millis(CLAIMED_MILLIS + YIELDED_MILLIS + 10 * script.lag_millis)).await;
    let second = serves(script, &router).await.map_err(|why| format!("claimed by another: {why}"))?;
    match first < second {
        true => Ok(()),
        false => Err(format!("incarnation {second} behind {first}")),
    }
}

/// Sends a request, and returns the incarnation that answered it.
async fn serves(script: &Script, router: &Channel) -> Result<u64, String> {
    rest(std::slice::from_ref(router), 1).await?;
    let candidate = script.calls.iter().find(|call| call.leaves_at.is_none() && call.deadline_millis.is_none());
    let plan = candidate.ok_or("no call without a deadline")?;
    let got = answer(plan, router).await.map_err(|status| format!("{status:?}"))?;
    if got != plan.reference(&script.sim).0 {
        return Err(format!("{got:?} is not the reference"));
    }
    // Until its blocks are free.
    sleep(Duration::from_millis(200)).await;
    let epoch = topology(router).await?.replicas.remove(0).epoch;
    epoch.split('.').next().and_then(|n| n.parse().ok()).ok_or(format!("{epoch} is not an epoch"))
}

async fn answer(plan: &PlannedCall, router: &Channel) -> Result<Tokens, Status> {
    let mut replies = InferenceClient::new(router.clone()).generate(plan.request()).await?.into_inner();
    let mut got = Tokens::new();
    while let Some(reply) = replies.message().await? {
        if let Some(Event::Delta(delta)) = reply.event {
            got.extend(&delta.token_ids);
        }
    }
    Ok(got)
}

#[test]
fn coordinator_cut_off_from_store_yields_its_replica() {
    for seed in 0..SEEDS {
        let script = Arc::new(script(seed));
        let outcome = recorded(false, |record| simulate(seed, &script, record));
        assert!(outcome.violations.is_empty(), "seed {seed}: {:?}", outcome.violations);
    }
}
