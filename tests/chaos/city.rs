//! Two routers before two coordinators, and a grid of two stages by two ranks for each: as processes that die and are
//! replaced. Knows command lines.

use crate::node::{Node, PATIENCE};
use crate::signal;
use rustix::process::Signal;
use std::net::TcpListener;
use std::time::{Duration, Instant};

pub const DOORS: [&str; 6] = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--threads", "1"];
const REPLICAS: [&str; 2] = ["east", "west"];
const RANKS: usize = 4;

pub struct Model {
    pub path: String,
    pub numerics: Vec<&'static str>,
    pub tokens_max: u32,
}

impl Model {
    pub fn tiny() -> Model {
        let numerics = vec!["--activations", "f32"];
        Model { path: "tests/reference/llama-f32-tied".into(), numerics, tokens_max: 400 }
    }

    pub fn smollm2() -> Model {
        Model { path: "smollm2".into(), numerics: vec![], tokens_max: 96 }
    }
}

/// Each role's processes, in the order in which they began.
pub struct City {
    model: Model,
    addresses: [String; 2],
    coordinators: [Node; 2],
    workers: [Vec<Node>; 2],
    routers: [(Node, String); 2],
    /// Stopped and replaced: woken when all is over, they may not disturb anybody.
    asleep: Vec<Node>,
}

impl City {
    pub fn start(model: Model) -> City {
        let addresses = [free_address(), free_address()];
        let coordinators = [0, 1].map(|i| coordinator(&model, &addresses[i], REPLICAS[i]));
        let workers = [0, 1].map(|i| (0..RANKS).map(|_| worker(&addresses[i])).collect());
        let routers = [0, 1].map(|_| router(&model, &addresses));
        let mut city = City { model, addresses, coordinators, workers, routers, asleep: Vec::new() };
        city.heal();
        city
    }

    pub fn doors(&self) -> Vec<String> {
        self.routers.iter().map(|(_, http)| http.clone()).collect()
    }

    pub fn n_workers(&self) -> usize {
        self.workers.iter().map(Vec::len).sum()
    }

    pub fn coordinator(&self, i: usize) -> u32 {
        self.coordinators[i].pid()
    }

