//! Reductions over one row of logits for the sampler, in sixteen lanes and one tree.

use super::isa::{Isa, Kernel, dispatch};
use super::lanes::{LANES, Lanes};
use super::math::exp;

/// The largest number of a row. NaN is skipped, and an empty row gives -infinity.
pub(crate) fn largest(isa: Isa, row: &[f32]) -> f32 {
    let mut largest = f32::NEG_INFINITY;
    dispatch(isa, Largest { row, largest: &mut largest });
    largest
}

/// The sum of e^((x - shift) * scale).
pub(crate) fn sum_exp(isa: Isa, row: &[f32], shift: f32, scale: f32) -> f32 {
    let mut sum = 0.0;
    dispatch(isa, SumExp { row, shift, scale, sum: &mut sum });
    sum
}

struct Largest<'a> {
    row: &'a [f32],
    largest: &'a mut f32,
}

impl Kernel for Largest<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (chunks, tail) = self.row.as_chunks::<LANES>();
        let mut largest = L::splat(f32::NEG_INFINITY);
        for chunk in chunks {
            largest = L::load(chunk).max(largest);
        }
        let tail = L::load_first(tail).keep_first(tail.len(), f32::NEG_INFINITY);
        *self.largest = tail.max(largest).largest();
    }
}

struct SumExp<'a> {
    row: &'a [f32],
    shift: f32,
    scale: f32,
    sum: &'a mut f32,
}

impl Kernel for SumExp<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (chunks, tail) = self.row.as_chunks::<LANES>();
        let (shift, scale) = (L::splat(self.shift), L::splat(self.scale));
        let mut sum = L::splat(0.0);
        for chunk in chunks {
            sum = sum.add(weight(L::load(chunk), shift, scale));
        }
        let last = weight(L::load_first(tail), shift, scale).keep_first(tail.len(), 0.0);
        *self.sum = sum.add(last).sum();
    }
}

// Not a closure: a closure would be compiled for the baseline instructions.
#[inline(always)]
fn weight<L: Lanes>(x: L, shift: L, scale: L) -> L {
    exp(x.sub(shift).mul(scale))
}
