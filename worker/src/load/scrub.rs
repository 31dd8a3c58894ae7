//! Checks whether weights in memory still are what was loaded: hashes their bytes once they are packed, and again,
//! piece by piece, while they are held. Works with bytes and the weights' names; has no knowledge of files.

use backend::Memory;
use model::PackedWeight;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use types::Rank;

/// The bytes hashed at a time: this takes some hundred microseconds.
const PIECE_BYTES: usize = 256 << 10;

/// A rank's weights in their packed form, and their hashes.
pub(crate) struct HashedPart {
    pieces: Vec<HashedPiece>,
    /// The piece to hash next.
    next: AtomicUsize,
    spoilt: OnceLock<SpoiltWeight>,
}

struct HashedPiece {
    weight: PackedWeight,
    range: Range<usize>,
    hash: [u8; 32],
}

/// A weight that differs from what was loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpoiltWeight {
    pub weight: String,
    /// Counted in pieces of 256 KiB of the packed weight.
    pub piece: usize,
    pub rank: Rank,
}

impl HashedPart {
    /// Hashes freshly packed weights, on the threads that packed them.
    pub fn of(packed: &[PackedWeight], device: &impl Memory) -> HashedPart {
        let pieces = packed.iter().flat_map(|weight| {
            let n_bytes = weight.bytes.bytes().len();
            (0..n_bytes).step_by(PIECE_BYTES).map(move |at| (weight.clone(), at..n_bytes.min(at + PIECE_BYTES)))
        });
        let pieces: Vec<_> = pieces.collect();
        let hashes: Vec<OnceLock<[u8; 32]>> = pieces.iter().map(|_| OnceLock::new()).collect();
        device.parallel_for(pieces.len(), &|some| {
            for i in some {
                let (weight, range) = &pieces[i];
                hashes[i].get_or_init(|| hash(weight, range));
            }
        });
        let hashed = |((weight, range), hash): ((PackedWeight, Range<usize>), OnceLock<[u8; 32]>)| HashedPiece {
            weight,
            range,
            hash: hash.into_inner().unwrap_or_default(),
        };
        let pieces = pieces.into_iter().zip(hashes).map(hashed).collect();
        HashedPart { pieces, next: AtomicUsize::new(0), spoilt: OnceLock::new() }
    }

    pub fn is_spoilt(&self) -> bool {
        self.spoilt.get().is_some()
    }

    /// Hashes the next piece. Returns the number of its bytes, or the spoilt weight.
    fn check_next_piece(&self, rank: Rank) -> Result<usize, SpoiltWeight> {
        let n_pieces = self.pieces.len().max(1);
        let at = self.next.fetch_add(1, Relaxed) % n_pieces;
        let Some(piece) = self.pieces.get(at) else { return Ok(0) };
        if hash(&piece.weight, &piece.range) == piece.hash {
            return Ok(piece.range.len());
        }
        let found = SpoiltWeight { weight: piece.weight.name.clone(), piece: piece.range.start / PIECE_BYTES, rank };
        Err(self.spoilt.get_or_init(|| found).clone())
    }
}

fn hash(weight: &PackedWeight, range: &Range<usize>) -> [u8; 32] {
    *blake3::hash(&weight.bytes.bytes()[range.clone()]).as_bytes()
}

/// Checks the weights that a worker holds at present; clones share them.
#[derive(Clone)]
pub struct Scrubber(Arc<ScrubState>);

struct ScrubState {
    /// The share of one core's time.
    share: f64,
    now: Mutex<(Weak<HashedPart>, Rank)>,
    n_bytes: AtomicU64,
}

/// The result of one check.
pub(crate) enum ScrubResult {
    /// Nothing is held.
    Nothing,
    Sound,
    Spoilt(SpoiltWeight),
}

impl Scrubber {
    /// The check takes `share` of one core's time, at most 1.
    pub fn new(share: f64) -> Scrubber {
        let now = Mutex::new((Weak::new(), Rank(0)));
        Scrubber(Arc::new(ScrubState { share, now, n_bytes: AtomicU64::new(0) }))
    }

    pub(crate) fn share(&self) -> f64 {
        self.0.share
    }

