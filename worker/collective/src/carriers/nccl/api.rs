//! NCCL's functions, as far as this machine's library has them. Has no knowledge of ranks.

use backend::library::{MissingFunction, RuntimeLibrary};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// The library's file name as packages install it, and as development packages link it.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NcclError {
    #[error("this machine has no NCCL (libnccl.so.2)")]
    Missing,
    #[error("the NCCL of this machine has no {0}")]
    Symbol(&'static str),
    /// `why` has NCCL's text for the code, and its last warning.
    #[error("NCCL failed with {code}: {why}")]
    Failed { code: i32, why: String },
}

/// A version as NCCL counts it: 2.30.7 is 23007.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NcclVersion(pub(crate) i32);

impl NcclVersion {
    /// From here on a non-blocking communicator makes progress by itself. In older versions a thread can begin only one
    /// at a time, and only that thread can end it.
    pub const MIN: NcclVersion = NcclVersion(21_900);
    /// From here on several ranks may share a device.
    pub const SHARING: NcclVersion = NcclVersion(23_000);
}

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0 / 10_000, self.0 / 100 % 100, self.0 % 100)
    }
}

/// A communicator, as NCCL returns it.
pub type RawComm = *mut c_void;
type NcclStatus = c_int;

const SUCCESS: c_int = 0;
const INTERNAL_ERROR: c_int = 3;
const IN_PROGRESS: c_int = 7;
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// The id by which ranks find their communicator.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u32; 32]);

/// `ncclConfig_t` of 2.27. Older libraries read its beginning; newer ones fill in the rest by its version. Fields in
/// between are set too: 2.26 also reads fields that are newer than the version it is given.
#[repr(C)]
struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    ctas_min: c_int,
    ctas_max: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
}

impl NcclConfig {
    const VERSION: u32 = 22_700;
    const UNSAID: c_int = c_int::MIN;

    fn of(comm: CommSpec) -> NcclConfig {
        NcclConfig {
            size: size_of::<NcclConfig>(),
            magic: 0xcafe_beef,
            version: NcclConfig::VERSION,
            blocking: 0,
            cga_cluster_size: NcclConfig::UNSAID,
            ctas_min: NcclConfig::UNSAID,
            // Only a maximum is set: NCCL would reject a minimum above the default maximum.
            ctas_max: comm.blocks_max.map_or(NcclConfig::UNSAID, c_int::from),
            net_name: std::ptr::null(),
            split_share: NcclConfig::UNSAID,
            traffic_class: NcclConfig::UNSAID,
            comm_name: comm.name.as_ptr(),
            collnet_enable: NcclConfig::UNSAID,
            cta_policy: NcclConfig::UNSAID,
            shrink_share: NcclConfig::UNSAID,
            nvls_ctas: NcclConfig::UNSAID,
        }
    }
}

/// A communicator to be created.
#[derive(Clone, Copy)]
pub struct CommSpec {
    pub n_ranks: usize,
    pub id: UniqueId,
    pub rank: usize,
    /// Its name in NCCL's own log. NCCL keeps the pointer, not a copy.
    pub name: &'static CStr,
    /// The most blocks of the device that a kernel takes. Without it NCCL chooses; its environment variable takes
    /// precedence.
    pub blocks_max: Option<u16>,
}

type Move<P> = unsafe extern "C" fn(P, usize, c_int, c_int, RawComm, *mut c_void) -> NcclStatus;
type CommFn = unsafe extern "C" fn(RawComm) -> NcclStatus;
type AllReduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, RawComm, *mut c_void) -> NcclStatus;
type AllGather = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, RawComm, *mut c_void) -> NcclStatus;

/// The functions of the library that this crate calls.
pub struct NcclApi {
    get_version: unsafe extern "C" fn(*mut c_int) -> NcclStatus,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> NcclStatus,
    init: unsafe extern "C" fn(*mut RawComm, c_int, UniqueId, c_int, *mut NcclConfig) -> NcclStatus,
    async_error: unsafe extern "C" fn(RawComm, *mut c_int) -> NcclStatus,
    finalize: CommFn,
    destroy: CommFn,
    abort: CommFn,
    group_start: unsafe extern "C" fn() -> NcclStatus,
    group_end: unsafe extern "C" fn() -> NcclStatus,
    send: Move<*const c_void>,
    recv: Move<*mut c_void>,
    all_gather: AllGather,
    all_reduce: AllReduce,
    error_text: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(RawComm) -> *const c_char,
    _library: RuntimeLibrary,
}

