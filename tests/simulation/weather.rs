//! Applies the script's faults: begins them at their times, and ends them. Has no knowledge of the roles that they hit.

use crate::record::Record;
use crate::script::{CALM_MILLIS, CLIENTS, Fault, Host, Script, What};
use std::time::Duration;
use turmoil::Sim;

pub const LATENCY_MIN: Duration = Duration::from_millis(1);
pub const LATENCY_MAX: Duration = Duration::from_millis(6);
const SLOW: Duration = Duration::from_millis(400);

pub struct Weather<'a> {
    script: &'a Script,
    record: Record,
    /// The faults in progress, by their numbers in the script.
    under_way: Vec<usize>,
    n_begun: usize,
    is_calm: bool,
}

impl Weather<'_> {
    pub fn new(script: &Script, record: Record) -> Weather<'_> {
        Weather { script, record, under_way: Vec::new(), n_begun: 0, is_calm: false }
    }

    /// Call after each step of the simulation.
    pub fn pass(&mut self, sim: &mut Sim<'_>) {
        let now = sim.elapsed().as_millis() as u64;
        let faults = &self.script.faults;
        let over: Vec<usize> = self.under_way.iter().copied().filter(|i| faults[*i].end_millis() <= now).collect();
        for i in over {
            self.under_way.retain(|other| *other != i);
            self.note(now, &format!("over: {:?}", faults[i].what));
            self.end(sim, &faults[i]);
        }
        while let Some(fault) = faults.get(self.n_begun).filter(|fault| fault.at_millis <= now) {
            self.note(now, &format!("{:?} for {} ms", fault.what, fault.lasts_millis));
            self.begin(sim, fault);
            self.under_way.push(self.n_begun);
            self.n_begun += 1;
        }
        if !self.is_calm && now >= CALM_MILLIS {
            self.is_calm = true;
            self.note(now, "calm");
            self.mend_wires(sim);
        }
    }

    fn note(&self, now: u64, what: &str) {
        self.record.seen().note(now.into(), "weather", what);
    }

    fn begin(&self, sim: &mut Sim<'_>, fault: &Fault) {
        self.record.count(fault.what.label());
        match fault.what {
            What::Kill(host) => sim.crash(host.name()),
            What::Drain(host) => {
                let stop = self.record.seen().stops.get(&host.name()).cloned();
                stop.iter().for_each(|stop| stop.cancel());
            }
            What::Stall(a, b) => sim.hold(a.name(), b.name()),
            What::Freeze(host) => self.neighbours(host).iter().for_each(|other| sim.hold(host.name(), other.name())),
            What::Cut(a, b) => sim.partition(a.name(), b.name()),
            What::Mute(from, to) => sim.partition_oneway(from.name(), to.name()),
            What::Slow(a, b) => sim.set_link_max_message_latency(a.name(), b.name(), SLOW),
            What::Hang(host) => drop(self.record.seen().hung.insert(host.name())),
            What::StoreAway => self.record.seen().is_store_away = true,
            What::StoreCut(host) => {
                self.record.seen().cut_off.entry(host.name()).or_insert(fault.at_millis);
            }
            What::Rival(replica) => drop(self.record.seen().rivals.insert(replica)),
            What::Scale { .. } => {}
        }
    }

    fn end(&self, sim: &mut Sim<'_>, fault: &Fault) {
        let goes_on = self.under_way.iter().any(|i| self.script.faults[*i].what == fault.what);
        match fault.what {
            What::Kill(host) if !goes_on => sim.bounce(host.name()),
            What::StoreAway | What::StoreCut(_) | What::Rival(_) if goes_on => {}
            What::StoreAway => self.record.seen().is_store_away = false,
            What::StoreCut(host) => drop(self.record.seen().cut_off.remove(&host.name())),
            What::Rival(replica) => {
                let mut seen = self.record.seen();
                seen.rivals.remove(&replica);
                seen.stops.get(&Host::Rival(replica).name()).iter().for_each(|stop| stop.cancel());
            }
            What::Kill(_) | What::Drain(_) | What::Scale { .. } => {}
            What::Stall(a, b) => sim.release(a.name(), b.name()),
            What::Freeze(host) => self.neighbours(host).iter().for_each(|other| sim.release(host.name(), other.name())),
            What::Cut(a, b) => sim.repair(a.name(), b.name()),
            What::Mute(from, to) => sim.repair_oneway(from.name(), to.name()),
            What::Slow(a, b) => sim.set_link_max_message_latency(a.name(), b.name(), LATENCY_MAX),
            What::Hang(host) => drop(self.record.seen().hung.remove(&host.name())),
        }
    }

    /// Releases every wire, because one fault's end may have affected another fault's wire.
    fn mend_wires(&self, sim: &mut Sim<'_>) {
        let hosts = self.everybody();
        for (i, a) in hosts.iter().enumerate() {
            for b in &hosts[i + 1..] {
                sim.release(a.name(), b.name());
            }
        }
    }

    fn neighbours(&self, host: Host) -> Vec<Host> {
        self.everybody().into_iter().filter(|other| *other != host).collect()
    }

    fn everybody(&self) -> Vec<Host> {
        self.script.hosts().into_iter().chain((0..CLIENTS).map(Host::Client)).collect()
    }
}

impl What {
    pub fn label(self) -> &'static str {
        match self {
            What::Kill(_) => "kill",
            What::Drain(_) => "drain",
            What::Stall(..) => "stall",
            What::Freeze(_) => "freeze",
            What::Cut(..) => "cut",
            What::Mute(..) => "mute",
            What::Slow(..) => "slow",
            What::Hang(_) => "hang",
            What::StoreAway => "store away",
            What::StoreCut(_) => "store cut",
            What::Rival(_) => "rival",
            What::Scale { .. } => "scale",
        }
    }
}
