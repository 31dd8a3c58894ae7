//! The indices of a ring that one side writes and one side reads, and the doorbell that wakes a sleeping side. Has no
//! knowledge of the words' meaning or place.
//!
//! ```text
//! words      0 ─────── read ═══════ written ─────── capacity
//!            free      [the reader's)               free
//! ```
//! Positions count words forever and wrap with u32; the place in the ring is the position modulo the capacity, which is
//! a power of two. Each side keeps its own position private and only publishes it to the other side. A neighbour that
//! writes nonsense into the shared indices can stop the exchange, but never lead this side outside of the ring.

use super::sync::{AtomicU32, Ordering, fence};

/// A value on its own cache line: values written by two sides must not share one.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct CacheLine<T>(pub T);

/// Every message begins on a cache line.
pub const LINE_WORDS: u32 = 16;

/// The positions that both sides see, in words. All zero is an empty ring.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Cursors {
    pub written: CacheLine<AtomicU32>,
    pub read: CacheLine<AtomicU32>,
}

/// The other side's index is impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidCursor;

/// Room for words in one piece from `at`, after `skip` words to the ring's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    pub skip: u32,
    pub at: u32,
}

/// Words that have arrived, in one piece: `[at, at + n)` of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilledRange {
    pub at: u32,
    pub n: u32,
}

#[derive(Debug)]
pub struct RingWriter {
    capacity: u32,
    written: u32,
    /// The reader's position when last read.
    read: u32,
}

impl RingWriter {
    pub fn new(capacity: u32) -> RingWriter {
        assert!(capacity.is_power_of_two() && capacity.is_multiple_of(LINE_WORDS), "a ring of {capacity} words");
        RingWriter { capacity, written: 0, read: 0 }
    }

    /// Reserves `n` words in one piece, if there is room.
    pub fn reserve(&mut self, cursors: &Cursors, n: u32) -> Result<Option<Reservation>, InvalidCursor> {
        let at = self.written & (self.capacity - 1);
        let tail = self.capacity - at;
        let skip = if n <= tail { 0 } else { tail };
        let needed = skip + n;
        if self.free() < needed {
            self.load_read_position(cursors)?;
        }
        Ok((self.free() >= needed).then_some(Reservation { skip, at: (at + skip) & (self.capacity - 1) }))
    }

    /// Passes `n` words to the reader, including skipped ones.
    pub fn publish(&mut self, cursors: &Cursors, n: u32) {
        debug_assert!(n <= self.free());
        self.written = self.written.wrapping_add(n);
        // Release: a reader that sees the index sees the words.
        cursors.written.0.store(self.written, Ordering::Release);
    }

    fn free(&self) -> u32 {
        self.capacity - self.written.wrapping_sub(self.read)
    }

    /// Reads the reader's position, which may only grow, and not beyond the written words.
    fn load_read_position(&mut self, cursors: &Cursors) -> Result<(), InvalidCursor> {
        // Acquire: the reader's loads of the words come before this side overwrites them.
        let read = cursors.read.0.load(Ordering::Acquire);
        if self.written.wrapping_sub(read) > self.written.wrapping_sub(self.read) {
            return Err(InvalidCursor);
        }
        self.read = read;
        Ok(())
    }
}

#[derive(Debug)]
pub struct RingReader {
    capacity: u32,
    read: u32,
    /// The writer's position when last read.
    written: u32,
}

impl RingReader {
    pub fn new(capacity: u32) -> RingReader {
        RingReader { capacity, read: 0, written: 0 }
    }

    /// Returns the words that have arrived, up to the ring's end.
    pub fn filled(&mut self, cursors: &Cursors) -> Result<FilledRange, InvalidCursor> {
        if self.written == self.read {
            self.load_written_position(cursors)?;
        }
        let at = self.read & (self.capacity - 1);
        let n = self.written.wrapping_sub(self.read).min(self.capacity - at);
        Ok(FilledRange { at, n })
    }

    /// Gives `n` words back to the writer.
    pub fn release(&mut self, cursors: &Cursors, n: u32) {
        debug_assert!(n <= self.written.wrapping_sub(self.read));
        self.read = self.read.wrapping_add(n);
        cursors.read.0.store(self.read, Ordering::Release);
    }

    /// Reads the writer's position, which may only grow, by whole lines, and not beyond the released words.
    fn load_written_position(&mut self, cursors: &Cursors) -> Result<(), InvalidCursor> {
        let written = cursors.written.0.load(Ordering::Acquire);
        let n = written.wrapping_sub(self.read);
        if n > self.capacity || !n.is_multiple_of(LINE_WORDS) {
            return Err(InvalidCursor);
        }
        self.written = written;
        Ok(())
    }
}

/// Wakes one sleeping rank; any of its neighbours may ring. All zero is a doorbell without a sleeper.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Doorbell {
    /// The futex word: changes with each ring for which the sleeper waits.
    pub rings: AtomicU32,
    /// Nonzero while a rank sleeps or is about to.
    pub sleeps: AtomicU32,
}

impl Doorbell {
    /// Called after publishing: wakes the sleeper, if there is one.
    pub fn ring(&self, wake: impl FnOnce(&AtomicU32)) {
        // Orders publishing before the check for a sleeper; `arm` has the matching fence, so one of the two sees the
        // other.
        fence(Ordering::SeqCst);
        if self.sleeps.load(Ordering::Relaxed) != 0 {
            self.ring_always(wake);
        }
    }

    /// Wakes the sleeper without checking that there is one.
    pub fn ring_always(&self, wake: impl FnOnce(&AtomicU32)) {
        self.sleeps.store(0, Ordering::Relaxed);
        self.rings.fetch_add(1, Ordering::Release);
        wake(&self.rings);
    }

    /// Called before sleeping. The caller then checks once more whether there is work, and otherwise sleeps while
    /// `rings` has the returned value.
    pub fn arm(&self) -> u32 {
        let seen = self.rings.load(Ordering::Acquire);
        self.sleeps.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        seen
    }

    pub fn disarm(&self) {
        self.sleeps.store(0, Ordering::Relaxed);
    }
}
