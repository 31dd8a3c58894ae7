//! Attention: every path gives the bits of the plain one, however positions were cut into steps and whatever other
//! sequences are in them.

mod int8;

use crate::numbers::{Rng, all, assert_bits, assert_close, cpu, cpus, filled};
use backend::cpu::{Cpu, Isa, Kv, Vector};
use backend::{
    Attention, AttentionCall, AttentionHeads, Batch, BlockTables, KvPages, KvSpec, Memory, PassSlice, RopeStyle,
    ScoreTerms, Weights,
};
use half::f16;
use types::{Activations, BlockId, KvDtype, KvLayout, Want};

const LAYER: usize = 1;
/// Blocks that sequences do not use, so that theirs are scattered.
const SPARE_BLOCKS: usize = 20;

/// A sequence and its blocks.
struct Sequence {
    /// [n_positions, qkv_cols], before the rope.
    qkv: Vec<f32>,
    blocks: Vec<BlockId>,
}

struct Case {
    heads: AttentionHeads,
    dtype: KvDtype,
    style: RopeStyle,
    has_rope: bool,
    cos: Vec<f32>,
    sin: Vec<f32>,
    n_blocks: usize,
    sequences: Vec<Sequence>,
    sinks: Option<Vec<f32>>,
}

impl Case {
    fn new(rng: &mut Rng, shape: (usize, usize, usize), dtype: KvDtype, style: RopeStyle, lengths: &[usize]) -> Case {
        let (n_heads, n_kv_heads, head_dim) = shape;
        let heads = AttentionHeads::whole(n_heads, n_kv_heads, head_dim, 1.0 / (head_dim as f32).sqrt());
        let n_angles = lengths.iter().max().unwrap() * head_dim / 2;
        let angles: Vec<f32> = (0..n_angles).map(|_| rng.unit() * 3.0).collect();
        // The sequences' blocks are scattered over the pool.
        let n_blocks = SPARE_BLOCKS + lengths.iter().map(|n| n.div_ceil(16)).sum::<usize>();
        let mut free: Vec<u32> = (0..n_blocks as u32).collect();
        let mut block = |rng: &mut Rng| BlockId(free.swap_remove(rng.below(free.len())));
        let mut sequences = Vec::new();
        for &n in lengths {
            let blocks = (0..n.div_ceil(16)).map(|_| block(rng)).collect();
            let qkv = rng.floats(n * heads.qkv_cols()).iter().map(|x| x * 3.0).collect();
            sequences.push(Sequence { qkv, blocks });
        }
        let (cos, sin) = (angles.iter().map(|a| a.cos()).collect(), angles.iter().map(|a| a.sin()).collect());
        Case { heads, dtype, style, has_rope: true, cos, sin, n_blocks, sequences, sinks: None }
    }

    /// The pairs of a head that turn.
    fn n_turned(&self) -> usize {
        let half = self.heads.head_dim / 2;
        if let RopeStyle::Apart(_) = self.style { half / 4 } else { half }
    }

    fn length(&self, sequence: usize) -> usize {
        self.sequences[sequence].qkv.len() / self.heads.qkv_cols()
    }

    fn kv(&self, cpu: &Cpu) -> Kv {
        let AttentionHeads { n_kv_heads, head_dim, .. } = self.heads;
        cpu.kv(KvSpec {
            n_layers: 2,
            n_blocks: self.n_blocks,
            layout: KvLayout::heads(n_kv_heads as u32, head_dim as u32),
            dtype: self.dtype,
        })
        .unwrap()
    }

