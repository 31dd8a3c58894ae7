//! Checks this machine's GPU, and measures it: `make gpu-check`. Needs a driver, NVRTC and the tiny checkpoints of the
//! tests; no network. Writes one JSON, prints a table last, and ends with an error if anything was not as it must be.
//!
//! `gpu_check [--part kernels|cluster|bench] [--models tests/reference] [--out FILE] [--cache DIR]
//! [--shape llama|tiny]`
#![allow(clippy::unwrap_used, reason = "a check may panic: it is a check that failed")]

#[path = "../../backend/tests/common/mod.rs"]
mod numbers;
#[path = "../../backend/tests/on_device/mod.rs"]
mod on_device;
#[path = "../../model/tests/whole/mod.rs"]
mod whole;

mod bench;
mod cluster;
#[path = "../../tests/common/mod.rs"]
#[allow(dead_code, reason = "shared with tests that need other parts of it")]
mod common;

use backend::cpu::{CpuConfig, Isa};
use backend::cuda::{Compiler, Cuda, CudaConfig, Driver};
use backend::{Activations, KvDtype};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use types::Pace;

const PARTS: [&str; 3] = ["kernels", "cluster", "bench"];
/// Rows that products are tried with: every kernel for them, and more rows than a block has.
const ROWS: [usize; 6] = [1, 7, 13, 30, 64, 200];

struct Arguments {
    parts: Vec<String>,
    models: PathBuf,
    out: PathBuf,
    cache: PathBuf,
    shape: bench::Shape,
    cluster: cluster::Size,
}

fn arguments() -> Result<Arguments, String> {
    let mut arguments = Arguments {
        parts: PARTS.map(str::to_owned).into(),
        models: "tests/reference".into(),
        out: "target/gpu-check.json".into(),
        cache: std::env::temp_dir().join("lockstep-gpu-check"),
        shape: bench::LLAMA,
        cluster: cluster::FULL,
    };
    let mut given = std::env::args().skip(1);
    while let Some(name) = given.next() {
        let value = given.next().ok_or_else(|| format!("{name} needs a value"))?;
        match &*name {
            "--part" if PARTS.contains(&&*value) => arguments.parts = vec![value],
            "--models" => arguments.models = value.into(),
            "--out" => arguments.out = value.into(),
            "--cache" => arguments.cache = value.into(),
            "--shape" if value == "llama" => arguments.shape = bench::LLAMA,
            "--shape" if value == "tiny" => (arguments.shape, arguments.cluster) = (bench::TINY, cluster::TINY),
            _ => return Err(format!("{name} {value} is not known; parts are {PARTS:?}")),
        }
    }
    Ok(arguments)
}

/// One line of the table, and of the JSON.
pub struct Finding {
    pub name: String,
    pub is_good: bool,
    pub told: Value,
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

fn check(arguments: &Arguments) -> Result<bool, String> {
    let device = device().map_err(|error| error.to_string())?;
    let mut findings = Vec::new();
    for part in &arguments.parts {
        let begun = Instant::now();
        eprintln!("{part} ..");
        let found = match &**part {
            "kernels" => kernels(&arguments.cache),
            "cluster" => cluster::check(&arguments.models, &arguments.cache, &arguments.cluster),
            _ => bench::measure(arguments.shape, &arguments.cache),
        }?;
        eprintln!("{part}: {} findings in {:.1} s", found.len(), begun.elapsed().as_secs_f64());
        findings.extend(found.into_iter().map(|finding| (part.clone(), finding)));
    }
    let is_good = findings.iter().all(|(_, finding)| finding.is_good);
    let each = findings.iter().map(
        |(part, finding)| json!({ "part": part, "name": finding.name, "good": finding.is_good, "told": finding.told }),
    );
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let page = json!({
        "seconds_since_1970": seconds,
        "device": device,
        "good": is_good,
        "findings": each.collect::<Vec<_>>(),
    });
    let text = serde_json::to_string_pretty(&page).map_err(|error| error.to_string())?;
    let written = arguments.out.parent().map_or(Ok(()), std::fs::create_dir_all);
    written.and_then(|()| std::fs::write(&arguments.out, text + "\n")).map_err(|error| error.to_string())?;
    for (part, Finding { name, is_good, told }) in &findings {
        println!("{:<8} {:<5} {name}: {told}", part, if *is_good { "good" } else { "WRONG" });
    }
    println!("{} in {}", if is_good { "all good" } else { "NOT GOOD" }, arguments.out.display());
    Ok(is_good)
}

fn device() -> backend::Result<Value> {
    let driver = Driver::find()?;
    let card = driver.card(0)?;
    card.check()?;
    let compiler = Compiler::find()?;
    Ok(json!({
        "name": card.name,
        "capability": format!("{}.{}", card.capability.0, card.capability.1),
        "memory_bytes": card.memory_bytes,
        "multiprocessors": card.multiprocessors,
        "driver_cuda": driver.to_string(),
        "nvrtc": compiler.to_string(),
        "devices": driver.cards()?.len(),
        "cublaslt": worker::lt_version().map_or_else(|error| error.to_string(), |version| version.to_string()),
        "nccl": worker::nccl_version().map_or_else(|error| error.to_string(), |version| version.to_string()),
    }))
}

pub fn cuda(cache: &Path, pace: Pace) -> Result<Cuda, String> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let host = CpuConfig { threads, activations: Activations::F32, isa: Isa::detect(), spin: false };
    let config = CudaConfig { ordinal: 0, cache: Some(cache.to_owned()), pace, host, graphs: true };
    Cuda::open(&config).map_err(|error| error.to_string())
}

fn kernels(cache: &Path) -> Result<Vec<Finding>, String> {
    let begun = Instant::now();
    let lockstep = cuda(cache, Pace::Lockstep)?;
    let opened = Finding {
        name: "opened, with kernels compiled or from the cache".into(),
        is_good: true,
        told: json!({ "seconds": begun.elapsed().as_secs_f64() }),
    };
    // Other numbers each time.
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64);
    let found = |check: on_device::Check| Finding {
        is_good: check.is_good(),
        told: json!({ "apart": check.apart, "limit": check.limit, "same_bits": check.same_bits, "seed": seed }),
        name: check.name,
    };
    let rounds = ROWS.chunks(2).enumerate();
    let checks = rounds.flat_map(|(i, rows)| on_device::checks(&lockstep, KvDtype::Bf16, rows, seed + i as u64));
    let findings = std::iter::once(opened).chain(checks.map(found));
    let fast = match worker::lt_version() {
        Err(why) => vec![skipped("products under fast", &why)],
        Ok(_) => {
            let fast = cuda(cache, Pace::Fast)?;
            let is_same = on_device::product_of(&fast, 64, 512, 32) == on_device::product_of(&lockstep, 64, 512, 32);
            let few = Finding {
                name: "few rows have one order under fast too".into(),
                is_good: is_same,
                told: json!({ "same_bits": is_same }),
            };
            let checks = on_device::fast_checks(&fast, &[1, 33, 200, 500], seed);
            checks.into_iter().map(found).chain([few]).collect()
        }
    };
    Ok(findings.chain(fast).collect())
}

/// What this machine lacks something for.
pub fn skipped(name: &str, why: &dyn std::fmt::Display) -> Finding {
    Finding { name: name.into(), is_good: true, told: json!({ "skipped": why.to_string() }) }
}
