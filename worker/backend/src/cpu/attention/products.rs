//! The two products of attention over a page, for several queries at a time: each number of K and V is loaded once for
//! all of them, and sums wait in registers.
//!
//! What a query's sums are is its own: how many others are beside it changes no bit.
#![allow(clippy::needless_range_loop, reason = "an index into several arrays of registers")]

use crate::cpu::kv::VALUES_MAX;
use crate::cpu::lanes::{LANES, Lanes};
use std::ops::Range;

/// A number as a cache has it.
pub(crate) trait KvNumber: Copy {
    fn lanes<L: Lanes>(from: &[Self; LANES]) -> L;
    /// Zeros behind what there is.
    fn first_lanes<L: Lanes>(from: &[Self]) -> L;
}

impl KvNumber for f32 {
    #[inline(always)]
    fn lanes<L: Lanes>(from: &[f32; LANES]) -> L {
        L::load(from)
    }

    #[inline(always)]
    fn first_lanes<L: Lanes>(from: &[f32]) -> L {
        L::load_first(from)
    }
}

/// The bits of an f16.
impl KvNumber for u16 {
    #[inline(always)]
    fn lanes<L: Lanes>(from: &[u16; LANES]) -> L {
        L::from_f16(from)
    }

    #[inline(always)]
    fn first_lanes<L: Lanes>(from: &[u16]) -> L {
        let mut lanes = [0; LANES];
        lanes[..from.len()].copy_from_slice(from);
        L::from_f16(&lanes)
    }
}

/// How many queries share what is loaded of a page: as many as leave their sums in registers.
pub(crate) const fn queries_per_load<L: Lanes>() -> usize {
    if L::SUMS < 4 { 2 } else { 4 }
}

/// How many pages share what is loaded of a query.
pub(crate) const fn pages_per_load<L: Lanes>() -> usize {
    if L::SUMS < 16 { 1 } else { 2 }
}

/// Puts queries side by side, as `dots` reads them. to: [dim, N]
pub(crate) fn interleave<'a>(queries: impl ExactSizeIterator<Item = &'a [f32]>, to: &mut [f32]) {
    let n = queries.len();
    for (i, query) in queries.enumerate() {
        query.iter().zip(to.chunks_exact_mut(n)).for_each(|(x, to)| to[i] = *x);
    }
}

/// Sums of N queries over sixteen positions of each of P pages.
type PageSums<L, const N: usize, const P: usize> = [[L; N]; P];

/// q · k of sixteen positions of each of P pages, for each of N queries. q: [dim, N], k: [dim, 16]
#[inline(always)]
pub(crate) fn dots<L: Lanes, T: KvNumber, const N: usize, const P: usize>(
    q: &[[f32; N]],
    k: &[&[[T; LANES]]; P],
) -> PageSums<L, N, P> {
    for p in 0..P {
        assert_eq!(k[p].len(), q.len(), "a number of K for each of a query");
    }
    // Constant, so that the loops over a virtual lane are unrolled; plain Rust is compiled small.
    match q.len() {
        dim if L::SUMS < 4 => tree_of_lanes(q, k, dim),
        64 => tree_of_lanes(q, k, 64),
        128 => tree_of_lanes(q, k, 128),
        dim => tree_of_lanes(q, k, dim),
    }
}

/// The virtual lane j of a product takes elements j, j + 16, ..: here it is a register, whose lanes are positions, and
/// the tree over virtual lanes is plain addition. Lanes are finished in the tree's own order, so that few sums wait.
#[inline(always)]
fn tree_of_lanes<L: Lanes, T: KvNumber, const N: usize, const P: usize>(
    q: &[[f32; N]],
    k: &[&[[T; LANES]]; P],
    dim: usize,
) -> PageSums<L, N, P> {
    let mut sums = [[L::splat(0.0); N]; P];
    for half in 0..2 {
        let of_four = [0, 2].map(|i| half + i);
        let mut both = [[L::splat(0.0); N]; P];
        for i in of_four {
            let mut pair = lane_pair::<L, T, N, P>(q, k, i, dim);
            add(&mut pair, &lane_pair(q, k, i + 4, dim));
            if i == half { both = pair } else { add(&mut both, &pair) }
        }
        if half == 0 { sums = both } else { add(&mut sums, &both) }
    }
    sums
}

