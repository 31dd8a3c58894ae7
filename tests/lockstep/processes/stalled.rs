//! A server whose stderr is a full pipe without a reader: it continues to serve, and reports the dropped lines once the
//! pipe is read again. Has knowledge only of log lines.

use super::{DOORS, MODEL, pid};
use crate::common::node::{BINARY, PATIENCE};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Requests that log far more than the pipe holds.
const N_REQUESTS: usize = 300;
/// The most requests until lines are dropped.
const N_REQUESTS_MAX: usize = 5000;
/// Limit for one request, on a machine busy with other tests.
const REQUEST_MAX: Duration = Duration::from_secs(30);
/// Limit for a drain, and for the flush of what cannot be written.
const END_MAX: Duration = Duration::from_secs(20);
const DROP_MESSAGE: &str = "log lines were dropped";
const DROPPED: &str = "lockstep:log_dropped_total";

struct Stalled {
    child: Child,
    log: BufReader<ChildStderr>,
    http: String,
    agent: ureq::Agent,
}

impl Stalled {
    /// Reads its log up to its address, and no further.
    fn serve(more: &[&str]) -> Stalled {
        let mut command = Command::new(BINARY);
        command.args(["serve", MODEL, "--activations", "f32", "--log", "debug"]).args(DOORS).args(more);
        command.current_dir(env!("CARGO_MANIFEST_DIR"));
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("serves") {
            line.clear();
            assert!(log.read_line(&mut line).unwrap() > 0, "it ended before it served");
        }
        let http = line[line.find("http://").unwrap()..].split("/v1").next().unwrap().to_owned();
        let agent = ureq::Agent::config_builder().timeout_global(Some(REQUEST_MAX)).http_status_as_error(false).build();
        Stalled { child, log, http, agent: agent.into() }
    }

    fn get(&self, path: &str) -> (u16, String) {
        let mut reply = self.agent.get(format!("{}{path}", self.http)).call().unwrap();
        (reply.status().as_u16(), reply.body_mut().read_to_string().unwrap())
    }

    fn until_ready(&self) {
        let deadline = Instant::now() + PATIENCE;
        while self.get("/ready").0 != 200 {
            assert!(Instant::now() < deadline, "it is never ready");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn answer(&self, nth: usize) {
        let stream = nth % 2 == 1;
        let body = json!({"prompt": "hello", "max_tokens": 4, "seed": nth, "stream": stream});
        let request =
            self.agent.post(format!("{}/v1/completions", self.http)).header("content-type", "application/json");
        let mut reply = request.send(body.to_string()).unwrap_or_else(|why| panic!("request {nth}: {why}"));
        let text = reply.body_mut().read_to_string().unwrap_or_else(|why| panic!("request {nth}: {why}"));
        match stream {
            true => assert!(text.trim_end().ends_with("data: [DONE]"), "request {nth}: {text}"),
            false => {
                assert!(serde_json::from_str::<Value>(&text).unwrap()["choices"].is_array(), "request {nth}: {text}")
            }
        }
    }

    fn n_dropped(&self) -> u64 {
        let (_, page) = self.get("/metrics");
        let line = page.lines().find(|line| line.starts_with(DROPPED)).unwrap_or_else(|| panic!("no {DROPPED}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// It answers many requests while its log is not read, until lines are dropped.
    fn serves_on(&self) {
        self.until_ready();
        (0..N_REQUESTS).for_each(|nth| self.answer(nth));
        let rest = (N_REQUESTS..N_REQUESTS_MAX).find(|nth| {
            self.answer(*nth);
            self.n_dropped() > 0
        });
        assert!(rest.is_some(), "nothing is dropped");
        assert_eq!((self.get("/health").0, self.get("/ready").0), (200, 200));
    }

    fn terminate(&mut self) -> ExitStatus {
        kill_process(pid(self.child.id()), Signal::TERM).unwrap();
        let deadline = Instant::now() + END_MAX;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Stalled {
    fn drop(&mut self) {
        // It may have ended already.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

#[test]
fn unread_log_does_not_block_the_server() {
    let mut server = Stalled::serve(&[]);
    server.serves_on();
    let mut line = String::new();
    while !line.contains(DROP_MESSAGE) {
        line.clear();
        assert!(server.log.read_line(&mut line).unwrap() > 0, "it never logged the dropped lines");
    }
    let n: u64 = line.split(DROP_MESSAGE).next().unwrap().split_whitespace().next_back().unwrap().parse().unwrap();
    assert!(line.contains("WARN") && n > 0, "{line}");
    // From then on every line is written, to the last one.
    kill_process(pid(server.child.id()), Signal::TERM).unwrap();
    let rest: Vec<String> = (&mut server.log).lines().map_while(Result::ok).collect();
    assert!(rest.iter().any(|line| line.contains("draining")), "{rest:?}");
}

/// Workers in separate processes log through the server, which must continue to read their output.
#[test]
fn unread_log_does_not_block_workers_or_shutdown() {
    let mut server = Stalled::serve(&["--tp", "2"]);
    server.serves_on();
    assert!(server.terminate().success());
}
