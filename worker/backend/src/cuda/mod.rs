//! A GPU of NVIDIA as a device. Built into every binary; the driver and its compiler are looked for when a device is
//! opened, and where they are missing that is an error like any other.
//!
//! ```text
//! driver    what the driver offers: contexts, streams, memory, launches
//! compiler  sources -> a cubin, kept on disk
//! table     which kernels there are: kernels/*.cu, which implement the contract kernels/kernels.cuh
//! kernels   their arguments, loading and launching
//! fault     what failed first
//! lt        cuBLASLt, for large products under `fast`
//! f8        such products with weights of eight bits
//! memory    buffers and vectors, and the way of numbers there and back
//! weights   stored matrices -> tiles of digits and scales
//! uploads   what a pass tells the device: positions, tables, tokens
//! clock     when passes began and ended
//! graphs    passes that are like others, recorded and begun again as one
//! one_shot  sums of ranks whose devices reach each other's memory
//! direct    the device as a library sees it that moves memory between devices
//! the rest  the operations, each a launch or two
//! ```
//! Operations are begun in order on one stream and return at once; who reads waits. What fails is remembered and said
//! by `settle`, and nothing more is begun until then. All memory is made at load, and none is given back before the
//! rank ends: a driver may wait for all that its context has begun when memory is allocated or freed, and where ranks
//! share a device, or add over each other's memory, a peer's kernel may be waiting there for this rank's next one.
//!
//! Knows nothing of models or requests, nor of other ranks.

mod attention;
mod clock;
mod compiler;
mod direct;
mod driver;
mod experts;
mod f8;
mod fault;
mod graphs;
mod kernels;
mod linear;
mod lt;
mod memory;
mod one_shot;
mod pointwise;
mod sample;
mod table;
mod uploads;
mod weights;

pub use attention::{Kv, Rope};
pub use compiler::{Arch, Compiler, Program, Text};
pub use direct::{Columns, Floats, Mark, Side, TransferBuffer, Words};
pub use driver::{Card, Driver};
pub use experts::Routes;
pub use kernels::{compile, kernel_names};
pub use lt::{LtVersion, lt_version};
pub use memory::{Buffer, Vector};
pub use one_shot::{MappedBuffer, OneShot, PeerBuffer, SumControl, Term};
pub use weights::Matrix;

use crate::cpu::{Cpu, CpuConfig};
use crate::{Pass, Repeat, Repeats, Result};
use clock::Clock;
use driver::{Bytes, Context, Event, Shape, Stream};
use fault::Fault;
use graphs::Graphs;
use kernels::Kernels;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use table::Kernel;
use types::Mode;
use uploads::Uploads;
use weights::Packer;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaConfig {
    /// Which of the driver's devices.
    pub ordinal: u32,
    /// Where compiled kernels are kept between starts.
    pub cache: Option<PathBuf>,
    pub mode: Mode,
    /// The processor beside it packs weights, and draws what the device has no kernel for.
    pub host: CpuConfig,
    /// Whether passes that are like others are begun as one.
    pub graphs: bool,
}

/// Driven by one thread at a time.
pub struct Cuda {
    card: Card,
    mode: Mode,
    host: Cpu,
    kernels: Kernels,
    uploads: Mutex<Uploads>,
    scratch: Mutex<Scratch>,
    draws: Mutex<sample::DrawScratch>,
    fault: Fault,
    graphs: Mutex<Graphs>,
    clock: Mutex<Clock>,
    /// What other ranks were shown last.
    peer_buffer: Mutex<Option<Arc<one_shot::PeerBuffer>>>,
    /// Under `fast`.
    lt: Option<lt::Library>,
    stream: Stream,
    context: Arc<Context>,
}

