//! The CUDA driver, as far as a device needs it: loaded on demand, with a typed error where it is missing. Contexts,
//! streams, memory, modules and launches; knows nothing of tensors or kernels.
//!
//! cudarc resolves symbols at the first call and panics where the library is missing, so nothing here is called before
//! `Driver::find` has seen it.

mod columns;
mod peers;

pub(crate) use peers::{Handle, PeerMemory};

use crate::{Error, Result};
use cudarc::driver::{result, sys};
use std::ffi::{CStr, c_void};
use std::fmt;
use std::sync::Arc;
use types::DeviceKind;

/// The oldest driver that has all calls used here, in the driver's numbering: CUDA 12.8.
const VERSION_MIN: i32 = 12_080;
/// bf16 matrix instructions and asynchronous copies begin with Ampere.
const CAPABILITY_MIN: (u32, u32) = (8, 0);

/// A driver that works.
#[derive(Clone, Copy, Debug)]
pub struct Driver {
    version: i32,
}

/// One of the devices, without any state of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    pub ordinal: u32,
    pub name: String,
    /// Compute capability.
    pub capability: (u32, u32),
    pub memory_bytes: u64,
    pub multiprocessors: u32,
    /// The most shared memory that a block can get on request.
    pub shared_bytes_max: u32,
    /// Domain, bus and device: where it is in its machine.
    pub pci: [u32; 3],
}

/// Returns the driver's result; its error names the operation.
pub(crate) fn check_status<T>(what: &'static str, answer: std::result::Result<T, result::DriverError>) -> Result<T> {
    answer.map_err(|error| {
        let (text, name) = (error.error_string().unwrap_or(c"no reason given"), error.error_name().unwrap_or(c"?"));
        Error::Driver { what, why: format!("{} ({})", text.to_string_lossy(), name.to_string_lossy()) }
    })
}

/// The same for an allocation: too little memory is an error of its own. This call also reports an earlier failure on
/// the device.
fn allocated<T>(what: &'static str, n: usize, answer: std::result::Result<T, result::DriverError>) -> Result<T> {
    match answer {
        Err(error) if error.0 == sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY => Err(Error::OutOfMemory { what, n }),
        answer => check_status("allocate memory", answer),
    }
}

