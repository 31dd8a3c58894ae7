//! Products of very many rows on Hopper (`warpgroups.cu`). A kernel brings the rows into tiles, chunk by chunk, so that
//! they fit a scratch and the cache of the second level.

use super::device::Cuda;
use super::driver::{DeviceMemory, LaunchShape};
use super::kernels::{TILED_SHARED_BYTES, arguments, by_row};
use super::linear::{FLOAT, PartProduct};
use super::table::Kernel;
use super::weights::{GROUP, TILE_ROWS};

/// Outputs of a block of threads.
pub(super) const TILE_OUTPUTS: usize = 128;
/// Tiles of rows at a time. All multiprocessors then work on a few rows and many outputs, and read each of them often.
const ROW_BLOCKS: usize = 8;

/// Returns how many blocks of rows of k numbers these bytes have room for. A product over nothing needs no tiles.
pub(super) fn row_blocks(n_bytes: usize, k: usize) -> usize {
    n_bytes.checked_div(TILE_ROWS * k.next_multiple_of(GROUP) * 2).unwrap_or(0)
}

/// Returns the rows of a chunk: of equal chunks, as few as the scratch has room for.
fn chunk_rows(n_rows: usize, row_blocks: usize) -> usize {
    let n_blocks = n_rows.div_ceil(TILE_ROWS);
    let n_chunks = n_blocks.div_ceil(row_blocks.min(ROW_BLOCKS));
    n_blocks.div_ceil(n_chunks) * TILE_ROWS
}

impl Cuda {
    /// Requires a scratch for at least one block of rows.
    pub(super) fn product_of_tiles(&self, product: &PartProduct<'_>, kernel: Kernel, tiles: &DeviceMemory) {
        let &PartProduct { w, part, x, n_rows, to, ld, split } = product;
        let (digits, scales, n_out) = (part.digits.address(0), part.scales.address(0), part.rows as u32);
        let (n_groups, tiles_at) = (w.pieces.n_groups, tiles.address(0));
        let (per_job, pieces) = split.map_or((w.pieces.n, w.pieces), |split| (split.per_job, split.parts));
        let chunk = chunk_rows(n_rows, row_blocks(tiles.len(), w.k));
        for first in (0..n_rows).step_by(chunk) {
            let n = (n_rows - first).min(chunk);
            let from = x + (first * n_groups as usize * GROUP * 2) as u64;
            let shape = LaunchShape { grid: [n.div_ceil(32) as u32, n_groups.div_ceil(4), 1], ..by_row(0) };
            // SAFETY: x has these rows, and the scratch has room for the tiles of a chunk.
            unsafe { self.launch(Kernel::TileRows, shape, arguments![from, n as u32, n_groups, tiles_at]) };
            let n_jobs = n.div_ceil(TILE_ROWS) as u32 * n_out.div_ceil(TILE_OUTPUTS as u32) * (pieces.n / per_job);
            let grid = [n_jobs.min(self.card.multiprocessors), 1, 1];
            let shape = LaunchShape { grid, block: [384, 1, 1], shared_bytes: TILED_SHARED_BYTES };
            let to = to + first as u64 * u64::from(ld) * FLOAT;
            let (rows, plane_rows) = (n as u32, n_rows as u32);
            let args = arguments![digits, scales, tiles_at, to, ld, n_out, rows, plane_rows, per_job, pieces];
            // SAFETY: the packer laid the part out for its kind, the kernel before wrote the tiles, and the caller
            // checked that the results have room.
            unsafe { self.launch(kernel, shape, args) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_equal_and_fit() {
        let of = |n_rows| chunk_rows(n_rows, 9);
        assert_eq!([129, 256, 2048].map(of), [256, 256, 2048]);
        assert_eq!([2049, 4096, 4097].map(of), [1280, 2048, 1536]);
        assert_eq!(chunk_rows(1000, 1), 256);
    }

    #[test]
    fn a_scratch_has_room_for_whole_blocks() {
        let block = 256 * 64 * 2;
        assert_eq!([0, block - 1, 2 * block].map(|n_bytes| row_blocks(n_bytes, 40)), [0, 0, 2]);
        assert_eq!(row_blocks(block, 0), 0, "a product over nothing");
    }
}
