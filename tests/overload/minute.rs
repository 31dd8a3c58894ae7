//! The real binary and the default model, with ten times more clients than there is room for, for a minute: its
//! throughput, how soon others are rejected, and the server's memory.

use crate::machine::{Held, load, machine, write_result};
use crate::node::{Node, PATIENCE};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

const RUNNING_MAX: usize = 8;
const WAITING_MAX: usize = 16;
const N_CLIENTS: usize = RUNNING_MAX + WAITING_MAX;
const N_TOKENS: u64 = 32;
const PEAK: Duration = Duration::from_secs(20);
const OVERLOAD: Duration = Duration::from_secs(60);
/// Pause of a client that ignores the server's advice for a retry.
const RUDE: Duration = Duration::from_millis(100);
/// The least throughput under ten times too many clients, in hundredths of the peak's tokens.
const KEPT_MIN: f64 = 90.0;
/// The limit for the 99th percentile of rejections, in milliseconds. In the opening all clients begin together and wait
/// for each other. It counts apart.
const REFUSED_MAX: f64 = 20.0;
const OPENING: Duration = Duration::from_secs(1);
/// The limit for the opening.
const OPENING_MAX: f64 = 200.0;
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The results of one run.
#[derive(Default)]
struct Seen {
    n_clients: usize,
    patience: Option<Duration>,
    took: Duration,
    n_answers: usize,
    /// Times until refusals, for those that were sent in the first second, and for the others.
    opening: Vec<Duration>,
    refusals: Vec<Duration>,
    held: Vec<Held>,
}

impl Seen {
    fn tokens_a_second(&self) -> f64 {
        self.n_answers as f64 * N_TOKENS as f64 / self.took.as_secs_f64()
    }

    fn row(&self) -> String {
        let (n_clients, seconds, n_answers) = (self.n_clients, self.took.as_secs_f64(), self.n_answers);
        let (rate, opening, times) = (self.tokens_a_second(), times(&self.opening), times(&self.refusals));
        let comes = self.patience.map_or("`retry-after-ms`".into(), |wait| format!("{} ms", wait.as_millis()));
        format!("| {n_clients} | {comes} | {seconds:.0} | {n_answers} | {rate:.1} | {opening} | {times} |\n")
    }
}

/// Returns the time that `hundredth` of a hundred rejections do not exceed, in milliseconds.
fn within(refusals: &[Duration], hundredth: usize) -> f64 {
    let at = (refusals.len() * hundredth / 100).min(refusals.len().saturating_sub(1));
    refusals.get(at).map_or(0.0, |took| took.as_secs_f64() * 1e3)
}

/// Returns the number of rejections and their times.
fn times(refusals: &[Duration]) -> String {
    let [half, most, all] = [50, 99, 100].map(|hundredth| within(refusals, hundredth));
    if refusals.is_empty() { "-".into() } else { format!("{}: {half:.1}, {most:.1}, {all:.1}", refusals.len()) }
}

pub fn run() {
    let (running, waiting) = (RUNNING_MAX.to_string(), WAITING_MAX.to_string());
    // A pool that is full before the minute begins, because its pages take memory at their first write.
    let pool = ["--context", "512", "--kv-memory", "32MiB"];
    let limits = ["--threads", "1", "--max-running", &running, "--max-waiting", &waiting];
    let doors = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    let mut server = Node::start(&[&["serve", "smollm2"], &limits[..], &pool, &doors].concat());
    let http = server.http();
    server.until_ready(&http);
    crowd(&http, &server, N_CLIENTS, PEAK / 2, None);
    let before = crowd(&http, &server, N_CLIENTS, PEAK, None);
    let overloaded = crowd(&http, &server, 10 * N_CLIENTS, OVERLOAD, None);
    let after = crowd(&http, &server, N_CLIENTS, PEAK, None);
    let rude = crowd(&http, &server, 10 * N_CLIENTS, OVERLOAD / 2, Some(RUDE));
    assert!(overloaded.refusals.len() > N_CLIENTS);
    write(&[before, overloaded, after, rude]);
}

/// Runs `n_clients` clients for `whole`. A rejected one retries after the server's advice, or after `patience`.
fn crowd(http: &str, server: &Node, n_clients: usize, whole: Duration, patience: Option<Duration>) -> Seen {
    let end = Arc::new(AtomicBool::new(false));
    let client = |i: usize| {
        let (http, end) = (http.to_owned(), end.clone());
        std::thread::spawn(move || run_client(&http, i, patience, &end))
    };
    let begun = Instant::now();
    let clients: Vec<_> = (0..n_clients).map(client).collect();
    let mut seen = Seen { n_clients, patience, ..Seen::default() };
    while begun.elapsed() < whole {
        std::thread::sleep(LOOK_EVERY.min(whole.saturating_sub(begun.elapsed())));
        seen.held.push(Held::by(server.pid()));
    }
    seen.took = begun.elapsed();
    end.store(true, Relaxed);
    for client in clients {
        let (n_answers, refusals) = client.join().unwrap();
        seen.n_answers += n_answers;
        let (opening, others): (Vec<_>, Vec<_>) = refusals.into_iter().partition(|(at, _)| *at < begun + OPENING);
        seen.opening.extend(opening.into_iter().map(|(_, took)| took));
        seen.refusals.extend(others.into_iter().map(|(_, took)| took));
    }
    seen.opening.sort();
    seen.refusals.sort();
    seen
}

