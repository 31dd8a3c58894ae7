//! The communicators of a rank, and a thread that looks after them. A device that waits for a peer waits for ever, and
//! whoever waits for the device too: so the thread ends the communicators when a peer is gone, when NCCL says that one
//! has failed, when nothing comes until the deadline, or when it is told to. Then the device goes on with wrong
//! numbers, the host comes back, and asks here before it believes anything.

use super::api::{Comm, NcclApi, NcclError, RawComm};
use crate::abort::{AbortState, DeviceWait};
use crate::mesh::WaitFault;
use crate::wait::WaitPolicy;
use backend::cuda::Mark;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How often the thread looks.
const LOOK: Duration = Duration::from_millis(5);
/// What NCCL takes up, it mostly takes up within this: who waits for it looks again at once.
const AT_ONCE: Duration = Duration::from_micros(200);
/// Between looks at what takes longer.
const LOOK_AGAIN: Duration = Duration::from_micros(50);
/// What a peer has sent before it left may still be on its way for so long.
const GRACE: Duration = Duration::from_millis(300);
/// A call of the library's comes back within this, unless it waits for a peer.
const CALL: Duration = Duration::from_millis(200);
/// For a communicator to come to an end in good order, and for who waits until it has ended.
const FAREWELL: Duration = Duration::from_secs(2);

/// Why there is no exchange any more.
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

struct Live(RawComm);

// SAFETY: communicators may be used from any thread, one at a time: they stand behind a mutex.
unsafe impl Send for Live {}

pub struct CommWatchdog {
    api: &'static NcclApi,
    /// Empty when all is over.
    comms: Mutex<Vec<Live>>,
    /// Behind the last operation of each stream. They keep the device, too, for who ends communicators.
    marks: Arc<[Mark]>,
    begun: Mutex<Instant>,
    /// Something was begun that NCCL has not taken up: as long as it connects peers, no mark knows of it.
    is_beginning: AtomicBool,
    /// A call that names a communicator is under way, and may wait for peers. Raised while `comms` is held.
    is_calling: Arc<AtomicBool>,
    fault: OnceLock<CommFault>,
    is_over: AtomicBool,
    is_unwanted: AtomicBool,
    thread: OnceLock<Thread>,
    /// They end communicators.
    ending: Mutex<Vec<JoinHandle<()>>>,
    abort: Arc<AbortState>,
    policy: WaitPolicy,
}

/// True until it is dropped.
struct Raised<'a>(&'a AtomicBool);

