//! Numbers of few bits that share a scale, and perhaps a zero, with their neighbours in a row: what AWQ, GPTQ and
//! compressed-tensors store, in one form. Reads no bytes itself.
//!
//! ```text
//! a block    [scale] [zero: f16, if there are any] [digits of 32 numbers] [digits of 32 numbers] ..
//! of four    16 bytes for 32 numbers: low nibbles are the first 16      of eight   32 bytes
//! a number   scale × (digit - zero)
//! ```

/// The type of such a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupedDtype {
    pub digits: DigitBits,
    pub scale: ScaleType,
    /// Whether a group stores its zero. Otherwise it is the middle of the digits.
    pub has_zeros: bool,
    pub size: GroupSize,
}

/// Bits per digit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DigitBits {
    Four,
    Eight,
}

/// The type of the scales, which stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleType {
    F16,
    BF16,
    F32,
}

/// Numbers per scale. A larger group is stored as several groups with the same scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupSize {
    G32,
    G64,
    G128,
}

impl DigitBits {
    pub const ALL: [DigitBits; 2] = [DigitBits::Four, DigitBits::Eight];

    pub const fn bits(self) -> usize {
        match self {
            DigitBits::Four => 4,
            DigitBits::Eight => 8,
        }
    }

    /// The zero of groups that store none.
    pub const fn middle(self) -> u8 {
        1 << (self.bits() - 1)
    }
}

impl ScaleType {
    pub const ALL: [ScaleType; 3] = [ScaleType::F16, ScaleType::BF16, ScaleType::F32];

    pub const fn bytes(self) -> usize {
        match self {
            ScaleType::F16 | ScaleType::BF16 => 2,
            ScaleType::F32 => 4,
        }
    }
}

impl GroupSize {
    pub const ALL: [GroupSize; 3] = [GroupSize::G32, GroupSize::G64, GroupSize::G128];

    pub const fn n(self) -> usize {
        match self {
            GroupSize::G32 => 32,
            GroupSize::G64 => 64,
            GroupSize::G128 => 128,
        }
    }

    /// The largest of which groups of `n` numbers are whole multiples.
    pub fn dividing(n: usize) -> Option<GroupSize> {
        GroupSize::ALL.into_iter().rev().find(|size| n > 0 && n.is_multiple_of(size.n()))
    }
}

/// The bytes of a zero.
const ZERO_BYTES: usize = 2;

macro_rules! sizes {
    ($($name:literal)*) => {[concat!($($name,)* "_G32"), concat!($($name,)* "_G64"), concat!($($name,)* "_G128")]};
}

macro_rules! names {
    ($($digits:literal)*) => {[$([sizes!($digits "_F16"), sizes!($digits "_BF16"), sizes!($digits "_F32")]),*]};
}

const NAMES: [[[&str; 3]; 3]; 4] = names!("INT4" "UINT4" "INT8" "UINT8");

impl GroupedDtype {
    pub const N: usize = 36;
    pub const ALL: [GroupedDtype; GroupedDtype::N] = GroupedDtype::all();

    const fn all() -> [GroupedDtype; GroupedDtype::N] {
        let first =
            GroupedDtype { digits: DigitBits::Four, scale: ScaleType::F16, has_zeros: false, size: GroupSize::G32 };
        let mut all = [first; GroupedDtype::N];
        let mut i = 0;
        while i < GroupedDtype::N {
            let (size, scale) = (GroupSize::ALL[i % 3], ScaleType::ALL[i / 3 % 3]);
            all[i] = GroupedDtype { digits: DigitBits::ALL[i / 18], scale, has_zeros: i / 9 % 2 == 1, size };
            i += 1;
        }
        all
    }

    pub const fn name(self) -> &'static str {
        NAMES[self.digits as usize * 2 + self.has_zeros as usize][self.scale as usize][self.size as usize]
    }

    /// The bytes of a block before its digits.
    pub const fn head_bytes(self) -> usize {
        self.scale.bytes() + if self.has_zeros { ZERO_BYTES } else { 0 }
    }

    pub const fn block_bytes(self) -> usize {
        self.head_bytes() + self.size.n() * self.digits.bits() / 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_has_its_own_name_and_takes_what_its_file_does() {
        for (i, grouped) in GroupedDtype::ALL.iter().enumerate() {
            assert!(GroupedDtype::ALL[..i].iter().all(|other| other != grouped && other.name() != grouped.name()));
        }
        let by = |name: &str| GroupedDtype::ALL.into_iter().find(|grouped| grouped.name() == name).unwrap();
        let eighths = |name: &str| by(name).block_bytes() * 64 / by(name).size.n();
        // In eighths of a bit per number: 4.125, 4.25, 4.5, 5, 8.125.
        let names = ["INT4_BF16_G128", "UINT4_F16_G128", "INT4_F16_G32", "UINT4_F16_G32", "INT8_BF16_G128"];
        assert_eq!(names.map(eighths), [33, 34, 36, 40, 65]);
        assert_eq!(
            [96, 4096, 64, 48, 0].map(GroupSize::dividing),
            [Some(GroupSize::G32), Some(GroupSize::G128), Some(GroupSize::G64), None, None]
        );
    }
}
