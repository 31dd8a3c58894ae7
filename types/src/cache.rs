//! Which layers of a model share block tables, and how many blocks a sequence needs of each group.

use crate::{BLOCK_TOKENS, DRAFT_ROWS_MAX, KvLayout, Sharding, Unsupported};
use alloc::vec::Vec;
use core::ops::Range;

/// The most blocks that one pool may have; no pool counts more.
pub const BLOCKS_MAX: u32 = 1 << 24;

/// The most pages that a draft model keeps of a sequence in each group of states: the one that the next known token
/// reads, and those of a step's guesses.
pub const DRAFT_STATES_MAX: u32 = 1 + DRAFT_ROWS_MAX.div_ceil(BLOCK_TOKENS);

/// Layers that share block tables. A model declares its groups; a step carries one run of blocks per group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CacheGroup {
    pub layout: KvLayout,
    pub sharding: Sharding,
}

impl CacheGroup {
    /// One head with one number, and no window: for callers that need no bytes.
    pub const FULL: CacheGroup = CacheGroup::of(KvLayout::heads(1, 1));

    /// The same of a recurrence's state.
    pub const STATE: CacheGroup = CacheGroup::of(KvLayout::State { n: 1, state: 1, row: 1 });

    /// A group whose ranks divide the heads.
    pub const fn of(layout: KvLayout) -> CacheGroup {
        CacheGroup { layout, sharding: Sharding::Heads }
    }

    /// The same group with a window: a query reads this many positions.
    #[must_use]
    pub const fn with_window(self, positions: u32) -> CacheGroup {
        CacheGroup { layout: self.layout.with_window(positions), sharding: self.sharding }
    }

    /// Returns what a rank keeps if its query heads read this many KV heads.
    #[must_use]
    pub const fn rank_layout(&self, n_kv_heads: u32) -> KvLayout {
        self.layout.rank_layout(self.sharding, n_kv_heads)
    }

    /// The length of a sequence's table when `n_tokens` positions are computed. Pages freed behind a window keep their
    /// entry: it is never read again, and a table that begins behind a prefix hit has `BlockId::NONE` there.
    pub fn n_blocks(&self, n_tokens: u32) -> u32 {
        blocks_for(n_tokens)
    }

    /// The first position that a query at `position` reads.
    pub fn first_read(&self, position: u32) -> u32 {
        self.layout.window().map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// True without a window: then every block stays readable.
    pub fn keeps_all(&self) -> bool {
        self.layout.window().is_none()
    }

    /// Returns how many blocks at the front of a table no query at `position` or later reads.
    pub fn n_passed(&self, position: u32) -> u32 {
        self.first_read(position) / BLOCK_TOKENS
    }

    /// Whether a slice's table may lack block `i`. No query reads it; or it is of a recurrence and lies in the slice's
    /// middle, over which the state is carried. No later slice begins there: the next one begins at the slice's end, or
    /// one position and the drafts before it, and reads the state one position earlier.
    pub fn may_lack(&self, i: u32, slice: &Range<u32>, n_draft: u32) -> bool {
        let is_inside = self.is_state() && i * BLOCK_TOKENS >= slice.start;
        i < self.n_passed(slice.start) || (is_inside && i < self.n_carried(slice.end, n_draft))
    }

    /// Returns how many blocks at the front of a table later slices do not need. This slice ends at `end` and has
    /// `n_draft` drafts.
    pub fn n_carried(&self, end: u32, n_draft: u32) -> u32 {
        if self.is_state() { end.saturating_sub(n_draft + 2) / BLOCK_TOKENS } else { 0 }
    }

    /// True for the state of a recurrence.
    pub const fn is_state(&self) -> bool {
        self.layout.is_state()
    }

    /// The most blocks that a sequence needs at one time, while `n_tokens` positions are computed in slices of at most
    /// `slice_max`.
    pub fn n_held_max(&self, n_tokens: u32, slice_max: u32) -> u32 {
        match self.layout.window() {
            // The pages that the slice's first query reads, and those that the slice writes. Neither end need be a
            // block's boundary. Of a recurrence no more than drafts and the last token.
            Some(window) => {
                let slice_max = if self.is_state() { slice_max.min(DRAFT_ROWS_MAX + 1) } else { slice_max };
                let span = (window - 1).saturating_add(slice_max);
                (blocks_for(span).saturating_add(1)).min(blocks_for(n_tokens))
            }
            None => self.n_blocks(n_tokens),
        }
    }

    pub fn supported(&self) -> Result<(), Unsupported> {
        match self.layout.window() {
            Some(0) => Err(Unsupported("a window of 0 positions")),
            _ => Ok(()),
        }
    }
}

/// The cache groups of a model, and the groups that each layer belongs to. A rank and its coordinator compute the same
/// groups from the model, so that they mean the same runs of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerGroups {
    groups: Vec<CacheGroup>,
    /// For each layer, the indices in `groups` of what its attention keeps and of its state, where it has them.
    of_layers: Vec<[Option<usize>; 2]>,
}

