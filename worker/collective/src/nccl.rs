//! NCCL, as far as this machine has it: which version a process would find. A table of our own, filled by name, because
//! the library's file has a number in its name and a missing symbol must be an error and not the end of the process.
//!
//! Ranks on GPUs exchange through the host as all ranks do; nothing here moves numbers.

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::c_int;
use std::fmt;

/// As packages install it, and as its developers' files are called.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NcclError {
    #[error("there is no NCCL (libnccl.so.2) on this machine")]
    Missing,
    #[error("the NCCL of this machine has no {0}")]
    Symbol(&'static str),
    #[error("NCCL failed with {0}")]
    Failed(i32),
}

/// A version, as NCCL counts: 2.30.7 is 23007.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclVersion(i32);

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0 / 10_000, self.0 / 100 % 100, self.0 % 100)
    }
}

/// The functions that are called, of a library that stays open as long as they can be.
struct Table {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    _library: Library,
}

impl Table {
    fn load(names: &[&str]) -> Result<Table, NcclError> {
        let open = |name: &&str| {
            // SAFETY: the system's own library under its own name; its constructors are its own affair.
            unsafe { Library::open(Some(*name), RTLD_NOW | RTLD_LOCAL) }.ok()
        };
        let library = names.iter().find_map(open).ok_or(NcclError::Missing)?;
        // SAFETY: the function has had this signature in all versions 2.
        let get_version = unsafe { library.get(b"ncclGetVersion\0") };
        let get_version = *get_version.map_err(|_| NcclError::Symbol("ncclGetVersion"))?;
        Ok(Table { get_version, _library: library })
    }
}

/// Of the library that a process here would find.
pub fn nccl_version() -> Result<NcclVersion, NcclError> {
    let table = Table::load(&NAMES)?;
    let mut version = 0;
    // SAFETY: writes one number; the table holds the library open.
    match unsafe { (table.get_version)(&mut version) } {
        0 => Ok(NcclVersion(version)),
        failed => Err(NcclError::Failed(failed)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_an_error() {
        assert_eq!(Table::load(&["libnccl-of-nobody.so.2"]).err(), Some(NcclError::Missing));
        // A library that every process has, and that is no NCCL.
        assert_eq!(Table::load(&["libc.so.6"]).err(), Some(NcclError::Symbol("ncclGetVersion")));
        assert_eq!(NcclVersion(23007).to_string(), "2.30.7");
    }
}