    /// One step over a range of positions of some sequences. Returns [n_rows, n_heads * head_dim].
    fn step(&self, cpu: &Cpu, kv: &mut Kv, slices: &[(usize, std::ops::Range<usize>)]) -> Vec<f32> {
        let cols = self.heads.qkv_cols();
        let (mut batch, mut x) = (Batch::default(), Vec::new());
        let mut table = BlockTables { blocks: Vec::new(), bounds: vec![0] };
        for (sequence, range) in slices {
            let first = batch.tokens.len() as u32;
            batch.tokens.extend(range.clone().map(|_| 0));
            batch.positions.extend(range.clone().map(|position| position as u32));
            batch.slices.push(PassSlice::new(first..first + range.len() as u32, range.start as u32, Want::Nothing));
            table.blocks.extend(&self.sequences[*sequence].blocks);
            table.bounds.push(table.blocks.len() as u32);
            x.extend(&self.sequences[*sequence].qkv[range.start * cols..range.end * cols]);
        }
        batch.tables.push(table);
        let n_rows = batch.n_rows();
        let rope = cpu.rope(&self.cos, &self.sin, self.n_turned(), self.style).unwrap();
        let mut qkv = filled(cpu, n_rows, &x);
        let mut out = cpu.buffer(n_rows, self.heads.n_heads * self.heads.head_dim).unwrap();
        cpu.rope_store(
            &mut qkv,
            self.has_rope.then_some(&rope),
            &AttentionCall { pass: &batch.pass(), heads: &self.heads, group: 0, layer: LAYER },
            kv,
        );
        cpu.attend(
            &mut qkv,
            kv,
            &AttentionCall { pass: &batch.pass(), heads: &self.heads, group: 0, layer: LAYER },
            &ScoreTerms { sinks: self.sinks.as_deref().map(Vector::new).as_ref(), distances: None },
            &mut out,
        );
        all(cpu, &out, n_rows)
    }

    fn whole(&self, cpu: &Cpu, sequence: usize) -> Vec<f32> {
        self.step(cpu, &mut self.kv(cpu), &[(sequence, 0..self.length(sequence))])
    }

    /// Textbook attention in f64 over what the cache holds.
    fn naive(&self, sequence: usize) -> Vec<f64> {
        let AttentionHeads { n_heads, n_kv_heads, head_dim: d, scale, window, cap, .. } = self.heads;
        let n = self.length(sequence);
        let head = |position: usize, head: usize| {
            let start = position * self.heads.qkv_cols() + head * d;
            let x: Vec<f64> = self.sequences[sequence].qkv[start..][..d].iter().map(|x| f64::from(*x)).collect();
            if head < n_heads + n_kv_heads && self.has_rope { self.turned(&x, position) } else { x }
        };
        let stored = |position: usize, at: usize| self.stored(head(position, at), at < n_heads + n_kv_heads);
        let mut out = Vec::new();
        for position in 0..n {
            for h in 0..n_heads {
                let q = head(position, h);
                let kv_head = n_heads + h / (n_heads / n_kv_heads);
                let dot = |t| stored(t, kv_head).iter().zip(&q).map(|(k, q)| k * q).sum::<f64>();
                let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
                let score = |t| match cap.map(f64::from) {
                    None => dot(t) * f64::from(scale),
                    Some(cap) => cap * (dot(t) * f64::from(scale) / cap).tanh(),
                };
                let scores: Vec<f64> = (first..=position).map(score).collect();
                let sink = self.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[h]));
                let largest = scores.iter().copied().fold(sink, f64::max);
                let p: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                let sum = p.iter().sum::<f64>() + (sink - largest).exp();
                let v: Vec<Vec<f64>> = (first..=position).map(|t| stored(t, kv_head + n_kv_heads)).collect();
                out.extend((0..d).map(|i| p.iter().zip(&v).map(|(p, v)| p * v[i]).sum::<f64>() / sum));
            }
        }
        out
    }

    /// A row of K or V as it is read back.
    fn stored(&self, row: Vec<f64>, is_key: bool) -> Vec<f64> {
        match self.dtype {
            KvDtype::F16 => row.iter().map(|x| f64::from(f16::from_f32(*x as f32).to_f32())).collect(),
            KvDtype::F32 => row,
            KvDtype::Int8 if is_key => int8::stored_key(&row),
            KvDtype::Int8 => int8::stored(&row),
            KvDtype::Bf16 | KvDtype::Fp8 => unreachable!("the CPU has no cache of this type"),
        }
    }

    /// What the values of even scores come to, by the letter: tiles are added up to chunks, and chunks to the row. All
    /// weights are one, so each sum is of plain numbers and nothing but the order of additions is seen.
    fn means(&self, sequence: usize, position: usize) -> Vec<f32> {
        let AttentionHeads { n_heads, n_kv_heads, head_dim: d, window, .. } = self.heads;
        let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
        let run = |at: usize, size: usize| first.max(at / size * size)..(position + 1).min((at / size + 1) * size);
        let value = |at: usize, column: usize| self.sequences[sequence].qkv[at * self.heads.qkv_cols() + column];
        let mean = |h: usize, i: usize| {
            let column = (n_heads + n_kv_heads + h / (n_heads / n_kv_heads)) * d + i;
            let tile = |at: usize| run(at, 256).fold(0.0f32, |sum, at| sum + value(at, column));
            let sum = |starts: Vec<f32>| starts.into_iter().reduce(|sum, next| sum + next).unwrap();
            let chunk = |at: usize| {
                let chunk = run(at, 4096);
                sum(chunk.clone().filter(|at| at % 256 == 0 || *at == chunk.start).map(tile).collect())
            };
            let row = (first..=position).filter(|at| at % 4096 == 0 || *at == first);
            sum(row.map(chunk).collect()) / (position + 1 - first) as f32
        };
        (0..n_heads).flat_map(|h| (0..d).map(move |i| (h, i))).map(|(h, i)| mean(h, i)).collect()
    }

    fn turned(&self, x: &[f64], position: usize) -> Vec<f64> {
        let half = self.n_turned();
        let mut out = x.to_vec();
        for i in 0..half {
            let angle = position * half + i;
            let (cos, sin) = (f64::from(self.cos[angle]), f64::from(self.sin[angle]));
            let (a, b) = match self.style {
                RopeStyle::Halves => (i, i + half),
                RopeStyle::Apart(n) => (i, i + n),
                RopeStyle::Pairs => (2 * i, 2 * i + 1),
            };
            (out[a], out[b]) = (x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin);
        }
        out
    }
}

