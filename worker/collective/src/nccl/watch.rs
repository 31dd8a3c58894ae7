//! The communicators of a rank, and a thread that looks after them. A device that waits for a peer waits for ever, and
//! whoever waits for the device too: so the thread ends the communicators when a peer is gone, when NCCL says that one
//! has failed, when nothing comes until the deadline, or when it is told to. Then the device goes on with what is
//! wrong, the host comes back, and asks here before it believes anything.

use super::table::{NcclError, RawComm, Table};
use crate::doom::Doom;
use backend::cuda::Mark;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How often the thread looks.
const LOOK: Duration = Duration::from_millis(5);
/// Between looks at a communicator that has not taken up what it was given.
const LOOK_AGAIN: Duration = Duration::from_micros(50);
/// What a peer has sent before it left may still be on its way for so long.
const GRACE: Duration = Duration::from_millis(300);
/// For a communicator to come to an end in good order.
const FAREWELL: Duration = Duration::from_secs(2);

/// Why there is no exchange any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    Aborted,
    /// A peer is gone; the links know which.
    Gone,
    Late,
    Failed(NcclError),
}

impl From<NcclError> for Fault {
    fn from(error: NcclError) -> Fault {
        Fault::Failed(error)
    }
}

struct Live(RawComm);

// SAFETY: communicators may be used from any thread, one at a time: they stand behind a mutex.
unsafe impl Send for Live {}

pub struct Watch {
    table: Arc<Table>,
    /// Empty when all is over.
    comms: Mutex<Vec<Live>>,
    /// Behind the last operation of each stream.
    marks: Vec<Mark>,
    begun: Mutex<Instant>,
    fault: OnceLock<Fault>,
    is_over: AtomicBool,
    is_unwanted: AtomicBool,
    thread: OnceLock<Thread>,
    /// They abort communicators.
    aborting: Mutex<Vec<JoinHandle<()>>>,
    doom: Arc<Doom>,
    /// Of one operation.
    deadline: Duration,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("fault", &self.fault).finish_non_exhaustive()
    }
}

/// A communicator of a watch, and the calls that are made of it.
#[derive(Clone, Copy)]
pub struct Lane<'a> {
    table: &'a Table,
    comm: RawComm,
    stream: *mut c_void,
}

impl Watch {
    pub fn new(table: Table, marks: Vec<Mark>, doom: Arc<Doom>, deadline: Duration) -> Watch {
        Watch {
            table: Arc::new(table),
            comms: Mutex::default(),
            marks,
            begun: Mutex::new(Instant::now()),
            fault: OnceLock::new(),
            is_over: AtomicBool::new(false),
            is_unwanted: AtomicBool::new(false),
            thread: OnceLock::new(),
            aborting: Mutex::default(),
            doom,
            deadline,
        }
    }

    pub fn mark(&self, idx: usize) -> &Mark {
        &self.marks[idx]
    }

    pub fn fault(&self) -> Option<&Fault> {
        self.fault.get()
    }

    /// One more communicator, which begins to come into being; its number.
    pub fn add(&self, init: impl FnOnce(&Table) -> Result<RawComm, NcclError>) -> Result<usize, Fault> {
        let mut comms = self.comms()?;
        comms.push(Live(init(&self.table)?));
        Ok(comms.len() - 1)
    }

