//! A real etcd for one test: members on loopback, killed and started again. Has no knowledge of keys.
#![allow(dead_code, reason = "each test binary uses a part")]

use crate::ports::free_port;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Attempts to start: a port that was free when it was chosen may be taken by the time it is used.
const STARTS_MAX: usize = 5;
/// A member without its ports ends within this time.
const SETTLE: Duration = Duration::from_millis(300);

/// The clients' certificate files.
pub struct Tls {
    pub authority: String,
    pub certificate: String,
    pub key: String,
}

pub struct Etcd {
    folder: PathBuf,
    host: String,
    scheme: &'static str,
    flags: Vec<String>,
    members: Vec<Member>,
}

struct Member {
    client: u16,
    peer: u16,
    child: Option<Child>,
}

impl Etcd {
    pub fn start(n_members: usize) -> Etcd {
        Etcd::start_with(n_members, None)
    }

    pub fn start_with(n_members: usize, tls: Option<&Tls>) -> Etcd {
        Etcd::start_at("127.0.0.1", n_members, tls)
    }

    /// Starts members at an address of this host.
    pub fn start_at(host: &str, n_members: usize, tls: Option<&Tls>) -> Etcd {
        let scheme = if tls.is_some() { "https" } else { "http" };
        let flags = tls.map(Tls::flags).unwrap_or_default();
        for _ in 0..STARTS_MAX {
            let mut etcd = Etcd {
                folder: folder(),
                host: host.into(),
                scheme,
                flags: flags.clone(),
                members: ports(host, n_members),
            };
            (0..n_members).for_each(|i| etcd.spawn(i));
            std::thread::sleep(SETTLE);
            let ended = etcd.members.iter_mut().any(|m| m.child.as_mut().unwrap().try_wait().unwrap().is_some());
            if !ended {
                return etcd;
            }
            eprintln!("etcd ended at its start: {}", etcd.log(0));
        }
        panic!("etcd does not start: see above");
    }

    pub fn endpoint(&self, i: usize) -> String {
        format!("{}://{}:{}", self.scheme, self.host, self.members[i].client)
    }

    pub fn endpoints(&self) -> Vec<String> {
        (0..self.members.len()).map(|i| self.endpoint(i)).collect()
    }

    pub fn port(&self, i: usize) -> u16 {
        self.members[i].client
    }

    /// Kills a member like a power failure.
    pub fn kill(&mut self, i: usize) {
        let mut child = self.members[i].child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub fn start_again(&mut self, i: usize) {
        self.spawn(i);
        std::thread::sleep(SETTLE);
        let ended = self.members[i].child.as_mut().unwrap().try_wait().unwrap();
        assert!(ended.is_none(), "etcd ended when it was started again: {}", self.log(i));
    }

    /// Starts a member with an empty disk at its old address.
    pub fn start_empty(&mut self, i: usize) {
        std::fs::remove_dir_all(self.data(i)).unwrap();
        self.start_again(i);
    }

    pub fn log(&self, i: usize) -> String {
        std::fs::read_to_string(self.folder.join(format!("{i}.log"))).unwrap_or_default()
    }

    fn data(&self, i: usize) -> PathBuf {
        self.folder.join(format!("{i}"))
    }

    fn spawn(&mut self, i: usize) {
        let peer = |i: usize| format!("http://{}:{}", self.host, self.members[i].peer);
        let all: Vec<String> = (0..self.members.len()).map(|i| format!("m{i}={}", peer(i))).collect();
        let log = std::fs::File::options().create(true).append(true).open(self.folder.join(format!("{i}.log")));
        let mut command = Command::new("etcd");
        command.args(["--name", &format!("m{i}"), "--data-dir"]).arg(self.data(i));
        command.args(["--listen-client-urls", &self.endpoint(i), "--advertise-client-urls", &self.endpoint(i)]);
        command.args(["--listen-peer-urls", &peer(i), "--initial-advertise-peer-urls", &peer(i)]);
        command.args(["--initial-cluster", &all.join(","), "--initial-cluster-state", "new"]).args(&self.flags);
        // etcd requires this variable on less common processors.
        command.env("ETCD_UNSUPPORTED_ARCH", std::env::consts::ARCH.replace("aarch64", "arm64"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.unwrap());
        match command.spawn() {
            Ok(child) => self.members[i].child = Some(child),
            Err(error) => panic!("etcd cannot be started ({error}): run `make test`, or install Debian's etcd-server"),
        }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for child in self.members.iter_mut().filter_map(|member| member.child.as_mut()) {
            // It may have ended already.
            let _ended = child.kill();
            let _reaped = child.wait();
        }
        // A leftover lies in the temporary folder.
        let _left = std::fs::remove_dir_all(&self.folder);
    }
}

impl Tls {
    fn flags(&self) -> Vec<String> {
        let Tls { authority, certificate, key } = self;
        [
            format!("--cert-file={certificate}"),
            format!("--key-file={key}"),
            format!("--trusted-ca-file={authority}"),
            "--client-cert-auth".into(),
        ]
        .into()
    }
}

fn folder() -> PathBuf {
    static N: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let n = N.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path: &Path = &std::env::temp_dir();
    let path = path.join(format!("lockstep-etcd-{}-{n}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// Free ports, of which none is taken by a connection while a member is down.
fn ports(host: &str, n_members: usize) -> Vec<Member> {
    let free = || free_port(host, 24_000..32_000);
    (0..n_members).map(|_| Member { client: free(), peer: free(), child: None }).collect()
}
