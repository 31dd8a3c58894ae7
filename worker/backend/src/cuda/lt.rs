//! cuBLASLt, if this machine has it: products of many rows, under `fast` only. The algorithm is chosen once for each
//! shape, and all memory is allocated when the library is opened. Knows nothing of models.

use super::driver::{Context, DeviceMemory, Stream};
use super::lock::lock;
use crate::library::{MissingFunction, RuntimeLibrary};
use crate::{Error, Result};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::{Arc, Mutex};

/// The names of packages for CUDA 13 and 12, and of the file for developers.
const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
/// The library's workspace; as much as it recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;
/// The limit of shapes with a known algorithm; beyond it, all are dropped.
const PLANS_MAX: usize = 4096;

// Numbers of the library's headers.
const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 7;
const NOT_SUPPORTED: c_int = 15;
const COMPUTE_32F: c_int = 68;
const R_32F: c_int = 0;
const R_16BF: c_int = 14;
const R_8F_E4M3: c_int = 28;
const TRANSPOSED: c_int = 1;
const DESC_TRANSA: c_int = 3;
const PREF_MAX_WORKSPACE_BYTES: c_int = 1;
const PREF_MIN_ALIGNMENT_BYTES: [c_int; 4] = [5, 6, 7, 8];

/// The alignment that the library assumes by default.
const ALIGNMENT_MAX: u32 = 256;

type LtStatus = c_int;
/// A handle or a description, as the library returns it.
type RawHandle = *mut c_void;
type CreateFn = unsafe extern "C" fn(*mut RawHandle) -> LtStatus;
type DestroyFn = unsafe extern "C" fn(RawHandle) -> LtStatus;
type SetAttributeFn = unsafe extern "C" fn(RawHandle, c_int, *const c_void, usize) -> LtStatus;
type CreateLayoutFn = unsafe extern "C" fn(*mut RawHandle, c_int, u64, u64, i64) -> LtStatus;
type Heuristic = unsafe extern "C" fn(
    RawHandle,
    RawHandle,
    RawHandle,
    RawHandle,
    RawHandle,
    RawHandle,
    RawHandle,
    c_int,
    *mut HeuristicResult,
    *mut c_int,
) -> LtStatus;
type Multiply = unsafe extern "C" fn(
    RawHandle,
    RawHandle,
    *const c_void,
    u64,
    RawHandle,
    u64,
    RawHandle,
    *const c_void,
    u64,
    RawHandle,
    u64,
    RawHandle,
    *const Algorithm,
    u64,
    usize,
    *mut c_void,
) -> LtStatus;

/// `cublasLtMatmulAlgo_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Algorithm([u64; 8]);

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct HeuristicResult {
    algorithm: Algorithm,
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

/// A version in the library's numbering: 13.1.0 is 130100.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LtVersion(usize);

impl fmt::Display for LtVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0 / 10_000, self.0 / 100 % 100, self.0 % 100)
    }
}

/// The functions that are called. They keep their library open.
struct LtApi {
    version: unsafe extern "C" fn() -> usize,
    create: CreateFn,
    destroy: DestroyFn,
    make_desc: unsafe extern "C" fn(*mut RawHandle, c_int, c_int) -> LtStatus,
    set_desc: SetAttributeFn,
    end_desc: DestroyFn,
    make_layout: CreateLayoutFn,
    end_layout: DestroyFn,
    make_preference: CreateFn,
    set_preference: SetAttributeFn,
    end_preference: DestroyFn,
    heuristic: Heuristic,
    multiply: Multiply,
    _library: RuntimeLibrary,
}

impl LtApi {
    fn find() -> Result<LtApi> {
        LtApi::load(&NAMES)
    }

    fn load(names: &[&str]) -> Result<LtApi> {
        let missing = || Error::Library(format!("the library is missing: install {}", NAMES[..2].join(" or ")));
        let library = RuntimeLibrary::first(names).ok_or_else(missing)?;
        let missing = |MissingFunction(name)| Error::Library(format!("the library of this machine has no {name}"));
        LtApi::filled(library).map_err(missing)
    }

