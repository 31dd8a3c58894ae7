//! A GPU of NVIDIA as a device. Built into every binary; the driver and its compiler are looked for when a device is
//! opened, and where they are missing that is an error like any other.
//!
//! ```text
//! driver    what the driver offers: contexts, streams, memory, launches
//! compiler  sources -> a cubin, kept on disk
//! table     which kernels there are; kernels/*.cu are the sources, kernels/kernels.cuh the page both sides are written to
//! kernels   their arguments, loading and launching
//! fault     what failed first
//! lt        cuBLASLt, for large products under `fast`
//! f8        such products with weights of eight bits
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
mod one_shot;
mod pointwise;
mod sample;
mod table;
mod uploads;
mod weights;

pub use attention::{Kv, Rope};
pub use compiler::{Arch, Compiler, Program, Text};
pub use direct::{Columns, Floats, Mark, Room, Side, Words};
pub use driver::{Card, Driver};
pub use experts::Routes;
pub use kernels::{compile, kernel_names};
pub use lt::{LtVersion, lt_version};
pub use one_shot::{MappedBuffer, OneShot, PeerBuffer, SumControl, Term};
pub use weights::Matrix;

use crate::cpu::{Cpu, CpuConfig};
use crate::{BatchLimits, Error, KvSpec, Memory, Pass, Repeat, Repeats, Result, RopeStyle, Routing, Stored};
use clock::Clock;
use driver::{Bytes, Context, Event, Shape, Stream};
use fault::Fault;
use graphs::Graphs;
use half::bf16;
use kernels::{Kernels, arguments};
use std::ffi::c_void;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use table::Kernel;
use types::{BlockId, DeviceClass, DeviceKind, Leaves, Mode};
use uploads::Uploads;
use weights::{GROUP, Packer};

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
    draws: Mutex<sample::Room>,
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
    f8: f8::Room,
    /// Of any buffer.
    rows_max: usize,
}

/// `[rows_max, cols]`, in f32 or, where a product is what reads it, in bf16.
pub struct Buffer {
    bytes: Bytes,
    rows_max: usize,
    cols: usize,
    is_bf16: AtomicBool,
}

impl Buffer {
    fn is_bf16(&self) -> bool {
        self.is_bf16.load(Ordering::Relaxed)
    }

    /// What an operation is about to write.
    fn becomes_bf16(&self, is_bf16: bool) {
        self.is_bf16.store(is_bf16, Ordering::Relaxed);
    }

    fn row_bytes(&self) -> usize {
        if self.is_bf16() { padded(self.cols) * 2 } else { self.cols * 4 }
    }

    /// An operation that does not fit its buffers is a bug of its caller.
    fn check(&self, n_rows: usize, cols: usize) {
        let fits = n_rows <= self.rows_max && cols == self.cols;
        assert!(fits, "{n_rows} rows of {cols} in a buffer of {} x {}", self.rows_max, self.cols);
    }

    fn at(&self) -> u64 {
        self.bytes.at(0)
    }
}

/// A vector of f32.
pub struct Vector {
    bytes: Bytes,
    len: usize,
}

impl Vector {
    fn at(&self) -> u64 {
        self.bytes.at(0)
    }
}

