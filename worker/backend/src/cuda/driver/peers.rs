//! What the driver offers to devices that reach each other's memory: whether they do, and memory that other processes
//! open. Words in memory of the host that a kernel looks at while it runs.

use super::{Bytes, Card, Context, Pinned, result, said, sys};
use crate::Result;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// By which another process of this machine opens memory.
pub type Handle = [u8; 64];

impl Context {
    /// Whether kernels of this device may be let at the memory of that one.
    pub fn can_reach(&self, card: &Card) -> Result<bool> {
        let there = said("find a device", result::device::get(card.ordinal as i32))?;
        let mut can = 0;
        // SAFETY: writes one number; both devices are the driver's.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.device, there) };
        said("tell which devices it reaches", asked.result())?;
        Ok(can != 0 || there == self.device)
    }

    /// From now on its kernels reach what `other` has.
    pub fn reach(&self, other: &Context) -> Result<()> {
        if self.raw == other.raw {
            return Ok(());
        }
        self.enter()?;
        // SAFETY: both contexts are retained for as long as their owners live.
        let asked = unsafe { sys::cuCtxEnablePeerAccess(other.raw, 0) };
        match asked {
            sys::cudaError_enum::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            _ => said("reach another device", asked.result()),
        }
    }
}

impl Bytes {
    /// For another process. The driver shows it whole pieces of two MiB: memory of that size is nobody else's too.
    pub fn handle(&self) -> Result<Handle> {
        self.context.enter()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: writes the handle; the memory was allocated by `new`, and lives.
        said("show memory to others", unsafe { sys::cuIpcGetMemHandle(&mut handle, self.start) }.result())?;
        Ok(handle.reserved.map(|byte| byte.cast_unsigned()))
    }

    pub fn context(&self) -> &Context {
        &self.context
    }
}

/// Memory of another process.
#[derive(Debug)]
pub struct Opened {
    start: sys::CUdeviceptr,
    context: Arc<Context>,
}

impl Opened {
    pub fn new(context: &Arc<Context>, handle: &Handle) -> Result<Opened> {
        context.enter()?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte.cast_signed()) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut start = 0;
        // SAFETY: writes one address; the driver knows a handle that is none. `drop` closes it.
        said("open another's memory", unsafe { sys::cuIpcOpenMemHandle_v2(&mut start, handle, flags) }.result())?;
        Ok(Opened { start, context: context.clone() })
    }

    pub fn at(&self) -> u64 {
        self.start
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: opened by `new`, and closed once; who used it has waited for its kernels.
        let _gone = unsafe { self.context.enter().map(|()| sys::cuIpcCloseMemHandle(self.start)) };
    }
}

impl Pinned {
    /// For a kernel's argument: the device knows the host's addresses.
    pub fn at(&self) -> u64 {
        self.start as u64
    }

    /// Its words, which the device may write meanwhile.
    pub fn atomics(&self) -> &[AtomicU32] {
        // SAFETY: so many whole words, written by `zeroed`, aligned as all that the driver gives, while self lives;
        // and as long as that nobody has them as plain bytes.
        unsafe { std::slice::from_raw_parts(self.start.cast(), self.len / size_of::<AtomicU32>()) }
    }
}