    fn filled(library: RuntimeLibrary) -> std::result::Result<LtApi, MissingFunction> {
        // SAFETY: the functions have had these signatures since CUDA 11.
        unsafe {
            Ok(LtApi {
                version: library.function("cublasLtGetVersion")?,
                create: library.function("cublasLtCreate")?,
                destroy: library.function("cublasLtDestroy")?,
                make_desc: library.function("cublasLtMatmulDescCreate")?,
                set_desc: library.function("cublasLtMatmulDescSetAttribute")?,
                end_desc: library.function("cublasLtMatmulDescDestroy")?,
                make_layout: library.function("cublasLtMatrixLayoutCreate")?,
                end_layout: library.function("cublasLtMatrixLayoutDestroy")?,
                make_preference: library.function("cublasLtMatmulPreferenceCreate")?,
                set_preference: library.function("cublasLtMatmulPreferenceSetAttribute")?,
                end_preference: library.function("cublasLtMatmulPreferenceDestroy")?,
                heuristic: library.function("cublasLtMatmulAlgoGetHeuristic")?,
                multiply: library.function("cublasLtMatmul")?,
                _library: library,
            })
        }
    }

    /// Returns an object that the library makes, with the function that destroys it.
    fn made(
        &self,
        what: &'static str,
        end: DestroyFn,
        make: impl FnOnce(*mut RawHandle) -> LtStatus,
    ) -> Result<LtObject> {
        let mut raw = std::ptr::null_mut();
        check_status(what, make(&mut raw))?;
        Ok(LtObject { raw, end })
    }
}

/// The version of the library that a process here would load.
pub fn lt_version() -> Result<LtVersion> {
    let table = LtApi::find()?;
    // SAFETY: no arguments; the table holds the library open.
    Ok(LtVersion(unsafe { (table.version)() }))
}

fn check_status(what: &'static str, answer: LtStatus) -> Result<()> {
    match answer {
        SUCCESS => Ok(()),
        failed => Err(Error::Library(format!("the library failed to {what}: status {failed}"))),
    }
}

/// Destroyed with its owner, which the table outlives.
struct LtObject {
    raw: RawHandle,
    end: DestroyFn,
}

// SAFETY: descriptions are plain memory of the library, which each user holds.
unsafe impl Send for LtObject {}

impl Drop for LtObject {
    fn drop(&mut self) {
        // SAFETY: made by the library, and destroyed once.
        let _gone = unsafe { (self.end)(self.raw) };
    }
}

/// The type of the numbers of w and x.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum NumberType {
    Bf16,
    /// Eight bits, unscaled: the caller multiplies the result. The library only takes scales for a whole matrix, or for
    /// rows on some devices.
    F8,
}

impl NumberType {
    fn code(self) -> c_int {
        match self {
            NumberType::Bf16 => R_16BF,
            NumberType::F8 => R_8F_E4M3,
        }
    }
}

/// out = x · wᵀ. w: `[n_out, k]` and x: `[n_rows, k]`, rows `ld` apart; out: f32 `[n_rows, n_out]`, rows `ld_out`
/// apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct LtProduct {
    pub number: NumberType,
    /// n_out, n_rows, k
    pub shape: [usize; 3],
    pub w: u64,
    pub x: u64,
    pub out: u64,
    pub ld: usize,
    pub ld_out: usize,
}

/// The inputs that an algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct MatmulKey {
    number: NumberType,
    shape: [usize; 3],
    ld: usize,
    ld_out: usize,
    /// The alignments of w, x and out.
    alignments: [u32; 3],
}

impl LtProduct {
    fn key(&self) -> MatmulKey {
        let alignment = |at: u64| 1 << at.trailing_zeros().min(ALIGNMENT_MAX.trailing_zeros());
        let alignments = [self.w, self.x, self.out].map(alignment);
        MatmulKey { number: self.number, shape: self.shape, ld: self.ld, ld_out: self.ld_out, alignments }
    }

    /// Whether eight-bit numbers meet the library's requirement: sixteen bytes, from each row's start to the next.
    fn is_aligned(&self) -> bool {
        const BYTES: usize = 16;
        let [n_out, _, k] = self.shape;
        let are_rows = [n_out, k, self.ld, self.ld_out * size_of::<f32>()].iter().all(|n| n.is_multiple_of(BYTES));
        are_rows && [self.w, self.x, self.out].iter().all(|at| at.is_multiple_of(BYTES as u64))
    }
}