#[inline(always)]
fn add<L: Lanes, const N: usize, const P: usize>(to: &mut PageSums<L, N, P>, of: &PageSums<L, N, P>) {
    for p in 0..P {
        for n in 0..N {
            to[p][n] = to[p][n].add(of[p][n]);
        }
    }
}

/// Virtual lanes `i` and `i + 8`, added.
#[inline(always)]
fn lane_pair<L: Lanes, T: KvNumber, const N: usize, const P: usize>(
    q: &[[f32; N]],
    k: &[&[[T; LANES]]; P],
    i: usize,
    dim: usize,
) -> PageSums<L, N, P> {
    let mut sums = lane::<L, T, N, P>(q, k, i, dim);
    add(&mut sums, &lane(q, k, i + 8, dim));
    sums
}

/// One virtual lane.
#[inline(always)]
fn lane<L: Lanes, T: KvNumber, const N: usize, const P: usize>(
    q: &[[f32; N]],
    k: &[&[[T; LANES]]; P],
    i: usize,
    dim: usize,
) -> PageSums<L, N, P> {
    let mut sums = [[L::splat(0.0); N]; P];
    for at in (i..dim).step_by(LANES) {
        let mut lanes = [L::splat(0.0); P];
        for p in 0..P {
            lanes[p] = T::lanes::<L>(&k[p][at]);
        }
        for n in 0..N {
            let q = L::splat(q[at][n]);
            for p in 0..P {
                sums[p][n] = q.fma(lanes[p], sums[p][n]);
            }
        }
    }
    sums
}

/// acc[n] += p[n][t] * v[t] for ascending t of `seen`, for each of N queries. v: [16, dim]
#[inline(always)]
pub(crate) fn add_weighted<L: Lanes, T: KvNumber, const N: usize>(
    p: &[&[f32; LANES]; N],
    seen: Range<usize>,
    v: &[T],
    dim: usize,
    acc: &mut [[f32; VALUES_MAX]],
) {
    let (whole, n) = (dim / LANES * LANES, const { columns_per_load::<L>(N) });
    let wide = whole / (n * LANES) * n * LANES;
    for column in (0..wide).step_by(n * LANES) {
        match n {
            1 => columns::<L, T, N, 1>(p, seen.clone(), v, (dim, column), acc),
            2 => columns::<L, T, N, 2>(p, seen.clone(), v, (dim, column), acc),
            _ => columns::<L, T, N, 4>(p, seen.clone(), v, (dim, column), acc),
        }
    }
    for column in (wide..whole).step_by(LANES) {
        columns::<L, T, N, 1>(p, seen.clone(), v, (dim, column), acc);
    }
    if whole < dim {
        last_columns::<L, T, N>(p, seen, v, (dim, whole), acc);
    }
}

/// How many registers of columns share what is loaded of the weights of n queries.
const fn columns_per_load<L: Lanes>(n: usize) -> usize {
    match L::SUMS / n {
        0 | 1 => 1,
        2 | 3 => 2,
        _ => 4,
    }
}

/// C registers of columns of each query.
#[inline(always)]
fn columns<L: Lanes, T: KvNumber, const N: usize, const C: usize>(
    p: &[&[f32; LANES]; N],
    seen: Range<usize>,
    v: &[T],
    (dim, column): (usize, usize),
    acc: &mut [[f32; VALUES_MAX]],
) {
    let mut sums = [[L::splat(0.0); C]; N];
    for n in 0..N {
        let acc = &acc[n][column..].as_chunks::<LANES>().0[..C];
        for c in 0..C {
            sums[n][c] = L::load(&acc[c]);
        }
    }
    for t in seen.start..seen.end.min(LANES) {
        let row = &v[t * dim + column..].as_chunks::<LANES>().0[..C];
        let mut lanes = [L::splat(0.0); C];
        for c in 0..C {
            lanes[c] = T::lanes::<L>(&row[c]);
        }
        for n in 0..N {
            let p = L::splat(p[n][t]);
            for c in 0..C {
                sums[n][c] = p.fma(lanes[c], sums[n][c]);
            }
        }
    }
    for n in 0..N {
        let acc = &mut acc[n][column..].as_chunks_mut::<LANES>().0[..C];
        for c in 0..C {
            sums[n][c].store(&mut acc[c]);
        }
    }
}

