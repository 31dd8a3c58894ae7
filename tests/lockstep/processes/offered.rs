//! TLS towards clients, by curl: both protocols, both ports, replaced certificates, and clients that fail the
//! handshake.

use super::{DOORS, MODEL};
use crate::common::node::{BINARY, Folder, Node, PATIENCE};
use crate::common::pem::pem;
use lockstep_client::v1::ListModelsRequest;
use lockstep_client::{ConnectOptions, LockstepClient};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use time::OffsetDateTime;

/// An authority, and the files of certificates that it has signed.
pub struct Authority {
    params: CertificateParams,
    key: KeyPair,
}

impl Authority {
    pub fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        // Of two authorities with one name a client takes the first.
        static N_MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!("authority {}", N_MADE.fetch_add(1, Ordering::Relaxed));
        params.distinguished_name.push(DnType::CommonName, name);
        Authority { params, key: KeyPair::generate().unwrap() }
    }

    pub fn root(&self) -> String {
        pem("CERTIFICATE", self.params.clone().self_signed(&self.key).unwrap().der())
    }

    /// A certificate and its key.
    pub fn signed(&self) -> [String; 2] {
        self.signed_until(OffsetDateTime::now_utc() + time::Duration::DAY)
    }

    /// A certificate that expires then, and its key.
    pub fn signed_until(&self, end: OffsetDateTime) -> [String; 2] {
        let mut params = CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
        params.not_after = end;
        // The authority's own name would make it look signed by itself.
        params.distinguished_name.push(DnType::CommonName, "offered");
        let key = KeyPair::generate().unwrap();
        let leaf = params.signed_by(&key, &Issuer::from_params(&self.params, &self.key)).unwrap();
        [pem("CERTIFICATE", leaf.der()), pem("PRIVATE KEY", &key.serialize_der())]
    }
}

/// A server, and its addresses for HTTPS and for gRPC with TLS.
pub struct Served {
    pub node: Node,
    pub http: String,
    pub grpc: String,
}

impl Served {
    pub fn with(folder: &Folder, authority: &Authority, more: &[&str]) -> Served {
        Served::with_model(&[MODEL, "--activations", "f32"], folder, authority, more)
    }

    pub fn with_model(model: &[&str], folder: &Folder, authority: &Authority, more: &[&str]) -> Served {
        let [certificate, key] = authority.signed();
        let (certificate, key) = (folder.write("cert.pem", &certificate), folder.write("key.pem", &key));
        folder.write("root.pem", &authority.root());
        let tls = ["--api-tls-cert", &certificate, "--api-tls-key", &key];
        let mut node = Node::start(&[&["serve"], model, &DOORS[..], &tls, more].concat());
        let line = node.until(&["serves", "https://", "grpcs://"]);
        let address = |scheme: &str| {
            let rest = &line[line.find(scheme).unwrap() + scheme.len()..];
            rest.split(['/', ' ']).next().unwrap().trim_end_matches('"').to_owned()
        };
        let (http, grpc) = (address("https://"), address("grpcs://"));
        Served { node, http, grpc }
    }
}

pub fn curl(folder: &Folder, words: &[&str]) -> Output {
    let root = folder.0.join("root.pem");
    let common = ["-s", "-S", "--max-time", "60", "--cacert", root.to_str().unwrap()];
    Command::new("curl").args(common).args(words).output().unwrap()
}

