//! Builds a router from its settings, within `serve` or in a process of its own.

use super::process::{resume_key, start_telemetry, stop_on_signals};
use super::routes::OtherModels;
use super::{api_tls, keys, text};
use crate::models;
use crate::settings::{ConfigSource, GRPC_PORT, RouterParts, RouterRole, ServeSettings, config_text};
use anyhow::{Context, anyhow};
use checkpoint::{Checkpoint, ModelSpec};
use clap::{ArgMatches, Args};
use cluster::{Addresses, Store};
use router::Membership;
use std::future::Future;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use telemetry::{Collector, logs};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tools::out;

/// The number of replicas for which a router's queues are sized if it finds replicas in a store.
const REPLICAS_EXPECTED: usize = 16;

#[derive(Args)]
pub struct RouterCommand {
    #[command(flatten)]
    pub settings: RouterRole,
    #[command(flatten)]
    pub source: ConfigSource,
}

impl RouterCommand {
    pub fn run(self, matches: &ArgMatches) -> anyhow::Result<()> {
        let RouterCommand { settings, source } = self;
        let mut role = source.merge_shared_file::<_, ServeSettings>(settings, matches)?.resolved()?;
        if source.print_config {
            out::print(&config_text(&role)?)?;
            return Ok(());
        }
        role.store.check()?;
        let given = role.route.given_addresses(role.store.is_given())?;
        let located = models::locate_or_fetch(&role.model.model, &source.hub)?;
        let name = role.model.served_name_or(located.name);
        let others = OtherModels::of(&role.route, &name, &source.hub)?;
        let content = role.router.otlp_content;
        let collector = role.watch.collector()?.map(|collector| Collector { content, ..collector });
        let metrics = start_telemetry(&role.watch, collector.as_ref(), Some(&name))?;
        let checkpoint = Checkpoint::open(&located.path)?;
        for address in given.iter().flat_map(|Addresses(addresses)| addresses) {
            role.trust.resolve("router", address, None)?;
        }
        check_clients(role.parts())?;
        Runtime::new()?.block_on(async {
            let listeners = Listeners::open(role.parts()).await?;
            listeners.print_addresses(role.parts(), checkpoint.spec())?;
            let shutdown = CancellationToken::new();
            tokio::spawn(stop_on_signals(shutdown.clone()));
            let membership = follow_coordinators(&role, given).await?;
            let resume_key = resume_key(role.trust.token()?.as_ref());
            let behind = ServedReplicas { membership, resume_key, others };
            route(role.parts(), &checkpoint, metrics.into(), behind, listeners, shutdown)?.await
        })
    }
}

/// Follows the given coordinators, or those that are registered in a store.
async fn follow_coordinators(role: &RouterRole, given: Option<Addresses>) -> anyhow::Result<Membership> {
    let store = match (given, role.store.open().await?) {
        (Some(given), _) => Store::fixed(given, 0),
        (None, store) => store.context("neither --coordinator nor --etcd-endpoints is given")?,
    };
    let trust = role.trust.clone();
    let dial = move |address: &str| {
        let trust = trust.at_each_dial("router", address, None).map_err(|error| format!("{error:#}"))?;
        let (address, until) = (address.to_owned(), CancellationToken::new());
        let now = move || Ok(wire::DialTarget { address: address.clone(), trust: trust(), until: until.clone() });
        Ok(wire::channel_to_where(now))
    };
    Ok(Membership::Followed { store, dial: Box::new(dial) })
}

/// The sockets on which clients reach the router.
pub struct Listeners {
    pub http: TcpListener,
    pub grpc: TcpListener,
    pub admin: Option<TcpListener>,
    /// Whether a request that arrives now would be served.
    pub readiness: tokio::sync::watch::Sender<bool>,
}

impl Listeners {
    pub async fn open(parts: RouterParts<'_>) -> anyhow::Result<Listeners> {
        let grpc = bind("gRPC", "--grpc", parts.router.grpc()).await?;
        Listeners::open_with(parts, grpc).await
    }

    /// Like `open`, for a machine with other servers: if the default gRPC port is in use, a free one is taken.
    pub async fn open_beside(parts: RouterParts<'_>) -> anyhow::Result<Listeners> {
        let usual = parts.router.grpc();
        let grpc = match TcpListener::bind(usual).await {
            Err(error) if error.kind() == ErrorKind::AddrInUse && usual.port() == GRPC_PORT => {
                let other = bind("gRPC", "--grpc", SocketAddr::new(usual.ip(), 0)).await?;
                tracing::info!(%usual, "the default gRPC port is in use, so this server uses a free one");
                other
            }
            Err(error) => return Err(bind_error("gRPC", "--grpc", usual, error)),
            Ok(grpc) => grpc,
        };
        Listeners::open_with(parts, grpc).await
    }

