//! How ranks meet: each dials the peers of lower rank, and accepts those of higher rank. Strangers are rejected and do
//! no harm. Has no knowledge of what ranks send each other afterwards.

mod handshake;
mod stream;

use crate::arrivals::{HANDSHAKE, IncomingConnection};
use crate::cancel::CancelFlag;
use crate::error::{Error, JoinRefusal, Result};
use crate::link::PeerLink;
use crate::listener::{MeetingGuard, PeerListener};
use crate::mesh::{Mesh, MeshParts};
use crate::plan::{MeshPlan, WireChoice};
use crate::region::{Region, RegionExport};
use crate::wait::WaitPolicy;
use crate::wiring::are_peers;
use handshake::{Handshake, JoinedPeer, new_nonce};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;
use std::time::{Duration, Instant};
use stream::HandshakeStream;
use types::Rank;

/// The most handshakes at a time; more connections wait at the listener.
const HANDSHAKES_MAX: usize = 64;
/// How often a wait checks whether it should end.
const LOOK: Duration = Duration::from_millis(10);
/// The pause before dialing again if a peer is not there yet.
const AGAIN: Duration = Duration::from_millis(30);

/// One rank's meeting with all its peers.
pub(crate) struct MeshJoin<'a> {
    listener: &'a PeerListener,
    plan: &'a MeshPlan,
    deadline: Instant,
    /// Set when the assignment of this join has ended.
    cancel: &'a CancelFlag,
    /// This rank's doorbell, and the handle with which other processes on this host open it.
    doorbell: Arc<Region>,
    offer: Option<RegionExport>,
    n_handshakes: AtomicUsize,
    state: Mutex<JoinState>,
}

struct JoinState {
    /// One state per rank.
    peers: Vec<PeerState>,
    /// The first failure, which ends the join.
    error: Option<Error>,
}

/// The progress of the meeting with a peer.
enum PeerState {
    /// Itself, or a rank with which it never communicates.
    Unneeded,
    Missing,
    /// A connection has proved to be this rank and is choosing the wire.
    Settling,
    Linked(Box<PeerLink>),
}

impl Mesh {
    /// Meets the other ranks of the plan's epoch: all of them join at about the same time, each with its own rank.
    pub fn join(listener: &PeerListener, plan: MeshPlan) -> Result<Mesh> {
        Mesh::join_until(listener, plan, &CancelFlag::default())
    }

    /// Like `join`, and stops when `cancel` is set, even if it was set before.
    pub fn join_until(listener: &PeerListener, plan: MeshPlan, cancel: &CancelFlag) -> Result<Mesh> {
        match plan.layout.grid().n_ranks() {
            1 => Ok(Mesh::alone(&plan.layout)),
            _ => join(listener, &plan, cancel),
        }
    }
}

fn join(listener: &PeerListener, plan: &MeshPlan, cancel: &CancelFlag) -> Result<Mesh> {
    let deadline = Instant::now() + plan.timeouts.join;
    let grid = plan.layout.grid();
    if plan.rank.0 >= grid.n_ranks() || plan.peers.len() != usize::from(grid.n_ranks()) {
        return Err(Error::Plan("the rank is outside of the grid, or some rank has no address"));
    }
    let peer = |rank| if are_peers(grid, plan.rank, Rank(rank)) { PeerState::Missing } else { PeerState::Unneeded };
    let peers = (0..grid.n_ranks()).map(peer).collect();
    let (doorbell, offer) = doorbell(plan)?;
    let join = MeshJoin {
        listener,
        plan,
        deadline,
        cancel,
        doorbell: Arc::new(doorbell),
        offer,
        n_handshakes: AtomicUsize::new(0),
        state: Mutex::new(JoinState { peers, error: None }),
    };
    join.meet();
    join.into_mesh()
}

/// Makes the doorbell. It is exported to other processes if the plan allows it and this system supports it.
fn doorbell(plan: &MeshPlan) -> Result<(Region, Option<RegionExport>)> {
    if plan.wire != WireChoice::Socket
        && let Ok((region, offer)) = RegionExport::make(Region::doorbell_bytes(), new_nonce()?)
    {
        return Ok((region, Some(offer)));
    }
    let doorbell = Region::anonymous(Region::doorbell_bytes());
    Ok((doorbell.map_err(|source| Error::Io { what: "memory for a doorbell", source })?, None))
}

