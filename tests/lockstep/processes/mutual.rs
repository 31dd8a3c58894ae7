//! Clients' certificates: they are required where configured, and a stream lasts no longer than the certificate of its
//! client is accepted.

use super::offered::{Authority, Served, curl, output_text};
use super::pid;
use crate::common::node::Folder;
use rustix::process::{Signal, kill_process};
use std::process::Output;
use std::thread::{ScopedJoinHandle, scope, sleep};
use std::time::Duration;
use time::OffsetDateTime;

/// The lifetime of a short certificate: time for a handshake and the first tokens on a busy machine.
const LIFE: Duration = Duration::from_secs(10);
/// The latest end of a stream after that of its certificate: one second by the clock, and a busy machine.
const LATE_MAX: time::Duration = time::Duration::seconds(4);
/// A stream that outlasts the test.
const LONG: &str = r#"{"prompt": "It goes on and", "max_tokens": 7000, "ignore_eos": true, "stream": true}"#;
const WRONG: &str = "invalid_certificate";

#[test]
fn client_certificates_are_required_where_configured() {
    let (folder, authority, clients) = (Folder::new("mutual"), Authority::new(), Authority::new());
    let client_root = folder.write("clients.pem", &clients.root());
    let served = Served::with(&folder, &authority, &["--api-client-ca", &client_root]);
    let alive = format!("https://{}/livez", served.http);
    let get_livez = |by: Option<&Authority>| {
        let [certificate, key] = by.unwrap_or(&clients).signed();
        let (certificate, key) = (folder.write("me.pem", &certificate), folder.write("me.key", &key));
        let proof = ["--cert", certificate.as_str(), "--key", key.as_str()];
        let words = if by.is_some() { &proof[..] } else { &[] };
        curl(&folder, &[words, &["-f", alive.as_str()]].concat())
    };
    assert_eq!(output_text(&get_livez(Some(&clients))), "alive\n");
    for refused in [get_livez(None), get_livez(Some(&authority))] {
        assert!(!refused.status.success(), "{}", output_text(&refused));
    }
}

/// A client with a certificate.
struct CertifiedClient<'a> {
    folder: &'a Folder,
    served: &'a Served,
    proof: [String; 4],
}

impl<'a> CertifiedClient<'a> {
    fn new(folder: &'a Folder, served: &'a Served, name: &str, [certificate, key]: [String; 2]) -> CertifiedClient<'a> {
        let certificate = folder.write(&format!("{name}.pem"), &certificate);
        let key = folder.write(&format!("{name}.key"), &key);
        CertifiedClient { folder, served, proof: ["--cert".into(), certificate, "--key".into(), key] }
    }

    fn curl(&self, words: &[&str]) -> Output {
        curl(self.folder, &[&self.proof.each_ref().map(String::as_str), words].concat())
    }

    fn until_ready(&self) {
        let url = format!("https://{}/ready", self.served.http);
        let tries = 1200;
        let is_ready = |_| {
            sleep(Duration::from_millis(100));
            self.curl(&["-f", &url]).status.success()
        };
        assert!((0..tries).any(is_ready), "{}", self.served.node.log());
    }

    /// Streams tokens over HTTP.
    fn stream(&self, protocol: &str) -> Ended {
        let url = format!("https://{}/v1/completions", self.served.http);
        Ended::of(&self.curl(&[protocol, "-N", "-H", "content-type: application/json", "-d", LONG, &url]))
    }

    /// Streams the state of the server's health over gRPC.
    fn watch(&self) -> Ended {
        std::fs::write(self.folder.0.join("empty.grpc"), [0; 5]).unwrap();
        let body = format!("@{}", self.folder.0.join("empty.grpc").display());
        let url = format!("https://{}/grpc.health.v1.Health/Watch", self.served.grpc);
        let words = ["--http2", "-N", "-H", "content-type: application/grpc", "-H", "te: trailers", "-D", "-"];
        Ended::of(&self.curl(&[&words[..], &["--data-binary", &body, &url]].concat()))
    }
}