impl Driver {
    /// Returns the driver of this machine, if it has one that is new enough and starts.
    pub fn find() -> Result<Driver> {
        // SAFETY: opens the library and closes it again; it is the system's own, under its own name.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::NoCuda("this machine has no driver (libcuda.so.1)".into()));
        }
        let mut version = 0;
        // SAFETY: writes one number.
        let status = unsafe { sys::cuDriverGetVersion(&mut version) };
        check_status("report its version", status.result())?;
        let driver = Driver { version };
        if version < VERSION_MIN {
            return Err(Error::NoCuda(format!("the driver is for CUDA {driver}; 12.8 or later is needed")));
        }
        check_status("start", result::init()).map_err(|error| Error::NoCuda(error.to_string()))?;
        Ok(driver)
    }

    /// Returns its major release: it loads code from compilers of this release and earlier ones.
    pub(crate) fn major(self) -> i32 {
        self.version / 1000
    }

    pub fn cards(&self) -> Result<Vec<Card>> {
        let n = check_status("count the devices", result::device::get_count())?;
        (0..n).map(|ordinal| self.card(ordinal as u32)).collect()
    }

    /// Returns the free memory of a device that this process has not opened yet.
    pub fn free_bytes(self, card: &Card) -> Result<u64> {
        Context::open(self, card)?.free_bytes()
    }

    /// Returns the device with this number.
    pub fn card(&self, ordinal: u32) -> Result<Card> {
        let n = check_status("count the devices", result::device::get_count())?;
        if i64::from(ordinal) >= i64::from(n) {
            return Err(Error::NoCuda(format!("there is no device {ordinal}: the driver has {n}")));
        }
        let device = check_status("find a device", result::device::get(ordinal as i32))?;
        let number = |attribute| {
            // SAFETY: the device is one that the driver named.
            let status = unsafe { result::device::get_attribute(device, attribute) };
            check_status("describe a device", status).map(|number| u32::try_from(number).unwrap_or(0))
        };
        use sys::CUdevice_attribute as A;
        // SAFETY: as above.
        let memory = check_status("describe a device", unsafe { result::device::total_mem(device) })?;
        Ok(Card {
            ordinal,
            name: check_status("name a device", result::device::get_name(device))?,
            capability: (
                number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                number(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            memory_bytes: memory as u64,
            multiprocessors: number(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes_max: number(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            pci: [
                number(A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
                number(A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
                number(A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
            ],
        })
    }
}

impl fmt::Display for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.version / 1000, self.version % 1000 / 10)
    }
}

impl Card {
    /// Cards of one architecture agree in every bit that their kernels compute.
    pub fn gpu_architecture(&self) -> String {
        format!("sm_{}{}", self.capability.0, self.capability.1)
    }

    /// Returns whether four warps can multiply together there, as kernels for Hopper do.
    pub fn has_warpgroups(&self) -> bool {
        self.capability == (9, 0)
    }

    /// Returns the device kind that a worker reports.
    pub fn device_kind(&self) -> DeviceKind {
        DeviceKind::cuda(&self.gpu_architecture())
    }

    /// Whether the kernels can run there.
    pub fn check(&self) -> Result<()> {
        let ((major, minor), (major_min, minor_min)) = (self.capability, CAPABILITY_MIN);
        if self.capability >= CAPABILITY_MIN {
            return Ok(());
        }
        Err(Error::NoCuda(format!(
            "device {} ({}) has compute capability {major}.{minor}; {major_min}.{minor_min} or later is needed",
            self.ordinal, self.name
        )))
    }
}

/// This process's context of a device. Everything made from it holds it, so it is dropped last.
#[derive(Debug)]
pub(crate) struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: the driver's contexts may be used from any thread; each caller makes it current first.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks the data that calls of several threads share.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the primary context, which other code of this process may share.
    pub fn open(_: Driver, card: &Card) -> Result<Arc<Context>> {
        let device = check_status("find a device", result::device::get(card.ordinal as i32))?;
        // SAFETY: the device is one that the driver named; `drop` releases this reference.
        let raw = check_status("open a device", unsafe { result::primary_ctx::retain(device) })?;
        let context = Arc::new(Context { device, raw });
        context.enter()?;
        Ok(context)
    }

    /// Makes it the calling thread's. Called before each call, as libraries that are called in between leave their own.
    /// If it is already current, this takes some nanoseconds.
    pub fn enter(&self) -> Result<()> {
        // SAFETY: it is retained for as long as self lives.
        check_status("make a context current", unsafe { result::ctx::set_current(self.raw) })
    }

    pub fn free_bytes(&self) -> Result<u64> {
        self.enter()?;
        Ok(check_status("report the free memory", result::mem_get_info())?.0 as u64)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `open`. A driver that is already shutting down changes nothing.
        let _gone = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// A stream: operations in order.
#[derive(Debug)]
pub(crate) struct Stream {
    raw: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: a handle that the driver lets any thread use.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new(context: &Arc<Context>) -> Result<Stream> {
        context.enter()?;
        let raw = check_status("create a stream", result::stream::create(result::stream::StreamKind::NonBlocking))?;
        Ok(Stream { raw, context: context.clone() })
    }

    /// Waits for all operations launched on it.
    pub fn finish(&self) -> Result<()> {
        self.context.enter()?;
        // SAFETY: the stream lives as long as self.
        check_status("synchronize a stream", unsafe { result::stream::synchronize(self.raw) })
    }

    /// # Safety
    /// The function is of a module that outlives the launch, and each argument points to a value of its parameter's
    /// type. Addresses among them are of this context's memory, as large as the kernel reads and writes, until the
    /// stream has finished.
    pub unsafe fn launch(&self, function: KernelFunction, shape: LaunchShape, args: &[*const c_void]) -> Result<()> {
        let mut pointers = [std::ptr::null_mut::<c_void>(); ARGS_MAX];
        assert!(args.len() <= ARGS_MAX, "a kernel of {} arguments", args.len());
        pointers.iter_mut().zip(args).for_each(|(pointer, arg)| *pointer = arg.cast_mut());
        let three = |[x, y, z]: [u32; 3]| (x, y, z);
        self.context.enter()?;
        // SAFETY: the caller's promise; the driver reads the arguments before it returns, and does not write them.
        let status = unsafe {
            result::launch_kernel(
                function.0,
                three(shape.grid),
                three(shape.block),
                shape.shared_bytes,
                self.raw,
                &mut pointers[..args.len()],
            )
        };
        check_status("launch a kernel", status)
    }

    /// # Safety
    /// `from` is pinned memory that its owner does not change until the stream has finished.
    pub unsafe fn write(&self, to: &DeviceMemory, at: usize, from: &[u8]) -> Result<()> {
        to.check(at, from.len());
        if from.is_empty() {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: inside the allocation; the rest is the caller's promise.
        check_status("copy to the device", unsafe { result::memcpy_htod_async(to.address(at), from, self.raw) })
    }

    /// # Safety
    /// No code reads `to` or frees it before the stream has finished.
    pub unsafe fn read(&self, from: &DeviceMemory, at: usize, to: &mut [u8]) -> Result<()> {
        from.check(at, to.len());
        if to.is_empty() {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: inside the allocation; the rest is the caller's promise.
        check_status("copy from the device", unsafe { result::memcpy_dtoh_async(to, from.address(at), self.raw) })
    }

    /// Within the device.
    pub fn copy(&self, to: &DeviceMemory, to_at: usize, from: &DeviceMemory, from_at: usize, n: usize) -> Result<()> {
        to.check(to_at, n);
        from.check(from_at, n);
        if n == 0 {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: both ranges are inside their allocations, which outlive the stream's work: freeing waits for it.
        let status = unsafe { result::memcpy_dtod_async(to.address(to_at), from.address(from_at), n, self.raw) };
        check_status("copy within the device", status)
    }

    /// Copies columns of rows within the device: `n_bytes` of each row.
    pub fn copy_columns(
        &self,
        to: PitchedRows<'_>,
        from: PitchedRows<'_>,
        n_bytes: usize,
        n_rows: usize,
    ) -> Result<()> {
        if n_bytes == 0 || n_rows == 0 {
            return Ok(());
        }
        // Contiguous bytes use a plain copy: a copy of columns takes longer to begin.
        if n_rows == 1 || (to.pitch == n_bytes && from.pitch == n_bytes) {
            return self.copy(to.bytes, to.at, from.bytes, from.at, n_bytes * n_rows);
        }
        [&to, &from].iter().for_each(|side| side.bytes.check(side.at, (n_rows - 1) * side.pitch + n_bytes));
        let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        let params = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: device,
            srcHost: std::ptr::null(),
            srcDevice: from.bytes.address(from.at),
            srcArray: std::ptr::null_mut(),
            srcPitch: from.pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: device,
            dstHost: std::ptr::null_mut(),
            dstDevice: to.bytes.address(to.at),
            dstArray: std::ptr::null_mut(),
            dstPitch: to.pitch,
            WidthInBytes: n_bytes,
            Height: n_rows,
        };
        self.context.enter()?;
        // SAFETY: both ranges are inside their allocations, which outlive the stream's work: freeing waits for it.
        check_status("copy columns within the device", unsafe { sys::cuMemcpy2DAsync_v2(&params, self.raw) }.result())
    }

    /// Makes later operations wait until that point is passed. An event that was never marked counts as passed.
    pub fn wait_for(&self, event: &CudaEvent) -> Result<()> {
        self.context.enter()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live as long as their owners.
        check_status("wait for an event in a stream", unsafe { result::stream::wait_event(self.raw, event.raw, flags) })
    }

    /// Returns the handle, for a library that launches operations of its own there.
    pub fn raw(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// Sets every byte to `value`.
    pub fn fill(&self, to: &DeviceMemory, value: u8) -> Result<()> {
        self.fill_part(to, 0, to.len, value)
    }

    /// Sets `n` bytes from `at` on to `value`.
    pub fn fill_part(&self, to: &DeviceMemory, at: usize, n: usize, value: u8) -> Result<()> {
        to.check(at, n);
        if n == 0 {
            return Ok(());
        }
        self.context.enter()?;
        // SAFETY: inside the allocation.
        check_status("fill memory", unsafe { result::memset_d8_async(to.address(at), value, n, self.raw) })
    }
}

impl Stream {
    /// Records this thread's later operations here instead of executing them, until `end_record`. Until then this
    /// thread may not wait, allocate or free; other threads may.
    pub fn begin_record(&self) -> Result<()> {
        self.context.enter()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as self, and is not the legacy one.
        check_status("begin the recording of a graph", unsafe { result::stream::begin_capture(self.raw, mode) })
    }

    /// Returns everything since `begin_record`; an error if any of it could not be recorded.
    pub fn end_record(&self) -> Result<StreamRecord> {
        self.context.enter()?;
        // SAFETY: as above; a recording was begun by this thread.
        let raw = check_status("record a graph", unsafe { result::stream::end_capture(self.raw) })?;
        if raw.is_null() {
            return Err(Error::Driver { what: "record a graph", why: "the recording is empty".into() });
        }
        Ok(StreamRecord { raw, context: self.context.clone() })
    }

    /// Launches all of a record.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        self.context.enter()?;
        // SAFETY: both live as long as their owners; by its maker's promise, the memory that the record reads and
        // writes lives as long as the graph.
        check_status("launch a graph", unsafe { result::graph::launch(graph.raw, self.raw) })
    }

    /// Zeroes columns of rows: `n_bytes` of each row.
    pub fn clear_columns(&self, to: PitchedRows<'_>, n_bytes: usize, n_rows: usize) -> Result<()> {
        if n_bytes == 0 || n_rows == 0 {
            return Ok(());
        }
        to.bytes.check(to.at, (n_rows - 1) * to.pitch + n_bytes);
        self.context.enter()?;
        let at = |row: usize| to.row_address(row);
        // SAFETY: the rows are inside the allocation, which outlives the stream's work: freeing waits for it.
        let status = unsafe {
            if to.pitch <= PITCH_MAX {
                sys::cuMemsetD2D8Async(at(0), to.pitch, 0, n_bytes, n_rows, self.raw).result()
            } else {
                (0..n_rows).try_for_each(|row| result::memset_d8_async(at(row), 0, n_bytes, self.raw))
            }
        };
        check_status("clear columns of memory", status)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by `new`; the driver ends it when its work is done.
        let _gone = unsafe { self.context.enter().map(|()| result::stream::destroy(self.raw)) };
    }
}

/// The operations launched on a stream, in their order.
#[derive(Debug)]
pub(crate) struct StreamRecord {
    raw: sys::CUgraph,
    context: Arc<Context>,
}

impl StreamRecord {
    /// Returns the number of operations in it.
    pub fn n_nodes(&self) -> Result<usize> {
        self.context.enter()?;
        let mut n = 0;
        // SAFETY: the record lives; without room for nodes their number alone is written.
        let status = unsafe { sys::cuGraphGetNodes(self.raw, std::ptr::null_mut(), &mut n) };
        check_status("count the nodes of a graph", status.result()).map(|()| n)
    }

    /// Instantiates the graph, with all the device memory that it needs.
    pub fn instantiate(&self, stream: &Stream) -> Result<Graph> {
        self.context.enter()?;
        // SAFETY: the record lives; no flag puts a requirement on the caller.
        let raw = unsafe { result::graph::instantiate(self.raw, sys::CUgraphInstantiate_flags(0)) };
        let graph = Graph { raw: check_status("instantiate a graph", raw)?, context: self.context.clone() };
        // SAFETY: both live.
        check_status("upload a graph", unsafe { result::graph::upload(graph.raw, stream.raw) })?;
        Ok(graph)
    }
}

impl Drop for StreamRecord {
    fn drop(&mut self) {
        // SAFETY: returned by `end_record`, and destroyed once; graphs made of it do not need it.
        let _gone = unsafe { self.context.enter().map(|()| result::graph::destroy(self.raw)) };
    }
}

/// A record that can be launched as one.
#[derive(Debug)]
pub(crate) struct Graph {
    raw: sys::CUgraphExec,
    context: Arc<Context>,
}

// SAFETY: a handle that the driver lets any thread use, one at a time: it is behind a mutex.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `ready`, and destroyed once; the driver lets running operations finish.
        let _gone = unsafe { self.context.enter().map(|()| result::graph::exec_destroy(self.raw)) };
    }
}

/// Rows with a fixed distance in bytes.
#[derive(Clone, Copy)]
pub(crate) struct PitchedRows<'a> {
    pub bytes: &'a DeviceMemory,
    pub at: usize,
    pub pitch: usize,
}

impl PitchedRows<'_> {
    fn row_address(&self, row: usize) -> u64 {
        self.bytes.address(self.at + row * self.pitch)
    }
}

/// Devices accept no larger distance between rows.
const PITCH_MAX: usize = i32::MAX as usize;

/// No kernel here has more.
const ARGS_MAX: usize = 32;

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaunchShape {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    /// Requested at the launch.
    pub shared_bytes: u32,
}

/// A point in a stream.
#[derive(Debug)]
pub(crate) struct CudaEvent {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: a handle that the driver lets any thread use.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// An event for ordering only. Without the time a device passes it faster.
    pub fn new(context: &Arc<Context>) -> Result<CudaEvent> {
        CudaEvent::with(context, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// An event with the time, for measuring.
    pub fn timed(context: &Arc<Context>) -> Result<CudaEvent> {
        CudaEvent::with(context, sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn with(context: &Arc<Context>, flags: sys::CUevent_flags) -> Result<CudaEvent> {
        context.enter()?;
        let raw = check_status("create an event", result::event::create(flags))?;
        Ok(CudaEvent { raw, context: context.clone() })
    }

    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.context.enter()?;
        // SAFETY: both live as long as their owners.
        check_status("record an event", unsafe { result::event::record(self.raw, stream.raw) })
    }

    /// Waits until the stream has passed it. One that was never recorded is passed.
    pub fn wait(&self) -> Result<()> {
        self.context.enter()?;
        // SAFETY: it lives as long as self.
        check_status("wait for an event", unsafe { result::event::synchronize(self.raw) })
    }

    pub fn enter(&self) -> Result<()> {
        self.context.enter()
    }

    /// Whether the stream has passed it. One that was never recorded is passed.
    pub fn is_passed(&self) -> Result<bool> {
        self.context.enter()?;
        // SAFETY: it lives as long as self.
        match unsafe { result::event::query(self.raw) } {
            Err(error) if error.0 == sys::cudaError_enum::CUDA_ERROR_NOT_READY => Ok(false),
            answer => check_status("query an event", answer).map(|()| true),
        }
    }

    /// Both are passed, and have the time.
    pub fn millis_since(&self, earlier: &CudaEvent) -> Result<f32> {
        let mut millis = 0.0;
        // SAFETY: both live, and one number is written.
        let status = unsafe { sys::cuEventElapsedTime_v2(&mut millis, earlier.raw, self.raw) };
        check_status("measure the time between events", status.result())?;
        Ok(millis)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: made by `new`; the driver keeps an event while an operation waits for it.
        let _gone = unsafe { self.context.enter().map(|()| result::event::destroy(self.raw)) };
    }
}

/// Memory of the device.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    start: sys::CUdeviceptr,
    len: usize,
    context: Arc<Context>,
}

impl DeviceMemory {
    /// Allocates uninitialized memory. With length 0 it has no address.
    pub fn new(context: &Arc<Context>, what: &'static str, len: usize) -> Result<DeviceMemory> {
        let mut bytes = DeviceMemory { start: 0, len: 0, context: context.clone() };
        if len > 0 {
            context.enter()?;
            // SAFETY: `drop` frees it; nothing reads a byte that was not written.
            let start = unsafe { result::malloc_sync(len) };
            bytes.start = allocated(what, len, start)?;
            bytes.len = len;
        }
        Ok(bytes)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns an address for a kernel's argument.
    pub fn address(&self, byte: usize) -> u64 {
        self.start + byte as u64
    }

    fn check(&self, at: usize, n: usize) {
        let end = at.checked_add(n);
        assert!(end.is_some_and(|end| end <= self.len), "{n} bytes at {at} of {}", self.len);
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated by `new`, and freed once; freeing waits for work that uses it.
            let _gone = unsafe { self.context.enter().map(|()| result::free_sync(self.start)) };
        }
    }
}

/// Host memory that the device can access while the processor does something else.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    start: *mut u8,
    len: usize,
    context: Arc<Context>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for PinnedMemory {}
// SAFETY: a shared reference gives no access to the contents.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    pub fn zeroed(context: &Arc<Context>, what: &'static str, len: usize) -> Result<PinnedMemory> {
        context.enter()?;
        // SAFETY: at least a byte; `drop` frees it.
        let start = unsafe { result::malloc_host(len.max(1), 0) };
        let start = allocated(what, len, start)?.cast::<u8>();
        // SAFETY: just allocated, of this length, and not shared.
        unsafe { start.write_bytes(0, len) };
        Ok(PinnedMemory { start, len, context: context.clone() })
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: this many bytes, written by `zeroed`, while self lives.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: this many bytes, written by `zeroed`, while self lives and is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `zeroed`, and freed once.
        let _gone = unsafe { self.context.enter().map(|()| result::free_host(self.start.cast())) };
    }
}

/// Kernels on the device.
#[derive(Debug)]
pub(crate) struct Module {
    raw: sys::CUmodule,
    context: Arc<Context>,
}

// SAFETY: a handle that the driver lets any thread use.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// One kernel of a module; usable while the module lives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelFunction(sys::CUfunction);

// SAFETY: a handle that the driver lets any thread use.
unsafe impl Send for KernelFunction {}
// SAFETY: as above.
unsafe impl Sync for KernelFunction {}

impl Module {
    pub fn load(context: &Arc<Context>, cubin: &[u8]) -> Result<Module> {
        context.enter()?;
        // SAFETY: the image is whole: it comes from the compiler, or its checksum was verified.
        let raw = check_status("load a module", unsafe { result::module::load_data(cubin.as_ptr().cast()) })?;
        Ok(Module { raw, context: context.clone() })
    }

    /// Returns a kernel that may be launched with this much dynamic shared memory.
    pub fn function(&self, name: &CStr, shared_bytes: u32) -> Result<KernelFunction> {
        /// The shared memory of a block without a request.
        const SHARED_DEFAULT: u32 = 48 << 10;
        self.context.enter()?;
        // SAFETY: the module is loaded.
        let raw = check_status("find a kernel", unsafe { result::module::get_function(self.raw, name.into()) })?;
        if shared_bytes > SHARED_DEFAULT {
            let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just found.
            let status = unsafe { result::function::set_function_attribute(raw, attribute, shared_bytes as i32) };
            check_status("raise the shared memory of a kernel", status)?;
        }
        // Loaded here and not at its first launch: loading may wait for the whole context, where a peer's kernel may
        // wait for the launch.
        // SAFETY: the function was just found.
        check_status("load a kernel", unsafe { sys::cuFuncLoad(raw) }.result())?;
        Ok(KernelFunction(raw))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`, and unloaded once.
        let _gone = unsafe { self.context.enter().map(|()| result::module::unload(self.raw)) };
    }
}
