//! A router's settings, in `serve` and in a process of its own.

use super::answers::AnswerSettings;
use super::bytes::ByteSize;
use super::check::at_least_one;
use super::model::ModelSettings;
use super::queue::QueueSettings;
use super::spoken::ProtocolSettings;
use super::store::{StoreSettings, one_or_many};
use super::trust::TrustSettings;
use super::watch::WatchSettings;
use anyhow::{Context, ensure};
use clap::{ArgAction, Args};
use cluster::Addresses;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use tools::pick::PickChoice;

/// The default port of the gRPC API.
pub const GRPC_PORT: u16 = 50051;

#[derive(Args, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RouterSettings {
    /// Address of the HTTP API [default: 127.0.0.1:8000]
    #[arg(long, env = "LOCKSTEP_HTTP", value_name = "ADDR")]
    pub http: Option<SocketAddr>,
    /// Address of the gRPC API [default: 127.0.0.1:50051]
    #[arg(long, env = "LOCKSTEP_GRPC", value_name = "ADDR")]
    pub grpc: Option<SocketAddr>,
    /// IP address of both APIs, unless --http or --grpc gives a full address [default: 127.0.0.1]
    #[arg(long, env = "LOCKSTEP_HOST", value_name = "IP")]
    pub host: Option<IpAddr>,
    /// Port of the HTTP API, unless --http gives a full address [default: 8000]
    #[arg(long, env = "LOCKSTEP_PORT")]
    pub port: Option<u16>,
    /// Which replica gets a request
    #[arg(long, env = "LOCKSTEP_POLICY", value_enum, default_value = "prefix")]
    pub policy: PickChoice,
    /// File of API keys, one per line: KEY or NAME:KEY [default: none]
    ///
    /// Keys of one name are one tenant, which shares no cache with others. A tenant's limits may follow its key:
    /// weight=4 requests_per_minute=600 tokens_per_minute=90000 concurrent=16. A line that begins with * has the limits
    /// of all tenants without their own. The file is read again when it changes; a file without keys in three
    /// checks revokes all. If no key was ever given, every client is served.
    #[arg(long, env = "LOCKSTEP_API_KEYS", value_name = "FILE")]
    pub api_keys: Option<PathBuf>,
    /// Seconds for which keys stay valid after their file became unreadable [default: forever]
    #[arg(long, env = "LOCKSTEP_API_KEYS_GRACE", value_name = "SECONDS")]
    pub api_keys_grace: Option<u64>,
    /// An API key, besides those of --api-keys
    #[arg(long, env = "LOCKSTEP_API_KEY", value_name = "KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Certificate of the HTTP and gRPC APIs, as PEM; turns on TLS towards clients
    ///
    /// The files of --api-tls-cert, --api-tls-key and --api-client-ca are read again when they change.
    #[arg(long, alias = "ssl-certfile", env = "LOCKSTEP_API_TLS_CERT", value_name = "FILE", requires = "api_tls_key")]
    pub api_tls_cert: Option<PathBuf>,
    /// Private key of --api-tls-cert, as PEM
    #[arg(long, alias = "ssl-keyfile", env = "LOCKSTEP_API_TLS_KEY", value_name = "FILE", requires = "api_tls_cert")]
    pub api_tls_key: Option<PathBuf>,
    /// CA certificate of clients, as PEM: a client without a certificate of it is refused
    #[arg(
        long,
        alias = "ssl-ca-certs",
        env = "LOCKSTEP_API_CLIENT_CA",
        value_name = "FILE",
        requires = "api_tls_cert"
    )]
    pub api_client_ca: Option<PathBuf>,
    /// Address of an HTTP server for operators, without TLS: /metrics and /cluster, which the HTTP API then no
    /// longer has, and /livez, /health and /ready [default: none]
    #[arg(long, env = "LOCKSTEP_ADMIN", value_name = "ADDR")]
    pub admin: Option<SocketAddr>,
    /// File of operators' keys, one per line, for /metrics and /cluster at --admin [default: no key is required]
    #[arg(long, env = "LOCKSTEP_ADMIN_KEYS", value_name = "FILE", requires = "admin")]
    pub admin_keys: Option<PathBuf>,
    /// Host names that the HTTP API accepts on a loopback address without keys, such as a proxy's [default:
    /// localhost and loopback addresses; * is any]
    #[arg(long, env = "LOCKSTEP_ALLOWED_HOSTS", value_name = "HOST", value_delimiter = ',')]
    #[serde(default, deserialize_with = "one_or_many")]
    pub allowed_hosts: Option<Vec<String>>,
    /// Origins of web pages that may use the HTTP API without keys, such as https://chat.example [default: those of
    /// this machine; * is any]
    #[arg(long, env = "LOCKSTEP_ALLOWED_ORIGINS", value_name = "ORIGIN", value_delimiter = ',')]
    #[serde(default, deserialize_with = "one_or_many")]
    pub allowed_origins: Option<Vec<String>>,
    /// Path under which a proxy serves the HTTP API, such as /llm: pages answer with it and without [default: none]
    #[arg(long, env = "LOCKSTEP_ROOT_PATH", value_name = "PATH")]
    pub root_path: Option<String>,
    /// Do not serve metrics at /metrics
    #[arg(
        long, env = "LOCKSTEP_NO_METRICS", action = ArgAction::Set, num_args = 0..=1, default_value_t = false,
        default_missing_value = "true"
    )]
    pub no_metrics: bool,
    /// Do not list running requests at /slots
    #[arg(
        long, env = "LOCKSTEP_NO_SLOTS", action = ArgAction::Set, num_args = 0..=1, default_value_t = false,
        default_missing_value = "true"
    )]
    pub no_slots: bool,
    /// Do not serve the page for browsers at /
    #[arg(
        long, env = "LOCKSTEP_NO_UI", action = ArgAction::Set, num_args = 0..=1, default_value_t = false,
        default_missing_value = "true"
    )]
    pub no_ui: bool,
    /// Tags that /models shows beside the model, as in llama.cpp's server [default: none]
    #[arg(long, env = "LOCKSTEP_TAGS", value_name = "TAG", value_delimiter = ',')]
    #[serde(default, deserialize_with = "one_or_many")]
    pub tags: Option<Vec<String>>,
    /// Maximum seconds that a request waits to be computed again after its coordinator or workers were lost
    #[arg(long, env = "LOCKSTEP_FAILOVER_MAX", value_name = "SECONDS", default_value_t = 60)]
    pub failover_max: u64,
    /// Maximum seconds of a request, whatever deadline its client sets [default: no limit]
    #[arg(long, env = "LOCKSTEP_REQUEST_SECONDS", value_name = "SECONDS")]
    pub request_seconds: Option<u64>,
    /// Maximum choices of one prompt, the field n
    #[arg(long, env = "LOCKSTEP_MAX_CHOICES", default_value_t = 128)]
    pub max_choices: u32,
    /// Seed of requests without one [default: a random one for each]
    #[arg(long, env = "LOCKSTEP_SEED")]
    pub seed: Option<u64>,
    /// Largest body of a request, over HTTP and gRPC
    #[arg(long, env = "LOCKSTEP_MAX_BODY_BYTES", value_name = "SIZE", default_value = "4MiB")]
    pub max_body_bytes: ByteSize,
    /// Maximum number of stored responses of /v1/responses, which later requests can continue; 0 stores none
    #[arg(long, env = "LOCKSTEP_STORED_RESPONSES", default_value_t = 4096)]
    pub stored_responses: u32,
    /// Memory for stored responses
    #[arg(long, env = "LOCKSTEP_STORED_BYTES", value_name = "SIZE", default_value = "64MiB")]
    pub stored_bytes: ByteSize,
    /// Seconds for which a response is stored
    #[arg(long, env = "LOCKSTEP_STORED_SECONDS", value_name = "SECONDS", default_value_t = 3600)]
    pub stored_seconds: u64,
    /// Chat template instead of the model's own: a file, or the template itself
    #[arg(long, env = "LOCKSTEP_CHAT_TEMPLATE", value_name = "FILE")]
    pub chat_template: Option<String>,
    /// Variables of the chat template where a request gives none, as a JSON object, such as {"enable_thinking": false}
    #[arg(long, env = "LOCKSTEP_DEFAULT_CHAT_TEMPLATE_KWARGS", value_name = "JSON")]
    pub default_chat_template_kwargs: Option<String>,
    /// Form in which the model writes tool calls, such as hermes or llama3_json [default: found in its chat template]
    #[arg(long, env = "LOCKSTEP_TOOL_CALL_PARSER", value_name = "NAME")]
    pub tool_call_parser: Option<String>,
    /// Form in which the model writes its reasoning, such as deepseek_r1 or qwen3 [default: found in its chat template]
    #[arg(long, env = "LOCKSTEP_REASONING_PARSER", value_name = "NAME")]
    pub reasoning_parser: Option<String>,
    /// Let a model choose itself to call a tool; this is always on, and the flag exists for users of vLLM
    #[arg(
        long, env = "LOCKSTEP_ENABLE_AUTO_TOOL_CHOICE", action = ArgAction::Set, num_args = 0..=1,
        default_value_t = true, default_missing_value = "true"
    )]
    pub enable_auto_tool_choice: bool,
    /// Let clients send a chat template of their own with a request
    #[arg(
        long, env = "LOCKSTEP_TRUST_REQUEST_CHAT_TEMPLATE", action = ArgAction::Set, num_args = 0..=1,
        default_value_t = false, default_missing_value = "true"
    )]
    pub trust_request_chat_template: bool,
    /// Add the times of a request to its answer, as vLLM's servers do (`metrics`)
    #[arg(
        long, env = "LOCKSTEP_ENABLE_PER_REQUEST_METRICS", action = ArgAction::Set, num_args = 0..=1,
        default_value_t = false, default_missing_value = "true"
    )]
    pub enable_per_request_metrics: bool,
    /// Also send the text of prompts and answers, in the trace spans of requests
    #[arg(
        long, env = "LOCKSTEP_OTLP_CONTENT", action = ArgAction::Set, num_args = 0..=1, default_value_t = false,
        default_missing_value = "true"
    )]
    pub otlp_content: bool,
    #[command(flatten)]
    #[serde(flatten)]
    pub answers: AnswerSettings,
}

