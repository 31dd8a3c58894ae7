//! One rank's talk with one other: frames out, frames in, none of it ever blocks. Knows nothing of what frames mean.

mod shm;
mod tcp;

pub use shm::{LinkSide, ShmLink, hung_up};
pub use tcp::TcpLink;

use crate::frame::FrameHead;
use types::Rank;

/// What a neighbour has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkFault {
    /// It is gone, and names who is to blame if it is not itself.
    Lost(Option<Rank>),
    /// It has left in good order, after all that it had to send.
    Left,
    Garbage(&'static str),
}

pub type Result<T> = std::result::Result<T, LinkFault>;

#[derive(Debug)]
pub enum PeerLink {
    Shm(ShmLink),
    Tcp(TcpLink),
}

impl PeerLink {
    /// The place for the next frame's payload, if there is room now.
    pub fn frame(&mut self, n_words: usize) -> Result<Option<&mut [u32]>> {
        match self {
            PeerLink::Shm(link) => link.frame(n_words),
            PeerLink::Tcp(link) => link.frame(n_words),
        }
    }

    /// Sends what was written to the place.
    pub fn send(&mut self, head: &FrameHead) -> Result<()> {
        match self {
            PeerLink::Shm(link) => link.send(head),
            PeerLink::Tcp(link) => link.send(head),
        }
    }

    /// Whether all that was sent has left this process.
    pub fn flush(&mut self) -> Result<bool> {
        match self {
            PeerLink::Shm(_) => Ok(true),
            PeerLink::Tcp(link) => link.flush(),
        }
    }

    /// The next frame, if it is here whole.
    pub fn peek(&mut self) -> Result<Option<FrameHead>> {
        match self {
            PeerLink::Shm(link) => link.peek(),
            PeerLink::Tcp(link) => link.peek(),
        }
    }

    /// The words of the frame that was peeked at.
    pub fn payload(&self) -> &[u32] {
        match self {
            PeerLink::Shm(link) => link.payload(),
            PeerLink::Tcp(link) => link.payload(),
        }
    }

    /// Done with that frame.
    pub fn release(&mut self) {
        match self {
            PeerLink::Shm(link) => link.release(),
            PeerLink::Tcp(link) => link.release(),
        }
    }

    /// Whether the neighbour has ended, or broken off what it did. `thorough` asks the system too. What it sent before
    /// may still be here.
    pub fn has_ended(&mut self, thorough: bool) -> Option<LinkFault> {
        match self {
            PeerLink::Shm(link) => link.has_ended(thorough),
            // The end arrives in its place, behind the last frame.
            PeerLink::Tcp(link) if thorough => link.has_ended(),
            PeerLink::Tcp(_) => None,
        }
    }
}
