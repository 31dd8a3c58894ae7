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

    /// Cuts the sum into jobs of this many pieces. Returns none if two sums of a job would wait for another job's.
    pub fn split(&self, per_job: u32) -> Option<SplitPieces> {
        let mut parts = *self;
        let mut sums = SumPieces { n_groups: self.n_groups, ..SumPieces::default() };
        // The sums of this job that wait for their neighbours.
        let mut n_waiting = 0;
        for i in 0..self.n as usize {
            let merges = self.merges[i].min(n_waiting);
            let merges_of_sums = self.merges[i] - merges;
            n_waiting -= merges;
            let ends_job = (i as u32 + 1).is_multiple_of(per_job) || i as u32 + 1 == self.n;
            let is_sum = self.ends_run[i] != 0 || merges_of_sums > 0 || ends_job;
            (parts.merges[i], parts.ends_run[i]) = (merges, is_sum.into());
            if !is_sum {
                n_waiting += 1;
                continue;
            }
            if n_waiting > 0 {
                return None;
            }
            let sum = sums.n as usize;
            (sums.end[sum], sums.merges[sum], sums.ends_run[sum]) = (self.end[i], merges_of_sums, self.ends_run[i]);
            sums.n += 1;
        }
        Some(SplitPieces { per_job, parts, sums })
    }
}

/// A sum that several jobs compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SplitPieces {
    pub per_job: u32,
    /// The pieces, with a run for each sum that a job stores.
    pub parts: SumPieces,
    /// These sums as the pieces of the whole.
    pub sums: SumPieces,
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

    fn pieces(merges: &[u8]) -> SumPieces {
        let mut pieces = SumPieces { n: merges.len() as u32, n_groups: 80, ..SumPieces::default() };
        pieces.merges[..merges.len()].copy_from_slice(merges);
        (0..merges.len()).for_each(|i| pieces.end[i] = 10 * (i as u32 + 1));
        pieces.ends_run[merges.len() - 1] = 1;
        pieces
    }

    #[test]
    fn jobs_of_a_sum_keep_its_order() {
        let (tree, strands) = (pieces(&[0, 1, 0, 2, 0, 1, 0, 3]), pieces(&[0, 1, 1, 1]));
        let of = |whole: &SumPieces, per_job| {
            let SplitPieces { parts, sums, .. } = whole.split(per_job).unwrap();
            let n = sums.n as usize;
            (parts.merges, parts.ends_run, sums.end[..n].to_vec(), sums.merges[..n].to_vec())
        };
        assert_eq!(of(&tree, 4), ([0, 1, 0, 2, 0, 1, 0, 2], [0, 0, 0, 1, 0, 0, 0, 1], vec![40, 80], vec![0, 1]));
        let quarters = ([0, 1, 0, 1, 0, 1, 0, 1], [0, 1, 0, 1, 0, 1, 0, 1], vec![20, 40, 60, 80], vec![0, 1, 0, 2]);
        assert_eq!(of(&tree, 2), quarters);
        let halves = ([0, 1, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0, 0, 0], vec![20, 30, 40], vec![0, 1, 1]);
        assert_eq!(of(&strands, 2), halves);
        for whole in [tree, strands] {
            assert_eq!(whole.split(1).unwrap().sums, whole, "each piece is a sum");
            assert_eq!(whole.split(whole.n).unwrap().parts, whole, "one job");
        }
        assert_eq!(tree.split(3), None, "the third piece would wait beside the first two");
    }

    #[test]
    fn structs_lie_as_in_the_header() {
        assert_eq!((size_of::<SumPieces>(), size_of::<HeadShape>()), (56, 40));
        assert_eq!(attend_of("attend_split_d96_q16"), Some((96, 16)));
        assert_eq!(attend_of("attend_merge"), None);
        assert!(HEADERS[0].text.contains("(QUERIES) * (D) * 2 + (QUERIES) * 264 * 4 + (QUERIES) * 9 * 4 + 64"));
    }
}
