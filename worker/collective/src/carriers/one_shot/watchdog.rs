//! A thread beside the computing one. A kernel that waits for a peer holds its device, and blocks every thread that
//! waits for the device. The watchdog therefore stops the kernel when a peer is gone, at the deadline, or on request.
//! The kernel decides: if its data came before the stop, the sum is valid. The kernel also has its own clock, in case
//! this process is stopped.

use crate::abort::{AbortState, DeviceWait};
use crate::mesh::WaitFault;
use backend::cuda::{StreamMark, SumControl};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Interval between the thread's checks.
const LOOK: Duration = Duration::from_millis(5);
/// Interval between polls of a stream that is about to finish.
const LOOK_AGAIN: Duration = Duration::from_micros(50);
/// How long a waiter spins first: a pass is mostly almost done when a thread begins to wait for it.
const SPIN: Duration = Duration::from_micros(200);
/// How long data that a peer sent before it left may still be on its way.
const GRACE: Duration = Duration::from_millis(300);
/// How long work in progress may take to finish.
const FAREWELL: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct SumWatchdog {
    pub control: SumControl,
    /// A mark after the last sum.
    pub mark: StreamMark,
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
    pub fn new(control: SumControl, mark: StreamMark, abort: Arc<AbortState>, deadline: Duration) -> SumWatchdog {
        let (begun, fault, is_over) = (Mutex::new(Instant::now()), OnceLock::new(), AtomicBool::new(false));
        SumWatchdog { control, mark, deadline, begun, fault, is_over, thread: OnceLock::new(), abort }
    }

    /// Returns why no further sum may begin.
    pub fn fault(&self) -> Option<WaitFault> {
        self.fault.get().copied()
    }

    /// Returns why a begun sum is invalid, and the rank of the stage that did not take part.
    pub fn sum_fault(&self) -> Option<(WaitFault, usize)> {
        let missing = self.control.missing()?;
        Some((self.fault().unwrap_or(WaitFault::Late), missing))
    }

    /// Waits until the last sum is done or has given up; the kernel's own clock limits the wait.
    pub fn wait(&self) {
        let begun = Instant::now();
        while self.is_busy() {
            if begun.elapsed() < SPIN { std::hint::spin_loop() } else { std::thread::sleep(LOOK_AGAIN) }
        }
    }

    /// Starts the deadline.
    pub fn start_deadline(&self) {
        *self.begun.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Ends the sums, from any thread; the first fault stands.
    pub fn end(&self, fault: WaitFault) {
        let _first = self.fault.set(fault);
        self.control.stop();
        self.wake();
    }

    /// Runs the thread's loop.
    pub fn run(&self) {
        let _first = self.thread.set(std::thread::current());
        let mut gone_since = None;
        while !self.is_over.load(Ordering::Acquire) && self.fault.get().is_none() {
            if let Some(fault) = self.find_fault(&mut gone_since) {
                return self.end(fault);
            }
            std::thread::park_timeout(LOOK);
        }
    }

    fn find_fault(&self, gone_since: &mut Option<Instant>) -> Option<WaitFault> {
        if !self.is_busy() {
            *gone_since = None;
            return None;
        }
        if self.abort.is_any_peer_gone() {
            let since = gone_since.get_or_insert_with(Instant::now);
            return (since.elapsed() > GRACE).then_some(WaitFault::Gone);
        }
        let begun = *self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        (begun.elapsed() > self.deadline).then_some(WaitFault::Late)
    }

    /// Returns whether begun work is not done yet.
    fn is_busy(&self) -> bool {
        // A device that returns an error has failed; the thread that waits for it receives that error.
        matches!(self.mark.is_passed(), Ok(false))
    }

    /// Called when all work has begun; the work may now finish.
    pub fn leave(&self) {
        let until = Instant::now() + FAREWELL;
        while self.is_busy() && self.fault.get().is_none() && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
        self.is_over.store(true, Ordering::Release);
        self.wake();
    }

    /// Waits until no kernel can read a buffer; returns false if one still may.
    pub fn wait_until_unused(&self) -> bool {
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
