//! How ranks meet: each dials those of lower rank that it talks to, and lets in those of higher rank. Who cannot be
//! meant is sent away and harms nobody. Knows nothing of what they will say to each other.

mod handshake;
mod talk;

use crate::doom::Ended;
use crate::doorway::Doorway;
use crate::error::{Error, Refusal, Result};
use crate::link::Link;
use crate::mesh::{Mesh, Wiring};
use crate::plan::{MeshPlan, Wire};
use crate::region::{Offer, Region};
use crate::wait::Waits;
use crate::wiring::talk as talks;
use handshake::{Meeting, Met, fresh};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;
use std::time::{Duration, Instant};
use talk::Talk;
use types::Rank;

/// Who knocks must say who it is within.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Handshakes at once; more wait in the system's queue.
const HANDSHAKES_MAX: usize = 64;
/// How often a wait looks whether it should end.
const LOOK: Duration = Duration::from_millis(10);
/// Before a peer that is not there yet is dialled again.
const AGAIN: Duration = Duration::from_millis(30);

/// One rank's meeting of all its peers.
pub(crate) struct Join<'a> {
    doorway: &'a Doorway,
    plan: &'a MeshPlan,
    deadline: Instant,
    /// The place that it is for is over.
    ended: &'a Ended,
    /// This rank's bell, and how others on this host open it.
    bell: Arc<Region>,
    offer: Option<Offer>,
    n_handshakes: AtomicUsize,
    state: Mutex<State>,
}

struct State {
    /// By rank.
    seats: Vec<Seat>,
    /// The first failure, which ends the join.
    error: Option<Error>,
}

/// Where a peer stands.
enum Seat {
    /// Itself, or one that it never talks to.
    Nobody,
    Empty,
    /// Somebody has proved to be it and is settling the wire.
    Taken,
    Here(Box<Link>),
}

pub(crate) fn join(doorway: &Doorway, plan: &MeshPlan, ended: &Ended) -> Result<Mesh> {
    let deadline = Instant::now() + plan.timeouts.join;
    let grid = plan.layout.grid();
    if plan.rank.0 >= grid.n_ranks() || plan.peers.len() != usize::from(grid.n_ranks()) {
        return Err(Error::Plan("a rank outside of the grid, or not one address for each rank"));
    }
    let seat = |rank| if talks(grid, plan.rank, Rank(rank)) { Seat::Empty } else { Seat::Nobody };
    let seats = (0..grid.n_ranks()).map(seat).collect();
    let (bell, offer) = bell(plan)?;
    let join = Join {
        doorway,
        plan,
        deadline,
        ended,
        bell: Arc::new(bell),
        offer,
        n_handshakes: AtomicUsize::new(0),
        state: Mutex::new(State { seats, error: None }),
    };
    join.meet();
    join.into_mesh()
}

/// Offered to others if it may be, and can be on this system.
fn bell(plan: &MeshPlan) -> Result<(Region, Option<Offer>)> {
    if plan.wire != Wire::Socket
        && let Ok((region, offer)) = Offer::make(Region::bell_bytes(), fresh()?)
    {
        return Ok((region, Some(offer)));
    }
    let bell = Region::anonymous(Region::bell_bytes());
    Ok((bell.map_err(|source| Error::Io { what: "memory for a bell", source })?, None))
}

