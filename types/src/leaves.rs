//! Where a sum over K is cut, and in which order the pieces are added. Follows from the model's shapes, never from the
//! topology: planner, loader and kernels all use these leaves.
//!
//! ```text
//! leaves      0   1   2   3   4   5   6   7   8
//!              \ /     \ /     \ /     \ /    |
//!              run 2   run 2   run 2   run 2  run 1
//!                \     /         \     /      |
//!                 run 4           run 4       |
//!                     \           /           |
//!                          run 8              |
//!                               \             /
//!                                    sum
//! ```
//! A rank owns a contiguous run of leaves, reduces the largest aligned power-of-two runs that it owns whole
//! (`aligned_runs`), and the runs of all ranks are merged by the same tree (`Fold`). So the bits do not depend on which
//! rank owned which leaf.

use crate::DeviceClass;
use alloc::vec::Vec;
use core::ops::Range;

/// A sum over `k` elements, cut on multiples of `Leaves::GRAIN`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaves {
    /// `bounds[i]..bounds[i + 1]` is leaf i.
    bounds: Vec<u32>,
}

impl Leaves {
    /// The length of a quantized block: no leaf cuts one.
    pub const GRAIN: u32 = 32;
    const DOWN_MIN: u32 = 16;
    const DOWN_MAX: u32 = 64;
    const CUDA: u32 = 8;

    /// One leaf, as everything has that is not row-parallel.
    pub fn whole(k: u32) -> Leaves {
        Leaves { bounds: [0, k].into() }
    }

    /// How `o_proj` is cut: on CPU by query heads, on CUDA in eight runs of whole heads, as equal as can be.
    pub fn o_proj(class: DeviceClass, n_heads: u32, head_dim: u32) -> Leaves {
        match class {
            DeviceClass::Cpu | DeviceClass::Sim => Leaves::of_heads(n_heads, head_dim),
            DeviceClass::Cuda => Leaves::of_heads(n_heads, head_dim).in_runs(Leaves::CUDA),
        }
    }

    /// How `down_proj` is cut: on CPU in 16 to 64, on CUDA in eight.
    pub fn down_proj(class: DeviceClass, inner: u32) -> Leaves {
        match class {
            DeviceClass::Cpu | DeviceClass::Sim => Leaves::of_inner(inner),
            DeviceClass::Cuda => Leaves::on_grain(inner, Leaves::CUDA),
        }
    }

    /// One leaf per query head, or per smallest run of heads that ends on the grain.
    fn of_heads(n_heads: u32, head_dim: u32) -> Leaves {
        let k = n_heads * head_dim;
        let mut heads_per_leaf = 1;
        while heads_per_leaf < n_heads && !(heads_per_leaf * head_dim).is_multiple_of(Leaves::GRAIN) {
            heads_per_leaf += 1;
        }
        let mut bounds: Vec<u32> = (0..n_heads).step_by(heads_per_leaf as usize).map(|head| head * head_dim).collect();
        bounds.push(k);
        Leaves { bounds }
    }

    /// Merges these leaves into `n` runs; returns them as they are if there are not more than `n`.
    fn in_runs(&self, n: u32) -> Leaves {
        let (n_leaves, n) = (self.len(), self.len().min(n as usize));
        Leaves { bounds: (0..=n).map(|i| self.bounds[i * n_leaves / n]).collect() }
    }

    /// The fewest of 16 to 64 equal leaves on the grain; where K has no such divisor, 16 that differ by one grain.
    fn of_inner(k: u32) -> Leaves {
        let grains = k.div_ceil(Leaves::GRAIN);
        let n = (Leaves::DOWN_MIN..=Leaves::DOWN_MAX)
            .find(|n| k.is_multiple_of(Leaves::GRAIN) && grains.is_multiple_of(*n))
            .unwrap_or(Leaves::DOWN_MIN);
        Leaves::on_grain(k, n)
    }

    /// Cuts `k` into `n` leaves that differ by at most one grain, or one leaf per grain if there are fewer grains.
    pub fn on_grain(k: u32, n: u32) -> Leaves {
        let grains = u64::from(k.div_ceil(Leaves::GRAIN));
        let n = u64::from(n).min(grains).max(1);
        let bound = |i: u64| (i * grains / n * u64::from(Leaves::GRAIN)).min(u64::from(k)) as u32;
        Leaves { bounds: (0..=n).map(bound).collect() }
    }

    pub fn len(&self) -> usize {
        self.bounds.len() - 1
    }

    pub fn is_empty(&self) -> bool {
        self.bounds.len() < 2
    }

    pub fn k(&self) -> u32 {
        self.bounds.last().copied().unwrap_or(0)
    }

    /// The elements of leaf `i`.
    pub fn leaf(&self, i: usize) -> Range<u32> {
        self.bounds[i]..self.bounds[i + 1]
    }

    /// The elements of a run of leaves; empty for an empty run, which a rank may own.
    pub fn elements(&self, run: &Range<u32>) -> Range<u32> {
        self.bounds[run.start as usize]..self.bounds[run.end as usize]
    }

    /// The bounds of the leaves: what a kernel walks.
    pub fn bounds(&self) -> &[u32] {
        &self.bounds
    }
}

