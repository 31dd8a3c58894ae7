//! A global allocator that counts the whole process's allocations, installed by including this file.
#![allow(unsafe_code, reason = "an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static N_ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static N_HERE: Cell<usize> = const { Cell::new(0) };
}

/// Allocations of this thread so far.
#[allow(dead_code, reason = "where other threads may allocate")]
pub fn n_allocations_here() -> usize {
    N_HERE.with(Cell::get)
}

/// Allocations so far.
pub fn n_allocations() -> usize {
    N_ALLOCATIONS.load(Ordering::Relaxed)
}

// SAFETY: passes every call on.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        N_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        _ = N_HERE.try_with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;
