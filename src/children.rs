//! Worker processes of this machine: starts them from the same executable, says their logs as its own, starts those
//! anew that die, and ends them. Knows nothing of what they compute.
//!
//! No child outlives this process, however it ends. A child's standard input is a pipe that brings the join token and
//! then nothing: its end is this process's end, and the child ends too. Besides, the kernel kills the child when the
//! thread that started it is gone; so each child has a thread of its own, which lives as long as the child.

use crate::relay;
use anyhow::{Context, bail};
use proto::secure::Token;
use rustix::process::{Signal, set_parent_process_death_signal};
use std::ffi::OsString;
use std::io::{BufRead, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// How often a thread looks whether its child has died.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Before a child is started anew; the wait doubles from the first to the second while it dies quickly.
const RESTART_MIN: Duration = Duration::from_millis(100);
const RESTART_MAX: Duration = Duration::from_secs(5);
/// A child that lived for so long did not die of how it was started.
const STEADY: Duration = Duration::from_secs(30);
/// One that dies so often sooner will go on doing so.
const QUICK_DEATHS_MAX: u32 = 5;
/// Between the end of its input and its end; then it is killed.
const FAREWELL_MAX: Duration = Duration::from_secs(5);
/// What a child has to end in, once its parent is gone.
const ORPHAN_MAX: Duration = Duration::from_secs(2);

/// How many queues of a GPU a process uses, where nobody has said so. A rank computes, sends and receives in streams of
/// its own, and NCCL has more: with the usual 8 two of them share one, and what waits for a peer holds up computing.
const DEVICE_QUEUES: (&str, &str) = ("CUDA_DEVICE_MAX_CONNECTIONS", "32");

/// What to start.
#[derive(Clone)]
pub struct Order {
    /// What each computes on.
    pub devices: Vec<String>,
    /// The first one's number in the logs; those of other orders may come before.
    pub first: u16,
    /// Of each; never with a secret among them, because everybody sees them.
    pub arguments: Vec<OsString>,
    /// Variables that say what an argument may not.
    pub secrets: Vec<(&'static str, String)>,
    pub token: Token,
}

/// Keeps the children alive until `end`. Returns when all of them have ended.
pub async fn run(order: Order, end: CancellationToken) -> anyhow::Result<()> {
    let (lost, mut losses) = mpsc::channel(order.devices.len().max(1));
    let workers = (order.first..).zip(&order.devices);
    let keepers: Vec<Keeper> = workers.map(|(worker, _)| Keeper::start(worker, &order, lost.clone())).collect();
    drop(lost);
    let result = tokio::select! {
        () = end.cancelled() => Ok(()),
        Some(lost) = losses.recv() => Err(lost),
    };
    // All are told before anyone is waited for.
    let threads: Vec<_> = keepers.into_iter().map(|Keeper { _end: _, thread }| thread).collect();
    let ended = tokio::task::spawn_blocking(move || {
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread that keeps a worker panicked");
            }
        }
    });
    if ended.await.is_err() {
        tracing::error!("the workers' end could not be awaited");
    }
    result
}

struct Keeper {
    /// Dropped to end the child.
    _end: SyncSender<()>,
    thread: JoinHandle<()>,
}

impl Keeper {
    fn start(worker: u16, order: &Order, lost: mpsc::Sender<anyhow::Error>) -> Keeper {
        let (end, ended) = sync_channel(0);
        let order = order.clone();
        let thread = std::thread::spawn(move || {
            if let Err(why) = keep(worker, &order, &ended) {
                // Nobody listens any more when everything ends anyway.
                let _ending = lost.blocking_send(why);
            }
        });
        Keeper { _end: end, thread }
    }
}

/// True: it is time to end.
fn is_over(end: &Receiver<()>, wait: Duration) -> bool {
    end.recv_timeout(wait) != Err(RecvTimeoutError::Timeout)
}

