//! Hashes a model's bytes without loading it: all weights, or those that a rank once read. Knows pieces, but nothing of
//! the ranks that hold them.

use crate::error::Error;
use crate::tensor::Tensor;
use crate::threads::{StopFn, in_threads};
use crate::{Checkpoint, Result, TensorWindow, WeightPieces, names};
use std::ops::Range;
use types::{PieceHash, PieceRun};

/// The suffix of a weight's name for its scales.
const SCALES: &str = "_scale";
/// Pieces of one weight that are to be hashed.
struct PieceRange<'a> {
    weight: &'a str,
    pieces: Range<usize>,
}

impl Checkpoint {
    /// The pieces of the weight with this Hugging Face name.
    pub fn pieces(&self, name: &str) -> Result<WeightPieces> {
        Ok(self.pieces_of(name, &self.tensor(name)?))
    }

    fn pieces_of(&self, name: &str, tensor: &Tensor<'_>) -> WeightPieces {
        let cut_by = self.source(name).map_or([None, None], |source| source.cut_by);
        WeightPieces::of(&self.spec, cut_by, tensor)
    }

    /// The hash of a weight's scales, which are read as one piece.
    pub fn hash_scales(name: &str, bytes: &[u8]) -> PieceRun {
        let hashes = vec![PieceHash::of_parts([blake3::hash(bytes).into()])];
        PieceRun { weight: format!("{name}{SCALES}"), n_pieces: 1, first: 0, hashes }
    }

    /// The hashes of all weights, in ascending order of their names. Reads every file to its end.
    pub fn hash_weights(&self) -> Result<Vec<PieceRun>> {
        let mut names: Vec<String> =
            names::required_tensors(&self.spec).into_iter().map(|expected| expected.name).collect();
        let scaled = names.iter().filter(|name| self.find(name).is_some_and(|tensor| tensor.scales.is_some()));
        let scales: Vec<String> = scaled.map(|name| format!("{name}{SCALES}")).collect();
        names.extend(scales);
        names.sort_unstable();
        let piece_numbers = |name: &'_ String| -> Result<Range<usize>> {
            Ok(0..if self.has(name) { self.pieces(name)?.n() } else { 1 })
        };
        let pieces = names.iter().map(piece_numbers).collect::<Result<Vec<_>>>()?;
        let ranges = names.iter().zip(pieces).map(|(weight, pieces)| PieceRange { weight, pieces });
        self.hash_all(&ranges.collect::<Vec<_>>(), &|| false)
    }

    /// Returns the first weight whose bytes differ from `read`; None if none does. Stops when `is_over` is true: the
    /// result is then meaningless.
    pub fn first_difference(&self, read: &[PieceRun], is_over: StopFn<'_>) -> Result<Option<String>> {
        let pieces = |run: &PieceRun| run.first as usize..run.first as usize + run.hashes.len();
        let ranges: Vec<_> = read.iter().map(|run| PieceRange { weight: &run.weight, pieces: pieces(run) }).collect();
        let now = self.hash_all(&ranges, is_over)?;
        Ok(read.iter().zip(&now).find(|(before, now)| before != now).map(|(before, _)| before.weight.clone()))
    }

    /// Returns the hashes in the requested order; stops when `is_over` is true.
    fn hash_all(&self, ranges: &[PieceRange<'_>], is_over: StopFn<'_>) -> Result<Vec<PieceRun>> {
        let hashed = in_threads(ranges, is_over, |range| self.hash(range));
        let runs = hashed.into_iter().flatten().collect::<Result<Vec<_>>>()?;
        self.check_unchanged()?;
        Ok(runs)
    }

    fn hash(&self, PieceRange { weight, pieces }: &PieceRange<'_>) -> Result<PieceRun> {
        if let Some(tensor) = self.find(weight) {
            let cut = self.pieces_of(weight, &tensor);
            if pieces.end > cut.n() {
                return Err(self.no_weight(weight));
            }
            return TensorWindow::of_pieces(tensor, cut, pieces.clone()).read_and_hash(weight);
        }
        let of = weight.strip_suffix(SCALES).and_then(|name| Some((name, self.find(name)?.scales?)));
        let (name, scales) = of.ok_or_else(|| self.no_weight(weight))?;
        Ok(Checkpoint::hash_scales(name, &scales.bytes.read()?))
    }

    fn no_weight(&self, name: &str) -> Error {
        Error::NoTensor { path: self.path.clone(), name: name.to_owned() }
    }
}
