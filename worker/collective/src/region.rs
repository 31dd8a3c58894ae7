//! Memory that two ranks share, within one process or between two on one host. Has no knowledge of messages.
//!
//! A region between processes is a sealed memfd. Its maker sends process id and descriptor. The neighbour opens it
//! through `/proc` (the same user, the same process namespace) and checks that it has the sent nonce. The seal is
//! required before mapping: a neighbour that could shrink the file could kill this process with it.
//!
//! ```text
//! pair     | nonce | cursors 0 -> 1 | cursors 1 -> 0 | exits |  ..  4096 | words 0 -> 1 | words 1 -> 0 |
//! doorbell | nonce | doorbell |
//! ```

use crate::ring::{CacheLine, Cursors, Doorbell};
use crate::sync::{AtomicU32, Ordering};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::io;
use std::ptr::NonNull;

pub type Nonce = [u8; 32];

/// Offset of the words of a pair's rings.
const HEAD_BYTES: usize = 4096;

/// The beginning of a pair's region. Atomics only: both sides may write at any time.
#[repr(C)]
pub struct PairHead {
    nonce: CacheLine<[AtomicU32; 8]>,
    pub cursors: [Cursors; 2],
    /// One per side: zero while it lives, then how it ended and the rank to blame.
    pub exits: [CacheLine<AtomicU32>; 2],
}

#[repr(C)]
pub struct DoorbellHead {
    nonce: CacheLine<[AtomicU32; 8]>,
    pub doorbell: Doorbell,
}

const _: () = assert!(size_of::<PairHead>() <= HEAD_BYTES && size_of::<DoorbellHead>() <= HEAD_BYTES);

/// A mapping that never moves.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    n_bytes: usize,
}

// SAFETY: the mapping belongs to the region; its head is atomics, and its words are reached by raw pointers whose users
// document their exclusive access.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Returns memory shared by threads of this process. It is zeroed; a page takes memory once it is touched.
    pub fn anonymous(n_bytes: usize) -> io::Result<Region> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the system's choice.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), n_bytes, prot, flags)? };
        Region::mapped(base.cast(), n_bytes)
    }

    fn mapped(base: *mut u8, n_bytes: usize) -> io::Result<Region> {
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Region { base, n_bytes })
    }

    /// Returns the bytes of a pair's region with rings of `ring_words` words.
    pub fn pair_bytes(ring_words: u32) -> usize {
        HEAD_BYTES + 2 * 4 * ring_words as usize
    }

    pub fn doorbell_bytes() -> usize {
        HEAD_BYTES
    }

    pub fn pair(&self) -> &PairHead {
        // SAFETY: the mapping is longer, begins on a page, and any bits are atomics.
        unsafe { self.base.cast::<PairHead>().as_ref() }
    }

    pub fn doorbell(&self) -> &Doorbell {
        // SAFETY: as above.
        unsafe { &self.base.cast::<DoorbellHead>().as_ref().doorbell }
    }

    /// Returns the start of the ring that `side` writes.
    pub fn ring_start(&self, side: usize, ring_words: u32) -> *mut u32 {
        assert!(side < 2 && Region::pair_bytes(ring_words) <= self.n_bytes, "a ring outside of its region");
        let at = HEAD_BYTES + side * 4 * ring_words as usize;
        // SAFETY: within the mapping, as asserted.
        unsafe { self.base.add(at).cast().as_ptr() }
    }

    pub fn set_nonce(&self, nonce: &Nonce) {
        for (word, bytes) in self.pair().nonce.0.iter().zip(nonce.as_chunks::<4>().0) {
            word.store(u32::from_le_bytes(*bytes), Ordering::Relaxed);
        }
    }

    pub fn nonce(&self) -> Nonce {
        let mut nonce = [0; 32];
        for (word, bytes) in self.pair().nonce.0.iter().zip(nonce.as_chunks_mut::<4>().0) {
            *bytes = word.load(Ordering::Relaxed).to_le_bytes();
        }
        nonce
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by this region, to which no reference is left.
        unsafe {
            let _ = munmap(self.base.as_ptr().cast(), self.n_bytes);
        }
    }
}

#[cfg(target_os = "linux")]
mod sealed {
    use super::{Nonce, Region};
    use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    use std::io;
    use std::os::fd::{AsRawFd, OwnedFd};

    /// The seals that fix a mapped file's size.
    const KEPT: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

    /// A region that another process can open as long as its maker keeps the descriptor.
    #[derive(Debug)]
    pub struct RegionExport {
        fd: OwnedFd,
        pub nonce: Nonce,
    }

    impl RegionExport {
        pub fn make(n_bytes: usize, nonce: Nonce) -> io::Result<(Region, RegionExport)> {
            let fd = memfd_create("lockstep", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&fd, n_bytes as u64)?;
            fcntl_add_seals(&fd, KEPT | SealFlags::SEAL)?;
            let region = Region::file(&fd, n_bytes)?;
            region.set_nonce(&nonce);
            Ok((region, RegionExport { fd, nonce }))
        }

        /// Returns the descriptor's number in this process.
        pub fn number(&self) -> u32 {
            self.fd.as_raw_fd().unsigned_abs()
        }
    }

    impl Region {
        /// Opens descriptor `number` of process `pid`, if it is the region with this nonce.
        pub fn open(pid: u32, number: u32, n_bytes: usize, nonce: &Nonce) -> io::Result<Region> {
            let path = format!("/proc/{pid}/fd/{number}");
            // Non-blocking, because another process's descriptor may be a pipe.
            let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
            let fd = rustix::fs::open(path, flags, Mode::empty())?;
            let size = rustix::fs::fstat(&fd)?.st_size;
            if !fcntl_get_seals(&fd)?.contains(KEPT) || usize::try_from(size) != Ok(n_bytes) {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let region = Region::file(&fd, n_bytes)?;
            if region.nonce() != *nonce {
                return Err(io::ErrorKind::InvalidData.into());
            }
            Ok(region)
        }

        fn file(fd: &OwnedFd, n_bytes: usize) -> io::Result<Region> {
            let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
            // SAFETY: a new mapping at an address of the system's choice, of a file that is sealed to its size.
            let base = unsafe { mmap(std::ptr::null_mut(), n_bytes, prot, flags, fd, 0)? };
            Region::mapped(base.cast(), n_bytes)
        }
    }

    /// Returns the id of the machine's current boot.
    pub fn boot_id() -> Vec<u8> {
        std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default()
    }
}

/// On other systems processes share no memory: ranks meet over sockets.
#[cfg(not(target_os = "linux"))]
mod sealed {
    use super::{Nonce, Region};
    use std::io;

    #[derive(Debug)]
    pub struct RegionExport {
        pub nonce: Nonce,
    }

    impl RegionExport {
        pub fn make(_n_bytes: usize, _nonce: Nonce) -> io::Result<(Region, RegionExport)> {
            Err(io::ErrorKind::Unsupported.into())
        }

        pub fn number(&self) -> u32 {
            0
        }
    }

    impl Region {
        pub fn open(_pid: u32, _number: u32, _n_bytes: usize, _nonce: &Nonce) -> io::Result<Region> {
            Err(io::ErrorKind::Unsupported.into())
        }
    }

    pub fn boot_id() -> Vec<u8> {
        Vec::new()
    }
}

pub use sealed::{RegionExport, boot_id};
