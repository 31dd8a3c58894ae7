//! The format of a message: a header of one cache line, then words. It is the same over shared memory and sockets.

use crate::ring::LINE_WORDS;
use types::Epoch;

pub const HEAD_WORDS: usize = LINE_WORDS as usize;
/// Longer transfers are cut into frames: 64 KiB.
pub const FRAME_WORDS_MAX: usize = 16 * 1024;

/// The words of a sealed frame's tag.
pub const TAG_WORDS: usize = 4;
/// A tag as words; zeros in shared memory, where nothing is sealed.
pub type SealTag = [u32; TAG_WORDS];

/// "LSC" and the version of this format.
const MAGIC: u32 = u32::from_le_bytes(*b"LSC\x02");
/// Written in a header's place when the next frame begins at the ring's start.
const SKIP: u32 = u32::from_le_bytes(*b"SKIP");

/// The content of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum FrameKind {
    /// All planes of a small sum.
    Planes = 1,
    /// The receiver's columns of the planes of a large sum.
    Parts = 2,
    /// Finished columns of a large sum.
    Sums = 3,
    /// Rows that their owner sends to the others.
    Rows = 4,
    /// Columns of one matrix that rank 0 of a stage gathers.
    Columns = 5,
    /// The residual stream, to the next stage.
    Stream = 6,
    /// The tokens drawn in a step.
    Tokens = 7,
    /// The sender has finished and leaves.
    Leave = 8,
    /// The sender breaks off, and names the rank to blame.
    Break = 9,
    /// Notes that ranks exchange while they choose carriers.
    Notes = 10,
}

impl FrameKind {
    fn of(word: u32) -> Option<FrameKind> {
        use FrameKind::{Break, Columns, Leave, Notes, Parts, Planes, Rows, Stream, Sums, Tokens};
        let all = [Planes, Parts, Sums, Rows, Columns, Stream, Tokens, Leave, Break, Notes];
        all.into_iter().find(|kind| *kind as u32 == word)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHead {
    pub kind: FrameKind,
    /// The frame's number on this link and direction, counted from zero.
    pub seq: u32,
    pub n_words: u32,
    /// Step id or shape, which must be equal on both sides.
    pub tag: u64,
    pub epoch: Epoch,
}

/// What was read in a header's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameStart {
    Head(FrameHead),
    Skip,
    Garbage(&'static str),
}

impl FrameHead {
    /// Encodes the head. `seal` is the tag of the head and its payload, for wires on which others may write.
    pub fn encode(&self, seal: SealTag) -> [u32; HEAD_WORDS] {
        let (tag, incarnation) = (self.tag, self.epoch.incarnation);
        let mut words = [0; HEAD_WORDS];
        words[..9].copy_from_slice(&[
            MAGIC,
            self.kind as u32,
            self.seq,
            self.n_words,
            tag as u32,
            (tag >> 32) as u32,
            incarnation as u32,
            (incarnation >> 32) as u32,
            self.epoch.n,
        ]);
        words[10..14].copy_from_slice(&seal);
        FrameHead::with_checksum(&words)
    }

    /// Returns a head's words with the checksum that they should have.
    pub fn with_checksum(words: &[u32; HEAD_WORDS]) -> [u32; HEAD_WORDS] {
        let (mut words, check) = (*words, checksum(&words[..14]));
        words[14..].copy_from_slice(&[check as u32, (check >> 32) as u32]);
        words
    }

    /// Returns the header, and the tag that the frame should have.
    pub fn decode(words: &[u32; HEAD_WORDS]) -> (FrameStart, SealTag) {
        const NONE: SealTag = [0; TAG_WORDS];
        let wide = |at: usize| u64::from(words[at]) | u64::from(words[at + 1]) << 32;
        let kind = match words[0] {
            SKIP => return (FrameStart::Skip, NONE),
            MAGIC if wide(14) == checksum(&words[..14]) => FrameKind::of(words[1]),
            MAGIC => return (FrameStart::Garbage("a head with a wrong checksum"), NONE),
            _ => return (FrameStart::Garbage("words that are no head of a message"), NONE),
        };
        let Some(kind) = kind else { return (FrameStart::Garbage("an unknown kind of message"), NONE) };
        if words[3] as usize > FRAME_WORDS_MAX {
            return (FrameStart::Garbage("a message longer than the limit"), NONE);
        }
        let epoch = Epoch { incarnation: wide(6), n: words[8] };
        let head = FrameHead { kind, seq: words[2], n_words: words[3], tag: wide(4), epoch };
        (FrameStart::Head(head), [words[10], words[11], words[12], words[13]])
    }

    /// Returns the word that a writer leaves if a frame would not fit before the ring's end.
    pub fn skip() -> u32 {
        SKIP
    }
}

/// Returns the words that a frame occupies, in whole cache lines.
pub fn frame_words(n_words: usize) -> usize {
    HEAD_WORDS + n_words.next_multiple_of(HEAD_WORDS)
}

/// Guards a head against faults of memory and wires, not against an attacker: frames of a connection also have a tag.
/// Each step of the four lanes is a bijection, so every change of a single word is detected.
fn checksum(words: &[u32]) -> u64 {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut lanes = [1u64, 2, 3, 4];
    let (fours, rest) = words.as_chunks::<4>();
    for four in fours {
        for (lane, word) in lanes.iter_mut().zip(four) {
            *lane = (*lane ^ u64::from(*word)).wrapping_mul(STEP).rotate_left(29);
        }
    }
    for (lane, word) in lanes.iter_mut().zip(rest) {
        *lane = (*lane ^ u64::from(*word)).wrapping_mul(STEP).rotate_left(29);
    }
    let start = (words.len() as u64).wrapping_mul(STEP);
    lanes.iter().fold(start, |sum, lane| (sum ^ lane).wrapping_mul(STEP).rotate_left(31))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEAL: SealTag = [1, 2, u32::MAX, 4];

    fn head() -> FrameHead {
        let epoch = Epoch { incarnation: 0x1234_5678_9abc_def0, n: 7 };
        FrameHead { kind: FrameKind::Tokens, seq: 3, n_words: 17, tag: u64::MAX - 5, epoch }
    }

    #[test]
    fn heads_come_back() {
        assert_eq!(FrameHead::decode(&head().encode(SEAL)), (FrameStart::Head(head()), SEAL));
        assert_eq!(frame_words(17), HEAD_WORDS + 32);
    }

    #[test]
    fn every_flipped_bit_of_a_head_is_seen() {
        let words = head().encode(SEAL);
        for bit in 0..HEAD_WORDS * 32 {
            let mut changed = words;
            changed[bit / 32] ^= 1 << (bit % 32);
            assert!(matches!(FrameHead::decode(&changed), (FrameStart::Garbage(_), _)), "bit {bit}");
        }
    }

    #[test]
    fn a_checksum_sees_each_word_and_the_length() {
        for n in 0..40 {
            let words: Vec<u32> = (0..n).map(|i| i * 77).collect();
            let sum = checksum(&words);
            for i in 0..words.len() {
                let mut changed = words.clone();
                changed[i] ^= 1 << (i % 32);
                assert_ne!(checksum(&changed), sum);
            }
            assert_ne!(checksum(&[words.as_slice(), &[0]].concat()), sum);
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_garbage() {
        let long = FrameHead { n_words: FRAME_WORDS_MAX as u32 + 1, ..head() };
        assert_eq!(FrameHead::decode(&long.encode(SEAL)).0, FrameStart::Garbage("a message longer than the limit"));
    }
}
