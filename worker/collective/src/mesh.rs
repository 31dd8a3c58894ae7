//! A rank among others: its links, and the loop that moves what an operation has to move. Sends and receives go on
//! together, so that two ranks with full rings do not wait for each other.

use crate::doom::{AbortHandle, Doom};
use crate::error::{Due, Error, Result};
use crate::fold::{Plane, STACK};
use crate::frame::{Head, Kind};
use crate::link::{Fault, Link};
use crate::moves::{Ends, Move, OwnerOf, Way};
use crate::nccl::{Direct, Watch};
use crate::one_shot::{self, Desks};
use crate::region::Region;
use crate::wait::{Idle, Waits};
use std::sync::Arc;
use std::time::{Duration, Instant};
use types::{Epoch, Grid, Layout, Part, Rank};

/// Where the time in collectives went, in microseconds since the rank joined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// For others.
    pub waiting: u64,
    /// Copying, sending, receiving.
    pub moving: u64,
    /// Adding up.
    pub folding: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Spent {
    pub waiting: Duration,
    pub moving: Duration,
    pub folding: Duration,
}

/// One rank of several.
#[derive(Debug)]
pub struct Mesh {
    pub(crate) part: Part,
    pub(crate) rank: Rank,
    pub(crate) grid: Grid,
    epoch: Epoch,
    /// By rank; None for itself and for those that it never talks to.
    pub(crate) peers: Vec<Option<Peer>>,
    waits: Waits,
    doom: Arc<Doom>,
    bell: Arc<Region>,
    pub(crate) moves: Vec<Move>,
    pub(crate) scratch: Scratch,
    pub(crate) spent: Spent,
    /// What goes from device to device.
    pub(crate) direct: Option<Box<Direct>>,
    /// Where its stage adds.
    pub(crate) desks: Option<Box<Desks>>,
}

#[derive(Debug)]
pub(crate) struct Peer {
    pub link: Link,
    n_sent: u32,
    n_received: u32,
}

/// Memory that operations keep from step to step.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// This rank's planes, or the parts that it folds for all.
    pub planes: Vec<f32>,
    /// What was folded.
    pub sum: Vec<f32>,
    pub stack: Vec<f32>,
    pub words: Vec<u32>,
    /// Who has which planes of a sum over so many leaves.
    pub sums: Vec<(u32, Vec<Plane>)>,
}

/// What a mesh is made of.
#[derive(Debug)]
pub(crate) struct Wiring {
    pub rank: Rank,
    pub epoch: Epoch,
    pub waits: Waits,
    /// This rank's own.
    pub bell: Arc<Region>,
    pub links: Vec<Option<Link>>,
}

/// What all ranks do at the same time, and who owns its rows.
#[derive(Clone, Copy)]
struct Op<'a> {
    kind: Kind,
    tag: u64,
    owner_of: OwnerOf<'a>,
}

/// What came of one round over all moves.
enum Round {
    Done,
    Moved,
    Still,
}

impl Peer {
    fn due(&self, Op { kind, tag, .. }: Op<'_>, n_words: usize) -> Due {
        Due { kind, seq: self.n_received, tag, n_words: n_words as u32 }
    }
}

