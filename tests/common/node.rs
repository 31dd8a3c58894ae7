//! The built binary as processes: started, read, used over HTTP, and killed. Has knowledge only of command lines and
//! log lines.
#![allow(dead_code, reason = "each test binary uses a part")]

use crate::ports::free_port;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Limit for any wait on a process, far beyond what a busy machine needs.
pub const PATIENCE: Duration = Duration::from_secs(120);
pub const BINARY: &str = env!("CARGO_BIN_EXE_lockstep");
const POLL: Duration = Duration::from_millis(20);

/// One process, killed when it is dropped.
pub struct Node {
    child: Child,
    log: Arc<Mutex<String>>,
    /// Ends when the process closes its output.
    reader: Option<JoinHandle<()>>,
}

impl Node {
    pub fn start(arguments: &[&str]) -> Node {
        Node::start_in(Path::new(env!("CARGO_MANIFEST_DIR")), arguments)
    }

    pub fn start_in(folder: &Path, arguments: &[&str]) -> Node {
        let mut command = Command::new(BINARY);
        command.args(arguments).current_dir(folder);
        Node::spawn(command)
    }

    pub fn spawn(mut command: Command) -> Node {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stderr = child.stderr.take().unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let shared_log = log.clone();
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut log = shared_log.lock().unwrap();
                log.push_str(&line);
                log.push('\n');
            }
        });
        Node { child, log, reader: Some(reader) }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// The number of log lines so far: a position in its log.
    pub fn log_len(&self) -> usize {
        self.log.lock().unwrap().len()
    }

    /// The first line from `place` on that has all the words.
    pub fn line_since(&self, place: usize, words: &[&str]) -> Option<String> {
        self.lines_since(place, words, 1).pop()
    }

    /// The first lines from `place` on that have all the words, `n_max` at most.
    pub fn lines_since(&self, place: usize, words: &[&str], n_max: usize) -> Vec<String> {
        let log = self.log.lock().unwrap();
        let lines = log[place..].lines().filter(|line| words.iter().all(|word| line.contains(word)));
        lines.take(n_max).map(str::to_owned).collect()
    }

    /// Waits for a line from `place` on that has all the words.
    pub fn until_since(&self, place: usize, words: &[&str]) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(line) = self.line_since(place, words) {
                return line;
            }
            assert!(Instant::now() < deadline, "it never logged {words:?}:\n{}", self.log());
            std::thread::sleep(POLL);
        }
    }

    /// Waits for the first line that has all the words; panics if there is none in time.
    pub fn until(&mut self, words: &[&str]) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let log = self.log();
            if let Some(line) = log.lines().find(|line| words.iter().all(|word| line.contains(word))) {
                return line.to_owned();
            }
            if let Some(status) = self.child.try_wait().unwrap() {
                // Its last lines may still be unread.
                let Some(reader) = self.reader.take() else {
                    panic!("it ended ({status}) and never logged {words:?}:\n{log}");
                };
                reader.join().unwrap();
                continue;
            }
            assert!(Instant::now() < deadline, "it never logged {words:?}:\n{log}");
            std::thread::sleep(POLL);
        }
    }

    /// Waits until the process ends by itself; returns its exit status.
    pub fn ended(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end:\n{}", self.log());
            std::thread::sleep(POLL);
        }
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The process ids of the workers that it has started, from its log.
    pub fn workers(&self) -> Vec<u32> {
        let log = self.log();
        let begun = log.lines().filter(|line| line.contains("a worker process starts"));
        begun.map(|line| field(line, "pid").parse().unwrap()).collect()
    }

    /// Its HTTP address, once it listens.
    pub fn http(&mut self) -> String {
        // These words are those of earlier builds, too.
        let line = self.until(&["http://", "/v1 and grpc://"]);
        let start = line.find("http://").unwrap();
        line[start..].split("/v1").next().unwrap().to_owned()
    }

    /// Its answers to a few prompts, as soon as it is ready.
    pub fn answers(&mut self) -> Vec<Value> {
        let http = self.http();
        self.until_ready(&http);
        ["hello", "a b c d", "the grid is the same"].iter().map(|prompt| answer(&http, prompt)).collect()
    }

    pub fn until_ready(&mut self, http: &str) {
        let deadline = Instant::now() + PATIENCE;
        while ureq::get(format!("{http}/ready")).call().is_err() {
            assert!(Instant::now() < deadline, "it is never ready:\n{}", self.log());
            assert!(self.child.try_wait().unwrap().is_none(), "it ended:\n{}", self.log());
            std::thread::sleep(POLL);
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // It may have ended already.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Returns a free address of this host, from which no connection can come either.
pub fn free_address() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], free_port("127.0.0.1", 10_000..24_000)))
}

/// The value of `name=` in a log line.
pub fn field<'a>(line: &'a str, name: &str) -> &'a str {
    let start = line.find(&format!("{name}=")).unwrap_or_else(|| panic!("no {name} in {line}")) + name.len() + 1;
    line[start..].split(' ').next().unwrap().trim_matches('"')
}

/// Returns text and logprobs, which show more than text alone.
pub fn answer(http: &str, prompt: &str) -> Value {
    complete(http, &json!({"prompt": prompt, "max_tokens": 12, "seed": 7, "temperature": 0.8, "logprobs": 2}))
}

/// The choices of a completion.
pub fn complete(http: &str, body: &Value) -> Value {
    let text = post(http, body).body_mut().read_to_string().unwrap();
    let value: Value = serde_json::from_str(&text).unwrap();
    assert!(value["choices"].is_array(), "{text}");
    value["choices"].clone()
}

/// The response with its head; the body may still be on the way.
pub fn post(http: &str, body: &Value) -> ureq::http::Response<ureq::Body> {
    let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false).build();
    let request = ureq::Agent::from(agent).post(format!("{http}/v1/completions"));
    request.header("content-type", "application/json").send(body.to_string()).unwrap()
}

/// The fields of `/proc/PID/stat`, from the state on.
fn stat(pid: u32) -> Vec<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// Whether the process runs: one that has ended may still wait for its parent.
pub fn is_alive(pid: u32) -> bool {
    stat(pid).first().is_some_and(|state| state != "Z" && state != "X")
}

/// Processor time so far, in the system's ticks.
pub fn cpu_ticks(pid: u32) -> u64 {
    let stat = stat(pid);
    // utime and stime.
    stat[11].parse::<u64>().unwrap() + stat[12].parse::<u64>().unwrap()
}

/// A folder for one test, removed at the end.
pub struct Folder(pub PathBuf);

impl Folder {
    /// A counter distinguishes folders of the same name from two tests of one program.
    pub fn new(name: &str) -> Folder {
        static N: AtomicUsize = AtomicUsize::new(0);
        let n = N.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("lockstep-{name}-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    pub fn write(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A leftover lies in the temporary folder.
        let _left = std::fs::remove_dir_all(&self.0);
    }
}
