//! Finds a model's tensors by name, reads what this rank owns of them, and hands it to the device. Knows names and
//! shapes, not what they are for.
//!
//! What was read is freed once it is packed: beside the packed weights there is one stack of matrices in memory at a
//! time. The device's threads read and hash as they pack, so nothing is packed without a hash. A matrix that a file of
//! packed matrices has is not read from the checkpoint.

use crate::error::{Error, Result};
use crate::packed::{PackedMatrices, PackedOrigin};
use backend::{MatrixShape, Memory, PackedBytes, RopeStyle, StoredMatrix};
use checkpoint::{BandHashes, Checkpoint, Tensor, TensorWindow};
use collective::CancelFlag;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use types::{Leaves, PieceRun, RankPart};

/// The rows of one matrix that a rank owns.
pub struct MatrixRows<'a> {
    pub name: &'a str,
    /// Rows of the whole matrix.
    pub n: usize,
    pub owned: Range<usize>,
}

impl<'a> MatrixRows<'a> {
    /// All rows of the matrix.
    pub fn all(name: &'a str, n: usize) -> MatrixRows<'a> {
        MatrixRows { name, n, owned: 0..n }
    }
}

/// A weight in memory, by the names of the tensors that are in it.
#[derive(Clone)]
pub struct PackedWeight {
    pub name: String,
    pub bytes: PackedBytes,
}

/// Totals of what has been loaded so far.
#[derive(Default)]
pub struct LoadTotals {
    /// Bytes that all packed matrices occupy.
    pub n_bytes: Cell<usize>,
    /// Bytes that were read from the checkpoint.
    pub n_read: Cell<u64>,
    /// Hashes of the bytes that were read.
    pub runs: RefCell<Vec<PieceRun>>,
    pub packed: RefCell<Vec<PackedWeight>>,
}

/// The tensors under a path of the checkpoint (`model.layers.3.` and what follows), for a rank and its device.
pub struct WeightLoader<'a, M: Memory> {
    checkpoint: &'a Checkpoint,
    device: &'a M,
    part: &'a RankPart,
    intake: &'a LoadTotals,
    source: LoadSource<'a>,
    path: String,
}

/// Where matrices may come from besides the checkpoint, and when to stop.
#[derive(Clone, Copy)]
pub struct LoadSource<'a> {
    pub cancel: &'a CancelFlag,
    /// Matrices that were packed by an earlier load of the same part.
    pub packed: Option<&'a PackedMatrices>,
}

/// The part of one tensor that goes into a matrix.
struct MatrixWindow<'a> {
    path: String,
    window: TensorWindow<'a>,
    /// Some of the columns of the window, which has whole blocks.
    columns: Option<Range<usize>>,
}

