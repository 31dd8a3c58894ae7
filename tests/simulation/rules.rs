//! What a broken call must be excused by: the rule is strict, and all that it needs is known from the script.
//!
//! 1. A call whose router ran and could be reached is told of nothing that befalls coordinators, workers or the wires
//!    between them: a stream that has begun does not break, whoever dies behind it.
//! 2. Before it has begun, it may be told that no replica is ready, if none was undisturbed for as long as a
//!    recovery takes.
//! 3. A deadline passes not before its time, and only for a client that set one; and where nothing was disturbed for as
//!    long as a recovery takes, only if it was shorter than such a request takes at its worst.
//! 4. The store's absence excuses nothing, unless somebody has to be found in it anew.
//! 5. Every call ends within `ENDS_MAX` from its beginning or the calm, whatever is later.

use crate::script::{Ask, CALM_MILLIS, Fault, Host, Script, What};
use tonic::{Code, Status};

/// A wire that lost something is found out by pings: one is sent after five seconds of silence and awaited for five.
/// Then the peer dials again, and a process that was told to stop has its grace.
const WIRE_MILLIS: u64 = 13_000;
const DRAIN_MILLIS: u64 = 31_000;
/// From a fault's end until the replica serves again at the latest: a lost rank's place is kept for ten seconds, those
/// that blame each other wait up to as long, a coordinator that nobody reaches is noticed within ten.
pub const RECOVERY_MILLIS: u64 = 25_000;
/// For a request in a cluster that is well: behind all others.
pub const SERVED_MILLIS: u64 = 6_000;
pub const ENDS_MAX_MILLIS: u64 = 45_000;

pub struct Rules {
    pub script: Script,
}

/// An attempt that did not come to its end.
pub struct Broken {
    pub begun_millis: u64,
    pub at_millis: u64,
    pub router: usize,
    /// The first event had come.
    pub has_begun: bool,
    pub status: Status,
}

impl Broken {
    pub fn is_deadline(&self) -> bool {
        self.status.code() == Code::DeadlineExceeded
    }
}

impl Rules {
    /// Why it may not be so.
    pub fn judge(&self, ask: &Ask, broken: &Broken) -> Result<(), String> {
        let Broken { begun_millis, at_millis, router, has_begun, status } = broken;
        let during =
            |fault: &Fault, margin: u64| fault.at_millis <= *at_millis && fault.end_millis() + margin >= *begun_millis;
        let faults = &self.script.faults;
        let is_router_well =
            !faults.iter().any(|fault| during(fault, WIRE_MILLIS) && fault.befalls(ask.client, *router))
                && !faults.iter().any(|fault| during(fault, DRAIN_MILLIS) && fault.drains(*router));
        if broken.is_deadline() {
            return self.judge_deadline(ask, *at_millis);
        }
        if !is_router_well {
            return Ok(());
        }
        if *has_begun {
            return Err("a stream broke at a router that was well".into());
        }
        let is_replica_well = |replica: &usize| {
            let touches = |fault: &Fault| fault.disturbs(*replica, *router) || self.bars(fault, *replica, *router);
            let is_disturbed = |fault: &&Fault| touches(fault) && during(fault, RECOVERY_MILLIS);
            faults.iter().find(is_disturbed).is_none()
        };
        let is_cold = *begun_millis < RECOVERY_MILLIS / 5;
        match (status.code(), (0..self.script.replicas.len()).find(is_replica_well)) {
            (Code::Unavailable, None) => Ok(()),
            // Nobody is let wait for what would come too late.
            (Code::ResourceExhausted, _) if ask.deadline_millis.is_some() => Ok(()),
            (Code::Unavailable, Some(_)) if is_cold => Ok(()),
            (Code::Unavailable, Some(replica)) => Err(format!("refused while replica {replica} was well")),
            _ => Err("a refusal that nothing explains".into()),
        }
    }

    fn judge_deadline(&self, ask: &Ask, at_millis: u64) -> Result<(), String> {
        let Some(deadline) = ask.deadline_millis else { return Err("a deadline that nobody set".into()) };
        // Milliseconds are rounded on their way.
        if at_millis + 2 < ask.at_millis + deadline {
            return Err(format!("a deadline of {deadline} ms has passed after {}", at_millis - ask.at_millis));
        }
        let touches = |fault: &Fault| {
            fault.at_millis <= at_millis && fault.end_millis() + RECOVERY_MILLIS.max(DRAIN_MILLIS) >= ask.at_millis
        };
        let is_cold = ask.at_millis < RECOVERY_MILLIS / 5;
        let is_short = deadline < SERVED_MILLIS;
        match is_short || is_cold || self.script.faults.iter().any(touches) {
            true => Ok(()),
            false => Err(format!("a deadline of {deadline} ms has passed in a cluster that was well")),
        }
    }

    /// A store that is away changes nothing for those who serve. But who has to be found there, because another has
    /// taken its place or it has forgotten the others, waits for it.
    fn bars(&self, fault: &Fault, of: usize, router: usize) -> bool {
        let is_barred = match fault.what {
            What::StoreAway => true,
            What::StoreCut(host) => host.replica() == Some(of) || host == Host::Router(router),
            _ => false,
        };
        let is_new = |host: Host| self.script.faults.iter().any(|fault| fault.replaces(host));
        is_barred && (is_new(Host::Coordinator(of)) || is_new(Host::Router(router)))
    }

    /// When a call must have ended.
    pub fn ends_by(&self, ask: &Ask) -> u64 {
        ask.at_millis.max(CALM_MILLIS) + ENDS_MAX_MILLIS
    }
}

impl Fault {
    /// The router, or the wire between it and the client.
    fn befalls(&self, client: usize, router: usize) -> bool {
        let (client, router) = (Host::Client(client), Host::Router(router));
        match self.what {
            What::Kill(host) | What::Drain(host) | What::Freeze(host) => host == router,
            What::Stall(a, b) | What::Cut(a, b) | What::Mute(a, b) | What::Slow(a, b) => {
                [a, b].contains(&client) && [a, b].contains(&router)
            }
            What::Hang(_) | What::Scale { .. } | What::StoreAway | What::StoreCut(_) | What::Rival(_) => false,
        }
    }

    /// Another process is there afterwards.
    fn replaces(&self, host: Host) -> bool {
        match self.what {
            What::Kill(other) | What::Drain(other) => other == host,
            What::Rival(replica) => host == Host::Coordinator(replica),
            _ => false,
        }
    }

    fn drains(&self, router: usize) -> bool {
        matches!(self.what, What::Drain(host) if host == Host::Router(router))
    }

    /// The replica, or its wire to the router.
    fn disturbs(&self, of: usize, router: usize) -> bool {
        let is_of = |host: Host| host.replica() == Some(of);
        match self.what {
            What::Kill(host) | What::Drain(host) | What::Freeze(host) | What::Hang(host) => is_of(host),
            What::Stall(a, b) | What::Cut(a, b) | What::Mute(a, b) | What::Slow(a, b) => {
                let is_mine = |host: Host| is_of(host) || host == Host::Router(router);
                (is_of(a) || is_of(b)) && is_mine(a) && is_mine(b)
            }
            What::Scale { replica, .. } | What::Rival(replica) => replica == of,
            What::StoreAway | What::StoreCut(_) => false,
        }
    }
}