const SHAPES: [(usize, usize, usize); 8] =
    [(9, 3, 64), (4, 4, 32), (8, 1, 16), (2, 1, 80), (6, 2, 24), (20, 1, 8), (2, 2, 256), (8, 1, 512)];

fn styles() -> impl Iterator<Item = (KvDtype, RopeStyle)> {
    let halves = [(KvDtype::F16, RopeStyle::Halves), (KvDtype::F32, RopeStyle::Pairs)];
    halves.into_iter().chain([(KvDtype::F16, RopeStyle::Pairs), (KvDtype::F32, RopeStyle::Halves)]).cycle()
}

#[test]
fn every_path_gives_the_bits_of_the_plain_one() {
    let mut rng = Rng(1);
    for (shape, (dtype, style)) in SHAPES.into_iter().zip(styles()) {
        let n = 1 + rng.below(90);
        let case = Case::new(&mut rng, shape, dtype, style, &[n]);
        let cpus = cpus(Activations::F32);
        let expected = case.whole(&cpus[0].1, 0);
        let name = format!("{shape:?} {dtype:?} {style:?} {n} positions");
        // An f16 of a rotated K may be rounded to the other side.
        assert_close(&name, &expected, &case.naive(0), if dtype == KvDtype::F16 { 5e-3 } else { 1e-4 });
        for (path, cpu) in &cpus[1..] {
            assert_bits(&format!("{name}, {path}"), &case.whole(cpu, 0), &expected);
        }
    }
}

#[test]
fn tiles_merge_into_the_whole() {
    let mut rng = Rng(2);
    let case = Case::new(&mut rng, (2, 1, 16), KvDtype::F32, RopeStyle::Halves, &[600]);
    let cpus = cpus(Activations::F32);
    let expected = case.whole(&cpus[0].1, 0);
    assert_close("600 positions", &expected, &case.naive(0), 1e-4);
    cpus.iter().for_each(|(path, cpu)| assert_bits(path, &case.whole(cpu, 0), &expected));
}

/// Three chunks, and windows that begin within a chunk, at its beginning for some rows, and in the tile before it. The
/// values cancel: a tile is far larger than what is left of all of them.
#[test]
fn tiles_merge_into_chunks_and_chunks_into_the_row() {
    let mut rng = Rng(9);
    const N: usize = 8200;
    for window in [None, Some(4100), Some(300), Some(5000)] {
        let mut case = Case::new(&mut rng, (2, 1, 8), KvDtype::F32, RopeStyle::Halves, &[N]);
        case.has_rope = false;
        for (at, row) in case.sequences[0].qkv.chunks_exact_mut(4 * 8).enumerate() {
            row[..2 * 8].fill(0.0);
            let size = if at / 256 % 2 == 0 { 1000.0 } else { -1000.0 };
            row[3 * 8..].iter_mut().for_each(|v| *v += size);
        }
        for (path, cpu) in cpus(Activations::F32) {
            let mut kv = case.kv(&cpu);
            for before in [4095, 4097, 4400, 8191, 8195] {
                // What is stored does not depend on the window, and one position is soon computed.
                case.heads.window = Some(1);
                case.step(&cpu, &mut kv, &[(0, 0..before)]);
                case.heads.window = window;
                let got = case.step(&cpu, &mut kv, &[(0, before..before + 1)]);
                assert_bits(&format!("{before} before, {window:?}, {path}"), &got, &case.means(0, before));
            }
        }
    }
}

