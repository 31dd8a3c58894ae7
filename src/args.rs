//! Arguments, parsed and nothing more: what they mean together is `config`'s.

use crate::bench;
use crate::config::Settings;
use crate::single::{CoordinatorSettings, RouterSettings, WorkerSettings};
use crate::store::StoreSettings;
use crate::trust::TrustSettings;
use crate::{scale, simulate, status, top};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use std::path::PathBuf;

/// Serves large language models: the same request gives the same tokens, whatever happens.
#[derive(Parser)]
#[command(name = "lockstep", version, about, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of `serve` that a role alone has no use for, and whose they are. A file and the environment may be shared by
/// roles; what stands on a command line is meant for the one that it begins with.
const UNHEEDED: [(&str, &str, &[&str]); 6] = [
    (
        "coordinator",
        "router",
        &["http", "grpc", "host", "port", "api_keys", "api_key", "failover_max", "request_seconds", "policy"],
    ),
    ("coordinator", "worker", &["kernel_cache", "cuda_graphs", "isa", "wire", "collective", "threads"]),
    ("coordinator", "serve", &["inproc", "control"]),
    (
        "router",
        "coordinator",
        &[
            "tp",
            "pp",
            "device",
            "numerics",
            "activations",
            "kv_dtype",
            "kv_memory",
            "context",
            "max_chunk_tokens",
            "prefix_cache",
            "zero_kv",
            "replan_seconds",
            "regrow_seconds",
            "load_seconds",
            "otlp_steps",
        ],
    ),
    ("router", "worker", &["kernel_cache", "cuda_graphs", "isa", "wire", "collective", "threads"]),
    ("router", "serve", &["inproc", "control"]),
];

