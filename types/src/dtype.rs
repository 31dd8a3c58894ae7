//! How the numbers of a matrix are stored: the types that files hold and devices pack, and how many bytes they take.
//! The one definition for all code that reads, measures and packs files. Reads no bytes itself.

use crate::grouped::GroupedDtype;

/// Within a block, `d` is a scale and `m` a minimum, both f16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    F32,
    F16,
    BF16,
    /// Blocks of 32: d, 16 bytes of nibbles (low nibbles are the first 16). Number: d × (nibble - 8).
    Q4_0,
    /// Blocks of 32: d, m, nibbles as above. Number: d × nibble + m.
    Q4_1,
    /// Blocks of 32: d, 32 fifth bits, nibbles. Number: d × (q - 16).
    Q5_0,
    /// Blocks of 32: d, m, 32 fifth bits, nibbles. Number: d × q + m.
    Q5_1,
    /// Blocks of 32: d, 32 × i8.
    Q8_0,
    /// Blocks of 256: 16 × (4 bits of scale, 4 of minimum), 2 bits each, d, m.
    Q2K,
    /// Blocks of 256: third bits, 2 bits each, 16 scales of 6 bits, d.
    Q3K,
    /// Blocks of 256: d, m, 8 × (6 bits of scale, 6 of minimum), nibbles.
    Q4K,
    /// Blocks of 256: as Q4K, with fifth bits.
    Q5K,
    /// Blocks of 256: low nibbles, upper 2 bits each, 16 × i8 scale, d.
    Q6K,
    /// Blocks of 32: d, nibbles that name one of sixteen numbers.
    IQ4NL,
    /// Blocks of 256: d, 8 × 6 bits of scale, nibbles that name one of sixteen numbers.
    IQ4XS,
    /// Blocks of 256: d, indices of runs of eight numbers, each one of three and an eighth more or less, 8 × 3 bits of
    /// scale.
    IQ1S,
    /// Blocks of 256: as IQ1S, with 16 × 3 bits of scale and d in four parts.
    IQ1M,
    /// Blocks of 256: d, indices of runs of eight numbers of three sizes, signs, 8 × 4 bits of scale.
    IQ2XXS,
    /// Blocks of 256: as IQ2XXS, with 16 × 4 bits of scale and twice as many runs.
    IQ2XS,
    /// Blocks of 256: as IQ2XS, with all signs and twice as many runs.
    IQ2S,
    /// Blocks of 256: d, indices of runs of four numbers of eight sizes, signs, 8 × 4 bits of scale.
    IQ3XXS,
    /// Blocks of 256: as IQ3XXS, with all signs and twice as many runs.
    IQ3S,
    /// Blocks of 256: digits of three values, five in a byte, d. Number: d × (digit - 1).
    TQ1_0,
    /// Blocks of 256: digits of three values, four in a byte, d. Number: d × (digit - 1).
    TQ2_0,
    /// Blocks of 32: an exponent, nibbles that are numbers of four bits.
    MXFP4,
    /// Blocks of 32, as devices cut it: numbers of eight bits, which are a sign, four bits of exponent and three of
    /// fraction, without infinities. Their scales are stored elsewhere: `Scales`.
    F8E4M3,
    /// Digits that share a scale with their neighbours; no file has them as they are cut here.
    Grouped(GroupedDtype),
}

/// The numbers that a cut of columns keeps together: each such run has its own scale within its block.
const SUB_BLOCK: usize = 32;

impl Dtype {
    /// Those that a file has as they are.
    const STORED: [Dtype; 26] = [
        Dtype::F32,
        Dtype::F16,
        Dtype::BF16,
        Dtype::Q4_0,
        Dtype::Q4_1,
        Dtype::Q5_0,
        Dtype::Q5_1,
        Dtype::Q8_0,
        Dtype::Q2K,
        Dtype::Q3K,
        Dtype::Q4K,
        Dtype::Q5K,
        Dtype::Q6K,
        Dtype::IQ4NL,
        Dtype::IQ4XS,
        Dtype::IQ1S,
        Dtype::IQ1M,
        Dtype::IQ2XXS,
        Dtype::IQ2XS,
        Dtype::IQ2S,
        Dtype::IQ3XXS,
        Dtype::IQ3S,
        Dtype::TQ1_0,
        Dtype::TQ2_0,
        Dtype::MXFP4,
        Dtype::F8E4M3,
    ];

    pub const ALL: [Dtype; Dtype::STORED.len() + GroupedDtype::N] = {
        let mut all = [Dtype::F32; Dtype::STORED.len() + GroupedDtype::N];
        let mut i = 0;
        while i < all.len() {
            let n = Dtype::STORED.len();
            all[i] = if i < n { Dtype::STORED[i] } else { Dtype::Grouped(GroupedDtype::ALL[i - n]) };
            i += 1;
        }
        all
    };

