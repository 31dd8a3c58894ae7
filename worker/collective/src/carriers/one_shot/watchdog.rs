//! A thread beside those who compute. A kernel that waits for a peer keeps its device and whoever waits for that: so
//! the thread tells it to stop when a peer is gone, at the deadline, or when it is told to. The kernel has the last
//! word: if what it waited for came before it heard of it, nothing is wrong. It also has a clock of its own, should
//! this process be kept from its own.

use crate::abort::{AbortState, DeviceWait};
use crate::mesh::WaitFault;
use backend::cuda::{Mark, SumControl};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// How often the thread looks.
const LOOK: Duration = Duration::from_millis(5);
/// Between looks at a stream that is about to be through.
const LOOK_AGAIN: Duration = Duration::from_micros(50);
/// Mostly a pass is nearly done when somebody waits for it.
const SPIN: Duration = Duration::from_micros(200);
/// What a peer has said before it left may still be on its way for so long.
const GRACE: Duration = Duration::from_millis(300);
/// For what is under way to come to an end.
const FAREWELL: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct SumWatchdog {
    pub told: SumControl,
    /// Behind the last sum.
    pub mark: Mark,
    /// Of one sum.
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

    /// Why no sum is begun any more.
    pub fn fault(&self) -> Option<WaitFault> {
        self.fault.get().copied()
    }

    /// Why a sum that was begun cannot be believed, and the rank of the stage that did not come to it.
    pub fn verdict(&self) -> Option<(WaitFault, usize)> {
        let missing = self.told.missing()?;
        Some((self.fault().unwrap_or(WaitFault::Late), missing))
    }

    /// Waits until the last sum that was begun is done or has given up: each does one of them within its patience.
    pub fn wait(&self) {
        let begun = Instant::now();
        while self.is_busy() {
            if begun.elapsed() < SPIN { std::hint::spin_loop() } else { std::thread::sleep(LOOK_AGAIN) }
        }
    }

    /// From now on the deadline counts.
    pub fn begins(&self) {
        *self.begun.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// From any thread; the first fault stands.
    pub fn end(&self, fault: WaitFault) {
        let _first = self.fault.set(fault);
        self.told.stop();
        self.wake();
    }

    /// What the thread does.
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

    /// Whether something that was begun is not done.
    fn is_busy(&self) -> bool {
        // A device that cannot say has failed, which whoever waits for it hears.
        matches!(self.mark.is_passed(), Ok(false))
    }

    /// All that was to be done has been begun, and may come to its end.
    pub fn leave(&self) {
        let until = Instant::now() + FAREWELL;
        while self.is_busy() && self.fault.get().is_none() && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
        self.is_over.store(true, Ordering::Release);
        self.wake();
    }

    /// Waits until no kernel is there any more that could look at a buffer.
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
