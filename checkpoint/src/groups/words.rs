//! How words of 32 bits hold digits: runs of whole words, with the first digit in the lowest bits. Knows no matrix.
//!
//! ```text
//! 2, 4, 8 bits   one word     a digit lies in one word
//! 3 bits         three words  32 digits; the 11th and the 22nd cross a word's end
//! ```

/// The most words of a run.
const WORDS_MAX: usize = 3;

/// The words of a run, and zeros.
pub(crate) type WordRun = [u32; WORDS_MAX];

/// The digits' bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WordPacking {
    Two,
    Three,
    Four,
    Eight,
}

impl WordPacking {
    pub const ALL: [WordPacking; 4] = [WordPacking::Two, WordPacking::Three, WordPacking::Four, WordPacking::Eight];

    pub const fn bits(self) -> usize {
        match self {
            WordPacking::Two => 2,
            WordPacking::Three => 3,
            WordPacking::Four => 4,
            WordPacking::Eight => 8,
        }
    }

    /// Words per run.
    pub const fn n_words(self) -> usize {
        if self.bits() == 3 { WORDS_MAX } else { 1 }
    }

    /// Digits per run.
    pub const fn n_digits(self) -> usize {
        self.n_words() * 32 / self.bits()
    }

    /// Returns how many digits this many words hold; None if they are no whole runs.
    pub fn digits_in(self, n_words: usize) -> Option<usize> {
        let n_runs = n_words.is_multiple_of(self.n_words()).then_some(n_words / self.n_words())?;
        n_runs.checked_mul(self.n_digits())
    }

    /// The digits of a run, in order.
    pub fn digits(self, run: WordRun) -> impl Iterator<Item = u8> {
        let bits = self.bits();
        (0..self.n_digits()).map(move |i| {
            let (word, shift) = (i * bits / 32, i * bits % 32);
            let mut digit = run[word] >> shift;
            if shift + bits > 32 {
                digit |= run[word + 1] << (32 - shift);
            }
            (digit & ((1 << bits) - 1)) as u8
        })
    }

    /// The runs of neighbouring words.
    pub fn runs(self, bytes: &[u8]) -> impl Iterator<Item = WordRun> {
        bytes.chunks_exact(4 * self.n_words()).map(|bytes| run_of(words_of(bytes)))
    }

    /// The runs of words that lie below each other, in lines of `width` words: those of the first `n_words` lines from
    /// left to right, then those of the next.
    pub fn runs_down(self, bytes: &[u8], width: usize) -> impl Iterator<Item = WordRun> {
        let lines = bytes.chunks_exact((4 * width * self.n_words()).max(1));
        lines.flat_map(move |lines| (0..width).map(move |column| run_of(words_of(lines).skip(column).step_by(width))))
    }
}

fn run_of(words: impl Iterator<Item = u32>) -> WordRun {
    let mut run = [0; WORDS_MAX];
    run.iter_mut().zip(words).for_each(|(to, word)| *to = word);
    run
}

pub(super) fn words_of(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every bit of a run belongs to one digit.
    #[test]
    fn digits_are_the_bits_in_order() {
        for packing in WordPacking::ALL {
            let run = [0x9e37_79b9, 0x85eb_ca6b, 0xc2b2_ae35];
            let mut bits = packing.digits(run).enumerate().fold(0u128, |all, (i, digit)| {
                assert!(u32::from(digit) < 1 << packing.bits(), "{packing:?}");
                all | u128::from(digit) << (i * packing.bits())
            });
            for word in &run[..packing.n_words()] {
                assert_eq!(bits as u32, *word, "{packing:?}");
                bits >>= 32;
            }
            assert_eq!(bits, 0, "{packing:?}");
        }
    }

    #[test]
    fn runs_are_read_along_and_down() {
        let bytes: Vec<u8> = (1..=6u32).flat_map(u32::to_le_bytes).collect();
        let along = |packing: WordPacking| packing.runs(&bytes).collect::<Vec<_>>();
        assert_eq!(along(WordPacking::Three), [[1, 2, 3], [4, 5, 6]]);
        assert_eq!(along(WordPacking::Four)[4..], [[5, 0, 0], [6, 0, 0]]);
        let down = WordPacking::Three.runs_down(&bytes, 2).collect::<Vec<_>>();
        assert_eq!(down, [[1, 3, 5], [2, 4, 6]]);
        assert_eq!(WordPacking::Eight.runs_down(&bytes, 3).collect::<Vec<_>>(), along(WordPacking::Two));
        assert_eq!(WordPacking::Eight.runs_down(&[], 0).count(), 0);
        let counts = WordPacking::ALL.map(|packing| packing.digits_in(4));
        assert_eq!(counts, [Some(64), None, Some(32), Some(16)]);
    }
}