/// One child after the other, until the end.
fn keep(worker: u16, order: &Order, end: &Receiver<()>) -> anyhow::Result<()> {
    let mut quick_deaths = 0;
    let mut wait = RESTART_MIN;
    loop {
        let began = Instant::now();
        let mut life = Life::begin(worker, order).with_context(|| format!("worker {worker} cannot be started"))?;
        let Some(status) = life.watch(end) else {
            life.end();
            return Ok(());
        };
        let last_words = life.last_words();
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
        if is_over(end, wait) {
            return Ok(());
        }
        wait = (wait * 2).min(RESTART_MAX);
    }
}

/// One child's life.
struct Life {
    child: Child,
    input: Option<ChildStdin>,
    relays: Vec<JoinHandle<Option<String>>>,
}

impl Life {
    fn begin(worker: u16, order: &Order) -> std::io::Result<Life> {
        // The running file itself, whatever has been put in its place since.
        let mut command = Command::new("/proc/self/exe");
        command.arg0("lockstep").args(&order.arguments);
        if let Some(device) = order.devices.get(usize::from(worker - order.first)) {
            command.args(["--device", device]);
        }
        // What the parent was told is in the arguments, as far as it is meant for a worker.
        let ours = |name: &OsString| name.to_string_lossy().starts_with("LOCKSTEP_");
        for name in std::env::vars_os().map(|(name, _)| name).filter(ours) {
            command.env_remove(name);
        }
        // Said before the child begins, which cannot say it to itself.
        if std::env::var_os(DEVICE_QUEUES.0).is_none() {
            command.env(DEVICE_QUEUES.0, DEVICE_QUEUES.1);
        }
        command.envs(order.secrets.iter().map(|(name, secret)| (name, secret)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // A group of its own: Ctrl-C is for the parent, which drains and then ends its children.
        let mut child = command.process_group(0).spawn()?;
        let mut input = child.stdin.take();
        if let Some(input) = &mut input {
            // A child that is dead already will be found so.
            let _dead = writeln!(input, "{}", order.token.expose());
        }
        let mut relays = Vec::new();
        relays.extend(child.stdout.take().map(|out| relay::start(worker, child.id(), out)));
        relays.extend(child.stderr.take().map(|out| relay::start(worker, child.id(), out)));
        tracing::info!(worker, pid = child.id(), "a worker process begins");
        Ok(Life { child, input, relays })
    }

    /// How it died, or nothing if it is to end.
    fn watch(&mut self, end: &Receiver<()>) -> Option<ExitStatus> {
        loop {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(status);
            }
            if is_over(end, LOOK_EVERY) {
                return None;
            }
        }
    }

    fn end(mut self) {
        drop(self.input.take());
        let deadline = Instant::now() + FAREWELL_MAX;
        while Instant::now() < deadline && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(LOOK_EVERY);
        }
        if matches!(self.child.try_wait(), Ok(None)) {
            tracing::warn!(pid = self.child.id(), "a worker process does not end, and is killed");
            // It may have ended in between.
            let _ended = self.child.kill();
        }
        let _reaped = self.child.wait();
        self.last_words();
    }

    /// What it said last that was no log: how it failed.
    fn last_words(&mut self) -> String {
        let mut words = self.relays.drain(..).filter_map(|relay| relay.join().ok().flatten());
        words.next_back().unwrap_or_else(|| "it said nothing".into())
    }
}

/// The child's side: takes the token, and ends with the parent.
pub fn be_one(shutdown: CancellationToken) -> anyhow::Result<Token> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("the parent's end cannot be watched")?;
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).context("the parent's token cannot be read")?;
    let token = Token::new(&line).context("from the parent")?;
    std::thread::Builder::new().name("parent".into()).spawn(move || {
        // Nothing more is ever said: this ends with the parent, or with its wish.
        let _ended = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        shutdown.cancel();
        std::thread::sleep(ORPHAN_MAX);
        std::process::exit(0);
    })?;
    Ok(token)
}
