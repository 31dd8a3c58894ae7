//! The cluster under test: two routers before two replicas, each a coordinator and a grid of two stages by two ranks,
//! found through an etcd of three members; all as processes that die and are replaced. Where the system permits it, one
//! worker and one whole replica are on hosts of their own. Knows command lines and log lines.

use crate::etcd::Etcd;
use crate::node::{BINARY, Folder, Node, PATIENCE, field, free_address};
use crate::star::Star;
use crate::{Dice, signal};
use rustix::process::Signal;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use wire::JoinToken;

pub const DOORS: [&str; 6] = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--threads", "1"];
/// A router's flags for chats with thoughts and calls.
pub const CHATS: [&str; 2] = ["--chat-template", "tests/chaos/chat.jinja"];
pub const REPLICAS: [&str; 2] = ["east", "west"];
const N_MEMBERS: usize = 3;
/// The host of the whole western replica, and that of one eastern worker.
const WEST: usize = 0;
const APART: usize = 1;
const LEASE_SECONDS: &str = "2";
const LOST: &str = "a worker is lost";
const NO_COORDINATOR: &str = "no coordinator";
/// A router's log lines about a coordinator that it misses.
const MISSED: [&str; 2] = [NO_COORDINATOR, SUSPECTED];
const SUSPECTED: &str = "suspecting it";
/// A router's log lines about requests that it moves to the other replica.
const MOVES: [&str; 3] = [NO_COORDINATOR, SUSPECTED, "a replica has lost ranks"];
const DRAINS: &str = "waiting for the running requests";
/// Log fields for a silent process, which may only be late: of workers, and of coordinators, which are suspected first.
const WORKER_SILENT: &str = "kind=\"silent\"";
const COORDINATOR_SILENT: [&str; 2] = [SUSPECTED, "the coordinator is silent"];
/// How long a cut-off process stays cut off after it was detected, and how long a stopped one sleeps.
const AWAY: Duration = Duration::from_millis(500);

pub struct Model {
    pub name: &'static str,
    pub path: String,
    pub numerics: Vec<&'static str>,
    pub tokens_max: u32,
    /// Ranks by stage, and stages.
    pub grid: [usize; 2],
}

/// The program that starts a role, and flags that all roles accept.
#[derive(Clone)]
pub struct Build {
    pub program: String,
    pub flags: Vec<&'static str>,
}

impl Build {
    pub fn this() -> Build {
        Build { program: BINARY.into(), flags: vec![] }
    }
}

impl Model {
    pub fn tiny() -> Model {
        let numerics = vec!["--activations", "f32"];
        Model { name: "tiny", path: "tests/reference/llama-f32-tied".into(), numerics, tokens_max: 300, grid: [2, 2] }
    }

    /// Layers with a recurrent state between those with attention, and tokens that are guessed ahead.
    pub fn hybrid() -> Model {
        let numerics = vec!["--activations", "f32", "--speculation", "ngram"];
        Model { name: "hybrid", path: "tests/reference/qwen3-next".into(), numerics, tokens_max: 300, grid: [2, 2] }
    }

    pub fn smollm2() -> Model {
        Model { name: "smollm2", path: "smollm2".into(), numerics: vec![], tokens_max: 64, grid: [2, 2] }
    }

    fn n_ranks(&self) -> usize {
        self.grid[0] * self.grid[1]
    }
}

struct Worker {
    node: Node,
    host: Option<usize>,
}

/// One replica's processes; workers in the order of their starts.
struct Side {
    name: &'static str,
    address: String,
    host: Option<usize>,
    coordinator: Node,
    workers: Vec<Worker>,
}

/// A worker: its replica, and its index there.
pub type Which = (usize, usize);

pub struct City {
    pub model: Model,
    /// The build that starts processes; running ones keep theirs.
    pub build: Build,
    star: Option<Star>,
    token: String,
    etcd: Etcd,
    dead_member: Option<usize>,
    sides: [Side; 2],
    routers: [(Node, String); 2],
    /// Workers that were stopped, and that are not needed again.
    woken: Vec<Node>,
    /// Set while the youngest eastern worker replaces one that was cut off: the log position of its coordinator then.
    stand_in: Option<usize>,
    /// The number of each role's processes that are never hit: the first router, the first coordinator, each replica's
    /// eldest workers.
    n_spared: usize,
    /// Counts from the logs of dead processes.
    past: Tally,
    n_alarms_due: usize,
    _folder: Folder,
}

