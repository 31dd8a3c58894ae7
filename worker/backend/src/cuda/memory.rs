//! What the device keeps, and how numbers get there and back.

use super::attention::{Kv, Rope};
use super::buffer::{Buffer, Vector, padded};
use super::device::Cuda;
use super::driver::DeviceMemory;
use super::experts::Routes;
use super::pages::CudaPages;
use super::weights::Matrix;
use crate::{Error, KvPages, KvSpec, Memory, PageMover, Result, RopeStyle, Routing, StoredMatrix, Weights};
use half::bf16;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use types::{BlockId, DeviceClass, DeviceKind, Leaves, NumericsMode};

impl Weights for Cuda {
    type Matrix = Matrix;
    type Vector = Vector;
    type Rope = Rope;

    fn matrix(&self, parts: &[StoredMatrix<'_>]) -> Result<Matrix> {
        self.packer(|packer| packer.stack(parts)).and_then(|matrix| self.with_f8_scratch(matrix))
    }

    fn matrix_leaves(&self, stored: StoredMatrix<'_>, leaves: &Leaves, owned: Range<u32>) -> Result<Matrix> {
        self.packer(|packer| packer.of_leaves(stored, leaves, owned)).and_then(|matrix| self.with_f8_scratch(matrix))
    }

    fn vector(&self, values: &[f32]) -> Result<Vector> {
        Ok(Vector { bytes: self.floats("a vector", values)?, len: values.len() })
    }

    fn rope(&self, cos: &[f32], sin: &[f32], half_dim: usize, style: RopeStyle) -> Result<Rope> {
        Rope::new(self, cos, sin, half_dim, style)
    }

    fn parallel_for(&self, n_items: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
        self.host.team.run(n_items, work);
    }

    fn matrix_bytes(&self, matrix: &Matrix) -> usize {
        matrix.n_bytes
    }
}

impl KvPages for Cuda {
    type Kv = Kv;

    fn kv(&self, spec: KvSpec) -> Result<Kv> {
        Kv::new(self, spec)
    }

    fn clear(&self, kv: &mut Kv, blocks: &[BlockId]) {
        if self.is_well() {
            self.keep_error(kv.clear(&self.stream, blocks));
        }
    }

    fn page_mover(&self, kv: &Kv) -> Result<Box<dyn PageMover>> {
        Ok(Box::new(CudaPages::new(self, kv)?))
    }

    fn read_block(&self, kv: &Kv, layer: usize, block: BlockId) -> Vec<u8> {
        let (at, n_bytes) = kv.block_span(layer, block);
        let mut bytes = vec![0; n_bytes];
        self.fetch(&kv.bytes, at, &mut bytes);
        bytes
    }
}

impl Memory for Cuda {
    type Buffer = Buffer;
    type Routes = Routes;

    fn class(&self) -> DeviceClass {
        DeviceClass::Cuda
    }

    fn device_kind(&self) -> DeviceKind {
        self.card.device_kind()
    }

    fn numerics_mode(&self) -> NumericsMode {
        self.mode
    }

    fn buffer(&self, rows_max: usize, cols: usize) -> Result<Buffer> {
        let too_big = || Error::Shape(format!("a buffer of {rows_max} x {cols}"));
        let size =
            |cols: usize, each: usize| rows_max.checked_mul(cols).and_then(|n| n.checked_mul(each)).ok_or_else(too_big);
        if u32::try_from(cols).is_err() || u32::try_from(rows_max).is_err() {
            return Err(too_big());
        }
        let (in_f32, in_bf16) = (size(cols, 4)?, size(padded(cols), 2)?);
        self.forget_graphs();
        self.scratch().reserve(&self.context, &self.card, rows_max, padded(cols) * 2)?;
        let bytes = DeviceMemory::new(&self.context, "a buffer", in_f32.max(in_bf16))?;
        self.stream.fill(&bytes, 0)?;
        Ok(Buffer { bytes, rows_max, cols, is_bf16: AtomicBool::new(false) })
    }

    fn routes(&self, rows_max: usize, hidden: usize, inner: usize, routing: Routing) -> Result<Routes> {
        Routes::new(self, rows_max, hidden, inner, routing)
    }

    fn read(&self, buffer: &Buffer, rows: Range<usize>, out: &mut [f32]) {
        buffer.check(rows.end, buffer.cols);
        assert_eq!(out.len(), rows.len() * buffer.cols, "room for {rows:?} of {} columns", buffer.cols);
        let start = rows.start * buffer.row_bytes();
        match buffer.is_bf16() {
            false => self.fetch(&buffer.bytes, start, bytemuck::cast_slice_mut(out)),
            true => {
                for (row, out) in rows.zip(out.chunks_exact_mut(buffer.cols.max(1))) {
                    self.read_part(buffer, row, 0, out);
                }
            }
        }
    }

    fn write(&self, buffer: &mut Buffer, row: usize, values: &[f32]) {
        let cols = buffer.cols;
        assert!(cols > 0 && values.len().is_multiple_of(cols), "{} values in rows of {cols}", values.len());
        buffer.check(row + values.len() / cols, cols);
        self.to_f32(buffer, buffer.rows_max);
        self.keep_error(self.upload_bytes(&buffer.bytes, row * cols * 4, bytemuck::cast_slice(values)));
    }

    fn cols(&self, buffer: &Buffer) -> usize {
        buffer.cols
    }

    fn read_part(&self, buffer: &Buffer, row: usize, col: usize, out: &mut [f32]) {
        buffer.check(row + 1, buffer.cols);
        assert!(col + out.len() <= buffer.cols, "{} columns from {col} of {}", out.len(), buffer.cols);
        if !buffer.is_bf16() {
            let at = (row * buffer.cols + col) * 4;
            return self.fetch(&buffer.bytes, at, bytemuck::cast_slice_mut(out));
        }
        const PIECE: usize = 512;
        let mut halves = [0u16; PIECE];
        for (i, out) in out.chunks_mut(PIECE).enumerate() {
            let halves = &mut halves[..out.len()];
            let at = row * buffer.row_bytes() + (col + i * PIECE) * 2;
            self.fetch(&buffer.bytes, at, bytemuck::cast_slice_mut(halves));
            out.iter_mut().zip(halves).for_each(|(out, bits)| *out = bf16::from_bits(*bits).to_f32());
        }
    }

    fn write_part(&self, buffer: &mut Buffer, row: usize, col: usize, values: &[f32]) {
        buffer.check(row + 1, buffer.cols);
        assert!(col + values.len() <= buffer.cols, "{} columns from {col} of {}", values.len(), buffer.cols);
        self.to_f32(buffer, buffer.rows_max);
        self.keep_error(self.upload_bytes(&buffer.bytes, (row * buffer.cols + col) * 4, bytemuck::cast_slice(values)));
    }
}
