//! What a layer keeps of earlier positions, how the ranks of a stage divide it, and the bytes that follow. A page is
//! what one layer keeps of a block's positions.

use crate::KvDtype;

/// Positions per block. Sixteen blocks make one tile of attention.
pub const BLOCK_TOKENS: u32 = 16;

/// The values that are kept of every position, for as long as queries read them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvLayout {
    /// `n` heads, each with `k` numbers of K and `v` of V. A query reads `window` positions, its own among them;
    /// without a window, all of them.
    Heads { n: u32, k: u32, v: u32, window: Option<u32> },
    /// `n` recurrent heads in f32, each with `state` numbers at a block's first position (what all positions before it
    /// have come to) and `row` numbers of each position of the block. A block is the chunk of the recurrence: an output
    /// is computed from the state at its block's start and the block's rows up to it, the next block's state from this
    /// one's and all of its rows. So a position reads its own block, and the first of a block the one before it.
    State { n: u32, state: u32, row: u32 },
}

/// How the ranks of a stage divide a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sharding {
    /// Each rank has the KV heads that its query heads read: a head that a boundary cuts is held on both sides.
    Heads,
    /// Each rank has all of it.
    Replicated,
}

impl KvLayout {
    /// Returns a layout with K and V of equal width, without a window.
    pub const fn heads(n: u32, dim: u32) -> KvLayout {
        KvLayout::Heads { n, k: dim, v: dim, window: None }
    }

    /// Returns what `n` recurrent heads keep: states of `[key, value]`, and a convolution over `taps` positions.
    ///
    /// ```text
    /// state   S [key, value] · the inputs of the taps - 1 positions before the block
    /// row     inputs of Q, K and V before the convolution · K · the solved value · the decay since the block's start
    /// ```
    pub const fn recurrence(n: u32, key: u32, value: u32, taps: u32) -> KvLayout {
        let channels = 2 * key + value;
        KvLayout::State { n, state: key * value + (taps - 1) * channels, row: channels + key + value + 1 }
    }

    /// Returns what `n` runs of `width` channels keep for a convolution over `taps` positions: its inputs at the
    /// positions before the block, and at the block's own.
    pub const fn convolution(n: u32, width: u32, taps: u32) -> KvLayout {
        KvLayout::State { n, state: (taps - 1) * width, row: width }
    }

    /// The same layout with a window: a query reads this many positions. Layouts other than attention have a fixed one.
    #[must_use]
    pub const fn with_window(self, positions: u32) -> KvLayout {
        match self {
            KvLayout::Heads { n, k, v, .. } => KvLayout::Heads { n, k, v, window: Some(positions) },
            KvLayout::State { .. } => self,
        }
    }

    pub const fn window(self) -> Option<u32> {
        match self {
            KvLayout::Heads { window, .. } => window,
            // The block of the position before, whose state and rows are the next block's state.
            KvLayout::State { .. } => Some(2),
        }
    }

    /// True for the state of a recurrence. Its page may be left out where no slice goes on from it.
    pub const fn is_state(self) -> bool {
        matches!(self, KvLayout::State { .. })
    }

    /// Returns what a rank keeps if it has this many of the layout's heads.
    #[must_use]
    pub const fn rank_layout(self, sharding: Sharding, n_heads: u32) -> KvLayout {
        match (sharding, self) {
            (Sharding::Heads, KvLayout::Heads { k, v, window, .. }) => KvLayout::Heads { n: n_heads, k, v, window },
            (Sharding::Heads, KvLayout::State { state, row, .. }) => KvLayout::State { n: n_heads, state, row },
            (Sharding::Replicated, whole) => whole,
        }
    }

    /// The same layout with every K and V padded to a multiple of `grain`, as a device requires.
    #[must_use]
    pub const fn padded(self, grain: u32) -> KvLayout {
        match self {
            KvLayout::Heads { n, k, v, window } => {
                KvLayout::Heads { n, k: k.next_multiple_of(grain), v: v.next_multiple_of(grain), window }
            }
            KvLayout::State { .. } => self,
        }
    }

    /// The bytes of a page. Saturates, so that an absurd shape fails when its memory is allocated.
    pub const fn page_bytes(self, dtype: KvDtype) -> u64 {
        let (n, n_bytes) = match self {
            KvLayout::Heads { n, k, v, .. } => (n, (dtype.row_bytes(k) + dtype.row_bytes(v)) * BLOCK_TOKENS as u64),
            KvLayout::State { n, state, row } => (n, (state as u64 + row as u64 * BLOCK_TOKENS as u64) * 4),
        };
        n_bytes.saturating_mul(n as u64)
    }
}

