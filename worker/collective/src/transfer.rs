//! What one operation has to move, and how far it is. Knows nothing of links or clocks.

use crate::frame::FRAME_WORDS_MAX;
use std::ops::Range;

/// The part of this rank's memory that an operation reads from and writes to.
pub trait Payload {
    /// Words of one row, to send.
    fn read(&mut self, row: usize, col: usize, out: &mut [u32]);
    /// Words of one row that `peer` has sent.
    fn write(&mut self, peer: usize, row: usize, col: usize, words: &[u32]);
}

/// Who owns a row, where rows have owners.
pub type OwnerOf<'a> = &'a dyn Fn(usize) -> u32;
/// Rows of which each goes where the others go.
pub const NO_OWNERS: OwnerOf<'static> = &|_| 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Out,
    In,
    /// In, and left where it arrived: the operation reads it there.
    Hold,
    /// The same, whatever its length.
    HoldAny,
}

/// Columns of rows, to or from one peer, in frames.
#[derive(Clone, Debug)]
pub struct Transfer {
    pub peer: usize,
    pub direction: Direction,
    /// Words that remain.
    pub words: usize,
    /// Whether all that went out has left.
    pub is_flushed: bool,
    /// Only the rows of this one.
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

    /// The rows of `owner`, of which there are so many.
    pub fn owned(peer: usize, direction: Direction, owner: u32, n_owned: usize, n_cols: usize) -> Transfer {
        Transfer { owner: Some(owner), ..Transfer::block(peer, direction, n_owned, 0..n_cols) }
    }

    pub fn is_done(&self) -> bool {
        self.words == 0 && (self.direction != Direction::Out || self.is_flushed)
    }

    /// Words of its next frame.
    pub fn frame_words(&self) -> usize {
        self.words.min(FRAME_WORDS_MAX)
    }

    /// Fills a frame, piece by piece.
    pub fn fill(&mut self, mut frame: &mut [u32], owner_of: OwnerOf<'_>, payload: &mut impl Payload) {
        while !frame.is_empty() {
            let (row, col, n) = self.piece(frame.len(), owner_of);
            let (piece, rest) = frame.split_at_mut(n);
            payload.read(row, col, piece);
            frame = rest;
        }
    }

    /// Empties a frame, piece by piece.
    pub fn empty(&mut self, mut frame: &[u32], owner_of: OwnerOf<'_>, payload: &mut impl Payload) {
        while !frame.is_empty() {
            let (row, col, n) = self.piece(frame.len(), owner_of);
            let (piece, rest) = frame.split_at(n);
            payload.write(self.peer, row, col, piece);
            frame = rest;
        }
    }

    fn piece(&mut self, room: usize, owner_of: OwnerOf<'_>) -> (usize, usize, usize) {
        // This ends: there are `words` left in rows of this owner.
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
