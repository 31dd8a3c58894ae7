//! How a rank waits: it may spin for a while, and then sleeps in slices. Between them it checks that its peers are
//! still there.

use crate::futex;
use crate::link::PeerLink;
use crate::region::Region;
use crate::transfer::Direction;
use rustix::event::{PollFd, PollFlags, poll};
use std::time::{Duration, Instant};

/// How long an operation may take, and whether it may spin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitPolicy {
    /// The deadline of one operation, from its call on.
    pub deadline: Duration,
    /// Whether to spin before sleeping. Use it only if there are at most as many threads as cores.
    pub spin: bool,
}

impl Default for WaitPolicy {
    fn default() -> WaitPolicy {
        WaitPolicy { deadline: Duration::from_secs(120), spin: false }
    }
}

/// Spinning time: several times the duration of a wake-up.
const SPIN: Duration = Duration::from_micros(200);
/// One sleep: the death of a silent neighbour is detected after it.
const SLICE: Duration = Duration::from_millis(2);
/// One sleep of a rank that waits for memory and sockets at once, because it can only sleep on one of them.
const SLICE_MIXED: Duration = Duration::from_micros(100);
/// The most connections polled during a sleep; the rest are read one slice later.
const POLLED_MAX: usize = 16;

/// The state of one operation's waiting.
#[derive(Debug)]
pub struct IdleWait {
    may_spin: bool,
    deadline: Instant,
    /// When progress stopped.
    since: Option<Instant>,
    n_spins: u32,
    /// The doorbell's count when it was armed.
    armed: Option<u32>,
    is_in_doubt: bool,
    has_slept: bool,
    pub waited: Duration,
}

impl IdleWait {
    pub fn new(begun: Instant, waits: &WaitPolicy) -> IdleWait {
        IdleWait {
            may_spin: waits.spin,
            deadline: begun + waits.deadline,
            since: None,
            n_spins: 0,
            armed: None,
            is_in_doubt: false,
            has_slept: false,
            waited: Duration::ZERO,
        }
    }

    /// Called after progress: waiting begins anew.
    pub fn reset(&mut self, doorbell: &Region) {
        if self.armed.take().is_some() {
            doorbell.doorbell().disarm();
        }
        if let Some(since) = self.since.take() {
            self.waited += since.elapsed();
            (self.n_spins, self.is_in_doubt, self.has_slept) = (0, false, false);
        }
    }

    /// Spins for a moment. Returns false when it is time to sleep.
    pub fn spin(&mut self) -> bool {
        const LOOKS: u32 = 64;
        let since = *self.since.get_or_insert_with(Instant::now);
        if !self.may_spin || self.n_spins == u32::MAX {
            return false;
        }
        self.n_spins += 1;
        if self.n_spins.is_multiple_of(LOOKS) && since.elapsed() > SPIN {
            self.n_spins = u32::MAX;
            return false;
        }
        std::hint::spin_loop();
        true
    }

    pub fn is_late(&self) -> bool {
        Instant::now() >= self.deadline
    }

    /// Returns whether a whole slice has passed, so that a system call costs little.
    pub fn has_slept(&self) -> bool {
        self.has_slept
    }

    /// Returns true the first time after progress.
    pub fn is_first_check(&mut self) -> bool {
        !std::mem::replace(&mut self.is_in_doubt, true)
    }

    /// The first call arms the doorbell, so that the caller checks once more; the next calls sleep.
    pub fn sleep<'a>(&mut self, doorbell: &Region, pending: impl Iterator<Item = (&'a PeerLink, Direction)>) {
        let Some(seen) = self.armed.take() else {
            self.armed = Some(doorbell.doorbell().arm());
            return;
        };
        let mut polled: [Option<PollFd<'_>>; POLLED_MAX] = [const { None }; POLLED_MAX];
        let (mut n_polled, mut n_memory) = (0, 0);
        for (link, direction) in pending {
            match link {
                PeerLink::Shm(_) => n_memory += 1,
                PeerLink::Tcp(link) if n_polled < POLLED_MAX => {
                    let flags = if direction == Direction::Out { PollFlags::OUT } else { PollFlags::IN };
                    polled[n_polled] = Some(PollFd::new(link.stream(), flags));
                    n_polled += 1;
                }
                PeerLink::Tcp(_) => {}
            }
        }
        let slice = if n_memory > 0 && n_polled > 0 { SLICE_MIXED } else { SLICE };
        let slice = slice.min(self.deadline.saturating_duration_since(Instant::now()));
        match n_polled {
            0 => futex::wait(&doorbell.doorbell().rings, seen, slice),
            n => listen(polled, n, slice),
        }
        doorbell.doorbell().disarm();
        self.has_slept = true;
    }
}

fn listen(polled: [Option<PollFd<'_>>; POLLED_MAX], n: usize, slice: Duration) {
    let Some(first) = polled[0].clone() else { return };
    let mut listening = polled.map(|fd| fd.unwrap_or_else(|| first.clone()));
    let slice = rustix::event::Timespec { tv_sec: 0, tv_nsec: slice.subsec_nanos().into() };
    // Woken, timed out or interrupted: the caller checks again in any case.
    let _ = poll(&mut listening[..n], Some(&slice));
}
