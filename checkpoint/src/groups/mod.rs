//! A matrix of few bits that a folder stores as several tensors, read as the blocks of one. Knows neither their names
//! nor the config.
//!
//! ```text
//! layout   used by             digits                          zeros                  scales
//! Down     GPTQ                [k / n, rows] words of n k      [groups, rows / n]     [groups, rows]
//! Across   AWQ                 [k, rows / n] words of n rows   [groups, rows / n]     [groups, rows]
//! Along    compressed-tensors  [rows, k / n] words of n k      [rows / n, groups]     [rows, groups]
//! Bytes    the same, LLM.int8  [rows, k], signed               [rows, groups]         [rows, groups]
//! ```
//! A word has 32 bits, with its first digit in the lowest; `n` digits of three bits fill three words. In AWQ the even
//! rows of eight come first. Signed digits and zeros are read with their middle added. Digits of two and three bits
//! become digits of four.

pub(crate) mod cells;
pub(crate) mod codes;
pub(crate) mod fp4;
pub(crate) mod join;
pub(crate) mod method;
mod scattered;
mod words;

use crate::error::{Error, Result};
use crate::file::SourceFile;
use cells::ShardMatrix;
use codes::CodebookMatrix;
use fp4::Fp4Matrix;
use half::f16;
use std::ops::Range;
use types::{DigitBits, Dtype, GroupedDtype};
use words::{WordPacking, words_of};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DigitLayout {
    Down,
    Across,
    Along,
    Bytes,
}

/// The reader of a matrix that consists of several tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MatrixReader<'a> {
    Groups(&'a GroupQuantMatrix),
    Codes(&'a CodebookMatrix),
    Fp4(&'a Fp4Matrix),
}

impl MatrixReader<'_> {
    pub fn shape(&self) -> [usize; 2] {
        match self {
            MatrixReader::Groups(of) => of.shape,
            MatrixReader::Codes(of) => of.shape,
            MatrixReader::Fp4(of) => of.shape,
        }
    }

    pub fn dtype(&self) -> Dtype {
        match self {
            MatrixReader::Groups(of) => of.dtype(),
            MatrixReader::Codes(of) => of.dtype,
            MatrixReader::Fp4(_) => Fp4Matrix::DTYPE,
        }
    }

    /// Returns where its digits are: the file and the position.
    pub fn file_and_start(&self) -> (usize, usize) {
        let digits = match self {
            MatrixReader::Groups(of) => of.digits,
            MatrixReader::Codes(of) => of.digits,
            MatrixReader::Fp4(of) => of.digits,
        };
        (digits.shard, digits.start)
    }

    pub fn edge_bytes(&self, files: &[SourceFile], n: usize) -> Result<Vec<u8>> {
        match self {
            MatrixReader::Groups(of) => of.edge_bytes(files, n),
            MatrixReader::Codes(of) => of.edge_bytes(files, n),
            MatrixReader::Fp4(of) => of.edge_bytes(files, n),
        }
    }

    pub fn read_rows(&self, files: &[SourceFile], rows: Range<usize>, to: &mut [u8]) -> Result<()> {
        match self {
            MatrixReader::Groups(of) => of.read_rows(files, rows, to),
            MatrixReader::Codes(of) => of.read_rows(files, rows, to),
            MatrixReader::Fp4(of) => of.read_rows(files, rows, to),
        }
    }
}

/// The row of eight at each place of an AWQ word.
const EVEN_FIRST: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Which group a column belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ColumnGroups {
    /// The one that contains it. A tensor that lists the groups must agree.
    InOrder(Option<ShardMatrix>),
    /// The one that this tensor lists, in words.
    Scattered(ShardMatrix),
}

/// One matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupQuantMatrix {
    pub layout: DigitLayout,
    /// How the file packs digits and zeros, where they are in words.
    pub packing: WordPacking,
    pub grouped: GroupedDtype,
    /// Rows and columns of the matrix.
    pub shape: [usize; 2],
    /// Columns that share a scale.
    pub columns: usize,
    pub digits: ShardMatrix,
    pub scales: ShardMatrix,
    pub zeros: Option<ShardMatrix>,
    /// Added to stored zeros.
    pub zero_plus: u16,
    pub groups: ColumnGroups,
    /// Scales are relative to numbers that were divided by this.
    pub divisor: Option<u16>,
}

