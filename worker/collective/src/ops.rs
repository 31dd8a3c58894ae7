//! The operations of a mesh: sums by the leaves' tree, and rows, columns and tokens from rank to rank.

use crate::error::{Error, Result};
use crate::fold::{Plane, fold};
use crate::frame::{FRAME_WORDS_MAX, Kind};
use crate::mesh::Mesh;
use crate::moves::{Ends, Move, Way};
use crate::nccl::Planes;
use backend::Memory;
use std::ops::Range;
use std::time::Instant;
use types::leaves::aligned_runs;
use types::{StepId, Token};

/// A rank's planes up to here travel whole, and every rank folds them: one message's latency instead of two.
const SMALL_WORDS: usize = FRAME_WORDS_MAX;
/// Stands for a row that drew nothing.
const NOTHING: u32 = u32::MAX;
/// Rows of a step whose tokens travel together.
const TOKENS_MAX: usize = FRAME_WORDS_MAX - 1;

/// Rows have no owners.
const NOBODY: &dyn Fn(usize) -> u32 = &|_| 0;

/// The shape of a sum.
#[derive(Clone, Copy)]
struct Sum {
    /// Of `Scratch::sums`.
    idx: usize,
    n_rows: usize,
    n_cols: usize,
    tag: u64,
}

impl Mesh {
    pub fn sum_leaves<M: Memory>(
        &mut self,
        device: &M,
        planes: &mut M::Buffer,
        runs: &[Range<u32>],
        n_leaves: u32,
        n_rows: usize,
    ) -> Result<()> {
        let idx = self.sum_idx(n_leaves);
        let own = self.scratch.sums[idx].1.iter().filter(|plane| plane.tp == self.tp());
        if !own.map(|plane| &plane.run).eq(runs) {
            return Err(Error::LeavesMissing { have: runs.to_vec(), n_leaves });
        }
        if self.tp_size() == 1 {
            // The one plane is the sum.
            return Ok(());
        }
        if let Some((cuda, buffer)) = device.cuda().zip(M::cuda_buffer(planes)) {
            let planes = Planes { idx, n_leaves, n_rows, n_cols: device.cols(planes) };
            if self.adds_at_desks(planes) {
                return self.sum_at_desks(cuda, buffer, planes);
            }
            if self.has_direct_stage() {
                return self.sum_on_device(cuda, buffer, planes);
            }
        }
        let tag = u64::from(n_leaves) << 32 | n_rows as u64;
        let sum = Sum { idx, n_rows, n_cols: device.cols(planes), tag };
        if self.n_planes_max(idx) * sum.n_rows * sum.n_cols <= SMALL_WORDS {
            self.sum_small(device, planes, sum)
        } else {
            self.sum_large(device, planes, sum)
        }
    }

    /// Who has which planes, made when such a sum is first seen.
    pub(crate) fn sum_idx(&mut self, n_leaves: u32) -> usize {
        let sums = &mut self.scratch.sums;
        if let Some(idx) = sums.iter().position(|(n, _)| *n == n_leaves) {
            return idx;
        }
        let (shares, n_ranks) = (&self.part.shares, self.grid.tp);
        let runs = |tp: u16| aligned_runs(shares.of(tp, n_leaves), n_leaves).into_iter().enumerate();
        let plane = |tp: u16| move |(number, run)| Plane { run, tp: tp.into(), number };
        sums.push((n_leaves, (0..n_ranks).flat_map(|tp| runs(tp).map(plane(tp))).collect()));
        sums.len() - 1
    }

    pub(crate) fn n_planes(&self, idx: usize, tp: usize) -> usize {
        self.scratch.sums[idx].1.iter().filter(|plane| plane.tp == tp).count()
    }

    pub(crate) fn n_planes_max(&self, idx: usize) -> usize {
        (0..self.tp_size()).map(|tp| self.n_planes(idx, tp)).max().unwrap_or(0)
    }