    /// Checks these weights from now on, for as long as any owner holds them.
    pub(crate) fn watch(&self, part: &Arc<HashedPart>, rank: Rank) {
        *self.0.now.lock().unwrap_or_else(PoisonError::into_inner) = (Arc::downgrade(part), rank);
    }

    pub(crate) fn check_next_piece(&self) -> ScrubResult {
        let (part, rank) = self.watched_part();
        let Some(part) = part.filter(|part| !part.is_spoilt()) else { return ScrubResult::Nothing };
        match part.check_next_piece(rank) {
            Ok(n_bytes) => {
                self.0.n_bytes.fetch_add(n_bytes as u64, Relaxed);
                ScrubResult::Sound
            }
            Err(spoilt) => ScrubResult::Spoilt(spoilt),
        }
    }

    /// Returns the spoilt weight among those held at present.
    pub(crate) fn spoilt(&self) -> Option<SpoiltWeight> {
        self.watched_part().0.and_then(|part| part.spoilt.get().cloned())
    }

    /// Returns the bytes hashed again since the last call.
    pub(crate) fn take_bytes(&self) -> u64 {
        self.0.n_bytes.swap(0, Relaxed)
    }

    fn watched_part(&self) -> (Option<Arc<HashedPart>>, Rank) {
        let now = self.0.now.lock().unwrap_or_else(PoisonError::into_inner);
        (now.0.upgrade(), now.1)
    }
}

impl std::fmt::Debug for Scrubber {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Scrubber({})", self.0.share)
    }
}

impl PartialEq for Scrubber {
    fn eq(&self, other: &Scrubber) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Scrubber {}

#[cfg(test)]
mod tests {
    use super::*;
    use backend::PackedBytes;
    use backend::cpu::{Cpu, CpuConfig, Isa};
    use std::sync::RwLock;
    use types::Activations;

    /// Bytes that a test may change while they are watched.
    struct Changing(RwLock<Vec<u8>>, Box<[u8]>);

    impl AsRef<[u8]> for Changing {
        fn as_ref(&self) -> &[u8] {
            if self.0.read().unwrap().is_empty() { &self.1 } else { &self.1[1..] }
        }
    }

    fn device() -> Cpu {
        Cpu::new(CpuConfig { threads: 2, activations: Activations::F32, isa: Isa::detect(), spin: false }).unwrap()
    }

    #[test]
    fn each_piece_is_looked_at_and_one_that_changed_is_named_once() {
        let n_bytes = 5 * PIECE_BYTES / 2;
        let sound = Arc::new(Changing(RwLock::default(), vec![7; n_bytes].into()));
        let mut other = vec![7u8; n_bytes + 1];
        other[n_bytes] = 6;
        let other = Arc::new(Changing(RwLock::default(), other.into()));
        let packed = [("sound", &sound), ("other", &other)]
            .map(|(name, bytes)| PackedWeight { name: name.into(), bytes: PackedBytes::new(bytes.clone(), n_bytes) });
        let part = Arc::new(HashedPart::of(&packed, &device()));
        assert_eq!(part.pieces.len(), 6);
        let scrubber = Scrubber::new(0.5);
        assert!(matches!(scrubber.check_next_piece(), ScrubResult::Nothing));
        scrubber.watch(&part, Rank(3));
        (0..12).for_each(|_| assert!(matches!(scrubber.check_next_piece(), ScrubResult::Sound)));
        assert_eq!((scrubber.take_bytes(), scrubber.spoilt()), (4 * n_bytes as u64, None));
        // The last byte of its last piece.
        other.0.write().unwrap().push(1);
        let found = (0..6).find_map(|_| match scrubber.check_next_piece() {
            ScrubResult::Spoilt(spoilt) => Some(spoilt),
            _ => None,
        });
        let expected = SpoiltWeight { weight: "other".into(), piece: 2, rank: Rank(3) };
        assert_eq!((found, scrubber.spoilt()), (Some(expected.clone()), Some(expected)));
        assert!(part.is_spoilt() && matches!(scrubber.check_next_piece(), ScrubResult::Nothing), "once");
        drop((part, packed));
        assert!(
            matches!(scrubber.check_next_piece(), ScrubResult::Nothing) && scrubber.spoilt().is_none(),
            "the scrubber keeps no weights alive"
        );
    }
}
