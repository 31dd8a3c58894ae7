//! Memory for tensors: zeroed, aligned to a cache line, on huge pages where the system has them.

use crate::{Error, Result};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

/// An allocation that never moves.
pub(crate) struct Pages {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: Pages owns its bytes, as a Vec does.
unsafe impl Send for Pages {}
// SAFETY: writing needs `&mut`, or a raw pointer whose user answers for it.
unsafe impl Sync for Pages {}

const LINE: usize = 64;
const HUGE_PAGE: usize = 2 << 20;

impl Pages {
    pub fn zeroed(what: &'static str, n_bytes: usize) -> Result<Pages> {
        let failed = || Error::OutOfMemory { what, n: n_bytes };
        let align = if n_bytes >= HUGE_PAGE { HUGE_PAGE } else { LINE };
        let layout = Layout::from_size_align(n_bytes.max(LINE), align).map_err(|_| failed())?;
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(failed)?;
        Ok(Pages { start, layout })
    }

    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub fn floats(&self) -> &[f32] {
        // SAFETY: aligned for f32, initialized, and any bits are an f32.
        unsafe { std::slice::from_raw_parts(self.start().cast(), self.layout.size() / 4) }
    }

    pub fn floats_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and borrowed by nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.start().cast(), self.layout.size() / 4) }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: initialized, and owned.
        unsafe { std::slice::from_raw_parts(self.start(), self.layout.size()) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated by `zeroed` with this layout.
        unsafe { dealloc(self.start(), self.layout) }
    }
}

/// A place that several threads write, each its own part.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T>(*mut T);

// SAFETY: whoever writes through it says why the parts are disjoint.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub fn new(start: *mut T) -> Shared<T> {
        Shared(start)
    }

    /// # Safety
    /// `[at, at + n)` lies in the allocation, and no other thread touches it while the slice lives.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that nobody else has this part")]
    pub unsafe fn part(&self, at: usize, n: usize) -> &mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), n) }
    }
}