impl City {
    /// Starts the cluster around an etcd. Hosts whose links can be cut only exist where the system permits them.
    pub fn start(model: Model, star: Option<Star>, n_spared: usize) -> City {
        City::of(Build::this(), model, star, n_spared)
    }

    pub fn of(build: Build, model: Model, star: Option<Star>, n_spared: usize) -> City {
        let folder = Folder::new("chaos");
        let token = folder.write("token", JoinToken::random().unwrap().expose());
        let near = |host| star.as_ref().map_or("127.0.0.1".into(), |star: &Star| star.near(host));
        let far = |host| star.as_ref().map_or("127.0.0.1".into(), |star: &Star| star.far(host));
        let etcd = Etcd::start_at(&near(WEST), N_MEMBERS, None);
        let west = star.is_some().then_some(WEST);
        let roles = Roles { build: &build, model: &model, star: star.as_ref(), token: &token, store: store(&etcd) };
        let sides = [(REPLICAS[0], near(APART), None), (REPLICAS[1], far(WEST), west)].map(|(name, ip, host)| {
            let address = format!("{ip}:{}", free_address().port());
            let coordinator = roles.coordinator(name, &address, host);
            Side { name, address, host, coordinator, workers: Vec::new() }
        });
        let routers = [0, 1].map(|_| roles.router("127.0.0.1:0"));
        let mut city = City {
            model,
            build,
            star,
            token,
            etcd,
            dead_member: None,
            sides,
            routers,
            woken: Vec::new(),
            stand_in: None,
            n_spared,
            past: Tally::default(),
            n_alarms_due: 0,
            _folder: folder,
        };
        city.settle();
        city
    }

    fn settle(&mut self) {
        let n_ranks = self.model.n_ranks();
        for (side, n) in [0, 1].into_iter().flat_map(|side| (0..n_ranks).map(move |n| (side, n))) {
            let is_apart = side == 0 && n == n_ranks - 1 && self.star.is_some();
            let host = if is_apart { Some(APART) } else { self.sides[side].host };
            self.add_worker(side, host);
        }
        self.heal();
        for i in [0, 1] {
            let http = self.routers[i].1.clone();
            self.routers[i].0.until_ready(&http);
        }
    }

    pub fn doors(&self) -> Vec<String> {
        self.routers.iter().map(|(_, http)| http.clone()).collect()
    }

    /// Whether links can be cut here.
    pub fn has_hosts(&self) -> bool {
        self.star.is_some()
    }

    // -- the processes that are hit

    /// Returns a random worker of a replica that has streams.
    pub fn any_worker(&self, dice: &mut Dice) -> Which {
        (self.any_busy(0, dice), self.n_spared + dice.below(self.model.n_ranks() - self.n_spared))
    }

    /// Returns the index of a random coordinator that has streams.
    pub fn any_coordinator(&self, dice: &mut Dice) -> usize {
        self.any_busy(self.n_spared, dice)
    }

    /// Returns the index of a random router.
    pub fn any_router(&self, dice: &mut Dice) -> usize {
        self.n_spared + dice.below(2 - self.n_spared)
    }

    /// Returns a random replica with streams. Routers send requests to the replica whose cache has their beginnings,
    /// which may be one for all. Without streams it may be any replica from `first` on.
    fn any_busy(&self, first: usize, dice: &mut Dice) -> usize {
        let busy: Vec<usize> = (first..self.sides.len()).filter(|side| self.is_busy(*side)).collect();
        if busy.is_empty() { first + dice.below(self.sides.len() - first) } else { busy[dice.below(busy.len())] }
    }