impl LayerGroups {
    /// Layers of one layout share a group. Groups stand in the order of their first layers.
    pub fn of(layouts: impl IntoIterator<Item = KvLayout>) -> LayerGroups {
        LayerGroups::of_some(layouts.into_iter().map(Some))
    }

    /// The same where some layers keep nothing of earlier positions.
    pub fn of_some(layouts: impl IntoIterator<Item = Option<KvLayout>>) -> LayerGroups {
        let in_place = |layout: Option<KvLayout>| match layout {
            Some(layout) if layout.is_state() => [None, Some(layout)],
            other => [other, None],
        };
        LayerGroups::of_layers(layouts.into_iter().map(in_place))
    }

    /// The same where each layer may keep what attention reads, a state, or both.
    pub fn of_layers(layouts: impl IntoIterator<Item = [Option<KvLayout>; 2]>) -> LayerGroups {
        let mut groups: Vec<CacheGroup> = Vec::new();
        let mut of_layout = |layout| {
            let known = groups.iter().position(|group| group.layout == layout);
            known.unwrap_or_else(|| {
                groups.push(CacheGroup::of(layout));
                groups.len() - 1
            })
        };
        let of_layers = layouts.into_iter().map(|both| both.map(|layout| layout.map(&mut of_layout))).collect();
        LayerGroups { groups, of_layers }
    }

    /// One group for all layers, which keep the same.
    pub fn alike(n_layers: u32, layout: KvLayout) -> LayerGroups {
        LayerGroups::of((0..n_layers).map(|_| layout))
    }

    pub fn groups(&self) -> &[CacheGroup] {
        &self.groups
    }

    /// For each group, how many of these layers belong to it; zero where a stage has none.
    pub fn n_layers(&self, layers: &Range<u32>) -> impl Iterator<Item = usize> {
        let of_layers = &self.of_layers[layers.start as usize..layers.end as usize];
        (0..self.groups.len()).map(|group| of_layers.iter().filter(|of| of.contains(&Some(group))).count())
    }

    /// Where a rank that has `layers` keeps what a layer's attention reads: the group's index, and the layer's number
    /// within that group. The layer has such attention.
    pub fn attention_place(&self, layers: &Range<u32>, layer: u32) -> (usize, usize) {
        self.place(layers, layer, 0)
    }

    /// The same for a layer's state.
    pub fn state_place(&self, layers: &Range<u32>, layer: u32) -> (usize, usize) {
        self.place(layers, layer, 1)
    }

    fn place(&self, layers: &Range<u32>, layer: u32, part: usize) -> (usize, usize) {
        let group = self.of_layers[layer as usize][part].expect("the layer has a cache group");
        let before = &self.of_layers[layers.start as usize..layer as usize];
        (group, before.iter().filter(|of| of.contains(&Some(group))).count())
    }
}

