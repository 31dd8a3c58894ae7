//! How a rank's waits are ended from outside, and how its peers hear of it.

use crate::link::{Link, Side};
use crate::region::Region;
use crate::sleep;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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
    /// A doorway's join; the number of aborts grows.
    Join(Arc<AtomicU64>),
}

impl AbortHandle {
    pub(crate) fn of_solo() -> AbortHandle {
        AbortHandle(Waiter::Solo)
    }

    pub(crate) fn of_mesh(doom: Arc<Doom>) -> AbortHandle {
        AbortHandle(Waiter::Mesh(doom))
    }

    pub(crate) fn of_join(n_aborts: Arc<AtomicU64>) -> AbortHandle {
        AbortHandle(Waiter::Join(n_aborts))
    }

    /// This rank's operations fail with `Aborted` from now on, those of its peers with `PeerLost`. A doorway's handle
    /// ends the join that is going on, and leaves the doorway as it is.
    pub fn abort(&self) {
        match &self.0 {
            Waiter::Solo => {}
            Waiter::Mesh(doom) => doom.abort(),
            Waiter::Join(n_aborts) => {
                n_aborts.fetch_add(1, Ordering::Release);
            }
        }
    }
}

#[derive(Debug)]
pub struct Doom {
    rank: Rank,
    ended: AtomicBool,
    bell: Arc<Region>,
    peers: Vec<Way>,
}

/// How a peer is told.
#[derive(Debug)]
enum Way {
    Memory(Side),
    Socket(TcpStream),
}

impl Doom {
    pub fn new<'a>(rank: Rank, bell: Arc<Region>, links: impl Iterator<Item = &'a Link>) -> std::io::Result<Doom> {
        let way = |link: &Link| match link {
            Link::Memory(link) => Ok(Way::Memory(link.side().clone())),
            Link::Socket(link) => link.stream().try_clone().map(Way::Socket),
        };
        Ok(Doom { rank, ended: AtomicBool::new(false), bell, peers: links.map(way).collect::<Result<_, _>>()? })
    }

    pub fn is_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
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
            if let Way::Memory(side) = peer {
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
    }
}
