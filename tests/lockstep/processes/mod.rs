//! Roles as processes of the built binary: the same answers as alone, no orphans, and foreign processes rejected by
//! name while the cluster continues.

mod damaged;
mod flooded;
mod intruder;
mod mutual;
mod offered;
mod rotated;
mod stalled;
mod stranded;

use crate::common::node::{BINARY, Folder, Node, PATIENCE, answer, field, free_address, is_alive};
use crate::common::pem::pem;
use checkpoint::Checkpoint;
use intruder::Intruder;
use proto::cluster::coordinator_client::CoordinatorClient;
use proto::cluster::{WorkerFrame, WorkerHello, worker_frame};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use time::OffsetDateTime;
use types::{Activations, DeviceClass, Numerics, NumericsMode, PolicyDigest};
use wire::{JoinToken, Trust, channel};

pub const MODEL: &str = "tests/reference/llama-f32-tied";
pub const DOORS: [&str; 6] = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--threads", "1"];

pub fn serve(more: &[&str]) -> Node {
    Node::start(&[&["serve", MODEL, "--activations", "f32"], &DOORS[..], more].concat())
}

/// A coordinator for one rank, and its address.
pub fn coordinator(model: &str, more: &[&str]) -> (Node, String) {
    let listen = ["coordinator", model, "--activations", "f32", "--listen", "127.0.0.1:0"];
    let mut node = Node::start(&[&listen[..], more].concat());
    let address = field(&node.until(&["coordinating"]), "address").to_owned();
    (node, address)
}

#[test]
fn a_grid_of_processes_answers_as_one_rank_does() {
    let alone = serve(&[]).answers();
    let mut grid = serve(&["--tp", "2", "--pp", "2"]);
    assert_eq!(grid.answers(), alone);
    let workers = grid.workers();
    assert_eq!(workers.len(), 4);
    // A killed worker is restarted, and the answers are the same.
    rustix::process::kill_process(pid(workers[1]), rustix::process::Signal::KILL).unwrap();
    grid.until(&["a worker process ended"]);
    assert_eq!(grid.answers(), alone);
    assert_eq!(serve(&["--tp", "2", "--pp", "2", "--inproc"]).answers(), alone);
}

fn run_command(door: &str, arguments: &[&str]) -> Output {
    Command::new(BINARY).args(arguments).args(["--coordinator", door]).output().unwrap()
}