impl GroupQuantMatrix {
    /// The first and the last bytes of all its tensors.
    pub fn edge_bytes(&self, files: &[SourceFile], n: usize) -> Result<Vec<u8>> {
        let order = if let ColumnGroups::Scattered(order) = self.groups { Some(order) } else { None };
        let all = [Some(self.digits), Some(self.scales), self.zeros, order].into_iter().flatten();
        let ends = all.map(|cells| cells.edge_bytes(files, n)).collect::<Result<Vec<_>>>()?;
        Ok(ends.concat())
    }

    /// Some rows, one after another: their blocks, or the numbers if their groups are scattered.
    pub fn read_rows(&self, files: &[SourceFile], rows: Range<usize>, to: &mut [u8]) -> Result<()> {
        match self.groups {
            ColumnGroups::Scattered(order) => return self.read_numbers(files, &rows, order, to),
            ColumnGroups::InOrder(Some(order)) => self.check_order(files, order)?,
            ColumnGroups::InOrder(None) => {}
        }
        let (k, n_groups) = (self.shape[1], self.n_groups());
        let (digits, scales) = (self.read_digits(files, &rows)?, self.read_scales(files, &rows)?);
        let zeros = self.read_zeros(files, &rows)?;
        let (size, n_scale) = (self.grouped.size.n(), self.grouped.scale.bytes());
        let blocks = to.chunks_exact_mut(self.grouped.block_bytes()).zip(digits.chunks_exact(size));
        for (i, (to, digits)) in blocks.enumerate() {
            let (row, column) = (i / (k / size), i % (k / size) * size);
            let group = row * n_groups + column / self.columns;
            let (head, packed) = to.split_at_mut(self.grouped.head_bytes());
            let (scale, zero) = head.split_at_mut(n_scale);
            scale.copy_from_slice(&scales[group * n_scale..][..n_scale]);
            if let Some(zeros) = &zeros {
                zero.copy_from_slice(&f16::from_f32(f32::from(zeros[group])).to_le_bytes());
            }
            pack(self.grouped.digits, digits, packed);
        }
        Ok(())
    }

    fn n_groups(&self) -> usize {
        self.shape[1] / self.columns
    }

    /// The row at a place of a run.
    fn row_at(&self, place: usize) -> usize {
        if self.layout == DigitLayout::Across { EVEN_FIRST[place] } else { place }
    }

    /// One byte each, `[rows, k]`.
    fn read_digits(&self, files: &[SourceFile], rows: &Range<usize>) -> Result<Vec<u8>> {
        let (k, packing) = (self.shape[1], self.packing);
        let (n, n_words) = (packing.n_digits(), packing.n_words());
        let mut digits = vec![0; rows.len() * k];
        match self.layout {
            DigitLayout::Down => {
                let words = self.digits.read(files, 0..k / n * n_words, rows.clone())?;
                for (i, run) in packing.runs_down(&words, rows.len()).enumerate() {
                    let at = i % rows.len() * k + i / rows.len() * n;
                    digits[at..at + n].iter_mut().zip(packing.digits(run)).for_each(|(to, digit)| *to = digit);
                }
            }
            DigitLayout::Across => {
                let of_rows = rows.start / n..rows.end.div_ceil(n);
                let words = self.digits.read(files, 0..k, of_rows.clone())?;
                for (i, run) in packing.runs(&words).enumerate() {
                    let (column, first) = (i / of_rows.len(), (of_rows.start + i % of_rows.len()) * n);
                    for (place, digit) in packing.digits(run).enumerate() {
                        let row = first + self.row_at(place);
                        if rows.contains(&row) {
                            digits[(row - rows.start) * k + column] = digit;
                        }
                    }
                }
            }
            DigitLayout::Along => {
                let words = self.digits.read(files, rows.clone(), 0..k / n)?;
                let each = packing.runs(&words).flat_map(|run| packing.digits(run));
                digits.iter_mut().zip(each).for_each(|(to, digit)| *to = digit);
            }
            DigitLayout::Bytes => {
                digits = self.digits.read(files, rows.clone(), 0..k)?;
                digits.iter_mut().for_each(|digit| *digit ^= DigitBits::Eight.middle());
            }
        }
        Ok(digits)
    }

