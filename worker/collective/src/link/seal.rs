//! The seals of one connection: an outgoing frame gets a tag, and an incoming frame is accepted only by its tag. Works
//! with keys and numbers; has no knowledge of sockets.
//!
//! ```text
//! words  0..10   the head: in the clear, authenticated
//!       10..14   the tag
//!       14..16   a checksum without a key over both: a fault of the wire shows before the frame is whole
//!       16..     the payload, with zeros up to a whole line: authenticated, and encrypted if links are
//! ```
//! Each direction of each connection has its own key, so a frame's number in its direction is a nonce that no other
//! frame has. A frame that was dropped, repeated or moved has another number, and its tag is wrong there.

use crate::frame::{FrameHead, HEAD_WORDS, SealTag, TAG_WORDS};
use crate::plan::LinkEncryption;
use ring::aead::{AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

/// The words of a head that its tag covers: those before the tag.
const SEALED_WORDS: usize = HEAD_WORDS - TAG_WORDS - 2;

/// The seals of a connection's outgoing and incoming frames.
#[derive(Debug)]
pub struct LinkSeals {
    pub outgoing: Seal,
    pub incoming: Seal,
}

/// The key of one direction, and the number of its next frame.
#[derive(Debug)]
pub struct Seal {
    key: LessSafeKey,
    encryption: LinkEncryption,
    /// Never wraps: 2^64 frames take longer than any machine lasts.
    n_frames: u64,
}

/// The frame is not the next one that the peer sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForgedFrame;

impl Seal {
    /// Only the two sides may have `secret`, and it must serve no other connection or direction.
    pub fn new(secret: &[u8; 32], encryption: LinkEncryption) -> Seal {
        let algorithm = match encryption {
            // Poly1305 alone is the faster MAC, and GCM the faster cipher: see DESIGN.md.
            LinkEncryption::Off => &CHACHA20_POLY1305,
            LinkEncryption::On => &AES_256_GCM,
        };
        let key = UnboundKey::new(algorithm, secret).expect("both algorithms have keys of 32 bytes");
        Seal { key: LessSafeKey::new(key), encryption, n_frames: 0 }
    }

    /// Writes the head in front of a frame's payload, and seals both. `frame` is the whole frame, in whole lines.
    pub fn seal(&mut self, head: &FrameHead, frame: &mut [u32]) {
        frame[..SEALED_WORDS].copy_from_slice(&head.encode([0; TAG_WORDS])[..SEALED_WORDS]);
        frame[SEALED_WORDS..HEAD_WORDS].fill(0);
        let nonce = nonce(self.n_frames);
        let (plain, secret) = self.encryption.parts(frame);
        let tag = self.key.seal_in_place_separate_tag(nonce, Aad::from(plain), secret);
        let tag = tag.expect("a frame is shorter than the limit of one seal");
        let mut words = [0; TAG_WORDS];
        bytemuck::bytes_of_mut(&mut words).copy_from_slice(tag.as_ref());
        frame[..HEAD_WORDS].copy_from_slice(&head.encode(words));
        self.n_frames += 1;
    }

    /// Opens the next frame in place.
    pub fn open(&mut self, tag: SealTag, frame: &mut [u32]) -> Result<(), ForgedFrame> {
        self.open_at(self.n_frames, tag, frame)?;
        self.n_frames += 1;
        Ok(())
    }

    /// Returns whether this head without a payload is the next frame, and leaves that frame in place.
    pub fn is_next(&self, tag: SealTag, head: &[u32; HEAD_WORDS]) -> bool {
        self.open_at(self.n_frames, tag, &mut head.clone()).is_ok()
    }

    fn open_at(&self, n: u64, tag: SealTag, frame: &mut [u32]) -> Result<(), ForgedFrame> {
        frame[SEALED_WORDS..HEAD_WORDS].fill(0);
        let tag = bytemuck::cast::<SealTag, [u8; 4 * TAG_WORDS]>(tag);
        let (plain, secret) = self.encryption.parts(frame);
        let opened = self.key.open_in_place_separate_tag(nonce(n), Aad::from(plain), tag.into(), secret, 0..);
        opened.map(drop).map_err(|_| ForgedFrame)
    }
}

impl LinkEncryption {
    /// Returns the plain part of a frame, and the encrypted part.
    fn parts(self, frame: &mut [u32]) -> (&[u8], &mut [u8]) {
        let n_plain = match self {
            LinkEncryption::Off => frame.len(),
            LinkEncryption::On => HEAD_WORDS,
        };
        let (plain, secret) = frame.split_at_mut(n_plain);
        (bytemuck::cast_slice(plain), bytemuck::cast_slice_mut(secret))
    }
}

fn nonce(n: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{FrameKind, FrameStart, frame_words};
    use types::Epoch;

    const MODES: [LinkEncryption; 2] = [LinkEncryption::Off, LinkEncryption::On];

    fn head(seq: u32, n_words: usize) -> FrameHead {
        FrameHead { kind: FrameKind::Rows, seq, n_words: n_words as u32, tag: 5, epoch: Epoch::default() }
    }

    fn payload(n_words: usize) -> Vec<u32> {
        (0..n_words as u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect()
    }

    fn sealed(seal: &mut Seal, head: &FrameHead) -> Vec<u32> {
        let n_words = head.n_words as usize;
        let mut frame = vec![0; frame_words(n_words)];
        frame[HEAD_WORDS..][..n_words].copy_from_slice(&payload(n_words));
        seal.seal(head, &mut frame);
        frame
    }

    fn opened(seal: &mut Seal, frame: &[u32]) -> Option<(FrameHead, Vec<u32>)> {
        let (FrameStart::Head(head), tag) = FrameHead::decode(frame.first_chunk()?) else { return None };
        let mut frame = frame.to_vec();
        seal.open(tag, &mut frame).ok()?;
        Some((head, frame[HEAD_WORDS..][..head.n_words as usize].to_vec()))
    }

    #[test]
    fn frames_come_back_in_their_order_and_in_no_other() {
        for mode in MODES {
            let [mut ours, mut theirs] = [Seal::new(&[3; 32], mode), Seal::new(&[3; 32], mode)];
            let lengths = [0, 1, 16, 17, 1000];
            let frames: Vec<_> =
                (0..).zip(lengths).map(|(seq, n)| (head(seq, n), sealed(&mut ours, &head(seq, n)))).collect();
            for (n, (head, frame)) in frames.iter().enumerate() {
                for (_, other) in frames.iter().enumerate().filter(|(i, _)| *i != n).map(|(_, frame)| frame) {
                    assert_eq!(opened(&mut theirs, other), None, "{mode:?}: another frame is accepted as no. {n}");
                }
                assert_eq!(opened(&mut theirs, frame), Some((*head, payload(head.n_words as usize))), "{mode:?}");
            }
        }
    }

    #[test]
    fn every_flipped_bit_of_a_frame_is_seen() {
        for mode in MODES {
            let frame = sealed(&mut Seal::new(&[3; 32], mode), &head(0, 20));
            for bit in 0..frame.len() * 32 {
                let mut changed = frame.clone();
                changed[bit / 32] ^= 1 << (bit % 32);
                let mut theirs = Seal::new(&[3; 32], mode);
                assert_eq!(opened(&mut theirs, &changed), None, "{mode:?}, bit {bit}");
                // An attacker makes the checksum of a changed frame right, as it has no key.
                let words: &[u32; HEAD_WORDS] = changed.first_chunk().unwrap();
                let meant = FrameHead::with_checksum(words);
                changed[..HEAD_WORDS].copy_from_slice(&meant);
                if changed != frame {
                    assert_eq!(opened(&mut theirs, &changed), None, "{mode:?}, bit {bit} and the checksum");
                }
            }
        }
    }

    #[test]
    fn another_key_or_mode_opens_nothing() {
        for mode in MODES {
            let frame = sealed(&mut Seal::new(&[3; 32], mode), &head(0, 20));
            let other_mode = MODES.into_iter().find(|other| *other != mode).unwrap();
            assert_eq!(opened(&mut Seal::new(&[4; 32], mode), &frame), None);
            assert_eq!(opened(&mut Seal::new(&[3; 32], other_mode), &frame), None);
        }
    }

    #[test]
    fn what_is_encrypted_shows_nothing_and_no_frame_looks_like_another() {
        let mut seal = Seal::new(&[3; 32], LinkEncryption::On);
        let frames = [sealed(&mut seal, &head(0, 64)), sealed(&mut seal, &head(0, 64))];
        assert_ne!(frames[0][HEAD_WORDS..], frames[1][HEAD_WORDS..]);
        let is_shown = |frame: &Vec<u32>| frame[HEAD_WORDS..].iter().zip(payload(64)).any(|(a, b)| *a == b);
        assert!(!frames.iter().any(is_shown));
        let mut plain = Seal::new(&[3; 32], LinkEncryption::Off);
        assert_eq!(sealed(&mut plain, &head(0, 64))[HEAD_WORDS..], payload(64));
    }

    #[test]
    fn a_last_word_is_known_before_it_is_taken() {
        for mode in MODES {
            let [mut ours, mut theirs] = [Seal::new(&[3; 32], mode), Seal::new(&[3; 32], mode)];
            let (first, last) = (sealed(&mut ours, &head(0, 0)), sealed(&mut ours, &head(1, 0)));
            let is_next = |theirs: &Seal, frame: &[u32]| {
                let words = frame.first_chunk().unwrap();
                theirs.is_next(FrameHead::decode(words).1, words)
            };
            assert!(is_next(&theirs, &first) && is_next(&theirs, &first) && !is_next(&theirs, &last));
            assert!(opened(&mut theirs, &first).is_some());
            assert!(is_next(&theirs, &last) && !is_next(&theirs, &first));
        }
    }
}
