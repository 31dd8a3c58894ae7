//! How a rank's waits are ended from outside, and how its peers hear of it.

use crate::link::{Link, Side};
use crate::region::Region;
use crate::sleep;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use types::Rank;

/// Ends every wait of its rank, from any thread, and tells the peers.
#[derive(Clone, Debug)]
pub struct AbortHandle(pub(crate) Option<Arc<Doom>>);

impl AbortHandle {
    /// This rank's operations fail with `Aborted` from now on, those of its peers with `PeerLost`.
    pub fn abort(&self) {
        if let Some(doom) = &self.0 {
            doom.abort();
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
    pub fn end(&self, culprit: Rank) {
        self.ended.store(true, Ordering::Release);
        for peer in &self.peers {
            if let Way::Memory(side) = peer {
                side.end(culprit);
            }
        }
    }

    /// Both ways of a connection: this rank's reads end as well.
    fn abort(&self) {
        self.end(self.rank);
        for peer in &self.peers {
            if let Way::Socket(stream) = peer {
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
        self.bell.bell().always(sleep::wake);
    }
}
