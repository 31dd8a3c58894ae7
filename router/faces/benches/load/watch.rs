//! Reads measurements of processes and of the machine from `/proc`.

use std::fs;
use std::time::Instant;

/// `sysconf(_SC_CLK_TCK)` has this value on every Linux.
const TICKS: f64 = 100.0;

/// Returns the CPU seconds of a process's threads whose name begins with this one.
pub fn threads_seconds(pid: u32, name: &str) -> f64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(|entry| entry.unwrap().path());
    let of = |task: std::path::PathBuf| {
        let is_of = fs::read_to_string(task.join("comm")).unwrap().starts_with(name);
        let times = fs::read_to_string(task.join("schedstat")).unwrap();
        let nanos: f64 = times.split_ascii_whitespace().next().unwrap().parse().unwrap();
        if is_of { nanos / 1e9 } else { 0.0 }
    };
    tasks.map(of).sum()
}

pub fn resident_bytes(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap() * 1024
}

/// The machine at one moment: the used time of its CPUs, by all processes and by ours.
pub struct Machine {
    began: Instant,
    busy: f64,
    own: f64,
    pids: Vec<u32>,
}

impl Machine {
    pub fn now(pids: &[u32]) -> Machine {
        Machine { began: Instant::now(), busy: busy_seconds(), own: own_seconds(pids), pids: pids.to_vec() }
    }

    /// Returns the cores that other processes have used since.
    pub fn foreign_cores(&self) -> f64 {
        let (busy, own) = (busy_seconds() - self.busy, own_seconds(&self.pids) - self.own);
        ((busy - own) / self.began.elapsed().as_secs_f64()).max(0.0)
    }
}

fn busy_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/stat").unwrap();
    let fields: Vec<f64> =
        stat.lines().next().unwrap().split_ascii_whitespace().skip(1).map(|field| field.parse().unwrap()).collect();
    // These are user, nice, system, irq, softirq and steal; not idle and iowait.
    [0, 1, 2, 5, 6, 7].map(|at: usize| fields[at]).iter().sum::<f64>() / TICKS
}

fn own_seconds(pids: &[u32]) -> f64 {
    let of = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().collect();
        fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()
    };
    pids.iter().map(of).sum::<f64>() / TICKS
}
