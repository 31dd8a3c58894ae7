//! Recurrent layers: outputs match the recurrence computed one position at a time in f64. Every cut of positions into
//! steps, every omission of pages within a step and every division of heads gives the same bits.

use crate::numbers::{Rng, all, assert_bits, assert_close, cpu, cpus, filled};
use backend::cpu::{Cpu, Isa, Kv, Vector};
use backend::{
    Batch, BlockTables, ConvolutionCall, ConvolvedChannels, KvPages, KvSpec, Memory, PassSlice, Recurrence,
    RecurrenceCall, RecurrentHeads, RecurrentWeights, StateRule,
};
use std::ops::Range;
use types::{Activations, BlockId, KvDtype, Want};

const LAYER: usize = 1;
/// Blocks that sequences do not use, so that theirs are scattered.
const SPARE_BLOCKS: usize = 9;

/// Value heads, key heads, widths of keys and values, taps.
const SHAPES: [[usize; 5]; 4] = [[4, 2, 16, 32, 4], [3, 3, 32, 16, 4], [2, 1, 128, 128, 4], [6, 2, 16, 80, 2]];

struct Case {
    heads: RecurrentHeads,
    weights: RecurrentWeights<Vector>,
    /// [n_positions, n_cols] of each sequence
    rows: Vec<Vec<f32>>,
    blocks: Vec<Vec<BlockId>>,
    n_blocks: usize,
}

/// Which blocks a step's table has.
#[derive(Clone, Copy, PartialEq)]
enum Pages {
    All,
    /// The pages of the position before the slice and of its last position.
    Needed,
}

fn heads([n_heads, n_key_heads, key_dim, value_dim, taps]: [usize; 5], has_steps: bool) -> RecurrentHeads {
    let per_key = n_heads / n_key_heads;
    RecurrentHeads { n_heads, n_key_heads, per_key, first: 0, key_dim, value_dim, taps, has_steps }
}

impl Case {
    fn new(rng: &mut Rng, shape: [usize; 5], has_steps: bool, lengths: &[usize]) -> Case {
        let heads = heads(shape, has_steps);
        let n_blocks = SPARE_BLOCKS + lengths.iter().map(|n| n.div_ceil(16)).sum::<usize>();
        let mut free: Vec<u32> = (0..n_blocks as u32).collect();
        let mut blocks = Vec::new();
        for n in lengths {
            blocks.push((0..n.div_ceil(16)).map(|_| BlockId(free.swap_remove(rng.below(free.len())))).collect());
        }
        let rows = lengths.iter().map(|n| rng.floats(n * heads.n_cols()).iter().map(|x| x * 2.0).collect()).collect();
        Case { weights: weights(rng, &heads), heads, rows, blocks, n_blocks }
    }

    fn length(&self, sequence: usize) -> usize {
        self.rows[sequence].len() / self.heads.n_cols()
    }

    fn kv(&self, cpu: &Cpu) -> Kv {
        let spec = KvSpec { n_layers: 2, n_blocks: self.n_blocks, layout: self.heads.layout(), dtype: KvDtype::F16 };
        cpu.kv(spec).unwrap()
    }

    /// One step over a range of positions of some sequences: [n_rows, n_heads * value_dim]
    fn step(&self, cpu: &Cpu, kv: &mut Kv, slices: &[(usize, Range<usize>)], pages: Pages) -> Vec<f32> {
        let (cols, mut batch, mut x) = (self.heads.n_cols(), Batch::default(), Vec::new());
        let mut table = BlockTables::default();
        for (sequence, range) in slices {
            let first = batch.tokens.len() as u32;
            batch.tokens.extend(range.clone().map(|_| 0));
            batch.positions.extend(range.clone().map(|position| position as u32));
            batch.slices.push(PassSlice::new(first..first + range.len() as u32, range.start as u32, Want::Nothing));
            let needed = [range.start.checked_sub(1), Some(range.end - 1)].map(|at| at.map(|at| at / 16));
            let is_there = |i: usize| pages == Pages::All || needed.contains(&Some(i));
            let blocks = &self.blocks[*sequence][..range.end.div_ceil(16)];
            table.blocks.extend(blocks.iter().enumerate().map(|(i, id)| if is_there(i) { *id } else { BlockId::NONE }));
            table.bounds.push(table.blocks.len() as u32);
            x.extend(&self.rows[*sequence][range.start * cols..range.end * cols]);
        }
        batch.tables.push(table);
        let n_rows = batch.n_rows();
        let x = filled(cpu, n_rows, &x);
        let mut out = cpu.buffer(n_rows, self.heads.n_heads * self.heads.value_dim).unwrap();
        let pass = batch.pass();
        let call = RecurrenceCall { pass: &pass, heads: &self.heads, group: 0, layer: LAYER };
        cpu.recur(&x, &self.weights, &call, kv, &mut out);
        all(cpu, &out, n_rows)
    }

