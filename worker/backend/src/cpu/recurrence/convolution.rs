//! Short convolutions between two gates, over pages of what they see. The last inputs of the block before stand in a
//! block's page, so a row reads one page.

use super::HeadPages;
use super::page::POSITIONS;
use crate::cpu::isa::{Isa, Kernel, dispatch};
use crate::cpu::kv::Kv;
use crate::cpu::lanes::{LANES, Lanes};
use crate::cpu::memory::SharedPtr;
use crate::{ConvolutionCall, PassSlice};
use std::ops::Range;
use types::BlockId;

/// Convolutions of some items; an item is a run of channels of a slice.
pub(super) struct ConvolutionJob<'a> {
    /// [n_rows, 3 * n_channels]
    pub x: &'a [f32],
    /// [taps, n_channels]
    pub weight: &'a [f32],
    pub call: &'a ConvolutionCall<'a>,
    pub kv: &'a Kv,
    /// [n_rows, n_channels]
    pub out: SharedPtr<f32>,
}

impl ConvolutionJob<'_> {
    /// Computes some items; `items` is a part of all runs of channels of all slices.
    pub fn run(&self, isa: Isa, items: Range<usize>) {
        // Two pages for blocks that have none.
        self.kv.with_spare(|spare| {
            dispatch(isa, ConvolutionItems { of: self, items, spare: SharedPtr::new(spare.as_mut_ptr()) });
        });
    }

    fn n_numbers(&self) -> usize {
        (self.call.channels.taps - 1 + POSITIONS) * self.call.channels.width
    }
}

struct ConvolutionItems<'a> {
    of: &'a ConvolutionJob<'a>,
    items: Range<usize>,
    spare: SharedPtr<f32>,
}

impl Kernel for ConvolutionItems<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let ConvolutionCall { pass, channels, group, .. } = *self.of.call;
        for item in self.items {
            let (slice, head) = (item / channels.n, item % channels.n);
            let blocks = pass.tables.group(group).blocks_of(slice);
            self.of.convolve_item::<L>(&pass.slices[slice], blocks, head, &self.spare);
        }
    }
}

impl ConvolutionJob<'_> {
    #[inline(always)]
    fn convolve_item<L: Lanes>(&self, slice: &PassSlice, blocks: &[BlockId], head: usize, spare: &SharedPtr<f32>) {
        let (start, end) = (slice.range.start as usize, slice.range.end as usize);
        let read = start.checked_sub(1).map(|before| blocks[before / POSITIONS]);
        assert!(read != Some(BlockId::NONE), "the page before position {start} is missing");
        let pages = HeadPages { kv: self.kv, layer: self.call.layer, head, spare, n: self.n_numbers() };
        let page = |block| pages.numbers(blocks, block);
        let n_before = (self.call.channels.taps - 1) * self.call.channels.width;
        for block in start / POSITIONS..end.div_ceil(POSITIONS) {
            let first = block * POSITIONS;
            let positions = start.max(first)..end.min(first + POSITIONS);
            let inputs = page(block);
            match block.checked_sub(1).filter(|_| positions.start == first) {
                Some(before) => inputs[..n_before].copy_from_slice(&page(before)[self.n_numbers() - n_before..]),
                None if positions.start == first => inputs[..n_before].fill(0.0),
                None => {}
            }
            for position in positions {
                let row = slice.rows.start as usize + position - start;
                self.row::<L>(row, head, &mut inputs[(position - first) * self.call.channels.width..]);
            }
        }
    }

    /// One row of a run of channels. seen: what its first tap sees, and on
    #[inline(always)]
    fn row<L: Lanes>(&self, row: usize, head: usize, seen: &mut [f32]) {
        let channels = self.call.channels;
        let (n_channels, width, first) = (channels.n_channels(), channels.width, head * channels.width);
        let x = &self.x[row * 3 * n_channels..][..3 * n_channels];
        let of = |part: usize| &x[part * n_channels + first..][..width];
        // SAFETY: the op checked the shape; one item, and so one thread, has these channels of this row.
        let out = unsafe { self.out.part(row * n_channels + first, width) };
        for i in (0..width).step_by(LANES) {
            let n = LANES.min(width - i);
            let [before, behind, input] = [of(0), of(1), of(2)].map(|part| L::load_first(&part[i..i + n]));
            before.mul(input).store_first(&mut seen[(channels.taps - 1) * width + i..][..n]);
            let mut sum = L::splat(0.0);
            for tap in 0..channels.taps {
                let weight = L::load_first(&self.weight[tap * n_channels + first + i..][..n]);
                sum = weight.fma(L::load_first(&seen[tap * width + i..][..n]), sum);
            }
            behind.mul(sum).store_first(&mut out[i..i + n]);
        }
    }
}
