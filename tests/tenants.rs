//! One tenant at fifty times its share, on the real binary over a simulated model: the other one is served as if the
//! queue were not there, in requests that go before it and not in seconds. And a tenant's limits, as the binary tells
//! them, from a keys' file that changes meanwhile.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "common/node.rs"]
mod node;

use node::{Folder, Node, PATIENCE};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const MODEL: &str = "tests/reference/llama-f32-tied";
const RUNNING_MAX: u64 = 4;
/// As many as one tenant's share of the slots, fifty times.
const N_HEAVY: usize = 100;
const N_ASKED: usize = 12;

fn serve(keys: &str) -> Node {
    let running = RUNNING_MAX.to_string();
    let more = ["--max-running", &running, "--max-waiting", "40", "--api-keys", keys];
    let doors = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    Node::start(&[&["serve", MODEL, "--device", "sim", "--threads", "1"], &doors[..], &more].concat())
}

/// The answer's status, its headers and its body.
fn ask(http: &str, key: &str, n_tokens: u32) -> (u16, ureq::http::HeaderMap, Value) {
    let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false).build();
    let asked = json!({ "prompt": "one two three", "max_tokens": n_tokens, "ignore_eos": true });
    let request = ureq::Agent::from(agent).post(format!("{http}/v1/completions"));
    let request = request.header("content-type", "application/json").header("authorization", format!("Bearer {key}"));
    let mut answer = request.send(asked.to_string()).unwrap();
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
fn one_at_fifty_times_its_share_goes_before_nobody() {
    let folder = Folder::new("tenants");
    let mut node = serve(&folder.write("keys", "heavy:kh\nlight:kl\n"));
    let http = node.http();
    node.until_ready(&http);
    let (is_over, n_served, n_refused) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let before_each = std::thread::scope(|scope| {
        for _ in 0..N_HEAVY {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    match ask(&http, "kh", 40).0 {
                        200 => n_served.fetch_add(1, Relaxed),
                        429 => {
                            std::thread::sleep(Duration::from_millis(50));
                            n_refused.fetch_add(1, Relaxed)
                        }
                        status => panic!("{status}"),
                    };
                }
            });
        }
        let deadline = Instant::now() + PATIENCE;
        while n_refused.load(Relaxed) == 0 || n_served.load(Relaxed) < RUNNING_MAX {
            assert!(Instant::now() < deadline, "the queue is never full");
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut before_each = Vec::new();
        for _ in 0..N_ASKED {
            let before = n_served.load(Relaxed);
            let (status, _, body) = ask(&http, "kl", 10);
            assert_eq!((status, &body["usage"]["completion_tokens"]), (200, &json!(10)), "{body}");
            before_each.push(n_served.load(Relaxed) - before);
        }
        is_over.store(true, Relaxed);
        before_each
    });
    println!("of the heavy one's requests, ended during each of the light one's: {before_each:?}");
    // In the ten steps of each, those that run may end, and be seen late. Behind the queue there would be forty more.
    let total: u64 = before_each.iter().sum();
    assert!(total <= 3 * RUNNING_MAX * N_ASKED as u64, "{before_each:?}");
    let page = page(&http);
    assert_eq!(count(&page, "lockstep:tenant_requests_total", "light"), N_ASKED as f64);
    assert_eq!(count(&page, "lockstep:tenant_generation_tokens_total", "light"), 10.0 * N_ASKED as f64);
    assert_eq!(count(&page, "lockstep:tenant_queue_seconds_count", "light"), N_ASKED as f64);
    assert_eq!(count(&page, "lockstep:tenant_refused_total", "light"), 0.0);
    assert!(count(&page, "lockstep:tenant_refused_total", "heavy") > 0.0);
}

#[test]
fn limits_are_told_and_change_with_their_file() {
    let folder = Folder::new("limits");
    let path = folder.write("keys", "alice:ka requests_per_minute=2 tokens_per_minute=1000\nbob:kb\n");
    let mut node = serve(&path);
    let http = node.http();
    node.until_ready(&http);
    let (status, headers, _) = ask(&http, "ka", 5);
    let header = |name: &str| headers.get(name).unwrap().to_str().unwrap().to_owned();
    assert_eq!((status, header("x-ratelimit-limit-requests")), (200, "2".into()));
    assert_eq!(
        (header("x-ratelimit-remaining-requests"), header("x-ratelimit-limit-tokens")),
        ("1".into(), "1000".into())
    );
    assert!(header("x-ratelimit-reset-requests").ends_with('s'), "{headers:?}");
    assert_eq!(ask(&http, "ka", 5).0, 200);
    let (status, headers, body) = ask(&http, "ka", 5);
    // On a machine that is slow enough one has come back by now.
    if status == 429 {
        assert_eq!(
            (&body["error"]["code"], &body["error"]["type"]),
            (&json!("rate_limit_exceeded"), &json!("requests"))
        );
        let retry_after: u64 = headers["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((1..=30).contains(&retry_after), "{headers:?}");
    }
    let (status, headers, _) = ask(&http, "kb", 5);
    assert!(status == 200 && !headers.contains_key("x-ratelimit-limit-requests"), "{headers:?}");

    // What cannot be meant changes nothing; what can does, and who has no key any more is told so.
    folder.write("keys", "alice:ka weight=none\n");
    node.until(&["the API keys stay what they were"]);
    assert_eq!(ask(&http, "kb", 5).0, 200);
    folder.write("keys", "alice:ka\ncarol:kc concurrent=3\n");
    node.until(&["the API keys were read again"]);
    let (status, headers, _) = ask(&http, "ka", 5);
    assert!(status == 200 && !headers.contains_key("x-ratelimit-limit-requests"), "{headers:?}");
    assert_eq!((ask(&http, "kb", 5).0, ask(&http, "kc", 5).0), (401, 200));
}