    /// Computes one sequence alone, cut as `cuts` returns.
    fn alone(&self, cpu: &Cpu, sequence: usize, cuts: impl Fn(usize) -> usize, pages: Pages) -> Vec<f32> {
        let (mut kv, mut at, mut out) = (self.kv(cpu), 0, Vec::new());
        while at < self.length(sequence) {
            let end = (at + cuts(at).max(1)).min(self.length(sequence));
            out.extend(self.step(cpu, &mut kv, &[(sequence, at..end)], pages));
            at = end;
        }
        out
    }

    fn whole(&self, sequence: usize) -> Vec<f32> {
        self.alone(&cpu(Isa::Plain, 1, Activations::F32), sequence, |_| usize::MAX / 2, Pages::All)
    }

    /// Returns the case of some of the heads, as a rank owns them.
    fn share(&self, owned: Range<usize>) -> Case {
        let RecurrentHeads { per_key, key_dim, value_dim, taps, n_heads, n_key_heads, .. } = self.heads;
        let keys = owned.start / per_key..(owned.end - 1) / per_key + 1;
        let (n_keys, n_values) = (n_key_heads * key_dim, n_heads * value_dim);
        let of = |first: usize, heads: &Range<usize>, dim: usize| first + heads.start * dim..first + heads.end * dim;
        let channels: Vec<Range<usize>> =
            vec![of(0, &keys, key_dim), of(n_keys, &keys, key_dim), of(2 * n_keys, &owned, value_dim)];
        let mut columns = channels.clone();
        let gates = self.heads.n_channels() + n_values;
        columns.push(of(self.heads.n_channels(), &owned, value_dim));
        columns.extend((0..1 + usize::from(self.heads.has_steps)).map(|gate| of(gates + gate * n_heads, &owned, 1)));
        let picked = |row: &[f32], ranges: &[Range<usize>]| -> Vec<f32> {
            ranges.iter().flat_map(|range| row[range.clone()].to_vec()).collect()
        };
        let pick_rows = |rows: &[f32], n: usize, ranges: &[Range<usize>]| -> Vec<f32> {
            rows.chunks_exact(n).flat_map(|row| picked(row, ranges)).collect()
        };
        let all = &self.weights;
        let rule = match &all.rule {
            StateRule::StateSpace { skip, step_min, step_max, z_factor, a_factor } => StateRule::StateSpace {
                skip: Vector::new(&skip[owned.clone()]),
                step_min: *step_min,
                step_max: *step_max,
                z_factor: *z_factor,
                a_factor: *a_factor,
            },
            delta => delta.clone(),
        };
        let weights = RecurrentWeights {
            conv: Vector::new(&pick_rows(&all.conv, self.heads.n_channels(), &channels)),
            conv_bias: all.conv_bias.as_ref().map(|bias| Vector::new(&picked(bias, &channels))),
            rate: Vector::new(&all.rate[owned.clone()]),
            rate_bias: Vector::new(&all.rate_bias[owned.clone()]),
            rule,
        };
        let heads = RecurrentHeads {
            n_heads: owned.len(),
            n_key_heads: keys.len(),
            first: owned.start % per_key,
            taps,
            ..self.heads
        };
        let rows = self.rows.iter().map(|rows| pick_rows(rows, self.heads.n_cols(), &columns)).collect();
        Case { heads, weights, rows, blocks: self.blocks.clone(), n_blocks: self.n_blocks }
    }
}