/// A stream that has ended.
struct Ended {
    at: OffsetDateTime,
    text: String,
}

impl Ended {
    fn of(output: &Output) -> Ended {
        Ended { at: OffsetDateTime::now_utc(), text: output_text(output) }
    }

    /// Checks that it began, and that it ended with this reason when the certificate did.
    fn check(&self, why: &str, certificate_end: OffsetDateTime) {
        assert!(self.text.contains(why), "{why} is not in the end of {}", tail(&self.text));
        let late = self.at - certificate_end;
        assert!(late >= time::Duration::ZERO && late < LATE_MAX, "{late} after the certificate: {}", tail(&self.text));
    }
}

fn tail(text: &str) -> String {
    let last = text.chars().rev().take(600).collect::<Vec<_>>();
    last.into_iter().rev().collect()
}

fn join(stream: ScopedJoinHandle<'_, Ended>) -> Ended {
    stream.join().unwrap()
}

#[test]
fn streams_end_with_their_client_certificate() {
    let (folder, authority, clients) = (Folder::new("expiring"), Authority::new(), Authority::new());
    let ca = folder.write("clients.pem", &clients.root());
    let served = Served::with_model(&["smollm2"], &folder, &authority, &["--api-client-ca", &ca]);
    let lasting = CertifiedClient::new(&folder, &served, "lasting", clients.signed());
    lasting.until_ready();
    let end = (OffsetDateTime::now_utc() + LIFE).replace_nanosecond(0).unwrap();
    let short = &CertifiedClient::new(&folder, &served, "short", clients.signed_until(end));
    scope(|scope| {
        let streams = ["--http1.1", "--http2"].map(|protocol| scope.spawn(move || short.stream(protocol)));
        let watch = scope.spawn(|| short.watch());
        for stream in streams.map(join) {
            assert!(stream.text.contains("\"text\""), "it began: {}", tail(&stream.text));
            stream.check(WRONG, end);
        }
        join(watch).check("grpc-status: 16", end);
    });
    let livez = format!("https://{}/livez", served.http);
    assert!(!short.curl(&["-f", &livez]).status.success(), "an expired certificate opens no connection");
    assert_eq!(output_text(&lasting.curl(&["-f", &livez])), "alive\n");
}

#[test]
fn streams_end_when_their_authority_is_withdrawn() {
    let (folder, authority) = (Folder::new("withdrawn"), Authority::new());
    let [old, new] = [Authority::new(), Authority::new()];
    let ca = folder.write("clients.pem", &(old.root() + &new.root()));
    let served = Served::with_model(&["smollm2"], &folder, &authority, &["--api-client-ca", &ca]);
    let [old, renewed] = [("old", &old), ("renewed", &new)]
        .map(|(name, authority)| CertifiedClient::new(&folder, &served, name, authority.signed()));
    renewed.until_ready();
    scope(|scope| {
        let streams = [scope.spawn(|| old.stream("--http2")), scope.spawn(|| old.watch())];
        let kept = scope.spawn(|| renewed.watch());
        sleep(Duration::from_secs(4));
        assert!(!streams.iter().any(ScopedJoinHandle::is_finished), "{}", served.node.log());
        let place = served.node.log_len();
        folder.write("clients.next", &new.root());
        std::fs::rename(folder.0.join("clients.next"), folder.0.join("clients.pem")).unwrap();
        served.node.until_since(place, &["clients get a new certificate"]);
        let withdrawn = OffsetDateTime::now_utc() - time::Duration::SECOND;
        for (stream, why) in streams.map(join).iter().zip([WRONG, "grpc-status: 16"]) {
            stream.check(why, withdrawn);
        }
        assert!(!kept.is_finished(), "the other authority's client keeps its stream");
        let livez = format!("https://{}/livez", served.http);
        assert!(!old.curl(&["-f", &livez]).status.success());
        assert_eq!(output_text(&renewed.curl(&["-f", &livez])), "alive\n");
        // The stream that is left ends with the server.
        kill_process(pid(served.node.pid()), Signal::KILL).unwrap();
        drop(join(kept));
    });
}
