//! The socket on which a worker's peers connect, one for all epochs. One thread accepts connections at any time and
//! hands those that have sent a Hello to the meeting, once there is one. Has no knowledge of the peers' identities.

use crate::arrivals::{IncomingConnection, IncomingConnections};
use crate::error::{Error, JoinRefusal, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most refusals kept; the oldest are dropped.
const REFUSALS_MAX: usize = 64;
/// The most connections handed to a meeting that it has not taken yet; more wait among the arrivals.
const HANDED_MAX: usize = 64;
/// The most connections accepted before the arrivals are read again.
const ACCEPTED_MAX: usize = 64;
/// The pause after an error of the system in accepting.
const AGAIN: Duration = Duration::from_millis(50);

/// A worker's listening socket. It outlives epochs: a connection for a past epoch is rejected in the next one.
#[derive(Debug)]
pub struct PeerListener {
    address: SocketAddr,
    shared: Arc<ListenerShared>,
    /// Some until this is dropped.
    accepting: Option<JoinHandle<()>>,
}

/// A peer that was refused, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedPeer {
    pub from: SocketAddr,
    pub why: JoinRefusal,
}

/// The state that the accepting thread and meetings share.
#[derive(Debug)]
struct ListenerShared {
    state: Mutex<ListenerState>,
    /// Notified when a connection was handed over, or the listener failed.
    handed: Condvar,
    /// Wakes the accepting thread.
    bell: OwnedFd,
}

#[derive(Default)]
struct ListenerState {
    n_meetings: usize,
    is_over: bool,
    handed: VecDeque<IncomingConnection>,
    failed: Option<io::Error>,
    refusals: VecDeque<RefusedPeer>,
}

/// While this is held, arrivals are handed to the meeting.
pub(crate) struct MeetingGuard<'a>(&'a ListenerShared);

impl PeerListener {
    pub fn bind(address: &str) -> Result<PeerListener> {
        let failed = |source| Error::Io { what: "the listener for peers", source };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| failed(error.into()))?;
        let shared = Arc::new(ListenerShared { state: Mutex::default(), handed: Condvar::new(), bell });
        let accept = {
            let shared = shared.clone();
            move || accept_all(&listener, &shared)
        };
        let accepting = std::thread::Builder::new().name("mesh-listener".into()).spawn(accept).map_err(failed)?;
        Ok(PeerListener { address, shared, accepting: Some(accepting) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the refusals since the last call.
    pub fn refusals(&self) -> Vec<RefusedPeer> {
        self.shared.state().refusals.drain(..).collect()
    }

    pub(crate) fn record_refusal(&self, from: SocketAddr, why: JoinRefusal) {
        self.shared.state().record_refusal(from, why);
    }

    pub(crate) fn open_meeting(&self) -> MeetingGuard<'_> {
        self.shared.state().n_meetings += 1;
        self.shared.ring();
        MeetingGuard(&self.shared)
    }
}

impl Drop for PeerListener {
    fn drop(&mut self) {
        self.shared.state().is_over = true;
        self.shared.ring();
        if let Some(accepting) = self.accepting.take() {
            // A thread that panicked has printed its reason.
            let _panicked = accepting.join();
        }
    }
}

impl MeetingGuard<'_> {
    /// Returns the next connection that has sent a Hello, if one comes within this time.
    pub fn next(&self, wait: Duration) -> Result<Option<IncomingConnection>> {
        let is_idle = |state: &mut ListenerState| state.handed.is_empty() && state.failed.is_none();
        let waited = self.0.handed.wait_timeout_while(self.0.state(), wait, is_idle);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if let Some(source) = state.failed.take() {
            return Err(Error::Io { what: "the listener for peers", source });
        }
        let was_full = state.handed.len() == HANDED_MAX;
        let next = state.handed.pop_front();
        drop(state);
        if was_full {
            self.0.ring();
        }
        Ok(next)
    }
}

impl Drop for MeetingGuard<'_> {
    fn drop(&mut self) {
        self.0.state().n_meetings -= 1;
        self.0.ring();
    }
}

impl ListenerShared {
    fn state(&self) -> MutexGuard<'_, ListenerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        // A full counter wakes the thread as well.
        let _full = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Hands the meeting as many arrivals as it can take, or takes back those that it left. Returns false when the
    /// listener is gone.
    fn hand_over(&self, arrivals: &mut IncomingConnections) -> bool {
        let mut state = self.state();
        if state.n_meetings == 0 {
            state.failed = None;
            while let Some(left) = state.handed.pop_back() {
                arrivals.give_back(left);
            }
        } else {
            while state.handed.len() < HANDED_MAX
                && let Some(arrival) = arrivals.take()
            {
                state.handed.push_back(arrival);
                self.handed.notify_one();
            }
        }
        !state.is_over
    }
}

impl ListenerState {
    fn record_refusal(&mut self, from: SocketAddr, why: JoinRefusal) {
        if self.refusals.len() == REFUSALS_MAX {
            self.refusals.pop_front();
        }
        self.refusals.push_back(RefusedPeer { from, why });
    }
}

impl std::fmt::Debug for ListenerState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "State({} joins, {} handed over)", self.n_meetings, self.handed.len())
    }
}

/// Accepts and reads until the listener is dropped. Sleeps while no connection arrives and none waits.
fn accept_all(listener: &TcpListener, shared: &ListenerShared) {
    let mut arrivals = IncomingConnections::default();
    while shared.hand_over(&mut arrivals) {
        let is_ready = wait(listener, shared, &arrivals);
        let refused = |from, why| shared.state().record_refusal(from, why);
        arrivals.read_arrived(&is_ready, Instant::now(), refused);
        if let Err(error) = accept_some(listener, &mut arrivals, refused) {
            shared.state().failed = Some(error);
            shared.handed.notify_one();
            std::thread::sleep(AGAIN);
        }
    }
}

/// Waits until an arrival has sent bytes, a new connection has come, or time is over. Returns which arrivals have
/// bytes.
fn wait(listener: &TcpListener, shared: &ListenerShared, arrivals: &IncomingConnections) -> Vec<bool> {
    let left = arrivals.next_deadline().map(|until| until.saturating_duration_since(Instant::now()));
    // Rounded up, so that the deadline has passed when this wakes.
    let left = left.map(|left| left + Duration::from_millis(1));
    let left = left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
    let bell = [PollFd::new(listener, PollFlags::IN), PollFd::new(&shared.bell, PollFlags::IN)];
    let theirs = arrivals.streams().map(|stream| PollFd::new(stream, PollFlags::IN));
    let mut polled: Vec<PollFd<'_>> = bell.into_iter().chain(theirs).collect();
    // The listener is checked whatever the poll returns.
    let _ = poll(&mut polled, left.as_ref());
    let _rung = rustix::io::read(&shared.bell, &mut [0; 8]);
    polled[2..].iter().map(|one| !one.revents().is_empty()).collect()
}

fn accept_some(
    listener: &TcpListener,
    arrivals: &mut IncomingConnections,
    refused: impl Fn(SocketAddr, JoinRefusal) + Copy,
) -> io::Result<()> {
    for _ in 0..ACCEPTED_MAX {
        let accepted =
            listener.accept().and_then(|(stream, from)| IncomingConnection::new(stream, from, Instant::now()));
        match accepted {
            Ok(arrival) => arrivals.add(arrival, refused),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock => return Ok(()),
                // A client that hung up before it was accepted is not an error.
                ErrorKind::Interrupted | ErrorKind::ConnectionAborted => {}
                _ => return Err(error),
            },
        }
    }
    Ok(())
}
