//! The emulator as a device: builds it once, launches kernels by name, and guards their memory.

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use std::collections::hash_map::DefaultHasher;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Thread orders that kernels are run in: ascending, descending, shuffled, and one warp after another.
pub const ORDERS: [i32; 4] = [0, 1, 2, 77];

type LaunchFn = unsafe extern "C" fn(*const c_char, *const u32, *const u32, u32, *mut *mut c_void, c_int) -> c_int;
type ErrorFn = unsafe extern "C" fn() -> *const c_char;
type KernelFn = unsafe extern "C" fn(u32) -> *const c_char;

unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}

struct Emulator {
    launch: LaunchFn,
    error: ErrorFn,
    kernel: KernelFn,
}

fn emulator() -> &'static Emulator {
    static EMULATOR: OnceLock<Emulator> = OnceLock::new();
    EMULATOR.get_or_init(|| {
        const RTLD_NOW: c_int = 2;
        let file = CString::new(build().into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: `build` has just made the library; its functions have the types in `emulator.cpp`.
        unsafe {
            let library = dlopen(file.as_ptr(), RTLD_NOW);
            assert!(!library.is_null(), "{:?}", CStr::from_ptr(dlerror()));
            let find = |name: &CStr| {
                let function = dlsym(library, name.as_ptr());
                assert!(!function.is_null(), "{name:?}");
                function
            };
            Emulator {
                launch: std::mem::transmute::<*mut c_void, LaunchFn>(find(c"emulator_launch")),
                error: std::mem::transmute::<*mut c_void, ErrorFn>(find(c"emulator_error")),
                kernel: std::mem::transmute::<*mut c_void, KernelFn>(find(c"emulator_kernel")),
            }
        }
    })
}

/// Compiles after the sources have changed: the file name contains their digest.
fn build() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut hasher = DefaultHasher::new();
    for folder in ["src/cuda/kernels", "emulator"] {
        let mut files: Vec<_> =
            std::fs::read_dir(root.join(folder)).unwrap().map(|file| file.unwrap().path()).collect();
        files.sort();
        // A table of registers is not a source.
        files.retain(|file| file.extension().is_some_and(|extension| extension != "txt"));
        files.iter().for_each(|file| std::fs::read(file).unwrap().hash(&mut hasher));
    }
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("emulator-{:016x}.so", hasher.finish()));
    if !out.exists() {
        let planted = root.join("emulator/planted.cpp");
        let made = Command::new("sh").arg(root.join("emulator/build.sh")).args([&out, &planted]).output().unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        assert!(made.stderr.is_empty(), "warnings:\n{}", String::from_utf8_lossy(&made.stderr));
    }
    out
}

/// Returns the names of all kernels in the emulator.
pub fn kernels() -> Vec<String> {
    let name = |i| {
        // SAFETY: a name that lives as long as the library, or null.
        let name = unsafe { (emulator().kernel)(i) };
        // SAFETY: as above.
        (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_str().unwrap().to_string())
    };
    (0..).map_while(name).collect()
}

/// How a kernel is started.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    pub grid: [usize; 3],
    pub block: usize,
    pub shared: usize,
    pub order: i32,
}

impl Launch {
    pub fn new(grid: [usize; 3], block: usize) -> Launch {
        Launch { grid, block, shared: 0, order: 0 }
    }

    /// Runs a kernel with pointers to its arguments, which `arguments!` makes.
    pub fn run(self, name: &str, arguments: &mut [*mut c_void]) -> Result<(), String> {
        let (grid, block) = (self.grid.map(|n| n as u32), [self.block as u32, 1, 1]);
        let kernel = CString::new(name).unwrap();
        // SAFETY: a test passes each kernel the arguments that `kernels.cuh` names, over memory that it holds.
        let failed = unsafe {
            let launch = emulator().launch;
            launch(
                kernel.as_ptr(),
                grid.as_ptr(),
                block.as_ptr(),
                self.shared as u32,
                arguments.as_mut_ptr(),
                self.order,
            )
        };
        // SAFETY: the message of this thread's last launch.
        let error = || unsafe { CStr::from_ptr((emulator().error)()) }.to_string_lossy().into_owned();
        if failed == 0 { Ok(()) } else { Err(format!("{name}: {}", error())) }
    }

