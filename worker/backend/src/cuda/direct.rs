//! The device in the view of a library that moves memory between devices: addresses of numbers, ordered streams,
//! columns of rows, and the sum of planes. Knows nothing of other devices, or of the library.

use super::buffer::Buffer;
use super::device::Cuda;
use super::driver::{CudaEvent, DeviceMemory, LaunchShape, PitchedRows, Stream};
use super::kernels::{arguments, by_row};
use super::table::Kernel;
use crate::Result;
use std::ffi::c_void;
use std::ops::Range;

const FLOAT: usize = 4;

/// Numbers on the device, from an address on.
#[derive(Clone, Copy)]
pub struct DeviceFloats<'a> {
    bytes: &'a DeviceMemory,
    start: usize,
    len: usize,
}

impl<'a> DeviceFloats<'a> {
    /// Returns a part of these.
    pub fn part(self, range: Range<usize>) -> DeviceFloats<'a> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} numbers", self.len);
        DeviceFloats { start: self.start + range.start, len: range.len(), ..self }
    }

    pub fn len(self) -> usize {
        self.len
    }

    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    pub fn address(self) -> u64 {
        self.bytes.address(self.start * FLOAT)
    }
}

/// Rows of numbers with a fixed distance.
#[derive(Clone, Copy)]
pub struct DeviceColumns<'a> {
    pub floats: DeviceFloats<'a>,
    pub stride: usize,
}

impl DeviceColumns<'_> {
    fn pitched(&self) -> PitchedRows<'_> {
        PitchedRows { bytes: self.floats.bytes, at: self.floats.start * FLOAT, pitch: self.stride * FLOAT }
    }
}

/// Memory for numbers in transfer.
pub struct TransferBuffer(DeviceMemory);

impl TransferBuffer {
    pub fn floats(&self) -> DeviceFloats<'_> {
        DeviceFloats { bytes: &self.0, start: 0, len: self.0.len() / FLOAT }
    }
}

/// Words that stay on the device.
pub struct DeviceWords(DeviceMemory);

/// A point in a stream, which another thread may query.
#[derive(Debug)]
pub struct StreamMark(CudaEvent);

impl StreamMark {
    pub fn is_passed(&self) -> Result<bool> {
        self.0.is_passed()
    }

    /// Makes its device the calling thread's.
    pub fn enter(&self) -> Result<()> {
        self.0.enter()
    }
}

/// A stream beside the one that computes.
pub struct SideStream {
    stream: Stream,
    /// The computations whose results this stream reads or overwrites.
    computed: CudaEvent,
}

impl SideStream {
    pub fn raw(&self) -> *mut c_void {
        self.stream.raw()
    }

    /// Operations launched here wait for everything computed before the last `Cuda::hand_over`.
    pub fn follow(&self) -> Result<()> {
        self.stream.wait_for(&self.computed)
    }

    pub fn mark(&self, mark: &StreamMark) -> Result<()> {
        mark.0.record(&self.stream)
    }
}

impl Cuda {
    /// Makes the device the calling thread's, as libraries require.
    pub fn enter(&self) -> Result<()> {
        self.context.enter()
    }

    /// Returns the stream that computes.
    pub fn raw_stream(&self) -> *mut c_void {
        self.stream.raw()
    }

    pub fn transfer_buffer(&self, n_floats: usize) -> Result<TransferBuffer> {
        self.forget_graphs();
        Ok(TransferBuffer(DeviceMemory::new(&self.context, "a transfer buffer", n_floats * FLOAT)?))
    }

    pub fn upload_words(&self, bytes: &[u8]) -> Result<DeviceWords> {
        let words = DeviceMemory::new(&self.context, "words", bytes.len())?;
        self.upload_bytes(&words, 0, bytes)?;
        Ok(DeviceWords(words))
    }

    pub fn new_mark(&self) -> Result<StreamMark> {
        Ok(StreamMark(CudaEvent::new(&self.context)?))
    }

    /// Marks the point behind everything launched so far. During a recording nothing is marked: the code that launches
    /// the record marks it then.
    pub fn mark(&self, mark: &StreamMark) -> Result<()> {
        if self.is_recording() { Ok(()) } else { mark.0.record(&self.stream) }
    }

    pub fn side(&self) -> Result<SideStream> {
        Ok(SideStream { stream: Stream::new(&self.context)?, computed: CudaEvent::new(&self.context)? })
    }

    /// Lets the other stream follow everything computed so far.
    pub fn hand_over(&self, side: &SideStream) -> Result<()> {
        side.computed.record(&self.stream)
    }

    /// Makes later computations wait for that point.
    pub fn wait_for_mark(&self, mark: &StreamMark) -> Result<()> {
        self.stream.wait_for(&mark.0)
    }

    /// Returns the first rows of a buffer, as f32.
    pub fn floats_of<'a>(&self, buffer: &'a Buffer, n_rows: usize) -> DeviceFloats<'a> {
        buffer.check(n_rows, buffer.cols);
        self.to_f32(buffer, n_rows);
        DeviceFloats { bytes: &buffer.bytes, start: 0, len: n_rows * buffer.cols }
    }

    /// Begins to copy `n_cols` columns of `n_rows` rows.
    pub fn copy_columns(
        &self,
        to: DeviceColumns<'_>,
        from: DeviceColumns<'_>,
        n_cols: usize,
        n_rows: usize,
    ) -> Result<()> {
        self.stream.copy_columns(to.pitched(), from.pitched(), n_cols * FLOAT, n_rows)
    }

    /// Zeroes the numbers.
    pub fn zero(&self, floats: DeviceFloats<'_>) -> Result<()> {
        self.stream.fill_part(floats.bytes, floats.start * FLOAT, floats.len * FLOAT, 0)
    }

    /// out = the sum of planes by the tree in `merges`: one byte for each plane.
    pub fn fold_planes(&self, planes: DeviceFloats<'_>, n_planes: usize, merges: &DeviceWords, out: DeviceFloats<'_>) {
        assert!(planes.len >= n_planes * out.len && merges.0.len() >= n_planes, "planes of {} numbers", out.len);
        if out.is_empty() {
            return;
        }
        let (from, n, to, merges) = (planes.address(), out.len as u64, out.address(), merges.0.address(0));
        let shape = LaunchShape { grid: [out.len.div_ceil(256) as u32, 1, 1], ..by_row(0) };
        // SAFETY: so many planes of so many numbers, a merge for each, and room for the sum.
        unsafe { self.launch(Kernel::FoldPlanes, shape, arguments![from, n_planes as u32, merges, n, to]) };
    }

    /// out[i] = row `rows[i]` of x, `n_cols` numbers each.
    pub fn gather_floats(&self, x: DeviceFloats<'_>, rows: &[u32], n_cols: usize, out: DeviceFloats<'_>) {
        let fits = rows.iter().all(|row| (*row as usize + 1) * n_cols <= x.len) && rows.len() * n_cols <= out.len;
        assert!(fits, "{} rows of {n_cols} of {} numbers to {}", rows.len(), x.len, out.len);
        if rows.is_empty() || n_cols == 0 {
            return;
        }
        let (x, rows_at, n_words, to) = (x.address(), self.upload(rows), n_cols as u32, out.address());
        // SAFETY: every row is in x, and out has room for so many.
        unsafe { self.launch(Kernel::GatherRows, by_row(rows.len()), arguments![x, rows_at, n_words, to]) };
    }
}
