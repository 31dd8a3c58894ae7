//! Additional rules for a cluster without faults: no rank is taken for lost, each call is served in time, and no step
//! computes for a client that has left. Faults would excuse all three.

use crate::client::millis;
use crate::operator::topology;
use crate::record::Record;
use crate::rules::{Rules, SERVED_MILLIS};
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::sleep;
use tonic::transport::Channel;

const LOOK: Duration = Duration::from_millis(250);
/// The age of a router's state: replicas report once a second, and a cancel takes some time.
const REPORT_MILLIS: u64 = 2_000;
/// How long the watch continues after the last call's end, when no request is left.
const LAST_LOOKS_MILLIS: u64 = 1_000;
/// Extra time at the start: ranks meet, and the first requests wait for them.
const COLD_MILLIS: u64 = 5_000;

/// Watches until the last call has ended and a router has received its end.
pub async fn watch(rules: &Rules, record: &Record, router: &Channel) {
    while !record.seen().open.is_empty() || n_open_calls(rules, record, millis().saturating_sub(LAST_LOOKS_MILLIS)) > 0
    {
        sleep(LOOK).await;
        let Ok(topology) = topology(router).await else { continue };
        let n_held: u32 = topology.replicas.iter().map(|replica| replica.n_waiting + replica.n_running).sum();
        let n_open = n_open_calls(rules, record, millis());
        if n_held as usize > n_open {
            record.violation(format!("{n_held} requests are held, and {n_open} calls are open"));
            return;
        }
    }
    judge(rules, record);
}

/// Returns the number of calls that had begun, and had not ended at the time of the oldest state that a router may
/// have.
fn n_open_calls(rules: &Rules, record: &Record, now: u64) -> usize {
    let seen = record.seen();
    let is_open = |call: usize| seen.ended_millis.get(&call).is_none_or(|ended| ended + REPORT_MILLIS > now);
    rules.script.calls.iter().enumerate().filter(|(call, plan)| plan.at_millis <= now && is_open(*call)).count()
}

fn judge(rules: &Rules, record: &Record) {
    let epochs = record.seen().epochs.clone();
    let ended_millis = record.seen().ended_millis.clone();
    let incarnations: BTreeSet<u64> = epochs.iter().map(|(incarnation, _)| *incarnation).collect();
    if incarnations.len() < epochs.len() {
        record.violation(format!("ranks are placed again in an undisturbed cluster: {epochs:?}"));
    }
    for (call, ended) in ended_millis {
        let begun = rules.script.calls[call].at_millis.max(COLD_MILLIS);
        if ended > begun + SERVED_MILLIS {
            record.violation(format!("call {call} took until {ended} in an undisturbed cluster"));
        }
    }
}
