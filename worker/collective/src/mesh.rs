//! A rank's links, and the loop that moves an operation's data. Sends and receives progress together, so two ranks with
//! full rings do not wait for each other.

use crate::abort::{AbortHandle, AbortState, DeviceWait};
use crate::error::{Error, ExpectedFrame, Result};
use crate::frame::{FrameHead, FrameKind};
use crate::link::{LinkFault, PeerLink};
use crate::plan::LinkEncryption;
use crate::region::Region;
use crate::transfer::{Direction, OwnerFn, Payload, Transfer};
use crate::wait::{IdleWait, WaitPolicy};
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use types::{Epoch, Grid, Layout, Rank, RankPart};

/// The columns that a rank finishes for the stage begin on multiples of this: one cache line.
pub(crate) const COLUMNS_MULTIPLE: usize = 16;

/// The time in collectives, in microseconds since the rank joined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExchangeTimes {
    /// Waiting for other ranks.
    pub waiting: u64,
    /// Copying, sending, receiving.
    pub moving: u64,
    /// Summing.
    pub folding: u64,
}

#[derive(Debug, Default)]
struct SpentTime {
    waiting: Duration,
    moving: Duration,
    folding: Duration,
}

/// One rank of a replica, and its links to its peers; a rank alone has none. Only the computing thread uses it.
#[derive(Debug)]
pub struct Mesh {
    part: RankPart,
    rank: Rank,
    grid: Grid,
    epoch: Epoch,
    encryption: LinkEncryption,
    /// One per rank; None for itself and for ranks with which it never communicates.
    peers: Vec<Option<MeshPeer>>,
    policy: WaitPolicy,
    abort: Arc<AbortState>,
    doorbell: Arc<Region>,
    /// The transfers of the next exchange.
    transfers: Vec<Transfer>,
    spent: SpentTime,
}

/// Why a wait of the device ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitFault {
    Aborted,
    /// A peer is gone; the links show which.
    Gone,
    Late,
}

#[derive(Debug)]
struct MeshPeer {
    link: PeerLink,
    n_sent: u32,
    n_received: u32,
}

/// The parts of a mesh.
#[derive(Debug)]
pub(crate) struct MeshParts {
    pub rank: Rank,
    pub epoch: Epoch,
    pub encryption: LinkEncryption,
    pub policy: WaitPolicy,
    /// This rank's own doorbell.
    pub doorbell: Arc<Region>,
    pub links: Vec<Option<PeerLink>>,
}

/// The operation that all ranks run now, and the owners of its rows.
#[derive(Clone, Copy)]
struct Op<'a> {
    kind: FrameKind,
    tag: u64,
    owner_of: OwnerFn<'a>,
}

/// The result of one round over all transfers.
enum Round {
    Done,
    Moved,
    Still,
}

impl MeshPeer {
    fn expected_frame(&self, Op { kind, tag, .. }: Op<'_>, n_words: usize) -> ExpectedFrame {
        ExpectedFrame { kind, seq: self.n_received, tag, n_words: n_words as u32 }
    }
}

impl Mesh {
    pub(crate) fn new(layout: &Layout, wiring: MeshParts) -> Result<Mesh> {
        let MeshParts { rank, epoch, encryption, policy, doorbell, links } = wiring;
        let abort = AbortState::new(rank, doorbell.clone(), links.iter().flatten());
        let abort = Arc::new(abort.map_err(|source| Error::Io { what: "a second handle of a connection", source })?);
        let peer = |link| MeshPeer { link, n_sent: 0, n_received: 0 };
        let peers = links.into_iter().map(|link| link.map(peer)).collect();
        let (part, grid) = (layout.part(rank), layout.grid());
        let (transfers, spent) = (Vec::new(), SpentTime::default());
        Ok(Mesh { part, rank, grid, epoch, encryption, peers, policy, abort, doorbell, transfers, spent })
    }

    /// Returns this rank's part of the model.
    pub fn part(&self) -> &RankPart {
        &self.part
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    /// Returns whether connections to other hosts are encrypted.
    pub(crate) fn encryption(&self) -> LinkEncryption {
        self.encryption
    }

    pub(crate) fn grid(&self) -> Grid {
        self.grid
    }

    pub fn is_alone(&self) -> bool {
        self.grid.n_ranks() == 1
    }

    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle((!self.is_alone()).then(|| self.abort.clone()))
    }