impl Mesh {
    pub(crate) fn new(layout: &Layout, wiring: Wiring) -> Result<Mesh> {
        let Wiring { rank, epoch, waits, bell, links } = wiring;
        let doom = Doom::new(rank, bell.clone(), links.iter().flatten());
        let doom = Arc::new(doom.map_err(|source| Error::Io { what: "a second handle of a connection", source })?);
        let peer = |link| Peer { link, n_sent: 0, n_received: 0 };
        let peers = links.into_iter().map(|link| link.map(peer)).collect();
        let scratch = Scratch { stack: vec![0.0; STACK], ..Scratch::default() };
        let (part, grid) = (layout.part(rank), layout.grid());
        let (moves, spent) = (Vec::new(), Spent::default());
        let (direct, desks) = (None, None);
        Ok(Mesh { part, rank, grid, epoch, peers, waits, doom, bell, moves, scratch, spent, direct, desks })
    }

    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle::of_mesh(self.doom.clone())
    }

    pub(crate) fn waits(&self) -> Waits {
        self.waits
    }

    pub(crate) fn doom(&self) -> Arc<Doom> {
        self.doom.clone()
    }

    pub(crate) fn watched_by(&self, watch: &Arc<Watch>) {
        self.doom.watched_by(watch);
    }

    pub(crate) fn desks_watched_by(&self, watch: &Arc<one_shot::Watch>) {
        self.doom.desks_watched_by(watch);
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.doom.is_ended()
    }

    pub(crate) fn is_anybody_gone(&self) -> bool {
        self.doom.is_anybody_gone()
    }

    /// Who has broken off or died, or who is to blame for that.
    pub(crate) fn who_is_lost(&mut self) -> Option<Error> {
        let (rank, fault) = self.who_ended(true, || [].iter())?;
        Some(self.blamed(rank, fault))
    }

    /// The one that this rank talks to, if there is but one.
    pub(crate) fn only_peer(&self) -> Option<Rank> {
        let mut peers = self.peers.iter().enumerate().filter(|(_, peer)| peer.is_some());
        let (rank, _) = peers.next()?;
        peers.next().is_none().then_some(Rank(rank as u16))
    }

    pub fn times(&self) -> Times {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let Spent { waiting, moving, folding } = self.spent;
        Times { waiting: micros(waiting), moving: micros(moving), folding: micros(folding) }
    }

    /// The rank's number of rank `tp` of this stage.
    pub(crate) fn in_stage(&self, tp: usize) -> usize {
        usize::from(self.part.place.stage) * usize::from(self.grid.tp) + tp
    }

    pub(crate) fn tp(&self) -> usize {
        self.part.place.tp.into()
    }

    pub(crate) fn tp_size(&self) -> usize {
        self.grid.tp.into()
    }

    /// Moves all that `self.moves` says. A failure ends this rank's collective: who is out of step stays so.
    pub(crate) fn exchange(&mut self, kind: Kind, tag: u64, owner_of: OwnerOf<'_>, ends: &mut impl Ends) -> Result<()> {
        if self.doom.is_ended() {
            self.moves.clear();
            return Err(Error::Aborted);
        }
        let mut moves = std::mem::take(&mut self.moves);
        let begun = Instant::now();
        let mut idle = Idle::new(begun, &self.waits);
        let result = self.drive(&mut moves, Op { kind, tag, owner_of }, ends, &mut idle);
        idle.moved(&self.bell);
        self.doom.waits_for(None);
        self.spent.waiting += idle.waited;
        self.spent.moving += begun.elapsed().saturating_sub(idle.waited);
        moves.clear();
        self.moves = moves;
        result.map_err(|error| self.fail(error))
    }

    fn drive(&mut self, moves: &mut [Move], op: Op<'_>, ends: &mut impl Ends, idle: &mut Idle) -> Result<()> {
        loop {
            match self.round(moves, op, ends)? {
                Round::Done => return Ok(()),
                Round::Moved => idle.moved(&self.bell),
                Round::Still => self.idle(idle, moves)?,
            }
        }
    }

    fn round(&mut self, moves: &mut [Move], op: Op<'_>, ends: &mut impl Ends) -> Result<Round> {
        let (mut is_done, mut has_moved) = (true, false);
        for each in moves.iter_mut().filter(|each| !each.is_done()) {
            has_moved |= match each.way {
                Way::Out => self.push(each, op, ends)?,
                Way::In | Way::Hold | Way::HoldAny => self.pull(each, op, ends)?,
            };
            is_done &= each.is_done();
        }
        Ok(match (is_done, has_moved) {
            (true, _) => Round::Done,
            (false, true) => Round::Moved,
            (false, false) => Round::Still,
        })
    }

    /// One frame out, if there is room.
    fn push(&mut self, each: &mut Move, op: Op<'_>, ends: &mut impl Ends) -> Result<bool> {
        let epoch = self.epoch;
        let (rank, peer) = self.peer(each.peer)?;
        let mut send = || {
            let n_words = each.frame_words();
            if n_words > 0 {
                let Some(frame) = peer.link.frame(n_words)? else { return Ok(false) };
                each.fill(frame, op.owner_of, ends);
                let (kind, tag) = (op.kind, op.tag);
                peer.link.send(&Head { kind, seq: peer.n_sent, n_words: n_words as u32, tag, epoch })?;
                peer.n_sent = peer.n_sent.wrapping_add(1);
            }
            each.is_flushed = each.words == 0 && peer.link.flush()?;
            Ok(n_words > 0 || each.is_flushed)
        };
        send().map_err(|fault| self.blamed(rank, fault))
    }

    /// One frame in, if there is one.
    fn pull(&mut self, each: &mut Move, op: Op<'_>, ends: &mut impl Ends) -> Result<bool> {
        let epoch = self.epoch;
        let (rank, peer) = self.peer(each.peer)?;
        let head = match peer.link.peek() {
            Ok(Some(head)) => head,
            Ok(None) => return Ok(false),
            Err(fault) => return Err(self.blamed(rank, fault)),
        };
        let n_words = if each.way == Way::HoldAny { head.n_words as usize } else { each.frame_words() };
        check(rank, &head, peer.due(op, n_words), epoch)?;
        peer.n_received = peer.n_received.wrapping_add(1);
        if each.way == Way::In {
            each.empty(peer.link.payload(), op.owner_of, ends);
            peer.link.release();
        } else {
            each.words = 0;
        }
        Ok(true)
    }

    pub(crate) fn peer(&mut self, rank: usize) -> Result<(Rank, &mut Peer)> {
        match self.peers.get_mut(rank) {
            Some(Some(peer)) => Ok((Rank(rank as u16), peer)),
            _ => Err(Error::NoPeer("link to that rank")),
        }
    }

    /// Nothing moves: spin, sleep, look who is still there.
    fn idle(&mut self, idle: &mut Idle, moves: &[Move]) -> Result<()> {
        if self.doom.is_ended() {
            return Err(Error::Aborted);
        }
        if idle.spin() {
            return Ok(());
        }
        let pending = || moves.iter().filter(|each| !each.is_done());
        let late = pending().next().map_or(self.rank, |each| Rank(each.peer as u16));
        if idle.is_late() {
            return Err(Error::Deadline { rank: late });
        }
        if let Some((rank, fault)) = self.who_ended(idle.has_slept(), pending) {
            // What it sent before it ended may have come since the last round: one more, then it is lost.
            return if idle.doubt() { Ok(()) } else { Err(self.blamed(rank, fault)) };
        }
        self.doom.waits_for(Some(late));
        idle.sleep(&self.bell, pending().filter_map(|each| Some((&self.peers[each.peer].as_ref()?.link, each.way))));
        Ok(())
    }

    /// The first peer that has broken off, or has left while it is waited for.
    fn who_ended<'m, P: Iterator<Item = &'m Move>>(
        &mut self,
        thorough: bool,
        pending: impl Fn() -> P,
    ) -> Option<(Rank, Fault)> {
        let ended = |(rank, peer): (usize, &mut Option<Peer>)| {
            let fault = peer.as_mut()?.link.has_ended(thorough)?;
            let is_meant = fault != Fault::Left || pending().any(|each| each.peer == rank);
            is_meant.then_some((Rank(rank as u16), fault))
        };
        self.peers.iter_mut().enumerate().find_map(ended)
    }

    fn blamed(&self, rank: Rank, fault: Fault) -> Error {
        match fault {
            // Another than this rank, or the peer itself: it says what it likes.
            Fault::Lost(Some(culprit)) if culprit != self.rank && culprit.0 < self.grid.n_ranks() => {
                Error::PeerLost { rank: culprit }
            }
            Fault::Lost(_) | Fault::Left => Error::PeerLost { rank },
            Fault::Garbage(what) => Error::Garbage { rank, what },
        }
    }

    /// Ends this rank's part in the collective, and tells the peers who is to blame.
    pub(crate) fn fail(&mut self, error: Error) -> Error {
        let culprit = error.rank().unwrap_or(self.rank);
        // An abort that broke a connection shows as a lost peer.
        let was_aborted = self.doom.is_ended();
        self.doom.break_off(culprit);
        self.last_frames(Kind::Break, culprit);
        if was_aborted { Error::Aborted } else { error }
    }

    fn last_frames(&mut self, kind: Kind, culprit: Rank) {
        let (tag, epoch) = (culprit.0.into(), self.epoch);
        for peer in self.peers.iter_mut().flatten() {
            if let Link::Socket(link) = &mut peer.link {
                link.leave(&Head { kind, seq: peer.n_sent, n_words: 0, tag, epoch });
            }
        }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        if self.doom.is_ended() {
            return;
        }
        let direct = self.direct.take();
        // The peers hear of it before communicators end, which may take long.
        if std::thread::panicking() {
            self.doom.break_off(self.rank);
            return self.last_frames(Kind::Break, self.rank);
        }
        if let Some(desks) = &self.desks {
            desks.leave();
        }
        if let Some(direct) = &direct {
            direct.finish();
        }
        self.doom.leave();
        self.last_frames(Kind::Leave, self.rank);
        if let Some(direct) = &direct {
            direct.leave();
        }
    }
}

/// That the ranks do the same thing at the same time.
fn check(rank: Rank, head: &Head, expected: Due, epoch: Epoch) -> Result<()> {
    if head.epoch != epoch {
        return Err(Error::Stale { rank, ours: epoch, theirs: head.epoch });
    }
    let found = Due { kind: head.kind, seq: head.seq, tag: head.tag, n_words: head.n_words };
    if found == expected { Ok(()) } else { Err(Error::OutOfStep { rank, expected, found }) }
}
