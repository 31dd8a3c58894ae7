//! Libraries loaded at run time: found by file name, opened, and searched for functions by name. Not linked, because
//! file names contain version numbers, and because a missing library or function must be an error and not end the
//! process. Knows none of the libraries.
//!
//! `cuda` loads NVRTC and cuBLASLt this way, the crate `collective` NCCL.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// An open library. It must live as long as any function taken from it.
#[derive(Debug)]
pub struct RuntimeLibrary(Library);

/// The library has no function of this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingFunction(pub &'static str);

impl RuntimeLibrary {
    /// Opens the first of these files that is found.
    pub fn first(names: &[&str]) -> Option<RuntimeLibrary> {
        RuntimeLibrary::find(names, Some)
    }

    /// Opens the files in turn and returns the first result of `take`: for libraries that come in several versions.
    pub fn find<T>(names: &[&str], take: impl FnMut(RuntimeLibrary) -> Option<T>) -> Option<T> {
        names.iter().filter_map(|name| RuntimeLibrary::open(name)).find_map(take)
    }

    fn open(name: &str) -> Option<RuntimeLibrary> {
        // SAFETY: the system's own library under its own name; its constructors are trusted.
        unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.ok().map(RuntimeLibrary)
    }

    /// # Safety
    /// `F` is a function pointer, of the signature that the function has in every version that may be found.
    pub unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F, MissingFunction> {
        // SAFETY: the caller's promise.
        unsafe { self.0.get::<F>(name.as_bytes()) }.map(|found| *found).map_err(|_| MissingFunction(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::c_int;

    #[test]
    fn the_first_that_is_there_is_taken() {
        assert!(RuntimeLibrary::first(&["libmissing.so.13", "libmissing.so"]).is_none());
        // A library that exists everywhere.
        let libc = RuntimeLibrary::first(&["libmissing.so.13", "libc.so.6"]).unwrap();
        // SAFETY: C's signature.
        let abs = unsafe { libc.function::<unsafe extern "C" fn(c_int) -> c_int>("abs") }.unwrap();
        // SAFETY: the argument has a positive counterpart.
        assert_eq!(unsafe { abs(-5) }, 5);
        // SAFETY: there is no such function.
        let missing = unsafe { libc.function::<unsafe extern "C" fn()>("of_nobody") };
        assert_eq!(missing.err(), Some(MissingFunction("of_nobody")));
        assert!(RuntimeLibrary::find(&["libc.so.6"], |_| None::<()>).is_none());
    }
}
