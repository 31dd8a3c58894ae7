//! Worker processes of this machine: starts them from the same executable, relays their logs, restarts those that die,
//! and ends them. Has no knowledge of what they compute.
//!
//! No child outlives this process, however it ends. A child's standard input is a pipe that carries its settings and
//! stays open until this process ends; the child then ends too. Besides, the kernel kills a child when the thread that
//! started it ends; so each child has a thread of its own, which lives as long as the child.

use super::relay;
use anyhow::{Context, bail};
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Interval between checks whether a child has died.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Pause before a child is restarted. It doubles from the first to the second value while the child dies quickly.
const RESTART_MIN: Duration = Duration::from_millis(100);
const RESTART_MAX: Duration = Duration::from_secs(5);
/// A child that lived this long did not die from its start.
const STEADY: Duration = Duration::from_secs(30);
/// A child that dies sooner this many times in a row is not restarted again.
const QUICK_DEATHS_MAX: u32 = 5;
/// How long a child may take to end after its input has closed; then it is killed.
const FAREWELL_MAX: Duration = Duration::from_secs(5);
/// The number of a GPU's hardware queues for a process, unless set. A rank computes, sends and receives in streams of
/// its own, and NCCL has more. With the default of 8 two streams share a queue, and a wait for a peer blocks computing.
const DEVICE_QUEUES: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// The worker processes to start.
pub struct WorkerLaunch {
    /// The number of the first worker in the logs. Workers of other orders may have lower numbers.
    pub first: u16,
    /// The line that each worker reads, with all of its settings. A pipe carries it, because every user of the machine
    /// can read arguments.
    pub settings_lines: Vec<String>,
}

/// Keeps the children alive until `end`. Returns when all of them have ended.
pub async fn run(order: WorkerLaunch, end: CancellationToken) -> anyhow::Result<()> {
    let (lost, mut losses) = mpsc::channel(order.settings_lines.len().max(1));
    let workers = (order.first..).zip(&order.settings_lines);
    let keepers: Vec<ChildKeeper> =
        workers.map(|(worker, line)| ChildKeeper::start(worker, line.clone(), lost.clone())).collect();
    drop(lost);
    let result = tokio::select! {
        () = end.cancelled() => Ok(()),
        Some(lost) = losses.recv() => Err(lost),
    };
    // Every child receives its end signal before this waits for any of them.
    let threads: Vec<_> = keepers.into_iter().map(|ChildKeeper { _end: _, thread }| thread).collect();
    let ended = tokio::task::spawn_blocking(move || {
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("the thread that restarts a worker panicked");
            }
        }
    });
    if ended.await.is_err() {
        tracing::error!("cannot wait for the workers to end");
    }
    result
}

struct ChildKeeper {
    /// Dropping this ends the child.
    _end: SyncSender<()>,
    thread: JoinHandle<()>,
}

impl ChildKeeper {
    fn start(worker: u16, settings_line: String, lost: mpsc::Sender<anyhow::Error>) -> ChildKeeper {
        let (end, ended) = sync_channel(0);
        let thread = std::thread::spawn(move || {
            if let Err(why) = keep(worker, &settings_line, &ended) {
                // The receiver is gone only when this process ends.
                let _ending = lost.blocking_send(why);
            }
        });
        ChildKeeper { _end: end, thread }
    }
}

/// Waits for at most `wait`; returns true if it is time to end.
fn wait_for_end(end: &Receiver<()>, wait: Duration) -> bool {
    end.recv_timeout(wait) != Err(RecvTimeoutError::Timeout)
}

/// Starts one child after another, until the end.
fn keep(worker: u16, settings_line: &str, end: &Receiver<()>) -> anyhow::Result<()> {
    let mut quick_deaths = 0;
    let mut wait = RESTART_MIN;
    loop {
        let began = Instant::now();
        let mut life =
            ChildProcess::spawn(worker, settings_line).with_context(|| format!("worker {worker} cannot be started"))?;
        let Some(status) = life.wait_for_exit(end) else {
            life.stop();
            return Ok(());
        };
        let last_words = life.failure_reason();
        if began.elapsed() > STEADY {
            (quick_deaths, wait) = (0, RESTART_MIN);
        }
        quick_deaths += 1;
        let signal = status.signal();
        let wait_ms = wait.as_millis() as u64;
        tracing::warn!(worker, %status, signal, wait_ms, last_words, "a worker process ended");
        if quick_deaths > QUICK_DEATHS_MAX {
            bail!("worker {worker} ended {quick_deaths} times in a row ({status}): {last_words}");
        }
        if wait_for_end(end, wait) {
            return Ok(());
        }
        wait = (wait * 2).min(RESTART_MAX);
    }
}

/// One child process.
struct ChildProcess {
    child: Child,
    input: Option<ChildStdin>,
    relays: Vec<JoinHandle<Option<String>>>,
}

impl ChildProcess {
    fn spawn(worker: u16, settings_line: &str) -> std::io::Result<ChildProcess> {
        // This is the running file itself, even if the path has another file by now.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("lockstep").args(["worker", "--supervised"]);
        // The parent's variables are for the parent: the line has all settings of a worker.
        let ours = |name: &OsString| name.to_string_lossy().starts_with("LOCKSTEP_");
        for name in std::env::vars_os().map(|(name, _)| name).filter(ours) {
            command.env_remove(name);
        }
        // Set before the child starts, because the driver reads it at that time.
        if std::env::var_os(DEVICE_QUEUES.0).is_none() {
            command.env(DEVICE_QUEUES.0, DEVICE_QUEUES.1);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // In a process group of its own: Ctrl-C reaches only the parent, which drains and then ends its children.
        let mut child = command.process_group(0).spawn()?;
        let mut input = child.stdin.take();
        if let Some(input) = &mut input {
            // A write fails if the child is dead already, which `watch` detects.
            let _dead = writeln!(input, "{settings_line}");
        }
        let mut relays = Vec::new();
        relays.extend(child.stdout.take().map(|out| relay::start(worker, child.id(), out)));
        relays.extend(child.stderr.take().map(|out| relay::start(worker, child.id(), out)));
        tracing::info!(worker, pid = child.id(), "a worker process starts");
        Ok(ChildProcess { child, input, relays })
    }

    /// Returns the status with which the child died, or None if it is to end.
    fn wait_for_exit(&mut self, end: &Receiver<()>) -> Option<ExitStatus> {
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            if wait_for_end(end, LOOK_EVERY) {
                return None;
            }
        }
    }

    fn stop(mut self) {
        drop(self.input.take());
        let deadline = Instant::now() + FAREWELL_MAX;
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(LOOK_EVERY);
        }
        if matches!(self.child.try_wait(), Ok(None)) {
            tracing::warn!(pid = self.child.id(), "a worker process did not end, and is killed");
            // The child may have ended in the meantime.
            let _ended = self.child.kill();
        }
        let _reaped = self.child.wait();
        self.failure_reason();
    }

    /// Returns the last line that was not a log entry: the reason why the child failed.
    fn failure_reason(&mut self) -> String {
        let mut words = self.relays.drain(..).filter_map(|relay| relay.join().ok().flatten());
        words.next_back().unwrap_or_else(|| "no output".into())
    }
}
