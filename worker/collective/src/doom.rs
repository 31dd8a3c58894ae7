//! How a rank's waits are ended from outside, and how its peers hear of it.

use crate::link::{Link, Side, hung_up};
use crate::nccl::{Fault, Watch};
use crate::one_shot;
use crate::region::Region;
use crate::sleep;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use types::Rank;

/// Ends every wait of its rank, from any thread, and tells the peers.
#[derive(Clone, Debug)]
pub struct AbortHandle(Waiter);

/// Whose waits it ends.
#[derive(Clone, Debug)]
enum Waiter {
    /// A rank alone, which never waits.
    Solo,
    Mesh(Arc<Doom>),
}

/// That nobody wants any more what is under way. Said once, from any thread; whoever takes long looks now and then.
#[derive(Clone, Debug, Default)]
pub struct Ended(Arc<AtomicBool>);

impl Ended {
    pub fn end(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub fn is_said(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl AbortHandle {
    pub(crate) fn of_solo() -> AbortHandle {
        AbortHandle(Waiter::Solo)
    }

    pub(crate) fn of_mesh(doom: Arc<Doom>) -> AbortHandle {
        AbortHandle(Waiter::Mesh(doom))
    }

    /// This rank's operations fail with `Aborted` from now on, those of its peers with `PeerLost`.
    pub fn abort(&self) {
        match &self.0 {
            Waiter::Solo => {}
            Waiter::Mesh(doom) => doom.abort(),
        }
    }

    /// Whom the rank waits for at this moment, if it sleeps over it.
    pub fn waits_for(&self) -> Option<Rank> {
        match &self.0 {
            Waiter::Solo => None,
            Waiter::Mesh(doom) => doom.awaited(),
        }
    }
}

#[derive(Debug)]
pub struct Doom {
    rank: Rank,
    ended: AtomicBool,
    /// The rank that is waited for, or nobody.
    awaited: AtomicU32,
    bell: Arc<Region>,
    peers: Vec<Way>,
    /// Where the devices wait, too. Both know this one, and go before it.
    watch: OnceLock<Weak<Watch>>,
    /// Where they wait at desks.
    desks: OnceLock<Weak<one_shot::Watch>>,
}

/// No rank has this number.
const NOBODY: u32 = u32::MAX;

/// How a peer is told.
#[derive(Debug)]
enum Way {
    Memory(Side, Option<TcpStream>),
    Socket(TcpStream),
}

impl Doom {
    pub fn new<'a>(rank: Rank, bell: Arc<Region>, links: impl Iterator<Item = &'a Link>) -> std::io::Result<Doom> {
        let way = |link: &Link| match link {
            Link::Memory(link) => {
                let control = link.control().map(TcpStream::try_clone).transpose()?;
                Ok(Way::Memory(link.side().clone(), control))
            }
            Link::Socket(link) => link.stream().try_clone().map(Way::Socket),
        };
        let peers = links.map(way).collect::<Result<_, _>>()?;
        let (ended, awaited, watch) = (AtomicBool::new(false), AtomicU32::new(NOBODY), OnceLock::new());
        Ok(Doom { rank, ended, awaited, bell, peers, watch, desks: OnceLock::new() })
    }

    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Told to whoever asks why nothing moves; it orders nothing.
    pub fn waits_for(&self, rank: Option<Rank>) {
        self.awaited.store(rank.map_or(NOBODY, |rank| rank.0.into()), Ordering::Relaxed);
    }

    /// Its waits end with the others'.
    pub fn watched_by(&self, watch: &Arc<Watch>) {
        // There is one at most.
        let _first = self.watch.set(Arc::downgrade(watch));
    }

    /// Likewise.
    pub fn desks_watched_by(&self, watch: &Arc<one_shot::Watch>) {
        let _first = self.desks.set(Arc::downgrade(watch));
    }

    /// Whether a peer has ended, whatever it has sent before.
    pub fn is_anybody_gone(&self) -> bool {
        self.peers.iter().any(|peer| match peer {
            Way::Memory(side, control) => side.is_left() || control.as_ref().is_some_and(hung_up),
            Way::Socket(stream) => {
                let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
                // Heard or not: an end shows as a flag.
                let _heard = poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
                polled[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
            }
        })
    }

    fn awaited(&self) -> Option<Rank> {
        u16::try_from(self.awaited.load(Ordering::Relaxed)).ok().map(Rank)
    }

    /// No operation begins any more, and those who share memory hear who is to blame.
    pub fn break_off(&self, culprit: Rank) {
        self.end(|side| side.break_off(culprit));
    }

    /// The same, after all that was to be done.
    pub fn leave(&self) {
        self.end(Side::leave);
    }

    fn end(&self, tell: impl Fn(&Side)) {
        self.ended.store(true, Ordering::Release);
        for peer in &self.peers {
            if let Way::Memory(side, _) = peer {
                tell(side);
            }
        }
    }

    /// Both ways of a connection: this rank's reads end as well.
    fn abort(&self) {
        self.break_off(self.rank);
        for peer in &self.peers {
            if let Way::Socket(stream) = peer {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
        self.bell.bell().always(sleep::wake);
        if let Some(watch) = self.watch.get().and_then(Weak::upgrade) {
            watch.abort();
        }
        if let Some(watch) = self.desks.get().and_then(Weak::upgrade) {
            watch.end(Fault::Aborted);
        }
    }
}