/// What the command line says; ends the process where it cannot be meant.
pub fn parse() -> Cli {
    let mut command = command();
    let matches = command.get_matches_mut();
    if let Some(unheeded) = unheeded(&matches) {
        command.error(ErrorKind::UnknownArgument, unheeded).exit();
    }
    Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

/// Nobody is offered what he may not say.
fn command() -> clap::Command {
    UNHEEDED.iter().fold(Cli::command(), |command, (role, _, flags)| {
        let hidden = |flag: clap::Arg| if flags.contains(&flag.get_id().as_str()) { flag.hide(true) } else { flag };
        command.mut_subcommand(role, |role| role.mut_args(hidden))
    })
}

fn unheeded(matches: &ArgMatches) -> Option<String> {
    let (role, said) = matches.subcommand()?;
    let of_role = UNHEEDED.iter().filter(|(of, _, _)| *of == role);
    let mut flags = of_role.flat_map(|(_, whose, flags)| flags.iter().map(move |flag| (*flag, *whose)));
    let (flag, whose) = flags.find(|(flag, _)| said.value_source(flag) == Some(ValueSource::CommandLine))?;
    Some(format!("`lockstep {role}` does not heed --{}: it is for `lockstep {whose}`", flag.replace('_', "-")))
}

const SERVE_HELP: &str = "\
Families, from safetensors (as a Hugging Face folder) and from GGUF:
  Llama and what is made like it (SmolLM2, Yi, ..)  tp up to the query heads; a KV head may be cut
  Mistral, SmolLM3, Qwen2, Qwen3, Phi-3             the same
  Gemma 2, Gemma 3                                  the same; windowed layers by turns
  GPT-2                                             the same; positions are learned
  Mixtral, Qwen3-MoE                                the same, and the experts are spread over a stage's ranks
pp goes up to the layers. `lockstep plan MODEL --tp N --pp N` shows who would hold what, or why it cannot be.

Examples: lockstep serve smollm2 --http 127.0.0.1:8000
          lockstep serve smollm2 --tp 2 --pp 2      four worker processes
          lockstep serve smollm2 --replicas 2       two replicas behind one address";

const SCALE_HELP: &str = "\
The workers must have joined already: `lockstep status` shows spares. What does not fit is refused with the
arithmetic, and then nothing has changed. A coordinator that is started again begins with the grid of its own flags.

`lockstep serve` is reached at 127.0.0.1:50100 too, or where its --control says.

Example: lockstep scale --coordinator 127.0.0.1:50100 --tp 2 --pp 1";

const SIMULATE_HELP: &str = "\
The router's pick, the placement and the planner of steps are those that serve; GPUs are a table and a roofline, time
is virtual, and the same seed says the same. No GPU, no model file and no network is asked for.

Examples: lockstep simulate --replicas 256 --gpu h100 --model llama-3.1-70b --tp 8 --rate 2000
          lockstep simulate --model qwen3-32b --weights fp8 --tp 2 --rate 4 --prompt lognormal:1500,1500 --json";

const WORKER_HELP: &str = "\
Example: lockstep worker --join coordinator:50100 --token-file token
         lockstep worker --etcd-endpoints etcd:2379 --replica one --token-file token";

const RELOAD_HELP: &str = "\
Streams go on with the same tokens. A file that has become another model is refused, and then nothing has changed: start
another replica with it instead. A rank that cannot read its copy goes on with what it had, and is named.

Example: lockstep reload --coordinator 127.0.0.1:50100";

#[derive(Subcommand)]
pub enum Command {
    /// Serve a model on this machine: OpenAI's API over HTTP, and gRPC
    #[command(after_help = SERVE_HELP)]
    Serve(Serve),
    /// Ask a model once, or chat with it when no prompt is given
    #[command(after_help = "Example: lockstep run smollm2 \"Why is the sky blue?\"")]
    Run(Run),
    /// Coordinate a replica whose workers and routers are elsewhere
    #[command(after_help = "Example: lockstep coordinator smollm2 --tp 2 --listen 0.0.0.0:50100 --token-file token")]
    Coordinator(Coordinator),
    /// Compute for a coordinator
    #[command(
        after_help = WORKER_HELP
    )]
    Worker(Worker),
    /// Answer clients for coordinators that are elsewhere
    #[command(after_help = "Example: lockstep router smollm2 --coordinator one:50100 --coordinator two:50100 \
                      --token-file token")]
    Router(Router),
    /// Print a new join token, for the file that all roles of a cluster share
    #[command(after_help = "Example: (umask 077; lockstep token > token)")]
    Token,
    /// Fetch a model and verify its checksum
    #[command(after_help = "Example: lockstep pull smollm2")]
    Pull(Pull),
    /// List the models that are here, and those that have a short name
    #[command(after_help = "Example: lockstep models --json")]
    Models(Models),
    /// Show how a model would be placed, in bytes and tokens, without loading it
    #[command(after_help = "Example: lockstep plan smollm2 --kv-memory 512MiB\n         lockstep plan --devices")]
    Plan(Plan),
    /// Show the live cluster once: each rank's place, memory and where its time goes
    #[command(after_help = "Example: lockstep status --url http://127.0.0.1:8000\n         lockstep status --devices")]
    Status(Status),
    /// Show the live cluster, again and again
    #[command(after_help = "Example: lockstep top --every 2")]
    Top(top::Top),
    /// Give a replica that serves another grid, with the same tokens and without failing a request
    #[command(after_help = SCALE_HELP)]
    Scale(scale::Scale),
    /// Have every rank of a replica that serves read its model again, as when a disk was moved or a file restored
    #[command(after_help = RELOAD_HELP)]
    Reload(scale::Reload),
    /// Put load on a server that speaks OpenAI's API, and measure it
    #[command(after_help = "Example: lockstep bench --concurrency 1,8,32 --prompt uniform:64..256 --output 64")]
    Bench(bench::Options),
    /// Foretell how a cluster of named GPUs would serve a load: latency, goodput, utilisation and cost
    #[command(after_help = SIMULATE_HELP)]
    Simulate(simulate::Options),
}

#[derive(Args)]
pub struct Serve {
    #[command(flatten)]
    pub settings: Settings,
    #[command(flatten)]
    pub source: Source,
}

#[derive(Args)]
pub struct Coordinator {
    #[command(flatten)]
    pub settings: Settings,
    #[command(flatten)]
    pub own: CoordinatorSettings,
    #[command(flatten)]
    pub store: StoreSettings,
    #[command(flatten)]
    pub trust: TrustSettings,
    #[command(flatten)]
    pub source: Source,
}

#[derive(Args)]
pub struct Router {
    #[command(flatten)]
    pub settings: Settings,
    #[command(flatten)]
    pub own: RouterSettings,
    #[command(flatten)]
    pub store: StoreSettings,
    #[command(flatten)]
    pub trust: TrustSettings,
    #[command(flatten)]
    pub source: Source,
}

#[derive(Args)]
pub struct Worker {
    #[command(flatten)]
    pub own: WorkerSettings,
    #[command(flatten)]
    pub store: StoreSettings,
    #[command(flatten)]
    pub trust: TrustSettings,
    /// A TOML file with the same names as the flags; flags and LOCKSTEP_* win over it
    #[arg(long, env = "LOCKSTEP_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print what was resolved from flags, environment and file, and stop
    #[arg(long)]
    pub print_config: bool,
    /// Started by `serve`, which says the token on standard input and ends this worker with itself
    #[arg(long, hide = true)]
    pub supervised: bool,
    #[command(flatten)]
    pub hub: Hub,
}