impl RouterSettings {
    pub fn http(&self) -> SocketAddr {
        self.http.unwrap_or_else(|| SocketAddr::new(self.host(), self.port.unwrap_or(8000)))
    }

    pub fn grpc(&self) -> SocketAddr {
        self.grpc.unwrap_or_else(|| SocketAddr::new(self.host(), GRPC_PORT))
    }

    fn host(&self) -> IpAddr {
        self.host.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
    }

    /// Fills in the full addresses, and checks the rest.
    pub fn resolved(mut self) -> anyhow::Result<RouterSettings> {
        ensure!(
            self.enable_auto_tool_choice,
            "--enable-auto-tool-choice=false is not supported: clients can send `tool_choice` none"
        );
        self.request_seconds.map_or(Ok(()), |seconds| at_least_one("request-seconds", seconds))?;
        at_least_one("max-choices", self.max_choices)?;
        self.root_path = self.root_path.as_deref().map(normalized_root).transpose()?;
        self.answers.check()?;
        at_least_one("max-body-bytes", self.max_body_bytes.0)?;
        at_least_one("stored-bytes", self.stored_bytes.0)?;
        at_least_one("stored-seconds", self.stored_seconds)?;
        let limit = router::RouterLimits::default().body_discarded_max as u64;
        ensure!(self.max_body_bytes.0 <= limit, "--max-body-bytes {} is more than 64 MiB", self.max_body_bytes);
        (self.http, self.grpc) = (Some(self.http()), Some(self.grpc()));
        (self.host, self.port) = (None, None);
        Ok(self)
    }
}