/// A refused request: when it was sent, and the time until its refusal.
type Refused = (Instant, Duration);

/// The number of answers before the end, and the refusals.
fn run_client(http: &str, client: usize, patience: Option<Duration>, end: &AtomicBool) -> (usize, Vec<Refused>) {
    let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false).build();
    let agent = ureq::Agent::from(agent);
    let (mut n_answers, mut refusals) = (0, Vec::new());
    for i in 0.. {
        let prompt = format!("{client} asks {i} what comes of many questions");
        let body = json!({"prompt": prompt, "max_tokens": N_TOKENS, "ignore_eos": true, "temperature": 0.0});
        let begun = Instant::now();
        let request = agent.post(format!("{http}/v1/completions")).header("content-type", "application/json");
        let mut answer = request.send(body.to_string()).unwrap();
        let text = answer.body_mut().read_to_string().unwrap();
        let took = begun.elapsed();
        if end.load(Relaxed) {
            break;
        }
        let value: Value = serde_json::from_str(&text).unwrap();
        match answer.status().as_u16() {
            200 => {
                assert_eq!(value["usage"]["completion_tokens"], N_TOKENS, "{text}");
                n_answers += 1;
            }
            429 => {
                refusals.push((begun, took));
                let retry_after_millis = answer.headers()["retry-after-ms"].to_str().unwrap().parse().unwrap();
                std::thread::sleep(patience.unwrap_or(Duration::from_millis(retry_after_millis)));
            }
            status => panic!("{status}: {text}"),
        }
    }
    (n_answers, refusals)
}

fn write(seen: &[Seen; 4]) {
    let [before, overloaded, after, rude] = seen;
    let kept = |of: &Seen| 200.0 * of.tokens_a_second() / (before.tokens_a_second() + after.tokens_a_second());
    let held = &overloaded.held;
    let third = |i: usize| {
        let n = held.len() / 3;
        Held::median(&held[i * n..(i + 1) * n].iter().collect::<Vec<_>>())
    };
    let thirds = [0, 1, 2].map(third);
    let whole = |seen: &Seen| Held::median(&seen.held.iter().collect::<Vec<_>>()).rss_kib / 1024.0;
    let mib = thirds.clone().map(|held| format!("{:.1}", held.rss_kib / 1024.0)).join(", ");
    let files = thirds.clone().map(|held| format!("{:.0}", held.n_files)).join(", ");
    let rows = seen.iter().map(Seen::row).collect::<String>();
    let text = format!(
        "# Ten times too many clients\n\n\
        Made by `make overload` on {}, {} at its end. `lockstep serve smollm2 --threads 1 --max-running {RUNNING_MAX} \
        --max-waiting {WAITING_MAX}`, with requests for {N_TOKENS} tokens over HTTP: from as many clients as \
        there is room for, then from ten times as many for a minute, then from as many as before, and then from ten \
        times as many impatient ones. A refused client retries after `retry-after-ms`; an impatient one ignores that, \
        and retries after a fixed time. Clients and server share the machine. Behind the number of refusals are their \
        times in ms: median, p99, worst.\n\n\
        | clients | retry after | seconds | answers | tokens a second | refused in the first second | refused later |\n\
        |---:|---|---:|---:|---:|---|---|\n\
        {rows}\n\
        Required: at least {KEPT_MIN}% of the peak's tokens; it is {:.0}%, and {:.0}% with impatient clients. Refusals \
        within {REFUSED_MAX} ms at p99; it is {:.1} ms, and {:.1} ms with impatient clients. In the first second, when \
        all clients begin together, within {OPENING_MAX} ms; it is {:.1} ms, and {:.1} ms. Memory flat: the server's \
        RSS was {mib} MiB in the thirds of the minute, with {files} open files; before it {:.1} MiB, after it {:.1} \
        MiB, and {:.1} MiB with impatient clients. The pool of KV (32 MiB) had been written to before.\n\n\
        The test `a_hundred_thousand_cancels_leave_nothing` in `coordinator/tests/cancels.rs` checks that 100,000 \
        cancels leave nothing behind in a replica; the test of that name in `router/src/link` checks a router's \
        link.\n",
        machine(),
        load(),
        kept(overloaded),
        kept(rude),
        within(&overloaded.refusals, 99),
        within(&rude.refusals, 99),
        within(&overloaded.opening, 99),
        within(&rude.opening, 99),
        whole(before),
        whole(after),
        whole(rude),
    );
    println!("{text}");
    write_result("overload.md", &text);
    assert!(thirds[2].is_flat_after(&thirds[1]), "{thirds:?}");
    assert!(kept(overloaded) >= KEPT_MIN, "{:.0}% of the peak's tokens", kept(overloaded));
    for seen in [overloaded, rude] {
        for (refusals, most) in [(&seen.refusals, REFUSED_MAX), (&seen.opening, OPENING_MAX)] {
            let took = within(refusals, 99);
            assert!(took <= most, "refusals take {took:.1} ms at p99, and {most} are allowed");
        }
    }
}
