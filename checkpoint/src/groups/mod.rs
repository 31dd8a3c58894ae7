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
//! A word has 32 bits, with its first digit in the lowest. In AWQ the even rows of eight come first. Signed digits and
//! zeros are read with their middle added.

pub(crate) mod codes;
pub(crate) mod join;
pub(crate) mod method;

use crate::error::{Error, Result};
use crate::file::SourceFile;
use codes::CodebookMatrix;
use half::f16;
use std::ops::Range;
use types::{DigitBits, Dtype, GroupedDtype};

/// Numbers in a file, in rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardMatrix {
    pub shard: usize,
    pub start: usize,
    pub rows: usize,
    pub cols: usize,
    /// Bytes per number.
    pub size: usize,
}

impl ShardMatrix {
    /// Some columns of some rows, one row after another.
    fn read(&self, files: &[SourceFile], rows: Range<usize>, cols: Range<usize>) -> Result<Vec<u8>> {
        let (stride, width) = (self.cols * self.size, cols.len() * self.size);
        let mut bytes = vec![0; rows.len() * width];
        if width == 0 {
            return Ok(bytes);
        }
        // Neighbouring rows are one run if every column is read.
        let run = if width == stride { bytes.len() } else { width };
        for (i, to) in bytes.chunks_exact_mut(run.max(1)).enumerate() {
            let at = self.start + (rows.start + i) * stride + cols.start * self.size;
            files[self.shard].read_at(at as u64, to)?;
        }
        Ok(bytes)
    }

    /// Reads a range of its numbers, counted through all rows.
    fn read_range(&self, files: &[SourceFile], cells: Range<usize>) -> Result<Vec<u8>> {
        let mut bytes = vec![0; cells.len() * self.size];
        files[self.shard].read_at((self.start + cells.start * self.size) as u64, &mut bytes)?;
        Ok(bytes)
    }

    /// The first and the last `n` bytes.
    fn edge_bytes(&self, files: &[SourceFile], n: usize) -> Result<Vec<u8>> {
        let n_bytes = self.rows * self.cols * self.size;
        let n = n.min(n_bytes);
        let mut ends = vec![0; 2 * n];
        let (first, last) = ends.split_at_mut(n);
        files[self.shard].read_at(self.start as u64, first)?;
        files[self.shard].read_at((self.start + n_bytes - n) as u64, last)?;
        Ok(ends)
    }
}

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
}

impl MatrixReader<'_> {
    pub fn shape(&self) -> [usize; 2] {
        match self {
            MatrixReader::Groups(of) => of.shape,
            MatrixReader::Codes(of) => of.shape,
        }
    }

    pub fn dtype(&self) -> Dtype {
        match self {
            MatrixReader::Groups(of) => Dtype::Grouped(of.grouped),
            MatrixReader::Codes(of) => of.dtype,
        }
    }

    /// Returns where its digits are: the file and the position.
    pub fn file_and_start(&self) -> (usize, usize) {
        let digits = match self {
            MatrixReader::Groups(of) => of.digits,
            MatrixReader::Codes(of) => of.digits,
        };
        (digits.shard, digits.start)
    }

    pub fn edge_bytes(&self, files: &[SourceFile], n: usize) -> Result<Vec<u8>> {
        match self {
            MatrixReader::Groups(of) => of.edge_bytes(files, n),
            MatrixReader::Codes(of) => of.edge_bytes(files, n),
        }
    }

    pub fn read_rows(&self, files: &[SourceFile], rows: Range<usize>, to: &mut [u8]) -> Result<()> {
        match self {
            MatrixReader::Groups(of) => of.read_rows(files, rows, to),
            MatrixReader::Codes(of) => of.read_rows(files, rows, to),
        }
    }
}

/// The row of eight at each place of an AWQ word.
const EVEN_FIRST: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
const IN_ORDER: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

/// One matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupQuantMatrix {
    pub layout: DigitLayout,
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
    /// For each column its group, in words. It must be the group that contains the column.
    pub order: Option<ShardMatrix>,
    /// Scales are relative to numbers that were divided by this.
    pub divisor: Option<u16>,
}

impl GroupQuantMatrix {
    /// The first and the last bytes of all its tensors.
    pub fn edge_bytes(&self, files: &[SourceFile], n: usize) -> Result<Vec<u8>> {
        let all = [Some(self.digits), Some(self.scales), self.zeros].into_iter().flatten();
        let ends = all.map(|cells| cells.edge_bytes(files, n)).collect::<Result<Vec<_>>>()?;
        Ok(ends.concat())
    }

