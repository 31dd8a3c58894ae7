//! Kernels from source to a cubin of one architecture, by NVRTC, and where cubins are kept between starts. Knows
//! nothing of devices but their architecture, and of kernels only their text.

use crate::{Error, Result};
use cudarc::nvrtc::sys;
use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// What code is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arch(pub u32, pub u32);

impl fmt::Display for Arch {
    /// The form with instructions that only this architecture has, where there is one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Arch(major, minor) = *self;
        let own = if (major, minor) == (9, 0) || major >= 10 { "a" } else { "" };
        write!(f, "sm_{major}{minor}{own}")
    }
}

/// A text under the name by which others include it.
#[derive(Clone, Copy, Debug)]
pub struct Text {
    pub name: &'static str,
    pub text: &'static str,
}

/// One translation unit and what it includes.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    pub main: Text,
    pub headers: &'static [Text],
    pub options: &'static [&'static str],
}

/// The compiler of this machine.
#[derive(Clone, Copy, Debug)]
pub struct Compiler {
    version: (i32, i32),
}

impl Compiler {
    pub fn find() -> Result<Compiler> {
        // SAFETY: opens the library and closes it again; it is the system's own, under its own name.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::Compiler("NVRTC (libnvrtc.so of CUDA 12 or 13) is not on this machine".into()));
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two numbers.
        done("tell its version", unsafe { sys::nvrtcVersion(&mut major, &mut minor) })?;
        Ok(Compiler { version: (major, minor) })
    }

    /// The cubin of `program`, out of `cache` if it is there and whole.
    pub fn cubin(&self, program: &Program, arch: Arch, cache: Option<&Path>) -> Result<Vec<u8>> {
        let Some(cache) = cache else { return self.compile(program, arch) };
        let kept = Kept { path: cache.join(format!("{}.cubin", self.key(program, arch))) };
        if let Some(cubin) = kept.read() {
            return Ok(cubin);
        }
        let cubin = self.compile(program, arch)?;
        // Without a cache the next start takes a second longer, and no more.
        let _uncached = kept.write(&cubin);
        Ok(cubin)
    }

    /// All that the code depends on.
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
        let options = options.chain([format!("--gpu-architecture={arch}")]).map(terminated);
        let options = options.collect::<Result<Vec<_>>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let unit = Unit::new(program)?;
        // SAFETY: the program was made, and the options are strings that live until the call returns.
        let compiled = unsafe { sys::nvrtcCompileProgram(unit.0, pointers.len() as i32, pointers.as_ptr()) };
        if compiled != sys::nvrtcResult::NVRTC_SUCCESS {
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

fn done(what: &str, result: sys::nvrtcResult) -> Result<()> {
    match result {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        failed => Err(Error::Compiler(format!("NVRTC did not {what}: {failed:?}"))),
    }
}

fn terminated(text: impl Into<Vec<u8>>) -> Result<CString> {
    CString::new(text).map_err(|_| Error::Compiler("a text with a zero in it".into()))
}

/// What NVRTC holds of a program.
struct Unit(sys::nvrtcProgram);

impl Unit {
    fn new(program: &Program) -> Result<Unit> {
        let (text, name) = (terminated(program.main.text)?, terminated(program.main.name)?);
        let headers = |of: fn(&Text) -> &'static str| {
            program.headers.iter().map(|header| terminated(of(header))).collect::<Result<Vec<_>>>()
        };
        let (texts, names) = (headers(|header| header.text)?, headers(|header| header.name)?);
        let pointers = |strings: &[CString]| strings.iter().map(|string| string.as_ptr()).collect::<Vec<_>>();
        let (text_pointers, name_pointers) = (pointers(&texts), pointers(&names));
        let mut raw = std::ptr::null_mut();
        // SAFETY: strings that live until the call returns, by which time NVRTC has copied them.
        let made = unsafe {
            sys::nvrtcCreateProgram(
                &mut raw,
                text.as_ptr(),
                name.as_ptr(),
                texts.len() as i32,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        done("take a program", made)?;
        Ok(Unit(raw))
    }

    /// What the compiler had to say.
    fn log(&self) -> String {
        let mut n = 0;
        // SAFETY: writes one number.
        if done("tell how much it has to say", unsafe { sys::nvrtcGetProgramLogSize(self.0, &mut n) }).is_err() {
            return "no reason given".into();
        }
        let mut log = vec![0u8; n + 1];
        // SAFETY: there is room for what it has said it will write.
        let told = unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        match (done("say it", told), CStr::from_bytes_until_nul(&log)) {
            (Ok(()), Ok(log)) => log.to_string_lossy().trim().to_owned(),
            _ => "no reason given".into(),
        }
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let mut n = 0;
        // SAFETY: writes one number.
        done("size the code", unsafe { sys::nvrtcGetCUBINSize(self.0, &mut n) })?;
        let mut cubin = vec![0u8; n];
        // SAFETY: there is room for what it has said it will write.
        done("give the code", unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast()) })?;
        match n {
            0 => Err(Error::Compiler("NVRTC made no code".into())),
            _ => Ok(cubin),
        }
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and destroyed once.
        let _gone = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

/// A cubin on disk: its checksum, then itself. A file that was cut short or changed is not there.
struct Kept {
    path: PathBuf,
}

const CHECKSUM_BYTES: usize = 32;

impl Kept {
    fn read(&self) -> Option<Vec<u8>> {
        let mut file = std::fs::read(&self.path).ok()?;
        let cubin = file.split_off_checked(CHECKSUM_BYTES)?;
        (*blake3::hash(&cubin).as_bytes() == file[..]).then_some(cubin)
    }

    /// Whole or not at all, whoever else writes the same.
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
            // It may not even have been made.
            let _left = std::fs::remove_file(&partial);
        }
        placed
    }
}

/// `Vec::split_off` that does not panic.
trait SplitOff {
    fn split_off_checked(&mut self, at: usize) -> Option<Vec<u8>>;
}

impl SplitOff for Vec<u8> {
    fn split_off_checked(&mut self, at: usize) -> Option<Vec<u8>> {
        (at <= self.len()).then(|| self.split_off(at))
    }
}
