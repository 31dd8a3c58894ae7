//! The kernels in the host's view: the structs that they take by value, their loading and their launch.
//! `kernels/kernels.cuh` describes each kernel's result.

use super::compiler::{Arch, Compiler};
use super::driver::{Card, Context, Driver, KernelFunction, LaunchShape, Module, Stream};
use super::table::{Kernel, UNITS, Unit};
use crate::{AttentionHeads, Error, Result};
use std::ffi::{CString, c_void};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

pub(super) const PIECES_MAX: usize = 8;

/// How a sum over k is cut; as in the header, field by field.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SumPieces {
    pub n: u32,
    pub n_groups: u32,
    pub end: [u32; PIECES_MAX],
    pub merges: [u8; PIECES_MAX],
    pub ends_run: [u8; PIECES_MAX],
}

impl SumPieces {
    /// The groups of each run of pieces, which has a plane of the product.
    pub fn runs(&self) -> impl Iterator<Item = Range<u32>> {
        let mut begin = 0;
        let ends = self.end.iter().zip(&self.ends_run).take(self.n as usize);
        ends.filter(|(_, ends_run)| **ends_run != 0).map(move |(end, _)| std::mem::replace(&mut begin, *end)..*end)
    }
}

/// As in the header, field by field.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct HeadShape {
    n_heads: u32,
    n_kv_heads: u32,
    per_kv: u32,
    first: u32,
    head_dim: u32,
    window: u32,
    scale: f32,
    cap: f32,
    /// The address of the sinks, or null.
    sinks: u64,
}

impl HeadShape {
    pub fn of(heads: &AttentionHeads) -> HeadShape {
        HeadShape {
            n_heads: heads.n_heads as u32,
            n_kv_heads: heads.n_kv_heads as u32,
            per_kv: heads.per_kv as u32,
            first: heads.first as u32,
            head_dim: heads.head_dim as u32,
            window: heads.window.map_or(0, |window| window as u32),
            scale: heads.scale,
            cap: heads.cap.unwrap_or(0.0),
            sinks: 0,
        }
    }

    pub fn with_sinks(self, sinks: u64) -> HeadShape {
        HeadShape { sinks, ..self }
    }
}

/// A valid argument of a kernel.
///
/// # Safety
/// The type has the memory layout of the kernel's parameter.
pub(super) unsafe trait Argument {}

// SAFETY: numbers are numbers, a pointer of the device is a number of 64 bits, and the structs are `repr(C)` with the
// header's fields.
unsafe impl Argument for u32 {}
// SAFETY: as above.
unsafe impl Argument for u64 {}
// SAFETY: as above.
unsafe impl Argument for f32 {}
// SAFETY: as above.
unsafe impl Argument for SumPieces {}
// SAFETY: as above.
unsafe impl Argument for HeadShape {}

pub(super) fn argument<T: Argument>(value: &T) -> *const c_void {
    std::ptr::from_ref(value).cast()
}

/// The arguments of a kernel, in the order of its parameters: they live until the end of the statement.
macro_rules! arguments {
    ($($value:expr),* $(,)?) => { &[$($crate::cuda::kernels::argument(&$value)),*] };
}
pub(super) use arguments;

/// All kernels, on the device.
pub(super) struct Kernels {
    /// By the kernel's number, in the order of the table.
    functions: Vec<KernelFunction>,
    /// Kept alive for the functions.
    _modules: Vec<Module>,
}

impl Kernels {
    pub fn load(driver: Driver, context: &Arc<Context>, card: &Card, cache: Option<&Path>) -> Result<Kernels> {
        let compiler = Compiler::find_for(driver)?;
        let cubins = compiled(&compiler, Arch(card.capability.0, card.capability.1), cache)?;
        let (mut functions, mut modules) = (Vec::new(), Vec::new());
        for (unit, cubin) in UNITS.iter().zip(cubins) {
            let module = Module::load(context, &cubin)?;
            for kernel in unit.kernels {
                let name = kernel.name();
                let text = CString::new(name)
                    .map_err(|_| Error::Compiler(format!("the kernel name {name:?} contains a NUL byte")))?;
                debug_assert_eq!(functions.len(), *kernel as usize, "the table's order");
                functions.push(module.function(&text, shared_bytes_max(*kernel, card))?);
            }
            modules.push(module);
        }
        Ok(Kernels { functions, _modules: modules })
    }

    /// # Safety
    /// The arguments are the kernel's, in order; their memory is as large as it reads and writes in this shape, and
    /// lives until the stream has finished.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        kernel: Kernel,
        shape: LaunchShape,
        args: &[*const c_void],
    ) -> Result<()> {
        // SAFETY: the module lives as long as self; the rest is the caller's promise.
        unsafe { stream.launch(self.functions[kernel as usize], shape, args) }
    }
}

/// Returns the names of all kernels.
pub fn kernel_names() -> impl Iterator<Item = &'static str> {
    UNITS.iter().flat_map(|unit| unit.kernels).map(|kernel| kernel.name())
}

/// Compiles the code of all kernels for an architecture, unit by unit, with the newest compiler of this machine.
pub fn compile(arch: Arch, cache: Option<&Path>) -> Result<Vec<Vec<u8>>> {
    compiled(&Compiler::find()?, arch, cache)
}