/// Returns the path with a slash at its beginning only; the root itself is empty.
fn normalized_root(path: &str) -> anyhow::Result<String> {
    let is_plain = path.bytes().all(|byte| byte.is_ascii_graphic() && !b"?#%".contains(&byte));
    ensure!(is_plain, "--root-path {path:?} has characters that a path cannot have");
    let parts = path.trim_matches('/');
    Ok(if parts.is_empty() { String::new() } else { format!("/{parts}") })
}

/// The replicas and the models of a cluster's router.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RouteSettings {
    /// Address of a replica's coordinator; give several, separated by commas, to route to several replicas
    #[arg(long, alias = "coordinators", env = "LOCKSTEP_COORDINATOR", value_name = "HOST:PORT", value_delimiter = ',')]
    #[serde(default, deserialize_with = "one_or_many")]
    pub coordinator: Option<Vec<String>>,
    /// Another model that replicas serve, for its tokenizer and chat template
    ///
    /// NAME is the name that its replicas serve [default: the model's own]. Names in routes without a --text use
    /// the tokenizer and chat template of the router's first model.
    #[arg(long, env = "LOCKSTEP_TEXT", value_name = "NAME=MODEL", value_delimiter = ',')]
    #[serde(default, deserialize_with = "one_or_many")]
    pub text: Option<Vec<String>>,
    /// Name that clients request, and the versions behind it by weight, such as chat=v1:90,v2:10
    ///
    /// A version is the name that its replicas serve. Where different replicas serve one name, @ and the beginning of a
    /// policy digest select one of them, as in v1@0a1b2c.
    #[arg(long, env = "LOCKSTEP_ROUTE", value_name = "NAME=VERSION:WEIGHT,..", value_delimiter = ';')]
    #[serde(default, deserialize_with = "one_or_many")]
    pub route: Option<Vec<String>>,
    /// File of routes, one per line; it is read again when it changes
    #[arg(long, env = "LOCKSTEP_ROUTES", value_name = "FILE")]
    pub routes: Option<PathBuf>,
}

