//! Two rings in a region, shared with a thread of this process or with another process, which may write anything there.

use super::{LinkFault, Result};
use crate::frame::{FrameHead, FrameStart, HEAD_WORDS, TAG_WORDS, frame_words};
use crate::futex;
use crate::region::Region;
use crate::ring::{Cursors, InvalidCursor, Reservation, RingReader, RingWriter};
use crate::sync::Ordering;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::sync::Arc;
use types::Rank;

/// The exit of a side that broke off, combined with the rank to blame.
const BROKEN: u32 = 1 << 16;
/// The exit of a side that left in good order.
const LEFT: u32 = 1 << 17;

/// One side of the region, and the neighbour's doorbell: enough to end a link.
#[derive(Clone, Debug)]
pub struct LinkSide {
    region: Arc<Region>,
    side: usize,
    /// The neighbour's doorbell.
    doorbell: Arc<Region>,
}

impl LinkSide {
    pub fn new(region: Arc<Region>, side: usize, doorbell: Arc<Region>) -> LinkSide {
        LinkSide { region, side, doorbell }
    }

    /// Records that this side has broken off, and the rank to blame.
    pub fn break_off(&self, culprit: Rank) {
        self.end(BROKEN | u32::from(culprit.0));
    }

    /// Records that this side has done all of its work.
    pub fn leave(&self) {
        self.end(LEFT);
    }

    /// Records an exit; the first one counts.
    fn end(&self, exit: u32) {
        let ours = &self.region.pair().exits[self.side].0;
        let _ = ours.compare_exchange(0, exit, Ordering::Release, Ordering::Relaxed);
        self.doorbell.doorbell().ring_always(futex::wake);
    }

    /// Returns whether the neighbour has ended, in either way.
    pub fn has_peer_ended(&self) -> bool {
        self.region.pair().exits[1 - self.side].0.load(Ordering::Acquire) != 0
    }

    fn outgoing(&self) -> &Cursors {
        &self.region.pair().cursors[self.side]
    }

    fn incoming(&self) -> &Cursors {
        &self.region.pair().cursors[1 - self.side]
    }

    fn ring_doorbell(&self) {
        self.doorbell.doorbell().ring(futex::wake);
    }
}

#[derive(Debug)]
pub struct ShmLink {
    side: LinkSide,
    ring_words: u32,
    writer: RingWriter,
    /// The reservation for the frame being written, and the words that it occupies.
    open: Option<(Reservation, u32)>,
    reader: RingReader,
    /// The frame that `peek` returned, and its position.
    front: Option<(FrameHead, u32)>,
    /// The handshake's connection: it closes when the other process dies.
    control: Option<TcpStream>,
}

impl From<InvalidCursor> for LinkFault {
    fn from(_: InvalidCursor) -> LinkFault {
        LinkFault::Garbage("an invalid index")
    }
}

impl ShmLink {
    pub fn new(side: LinkSide, ring_words: u32, control: Option<TcpStream>) -> ShmLink {
        let (writer, reader) = (RingWriter::new(ring_words), RingReader::new(ring_words));
        ShmLink { side, ring_words, writer, open: None, reader, front: None, control }
    }

    pub fn side(&self) -> &LinkSide {
        &self.side
    }

    pub fn reserve_frame(&mut self, n_words: usize) -> Result<Option<&mut [u32]>> {
        let n = frame_words(n_words) as u32;
        let Some(room) = self.writer.reserve(self.side.outgoing(), n)? else { return Ok(None) };
        self.open = Some((room, n));
        // SAFETY: `room` is whole within the ring, and its words are this side's until they are published. A neighbour
        // that writes there nonetheless changes numbers, any of which are valid.
        Ok(Some(unsafe { std::slice::from_raw_parts_mut(self.out_at(room.at).add(HEAD_WORDS), n_words) }))
    }

    pub fn send(&mut self, head: &FrameHead) -> Result<()> {
        let Some((room, n)) = self.open.take() else { return Ok(()) };
        if room.skip > 0 {
            // SAFETY: the skipped words end the ring, at least a line of them, and are this side's.
            unsafe { self.out_at(self.ring_words - room.skip).write(FrameHead::skip()) };
        }
        let words = head.encode([0; TAG_WORDS]);
        // SAFETY: as in `frame`: the room begins with the head's line.
        unsafe { self.out_at(room.at).copy_from_nonoverlapping(words.as_ptr(), HEAD_WORDS) };
        self.writer.publish(self.side.outgoing(), room.skip + n);
        self.side.ring_doorbell();
        Ok(())
    }

