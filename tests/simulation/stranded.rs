//! Clusters of four workers that lose some of them without replacement: each call ends within its limit, with the
//! reference's answer or the reason for its end. With a second replica all streams continue there immediately.
//!
//! `SIMULATION_SEED=7` prints the events of one seed, as in the other simulations.

use crate::cast::Stage;
use crate::client::millis;
use crate::net::channel;
use crate::random::Random;
use crate::record::Record;
use crate::registry::Registry;
use crate::rules::SERVED_MILLIS;
use crate::script::{CLIENTS, Fault, Host, PlannedCall, ROUTERS, ReplicaPlan, Script, What};
use crate::weather::Weather;
use crate::world::{Outcome, network, recorded};
use crate::{check_all, number};
use proto::v1::generate_reply::Event;
use proto::v1::inference_client::InferenceClient;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;
use tonic::{Code, Status};
use types::Tokens;

/// The routers' limit for a waiting request: once shorter and once longer than a lost rank's place is kept.
const FAILOVER_MILLIS: [u64; 2] = [4_000, 14_000];
/// By then all roles have found each other, and the ranks have met.
const SETTLED_MILLIS: u64 = 3_000;
const LOSSES_END_MILLIS: u64 = 14_000;
/// From a loss to a stream's next token at the other replica: detection, messages and a replay.
const MOVED_MILLIS: u64 = 1_000;
const MILLIS_MAX: u64 = 90_000;

fn script(seed: u64) -> Script {
    let mut random = Random::new(seed ^ 0x57_4a9d);
    let grid = |(tp, pp): (u16, u16)| ReplicaPlan { tp, pp, n_workers: usize::from(tp * pp) };
    let is_alone = seed.is_multiple_of(2);
    let replicas = match is_alone {
        true => vec![grid((2, 2))],
        false => vec![grid(*random.one_of(&[(2, 1), (1, 2)])), grid(*random.one_of(&[(2, 1), (1, 2)]))],
    };
    let n_workers = replicas[0].n_workers;
    let n_lost = random.between(1, n_workers as u64) as usize;
    let lost = (0..n_lost).map(|worker| {
        let at_millis = random.between(SETTLED_MILLIS + 500, LOSSES_END_MILLIS);
        Fault { at_millis, lasts_millis: MILLIS_MAX, what: What::Kill(Host::Worker(0, worker)) }
    });
    let mut faults: Vec<Fault> = lost.collect();
    faults.sort_by_key(|fault| fault.at_millis);
    let of = Script::of(seed);
    let calls = of
        .calls
        .iter()
        .map(|plan| PlannedCall { at_millis: plan.at_millis + SETTLED_MILLIS, ..plan.clone() })
        .collect();
    Script {
        replicas,
        faults,
        calls,
        lag_millis: 20,
        // Blocks for a whole context: four ranks may hold it if one holds a quarter of it. At the replica that streams
        // move to, no request waits for room.
        n_blocks: if is_alone { *random.one_of(&[18, 34, 160]) } else { 160 },
        running_max: if is_alone { of.running_max } else { 64 },
        is_context_set: random.once_in(2),
        failover_millis: Some(*random.one_of(&FAILOVER_MILLIS)),
        ..of
    }
}

fn run(seed: u64, is_printed: bool) -> Outcome {
    let script = Arc::new(script(seed));
    if is_printed {
        println!("{script:#?}");
    }
    recorded(is_printed, |record| simulate(seed, &script, record))
}

fn simulate(seed: u64, script: &Arc<Script>, record: &Record) -> turmoil::Result {
    let mut sim = network(seed, MILLIS_MAX);
    let registry = Registry::new(record.clone(), script.lag_millis);
    let stage = Stage { script: script.clone(), record: record.clone(), registry };
    stage.open(&mut sim);
    for client in 0..CLIENTS {
        sim.client(Host::Client(client).name(), play(client, script.clone(), record.clone()));
    }
    let mut weather = Weather::new(script, record.clone());
    while !sim.step()? {
        weather.pass(&mut sim);
        if sim.elapsed().as_millis() as u64 > MILLIS_MAX {
            record.violation(format!("calls {:?} do not end", record.seen().open));
            return Ok(());
        }
    }
    Ok(())
}

async fn play(client: usize, script: Arc<Script>, record: Record) -> turmoil::Result {
    let mut calls = tokio::task::JoinSet::new();
    for (number, plan) in script.calls.iter().enumerate().filter(|(_, planned)| planned.client == client) {
        let (got, last_token_millis) = (Tokens::new(), 0);
        let call =
            Call { number, plan: plan.clone(), script: script.clone(), record: record.clone(), got, last_token_millis };
        calls.spawn(call.run());
    }
    while let Some(ended) = calls.join_next().await {
        ended?;
    }
    Ok(())
}

