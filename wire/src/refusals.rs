//! Peers that were refused at a listener, for the log: each address once a second, however often it dials. Knows
//! nothing of the reasons.

use crate::rate_limit::{LogRateLimit, SuppressedEvents};
use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use tokio::time::Instant;
use types::Micros;

/// The refused peers of one listener.
#[derive(Debug)]
pub struct Refusals {
    began: Instant,
    limit: Mutex<LogRateLimit<IpAddr>>,
}

impl Default for Refusals {
    fn default() -> Refusals {
        Refusals { began: Instant::now(), limit: Mutex::default() }
    }
}

impl Refusals {
    /// Returns what the line about these `n` must add about earlier ones without a line. None: these get no line
    /// either.
    pub fn admit(&self, peer: SocketAddr, n: u64, why: &impl Display) -> Option<SuppressedEvents> {
        let now = Micros(self.began.elapsed().as_micros() as u64);
        // A client gets a new port for each connection.
        let address = peer.ip().to_canonical();
        self.limit.lock().unwrap_or_else(PoisonError::into_inner).admit(address, n, why, now)
    }
}
