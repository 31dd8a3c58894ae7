//! The indices of a ring that one side writes and one side reads, and the doorbell that wakes a sleeping side. Knows
//! nothing of what the words mean, nor where they lie.
//!
//! ```text
//! words      0 ─────── read ═══════ written ─────── capacity
//!            free      [the reader's)               free
//! ```
//! Positions count words for ever and wrap with u32; the place in the ring is the position modulo the capacity, which
//! is a power of two. Each side keeps its own position to itself and only tells it to the other, so that a neighbour
//! who writes nonsense into the shared indices can stop the talk and not send this side outside of the ring.

use super::sync::{AtomicU32, Ordering, fence};

/// A cache line of its own: what two sides write must not share one.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct CacheLine<T>(pub T);

/// Every message begins on a line.
pub const LINE_WORDS: u32 = 16;

/// What both sides see: positions, in words. All zero is an empty ring.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Cursors {
    pub written: CacheLine<AtomicU32>,
    pub read: CacheLine<AtomicU32>,
}

/// The other side's index cannot be meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidCursor;

/// Where words may be written: after `skip` words to the ring's end, in one piece from `at`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    pub skip: u32,
    pub at: u32,
}

/// Words that have arrived, in one piece: `[at, at + n)` of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filled {
    pub at: u32,
    pub n: u32,
}

#[derive(Debug)]
pub struct Writer {
    capacity: u32,
    written: u32,
    /// How far the reader was when last asked.
    read: u32,
}

impl Writer {
    pub fn new(capacity: u32) -> Writer {
        assert!(capacity.is_power_of_two() && capacity.is_multiple_of(LINE_WORDS), "a ring of {capacity} words");
        Writer { capacity, written: 0, read: 0 }
    }

    /// Reservation for `n` words in one piece, if there is.
    pub fn reserve(&mut self, cursors: &Cursors, n: u32) -> Result<Option<Reservation>, InvalidCursor> {
        let at = self.written & (self.capacity - 1);
        let tail = self.capacity - at;
        let skip = if n <= tail { 0 } else { tail };
        let needed = skip + n;
        if self.free() < needed {
            self.look(cursors)?;
        }
        Ok((self.free() >= needed).then_some(Reservation { skip, at: (at + skip) & (self.capacity - 1) }))
    }

    /// Hands `n` words to the reader, skipped ones among them.
    pub fn publish(&mut self, cursors: &Cursors, n: u32) {
        debug_assert!(n <= self.free());
        self.written = self.written.wrapping_add(n);
        // Release: who sees the index sees the words.
        cursors.written.0.store(self.written, Ordering::Release);
    }

    fn free(&self) -> u32 {
        self.capacity - self.written.wrapping_sub(self.read)
    }

    /// The reader only goes forward, and not past what was written.
    fn look(&mut self, cursors: &Cursors) -> Result<(), InvalidCursor> {
        // Acquire: the reader's loads of the words come before this side writes over them.
        let read = cursors.read.0.load(Ordering::Acquire);
        if self.written.wrapping_sub(read) > self.written.wrapping_sub(self.read) {
            return Err(InvalidCursor);
        }
        self.read = read;
        Ok(())
    }
}

#[derive(Debug)]
pub struct Reader {
    capacity: u32,
    read: u32,
    /// How far the writer was when last asked.
    written: u32,
}

impl Reader {
    pub fn new(capacity: u32) -> Reader {
        Reader { capacity, read: 0, written: 0 }
    }

    /// What has arrived, up to the ring's end.
    pub fn filled(&mut self, cursors: &Cursors) -> Result<Filled, InvalidCursor> {
        if self.written == self.read {
            self.look(cursors)?;
        }
        let at = self.read & (self.capacity - 1);
        let n = self.written.wrapping_sub(self.read).min(self.capacity - at);
        Ok(Filled { at, n })
    }

    /// Gives `n` words back to the writer.
    pub fn release(&mut self, cursors: &Cursors, n: u32) {
        debug_assert!(n <= self.written.wrapping_sub(self.read));
        self.read = self.read.wrapping_add(n);
        cursors.read.0.store(self.read, Ordering::Release);
    }

    /// The writer only goes forward, by whole lines, and not past what was given back.
    fn look(&mut self, cursors: &Cursors) -> Result<(), InvalidCursor> {
        let written = cursors.written.0.load(Ordering::Acquire);
        let n = written.wrapping_sub(self.read);
        if n > self.capacity || !n.is_multiple_of(LINE_WORDS) {
            return Err(InvalidCursor);
        }
        self.written = written;
        Ok(())
    }
}

/// Wakes one sleeper, whoever of its neighbours rings. All zero is a doorbell that nobody hears.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Doorbell {
    /// What the sleeper sleeps on: changes with each ring that it waits for.
    pub rings: AtomicU32,
    /// Not zero: somebody sleeps or is about to.
    pub sleeps: AtomicU32,
}

impl Doorbell {
    /// After publishing: wakes the sleeper, if there is one.
    pub fn ring(&self, wake: impl FnOnce(&AtomicU32)) {
        // Between publishing and looking for a sleeper; `arm` has its twin. One of the two sees the other.
        fence(Ordering::SeqCst);
        if self.sleeps.load(Ordering::Relaxed) != 0 {
            self.always(wake);
        }
    }

    /// Wakes the sleeper without asking.
    pub fn always(&self, wake: impl FnOnce(&AtomicU32)) {
        self.sleeps.store(0, Ordering::Relaxed);
        self.rings.fetch_add(1, Ordering::Release);
        wake(&self.rings);
    }

    /// Before sleeping. Afterwards look once more whether there is nothing to do, then sleep while `rings` is the
    /// answer.
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