impl<'a> Raised<'a> {
    fn new(flag: &'a AtomicBool) -> Raised<'a> {
        flag.store(true, Ordering::Release);
        Raised(flag)
    }
}

impl Drop for Raised<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl DeviceWait for CommWatchdog {
    /// From any thread: the exchange is to end.
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

/// A communicator of a watchdog, and the calls that are made of it.
#[derive(Clone, Copy)]
pub struct Lane<'a> {
    api: &'a NcclApi,
    comm: RawComm,
    stream: *mut c_void,
}

impl CommWatchdog {
    pub fn new(api: &'static NcclApi, marks: Vec<Mark>, abort: Arc<AbortState>, policy: WaitPolicy) -> CommWatchdog {
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

    pub fn mark(&self, idx: usize) -> &Mark {
        &self.marks[idx]
    }

    pub fn fault(&self) -> Option<&CommFault> {
        self.fault.get()
    }

    /// One more communicator, which begins to come into being; its number.
    pub fn add(&self, of: Comm) -> Result<usize, CommFault> {
        let mut comms = self.comms()?;
        let (made, begun) = self.api.init(of);
        comms.extend(made.map(Live));
        begun?;
        Ok(comms.len() - 1)
    }

    /// Waits until it has taken up what it was given.
    pub fn taken_up(&self, comm: usize, until: Instant, is_wanted: impl Fn() -> bool) -> Result<(), CommFault> {
        let begun = Instant::now();
        loop {
            {
                let comms = self.comms()?;
                // SAFETY: it is live as long as it is in the list, which is held.
                if unsafe { self.api.state(comms[comm].0) }? {
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
            if !is_wanted() {
                return Err(WaitFault::Aborted.into());
            }
            if Instant::now() >= until {
                return Err(WaitFault::Late.into());
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Begins what `calls` say, which go on together, and waits until they have been taken up: not until they are done.
    pub fn begin(
        &self,
        comm: usize,
        stream: *mut c_void,
        calls: impl FnOnce(Lane<'_>) -> Result<(), NcclError>,
    ) -> Result<(), CommFault> {
        self.begins();
        let _beginning = Raised::new(&self.is_beginning);
        let called = {
            // Not held any longer: the thread has to end a call that waits for a peer.
            let (lane, _calling) = {
                let comms = self.comms()?;
                (Lane { api: self.api, comm: comms[comm].0, stream }, Raised::new(&self.is_calling))
            };
            self.api.group(|| calls(lane))
        };
        match self.fault() {
            // Of what was ended a call says anything.
            Some(fault) => Err(fault.clone()),
            None => called.map_err(CommFault::from),
        }?;
        self.taken_up(comm, Instant::now() + self.policy.deadline, || true)
    }

    /// Waits until all that was begun is done.
    pub fn passed(&self) -> Result<(), CommFault> {
        while self.fault().is_none() && self.is_busy() {
            std::thread::sleep(LOOK_AGAIN);
        }
        self.fault().map_or(Ok(()), |fault| Err(fault.clone()))
    }

    /// From now on the deadline counts.
    pub fn begins(&self) {
        *lock(&self.begun) = Instant::now();
    }

    fn comms(&self) -> Result<MutexGuard<'_, Vec<Live>>, CommFault> {
        let comms = lock(&self.comms);
        match self.fault.get() {
            Some(fault) => Err(fault.clone()),
            None => Ok(comms),
        }
    }

    /// What the thread does.
    pub fn keep(&self) {
        let _first = self.thread.set(std::thread::current());
        let mut gone_since = None;
        while !self.is_over.load(Ordering::Acquire) {
            if let Some(fault) = self.look(&mut gone_since) {
                return self.end(fault);
            }
            std::thread::park_timeout(LOOK);
        }
    }

    fn look(&self, gone_since: &mut Option<Instant>) -> Option<CommFault> {
        if self.is_unwanted.load(Ordering::Acquire) {
            return Some(WaitFault::Aborted.into());
        }
        {
            let comms = lock(&self.comms);
            // Who calls asks itself, as soon as the call is back.
            let asked = if self.is_calling.load(Ordering::Acquire) { &[] } else { comms.as_slice() };
            // SAFETY: they are live as long as they are in the list, which is held.
            let failed = asked.iter().find_map(|comm| unsafe { self.api.state(comm.0) }.err());
            if let Some(failed) = failed {
                return Some(failed.into());
            }
        }
        if !self.is_busy() {
            *gone_since = None;
            return None;
        }
        if self.abort.is_anybody_gone() {
            let since = gone_since.get_or_insert_with(Instant::now);
            return (since.elapsed() > GRACE).then(|| WaitFault::Gone.into());
        }
        (lock(&self.begun).elapsed() > self.policy.deadline).then(|| WaitFault::Late.into())
    }

    /// Whether something that was begun is not done.
    fn is_busy(&self) -> bool {
        // A device that cannot say has failed, which whoever waits for it hears.
        let is_pending = |mark: &Mark| matches!(mark.is_passed(), Ok(false));
        self.is_beginning.load(Ordering::Acquire) || self.marks.iter().any(is_pending)
    }

    /// The first fault stands. NCCL comes back from an abort when no graph names the communicator any more, and whoever
    /// owns graphs may be who called, or may still wait for what another communicator does.
    pub fn end(&self, fault: CommFault) {
        let comms = {
            let mut comms = lock(&self.comms);
            let _first = self.fault.set(fault);
            std::mem::take(&mut *comms)
        };
        self.end_each(comms, abort);
    }

    /// By threads of their own, all at once.
    fn end_each(&self, comms: Vec<Live>, how: fn(&NcclApi, RawComm, &AtomicBool)) {
        for comm in comms {
            let (api, marks, is_calling) = (self.api, self.marks.clone(), self.is_calling.clone());
            let end = move || {
                let Live(comm) = { comm };
                // NCCL goes back to the device that its caller had, and would open the first one for who has none.
                let _entered = marks.first().map(Mark::enter);
                how(api, comm, &is_calling);
            };
            // Without a thread it stays: the process is at its end.
            if let Ok(thread) = std::thread::Builder::new().name("nccl-end".into()).spawn(end) {
                lock(&self.ending).push(thread);
            }
        }
    }

    /// Waits for those that are to end: by now no graph is left. Not for ever: NCCL waits for all that it has connected
    /// on a host, and a neighbour may neither go on nor end. What is left then ends with that.
    pub fn has_ended(&self) {
        let until = Instant::now() + FAREWELL;
        for thread in lock(&self.ending).drain(..) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(LOOK_AGAIN);
            }
            if thread.is_finished() {
                // A thread that panicked has said so.
                let _ended = thread.join();
            }
        }
    }

    /// All that was to be done has been begun: what is still under way may come to its end.
    pub fn finish(&self) {
        let until = Instant::now() + FAREWELL;
        while self.is_busy() && self.fault().is_none() && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// In good order, if all has come to its end.
    pub fn leave(&self) {
        self.is_over.store(true, Ordering::Release);
        self.wake();
        if self.is_busy() {
            return self.end(WaitFault::Aborted.into());
        }
        let comms = std::mem::take(&mut *lock(&self.comms));
        self.end_each(comms, part);
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

/// What it still does ends, and so does it. A call that has not come back may not be of what ends; one that waits for a
/// peer comes back by that alone.
fn abort(api: &NcclApi, comm: RawComm, is_calling: &AtomicBool) {
    let until = Instant::now() + CALL;
    while is_calling.load(Ordering::Acquire) && Instant::now() < until {
        std::thread::sleep(LOOK_AGAIN);
    }
    // SAFETY: it was live, and is in no list any more. What an aborted one answers changes nothing.
    let _aborted = unsafe { api.abort(comm) };
}

/// What the host still carries for it is carried to its end.
fn part(api: &NcclApi, comm: RawComm, _: &AtomicBool) {
    let until = Instant::now() + FAREWELL;
    // SAFETY: it is live until it is destroyed or aborted here, and in no list any more.
    unsafe {
        let mut state = api.finalize(comm).and_then(|()| api.state(comm));
        while state == Ok(false) && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
            state = api.state(comm);
        }
        // What either answers changes nothing any more.
        let _gone = if state == Ok(true) { api.destroy(comm) } else { api.abort(comm) };
    }
}

impl Lane<'_> {
    /// # Safety
    /// So many numbers of the device stay there until the stream is through; so for all below.
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
    /// As above; `to` has room for `n` of each.
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