    /// Whether a router lists running requests there.
    fn is_busy(&self, side: usize) -> bool {
        let runs = |replica: &serde_json::Value| {
            replica["replica"] == self.sides[side].name && replica["requests"]["running"].as_u64() > Some(0)
        };
        cluster(&self.routers[0].1)["replicas"].as_array().is_some_and(|replicas| replicas.iter().any(runs))
    }

    /// The processes that are never hit, and etcd's members, by name.
    pub fn spared(&self) -> Vec<(String, u32)> {
        let mut all = vec![
            ("router".into(), self.routers[0].0.pid()),
            ("coordinator east".into(), self.sides[0].coordinator.pid()),
        ];
        all.extend(self.sides.iter().map(|side| (format!("worker {}", side.name), side.workers[0].node.pid())));
        all
    }

    /// All of our processes at this moment.
    pub fn pids(&self) -> Vec<u32> {
        let of_side =
            |side: &Side| side.workers.iter().map(|of| of.node.pid()).chain([side.coordinator.pid()]).collect();
        let sides = self.sides.iter().flat_map(|side| -> Vec<u32> { of_side(side) });
        sides.chain(self.routers.iter().map(|(node, _)| node.pid())).collect()
    }

    // -- the logs

    pub fn tally(&self) -> Tally {
        let coordinators = self.sides.iter().map(|side| &side.coordinator);
        coordinators.chain(self.routers.iter().map(|(node, _)| node)).map(Tally::of).fold(self.past, Tally::plus)
    }

    /// The last alarm of each running process.
    pub fn last_alarms(&self) -> String {
        let coordinators = self.sides.iter().map(|side| &side.coordinator);
        let all = coordinators.chain(self.routers.iter().map(|(node, _)| node));
        let words = [WORKER_SILENT, COORDINATOR_SILENT[0], COORDINATOR_SILENT[1]];
        let last = |node: &Node, words| node.lines_since(0, &[words], usize::MAX).pop();
        let lines = all.flat_map(|node| words.map(|words| last(node, words))).flatten();
        lines.collect::<Vec<_>>().join("\n")
    }

    /// The number of alarms that faults should have raised.
    pub fn n_alarms_due(&self) -> usize {
        self.n_alarms_due
    }

    // -- workers

    /// Kills a worker; returns when its coordinator has detected it. Another worker takes its place.
    pub fn kill_worker(&mut self, which: Which) -> Duration {
        let mut dead = self.take_worker(which);
        let place = self.sides[which.0].coordinator.log_len();
        let begun = time_of_day();
        dead.node.kill();
        let found_out = self.found_out(which.0, place, begun);
        self.add_worker(which.0, dead.host);
        found_out
    }

    /// Stops a worker until another one has its place, and then continues it.
    pub fn stop_worker(&mut self, which: Which) -> Duration {
        let stopped = self.take_worker(which);
        let place = self.sides[which.0].coordinator.log_len();
        self.n_alarms_due += 1;
        let begun = time_of_day();
        signal(stopped.node.pid(), Signal::STOP);
        let found_out = self.found_out(which.0, place, begun);
        self.add_worker(which.0, stopped.host);
        self.sides[which.0].coordinator.until_since(place, &["the replica is ready"]);
        signal(stopped.node.pid(), Signal::CONT);
        self.woken.push(stopped.node);
        found_out
    }

    pub fn end_worker(&mut self, which: Which) {
        let mut ending = self.take_worker(which);
        signal(ending.node.pid(), Signal::TERM);
        self.add_worker(which.0, ending.host);
        assert!(ending.node.ended().success(), "{}", ending.node.log());
    }

    /// Cuts the link to the worker's host. Another worker takes its place before the link is back.
    pub fn cut_worker(&mut self) -> Duration {
        let place = self.sides[0].coordinator.log_len();
        self.n_alarms_due += 1;
        let begun = time_of_day();
        self.set_link(APART, "down");
        let found_out = self.found_out(0, place, begun);
        self.add_worker(0, None);
        self.stand_in = Some(place);
        std::thread::sleep(AWAY);
        self.set_link(APART, "up");
        found_out
    }

