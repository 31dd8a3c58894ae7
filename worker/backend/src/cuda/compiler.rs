//! Compiles kernels from source to a cubin of one architecture with NVRTC, and caches cubins between starts. Knows
//! nothing of devices but their architecture, and of kernels only their text.
//!
//! A driver loads code from compilers of its own major release or an earlier one: code of CUDA 13 needs a driver of
//! CUDA 13. Machines may have several compilers, so the newest that the driver supports is chosen.

use super::driver::Driver;
use crate::library::{MissingFunction, RuntimeLibrary};
use crate::{Error, Result};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The architecture for which code is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arch(pub u32, pub u32);

impl fmt::Display for Arch {
    /// Writes the form with instructions that only this architecture has, where there is one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Arch(major, minor) = *self;
        let own = if (major, minor) == (9, 0) || major >= 10 { "a" } else { "" };
        write!(f, "sm_{major}{minor}{own}")
    }
}

/// A text, and the name by which others include it.
#[derive(Clone, Copy, Debug)]
pub struct SourceText {
    pub name: &'static str,
    pub text: &'static str,
}

/// One translation unit and what it includes.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    pub main: SourceText,
    pub headers: &'static [SourceText],
    pub options: &'static [&'static str],
}

/// The names of packages for CUDA 13 and 12, and of the file for developers.
const NAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