    async fn open_with(parts: RouterParts<'_>, grpc: TcpListener) -> anyhow::Result<Listeners> {
        let http = bind("HTTP", "--port", parts.router.http()).await?;
        let admin = match parts.router.admin {
            Some(address) => Some(bind("operators", "--admin", address).await?),
            None => None,
        };
        Ok(Listeners { http, grpc, admin, readiness: Default::default() })
    }

    /// Prints the addresses, and how to send a request once the model is ready.
    pub fn print_addresses(&self, parts: RouterParts<'_>, spec: &ModelSpec) -> anyhow::Result<()> {
        let (http, grpc) = (self.http.local_addr()?, self.grpc.local_addr()?);
        let model = parts.model.served_name().unwrap_or(&parts.model.model);
        let version = env!("CARGO_PKG_VERSION");
        let (web, rpc) = if parts.router.api_tls_cert.is_some() { ("https", "grpcs") } else { ("http", "grpc") };
        let addresses = format!("{web}://{http}/v1 and {rpc}://{grpc}");
        logs::write_line(&format!("lockstep {version} listens on {addresses} for {model}, which is not ready yet"));
        if let Some(admin) = &self.admin {
            logs::write_line(&format!("operators' pages: http://{}", admin.local_addr()?));
        }
        let (path, body) = example_request(spec);
        let ready = format!(
            "lockstep {version} serves {model} on {addresses}\n\
             try: curl -s {web}://{http}{path} -H 'content-type: application/json' -d '{body}'"
        );
        let mut readiness = self.readiness.subscribe();
        tokio::spawn(async move {
            // An error means that the process ends before it was ready.
            if readiness.wait_for(|is_ready| *is_ready).await.is_ok() {
                ready.lines().for_each(logs::write_line);
            }
        });
        Ok(())
    }
}

