//! The cluster's operator: changes grids as the script plans, and checks at the end that everything is at rest.

use crate::cast::routers;
use crate::client::millis;
use crate::net::channel;
use crate::peace;
use crate::record::Record;
use crate::rules::{RECOVERY_MILLIS, Rules};
use crate::script::{CALM_MILLIS, Fault, Host, What};
use proto::cluster::ScaleRequest;
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::v1;
use proto::v1::inference_client::InferenceClient;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};
use tonic::transport::Channel;
use types::Epoch;

const LOOK: Duration = Duration::from_millis(500);
/// A lost router's requests are computed for ten more seconds, and longer behind a wire whose end is detected late.
const REST_MILLIS: u64 = 14_000;

pub async fn play(rules: Arc<Rules>, record: Record) -> turmoil::Result {
    let scales = rules.script.faults.iter().filter(|fault| matches!(fault.what, What::Scale { .. }));
    for fault in scales.copied() {
        tokio::spawn(scale(fault, record.clone()));
    }
    let channels: Vec<Channel> = routers().map(|router| channel(&router.name())).collect();
    for (router, channel) in routers().zip(&channels) {
        tokio::spawn(epochs(router.name(), channel.clone(), record.clone()));
    }
    if rules.script.faults.is_empty() {
        peace::watch(&rules, &record, &channels[0]).await;
    }
    while !record.seen().open.is_empty() || millis() < CALM_MILLIS {
        sleep(LOOK).await;
    }
    let by_millis = millis().max(CALM_MILLIS + RECOVERY_MILLIS - REST_MILLIS) + REST_MILLIS;
    loop {
        let Err(unrest) = rest(&channels, rules.script.replicas.len()).await else { break };
        if millis() > by_millis {
            record.violation(format!("the cluster does not come to rest: {unrest}"));
            break;
        }
        sleep(LOOK).await;
    }
    record.note("operator", "at rest");
    Ok(())
}

/// Checks that a router never reports an epoch older than one reported before, for as long as it runs.
async fn epochs(router: String, channel: Channel, record: Record) {
    let (mut last, mut start) = (BTreeMap::<String, Epoch>::new(), 0);
    loop {
        sleep(LOOK).await;
        let before = record.seen().starts.get(&router).copied().unwrap_or_default();
        let Ok(topology) = topology(&channel).await else { continue };
        if record.seen().starts.get(&router).copied() != Some(before) {
            continue;
        }
        if before != start {
            (last, start) = (BTreeMap::new(), before);
        }
        for replica in topology.replicas {
            let Some(epoch) = epoch(&replica.epoch) else { continue };
            let seen = last.entry(replica.replica.clone()).or_insert(epoch);
            if epoch < *seen {
                record.violation(format!("{router} sees {epoch} of {} behind {seen}", replica.replica));
            }
            *seen = epoch;
        }
    }
}

/// Parses an epoch of the topology's page; None for a replica that a router has not met.
fn epoch(text: &str) -> Option<Epoch> {
    let (incarnation, n) = text.split_once('.')?;
    Some(Epoch { incarnation: incarnation.parse().ok().filter(|known| *known > 0)?, n: n.parse().ok()? })
}

/// Ignores a rejection; only the fate of the requests matters.
async fn scale(fault: Fault, record: Record) {
    sleep(Duration::from_millis(fault.at_millis)).await;
    let What::Scale { replica, tp, pp } = fault.what else { return };
    let mut client = CoordinatorClient::new(channel(&Host::Coordinator(replica).name()));
    let request = ScaleRequest { version: proto::VERSION.into(), tp: tp.into(), pp: pp.into(), protocols: None };
    match timeout(Duration::from_secs(20), client.scale(request)).await {
        Ok(Ok(_)) => {
            record.count("scaled");
            record.note("operator", format!("replica {replica} is on {tp} x {pp}"));
        }
        Ok(Err(status)) => record.note("operator", format!("{tp} x {pp} for replica {replica}: {:?}", status.code())),
        Err(_) => record.note("operator", format!("{tp} x {pp} for replica {replica}: no answer")),
    }
}

/// Checks that every router sees every replica ready, with nothing waiting, nothing running and no block in use.
pub async fn rest(channels: &[Channel], n_replicas: usize) -> Result<(), String> {
    for channel in channels {
        let replicas = topology(channel).await?.replicas;
        if replicas.len() != n_replicas {
            return Err(format!("a router knows {} replicas of {n_replicas}", replicas.len()));
        }
        for replica in replicas {
            let held = (replica.n_waiting, replica.n_running, replica.blocks_used);
            if replica.phase != "ready" || held != (0, 0, 0) {
                let (name, phase) = (replica.replica, replica.phase);
                return Err(format!("{name} is {phase} with (waiting, running, blocks) {held:?}"));
            }
        }
    }
    Ok(())
}

pub async fn topology(router: &Channel) -> Result<v1::Topology, String> {
    let mut client = InferenceClient::new(router.clone());
    match timeout(LOOK * 4, client.get_topology(v1::GetTopologyRequest::default())).await {
        Ok(Ok(reply)) => Ok(reply.into_inner()),
        Ok(Err(status)) => Err(format!("{status:?}")),
        Err(_) => Err("no answer".into()),
    }
}