const SUCCESS: c_int = 0;
/// A program, as the library returns it.
type RawProgram = *mut c_void;
type Size = unsafe extern "C" fn(RawProgram, *mut usize) -> c_int;
type TextFn = unsafe extern "C" fn(RawProgram, *mut c_char) -> c_int;
type Create = unsafe extern "C" fn(
    *mut RawProgram,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;

/// The functions that are called. They keep their library open.
#[derive(Debug)]
struct NvrtcApi {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    create: Create,
    destroy: unsafe extern "C" fn(*mut RawProgram) -> c_int,
    compile: unsafe extern "C" fn(RawProgram, c_int, *const *const c_char) -> c_int,
    log_size: Size,
    log: TextFn,
    cubin_size: Size,
    cubin: TextFn,
    _library: RuntimeLibrary,
}

impl NvrtcApi {
    fn of(library: RuntimeLibrary) -> Result<NvrtcApi> {
        let missing = |MissingFunction(name)| Error::Compiler(format!("the NVRTC of this machine has no {name}"));
        NvrtcApi::resolve(library).map_err(missing)
    }

    fn resolve(library: RuntimeLibrary) -> std::result::Result<NvrtcApi, MissingFunction> {
        // SAFETY: the functions have had these signatures since CUDA 11.1.
        unsafe {
            Ok(NvrtcApi {
                version: library.function("nvrtcVersion")?,
                create: library.function("nvrtcCreateProgram")?,
                destroy: library.function("nvrtcDestroyProgram")?,
                compile: library.function("nvrtcCompileProgram")?,
                log_size: library.function("nvrtcGetProgramLogSize")?,
                log: library.function("nvrtcGetProgramLog")?,
                cubin_size: library.function("nvrtcGetCUBINSize")?,
                cubin: library.function("nvrtcGetCUBIN")?,
                _library: library,
            })
        }
    }
}

/// A compiler of this machine.
#[derive(Debug)]
pub struct Compiler {
    table: NvrtcApi,
    version: (c_int, c_int),
}

impl Compiler {
    /// Returns the newest compiler.
    pub fn find() -> Result<Compiler> {
        Compiler::newest(&NAMES, c_int::MAX).map_err(|_| missing())
    }

    /// Returns the newest compiler whose code this driver loads.
    pub fn find_for(driver: Driver) -> Result<Compiler> {
        let major = driver.major();
        Compiler::newest(&NAMES, major).map_err(|later| match later {
            None => missing(),
            Some(found) => Error::Compiler(format!(
                "this driver, for CUDA {driver}, does not load code of NVRTC {found}: install NVRTC {major} \
                 (libnvrtc.so.{major}), or a newer driver"
            )),
        })
    }

    /// Returns the newest of at most this major release. If there are only later ones, the error names the first.
    fn newest(names: &[&str], major_max: c_int) -> std::result::Result<Compiler, Option<String>> {
        let mut later = None;
        let take = |library| {
            let compiler = NvrtcApi::of(library).and_then(Compiler::of).ok()?;
            if compiler.version.0 <= major_max {
                return Some(compiler);
            }
            later.get_or_insert_with(|| compiler.to_string());
            None
        };
        RuntimeLibrary::find(names, take).ok_or(later)
    }

    fn of(table: NvrtcApi) -> Result<Compiler> {
        let mut version = (0, 0);
        // SAFETY: writes two numbers.
        check_answer("report its version", unsafe { (table.version)(&mut version.0, &mut version.1) })?;
        Ok(Compiler { table, version })
    }

    /// Returns the cubin of `program`, from `cache` if it is there and whole.
    pub fn cubin(&self, program: &Program, arch: Arch, cache: Option<&Path>) -> Result<Vec<u8>> {
        let Some(cache) = cache else { return self.compile(program, arch) };
        let kept = CachedCubin { path: cache.join(format!("{}.cubin", self.key(program, arch))) };
        if let Some(cubin) = kept.read() {
            return Ok(cubin);
        }
        let cubin = self.compile(program, arch)?;
        // Without a cache the next start only takes a second longer.
        let _uncached = kept.write(&cubin);
        Ok(cubin)
    }

    /// Returns a text of everything that the code depends on.
    fn key(&self, program: &Program, arch: Arch) -> String {
        let mut hasher = blake3::Hasher::new_derive_key("lockstep 2026 compiled kernels");
        let version = format!("{}.{}", self.version.0, self.version.1);
        let texts = std::iter::once(&program.main).chain(program.headers).flat_map(|text| [text.name, text.text]);
        let rest = program.options.iter().copied();
        let mut add = |part: &str| {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        };
        add(&version);
        add(&arch.to_string());
        texts.chain(rest).for_each(add);
        hasher.finalize().to_hex()[..32].to_owned()
    }

    pub fn compile(&self, program: &Program, arch: Arch) -> Result<Vec<u8>> {
        let options = program.options.iter().map(|option| (*option).to_owned());
        let options = options.chain([format!("--gpu-architecture={arch}")]).map(to_c_string);
        let options = options.collect::<Result<Vec<_>>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let unit = NvrtcProgram::new(&self.table, program)?;
        // SAFETY: the program was made, and the options are strings that live until the call returns.
        let compiled = unsafe { (self.table.compile)(unit.raw, pointers.len() as c_int, pointers.as_ptr()) };
        if compiled != SUCCESS {
            return Err(Error::Compiler(format!("{} for {arch}: {}", program.main.name, unit.log())));
        }
        unit.cubin()
    }
}

impl fmt::Display for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.version.0, self.version.1)
    }
}

fn check_answer(what: &str, answer: c_int) -> Result<()> {
    match answer {
        SUCCESS => Ok(()),
        failed => Err(Error::Compiler(format!("NVRTC failed to {what}: status {failed}"))),
    }
}

fn to_c_string(text: impl Into<Vec<u8>>) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Compiler("a source or an option contains a NUL byte".into()))
}

fn missing() -> Error {
    let names = NAMES[..2].join(" or ");
    Error::Compiler(format!("NVRTC is missing: install {names} in the library search path"))
}

/// NVRTC's handle of a program.
struct NvrtcProgram<'a> {
    table: &'a NvrtcApi,
    raw: RawProgram,
}

