//! The context of measurements: the machine, its load, a process's memory and files; and where results are written.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::Path;

/// A description of the machine.
pub fn machine() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    format!("{} cores of {}", n_cores(), model.unwrap_or(std::env::consts::ARCH))
}

pub fn n_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The machine's load.
pub fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let averages: Vec<&str> = text.split(' ').take(3).collect();
    format!("load {}", averages.join(", "))
}

/// Writes a result file, replacing that of an earlier run.
pub fn write_result(name: &str, text: &str) {
    std::fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/results").join(name), text).unwrap();
}

/// Memory and files held by one process, or by several together.
#[derive(Clone, Debug, Default)]
pub struct Held {
    pub rss_kib: f64,
    /// A shared page counts in parts, so that the sum over the processes that share it counts it once.
    pub pss_kib: f64,
    pub n_files: f64,
}

impl Held {
    pub fn by(pid: u32) -> Held {
        let page = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
        let kib = |name: &str| {
            let line = page.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse().unwrap()
        };
        let n_files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count() as f64;
        Held { rss_kib: kib("Rss:"), pss_kib: kib("Pss:"), n_files }
    }

    pub fn together(all: &[Held]) -> Held {
        let sum = |of: fn(&Held) -> f64| all.iter().map(of).sum();
        Held { rss_kib: sum(|of| of.rss_kib), pss_kib: sum(|of| of.pss_kib), n_files: sum(|of| of.n_files) }
    }

    pub fn median(all: &[&Held]) -> Held {
        let of = |value: fn(&Held) -> f64| median(all.iter().map(|held| value(held)).collect());
        Held { rss_kib: of(|held| held.rss_kib), pss_kib: of(|held| held.pss_kib), n_files: of(|held| held.n_files) }
    }

    /// Whether the growth since `before` is no leak. A little growth is allowed, because memory is kept for reuse.
    pub fn is_flat_after(&self, before: &Held) -> bool {
        let flat = |now: f64, before: f64| now <= before * 1.05 + 1024.0;
        flat(self.rss_kib, before.rss_kib) && flat(self.pss_kib, before.pss_kib) && self.n_files <= before.n_files + 2.0
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
