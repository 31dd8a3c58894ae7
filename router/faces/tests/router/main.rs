//! The router between real sockets and a replica with tokens that the test decides.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod advisories;
mod all_faces;
mod apis;
mod audits;
mod background;
mod calls;
mod certificates;
mod choices;
mod client;
mod conversations;
#[path = "../../../../tests/common/documents.rs"]
mod documents;
mod doors;
mod fake;
mod fuzz;
mod grpc;
mod http;
mod known;
mod kserve;
mod limits;
mod llama_cpp;
mod llama_habits;
mod looking;
mod loss;
mod messages;
mod model;
mod models;
mod ollama;
mod openapi;
mod operators;
mod overload;
mod own_client;
mod pages;
mod paths;
mod peers;
mod policies;
mod raw;
mod records;
mod references;
mod replicas;
mod responses;
mod resume;
mod roster;
mod shapes;
mod small_fields;
mod stranded;
mod unread;
mod vllm_pages;
mod vllm_server;
mod vllm_words;

use crate::fake::Fake;
use router::{Config, RouterLimits, Timeouts};
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// A running router, and the replica behind it; or several.
pub struct House {
    pub fake: Fake,
    pub more: Vec<Fake>,
    pub http: SocketAddr,
    pub grpc: SocketAddr,
    pub shutdown: CancellationToken,
    served: JoinHandle<Result<(), faces::Error>>,
}

pub fn config() -> Config {
    // A fake sends nothing unless something changes, so silence is no loss here.
    let replica_silence_max = Duration::from_secs(600);
    let (reattach_min, drain_max) = (Duration::from_millis(5), Duration::from_secs(5));
    let timeouts = Timeouts { reattach_min, drain_max, replica_silence_max, ..Timeouts::default() };
    let limits = RouterLimits { body_bytes_max: 1 << 20, ..RouterLimits::default() };
    let names = vec!["toy".into(), "alias".into()];
    Config { names, limits, timeouts, metrics: Arc::new(|| "metric 1\n".into()), ..Config::default() }
}

impl House {
    pub async fn open(config: Config) -> House {
        let house = House::open_unready(config).await;
        house.fake.welcome();
        house.wait_until_ready().await;
        house
    }

    pub async fn open_unready(config: Config) -> House {
        House::of(config, vec![Fake::start()]).await
    }

    /// Two replicas, ready.
    pub async fn open_two(config: Config) -> House {
        let house = House::of(config, vec![Fake::start(), Fake::start()]).await;
        house.fake.script(|script| script.name = "one");
        house.other().script(|script| script.name = "two");
        house.fake.welcome();
        house.other().welcome();
        house.wait_for_phases(["ready", "ready"]).await;
        house
    }

    pub fn other(&self) -> &Fake {
        &self.more[0]
    }

    /// Waits until `/cluster` shows these phases.
    pub async fn wait_for_phases(&self, expect: [&str; 2]) {
        eventually(|| async {
            let page = client::get(self.http, "/cluster").await.json();
            let replicas = page["replicas"].as_array().unwrap();
            replicas.iter().map(|replica| replica["phase"].as_str().unwrap()).eq(expect)
        })
        .await;
    }

    pub async fn of(config: Config, fakes: Vec<Fake>) -> House {
        let coordinators: Vec<_> = fakes.iter().map(Fake::coordinator).collect();
        House::with(config, fakes, coordinators.into()).await
    }

    pub async fn with(config: Config, fakes: Vec<Fake>, members: router::Membership) -> House {
        House::with_texts(config, fakes, members, model::text()).await
    }

    /// Opens a router with a model that fills in text between two texts.
    pub async fn coding() -> House {
        let fakes = vec![Fake::start()];
        let members: Vec<_> = fakes.iter().map(Fake::coordinator).collect();
        House::with_texts(config(), fakes, members.into(), model::coder()).await
    }

    pub async fn with_texts(
        config: Config,
        mut fakes: Vec<Fake>,
        members: router::Membership,
        texts: impl Into<router::ModelTexts>,
    ) -> House {
        let (http, grpc) = (listener().await, listener().await);
        let addresses = (http.local_addr().unwrap(), grpc.local_addr().unwrap());
        let shutdown = CancellationToken::new();
        let serve = faces::serve(config, members, texts.into(), http, grpc, shutdown.clone());
        let served = tokio::spawn(serve);
        let fake = fakes.remove(0);
        House { fake, more: fakes, http: addresses.0, grpc: addresses.1, shutdown, served }
    }

    pub async fn wait_until_ready(&self) {
        eventually(|| async { client::get(self.http, "/ready").await.status == 200 }).await;
    }

    pub async fn close(self) {
        self.shutdown.cancel();
        self.served.await.unwrap().unwrap();
    }
}

async fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

/// A test that hangs fails.
pub fn run<T>(test: impl Future<Output = T>) -> T {
    run_within(Duration::from_secs(30), test)
}

pub fn run_within<T>(time_max: Duration, test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let result = runtime.block_on(async { tokio::time::timeout(time_max, test).await.expect("the test hangs") });
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

pub async fn eventually<F: Future<Output = bool>>(mut holds: impl FnMut() -> F) {
    for _ in 0..2000 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("the condition did not become true");
}
