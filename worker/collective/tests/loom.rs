//! The ring's and the doorbell's orderings, in every interleaving that loom finds:
//! `RUSTFLAGS="--cfg loom" cargo test -p collective --test loom --target-dir target/loom`
#![allow(unexpected_cfgs, reason = "loom's own flag")]
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(unsafe_code, reason = "words that two threads share, guarded by the ring")]

mod sync {
    pub use loom::sync::atomic::{AtomicU32, Ordering, fence};
}

#[path = "../src/ring.rs"]
#[allow(dead_code, reason = "the crate uses the rest")]
mod ring;

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use ring::{Cursors, Doorbell, InvalidCursor, LINE_WORDS, RingReader, RingWriter};
use sync::{AtomicU32, Ordering};

/// A ring of two lines, with one word of each in use.
struct Shared {
    cursors: Cursors,
    lines: [UnsafeCell<u32>; 2],
    /// The reader's doorbell, and the futex on which it sleeps.
    doorbell: Doorbell,
    futex: Futex,
}

// SAFETY: loom checks that no two threads are in a cell at once.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// The system's futex: it compares and sleeps atomically.
#[derive(Default)]
struct Futex {
    lock: Mutex<()>,
    wakes: Condvar,
}

impl Futex {
    fn sleep(&self, word: &AtomicU32, seen: u32) {
        let guard = self.lock.lock().unwrap();
        if word.load(Ordering::Relaxed) == seen {
            drop(self.wakes.wait(guard).unwrap());
        }
    }

    fn wake(&self) {
        drop(self.lock.lock().unwrap());
        self.wakes.notify_one();
    }
}

impl Shared {
    fn new() -> Arc<Shared> {
        let cells = || UnsafeCell::new(0);
        let (cursors, doorbell, futex) = (Cursors::default(), Doorbell::default(), Futex::default());
        Arc::new(Shared { cursors, lines: [cells(), cells()], doorbell, futex })
    }

    fn line(&self, at: u32) -> &UnsafeCell<u32> {
        &self.lines[(at / LINE_WORDS) as usize]
    }
}

const CAPACITY: u32 = 2 * LINE_WORDS;

/// Three messages through a ring of two: the reader gets the written words in order, and never reads a word that is
/// being written (loom fails on the first unordered access of two threads to one cell).
#[test]
fn words_arrive_whole_and_in_order() {
    loom::model(|| {
        let shared = Shared::new();
        let theirs = shared.clone();
        let writer = thread::spawn(move || {
            let mut writer = RingWriter::new(CAPACITY);
            for value in 1..=3 {
                let room = loop {
                    match writer.reserve(&theirs.cursors, LINE_WORDS).unwrap() {
                        Some(room) => break room,
                        None => thread::yield_now(),
                    }
                };
                // SAFETY: the ring has reserved the word for the writer.
                theirs.line(room.at).with_mut(|word| unsafe { *word = value });
                writer.publish(&theirs.cursors, room.skip + LINE_WORDS);
            }
        });
        let mut reader = RingReader::new(CAPACITY);
        let mut expected = 1;
        while expected <= 3 {
            let filled = reader.filled(&shared.cursors).unwrap();
            if filled.n == 0 {
                thread::yield_now();
                continue;
            }
            // SAFETY: the ring has handed the word to the reader.
            assert_eq!(shared.line(filled.at).with(|word| unsafe { *word }), expected);
            reader.release(&shared.cursors, LINE_WORDS);
            expected += 1;
        }
        writer.join().unwrap();
    });
}

/// Runs interleavings with at most three preemptions: all of them would take hours.
fn bounded(run: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(run);
}

/// No thread sleeps forever: loom fails when all threads wait.
#[test]
fn a_sleeper_is_woken() {
    bounded(|| {
        let shared = Shared::new();
        let theirs = shared.clone();
        let writer = thread::spawn(move || {
            let mut writer = RingWriter::new(CAPACITY);
            for value in 1..=2 {
                let room = writer.reserve(&theirs.cursors, LINE_WORDS).unwrap().unwrap();
                // SAFETY: the ring has reserved the word for the writer.
                theirs.line(room.at).with_mut(|word| unsafe { *word = value });
                writer.publish(&theirs.cursors, LINE_WORDS);
                theirs.doorbell.ring(|_| theirs.futex.wake());
            }
        });
        let mut reader = RingReader::new(CAPACITY);
        for _ in 0..2 {
            wait_for_word(&shared, &mut reader);
            reader.release(&shared.cursors, LINE_WORDS);
        }
        writer.join().unwrap();
    });
}

/// Waits like `Idle`: check, arm, check again, sleep.
fn wait_for_word(shared: &Shared, reader: &mut RingReader) {
    let has_word = |reader: &mut RingReader| reader.filled(&shared.cursors).unwrap().n > 0;
    while !has_word(reader) {
        let seen = shared.doorbell.arm();
        if !has_word(reader) {
            shared.futex.sleep(&shared.doorbell.rings, seen);
        }
        shared.doorbell.disarm();
    }
}

/// Two neighbours ring one doorbell.
#[test]
fn two_ringers_lose_no_sleeper() {
    bounded(|| {
        let (doorbell, futex) = (Arc::new(Doorbell::default()), Arc::new(Futex::default()));
        let done = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let ringers: Vec<_> = (0..2)
            .map(|i| {
                let (doorbell, futex, done) = (doorbell.clone(), futex.clone(), done.clone());
                thread::spawn(move || {
                    done[i].store(1, Ordering::Release);
                    doorbell.ring(|_| futex.wake());
                })
            })
            .collect();
        let all = || done.iter().all(|done| done.load(Ordering::Acquire) == 1);
        while !all() {
            let seen = doorbell.arm();
            if !all() {
                futex.sleep(&doorbell.rings, seen);
            }
            doorbell.disarm();
        }
        ringers.into_iter().for_each(|ringer| ringer.join().unwrap());
    });
}

/// The other side may write any index.
#[test]
fn nonsense_is_named() {
    loom::model(|| {
        let cursors = Cursors::default();
        let mut writer = RingWriter::new(CAPACITY);
        writer.publish(&cursors, CAPACITY);
        for ahead in [CAPACITY + 1, 1 << 31, u32::MAX] {
            cursors.read.0.store(ahead, Ordering::Release);
            assert_eq!(writer.reserve(&cursors, LINE_WORDS), Err(InvalidCursor));
        }
        let mut reader = RingReader::new(CAPACITY);
        for written in [CAPACITY + LINE_WORDS, 1, 1 << 31, u32::MAX] {
            cursors.written.0.store(written, Ordering::Release);
            assert_eq!(reader.filled(&cursors), Err(InvalidCursor));
        }
    });
}
