//! One rank's link to one other: frames out and frames in, without ever blocking. Has no knowledge of the frames'
//! meaning.

mod shm;
mod tcp;

mod seal;

pub use seal::{LinkSeals, Seal};
pub use shm::{LinkSide, ShmLink, has_hung_up};
pub use tcp::TcpLink;

use crate::frame::FrameHead;
use types::Rank;

/// How a neighbour's end appears on the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkFault {
    /// It is gone, and names the rank to blame if that is another one.
    Lost(Option<Rank>),
    /// It left in good order, after all of its frames.
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
    /// Returns memory for the next frame's payload, if there is room now.
    pub fn reserve_frame(&mut self, n_words: usize) -> Result<Option<&mut [u32]>> {
        match self {
            PeerLink::Shm(link) => link.reserve_frame(n_words),
            PeerLink::Tcp(link) => link.reserve_frame(n_words),
        }
    }

    /// Sends the frame that was written there.
    pub fn send(&mut self, head: &FrameHead) -> Result<()> {
        match self {
            PeerLink::Shm(link) => link.send(head),
            PeerLink::Tcp(link) => link.send(head),
        }
    }

    /// Returns whether all sent frames have left this process.
    pub fn flush(&mut self) -> Result<bool> {
        match self {
            PeerLink::Shm(_) => Ok(true),
            PeerLink::Tcp(link) => link.flush(),
        }
    }

    /// Returns the next frame's head, if the frame has arrived whole.
    pub fn peek(&mut self) -> Result<Option<FrameHead>> {
        match self {
            PeerLink::Shm(link) => link.peek(),
            PeerLink::Tcp(link) => link.peek(),
        }
    }

    /// Returns the words of the frame that `peek` returned.
    pub fn payload(&self) -> &[u32] {
        match self {
            PeerLink::Shm(link) => link.payload(),
            PeerLink::Tcp(link) => link.payload(),
        }
    }

    /// Gives the frame's memory back.
    pub fn release(&mut self) {
        match self {
            PeerLink::Shm(link) => link.release(),
            PeerLink::Tcp(link) => link.release(),
        }
    }

    /// Returns how the neighbour has ended, if it has. `thorough` also checks the system. Frames sent before may still
    /// be here.
    pub fn has_ended(&mut self, thorough: bool) -> Option<LinkFault> {
        match self {
            PeerLink::Shm(link) => link.has_ended(thorough),
            // On TCP the last frame with the reason arrives behind all others.
            PeerLink::Tcp(link) if thorough => link.has_ended(),
            PeerLink::Tcp(_) => None,
        }
    }
}
