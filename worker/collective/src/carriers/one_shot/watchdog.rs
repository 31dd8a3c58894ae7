//! A thread beside the computing one. A kernel that waits for a peer keeps its device, and whoever waits for that. The
//! thread therefore tells it to stop when a peer is gone, at the deadline, or on request. The kernel decides: if what
//! it waited for came before the stop, nothing is wrong. It also has a clock of its own, in case this process is
//! stopped.

use crate::abort::{AbortState, DeviceWait};
use crate::mesh::WaitFault;
use backend::cuda::{Mark, SumControl};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Interval between the thread's checks.
const LOOK: Duration = Duration::from_millis(5);
/// Interval between polls of a stream that is about to finish.
const LOOK_AGAIN: Duration = Duration::from_micros(50);
/// How long a waiter spins first: a pass is mostly nearly done when somebody waits for it.
const SPIN: Duration = Duration::from_micros(200);
/// How long data that a peer sent before it left may still be on its way.
const GRACE: Duration = Duration::from_millis(300);
/// How long work in progress may take to end.
const FAREWELL: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct SumWatchdog {
    pub told: SumControl,
    /// A mark after the last sum.
    pub mark: Mark,
    /// The deadline of one sum.
    pub deadline: Duration,
    begun: Mutex<Instant>,
    fault: OnceLock<WaitFault>,
    is_over: AtomicBool,
    thread: OnceLock<Thread>,
    abort: Arc<AbortState>,
}

impl DeviceWait for SumWatchdog {
    fn abort(&self) {
        self.end(WaitFault::Aborted);
    }
}

impl SumWatchdog {
    pub fn new(told: SumControl, mark: Mark, abort: Arc<AbortState>, deadline: Duration) -> SumWatchdog {
        let (begun, fault, is_over) = (Mutex::new(Instant::now()), OnceLock::new(), AtomicBool::new(false));
        SumWatchdog { told, mark, deadline, begun, fault, is_over, thread: OnceLock::new(), abort }
    }

    /// Why no further sum is begun.
    pub fn fault(&self) -> Option<WaitFault> {
        self.fault.get().copied()
    }

    /// Why a sum that was begun cannot be trusted, and the rank of the stage that did not come to it.
    pub fn verdict(&self) -> Option<(WaitFault, usize)> {
        let missing = self.told.missing()?;
        Some((self.fault().unwrap_or(WaitFault::Late), missing))
    }

    /// Waits until the last sum that was begun is done or has given up, which a kernel's own clock sees to.
    pub fn wait(&self) {
        let begun = Instant::now();
        while self.is_busy() {
            if begun.elapsed() < SPIN { std::hint::spin_loop() } else { std::thread::sleep(LOOK_AGAIN) }
        }
    }

    /// Starts the deadline.
    pub fn begins(&self) {
        *self.begun.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Ends the sums, from any thread; the first fault stands.
    pub fn end(&self, fault: WaitFault) {
        let _first = self.fault.set(fault);
        self.told.stop();
        self.wake();
    }

    /// The thread's loop.
    pub fn keep(&self) {
        let _first = self.thread.set(std::thread::current());
        let mut gone_since = None;
        while !self.is_over.load(Ordering::Acquire) && self.fault.get().is_none() {
            if let Some(fault) = self.look(&mut gone_since) {
                return self.end(fault);
            }
            std::thread::park_timeout(LOOK);
        }
    }

    fn look(&self, gone_since: &mut Option<Instant>) -> Option<WaitFault> {
        if !self.is_busy() {
            *gone_since = None;
            return None;
        }
        if self.abort.is_anybody_gone() {
            let since = gone_since.get_or_insert_with(Instant::now);
            return (since.elapsed() > GRACE).then_some(WaitFault::Gone);
        }
        let begun = *self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        (begun.elapsed() > self.deadline).then_some(WaitFault::Late)
    }

    /// Whether something that was begun is not yet done.
    fn is_busy(&self) -> bool {
        // A device that cannot answer has failed; whoever waits for it gets that error.
        matches!(self.mark.is_passed(), Ok(false))
    }

    /// Everything has been begun, and may now come to its end.
    pub fn leave(&self) {
        let until = Instant::now() + FAREWELL;
        while self.is_busy() && self.fault.get().is_none() && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
        self.is_over.store(true, Ordering::Release);
        self.wake();
    }

    /// Waits until no kernel can read a buffer any more; false if one still may.
    pub fn is_through(&self) -> bool {
        let until = Instant::now() + FAREWELL;
        while self.is_busy() {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        true
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}
