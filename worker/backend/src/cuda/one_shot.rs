//! Sums of ranks whose devices access each other's memory: each rank copies its planes to a buffer that all others see,
//! and a kernel of each rank adds the contents of all buffers. Knows nothing of how ranks meet, nor of models.

use super::device::Cuda;
use super::direct::DeviceFloats;
use super::driver::{DeviceMemory, Driver, Handle, LaunchShape, PeerMemory, PinnedMemory};
use super::kernels::{Argument, arguments};
use super::lock::lock;
use super::peer_buffer::{MappedBuffer, OpenedBuffer, PEER_BUFFERS, PeerBuffer, SumControl};
use super::table::Kernel;
use crate::{Error, Result};
use std::ops::Range;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// As in the header, which defines the layout of a buffer.
const RANKS_MAX: usize = 8;
const PLANES_MAX: usize = 128;
const BLOCKS_MAX: usize = 64;
const REGION: usize = 2048;
const DEPTH_MAX: u32 = 8;
const BUFFER_BYTES: usize = 2 << 20;
/// The fewest numbers of a block, where there are that many: two for each of its threads.
const BLOCK_MIN: usize = 512;
/// Parts of planes begin on whole cache lines.
const LINE: usize = 32;

/// One plane of a sum: its rank, its number among that rank's planes, and how many merges follow it.
#[derive(Clone, Copy, Debug)]
pub struct SumTerm {
    pub rank: usize,
    pub number: usize,
    pub merges: u32,
}

/// As in the header, field by field.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct OneShotRanks {
    buffers: [u64; RANKS_MAX],
    n_ranks: u32,
    me: u32,
    n_planes: u32,
    per_block: u32,
    rank: [u8; PLANES_MAX],
    number: [u8; PLANES_MAX],
    merges: [u8; PLANES_MAX],
}

// SAFETY: `repr(C)` with the header's fields.
unsafe impl Argument for OneShotRanks {}

/// A sum over the planes of several ranks, of any number of numbers.
#[derive(Clone, Debug)]
pub struct OneShotSum {
    ranks: OneShotRanks,
    /// The largest number of planes of one rank.
    n_planes_max: usize,
    n_own: usize,
}

impl OneShotSum {
    /// Returns None where no kernel has room for it. The terms come in the order of their leaves.
    pub fn new(buffers: &[MappedBuffer], me: usize, terms: &[SumTerm]) -> Option<OneShotSum> {
        if !OneShotSum::fits(buffers.len(), terms) {
            return None;
        }
        let n_of = |rank: usize| terms.iter().filter(|term| term.rank == rank).count();
        let n_planes_max = (0..buffers.len()).map(n_of).max()?;
        let mut ranks = OneShotRanks {
            buffers: [0; RANKS_MAX],
            n_ranks: buffers.len() as u32,
            me: me as u32,
            n_planes: terms.len() as u32,
            per_block: 0,
            rank: [0; PLANES_MAX],
            number: [0; PLANES_MAX],
            merges: [0; PLANES_MAX],
        };
        ranks.buffers.iter_mut().zip(buffers).for_each(|(at, buffer)| *at = buffer.address());
        for (i, term) in terms.iter().enumerate() {
            (ranks.rank[i], ranks.number[i], ranks.merges[i]) = (term.rank as u8, term.number as u8, term.merges as u8);
        }
        Some(OneShotSum { ranks, n_planes_max, n_own: n_of(me) })
    }

    /// Whether a kernel has room for such a sum of `n_ranks` ranks.
    pub fn fits(n_ranks: usize, terms: &[SumTerm]) -> bool {
        let n_of = |rank: usize| terms.iter().filter(|term| term.rank == rank).count();
        let mut depth = 0;
        let fits_stack = terms.iter().all(|term| {
            depth = depth + 1 - term.merges.min(depth);
            depth <= DEPTH_MAX
        });
        let fits_buffer = (0..n_ranks).all(|rank| n_of(rank) <= REGION / LINE);
        let is_some = (2..=RANKS_MAX).contains(&n_ranks) && (1..=PLANES_MAX).contains(&terms.len());
        is_some && fits_buffer && fits_stack
    }

    /// Returns how many numbers of each plane one launch adds: those of a rank's planes take half of its buffer, 512
    /// KiB.
    pub fn n_max(&self) -> usize {
        BLOCKS_MAX * self.per_block_max()
    }

    fn per_block_max(&self) -> usize {
        REGION / self.n_planes_max / LINE * LINE
    }

    /// All ranks compute the same number.
    fn per_block(&self, n: usize) -> usize {
        let even = n.div_ceil(BLOCKS_MAX).next_multiple_of(LINE);
        even.max(BLOCK_MIN.min(self.per_block_max()))
    }
}

impl Cuda {
    /// Returns a buffer of zeros to share with others. The previous one is freed once no rank of this process uses it:
    /// ranks that meet again have dropped it.
    pub fn peer_buffer(&self) -> Result<Arc<PeerBuffer>> {
        self.forget_graphs();
        let bytes = DeviceMemory::new(&self.context, "a buffer for sums", BUFFER_BYTES)?;
        self.stream.fill(&bytes, 0)?;
        self.stream.finish()?;
        let buffer = Arc::new(PeerBuffer(bytes));
        let before = lock(&self.peer_buffer).replace(buffer.clone());
        let mut buffers = lock(&PEER_BUFFERS);
        buffers.retain(|_, buffer| buffer.strong_count() > 0);
        buffers.insert(buffer.address(), Arc::downgrade(&buffer));
        // An old buffer is freed only after the lock on the others is released.
        drop(buffers);
        drop(before);
        Ok(buffer)
    }