    /// Everybody has all planes and folds them, out of the memory where they arrived.
    fn sum_small<M: Memory>(&mut self, device: &M, planes: &mut M::Buffer, sum: Sum) -> Result<()> {
        let (n_own, size) = (self.n_planes(sum.idx, self.tp()), sum.n_rows * sum.n_cols);
        let mut own = std::mem::take(&mut self.scratch.planes);
        grow(&mut own, n_own * size);
        device.read(planes, 0..n_own * sum.n_rows, &mut own[..n_own * size]);
        for tp in self.others() {
            let to = Move::block(self.in_stage(tp), Way::Out, n_own * sum.n_rows, 0..sum.n_cols);
            let n_theirs = self.n_planes(sum.idx, tp) * sum.n_rows;
            let from = Move::block(self.in_stage(tp), Way::Hold, n_theirs, 0..sum.n_cols);
            self.moves.extend([to, from].into_iter().filter(|each| each.words > 0));
        }
        let mut ends = Read { floats: &own, n_cols: sum.n_cols };
        let result = self.exchange(Kind::Planes, sum.tag, NOBODY, &mut ends);
        if result.is_ok() {
            self.fold_held(&own, sum, size);
            device.write(planes, 0, &self.scratch.sum[..size]);
            self.release_planes(sum.idx);
        }
        self.scratch.planes = own;
        result
    }

    fn fold_held(&mut self, own: &[f32], sum: Sum, size: usize) {
        let begun = Instant::now();
        let (first, me) = (self.in_stage(0), self.tp());
        grow(&mut self.scratch.sum, size);
        let peers = &self.peers;
        let source = |plane: &Plane| {
            let from = match &peers[first + plane.tp] {
                Some(peer) if plane.tp != me => bytemuck::cast_slice(peer.link.payload()),
                _ => own,
            };
            &from[plane.number * size..][..size]
        };
        let scratch = &mut self.scratch;
        fold(&scratch.sums[sum.idx].1, source, &mut scratch.stack, &mut scratch.sum[..size]);
        self.spent.folding += begun.elapsed();
    }

    /// Of those that had any: of the others, a later frame may be here already.
    fn release_planes(&mut self, idx: usize) {
        for tp in self.others() {
            if self.n_planes(idx, tp) == 0 {
                continue;
            }
            let rank = self.in_stage(tp);
            if let Ok((_, peer)) = self.peer(rank) {
                peer.link.release();
            }
        }
    }

    /// Each rank has its columns of all planes and folds those; then everybody has the finished columns of all.
    fn sum_large<M: Memory>(&mut self, device: &M, planes: &mut M::Buffer, sum: Sum) -> Result<()> {
        let mut parts = std::mem::take(&mut self.scratch.planes);
        let result = self.gather_parts(device, planes, sum, &mut parts);
        if result.is_ok() {
            self.fold_parts(&parts, sum);
            let cols = self.columns(sum, self.tp());
            for (row, values) in rows_of(&self.scratch.sum, sum.n_rows, cols.len()).enumerate() {
                device.write_part(planes, row, cols.start, values);
            }
        }
        self.scratch.planes = parts;
        result?;
        for tp in self.others() {
            let to = Move::block(self.in_stage(tp), Way::Out, sum.n_rows, self.columns(sum, self.tp()));
            let from = Move::block(self.in_stage(tp), Way::In, sum.n_rows, self.columns(sum, tp));
            self.moves.extend([to, from].into_iter().filter(|each| each.words > 0));
        }
        self.exchange(Kind::Sums, sum.tag, NOBODY, &mut Whole { device, buffer: planes })
    }

    /// parts: for each rank [n_planes * n_rows, this rank's columns]
    fn gather_parts<M: Memory>(
        &mut self,
        device: &M,
        planes: &mut M::Buffer,
        sum: Sum,
        parts: &mut Vec<f32>,
    ) -> Result<()> {
        let cols = self.columns(sum, self.tp());
        let n_planes: usize = self.scratch.sums[sum.idx].1.len();
        grow(parts, n_planes * sum.n_rows * cols.len());
        let (n_own, own) = (self.n_planes(sum.idx, self.tp()), self.part_start(sum, self.tp()) * cols.len());
        for row in 0..n_own * sum.n_rows {
            let at = own + row * cols.len();
            device.read_part(planes, row, cols.start, &mut parts[at..at + cols.len()]);
        }
        for tp in self.others() {
            let to = Move::block(self.in_stage(tp), Way::Out, n_own * sum.n_rows, self.columns(sum, tp));
            let n_theirs = self.n_planes(sum.idx, tp) * sum.n_rows;
            let from = Move::block(self.in_stage(tp), Way::In, n_theirs, cols.clone());
            self.moves.extend([to, from].into_iter().filter(|each| each.words > 0));
        }
        let first = self.in_stage(0);
        let sums = std::mem::take(&mut self.scratch.sums);
        let start = |rank: usize| part_start(&sums[sum.idx].1, rank - first, sum.n_rows);
        let mut ends = Parts { device, planes, parts, cols, start };
        let result = self.exchange(Kind::Parts, sum.tag, NOBODY, &mut ends);
        self.scratch.sums = sums;
        result
    }

