//! What is checked and measured: parts, and in each of them groups, of which each is a process. Knows how they are run,
//! what they find and where that is written; nothing of what they do.

pub mod bench;
pub mod cluster;
pub mod kernels;
mod page;
mod process;

use backend::cpu::{CpuConfig, Isa};
use backend::cuda::{Card, Cuda, CudaConfig, Driver};
use backend::{Activations, Result as DeviceResult};
use page::Page;
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use types::Pace;

/// In errors of a device whose memory is too small.
const NO_ROOM: &str = "do not fit in memory";

pub const PARTS: [&str; 3] = ["kernels", "cluster", "bench"];

#[derive(Clone)]
pub struct Options {
    /// The checkout's tests/reference.
    pub models: PathBuf,
    /// Of compiled kernels.
    pub cache: PathBuf,
    /// For an emulator, which takes a thousand times as long as a device.
    pub is_tiny: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As it must be, or measured.
    Good,
    /// Measured, and less than was aimed at.
    Below,
    Wrong,
    /// This machine lacks something for it.
    NotRun,
}

impl Outcome {
    const ALL: [(Outcome, &'static str); 4] =
        [(Outcome::Good, "good"), (Outcome::Below, "below"), (Outcome::Wrong, "WRONG"), (Outcome::NotRun, "not run")];

    pub fn name(self) -> &'static str {
        Outcome::ALL.iter().find(|(outcome, _)| *outcome == self).map_or("", |(_, name)| name)
    }
}

/// One line of the table, and of the JSON.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    pub name: String,
    pub outcome: Outcome,
    pub told: Value,
}

impl Finding {
    pub fn checked(name: impl Into<String>, is_good: bool, told: Value) -> Finding {
        Finding { name: name.into(), outcome: if is_good { Outcome::Good } else { Outcome::Wrong }, told }
    }

    pub fn measured(name: impl Into<String>, told: Value) -> Finding {
        Finding { name: name.into(), outcome: Outcome::Good, told }
    }

    /// Beside a figure that it is to reach.
    pub fn aimed(name: impl Into<String>, figure: f64, aim: f64, told: Value) -> Finding {
        let outcome = if figure >= aim { Outcome::Good } else { Outcome::Below };
        Finding { name: name.into(), outcome, told }
    }

    pub fn not_run(name: impl Into<String>, why: &dyn std::fmt::Display) -> Finding {
        Finding { name: name.into(), outcome: Outcome::NotRun, told: json!({ "why": why.to_string() }) }
    }

    pub fn wrong(name: impl Into<String>, why: &str) -> Finding {
        Finding { name: name.into(), outcome: Outcome::Wrong, told: json!({ "why": why }) }
    }
}