impl<'a, M: Memory> WeightLoader<'a, M> {
    pub fn new(
        checkpoint: &'a Checkpoint,
        device: &'a M,
        part: &'a RankPart,
        intake: &'a LoadTotals,
        source: LoadSource<'a>,
    ) -> WeightLoader<'a, M> {
        WeightLoader { checkpoint, device, part, intake, source, path: String::new() }
    }

    pub fn at_path(&self, part: impl std::fmt::Display) -> WeightLoader<'a, M> {
        WeightLoader { path: format!("{}{part}.", self.path), ..*self }
    }

    pub fn device(&self) -> &'a M {
        self.device
    }

    /// This rank's part of the model.
    pub fn part(&self) -> &'a RankPart {
        self.part
    }

    /// Loads each of this rank's layers from its tensors; `load` gets the layer's number in the model.
    pub fn layers<T>(&self, load: impl Fn(&WeightLoader<'a, M>, usize) -> Result<T>) -> Result<Vec<T>> {
        let all = self.at_path("model.layers");
        self.part.layers.clone().map(|layer| load(&all.at_path(layer), layer as usize)).collect()
    }

    /// A vector on the device, made of what was read as `name`.
    pub fn vector(&self, name: &str, values: &[f32]) -> Result<M::Vector> {
        let vector = self.device.vector(values)?;
        self.note_packed(name, self.device.vector_bytes(&vector));
        Ok(vector)
    }

    /// Cosines and sines per position, `[context, half_dim]`.
    pub fn rope(&self, [cos, sin]: [&[f32]; 2], half_dim: usize, style: RopeStyle) -> Result<M::Rope> {
        let rope = self.device.rope(cos, sin, half_dim, style)?;
        let names = ["cosines of positions", "sines of positions"];
        self.device
            .rope_bytes(&rope)
            .into_iter()
            .flatten()
            .zip(names)
            .for_each(|(bytes, name)| self.note_packed(name, Some(bytes)));
        Ok(rope)
    }

    /// `{name}.weight`, a vector of `len` in f32, each number plus `offset`.
    pub fn vector_plus(&self, name: &str, len: usize, offset: f32) -> Result<M::Vector> {
        let values = self.numbers(&format!("{name}.weight"), [1, len])?;
        self.vector(&format!("{name}.weight"), &values.into_iter().map(|value| value + offset).collect::<Vec<_>>())
    }

    /// Some of the elements of a vector.
    pub fn vector_part(&self, name: &str, len: usize, owned: Range<usize>) -> Result<M::Vector> {
        self.vector(name, &self.numbers(name, [1, len])?[owned])
    }

    /// Some of the elements of `{name}.bias`; None where the checkpoint has no such tensor.
    pub fn bias(&self, name: &str, len: usize, owned: Range<usize>) -> Result<Option<Vec<f32>>> {
        let name = format!("{name}.bias");
        if !self.checkpoint.has(&format!("{}{name}", self.path)) {
            return Ok(None);
        }
        Ok(Some(self.numbers(&name, [1, len])?[owned].to_vec()))
    }

    /// A vector as it is stored, or a small matrix that meets no input.
    pub fn numbers(&self, name: &str, shape: [usize; 2]) -> Result<Vec<f32>> {
        let (path, tensor) = self.tensor(name, shape)?;
        let (read, runs) = self.read(&path, TensorWindow::whole(tensor, self.checkpoint.pieces(&path)?))?;
        self.intake.runs.borrow_mut().extend(runs);
        Ok(tensor.decode_f32(&read.bytes))
    }

    /// Rows of `{name}.weight`, matrices of `k` columns that meet the same input, stacked.
    pub fn rows(&self, k: usize, parts: &[MatrixRows<'_>]) -> Result<M::Matrix> {
        let window = |part: &MatrixRows<'_>| {
            let (path, tensor) = self.tensor(&format!("{}.weight", part.name), [part.n, k])?;
            let window = TensorWindow::of_rows(tensor, self.checkpoint.pieces(&path)?, part.owned.clone());
            Ok(MatrixWindow { path, window, columns: None })
        };
        let windows = parts.iter().map(window).collect::<Result<Vec<_>>>()?;
        let names = parts.iter().map(|part| part.name).collect::<Vec<_>>().join("+");
        self.matrix(&names, windows, None)
    }

    /// Columns of `{name}.weight`, a matrix of `[n_out, leaves.k()]`, that are the leaves `owned` of its sum.
    pub fn leaves(&self, name: &str, n_out: usize, leaves: &Leaves, owned: Range<u32>) -> Result<M::Matrix> {
        let (path, tensor) = self.tensor(&format!("{name}.weight"), [n_out, leaves.k() as usize])?;
        let elements = leaves.elements(&owned);
        let columns = elements.start as usize..elements.end as usize;
        let window = TensorWindow::of_columns(tensor, self.checkpoint.pieces(&path)?, columns.clone());
        self.matrix(name, vec![MatrixWindow { path, window, columns: Some(columns) }], Some((leaves, owned)))
    }

    /// The matrix of these windows, stacked: as it was packed before, or read and packed.
    fn matrix(
        &self,
        names: &str,
        windows: Vec<MatrixWindow<'a>>,
        leaves: Option<(&Leaves, Range<u32>)>,
    ) -> Result<M::Matrix> {
        let Some(packed) = self.source.packed else {
            let (matrix, runs) = self.pack(windows, leaves)?;
            return Ok(self.note_matrix(names, matrix, runs));
        };
        let parts = windows.iter().map(MatrixWindow::shape).collect::<Result<Vec<_>>>()?;
        let name = windows.iter().map(MatrixWindow::name).collect::<Vec<_>>().join(" + ");
        let shape = MatrixShape { parts: &parts, leaves: leaves.clone() };
        let origin = PackedOrigin::new(name, &shape);
        if let Some((matrix, runs)) = packed.restore(self.device, &origin, &shape)? {
            return Ok(self.note_matrix(names, matrix, runs));
        }
        let (matrix, runs) = self.pack(windows, leaves)?;
        packed.gather(self.device, origin, &matrix, runs.clone());
        Ok(self.note_matrix(names, matrix, runs))
    }

    /// Reads and packs. Also returns the hashes of what was read.
    fn pack(
        &self,
        windows: Vec<MatrixWindow<'a>>,
        leaves: Option<(&Leaves, Range<u32>)>,
    ) -> Result<(M::Matrix, Vec<PieceRun>)> {
        let (mut read, mut all_runs) = (Vec::with_capacity(windows.len()), Vec::new());
        for MatrixWindow { path, window, columns } in windows {
            let (loaded, runs) = self.read(&path, window)?;
            all_runs.extend(runs);
            read.push((loaded, columns));
        }
        let stored = read.iter().map(|(loaded, columns)| cut(&loaded.window, loaded.stored(), columns.as_ref()));
        let stored = stored.collect::<Result<Vec<_>>>()?;
        let matrix = match (leaves, &stored[..]) {
            (Some((leaves, owned)), [stored]) => self.device.matrix_leaves(*stored, leaves, owned)?,
            _ => self.device.matrix(&stored)?,
        };
        Ok((matrix, all_runs))
    }

    /// Reads on all threads of the device.
    fn read(&self, path: &str, window: TensorWindow<'a>) -> Result<(LoadedWindow<'a>, Vec<PieceRun>)> {
        let mut bytes = vec![0; window.n_bytes()];
        let bands = self.fill(&window, &mut bytes)?;
        let scales = window.tensor().scales.map(|of| of.bytes.read()).transpose()?;
        let n_read = bytes.len() + scales.as_ref().map_or(0, Vec::len);
        self.intake.n_read.set(self.intake.n_read.get() + n_read as u64);
        // A rank that owns nothing of the tensor has read nothing.
        let run = (!bands.is_empty()).then(|| window.combine_hashes(path, &bands));
        let of_scales = scales.as_ref().map(|bytes| Checkpoint::hash_scales(path, bytes));
        Ok((LoadedWindow { window, bytes, scales }, run.into_iter().chain(of_scales).collect()))
    }

    fn fill(&self, window: &TensorWindow<'a>, bytes: &mut [u8]) -> Result<Vec<BandHashes>> {
        let places: Vec<Mutex<(&mut [u8], BandHashes)>> =
            window.split_bands(bytes).into_iter().map(|place| Mutex::new((place, BandHashes::new()))).collect();
        let failed = Mutex::new(None);
        self.device.parallel_for(places.len(), &|bands| {
            for band in bands {
                let mut place = places[band].lock().unwrap_or_else(PoisonError::into_inner);
                match window.fill(band, place.0) {
                    Ok(hashes) => place.1 = hashes,
                    Err(error) => {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                    }
                }
            }
        });
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error.into()),
            None => {
                let hashes =
                    |place: Mutex<(_, BandHashes)>| place.into_inner().unwrap_or_else(PoisonError::into_inner).1;
                Ok(places.into_iter().map(hashes).collect())
            }
        }
    }

    fn note_matrix(&self, name: &str, matrix: M::Matrix, runs: Vec<PieceRun>) -> M::Matrix {
        self.intake.runs.borrow_mut().extend(runs);
        self.note_packed(&format!("{name}.weight"), self.device.packed_bytes(&matrix));
        self.intake.n_bytes.set(self.intake.n_bytes.get() + self.device.matrix_bytes(&matrix));
        matrix
    }

    /// Notes what is in this process's memory of a weight.
    fn note_packed(&self, name: &str, bytes: Option<PackedBytes>) {
        let name = || format!("{}{name}", self.path);
        self.intake.packed.borrow_mut().extend(bytes.map(|bytes| PackedWeight { name: name(), bytes }));
    }

    /// A tensor by its full name.
    fn tensor(&self, name: &str, expected: [usize; 2]) -> Result<(String, Tensor<'a>)> {
        if self.source.cancel.is_cancelled() {
            return Err(Error::BrokenOff);
        }
        let path = format!("{}{name}", self.path);
        let tensor = self.checkpoint.tensor(&path)?;
        if tensor.shape != expected {
            return Err(Error::Shape { tensor: path, shape: tensor.shape, expected });
        }
        Ok((path, tensor))
    }
}