impl NcclApi {
    /// Opens the library once and never closes it: its own threads may run on after the last call.
    pub fn find() -> Result<&'static NcclApi, NcclError> {
        static FOUND: Mutex<Option<&'static NcclApi>> = Mutex::new(None);
        let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
        match *found {
            Some(api) => Ok(api),
            None => Ok(*found.insert(Box::leak(Box::new(NcclApi::load(&NAMES)?)))),
        }
    }

    fn load(names: &[&str]) -> Result<NcclApi, NcclError> {
        let library = RuntimeLibrary::first(names).ok_or(NcclError::Missing)?;
        NcclApi::filled(library).map_err(|MissingFunction(name)| NcclError::Symbol(name))
    }

    fn filled(library: RuntimeLibrary) -> Result<NcclApi, MissingFunction> {
        // SAFETY: NCCL has never changed these functions' signatures.
        unsafe {
            Ok(NcclApi {
                get_version: library.function("ncclGetVersion")?,
                get_unique_id: library.function("ncclGetUniqueId")?,
                init: library.function("ncclCommInitRankConfig")?,
                async_error: library.function("ncclCommGetAsyncError")?,
                finalize: library.function("ncclCommFinalize")?,
                destroy: library.function("ncclCommDestroy")?,
                abort: library.function("ncclCommAbort")?,
                group_start: library.function("ncclGroupStart")?,
                group_end: library.function("ncclGroupEnd")?,
                send: library.function("ncclSend")?,
                recv: library.function("ncclRecv")?,
                all_gather: library.function("ncclAllGather")?,
                all_reduce: library.function("ncclAllReduce")?,
                error_text: library.function("ncclGetErrorString")?,
                last_error: library.function("ncclGetLastError")?,
                _library: library,
            })
        }
    }

    pub fn version(&self) -> Result<NcclVersion, NcclError> {
        let mut version = 0;
        // SAFETY: writes one number; the table holds the library open.
        self.check_status(unsafe { (self.get_version)(&mut version) }).map(|()| NcclVersion(version))
    }

    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; 32]);
        // SAFETY: writes its 128 bytes.
        self.check_status(unsafe { (self.get_unique_id)(&mut id) }).map(|()| id)
    }

    /// Begins a communicator on the calling thread's device; `state` reports when it is ready. A communicator that
    /// failed at once may exist all the same, and must be aborted.
    pub fn init(&self, of: CommSpec) -> (Option<RawComm>, Result<(), NcclError>) {
        let (mut made, mut config) = (std::ptr::null_mut(), NcclConfig::of(of));
        let CommSpec { n_ranks, id, rank, .. } = of;
        // SAFETY: writes one pointer; the configuration has its own length, and is read before this returns.
        let begun =
            self.check_status(unsafe { (self.init)(&mut made, n_ranks as c_int, id, rank as c_int, &mut config) });
        match begun {
            Ok(()) if made.is_null() => (None, Err(self.error_of(INTERNAL_ERROR))),
            begun => (Some(made).filter(|made| !made.is_null()), begun),
        }
    }

    /// Returns whether NCCL has accepted all calls so far, or an error if something has failed since.
    ///
    /// # Safety
    /// As for all below: the communicator comes from `init`, and was neither destroyed nor aborted.
    pub unsafe fn has_accepted_calls(&self, comm: RawComm) -> Result<bool, NcclError> {
        let mut state = SUCCESS;
        // SAFETY: writes one number; the rest is the caller's promise.
        self.check_status(unsafe { (self.async_error)(comm, &mut state) })?;
        self.check_status(state).map(|()| state == SUCCESS)
    }

    /// # Safety
    /// As above.
    pub unsafe fn finalize(&self, comm: RawComm) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        self.check_status(unsafe { (self.finalize)(comm) })
    }

    /// # Safety
    /// As above; it is not used again.
    pub unsafe fn destroy(&self, comm: RawComm) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        self.check_status(unsafe { (self.destroy)(comm) })
    }

    /// Ends the communicator and everything that it still does.
    ///
    /// # Safety
    /// As above; it is not used again.
    pub unsafe fn abort(&self, comm: RawComm) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        self.check_status(unsafe { (self.abort)(comm) })
    }

    /// Runs `calls` as one group whose calls progress together.
    pub fn group(&self, calls: impl FnOnce() -> Result<(), NcclError>) -> Result<(), NcclError> {
        // SAFETY: no arguments; every start has its end.
        self.check_status(unsafe { (self.group_start)() })?;
        let begun = calls();
        // SAFETY: as above.
        let ended = self.check_status(unsafe { (self.group_end)() });
        begun.and(ended)
    }

    /// # Safety
    /// As above, and `n` numbers of device memory stay valid at `from` until the stream has passed; so for all below.
    pub unsafe fn send(&self, from: u64, n: usize, to: usize, at: (RawComm, *mut c_void)) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        self.check_status(unsafe { (self.send)(from as *const c_void, n, FLOAT32, to as c_int, at.0, at.1) })
    }

    /// # Safety
    /// As above.
    pub unsafe fn recv(&self, to: u64, n: usize, from: usize, at: (RawComm, *mut c_void)) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        self.check_status(unsafe { (self.recv)(to as *mut c_void, n, FLOAT32, from as c_int, at.0, at.1) })
    }

    /// Gathers `n` numbers from each rank, in rank order, on all of them.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn all_gather(&self, from: u64, to: u64, n: usize, at: (RawComm, *mut c_void)) -> Result<(), NcclError> {
        // SAFETY: the caller's promise.
        self.check_status(unsafe {
            (self.all_gather)(from as *const c_void, to as *mut c_void, n, FLOAT32, at.0, at.1)
        })
    }
}

