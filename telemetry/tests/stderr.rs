//! A process's output on stderr, in a process of its own: a panic is written before the process ends. Without a reader,
//! logging, panicking and the end of the process do not wait for long.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::io::Read;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use telemetry::logs::{self, LogOptions};

/// Marks the process as the child, and names its task.
const CHILD: &str = "TEST_OF_STDERR";
/// More than a pipe and the queue hold.
const N_LINES: usize = 20_000;
const N_PANICS: usize = 50;
/// The limit for waits that would otherwise not end; they take about a second.
const SOON: Duration = Duration::from_secs(10);

fn child(what: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "in_a_process_of_its_own", "--nocapture"]).env(CHILD, what);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn panic_once() {
    let thread = thread::Builder::new().name("unlucky".into());
    thread.spawn(|| panic!("of {}", "bad luck")).unwrap().join().unwrap_err();
}

/// Does nothing unless another test starts it.
#[test]
fn in_a_process_of_its_own() {
    let Ok(what) = std::env::var(CHILD) else { return };
    logs::init(LogOptions { filter: "info", ..LogOptions::default() }).unwrap();
    match what.as_str() {
        "panic" => {
            tracing::info!("before");
            panic_once();
            // As when the main thread panics: nothing is flushed after that.
            std::process::exit(0);
        }
        "end" => {
            (0..100).for_each(|n| tracing::info!(n, "a line"));
            logs::write_line("the last one");
            logs::flush();
            std::process::exit(0);
        }
        _ => {
            (0..N_LINES).for_each(|n| tracing::info!(n, "a line that is not read, like those before it"));
            (0..N_PANICS).for_each(|_| panic_once());
            logs::flush();
            println!("it ends");
        }
    }
}

#[test]
fn a_panic_is_read_though_nothing_is_flushed() {
    let done = child("panic").output().unwrap();
    let log = String::from_utf8(done.stderr).unwrap();
    let at = |words: &str| log.find(words).unwrap_or_else(|| panic!("{words} is not in\n{log}"));
    assert!(at("before") < at("thread 'unlucky' panicked at telemetry/tests/stderr.rs:"), "{log}");
    at("of bad luck\n");
}

#[test]
fn lines_before_a_flush_are_read() {
    let done = child("end").output().unwrap();
    let log = String::from_utf8(done.stderr).unwrap();
    let lines = log.lines().filter(|line| line.contains("a line"));
    assert!(lines.count() == 100 && log.ends_with("the last one\n"), "{log}");
}

#[test]
fn process_ends_although_stderr_is_not_read() {
    let began = Instant::now();
    let mut process = child("stall").spawn().unwrap();
    let status = loop {
        if let Some(status) = process.try_wait().unwrap() {
            break status;
        }
        if began.elapsed() > SOON {
            process.kill().unwrap();
            process.wait().unwrap();
            panic!("it does not end");
        }
        thread::sleep(Duration::from_millis(10));
    };
    let mut stdout = String::new();
    process.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    assert!(status.success() && stdout.contains("it ends"), "{status} {stdout}");
}