/// The largest aligned power-of-two runs that tile `owned`, in ascending order.
///
/// `total` is the number of all leaves: the last run of a tree may be short of its power of two, and is whole then.
pub fn aligned_runs(owned: Range<u32>, total: u32) -> Vec<Range<u32>> {
    let mut runs = Vec::new();
    let mut at = owned.start;
    while at < owned.end {
        let mut size = 1;
        while at.is_multiple_of(size * 2) && (at + size * 2 <= owned.end || (owned.end == total && at + size < total)) {
            size *= 2;
        }
        let end = (at + size).min(owned.end);
        runs.push(at..end);
        at = end;
    }
    runs
}

/// Adds leaves or runs in ascending order by the one tree. Needs a stack of at most 32 partial sums; the caller chooses
/// what a partial sum is (a number, a tile of them).
///
/// `push(run)` returns how often to merge the two topmost entries: after pushing leaf 5 (0b101), once, and 4 and 5
/// become one run of two. A leaf that is absent (an expert that no token chose) is pushed as -0.0, which adds to any
/// number without changing a bit of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fold {
    next: u32,
}

impl Fold {
    /// The depth that a stack of partial sums can reach.
    pub const DEPTH_MAX: usize = 32;

    /// Call with each run as its sum is pushed on the stack. Returns how many times to replace the two topmost entries
    /// by `lower + upper`.
    pub fn push(&mut self, run: &Range<u32>) -> u32 {
        assert_eq!(self.next, run.start, "runs come in order and without gaps");
        self.next = run.end;
        let size = (run.end - run.start).next_power_of_two();
        let filled = run.start / size + 1;
        // As in a binary counter: one merge for each carry.
        filled.trailing_zeros()
    }

    /// Once all are pushed: returns how many times, `depth - 1`, to merge the rest from the top down.
    pub fn n_last(depth: usize) -> usize {
        depth.saturating_sub(1)
    }
}

/// The tree on plain numbers: the reference for every kernel that implements it.
pub fn sum_runs(runs: &[(Range<u32>, f32)]) -> f32 {
    let mut stack: Vec<f32> = Vec::new();
    let mut fold = Fold::default();
    for (run, value) in runs {
        stack.push(*value);
        for _ in 0..fold.push(run) {
            merge(&mut stack);
        }
    }
    for _ in 0..Fold::n_last(stack.len()) {
        merge(&mut stack);
    }
    stack.pop().unwrap_or(-0.0)
}

fn merge(stack: &mut Vec<f32>) {
    if let (Some(upper), Some(lower)) = (stack.pop(), stack.pop()) {
        stack.push(lower + upper);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_of_known_shapes() {
        assert_eq!(Leaves::of_heads(9, 64).len(), 9);
        assert_eq!(Leaves::of_heads(4, 8).bounds(), &[0, 32]);
        assert_eq!(Leaves::of_heads(6, 16).bounds(), &[0, 32, 64, 96]);
        assert_eq!(Leaves::of_heads(3, 80).bounds(), &[0, 160, 240]);
        let on_cuda = |n_heads, head_dim| Leaves::o_proj(DeviceClass::Cuda, n_heads, head_dim);
        assert_eq!(on_cuda(32, 128), Leaves::on_grain(4096, 8));
        assert_eq!(on_cuda(9, 64).bounds(), &[0, 64, 128, 192, 256, 320, 384, 448, 576]);
        assert_eq!(on_cuda(6, 16).bounds(), &[0, 32, 64, 96]);
        assert_eq!(Leaves::of_inner(1536).len(), 16);
        assert_eq!(Leaves::of_inner(11008).len(), 43);
        assert_eq!(Leaves::of_inner(128).len(), 4);
        assert_eq!(Leaves::of_inner(32 * 67).len(), 16);
        assert_eq!(Leaves::of_inner(100).bounds(), &[0, 32, 64, 96, 100]);
    }

    #[test]
    fn every_split_sums_to_the_same_bits() {
        for n in 1..70u32 {
            let leaf = |i: u32| 1.0 / (i as f32 + 1.37);
            let one_by_one: Vec<_> = (0..n).map(|i| (i..i + 1, leaf(i))).collect();
            let whole = sum_runs(&one_by_one);
            for cut_a in 0..=n {
                for cut_b in [cut_a, (cut_a + n).div_ceil(2), n] {
                    let runs: Vec<_> = [0..cut_a, cut_a..cut_b, cut_b..n]
                        .into_iter()
                        .flat_map(|owned| aligned_runs(owned, n))
                        .map(|run| (run.clone(), sum_within(&run, leaf)))
                        .collect();
                    assert_eq!(sum_runs(&runs).to_bits(), whole.to_bits(), "n={n} cuts {cut_a},{cut_b}");
                }
            }
        }
    }

    /// Sums a run by the tree, counting from the run's own first leaf: allowed because runs are aligned.
    fn sum_within(run: &Range<u32>, leaf: impl Fn(u32) -> f32) -> f32 {
        let inner: Vec<_> = run.clone().map(|i| (i - run.start..i - run.start + 1, leaf(i))).collect();
        sum_runs(&inner)
    }
}
