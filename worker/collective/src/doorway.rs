//! Where a worker's peers knock: one listening socket, for one epoch after another.

use crate::error::{Error, Refusal, Result};
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Mutex, PoisonError};

/// Refusals that are remembered; the oldest go first.
const REFUSALS_MAX: usize = 64;

/// A worker's listening socket. It outlives epochs: who knocks for one that is over is sent away by the next.
#[derive(Debug)]
pub struct Doorway {
    listener: TcpListener,
    address: SocketAddr,
    refusals: Mutex<VecDeque<Refused>>,
}

/// Who was sent away, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    pub from: SocketAddr,
    pub why: Refusal,
}

impl Doorway {
    pub fn open(address: &str) -> Result<Doorway> {
        let failed = |source| Error::Io { what: "the doorway for peers", source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Doorway { listener, address, refusals: Mutex::default() })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Who was sent away since the last call.
    pub fn refusals(&self) -> Vec<Refused> {
        self.refusals.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
    }

    pub(crate) fn refused(&self, from: SocketAddr, why: Refusal) {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        if refusals.len() == REFUSALS_MAX {
            refusals.pop_front();
        }
        refusals.push_back(Refused { from, why });
    }

    pub(crate) fn listener(&self) -> &TcpListener {
        &self.listener
    }

    /// The next who knocks, if somebody does.
    pub(crate) fn accept(&self) -> Result<Option<(TcpStream, SocketAddr)>> {
        match self.listener.accept() {
            Ok(knock) => Ok(Some(knock)),
            Err(error) => match error.kind() {
                // Whoever hung up before being let in is no trouble of ours.
                ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted => Ok(None),
                _ => Err(Error::Io { what: "the doorway for peers", source: error }),
            },
        }
    }
}
