//! The CPU as a device: plain Rust, AVX2 and AVX-512 with the same bits, on a pool of threads.
//!
//! Knows nothing of models or requests. Weights are packed, and scratch memory is allocated, at load.

mod amx;
mod attention;
mod between;
pub(crate) mod blocks;
pub(crate) mod codebooks;
mod digits;
#[cfg(test)]
mod documented;
mod experts;
pub(crate) mod formats;
mod grids;
mod isa;
mod kv;
pub(crate) mod lanes;
mod linear;
pub(crate) mod math;
pub(crate) mod memory;
mod pack;
mod pairs;
mod panels;
mod pointwise;
mod quants;
mod recurrence;
mod rows;
pub(crate) mod sample;
pub(crate) mod team;
mod vector;

pub use experts::Routes;
pub use isa::Isa;
pub use kv::{Kv, Rope};
pub use pack::{Matrix, PACKING_VERSION};
pub use vector::Vector;

pub(crate) use isa::{Kernel, dispatch};

use crate::{
    BlockMemory, Error, FillPiece, KvPages, KvSpec, MatrixShape, Memory, PackedBytes, PageMover, Result, RopeStyle,
    Routing, StoredMatrix, Weights,
};
use memory::{HostMemory, SharedPtr};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use team::Team;
use types::{Activations, BlockId, DeviceClass, Leaves};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuConfig {
    /// Computing threads, including the caller's.
    pub threads: usize,
    pub activations: Activations,
    pub isa: Isa,
    /// Whether waiting threads spin. Not where other work needs their cores, such as ranks on the same machine.
    pub spin: bool,
}

/// Used by one thread at a time, with the help of its pool.
pub struct Cpu {
    config: CpuConfig,
    pub(crate) team: Team,
    scratch: Mutex<PanelScratch>,
    samplers: sample::Samplers,
}

/// Memory for the panels of one product, grown when buffers are made.
struct PanelScratch {
    /// By operand.
    panels: [HostMemory; 4],
    n_words: usize,
}

/// Memory that no product writes to is not taken from the system.
fn scratch_panels(n_bytes: usize) -> Result<[HostMemory; 4]> {
    let pages = || HostMemory::zeroed("scratch", n_bytes);
    Ok([pages()?, pages()?, pages()?, pages()?])
}

/// `[rows_max, cols]` of f32.
pub struct Buffer {
    pages: HostMemory,
    rows_max: usize,
    cols: usize,
}

impl Buffer {
    pub fn rows_max(&self) -> usize {
        self.rows_max
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub fn row(&self, row: usize) -> &[f32] {
        self.rows(row + 1, self.cols).get(row * self.cols..).unwrap_or(&[])
    }

    /// The first rows, if they are as wide as the operation expects. Buffers that do not fit are the caller's bug.
    fn rows(&self, n_rows: usize, cols: usize) -> &[f32] {
        self.check(n_rows, cols);
        &self.pages.floats()[..n_rows * cols]
    }

    fn rows_mut(&mut self, n_rows: usize, cols: usize) -> &mut [f32] {
        self.check(n_rows, cols);
        &mut self.pages.floats_mut()[..n_rows * cols]
    }

    fn shared(&mut self, n_rows: usize, cols: usize) -> SharedPtr<f32> {
        SharedPtr::new(self.rows_mut(n_rows, cols).as_mut_ptr())
    }

    fn check(&self, n_rows: usize, cols: usize) {
        let fits = n_rows <= self.rows_max && cols == self.cols;
        assert!(fits, "{n_rows} rows of {cols} in a buffer of {} x {}", self.rows_max, self.cols);
    }
}

impl Cpu {
    pub fn new(config: CpuConfig) -> Result<Cpu> {
        if config.activations == Activations::Bf16 {
            return Err(Error::Unsupported(types::Unsupported("activations in bf16 on the CPU")));
        }
        if !config.isa.is_supported() {
            return Err(Error::Unsupported(types::Unsupported("these instructions on this machine")));
        }
        let team = Team::new(config.threads, config.spin)
            .map_err(|_| Error::OutOfMemory { what: "threads", n: config.threads })?;
        let scratch = PanelScratch { panels: scratch_panels(0)?, n_words: 0 };
        Ok(Cpu { config, team, scratch: Mutex::new(scratch), samplers: sample::Samplers::default() })
    }

    pub fn config(&self) -> &CpuConfig {
        &self.config
    }

    fn scratch(&self) -> std::sync::MutexGuard<'_, PanelScratch> {
        // An aborted operation's leftovers are overwritten by the next.
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Grows the scratch memory for products of `rows_max` rows of `k`. Making a buffer does this for its own size.
    pub fn reserve(&self, rows_max: usize, k: usize) -> Result<()> {
        let too_big = || Error::Shape(format!("a buffer of {rows_max} x {k}"));
        let n_words = panels::n_words(rows_max, k).ok_or_else(too_big)?;
        let n_bytes = n_words.checked_mul(4).ok_or_else(too_big)?;
        let mut scratch = self.scratch();
        if scratch.n_words < n_words {
            scratch.panels = scratch_panels(n_bytes)?;
            scratch.n_words = n_words;
        }
        Ok(())
    }

