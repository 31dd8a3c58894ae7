//! The sum over the planes of all ranks by the leaves' tree, one tile of columns at a time. Has no knowledge of the
//! planes' origin.

use crate::sum::Plane;
use types::leaves::Fold;

/// Columns folded together: a stack of this width stays in the L1 cache.
const TILE: usize = 256;
/// The numbers of the stack without its first entry, which is the result itself.
pub const STACK: usize = (Fold::DEPTH_MAX - 1) * TILE;

/// Computes `out` as the sum of all planes, which come in ascending order of their leaves. `source` returns a plane's
/// elements, as many as `out` has.
pub fn fold<'a>(planes: &[Plane], source: impl Fn(&Plane) -> &'a [f32], stack: &mut [f32], out: &mut [f32]) {
    for start in (0..out.len()).step_by(TILE) {
        let end = (start + TILE).min(out.len());
        fold_tile(planes, |plane| &source(plane)[start..end], stack, &mut out[start..end]);
    }
}

fn fold_tile<'a>(planes: &[Plane], source: impl Fn(&Plane) -> &'a [f32], stack: &mut [f32], out: &mut [f32]) {
    let mut tree = Fold::default();
    let mut depth = 0;
    for plane in planes {
        let values = source(plane);
        let n_merges = tree.push(&plane.run);
        if n_merges == 0 {
            entry(stack, out, depth).copy_from_slice(values);
            depth += 1;
        } else {
            // A single plane is pushed and merged in one go.
            add(entry(stack, out, depth - 1), values);
            (1..n_merges).for_each(|_| merge(stack, out, &mut depth));
        }
    }
    for _ in 0..Fold::n_last(depth) {
        merge(stack, out, &mut depth);
    }
}

/// Returns an entry of the stack; the lowest is the result.
fn entry<'s>(stack: &'s mut [f32], out: &'s mut [f32], i: usize) -> &'s mut [f32] {
    match i {
        0 => out,
        i => &mut stack[(i - 1) * TILE..][..out.len()],
    }
}

/// Merges the two topmost entries into one.
fn merge(stack: &mut [f32], out: &mut [f32], depth: &mut usize) {
    *depth -= 1;
    let (below, top) = stack.split_at_mut((*depth - 1) * TILE);
    let top = &top[..out.len()];
    match *depth {
        1 => add(out, top),
        i => add(&mut below[(i - 2) * TILE..][..top.len()], top),
    }
}

fn add(lower: &mut [f32], upper: &[f32]) {
    lower.iter_mut().zip(upper).for_each(|(lower, upper)| *lower += upper);
}
