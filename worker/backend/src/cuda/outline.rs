//! What passes have in common that may be begun from one record.

use crate::Pass;

/// Rows that passes are filled up to. The kernels for products take 8, 16, 32 and 64 rows at a time.
const ROWS: [u32; 11] = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256];
/// Positions of a tile of attention.
pub(super) const TILE: u32 = 256;

/// What passes have in common that may be begun from one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PassOutline {
    n_rows: u32,
    /// Of attention, as many as there may be positions for.
    pub n_tiles: u32,
}

impl PassOutline {
    pub fn of(pass: &Pass<'_>) -> Option<PassOutline> {
        let n_rows = u32::try_from(pass.n_rows()).ok().filter(|n| ROWS.contains(n))?;
        let is_single = !pass.slices.is_empty() && pass.slices.iter().all(|slice| slice.rows.len() == 1);
        // 1, 4, 16, ..
        let at_least = |n: u32| 1 << (n.max(1).next_power_of_two().ilog2().next_multiple_of(2));
        is_single.then(|| PassOutline { n_rows, n_tiles: at_least(n_tiles(pass)) })
    }

    /// The rows that a pass is filled up to, in buffers for so many.
    pub fn padded_rows(pass: &Pass<'_>, rows_max: usize) -> usize {
        let n_rows = pass.n_rows();
        let is_single = pass.slices.iter().all(|slice| slice.rows.len() == 1);
        let filled = ROWS.iter().map(|rows| *rows as usize).find(|rows| *rows >= n_rows);
        filled.filter(|rows| is_single && n_rows > 0 && *rows <= rows_max).unwrap_or(n_rows)
    }
}

/// Tiles up to the last position of a pass.
pub(super) fn n_tiles(pass: &Pass<'_>) -> u32 {
    let end = pass.slices.iter().map(|slice| slice.range.end).max().unwrap_or(0);
    end.div_ceil(TILE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, PassSlice};
    use types::Want;

    fn batch(n_rows: u32, position: u32) -> Batch {
        let slice = |row| PassSlice::new(row..row + 1, position, Want::Last);
        let (tokens, positions) = (vec![1; n_rows as usize], vec![position; n_rows as usize]);
        Batch { tokens, positions, slices: (0..n_rows).map(slice).collect(), ..Batch::default() }
    }

    #[test]
    fn batches_are_filled_up_to_few_outlines() {
        let rows = |n, rows_max| PassOutline::padded_rows(&batch(n, 5).pass(), rows_max);
        assert_eq!([1, 3, 5, 64, 65, 257].map(|n| rows(n, 512)), [1, 4, 8, 64, 96, 257]);
        assert_eq!([5, 7].map(|n| rows(n, 7)), [5, 7], "padding stops at the rows of the buffers");
        let mut long = batch(3, 5);
        long.slices.truncate(1);
        long.slices[0].rows = 0..3;
        assert_eq!(PassOutline::padded_rows(&long.pass(), 512), 3);
        long.pad(4);
        assert_eq!(PassOutline::of(&long.pass()), None);
    }

    #[test]
    fn positions_of_one_outline_are_many() {
        let tiles = |position| PassOutline::of(&batch(4, position).pass()).map(|outline| outline.n_tiles);
        let positions = [0, 255, 256, 1023, 1024, 16 * 256 - 1, 16 * 256];
        assert_eq!(positions.map(tiles), [1, 1, 4, 4, 16, 16, 64].map(Some));
        assert_eq!(PassOutline::of(&batch(3, 5).pass()), None, "three rows have no outline before padding");
        let mut filled = batch(3, 5);
        filled.pad(4);
        assert!(filled.pass().is_tiled() && filled.n_padding == 1);
        assert_eq!(PassOutline::of(&filled.pass()), PassOutline::of(&batch(4, 5).pass()));
    }
}