/// The algorithm for the products of a shape.
struct MatmulPlan {
    desc: LtObject,
    w: LtObject,
    x: LtObject,
    out: LtObject,
    algorithm: Algorithm,
}

/// The library, opened for one device.
pub(super) struct LtLibrary {
    /// None: it has no algorithm for these.
    plans: Mutex<HashMap<MatmulKey, Option<MatmulPlan>>>,
    workspace: DeviceMemory,
    handle: LtObject,
    table: LtApi,
    context: Arc<Context>,
}

// SAFETY: the library's calls may come from any thread; the handle is for one at a time, and so is a device.
unsafe impl Sync for LtLibrary {}

impl LtLibrary {
    pub fn open(context: &Arc<Context>) -> Result<LtLibrary> {
        let table = LtApi::find()?;
        context.enter()?;
        // SAFETY: writes one handle, for the context that is current.
        let handle = table.made("create a handle", table.destroy, |raw| unsafe { (table.create)(raw) })?;
        let workspace = DeviceMemory::new(context, "the workspace of cuBLASLt", WORKSPACE_BYTES)?;
        Ok(LtLibrary { plans: Mutex::default(), workspace, handle, table, context: context.clone() })
    }

    /// Whether there is an algorithm for such a product.
    pub fn has_algorithm(&self, product: &LtProduct) -> Result<bool> {
        if product.number == NumberType::F8 && !product.is_aligned() {
            return Ok(false);
        }
        let (key, mut plans) = (product.key(), lock(&self.plans));
        self.planned(&mut plans, &key)?;
        Ok(matches!(plans.get(&key), Some(Some(_))))
    }

    fn planned(&self, plans: &mut HashMap<MatmulKey, Option<MatmulPlan>>, key: &MatmulKey) -> Result<()> {
        if !plans.contains_key(key) {
            if plans.len() >= PLANS_MAX {
                plans.clear();
            }
            // Libraries without these types report it with various errors.
            let plan = match self.plan(key) {
                Err(_) if key.number == NumberType::F8 => None,
                plan => plan?,
            };
            plans.insert(*key, plan);
        }
        Ok(())
    }

    /// Launches a product in the stream. Returns false if there is no algorithm for it.
    ///
    /// # Safety
    /// All operands of the product are in this context's memory, with its sizes, until the stream has finished.
    pub unsafe fn multiply(&self, stream: &Stream, product: &LtProduct) -> Result<bool> {
        let key = product.key();
        let mut plans = lock(&self.plans);
        self.planned(&mut plans, &key)?;
        let Some(Some(plan)) = plans.get(&key) else { return Ok(false) };
        let (one, zero) = (1.0f32, 0.0f32);
        let number = |number: &f32| std::ptr::from_ref(number).cast();
        self.context.enter()?;
        // SAFETY: the descriptions are the plan's and live through the call; the rest is the caller's promise. The
        // workspace is used in the order of one stream.
        let answer = unsafe {
            (self.table.multiply)(
                self.handle.raw,
                plan.desc.raw,
                number(&one),
                product.w,
                plan.w.raw,
                product.x,
                plan.x.raw,
                number(&zero),
                product.out,
                plan.out.raw,
                product.out,
                plan.out.raw,
                &plan.algorithm,
                self.workspace.address(0),
                self.workspace.len(),
                stream.raw(),
            )
        };
        // A library without a kernel for a type may report it only here.
        if product.number == NumberType::F8 && matches!(answer, NOT_SUPPORTED | INVALID_VALUE) {
            plans.insert(key, None);
            return Ok(false);
        }
        check_status("launch a product", answer).map(|()| true)
    }

