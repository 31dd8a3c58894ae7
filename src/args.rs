//! Arguments, parsed and nothing more: what they mean together is `config`'s.

use crate::bench;
use crate::config::Settings;
use crate::single::{CoordinatorSettings, RouterSettings, WorkerSettings};
use crate::store::StoreSettings;
use crate::trust::TrustSettings;
use crate::{scale, simulate, status, top};
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// Serves large language models: the same request gives the same tokens, whatever happens.
#[derive(Parser)]
#[command(name = "lockstep", version, about, max_term_width = 110)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
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

Example: lockstep scale --coordinator 127.0.0.1:50100 --tp 2 --pp 1";

const SIMULATE_HELP: &str = "\
The router's pick, the placement and the planner of steps are those that serve; GPUs are a table and a roofline, time
is virtual, and the same seed says the same. No GPU, no model file and no network is asked for.

Examples: lockstep simulate --replicas 256 --gpu h100 --model llama-3.1-70b --tp 8 --rate 2000
          lockstep simulate --model qwen3-32b --weights fp8 --tp 2 --rate 4 --prompt lognormal:1500,1500 --json";

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
    #[command(after_help = "Example: lockstep worker --join coordinator:50100 --token-file token")]
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
    #[command(after_help = "Example: lockstep status --url http://127.0.0.1:8000")]
    Status(status::Look),
    /// Show the live cluster, again and again
    #[command(after_help = "Example: lockstep top --every 2")]
    Top(top::Top),
    /// Give a replica that serves another grid, with the same tokens and without failing a request
    #[command(after_help = SCALE_HELP)]
    Scale(scale::Scale),
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
