//! One operation's transfer to or from a peer, and its progress. Has no knowledge of links or clocks.

use crate::frame::FRAME_WORDS_MAX;
use std::ops::Range;

/// The part of this rank's memory that an operation reads from and writes to.
pub trait Payload {
    /// Reads words of one row, to send them.
    fn read(&mut self, row: usize, col: usize, out: &mut [u32]);
    /// Writes words of one row that `peer` has sent.
    fn write(&mut self, peer: usize, row: usize, col: usize, words: &[u32]);
}

/// The owner of each row, for operations whose rows have owners.
pub type OwnerFn<'a> = &'a dyn Fn(usize) -> u32;
/// For operations in which all rows go to the same peers.
pub const NO_OWNERS: OwnerFn<'static> = &|_| 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Out,
    In,
    /// Receives, and leaves the frame in its place, where the operation reads it.
    Hold,
    /// Like `Hold`, for a frame of any length.
    HoldAny,
}

/// Columns of rows, to or from one peer, in frames.
#[derive(Clone, Debug)]
pub struct Transfer {
    pub peer: usize,
    pub direction: Direction,
    /// Words still to move.
    pub words: usize,
    /// Whether everything sent has left the process.
    pub is_flushed: bool,
    /// Only this owner's rows are moved.
    owner: Option<u32>,
    row: usize,
    col: usize,
    cols: Range<usize>,
}

impl Transfer {
    pub fn block(peer: usize, direction: Direction, n_rows: usize, cols: Range<usize>) -> Transfer {
        let (words, col) = (n_rows * cols.len(), cols.start);
        Transfer { peer, direction, words, is_flushed: false, owner: None, row: 0, col, cols }
    }

    /// Moves the `n_owned` rows of `owner`.
    pub fn owned(peer: usize, direction: Direction, owner: u32, n_owned: usize, n_cols: usize) -> Transfer {
        Transfer { owner: Some(owner), ..Transfer::block(peer, direction, n_owned, 0..n_cols) }
    }

    pub fn is_done(&self) -> bool {
        self.words == 0 && (self.direction != Direction::Out || self.is_flushed)
    }

    /// Returns the words of the next frame.
    pub fn frame_words(&self) -> usize {
        self.words.min(FRAME_WORDS_MAX)
    }

    /// Fills a frame, piece by piece.
    pub fn fill(&mut self, mut frame: &mut [u32], owner_of: OwnerFn<'_>, payload: &mut impl Payload) {
        while !frame.is_empty() {
            let (row, col, n) = self.piece(frame.len(), owner_of);
            let (piece, rest) = frame.split_at_mut(n);
            payload.read(row, col, piece);
            frame = rest;
        }
    }

    /// Empties a frame, piece by piece.
    pub fn empty(&mut self, mut frame: &[u32], owner_of: OwnerFn<'_>, payload: &mut impl Payload) {
        while !frame.is_empty() {
            let (row, col, n) = self.piece(frame.len(), owner_of);
            let (piece, rest) = frame.split_at(n);
            payload.write(self.peer, row, col, piece);
            frame = rest;
        }
    }

    fn piece(&mut self, room: usize, owner_of: OwnerFn<'_>) -> (usize, usize, usize) {
        // This ends: `words` are left in rows of this owner.
        while self.owner.is_some_and(|owner| owner_of(self.row) != owner) {
            self.row += 1;
        }
        let n = room.min(self.cols.end - self.col);
        let piece = (self.row, self.col, n);
        (self.words, self.col) = (self.words - n, self.col + n);
        if self.col == self.cols.end {
            (self.row, self.col) = (self.row + 1, self.cols.start);
        }
        piece
    }
}