    /// The library is column-major: consecutive rows of w are its columns. So w is transposed, x is not, and out's rows
    /// are its columns.
    fn plan(&self, key: &MatmulKey) -> Result<Option<MatmulPlan>> {
        let (table, [n_out, n_rows, k]) = (&self.table, key.shape);
        // SAFETY: writes one description.
        let make = |raw| unsafe { (table.make_desc)(raw, COMPUTE_32F, R_32F) };
        let desc = table.made("describe a product", table.end_desc, make)?;
        let turned = std::ptr::from_ref(&TRANSPOSED).cast();
        // SAFETY: reads so many bytes of one number.
        check_status("transpose a matrix", unsafe {
            (table.set_desc)(desc.raw, DESC_TRANSA, turned, size_of::<c_int>())
        })?;
        let layout = |dtype, rows: usize, cols: usize, ld: usize| {
            // SAFETY: writes one description.
            let make = |raw| unsafe { (table.make_layout)(raw, dtype, rows as u64, cols as u64, ld as i64) };
            table.made("describe a matrix", table.end_layout, make)
        };
        let number = key.number.code();
        let (w, x) = (layout(number, k, n_out, key.ld)?, layout(number, k, n_rows, key.ld)?);
        let out = layout(R_32F, n_out, n_rows, key.ld_out)?;
        let found = self.search(key, [&desc, &w, &x, &out])?;
        Ok(found.map(|algorithm| MatmulPlan { desc, w, x, out, algorithm }))
    }

    /// Returns the algorithm that the library expects to be fastest in this workspace.
    fn search(&self, key: &MatmulKey, [desc, w, x, out]: [&LtObject; 4]) -> Result<Option<Algorithm>> {
        let table = &self.table;
        // SAFETY: writes one description.
        let make = |raw| unsafe { (table.make_preference)(raw) };
        let preference = table.made("create a preference", table.end_preference, make)?;
        let set = |attribute, value: *const c_void, n_bytes| {
            // SAFETY: reads so many bytes of one number, which the caller holds.
            check_status("set a preference", unsafe {
                (table.set_preference)(preference.raw, attribute, value, n_bytes)
            })
        };
        let workspace = self.workspace.len() as u64;
        set(PREF_MAX_WORKSPACE_BYTES, std::ptr::from_ref(&workspace).cast(), size_of::<u64>())?;
        let [of_w, of_x, of_out] = key.alignments;
        for (attribute, alignment) in PREF_MIN_ALIGNMENT_BYTES.into_iter().zip([of_w, of_x, of_out, of_out]) {
            set(attribute, std::ptr::from_ref(&alignment).cast(), size_of::<u32>())?;
        }
        let (mut found, mut n_found) = (HeuristicResult::default(), 0);
        self.context.enter()?;
        // SAFETY: all descriptions live through the call, which writes at most one result and its number.
        let answer = unsafe {
            (table.heuristic)(
                self.handle.raw,
                desc.raw,
                w.raw,
                x.raw,
                out.raw,
                out.raw,
                preference.raw,
                1,
                &mut found,
                &mut n_found,
            )
        };
        if answer == NOT_SUPPORTED {
            return Ok(None);
        }
        check_status("find an algorithm", answer)?;
        let is_usable = n_found > 0 && found.state == SUCCESS && found.workspace_bytes <= self.workspace.len();
        Ok(is_usable.then_some(found.algorithm))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_an_error() {
        let missing = LtApi::load(&["libcublasLt-missing.so.13"]).err().unwrap();
        assert_eq!(
            missing.to_string(),
            "cuBLASLt: the library is missing: install libcublasLt.so.13 or libcublasLt.so.12"
        );
        // A library that exists everywhere and is not cuBLASLt.
        let other = LtApi::load(&["libc.so.6"]).err().unwrap();
        assert!(other.to_string().contains("has no cublasLtGetVersion"), "{other}");
        assert_eq!(LtVersion(130_100).to_string(), "13.1.0");
    }

    #[test]
    fn results_lie_as_the_library_has_them() {
        assert_eq!((size_of::<HeuristicResult>(), std::mem::offset_of!(HeuristicResult, state)), (96, 72));
    }

    #[test]
    fn an_address_is_aligned_as_far_as_it_is() {
        let product = |w| LtProduct { number: NumberType::Bf16, shape: [1; 3], w, x: 64, out: 4, ld: 32, ld_out: 1 };
        assert_eq!(product(4096).key().alignments, [256, 64, 4]);
        assert_eq!(product(48).key().alignments, [16, 64, 4]);
    }
}
