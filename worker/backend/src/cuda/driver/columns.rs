//! Copies of columns between the device and pinned memory of the host: the device's rows are apart, the host's are not.

use super::{PITCH_MAX, PitchedRows, Stream, check_status, result, sys};
use crate::Result;

impl Stream {
    /// Copies `n_rows` rows from the device.
    ///
    /// # Safety
    /// `to` is pinned memory. No code reads, writes or frees it before the stream has finished.
    pub unsafe fn read_columns(&self, from: PitchedRows<'_>, to: &mut [u8], n_rows: usize) -> Result<()> {
        let Some(columns) = HostColumns::new(&from, to.len(), n_rows) else { return Ok(()) };
        self.context.enter()?;
        let status = if from.pitch <= PITCH_MAX {
            let params = sys::CUDA_MEMCPY2D {
                dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
                dstHost: to.as_mut_ptr().cast(),
                dstPitch: columns.row_bytes,
                ..columns.of_device(&from)
            };
            // SAFETY: inside the allocation, which outlives the stream's work; the rest is the caller's promise.
            unsafe { sys::cuMemcpy2DAsync_v2(&params, self.raw) }.result()
        } else {
            let mut rows = to.chunks_exact_mut(columns.row_bytes).enumerate();
            // SAFETY: as above.
            rows.try_for_each(|(row, to)| unsafe { result::memcpy_dtoh_async(to, from.row_address(row), self.raw) })
        };
        check_status("copy columns from the device", status)
    }

    /// Copies `n_rows` rows to the device.
    ///
    /// # Safety
    /// `from` is pinned memory that its owner does not change or free until the stream has finished.
    pub unsafe fn write_columns(&self, to: PitchedRows<'_>, from: &[u8], n_rows: usize) -> Result<()> {
        let Some(columns) = HostColumns::new(&to, from.len(), n_rows) else { return Ok(()) };
        self.context.enter()?;
        let status = if to.pitch <= PITCH_MAX {
            let params = sys::CUDA_MEMCPY2D {
                srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
                srcHost: from.as_ptr().cast(),
                srcPitch: columns.row_bytes,
                ..columns.of_device(&to)
            };
            // SAFETY: inside the allocation, which outlives the stream's work; the rest is the caller's promise.
            unsafe { sys::cuMemcpy2DAsync_v2(&params, self.raw) }.result()
        } else {
            let mut rows = from.chunks_exact(columns.row_bytes).enumerate();
            // SAFETY: as above.
            rows.try_for_each(|(row, from)| unsafe { result::memcpy_htod_async(to.row_address(row), from, self.raw) })
        };
        check_status("copy columns to the device", status)
    }
}

/// The size of a copy.
struct HostColumns {
    row_bytes: usize,
    n_rows: usize,
}

impl HostColumns {
    /// None if there is nothing to copy.
    fn new(device: &PitchedRows<'_>, n_bytes: usize, n_rows: usize) -> Option<HostColumns> {
        let row_bytes = n_bytes.checked_div(n_rows).filter(|row_bytes| *row_bytes > 0)?;
        device.bytes.check(device.at, (n_rows - 1) * device.pitch + row_bytes);
        Some(HostColumns { row_bytes, n_rows })
    }

    /// Both sides as rows of the device; the caller replaces one.
    fn of_device(&self, rows: &PitchedRows<'_>) -> sys::CUDA_MEMCPY2D {
        let device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: device,
            srcHost: std::ptr::null(),
            srcDevice: rows.row_address(0),
            srcArray: std::ptr::null_mut(),
            srcPitch: rows.pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: device,
            dstHost: std::ptr::null_mut(),
            dstDevice: rows.row_address(0),
            dstArray: std::ptr::null_mut(),
            dstPitch: rows.pitch,
            WidthInBytes: self.row_bytes,
            Height: self.n_rows,
        }
    }
}