    /// Waits until it has taken up what it was given.
    pub fn taken_up(&self, comm: usize, until: Instant, is_wanted: impl Fn() -> bool) -> Result<(), Fault> {
        loop {
            {
                let comms = self.comms()?;
                // SAFETY: it is live as long as it is in the list, which is held.
                if unsafe { self.table.state(comms[comm].0) }? {
                    return Ok(());
                }
            }
            if !is_wanted() {
                return Err(Fault::Aborted);
            }
            if Instant::now() >= until {
                return Err(Fault::Late);
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
    ) -> Result<(), Fault> {
        self.begins();
        {
            let comms = self.comms()?;
            let lane = Lane { table: &self.table, comm: comms[comm].0, stream };
            self.table.group(|| calls(lane))?;
        }
        self.taken_up(comm, Instant::now() + self.deadline, || true)
    }

    /// From now on the deadline counts.
    pub fn begins(&self) {
        *lock(&self.begun) = Instant::now();
    }

    /// From another thread: the exchange is to end.
    pub fn abort(&self) {
        self.is_unwanted.store(true, Ordering::Release);
        self.wake();
    }

    fn comms(&self) -> Result<MutexGuard<'_, Vec<Live>>, Fault> {
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

    fn look(&self, gone_since: &mut Option<Instant>) -> Option<Fault> {
        if self.is_unwanted.load(Ordering::Acquire) {
            return Some(Fault::Aborted);
        }
        {
            let comms = lock(&self.comms);
            // SAFETY: they are live as long as they are in the list, which is held.
            let failed = comms.iter().find_map(|comm| unsafe { self.table.state(comm.0) }.err());
            if let Some(failed) = failed {
                return Some(failed.into());
            }
        }
        if !self.is_busy() {
            *gone_since = None;
            return None;
        }
        if self.doom.is_anybody_gone() {
            let since = gone_since.get_or_insert_with(Instant::now);
            return (since.elapsed() > GRACE).then_some(Fault::Gone);
        }
        (lock(&self.begun).elapsed() > self.deadline).then_some(Fault::Late)
    }

    /// Whether something that was begun is not done.
    fn is_busy(&self) -> bool {
        // A device that cannot say has failed, which whoever waits for it hears.
        self.marks.iter().any(|mark| matches!(mark.is_passed(), Ok(false)))
    }

    /// The first fault stands. Communicators are aborted by threads of their own, all at once: NCCL comes back from it
    /// when no graph names the communicator any more, and whoever owns graphs may be who called, or may still wait for
    /// what another communicator does.
    pub fn end(&self, fault: Fault) {
        let comms = {
            let mut comms = lock(&self.comms);
            let _first = self.fault.set(fault);
            std::mem::take(&mut *comms)
        };
        for comm in comms {
            let table = self.table.clone();
            let abort = move || {
                let Live(comm) = { comm };
                // SAFETY: it was live, and is in no list any more. What an aborted one answers changes nothing.
                let _aborted = unsafe { table.abort(comm) };
            };
            // Without a thread it stays: the process is at its end.
            if let Ok(thread) = std::thread::Builder::new().name("nccl-abort".into()).spawn(abort) {
                lock(&self.aborting).push(thread);
            }
        }
    }

    /// Waits for what was aborted: by now no graph is left.
    pub fn has_ended(&self) {
        for thread in lock(&self.aborting).drain(..) {
            // A thread that panicked has said so.
            let _ended = thread.join();
        }
    }

    /// All that was to be done has been begun: what is still under way may come to its end.
    pub fn leave(&self) {
        let until = Instant::now() + FAREWELL;
        while self.is_busy() && self.fault.get().is_none() && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
        self.is_over.store(true, Ordering::Release);
        self.wake();
        if self.is_busy() {
            return self.end(Fault::Aborted);
        }
        let mut comms = lock(&self.comms);
        for comm in comms.drain(..) {
            // SAFETY: it is live until it is destroyed or aborted here, and in no list any more.
            unsafe {
                let is_ended = || self.table.state(comm.0).unwrap_or(false);
                let mut has_ended = self.table.finalize(comm.0).is_ok() && is_ended();
                while !has_ended && Instant::now() < until {
                    std::thread::sleep(LOOK_AGAIN);
                    has_ended = is_ended();
                }
                // What either answers changes nothing any more.
                let _gone = if has_ended { self.table.destroy(comm.0) } else { self.table.abort(comm.0) };
            }
        }
    }

    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

impl Lane<'_> {
    /// # Safety
    /// So many numbers of the device stay there until the stream is through; so for all below.
    pub unsafe fn send(self, from: u64, n: usize, to: usize) -> Result<(), NcclError> {
        // SAFETY: the communicator is live while the lane is; the rest is the caller's promise.
        unsafe { self.table.send(from, n, to, (self.comm, self.stream)) }
    }

    /// # Safety
    /// As above.
    pub unsafe fn recv(self, to: u64, n: usize, from: usize) -> Result<(), NcclError> {
        // SAFETY: as above.
        unsafe { self.table.recv(to, n, from, (self.comm, self.stream)) }
    }

    /// # Safety
    /// As above; `to` has room for `n` of each.
    pub unsafe fn all_gather(self, from: u64, to: u64, n: usize) -> Result<(), NcclError> {
        // SAFETY: as above.
        unsafe { self.table.all_gather(from, to, n, (self.comm, self.stream)) }
    }

    /// # Safety
    /// As above.
    pub unsafe fn all_reduce(self, at: u64, n: usize) -> Result<(), NcclError> {
        // SAFETY: as above.
        unsafe { self.table.all_reduce(at, n, (self.comm, self.stream)) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
