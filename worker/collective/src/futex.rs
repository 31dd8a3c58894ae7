//! Sleeps on a word of memory, across processes too: without the private flag the system identifies the word by its
//! page.

use crate::sync::AtomicU32;
use std::time::Duration;

/// Sleeps while `word` equals `seen`, for `time` at most.
#[cfg(target_os = "linux")]
pub fn wait(word: &AtomicU32, seen: u32, time: Duration) {
    use rustix::thread::futex;
    let time = rustix::event::Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    // Woken, timed out or interrupted: the caller checks again in any case.
    let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&time));
}

#[cfg(target_os = "linux")]
pub fn wake(word: &AtomicU32) {
    use rustix::thread::futex;
    let _ = futex::wake(word, futex::Flags::empty(), 1);
}

/// Without a futex: a short sleep, so that a wake-up is not missed for long.
#[cfg(not(target_os = "linux"))]
pub fn wait(_word: &AtomicU32, _seen: u32, time: Duration) {
    std::thread::sleep(time.min(Duration::from_micros(50)));
}

#[cfg(not(target_os = "linux"))]
pub fn wake(_word: &AtomicU32) {}