impl MeshJoin<'_> {
    fn meet(&self) {
        let hours = self.listener.open_meeting();
        std::thread::scope(|scope| {
            for rank in self.missing().into_iter().filter(|rank| *rank < self.plan.rank) {
                scope.spawn(move || self.dial(rank));
            }
            while !self.is_over() {
                if let Err(error) = self.accept_next(scope, &hours) {
                    self.fail(error);
                }
            }
        });
    }

    fn into_mesh(self) -> Result<Mesh> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = state.error {
            return Err(error);
        }
        let links = state.peers.into_iter().map(|peer| match peer {
            PeerState::Linked(link) => Some(*link),
            _ => None,
        });
        let plan = self.plan;
        let policy = WaitPolicy { deadline: plan.timeouts.op, spin: plan.spin };
        let (rank, epoch, encryption, doorbell) = (plan.rank, plan.epoch, plan.encryption, self.doorbell);
        Mesh::new(&plan.layout, MeshParts { rank, epoch, encryption, policy, doorbell, links: links.collect() })
    }

    fn state(&self) -> MutexGuard<'_, JoinState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn missing(&self) -> Vec<Rank> {
        let state = self.state();
        let awaited =
            state.peers.iter().enumerate().filter(|(_, peer)| matches!(peer, PeerState::Missing | PeerState::Settling));
        awaited.map(|(rank, _)| Rank(rank as u16)).collect()
    }

    /// Records a failure; the first one counts.
    fn fail(&self, error: Error) {
        self.state().error.get_or_insert(error);
    }

    /// Returns whether all ranks are here or the join has failed. A passed deadline is a failure that names a missing
    /// rank.
    fn is_over(&self) -> bool {
        let Some(missing) = self.missing().into_iter().next() else { return true };
        if self.cancel.is_cancelled() {
            self.fail(Error::Aborted);
        } else if Instant::now() >= self.deadline {
            self.fail(Error::Deadline { rank: missing });
        }
        self.state().error.is_some()
    }

    /// Waits a moment for a connection that has sent a Hello, and judges it on its own thread, so that a silent one
    /// delays no other.
    fn accept_next<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, hours: &MeetingGuard<'_>) -> Result<()> {
        if self.n_handshakes.load(Ordering::Relaxed) >= HANDSHAKES_MAX {
            std::thread::sleep(LOOK);
            return Ok(());
        }
        let Some(arrival) = hours.next(LOOK)? else { return Ok(()) };
        self.n_handshakes.fetch_add(1, Ordering::Relaxed);
        let welcome = move || {
            self.accept(arrival);
            self.n_handshakes.fetch_sub(1, Ordering::Relaxed);
        };
        let thread = std::thread::Builder::new().spawn_scoped(scope, welcome);
        thread.map(|_| ()).map_err(|source| Error::Io { what: "a thread for a handshake", source })
    }

    fn accept(&self, arrival: IncomingConnection) {
        let IncomingConnection { stream, from, hello, .. } = arrival;
        let until = self.deadline.min(Instant::now() + HANDSHAKE);
        let met =
            self.handshake(stream, until).and_then(|mut meeting| meeting.accept(&hello, |rank| self.take_slot(rank)));
        match met {
            Ok((rank, met)) => self.settle(rank, Ok(met)),
            Err((rank, why)) => {
                // The slot is free again for the real rank.
                self.free(rank);
                self.listener.record_refusal(from, why);
            }
        }
    }

    fn handshake(
        &self,
        stream: TcpStream,
        until: Instant,
    ) -> std::result::Result<Handshake<'_>, (Option<Rank>, JoinRefusal)> {
        let stream = HandshakeStream::new(stream, until, Box::new(|| self.is_over())).map_err(|why| (None, why))?;
        Ok(Handshake { plan: self.plan, offer: self.offer.as_ref(), stream })
    }

    /// Takes the slot of a rank that has proved its identity.
    fn take_slot(&self, rank: Rank) -> std::result::Result<(), JoinRefusal> {
        match &mut self.state().peers[usize::from(rank.0)] {
            PeerState::Unneeded => Err(JoinRefusal::Unexpected),
            PeerState::Settling | PeerState::Linked(_) => Err(JoinRefusal::Duplicate),
            peer @ PeerState::Missing => {
                *peer = PeerState::Settling;
                Ok(())
            }
        }
    }

    fn free(&self, rank: Option<Rank>) {
        if let Some(rank) = rank {
            self.state().peers[usize::from(rank.0)] = PeerState::Missing;
        }
    }

    fn settle(&self, rank: Rank, met: Result<JoinedPeer>) {
        let link = met.and_then(|met| met.into_link(self.plan, rank));
        match link {
            Ok(link) => self.state().peers[usize::from(rank.0)] = PeerState::Linked(Box::new(link)),
            Err(error) => self.fail(error),
        }
    }

    /// Dials until the peer is there, or rejects this rank for good.
    fn dial(&self, rank: Rank) {
        let mut early = None;
        while !self.is_over() {
            match self.dial_once(rank) {
                Ok(met) => return self.settle(rank, Ok(met)),
                Err(why @ JoinRefusal::Early { .. }) => early = Some(why),
                Err(JoinRefusal::Gone | JoinRefusal::Silence) => {}
                Err(JoinRefusal::Stale { ours, theirs }) => return self.fail(Error::Stale { rank, ours, theirs }),
                Err(why) => return self.fail(Error::Refused { rank, why }),
            }
            if let Some(why) = early
                && Instant::now() + AGAIN >= self.deadline
            {
                return self.fail(Error::Refused { rank, why });
            }
            std::thread::sleep(AGAIN);
        }
    }

    fn dial_once(&self, rank: Rank) -> std::result::Result<JoinedPeer, JoinRefusal> {
        let time = self.deadline.saturating_duration_since(Instant::now()).min(HANDSHAKE);
        let peer = &self.plan.peers[usize::from(rank.0)];
        let addresses = peer.to_socket_addrs().map_err(|_| JoinRefusal::Gone)?;
        let connect = |address| TcpStream::connect_timeout(&address, time.max(LOOK)).ok();
        let stream = addresses.into_iter().find_map(connect).ok_or(JoinRefusal::Gone)?;
        // Until the deadline: the peer may still be in an earlier epoch, and not serve its listener yet.
        let mut meeting = self.handshake(stream, self.deadline).map_err(|(_, why)| why)?;
        meeting.dial(rank)
    }
}
