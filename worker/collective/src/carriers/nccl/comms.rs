//! The communicators of a rank with the memory that they use, and the thread that watches them.

use super::api::NcclApi;
use super::watchdog::{CommFault, CommWatchdog};
use crate::abort::DeviceWait;
use crate::error::{Error, Result};
use crate::mesh::Mesh;
use backend::cuda::{Cuda, DeviceWords, SideStream, TransferBuffer};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Indices into the watchdog's marks.
pub(super) const STAGE: usize = 0;
pub(super) const NEXT: usize = 1;
pub(super) const BEFORE: usize = 2;

/// The communicator among the ranks of the stage, on the compute stream.
pub(super) struct StageComm {
    pub comm: usize,
    /// Columns going out, columns received, the folded result, and the finished columns of all ranks.
    pub out: TransferBuffer,
    pub parts: TransferBuffer,
    pub sum: TransferBuffer,
    pub all: TransferBuffer,
    /// Merges after each of this rank's own planes, for planes that are added one after the other.
    pub in_a_row: DeviceWords,
    /// By number of leaves: merges after each plane.
    pub merges: Vec<(u32, DeviceWords)>,
}

/// The communicator with the same rank of a neighbouring stage, on its own stream, so that computing does not wait.
pub(super) struct HopComm {
    pub comm: usize,
    /// The peer's rank within this communicator.
    pub peer: usize,
    pub side: SideStream,
    pub room: TransferBuffer,
}

/// Why an operation did not begin.
pub(super) enum BeginError {
    Fault(CommFault),
    Device(backend::Error),
}

pub(super) type BeginResult = std::result::Result<(), BeginError>;

impl From<CommFault> for BeginError {
    fn from(fault: CommFault) -> BeginError {
        BeginError::Fault(fault)
    }
}

impl From<backend::Error> for BeginError {
    fn from(error: backend::Error) -> BeginError {
        BeginError::Device(error)
    }
}

impl CommFault {
    /// Returns the error that names the rank to blame, as far as the links show it.
    pub(super) fn blame(&self, mesh: &mut Mesh) -> Error {
        match self {
            CommFault::Wait(fault) => mesh.blame(*fault),
            CommFault::Failed(why) => mesh.lost_peer_error().unwrap_or_else(|| Error::Nccl(why.clone())),
        }
    }
}

/// The communicators with the thread that watches them. Dropped before the memory that they use.
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
            let thread = std::thread::Builder::new().name("nccl".into()).spawn(move || watchdog.run());
            thread.map_err(|source| Error::Io { what: "the thread that watches NCCL", source })?
        };
        Ok(WatchedComms { watchdog, thread: Some(thread) })
    }

    /// Begins an operation. An error ends this rank's part in the mesh.
    pub fn begin(&self, mesh: &mut Mesh, operation: impl FnOnce(&Mesh, &CommWatchdog) -> BeginResult) -> Result<()> {
        // The watchdog detects an abort a moment later; until then it would begin unneeded work.
        if mesh.is_ended() && self.watchdog.fault().is_none() {
            return Err(Error::Aborted);
        }
        match operation(mesh, &self.watchdog) {
            Ok(()) => Ok(()),
            Err(BeginError::Fault(fault)) => Err(self.end_with(mesh, fault)),
            Err(BeginError::Device(error)) => Err(mesh.fail(error.into())),
        }
    }

    /// Notifies the peers first, because communicators may end slowly.
    pub fn end_with(&self, mesh: &mut Mesh, fault: CommFault) -> Error {
        let blamed = fault.blame(mesh);
        let error = mesh.fail(blamed);
        self.watchdog.end(fault);
        error
    }
}

impl Drop for WatchedComms {
    fn drop(&mut self) {
        // Without an earlier fault this aborts the work in progress.
        self.watchdog.abort();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been reported.
            let _ended = thread.join();
        }
        self.watchdog.wait_until_ended();
    }
}
