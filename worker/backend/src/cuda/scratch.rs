//! What operations need besides their arguments. Grown when buffers are made, and never in a pass.

use super::driver::{Card, Context, DeviceMemory};
use super::weights::TILE_ROWS;
use crate::Result;
use std::sync::Arc;

/// Room for what the tiles of a split attention have made. Where it is too small, nothing is split.
pub(super) const PARTIAL_BYTES: usize = 32 << 20;
/// Weights in bf16 at a time: so many may stay in a cache of the second level between their maker and their reader.
pub(super) const WIDENED_BYTES: usize = 64 << 20;

/// Tiles of rows at a time: all of them stay in a cache of the second level.
const TILES_BYTES: usize = 64 << 20;

/// What operations need besides their arguments, grown when buffers are made.
pub(super) struct DeviceScratch {
    /// Rows on their way from one form to the other.
    pub(super) rows: DeviceMemory,
    /// What the tiles of a split attention have made.
    pub(super) partial: DeviceMemory,
    /// Tiles of rows, where products read them.
    pub(super) tiles: DeviceMemory,
    /// Of products with weights of eight bits.
    pub(super) f8: ScaledScratch,
    /// Of any buffer.
    pub(super) rows_max: usize,
}

impl DeviceScratch {
    pub fn new(context: &Arc<Context>) -> Result<DeviceScratch> {
        Ok(DeviceScratch {
            rows: DeviceMemory::new(context, "scratch", 0)?,
            partial: DeviceMemory::new(context, "scratch", PARTIAL_BYTES)?,
            tiles: DeviceMemory::new(context, "tiles of rows", 0)?,
            f8: ScaledScratch::default(),
            rows_max: 0,
        })
    }

    /// Makes room for a buffer of these rows.
    pub fn reserve(&mut self, context: &Arc<Context>, card: &Card, rows_max: usize, row_bytes: usize) -> Result<()> {
        let in_rows = rows_max * row_bytes;
        let in_tiles = rows_max.next_multiple_of(TILE_ROWS).saturating_mul(row_bytes).min(TILES_BYTES);
        if self.rows.len() < in_rows {
            self.rows = DeviceMemory::new(context, "scratch", in_rows)?;
        }
        if card.has_warpgroups() && self.tiles.len() < in_tiles {
            self.tiles = DeviceMemory::new(context, "tiles of rows", in_tiles)?;
        }
        self.rows_max = self.rows_max.max(rows_max);
        if self.f8.is_made() { self.reserve_f8(context) } else { Ok(()) }
    }

    /// As much as any buffer that is here needs.
    pub fn reserve_f8(&mut self, context: &Arc<Context>) -> Result<()> {
        // A row of bf16 has two bytes for each number.
        self.f8.reserve(context, self.rows_max, self.rows.len() / 2)
    }
}

/// Where rows in eight bits lie, and weights in bf16. None where no weights need it.
#[derive(Default)]
pub(super) struct ScaledScratch(Option<ScaledBuffers>);

pub(super) struct ScaledBuffers {
    pub rows: DeviceMemory,   // [rows_max, k]
    pub scales: DeviceMemory, // [rows_max]
    pub widened: DeviceMemory,
}

impl ScaledScratch {
    /// For rows of so many numbers in all.
    pub fn reserve(&mut self, context: &Arc<Context>, rows_max: usize, n_numbers: usize) -> Result<()> {
        let fits = |places: &ScaledBuffers| places.rows.len() >= n_numbers && places.scales.len() >= 4 * rows_max;
        if !self.0.as_ref().is_some_and(fits) {
            // What is too small goes before its successor comes.
            self.0 = None;
            self.0 = Some(ScaledBuffers {
                rows: DeviceMemory::new(context, "rows in eight bits", n_numbers)?,
                scales: DeviceMemory::new(context, "scales of rows", 4 * rows_max)?,
                widened: DeviceMemory::new(context, "weights in bf16", WIDENED_BYTES)?,
            });
        }
        Ok(())
    }

    pub fn places(&self) -> Option<&ScaledBuffers> {
        self.0.as_ref()
    }

    pub fn is_made(&self) -> bool {
        self.0.is_some()
    }
}