/// Positions one by one, in chunks of prefill that cross the boundary, and all at once.
#[test]
fn however_rows_are_cut_chunks_of_positions_are_the_same() {
    let mut rng = Rng(10);
    const N: usize = 4400;
    for (window, dtype) in [(None, KvDtype::F16), (Some(4200), KvDtype::F32), (Some(290), KvDtype::F16)] {
        let mut case = Case::new(&mut rng, (3, 1, 16), dtype, RopeStyle::Halves, &[N]);
        case.heads = AttentionHeads { window, ..case.heads };
        let cpus = cpus(Activations::F32);
        let expected = case.whole(&cpus[0].1, 0);
        for (path, cpu) in &cpus[1..] {
            assert_bits(&format!("{window:?}, {path}"), &case.whole(cpu, 0), &expected);
        }
        let cpu = &cpus[cpus.len() - 1].1;
        let lengths: [&[usize]; 3] = [&[4090, 12, 298], &[1000, 3000, 400], &[4096, 304]];
        for lengths in lengths {
            let (mut kv, mut at, mut got) = (case.kv(cpu), 0, Vec::new());
            for n in lengths {
                got.extend(case.step(cpu, &mut kv, &[(0, at..at + n)]));
                at += n;
            }
            assert_bits(&format!("{window:?}, in steps of {lengths:?}"), &got, &expected);
        }
        let mut kv = case.kv(cpu);
        let got: Vec<f32> = (0..N).flat_map(|at| case.step(cpu, &mut kv, &[(0, at..at + 1)])).collect();
        assert_bits(&format!("{window:?}, one by one"), &got, &expected);
    }
}

#[test]
fn chunks_and_neighbours_change_nothing() {
    let mut rng = Rng(3);
    for (shape, (dtype, style)) in SHAPES.into_iter().zip(styles()) {
        let lengths = [300, 1 + rng.below(40), 1 + rng.below(280)];
        let case = Case::new(&mut rng, shape, dtype, style, &lengths);
        let cpu = cpu(Isa::detect(), 2, Activations::F32);
        let alone: Vec<Vec<f32>> = (0..lengths.len()).map(|i| case.whole(&cpu, i)).collect();
        let mut kv = case.kv(&cpu);
        let (mut done, mut got) = ([0; 3], vec![Vec::new(); 3]);
        while done != lengths {
            let mut slices = Vec::new();
            for i in 0..lengths.len() {
                let n = [1, 7, 130][rng.below(3)].min(lengths[i] - done[i]);
                if n > 0 {
                    slices.push((i, done[i]..done[i] + n));
                    done[i] += n;
                }
            }
            let out = case.step(&cpu, &mut kv, &slices);
            let mut rows = out.chunks(shape.0 * shape.2);
            for (i, range) in slices {
                rows.by_ref().take(range.len()).for_each(|row| got[i].extend(row));
            }
        }
        for i in 0..lengths.len() {
            assert_bits(&format!("{shape:?}, sequence {i}"), &got[i], &alone[i]);
        }
    }
}

/// Sinks above, among and below all scores, with and without windows; in chunks and on every path.
#[test]
fn sinks() {
    let mut rng = Rng(16);
    for window in [None, Some(1), Some(37), Some(270)] {
        let mut case = Case::new(&mut rng, (6, 2, 24), KvDtype::F32, RopeStyle::Halves, &[560]);
        case.heads = AttentionHeads { window, ..case.heads };
        case.sinks = Some(vec![-40.0, 0.0, 1.5, 3.0, 8.0, 30.0]);
        let cpus = cpus(Activations::F32);
        let expected = case.whole(&cpus[0].1, 0);
        let name = format!("sinks, a window of {window:?}");
        assert_close(&name, &expected, &case.naive(0), 1e-4);
        for (path, cpu) in &cpus[1..] {
            assert_bits(&format!("{name}, {path}"), &case.whole(cpu, 0), &expected);
        }
        let (cpu, mut kv) = (&cpus[1].1, case.kv(&cpus[1].1));
        let got: Vec<f32> = [0..100, 100..257, 257..258, 258..560]
            .into_iter()
            .flat_map(|range| case.step(cpu, &mut kv, &[(0, range)]))
            .collect();
        assert_bits(&format!("{name}, in chunks"), &got, &expected);
    }
}