#[inline(always)]
fn last_columns<L: Lanes, T: KvNumber, const N: usize>(
    p: &[&[f32; LANES]; N],
    seen: Range<usize>,
    v: &[T],
    (dim, column): (usize, usize),
    acc: &mut [[f32; VALUES_MAX]],
) {
    for n in 0..N {
        let acc = &mut acc[n][column..].as_chunks_mut::<LANES>().0[0];
        let mut sum = L::load(acc);
        for t in seen.start..seen.end.min(LANES) {
            let row = T::first_lanes::<L>(&v[t * dim + column..][..dim - column]);
            sum = L::splat(p[n][t]).fma(row, sum);
        }
        sum.store(acc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::lanes::PlainFloat;
    use half::f16;

    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| (((i + seed) * 7919 % 1009) as f32 - 504.0) / 97.0).collect()
    }

    /// Sixteen virtual lanes, and halves added to halves.
    fn dot(q: &[f32], k: impl Fn(usize) -> f32) -> f32 {
        let mut lanes = [0.0f32; LANES];
        q.iter().enumerate().for_each(|(i, q)| lanes[i % LANES] = q.mul_add(k(i), lanes[i % LANES]));
        for half in [8, 4, 2, 1] {
            (0..half).for_each(|i| lanes[i] += lanes[i + half]);
        }
        lanes[0]
    }

    const DIMS: [usize; 8] = [2, 8, 24, 64, 80, 96, 256, 512];

    fn dots_follow_the_letter<const N: usize>() {
        for dim in DIMS {
            let queries: Vec<Vec<f32>> = (0..N).map(|n| numbers(dim, 31 * n)).collect();
            let k: Vec<u16> = numbers(dim * LANES, 5).iter().map(|x| f16::from_f32(*x).to_bits()).collect();
            let wide: Vec<f32> = k.iter().map(|bits| f16::from_bits(*bits).to_f32()).collect();
            let mut q = vec![0.0; N * dim];
            interleave(queries.iter().map(Vec::as_slice), &mut q);
            let q = q.as_chunks::<N>().0;
            let [halves] = dots::<PlainFloat, u16, N, 1>(q, &[k.as_chunks().0]);
            let floats = dots::<PlainFloat, f32, N, 2>(q, &[wide.as_chunks().0; 2]);
            for n in 0..N {
                let mut got = [[0.0; LANES]; 3];
                halves[n].store(&mut got[0]);
                floats[0][n].store(&mut got[1]);
                floats[1][n].store(&mut got[2]);
                let expected: [f32; LANES] = std::array::from_fn(|at| dot(&queries[n], |i| wide[i * LANES + at]));
                assert_eq!(got.map(|of| of.map(f32::to_bits)), [expected.map(f32::to_bits); 3], "{N} of {dim}");
            }
        }
    }

    fn sums_follow_the_letter<const N: usize>() {
        for (dim, seen) in DIMS.into_iter().flat_map(|dim| [0..16, 3..9, 15..16, 4..4].map(|seen| (dim, seen))) {
            let weights: Vec<[f32; LANES]> = (0..N).map(|n| numbers(LANES, 17 * n).try_into().unwrap()).collect();
            let v: Vec<u16> = numbers(dim * LANES, 9).iter().map(|x| f16::from_f32(*x).to_bits()).collect();
            let mut got = vec![[0.5; VALUES_MAX]; N];
            let p: [&[f32; LANES]; N] = std::array::from_fn(|n| &weights[n]);
            add_weighted::<PlainFloat, u16, N>(&p, seen.clone(), &v, dim, &mut got);
            for n in 0..N {
                for column in 0..dim {
                    let of = |sum: f32, t: usize| p[n][t].mul_add(f16::from_bits(v[t * dim + column]).to_f32(), sum);
                    let expected = seen.clone().fold(0.5, of);
                    assert_eq!(got[n][column].to_bits(), expected.to_bits(), "{N} of {dim}, {seen:?}, {column}");
                }
            }
        }
    }

    #[test]
    fn a_group_of_queries_has_the_sums_of_each() {
        dots_follow_the_letter::<1>();
        dots_follow_the_letter::<3>();
        dots_follow_the_letter::<4>();
        sums_follow_the_letter::<1>();
        sums_follow_the_letter::<3>();
        sums_follow_the_letter::<4>();
    }
}
