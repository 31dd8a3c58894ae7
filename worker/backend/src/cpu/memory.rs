//! Memory for tensors: zeroed, aligned to a cache line, on huge pages where the system has them.

use crate::{Error, Result};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::ptr::NonNull;

/// An allocation that never moves.
pub(crate) struct HostMemory {
    start: NonNull<u8>,
    n_bytes: usize,
    source: HostMemorySource,
}

enum HostMemorySource {
    Heap(Layout),
    /// The system zeroes a page when a thread first touches it.
    #[cfg(target_os = "linux")]
    Map {
        base: *mut u8,
        len: usize,
    },
}

// SAFETY: Pages owns its bytes, as a Vec does.
unsafe impl Send for HostMemory {}
// SAFETY: writing needs `&mut`, or a raw pointer whose user ensures exclusive access.
unsafe impl Sync for HostMemory {}

const LINE: usize = 64;
const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;

impl HostMemory {
    pub fn zeroed(what: &'static str, n_bytes: usize) -> Result<HostMemory> {
        let pages = if n_bytes < HUGE_PAGE { HostMemory::heap(n_bytes) } else { HostMemory::large(n_bytes) };
        pages.ok_or(Error::OutOfMemory { what, n: n_bytes })
    }

    fn heap(n_bytes: usize) -> Option<HostMemory> {
        let n_bytes = n_bytes.max(1).checked_next_multiple_of(LINE)?;
        let layout = Layout::from_size_align(n_bytes, LINE).ok()?;
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(HostMemory { start, n_bytes, source: HostMemorySource::Heap(layout) })
    }

    #[cfg(not(target_os = "linux"))]
    fn large(n_bytes: usize) -> Option<HostMemory> {
        HostMemory::heap(n_bytes)
    }

    /// Allocates on huge pages if the system provides them. A huge page is aligned to its size, hence the surplus.
    #[cfg(target_os = "linux")]
    fn large(n_bytes: usize) -> Option<HostMemory> {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
        let n_bytes = n_bytes.checked_next_multiple_of(HUGE_PAGE)?;
        let len = n_bytes.checked_add(HUGE_PAGE)?;
        // SAFETY: a new private mapping at an address of the system's choice.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).ok()?
        };
        let base: *mut u8 = base.cast();
        // SAFETY: the aligned start and `n_bytes` after it lie in the mapping. Advice changes no contents.
        let start = unsafe {
            let start = base.add(base.align_offset(HUGE_PAGE));
            let _ = madvise(start.cast(), n_bytes, Advice::LinuxHugepage);
            start
        };
        Some(HostMemory { start: NonNull::new(start)?, n_bytes, source: HostMemorySource::Map { base, len } })
    }

    /// Has the system allocate these bytes now, not when a thread first touches them. Contents stay as they are, even
    /// under concurrent reads and writes. A system without this call allocates them later.
    pub fn populate(&self, bytes: Range<usize>) -> std::io::Result<()> {
        match self.source {
            HostMemorySource::Heap(_) => Ok(()),
            #[cfg(target_os = "linux")]
            HostMemorySource::Map { .. } => {
                use rustix::{io::Errno, mm::Advice};
                let (start, end) = (bytes.start / PAGE * PAGE, bytes.end.next_multiple_of(PAGE).min(self.n_bytes));
                // SAFETY: whole pages of this mapping, whose contents the advice does not change.
                let given = unsafe {
                    let at = self.start().add(start).cast();
                    rustix::mm::madvise(at, end.saturating_sub(start), Advice::LinuxPopulateWrite)
                };
                match given {
                    Err(Errno::INVAL | Errno::NOSYS) => Ok(()),
                    given => Ok(given?),
                }
            }
        }
    }

    /// Returns the whole pages among these bytes to the system; they read as zeros from now on.
    ///
    /// # Safety
    /// Nothing reads or writes these bytes meanwhile.
    pub unsafe fn release(&self, bytes: Range<usize>) -> std::io::Result<()> {
        match self.source {
            HostMemorySource::Heap(_) => Ok(()),
            #[cfg(target_os = "linux")]
            HostMemorySource::Map { .. } => {
                let (start, end) = (bytes.start.next_multiple_of(PAGE), bytes.end.min(self.n_bytes) / PAGE * PAGE);
                // SAFETY: whole pages of this mapping, which are unused by the caller's promise.
                unsafe {
                    let at = self.start().add(start).cast();
                    let advice = rustix::mm::Advice::LinuxDontNeed;
                    Ok(rustix::mm::madvise(at, end.saturating_sub(start), advice)?)
                }
            }
        }
    }

    /// Whether the system allocates these bytes only when they are touched.
    pub fn is_lazy(&self) -> bool {
        !matches!(self.source, HostMemorySource::Heap(_))
    }

    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub fn floats(&self) -> &[f32] {
        // SAFETY: aligned for f32, initialized, and any bits are an f32.
        unsafe { std::slice::from_raw_parts(self.start().cast(), self.n_bytes / 4) }
    }

    pub fn floats_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and borrowed by no other code.
        unsafe { std::slice::from_raw_parts_mut(self.start().cast(), self.n_bytes / 4) }
    }

    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: initialized, and owned.
        unsafe { std::slice::from_raw_parts(self.start(), self.n_bytes) }
    }
}

impl AsRef<[u8]> for HostMemory {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        match self.source {
            // SAFETY: allocated by `heap` with this layout.
            HostMemorySource::Heap(layout) => unsafe { dealloc(self.start(), layout) },
            #[cfg(target_os = "linux")]
            // SAFETY: mapped by `large`, and no reference to it is left.
            HostMemorySource::Map { base, len } => unsafe {
                let _ = rustix::mm::munmap(base.cast(), len);
            },
        }
    }
}

/// Memory that several threads write, each its own part.
#[derive(Clone, Copy)]
pub(crate) struct SharedPtr<T>(*mut T);

// SAFETY: every use of the pointer has a comment on why the parts are disjoint.
unsafe impl<T: Send> Send for SharedPtr<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedPtr<T> {}

impl<T> SharedPtr<T> {
    pub fn new(start: *mut T) -> SharedPtr<T> {
        SharedPtr(start)
    }

    /// # Safety
    /// `[at, at + n)` lies in the allocation, and no other thread touches it while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "the caller promises exclusive access to this part")]
    pub unsafe fn part(&self, at: usize, n: usize) -> &mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), n) }
    }
}