/// Returns the page and the body of a request that the model can answer.
fn example_request(spec: &ModelSpec) -> (&'static str, &'static str) {
    match (spec.pooling.is_classifier(), spec.pooling.labels.len()) {
        (true, 0 | 1) => ("/v1/rerank", r#"{"query": "a pet", "documents": ["a cat", "a car"]}"#),
        (true, _) => ("/classify", r#"{"input": "Hello!"}"#),
        (false, _) if spec.encoder.is_some() => ("/v1/embeddings", r#"{"input": "Hello!"}"#),
        (false, _) => ("/v1/chat/completions", r#"{"messages": [{"role": "user", "content": "Hello!"}]}"#),
    }
}

async fn bind(what: &str, flag: &str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.map_err(|error| bind_error(what, flag, address, error))
}

fn bind_error(what: &str, flag: &str, address: SocketAddr, error: std::io::Error) -> anyhow::Error {
    match error.kind() {
        ErrorKind::AddrInUse => {
            anyhow!("cannot listen for {what} on {address}: the address is in use; set {flag}")
        }
        ErrorKind::PermissionDenied => {
            anyhow!("cannot listen for {what} on {address}: this user has no permission; set {flag}")
        }
        _ => anyhow!("cannot listen for {what} on {address}: {error}; set {flag}"),
    }
}

/// Reads keys, certificates and chat template before anything starts, so that errors are reported immediately.
pub fn check_clients(parts: RouterParts<'_>) -> anyhow::Result<()> {
    keys::read(parts.router)?;
    if parts.router.admin.is_some() {
        keys::read_operators(parts.router)?;
    }
    api_tls::read(parts.router)?;
    text::check_template(parts.router)
}

/// What a router's pages show beside its own state.
#[derive(Clone)]
pub struct PageSources {
    pub metrics: router::Render,
    /// None if the replicas may be on other machines.
    pub machine_models: Option<router::ListMachineModels>,
}

impl From<router::Render> for PageSources {
    fn from(metrics: router::Render) -> PageSources {
        PageSources { metrics, machine_models: None }
    }
}

/// The replicas that a router serves, and the models besides its first one.
pub struct ServedReplicas {
    pub membership: Membership,
    pub resume_key: router::ResumeKey,
    pub others: OtherModels,
}

impl ServedReplicas {
    /// The replicas of this machine, all with one model.
    pub fn of_channels(coordinators: Vec<router::CoordinatorChannel>) -> anyhow::Result<ServedReplicas> {
        // No other process has to read these handles, so no other process can make any.
        let resume_key = router::ResumeKey::of(&wire::random::<32>()?);
        Ok(ServedReplicas { membership: coordinators.into(), resume_key, others: OtherModels::default() })
    }
}

/// Runs a router over these replicas, until `shutdown`.
pub fn route(
    parts: RouterParts<'_>,
    checkpoint: &Checkpoint,
    pages: PageSources,
    behind: ServedReplicas,
    listeners: Listeners,
    shutdown: CancellationToken,
) -> anyhow::Result<impl Future<Output = anyhow::Result<()>> + use<>> {
    let ServedReplicas { membership, resume_key, others } = behind;
    let n_replicas = match &membership {
        Membership::Given(given) => given.len(),
        Membership::Followed { store: Store::Static { given, .. }, .. } => given.0.len(),
        Membership::Followed { .. } => REPLICAS_EXPECTED,
    };
    let path = checkpoint.path().to_owned();
    // The files are opened on demand, so that they use no memory until then.
    let text_files: router::ReadTextFiles = Arc::new(move || Checkpoint::open(&path)?.text_bundle());
    let text_files = Some(text_files);
    let routes = others.routes.clone();
    let readiness = listeners.readiness;
    let PageSources { metrics, machine_models } = pages;
    let config = config(parts, n_replicas, metrics)?;
    let config = router::Config { resume_key, text_files, machine_models, routes, readiness, ..config };
    let mut texts = router::ModelTexts::from(text::first_model_text(checkpoint, &parts.model.model, parts.router)?);
    for (name, checkpoint) in &others.models {
        texts = texts.and(name.clone(), text::other_model_text(checkpoint).with_context(|| format!("--text {name}"))?);
    }
    let quotas_shared = shared_quotas(&membership, &config.keys)?;
    let (keys_followed, routes_followed) = (keys::follow(parts.router, &config.keys), others.follow());
    let tls_followed = api_tls::follow(parts.router, config.tls.as_ref());
    let admin_keys_followed = keys::follow_operators(parts.router, config.operators.as_ref());
    let http = faces::HttpListeners { clients: listeners.http, operators: listeners.admin };
    let served = faces::serve(config, membership, texts, http, listeners.grpc, shutdown);
    Ok(async move {
        tokio::select! {
            biased;
            served = served => Ok(served?),
            () = keys_followed => Ok(()),
            () = admin_keys_followed => Ok(()),
            () = routes_followed => Ok(()),
            () = tls_followed => Ok(()),
            () = quotas_shared => Ok(()),
        }
    })
}

/// Divides the limits of tenants among the routers that use one store. Does nothing without a store.
fn shared_quotas(membership: &Membership, keys: &router::ApiKeys) -> anyhow::Result<impl Future<Output = ()> + use<>> {
    let post = match membership {
        Membership::Given(_) => None,
        Membership::Followed { store, .. } => store.post(&new_name()?)?,
    };
    let shared = post.map(|post| router::SharedQuotas::new(keys, post));
    Ok(async move {
        match shared {
            Some(shared) => shared.run().await,
            None => std::future::pending().await,
        }
    })
}

/// Returns a name that no other router has, nor an earlier process of this router, whose share may not have expired
/// yet.
fn new_name() -> anyhow::Result<String> {
    Ok(wire::random::<8>()?.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn config(parts: RouterParts<'_>, n_replicas: usize, metrics: router::Render) -> anyhow::Result<router::Config> {
    let RouterParts { model, queue, router: settings, spoken } = parts;
    let drain_max = Duration::from_secs(queue.drain_seconds);
    let replica_absence_max = Duration::from_secs(settings.failover_max);
    let request_max = settings.request_seconds.map(Duration::from_secs);
    let requests_max = (queue.max_waiting as usize + queue.max_running as usize) * n_replicas;
    Ok(router::Config {
        names: model.served_model_name.clone().unwrap_or_default(),
        policy: settings.policy.into(),
        seed: settings.seed,
        request_metrics: settings.enable_per_request_metrics,
        limits: router::RouterLimits {
            // Requests without a first token: those in the queue, and those in prefill.
            requests_waiting_max: requests_max,
            waiting_tokens_max: coordinator::Limits::default().waiting_tokens_max as usize * n_replicas,
            requests_max,
            slots: queue.max_running as usize * n_replicas,
            choices_max: settings.max_choices,
            body_bytes_max: settings.max_body_bytes.0 as usize,
            stored: router::StoreLimits {
                responses_max: settings.stored_responses as usize,
                bytes_max: settings.stored_bytes.0 as usize,
                age_max: Duration::from_secs(settings.stored_seconds),
            },
            ..router::RouterLimits::default()
        },
        timeouts: router::Timeouts { drain_max, replica_absence_max, request_max, ..router::Timeouts::default() },
        keys: keys::read(settings)?,
        operators: settings.admin.map(|_| keys::read_operators(settings)).transpose()?,
        tls: api_tls::read(settings)?,
        hosts_allowed: settings.allowed_hosts.clone().unwrap_or_default(),
        origins_allowed: settings.allowed_origins.clone().unwrap_or_default(),
        root_path: settings.root_path.clone().unwrap_or_default(),
        pages_off: router::DisabledPages { metrics: settings.no_metrics, slots: settings.no_slots, ui: settings.no_ui },
        tags: settings.tags.clone().unwrap_or_default(),
        record: settings.answers.record(),
        audit: settings.answers.audit,
        speaks: spoken.speaks(),
        metrics,
        ..router::Config::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::tests::parse_settings;

    #[test]
    fn router_timeouts_follow_the_flags() {
        let waits = |words: &str| {
            let settings = parse_settings::<ServeSettings>(words).resolved().ok()?;
            Some(config(settings.router(), 1, Arc::new(String::new)).unwrap().timeouts)
        };
        let seconds = |words| {
            let waits = waits(words).unwrap();
            (waits.replica_absence_max.as_secs(), waits.drain_max.as_secs())
        };
        assert_eq!(seconds("--drain-seconds 4"), (60, 4));
        assert_eq!(seconds("--drain-seconds 4 --failover-max 7"), (7, 4));
        assert_eq!(seconds("--drain-seconds 4 --failover-max 0"), (0, 4));
        let request_max = |words| waits(words).map(|waits| waits.request_max);
        let minute = Some(Duration::from_secs(60));
        let flags = ["", "--request-seconds 60", "--request-seconds 0"];
        assert_eq!(flags.map(request_max), [Some(None), Some(minute), None]);
    }

    #[test]
    fn routers_answer_to_several_names() {
        for words in ["--served-model-name a --served-model-name b", "--served-model-name a,b"] {
            let settings = parse_settings::<ServeSettings>(words);
            assert_eq!(settings.model.served_name(), Some("a"));
            assert_eq!(config(settings.router(), 1, Arc::new(String::new)).unwrap().names, ["a", "b"], "{words}");
        }
        let mut model = parse_settings::<ServeSettings>("").model;
        assert_eq!(model.served_name(), None);
        assert_eq!(model.served_name_or("own".into()), "own");
    }

    #[test]
    fn router_limits_follow_the_flags() {
        let check = |words: &str, expect: Option<(u32, usize)>| {
            let settings = parse_settings::<ServeSettings>(words).resolved().ok();
            let limits = settings.map(|of| config(of.router(), 1, Arc::new(String::new)).unwrap().limits);
            assert_eq!(limits.map(|limits| (limits.choices_max, limits.body_bytes_max)), expect, "{words}");
        };
        check("", Some((128, 4 << 20)));
        check("--max-choices 7 --max-body-bytes 1MiB", Some((7, 1 << 20)));
        check("--max-body-bytes 64MiB", Some((128, 64 << 20)));
        for words in ["--max-choices 0", "--max-body-bytes 0", "--max-body-bytes 65MiB"] {
            check(words, None);
        }
    }

    #[test]
    fn stored_response_limits_follow_the_flags() {
        let check = |words: &str, expect: Option<(usize, usize, u64)>| {
            let settings = parse_settings::<ServeSettings>(words).resolved().ok();
            let stored = settings.map(|of| config(of.router(), 1, Arc::new(String::new)).unwrap().limits.stored);
            let limits = stored.map(|of| (of.responses_max, of.bytes_max, of.age_max.as_secs()));
            assert_eq!(limits, expect, "{words}");
        };
        check("", Some((4096, 64 << 20, 3600)));
        check("--stored-responses 0 --stored-bytes 1MiB --stored-seconds 5", Some((0, 1 << 20, 5)));
        check("--stored-bytes 0", None);
        check("--stored-seconds 0", None);
    }
}