pub fn output_text(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

fn until_ready(folder: &Folder, served: &Served) {
    let deadline = Instant::now() + PATIENCE;
    let url = format!("https://{}/ready", served.http);
    while !curl(folder, &["-f", &url]).status.success() {
        assert!(Instant::now() < deadline, "it is never ready:\n{}", served.node.log());
        std::thread::sleep(Duration::from_millis(50));
    }
}

const REQUEST_BODY: &str = r#"{"prompt": "hello", "max_tokens": 12, "seed": 7, "temperature": 0.8}"#;

fn answer(folder: &Folder, served: &Served, protocol: &str) -> serde_json::Value {
    let url = format!("https://{}/v1/completions", served.http);
    let reply = curl(folder, &[protocol, "-f", "-H", "content-type: application/json", "-d", REQUEST_BODY, &url]);
    let value: serde_json::Value =
        serde_json::from_slice(&reply.stdout).unwrap_or_else(|_| panic!("{}", output_text(&reply)));
    value["choices"][0]["text"].clone()
}

#[test]
fn clients_are_served_by_tls_in_both_protocols_and_on_both_ports() {
    let (folder, authority) = (Folder::new("offered"), Authority::new());
    let served = Served::with(&folder, &authority, &[]);
    until_ready(&folder, &served);
    let health = format!("https://{}/health", served.http);
    for (protocol, version) in [("--http1.1", "1.1"), ("--http2", "2")] {
        let reply = curl(&folder, &[protocol, "-w", "%{http_version}", &health]);
        assert_eq!(output_text(&reply), format!("healthy\n{version}"));
    }
    assert_eq!(answer(&folder, &served, "--http2"), answer(&folder, &served, "--http1.1"));

    std::fs::write(folder.0.join("empty.grpc"), [0; 5]).unwrap();
    let body = format!("@{}", folder.0.join("empty.grpc").display());
    let check = format!("https://{}/grpc.health.v1.Health/Check", served.grpc);
    let words = ["-H", "content-type: application/grpc", "-H", "te: trailers", "--data-binary", &body, "-D", "-"];
    let reply = output_text(&curl(&folder, &[&["--http2"], &words[..], &[&check]].concat()));
    assert!(reply.contains("HTTP/2 200") && reply.contains("grpc-status: 0"), "{reply}");
    // This port supports HTTP/2 alone, and reports that in the handshake.
    assert!(!curl(&folder, &["--http1.1", &check]).status.success());

    let stranger = Command::new("curl").args(["-s", "-S", &health]).output().unwrap();
    assert!(!stranger.status.success() && output_text(&stranger).contains("certificate"), "{}", output_text(&stranger));
    for port in [&served.http, &served.grpc] {
        let plain = curl(&folder, &["-w", "%{http_code}", &format!("http://{port}/health")]);
        assert_eq!(output_text(&plain), "this port speaks TLS: https://400");
    }
}

#[test]
fn the_client_in_rust_trusts_the_authority_that_it_is_given() {
    let (folder, authority) = (Folder::new("rust-client"), Authority::new());
    let served = Served::with(&folder, &authority, &[]);
    until_ready(&folder, &served);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let models = |address: String, ca_pem: Option<String>, server_name: Option<&str>| {
        let server_name = server_name.map(str::to_owned);
        let options = ConnectOptions { ca_pem: ca_pem.map(String::into_bytes), server_name, ..Default::default() };
        let calling = async {
            let client = LockstepClient::connect([address], &options).unwrap();
            client.inference().list_models(ListModelsRequest {}).await
        };
        runtime.block_on(async { tokio::time::timeout(PATIENCE, calling).await.unwrap() })
    };
    let (https, root) = (format!("https://{}", served.grpc), || Some(authority.root()));
    assert_eq!(models(https.clone(), root(), None).unwrap().into_inner().models.len(), 1);
    assert!(models(https.clone(), root(), Some("localhost")).is_ok());
    assert!(models(https.clone(), root(), Some("another.example")).is_err(), "another name");
    assert!(models(https.clone(), None, None).is_err(), "an authority that the web does not know");
    assert!(models(https, Some(Authority::new().root()), None).is_err(), "another authority");
}

/// A slow, broken or missing handshake blocks other clients only briefly, and takes no place from them.
#[test]
fn failed_handshakes_do_not_block_other_clients() {
    const N_SILENT: usize = 300;
    let (folder, authority) = (Folder::new("handshakes"), Authority::new());
    let served = Served::with(&folder, &authority, &[]);
    until_ready(&folder, &served);
    let connect = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(&served.http).unwrap();
        stream.write_all(bytes).unwrap();
        stream
    };
    // An incomplete record, an invalid one, and nothing.
    let slow: Vec<TcpStream> =
        (0..N_SILENT).map(|n| connect(if n % 2 == 0 { &[22, 3, 1, 2, 0] } else { b"" })).collect();
    let mut bad = connect(&[22, 3, 1, 0, 4, 9, 9, 9, 9]);
    let begun = Instant::now();
    let reply = curl(&folder, &["-f", &format!("https://{}/health", served.http)]);
    assert_eq!(output_text(&reply), "healthy\n");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    bad.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut alert = Vec::new();
    // A reset is as good as an alert.
    let _ended = bad.read_to_end(&mut alert);
    assert!(alert.is_empty() || alert[0] == 21, "{alert:?}");
    served.node.until_since(0, &["a peer is refused"]);
    drop(slow);
}