/// Takes findings as they come: what is told is told, whatever comes behind it.
type Tell<'a> = &'a mut dyn FnMut(Finding);
type Done = Result<(), String>;
type Work = Box<dyn Fn(&Options, Tell<'_>) -> Done>;

/// What runs in one process.
pub struct Group {
    pub part: &'static str,
    pub name: String,
    pub limit: Duration,
    work: Work,
}

impl Group {
    fn new<W>(part: &'static str, name: impl Into<String>, work: W) -> Group
    where
        W: Fn(&Options, Tell<'_>) -> Done + 'static,
    {
        Group { part, name: name.into(), limit: Duration::from_secs(90), work: Box::new(work) }
    }

    fn within(self, seconds: u64) -> Group {
        Group { limit: Duration::from_secs(seconds), ..self }
    }

    pub fn id(&self) -> String {
        format!("{}/{}", self.part, self.name)
    }
}

pub fn groups(options: &Options) -> Vec<Group> {
    kernels::groups(options).into_iter().chain(cluster::groups(options)).chain(bench::groups(options)).collect()
}

/// Runs a group in this process, and says what it finds to who started it.
pub fn run_here(id: &str, options: &Options) -> Result<(), String> {
    let groups = groups(options);
    let group = groups.iter().find(|group| group.id() == id).ok_or_else(|| format!("there is no group {id}"))?;
    let done = catch_unwind(AssertUnwindSafe(|| (group.work)(options, &mut |finding| process::tell(&finding))));
    if let Err(why) = done.unwrap_or_else(|panic| Err(format!("it panicked: {}", said(&*panic)))) {
        // Smaller devices have no room for what is measured.
        let is_too_large = group.part == "bench" && why.contains(NO_ROOM);
        let (name, wrong) = (&group.name, Finding::wrong(&group.name, &why));
        process::tell(&if is_too_large { Finding::not_run(name, &why) } else { wrong });
    }
    process::tell_end();
    Ok(())
}

fn said(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

/// Runs all groups of these parts, or those that are named, one after another, each by the command that `start` makes
/// for it. Whether all is good.
pub fn run(
    parts: &[String],
    options: &Options,
    out: &Path,
    limit: Duration,
    start: impl Fn(&str) -> Result<Command, String>,
) -> Result<bool, String> {
    let device = device().map_err(|error| error.to_string())?;
    let (mut page, begun) = (Page::new(device, out), Instant::now());
    let is_asked = |group: &&Group| parts.iter().any(|part| part == group.part || *part == group.id());
    let groups = groups(options);
    let is_any = |asked: &&String| groups.iter().any(|group| *asked == group.part || **asked == group.id());
    if let Some(unknown) = parts.iter().find(|asked| !is_any(asked)) {
        return Err(format!("there is no part or group {unknown}"));
    }
    for group in groups.iter().filter(is_asked) {
        let (left, at) = (limit.saturating_sub(begun.elapsed()), Instant::now());
        let limit_of_group = group.limit * if options.is_tiny { 10 } else { 1 };
        let found = match start(&group.id()) {
            _ if left.is_zero() => vec![Finding::not_run(&group.name, &format!("the {} s are over", limit.as_secs()))],
            Ok(command) => process::run(command, &group.name, limit_of_group.min(left), left < limit_of_group),
            Err(why) => vec![Finding::wrong(&group.name, &why)],
        };
        eprintln!("{}: {} findings in {:.1} s", group.id(), found.len(), at.elapsed().as_secs_f64());
        page.add(group.part, found)?;
    }
    page.finish(begun.elapsed() < limit)
}

/// Of the first device: what it is, and how it is set.
fn device() -> DeviceResult<Value> {
    let driver = Driver::find()?;
    let card = driver.card(0)?;
    card.check()?;
    let compiler = backend::cuda::Compiler::find_for(driver)?;
    let version = |told: Result<String, String>| told.unwrap_or_else(|why| why);
    Ok(json!({
        "name": card.name,
        "capability": format!("{}.{}", card.capability.0, card.capability.1),
        "memory_bytes": card.memory_bytes,
        "multiprocessors": card.multiprocessors,
        "driver_cuda": driver.to_string(),
        "nvrtc": compiler.to_string(),
        "devices": driver.cards()?.len(),
        "cublaslt": version(worker::lt_version().map(|it| it.to_string()).map_err(|why| why.to_string())),
        "nccl": version(worker::nccl_version().map(|it| it.to_string()).map_err(|why| why.to_string())),
        "set": settings(&card),
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
    }))
}

/// Clocks and power, where the driver's own program tells them.
fn settings(card: &Card) -> Value {
    const ASKED: [&str; 9] = [
        "driver_version",
        "pstate",
        "clocks.sm",
        "clocks.mem",
        "clocks.max.sm",
        "clocks.max.mem",
        "power.limit",
        "power.draw",
        "temperature.gpu",
    ];
    let mut command = Command::new("nvidia-smi");
    command.args(["-i", &card.ordinal.to_string(), "--format=csv,noheader"]);
    command.arg(format!("--query-gpu={}", ASKED.join(",")));
    match process::answer(command, Duration::from_secs(20)) {
        Err(why) => json!(format!("nvidia-smi: {why}")),
        Ok(told) => {
            let told = told.trim().split(", ");
            Value::Object(ASKED.iter().zip(told).map(|(name, told)| ((*name).to_owned(), json!(told))).collect())
        }
    }
}

pub fn cuda(options: &Options, pace: Pace) -> Result<Cuda, String> {
    let host = CpuConfig { threads: cores(), activations: Activations::F32, isa: Isa::detect(), spin: false };
    let config = CudaConfig { ordinal: 0, cache: Some(options.cache.clone()), pace, host, graphs: true };
    Cuda::open(&config).map_err(|error| error.to_string())
}

pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The paces that this machine has, and why not the other.
pub fn paces() -> (Vec<Pace>, Option<String>) {
    match worker::lt_version() {
        Ok(_) => (vec![Pace::Lockstep, Pace::Fast], None),
        Err(why) => (vec![Pace::Lockstep], Some(why.to_string())),
    }
}