/// Units are independent, so a thread of its own compiles each one.
fn compiled(compiler: &Compiler, arch: Arch, cache: Option<&Path>) -> Result<Vec<Vec<u8>>> {
    std::thread::scope(|scope| {
        let compile = |unit: &'static Unit| scope.spawn(move || compiler.cubin(&unit.program(), arch, cache));
        let compiling: Vec<_> = UNITS.iter().map(compile).collect();
        let failed = |_| Err(Error::Compiler("the compiler panicked".into()));
        compiling.into_iter().map(|thread| thread.join().unwrap_or_else(failed)).collect()
    })
}

/// Returns the shared memory that a block of this kernel may request.
fn shared_bytes_max(kernel: Kernel, card: &Card) -> u32 {
    match kernel {
        Kernel::RmsNorm | Kernel::AddRmsNorm | Kernel::LayerNorm => norm_bytes_max(card),
        _ if kernel.name().ends_with("_r128") => WIDE_SHARED_BYTES,
        _ if kernel.name().ends_with("_r256") && card.has_warpgroups() => TILED_SHARED_BYTES,
        _ => attend_of(kernel.name()).map_or(0, |(head_dim, queries)| attend_shared_bytes(head_dim, queries)),
    }
}

/// Returns the bytes for the longest row that fits, beside the small static memory of the norms' kernels.
pub(super) fn norm_bytes_max(card: &Card) -> u32 {
    card.shared_bytes_max.saturating_sub(1 << 10)
}

/// `attend_d64_q16` -> 64, 16
fn attend_of(name: &str) -> Option<(u32, u32)> {
    let (_, numbers) = name.split_once("_d")?;
    let (head_dim, queries) = numbers.split_once("_q")?;
    Some((head_dim.parse().ok()?, queries.parse().ok()?))
}

/// `ATTEND_SMEM` of the header.
pub(super) const fn attend_shared_bytes(head_dim: u32, queries: u32) -> u32 {
    queries * head_dim * 2 + queries * 264 * 4 + queries * 9 * 4 + 64
}

/// `WIDE_SMEM` of the header.
pub(super) const WIDE_SHARED_BYTES: u32 = 4 * (256 + 128) * 64;

/// `WARPGROUPS_SMEM` of the header.
pub(super) const TILED_SHARED_BYTES: u32 = 8 * (256 + 128) * 64 + 1024;

/// Returns a shape with a block of 256 threads for each row.
pub(super) fn by_row(n_rows: usize) -> LaunchShape {
    LaunchShape { grid: [n_rows as u32, 1, 1], block: [256, 1, 1], shared_bytes: 0 }
}

/// The columns of a row that a block of the kernels with `put_row` takes: each thread loads eight numbers at once.
const PART_COLS: usize = 8 * 256;

/// Returns a shape with a block of 256 threads for each part of each row.
pub(super) fn by_row_part(n_rows: usize, cols: usize) -> LaunchShape {
    LaunchShape { grid: [n_rows as u32, cols.div_ceil(PART_COLS).max(1) as u32, 1], ..by_row(0) }
}

#[cfg(test)]
mod tests {
    use super::super::table::HEADERS;
    use super::*;

    /// Returns the names that the header declares, written out or made by its macros.
    fn declared() -> Vec<String> {
        let header = HEADERS[0].text;
        let code = header.lines().filter(|line| !line.trim_start().starts_with("//"));
        let code: String = code.flat_map(|line| [line.trim_end_matches('\\'), "\n"]).collect();
        let mut names = Vec::new();
        let name = |text: &str| text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or("").to_owned();
        for (at, _) in ["KERNEL(", "KERNEL_SHARING("].iter().flat_map(|text| code.match_indices(text)) {
            let after = code[at..].split_once(')').map_or("", |(_, rest)| rest.trim_start());
            names.push(name(after));
        }
        for macro_name in ["ATTEND(", "ATTEND_SPLIT(", "LINEAR_GROUPED(", "LINEAR_TILED(", "EMBED("] {
            names.extend(code.match_indices(macro_name).map(|(at, _)| name(&code[at + macro_name.len()..])));
        }
        for (at, _) in code.match_indices("\nLINEARS(") {
            let kind = name(&code[at + "\nLINEARS(".len()..]);
            names.extend(["r8", "r16", "r32", "r64", "r128"].map(|rows| format!("linear_{kind}_{rows}")));
        }
        names.retain(|found| found != "name" && !found.is_empty());
        names
    }

    #[test]
    fn every_kernel_is_declared_and_every_declared_one_is_here() {
        let declared = declared();
        let known: Vec<&str> = kernel_names().collect();
        for name in &known {
            assert!(declared.iter().any(|declared| declared == name), "{name} is not in the header");
        }
        let unknown: Vec<_> = declared.iter().filter(|name| !known.contains(&name.as_str())).collect();
        assert!(unknown.is_empty(), "{unknown:?} are in the header and not in the table");
    }

    #[test]
    fn structs_lie_as_in_the_header() {
        assert_eq!((size_of::<SumPieces>(), size_of::<HeadShape>()), (56, 40));
        assert_eq!(attend_of("attend_split_d96_q16"), Some((96, 16)));
        assert_eq!(attend_of("attend_merge"), None);
        assert!(HEADERS[0].text.contains("(QUERIES) * (D) * 2 + (QUERIES) * 264 * 4 + (QUERIES) * 9 * 4 + 64"));
    }
}