/// The numbers that a row of bf16 has room for.
fn padded(cols: usize) -> usize {
    cols.next_multiple_of(GROUP)
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
                f8: f8::Room::default(),
                rows_max: 0,
            }),
            draws: Mutex::new(sample::Room::new(&context)?),
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

    /// The rows in bf16: where they are, or rounded into the scratch. Another such call takes that away.
    fn in_bf16(&self, x: &Buffer, n_rows: usize) -> u64 {
        if x.is_bf16() {
            return x.at();
        }
        let (from, cols, to) = (x.at(), x.cols as u32, self.scratch().rows.at(0));
        // SAFETY: x has so many rows, and `buffer` made the scratch as large as any buffer's rows in bf16.
        unsafe { self.launch(Kernel::RoundRows, by_row(n_rows), arguments![from, cols, to]) };
        to
    }

    /// Makes the rows f32 where they stand.
    fn to_f32(&self, x: &Buffer, n_rows: usize) {
        if !x.is_bf16() {
            return;
        }
        let scratch = self.scratch();
        if n_rows > 0 && x.cols > 0 {
            self.note(self.stream.copy(&scratch.rows, 0, &x.bytes, 0, n_rows * x.row_bytes()));
            let (from, cols, to) = (scratch.rows.at(0), x.cols as u32, x.at());
            // SAFETY: the scratch has the rows in bf16, and x is as large in f32.
            unsafe { self.launch(Kernel::WidenRows, by_row(n_rows), arguments![from, cols, to]) };
        }
        x.becomes_bf16(false);
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

impl Memory for Cuda {
    type Buffer = Buffer;
    type Matrix = Matrix;
    type Vector = Vector;
    type Kv = Kv;
    type Rope = Rope;
    type Routes = Routes;

    fn class(&self) -> DeviceClass {
        DeviceClass::Cuda
    }

    fn told(&self) -> DeviceKind {
        self.card.told()
    }

    fn mode(&self) -> Mode {
        self.mode
    }

    fn buffer(&self, rows_max: usize, cols: usize) -> Result<Buffer> {
        let too_big = || Error::Shape(format!("a buffer of {rows_max} x {cols}"));
        let size =
            |cols: usize, each: usize| rows_max.checked_mul(cols).and_then(|n| n.checked_mul(each)).ok_or_else(too_big);
        if u32::try_from(cols).is_err() || u32::try_from(rows_max).is_err() {
            return Err(too_big());
        }
        let (in_f32, in_bf16) = (size(cols, 4)?, size(padded(cols), 2)?);
        self.forget_graphs();
        {
            let mut scratch = self.scratch();
            if scratch.rows.len() < in_bf16 {
                scratch.rows = Bytes::new(&self.context, "scratch", in_bf16)?;
            }
            scratch.rows_max = scratch.rows_max.max(rows_max);
            if scratch.f8.is_made() {
                scratch.reserve_f8(&self.context)?;
            }
        }
        let bytes = Bytes::new(&self.context, "a buffer", in_f32.max(in_bf16))?;
        self.stream.fill(&bytes, 0)?;
        Ok(Buffer { bytes, rows_max, cols, is_bf16: AtomicBool::new(false) })
    }

    fn vector(&self, values: &[f32]) -> Result<Vector> {
        Ok(Vector { bytes: self.floats("a vector", values)?, len: values.len() })
    }

    fn share(&self, n_items: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
        self.host.team.run(n_items, work);
    }

    fn matrix(&self, parts: &[Stored<'_>]) -> Result<Matrix> {
        self.packer(|packer| packer.stack(parts)).and_then(|matrix| self.with_room(matrix))
    }

    fn matrix_leaves(&self, stored: Stored<'_>, leaves: &Leaves, owned: Range<u32>) -> Result<Matrix> {
        self.packer(|packer| packer.of_leaves(stored, leaves, owned)).and_then(|matrix| self.with_room(matrix))
    }

    fn kv(&self, spec: KvSpec) -> Result<Kv> {
        Kv::new(self, spec)
    }

    fn clear(&self, kv: &mut Kv, blocks: &[BlockId]) {
        if self.is_well() {
            self.note(kv.clear(&self.stream, blocks));
        }
    }

    fn read_block(&self, kv: &Kv, layer: usize, block: BlockId) -> Vec<u8> {
        let (at, n_bytes) = kv.block(layer, block);
        let mut bytes = vec![0; n_bytes];
        self.fetch(&kv.bytes, at, &mut bytes);
        bytes
    }

    fn rope(&self, cos: &[f32], sin: &[f32], half_dim: usize, style: RopeStyle) -> Result<Rope> {
        Rope::new(self, cos, sin, half_dim, style)
    }

    fn batches(&self, limits: BatchLimits) -> Result<()> {
        let n_bytes = uploads::bytes_for(limits).ok_or_else(|| Error::Shape(format!("batches of {limits:?}")))?;
        self.forget_graphs();
        *lock(&self.uploads) = Uploads::new(&self.context, n_bytes)?;
        lock(&self.graphs).fits(limits);
        lock(&self.draws).reserve(&self.context, limits.rows_max)
    }

    fn begin(&self, pass: &Pass<'_>) {
        let began = lock(&self.clock).begin(&self.stream);
        self.note(began);
        let drawn = lock(&self.draws);
        let mut uploads = lock(&self.uploads);
        let begun = uploads.begin(&self.stream, pass, drawn.entries());
        let (tokens, (pairs, n)) = (uploads.batch.tokens, uploads.batch.taken);
        if self.note(begun).is_some() && n > 0 {
            let shape = Shape { grid: [n.div_ceil(256), 1, 1], ..by_row(0) };
            // SAFETY: so many pairs of a row of the pass and an entry of what the pass before has drawn.
            unsafe { self.launch(Kernel::TakeDrawn, shape, arguments![tokens, pairs, n, drawn.on_device()]) };
        }
    }

    fn routes(&self, rows_max: usize, hidden: usize, inner: usize, routing: Routing) -> Result<Routes> {
        Routes::new(self, rows_max, hidden, inner, routing)
    }

    fn matrix_bytes(&self, matrix: &Matrix) -> usize {
        matrix.n_bytes
    }

    fn read(&self, buffer: &Buffer, rows: Range<usize>, out: &mut [f32]) {
        buffer.check(rows.end, buffer.cols);
        assert_eq!(out.len(), rows.len() * buffer.cols, "room for {rows:?} of {} columns", buffer.cols);
        let start = rows.start * buffer.row_bytes();
        match buffer.is_bf16() {
            false => self.fetch(&buffer.bytes, start, bytemuck::cast_slice_mut(out)),
            true => {
                for (row, out) in rows.zip(out.chunks_exact_mut(buffer.cols.max(1))) {
                    self.read_part(buffer, row, 0, out);
                }
            }
        }
    }

    fn write(&self, buffer: &mut Buffer, row: usize, values: &[f32]) {
        let cols = buffer.cols;
        assert!(cols > 0 && values.len().is_multiple_of(cols), "{} values in rows of {cols}", values.len());
        buffer.check(row + values.len() / cols, cols);
        self.to_f32(buffer, buffer.rows_max);
        self.note(self.place(&buffer.bytes, row * cols * 4, bytemuck::cast_slice(values)));
    }

    fn cols(&self, buffer: &Buffer) -> usize {
        buffer.cols
    }

    fn read_part(&self, buffer: &Buffer, row: usize, col: usize, out: &mut [f32]) {
        buffer.check(row + 1, buffer.cols);
        assert!(col + out.len() <= buffer.cols, "{} columns from {col} of {}", out.len(), buffer.cols);
        if !buffer.is_bf16() {
            let at = (row * buffer.cols + col) * 4;
            return self.fetch(&buffer.bytes, at, bytemuck::cast_slice_mut(out));
        }
        const PIECE: usize = 512;
        let mut halves = [0u16; PIECE];
        for (i, out) in out.chunks_mut(PIECE).enumerate() {
            let halves = &mut halves[..out.len()];
            let at = row * buffer.row_bytes() + (col + i * PIECE) * 2;
            self.fetch(&buffer.bytes, at, bytemuck::cast_slice_mut(halves));
            out.iter_mut().zip(halves).for_each(|(out, bits)| *out = bf16::from_bits(*bits).to_f32());
        }
    }

    fn write_part(&self, buffer: &mut Buffer, row: usize, col: usize, values: &[f32]) {
        buffer.check(row + 1, buffer.cols);
        assert!(col + values.len() <= buffer.cols, "{} columns from {col} of {}", values.len(), buffer.cols);
        self.to_f32(buffer, buffer.rows_max);
        self.note(self.place(&buffer.bytes, (row * buffer.cols + col) * 4, bytemuck::cast_slice(values)));
    }
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
