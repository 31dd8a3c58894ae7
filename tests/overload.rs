//! Ten times more clients than there is room for, on the real router, coordinator and scheduler over a simulated model:
//! throughput stays at its peak, and the other requests are rejected with a typed error. With eight running, a step
//! gave 7.96 tokens at the peak and 7.99 under 240 clients, which were rejected 19,169 times (two busy cores, steps of
//! 4 ms).
//!
//! `make overload` does it with the real binary and the default model, for a minute.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "common/house.rs"]
mod house;
#[path = "common/machine.rs"]
mod machine;
#[path = "overload/minute.rs"]
mod minute;
#[path = "common/node.rs"]
mod node;
#[path = "common/ports.rs"]
mod ports;

use house::{Client, House, Rooms};
use proto::v1;
use proto::v1::generate_reply::Event;
use proto::v1::generate_request::Input;
use router::ApiKeys;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;
use tokio::task::JoinSet;
use tonic::{Code, Status};

const RUNNING_MAX: u32 = 8;
const WAITING_MAX: u32 = 16;
/// As many as may run and wait: one more would be rejected.
const N_CLIENTS: usize = (RUNNING_MAX + WAITING_MAX) as usize;
const N_ANSWERS: usize = 240;
const N_TOKENS: u32 = 20;

async fn open() -> House {
    let keys = ApiKeys::default();
    let mut house = House::open(Rooms { running_max: RUNNING_MAX, waiting_max: WAITING_MAX, keys }).await;
    house.until(|replica| replica.phase == "ready").await;
    house
}

impl House {
    async fn replica(&mut self) -> v1::ReplicaTopology {
        let topology = self.client.get_topology(v1::GetTopologyRequest::default()).await.unwrap().into_inner();
        topology.replicas.into_iter().next().unwrap()
    }

    async fn until(&mut self, holds: impl Fn(&v1::ReplicaTopology) -> bool) -> v1::ReplicaTopology {
        loop {
            let replica = self.replica().await;
            if holds(&replica) {
                return replica;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Steps so far, read while nothing is open.
    async fn steps(&mut self) -> u64 {
        let is_idle = |of: &v1::ReplicaTopology| of.n_waiting == 0 && of.n_running == 0 && of.blocks_used == 0;
        self.until(is_idle).await;
        // The last report may be older.
        tokio::time::sleep(Duration::from_millis(100)).await;
        let replica = self.until(is_idle).await;
        assert_eq!(replica.backlog_tokens, 0);
        replica.steps
    }

    /// Runs `n_clients` clients that repeat requests until there are enough answers. Returns tokens per step, and
    /// rejections.
    async fn load(&mut self, n_clients: usize) -> (f64, usize) {
        let before = self.steps().await;
        let (n_answers, n_refused) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let mut clients = JoinSet::new();
        for i in 0..n_clients {
            let (client, n_answers, n_refused) = (self.client.clone(), n_answers.clone(), n_refused.clone());
            clients.spawn(async move {
                for j in 0.. {
                    if n_answers.load(Relaxed) >= N_ANSWERS {
                        return;
                    }
                    match generate_tokens(client.clone(), format!("{i} asks {j}")).await {
                        Ok(n_tokens) => drop((assert_eq!(n_tokens, N_TOKENS), n_answers.fetch_add(1, Relaxed))),
                        Err(status) => {
                            check_refusal(&status);
                            n_refused.fetch_add(1, Relaxed);
                            // Earlier than the server's advice: the test is of clients that behave badly.
                            tokio::time::sleep(Duration::from_millis(20)).await;
                        }
                    }
                }
            });
        }
        while !clients.is_empty() {
            let replica = self.replica().await;
            assert!(replica.n_waiting <= WAITING_MAX && replica.n_running <= RUNNING_MAX, "{replica:?}");
            if let Ok(Some(ended)) = tokio::time::timeout(Duration::from_millis(5), clients.join_next()).await {
                ended.unwrap();
            }
        }
        let steps = self.steps().await - before;
        let n_tokens = n_answers.load(Relaxed) as f64 * f64::from(N_TOKENS);
        (n_tokens / steps as f64, n_refused.load(Relaxed))
    }
}

fn check_refusal(status: &Status) {
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    let retry_after = status.metadata().get("retry-after").unwrap().to_str().unwrap();
    let millis = status.metadata().get("retry-after-ms").unwrap().to_str().unwrap().parse::<u64>().unwrap();
    // Rounded up: a client that comes a little late also finds a place.
    assert_eq!(retry_after.parse::<u64>().unwrap(), millis.div_ceil(1000), "{status:?}");
    assert!(millis >= 100, "{status:?}");
}

async fn generate_tokens(mut client: Client, text: String) -> Result<u32, Status> {
    let sampling = v1::Sampling { max_tokens: Some(N_TOKENS), ignore_eos: true, ..v1::Sampling::default() };
    let request =
        v1::GenerateRequest { input: Some(Input::Text(text)), sampling: Some(sampling), ..Default::default() };
    let mut replies = client.generate(request).await?.into_inner();
    let (mut n_tokens, mut has_ended) = (0, false);
    while let Some(reply) = replies.message().await? {
        match reply.event.unwrap() {
            Event::Delta(delta) => n_tokens += delta.token_ids.len() as u32,
            Event::Finished(_) => has_ended = true,
            Event::Started(_) | Event::PromptLogprobs(_) | Event::PromptProgress(_) => {}
        }
    }
    assert!(has_ended);
    Ok(n_tokens)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_times_too_many_get_as_much_done_as_just_enough() {
    if std::env::var_os("LOCKSTEP_OVERLOAD").is_some() {
        return tokio::task::spawn_blocking(minute::run).await.unwrap();
    }
    let mut house = open().await;
    let (peak, _) = house.load(N_CLIENTS).await;
    let (overloaded, n_refused) = house.load(10 * N_CLIENTS).await;
    println!("tokens a step: {peak:.2} at the peak, {overloaded:.2} overloaded; {n_refused} refused");
    assert!(overloaded >= 0.9 * peak, "{overloaded} tokens a step, and {peak} at the peak");
    assert!(n_refused > N_CLIENTS);
    house.close().await;
}
