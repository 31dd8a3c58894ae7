//! A page met by all queries of a walk, in groups that share what is loaded of it.
#![allow(clippy::needless_range_loop, reason = "an index into several arrays")]

use super::products::{KvNumber, add_weighted, dots, interleave, queries_per_load};
use super::{AttentionJob, POSITIONS, Query, TILE};
use crate::cpu::kv::{KvPlane, VALUES_MAX};
use crate::cpu::lanes::{LANES, Lanes};
use crate::cpu::math::soft_cap;
use std::ops::Range;

/// From so many queries on a page of f16 is widened once for all of them, and not in the registers of each group.
const WIDENED_MIN: usize = 5;

impl AttentionJob<'_> {
    /// The queries as `products` reads them, group by group.
    #[inline(always)]
    pub(super) fn lay_out<L: Lanes>(&self, queries: &[Query], to: &mut [f32]) {
        let (dim, n_cols) = (self.call.heads.head_dim, self.call.heads.qkv_cols());
        for (queries, to) in queries.chunks(queries_per_load::<L>()).zip(to.chunks_mut(queries_per_load::<L>() * dim)) {
            let of = |query: &Query| &self.qkv[query.row * n_cols + query.head * dim..][..dim];
            interleave(queries.iter().map(of), &mut to[..queries.len() * dim]);
        }
    }

    /// A half page, widened where that is done once for many queries.
    #[inline(always)]
    pub(super) fn widened_plane<'a, L: Lanes>(
        &'a self,
        start: usize,
        n_queries: usize,
        page: &'a mut [f32],
    ) -> KvPlane<'a> {
        let n = POSITIONS * self.call.heads.head_dim;
        match self.kv.half(start, n) {
            KvPlane::F16(_) if n_queries >= WIDENED_MIN => {
                self.kv.widen::<L>(start, &mut page[..n]);
                KvPlane::F32(&page[..n])
            }
            half => half,
        }
    }

    /// Pages `i` of a tile and those behind it.
    #[inline(always)]
    pub(super) fn score_pages<L: Lanes, T: KvNumber, const P: usize>(
        &self,
        q: &[f32],
        k: [&[T]; P],
        i: usize,
        scores: &mut [[f32; TILE]],
    ) {
        let mut pages: [&[[T; LANES]]; P] = [&[]; P];
        for p in 0..P {
            pages[p] = k[p].as_chunks().0;
        }
        let of_group = queries_per_load::<L>() * self.call.heads.head_dim;
        for (q, scores) in q.chunks(of_group).zip(scores.chunks_mut(queries_per_load::<L>())) {
            match scores.len() {
                4.. => self.score_group::<L, T, 4, P>(q, &pages, i, scores),
                3 => self.score_group::<L, T, 3, P>(q, &pages, i, scores),
                2 => self.score_group::<L, T, 2, P>(q, &pages, i, scores),
                _ => self.score_group::<L, T, 1, P>(q, &pages, i, scores),
            }
        }
    }

    #[inline(always)]
    fn score_group<L: Lanes, T: KvNumber, const N: usize, const P: usize>(
        &self,
        q: &[f32],
        k: &[&[[T; LANES]]; P],
        i: usize,
        scores: &mut [[f32; TILE]],
    ) {
        // Groups are no larger, and such code is not made.
        if N > queries_per_load::<L>() {
            unreachable!("a group of {N}");
        }
        let dots = dots::<L, T, N, P>(q.as_chunks().0, k);
        for (dots, i) in dots.iter().zip(i..) {
            for (dot, scores) in dots.iter().zip(&mut *scores) {
                let score = dot.mul(L::splat(self.call.heads.scale));
                let scores = &mut scores.as_chunks_mut::<LANES>().0[i];
                match self.call.heads.cap {
                    None => score.store(scores),
                    Some(cap) => soft_cap(score, L::splat(cap)).store(scores),
                }
            }
        }
    }

    /// The page at position `at`.
    #[inline(always)]
    pub(super) fn add_page<L: Lanes, T: KvNumber>(
        &self,
        queries: &[Query],
        v: &[T],
        at: usize,
        scores: &[[f32; TILE]],
        values: &mut [[f32; VALUES_MAX]],
    ) {
        let n = queries_per_load::<L>();
        for ((queries, scores), values) in queries.chunks(n).zip(scores.chunks(n)).zip(values.chunks_mut(n)) {
            match queries.len() {
                4.. => self.add_group::<L, T, 4>(queries, v, at, scores, values),
                3 => self.add_group::<L, T, 3>(queries, v, at, scores, values),
                2 => self.add_group::<L, T, 2>(queries, v, at, scores, values),
                _ => self.add_group::<L, T, 1>(queries, v, at, scores, values),
            }
        }
    }

    /// What all of them see is read once for all, and what only some see, after that, for each.
    #[inline(always)]
    fn add_group<L: Lanes, T: KvNumber, const N: usize>(
        &self,
        queries: &[Query],
        v: &[T],
        at: usize,
        scores: &[[f32; TILE]],
        values: &mut [[f32; VALUES_MAX]],
    ) {
        // Groups are no larger, and such code is not made.
        if N > queries_per_load::<L>() {
            unreachable!("a group of {N}");
        }
        let dim = self.call.heads.head_dim;
        let mut p = [&[0.0; LANES]; N];
        for n in 0..N {
            p[n] = &scores[n].as_chunks::<LANES>().0[at % TILE / POSITIONS];
        }
        let shared = seen_by_all(queries, at);
        if !shared.is_empty() {
            add_weighted::<L, T, N>(&p, shared.clone(), v, dim, values);
        }
        for n in 0..N {
            let seen = queries[n].seen_of(at, POSITIONS);
            let rest = seen.start.max(shared.end)..seen.end;
            if !rest.is_empty() {
                add_weighted::<L, T, 1>(&[p[n]], rest, v, dim, &mut values[n..]);
            }
        }
    }
}

/// The positions of a page, from the first that any query sees, that all of them see.
#[inline(always)]
fn seen_by_all(queries: &[Query], at: usize) -> Range<usize> {
    let mut all = queries[0].seen_of(at, POSITIONS);
    for query in &queries[1..] {
        let seen = query.seen_of(at, POSITIONS);
        if seen.start != all.start {
            return 0..0;
        }
        all.end = all.end.min(seen.end);
    }
    all
}
