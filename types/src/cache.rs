//! What a layer remembers, and in which pages.

use crate::Unsupported;

/// Positions per block. Sixteen blocks make one tile of attention.
pub const BLOCK_TOKENS: u32 = 16;

/// What layers of one kind keep of the positions behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheKind {
    /// K and V of every position.
    Full,
    /// K and V of the last so many positions.
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
    /// entry.
    pub fn n_blocks(&self, n_tokens: u32) -> u32 {
        match self.kind {
            CacheKind::Recurrent => 1,
            CacheKind::Full | CacheKind::Window(_) | CacheKind::Latent => blocks_for(n_tokens),
        }
    }

    pub fn supported(&self) -> Result<(), Unsupported> {
        match self.kind {
            CacheKind::Full => Ok(()),
            CacheKind::Window(_) => Err(Unsupported("a windowed cache group")),
            CacheKind::Latent => Err(Unsupported("a latent cache group")),
            CacheKind::Recurrent => Err(Unsupported("a recurrent cache group")),
        }
    }
}

/// How many blocks hold so many positions.
pub fn blocks_for(n_tokens: u32) -> u32 {
    n_tokens.div_ceil(BLOCK_TOKENS)
}