    /// Whether this device can access the memory of the one at this address of the machine. False for a device that
    /// this process does not see.
    pub fn can_access_peer(&self, pci: [u32; 3]) -> Result<bool> {
        match Driver::find()?.cards()?.iter().find(|card| card.pci == pci) {
            Some(card) => self.context.can_access_peer(card),
            None => Ok(false),
        }
    }

    /// Returns the buffer of another thread's device.
    pub fn local_peer_buffer(&self, address: u64) -> Result<MappedBuffer> {
        let buffer = lock(&PEER_BUFFERS).get(&address).and_then(Weak::upgrade);
        let buffer =
            buffer.ok_or_else(|| Error::Shape(format!("this process has no buffer at address {address:#x}")))?;
        self.context.enable_peer_access(buffer.0.context())?;
        Ok(MappedBuffer::Local(buffer))
    }

    /// Returns the buffer of another process's device.
    pub fn open_peer_buffer(&self, handle: &Handle) -> Result<MappedBuffer> {
        Ok(MappedBuffer::Opened(OpenedBuffer(PeerMemory::new(&self.context, handle)?)))
    }

    pub fn sum_control(&self) -> Result<SumControl> {
        Ok(SumControl(PinnedMemory::zeroed(&self.context, "control words of sums", 2 * size_of::<AtomicU32>())?))
    }

    /// Begins to add these numbers of all ranks' planes; planes are `stride` apart. A rank without planes has room for
    /// the sum there. No sum has more than `n_max` numbers.
    pub fn sum_one_shot(
        &self,
        sum: &OneShotSum,
        planes: DeviceFloats<'_>,
        numbers: Range<usize>,
        stride: usize,
        (control, patience): (&SumControl, Duration),
    ) {
        let (n, per_block) = (numbers.len(), sum.per_block(numbers.len()));
        if n == 0 {
            return;
        }
        let n_room = sum.n_own.saturating_sub(1) * stride + numbers.end;
        assert!(n <= sum.n_max() && n_room <= planes.len(), "{numbers:?} of planes of {} numbers", planes.len());
        let ranks = OneShotRanks { per_block: per_block as u32, ..sum.ranks };
        let patience = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        let shape = LaunchShape { grid: [n.div_ceil(per_block) as u32, 1, 1], block: [256, 1, 1], shared_bytes: 0 };
        let (at, control_at) = (planes.part(numbers.start..planes.len()).address(), control.0.device_address());
        // SAFETY: this rank's planes have the checked length, a buffer has room for everything that a block may copy
        // there, and the holder of the buffers and the words drops them when the stream has finished.
        unsafe {
            self.launch(
                Kernel::SumOneShot,
                shape,
                arguments![at, stride as u64, n as u32, ranks, control_at, patience],
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_lie_as_in_the_header() {
        let header = include_str!("kernels/kernels.cuh");
        let number = |name: &str| {
            let line = header.lines().find_map(|line| line.strip_prefix(&format!("#define ONE_SHOT_{name} ")));
            line.unwrap().to_owned()
        };
        let numbers = [("RANKS", RANKS_MAX), ("PLANES", PLANES_MAX), ("BLOCKS", BLOCKS_MAX), ("REGION", REGION)];
        for (name, ours) in numbers.into_iter().chain([("DEPTH", DEPTH_MAX as usize)]) {
            assert_eq!(number(name), ours.to_string(), "{name}");
        }
        assert_eq!((number("BUFFER"), size_of::<OneShotRanks>()), ("(2 << 20)".into(), 464));
        let (flags, broken, data) = (number("FLAGS"), number("BROKEN"), number("DATA"));
        let [flags, broken, data] = [flags, broken, data].map(|text| text.parse::<usize>().unwrap());
        assert_eq!((flags, broken), (BLOCKS_MAX * 8, flags + BLOCKS_MAX * RANKS_MAX * 8));
        assert!(broken + 8 <= data && data + 2 * BLOCKS_MAX * REGION * 4 <= BUFFER_BYTES);
    }

    #[test]
    fn parts_of_blocks_fit_their_places() {
        for n_planes in [1, 2, 3, 5, 14, 64] {
            let ranks = OneShotRanks {
                buffers: [0; RANKS_MAX],
                n_ranks: 2,
                me: 0,
                n_planes: n_planes as u32,
                per_block: 0,
                rank: [0; PLANES_MAX],
                number: [0; PLANES_MAX],
                merges: [0; PLANES_MAX],
            };
            let sum = OneShotSum { ranks, n_planes_max: n_planes, n_own: n_planes };
            for n in [1, 31, 576, 4096, sum.n_max() - 1, sum.n_max()].map(|n| n.min(sum.n_max())) {
                let per_block = sum.per_block(n);
                assert!(per_block * n_planes <= REGION && n.div_ceil(per_block) <= BLOCKS_MAX, "{n} of {n_planes}");
            }
        }
    }
}
