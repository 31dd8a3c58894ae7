//! One tenant at fifty times its share, on the real router, coordinator and scheduler over a simulated model: the other
//! tenant is never rejected, and is served as if there were no queue. Also a tenant's limits, as the binary reports
//! them, from a file of keys that changes meanwhile.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "common/house.rs"]
mod house;
#[path = "common/node.rs"]
mod node;
#[path = "common/ports.rs"]
mod ports;

use house::{Client, House, MODEL, Rooms};
use node::{Folder, Node, PATIENCE};
use proto::v1;
use proto::v1::generate_reply::Event;
use proto::v1::generate_request::Input;
use router::ApiKeys;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tonic::{Code, Status};

const RUNNING_MAX: u32 = 4;
const WAITING_MAX: u32 = 40;
/// Fifty times one tenant's share of the slots.
const N_HEAVY: usize = 100;
/// Many more than the light one's, so that many steps pass between two ends.
const HEAVY_TOKENS: u32 = 150;
const LIGHT_TOKENS: u32 = 10;
/// Shorter than the router advises: the test is of clients that behave badly.
const REFUSED_PAUSE: Duration = Duration::from_millis(250);

/// Opens a ready cluster with two tenants.
async fn open() -> House {
    let keys = ApiKeys::parse("heavy:kh\nlight:kl").unwrap();
    let house = House::open(Rooms { running_max: RUNNING_MAX, waiting_max: WAITING_MAX, keys }).await;
    let deadline = Instant::now() + PATIENCE;
    while time_to_first_token(house.client.clone(), "kl", 1).await.is_err() {
        assert!(Instant::now() < deadline, "it is never ready");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    house
}

impl House {
    /// Sends `n_requests` requests of the light tenant, one after another, beside `n_heavy` clients of the heavy one.
    async fn load(&self, n_heavy: usize, n_requests: usize) -> Load {
        let (n_served, n_refused) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let mut heavy = JoinSet::new();
        for _ in 0..n_heavy {
            let (client, n_served, n_refused) = (self.client.clone(), n_served.clone(), n_refused.clone());
            heavy.spawn(async move {
                loop {
                    match time_to_first_token(client.clone(), "kh", HEAVY_TOKENS).await {
                        Ok(_) => n_served.fetch_add(1, Relaxed),
                        Err(status) => {
                            assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
                            n_refused.fetch_add(1, Relaxed);
                            tokio::time::sleep(REFUSED_PAUSE).await;
                            0
                        }
                    };
                }
            });
        }
        let (deadline, is_much) = (Instant::now() + PATIENCE, n_heavy > (RUNNING_MAX + WAITING_MAX) as usize);
        while n_heavy > 0 && (n_served.load(Relaxed) == 0 || (is_much && n_refused.load(Relaxed) == 0)) {
            assert!(Instant::now() < deadline, "no request of the heavy tenant was refused");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let mut load = Load::default();
        for _ in 0..n_requests {
            let (before, since) = (n_served.load(Relaxed), Instant::now());
            let first = time_to_first_token(self.client.clone(), "kl", LIGHT_TOKENS).await.unwrap();
            load.answers.push(since.elapsed());
            load.first_tokens.push(first);
            load.n_served += n_served.load(Relaxed) - before;
        }
        load.n_refused = n_refused.load(Relaxed);
        heavy.shutdown().await;
        load
    }
}

/// The events beside the light tenant's requests, and the times of these.
#[derive(Default)]
struct Load {
    n_served: u64,
    n_refused: u64,
    first_tokens: Vec<Duration>,
    answers: Vec<Duration>,
}

/// Reads a whole answer; returns the time until its first token.
async fn time_to_first_token(mut client: Client, key: &str, n_tokens: u32) -> Result<Duration, Status> {
    let since = Instant::now();
    let sampling = v1::Sampling { max_tokens: Some(n_tokens), ignore_eos: true, ..v1::Sampling::default() };
    let input = Some(Input::Text("one two three".into()));
    let request = v1::GenerateRequest { input, sampling: Some(sampling), ..Default::default() };
    let mut request = tonic::Request::new(request);
    request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    let mut replies = client.generate(request).await?.into_inner();
    let (mut n_received, mut first) = (0, Duration::ZERO);
    while let Some(reply) = replies.message().await? {
        if let Event::Delta(delta) = reply.event.unwrap() {
            first = if n_received == 0 { since.elapsed() } else { first };
            n_received += delta.token_ids.len() as u32;
        }
    }
    assert_eq!(n_received, n_tokens);
    Ok(first)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tenant_above_its_share_does_not_delay_others() {
    let house = open().await;
    let n_requests = 12;
    let Load { n_served, n_refused, .. } = house.load(N_HEAVY, n_requests).await;
    println!("{n_served} heavy requests ended during {n_requests} light ones; {n_refused} were refused");
    // No request of the light tenant is rejected: that would have panicked. During each of them the running requests
    // may end. If it were behind the queue, all waiting ones would end before it each time.
    assert!(n_refused > 0 && n_served < n_requests as u64 * u64::from(WAITING_MAX) / 2, "{n_served}");
    house.close().await;
}

/// The light tenant is never rejected, independent of the other's load. `make bench-tenants` runs this longer, for the
/// times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn how_long_the_light_one_waits() {
    let house = open().await;
    let kinds = [
        ("alone", 0),
        ("beside a tenant at its share", RUNNING_MAX as usize / 2),
        ("beside a tenant at 50 times its share", N_HEAVY),
    ];
    let mut loads = kinds.map(|_| Load::default());
    let rounds: Option<usize> = std::env::var("LOCKSTEP_TENANTS").ok().map(|rounds| rounds.parse().unwrap());
    let n_requests = if rounds.is_some() { 60 } else { 3 };
    for _ in 0..rounds.unwrap_or(1) {
        for ((_, n_heavy), all) in kinds.iter().zip(&mut loads) {
            let load = house.load(*n_heavy, n_requests).await;
            all.first_tokens.extend(load.first_tokens);
            all.answers.extend(load.answers);
            all.n_refused += load.n_refused;
        }
    }
    println!(
        "| the light tenant | requests | first token p50 | p99 | answer p50 | p99 | refusals of the heavy tenant |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|");
    for ((kind, _), load) in kinds.iter().zip(&mut loads) {
        let [a, b] = [&mut load.first_tokens, &mut load.answers].map(|times| {
            times.sort_unstable();
            [50, 99].map(|percent| times[(times.len() * percent / 100).min(times.len() - 1)].as_secs_f64() * 1e3)
        });
        let n = load.answers.len();
        println!(
            "| {kind} | {n} | {:.1} ms | {:.1} ms | {:.1} ms | {:.1} ms | {} |",
            a[0], a[1], b[0], b[1], load.n_refused
        );
    }
    house.close().await;
}

fn serve(keys: &str) -> Node {
    let doors = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    Node::start(&[&["serve", MODEL, "--device", "sim", "--threads", "1", "--api-keys", keys], &doors[..]].concat())
}

/// The answer's status, its headers and its body.
fn complete_http(http: &str, key: &str, n_tokens: u32) -> (u16, ureq::http::HeaderMap, Value) {
    let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false).build();
    let request_body = json!({ "prompt": "one two three", "max_tokens": n_tokens, "ignore_eos": true });
    let request = ureq::Agent::from(agent).post(format!("{http}/v1/completions"));
    let request = request.header("content-type", "application/json").header("authorization", format!("Bearer {key}"));
    let mut answer = request.send(request_body.to_string()).unwrap();
    let body = serde_json::from_str(&answer.body_mut().read_to_string().unwrap()).unwrap();
    (answer.status().as_u16(), answer.headers().clone(), body)
}

fn page(http: &str) -> String {
    ureq::get(format!("{http}/metrics")).call().unwrap().body_mut().read_to_string().unwrap()
}

fn count(page: &str, name: &str, tenant: &str) -> f64 {
    let label = format!("tenant=\"{tenant}\"");
    let lines = page.lines().filter(|line| line.starts_with(name) && line.contains(&label));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

#[test]
fn limits_are_reported_and_follow_their_file() {
    let folder = Folder::new("limits");
    let path = folder.write("keys", "alice:ka requests_per_minute=2 tokens_per_minute=1000\nbob:kb\n");
    let mut node = serve(&path);
    let http = node.http();
    node.until_ready(&http);
    let (status, headers, _) = complete_http(&http, "ka", 5);
    let header = |name: &str| headers.get(name).unwrap().to_str().unwrap().to_owned();
    assert_eq!((status, header("x-ratelimit-limit-requests")), (200, "2".into()));
    assert_eq!(
        (header("x-ratelimit-remaining-requests"), header("x-ratelimit-limit-tokens")),
        ("1".into(), "1000".into())
    );
    assert!(header("x-ratelimit-reset-requests").ends_with('s'), "{headers:?}");
    assert_eq!(complete_http(&http, "ka", 5).0, 200);
    let (status, headers, body) = complete_http(&http, "ka", 5);
    // On a slow machine one request has ended by now.
    if status == 429 {
        assert_eq!(
            (&body["error"]["code"], &body["error"]["type"]),
            (&json!("rate_limit_exceeded"), &json!("requests"))
        );
        let retry_after: u64 = headers["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((1..=30).contains(&retry_after), "{headers:?}");
    }
    let counts = page(&http);
    assert!(count(&counts, "lockstep:tenant_requests_total", "alice") >= 2.0, "{counts}");
    assert!(count(&counts, "lockstep:tenant_generation_tokens_total", "alice") >= 10.0, "{counts}");
    assert!(count(&counts, "lockstep:tenant_queue_seconds_count", "alice") >= 2.0, "{counts}");
    let (status, headers, _) = complete_http(&http, "kb", 5);
    assert!(status == 200 && !headers.contains_key("x-ratelimit-limit-requests"), "{headers:?}");

    // The valid lines of a file with an invalid one are keys, and an empty file revokes all; clients without a key stay
    // rejected.
    folder.write("keys", "alice:ka weight=none\nbob:kb\n");
    node.until(&["only the other lines are keys"]);
    assert_eq!(["ka", "kb"].map(|key| complete_http(&http, key, 5).0), [401, 200]);
    folder.write("keys", "");
    node.until(&["all keys of the file are revoked"]);
    assert_eq!(["kb", ""].map(|key| complete_http(&http, key, 5).0), [401, 401]);
    let is_refused = |line: &str| line.starts_with("lockstep:config_reload_ok{") && line.contains("api_keys");
    assert!(page(&http).lines().any(|line| is_refused(line) && line.ends_with(" 0")), "{}", page(&http));
    folder.write("keys", "alice:ka\ncarol:kc concurrent=3\n");
    node.until(&["the API keys were read again"]);
    let (status, headers, _) = complete_http(&http, "ka", 5);
    assert!(status == 200 && !headers.contains_key("x-ratelimit-limit-requests"), "{headers:?}");
    assert_eq!((complete_http(&http, "kb", 5).0, complete_http(&http, "kc", 5).0), (401, 200));
}
