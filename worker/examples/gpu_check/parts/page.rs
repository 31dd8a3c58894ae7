//! The page of all findings. It is rewritten for each new finding, so that it exists whatever happens, and printed as a
//! table at the end.

use super::{Finding, Outcome};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

pub struct Page {
    device: Value,
    out: PathBuf,
    begun: u64,
    /// By part: seconds and processes.
    ran: Vec<(&'static str, Value)>,
    findings: Vec<(&'static str, Finding)>,
}

impl Page {
    pub fn new(device: Value, out: &Path) -> Page {
        let begun = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Page { device, out: out.to_owned(), begun, ran: Vec::new(), findings: Vec::new() }
    }

    pub fn add(&mut self, part: &'static str, found: Vec<Finding>) -> Result<(), String> {
        self.findings.extend(found.into_iter().map(|finding| (part, finding)));
        self.write(false).map_err(|error| format!("{}: {error}", self.out.display()))
    }

    /// Records the end of a part.
    pub fn ran(&mut self, part: &'static str, took: Duration, n_processes: usize) -> Result<(), String> {
        self.ran.push((part, json!({ "seconds": took.as_secs_f64(), "processes": n_processes })));
        self.add(part, Vec::new())
    }

    fn is_good(&self) -> bool {
        !self.findings.is_empty() && self.findings.iter().all(|(_, finding)| finding.outcome != Outcome::Wrong)
    }

    /// Replaces the file at once, so that it is never half written.
    fn write(&self, is_whole: bool) -> io::Result<()> {
        let each = self.findings.iter().map(|(part, finding)| {
            let Finding { name, outcome, details } = finding;
            json!({ "part": part, "name": name, "outcome": outcome.name(), "details": details })
        });
        let page = json!({
            "seconds_since_1970": self.begun,
            "device": self.device,
            "whole": is_whole,
            "good": self.is_good(),
            "parts": self.ran.iter().map(|(part, ran)| (*part, ran)).collect::<BTreeMap<_, _>>(),
            "findings": each.collect::<Vec<_>>(),
        });
        if let Some(folder) = self.out.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let partial = self.out.with_extension("partial");
        std::fs::write(&partial, format!("{page:#}\n"))?;
        std::fs::rename(partial, &self.out)
    }

    /// Prints the table. Returns whether everything ran and succeeded.
    pub fn finish(self, is_whole: bool) -> Result<bool, String> {
        self.write(is_whole).map_err(|error| format!("{}: {error}", self.out.display()))?;
        println!("device: {}", self.device);
        for (part, Finding { name, outcome, details }) in &self.findings {
            println!("{part:<8} {:<8} {name}: {details}", outcome.name());
        }
        let count = |outcome| self.findings.iter().filter(|(_, finding)| finding.outcome == outcome).count();
        let counts: Vec<String> =
            Outcome::ALL.iter().map(|(outcome, name)| format!("{} {name}", count(*outcome))).collect();
        let verdict = match (self.is_good(), is_whole) {
            (true, true) => "all good",
            (true, false) => "good, but NOT COMPLETE: the time was over",
            (false, _) => "NOT GOOD",
        };
        println!("{verdict} ({}) in {}", counts.join(", "), self.out.display());
        Ok(self.is_good() && is_whole)
    }
}