    /// Kills two workers of each replica, and then starts others.
    pub fn kill_four_workers(&mut self) -> Duration {
        let places = [0, 1].map(|side| self.sides[side].coordinator.log_len());
        let mut dead: Vec<(usize, Worker)> =
            [0, 1, 0, 1].map(|side| (side, self.take_worker((side, self.n_spared)))).into();
        let begun = time_of_day();
        dead.iter_mut().for_each(|(_, worker)| worker.node.kill());
        let found_out = [0, 1].map(|side| self.found_out(side, places[side], begun));
        dead.iter().for_each(|(side, worker)| self.add_worker(*side, worker.host));
        found_out.into_iter().max().unwrap_or_default()
    }

    /// Kills a worker; another one while the replica is placed anew; and the coordinator while it is placed once more.
    pub fn kill_in_recovery(&mut self, side: usize) -> Duration {
        for _ in 0..2 {
            let mut dead = self.take_worker((side, self.n_spared));
            let place = self.sides[side].coordinator.log_len();
            dead.node.kill();
            self.add_worker(side, dead.host);
            self.sides[side].coordinator.until_since(place, &["placing the replica"]);
        }
        self.kill_coordinator(side)
    }

    /// Returns the first `n` workers that may be hit.
    pub fn first_workers(&self, n: usize) -> Vec<Which> {
        // Replacements are at the end of the list.
        vec![(0, self.n_spared); n]
    }

    fn take_worker(&mut self, (side, n): Which) -> Worker {
        self.sides[side].workers.remove(n)
    }

    fn add_worker(&mut self, side: usize, host: Option<usize>) {
        let node = self.roles().worker(&self.sides[side].address, host, self.sides[side].host);
        self.sides[side].workers.push(Worker { node, host });
    }

    fn found_out(&self, side: usize, place: usize, begun: Duration) -> Duration {
        since(begun, &self.sides[side].coordinator.until_since(place, &[LOST]))
    }

    // -- coordinators

    /// Kills a coordinator; returns when both routers have detected it. Another takes its place at the same address.
    pub fn kill_coordinator(&mut self, i: usize) -> Duration {
        let (places, begun) = (self.places(), time_of_day());
        self.sides[i].coordinator.kill();
        let found_out = self.missed(places, begun);
        self.replace_coordinator(i);
        found_out
    }

    pub fn stop_coordinator(&mut self, i: usize) -> Duration {
        self.n_alarms_due += self.routers.len();
        let (places, begun) = (self.places(), time_of_day());
        signal(self.sides[i].coordinator.pid(), Signal::STOP);
        let found_out = self.missed(places, begun);
        std::thread::sleep(AWAY);
        signal(self.sides[i].coordinator.pid(), Signal::CONT);
        found_out
    }

    /// Cuts the link to the host of the whole replica.
    pub fn cut_replica(&mut self) -> Duration {
        self.n_alarms_due += self.routers.len();
        let (places, begun) = (self.places(), time_of_day());
        self.set_link(WEST, "down");
        let found_out = self.missed(places, begun);
        std::thread::sleep(AWAY);
        self.set_link(WEST, "up");
        found_out
    }

    pub fn end_coordinator(&mut self, i: usize) {
        signal(self.sides[i].coordinator.pid(), Signal::TERM);
        let status = self.sides[i].coordinator.ended();
        assert!(status.success(), "{}", self.sides[i].coordinator.log());
        self.replace_coordinator(i);
    }

    pub fn kill_all_coordinators(&mut self) {
        self.sides.iter_mut().for_each(|side| side.coordinator.kill());
        [0, 1].into_iter().for_each(|i| self.replace_coordinator(i));
    }

    fn replace_coordinator(&mut self, i: usize) {
        let side = &self.sides[i];
        let next = self.roles().coordinator(side.name, &side.address, side.host);
        self.past = self.past.plus(Tally::of(&self.sides[i].coordinator));
        self.sides[i].coordinator = next;
    }

