//! The handle of a link, for the rest of the router and the other links. Knows no frames.

use crate::board::ledger::Ledger;
use crate::link::absence::ComputeAbsence;
use crate::link::request::{Adoption, ClientCall, LinkRequest};
use crate::link::ticket::{Cancel, CancelRoute, Ticket};
use crate::refusal::Refusal;
use proto::cluster::passage::Kind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;
use types::Request;

/// A link's handle, for the rest of the router and the other links.
#[derive(Clone)]
pub struct ReplicaLink {
    pub(super) submits: mpsc::Sender<(u64, Box<LinkRequest>)>,
    pub(super) cancels: mpsc::Sender<Cancel>,
    pub(super) ledger: Arc<Ledger>,
    /// The next key; all links of this router share the counter.
    pub(super) next_key: Arc<AtomicU64>,
    pub(super) retry_after: Duration,
}

impl ReplicaLink {
    /// Tokens that the replica has to compute, as far as this router knows.
    #[cfg(test)]
    pub fn work(&self) -> u64 {
        self.ledger.work()
    }

    pub fn ledger(&self) -> Arc<Ledger> {
        self.ledger.clone()
    }

    /// How long a request of `n_tokens` would wait for its first token.
    pub fn wait(&self, n_tokens: u64) -> Option<Duration> {
        self.ledger.wait(n_tokens)
    }

    /// Returns whether the link's queue has room for another request.
    pub fn has_room(&self) -> bool {
        self.cancels.capacity() > 0
    }

    /// Reserves `n` consecutive keys for the choices of one request, and returns the first.
    pub fn keys(&self, n: u64) -> u64 {
        self.next_key.fetch_add(n, Ordering::Relaxed)
    }

    /// Submits the request in a slot of the call.
    pub fn submit(
        &self,
        request: Request,
        slot: u32,
        adopts: Option<Adoption>,
        call: &Arc<ClientCall>,
    ) -> Result<Ticket, Refusal> {
        let full = || Refusal::Full { retry_after: self.retry_after };
        let cancel = self.cancels.clone().try_reserve_owned().map_err(|_| full())?;
        let last = call.outputs.clone().try_reserve_owned().map_err(|_| full())?;
        let n_missing = (request.n_tokens() as u64).saturating_sub(call.n_cached.into());
        let (key, home) = (call.first_key + u64::from(slot), CancelRoute::to_link(cancel));
        let ticket = Ticket::new(key, home.clone());
        let entry = LinkRequest {
            request,
            slot,
            call: call.clone(),
            adopts,
            last,
            home,
            work: self.ledger.add_work(n_missing),
            since: Instant::now(),
            absence: ComputeAbsence::default(),
            n_lost: 0,
            n_coordinators_lost: 0,
            last_token_at: None,
            events: Vec::new(),
        };
        match self.submits.try_send((key, Box::new(entry))) {
            Ok(()) => Ok(ticket),
            Err(_) => {
                ticket.finish();
                Err(full())
            }
        }
    }

    /// Takes over another link's request. It is given back if this link is full.
    pub(super) fn adopt(&self, key: u64, mut entry: Box<LinkRequest>) -> Result<(), Box<LinkRequest>> {
        let (Ok(place), Ok(cancel)) = (self.submits.try_reserve(), self.cancels.clone().try_reserve_owned()) else {
            return Err(entry);
        };
        if entry.home.move_to(cancel) {
            entry.work = self.ledger.add_work(entry.request.n_tokens() as u64);
            (entry.adopts, entry.last_token_at) = (None, None);
            entry.record_event(Kind::Moved, Instant::now());
            place.send((key, entry));
        }
        Ok(())
    }
}