/// How many blocks hold `n_tokens` positions.
pub fn blocks_for(n_tokens: u32) -> u32 {
    n_tokens.div_ceil(BLOCK_TOKENS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn layers_of_one_layout_share_a_group() {
        let full = KvLayout::heads(1, 1);
        let local = full.with_window(18);
        let layers = LayerGroups::of([local, local, full, local, full]);
        let layouts: Vec<_> = layers.groups().iter().map(|group| group.layout).collect();
        assert_eq!(layouts, [local, full]);
        let n_layers = |range: Range<u32>| layers.n_layers(&range).collect::<Vec<_>>();
        assert_eq!((n_layers(0..5), n_layers(0..2), n_layers(4..5)), (vec![3, 2], vec![2, 0], vec![0, 1]));
        let places: Vec<_> = (1..5).map(|layer| layers.attention_place(&(1..5), layer)).collect();
        assert_eq!(places, [(0, 0), (1, 0), (0, 1), (1, 1)]);
        let some = LayerGroups::of_some([None, Some(full), None, Some(full)]);
        assert_eq!((some.n_layers(&(0..4)).collect::<Vec<_>>(), some.n_layers(&(2..3)).collect()), (vec![2], vec![0]));
        assert_eq!(some.attention_place(&(0..4), 3), (0, 1));
        let state = KvLayout::convolution(1, 16, 4);
        let both = LayerGroups::of_layers([[Some(full), Some(state)], [None, Some(state)], [Some(full), Some(state)]]);
        assert_eq!(both.n_layers(&(0..3)).collect::<Vec<_>>(), [2, 3]);
        assert_eq!((both.attention_place(&(0..3), 2), both.state_place(&(1..3), 2)), ((0, 1), (1, 1)));
        assert_eq!(LayerGroups::alike(3, full).groups(), [CacheGroup::FULL]);
    }

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
            let group = CacheGroup::FULL.with_window(window);
            assert_eq!(
                (group.first_read(position), group.n_passed(position)),
                (first, n_passed),
                "{window} {position}"
            );
        }
        assert_eq!((CacheGroup::FULL.first_read(99), CacheGroup::FULL.n_passed(99)), (0, 0));
    }

    #[test]
    fn of_a_recurrence_the_end_of_a_slice_is_kept_and_what_its_first_query_reads() {
        let group = CacheGroup::STATE;
        let lacks = |slice: Range<u32>, n_draft| {
            let all = 0..blocks_for(slice.end);
            all.filter(|&i| group.may_lack(i, &slice, n_draft)).collect::<Vec<_>>()
        };
        assert_eq!(lacks(0..64, 0), [0, 1, 2]);
        assert_eq!(lacks(0..65, 0), [0, 1, 2], "the last position may be computed again, and reads block 3");
        assert_eq!(lacks(0..66, 0), [0, 1, 2, 3]);
        assert_eq!(lacks(32..64, 0), [0, 2], "the first query reads block 1");
        assert_eq!(lacks(33..64, 0), [0, 1], "this query reads block 2");
        assert_eq!(lacks(40..73, 32), [0, 1]);
        assert_eq!(lacks(16..17, 0), []);
        assert_eq!(CacheGroup::FULL.n_carried(100, 0), 0);
        for slice in 1..80 {
            for start in 0..100 {
                let range = start..start + slice;
                let n_draft = (slice - 1).min(DRAFT_ROWS_MAX);
                for n_draft in if slice <= DRAFT_ROWS_MAX + 1 { [0, n_draft] } else { [0, 0] } {
                    let n = blocks_for(range.end) - lacks(range.clone(), n_draft).len() as u32;
                    assert!(n <= group.n_held_max(range.end, slice), "{range:?} {n_draft}");
                }
            }
        }
    }

    #[test]
    fn held_blocks_stay_within_n_held_max() {
        for window in [1, 2, 15, 16, 17, 18, 33, 100] {
            let group = CacheGroup::FULL.with_window(window);
            for slice in [1, 2, 16, 17, 40] {
                for n_tokens in [1, 5, 16, 40, 200] {
                    let starts = 0..n_tokens;
                    let held = |start: u32| blocks_for((start + slice).min(n_tokens)) - group.n_passed(start);
                    let most = starts.map(held).max().unwrap_or(0);
                    let bound = group.n_held_max(n_tokens, slice);
                    assert!(most <= bound, "{most} held, at most {bound} expected: {window} {slice} {n_tokens}");
                    assert!(bound <= blocks_for(n_tokens) && bound <= most + 1);
                }
            }
        }
    }
}
