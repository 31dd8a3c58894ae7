//! Checks this machine's GPU, and measures it: `make gpu-check`. Needs a driver, NVRTC and the tiny checkpoints of the
//! tests; no network. Writes one JSON file, prints a table at the end, and fails if any check did.
//!
//! `gpu_check [--part kernels|cluster|bench|PART/GROUP] [--models tests/reference] [--out FILE] [--cache DIR]
//! [--seconds N] [--tiny 1]`
//!
//! Groups of checks run in child processes. A device with a failed or endless kernel fails everything after it in its
//! process, so the remaining groups run in another process. Each part has its own time (`parts::SECONDS`); groups that
//! do not fit are reported as not run.
#![allow(clippy::unwrap_used, reason = "a check that panics has failed")]

#[path = "../../backend/tests/common/mod.rs"]
mod numbers;
#[path = "../../backend/tests/on_device/mod.rs"]
mod on_device;
#[path = "../../model/tests/whole/mod.rs"]
mod whole;

#[path = "../../tests/common/mod.rs"]
#[allow(dead_code, reason = "shared with tests that need other parts of it")]
mod common;
mod parts;

use parts::{Options, PARTS};
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

/// Limit for all parts: a command on a lent machine may take ten minutes, and the page must be written by then.
const SECONDS: u64 = 570;

struct Arguments {
    parts: Vec<String>,
    out: PathBuf,
    /// Limit for everything together.
    seconds: u64,
    options: Options,
    /// Only these groups; the parent process sets them.
    groups: Vec<String>,
}

fn arguments() -> Result<Arguments, String> {
    let cache = std::env::temp_dir().join("lockstep-gpu-check");
    let mut arguments = Arguments {
        parts: PARTS.map(str::to_owned).into(),
        out: "target/gpu-check.json".into(),
        seconds: SECONDS,
        options: Options { models: "tests/reference".into(), cache, is_tiny: false },
        groups: Vec::new(),
    };
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        let value = given.next().ok_or_else(|| format!("{name} needs a value"))?;
        match &*name {
            "--part" if PARTS.contains(&&*value) || value.contains('/') => arguments.parts = vec![value],
            "--models" => arguments.options.models = value.into(),
            "--out" => arguments.out = value.into(),
            "--cache" => arguments.options.cache = value.into(),
            "--seconds" => {
                arguments.seconds = value.parse().map_err(|_| format!("--seconds {value} is not a number"))?
            }
            "--tiny" => arguments.options.is_tiny = value == "1",
            "--group" => arguments.groups.push(value),
            _ => return Err(format!("unknown option {name} {value}; parts are {PARTS:?}")),
        }
    }
    Ok(arguments)
}

/// Returns the command that runs this program again for some groups.
fn rerun_command(options: &Options, groups: &[String]) -> Result<Command, String> {
    let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
    command.arg("--models").arg(&options.models).arg("--cache").arg(&options.cache);
    command.args(["--tiny", if options.is_tiny { "1" } else { "0" }]);
    command.args(groups.iter().flat_map(|group| ["--group", group]));
    // Allows ranks to share the device, where NCCL can.
    command.env("NCCL_MULTI_RANK_GPU_ENABLE", "1");
    Ok(command)
}

fn check(arguments: &Arguments) -> Result<bool, String> {
    let options = &arguments.options;
    if !arguments.groups.is_empty() {
        let groups: Vec<&str> = arguments.groups.iter().map(String::as_str).collect();
        return parts::run_here(&groups, options).map(|()| true);
    }
    let limit = Duration::from_secs(arguments.seconds);
    parts::run(&arguments.parts, options, &arguments.out, limit, |groups| rerun_command(options, groups))
}

fn main() -> ExitCode {
    match arguments().and_then(|arguments| check(&arguments)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("gpu-check: {why}");
            ExitCode::FAILURE
        }
    }
}