    /// Everybody is there again, and both routers see both replicas.
    pub fn heal(&mut self) {
        for node in self.asleep.drain(..) {
            signal(node.pid(), Signal::CONT);
        }
        let doors = self.doors();
        let deadline = Instant::now() + PATIENCE;
        while !doors.iter().all(|http| both_ready(http)) {
            assert!(Instant::now() < deadline, "the city does not heal: {}", self.coordinators[0].log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    // -- workers

    /// Until its coordinator has found it out. Another takes its place.
    pub fn kill_worker(&mut self, n: usize) -> Duration {
        let (side, mut dead) = self.take_worker(n);
        let n_lost = self.n_lost(side);
        let begun = Instant::now();
        dead.kill();
        self.until_lost(side, n_lost);
        let found_out = begun.elapsed();
        self.workers[side].push(worker(&self.addresses[side]));
        found_out
    }

    pub fn stop_worker(&mut self, n: usize) -> Duration {
        let (side, stopped) = self.take_worker(n);
        let n_lost = self.n_lost(side);
        let begun = Instant::now();
        signal(stopped.pid(), Signal::STOP);
        self.until_lost(side, n_lost);
        let found_out = begun.elapsed();
        self.asleep.push(stopped);
        self.workers[side].push(worker(&self.addresses[side]));
        found_out
    }

    pub fn end_worker(&mut self, n: usize) {
        let (side, mut ending) = self.take_worker(n);
        signal(ending.pid(), Signal::TERM);
        self.workers[side].push(worker(&self.addresses[side]));
        assert!(ending.ended().success(), "{}", ending.log());
    }

    fn take_worker(&mut self, n: usize) -> (usize, Node) {
        let side = usize::from(n >= self.workers[0].len());
        let within = n - side * self.workers[0].len();
        (side, self.workers[side].remove(within))
    }

    fn n_lost(&self, side: usize) -> usize {
        self.coordinators[side].log().matches("a worker is lost").count()
    }

    fn until_lost(&self, side: usize, n_before: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.n_lost(side) == n_before {
            assert!(Instant::now() < deadline, "nobody is found out: {}", self.coordinators[side].log());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    // -- coordinators

    /// Another takes its place at the same address.
    pub fn kill_coordinator(&mut self, i: usize) {
        self.coordinators[i].kill();
        self.coordinators[i] = coordinator(&self.model, &self.addresses[i], REPLICAS[i]);
    }

    pub fn end_coordinator(&mut self, i: usize) {
        signal(self.coordinators[i].pid(), Signal::TERM);
        let status = self.coordinators[i].ended();
        assert!(status.success(), "{}", self.coordinators[i].log());
        self.coordinators[i] = coordinator(&self.model, &self.addresses[i], REPLICAS[i]);
    }

    // -- routers

    /// Another takes its place at the same door.
    pub fn kill_router(&mut self, i: usize) {
        self.routers[i].0.kill();
        self.reopen(i);
    }

    pub fn end_router(&mut self, i: usize) {
        signal(self.routers[i].0.pid(), Signal::TERM);
        let status = self.routers[i].0.ended();
        assert!(status.success(), "{}", self.routers[i].0.log());
        self.reopen(i);
    }

    fn reopen(&mut self, i: usize) {
        let door = self.routers[i].1.trim_start_matches("http://").to_owned();
        self.routers[i] = router_at(&self.model, &self.addresses, &door);
    }

    // -- all

    /// Every process is replaced, one after the other, each when the one before is back.
    pub fn roll(&mut self) {
        for _ in 0..self.n_workers() {
            // The eldest of each side in turn: the new ones stand behind.
            self.end_worker(0);
            self.heal();
            self.workers.swap(0, 1);
            self.addresses.swap(0, 1);
            self.coordinators.swap(0, 1);
        }
        for i in [0, 1] {
            self.end_coordinator(i);
            self.heal();
            self.end_router(i);
            self.heal();
        }
    }
}

/// Stops a process that nobody replaces, and lets it go on.
pub fn stop_and_go_on(pid: u32, after: Duration) {
    signal(pid, Signal::STOP);
    std::thread::sleep(after);
    signal(pid, Signal::CONT);
}

fn both_ready(http: &str) -> bool {
    let Ok(mut answer) = ureq::get(format!("{http}/cluster")).call() else { return false };
    let page = answer.body_mut().read_to_string().unwrap_or_default();
    let page: serde_json::Value = serde_json::from_str(&page).unwrap_or_default();
    let replicas = page["replicas"].as_array().map_or(&[][..], Vec::as_slice);
    replicas.len() == REPLICAS.len()
        && replicas.iter().all(|replica| {
            replica["phase"] == "ready" && replica["ranks"].as_array().is_some_and(|ranks| ranks.len() == RANKS)
        })
}

/// Free at this moment.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

fn coordinator(model: &Model, address: &str, replica: &str) -> Node {
    let grid = ["--tp", "2", "--pp", "2", "--kv-memory", "64MiB", "--listen", address, "--replica", replica];
    let mut node = Node::start(&[&["coordinator", &model.path], &model.numerics[..], &grid].concat());
    node.until(&["coordinating"]);
    node
}

fn worker(address: &str) -> Node {
    Node::start(&["worker", "--threads", "1", "--local-workers", "8", "--join", address])
}

fn router(model: &Model, addresses: &[String; 2]) -> (Node, String) {
    router_at(model, addresses, "127.0.0.1:0")
}

fn router_at(model: &Model, addresses: &[String; 2], door: &str) -> (Node, String) {
    let coordinators = ["--coordinator", &addresses[0], "--coordinator", &addresses[1]];
    let doors = ["--http", door, "--grpc", "127.0.0.1:0"];
    let mut node = Node::start(&[&["router", &model.path], &coordinators[..], &doors].concat());
    let http = node.http();
    node.until_ready(&http);
    (node, http)
}
