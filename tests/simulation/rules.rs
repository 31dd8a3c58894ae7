//! The rules that excuse a broken call. They are strict, and follow from the script alone.
//!
//! 1. A call with a running and reachable router sees no fault of coordinators, workers or the wires between them: a
//!    stream that has begun does not break, whichever process dies behind the router.
//! 2. Before it has begun, it may fail because no replica is ready, if none was undisturbed for as long as a recovery
//!    takes.
//! 3. A deadline does not expire early, and only for a client that set one. Where there was no fault for as long as a
//!    recovery takes, it expires only if it was shorter than the longest time of such a request.
//! 4. The store's absence excuses nothing, unless a process has to be found in it again.
//! 5. Every call ends within `ENDS_MAX` from its beginning or from the end of all faults, whichever is later.

use crate::script::{CALM_MILLIS, Fault, Host, PlannedCall, Script, What};
use tonic::{Code, Status};

/// A wire with losses is detected by pings: one is sent after five seconds of silence, and its answer may take five.
/// Then the peer dials again, and a process that received a stop signal has its grace.
const WIRE_MILLIS: u64 = 13_000;
const DRAIN_MILLIS: u64 = 31_000;
/// The longest time from a fault's end until the replica serves again: a lost rank's place is kept for ten seconds,
/// ranks that blame each other wait up to as long, an unreachable coordinator is noticed within ten.
pub const RECOVERY_MILLIS: u64 = 25_000;
/// Limit for a request in a healthy cluster, behind all others.
pub const SERVED_MILLIS: u64 = 6_000;
pub const ENDS_MAX_MILLIS: u64 = 45_000;

pub struct Rules {
    pub script: Script,
}

/// An attempt that did not reach its end.
pub struct Broken {
    pub begun_millis: u64,
    pub at_millis: u64,
    pub router: usize,
    /// Whether the first event had come.
    pub has_begun: bool,
    pub status: Status,
}

impl Broken {
    pub fn is_deadline(&self) -> bool {
        self.status.code() == Code::DeadlineExceeded
    }
}

impl Rules {
    /// Returns the broken rule, if nothing excuses the attempt.
    pub fn judge(&self, plan: &PlannedCall, broken: &Broken) -> Result<(), String> {
        let Broken { begun_millis, at_millis, router, has_begun, status } = broken;
        let during =
            |fault: &Fault, margin: u64| fault.at_millis <= *at_millis && fault.end_millis() + margin >= *begun_millis;
        let faults = &self.script.faults;
        let is_router_well =
            !faults.iter().any(|fault| during(fault, WIRE_MILLIS) && fault.disturbs_client(plan.client, *router))
                && !faults.iter().any(|fault| during(fault, DRAIN_MILLIS) && fault.drains(*router));
        if broken.is_deadline() {
            return self.judge_deadline(plan, *at_millis);
        }
        if !is_router_well {
            return Ok(());
        }
        if *has_begun {
            return Err("a stream broke at an undisturbed router".into());
        }
        let is_replica_well = |replica: &usize| {
            let touches = |fault: &Fault| fault.disturbs(*replica, *router) || self.bars(fault, *replica, *router);
            let is_disturbed = |fault: &&Fault| touches(fault) && during(fault, RECOVERY_MILLIS);
            faults.iter().find(is_disturbed).is_none()
        };
        let is_cold = *begun_millis < RECOVERY_MILLIS / 5;
        match (status.code(), (0..self.script.replicas.len()).find(is_replica_well)) {
            (Code::Unavailable, None) => Ok(()),
            // A request that would wait beyond its deadline is rejected immediately.
            (Code::ResourceExhausted, _) if plan.deadline_millis.is_some() => Ok(()),
            (Code::Unavailable, Some(_)) if is_cold => Ok(()),
            (Code::Unavailable, Some(replica)) => Err(format!("refused while replica {replica} was well")),
            _ => Err("a refusal that nothing explains".into()),
        }
    }

    fn judge_deadline(&self, plan: &PlannedCall, at_millis: u64) -> Result<(), String> {
        let Some(deadline) = plan.deadline_millis else {
            return Err("a deadline that the request does not have".into());
        };
        // Milliseconds are rounded in transit.
        if at_millis + 2 < plan.at_millis + deadline {
            return Err(format!("a deadline of {deadline} ms has passed after {}", at_millis - plan.at_millis));
        }
        let touches = |fault: &Fault| {
            fault.at_millis <= at_millis && fault.end_millis() + RECOVERY_MILLIS.max(DRAIN_MILLIS) >= plan.at_millis
        };
        let is_cold = plan.at_millis < RECOVERY_MILLIS / 5;
        let is_short = deadline < SERVED_MILLIS;
        match is_short || is_cold || self.script.faults.iter().any(touches) {
            true => Ok(()),
            false => Err(format!("a deadline of {deadline} ms has passed in an undisturbed cluster")),
        }
    }

    /// Whether an absent store delays the call. Running roles do not need it, but a new coordinator or router has to be
    /// found in it.
    fn bars(&self, fault: &Fault, of: usize, router: usize) -> bool {
        let is_barred = match fault.what {
            What::StoreAway => true,
            What::StoreCut(host) => host.replica() == Some(of) || host == Host::Router(router),
            _ => false,
        };
        let is_new = |host: Host| self.script.faults.iter().any(|fault| fault.replaces(host));
        is_barred && (is_new(Host::Coordinator(of)) || is_new(Host::Router(router)))
    }

    /// The time by which a call must have ended.
    pub fn ends_by(&self, plan: &PlannedCall) -> u64 {
        plan.at_millis.max(CALM_MILLIS) + ENDS_MAX_MILLIS
    }
}

impl Fault {
    /// Whether the fault hits the router, or the wire between it and the client.
    fn disturbs_client(&self, client: usize, router: usize) -> bool {
        let (client, router) = (Host::Client(client), Host::Router(router));
        match self.what {
            What::Kill(host) | What::Drain(host) | What::Freeze(host) => host == router,
            What::Stall(a, b) | What::Cut(a, b) | What::Mute(a, b) | What::Slow(a, b) => {
                [a, b].contains(&client) && [a, b].contains(&router)
            }
            What::Hang(_) | What::Scale { .. } | What::StoreAway | What::StoreCut(_) | What::Rival(_) => false,
        }
    }

    /// Whether another process takes the host's place.
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

    /// Whether the fault hits the replica, or its wire to the router.
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