/// What operations need besides their arguments, grown when buffers are made.
struct Scratch {
    /// Rows on their way from one form to the other.
    rows: Bytes,
    /// What the tiles of a split attention have made.
    partial: Bytes,
    /// Of products with weights of eight bits.
    f8: f8::ScaledScratch,
    /// Of any buffer.
    rows_max: usize,
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
            scratch: Mutex::new(Scratch {
                rows: Bytes::new(&context, "scratch", 0)?,
                partial: Bytes::new(&context, "scratch", attention::PARTIAL_BYTES)?,
                f8: f8::ScaledScratch::default(),
                rows_max: 0,
            }),
            draws: Mutex::new(sample::DrawScratch::new(&context)?),
            fault: Fault::default(),
            clock: Mutex::new(Clock::new(&context)?),
            peer_buffer: Mutex::new(None),
            graphs: Mutex::new(Graphs::new(&card, config.graphs)),
            lt: (config.mode == Mode::Fast).then(|| lt::Library::open(&context)).transpose()?,
            stream: Stream::new(&context)?,
            card,
            context,
        })
    }

    pub fn card(&self) -> &Card {
        &self.card
    }

    /// The processor beside it.
    pub fn host(&self) -> &Cpu {
        &self.host
    }

    /// What nobody has taken of the device's memory, and graphs are not to take either.
    pub fn free_bytes(&self) -> Result<u64> {
        let for_graphs = lock(&self.graphs).n_left() as u64;
        Ok(self.context.free_bytes()?.saturating_sub(for_graphs))
    }

    /// Seconds that the device takes for what `work` begins.
    pub fn seconds(&self, work: impl FnOnce()) -> Result<f64> {
        let (begin, end) = (Event::timed(&self.context)?, Event::timed(&self.context)?);
        begin.record(&self.stream)?;
        work();
        end.record(&self.stream)?;
        end.wait()?;
        Ok(f64::from(end.millis_since(&begin)?) / 1e3)
    }

    /// Begins to copy the first rows of a buffer to another.
    pub fn copy_rows(&self, from: &Buffer, to: &mut Buffer, n_rows: usize) {
        from.check(n_rows, to.cols);
        to.check(n_rows, to.cols);
        to.becomes_bf16(from.is_bf16());
        self.note(self.stream.copy(&to.bytes, 0, &from.bytes, 0, n_rows * from.row_bytes()));
    }

    /// Runs a kernel, unless something has failed before.
    ///
    /// # Safety
    /// As for `Kernels::launch`.
    unsafe fn launch(&self, kernel: Kernel, shape: Shape, args: &[*const c_void]) {
        if self.is_well() {
            // SAFETY: the caller's promise.
            self.note(unsafe { self.kernels.launch(&self.stream, kernel, shape, args) });
        }
    }

    fn is_well(&self) -> bool {
        !self.fault.is_there()
    }

    fn note<T>(&self, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.fault.keep(error);
                None
            }
        }
    }

    fn scratch(&self) -> MutexGuard<'_, Scratch> {
        lock(&self.scratch)
    }

    /// Words that the device is to have for the rest of the pass.
    fn upload(&self, words: &[u32]) -> u64 {
        let uploaded = lock(&self.uploads).put(&self.stream, words.len(), |to| to.copy_from_slice(words));
        self.note(uploaded).unwrap_or(0)
    }

    /// Copies from the device, and has it when it returns.
    ///
    /// Whoever asks cannot go on without an answer and has no way to be told: a rank whose device has failed must not
    /// send its peers what it does not have. The step fails as a whole.
    fn fetch(&self, from: &Bytes, at: usize, to: &mut [u8]) {
        // SAFETY: `to` is borrowed until the stream is through.
        let fetched = unsafe { self.stream.read(from, at, to) }.and_then(|()| self.stream.finish());
        self.note(fetched);
        self.fault.check();
    }

    fn place(&self, to: &Bytes, at: usize, from: &[u8]) -> Result<()> {
        // SAFETY: `from` is borrowed until the stream is through.
        unsafe { self.stream.write(to, at, from) }?;
        self.stream.finish()
    }

    fn packer<T>(&self, pack: impl FnOnce(Packer<'_>) -> Result<T>) -> Result<T> {
        let write = |to: &Bytes, at: usize, from: &[u8]| self.place(to, at, from);
        pack(Packer { context: &self.context, team: &self.host.team, mode: self.mode, write: &write })
    }

    fn floats(&self, what: &'static str, values: &[f32]) -> Result<Bytes> {
        let bytes = Bytes::new(&self.context, what, size_of_val(values))?;
        self.place(&bytes, 0, bytemuck::cast_slice(values))?;
        Ok(bytes)
    }
}

/// A block of 256 for each row.
fn by_row(n_rows: usize) -> Shape {
    Shape { grid: [n_rows as u32, 1, 1], block: [256, 1, 1], shared_bytes: 0 }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What an aborted operation left in it, the next overwrites.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl crate::Device for Cuda {
    fn settle(&self) -> Result<()> {
        self.fault.take().map_or(Ok(()), Err)
    }

    fn rows_for(&self, pass: &Pass<'_>) -> usize {
        lock(&self.graphs).rows_for(pass)
    }

    fn repeat<E>(&self, work: impl FnMut() -> std::result::Result<(), E>) -> std::result::Result<Repeat, E> {
        self.repeat_work(work)
    }

    fn forget(&self) {
        self.forget_graphs();
    }

    fn repeats(&self) -> Repeats {
        let clock = lock(&self.clock);
        Repeats { busy_micros: clock.busy_micros, idle_micros: clock.idle_micros, ..self.repeats_so_far() }
    }
}
