//! The one stream to a coordinator: one task owns it and the table of requests under way. Knows tokens and positions,
//! no text, no clients and no other replica.
//!
//! A coordinator that is lost takes no stream with it. The table holds each request's token log; whoever has the same
//! policy digest gets prompt and output so far and goes on from there: another replica that is ready, or else the first
//! that will be, the same one included. An entry holds all that another link needs to go on with it.
mod entry;
mod hear;
mod line;
mod moves;
mod replica;
mod task;
#[cfg(test)]
mod tests;

pub use replica::{Replica, View};
pub use task::Task;

use crate::beats::Beats;
use crate::config::Config;
use crate::ledger::Ledger;
use crate::peers::Peers;
use crate::refusal::Refusal;
use crate::target::Target;
use crate::ticket::{Cancel, Home, Ticket};
use entry::Entry;
use line::Line;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use telemetry::Carried;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use types::{Finish, PolicyDigest, Request, RequestId, TokenOut};

/// What a request's owner is told.
#[derive(Debug)]
pub enum Told {
    Tokens(Progress),
    /// Nothing follows.
    Refused(Refusal),
}

/// Tokens without gap or repetition, whatever happened to the replica in between.
#[derive(Debug, Default)]
pub struct Progress {
    /// Of the first token, counted from the end of the prompt.
    pub position: u32,
    pub tokens: Vec<TokenOut>,
    pub n_cached: u32,
    pub finish: Option<Finish>,
    /// Logprobs of the prompt's tokens from a position on, as the replica says them: perhaps not for the first time.
    pub scored_position: u32,
    pub scored: Vec<TokenOut>,
    pub pooled: Vec<f32>,
}

/// Where a request's owner hears of it: which slot, and what.
pub type Ear = mpsc::Sender<(u32, Told)>;

/// A request on its way to the replica.
pub struct Submit {
    /// Of all links of this router together.
    pub key: u64,
    /// Its id is filled in here: it depends on the replica.
    pub request: Request,
    /// What its owner calls it.
    pub slot: u32,
    pub deadline: Option<Instant>,
    /// Replicas with another digest would give other tokens.
    pub digest: PolicyDigest,
    /// Tokens of it that the replica's cache is said to have.
    pub n_cached: u32,
    pub adopts: Option<Adopts>,
    /// Of the request's span; empty where nobody records it.
    pub trace: Carried,
    pub ear: Ear,
}

/// A request that the replica may have already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Adopts {
    pub of: RequestId,
    /// Tokens that the client has.
    pub n_had: u32,
}

/// The side of the link that the rest of the router holds, and the other links.
#[derive(Clone)]
pub struct Link {
    submits: mpsc::Sender<(u64, Box<Entry>)>,
    cancels: mpsc::Sender<Cancel>,
    ledger: Arc<Ledger>,
    /// Of all links of this router together.
    next_key: Arc<AtomicU64>,
    retry_after: Duration,
}

impl Link {
    /// Tokens that the replica has to compute, as far as is known here.
    #[cfg(test)]
    pub fn work(&self) -> u64 {
        self.ledger.work()
    }

    pub fn ledger(&self) -> Arc<Ledger> {
        self.ledger.clone()
    }

    /// How long a request of so many tokens would wait for its first.
    pub fn wait(&self, n_tokens: u64) -> Option<Duration> {
        self.ledger.wait(n_tokens)
    }

    /// False: whatever is submitted now is refused.
    pub fn has_room(&self) -> bool {
        self.cancels.capacity() > 0
    }

    /// So many keys that follow one another, for the choices of one request.
    pub fn keys(&self, n: u64) -> u64 {
        self.next_key.fetch_add(n, Ordering::Relaxed)
    }

    pub fn submit(&self, submit: Submit) -> Result<Ticket, Refusal> {
        let full = || Refusal::Full { retry_after: self.retry_after };
        let cancel = self.cancels.clone().try_reserve_owned().map_err(|_| full())?;
        let last = submit.ear.clone().try_reserve_owned().map_err(|_| full())?;
        let Submit { key, request, slot, deadline, digest, n_cached, adopts, trace, ear } = submit;
        let n_missing = (request.n_tokens() as u64).saturating_sub(n_cached.into());
        let (work, since) = (self.ledger.enter(n_missing), Instant::now());
        let home = Home::at(cancel);
        let ticket = Ticket::new(key, home.clone());
        let (n_lost, heard) = (0, None);
        let entry =
            Entry { request, slot, deadline, digest, adopts, trace, ear, last, home, work, since, n_lost, heard };
        match self.submits.try_send((key, Box::new(entry))) {
            Ok(()) => Ok(ticket),
            Err(_) => {
                ticket.over();
                Err(full())
            }
        }
    }

    /// Takes over what another link had. Given back where this one is full.
    fn adopt(&self, key: u64, mut entry: Box<Entry>) -> Result<(), Box<Entry>> {
        let (Ok(place), Ok(cancel)) = (self.submits.try_reserve(), self.cancels.clone().try_reserve_owned()) else {
            return Err(entry);
        };
        if entry.home.moves_to(cancel) {
            entry.work = self.ledger.enter(entry.request.n_tokens() as u64);
            (entry.adopts, entry.heard) = (None, None);
            place.send((key, entry));
        }
        Ok(())
    }
}

/// The task of a link, which introduces itself to the others. It is to be run.
pub fn link(
    target: watch::Receiver<Target>,
    peers: Peers,
    place: usize,
    next_key: Arc<AtomicU64>,
    config: &Config,
) -> Task {
    let requests_max = config.limits.requests_max;
    let (submits, submitted) = mpsc::channel(requests_max);
    let (cancels, cancelled) = mpsc::channel(requests_max);
    let ledger = peers.ledger();
    let retry_after = config.waits.retry_after;
    peers.introduce(place, Link { submits, cancels, ledger: ledger.clone(), next_key, retry_after });
    Task {
        target,
        aimed: 0,
        waits: config.waits.clone(),
        outputs_unread_max: config.limits.outputs_unread_max,
        losses_max: config.limits.losses_max,
        submitted,
        cancelled,
        views: peers.views(),
        peers,
        place,
        ledger,
        replica: None,
        former: None,
        draining: false,
        recovering_since: None,
        beats: Beats::default(),
        line: Line::Down { until: Instant::now() },
        reattach: config.waits.reattach_min,
        outbound: None,
        outbox: VecDeque::new(),
        table: BTreeMap::new(),
        parked: BTreeMap::new(),
        reason: String::new(),
    }
}