/// One call, made once: its router runs, so its status is the final answer.
struct Call {
    number: usize,
    plan: PlannedCall,
    script: Arc<Script>,
    record: Record,
    got: Tokens,
    /// The time of its last token, or of its beginning.
    last_token_millis: u64,
}

impl Call {
    async fn run(mut self) {
        self.record.seen().open.insert(self.number);
        sleep(Duration::from_millis(self.plan.at_millis)).await;
        self.last_token_millis = millis();
        let ended = self.read().await;
        self.record_token_time();
        self.record.note(&format!("call {}", self.number), format!("ends with {} tokens: {ended:?}", self.got.len()));
        self.record.count(match &ended {
            Ok(()) => "finished",
            Err(status) if status.code() == Code::DeadlineExceeded => "deadline",
            Err(_) => "refused with a reason",
        });
        if let Err(why) = ended.or_else(|status| self.judge(&status)) {
            self.violation(&why);
        }
        self.record.seen().open.remove(&self.number);
    }

    async fn read(&mut self) -> Result<(), Status> {
        let (reference, reason) = self.plan.reference(&self.script.sim);
        let mut client = InferenceClient::new(channel(&Host::Router(self.plan.router % ROUTERS).name()));
        let deadline_ms = self.plan.deadline_millis.unwrap_or(0) as u32;
        let request = proto::v1::GenerateRequest { deadline_ms, ..self.plan.request() };
        let mut replies = client.generate(request).await?.into_inner();
        while let Some(reply) = replies.message().await? {
            match reply.event {
                Some(Event::Delta(delta)) => {
                    self.record_token_time();
                    self.got.extend(&delta.token_ids);
                    if !reference.starts_with(&self.got) {
                        self.violation(&format!("{:?} is not what the reference begins with", self.got));
                    }
                }
                Some(Event::Finished(finished)) => {
                    if self.got != reference || finished.reason() != reason {
                        self.violation(&format!("it ends by {:?} behind {:?}", finished.reason(), self.got));
                    }
                    return Ok(());
                }
                _ => {}
            }
            if self.plan.leaves_at.is_some_and(|n_tokens| self.got.len() >= n_tokens) {
                return Ok(());
            }
        }
        Err(Status::data_loss("the stream ended without an end"))
    }

    /// Records the time of a token, or of the end.
    fn record_token_time(&mut self) {
        let (now, failover_millis) = (millis(), self.script.failover_millis.unwrap_or(0));
        let is_alone = self.script.replicas.len() == 1;
        let (gap, max) =
            (now - self.last_token_millis, if is_alone { failover_millis + SERVED_MILLIS } else { MOVED_MILLIS });
        if gap > max {
            self.violation(&format!("nothing arrives for {gap} ms, and the limit is {max}"));
        }
        self.last_token_millis = now;
    }

    /// The broken rule, if the call may not end with this status.
    fn judge(&self, status: &Status) -> Result<(), String> {
        let message = status.message();
        match status.code() {
            Code::DeadlineExceeded | Code::ResourceExhausted if self.plan.deadline_millis.is_some() => Ok(()),
            Code::Unavailable if self.script.replicas.len() > 1 => Err(format!("another replica is well: {message}")),
            // The status must name what failed, where, and the setting to change.
            Code::Unavailable if message.contains("--failover-max") && message.contains("replica-0") => Ok(()),
            Code::Unavailable if message.contains("try again when there are more") => Ok(()),
            _ => Err(format!("nothing explains it: {status:?}")),
        }
    }

    fn violation(&self, what: &str) {
        self.record.violation(format!("call {}: {what}", self.number));
    }
}

fn failure_text(seed: u64, outcome: &Outcome) -> String {
    let violations = outcome.violations.join("\n  ");
    format!("\nSIMULATION_SEED={seed} cargo test --test simulation stranded -- --nocapture\n  {violations}\n")
}

#[test]
fn ranks_are_lost_and_none_comes() {
    if let Some(seed) = number("SIMULATION_SEED") {
        let outcome = run(seed, true);
        println!("{:?}", outcome.counts);
        assert!(outcome.violations.is_empty(), "{}", failure_text(seed, &outcome));
        return;
    }
    check_all(failure_text, |seed| run(seed, false));
}