    pub(crate) fn policy(&self) -> WaitPolicy {
        self.policy
    }

    pub(crate) fn abort_state(&self) -> Arc<AbortState> {
        self.abort.clone()
    }

    /// Makes an abort of this rank also end this device's wait.
    pub(crate) fn add_device_wait<W: DeviceWait + 'static>(&self, wait: &Arc<W>) {
        let wait: Weak<W> = Arc::downgrade(wait);
        self.abort.add_device_wait(wait);
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.abort.is_ended()
    }

    pub(crate) fn is_any_peer_gone(&self) -> bool {
        self.abort.is_any_peer_gone()
    }

    /// Returns the error that names the rank to blame for the end of a device's wait, as far as the links show it.
    pub(crate) fn blame(&mut self, fault: WaitFault) -> Error {
        if fault == WaitFault::Aborted && self.is_ended() {
            return Error::Aborted;
        }
        if let Some(lost) = self.lost_peer_error() {
            return lost;
        }
        match (fault, self.only_peer()) {
            (WaitFault::Aborted, _) => Error::Aborted,
            (WaitFault::Gone, Some(rank)) => Error::PeerLost { rank },
            (WaitFault::Late, Some(rank)) => Error::Deadline { rank },
            (WaitFault::Gone | WaitFault::Late, None) => Error::Silence,
        }
    }

    /// Returns the peer that has broken off or died, or the rank that it blames.
    pub(crate) fn lost_peer_error(&mut self) -> Option<Error> {
        let (rank, fault) = self.find_lost_peer(true, || [].iter())?;
        Some(self.blamed(rank, fault))
    }

    /// Returns the rank's only peer, if it has just one.
    fn only_peer(&self) -> Option<Rank> {
        let mut peers = self.peers.iter().enumerate().filter(|(_, peer)| peer.is_some());
        let (rank, _) = peers.next()?;
        peers.next().is_none().then_some(Rank(rank as u16))
    }

    pub fn times(&self) -> ExchangeTimes {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let SpentTime { waiting, moving, folding } = self.spent;
        ExchangeTimes { waiting: micros(waiting), moving: micros(moving), folding: micros(folding) }
    }

    pub(crate) fn add_fold_time(&mut self, begun: Instant) {
        self.spent.folding += begun.elapsed();
    }

    /// The rank number of rank `tp` of this stage.
    pub(crate) fn stage_rank(&self, tp: usize) -> usize {
        usize::from(self.part.place.stage) * usize::from(self.grid.tp) + tp
    }

    pub(crate) fn tp(&self) -> usize {
        self.part.place.tp.into()
    }

    pub(crate) fn tp_size(&self) -> usize {
        self.grid.tp.into()
    }

    /// The other ranks of the stage.
    pub(crate) fn other_stage_ranks(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.tp();
        (0..self.tp_size()).filter(move |tp| *tp != me)
    }

    /// Returns the columns that rank `tp` finishes for the stage: equal parts of whole cache lines.
    pub(crate) fn columns_of(&self, tp: usize, n_cols: usize) -> Range<usize> {
        let cut = |i: usize| (n_cols * i / self.tp_size()).next_multiple_of(COLUMNS_MULTIPLE).min(n_cols);
        cut(tp)..cut(tp + 1)
    }

    /// Returns the units of `n_units` that rank `tp` of the stage owns.
    pub(crate) fn units_of(&self, tp: usize, n_units: u32) -> Range<usize> {
        let units = self.part.shares.of(tp as u16, n_units);
        units.start as usize..units.end as usize
    }

    /// Checks that every row has an owner in this stage.
    pub(crate) fn check_owners(&self, owner_of: OwnerFn<'_>, n_rows: usize) -> Result<()> {
        let is_here = |row: usize| (owner_of(row) as usize) < self.tp_size();
        let are_here = (0..n_rows).all(is_here);
        if are_here { Ok(()) } else { Err(Error::NoPeer("peer that owns one of the rows")) }
    }

    /// Adds transfers to the next exchange, without empty ones.
    pub(crate) fn plan<const N: usize>(&mut self, transfers: [Transfer; N]) {
        self.transfers.extend(transfers.into_iter().filter(|each| each.words > 0));
    }

    /// Carries out `self.transfers`. A failure ends this rank's part: a rank that is out of step stays so.
    pub(crate) fn exchange(
        &mut self,
        kind: FrameKind,
        tag: u64,
        owner_of: OwnerFn<'_>,
        payload: &mut impl Payload,
    ) -> Result<()> {
        if self.abort.is_ended() {
            self.transfers.clear();
            return Err(Error::Aborted);
        }
        let mut transfers = std::mem::take(&mut self.transfers);
        let begun = Instant::now();
        let mut idle = IdleWait::new(begun, &self.policy);
        let result = self.drive(&mut transfers, Op { kind, tag, owner_of }, payload, &mut idle);
        idle.reset(&self.doorbell);
        self.abort.set_awaited(None);
        self.spent.waiting += idle.waited;
        self.spent.moving += begun.elapsed().saturating_sub(idle.waited);
        transfers.clear();
        self.transfers = transfers;
        result.map_err(|error| self.fail(error))
    }

    fn drive(
        &mut self,
        transfers: &mut [Transfer],
        op: Op<'_>,
        payload: &mut impl Payload,
        idle: &mut IdleWait,
    ) -> Result<()> {
        loop {
            match self.round(transfers, op, payload)? {
                Round::Done => return Ok(()),
                Round::Moved => idle.reset(&self.doorbell),
                Round::Still => self.wait_idle(idle, transfers)?,
            }
        }
    }

    fn round(&mut self, transfers: &mut [Transfer], op: Op<'_>, payload: &mut impl Payload) -> Result<Round> {
        let (mut is_done, mut has_moved) = (true, false);
        for each in transfers.iter_mut().filter(|each| !each.is_done()) {
            has_moved |= match each.direction {
                Direction::Out => self.push(each, op, payload)?,
                Direction::In | Direction::Hold | Direction::HoldAny => self.pull(each, op, payload)?,
            };
            is_done &= each.is_done();
        }
        Ok(match (is_done, has_moved) {
            (true, _) => Round::Done,
            (false, true) => Round::Moved,
            (false, false) => Round::Still,
        })
    }

    /// Sends one frame, if there is room.
    fn push(&mut self, each: &mut Transfer, op: Op<'_>, payload: &mut impl Payload) -> Result<bool> {
        let epoch = self.epoch;
        let (rank, peer) = self.peer(each.peer)?;
        let mut send = || {
            let n_words = each.frame_words();
            if n_words > 0 {
                let Some(frame) = peer.link.reserve_frame(n_words)? else { return Ok(false) };
                each.fill(frame, op.owner_of, payload);
                let (kind, tag) = (op.kind, op.tag);
                peer.link.send(&FrameHead { kind, seq: peer.n_sent, n_words: n_words as u32, tag, epoch })?;
                peer.n_sent = peer.n_sent.wrapping_add(1);
            }
            each.is_flushed = each.words == 0 && peer.link.flush()?;
            Ok(n_words > 0 || each.is_flushed)
        };
        send().map_err(|fault| self.blamed(rank, fault))
    }

    /// Receives one frame, if there is one.
    fn pull(&mut self, each: &mut Transfer, op: Op<'_>, payload: &mut impl Payload) -> Result<bool> {
        let epoch = self.epoch;
        let (rank, peer) = self.peer(each.peer)?;
        let head = match peer.link.peek() {
            Ok(Some(head)) => head,
            Ok(None) => return Ok(false),
            Err(fault) => return Err(self.blamed(rank, fault)),
        };
        let n_words = if each.direction == Direction::HoldAny { head.n_words as usize } else { each.frame_words() };
        check(rank, &head, peer.expected_frame(op, n_words), epoch)?;
        peer.n_received = peer.n_received.wrapping_add(1);
        if each.direction == Direction::In {
            each.empty(peer.link.payload(), op.owner_of, payload);
            peer.link.release();
        } else {
            each.words = 0;
        }
        Ok(true)
    }

    /// Returns the frame that `Direction::Hold` has left in its place.
    pub(crate) fn held_frame(&self, rank: usize) -> &[u32] {
        self.peers[rank].as_ref().map_or(&[], |peer| peer.link.payload())
    }

    /// Gives the held frame's memory back.
    pub(crate) fn release(&mut self, rank: usize) {
        if let Some(peer) = &mut self.peers[rank] {
            peer.link.release();
        }
    }

    fn peer(&mut self, rank: usize) -> Result<(Rank, &mut MeshPeer)> {
        match self.peers.get_mut(rank) {
            Some(Some(peer)) => Ok((Rank(rank as u16), peer)),
            _ => Err(Error::NoPeer("link to that rank")),
        }
    }

    /// Called when nothing moves: spins, sleeps, and checks that the peers are still there.
    fn wait_idle(&mut self, idle: &mut IdleWait, transfers: &[Transfer]) -> Result<()> {
        if self.abort.is_ended() {
            return Err(Error::Aborted);
        }
        if idle.spin() {
            return Ok(());
        }
        let pending = || transfers.iter().filter(|each| !each.is_done());
        let late = pending().next().map_or(self.rank, |each| Rank(each.peer as u16));
        if idle.is_late() {
            return Err(Error::Deadline { rank: late });
        }
        if let Some((rank, fault)) = self.find_lost_peer(idle.has_slept(), pending) {
            // Frames that the peer sent before its end may have come since the last round: one more round, then it is
            // lost.
            return if idle.is_first_check() { Ok(()) } else { Err(self.blamed(rank, fault)) };
        }
        self.abort.set_awaited(Some(late));
        idle.sleep(
            &self.doorbell,
            pending().filter_map(|each| Some((&self.peers[each.peer].as_ref()?.link, each.direction))),
        );
        Ok(())
    }

    /// Returns the first peer that has broken off, or has left while this rank waits for it.
    fn find_lost_peer<'m, P: Iterator<Item = &'m Transfer>>(
        &mut self,
        thorough: bool,
        pending: impl Fn() -> P,
    ) -> Option<(Rank, LinkFault)> {
        let ended = |(rank, peer): (usize, &mut Option<MeshPeer>)| {
            let fault = peer.as_mut()?.link.has_ended(thorough)?;
            let is_meant = fault != LinkFault::Left || pending().any(|each| each.peer == rank);
            is_meant.then_some((Rank(rank as u16), fault))
        };
        self.peers.iter_mut().enumerate().find_map(ended)
    }

    fn blamed(&self, rank: Rank, fault: LinkFault) -> Error {
        match fault {
            // A peer may name any rank, but this rank accepts no blame of itself.
            LinkFault::Lost(Some(culprit)) if culprit != self.rank && culprit.0 < self.grid.n_ranks() => {
                Error::PeerLost { rank: culprit }
            }
            LinkFault::Lost(_) | LinkFault::Left => Error::PeerLost { rank },
            LinkFault::Garbage(what) => Error::Garbage { rank, what },
        }
    }

    /// Ends this rank's part in the mesh and sends the rank to blame to the peers.
    pub(crate) fn fail(&mut self, error: Error) -> Error {
        let culprit = error.rank().unwrap_or(self.rank);
        // An abort that broke a connection appears as a lost peer.
        let was_aborted = self.abort.is_ended();
        self.abort.break_off(culprit);
        self.send_last_frames(FrameKind::Break, culprit);
        if was_aborted { Error::Aborted } else { error }
    }

    /// Notifies the peers that nothing more will come or, on a panic, that this rank breaks off. If it ended before,
    /// they have been notified already.
    pub(crate) fn leave(&mut self) {
        if self.is_ended() {
            return;
        }
        if std::thread::panicking() {
            self.abort.break_off(self.rank);
            return self.send_last_frames(FrameKind::Break, self.rank);
        }
        self.abort.leave();
        self.send_last_frames(FrameKind::Leave, self.rank);
    }

    fn send_last_frames(&mut self, kind: FrameKind, culprit: Rank) {
        let (tag, epoch) = (culprit.0.into(), self.epoch);
        for peer in self.peers.iter_mut().flatten() {
            if let PeerLink::Tcp(link) = &mut peer.link {
                link.leave(&FrameHead { kind, seq: peer.n_sent, n_words: 0, tag, epoch });
            }
        }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Checks that the ranks run the same operation at the same time.
fn check(rank: Rank, head: &FrameHead, expected: ExpectedFrame, epoch: Epoch) -> Result<()> {
    if head.epoch != epoch {
        return Err(Error::Stale { rank, ours: epoch, theirs: head.epoch });
    }
    let found = ExpectedFrame { kind: head.kind, seq: head.seq, tag: head.tag, n_words: head.n_words };
    if found == expected { Ok(()) } else { Err(Error::OutOfStep { rank, expected, found }) }
}