/// Windows that end within a block, at its end and in another tile; capped scores; each in chunks and on every path.
#[test]
fn windows_and_caps() {
    let mut rng = Rng(6);
    for (window, cap) in [(1, None), (5, Some(2.0)), (16, None), (37, Some(0.5)), (256, None), (270, Some(30.0))] {
        let mut case = Case::new(&mut rng, (6, 2, 24), KvDtype::F32, RopeStyle::Halves, &[560]);
        case.heads = AttentionHeads { window: Some(window), cap, ..case.heads };
        let cpus = cpus(Activations::F32);
        let expected = case.whole(&cpus[0].1, 0);
        let name = format!("a window of {window}, a cap of {cap:?}");
        assert_close(&name, &expected, &case.naive(0), 1e-4);
        cpus[1..]
            .iter()
            .for_each(|(path, cpu)| assert_bits(&format!("{name}, {path}"), &case.whole(cpu, 0), &expected));
        let (cpu, mut at, mut got) = (&cpus[1].1, 0, Vec::new());
        let mut kv = case.kv(cpu);
        for n in [1, 6, 300, 1, 13, 239] {
            got.extend(case.step(cpu, &mut kv, &[(0, at..at + n)]));
            at += n;
        }
        assert_bits(&format!("{name}, in chunks"), &got, &expected);
    }
}

/// Blocks behind a window may belong to other sequences by now, with any contents.
#[test]
fn what_is_out_of_sight_is_not_read() {
    let mut case = Case::new(&mut Rng(7), (4, 2, 32), KvDtype::F16, RopeStyle::Halves, &[300]);
    case.heads = AttentionHeads { window: Some(20), ..case.heads };
    let cpu = cpu(Isa::detect(), 2, Activations::F32);
    let clean = case.whole(&cpu, 0);
    let mut kv = case.kv(&cpu);
    case.step(&cpu, &mut kv, &[(0, 0..290)]);
    let mut dirty = Case::new(&mut Rng(7), (4, 2, 32), KvDtype::F16, RopeStyle::Halves, &[256]);
    dirty.sequences[0].qkv.fill(f32::NAN);
    dirty.sequences[0].blocks = case.sequences[0].blocks[..16].to_vec();
    dirty.step(&cpu, &mut kv, &[(0, 0..256)]);
    // After a prefix hit the table has no blocks there at all.
    case.sequences[0].blocks[..16].fill(BlockId::NONE);
    let got = case.step(&cpu, &mut kv, &[(0, 290..300)]);
    assert_bits("after NaN", &got, &clean[290 * 4 * 32..]);
}

#[test]
fn without_a_rope_nothing_turns() {
    let mut case = Case::new(&mut Rng(8), (4, 2, 32), KvDtype::F16, RopeStyle::Halves, &[40]);
    case.cos.fill(1.0);
    case.sin.fill(0.0);
    let cpu = cpu(Isa::detect(), 2, Activations::F32);
    let turned_by_nothing = case.whole(&cpu, 0);
    case.has_rope = false;
    assert_bits("no rope", &case.whole(&cpu, 0), &turned_by_nothing);
}