    fn part_start(&self, sum: Sum, tp: usize) -> usize {
        part_start(&self.scratch.sums[sum.idx].1, tp, sum.n_rows)
    }

    fn fold_parts(&mut self, parts: &[f32], sum: Sum) {
        let begun = Instant::now();
        let size = sum.n_rows * self.columns(sum, self.tp()).len();
        let scratch = &mut self.scratch;
        grow(&mut scratch.sum, size);
        // The planes of all ranks lie in the order of their leaves, as parts do.
        let planes = &scratch.sums[sum.idx].1;
        let first_of = |tp: usize| planes.iter().position(|plane| plane.tp == tp).unwrap_or(0);
        let source = |plane: &Plane| &parts[(first_of(plane.tp) + plane.number) * size..][..size];
        fold(planes, source, &mut scratch.stack, &mut scratch.sum[..size]);
        self.spent.folding += begun.elapsed();
    }

    /// The columns that rank `tp` folds: equal parts on whole cache lines.
    fn columns(&self, sum: Sum, tp: usize) -> Range<usize> {
        const LINE: usize = 16;
        self.cut_on(LINE, sum.n_cols, tp)
    }

    /// Equal parts that end on multiples of `line`.
    pub(crate) fn cut_on(&self, line: usize, n_cols: usize, tp: usize) -> Range<usize> {
        let cut = |i: usize| (n_cols * i / self.tp_size()).next_multiple_of(line).min(n_cols);
        cut(tp)..cut(tp + 1)
    }

    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let me = self.tp();
        (0..self.tp_size()).filter(move |tp| *tp != me)
    }

    pub fn share_rows<M: Memory>(
        &mut self,
        device: &M,
        buffer: &mut M::Buffer,
        owner_of: impl Fn(usize) -> u32,
        n_rows: usize,
    ) -> Result<()> {
        let n_cols = device.cols(buffer);
        let n_owned = |tp: usize| (0..n_rows).filter(|row| owner_of(*row) as usize == tp).count();
        if (0..n_rows).any(|row| owner_of(row) as usize >= self.tp_size()) {
            return Err(Error::NoPeer("peer that owns one of the rows"));
        }
        if let Some((cuda, buffer)) = device.cuda().zip(M::cuda_buffer(buffer)).filter(|_| self.has_direct_stage()) {
            return self.share_on_device(cuda, buffer, owner_of, n_rows, n_cols);
        }
        for tp in self.others() {
            let (rank, me) = (self.in_stage(tp), self.tp());
            let to = Move::owned(rank, Way::Out, me as u32, n_owned(me), n_cols);
            let from = Move::owned(rank, Way::In, tp as u32, n_owned(tp), n_cols);
            self.moves.extend([to, from].into_iter().filter(|each| each.words > 0));
        }
        self.exchange(Kind::Rows, n_rows as u64, &owner_of, &mut Whole { device, buffer })
    }

    pub fn gather_columns<M: Memory>(
        &mut self,
        device: &M,
        mine: &M::Buffer,
        whole: &mut M::Buffer,
        n_units: u32,
        n_rows: usize,
    ) -> Result<()> {
        if self.tp() != 0 {
            self.believe()?;
        }
        let on_device = device.cuda().zip(M::cuda_buffer(mine)).zip(M::cuda_buffer(whole));
        if let Some(((cuda, mine), whole)) = on_device.filter(|_| self.has_direct_stage()) {
            return self.gather_on_device(cuda, mine, whole, n_units, n_rows);
        }
        let cols = |tp: usize| as_columns(self.part.shares.of(tp as u16, n_units));
        let tag = u64::from(n_units) << 32 | n_rows as u64;
        let own = cols(self.tp());
        if self.tp() != 0 {
            let to = Move::block(self.in_stage(0), Way::Out, n_rows, 0..own.len());
            self.moves.extend(Some(to).filter(|each| each.words > 0));
            return self.exchange(Kind::Columns, tag, NOBODY, &mut Mine { device, buffer: mine });
        }
        for tp in self.others() {
            let from = Move::block(self.in_stage(tp), Way::In, n_rows, cols(tp));
            self.moves.extend(Some(from).filter(|each| each.words > 0));
        }
        grow(&mut self.scratch.sum, own.len());
        for row in 0..n_rows {
            let values = &mut self.scratch.sum[..own.len()];
            device.read_part(mine, row, 0, values);
            device.write_part(whole, row, own.start, values);
        }
        self.exchange(Kind::Columns, tag, NOBODY, &mut Whole { device, buffer: whole })
    }

    pub fn send_rows<M: Memory>(&mut self, device: &M, buffer: &M::Buffer, n_rows: usize) -> Result<()> {
        if self.part.is_last() {
            return Err(Error::NoPeer("next stage"));
        }
        self.believe()?;
        let to = usize::from(self.rank.0) + self.tp_size();
        let n_cols = device.cols(buffer);
        if let Some((cuda, buffer)) = device.cuda().zip(M::cuda_buffer(buffer)).filter(|_| self.has_direct_next()) {
            return self.send_on_device(cuda, buffer, n_rows, n_cols);
        }
        self.moves.extend(Some(Move::block(to, Way::Out, n_rows, 0..n_cols)).filter(|each| each.words > 0));
        self.exchange(Kind::Stream, n_rows as u64, NOBODY, &mut Mine { device, buffer })
    }

    pub fn recv_rows<M: Memory>(&mut self, device: &M, buffer: &mut M::Buffer, n_rows: usize) -> Result<()> {
        if self.part.is_first() {
            return Err(Error::NoPeer("stage before"));
        }
        let from = usize::from(self.rank.0) - self.tp_size();
        let n_cols = device.cols(buffer);
        if let Some((cuda, buffer)) = device.cuda().zip(M::cuda_buffer(buffer)).filter(|_| self.has_direct_before()) {
            return self.recv_on_device(cuda, buffer, n_rows, n_cols);
        }
        self.moves.extend(Some(Move::block(from, Way::In, n_rows, 0..n_cols)).filter(|each| each.words > 0));
        self.exchange(Kind::Stream, n_rows as u64, NOBODY, &mut Whole { device, buffer })
    }

    pub fn send_tokens(&mut self, step: StepId, tokens: &[Option<Token>]) -> Result<()> {
        if !self.part.is_sampler() {
            return Err(Error::NoPeer("tokens to send: it does not draw"));
        }
        if tokens.len() > TOKENS_MAX {
            return Err(types::Unsupported("a step that draws more than 16383 tokens").into());
        }
        let mut words = std::mem::take(&mut self.scratch.words);
        words.clear();
        words.push(tokens.len() as u32);
        words.extend(tokens.iter().map(|token| token.unwrap_or(NOTHING)));
        let to = (0..self.tp_size()).filter(|rank| *rank != usize::from(self.rank.0));
        self.moves.extend(to.map(|rank| Move::block(rank, Way::Out, 1, 0..words.len())));
        let result = self.exchange(Kind::Tokens, step.0, NOBODY, &mut Words(&words));
        self.scratch.words = words;
        result
    }

    pub fn recv_tokens(&mut self, step: StepId, tokens: &mut Vec<Option<Token>>) -> Result<()> {
        if !self.part.is_first() || self.part.is_sampler() {
            return Err(Error::NoPeer("sampler to receive tokens from"));
        }
        let sampler = self.grid.sampler();
        self.moves.push(Move::block(sampler.0.into(), Way::HoldAny, 1, 0..1));
        self.exchange(Kind::Tokens, step.0, NOBODY, &mut Words(&[]))?;
        let (rank, peer) = self.peer(sampler.0.into())?;
        tokens.clear();
        let result = match peer.link.payload() {
            [n, words @ ..] if *n as usize == words.len() => {
                tokens.extend(words.iter().map(|word| (*word != NOTHING).then_some(*word)));
                Ok(())
            }
            _ => Err(Error::Garbage { rank, what: "tokens of another number than it says" }),
        };
        peer.link.release();
        result
    }
}