/// A rank reports the committed part of its pools in this many parts of the whole.
pub const KV_PARTS: u32 = 1 << 16;

/// Returns how many of a pool's blocks have memory if `parts` of it are committed: those with the lowest ids.
pub const fn blocks_committed(n_blocks: u32, parts: u32) -> u32 {
    if parts >= KV_PARTS { n_blocks } else { ((n_blocks as u64 * parts as u64) / KV_PARTS as u64) as u32 }
}

/// Returns the fewest parts of a pool that cover `n_needed` of its blocks.
pub const fn parts_for(n_needed: u64, n_blocks: u32) -> u32 {
    if n_needed >= n_blocks as u64 { KV_PARTS } else { (n_needed * KV_PARTS as u64).div_ceil(n_blocks as u64) as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parts_are_all_blocks_and_fewer_are_never_more() {
        let blocks = |parts| [0, 1, 7, 4096, 1 << 24].map(|n_blocks| blocks_committed(n_blocks, parts));
        assert_eq!(blocks(0), [0; 5]);
        assert_eq!(blocks(1), [0, 0, 0, 0, 256]);
        assert_eq!(blocks(KV_PARTS - 1), [0, 0, 6, 4095, (1 << 24) - 256]);
        assert_eq!((blocks(KV_PARTS), blocks(u32::MAX)), ([0, 1, 7, 4096, 1 << 24], [0, 1, 7, 4096, 1 << 24]));
    }

    #[test]
    fn parts_for_blocks_are_the_fewest_that_hold_them() {
        for n_blocks in [1, 7, 4096, 65_537, 1 << 24] {
            for n_needed in [0, 1, 2, 6, 4095, 65_536, (1 << 24) - 1, 1 << 30] {
                let (parts, whole) = (parts_for(n_needed, n_blocks), n_needed.min(n_blocks.into()));
                assert!(u64::from(blocks_committed(n_blocks, parts)) >= whole, "{n_needed} of {n_blocks}");
                assert!(parts == 0 || u64::from(blocks_committed(n_blocks, parts - 1)) < whole.max(1));
            }
        }
    }

    #[test]
    fn bytes_of_a_page_follow_from_layout_sharding_and_dtype() {
        // (heads, numbers, dtype, bytes of all heads, of two)
        let cases = [
            (3, 64, KvDtype::F16, 12_288, 8192),
            (3, 64, KvDtype::F32, 24_576, 16_384),
            (8, 128, KvDtype::Bf16, 65_536, 16_384),
            (8, 128, KvDtype::Fp8, 32_768, 8192),
            // With a scale for each row, 0.53 of f16's; of narrow heads more.
            (3, 64, KvDtype::Int8, 6528, 4352),
            (8, 128, KvDtype::Int8, 33_792, 8448),
            (3, 20, KvDtype::Int8, 3456, 2304),
        ];
        for (n, dim, dtype, all, two) in cases {
            let layout = KvLayout::heads(n, dim);
            let bytes = |sharding| layout.rank_layout(sharding, 2).page_bytes(dtype);
            assert_eq!((layout.page_bytes(dtype), bytes(Sharding::Heads)), (all, two));
            assert_eq!((bytes(Sharding::Replicated), layout.with_window(9).page_bytes(dtype)), (all, all));
        }
        assert_eq!(KvLayout::heads(3, 64).rank_layout(Sharding::Heads, 0).page_bytes(KvDtype::F16), 0);
        assert_eq!(KvLayout::heads(2, 80).padded(32), KvLayout::heads(2, 96));
        for dtype in [KvDtype::F32, KvDtype::Int8] {
            assert_eq!(KvLayout::heads(u32::MAX, u32::MAX).page_bytes(dtype), u64::MAX);
        }
        let state = KvLayout::State { n: 4, state: 64, row: 10 };
        assert_eq!((state.page_bytes(KvDtype::F16), state.window(), state.is_state()), (3584, Some(2), true));
        assert_eq!(state.rank_layout(Sharding::Heads, 1).page_bytes(KvDtype::F16), 896);
        assert_eq!((state.with_window(9), state.padded(32)), (state, state));
    }
}
