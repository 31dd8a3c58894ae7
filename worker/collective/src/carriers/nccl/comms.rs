//! The communicators of a rank with the memory that they work in, and the thread that looks after them.

use super::api::NcclApi;
use super::watchdog::{CommFault, CommWatchdog};
use crate::abort::DeviceWait;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use backend::cuda::{Cuda, Side, TransferBuffer, Words};
use std::sync::Arc;
use std::thread::JoinHandle;

/// The marks of a watchdog.
pub(super) const STAGE: usize = 0;
pub(super) const NEXT: usize = 1;
pub(super) const BEFORE: usize = 2;

/// Among the ranks of the stage, in the stream that computes.
pub(super) struct StageComm {
    pub comm: usize,
    /// What goes out by column, what came, what was folded, and the finished columns of all.
    pub out: TransferBuffer,
    pub parts: TransferBuffer,
    pub sum: TransferBuffer,
    pub all: TransferBuffer,
    /// How often to merge behind each of the own planes, where they are added one after the other.
    pub in_a_row: Words,
    /// By number of leaves: how often to merge behind each plane.
    pub merges: Vec<(u32, Words)>,
}

/// With the same rank of a neighbouring stage, in a stream of its own: who computes does not wait for it.
pub(super) struct HopComm {
    pub comm: usize,
    /// The peer's number in it.
    pub peer: usize,
    pub side: Side,
    pub room: TransferBuffer,
}

/// Why an operation was not begun.
pub(super) enum Stopped {
    Fault(CommFault),
    Device(backend::Error),
}

pub(super) type Begun = std::result::Result<(), Stopped>;

impl From<CommFault> for Stopped {
    fn from(fault: CommFault) -> Stopped {
        Stopped::Fault(fault)
    }
}

impl From<backend::Error> for Stopped {
    fn from(error: backend::Error) -> Stopped {
        Stopped::Device(error)
    }
}

impl CommFault {
    /// Who is to blame, as far as the links know.
    pub(super) fn blame(&self, mesh: &mut Mesh) -> Error {
        match self {
            CommFault::Wait(fault) => mesh.blame(*fault),
            CommFault::Failed(why) => mesh.who_is_lost().unwrap_or_else(|| Error::Nccl(why.clone())),
        }
    }
}

/// The communicators, and the thread that looks after them. They end with this: before the memory that they work in.
#[derive(Debug)]
pub(super) struct WatchedComms {
    pub watchdog: Arc<CommWatchdog>,
    thread: Option<JoinHandle<()>>,
}

impl WatchedComms {
    pub fn start(mesh: &Mesh, cuda: &Cuda, api: &'static NcclApi) -> Result<WatchedComms> {
        let marks = (0..=BEFORE).map(|_| cuda.new_mark()).collect::<backend::Result<_>>()?;
        cuda.enter()?;
        let watchdog = Arc::new(CommWatchdog::new(api, marks, mesh.abort_state(), mesh.policy()));
        let thread = {
            let watchdog = watchdog.clone();
            let thread = std::thread::Builder::new().name("nccl".into()).spawn(move || watchdog.keep());
            thread.map_err(|source| Error::Io { what: "a thread to look after NCCL", source })?
        };
        Ok(WatchedComms { watchdog, thread: Some(thread) })
    }

    /// Begins an operation; what stops it ends this rank's part in the mesh.
    pub fn begin(&self, mesh: &mut Mesh, operation: impl FnOnce(&Mesh, &CommWatchdog) -> Begun) -> Result<()> {
        // The watchdog hears of an abort a moment later, and until then would begin what nobody wants any more.
        if mesh.is_ended() && self.watchdog.fault().is_none() {
            return Err(Error::Aborted);
        }
        match operation(mesh, &self.watchdog) {
            Ok(()) => Ok(()),
            Err(Stopped::Fault(fault)) => Err(self.ended_by(mesh, fault)),
            Err(Stopped::Device(error)) => Err(mesh.fail(error.into())),
        }
    }

    /// The peers hear of it first: communicators may end slowly.
    pub fn ended_by(&self, mesh: &mut Mesh, fault: CommFault) -> Error {
        let blamed = fault.blame(mesh);
        let error = mesh.fail(blamed);
        self.watchdog.end(fault);
        error
    }
}

impl Drop for WatchedComms {
    fn drop(&mut self) {
        // If nothing has been said before, it is broken off.
        self.watchdog.abort();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so.
            let _ended = thread.join();
        }
        self.watchdog.has_ended();
    }
}