#[test]
fn a_certificate_is_replaced_under_load_and_a_broken_one_is_not_taken() {
    let (folder, old, new) = (Folder::new("renewal"), Authority::new(), Authority::new());
    let served = Served::with(&folder, &old, &[]);
    until_ready(&folder, &served);
    let health = format!("https://{}/health", served.http);
    folder.write("root.pem", &(old.root() + &new.root()));
    folder.write("new.pem", &new.root());
    let by_new = || {
        let root = folder.0.join("new.pem");
        let output = Command::new("curl").args(["-s", "--cacert", root.to_str().unwrap(), &health]).output();
        output.unwrap().status.success()
    };
    assert!(!by_new());
    let (over, deadline) = (AtomicBool::new(false), Instant::now() + PATIENCE);
    let n_requests = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut n = 0;
            while !over.load(Ordering::Relaxed) {
                let reply = curl(&folder, &["-f", &health]);
                assert!(reply.status.success(), "{}", output_text(&reply));
                n += 1;
            }
            n
        });
        let [certificate, key] = new.signed();
        // The two files do not match for a moment.
        folder.write("cert.pem", &certificate);
        served.node.until_since(0, &["clients still get the last certificate", "do not match"]);
        folder.write("key.pem", &key);
        served.node.until_since(0, &["clients get a new certificate"]);
        while !by_new() {
            assert!(Instant::now() < deadline, "{}", served.node.log());
        }
        let place = served.node.log_len();
        folder.write("cert.pem", "no certificate");
        served.node.until_since(place, &["clients still get the last certificate", "cert.pem"]);
        assert!(by_new());
        over.store(true, Ordering::Relaxed);
        load.join().unwrap()
    });
    assert!(n_requests > 3, "{n_requests} requests");
}

#[test]
fn commands_trust_only_the_given_authority() {
    let (folder, authority) = (Folder::new("authorities"), Authority::new());
    let served = Served::with(&folder, &authority, &[]);
    until_ready(&folder, &served);
    let (url, own) = (format!("https://{}", served.http), folder.0.join("root.pem"));
    let other = folder.write("other.pem", &Authority::new().root());
    let run_command = |words: &[&str], authority: Option<&str>| {
        let trust = authority.map_or(vec![], |authority| vec!["--tls-ca", authority]);
        Command::new(BINARY).args(words).args(["--url", &url]).args(trust).output().unwrap()
    };
    let commands: [&[&str]; 3] = [
        &["status"],
        &["top", "--looks", "1"],
        &["bench", "--requests", "1", "--warm-up", "0", "--concurrency", "1", "--prompt", "4", "--output", "4"],
    ];
    for words in commands {
        let trusted = run_command(words, own.to_str());
        assert!(
            trusted.status.success() && !output_text(&trusted).contains("ertificate"),
            "{words:?}: {}",
            output_text(&trusted)
        );
        // `top` shows the error and continues, so its exit status does not show it.
        for authority in [None, Some(other.as_str())] {
            let refused = run_command(words, authority);
            assert!(output_text(&refused).contains("ertificate"), "{words:?}: {}", output_text(&refused));
        }
    }
}

