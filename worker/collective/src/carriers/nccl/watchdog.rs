//! The communicators of a rank, and a thread that watches them. A device that waits for a peer waits forever, and so
//! does a host thread that waits for the device. The thread therefore ends the communicators when a peer is gone, when
//! NCCL reports a failure, at the deadline, or on request. The device then continues with wrong numbers, and the host
//! checks for a fault here before it uses any of them.

use super::api::{CommSpec, NcclApi, NcclError, RawComm};
use crate::abort::{AbortState, DeviceWait};
use crate::mesh::WaitFault;
use crate::wait::WaitPolicy;
use backend::cuda::StreamMark;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// Interval between the thread's checks.
const LOOK: Duration = Duration::from_millis(5);
/// NCCL mostly accepts a call within this time: until then its state is polled without a sleep.
const AT_ONCE: Duration = Duration::from_micros(200);
/// Interval between polls after that.
const LOOK_AGAIN: Duration = Duration::from_micros(50);
/// How long data that a peer sent before it left may still be on its way.
const GRACE: Duration = Duration::from_millis(300);
/// A library call returns within this time, unless it waits for a peer.
const CALL: Duration = Duration::from_millis(200);
/// How long a communicator may take to end in good order, and how long other code waits for that.
const FAREWELL: Duration = Duration::from_secs(2);

/// Why no exchange is possible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CommFault {
    Wait(WaitFault),
    Failed(NcclError),
}

impl From<WaitFault> for CommFault {
    fn from(fault: WaitFault) -> CommFault {
        CommFault::Wait(fault)
    }
}

impl From<NcclError> for CommFault {
    fn from(error: NcclError) -> CommFault {
        CommFault::Failed(error)
    }
}

struct LiveComm(RawComm);

// SAFETY: communicators may be used from any thread, one at a time: a mutex guards them.
unsafe impl Send for LiveComm {}

pub struct CommWatchdog {
    api: &'static NcclApi,
    /// Empty once everything has ended.
    comms: Mutex<Vec<LiveComm>>,
    /// Marks after the last operation of each stream. They also keep the device alive for the threads that end
    /// communicators.
    marks: Arc<[StreamMark]>,
    begun: Mutex<Instant>,
    /// Whether NCCL has not accepted a call that was begun: while NCCL connects peers, no mark covers it.
    is_beginning: AtomicBool,
    /// Whether a call on a communicator is in progress, and may wait for peers. Set while `comms` is locked.
    is_calling: Arc<AtomicBool>,
    fault: OnceLock<CommFault>,
    is_over: AtomicBool,
    is_unwanted: AtomicBool,
    thread: OnceLock<Thread>,
    /// The threads that end communicators.
    ending: Mutex<Vec<JoinHandle<()>>>,
    abort: Arc<AbortState>,
    policy: WaitPolicy,
}

/// Keeps the flag true until this is dropped.
struct RaisedFlag<'a>(&'a AtomicBool);

impl<'a> RaisedFlag<'a> {
    fn new(flag: &'a AtomicBool) -> RaisedFlag<'a> {
        flag.store(true, Ordering::Release);
        RaisedFlag(flag)
    }
}

impl Drop for RaisedFlag<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl DeviceWait for CommWatchdog {
    /// Ends the exchange, from any thread.
    fn abort(&self) {
        self.is_unwanted.store(true, Ordering::Release);
        self.wake();
    }
}

impl std::fmt::Debug for CommWatchdog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommWatchdog").field("fault", &self.fault).finish_non_exhaustive()
    }
}

/// One of the watchdog's communicators with the stream of its calls.
#[derive(Clone, Copy)]
pub struct CommStream<'a> {
    api: &'a NcclApi,
    comm: RawComm,
    stream: *mut c_void,
}

impl CommWatchdog {
    pub fn new(
        api: &'static NcclApi,
        marks: Vec<StreamMark>,
        abort: Arc<AbortState>,
        policy: WaitPolicy,
    ) -> CommWatchdog {
        CommWatchdog {
            api,
            comms: Mutex::default(),
            marks: marks.into(),
            begun: Mutex::new(Instant::now()),
            is_beginning: AtomicBool::new(false),
            is_calling: Arc::default(),
            fault: OnceLock::new(),
            is_over: AtomicBool::new(false),
            is_unwanted: AtomicBool::new(false),
            thread: OnceLock::new(),
            ending: Mutex::default(),
            abort,
            policy,
        }
    }

    pub fn mark(&self, idx: usize) -> &StreamMark {
        &self.marks[idx]
    }

    pub fn fault(&self) -> Option<&CommFault> {
        self.fault.get()
    }