impl RouteSettings {
    /// Returns the given coordinators, or None if the router finds them in a store.
    pub fn given_addresses(&self, has_store: bool) -> anyhow::Result<Option<Addresses>> {
        let addresses = self.coordinator.clone().unwrap_or_default();
        ensure!(
            addresses.is_empty() == has_store,
            "give either --coordinator HOST:PORT, a replica's address, or --etcd-endpoints HOST:PORT, to find replicas"
        );
        if has_store {
            return Ok(None);
        }
        let twice = addresses.iter().enumerate().find(|(i, address)| addresses[..*i].contains(address));
        ensure!(twice.is_none(), "--coordinator {} is given twice", twice.map_or("", |(_, address)| address));
        Ok(Some(addresses.join(",").parse::<Addresses>().context("--coordinator")?))
    }
}

/// The settings of `lockstep router`.
#[derive(Args, Clone, Debug, Serialize, Deserialize)]
pub struct RouterRole {
    #[command(flatten)]
    #[serde(flatten)]
    pub route: RouteSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub store: StoreSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub trust: TrustSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub spoken: ProtocolSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub model: ModelSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub router: RouterSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub queue: QueueSettings,
    #[command(flatten)]
    #[serde(flatten)]
    pub watch: WatchSettings,
}

impl RouterRole {
    pub fn resolved(mut self) -> anyhow::Result<RouterRole> {
        self.queue.check()?;
        self.router = self.router.resolved()?;
        self.watch = self.watch.resolved()?;
        Ok(self)
    }

    pub fn parts(&self) -> RouterParts<'_> {
        RouterParts { model: &self.model, queue: &self.queue, router: &self.router, spoken: self.spoken }
    }
}

/// The settings of a router, from either role.
#[derive(Clone, Copy)]
pub struct RouterParts<'a> {
    pub model: &'a ModelSettings,
    pub queue: &'a QueueSettings,
    pub router: &'a RouterSettings,
    pub spoken: ProtocolSettings,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_path_has_one_form() {
        for given in ["/llm", "llm", "/llm/"] {
            assert_eq!(normalized_root(given).unwrap(), "/llm");
        }
        assert_eq!(normalized_root("/").unwrap(), "");
        assert!(normalized_root("/a?b").is_err() && normalized_root("/a b").is_err());
    }

    #[test]
    fn coordinators_are_one_or_several() {
        let read = |file: &str| toml::from_str::<RouteSettings>(file).unwrap().coordinator;
        let addresses = |list: &[&str]| Some(list.iter().map(|address| (*address).to_owned()).collect::<Vec<_>>());
        assert_eq!(read("coordinator = \"a:1\""), addresses(&["a:1"]));
        assert_eq!(read("coordinator = [\"a:1\", \"b:2\"]"), addresses(&["a:1", "b:2"]));
        assert_eq!(read(""), None);
    }
}
