//! Recurrent layers over paged states, block by block.
//!
//! A page keeps the state at its block's start and the block's rows. An output depends on its page up to its row, and
//! the next page's state on the whole page, each in one order. So bits do not depend on how rows were cut into steps,
//! and a step in mid-block reads the state once and writes none. An item is a value head of a slice. Vector lanes are
//! columns of V, which no sum crosses, or the sixteen of a product of two keys.

mod convolution;
pub(super) mod page;
mod rows;

use super::isa::{Isa, Kernel, dispatch};
use super::kv::Kv;
use super::lanes::Lanes;
use super::memory::SharedPtr;
use super::{Buffer, Cpu, Vector};
use crate::{
    ConvolutionCall, ConvolvedChannels, PassSlice, Recurrence, RecurrenceCall, RecurrentHeads, RecurrentWeights,
    Result, StateRule,
};
use convolution::ConvolutionJob;
use page::{HeadWidths, POSITIONS, StatePage, check_channels, check_heads};
use std::ops::Range;
use types::BlockId;

type CpuRecurrentWeights = RecurrentWeights<Vector>;

impl Recurrence for Cpu {
    fn check_recurrence(&self, heads: &RecurrentHeads) -> Result<()> {
        check_heads(heads)
    }

    fn check_convolution(&self, channels: &ConvolvedChannels) -> Result<()> {
        check_channels(channels)
    }

    fn recur(
        &self,
        x: &Buffer,
        weights: &CpuRecurrentWeights,
        call: &RecurrenceCall<'_>,
        kv: &mut Kv,
        out: &mut Buffer,
    ) {
        let RecurrenceCall { pass, heads, layer, .. } = *call;
        if heads.n_heads == 0 {
            return;
        }
        kv.check_recurrent(heads.layout(), layer);
        check(heads, weights);
        assert!(pass.is_tiled(), "each row belongs to one slice");
        let n_rows = pass.n_rows();
        let x = x.rows(n_rows, heads.n_cols());
        let out = out.shared(n_rows, heads.n_heads * heads.value_dim);
        let recur = RecurrenceJob { x, weights, call, shape: HeadWidths::of(heads), kv, out };
        self.team.run(pass.slices.len() * heads.n_heads, &|items| recur.run(self.config.isa, items));
    }

    fn convolve(&self, x: &Buffer, weight: &Vector, call: &ConvolutionCall<'_>, kv: &mut Kv, out: &mut Buffer) {
        let ConvolutionCall { pass, channels, layer, .. } = *call;
        let (n_rows, n_channels) = (pass.n_rows(), channels.n_channels());
        if n_channels == 0 {
            return;
        }
        kv.check_recurrent(channels.layout(), layer);
        assert!(weight.len() == channels.taps * n_channels, "a weight for each tap of each channel");
        assert!(pass.is_tiled(), "each row belongs to one slice");
        let x = x.rows(n_rows, 3 * n_channels);
        let out = out.shared(n_rows, n_channels);
        let convolve = ConvolutionJob { x, weight, call, kv, out };
        self.team.run(pass.slices.len() * channels.n, &|items| convolve.run(self.config.isa, items));
    }
}

fn check(heads: &RecurrentHeads, weights: &CpuRecurrentWeights) {
    let RecurrentWeights { conv, conv_bias, rate, rate_bias, rule } = weights;
    let n_channels = heads.n_channels();
    let fits_rule = match rule {
        StateRule::Delta { norm, .. } => norm.len() == heads.value_dim && heads.has_steps,
        StateRule::StateSpace { skip, .. } => skip.len() == heads.n_heads && !heads.has_steps,
    };
    let fits = conv.len() == heads.taps * n_channels && conv_bias.as_ref().is_none_or(|bias| bias.len() == n_channels);
    assert!(fits && fits_rule && [rate, rate_bias].iter().all(|of| of.len() == heads.n_heads), "weights of {heads:?}");
    assert!(check_heads(heads).is_ok() && heads.key_head_of(heads.n_heads - 1) < heads.n_key_heads, "{heads:?}");
}