impl MatrixWindow<'_> {
    /// Its place in the packed matrix, without its bytes.
    fn shape(&self) -> Result<StoredMatrix<'static>> {
        let (rows, columns) = (self.window.rows().len(), self.window.columns().len());
        let whole = StoredMatrix::whole(self.window.tensor().dtype, rows, columns, &[]);
        cut(&self.window, whole, self.columns.as_ref())
    }

    fn name(&self) -> String {
        let rows = self.window.rows();
        match &self.columns {
            Some(columns) => format!("{} rows {rows:?} columns {columns:?}", self.path),
            None => format!("{} rows {rows:?}", self.path),
        }
    }
}

/// The requested columns of what a window has: the file is read in whole blocks.
fn cut<'b>(
    window: &TensorWindow<'_>,
    stored: StoredMatrix<'b>,
    columns: Option<&Range<usize>>,
) -> Result<StoredMatrix<'b>> {
    let first = window.columns().start;
    match columns.filter(|columns| !columns.is_empty()) {
        Some(columns) => Ok(stored.columns(columns.start - first..columns.end - first)?),
        None => Ok(stored),
    }
}

/// A part of a matrix in memory.
struct LoadedWindow<'a> {
    window: TensorWindow<'a>,
    bytes: Vec<u8>,
    /// All scales of the tensor.
    scales: Option<Vec<u8>>,
}

impl LoadedWindow<'_> {
    fn stored(&self) -> StoredMatrix<'_> {
        let (tensor, rows, columns) = (self.window.tensor(), self.window.rows(), self.window.columns());
        let bytes = self.window.requested_bytes(&self.bytes);
        let stored = StoredMatrix::whole(tensor.dtype, rows.len(), columns.len(), bytes);
        let (Some(of), Some(bytes)) = (&tensor.scales, &self.scales) else { return stored };
        stored.scaled(of.with(&bytes[..]).from(rows.start, columns.start))
    }
}
