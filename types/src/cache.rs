//! What a layer remembers, and in which pages.

use crate::Unsupported;

/// Positions per block. Sixteen blocks make one tile of attention.
pub const BLOCK_TOKENS: u32 = 16;

/// What layers of one kind keep of the positions behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheKind {
    /// K and V of every position.
    Full,
    /// K and V of the last so many positions: a query reads its own and those before it, so many in all.
    Window(u32),
    /// One compressed row for all heads.
    Latent,
    /// A state that is overwritten.
    Recurrent,
}

/// Layers that share block tables. A model declares its groups; a step carries one run of blocks per group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheGroup {
    pub kind: CacheKind,
    /// Heads are split over the ranks of a stage; otherwise each rank holds all of it.
    pub sharded: bool,
}

impl CacheGroup {
    pub const FULL: CacheGroup = CacheGroup { kind: CacheKind::Full, sharded: true };

    /// How long a sequence's table is when so many positions are computed. Pages freed behind a window keep their
    /// entry: it is never read again, and a table that begins behind a prefix hit has `BlockId::NONE` there.
    pub fn n_blocks(&self, n_tokens: u32) -> u32 {
        match self.kind {
            CacheKind::Recurrent => 1,
            CacheKind::Full | CacheKind::Window(_) | CacheKind::Latent => blocks_for(n_tokens),
        }
    }

    /// The first position that a query at `position` reads.
    pub fn first_read(&self, position: u32) -> u32 {
        match self.kind {
            CacheKind::Window(window) => (position + 1).saturating_sub(window),
            CacheKind::Full | CacheKind::Latent | CacheKind::Recurrent => 0,
        }
    }

    /// No block is ever behind what a query reads.
    pub fn keeps_all(&self) -> bool {
        !matches!(self.kind, CacheKind::Window(_))
    }

    /// How many blocks at the front of a table no query reads that is at `position` or later.
    pub fn n_passed(&self, position: u32) -> u32 {
        self.first_read(position) / BLOCK_TOKENS
    }

    /// How many blocks a sequence needs at most at one time, while so many positions are computed in slices of at most
    /// `slice_max`.
    pub fn n_held_max(&self, n_tokens: u32, slice_max: u32) -> u32 {
        match self.kind {
            // What the slice's first query reads and what the slice writes; neither begins or ends with a block.
            CacheKind::Window(window) => {
                let span = (window - 1).saturating_add(slice_max);
                (blocks_for(span).saturating_add(1)).min(blocks_for(n_tokens))
            }
            CacheKind::Full | CacheKind::Latent | CacheKind::Recurrent => self.n_blocks(n_tokens),
        }
    }

    pub fn supported(&self) -> Result<(), Unsupported> {
        match self.kind {
            CacheKind::Window(0) => Err(Unsupported("a window of no position")),
            CacheKind::Full | CacheKind::Window(_) => Ok(()),
            CacheKind::Latent => Err(Unsupported("a latent cache group")),
            CacheKind::Recurrent => Err(Unsupported("a recurrent cache group")),
        }
    }
}

/// How many blocks hold so many positions.
pub fn blocks_for(n_tokens: u32) -> u32 {
    n_tokens.div_ceil(BLOCK_TOKENS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_passed_when_the_whole_block_is_behind_the_window() {
        // (window, position, first position read, blocks passed)
        let cases = [
            (1, 0, 0, 0),
            (1, 15, 15, 0),
            (1, 16, 16, 1),
            (4, 2, 0, 0),
            (4, 18, 15, 0),
            (4, 19, 16, 1),
            (16, 31, 16, 1),
            (17, 31, 15, 0),
            (4096, 10_000, 5905, 369),
            (u32::MAX, 10_000, 0, 0),
        ];
        for (window, position, first, n_passed) in cases {
            let group = CacheGroup { kind: CacheKind::Window(window), sharded: true };
            assert_eq!(
                (group.first_read(position), group.n_passed(position)),
                (first, n_passed),
                "{window} {position}"
            );
        }
        assert_eq!((CacheGroup::FULL.first_read(99), CacheGroup::FULL.n_passed(99)), (0, 0));
    }

    #[test]
    fn no_more_blocks_are_held_than_said() {
        for window in [1, 2, 15, 16, 17, 18, 33, 100] {
            let group = CacheGroup { kind: CacheKind::Window(window), sharded: true };
            for slice in [1, 2, 16, 17, 40] {
                for n_tokens in [1, 5, 16, 40, 200] {
                    let starts = 0..n_tokens;
                    let held = |start: u32| blocks_for((start + slice).min(n_tokens)) - group.n_passed(start);
                    let most = starts.map(held).max().unwrap_or(0);
                    let said = group.n_held_max(n_tokens, slice);
                    assert!(most <= said, "{most} held, {said} said: {window} {slice} {n_tokens}");
                    assert!(said <= blocks_for(n_tokens) && said <= most + 1);
                }
            }
        }
    }
}
