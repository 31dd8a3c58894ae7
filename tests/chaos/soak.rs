//! A fault every few seconds for an hour, and the leaks afterwards: memory and open files of surviving processes. No
//! process is wrongly detected as lost, even while another program keeps a core busy.

use crate::city::{City, Model};
use crate::client::requests;
use crate::machine::{Held, load, machine, write_result};
use crate::star::Star;
use crate::{Dice, FAULTS, Fault, Load, N_STREAMS};
use std::fmt::Write;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The least time between the beginnings of two faults.
const FAULT_EVERY: Duration = Duration::from_secs(4);
const SAMPLE_EVERY: Duration = Duration::from_secs(10);
/// Few and short, so that an hour of it leaves the machine usable.
const STREAMS: usize = N_STREAMS / 4;
const TOKENS_MAX: u32 = 100;
/// The part of the run in which another program keeps a core busy.
const FOREIGN: Range<f64> = 0.40..0.48;

pub fn run(whole: Duration, mut dice: Dice, star: Option<Star>) {
    let load = Load::new(&Model::tiny(), requests(STREAMS, TOKENS_MAX));
    let mut city = City::start(Model::tiny(), star, 1);
    let faults: Vec<&Fault> = FAULTS.iter().filter(|of| of.spares && (city.has_hosts() || !of.needs_hosts)).collect();
    let mut soak =
        Soak { begun: Instant::now(), whole, samples: Vec::new(), n_false: 0, n_faults: vec![0; faults.len()] };
    let mut foreign = Foreign::default();
    while soak.begun.elapsed() < whole {
        let next = Instant::now() + FAULT_EVERY;
        foreign.set(FOREIGN.contains(&soak.part()));
        soak.look_at(&city);
        let i = dice.below(faults.len());
        load.round(&mut city, &mut dice, faults[i], f64::INFINITY);
        soak.n_faults[i] += 1;
        city.heal();
        let (n_alarms, n_due) = (city.tally().n_alarms, city.n_alarms_due());
        if n_alarms > n_due + soak.n_false {
            soak.n_false = n_alarms - n_due;
            println!("{:?}: a false alarm, with {}\n{}", soak.begun.elapsed(), faults[i].name, city.last_alarms());
        }
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    soak.sample(&city);
    let names: Vec<&str> = faults.iter().map(|of| of.name).collect();
    let is_flat = soak.write(&names, city.n_alarms_due());
    assert_eq!(soak.n_false, 0, "false alarms");
    assert!(is_flat, "see benches/results/soak.md");
}

/// Another program that keeps a core busy.
#[derive(Default)]
struct Foreign {
    thread: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
}

impl Foreign {
    fn set(&mut self, busy: bool) {
        match self.thread.take() {
            None if busy => {
                let end = Arc::new(AtomicBool::new(false));
                let ended = end.clone();
                let spin = move || while !ended.load(Relaxed) {};
                self.thread = Some((end, std::thread::spawn(spin)));
            }
            Some((end, thread)) if !busy => {
                end.store(true, Relaxed);
                thread.join().unwrap();
            }
            as_it_is => self.thread = as_it_is,
        }
    }
}

struct Sample {
    at: f64,
    spared: Vec<(String, Held)>,
    together: Held,
}

impl Sample {
    fn of(&self, n: usize) -> &Held {
        self.spared.get(n).map_or(&self.together, |(_, held)| held)
    }
}

struct Soak {
    begun: Instant,
    whole: Duration,
    samples: Vec<Sample>,
    n_faults: Vec<usize>,
    /// How often a process was wrongly detected as lost.
    n_false: usize,
}

impl Soak {
    /// The elapsed part of the run, from 0 to 1.
    fn part(&self) -> f64 {
        self.begun.elapsed().as_secs_f64() / self.whole.as_secs_f64()
    }

    fn look_at(&mut self, city: &City) {
        let due = SAMPLE_EVERY * self.samples.len() as u32;
        if self.begun.elapsed() >= due.min(self.whole) {
            self.sample(city);
        }
    }

    /// Sampled when all processes are there and idle.
    fn sample(&mut self, city: &City) {
        let spared = city.spared().into_iter().map(|(name, pid)| (name, Held::by(pid))).collect();
        let all: Vec<Held> = city.pids().into_iter().map(Held::by).collect();
        let together = Held::together(&all);
        self.samples.push(Sample { at: self.part(), spared, together });
    }

    /// Medians over third `i` of the run, for spared process `n`; for all together if `n` is one past the last.
    fn third(&self, i: usize, n: usize) -> Held {
        let part = i as f64 / 3.0..(i + 1) as f64 / 3.0;
        let is_last = |sample: &Sample| i == 2 && sample.at >= 1.0;
        let within: Vec<&Held> = self
            .samples
            .iter()
            .filter(|sample| part.contains(&sample.at) || is_last(sample))
            .map(|s| s.of(n))
            .collect();
        Held::median(&within)
    }

    /// Writes the table; whether all counts are flat.
    fn write(&self, names: &[&str], n_alarms: usize) -> bool {
        let (table, is_flat) = self.table();
        let n_faults: usize = self.n_faults.iter().sum();
        let by_kind: Vec<String> = names.iter().zip(&self.n_faults).map(|(name, n)| format!("{name} {n}")).collect();
        let verdict = if is_flat { "Flat." } else { "**Not flat.**" };
        let text = format!(
            "# A soak of faults\n\n\
            Made by `make soak-hour` on {}, {} at its end: {:.0} minutes, {n_faults} rounds with a fault in each, {} \
            samples. Two routers, two replicas of tp 2 x pp 2 with a tiny model, an etcd of three members, as \
            processes; in each round {STREAMS} streams, all equal to the undisturbed ones. One router, one coordinator \
            and one worker of each replica run to the end; other processes are killed and restarted. Other programs \
            used this machine too, and from {:.0} to {:.0}% of the time a thread kept a core busy.\n\n\
            {} false alarms. {n_alarms} times a process was stopped or cut off, and only its silence shows that.\n\n\
            {verdict} Medians of each third of the time, taken every 10 s between rounds; flat is a last third of at \
            most 1.05 x the middle one and 1 MiB, and two files. PSS counts shared pages in parts, so the sum counts \
            them once.\n\n\
            {table}\n\
            Rounds by fault: {}.\n",
            machine(),
            load(),
            self.whole.as_secs_f64() / 60.0,
            self.samples.len(),
            FOREIGN.start * 100.0,
            FOREIGN.end * 100.0,
            self.n_false,
            by_kind.join(", ")
        );
        write_result("soak.md", &text);
        is_flat
    }

    fn table(&self) -> (String, bool) {
        let mut text = "\
            | process | RSS, MiB: first, middle, last third | PSS, MiB | open files | |\n\
            |---|---:|---:|---:|---|\n"
            .to_owned();
        let mut is_flat = true;
        let names: Vec<&str> = self.samples[0].spared.iter().map(|(name, _)| &**name).collect();
        for i in 0..=names.len() {
            let thirds = [0, 1, 2].map(|third| self.third(third, i));
            let flat = thirds[2].is_flat_after(&thirds[1]);
            is_flat &= flat;
            let mib =
                |value: fn(&Held) -> f64| thirds.clone().map(|held| format!("{:.1}", value(&held) / 1024.0)).join(", ");
            let files = thirds.clone().map(|held| format!("{:.0}", held.n_files)).join(", ");
            let name = names.get(i).copied().unwrap_or("all together");
            let word = if flat { "flat" } else { "**grows**" };
            let (rss, pss) = (mib(|held| held.rss_kib), mib(|held| held.pss_kib));
            writeln!(text, "| {name} | {rss} | {pss} | {files} | {word} |").unwrap();
        }
        (text, is_flat)
    }
}
