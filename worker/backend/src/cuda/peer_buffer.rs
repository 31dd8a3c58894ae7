//! Memory of a rank that other ranks' devices see, and the words by which host and device speak while a sum waits.

use super::driver::{Bytes, Opened, Pinned};
use crate::Result;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// Where a rank copies its planes for the others. It stays as long as somebody of this process may look.
#[derive(Debug)]
pub struct PeerBuffer(pub(super) Bytes);

impl PeerBuffer {
    /// By which another thread of this process finds it.
    pub fn address(&self) -> u64 {
        self.0.at(0)
    }

    /// By which another process does.
    pub fn handle(&self) -> Result<[u8; 64]> {
        self.0.handle()
    }
}

/// Those of this process.
pub(super) static PEER_BUFFERS: Mutex<BTreeMap<u64, Weak<PeerBuffer>>> = Mutex::new(BTreeMap::new());

/// A rank's buffer, as another's device sees it.
#[derive(Debug)]
pub enum MappedBuffer {
    Local(Arc<PeerBuffer>),
    Opened(OpenedBuffer),
}

/// Of another process.
#[derive(Debug)]
pub struct OpenedBuffer(pub(super) Opened);

impl MappedBuffer {
    pub(super) fn at(&self) -> u64 {
        match self {
            MappedBuffer::Local(buffer) => buffer.address(),
            MappedBuffer::Opened(OpenedBuffer(opened)) => opened.at(),
        }
    }
}

/// What host and device tell each other while a sum waits.
#[derive(Debug)]
pub struct SumControl(pub(super) Pinned);

impl SumControl {
    fn word(&self, idx: usize) -> &AtomicU32 {
        &self.0.atomics()[idx]
    }

    /// No sum waits any longer.
    pub fn stop(&self) {
        self.word(0).store(1, Ordering::Release);
    }

    /// The rank that a sum has waited for in vain.
    pub fn missing(&self) -> Option<usize> {
        (self.word(1).load(Ordering::Acquire) as usize).checked_sub(1)
    }
}