impl<'a> NvrtcProgram<'a> {
    fn new(table: &'a NvrtcApi, program: &Program) -> Result<NvrtcProgram<'a>> {
        let (text, name) = (to_c_string(program.main.text)?, to_c_string(program.main.name)?);
        let headers = |of: fn(&SourceText) -> &'static str| {
            program.headers.iter().map(|header| to_c_string(of(header))).collect::<Result<Vec<_>>>()
        };
        let (texts, names) = (headers(|header| header.text)?, headers(|header| header.name)?);
        let pointers = |strings: &[CString]| strings.iter().map(|string| string.as_ptr()).collect::<Vec<_>>();
        let (text_pointers, name_pointers) = (pointers(&texts), pointers(&names));
        let mut raw = std::ptr::null_mut();
        // SAFETY: strings that live until the call returns, by which time NVRTC has copied them.
        let made = unsafe {
            (table.create)(
                &mut raw,
                text.as_ptr(),
                name.as_ptr(),
                texts.len() as c_int,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        check_answer("create a program", made)?;
        Ok(NvrtcProgram { table, raw })
    }

    /// Returns the compiler's messages.
    fn log(&self) -> String {
        let mut n = 0;
        // SAFETY: writes one number.
        if check_answer("report the size of its log", unsafe { (self.table.log_size)(self.raw, &mut n) }).is_err() {
            return "no reason given".into();
        }
        let mut log = vec![0u8; n + 1];
        // SAFETY: there is room for the size that it reported.
        let status = unsafe { (self.table.log)(self.raw, log.as_mut_ptr().cast()) };
        match (check_answer("return its log", status), CStr::from_bytes_until_nul(&log)) {
            (Ok(()), Ok(log)) => log.to_string_lossy().trim().to_owned(),
            _ => "no reason given".into(),
        }
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut n = 0;
        // SAFETY: writes one number.
        check_answer("report the size of the code", unsafe { (self.table.cubin_size)(self.raw, &mut n) })?;
        let mut cubin = vec![0u8; n];
        // SAFETY: there is room for the size that it reported.
        check_answer("return the code", unsafe { (self.table.cubin)(self.raw, cubin.as_mut_ptr().cast()) })?;
        match n {
            0 => Err(Error::Compiler("NVRTC made no code".into())),
            _ => Ok(cubin),
        }
    }
}

impl Drop for NvrtcProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and destroyed once.
        let _gone = unsafe { (self.table.destroy)(&mut self.raw) };
    }
}

/// A cubin on disk: its checksum, then its bytes. A truncated or changed file counts as absent.
struct CachedCubin {
    path: PathBuf,
}

const CHECKSUM_BYTES: usize = 32;

impl CachedCubin {
    fn read(&self) -> Option<Vec<u8>> {
        let mut file = std::fs::read(&self.path).ok()?;
        let cubin = file.split_off_checked(CHECKSUM_BYTES)?;
        (*blake3::hash(&cubin).as_bytes() == file[..]).then_some(cubin)
    }

    /// Writes the file whole or not at all, even if another process writes the same one.
    fn write(&self, cubin: &[u8]) -> io::Result<()> {
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let partial = self.path.with_extension(format!("{}-{number}.partial", std::process::id()));
        let written = std::fs::write(&partial, [blake3::hash(cubin).as_bytes(), cubin].concat());
        let placed = written.and_then(|()| std::fs::rename(&partial, &self.path));
        if placed.is_err() {
            // The file may not even exist.
            let _left = std::fs::remove_file(&partial);
        }
        placed
    }
}

/// `Vec::split_off` that does not panic.
trait CheckedSplitOff {
    fn split_off_checked(&mut self, at: usize) -> Option<Vec<u8>>;
}

impl CheckedSplitOff for Vec<u8> {
    fn split_off_checked(&mut self, at: usize) -> Option<Vec<u8>> {
        (at <= self.len()).then(|| self.split_off(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_an_error() {
        assert_eq!(Compiler::newest(&["libnvrtc-missing.so.13"], 13).err(), Some(None));
        // A library that exists everywhere and is no compiler.
        let other = NvrtcApi::of(RuntimeLibrary::first(&["libc.so.6"]).unwrap()).err().unwrap();
        assert!(other.to_string().contains("has no nvrtcVersion"), "{other}");
    }
}