    /// Runs a kernel over ranges of items on all threads.
    fn run_on_team<K: Kernel>(&self, n_items: usize, kernel: impl Fn(Range<usize>) -> K + Sync) {
        self.team.run(n_items, &|items| dispatch(self.config.isa, kernel(items)));
    }
}

impl Weights for Cpu {
    type Matrix = Matrix;
    type Vector = Vector;
    type Rope = Rope;

    fn matrix(&self, parts: &[StoredMatrix<'_>]) -> Result<Matrix> {
        Matrix::stack(parts, &self.team)
    }

    fn matrix_leaves(&self, stored: StoredMatrix<'_>, leaves: &Leaves, owned: Range<u32>) -> Result<Matrix> {
        Matrix::of_leaves(stored, leaves, owned, &self.team)
    }

    fn matrix_of_packed(
        &self,
        shape: &MatrixShape<'_>,
        n_bytes: usize,
        fill: &FillPiece<'_>,
    ) -> Result<Option<Matrix>> {
        Matrix::of_packed(shape, n_bytes, fill, &self.team)
    }

    fn vector(&self, values: &[f32]) -> Result<Vector> {
        Ok(Vector::new(values))
    }

    fn rope(&self, cos: &[f32], sin: &[f32], half_dim: usize, style: RopeStyle) -> Result<Rope> {
        Rope::new(cos, sin, half_dim, style)
    }

    fn parallel_for(&self, n_items: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
        self.team.run(n_items, work);
    }

    fn matrix_bytes(&self, matrix: &Matrix) -> usize {
        matrix.n_bytes
    }

    fn packed_bytes(&self, matrix: &Matrix) -> Option<PackedBytes> {
        Some(PackedBytes::new(matrix.pages.clone(), matrix.n_bytes))
    }

    fn vector_bytes(&self, vector: &Vector) -> Option<PackedBytes> {
        Some(vector.bytes())
    }

    fn rope_bytes(&self, rope: &Rope) -> Option<[PackedBytes; 2]> {
        Some(rope.bytes())
    }
}

impl KvPages for Cpu {
    type Kv = Kv;

    fn kv(&self, spec: KvSpec) -> Result<Kv> {
        Kv::new(spec, self.config.threads)
    }

    fn clear(&self, kv: &mut Kv, blocks: &[BlockId]) {
        kv.clear(blocks);
    }

    fn block_memory(&self, kv: &Kv) -> Option<BlockMemory> {
        kv.block_memory()
    }

    fn page_mover(&self, kv: &Kv) -> Result<Box<dyn PageMover>> {
        Ok(Box::new(kv.page_mover()))
    }

    fn read_block(&self, kv: &Kv, layer: usize, block: BlockId) -> Vec<u8> {
        kv.read_block(layer, block)
    }
}

impl Memory for Cpu {
    type Buffer = Buffer;
    type Routes = Routes;

    fn class(&self) -> DeviceClass {
        DeviceClass::Cpu
    }

    fn buffer(&self, rows_max: usize, cols: usize) -> Result<Buffer> {
        let too_big = || Error::Shape(format!("a buffer of {rows_max} x {cols}"));
        let n_bytes = rows_max.checked_mul(cols).and_then(|n| n.checked_mul(4)).ok_or_else(too_big)?;
        self.reserve(rows_max, cols)?;
        Ok(Buffer { pages: HostMemory::zeroed("a buffer", n_bytes)?, rows_max, cols })
    }

    fn routes(&self, rows_max: usize, hidden: usize, inner: usize, routing: Routing) -> Result<Routes> {
        Routes::new(self, rows_max, hidden, inner, routing)
    }

    fn read(&self, buffer: &Buffer, rows: Range<usize>, out: &mut [f32]) {
        out.copy_from_slice(&buffer.rows(rows.end, buffer.cols)[rows.start * buffer.cols..]);
    }

    fn write(&self, buffer: &mut Buffer, row: usize, values: &[f32]) {
        let cols = buffer.cols;
        assert!(cols > 0 && values.len().is_multiple_of(cols), "{} values in rows of {cols}", values.len());
        buffer.rows_mut(row + values.len() / cols, cols)[row * cols..].copy_from_slice(values);
    }

    fn cols(&self, buffer: &Buffer) -> usize {
        buffer.cols
    }

    fn read_part(&self, buffer: &Buffer, row: usize, col: usize, out: &mut [f32]) {
        out.copy_from_slice(&buffer.row(row)[col..][..out.len()]);
    }

    fn write_part(&self, buffer: &mut Buffer, row: usize, col: usize, values: &[f32]) {
        let cols = buffer.cols;
        let row = &mut buffer.rows_mut(row + 1, cols)[row * cols..];
        row[col..][..values.len()].copy_from_slice(values);
    }
}

impl crate::Device for Cpu {}
