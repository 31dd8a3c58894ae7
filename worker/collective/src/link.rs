//! One rank's talk with one other: frames out, frames in, none of it ever blocks. Knows nothing of what frames mean.

mod memory;
mod socket;

pub use memory::{MemoryLink, Side, hung_up};
pub use socket::SocketLink;

use crate::frame::Head;
use types::Rank;

/// What a neighbour has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is gone, and names who is to blame if it is not itself.
    Lost(Option<Rank>),
    /// It has left in good order, after all that it had to send.
    Left,
    Garbage(&'static str),
}

pub type Result<T> = std::result::Result<T, Fault>;

#[derive(Debug)]
pub enum Link {
    Memory(MemoryLink),
    Socket(SocketLink),
}

impl Link {
    /// The place for the next frame's payload, if there is room now.
    pub fn frame(&mut self, n_words: usize) -> Result<Option<&mut [u32]>> {
        match self {
            Link::Memory(link) => link.frame(n_words),
            Link::Socket(link) => link.frame(n_words),
        }
    }

    /// Sends what was written to the place.
    pub fn send(&mut self, head: &Head) -> Result<()> {
        match self {
            Link::Memory(link) => link.send(head),
            Link::Socket(link) => link.send(head),
        }
    }

    /// Whether all that was sent has left this process.
    pub fn flush(&mut self) -> Result<bool> {
        match self {
            Link::Memory(_) => Ok(true),
            Link::Socket(link) => link.flush(),
        }
    }

    /// The next frame, if it is here whole.
    pub fn peek(&mut self) -> Result<Option<Head>> {
        match self {
            Link::Memory(link) => link.peek(),
            Link::Socket(link) => link.peek(),
        }
    }

    /// The words of the frame that was peeked at.
    pub fn payload(&self) -> &[u32] {
        match self {
            Link::Memory(link) => link.payload(),
            Link::Socket(link) => link.payload(),
        }
    }

    /// Done with that frame.
    pub fn release(&mut self) {
        match self {
            Link::Memory(link) => link.release(),
            Link::Socket(link) => link.release(),
        }
    }

    /// Whether the neighbour has ended, or broken off what it did. `thorough` asks the system too. What it sent before
    /// may still be here.
    pub fn has_ended(&mut self, thorough: bool) -> Option<Fault> {
        match self {
            Link::Memory(link) => link.has_ended(thorough),
            // The end arrives in its place, behind the last frame.
            Link::Socket(link) if thorough => link.has_ended(),
            Link::Socket(_) => None,
        }
    }
}