impl NcclApi {
    /// Replaces each rank's numbers by the sum over all ranks. NCCL adds in its own order, which is the same for all
    /// ranks.
    ///
    /// # Safety
    /// As above.
    pub unsafe fn all_reduce(&self, at: u64, n: usize, of: (RawComm, *mut c_void)) -> Result<(), NcclError> {
        // SAFETY: the caller's promise; NCCL takes one place for both.
        self.check_status(unsafe {
            (self.all_reduce)(at as *const c_void, at as *mut c_void, n, FLOAT32, SUM, of.0, of.1)
        })
    }
}

impl NcclApi {
    /// Turns a result into an error. "In progress" is not a failure.
    fn check_status(&self, answer: c_int) -> Result<(), NcclError> {
        match answer {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(self.error_of(code)),
        }
    }

    fn error_of(&self, code: c_int) -> NcclError {
        // SAFETY: static texts, for the code and for the library's last warning; no communicator is involved.
        let texts = unsafe { [(self.error_text)(code), (self.last_error)(std::ptr::null_mut())] };
        let text = |at: *const c_char| {
            // SAFETY: a text that is not null ends with a zero, and stays valid while the library is open.
            (!at.is_null()).then(|| unsafe { CStr::from_ptr(at) }.to_string_lossy().trim().to_string())
        };
        let messages: Vec<String> = texts.into_iter().filter_map(text).filter(|text| !text.is_empty()).collect();
        NcclError::Failed { code, why: messages.join("; ") }
    }
}

impl fmt::Debug for NcclApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NcclApi(..)")
    }
}

/// Returns the version of the library that a process here would load.
pub fn nccl_version() -> Result<NcclVersion, NcclError> {
    NcclApi::find()?.version()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_an_error() {
        assert_eq!(NcclApi::load(&["libnccl-missing.so.2"]).err(), Some(NcclError::Missing));
        // A library that every process has, and that is not NCCL.
        assert_eq!(NcclApi::load(&["libc.so.6"]).err(), Some(NcclError::Symbol("ncclGetVersion")));
        assert_eq!(NcclVersion(23007).to_string(), "2.30.7");
    }

    #[test]
    fn the_configuration_lies_as_nccl_has_it() {
        let (net, name) = (std::mem::offset_of!(NcclConfig, net_name), std::mem::offset_of!(NcclConfig, comm_name));
        assert_eq!(
            (net, std::mem::offset_of!(NcclConfig, traffic_class), name, size_of::<NcclConfig>()),
            (32, 44, 48, 72)
        );
        assert_eq!(size_of::<UniqueId>(), 128);
    }
}