/// An operator changes the replicas of `serve` through separate sockets, which accept no other role.
#[test]
fn serve_takes_another_grid_and_reads_its_model_again() {
    let mut grid = serve(&["--tp", "2", "--control", "127.0.0.1:0"]);
    let alone = serve(&[]).answers();
    assert_eq!(grid.answers(), alone);
    let door = field(&grid.until(&["`scale` and `reload` can reach this replica"]), "address").to_owned();
    let done = run_command(&door, &["scale", "--tp", "1", "--pp", "2"]);
    assert!(done.status.success() && done.stdout.starts_with(b"tp 1 x pp 2 after "), "{done:?}");
    assert_eq!(grid.answers(), alone);
    let refused = run_command(&door, &["scale", "--tp", "2", "--pp", "2"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("needs 4 workers, but 2 are available"), "{refused:?}");
    let done = run_command(&door, &["reload"]);
    assert!(done.status.success() && done.stdout.starts_with(b"2 of 2 ranks have read"), "{done:?}");
    assert_eq!(grid.answers(), alone);
    let mut stranger = Node::start(&["worker", "--threads", "1", "--join", &door]);
    stranger.until(&["this address is for `scale` and `reload`"]);
    // Two replicas have two sockets.
    let mut two = serve(&["--replicas", "2", "--control", "127.0.0.1:0"]);
    two.until(&["`scale` and `reload` can reach this replica", "replica=\"local-1\""]);
}

/// The parent's environment variables are not passed on to workers.
#[test]
fn workers_get_settings_only_from_their_parent() {
    let folder = Folder::new("environment");
    let config = folder.write("config", &format!("model = \"{MODEL}\"\nactivations = \"f32\"\ntp = 2\n"));
    let mut command = Command::new(BINARY);
    command.arg("serve").args(DOORS).current_dir(env!("CARGO_MANIFEST_DIR"));
    command.env("LOCKSTEP_CONFIG", &config).env("LOCKSTEP_TOKEN_FILE", folder.0.join("none"));
    command.env("LOCKSTEP_MODELS", &folder.0).env("LOCKSTEP_TLS", "on");
    assert_eq!(Node::spawn(command).answers(), serve(&[]).answers());
}

/// A worker with a health page, and the page's address.
fn watched_worker(join: &str) -> (Node, String) {
    let arguments = ["worker", "--threads", "1", "--join", join, "--health", "127.0.0.1:0"];
    let mut node = Node::start(&arguments);
    let address = field(&node.until(&["this worker serves its health pages"]), "address").to_owned();
    (node, format!("http://{address}/ready"))
}

/// Waits until a page answers with this status.
fn until_status(page: &str, status: u16) {
    let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false).build();
    let (agent, deadline) = (ureq::Agent::from(agent), Instant::now() + PATIENCE);
    while agent.get(page).call().unwrap().status() != status {
        assert!(Instant::now() < deadline, "{page} never has status {status}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_rank_without_the_others_is_not_ready() {
    // The lost rank's place is kept, so the remaining worker does not get the whole model.
    let (mut coordinating, address) = coordinator(MODEL, &["--tp", "2", "--replan-seconds", "3600"]);
    let (_one, page) = watched_worker(&address);
    until_status(&page, 503);
    let (mut other, other_page) = watched_worker(&address);
    [&page, &other_page].iter().for_each(|page| until_status(page, 200));
    other.kill();
    until_status(&page, 503);
    let (_another, another_page) = watched_worker(&address);
    [&page, &another_page].iter().for_each(|page| until_status(page, 200));
    coordinating.kill();
    [&page, &another_page].iter().for_each(|page| until_status(page, 503));
}

fn pid(pid: u32) -> rustix::process::Pid {
    rustix::process::Pid::from_raw(pid.cast_signed()).unwrap()
}

#[test]
fn no_worker_outlives_its_parent() {
    for signal in [rustix::process::Signal::KILL, rustix::process::Signal::TERM] {
        let mut grid = serve(&["--tp", "2"]);
        let http = grid.http();
        grid.until_ready(&http);
        let workers = grid.workers();
        assert!(workers.len() == 2 && workers.iter().all(|pid| is_alive(*pid)));
        rustix::process::kill_process(pid(grid.pid()), signal).unwrap();
        grid.ended();
        let deadline = Instant::now() + PATIENCE;
        while workers.iter().any(|pid| is_alive(*pid)) {
            assert!(Instant::now() < deadline, "a worker outlives its parent");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[test]
fn foreign_peers_are_refused_and_the_cluster_continues() {
    let folder = Folder::new("tokens");
    let token = JoinToken::random().unwrap();
    let good = folder.write("good", token.expose());
    let bad = folder.write("bad", JoinToken::random().unwrap().expose());
    let (mut coordinator, address) = coordinator(MODEL, &["--token-file", &good]);
    let join = ["worker", "--threads", "1", "--join", &address];
    let mut worker = Node::start(&[&join[..], &["--token-file", &good]].concat());
    let mut stranger = Node::start(&[&join[..], &["--token-file", &bad]].concat());
    stranger.until(&["lockstep:", "the join tokens differ"]);
    assert!(!stranger.ended().success());
    coordinator.until(&["a peer is refused", "the join tokens differ"]);
    let mut tokenless = Node::start(&join);
    tokenless.until(&["lockstep:", "the listener requires a join token"]);
    assert!(!tokenless.ended().success());
    let mut half = TcpStream::connect(&address).unwrap();
    half.write_all(b"LOCKSTP1").unwrap();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 300]] {
        send_bytes(&address, garbage);
    }
    coordinator.until(&["a peer is refused", "not a role of a cluster"]);
    coordinator.until(&["a peer is refused", "the connection timed out"]);
    another_version(&address, token);
    worker.until(&["received an assignment"]);
    let arguments = ["router", MODEL, "--coordinator", &address, "--token-file", &good];
    let mut router = Node::start(&[&arguments[..], &DOORS[..4]].concat());
    assert_eq!(router.answers(), serve(&[]).answers());
}

/// Sends the first bytes of a foreign client, and waits until the connection ends.
fn send_bytes(address: &str, words: &[u8]) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(words).unwrap();
    // A reset is as good as an end.
    let _reset = stream.read_to_end(&mut Vec::new());
}

#[test]
fn repeated_refusals_are_logged_once_a_second() {
    const KNOCKS: usize = 500;
    let (coordinator, address) = coordinator(MODEL, &[]);
    let began = Instant::now();
    (0..KNOCKS).for_each(|_| send_bytes(&address, b"GET / HTTP/1.1\r\n\r\n"));
    std::thread::sleep(Duration::from_millis(1100));
    // The next log line has the number of rejections before it.
    send_bytes(&address, b"GET / HTTP/1.1\r\n\r\n");
    let unsaid = |line: &String| if line.contains(" unsaid=") { field(line, "unsaid").parse().unwrap() } else { 0 };
    let deadline = Instant::now() + PATIENCE;
    let lines = loop {
        let lines = coordinator.lines_since(0, &["a peer is refused", "not a role of a cluster"], usize::MAX);
        if lines.len() + lines.iter().map(unsaid).sum::<usize>() == KNOCKS + 1 {
            break lines;
        }
        assert!(Instant::now() < deadline, "refusals are lost:\n{}", coordinator.log());
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(lines.len() as u64 <= began.elapsed().as_secs() + 1, "{lines:?}");
}

/// A router for a coordinator whose ranks are complete.
pub fn router(address: &str) -> Node {
    Node::start(&[&["router", MODEL, "--coordinator", address], &DOORS[..4]].concat())
}

fn model() -> Checkpoint {
    Checkpoint::open(Path::new(MODEL)).unwrap()
}

/// The policy of ranks of this model, by its fingerprint.
fn policy(kv_dtype: &str) -> PolicyDigest {
    let weights = model().fingerprint().unwrap();
    Numerics::plain(
        &DeviceClass::Cpu.into(),
        NumericsMode::Lockstep,
        Activations::F32,
        kv_dtype.parse().unwrap(),
        weights,
    )
    .digest()
}

#[test]
fn another_model_or_policy_is_refused_by_name_and_the_cluster_goes_on() {
    let (mut coordinator, address) = coordinator(MODEL, &[]);
    let join = ["worker", "--threads", "1", "--join", &address];
    // The foreign worker joins first, with a model of the same shape.
    let mut stranger = Node::start(&[&join[..], &["--model-path", "tests/reference/llama-linear"]].concat());
    let refusal = ["computes under", "its model, numerics or GPU architecture differs"];
    stranger.until(&["lockstep:", refusal[0], refusal[1]]);
    assert!(!stranger.ended().success());
    coordinator.until(&["a worker is lost", refusal[0], refusal[1]]);

    // The same model, with another cache type than the coordinator's.
    let mut intruder = Intruder::join(&address, "").unwrap();
    intruder.assigned();
    intruder.loaded(policy("f32"), &model().hash_weights().unwrap());
    let end = intruder.ended();
    assert_eq!(end.code(), tonic::Code::FailedPrecondition);
    assert!(refusal.iter().all(|words| end.message().contains(words)), "{end:?}");
    let mut twin = Intruder::join(&address, "").unwrap();
    twin.assigned();
    twin.loaded(policy("f16"), &model().hash_weights().unwrap());
    twin.ready();
    coordinator.until(&["the replica is ready"]);
    drop(twin);

    let mut worker = Node::start(&join);
    worker.until(&["received an assignment"]);
    assert_eq!(router(&address).answers(), serve(&[]).answers());
}

#[test]
fn a_second_one_of_a_place_is_refused_by_name_and_the_cluster_goes_on() {
    let (mut coordinator, address) = coordinator(MODEL, &["--tp", "2"]);
    let port = free_address().to_string();
    let join = ["worker", "--threads", "1", "--local-workers", "2", "--join", &address];
    let mut first = Node::start(&[&join[..], &["--mesh-listen", &port]].concat());
    coordinator.until(&["a worker joins"]);
    let end = Intruder::join(&address, &port).and_then(|mut twin| Err::<(), _>(twin.ended())).unwrap_err();
    assert!(end.code() == tonic::Code::AlreadyExists && end.message().contains(&port), "{end:?}");
    coordinator.until(&["refused: its mesh address is another worker's"]);
    let mut second = Node::start(&[&join[..], &["--mesh-listen", &port]].concat());
    second.until(&["lockstep:", "cannot listen for other workers", &port]);
    assert!(!second.ended().success());

    // Foreign clients connect to the first worker while it waits for the second: one sends garbage, one stops midway.
    // Both are disconnected before the ranks meet, and the log names them once the ranks have met.
    let mut silent = TcpStream::connect(&port).unwrap();
    silent.write_all(b"LOCKSTEP").unwrap();
    let mut loud = TcpStream::connect(&port).unwrap();
    loud.write_all(&[0x5a; 400]).unwrap();
    assert!(is_let_go(silent) && is_let_go(loud));
    let _second = Node::start(&join);
    first.until(&["a rank is refused", "the handshake is invalid", "no answer until the deadline"]);
    assert_eq!(router(&address).answers(), serve(&[]).answers());
}

fn is_let_go(mut stranger: TcpStream) -> bool {
    stranger.set_read_timeout(Some(PATIENCE)).unwrap();
    match stranger.read(&mut [0]) {
        Ok(n) => n == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

/// A worker that holds a rank and misbehaves.
#[test]
fn rank_that_sends_garbage_is_blamed_by_name() {
    let (mut coordinator, address) = coordinator(MODEL, &["--tp", "2"]);
    let door = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut intruder = Intruder::join(&address, &door.local_addr().unwrap().to_string()).unwrap();
    let join = ["worker", "--threads", "1", "--local-workers", "2", "--join", &address];
    let _first = Node::start(&join);
    intruder.assigned();
    intruder.loaded(policy("f16"), &model().hash_weights().unwrap());
    // The correct worker dials once both have loaded.
    let (mut peer, _) = door.accept().unwrap();
    peer.write_all(&[0x5a; 400]).unwrap();
    coordinator.until(&["a rank is blamed by a peer", "rank=0", "the handshake is invalid"]);
    let _second = Node::start(&join);
    assert_eq!(router(&address).answers(), serve(&[]).answers());
}

/// A worker of another version gets as far as its hello.
fn another_version(address: &str, token: JoinToken) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let status = runtime.block_on(async {
        let mut client = CoordinatorClient::new(channel(address, Trust { token: Some(token), tls: None }));
        let hello = WorkerHello { version: "0.0.0".into(), ..WorkerHello::default() };
        let frame = WorkerFrame { frame: Some(worker_frame::Frame::Hello(hello)) };
        client.join(tokio_stream::once(frame)).await.unwrap_err()
    });
    assert_eq!(status.code(), tonic::Code::FailedPrecondition);
    assert!(status.message().contains("0.0.0"), "{}", status.message());
}

/// PEM files: an authority, and a certificate that expires `ends_in` seconds from now.
fn certificate(folder: &Folder, name: &str, authority: &(CertificateParams, KeyPair), ends_in: i64) -> Vec<String> {
    let mut params = CertificateParams::new(vec!["lockstep.cluster".to_owned()]).unwrap();
    let now = OffsetDateTime::now_utc();
    (params.not_before, params.not_after) = (now - time::Duration::DAY, now + time::Duration::seconds(ends_in));
    let key = KeyPair::generate().unwrap();
    let issuer = Issuer::from_params(&authority.0, &authority.1);
    let leaf = params.signed_by(&key, &issuer).unwrap();
    let root = authority.0.self_signed(&authority.1).unwrap();
    [
        ("--tls-cert", pem("CERTIFICATE", leaf.der())),
        ("--tls-key", pem("PRIVATE KEY", &key.serialize_der())),
        ("--tls-ca", pem("CERTIFICATE", root.der())),
    ]
    .into_iter()
    .flat_map(|(flag, text)| [flag.to_owned(), folder.write(&format!("{name}{flag}"), &text)])
    .collect()
}

#[test]
fn an_expired_certificate_is_refused_by_name_and_its_successor_is_taken_without_a_restart() {
    let folder = Folder::new("certificates");
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = (params, KeyPair::generate().unwrap());
    let files = |name: &str, ends_in: i64| certificate(&folder, name, &authority, ends_in);
    let (good, old, late) = (files("good", 3600), files("old", -3600), files("late", -3600));
    let flags = |files: &[String]| files.iter().map(String::clone).collect::<Vec<_>>();
    let with = |first: &[&str], files: &[String]| -> Node {
        let files = flags(files);
        Node::start(&[first, &files.iter().map(String::as_str).collect::<Vec<_>>()].concat())
    };
    let good_flags: Vec<&str> = good.iter().map(String::as_str).collect();
    let (mut coordinator, address) = coordinator(MODEL, &good_flags);
    let join = ["worker", "--threads", "1", "--join", &address];
    let mut expired = with(&join, &old);
    expired.until(&["no connection to this address", "expired"]);
    coordinator.until(&["a peer is refused", "expired"]);
    files("old", 3600);
    expired.until(&["received an assignment"]);
    expired.kill();
    let mut plain = Node::start(&join);
    plain.until(&["lockstep:", "the listener uses TLS"]);
    let mut worker = with(&join, &good);
    worker.until(&["received an assignment"]);
    let arguments = [&["router", MODEL, "--coordinator", &address], &DOORS[..4]].concat();
    let http = {
        let mut router = with(&arguments, &good);
        let http = router.http();
        router.until_ready(&http);
        answer(&http, "over TLS");
        http
    };
    assert!(http.starts_with("http://127.0.0.1:"));
    // The same for a role that listens.
    let late: Vec<&str> = late.iter().map(String::as_str).collect();
    let (mut listener, address) = self::coordinator(MODEL, &late);
    let mut waits = with(&["worker", "--threads", "1", "--join", &address], &good);
    waits.until(&["no connection to this address", "expired"]);
    files("late", 3600);
    listener.until(&["the certificates were read again"]);
    waits.until(&["received an assignment"]);
}

/// The coordinator's path does not exist in the worker's folder, so the worker fetches the model; the second time it
/// has it.
#[test]
fn a_worker_without_the_model_fetches_it() {
    let folder = Folder::new("fetch");
    let cache = folder.0.join("cache");
    let (_coordinator, address) = coordinator(MODEL, &[]);
    let fetch = ["worker", "--threads", "1", "--join", &address, "--fetch", "--cache", cache.to_str().unwrap()];
    let mut router = Node::start(&[&["router", MODEL, "--coordinator", &address], &DOORS[..4]].concat());
    let mut worker = Node::start_in(&folder.0, &fetch);
    worker.until(&["fetching this rank's part"]);
    let answers = router.answers();
    assert_eq!(answers, serve(&[]).answers());
    worker.kill();
    let mut again = Node::start_in(&folder.0, &fetch);
    again.until(&["received an assignment"]);
    assert_eq!(router.answers(), answers);
    assert!(!again.log().contains("fetching"), "{}", again.log());
}
