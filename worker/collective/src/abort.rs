//! Ends a rank's waits from outside and notifies its peers. Has no knowledge of the exchanged data.

use crate::futex;
use crate::link::{LinkSide, PeerLink, has_hung_up};
use crate::region::Region;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fmt;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use types::Rank;

/// Ends every wait of its rank, from any thread, and notifies the peers. A rank alone never waits, and its handle does
/// nothing.
#[derive(Clone, Debug)]
pub struct AbortHandle(pub(crate) Option<Arc<AbortState>>);

impl AbortHandle {
    /// Makes this rank's operations fail with `Aborted` from now on, and those of its peers with `PeerLost`.
    pub fn abort(&self) {
        if let Some(state) = &self.0 {
            state.abort();
        }
    }

    /// Returns the rank for which this one waits at this moment, if it sleeps.
    pub fn waits_for(&self) -> Option<Rank> {
        self.0.as_ref()?.awaited()
    }
}

/// Watches a wait of the rank's device and can end it.
pub trait DeviceWait: fmt::Debug + Send + Sync {
    fn abort(&self);
}

#[derive(Debug)]
pub struct AbortState {
    rank: Rank,
    ended: AtomicBool,
    /// The awaited rank, or `NO_RANK`.
    awaited: AtomicU32,
    doorbell: Arc<Region>,
    peers: Vec<PeerNotifier>,
    /// One entry per carrier whose device waits. The carriers hold this state and are dropped before it.
    device_waits: Mutex<Vec<Weak<dyn DeviceWait>>>,
}

/// No rank has this number.
const NO_RANK: u32 = u32::MAX;

/// The ways in which a peer is notified of an abort.
#[derive(Debug)]
enum PeerNotifier {
    Shm(LinkSide, Option<TcpStream>),
    Tcp(TcpStream),
}

impl AbortState {
    pub fn new<'a>(
        rank: Rank,
        doorbell: Arc<Region>,
        links: impl Iterator<Item = &'a PeerLink>,
    ) -> std::io::Result<AbortState> {
        let notice = |link: &PeerLink| match link {
            PeerLink::Shm(link) => {
                let control = link.control().map(TcpStream::try_clone).transpose()?;
                Ok(PeerNotifier::Shm(link.side().clone(), control))
            }
            PeerLink::Tcp(link) => link.stream().try_clone().map(PeerNotifier::Tcp),
        };
        let peers = links.map(notice).collect::<Result<_, _>>()?;
        let (ended, awaited, device_waits) = (AtomicBool::new(false), AtomicU32::new(NO_RANK), Mutex::default());
        Ok(AbortState { rank, ended, awaited, doorbell, peers, device_waits })
    }

    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Records the awaited rank. It is used only for diagnosis of a rank that makes no progress.
    pub fn set_awaited(&self, rank: Option<Rank>) {
        self.awaited.store(rank.map_or(NO_RANK, |rank| rank.0.into()), Ordering::Relaxed);
    }

    /// From now on, an abort ends this device's waits too.
    pub fn add_device_wait(&self, wait: Weak<dyn DeviceWait>) {
        self.device_waits().push(wait);
    }

    /// Returns whether any peer has ended, even if frames of it are still here.
    pub fn is_any_peer_gone(&self) -> bool {
        self.peers.iter().any(|peer| match peer {
            PeerNotifier::Shm(side, control) => side.has_peer_ended() || control.as_ref().is_some_and(has_hung_up),
            PeerNotifier::Tcp(stream) => {
                let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
                // The result does not matter: an end appears as a flag.
                let _n_ready = poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
                polled[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
            }
        })
    }

    fn awaited(&self) -> Option<Rank> {
        u16::try_from(self.awaited.load(Ordering::Relaxed)).ok().map(Rank)
    }

    /// No further operation begins, and peers that share memory receive the rank to blame.
    pub fn break_off(&self, culprit: Rank) {
        self.end(|side| side.break_off(culprit));
    }

    /// Like `break_off`, but in good order: all work was done.
    pub fn leave(&self) {
        self.end(LinkSide::leave);
    }

    fn end(&self, notify: impl Fn(&LinkSide)) {
        self.ended.store(true, Ordering::Release);
        for peer in &self.peers {
            if let PeerNotifier::Shm(side, _) = peer {
                notify(side);
            }
        }
    }

    /// Breaks off and shuts connections down both ways, so that this rank's reads end as well.
    fn abort(&self) {
        self.break_off(self.rank);
        for peer in &self.peers {
            if let PeerNotifier::Tcp(stream) = peer {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
        self.doorbell.doorbell().ring_always(futex::wake);
        let waits: Vec<_> = self.device_waits().iter().filter_map(Weak::upgrade).collect();
        waits.iter().for_each(|wait| wait.abort());
    }

    fn device_waits(&self) -> MutexGuard<'_, Vec<Weak<dyn DeviceWait>>> {
        self.device_waits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
