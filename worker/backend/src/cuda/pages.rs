//! Pages of the cache on their way between the device and the host, beside the passes.
//!
//! ```text
//! compute stream    ─ pass ─ copy of a page to pinned memory · mark ─ pass ─
//! upload stream     ─ waits for the passes begun before the fetch · copy of a page from pinned memory ─
//! ```
//! The pinned memory is allocated at load.

use super::attention::Kv;
use super::device::Cuda;
use super::driver::{Context, CudaEvent, DeviceMemory, PinnedMemory, PitchedRows, Stream};
use super::lock::lock;
use crate::{PageCopy, PageMover, Result, WritePage};
use std::sync::{Arc, Mutex};
use types::BlockId;

/// Pinned memory for the copies of a cache group that are under way.
const STAGED_BYTES: usize = 256 << 20;
/// The most copies under way.
const STAGED_MAX: usize = 1024;

/// Where the blocks of a cache are.
#[derive(Clone)]
struct BlockPlaces {
    bytes: Arc<DeviceMemory>,
    n_layers: usize,
    layer_bytes: usize,
    block_bytes: usize,
}

impl BlockPlaces {
    fn n_bytes(&self) -> usize {
        self.n_layers * self.block_bytes
    }

    /// Returns a block's bytes, a row for each layer.
    fn rows(&self, block: BlockId) -> PitchedRows<'_> {
        PitchedRows { bytes: &self.bytes, at: block.0 as usize * self.block_bytes, pitch: self.layer_bytes }
    }
}

pub(super) struct CudaPages {
    blocks: BlockPlaces,
    context: Arc<Context>,
    compute: Arc<Stream>,
    free: Arc<Mutex<Vec<StagedPage>>>,
    upload: Arc<Mutex<PageUpload>>,
}

/// Pinned memory for a page from the device.
struct StagedPage {
    pinned: PinnedMemory,
    /// Passed when the page is there.
    copied: CudaEvent,
}

impl Drop for StagedPage {
    fn drop(&mut self) {
        // A device that has failed copies nothing more.
        let _failed = self.copied.wait();
    }
}

/// A copy under way. Its memory is free again when this is dropped: a later copy is behind this one in the stream.
struct StagedCopy {
    page: Option<StagedPage>,
    free: Arc<Mutex<Vec<StagedPage>>>,
}

impl Drop for StagedCopy {
    fn drop(&mut self) {
        lock(&self.free).extend(self.page.take());
    }
}

/// The way to the device: a stream, and pinned memory for a page.
struct PageUpload {
    stream: Stream,
    pinned: PinnedMemory,
}

impl CudaPages {
    pub fn new(cuda: &Cuda, kv: &Kv) -> Result<CudaPages> {
        let (layer_bytes, block_bytes, n_layers) = kv.sizes();
        let blocks = BlockPlaces { bytes: kv.bytes.clone(), n_layers, layer_bytes, block_bytes };
        let (context, n_bytes) = (&cuda.context, blocks.n_bytes());
        let n_staged = STAGED_BYTES.checked_div(n_bytes).map_or(0, |n| n.clamp(2, STAGED_MAX));
        let pinned = || PinnedMemory::zeroed(context, "a page on its way", n_bytes);
        let staged = || Ok(StagedPage { pinned: pinned()?, copied: CudaEvent::new(context)? });
        let free = (0..n_staged).map(|_| staged()).collect::<Result<_>>()?;
        let upload = PageUpload { stream: Stream::new(context)?, pinned: pinned()? };
        Ok(CudaPages {
            blocks,
            context: context.clone(),
            compute: cuda.stream.clone(),
            free: Arc::new(Mutex::new(free)),
            upload: Arc::new(Mutex::new(upload)),
        })
    }
}

impl PageMover for CudaPages {
    fn block_bytes(&self) -> usize {
        self.blocks.block_bytes
    }

    fn copy(&self, block: BlockId) -> Option<PageCopy> {
        let page = lock(&self.free).pop()?;
        let mut copy = StagedCopy { page: Some(page), free: self.free.clone() };
        let StagedPage { pinned, copied } = copy.page.as_mut()?;
        // SAFETY: the page is read behind `copied`, written again by later copies in this stream, and not freed before.
        let begun =
            unsafe { self.compute.read_columns(self.blocks.rows(block), pinned.bytes_mut(), self.blocks.n_layers) };
        // A device that has failed reports it in its next pass.
        begun.and_then(|()| copied.record(&self.compute)).ok()?;
        Some(Box::new(move || {
            let StagedPage { pinned, copied } = copy.page.as_ref().expect("it is there until the copy is dropped");
            copied.wait()?;
            Ok(pinned.bytes().to_vec())
        }))
    }

    fn writer(&self) -> Result<WritePage> {
        let begun = CudaEvent::new(&self.context)?;
        begun.record(&self.compute)?;
        let (blocks, upload) = (self.blocks.clone(), self.upload.clone());
        Ok(Box::new(move |block, page| {
            let PageUpload { stream, pinned } = &mut *lock(&upload);
            pinned.bytes_mut().copy_from_slice(page);
            stream.wait_for(&begun)?;
            // SAFETY: the lock is held until the stream has finished.
            unsafe { stream.write_columns(blocks.rows(block), pinned.bytes(), blocks.n_layers) }?;
            stream.finish()
        }))
    }
}
