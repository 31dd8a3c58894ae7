//! Rows whose columns the ranks of a stage divide, for what needs all of them: each shows the others its own.

use crate::ctx::Ctx;
use crate::error::Result;
use crate::limits::PassLimits;
use backend::{Device, Memory};
use std::ops::Range;
use types::{GridPlace, RankPart};

/// What each rank of this one's stage holds.
pub fn parts_of_stage(part: &RankPart) -> impl Iterator<Item = RankPart> {
    (0..part.shares.n_ranks()).map(|tp| RankPart { place: GridPlace { tp, ..part.place }, ..part.clone() })
}

/// The columns of all ranks, where there are several. A rank alone gathers nothing.
pub struct GatheredRows<M: Memory> {
    n_ranks: usize,
    all: M::Buffer, // [n_ranks * rows_max, columns that a rank has at most]
}

impl<M: Memory> GatheredRows<M> {
    /// Room for ranks with so many columns each.
    pub fn new(
        device: &M,
        limits: PassLimits,
        widths: impl ExactSizeIterator<Item = usize>,
    ) -> Result<GatheredRows<M>> {
        let n_ranks = widths.len();
        let n_rows = if n_ranks > 1 { n_ranks * limits.rows_max } else { 0 };
        Ok(GatheredRows { n_ranks, all: device.buffer(n_rows, widths.max().unwrap_or(0))? })
    }

    /// Returns the rows of a rank whose columns were gathered from `own`: the buffer, and the rows in it.
    pub fn rows_of_rank<'a>(&'a self, own: &'a M::Buffer, rank: usize, n_rows: usize) -> (&'a M::Buffer, Range<usize>) {
        if self.n_ranks > 1 { (&self.all, rank * n_rows..(rank + 1) * n_rows) } else { (own, 0..n_rows) }
    }
}

impl<D: Device> GatheredRows<D> {
    /// Gathers the first `width` columns of `own`, and what the other ranks have there.
    pub fn gather(&mut self, ctx: &mut Ctx<'_, D>, own: &D::Buffer, width: usize) -> Result<()> {
        if self.n_ranks > 1 {
            let (device, n_rows, me) = (ctx.device, ctx.n_rows(), ctx.ranks.stage_rank() as usize);
            device.copy_columns(own, 0..n_rows, 0..width, &mut self.all, me * n_rows, 0);
            let owner_of = |row: usize| (row / n_rows) as u32;
            ctx.ranks.share_rows(device, &mut self.all, owner_of, self.n_ranks * n_rows)?;
        }
        Ok(())
    }
}