    /// The blocks of some rows, one row after another.
    pub fn read_rows(&self, files: &[SourceFile], rows: Range<usize>, to: &mut [u8]) -> Result<()> {
        self.check_order(files)?;
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

    /// DigitBits per word.
    fn per_word(&self) -> usize {
        32 / self.grouped.digits.bits()
    }

    fn row_order(&self) -> &'static [usize] {
        if self.layout == DigitLayout::Across { &EVEN_FIRST } else { &IN_ORDER[..self.per_word()] }
    }

    /// The digits of a word, the lowest first.
    fn digits_of_word(&self, word: u32) -> impl Iterator<Item = u8> + use<> {
        let (bits, n) = (self.grouped.digits.bits(), self.per_word());
        (0..n).map(move |i| (word >> (i * bits) & ((1 << bits) - 1)) as u8)
    }

    /// One byte each, `[rows, k]`.
    fn read_digits(&self, files: &[SourceFile], rows: &Range<usize>) -> Result<Vec<u8>> {
        let (k, n) = (self.shape[1], self.per_word());
        let mut digits = vec![0; rows.len() * k];
        match self.layout {
            DigitLayout::Down => {
                let words = self.digits.read(files, 0..k / n, rows.clone())?;
                for (i, word) in words_of(&words).enumerate() {
                    let at = i % rows.len() * k + i / rows.len() * n;
                    digits[at..at + n].iter_mut().zip(self.digits_of_word(word)).for_each(|(to, digit)| *to = digit);
                }
            }
            DigitLayout::Across => {
                let of_rows = rows.start / n..rows.end.div_ceil(n);
                let words = self.digits.read(files, 0..k, of_rows.clone())?;
                for (i, word) in words_of(&words).enumerate() {
                    let (column, first) = (i / of_rows.len(), (of_rows.start + i % of_rows.len()) * n);
                    for (row, digit) in self.row_order().iter().zip(self.digits_of_word(word)) {
                        if rows.contains(&(first + row)) {
                            digits[(first + row - rows.start) * k + column] = digit;
                        }
                    }
                }
            }
            DigitLayout::Along => {
                let words = self.digits.read(files, rows.clone(), 0..k / n)?;
                let each = words_of(&words).flat_map(|word| self.digits_of_word(word));
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
        let (n, n_groups) = (self.per_word(), self.n_groups());
        let of_rows = rows.start / n..rows.end.div_ceil(n);
        let words = match self.layout {
            DigitLayout::Bytes => {
                let zeros = cells.read(files, rows.clone(), 0..n_groups)?;
                return Ok(Some(zeros.into_iter().map(|zero| u16::from(zero ^ DigitBits::Eight.middle())).collect()));
            }
            DigitLayout::Along => cells.read(files, of_rows.clone(), 0..n_groups)?,
            DigitLayout::Down | DigitLayout::Across => cells.read(files, 0..n_groups, of_rows.clone())?,
        };
        let mut zeros = vec![0; rows.len() * n_groups];
        for (i, word) in words_of(&words).enumerate() {
            let (group, word_row) = match self.layout {
                DigitLayout::Along => (i % n_groups, i / n_groups),
                _ => (i / of_rows.len(), i % of_rows.len()),
            };
            let first = (of_rows.start + word_row) * n;
            for (row, zero) in self.row_order().iter().zip(self.digits_of_word(word)) {
                if rows.contains(&(first + row)) {
                    zeros[(first + row - rows.start) * n_groups + group] = self.decode_zero(files, zero)?;
                }
            }
        }
        Ok(Some(zeros))
    }

    /// Decodes a stored zero.
    fn decode_zero(&self, files: &[SourceFile], stored: u8) -> Result<u16> {
        let largest = u8::MAX >> (8 - self.grouped.digits.bits());
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
    fn check_order(&self, files: &[SourceFile]) -> Result<()> {
        let Some(cells) = self.order else { return Ok(()) };
        let order = cells.read(files, 0..cells.rows, 0..cells.cols)?;
        if words_of(&order).enumerate().all(|(column, group)| group as usize == column / self.columns) {
            return Ok(());
        }
        let what = "a matrix whose columns are not in the order of their groups (act-order, desc_act)".to_owned();
        Err(Error::Unsupported { path: files[cells.shard].path().to_owned(), what })
    }
}

fn words_of(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes))
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