/// A key is added, clients change to it, and the old one is revoked; then the same with certificates of another
/// authority.
#[test]
fn keys_and_certificates_are_rotated_under_load_and_no_request_fails() {
    const N_CLIENTS: usize = 4;
    const N_ROTATIONS: usize = 3;
    let (folder, mut authority) = (Folder::new("rotation"), Authority::new());
    let keys = folder.write("keys", "team:key-0\n");
    let served = Served::with(&folder, &authority, &["--api-keys", &keys]);
    until_ready(&folder, &served);
    let url = format!("https://{}/v1/completions", served.http);
    let (over, key) = (AtomicBool::new(false), AtomicU32::new(0));
    let n_done = [const { AtomicUsize::new(0) }; N_CLIENTS];
    let (expected, deadline) = (Mutex::new(None), Instant::now() + PATIENCE);
    let send_request = || {
        let bearer = format!("authorization: Bearer key-{}", key.load(Ordering::Relaxed));
        let reply =
            curl(&folder, &["-f", "-H", "content-type: application/json", "-H", &bearer, "-d", REQUEST_BODY, &url]);
        assert!(reply.status.success(), "{bearer}: {}", output_text(&reply));
        let value: serde_json::Value = serde_json::from_slice(&reply.stdout).unwrap();
        let text = value["choices"][0]["text"].clone();
        let mut expected = expected.lock().unwrap();
        assert_eq!(expected.get_or_insert_with(|| text.clone()), &text);
    };
    let client = |i: usize| {
        while !over.load(Ordering::Relaxed) {
            send_request();
            n_done[i].fetch_add(1, Ordering::Relaxed);
        }
        n_done[i].load(Ordering::Relaxed)
    };
    let client = &client;
    let n_requests = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..N_CLIENTS).map(|i| scope.spawn(move || client(i))).collect();
        for n in 1..=N_ROTATIONS {
            let place = served.node.log_len();
            folder.write("keys", &format!("team:key-{}\nteam:key-{n}\n", n - 1));
            served.node.until_since(place, &["the API keys were read again"]);
            key.store(n as u32, Ordering::Relaxed);
            let next = Authority::new();
            // Clients trust both authorities before the server shows the new certificate.
            folder.write("root.next", &(authority.root() + &next.root()));
            std::fs::rename(folder.0.join("root.next"), folder.0.join("root.pem")).unwrap();
            // The current request of each client may have the old key, and the next one does not.
            let before = n_done.each_ref().map(|n| n.load(Ordering::Relaxed));
            while n_done.iter().zip(before).any(|(n, before)| n.load(Ordering::Relaxed) < before + 2) {
                assert!(Instant::now() < deadline && !clients.iter().any(|client| client.is_finished()));
                std::thread::sleep(Duration::from_millis(20));
            }
            let place = served.node.log_len();
            folder.write("keys", &format!("team:key-{n}\n"));
            served.node.until_since(place, &["the API keys were read again"]);
            let [certificate, secret] = next.signed();
            folder.write("cert.pem", &certificate);
            folder.write("key.pem", &secret);
            served.node.until_since(place, &["clients get a new certificate"]);
            authority = next;
        }
        over.store(true, Ordering::Relaxed);
        clients.into_iter().map(|client| client.join().unwrap()).sum::<usize>()
    });
    assert!(n_requests > N_CLIENTS * N_ROTATIONS, "{n_requests} requests");
    let old =
        ["-f", "-H", "content-type: application/json", "-H", "authorization: Bearer key-0", "-d", REQUEST_BODY, &url];
    assert!(!curl(&folder, &old).status.success(), "the first key is taken back");
}

#[test]
fn files_that_cannot_be_used_are_named_at_the_start() {
    let (folder, authority) = (Folder::new("unusable"), Authority::new());
    let [[certificate, _], [_, key]] = [authority.signed(), authority.signed()];
    let (certificate, key) = (folder.write("cert.pem", &certificate), folder.write("key.pem", &key));
    let missing = folder.0.join("missing.pem");
    let check = |certificate: &str, key: &str, message: &str| {
        let files = ["--api-tls-cert", certificate, "--api-tls-key", key];
        let mut node = Node::start(&[&["serve", MODEL, "--activations", "f32"], &DOORS[..], &files].concat());
        node.until(&["lockstep:", message]);
        assert!(!node.ended().success());
    };
    check(&certificate, &key, "do not match");
    check(missing.to_str().unwrap(), &key, "missing.pem");
    assert!(Path::new(&certificate).exists());
}