    /// The name in GGUF (or safetensors, or our own), numbers per block, bytes per block.
    const fn row(self) -> (&'static str, usize, usize) {
        match self {
            Dtype::F32 => ("F32", 1, 4),
            Dtype::F16 => ("F16", 1, 2),
            Dtype::BF16 => ("BF16", 1, 2),
            Dtype::Q4_0 => ("Q4_0", 32, 18),
            Dtype::Q4_1 => ("Q4_1", 32, 20),
            Dtype::Q5_0 => ("Q5_0", 32, 22),
            Dtype::Q5_1 => ("Q5_1", 32, 24),
            Dtype::Q8_0 => ("Q8_0", 32, 34),
            Dtype::Q2K => ("Q2_K", 256, 84),
            Dtype::Q3K => ("Q3_K", 256, 110),
            Dtype::Q4K => ("Q4_K", 256, 144),
            Dtype::Q5K => ("Q5_K", 256, 176),
            Dtype::Q6K => ("Q6_K", 256, 210),
            Dtype::IQ4NL => ("IQ4_NL", 32, 18),
            Dtype::IQ4XS => ("IQ4_XS", 256, 136),
            Dtype::IQ1S => ("IQ1_S", 256, 50),
            Dtype::IQ1M => ("IQ1_M", 256, 56),
            Dtype::IQ2XXS => ("IQ2_XXS", 256, 66),
            Dtype::IQ2XS => ("IQ2_XS", 256, 74),
            Dtype::IQ2S => ("IQ2_S", 256, 82),
            Dtype::IQ3XXS => ("IQ3_XXS", 256, 98),
            Dtype::IQ3S => ("IQ3_S", 256, 110),
            Dtype::TQ1_0 => ("TQ1_0", 256, 54),
            Dtype::TQ2_0 => ("TQ2_0", 256, 66),
            Dtype::MXFP4 => ("MXFP4", 32, 17),
            Dtype::F8E4M3 => ("F8_E4M3", 32, 32),
            Dtype::Grouped(grouped) => (grouped.name(), grouped.size.n(), grouped.block_bytes()),
        }
    }

    pub const fn name(self) -> &'static str {
        self.row().0
    }

    /// Numbers per block.
    pub const fn block(self) -> usize {
        self.row().1
    }

    pub const fn block_bytes(self) -> usize {
        self.row().2
    }

    /// Columns are cut at multiples of this, which may be less than a block.
    pub const fn unit(self) -> usize {
        if self.block() < SUB_BLOCK { self.block() } else { SUB_BLOCK }
    }

    /// Returns the bytes of the blocks that hold `k` numbers. Saturates, so that a hostile file's size fails when its
    /// bytes are read.
    pub const fn row_bytes(self, k: usize) -> usize {
        k.div_ceil(self.block()).saturating_mul(self.block_bytes())
    }

    /// The bytes of `n` numbers, if they fill whole blocks and the count is not absurd.
    pub const fn bytes_of(self, n: u64) -> Option<u64> {
        let block = self.block() as u64;
        if n.is_multiple_of(block) { (n / block).checked_mul(self.block_bytes() as u64) } else { None }
    }
}

/// The scales of a matrix, where they are not stored in its blocks: one for some rows and columns together. `B` is
/// where their bytes are: in a file, or in memory.
#[derive(Clone, Copy, Debug)]
pub struct Scales<B> {
    /// F32, F16 or BF16.
    pub dtype: Dtype,
    pub bytes: B,
    /// How many rows and columns share one scale; the columns are whole units.
    pub block: [usize; 2],
    /// Scales per row of the scale matrix.
    pub per_row: usize,
    /// The row and column of the scaled matrix at which this part begins.
    pub first: [usize; 2],
}

impl<B> Scales<B> {
    /// The index of a number's scale.
    pub fn index(&self, row: usize, column: usize) -> Option<usize> {
        let of = |at: usize, axis: usize| self.first[axis].checked_add(at)?.checked_div(self.block[axis]);
        of(row, 0)?.checked_mul(self.per_row)?.checked_add(of(column, 1)?)
    }

    /// The bytes of the scales that a matrix of this shape needs; None where its columns are cut within a unit.
    pub fn bytes_for(&self, rows: usize, k: usize) -> Option<usize> {
        let unit = Dtype::F8E4M3.unit();
        let are_whole = self.block[1].is_multiple_of(unit) && self.first[1].is_multiple_of(unit);
        let last = self.index(rows.checked_sub(1)?, k.checked_sub(1)?).filter(|_| are_whole)?;
        last.checked_add(1)?.checked_mul(self.dtype.block_bytes())
    }

    /// The scales of a part of the matrix that begins at this row and column of it.
    #[must_use]
    pub fn from(self, row: usize, column: usize) -> Scales<B> {
        let first = [self.first[0].saturating_add(row), self.first[1].saturating_add(column)];
        Scales { first, ..self }
    }

    /// The same scales with their bytes elsewhere.
    pub fn with<C>(&self, bytes: C) -> Scales<C> {
        Scales { dtype: self.dtype, bytes, block: self.block, per_row: self.per_row, first: self.first }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_whole_rows_are_those_of_their_blocks() {
        for dtype in Dtype::ALL {
            let k = dtype.block() * 3;
            assert_eq!(dtype.bytes_of(k as u64), Some(dtype.row_bytes(k) as u64));
            assert!(dtype.block().is_multiple_of(dtype.unit()) && dtype.unit() <= 32);
        }
        assert_eq!((Dtype::Q4_0.bytes_of(33), Dtype::Q4_0.row_bytes(33)), (None, 36));
        assert_eq!((Dtype::Q8_0.bytes_of(u64::MAX / 32 * 32), Dtype::F32.row_bytes(usize::MAX)), (None, usize::MAX));
    }

    #[test]
    fn a_part_of_a_matrix_finds_the_scales_of_its_own_numbers() {
        let whole = Scales { dtype: Dtype::F16, bytes: (), block: [2, 64], per_row: 3, first: [0, 0] };
        assert_eq!((whole.index(5, 130), whole.bytes_for(6, 192)), (Some(8), Some(18)));
        assert_eq!(whole.from(4, 64).index(1, 66), whole.index(5, 130));
        assert_eq!(whole.from(0, 16).bytes_for(6, 32), None);
        assert_eq!(Scales { block: [0, 64], ..whole }.bytes_for(1, 32), None);
        assert_eq!(whole.from(usize::MAX, 0).bytes_for(2, 32), None);
    }
}
