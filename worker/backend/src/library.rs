//! Libraries that are looked for at run time: found by the names that their files go by, opened, and asked for
//! functions by name. A table of functions of our own and not a link, because the files' names have numbers in them,
//! and because a library or a function that is missing must be an error and not the end of the process. Knows none of
//! them.
//!
//! NVRTC and cuBLASLt are loaded so by `cuda`, NCCL by the crate `collective`.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// An open library. Whoever keeps a function of it keeps this, too.
#[derive(Debug)]
pub struct RuntimeLibrary(Library);

/// The library has no function of this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissingFunction(pub &'static str);

impl RuntimeLibrary {
    /// The first of these files that is where libraries are looked for, and opens.
    pub fn first(names: &[&str]) -> Option<RuntimeLibrary> {
        RuntimeLibrary::find(names, Some)
    }

    /// What `take` makes of the first of them that it does not pass over: where several versions may be there.
    pub fn find<T>(names: &[&str], take: impl FnMut(RuntimeLibrary) -> Option<T>) -> Option<T> {
        names.iter().filter_map(|name| RuntimeLibrary::open(name)).find_map(take)
    }

    fn open(name: &str) -> Option<RuntimeLibrary> {
        // SAFETY: the system's own library under its own name; its constructors are its own affair.
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
        assert!(RuntimeLibrary::first(&["libof-nobody.so.13", "libof-nobody.so"]).is_none());
        // A library that every process has.
        let libc = RuntimeLibrary::first(&["libof-nobody.so.13", "libc.so.6"]).unwrap();
        // SAFETY: as C has it.
        let abs = unsafe { libc.function::<unsafe extern "C" fn(c_int) -> c_int>("abs") }.unwrap();
        // SAFETY: any number that has a positive one.
        assert_eq!(unsafe { abs(-5) }, 5);
        // SAFETY: there is no such function.
        let missing = unsafe { libc.function::<unsafe extern "C" fn()>("of_nobody") };
        assert_eq!(missing.err(), Some(MissingFunction("of_nobody")));
        assert!(RuntimeLibrary::find(&["libc.so.6"], |_| None::<()>).is_none());
    }
}