#[test]
fn a_rank_may_begin_inside_a_group() {
    let mut rng = Rng(5);
    let whole = Case::new(&mut rng, (9, 3, 32), KvDtype::F16, RopeStyle::Pairs, &[50]);
    let cpu = cpu(Isa::detect(), 2, Activations::F32);
    let expected = whole.whole(&cpu, 0);
    for owned in [0..2, 2..5, 4..9, 1..8, 5..6] {
        let kv = owned.start / 3..(owned.end - 1) / 3 + 1;
        let heads =
            AttentionHeads { n_heads: owned.len(), n_kv_heads: kv.len(), first: owned.start % 3, ..whole.heads };
        let columns = [owned.clone(), 9 + kv.start..9 + kv.end, 12 + kv.start..12 + kv.end];
        let cut = |row: &[f32]| columns.iter().cloned().flat_map(|c| row[c.start * 32..c.end * 32].to_vec()).collect();
        let rows = whole.sequences[0].qkv.chunks(whole.heads.qkv_cols());
        let qkv = rows.flat_map(|row| -> Vec<f32> { cut(row) }).collect();
        let sequences = vec![Sequence { qkv, blocks: whole.sequences[0].blocks.clone() }];
        let rank = Case { heads, sequences, cos: whole.cos.clone(), sin: whole.sin.clone(), sinks: None, ..whole };
        let got = rank.whole(&cpu, 0);
        let expected: Vec<f32> =
            expected.chunks(9 * 32).flat_map(|row| row[owned.start * 32..owned.end * 32].to_vec()).collect();
        assert_bits(&format!("heads {owned:?}"), &got, &expected);
    }
}

#[test]
fn what_others_left_in_a_block_is_not_seen() {
    let mut rng = Rng(4);
    let case = Case::new(&mut rng, (4, 2, 32), KvDtype::F16, RopeStyle::Halves, &[21]);
    let cpu = cpu(Isa::detect(), 1, Activations::F32);
    let clean = case.whole(&cpu, 0);
    let mut kv = case.kv(&cpu);
    let mut dirty = Case::new(&mut Rng(4), (4, 2, 32), KvDtype::F16, RopeStyle::Halves, &[32]);
    dirty.sequences[0].qkv.fill(f32::NAN);
    dirty.sequences[0].blocks.clone_from(&case.sequences[0].blocks);
    dirty.step(&cpu, &mut kv, &[(0, 0..32)]);
    assert_bits("after NaN", &case.step(&cpu, &mut kv, &[(0, 0..21)]), &clean);
}

#[test]
fn a_layer_that_reads_the_keys_of_another_gives_its_bits() {
    let mut rng = Rng(29);
    for dtype in [KvDtype::F16, KvDtype::Int8] {
        let case = Case::new(&mut rng, (6, 2, 64), dtype, RopeStyle::Apart(32), &[300]);
        let (n_cols, n_q) = (case.heads.qkv_cols(), 6 * 64);
        let mut reader = Case::new(&mut rng, (6, 2, 64), dtype, RopeStyle::Apart(32), &[300]);
        reader.heads.is_reader = true;
        let queries = case.sequences[0].qkv.chunks(n_cols).flat_map(|row| &row[..n_q]).copied().collect();
        reader.sequences = vec![Sequence { qkv: queries, blocks: case.sequences[0].blocks.clone() }];
        (reader.cos, reader.sin, reader.n_blocks) = (case.cos.clone(), case.sin.clone(), case.n_blocks);
        for (path, cpu) in cpus(Activations::F32) {
            let mut kv = case.kv(&cpu);
            let expected = case.step(&cpu, &mut kv, &[(0, 0..300)]);
            for range in [0..300, 250..300] {
                let of_range = &expected[range.start * n_q..range.end * n_q];
                assert_bits(&format!("{path}, {dtype:?}"), &reader.step(&cpu, &mut kv, &[(0, range)]), of_range);
            }
        }
    }
}

#[test]
fn caches_that_cannot_be_are_refused() {
    let cpu = cpu(Isa::detect(), 1, Activations::F32);
    let spec = KvSpec { n_layers: 1, n_blocks: 1, layout: KvLayout::heads(1, 64), dtype: KvDtype::F16 };
    assert!(cpu.kv(spec).is_ok());
    for bad in [
        KvSpec { layout: KvLayout::heads(1, 514), ..spec },
        KvSpec { layout: KvLayout::heads(1, 7), ..spec },
        KvSpec { n_blocks: 1 << 60, ..spec },
    ] {
        assert!(cpu.kv(bad).is_err(), "{bad:?}");
    }
    assert!(cpu.rope(&[1.0; 8], &[0.0; 7], 4, RopeStyle::Halves).is_err());
    assert!(cpu.rope(&[1.0; 8], &[0.0; 8], 0, RopeStyle::Halves).is_err());
    assert!(cpu.rope(&[1.0; 8], &[0.0; 8], 4, RopeStyle::Apart(3)).is_err());
}
