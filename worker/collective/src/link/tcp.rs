//! A TCP connection between hosts: sealed frames, sent and received without blocking.

use super::seal::{ForgedFrame, LinkSeals};
use super::{LinkFault, Result};
use crate::frame::{FRAME_WORDS_MAX, FrameHead, FrameKind, FrameStart, HEAD_WORDS, frame_words};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::Range;
use types::Rank;

/// The longest frame, with its header.
const ROOM_WORDS: usize = HEAD_WORDS + FRAME_WORDS_MAX;

#[derive(Debug)]
pub struct TcpLink {
    stream: TcpStream,
    seals: Box<LinkSeals>,
    /// The frame to send; `leaving` are the bytes that the system has not accepted yet.
    staged: Box<[u32]>,
    leaving: Range<usize>,
    /// Received bytes; `arrived` are those not read yet. Frames begin on cache lines of this buffer.
    incoming: Box<[u32]>,
    arrived: Range<usize>,
    front: Option<FrameHead>,
}

impl TcpLink {
    /// `stream` must be non-blocking and without Nagle's delay.
    pub fn new(stream: TcpStream, seals: LinkSeals) -> TcpLink {
        let room = |n: usize| vec![0; n].into_boxed_slice();
        let (staged, incoming) = (room(ROOM_WORDS), room(2 * ROOM_WORDS));
        TcpLink { stream, seals: Box::new(seals), staged, leaving: 0..0, incoming, arrived: 0..0, front: None }
    }

    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub fn reserve_frame(&mut self, n_words: usize) -> Result<Option<&mut [u32]>> {
        if !self.flush()? {
            return Ok(None);
        }
        Ok(Some(&mut self.staged[HEAD_WORDS..][..n_words]))
    }

    pub fn send(&mut self, head: &FrameHead) -> Result<()> {
        let n_words = head.n_words as usize;
        self.staged[HEAD_WORDS + n_words..frame_words(n_words)].fill(0);
        self.seals.outgoing.seal(head, &mut self.staged[..frame_words(n_words)]);
        self.leaving = 0..4 * frame_words(n_words);
        self.flush()?;
        Ok(())
    }

    pub fn flush(&mut self) -> Result<bool> {
        while !self.leaving.is_empty() {
            let bytes: &[u8] = bytemuck::cast_slice(&self.staged);
            match self.stream.write(&bytes[self.leaving.clone()]) {
                Ok(0) => return Err(LinkFault::Lost(None)),
                Ok(n) => self.leaving.start += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The neighbour may have sent its reason before it ended.
                Err(_) => return Err(self.why_ended()),
            }
        }
        Ok(true)
    }

    pub fn peek(&mut self) -> Result<Option<FrameHead>> {
        if self.front.is_none() && self.next_whole_frame()?.is_none() {
            self.receive()?;
            self.next_whole_frame()?;
        }
        match self.front.as_ref().and_then(announced_fault) {
            Some(fault) => Err(fault),
            None => Ok(self.front),
        }
    }

    /// Returns how the neighbour has ended, by its last frame or by hanging up, behind the bytes not read yet.
    pub fn has_ended(&mut self) -> Option<LinkFault> {
        let held = match self.front {
            Some(head) if announced_fault(&head).is_none() => head,
            _ => return self.peek().err(),
        };
        // The front frame is still in use: check the bytes behind it, as far as there is room.
        let is_full = self.arrived.end == 4 * self.incoming.len();
        let received = if is_full { Ok(()) } else { self.receive() };
        let behind = self.arrived.start / 4 + frame_words(held.n_words as usize);
        let words = self.incoming[..self.arrived.end / 4].get(behind..).unwrap_or(&[]);
        let Some(words) = words.first_chunk() else { return received.err() };
        match FrameHead::decode(words) {
            // It has no payload, so its tag can be checked before the frame in front of it is released.
            (FrameStart::Head(head), tag) => announced_fault(&head).filter(|_| self.seals.incoming.is_next(tag, words)),
            _ => received.err(),
        }
    }

    /// Returns the next frame's header, once the frame is whole and its tag is right.
    fn next_whole_frame(&mut self) -> Result<Option<FrameHead>> {
        let words = &mut self.incoming[self.arrived.start / 4..self.arrived.end / 4];
        let Some(head_words) = words.first_chunk() else { return Ok(None) };
        let (front, tag) = FrameHead::decode(head_words);
        let head = match front {
            FrameStart::Head(head) => head,
            FrameStart::Skip => return Err(LinkFault::Garbage("a skip on a connection")),
            FrameStart::Garbage(what) => return Err(LinkFault::Garbage(what)),
        };
        let Some(frame) = words.get_mut(..frame_words(head.n_words as usize)) else { return Ok(None) };
        let opened = self.seals.incoming.open(tag, frame);
        opened.map_err(|ForgedFrame| LinkFault::Garbage("a message with a wrong seal"))?;
        self.front = Some(head);
        Ok(self.front)
    }

    /// Receives what the system has, as far as there is room.
    fn receive(&mut self) -> Result<()> {
        self.make_room();
        loop {
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.incoming);
            match self.stream.read(&mut bytes[self.arrived.end..]) {
                Ok(0) => return Err(LinkFault::Lost(None)),
                Ok(n) => self.arrived.end += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Err(LinkFault::Lost(None)),
            }
            return Ok(());
        }
    }

    /// Moves the arrived bytes to the front, so that a frame of any length fits.
    fn make_room(&mut self) {
        if self.arrived.start > 4 * ROOM_WORDS {
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.incoming);
            bytes.copy_within(self.arrived.clone(), 0);
            self.arrived = 0..self.arrived.len();
        }
    }

    pub fn payload(&self) -> &[u32] {
        let n_words = self.front.map_or(0, |head| head.n_words as usize);
        &self.incoming[self.arrived.start / 4 + HEAD_WORDS..][..n_words]
    }

    pub fn release(&mut self) {
        let Some(head) = self.front.take() else { return };
        self.arrived.start += 4 * frame_words(head.n_words as usize);
        if self.arrived.is_empty() {
            self.arrived = 0..0;
        }
    }

    /// Sends the last frame, as far as the system accepts it at once, and nothing after it.
    pub fn leave(&mut self, head: &FrameHead) {
        if matches!(self.flush(), Ok(true)) {
            let _ = self.send(head);
        }
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Returns why writing fails, with the rank to blame if the neighbour named one behind the bytes not read yet.
    fn why_ended(&mut self) -> LinkFault {
        loop {
            let n = self.arrived.len();
            match self.peek() {
                Err(fault) => return fault,
                Ok(Some(_)) => self.release(),
                Ok(None) if self.arrived.len() == n => return LinkFault::Lost(None),
                Ok(None) => {}
            }
        }
    }
}

/// Returns the end of the sender that a frame announces, if it does.
fn announced_fault(head: &FrameHead) -> Option<LinkFault> {
    match head.kind {
        FrameKind::Break => Some(LinkFault::Lost(Some(Rank(head.tag as u16)))),
        FrameKind::Leave => Some(LinkFault::Left),
        _ => None,
    }
}
