//! Checks this machine's GPU, and measures it: `make gpu-check`. Needs a driver, NVRTC and the tiny checkpoints of the
//! tests; no network. Writes one JSON, prints a table last, and ends with an error if anything was not as it must be.
//!
//! `gpu_check [--part kernels|cluster|bench|PART/GROUP] [--models tests/reference] [--out FILE] [--cache DIR]
//! [--seconds N] [--tiny 1]`
//!
//! Each group of checks is a process of its own, which this program starts from itself: a device whose kernel has
//! failed, or does not come to its end, fails everything after it in its process, and is to hide nothing else.
#![allow(clippy::unwrap_used, reason = "a check may panic: it is a check that failed")]

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

struct Arguments {
    parts: Vec<String>,
    out: PathBuf,
    /// For all of it together.
    seconds: u64,
    options: Options,
    /// Only this, for who started this process.
    group: Option<String>,
}

fn arguments() -> Result<Arguments, String> {
    let cache = std::env::temp_dir().join("lockstep-gpu-check");
    let mut arguments = Arguments {
        parts: PARTS.map(str::to_owned).into(),
        out: "target/gpu-check.json".into(),
        seconds: 470,
        options: Options { models: "tests/reference".into(), cache, is_tiny: false },
        group: None,
    };
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        let value = given.next().ok_or_else(|| format!("{name} needs a value"))?;
        match &*name {
            "--part" if PARTS.contains(&&*value) || value.contains('/') => arguments.parts = vec![value],
            "--models" => arguments.options.models = value.into(),
            "--out" => arguments.out = value.into(),
            "--cache" => arguments.options.cache = value.into(),
            "--seconds" => arguments.seconds = value.parse().map_err(|_| format!("{value} seconds"))?,
            "--tiny" => arguments.options.is_tiny = value == "1",
            "--group" => arguments.group = Some(value),
            _ => return Err(format!("{name} {value} is not known; parts are {PARTS:?}")),
        }
    }
    Ok(arguments)
}

/// This program again, for one group.
fn again(options: &Options, group: &str) -> Result<Command, String> {
    let mut command = Command::new(std::env::current_exe().map_err(|error| error.to_string())?);
    command.arg("--models").arg(&options.models).arg("--cache").arg(&options.cache);
    command.args(["--tiny", if options.is_tiny { "1" } else { "0" }, "--group", group]);
    // Ranks may share the device, where NCCL can do that.
    command.env("NCCL_MULTI_RANK_GPU_ENABLE", "1");
    Ok(command)
}

fn check(arguments: &Arguments) -> Result<bool, String> {
    let options = &arguments.options;
    if let Some(group) = &arguments.group {
        return parts::run_here(group, options).map(|()| true);
    }
    let limit = Duration::from_secs(arguments.seconds);
    parts::run(&arguments.parts, options, &arguments.out, limit, |group| again(options, group))
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
