//! The certificates of all roles are replaced by those of another authority while clients stream: no stream ends, no
//! connection is lost, and later connections use the new certificates. Has knowledge only of files, flags and log
//! lines.

use super::{DOORS, MODEL, coordinator};
use crate::common::node::{Folder, Node, PATIENCE, post};
use crate::common::pem::pem;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

const N_CLIENTS: usize = 3;
const READ_AGAIN: &str = "the certificates were read again";
/// Log lines of a lost connection between roles.
const LOSSES: [&str; 3] = ["a worker is lost", "no coordinator", "suspecting it"];

/// An authority of roles.
struct RoleAuthority {
    params: CertificateParams,
    key: KeyPair,
}

impl RoleAuthority {
    fn new(name: &str) -> RoleAuthority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        RoleAuthority { params, key: KeyPair::generate().unwrap() }
    }

    fn root(&self) -> String {
        pem("CERTIFICATE", self.params.clone().self_signed(&self.key).unwrap().der())
    }

    /// A certificate and its key.
    fn signed(&self) -> [String; 2] {
        let mut params = CertificateParams::new(vec!["lockstep.cluster".to_owned()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, "a role");
        let key = KeyPair::generate().unwrap();
        let leaf = params.signed_by(&key, &Issuer::from_params(&self.params, &self.key)).unwrap();
        [pem("CERTIFICATE", leaf.der()), pem("PRIVATE KEY", &key.serialize_der())]
    }
}

/// The files of one role, and its flags for them.
struct RoleFiles<'a> {
    folder: &'a Folder,
    role: &'static str,
}

impl RoleFiles<'_> {
    /// Each file is replaced whole, as a mounted secret is.
    fn write(&self, signer: &RoleAuthority, accepted: &[&RoleAuthority]) {
        let [certificate, key] = signer.signed();
        let roots = accepted.iter().map(|authority| authority.root()).collect();
        for (name, text) in [("cert", certificate), ("key", key), ("ca", roots)] {
            let next = self.folder.write("next", &text);
            std::fs::rename(next, self.path(name)).unwrap();
        }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.folder.0.join(format!("{}.{name}", self.role))
    }

    fn flags(&self) -> Vec<String> {
        let flag = |name| [format!("--tls-{name}"), self.path(name).to_str().unwrap().to_owned()];
        ["cert", "key", "ca"].into_iter().flat_map(flag).collect()
    }

    fn start(&self, arguments: &[&str]) -> Node {
        let flags = self.flags();
        Node::start(&[arguments, &flags.iter().map(String::as_str).collect::<Vec<_>>()].concat())
    }
}

/// The token ids of a whole stream.
fn stream(http: &str, seed: usize) -> Vec<Value> {
    let body = json!({
        "prompt": "the certificates change", "max_tokens": 200, "ignore_eos": true, "temperature": 0.8, "seed": seed,
        "stream": true, "return_token_ids": true,
    });
    let lines = BufReader::new(post(http, &body).into_body().into_reader()).lines().map(Result::unwrap);
    let events = lines.filter_map(|line| Some(line.strip_prefix("data: ")?.to_owned()));
    let ids = events.take_while(|event| event != "[DONE]").flat_map(|event| {
        let event: Value = serde_json::from_str(&event).unwrap();
        assert!(event["error"].is_null(), "{event}");
        event["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default()
    });
    ids.collect()
}

/// Waits until every client has had another two whole streams.
fn until_streamed(n_streams: &[AtomicUsize], what: &str) {
    let (deadline, before) = (Instant::now() + PATIENCE, n_streams.iter().map(|n| n.load(Relaxed)).collect::<Vec<_>>());
    while n_streams.iter().zip(&before).any(|(n, before)| n.load(Relaxed) < before + 2) {
        assert!(Instant::now() < deadline, "{what}: the streams have stopped");
        sleep(Duration::from_millis(20));
    }
}

fn check_no_loss(nodes: &[&Node]) {
    for (node, loss) in nodes.iter().flat_map(|node| LOSSES.map(|loss| (node, loss))) {
        assert!(node.line_since(0, &[loss]).is_none(), "{loss}:\n{}", node.log());
    }
}

#[test]
fn role_certificates_are_rotated_under_load_and_no_stream_ends() {
    let folder = Folder::new("rotated");
    let [old, new] = ["old", "new"].map(RoleAuthority::new);
    let roles = ["coordinator", "worker", "router"].map(|role| RoleFiles { folder: &folder, role });
    let write = |signer: &RoleAuthority, accepted: &[&RoleAuthority]| {
        roles.iter().for_each(|files| files.write(signer, accepted));
    };
    write(&old, &[&old]);
    let [of_coordinator, of_worker, of_router] = &roles;
    let flags = of_coordinator.flags();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let (coordinating, address) = coordinator(MODEL, &[&["--tp", "2"], &flags[..]].concat());
    let join = ["worker", "--threads", "1", "--local-workers", "2", "--join", &address];
    let mut workers = [of_worker.start(&join), of_worker.start(&join)];
    let router = [&["router", MODEL, "--coordinator", &address], &DOORS[..4]].concat();
    let mut routing = of_router.start(&router);
    let http = routing.http();
    routing.until_ready(&http);
    let expected: Vec<_> = (0..N_CLIENTS).map(|seed| stream(&http, seed)).collect();
    assert!(expected.iter().all(|ids| ids.len() == 200));

    let (over, n_streams) = (AtomicBool::new(false), [const { AtomicUsize::new(0) }; N_CLIENTS]);
    let deadline = Instant::now() + 3 * PATIENCE;
    let client = |seed: usize| {
        while !over.load(Relaxed) && Instant::now() < deadline {
            assert!(stream(&http, seed) == expected[seed], "another answer to seed {seed}");
            n_streams[seed].fetch_add(1, Relaxed);
        }
    };
    let client = &client;
    scope(|scope| {
        let clients: Vec<_> = (0..N_CLIENTS).map(|seed| scope.spawn(move || client(seed))).collect();
        until_streamed(&n_streams, "before");
        // Every role accepts both authorities, then shows the new certificate, then accepts only the new one.
        for (signer, accepted) in [(&old, &[&old, &new][..]), (&new, &[&old, &new][..]), (&new, &[&new][..])] {
            let place = coordinating.log_len();
            write(signer, accepted);
            coordinating.until_since(place, &[READ_AGAIN]);
            // The files may have been read between two writes, and then once more.
            sleep(Duration::from_secs(3));
            until_streamed(&n_streams, "a rotation");
        }
        check_no_loss(&[&coordinating, &workers[0], &workers[1], &routing]);

        // Later connections: a stranger has the old certificate, a spare worker and another router have the new one.
        let stranger = RoleFiles { folder: &folder, role: "stranger" };
        stranger.write(&old, &[&old, &new]);
        let mut refused = stranger.start(&join);
        refused.until(&["lockstep:", "certificate does not belong to this cluster"]);
        let place = coordinating.log_len();
        let _spare = of_worker.start(&join);
        coordinating.until_since(place, &["a worker joins"]);
        let mut another = of_router.start(&router);
        let at_another = another.http();
        another.until_ready(&at_another);
        assert!(stream(&at_another, 0) == expected[0], "the same answer through another router");
        let place = coordinating.log_len();
        workers[0].kill();
        coordinating.until_since(place, &["a worker is lost"]);
        coordinating.until_since(place, &["the replica is ready"]);
        until_streamed(&n_streams, "after a loss");
        over.store(true, Relaxed);
        clients.into_iter().for_each(|client| client.join().unwrap());
    });
    println!("{n_streams:?} streams");
}