struct RecurrenceJob<'a> {
    /// [n_rows, n_cols]
    x: &'a [f32],
    weights: &'a CpuRecurrentWeights,
    call: &'a RecurrenceCall<'a>,
    shape: HeadWidths,
    kv: &'a Kv,
    /// [n_rows, n_heads * value_dim]
    out: SharedPtr<f32>,
}

impl RecurrenceJob<'_> {
    /// Computes some items; `items` is a part of all heads of all slices.
    fn run(&self, isa: Isa, items: Range<usize>) {
        // Two pages for blocks that have none, and the working memory of `rows`.
        self.kv.with_spare(|spare| {
            let (pages, work) = spare.split_at_mut(2 * self.shape.n_numbers());
            dispatch(isa, RecurrenceItems { recur: self, items, pages, work });
        });
    }
}

struct RecurrenceItems<'a> {
    recur: &'a RecurrenceJob<'a>,
    items: Range<usize>,
    pages: &'a mut [f32],
    work: &'a mut [f32],
}

impl Kernel for RecurrenceItems<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let RecurrenceCall { pass, heads, group, .. } = *self.recur.call;
        let pages = SharedPtr::new(self.pages.as_mut_ptr());
        for item in self.items {
            let (slice, head) = (item / heads.n_heads, item % heads.n_heads);
            let blocks = pass.tables.group(group).blocks_of(slice);
            self.recur.compute_item::<L>(&pass.slices[slice], blocks, head, &pages, self.work);
        }
    }
}

impl RecurrenceJob<'_> {
    /// Computes one head of one slice.
    #[inline(always)]
    fn compute_item<L: Lanes>(
        &self,
        slice: &PassSlice,
        blocks: &[BlockId],
        head: usize,
        pages: &SharedPtr<f32>,
        work: &mut [f32],
    ) {
        let (start, end) = (slice.range.start as usize, slice.range.end as usize);
        let read = start.checked_sub(1).map(|before| blocks[before / POSITIONS]);
        assert!(read != Some(BlockId::NONE), "the page before position {start} is missing");
        for block in start / POSITIONS..end.div_ceil(POSITIONS) {
            let first = block * POSITIONS;
            let positions = start.max(first)..end.min(first + POSITIONS);
            let mut page = self.page(blocks, block, head, pages);
            match block.checked_sub(1).filter(|_| positions.start == first) {
                Some(before) => rows::carry_state::<L>(&self.page(blocks, before, head, pages), &mut page, work),
                None if first == positions.start => page.begin_sequence(),
                None => {}
            }
            let row = slice.rows.start as usize + positions.start - start;
            self.compute_rows::<L>(head, row, positions.start - first..positions.end - first, &mut page, work);
        }
    }

    /// Returns a head's page of a block.
    #[inline(always)]
    fn page<'s>(&'s self, blocks: &[BlockId], block: usize, head: usize, spare: &'s SharedPtr<f32>) -> StatePage<'s> {
        let n = self.shape.n_numbers();
        let pages = HeadPages { kv: self.kv, layer: self.call.layer, head, spare, n };
        StatePage::of(self.shape, pages.numbers(blocks, block))
    }
}

/// The pages of one head in one layer, each of `n` numbers.
struct HeadPages<'s> {
    kv: &'s Kv,
    layer: usize,
    head: usize,
    /// Two pages for blocks that have none.
    spare: &'s SharedPtr<f32>,
    n: usize,
}

impl<'s> HeadPages<'s> {
    /// Returns the numbers of a block's page: its own, or spare memory where the table has none. Neighbouring blocks
    /// get different spare memory. The caller owns the page of this head, or reads a full one.
    #[inline(always)]
    fn numbers(&self, blocks: &[BlockId], block: usize) -> &'s mut [f32] {
        match blocks[block] {
            // SAFETY: this thread's own memory; it has two pages, and no two pages in use at the same time have equal
            // parity.
            BlockId::NONE => unsafe { self.spare.part(block % 2 * self.n, self.n) },
            // SAFETY: a writer has the page to itself; a shared page is full, and only read.
            id => unsafe { self.kv.recurrent_page(self.layer, id, self.head) },
        }
    }
}