impl Join<'_> {
    fn meet(&self) {
        std::thread::scope(|scope| {
            for rank in self.empty().into_iter().filter(|rank| *rank < self.plan.rank) {
                scope.spawn(move || self.dial(rank));
            }
            while !self.is_over() {
                if let Err(error) = self.let_in(scope) {
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
        let links = state.seats.into_iter().map(|seat| match seat {
            Seat::Here(link) => Some(*link),
            _ => None,
        });
        let plan = self.plan;
        let waits = Waits { deadline: plan.timeouts.op, spin: plan.spin };
        let (rank, epoch, bell) = (plan.rank, plan.epoch, self.bell);
        Mesh::new(&plan.layout, Wiring { rank, epoch, waits, bell, links: links.collect() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn empty(&self) -> Vec<Rank> {
        let state = self.state();
        let awaited = state.seats.iter().enumerate().filter(|(_, seat)| matches!(seat, Seat::Empty | Seat::Taken));
        awaited.map(|(rank, _)| Rank(rank as u16)).collect()
    }

    /// The first failure stands.
    fn fail(&self, error: Error) {
        self.state().error.get_or_insert(error);
    }

    /// All are here, or it has failed; a passed deadline is a failure that names who is missing.
    fn is_over(&self) -> bool {
        let Some(missing) = self.empty().into_iter().next() else { return true };
        if self.ended.is_said() {
            self.fail(Error::Aborted);
        } else if Instant::now() >= self.deadline {
            self.fail(Error::Deadline { rank: missing });
        }
        self.state().error.is_some()
    }

    /// Waits a moment for a knock, and gives who knocks a thread: who is silent keeps nobody waiting.
    fn let_in<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> Result<()> {
        let slice = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
        // Heard or not, the doorway is asked.
        let _ = poll(&mut [PollFd::new(self.doorway.listener(), PollFlags::IN)], Some(&slice));
        if self.n_handshakes.load(Ordering::Relaxed) >= HANDSHAKES_MAX {
            std::thread::sleep(LOOK);
            return Ok(());
        }
        let Some((stream, from)) = self.doorway.accept()? else { return Ok(()) };
        self.n_handshakes.fetch_add(1, Ordering::Relaxed);
        let welcome = move || {
            self.welcome(stream, from);
            self.n_handshakes.fetch_sub(1, Ordering::Relaxed);
        };
        let thread = std::thread::Builder::new().spawn_scoped(scope, welcome);
        thread.map(|_| ()).map_err(|source| Error::Io { what: "a thread for a handshake", source })
    }

    fn welcome(&self, stream: TcpStream, from: SocketAddr) {
        let until = self.deadline.min(Instant::now() + HANDSHAKE);
        match self.meeting(stream, until).and_then(|mut meeting| meeting.welcome(|rank| self.take(rank))) {
            Ok((rank, met)) => self.seat(rank, Ok(met)),
            Err((rank, why)) => {
                // Its seat is free again for the one who is meant.
                self.free(rank);
                self.doorway.refused(from, why);
            }
        }
    }

    fn meeting(&self, stream: TcpStream, until: Instant) -> std::result::Result<Meeting<'_>, (Option<Rank>, Refusal)> {
        let talk = Talk::new(stream, until, Box::new(|| self.is_over())).map_err(|why| (None, why))?;
        Ok(Meeting { plan: self.plan, offer: self.offer.as_ref(), talk })
    }

    /// The seat of a rank that has proved to be it.
    fn take(&self, rank: Rank) -> std::result::Result<(), Refusal> {
        match &mut self.state().seats[usize::from(rank.0)] {
            Seat::Nobody => Err(Refusal::Unexpected),
            Seat::Taken | Seat::Here(_) => Err(Refusal::Duplicate),
            seat @ Seat::Empty => {
                *seat = Seat::Taken;
                Ok(())
            }
        }
    }

    fn free(&self, rank: Option<Rank>) {
        if let Some(rank) = rank {
            self.state().seats[usize::from(rank.0)] = Seat::Empty;
        }
    }

    fn seat(&self, rank: Rank, met: Result<Met>) {
        let link = met.and_then(|met| met.into_link(self.plan, rank));
        match link {
            Ok(link) => self.state().seats[usize::from(rank.0)] = Seat::Here(Box::new(link)),
            Err(error) => self.fail(error),
        }
    }

    /// Until it is there, or says that it never will be.
    fn dial(&self, rank: Rank) {
        let mut early = None;
        while !self.is_over() {
            match self.dial_once(rank) {
                Ok(met) => return self.seat(rank, Ok(met)),
                Err(why @ Refusal::Early { .. }) => early = Some(why),
                Err(Refusal::Gone | Refusal::Silence) => {}
                Err(Refusal::Stale { ours, theirs }) => return self.fail(Error::Stale { rank, ours, theirs }),
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

    fn dial_once(&self, rank: Rank) -> std::result::Result<Met, Refusal> {
        let time = self.deadline.saturating_duration_since(Instant::now()).min(HANDSHAKE);
        let peer = &self.plan.peers[usize::from(rank.0)];
        let addresses = peer.to_socket_addrs().map_err(|_| Refusal::Gone)?;
        let connect = |address| TcpStream::connect_timeout(&address, time.max(LOOK)).ok();
        let stream = addresses.into_iter().find_map(connect).ok_or(Refusal::Gone)?;
        // Until the deadline: the peer may still be in an epoch before this one, its doorway unattended.
        let mut meeting = self.meeting(stream, self.deadline).map_err(|(_, why)| why)?;
        meeting.dial(rank)
    }
}
