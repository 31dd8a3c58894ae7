//! How far a sequence is computed and planned. Knows no log and no blocks.

use core::ops::Range;

/// How far a sequence is computed, since its last start.
///
/// `[0, n_sure) computed · [n_sure, n_computed) in flight · [n_computed, n_known) to plan · n_drawing in flight`
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct SequenceProgress {
    /// Positions planned so far, or found in the prefix cache.
    pub n_computed: u32,
    /// The most tokens that slices in flight may draw.
    pub n_drawing: u32,
    /// The entries of each of its tables.
    pub n_entries: u32,
    /// The longest slice.
    pub chunk_max: u32,
    pub n_slices_in_flight: u32,
    /// Positions that are computed for good: their slices have come back, and no slice will compute them again.
    pub n_sure: u32,
    /// The entries of each of its tables that the ranks have; zero until a step carries its start.
    pub n_sent: u32,
    /// How many of its slices in flight, the oldest, were planned behind a draw that did not come.
    pub n_stale: u32,
    /// The step of its last slice.
    pub last_step: u64,
    /// A new number for each admission; zero while it waits. Results planned for another number are dropped.
    pub generation: u64,
    /// Its full blocks, of which the last has a name until there is another.
    pub n_passing: u32,
}

impl SequenceProgress {
    /// The next slice has `n_tokens` and may draw `draws_max`. Returns the slice's positions.
    #[inline]
    pub fn add_slice(&mut self, step: u64, n_tokens: u32, draws_max: u32) -> Range<u32> {
        let start = self.n_computed;
        self.n_computed += n_tokens;
        self.n_drawing += draws_max;
        self.n_slices_in_flight += 1;
        self.last_step = step;
        start..self.n_computed
    }

    /// Whether the slice that has come back was planned behind a draw that did not come.
    #[inline]
    pub fn drops_slice(&mut self) -> bool {
        let is_stale = self.n_stale > 0;
        self.n_stale -= u32::from(is_stale);
        is_stale
    }

    /// A slice up to `end` has come back, and the log has taken `n_drawn` tokens of the `draws_max` that it might have
    /// drawn. If some are missing, the log's last position is computed again, and later slices in flight are stale.
    ///
    /// `[.., end - draws_max] known before · (end - draws_max, end) drafts`
    #[inline]
    pub fn apply_returned_slice(&mut self, end: u32, draws_max: u32, n_drawn: u32) {
        let n_lacking = draws_max - n_drawn;
        self.n_sure = end - n_lacking;
        self.n_drawing -= draws_max;
        if n_lacking > 0 {
            self.n_computed = self.n_sure;
            self.n_drawing = 0;
            self.n_stale = self.n_slices_in_flight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten tokens are known, the slice ends with up to two drafts, and two more slices are in flight behind it.
    #[test]
    fn a_slice_is_settled_by_how_many_tokens_came_back() {
        // (drafts, tokens drawn, sure, computed, still being drawn, stale)
        let cases = [
            (0, 1, 10, 12, 2, 0),
            (0, 0, 9, 9, 0, 2),
            (2, 3, 12, 14, 2, 0),
            (2, 2, 11, 11, 0, 2),
            (2, 1, 10, 10, 0, 2),
            (2, 0, 9, 9, 0, 2),
        ];
        for (n_drafts, n_drawn, n_sure, n_computed, n_drawing, n_stale) in cases {
            let (end, draws_max) = (10 + n_drafts, 1 + n_drafts);
            let mut progress = SequenceProgress {
                n_computed: end + 2,
                n_drawing: draws_max + 2,
                n_slices_in_flight: 2,
                ..SequenceProgress::default()
            };
            progress.apply_returned_slice(end, draws_max, n_drawn);
            let counts = (progress.n_sure, progress.n_computed, progress.n_drawing, progress.n_stale);
            assert_eq!(counts, (n_sure, n_computed, n_drawing, n_stale), "{n_drafts} drafts, {n_drawn} drawn");
        }
    }
}
