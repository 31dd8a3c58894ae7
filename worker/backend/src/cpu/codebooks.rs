//! The numbers that four bits of a weight name.

/// Sixteen numbers, and the offset that makes them unsigned digits.
pub(crate) trait Codebook {
    const NUMBERS: [i16; 16];
    const OFFSET: u8;
    const DIGITS: [u8; 16] = digits(&Self::NUMBERS, Self::OFFSET);
    /// The largest digit.
    const LARGEST: u8 = largest(&Self::DIGITS);
}

const fn digits(numbers: &[i16; 16], offset: u8) -> [u8; 16] {
    let (mut i, mut digits) = (0, [0; 16]);
    while i < digits.len() {
        let digit = numbers[i] + offset as i16;
        assert!(0 <= digit && digit < 256, "the offset makes digits unsigned");
        digits[i] = digit as u8;
        i += 1;
    }
    digits
}

const fn largest(digits: &[u8; 16]) -> u8 {
    let (mut i, mut largest) = (0, 0);
    while i < digits.len() {
        if digits[i] > largest {
            largest = digits[i];
        }
        i += 1;
    }
    largest
}

/// The bit of a name that changes the sign, where a codebook has sizes with signs.
pub(crate) const NEGATIVE: u8 = 8;

/// Eight sizes, then the same with the other sign.
const fn with_signs(sizes: [i16; 8]) -> [i16; 16] {
    let (mut i, mut numbers) = (0, [0; 16]);
    while i < sizes.len() {
        numbers[i] = sizes[i];
        numbers[i + NEGATIVE as usize] = -sizes[i];
        i += 1;
    }
    numbers
}

/// The numbers of IQ4_NL and IQ4_XS.
pub(crate) struct Iq4Numbers;

impl Codebook for Iq4Numbers {
    const NUMBERS: [i16; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
    const OFFSET: u8 = 128;
}

/// Twice the numbers of MXFP4: a sign, two bits of exponent, one of fraction.
pub(crate) struct Mxfp4Numbers;

impl Codebook for Mxfp4Numbers {
    const NUMBERS: [i16; 16] = with_signs([0, 1, 2, 3, 4, 6, 8, 12]);
    const OFFSET: u8 = 12;
}

/// Eight times the numbers of IQ1_S and IQ1_M: minus one, zero or one, plus an eighth; from 8 on, minus an eighth.
pub(crate) struct Iq1Numbers;

impl Codebook for Iq1Numbers {
    const NUMBERS: [i16; 16] = [-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0];
    const OFFSET: u8 = 9;
}

/// The sizes of IQ2_XXS, IQ2_XS and IQ2_S. Their grids use the first three.
pub(crate) struct Iq2Numbers;

impl Codebook for Iq2Numbers {
    const NUMBERS: [i16; 16] = with_signs([8, 25, 43, 0, 0, 0, 0, 0]);
    const OFFSET: u8 = 43;
}

/// The sizes of IQ3_XXS.
pub(crate) struct Iq3XxsNumbers;

impl Codebook for Iq3XxsNumbers {
    const NUMBERS: [i16; 16] = with_signs([4, 12, 20, 28, 36, 44, 52, 62]);
    const OFFSET: u8 = 62;
}

/// The sizes of IQ3_S.
pub(crate) struct Iq3SNumbers;

impl Codebook for Iq3SNumbers {
    const NUMBERS: [i16; 16] = with_signs([1, 3, 5, 7, 9, 11, 13, 15]);
    const OFFSET: u8 = 15;
}
