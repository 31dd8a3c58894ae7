//! The driver's calls for devices that access each other's memory: whether they can, and memory that other processes
//! open. Also words in host memory that a kernel reads while it runs.

use super::{Card, Context, DeviceMemory, PinnedMemory, check_status, result, sys};
use crate::Result;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// A handle by which another process of this machine opens memory.
pub type Handle = [u8; 64];

impl Context {
    /// Whether kernels of this device can access the memory of that one.
    pub fn can_access_peer(&self, card: &Card) -> Result<bool> {
        let there = check_status("find a device", result::device::get(card.ordinal as i32))?;
        let mut can = 0;
        // SAFETY: writes one number; both devices are the driver's.
        let status = unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.device, there) };
        check_status("report peer access", status.result())?;
        Ok(can != 0 || there == self.device)
    }

    /// Gives its kernels access to the memory of `other`.
    pub fn enable_peer_access(&self, other: &Context) -> Result<()> {
        if self.raw == other.raw {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: both contexts are retained for as long as their owners live.
        let status = unsafe { sys::cuCtxEnablePeerAccess(other.raw, 0) };
        match status {
            sys::cudaError_enum::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            _ => check_status("enable peer access", status.result()),
        }
    }
}

impl DeviceMemory {
    /// Returns a handle for another process. The driver shares whole pieces of two MiB, so memory of that size shares
    /// no other data.
    pub fn handle(&self) -> Result<Handle> {
        self.context.enter()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: writes the handle; the memory was allocated by `new`, and lives.
        check_status(
            "share memory with other processes",
            unsafe { sys::cuIpcGetMemHandle(&mut handle, self.start) }.result(),
        )?;
        Ok(handle.reserved.map(|byte| byte.cast_unsigned()))
    }

    pub fn context(&self) -> &Context {
        &self.context
    }
}

/// Memory of another process.
#[derive(Debug)]
pub struct PeerMemory {
    start: sys::CUdeviceptr,
    context: Arc<Context>,
}

impl PeerMemory {
    pub fn new(context: &Arc<Context>, handle: &Handle) -> Result<PeerMemory> {
        context.enter()?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte.cast_signed()) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut start = 0;
        // SAFETY: writes one address; the driver rejects an invalid handle. `drop` closes it.
        check_status(
            "open the memory of another process",
            unsafe { sys::cuIpcOpenMemHandle_v2(&mut start, handle, flags) }.result(),
        )?;
        Ok(PeerMemory { start, context: context.clone() })
    }

    pub fn address(&self) -> u64 {
        self.start
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        // SAFETY: opened by `new`, and closed once; its users have waited for their kernels.
        let _gone = unsafe { self.context.enter().map(|()| sys::cuIpcCloseMemHandle(self.start)) };
    }
}

impl PinnedMemory {
    /// Returns the address for a kernel's argument: the device can use host addresses.
    pub fn device_address(&self) -> u64 {
        self.start as u64
    }

    /// Returns its words, which the device may write at the same time.
    pub fn atomics(&self) -> &[AtomicU32] {
        // SAFETY: whole words, written by `zeroed`, aligned as all of the driver's allocations, while self lives, and
        // as long as no code holds them as plain bytes.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.len / size_of::<AtomicU32>()) }
    }
}
