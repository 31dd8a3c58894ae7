//! Checks and measurements: parts of several groups. Neighbouring groups share a process as long as all succeed.
//! Defines how groups run, what they find and where that is written; has no knowledge of what they check.

pub mod bench;
pub mod cluster;
pub mod kernels;
mod page;
mod process;

use backend::Result as DeviceResult;
use backend::cpu::{CpuConfig, Isa};
use backend::cuda::{Card, Cuda, CudaConfig, Driver};
use page::Page;
use process::{GroupRequest, Word};
use serde_json::{Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use types::{Activations, NumericsMode};

/// A part of the error on devices with too little memory.
const NO_ROOM: &str = "do not fit in memory";

pub const PARTS: [&str; 3] = ["kernels", "cluster", "bench"];

/// Seconds that each part may take on a device; groups that have not ended by then are not run. On an H200 with 16
/// cores the parts took 48, 5 and 106 s; the page has each part's time and number of processes. A process takes some
/// seconds until its first kernel, so groups share processes.
const SECONDS: [u64; 3] = [150, 180, 280];
/// On an emulator, on which times are not comparable.
const SECONDS_TINY: u64 = 3600;

/// The seconds of one part.
fn part_seconds(part: &str, options: &Options) -> u64 {
    let seconds = PARTS.iter().zip(SECONDS).find(|(name, _)| **name == part).map_or(0, |(_, seconds)| seconds);
    if options.is_tiny { SECONDS_TINY } else { seconds }
}

#[derive(Clone)]
pub struct Options {
    /// The checkout's tests/reference.
    pub models: PathBuf,
    /// The folder of compiled kernels.
    pub cache: PathBuf,
    /// For an emulator, which takes a thousand times as long as a device.
    pub is_tiny: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A check that succeeded, or a measurement.
    Good,
    /// A measurement below its aim.
    Below,
    Wrong,
    /// This machine lacks a requirement of the check, or no time was left.
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
    pub details: Value,
}

impl Finding {
    pub fn checked(name: impl Into<String>, is_good: bool, details: Value) -> Finding {
        Finding { name: name.into(), outcome: if is_good { Outcome::Good } else { Outcome::Wrong }, details }
    }

    pub fn measured(name: impl Into<String>, details: Value) -> Finding {
        Finding { name: name.into(), outcome: Outcome::Good, details }
    }

    /// A figure with the aim that it should reach.
    pub fn aimed(name: impl Into<String>, figure: f64, aim: f64, details: Value) -> Finding {
        let outcome = if figure >= aim { Outcome::Good } else { Outcome::Below };
        Finding { name: name.into(), outcome, details }
    }

    pub fn not_run(name: impl Into<String>, why: &dyn std::fmt::Display) -> Finding {
        Finding { name: name.into(), outcome: Outcome::NotRun, details: json!({ "why": why.to_string() }) }
    }

    pub fn wrong(name: impl Into<String>, why: &str) -> Finding {
        Finding { name: name.into(), outcome: Outcome::Wrong, details: json!({ "why": why }) }
    }
}

/// Takes findings as they come, so that a later failure loses none.
type FindingSink<'a> = &'a mut dyn FnMut(Finding);
type Done = Result<(), String>;
type Work = Box<dyn Fn(&Options, FindingSink<'_>) -> Done>;

/// Checks that run together, and fail together if one never ends.
pub struct Group {
    pub part: &'static str,
    pub name: String,
    pub limit: Duration,
    /// Neighbouring groups with the same name here share a process.
    process: &'static str,
    work: Work,
}

impl Group {
    fn new<W>(part: &'static str, name: impl Into<String>, work: W) -> Group
    where
        W: Fn(&Options, FindingSink<'_>) -> Done + 'static,
    {
        Group { part, name: name.into(), limit: Duration::from_secs(90), process: "", work: Box::new(work) }
    }

    /// Returns the first group of a part, which compiles the kernels for the others.
    fn opened(part: &'static str) -> Group {
        Group::new(part, "opened", opened).within(140)
    }

    fn in_process(self, process: &'static str) -> Group {
        Group { process, ..self }
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

/// Opens the device, with kernels compiled or from the cache.
fn opened(options: &Options, report: FindingSink<'_>) -> Done {
    let begun = Instant::now();
    let cuda = cuda(options, NumericsMode::Lockstep)?;
    let free = cuda.free_bytes().map_err(|error| error.to_string())?;
    let details = json!({ "seconds": begun.elapsed().as_secs_f64(), "free_bytes": free });
    report(Finding::measured("opened, with kernels compiled or from the cache", details));
    Ok(())
}

/// Runs groups in this process, and reports their findings to the parent process. After a failed group, another process
/// runs the rest.
pub fn run_here(ids: &[&str], options: &Options) -> Result<(), String> {
    let groups = groups(options);
    let mut kept_open = None;
    for id in ids {
        let group = groups.iter().find(|group| group.id() == *id).ok_or_else(|| format!("there is no group {id}"))?;
        process::send_word(Word::Begun);
        let is_good = group.run_here(options);
        process::send_word(Word::Ended);
        if !is_good {
            process::send_word(Word::Leaves);
            return Ok(());
        }
        // Keeps the device's context for all groups, because creating it is slow. A group that cannot open the device
        // reports that error itself.
        kept_open = kept_open.or_else(|| cuda(options, NumericsMode::Lockstep).ok());
    }
    Ok(())
}

impl Group {
    /// Runs the group. Returns whether nothing failed.
    fn run_here(&self, options: &Options) -> bool {
        let mut is_good = true;
        let mut report = |finding: Finding| {
            is_good &= finding.outcome != Outcome::Wrong;
            process::send_finding(&finding);
        };
        let done = catch_unwind(AssertUnwindSafe(|| (self.work)(options, &mut report)));
        if let Err(why) = done.unwrap_or_else(|panic| Err(format!("it panicked: {}", panic_text(&*panic)))) {
            // Smaller devices have no room for the measurements.
            let is_too_large = self.part == "bench" && why.contains(NO_ROOM);
            let (name, wrong) = (&self.name, Finding::wrong(&self.name, &why));
            report(if is_too_large { Finding::not_run(name, &why) } else { wrong });
        }
        is_good
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
}

/// Runs all groups of these parts, or only the named ones, one after another, in processes by the command that `start`
/// makes for some of them. Returns whether all succeeded.
pub fn run(
    parts: &[String],
    options: &Options,
    out: &Path,
    limit: Duration,
    start: impl Fn(&[String]) -> Result<Command, String>,
) -> Result<bool, String> {
    let groups = groups(options);
    let is_any = |name: &&String| groups.iter().any(|group| *name == group.part || **name == group.id());
    if let Some(unknown) = parts.iter().find(|name| !is_any(name)) {
        return Err(format!("unknown part or group {unknown}"));
    }
    let end = Instant::now() + limit;
    let mut page = Page::new(device().map_err(|error| error.to_string())?, out);
    let is_selected = |group: &&Group| parts.iter().any(|part| part == group.part || *part == group.id());
    let selected: Vec<&Group> = groups.iter().filter(is_selected).collect();
    let mut is_whole = true;
    for of_part in selected.chunk_by(|a, b| a.part == b.part) {
        let until = end.min(Instant::now() + Duration::from_secs(part_seconds(of_part[0].part, options)));
        run_part(of_part, options, until, &mut page, &start)?;
        is_whole &= Instant::now() < until;
    }
    page.finish(is_whole)
}

/// Runs groups of one part.
fn run_part(
    groups: &[&Group],
    options: &Options,
    until: Instant,
    page: &mut Page,
    start: impl Fn(&[String]) -> Result<Command, String>,
) -> Result<(), String> {
    let (part, begun) = (groups[0].part, Instant::now());
    let mut n_processes = 0;
    for company in groups.chunk_by(|a, b| a.process == b.process) {
        let slowly = if options.is_tiny { 10 } else { 1 };
        let requests: Vec<GroupRequest<'_>> =
            company.iter().map(|group| GroupRequest { name: &group.name, limit: group.limit * slowly }).collect();
        let ids: Vec<String> = company.iter().map(|group| group.id()).collect();
        let mut take = |i: usize, found: Vec<Finding>| {
            eprintln!("{}: {} findings, {:.1} s into its part", ids[i], found.len(), begun.elapsed().as_secs_f64());
            page.add(part, found)
        };
        n_processes += process::run(&requests, until, |next| start(&ids[next..]), &mut take)?;
    }
    page.ran(part, begun.elapsed(), n_processes)
}

/// Returns the first device and its settings.
fn device() -> DeviceResult<Value> {
    let driver = Driver::find()?;
    let card = driver.card(0)?;
    card.check()?;
    let compiler = backend::cuda::Compiler::find_for(driver)?;
    let version = |found: Result<String, String>| found.unwrap_or_else(|why| why);
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

/// Returns clocks and power, from the driver's own program.
fn settings(card: &Card) -> Value {
    const QUERY_FIELDS: [&str; 9] = [
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
    command.arg(format!("--query-gpu={}", QUERY_FIELDS.join(",")));
    match process::output_of(command, Duration::from_secs(20)) {
        Err(why) => json!(format!("nvidia-smi: {why}")),
        Ok(text) => {
            let values = text.trim().split(", ");
            Value::Object(
                QUERY_FIELDS.iter().zip(values).map(|(name, value)| ((*name).to_owned(), json!(value))).collect(),
            )
        }
    }
}

pub fn cuda(options: &Options, mode: NumericsMode) -> Result<Cuda, String> {
    let host = CpuConfig { threads: cores(), activations: Activations::F32, isa: Isa::detect(), spin: false };
    let config = CudaConfig { ordinal: 0, cache: Some(options.cache.clone()), mode, host, graphs: true };
    Cuda::open(&config).map_err(|error| error.to_string())
}

pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the modes that this machine supports, and why it lacks the other one.
pub fn modes() -> (Vec<NumericsMode>, Option<String>) {
    match worker::lt_version() {
        Ok(_) => (vec![NumericsMode::Lockstep, NumericsMode::Fast], None),
        Err(why) => (vec![NumericsMode::Lockstep], Some(why.to_string())),
    }
}
