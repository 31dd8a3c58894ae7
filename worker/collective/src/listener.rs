//! The socket on which a worker's peers connect: one socket for all epochs.

use crate::error::{Error, JoinRefusal, Result};
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Mutex, PoisonError};

/// Refusals kept; the oldest are dropped.
const REFUSALS_MAX: usize = 64;

/// A worker's listening socket. It outlives epochs: a connection for a past epoch is refused in the next.
#[derive(Debug)]
pub struct PeerListener {
    listener: TcpListener,
    address: SocketAddr,
    refusals: Mutex<VecDeque<RefusedPeer>>,
}

/// A peer that was refused, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedPeer {
    pub from: SocketAddr,
    pub why: JoinRefusal,
}

impl PeerListener {
    pub fn bind(address: &str) -> Result<PeerListener> {
        let failed = |source| Error::Io { what: "the listener for peers", source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(PeerListener { listener, address, refusals: Mutex::default() })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The refusals since the last call.
    pub fn refusals(&self) -> Vec<RefusedPeer> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
    }

    pub(crate) fn refused(&self, from: SocketAddr, why: JoinRefusal) {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        if refusals.len() == REFUSALS_MAX {
            refusals.pop_front();
        }
        refusals.push_back(RefusedPeer { from, why });
    }

    pub(crate) fn listener(&self) -> &TcpListener {
        &self.listener
    }

    /// The next connection, if there is one.
    pub(crate) fn accept(&self) -> Result<Option<(TcpStream, SocketAddr)>> {
        match self.listener.accept() {
            Ok(accepted) => Ok(Some(accepted)),
            Err(error) => match error.kind() {
                // A client that hung up before it was accepted is no trouble.
                ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted => Ok(None),
                _ => Err(Error::Io { what: "the listener for peers", source: error }),
            },
        }
    }
}