    /// Returns the time until both routers have detected the loss of a coordinator.
    fn missed(&self, places: [usize; 2], begun: Duration) -> Duration {
        let deadline = Instant::now() + PATIENCE;
        let first =
            |i: usize| MISSED.iter().filter_map(|words| self.routers[i].0.line_since(places[i], &[words])).min();
        loop {
            if let [Some(one), Some(other)] = [0, 1].map(first) {
                return since(begun, &one).max(since(begun, &other));
            }
            assert!(Instant::now() < deadline, "no loss is logged: {}", self.routers[0].0.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn places(&self) -> [usize; 2] {
        [0, 1].map(|i| self.routers[i].0.log_len())
    }

    /// Scales to another grid and back, and waits for `lockstep scale`.
    pub fn scale(&mut self, i: usize) {
        for grid in [["--tp", "1", "--pp", "2"], ["--tp", "2", "--pp", "1"], ["--tp", "2", "--pp", "2"]] {
            let mut command = Command::new(BINARY);
            command.args(["scale", "--coordinator", &self.sides[i].address, "--token-file", &self.token]).args(grid);
            let done = command.output().unwrap();
            assert!(done.status.success(), "{grid:?}: {}", String::from_utf8_lossy(&done.stderr));
        }
    }

    // -- routers

    /// Kills a router. Another takes its place at the same address.
    pub fn kill_router(&mut self, i: usize) {
        self.routers[i].0.kill();
        self.reopen(i);
    }

    pub fn kill_all_routers(&mut self) {
        self.routers.iter_mut().for_each(|(node, _)| node.kill());
        [0, 1].into_iter().for_each(|i| self.reopen(i));
    }

    pub fn stop_router(&mut self, i: usize) {
        signal(self.routers[i].0.pid(), Signal::STOP);
        std::thread::sleep(AWAY);
        signal(self.routers[i].0.pid(), Signal::CONT);
    }

    pub fn end_router(&mut self, i: usize) {
        signal(self.routers[i].0.pid(), Signal::TERM);
        let status = self.routers[i].0.ended();
        assert!(status.success(), "{}", self.routers[i].0.log());
        self.reopen(i);
    }

    fn reopen(&mut self, i: usize) {
        self.past = self.past.plus(Tally::of(&self.routers[i].0));
        let door = self.routers[i].1.trim_start_matches("http://").to_owned();
        self.routers[i] = self.roles().router(&door);
        let (node, http) = &mut self.routers[i];
        node.until_ready(http);
    }

    // -- etcd

    /// Kills the leader like a power failure; it returns when the cluster heals.
    pub fn kill_etcds_leader(&mut self) {
        let leader = self.until_etcd_has_a_leader();
        self.etcd.kill(leader);
        self.dead_member = Some(leader);
    }

    /// Waits for an election, and returns the member that won it.
    pub fn until_etcd_has_a_leader(&self) -> usize {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(leader) = (0..N_MEMBERS).find(|i| is_leader(&self.etcd.endpoint(*i))) {
                return leader;
            }
            assert!(Instant::now() < deadline, "etcd has no leader: {}", self.etcd.log(0));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Kills all members, and starts an empty etcd in their place. Returns when both coordinators are in it.
    pub fn wipe_etcd(&mut self) {
        let places = [0, 1].map(|side| self.sides[side].coordinator.log_len());
        (0..N_MEMBERS).for_each(|i| self.etcd.kill(i));
        (0..N_MEMBERS).for_each(|i| self.etcd.start_empty(i));
        for (side, place) in self.sides.iter().zip(places) {
            side.coordinator.until_since(place, &["etcd had lost the claim: it is written again"]);
        }
    }

    // -- several roles

    /// Kills one process of each role, before the loss of any is detected.
    pub fn kill_three_roles(&mut self, (side, n): Which, router: usize) {
        // The other replica's coordinator, so that every stream is hit, unless that one is spared.
        let coordinator = (1 - side).max(self.n_spared);
        let mut dead = self.take_worker((side, n));
        dead.node.kill();
        self.sides[coordinator].coordinator.kill();
        self.routers[router].0.kill();
        self.add_worker(side, dead.host);
        self.replace_coordinator(coordinator);
        self.reopen(router);
    }

    /// Replaces every process, one after another, each when the one before it is back.
    pub fn roll(&mut self) {
        self.roll_with(&mut |_| ());
    }

    /// Does the same, and calls `before` with a process's name before its replacement.
    pub fn roll_with(&mut self, before: &mut dyn FnMut(&str)) {
        let n_ranks = self.model.n_ranks();
        for (side, _) in [0, 1].into_iter().flat_map(|side| (0..n_ranks).map(move |n| (side, n))) {
            before("worker");
            // The eldest worker; new ones are at the end of the list.
            let place = self.sides[side].coordinator.log_len();
            self.end_worker((side, 0));
            self.sides[side].coordinator.until_since(place, &["the replica is ready"]);
        }
        for i in [0, 1] {
            before("coordinator");
            self.end_coordinator(i);
            self.heal();
            before("router");
            self.end_router(i);
            self.heal();
        }
    }

    /// Returns the first router's entry for each replica.
    pub fn replicas(&self) -> Vec<serde_json::Value> {
        cluster(&self.routers[0].1)["replicas"].as_array().cloned().unwrap_or_default()
    }

    /// Waits until every process is back, and both routers see both replicas.
    pub fn heal(&mut self) {
        if let Some(i) = self.dead_member.take() {
            self.etcd.start_again(i);
        }
        // They are spares by now, so their loss has no effect.
        self.woken.clear();
        if let Some(place) = self.stand_in.take() {
            self.relieve(place);
        }
        let doors = self.doors();
        let deadline = Instant::now() + PATIENCE;
        while !doors.iter().all(|http| both_ready(http, self.model.n_ranks())) {
            let logs = || self.sides.iter().map(|side| side.coordinator.log()).collect::<Vec<_>>().join("\n");
            assert!(Instant::now() < deadline, "the cluster does not recover: {}", logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Lets the cut-off worker, which is a spare now, take the place of its replacement.
    fn relieve(&mut self, place: usize) {
        let east = &mut self.sides[0];
        let cut_off = east.workers.iter().find(|of| of.host == Some(APART)).expect("one worker is cut off");
        east.coordinator.until_since(place, &["a worker joins", &format!(" pid={} ", cut_off.node.pid())]);
        let place = east.coordinator.log_len();
        let mut stand_in = east.workers.pop().expect("the last worker");
        signal(stand_in.node.pid(), Signal::TERM);
        assert!(stand_in.node.ended().success(), "{}", stand_in.node.log());
        east.coordinator.until_since(place, &["the replica is ready"]);
    }

    fn set_link(&self, host: usize, state: &str) {
        self.star.as_ref().expect("only called with hosts").set_link(host, state);
    }

    fn roles(&self) -> Roles<'_> {
        let (build, model, star) = (&self.build, &self.model, self.star.as_ref());
        Roles { build, model, star, token: &self.token, store: store(&self.etcd) }
    }
}

/// The command lines of processes.
struct Roles<'a> {
    build: &'a Build,
    model: &'a Model,
    star: Option<&'a Star>,
    token: &'a str,
    store: [String; 4],
}

impl Roles<'_> {
    /// Returns as soon as the coordinator has its claim.
    fn coordinator(&self, replica: &str, address: &str, host: Option<usize>) -> Node {
        let [tp, pp] = self.model.grid.map(|n| n.to_string());
        let grid = ["--tp", &tp, "--pp", &pp, "--kv-memory", "128MiB", "--listen", address, "--replica", replica];
        let mut command = self.at(host, &["coordinator", &self.model.path]);
        command.args(&self.model.numerics).args(grid).args(&self.store);
        let mut node = Node::spawn(command);
        node.until(&["coordinating"]);
        node
    }

    fn worker(&self, address: &str, host: Option<usize>, coordinators: Option<usize>) -> Node {
        let mut command = self.at(host, &["worker", "--threads", "1", "--local-workers", "8", "--join", address]);
        if host != coordinators {
            // These hosts have one kernel, so the workers could share memory.
            command.args(["--wire", "tcp"]);
        }
        Node::spawn(command)
    }

    fn router(&self, door: &str) -> (Node, String) {
        let mut command = self.at(None, &["router", &self.model.path, "--http", door, "--grpc", "127.0.0.1:0"]);
        command.args(&self.store);
        // So both replicas have streams, and a fault of either one hits some.
        command.args(["--policy", "round-robin"]).args(CHATS);
        let mut node = Node::spawn(command);
        let http = node.http();
        (node, http)
    }

    fn at(&self, host: Option<usize>, arguments: &[&str]) -> Command {
        let mut command = match (host, self.star) {
            (Some(host), Some(star)) => star.command_at(host, &self.build.program),
            _ => Command::new(&self.build.program),
        };
        command
            .args(arguments)
            .args(&self.build.flags)
            .args(["--token-file", self.token])
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        command
    }
}

/// The flags for the store.
fn store(etcd: &Etcd) -> [String; 4] {
    ["--etcd-endpoints".into(), etcd.endpoints().join(","), "--etcd-lease-seconds".into(), LEASE_SECONDS.into()]
}

fn is_leader(endpoint: &str) -> bool {
    let Ok(mut answer) = ureq::get(format!("{endpoint}/metrics")).call() else { return false };
    let page = answer.body_mut().read_to_string().unwrap_or_default();
    page.lines().any(|line| line == "etcd_server_is_leader 1")
}

/// Returns a router's page about the cluster, or null if it does not answer.
fn cluster(http: &str) -> serde_json::Value {
    let Ok(mut answer) = ureq::get(format!("{http}/cluster")).call() else { return serde_json::Value::Null };
    let page = answer.body_mut().read_to_string().unwrap_or_default();
    serde_json::from_str(&page).unwrap_or_default()
}

fn both_ready(http: &str, n_ranks: usize) -> bool {
    let page = cluster(http);
    let replicas = page["replicas"].as_array().map_or(&[][..], Vec::as_slice);
    let is_ready = |replica: &serde_json::Value| {
        replica["phase"] == "ready" && replica["ranks"].as_array().is_some_and(|ranks| ranks.len() == n_ranks)
    };
    page["store"]["connected"] == true && replicas.len() == REPLICAS.len() && replicas.iter().all(is_ready)
}

/// Counts from the processes' logs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    /// Alarms raised for silence, which would be raised for a late process too.
    pub n_alarms: usize,
    /// Positions that replicas recomputed, by their own count.
    pub n_replayed: u64,
    /// Sequences that lost their coordinator or ranks of their replica, by the routers' count.
    pub n_moved: u64,
    /// Requests that ran when their process began to drain.
    pub n_drained: u64,
}

impl Tally {
    fn of(node: &Node) -> Tally {
        let lines = |words: &str| node.lines_since(0, &[words], usize::MAX);
        let sum = |words: &str, name: &str| lines(words).iter().map(|line| number(line, name)).sum();
        Tally {
            n_alarms: lines(WORKER_SILENT).len()
                + COORDINATOR_SILENT.map(|words| lines(words).len()).into_iter().max().unwrap_or(0),
            n_replayed: sum("the replica serves again", "tokens_replayed"),
            // Streams move as soon as their coordinator is suspected, if another replica can continue them.
            n_moved: MOVES.map(|words| sum(words, "requests")).into_iter().sum(),
            n_drained: sum(DRAINS, "requests"),
        }
    }

    fn plus(self, more: Tally) -> Tally {
        Tally {
            n_alarms: self.n_alarms + more.n_alarms,
            n_replayed: self.n_replayed + more.n_replayed,
            n_moved: self.n_moved + more.n_moved,
            n_drained: self.n_drained + more.n_drained,
        }
    }
}

fn number(line: &str, name: &str) -> u64 {
    field(line, name).parse().unwrap()
}

fn time_of_day() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    Duration::new(now.as_secs() % 86400, now.subsec_nanos())
}

/// Time until a log line was written, by the line's own timestamp.
fn since(begun: Duration, line: &str) -> Duration {
    let mut parts = line[11..26].split(':').map(|part| part.parse::<f64>().unwrap());
    let written = parts.by_ref().fold(0.0, |sum, part| sum * 60.0 + part);
    let day = 86400.0;
    Duration::from_secs_f64((written - begun.as_secs_f64()).rem_euclid(day) % (day - 1.0))
}
