//! Parses arguments and does nothing else: `settings` decides what they mean together.

use crate::clients::run::RunCommand;
use crate::clients::simulate::SimulateCommand;
use crate::clients::verify::{ReplayCommand, VerifyCommand};
use crate::mistakes::explained;
use crate::models::{ModelsCommand, PullCommand, QuantizeCommand, RemoveCommand, ShowCommand};
use crate::operate::{PlanCommand, scale};
use crate::roles::coordinator::CoordinatorCommand;
use crate::roles::router::RouterCommand;
use crate::roles::worker::WorkerCommand;
use crate::serve::ServeCommand;
use crate::settings::environment;
use crate::shell::{CompletionsCommand, ManCommand};
use checkpoint::Family;
use clap::error::ErrorKind;
use clap::{Arg, ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use tools::bench::BenchOptions;
use tools::logs::LogsCommand;
use tools::ps::PsCommand;
use tools::status::StatusCommand;
use tools::top::TopCommand;

/// Serves large language models: the same request gives the same tokens, whatever happens.
#[derive(Parser)]
#[command(name = "lockstep", version, about, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Reads the command line: the command, and the matches that distinguish flags from defaults. An invalid line ends the
/// process, and so does a `LOCKSTEP_*` variable that no command has.
pub fn parse() -> (Command, ArgMatches) {
    let text = |word: OsString| word.to_string_lossy().into_owned();
    let variables = std::env::vars_os().map(|(name, value)| (text(name), text(value)));
    parse_from(std::env::args_os().collect(), variables).unwrap_or_else(|error| error.exit())
}

/// All commands, as they are declared.
pub fn program() -> clap::Command {
    Cli::command()
}

fn parse_from(
    words: Vec<OsString>,
    variables: impl Iterator<Item = (String, String)>,
) -> Result<(Command, ArgMatches), clap::Error> {
    let words: Vec<OsString> = words.into_iter().map(to_long_option).collect();
    let mut lockstep = Cli::command();
    let matches = lockstep.try_get_matches_from_mut(&words).map_err(|error| explained(error, &mut lockstep, &words))?;
    let known = environment::check(&lockstep, variables);
    known.map_err(|message| lockstep.error(ErrorKind::UnknownArgument, message))?;
    let cli = Cli::from_arg_matches(&matches)?;
    let subcommand_matches = matches.subcommand().map(|(_, sub_matches)| sub_matches.clone());
    Ok((cli.command, subcommand_matches.unwrap_or_default()))
}

/// vLLM and llama.cpp write a few long names with one dash, as `-tp 2`, which clap would read as `-t` and `-p`.
fn to_long_option(word: OsString) -> OsString {
    const NAMES: [(&str, &str); 4] =
        [("-tp", "--tp"), ("-pp", "--pp"), ("-dp", "--replicas"), ("-md", "--draft-model")];
    let text = word.to_str().unwrap_or_default();
    let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
    match (NAMES.iter().find(|(short, _)| *short == name), value) {
        (Some((_, long)), None) => long.into(),
        (Some((_, long)), Some(value)) => format!("{long}={value}").into(),
        (None, _) => word,
    }
}

/// The width of a printed list of names, in columns.
const LIST_COLUMNS: usize = 108;

fn serve_help() -> String {
    let mut lines = vec![String::new()];
    for (i, family) in Family::ALL.iter().enumerate() {
        let name = family.name();
        let is_full = lines.last().is_some_and(|line| line.len() + name.len() > LIST_COLUMNS);
        if is_full {
            lines.push(String::new());
        }
        if let Some(line) = lines.last_mut() {
            line.push_str(name);
            line.push_str(if i + 1 < Family::ALL.len() { ", " } else { "" });
        }
    }
    let families: Vec<String> = lines.iter().map(|line| format!("  {}", line.trim_end())).collect();
    format!(
        "Model families, from safetensors (a Hugging Face folder) or GGUF:\n{}\n\n{SERVE_HELP}",
        families.join("\n"),
    )
}

const SERVE_HELP: &str = "\
--tp may be as large as the number of query heads, --pp as large as the number of layers.
`lockstep plan MODEL --tp N --pp N` shows what each rank would hold, or why a grid is not possible.

Examples: lockstep serve smollm2 --http 127.0.0.1:8000
          lockstep serve smollm2 --tp 2 --pp 2      four worker processes
          lockstep serve smollm2 --replicas 2       two replicas behind one address";

const RUN_HELP: &str = "\
All flags of `lockstep serve` work too; this help lists those that a chat in the terminal needs.

Examples: lockstep run smollm2 \"Why is the sky blue?\"
          lockstep run smollm2                      a chat; /help lists its commands
          git diff | lockstep run smollm2 - --system \"Summarize this diff.\"
          lockstep run hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0";

const QUANTIZE_HELP: &str = "\
Each matrix gets the type that llama.cpp gives it under that name. Vectors and norms stay as they are.
For a folder of safetensors make a GGUF first, with llama.cpp's convert_hf_to_gguf.py.

Examples: lockstep quantize model-f16.gguf model-q4_k_m.gguf
          lockstep quantize org/name-GGUF:BF16 name-q6_k.gguf --type q6_k";

/// The flags that the help of `run` lists. `run` accepts more.
const OF_RUN: [&str; 18] = [
    "prompt",
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "raw",
    "max_tokens",
    "system",
    "seed",
    "context",
    "device",
    "threads",
    "kv_memory",
    "tp",
    "pp",
    "cache",
    "log",
];

/// `serve` has no certificate of a role, so the short names are those of the certificate that clients see.
fn alias_api_tls(argument: Arg) -> Arg {
    match argument.get_id().as_str() {
        "api_tls_cert" => argument.alias("tls-cert"),
        "api_tls_key" => argument.alias("tls-key"),
        _ => argument,
    }
}

fn hide_unless_listed(argument: Arg) -> Arg {
    let is_listed = OF_RUN.contains(&argument.get_id().as_str());
    if is_listed { argument } else { argument.hide(true) }
}

const SCALE_HELP: &str = "\
Further workers must have joined already: `lockstep status` shows spares. If the grid does not fit, the
command fails with the reason, and nothing changes. A restarted coordinator begins with the grid of its own flags.

`lockstep serve` accepts this command at 127.0.0.1:50100, or at its --control address.

Example: lockstep scale --coordinator 127.0.0.1:50100 --tp 2 --pp 1";

const SIMULATE_HELP: &str = "\
Routing, placement and scheduling are the real code; GPUs are simulated from their data sheets, and time is virtual.
The same seed gives the same report. No GPU, model file or network is needed.

Examples: lockstep simulate --replicas 256 --gpu h100 --model llama-3.1-70b --tp 8 --rate 2000
          lockstep simulate --model qwen3-32b --weights fp8 --tp 2 --rate 4 --prompt lognormal:1500,1500 --json";

const VERIFY_HELP: &str = "\
ID is the id of a response. Its record is in the folder of --record, or on the server at --url if that server records.
FILE is JSON: {\"request\": .., \"response\": ..}. The response is the whole body, or the events of a stream as one
string. The request needs \"certificate\": true, and \"return_token_ids\": true to see where tokens differ.
With MODEL, the command starts a server for it, on any grid. Otherwise it uses the server at --url.

The exit status is 0 if the answer is equal, 1 if it is not, 2 if it cannot be compared.

Examples: lockstep verify answer.json
          lockstep verify answer.json smollm2 --tp 2
          lockstep verify cmpl-1f2e3d4c0000000000000007 --record records";

const REPLAY_HELP: &str = "\
DIR is the record that a router or server wrote with --record DIR --record-prompts. With MODEL, the command starts a
server for it, on any grid. Otherwise it uses the server at --url.

The exit status is 0 if all compared answers are equal, 1 if one is not, 2 if none could be compared. The command skips
answers of another policy digest: their tokens may differ legitimately.

Examples: lockstep replay records --concurrency 32 --order shuffled
          lockstep replay records smollm2 --pp 2 --speed 10";

const COMPLETIONS_HELP: &str = "\
Examples: lockstep completions bash > ~/.local/share/bash-completion/completions/lockstep
          lockstep completions zsh > \"${fpath[1]}/_lockstep\"
          lockstep completions fish > ~/.config/fish/completions/lockstep.fish";

const WORKER_HELP: &str = "\
Example: lockstep worker --join coordinator:50100 --token-file token
         lockstep worker --etcd-endpoints etcd:2379 --replica one --token-file token";

const RELOAD_HELP: &str = "\
Streams continue with the same tokens. If the file holds another model now, the command fails and nothing changes:
start another replica for it instead. A rank that cannot read its copy keeps its weights, and the output names it.

Example: lockstep reload --coordinator 127.0.0.1:50100";

#[derive(Subcommand)]
pub enum Command {
    /// Serve a model on this machine, with OpenAI's API over HTTP and with gRPC
    #[command(after_help = serve_help(), mut_args(alias_api_tls))]
    Serve(ServeCommand),
    /// Answer one prompt, or chat in the terminal
    #[command(after_help = RUN_HELP, mut_args(hide_unless_listed))]
    Run(RunCommand),
    /// Run the coordinator of one replica, which plans the steps of its workers
    #[command(after_help = "Example: lockstep coordinator smollm2 --tp 2 --listen 0.0.0.0:50100 --token-file token")]
    Coordinator(CoordinatorCommand),
    /// Run a worker, which holds one rank and computes for a coordinator
    #[command(after_help = WORKER_HELP)]
    Worker(WorkerCommand),
    /// Run a router, which answers clients and sends their requests to replicas
    #[command(after_help = "Example: lockstep router smollm2 --coordinator one:50100 --coordinator two:50100 \
                      --token-file token")]
    Router(RouterCommand),
    /// Print a new join token, which all roles of a cluster share
    #[command(after_help = "Example: (umask 077; lockstep token > token)")]
    Token,
    /// Fetch a model and verify its checksum
    #[command(after_help = "Example: lockstep pull smollm2")]
    Pull(PullCommand),
    /// List the models on this machine, and those that have a short name
    #[command(after_help = "Example: lockstep models --fit --context 16384", visible_alias = "list", alias = "ls")]
    Models(ModelsCommand),
    /// Show details of a model on this machine
    #[command(after_help = "Example: lockstep show smollm2")]
    Show(ShowCommand),
    /// Remove models that were fetched
    #[command(after_help = "Example: lockstep rm smollm2")]
    Rm(RemoveCommand),
    /// Write a GGUF again with fewer bits for each weight
    #[command(after_help = QUANTIZE_HELP)]
    Quantize(QuantizeCommand),
    /// List the models that a server has loaded
    #[command(after_help = "Example: lockstep ps --url http://127.0.0.1:8000")]
    Ps(PsCommand),
    /// Show what each rank would hold of a model, in bytes and tokens, without loading it
    #[command(after_help = "Example: lockstep plan smollm2 --kv-memory 512MiB\n         lockstep plan --devices")]
    Plan(PlanCommand),
    /// Show a running cluster: each rank's place, its memory and where its time goes
    #[command(after_help = "Example: lockstep status --url http://127.0.0.1:8000\n         lockstep status --devices")]
    Status(StatusCommand),
    /// Watch a running cluster, its requests and its load; prints text if there is no terminal
    #[command(after_help = "Example: lockstep top --every 2")]
    Top(TopCommand),
    /// Show the timeline of one request: when it waited, was computed, preempted, lost or moved
    #[command(after_help = "Example: lockstep logs 7\n         lockstep logs chatcmpl-1f2e3d4c0000000000000007")]
    Logs(LogsCommand),
    /// Change the grid of a replica while it serves: the same tokens, and no failed request
    #[command(after_help = SCALE_HELP)]
    Scale(scale::ScaleCommand),
    /// Read the model's files again on every rank of a replica while it serves, for example after a file was restored
    #[command(after_help = RELOAD_HELP)]
    Reload(scale::ReloadCommand),
    /// Run an answer again and compare
    #[command(after_help = VERIFY_HELP, mut_arg("model", |model| model.index(2)))]
    Verify(VerifyCommand),
    /// Run the answers of a record again and compare
    #[command(after_help = REPLAY_HELP, mut_arg("model", |model| model.index(2)))]
    Replay(ReplayCommand),
    /// Measure the throughput and latency of any server with OpenAI's API
    #[command(after_help = "Example: lockstep bench --concurrency 1,8,32 --prompt uniform:64..256 --output 64")]
    Bench(BenchOptions),
    /// Predict how a cluster of GPUs would serve a load: latency, goodput, utilisation and cost
    #[command(after_help = SIMULATE_HELP)]
    Simulate(SimulateCommand),
    /// Print completions of these commands for a shell
    #[command(after_help = COMPLETIONS_HELP)]
    Completions(CompletionsCommand),
    /// Write manual pages of these commands to a folder
    #[command(after_help = "Example: lockstep man ~/.local/share/man/man1")]
    Man(ManCommand),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::memory_part::MemoryPart;

    fn check(line: &str, expect: Option<&str>) {
        check_with(&[], line, expect);
    }

    fn check_with(variables: &[&str], line: &str, expect: Option<&str>) {
        let variables = variables.iter().map(|name| ((*name).to_owned(), "1".to_owned()));
        let result = parse_from(line.split(' ').map(OsString::from).collect(), variables);
        let message = result.err().map(|error| error.to_string());
        assert_eq!(message.is_some(), expect.is_some(), "{line}: {message:?}");
        assert!(message.is_none_or(|text| text.contains(expect.unwrap_or_default())), "{line}");
    }

    #[test]
    fn roles_refuse_flags_of_other_roles() {
        check("lockstep serve --tp 2 --threads 1 --http 127.0.0.1:0 --control 127.0.0.1:0", None);
        check("lockstep coordinator --tp 2 --kv-memory 1GiB --device sim", None);
        check("lockstep coordinator --threads 1", Some("--threads: it is for `lockstep worker`"));
        check("lockstep coordinator --request-seconds 9", Some("--request-seconds: it is for `lockstep router`"));
        check("lockstep coordinator --api-keys keys", Some("--api-keys: it is for `lockstep router`"));
        check("lockstep router --http 127.0.0.1:0 --max-batch-tokens 7 --failover-max 9", None);
        check("lockstep router --tp 2", Some("--tp: it is for `lockstep coordinator`"));
        check("lockstep router --inproc", Some("--inproc: it is for `lockstep serve`"));
        check("lockstep worker --inproc=true", Some("--inproc: it is for `lockstep serve`"));
        check("lockstep worker --max-running 1", Some("--max-running: it is for `lockstep router`"));
        check("lockstep worker --join a:1 --threads 1 --replica one", None);
        check("lockstep router --unheard-of", Some("unexpected argument '--unheard-of'"));
    }

    #[test]
    fn the_help_of_run_lists_what_run_needs_and_takes_the_rest() {
        let mut program = program();
        let help = program.find_subcommand_mut("run").unwrap().render_help().to_string();
        for flag in ["--temperature", "--system", "--max-tokens", "--seed", "--kv-memory", "[PROMPT]", "[MODEL]"] {
            assert!(help.contains(flag), "{flag} is not in\n{help}");
        }
        assert!(!help.contains("--api-keys") && help.lines().count() < 70, "{help}");
        check("lockstep run smollm2 hi --max-running 3 --api-tls-cert a --api-tls-key b", None);
        let run = program.find_subcommand("run").unwrap();
        let strange = OF_RUN.iter().find(|name| run.get_arguments().all(|argument| argument.get_id() != **name));
        assert_eq!(strange, None);
    }

    #[test]
    fn certificates_and_memory_have_the_names_of_others_too() {
        for names in
            ["--api-tls-cert a --api-tls-key b", "--ssl-certfile a --ssl-keyfile b", "--tls-cert a --tls-key b"]
        {
            let line = format!("lockstep serve m {names} --gpu-memory-utilization 0.85");
            let words = line.split(' ').map(OsString::from).collect();
            let Ok((Command::Serve(serve), _)) = parse_from(words, std::iter::empty()) else { panic!("{line}") };
            let (router, coordinator) = (serve.settings.router, serve.settings.coordinator);
            assert_eq!((router.api_tls_cert, router.api_tls_key), (Some("a".into()), Some("b".into())), "{line}");
            assert_eq!(coordinator.gpu_memory_utilization.map(MemoryPart::permille), Some(850));
        }
        check("lockstep serve m --ssl-ca-certs a", Some("--api-tls-cert"));
        check("lockstep serve m --gpu-memory-utilization 0.9 --kv-memory 1GiB", Some("cannot be used with"));
        // A role has a certificate towards other roles.
        check("lockstep router --tls-cert a --tls-key b", Some("--tls-ca"));
    }

    #[test]
    fn what_ollama_s_users_type_is_known() {
        for line in ["list", "ls", "ps", "rm smollm2", "show smollm2", "show smollm2 --template", "pull smollm2"] {
            check(&format!("lockstep {line}"), None);
        }
    }

    #[test]
    fn long_names_may_have_one_dash_where_vllm_writes_them_so() {
        let grid = |line: &str| {
            let words = line.split(' ').map(OsString::from).collect();
            match parse_from(words, std::iter::empty()).unwrap().0 {
                Command::Serve(serve) => {
                    let settings = serve.settings;
                    (settings.coordinator.tp, settings.coordinator.pp, settings.local.replicas)
                }
                _ => panic!("{line}"),
            }
        };
        assert_eq!(grid("lockstep serve -tp 2 -pp=3 -dp 4"), (2, 3, 4));
        assert_eq!(grid("lockstep serve"), (1, 1, 1));
        check("lockstep worker -tp 2", Some("--tp: it is for `lockstep coordinator`"));
    }

    #[test]
    fn variables_that_no_command_knows_are_refused_and_another_role_s_are_not() {
        check_with(&["LOCKSTEP_THREADS", "LOCKSTEP_API_KEYS"], "lockstep coordinator --tp 2", None);
        let meant = "variable LOCKSTEP_API_KEYES: a setting with a similar name is LOCKSTEP_API_KEYS";
        check_with(&["HOME", "LOCKSTEP_API_KEYES"], "lockstep router", Some(meant));
        check_with(&["LOCKSTEP_MOOD"], "lockstep serve", Some("unknown environment variable LOCKSTEP_MOOD"));
    }
}
