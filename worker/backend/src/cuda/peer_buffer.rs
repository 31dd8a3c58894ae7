//! Memory of a rank that other ranks' devices see, and the words that host and device exchange while a sum waits.

use super::driver::{DeviceMemory, PeerMemory, PinnedMemory};
use crate::Result;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// The buffer to which a rank copies its planes for the others. It stays as long as a rank of this process may read it.
#[derive(Debug)]
pub struct PeerBuffer(pub(super) DeviceMemory);

impl PeerBuffer {
    /// Returns the address by which another thread of this process finds it.
    pub fn address(&self) -> u64 {
        self.0.address(0)
    }

    /// Returns the handle by which another process opens it.
    pub fn handle(&self) -> Result<[u8; 64]> {
        self.0.handle()
    }
}

/// The buffers of this process.
pub(super) static PEER_BUFFERS: Mutex<BTreeMap<u64, Weak<PeerBuffer>>> = Mutex::new(BTreeMap::new());

/// A rank's buffer in another device's view.
#[derive(Debug)]
pub enum MappedBuffer {
    Local(Arc<PeerBuffer>),
    Opened(OpenedBuffer),
}

/// A buffer of another process.
#[derive(Debug)]
pub struct OpenedBuffer(pub(super) PeerMemory);

impl MappedBuffer {
    pub(super) fn address(&self) -> u64 {
        match self {
            MappedBuffer::Local(buffer) => buffer.address(),
            MappedBuffer::Opened(OpenedBuffer(opened)) => opened.address(),
        }
    }
}

/// The words that host and device exchange while a sum waits.
#[derive(Debug)]
pub struct SumControl(pub(super) PinnedMemory);

impl SumControl {
    fn word(&self, idx: usize) -> &AtomicU32 {
        &self.0.atomics()[idx]
    }

    /// Ends the wait of all sums.
    pub fn stop(&self) {
        self.word(0).store(1, Ordering::Release);
    }

    /// Returns the rank that a sum has waited for in vain.
    pub fn missing(&self) -> Option<usize> {
        (self.word(1).load(Ordering::Acquire) as usize).checked_sub(1)
    }
}