fn as_columns(units: Range<u32>) -> Range<usize> {
    units.start as usize..units.end as usize
}

/// The first row of rank `tp`'s planes among those of all.
fn part_start(planes: &[Plane], tp: usize, n_rows: usize) -> usize {
    planes.iter().filter(|plane| plane.tp < tp).count() * n_rows
}

fn grow(floats: &mut Vec<f32>, n: usize) {
    if floats.len() < n {
        floats.resize(n, 0.0);
    }
}

fn rows_of(floats: &[f32], n_rows: usize, n_cols: usize) -> impl Iterator<Item = &[f32]> {
    (0..n_rows).map(move |row| &floats[row * n_cols..][..n_cols])
}

/// A buffer that is sent from and received into.
struct Whole<'a, M: Memory> {
    device: &'a M,
    buffer: &'a mut M::Buffer,
}

impl<M: Memory> Ends for Whole<'_, M> {
    fn read(&mut self, row: usize, col: usize, out: &mut [u32]) {
        self.device.read_part(self.buffer, row, col, bytemuck::cast_slice_mut(out));
    }

    fn write(&mut self, _peer: usize, row: usize, col: usize, words: &[u32]) {
        self.device.write_part(self.buffer, row, col, bytemuck::cast_slice(words));
    }
}

/// A buffer that is only sent from.
struct Mine<'a, M: Memory> {
    device: &'a M,
    buffer: &'a M::Buffer,
}