#[derive(Args)]
pub struct Run {
    /// What to ask, or - for what stands on standard input; without it, a chat begins
    #[arg(index = 2)]
    pub prompt: Option<String>,
    /// Sampling temperature; 0 is greedy
    #[arg(long)]
    pub temperature: Option<f32>,
    /// The same seed gives the same answer
    #[arg(long)]
    pub seed: Option<u64>,
    /// Tokens to answer with at most
    #[arg(long)]
    pub max_tokens: Option<u32>,
    /// Instructions that the chat begins with
    #[arg(long)]
    pub system: Option<String>,
    #[command(flatten)]
    pub settings: Settings,
    #[command(flatten)]
    pub source: Source,
}

#[derive(Args)]
pub struct Pull {
    /// A catalogue name, or a hub id as org/name or org/name:Q4_K_M
    pub model: String,
    /// What its SHA-256 must be; of several files that of `LC_ALL=C sha256sum * | sha256sum` [default: not asked]
    #[arg(long, value_name = "HEX")]
    pub sha256: Option<String>,
    #[command(flatten)]
    pub hub: Hub,
}

#[derive(Args)]
pub struct Models {
    /// As JSON, for programs
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub hub: Hub,
}

#[derive(Args)]
pub struct Plan {
    /// List what this machine has to compute on, with drivers, memory and NCCL, and stop
    #[arg(long)]
    pub devices: bool,
    #[command(flatten)]
    pub settings: Settings,
    #[command(flatten)]
    pub source: Source,
}

#[derive(Args)]
pub struct Status {
    /// List what this machine has to compute on, with drivers, memory and NCCL, and stop
    #[arg(long)]
    pub devices: bool,
    #[command(flatten)]
    pub look: status::Look,
}

/// Where the settings come from, besides the flags.
#[derive(Args)]
pub struct Source {
    /// A TOML file with the same names as the flags; flags and LOCKSTEP_* win over it
    #[arg(long, env = "LOCKSTEP_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print what was resolved from flags, environment and file, and stop
    #[arg(long)]
    pub print_config: bool,
    #[command(flatten)]
    pub hub: Hub,
}

/// Where models are kept and fetched from. The names that people's machines have set already.
#[derive(Args, Clone)]
pub struct Hub {
    /// Where pulled models are kept [default: the user's cache folder]
    #[arg(long, env = "LOCKSTEP_CACHE", value_name = "DIR")]
    pub cache: Option<PathBuf>,
    #[arg(long, env = "HF_TOKEN", hide = true, hide_env_values = true)]
    pub hf_token: Option<String>,
    #[arg(long, env = "HF_ENDPOINT", hide = true)]
    pub hf_endpoint: Option<String>,
    #[arg(long, env = "HF_HOME", hide = true)]
    pub hf_home: Option<PathBuf>,
    #[arg(long, env = "HF_HUB_CACHE", hide = true)]
    pub hf_hub_cache: Option<PathBuf>,
    /// Ollama's models are used where they are.
    #[arg(long, env = "OLLAMA_MODELS", hide = true)]
    pub ollama_models: Option<PathBuf>,
    /// And so are llama.cpp's.
    #[arg(long, env = "LLAMA_CACHE", hide = true)]
    pub llama_cache: Option<PathBuf>,
    #[arg(long, env = "XDG_CACHE_HOME", hide = true)]
    pub xdg_cache_home: Option<PathBuf>,
    #[arg(long, env = "HOME", hide = true)]
    pub home: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, expect: Option<&str>) {
        let matches = command().try_get_matches_from(line.split(' ')).unwrap();
        let told = unheeded(&matches);
        assert_eq!(told.is_some(), expect.is_some(), "{line}: {told:?}");
        assert!(told.is_none_or(|told| told.contains(expect.unwrap_or_default())), "{line}");
    }

    #[test]
    fn a_role_refuses_what_it_would_not_heed() {
        check("lockstep serve --tp 2 --threads 1 --http 127.0.0.1:0 --control 127.0.0.1:0", None);
        check("lockstep coordinator --tp 2 --kv-memory 1GiB --device sim", None);
        check("lockstep coordinator --threads 1", Some("--threads: it is for `lockstep worker`"));
        check("lockstep coordinator --request-seconds 9", Some("--request-seconds: it is for `lockstep router`"));
        check("lockstep coordinator --api-keys keys", Some("--api-keys: it is for `lockstep router`"));
        check("lockstep router --http 127.0.0.1:0 --max-batch-tokens 7 --failover-max 9", None);
        check("lockstep router --tp 2", Some("--tp: it is for `lockstep coordinator`"));
        check("lockstep router --inproc", Some("--inproc: it is for `lockstep serve`"));
    }
}