    pub fn ok(self, name: &str, arguments: &mut [*mut c_void]) {
        self.run(name, arguments).unwrap();
    }
}

/// Pointers to values, which live to the end of the statement.
#[macro_export]
macro_rules! arguments {
    ($($value:expr),* $(,)?) => { &mut [$( std::ptr::from_mut(&mut { $value }).cast::<std::ffi::c_void>() ),*] };
}

const FENCE: u8 = 0xa5;
/// A multiple of the page size on any machine.
const PAGE: usize = 64 << 10;

/// Device memory, aligned to 16 bytes and followed by a page that may not be read, except for the alignment gap. Writes
/// before it, and into that gap, are detected.
pub struct Memory<T> {
    /// A page without access, the pages of the values, and another page without access.
    pages: *mut u8,
    n_pages: usize,
    n: usize,
    of: std::marker::PhantomData<T>,
}

impl<T: bytemuck::Pod> Memory<T> {
    pub fn of(values: &[T]) -> Memory<T> {
        let n_bytes = size_of_val(values);
        let n_pages = n_bytes.div_ceil(PAGE).max(1);
        let none = std::ptr::null_mut();
        // SAFETY: fresh pages without another user; the inner ones may be accessed.
        let pages = unsafe {
            let pages = mmap_anonymous(none, (n_pages + 2) * PAGE, ProtFlags::empty(), MapFlags::PRIVATE).unwrap();
            mprotect(pages.byte_add(PAGE), n_pages * PAGE, MprotectFlags::READ | MprotectFlags::WRITE).unwrap();
            pages.cast::<u8>()
        };
        let memory: Memory<T> = Memory { pages, n_pages, n: values.len(), of: std::marker::PhantomData };
        // SAFETY: all inside the inner pages, which are at least as long as the values.
        unsafe {
            pages.add(PAGE).write_bytes(FENCE, n_pages * PAGE);
            memory.start().cast::<u8>().copy_from_nonoverlapping(values.as_ptr().cast(), n_bytes);
        }
        memory
    }

    pub fn filled(n: usize, value: T) -> Memory<T> {
        Memory::of(&vec![value; n])
    }

    pub fn start(&self) -> *mut T {
        let n_bytes = (self.n * size_of::<T>()).next_multiple_of(16);
        self.pages.wrapping_add((self.n_pages + 1) * PAGE - n_bytes).cast()
    }

    /// The contents after a kernel; panics if it wrote outside of them.
    pub fn read(&self) -> Vec<T> {
        // SAFETY: the inner pages; no kernel runs, as a launch returns when all its threads have.
        let bytes = unsafe { std::slice::from_raw_parts(self.pages.add(PAGE), self.n_pages * PAGE) };
        let start = self.start().addr() - bytes.as_ptr().addr();
        let end = start + self.n * size_of::<T>();
        let mut fences = bytes[..start].iter().chain(&bytes[end..]);
        assert!(fences.all(|byte| *byte == FENCE), "a kernel wrote outside its memory");
        bytes[start..end].chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
    }
}

impl<T> Drop for Memory<T> {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`, and no pointer to it is left.
        unsafe { munmap(self.pages.cast(), (self.n_pages + 2) * PAGE) }.unwrap();
    }
}

/// f32 numbers as the kernels' rows of bf16: rounded, padded to 32 with zeros.
pub fn bf16_rows(values: &[f32], cols: usize) -> Vec<u16> {
    let mut out = Vec::new();
    for row in values.chunks(cols.max(1)) {
        out.extend(row.iter().map(|x| half::bf16::from_f32(*x).to_bits()));
        out.resize(out.len().next_multiple_of(32), 0);
    }
    out
}

pub fn rounded(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}

/// Fills memory that a kernel must write.
pub const UNWRITTEN: f32 = f32::from_bits(0xffc0_1234);