impl<M: Memory> Ends for Mine<'_, M> {
    fn read(&mut self, row: usize, col: usize, out: &mut [u32]) {
        self.device.read_part(self.buffer, row, col, bytemuck::cast_slice_mut(out));
    }

    fn write(&mut self, _peer: usize, _row: usize, _col: usize, _words: &[u32]) {
        unreachable!("nothing is received into what is only sent");
    }
}

/// Planes that were read already.
struct Read<'a> {
    floats: &'a [f32],
    n_cols: usize,
}

impl Ends for Read<'_> {
    fn read(&mut self, row: usize, col: usize, out: &mut [u32]) {
        out.copy_from_slice(bytemuck::cast_slice(&self.floats[row * self.n_cols + col..][..out.len()]));
    }

    fn write(&mut self, _peer: usize, _row: usize, _col: usize, _words: &[u32]) {
        unreachable!("what arrives is held where it is");
    }
}

/// Columns of planes: sent from the device, received beside each other.
struct Parts<'a, M: Memory, F> {
    device: &'a M,
    planes: &'a M::Buffer,
    parts: &'a mut [f32],
    cols: Range<usize>,
    /// The first row of a rank's planes.
    start: F,
}

impl<M: Memory, F: Fn(usize) -> usize> Ends for Parts<'_, M, F> {
    fn read(&mut self, row: usize, col: usize, out: &mut [u32]) {
        self.device.read_part(self.planes, row, col, bytemuck::cast_slice_mut(out));
    }

    fn write(&mut self, peer: usize, row: usize, col: usize, words: &[u32]) {
        let at = ((self.start)(peer) + row) * self.cols.len() + col - self.cols.start;
        self.parts[at..at + words.len()].copy_from_slice(bytemuck::cast_slice(words));
    }
}

/// One row of words, sent.
struct Words<'a>(&'a [u32]);

impl Ends for Words<'_> {
    fn read(&mut self, _row: usize, col: usize, out: &mut [u32]) {
        out.copy_from_slice(&self.0[col..][..out.len()]);
    }

    fn write(&mut self, _peer: usize, _row: usize, _col: usize, _words: &[u32]) {
        unreachable!("what arrives is held where it is");
    }
}
