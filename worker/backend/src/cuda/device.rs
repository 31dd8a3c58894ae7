//! The device: its parts, how a kernel is launched on it, and how bytes are copied to and from it.

use super::clock::BusyClock;
use super::draws::DrawScratch;
use super::driver::{Card, Context, CudaEvent, DeviceMemory, Driver, LaunchShape, Stream};
use super::fault::FirstError;
use super::graphs::GraphCache;
use super::kernels::Kernels;
use super::lock::lock;
use super::lt;
use super::peer_buffer::PeerBuffer;
use super::scratch::DeviceScratch;
use super::table::Kernel;
use super::uploads::{self, Uploads};
use super::weights::Packer;
use crate::cpu::{Cpu, CpuConfig};
use crate::{PassStats, Result};
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use types::NumericsMode;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaConfig {
    /// The driver's number of the device.
    pub ordinal: u32,
    /// Where compiled kernels are kept between starts.
    pub cache: Option<PathBuf>,
    pub mode: NumericsMode,
    /// The CPU beside it packs weights, and draws where the device has no kernel.
    pub host: CpuConfig,
    /// Whether similar passes are launched as one graph.
    pub graphs: bool,
}

/// Used by one thread at a time.
pub struct Cuda {
    pub(super) card: Card,
    pub(super) mode: NumericsMode,
    pub(super) host: Cpu,
    pub(super) kernels: Kernels,
    pub(super) uploads: Mutex<Uploads>,
    pub(super) scratch: Mutex<DeviceScratch>,
    pub(super) draws: Mutex<DrawScratch>,
    pub(super) fault: FirstError,
    pub(super) graphs: Mutex<GraphCache>,
    pub(super) clock: Mutex<BusyClock>,
    /// The buffer that other ranks received last.
    pub(super) peer_buffer: Mutex<Option<Arc<PeerBuffer>>>,
    /// Present under `fast`.
    pub(super) lt: Option<lt::LtLibrary>,
    /// Shared with the threads that move pages.
    pub(super) stream: Arc<Stream>,
    pub(super) context: Arc<Context>,
}

impl Cuda {
    pub fn open(config: &CudaConfig) -> Result<Cuda> {
        let driver = Driver::find()?;
        let card = driver.card(config.ordinal)?;
        card.check()?;
        let context = Context::open(driver, &card)?;
        Ok(Cuda {
            mode: config.mode,
            host: Cpu::new(config.host)?,
            kernels: Kernels::load(driver, &context, &card, config.cache.as_deref())?,
            uploads: Mutex::new(Uploads::new(&context, uploads::BYTES_MIN)?),
            scratch: Mutex::new(DeviceScratch::new(&context)?),
            draws: Mutex::new(DrawScratch::new(&context)?),
            fault: FirstError::default(),
            clock: Mutex::new(BusyClock::new(&context)?),
            peer_buffer: Mutex::new(None),
            graphs: Mutex::new(GraphCache::new(&card, config.graphs)),
            lt: (config.mode == NumericsMode::Fast).then(|| lt::LtLibrary::open(&context)).transpose()?,
            stream: Arc::new(Stream::new(&context)?),
            card,
            context,
        })
    }

    pub fn card(&self) -> &Card {
        &self.card
    }

    /// Returns the CPU device beside it.
    pub fn host(&self) -> &Cpu {
        &self.host
    }

    /// Returns the free bytes of the device's memory that graphs will not use either.
    pub fn free_bytes(&self) -> Result<u64> {
        let for_graphs = lock(&self.graphs).n_left() as u64;
        Ok(self.context.free_bytes()?.saturating_sub(for_graphs))
    }

    /// Returns the seconds that the device takes for the operations that `work` launches.
    pub fn seconds(&self, work: impl FnOnce()) -> Result<f64> {
        let (begin, end) = (CudaEvent::timed(&self.context)?, CudaEvent::timed(&self.context)?);
        begin.record(&self.stream)?;
        work();
        end.record(&self.stream)?;
        end.wait()?;
        Ok(f64::from(end.millis_since(&begin)?) / 1e3)
    }

    /// Runs a kernel, unless an earlier operation has failed.
    ///
    /// # Safety
    /// As for `Kernels::launch`.
    pub(super) unsafe fn launch(&self, kernel: Kernel, shape: LaunchShape, args: &[*const c_void]) {
        if self.is_well() {
            // SAFETY: the caller's promise.
            self.keep_error(unsafe { self.kernels.launch(&self.stream, kernel, shape, args) });
        }
    }

    pub(super) fn is_well(&self) -> bool {
        !self.fault.is_there()
    }

    pub(super) fn keep_error<T>(&self, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.fault.keep(error);
                None
            }
        }
    }

    pub(super) fn scratch(&self) -> MutexGuard<'_, DeviceScratch> {
        lock(&self.scratch)
    }

    /// Uploads words for the rest of the pass.
    pub(super) fn upload(&self, words: &[u32]) -> u64 {
        let uploaded = lock(&self.uploads).put(&self.stream, words.len(), |to| to.copy_from_slice(words));
        self.keep_error(uploaded).unwrap_or(0)
    }

    /// Copies from the device, and returns when the copy is complete.
    ///
    /// Panics on a failure, as the caller cannot continue and receives no error: a rank whose device has failed must
    /// not send its peers data that it does not have. The step fails as a whole.
    pub(super) fn fetch(&self, from: &DeviceMemory, at: usize, to: &mut [u8]) {
        // SAFETY: `to` is borrowed until the stream has finished.
        let fetched = unsafe { self.stream.read(from, at, to) }.and_then(|()| self.stream.finish());
        self.keep_error(fetched);
        self.fault.check();
    }

    pub(super) fn upload_bytes(&self, to: &DeviceMemory, at: usize, from: &[u8]) -> Result<()> {
        // SAFETY: `from` is borrowed until the stream has finished.
        unsafe { self.stream.write(to, at, from) }?;
        self.stream.finish()
    }

    pub(super) fn packer<T>(&self, pack: impl FnOnce(Packer<'_>) -> Result<T>) -> Result<T> {
        let write = |to: &DeviceMemory, at: usize, from: &[u8]| self.upload_bytes(to, at, from);
        pack(Packer { context: &self.context, team: &self.host.team, mode: self.mode, write: &write })
    }

    pub(super) fn floats(&self, what: &'static str, values: &[f32]) -> Result<DeviceMemory> {
        let bytes = DeviceMemory::new(&self.context, what, size_of_val(values))?;
        self.upload_bytes(&bytes, 0, bytemuck::cast_slice(values))?;
        Ok(bytes)
    }

    /// Whether launches are recorded and not executed.
    pub(super) fn is_recording(&self) -> bool {
        lock(&self.graphs).is_recording
    }

    /// Drops all graphs after a buffer has moved: no record may contain its old address.
    pub(super) fn forget_graphs(&self) {
        lock(&self.graphs).forget();
    }

    pub(super) fn pass_counts_so_far(&self) -> PassStats {
        lock(&self.graphs).counts
    }
}