fn weights(rng: &mut Rng, heads: &RecurrentHeads) -> RecurrentWeights<Vector> {
    let mut some = |n: usize, scale: f32, shift: f32| {
        Vector::new(&rng.floats(n).iter().map(|x| x * scale + shift).collect::<Vec<_>>())
    };
    let rule = match heads.has_steps {
        true => StateRule::Delta { norm: some(heads.value_dim, 0.3, 1.0), eps: 1e-6, step_max: 1.5 },
        false => StateRule::StateSpace {
            skip: some(heads.n_heads, 0.3, 1.0),
            step_min: 0.02,
            step_max: 1.5,
            z_factor: 0.7,
            a_factor: 1.3,
        },
    };
    RecurrentWeights {
        conv: some(heads.taps * heads.n_channels(), 0.7, 0.0),
        conv_bias: (!heads.has_steps).then(|| some(heads.n_channels(), 0.2, 0.0)),
        // Some heads forget within a block, some hardly at all.
        rate: some(heads.n_heads, 0.2, -0.21),
        rate_bias: some(heads.n_heads, 0.5, 0.0),
        rule,
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// One position after another, in f64.
fn one_by_one(case: &Case, sequence: usize) -> Vec<f64> {
    let RecurrentHeads { n_heads, n_key_heads, key_dim, value_dim, taps, .. } = case.heads;
    let (n_keys, n_values, n_channels) = (n_key_heads * key_dim, n_heads * value_dim, case.heads.n_channels());
    let rows: Vec<&[f32]> = case.rows[sequence].chunks_exact(case.heads.n_cols()).collect();
    let weights = &case.weights;
    let mut states = vec![vec![0.0; key_dim * value_dim]; n_heads];
    let mut out = Vec::new();
    for (t, row) in rows.iter().enumerate() {
        let channel = |c: usize| {
            let bias = weights.conv_bias.as_ref().map_or(0.0, |bias| f64::from(bias[c]));
            let seen = (0..taps).filter_map(|tap| (t + tap + 1).checked_sub(taps).map(|from| (tap, from)));
            let sum: f64 =
                seen.map(|(tap, from)| f64::from(weights.conv[tap * n_channels + c]) * f64::from(rows[from][c])).sum();
            silu(sum + bias)
        };
        for head in 0..n_heads {
            let state = &mut states[head];
            let key_at = case.heads.key_head_of(head) * key_dim;
            let mut q: Vec<f64> = (0..key_dim).map(|i| channel(key_at + i)).collect();
            let mut k: Vec<f64> = (0..key_dim).map(|i| channel(n_keys + key_at + i)).collect();
            let v: Vec<f64> = (0..value_dim).map(|j| channel(2 * n_keys + head * value_dim + j)).collect();
            let gates = n_channels + n_values;
            let a = f64::from(row[gates + usize::from(case.heads.has_steps) * n_heads + head]);
            let soft = (f64::from(weights.rule.a_factor()) * a + f64::from(weights.rate_bias[head])).exp().ln_1p();
            let (step, soft) = match &weights.rule {
                StateRule::Delta { step_max, .. } => {
                    (f64::from(*step_max) * sigmoid(f64::from(row[gates + head])), soft)
                }
                StateRule::StateSpace { step_min, step_max, .. } => {
                    let step = soft.clamp(f64::from(*step_min), f64::from(*step_max));
                    (step, step)
                }
            };
            if case.heads.has_steps {
                let length = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                let (of_q, of_k) = (length(&q) * (key_dim as f64).sqrt(), length(&k));
                q.iter_mut().for_each(|q| *q /= of_q);
                k.iter_mut().for_each(|k| *k /= of_k);
            }
            let decay = (f64::from(weights.rate[head]) * soft).exp();
            state.iter_mut().for_each(|x| *x *= decay);
            let mut o = vec![0.0; value_dim];
            for j in 0..value_dim {
                let known: f64 = match case.heads.has_steps {
                    true => (0..key_dim).map(|i| state[i * value_dim + j] * k[i]).sum(),
                    false => 0.0,
                };
                let u = step * (v[j] - known);
                (0..key_dim).for_each(|i| state[i * value_dim + j] += k[i] * u);
                o[j] = (0..key_dim).map(|i| state[i * value_dim + j] * q[i]).sum();
            }
            let z = |j: usize| f64::from(row[n_channels + head * value_dim + j]);
            match &weights.rule {
                StateRule::Delta { norm, eps, .. } => {
                    let mean = o.iter().map(|x| x * x).sum::<f64>() / value_dim as f64;
                    let scale = 1.0 / (mean + f64::from(*eps)).sqrt();
                    out.extend(o.iter().enumerate().map(|(j, x)| x * scale * f64::from(norm[j]) * silu(z(j))));
                }
                StateRule::StateSpace { skip, z_factor, .. } => {
                    let gate = |j: usize| silu(f64::from(*z_factor) * z(j));
                    let skipped = |j: usize| o[j] + f64::from(skip[head]) * v[j];
                    out.extend((0..value_dim).map(|j| skipped(j) * gate(j)));
                }
            }
        }
    }
    out
}

#[test]
fn blocks_give_what_the_recurrence_gives_one_by_one() {
    let mut rng = Rng(51);
    for (shape, has_steps) in SHAPES.into_iter().flat_map(|shape| [(shape, true), (shape, false)]) {
        let lengths = [1, 16, 17, 70];
        let case = Case::new(&mut rng, shape, has_steps, &lengths);
        for (sequence, n_positions) in lengths.into_iter().enumerate() {
            let expected = one_by_one(&case, sequence);
            let largest = expected.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
            let name = format!("{shape:?}, delta {has_steps}, {n_positions} positions");
            assert_close(&name, &case.whole(sequence), &expected, 2e-5 * largest);
        }
    }
}

#[test]
fn every_cut_gives_the_same_bits_with_and_without_pages_in_the_middle() {
    let mut rng = Rng(52);
    for (shape, has_steps) in SHAPES.into_iter().flat_map(|shape| [(shape, true), (shape, false)]) {
        let case = Case::new(&mut rng, shape, has_steps, &[90]);
        let expected = case.whole(0);
        let seed = rng.next();
        for (name, cpu) in cpus(Activations::F32) {
            for pages in [Pages::All, Pages::Needed] {
                for chunk in [1, 7, 16, 64, 90] {
                    let got = case.alone(&cpu, 0, |_| chunk, pages);
                    assert_bits(&format!("{shape:?}, {name}, chunks of {chunk}"), &got, &expected);
                }
                let random = |at: usize| Rng(seed ^ at as u64).below(40);
                assert_bits(&format!("{shape:?}, {name}, random"), &case.alone(&cpu, 0, random, pages), &expected);
            }
        }
    }
}

#[test]
fn company_gives_the_same_bits() {
    let mut rng = Rng(53);
    for has_steps in [true, false] {
        let case = Case::new(&mut rng, SHAPES[0], has_steps, &[40, 65, 33]);
        for (name, cpu) in cpus(Activations::F32) {
            let (mut kv, mut at, mut together) = (case.kv(&cpu), [0; 3], vec![Vec::new(); 3]);
            for paces in [[3, 50, 20], [0, 1, 12], [36, 1, 0], [1, 13, 1]] {
                let slices: Vec<_> =
                    (0..3).map(|i| (i, at[i]..at[i] + paces[i])).filter(|(_, range)| !range.is_empty()).collect();
                let rows = case.step(&cpu, &mut kv, &slices, Pages::Needed);
                let mut rest = &rows[..];
                for (i, range) in slices {
                    let (its, behind) = rest.split_at(range.len() * case.heads.n_heads * case.heads.value_dim);
                    together[i].extend(its);
                    (at[i], rest) = (range.end, behind);
                }
            }
            for (i, got) in together.iter().enumerate() {
                assert_bits(&format!("{name}, sequence {i}"), got, &case.whole(i));
            }
        }
    }
}

/// Rejected rows are computed again, also in the previous block.
#[test]
fn rewound_rows_leave_nothing() {
    let mut rng = Rng(54);
    for has_steps in [true, false] {
        let case = Case::new(&mut rng, SHAPES[0], has_steps, &[40]);
        let wrong = Case { rows: vec![rng.floats(case.rows[0].len())], ..case.share(0..case.heads.n_heads) };
        let cpu = cpu(Isa::detect(), 1, Activations::F32);
        let (expected, cols) = (case.whole(0), case.heads.n_heads * case.heads.value_dim);
        for start in [0, 3, 15, 16, 17, 31, 32] {
            let mut kv = case.kv(&cpu);
            let mut got = Vec::new();
            if start > 0 {
                got.extend(case.step(&cpu, &mut kv, &[(0, 0..start)], Pages::Needed));
            }
            wrong.step(&cpu, &mut kv, &[(0, start..start + 6)], Pages::Needed);
            got.extend(case.step(&cpu, &mut kv, &[(0, start..40)], Pages::Needed));
            assert_bits(&format!("from {start}"), &got[start * cols..], &expected[start * cols..]);
        }
    }
}

#[test]
fn ranks_that_divide_the_heads_have_the_same_bits() {
    let mut rng = Rng(55);
    let cpu = cpu(Isa::detect(), 2, Activations::F32);
    for (shape, has_steps) in [(SHAPES[0], true), (SHAPES[3], true), (SHAPES[3], false)] {
        let case = Case::new(&mut rng, shape, has_steps, &[37]);
        let (expected, n, value) = (case.whole(0), case.heads.n_heads, case.heads.value_dim);
        for cut in 1..n {
            for owned in [0..cut, cut..n] {
                let got = case.share(owned.clone()).alone(&cpu, 0, |_| 9, Pages::Needed);
                let its = |row: &[f32]| row[owned.start * value..owned.end * value].to_vec();
                let of_rank: Vec<f32> = expected.chunks_exact(n * value).flat_map(its).collect();
                assert_bits(&format!("{shape:?}, heads {owned:?}"), &got, &of_rank);
            }
        }
    }
}

#[test]
fn shapes_without_a_kernel_are_refused_by_name() {
    let cpu = cpu(Isa::Plain, 1, Activations::F32);
    let refused = |shape| cpu.check_recurrence(&heads(shape, true)).unwrap_err().to_string();
    for (shape, name) in
        [([2, 1, 24, 32, 4], "24 by 32"), ([2, 1, 32, 512, 4], "32 by 512"), ([2, 1, 16, 16, 0], "0 taps")]
    {
        assert!(refused(shape).contains(name), "{}", refused(shape));
    }
    assert!(SHAPES.into_iter().all(|shape| cpu.check_recurrence(&heads(shape, true)).is_ok()));
}

/// A sequence's short convolution in chunks, with the pages that are needed.
fn convolved(cpu: &Cpu, channels: &ConvolvedChannels, weight: &[f32], rows: &[f32], chunk: usize) -> Vec<f32> {
    let (cols, n) = (3 * channels.n_channels(), rows.len() / (3 * channels.n_channels()));
    let spec = KvSpec { n_layers: 2, n_blocks: 9, layout: channels.layout(), dtype: KvDtype::F16 };
    let (mut kv, mut out, weight) = (cpu.kv(spec).unwrap(), Vec::new(), Vector::new(weight));
    for start in (0..n).step_by(chunk) {
        let end = n.min(start + chunk);
        let needed = [start.checked_sub(1), Some(end - 1)].map(|at| at.map(|at| at / 16));
        let block = |i: usize| if needed.contains(&Some(i)) { BlockId(8 - i as u32) } else { BlockId::NONE };
        let blocks: Vec<BlockId> = (0..end.div_ceil(16)).map(block).collect();
        let bounds = vec![0, blocks.len() as u32];
        let batch = Batch {
            tokens: vec![0; end - start],
            positions: (start as u32..end as u32).collect(),
            slices: vec![PassSlice::new(0..(end - start) as u32, start as u32, Want::Nothing)],
            tables: vec![BlockTables { blocks, bounds }],
            ..Batch::default()
        };
        let x = filled(cpu, end - start, &rows[start * cols..end * cols]);
        let mut part = cpu.buffer(end - start, channels.n_channels()).unwrap();
        let pass = batch.pass();
        let call = ConvolutionCall { pass: &pass, channels, group: 0, layer: LAYER };
        cpu.convolve(&x, &weight, &call, &mut kv, &mut part);
        out.extend(all(cpu, &part, end - start));
    }
    out
}

#[test]
fn short_convolutions_are_those_of_f64_and_the_same_in_any_chunks() {
    let mut rng = Rng(56);
    for (n, width, taps) in [(2, 32, 3), (3, 40, 4), (1, 16, 1)] {
        let channels = ConvolvedChannels { n, width, taps };
        let (n_channels, n_rows) = (n * width, 70);
        let (weight, rows) = (rng.floats(taps * n_channels), rng.floats(n_rows * 3 * n_channels));
        let of = |row: usize, part: usize, c: usize| f64::from(rows[(row * 3 + part) * n_channels + c]);
        let one = |row: usize, c: usize| -> f64 {
            let seen = (0..taps).filter_map(|tap| (row + tap + 1).checked_sub(taps).map(|from| (tap, from)));
            let sum: f64 =
                seen.map(|(tap, from)| f64::from(weight[tap * n_channels + c]) * of(from, 0, c) * of(from, 2, c)).sum();
            of(row, 1, c) * sum
        };
        let expected: Vec<f64> =
            (0..n_rows).flat_map(|row| (0..n_channels).map(move |c| (row, c))).map(|(r, c)| one(r, c)).collect();
        let reference = convolved(&cpu(Isa::Plain, 1, Activations::F32), &channels, &weight, &rows, 70);
        assert_close(&format!("{channels:?}"), &reference, &expected, 1e-5);
        for (name, cpu) in cpus(Activations::F32) {
            for chunk in [1, 7, 16, 33] {
                let got = convolved(&cpu, &channels, &weight, &rows, chunk);
                assert_bits(&format!("{channels:?}, {name}, chunks of {chunk}"), &got, &reference);
            }
        }
    }
}