    /// `[rows, groups]`.
    fn read_zeros(&self, files: &[SourceFile], rows: &Range<usize>) -> Result<Option<Vec<u16>>> {
        let Some(cells) = self.zeros else { return Ok(None) };
        let (packing, n, n_groups) = (self.packing, self.packing.n_digits(), self.n_groups());
        let of_rows = rows.start / n..rows.end.div_ceil(n);
        let words = match self.layout {
            DigitLayout::Bytes => {
                let zeros = cells.read(files, rows.clone(), 0..n_groups)?;
                return Ok(Some(zeros.into_iter().map(|zero| u16::from(zero ^ DigitBits::Eight.middle())).collect()));
            }
            DigitLayout::Along => cells.read(files, of_rows.clone(), 0..n_groups)?,
            DigitLayout::Down | DigitLayout::Across => {
                let n_words = packing.n_words();
                cells.read(files, 0..n_groups, of_rows.start * n_words..of_rows.end * n_words)?
            }
        };
        let mut zeros = vec![0; rows.len() * n_groups];
        for (i, run) in packing.runs(&words).enumerate() {
            let (group, run_row) = match self.layout {
                DigitLayout::Along => (i % n_groups, i / n_groups),
                _ => (i / of_rows.len(), i % of_rows.len()),
            };
            let first = (of_rows.start + run_row) * n;
            for (place, zero) in packing.digits(run).enumerate() {
                let row = first + self.row_at(place);
                if rows.contains(&row) {
                    zeros[(row - rows.start) * n_groups + group] = self.decode_zero(files, zero)?;
                }
            }
        }
        Ok(Some(zeros))
    }

    /// Decodes a stored zero.
    fn decode_zero(&self, files: &[SourceFile], stored: u8) -> Result<u16> {
        let largest = u8::MAX >> (8 - self.packing.bits());
        if self.zero_plus > 0 && stored == largest {
            let what =
                format!("a zero of GPTQ's first format that is stored as {stored}, which tools read differently,");
            return Err(Error::Unsupported { path: files[self.digits.shard].path().to_owned(), what });
        }
        Ok(u16::from(stored) + self.zero_plus)
    }

    /// `[rows, groups]` of the scales' type.
    fn read_scales(&self, files: &[SourceFile], rows: &Range<usize>) -> Result<Vec<u8>> {
        let (n, n_groups, cells) = (self.grouped.scale.bytes(), self.n_groups(), &self.scales);
        let mut scales = match self.layout {
            DigitLayout::Down | DigitLayout::Across => {
                let turned = cells.read(files, 0..n_groups, rows.clone())?;
                let mut scales = vec![0; turned.len()];
                for (i, scale) in turned.chunks_exact(n).enumerate() {
                    let at = i % rows.len() * n_groups + i / rows.len();
                    scales[at * n..][..n].copy_from_slice(scale);
                }
                scales
            }
            DigitLayout::Along | DigitLayout::Bytes if cells.rows == 1 => {
                cells.read(files, 0..1, 0..n_groups)?.repeat(rows.len())
            }
            DigitLayout::Along | DigitLayout::Bytes => cells.read(files, rows.clone(), 0..n_groups)?,
        };
        if let Some(divisor) = self.divisor {
            let divided =
                |bytes: &mut [u8; 4]| *bytes = (f32::from_le_bytes(*bytes) / f32::from(divisor)).to_le_bytes();
            scales.as_chunks_mut().0.iter_mut().for_each(divided);
        }
        Ok(scales)
    }

    /// Refuses a matrix whose columns are not in the order of their groups.
    fn check_order(&self, files: &[SourceFile], order: ShardMatrix) -> Result<()> {
        let groups = order.read(files, 0..order.rows, 0..order.cols)?;
        if are_in_order(&groups, self.columns) {
            return Ok(());
        }
        let what = "a matrix whose first columns are in the order of their groups, but not the later ones (act-order)";
        Err(Error::Unsupported { path: files[order.shard].path().to_owned(), what: what.to_owned() })
    }
}

/// Whether these are the groups of the first columns, with so many columns for each.
fn are_in_order(groups: &[u8], columns: usize) -> bool {
    words_of(groups).enumerate().all(|(column, group)| group as usize == column / columns)
}

/// Packs a block's digits, which come as one byte each.
fn pack(bits: DigitBits, digits: &[u8], to: &mut [u8]) {
    match bits {
        DigitBits::Eight => to.copy_from_slice(digits),
        DigitBits::Four => {
            for (digits, to) in digits.as_chunks::<32>().0.iter().zip(to.as_chunks_mut::<16>().0) {
                let (low, high) = digits.split_at(16);
                to.iter_mut().zip(low.iter().zip(high)).for_each(|(to, (low, high))| *to = low | high << 4);
            }
        }
    }
}