    /// Begins one more communicator and returns its number.
    pub fn add(&self, of: CommSpec) -> Result<usize, CommFault> {
        let mut comms = self.comms()?;
        let (made, begun) = self.api.init(of);
        comms.extend(made.map(LiveComm));
        begun?;
        Ok(comms.len() - 1)
    }

    /// Waits until the communicator has accepted its calls.
    pub fn wait_until_accepted(
        &self,
        comm: usize,
        until: Instant,
        should_wait: impl Fn() -> bool,
    ) -> Result<(), CommFault> {
        let begun = Instant::now();
        loop {
            {
                let comms = self.comms()?;
                // SAFETY: a communicator in the list is live, and the list is locked.
                if unsafe { self.api.has_accepted_calls(comms[comm].0) }? {
                    return Ok(());
                }
            }
            if begun.elapsed() < AT_ONCE {
                if self.policy.spin {
                    std::hint::spin_loop()
                } else {
                    std::thread::yield_now()
                }
                continue;
            }
            if !should_wait() {
                return Err(WaitFault::Aborted.into());
            }
            if Instant::now() >= until {
                return Err(WaitFault::Late.into());
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Begins `calls` as one group and waits until NCCL has accepted them, not until they are done.
    pub fn begin(
        &self,
        comm: usize,
        stream: *mut c_void,
        calls: impl FnOnce(CommStream<'_>) -> Result<(), NcclError>,
    ) -> Result<(), CommFault> {
        self.start_deadline();
        let _beginning = RaisedFlag::new(&self.is_beginning);
        let called = {
            // The lock is released here: the thread must be able to end a call that waits for a peer.
            let (lane, _calling) = {
                let comms = self.comms()?;
                (CommStream { api: self.api, comm: comms[comm].0, stream }, RaisedFlag::new(&self.is_calling))
            };
            self.api.group(|| calls(lane))
        };
        match self.fault() {
            // A call on an ended communicator may return anything.
            Some(fault) => Err(fault.clone()),
            None => called.map_err(CommFault::from),
        }?;
        self.wait_until_accepted(comm, Instant::now() + self.policy.deadline, || true)
    }

    /// Waits until all begun work is done.
    pub fn wait_until_idle(&self) -> Result<(), CommFault> {
        while self.fault().is_none() && self.is_busy() {
            std::thread::sleep(LOOK_AGAIN);
        }
        self.fault().map_or(Ok(()), |fault| Err(fault.clone()))
    }

    /// Starts the deadline.
    pub fn start_deadline(&self) {
        *lock(&self.begun) = Instant::now();
    }

    fn comms(&self) -> Result<MutexGuard<'_, Vec<LiveComm>>, CommFault> {
        let comms = lock(&self.comms);
        match self.fault.get() {
            Some(fault) => Err(fault.clone()),
            None => Ok(comms),
        }
    }

    /// Runs the thread's loop.
    pub fn run(&self) {
        let _first = self.thread.set(std::thread::current());
        let mut gone_since = None;
        while !self.is_over.load(Ordering::Acquire) {
            if let Some(fault) = self.find_fault(&mut gone_since) {
                return self.end(fault);
            }
            std::thread::park_timeout(LOOK);
        }
    }

    fn find_fault(&self, gone_since: &mut Option<Instant>) -> Option<CommFault> {
        if self.is_unwanted.load(Ordering::Acquire) {
            return Some(WaitFault::Aborted.into());
        }
        {
            let comms = lock(&self.comms);
            // A caller polls the state itself as soon as its call returns.
            let polled = if self.is_calling.load(Ordering::Acquire) { &[] } else { comms.as_slice() };
            // SAFETY: communicators in the list are live, and the list is locked.
            let failed = polled.iter().find_map(|comm| unsafe { self.api.has_accepted_calls(comm.0) }.err());
            if let Some(failed) = failed {
                return Some(failed.into());
            }
        }
        if !self.is_busy() {
            *gone_since = None;
            return None;
        }
        if self.abort.is_any_peer_gone() {
            let since = gone_since.get_or_insert_with(Instant::now);
            return (since.elapsed() > GRACE).then(|| WaitFault::Gone.into());
        }
        (lock(&self.begun).elapsed() > self.policy.deadline).then(|| WaitFault::Late.into())
    }

    /// Returns whether begun work is not done yet.
    fn is_busy(&self) -> bool {
        // A device that returns an error has failed; the thread that waits for it receives that error.
        let is_pending = |mark: &StreamMark| matches!(mark.is_passed(), Ok(false));
        self.is_beginning.load(Ordering::Acquire) || self.marks.iter().any(is_pending)
    }

    /// Records the first fault and ends the communicators. NCCL returns from an abort only when no graph names the
    /// communicator. The owner of the graphs may be the caller, or may still wait for another communicator.
    pub fn end(&self, fault: CommFault) {
        let comms = {
            let mut comms = lock(&self.comms);
            let _first = self.fault.set(fault);
            std::mem::take(&mut *comms)
        };
        self.end_each(comms, abort);
    }

    /// Ends all of them at once, each on its own thread.
    fn end_each(&self, comms: Vec<LiveComm>, how: fn(&NcclApi, RawComm, &AtomicBool)) {
        for comm in comms {
            let (api, marks, is_calling) = (self.api, self.marks.clone(), self.is_calling.clone());
            let end = move || {
                let LiveComm(comm) = { comm };
                // NCCL restores its caller's current device, and would open the first device for a thread without one.
                let _entered = marks.first().map(StreamMark::enter);
                how(api, comm, &is_calling);
            };
            // If no thread can start, the communicator stays: the process is about to end.
            if let Ok(thread) = std::thread::Builder::new().name("nccl-end".into()).spawn(end) {
                lock(&self.ending).push(thread);
            }
        }
    }

    /// Waits for the communicators that are ending; no graph names them by now. The wait is limited: NCCL waits for
    /// everything that it has connected on a host, and a neighbour may be stuck. Such a communicator ends later, when
    /// the neighbour does.
    pub fn wait_until_ended(&self) {
        let until = Instant::now() + FAREWELL;
        for thread in lock(&self.ending).drain(..) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(LOOK_AGAIN);
            }
            if thread.is_finished() {
                // A panic of the thread has already been reported.
                let _ended = thread.join();
            }
        }
    }

    /// Called when all work has begun; the work may now finish.
    pub fn finish(&self) {
        let until = Instant::now() + FAREWELL;
        while self.is_busy() && self.fault().is_none() && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Ends the communicators in good order, if all work is done.
    pub fn leave(&self) {
        self.is_over.store(true, Ordering::Release);
        self.wake();
        if self.is_busy() {
            return self.end(WaitFault::Aborted.into());
        }
        let comms = std::mem::take(&mut *lock(&self.comms));
        self.end_each(comms, finalize);
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

/// Ends the communicator and everything that it still does. No call may be in progress on it, except one that waits for
/// a peer: the abort makes that call return.
fn abort(api: &NcclApi, comm: RawComm, is_calling: &AtomicBool) {
    let until = Instant::now() + CALL;
    while is_calling.load(Ordering::Acquire) && Instant::now() < until {
        std::thread::sleep(LOOK_AGAIN);
    }
    // SAFETY: it was live and is in no list any more. The result of an abort changes nothing.
    let _aborted = unsafe { api.abort(comm) };
}

/// Finalises first, so that work that needs the host completes.
fn finalize(api: &NcclApi, comm: RawComm, _: &AtomicBool) {
    let until = Instant::now() + FAREWELL;
    // SAFETY: it is live until it is destroyed or aborted here, and in no list any more.
    unsafe {
        let mut state = api.finalize(comm).and_then(|()| api.has_accepted_calls(comm));
        while state == Ok(false) && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
            state = api.has_accepted_calls(comm);
        }
        // The result of either call changes nothing.
        let _gone = if state == Ok(true) { api.destroy(comm) } else { api.abort(comm) };
    }
}

impl CommStream<'_> {
    /// # Safety
    /// `n` numbers of device memory stay valid at `from` until the stream has passed; so for all below.
    pub unsafe fn send(self, from: u64, n: usize, to: usize) -> Result<(), NcclError> {
        // SAFETY: the communicator is live while the lane is; the rest is the caller's promise.
        unsafe { self.api.send(from, n, to, (self.comm, self.stream)) }
    }

    /// # Safety
    /// As above.
    pub unsafe fn recv(self, to: u64, n: usize, from: usize) -> Result<(), NcclError> {
        // SAFETY: as above.
        unsafe { self.api.recv(to, n, from, (self.comm, self.stream)) }
    }

    /// # Safety
    /// As above; `to` has room for `n` numbers of each rank.
    pub unsafe fn all_gather(self, from: u64, to: u64, n: usize) -> Result<(), NcclError> {
        // SAFETY: as above.
        unsafe { self.api.all_gather(from, to, n, (self.comm, self.stream)) }
    }

    /// # Safety
    /// As above.
    pub unsafe fn all_reduce(self, at: u64, n: usize) -> Result<(), NcclError> {
        // SAFETY: as above.
        unsafe { self.api.all_reduce(at, n, (self.comm, self.stream)) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