    pub fn peek(&mut self) -> Result<Option<FrameHead>> {
        if let Some((head, _)) = self.front {
            return Ok(Some(head));
        }
        let mut front = self.look()?;
        if front == Some(FrameStart::Skip) {
            front = self.look()?;
        }
        match front {
            None => Ok(None),
            Some(FrameStart::Head(head)) => Ok(Some(head)),
            Some(FrameStart::Skip) => Err(LinkFault::Garbage("a skip without a message after it")),
            Some(FrameStart::Garbage(what)) => Err(LinkFault::Garbage(what)),
        }
    }

    /// Returns what begins at the read position, after a skip.
    fn look(&mut self) -> Result<Option<FrameStart>> {
        let filled = self.reader.filled(self.side.incoming())?;
        if filled.n == 0 {
            return Ok(None);
        }
        // Copied once and then checked: the neighbour may write here at any time.
        let mut words = [0; HEAD_WORDS];
        // SAFETY: positions are whole lines (`Reader::filled`), so a line from `at` lies in the ring.
        unsafe { self.in_at(filled.at).copy_to_nonoverlapping(words.as_mut_ptr(), HEAD_WORDS) };
        let (front, _) = FrameHead::decode(&words);
        match front {
            FrameStart::Head(head) if frame_words(head.n_words as usize) > filled.n as usize => {
                return Err(LinkFault::Garbage("a message that is shorter than its head declares"));
            }
            FrameStart::Head(head) => self.front = Some((head, filled.at)),
            FrameStart::Skip if filled.at + filled.n == self.ring_words => {
                self.reader.release(self.side.incoming(), filled.n);
            }
            FrameStart::Skip => return Err(LinkFault::Garbage("a skip that does not end at the end of the ring")),
            FrameStart::Garbage(_) => {}
        }
        Ok(Some(front))
    }

    pub fn payload(&self) -> &[u32] {
        let Some((head, at)) = self.front else { return &[] };
        // SAFETY: `look` has found the frame whole in the ring, and its words are this side's until they are released.
        // A neighbour that writes there nonetheless changes numbers, any of which are valid.
        unsafe { std::slice::from_raw_parts(self.in_at(at).add(HEAD_WORDS), head.n_words as usize) }
    }

    pub fn release(&mut self) {
        let Some((head, _)) = self.front.take() else { return };
        self.reader.release(self.side.incoming(), frame_words(head.n_words as usize) as u32);
        self.side.ring_doorbell();
    }

    /// Returns the connection that closes at the death of the neighbour's process, if that is another process.
    pub fn control(&self) -> Option<&TcpStream> {
        self.control.as_ref()
    }

    pub fn has_ended(&mut self, thorough: bool) -> Option<LinkFault> {
        let hung_up = thorough && self.control.as_ref().is_some_and(has_hung_up);
        // Read after the connection: a leaving neighbour sets its exit before it hangs up. Acquire: a reader that sees
        // the exit also sees what was sent before it.
        let exit = self.side.region.pair().exits[1 - self.side.side].0.load(Ordering::Acquire);
        match exit {
            0 => hung_up.then_some(LinkFault::Lost(None)),
            exit if exit & BROKEN != 0 => Some(LinkFault::Lost(Some(Rank(exit as u16)))),
            _ => Some(LinkFault::Left),
        }
    }

    fn out_at(&self, at: u32) -> *mut u32 {
        debug_assert!(at < self.ring_words);
        // SAFETY: within the ring, which `words` has found within the region.
        unsafe { self.side.region.ring_start(self.side.side, self.ring_words).add(at as usize) }
    }

    fn in_at(&self, at: u32) -> *const u32 {
        debug_assert!(at < self.ring_words);
        // SAFETY: as above.
        unsafe { self.side.region.ring_start(1 - self.side.side, self.ring_words).add(at as usize) }
    }
}

/// Returns whether a control connection has closed. No data is ever sent on it.
pub fn has_hung_up(control: &TcpStream) -> bool {
    match control.peek(&mut [0]) {
        Ok(_) => true,
        Err(error) => !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}
