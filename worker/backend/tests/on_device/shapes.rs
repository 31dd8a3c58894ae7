//! Operations in the shapes of real models, beside the CPU's, and with the same bits in every batch: products,
//! attention over long contexts, mixtures, rows, draws. `SMALL` has the same in sizes for an emulator.

use super::{Check, Mixture, Operation, PRODUCT, Row, Rows, apart, draws, filled, read, same_bits};
use crate::numbers::{File, Rng, cpu, random_block};
use backend::cpu::{Cpu, Isa};
use backend::{
    AttentionCall, AttentionHeads, Batch, BatchLimits, BlockTables, Device, KvSpec, PassSlice, RopeStyle, Routing,
    ScoreTerms, Scoring,
};
use std::ops::Range;
use types::cache::blocks_for;
use types::{Activations, BlockId, Dtype, KvDtype, KvLayout, Leaves, Want};

/// The sizes of all shapes.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub hidden: usize,
    pub inner: usize,
    /// Columns of K, which are also those of V.
    pub kv: usize,
    pub vocab: usize,
    /// Batch sizes, the largest last.
    pub rows: &'static [usize],
    /// Query heads, KV heads and head dimension.
    pub heads: &'static [[usize; 3]],
    /// Positions stored before those that are computed.
    pub context: usize,
    /// Positions of a prompt computed at once.
    pub chunk: usize,
    /// Numbers of sequences that decode together.
    pub company: usize,
    /// Hidden, inner, experts, and how many of them a row uses.
    pub experts: [usize; 4],
}

/// Llama-3.1-8B's shapes, with heads of other models too, and a quarter of Qwen3-30B-A3B's experts.
pub const REAL: Sizes = Sizes {
    hidden: 4096,
    inner: 14_336,
    kv: 1024,
    vocab: 128_256,
    rows: &[1, 8, 32, 64, 256],
    heads: &[[32, 8, 128], [28, 4, 128], [32, 8, 64], [32, 32, 96]],
    context: 4096,
    chunk: 512,
    company: 64,
    experts: [2048, 768, 32, 8],
};
pub const SMALL: Sizes = Sizes {
    hidden: 64,
    inner: 96,
    kv: 16,
    vocab: 70,
    rows: &[1, 8, 40],
    heads: &[[4, 2, 32], [7, 1, 32]],
    context: 40,
    chunk: 10,
    company: 5,
    experts: [64, 32, 6, 2],
};

/// A large matrix, made quickly: a prime number of random blocks, repeated.
pub fn wide(rng: &mut Rng, dtype: Dtype, rows: usize, k: usize) -> File {
    const POOL: usize = 65_537;
    let n_blocks = rows * k / dtype.block();
    let n_bytes = n_blocks * dtype.block_bytes();
    let pool: Vec<u8> = (0..n_blocks.min(POOL)).flat_map(|_| random_block(rng, dtype)).collect();
    let mut bytes = Vec::with_capacity(n_bytes + pool.len());
    while bytes.len() < n_bytes {
        bytes.extend_from_slice(&pool);
    }
    bytes.truncate(n_bytes);
    let scales = crate::numbers::scales(rng, dtype, [rows, k], [1, k]);
    File { dtype, rows, k, bytes, values: Vec::new(), scales }
}

fn reference() -> Cpu {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    cpu(Isa::detect(), threads, Activations::F32)
}

/// One product of a layer, whole or as the sum of its leaves.
struct Wide {
    name: &'static str,
    file: File,
    is_cut: bool,
}

impl Wide {
    fn run<'a, D: Device>(&'a self, device: &'a D) -> impl Fn(&[f32], usize) -> Vec<f32> + 'a {
        let leaves = Leaves::on_grain(self.file.k as u32, 8);
        let n_leaves = leaves.len() as u32;
        let w = match self.is_cut {
            true => device.matrix_leaves(self.file.stored(), &leaves, 0..n_leaves).unwrap(),
            false => device.matrix(&[self.file.stored()]).unwrap(),
        };
        move |x, n_rows| {
            let (x, mut out) = (filled(device, n_rows, x), device.buffer(n_rows, self.file.rows).unwrap());
            device.linear_runs(&x, &w, n_rows, &mut out);
            read(device, &out, n_rows)
        }
    }

    fn check<D: Device>(&self, device: &D, reference: &Cpu, rng: &mut Rng, rows: &[usize]) -> Check {
        let File { dtype, rows: n_out, k, .. } = self.file;
        let (n_rows, run) = (rows.last().copied().unwrap_or(1), self.run(device));
        let x = rng.floats(n_rows * k);
        let got = run(&x, n_rows);
        let is_same = |n: &usize| same_bits(&run(&x[..n * k], *n), &got[..n * n_out]);
        Check {
            name: format!("{} of {dtype:?}, {n_out} x {k}, in batches of {rows:?}", self.name),
            apart: apart(&got, &self.run(reference)(&x, n_rows)),
            limit: PRODUCT,
            same_bits: rows.iter().all(is_same),
        }
    }
}

/// The products of a layer.
pub fn products<D: Device>(device: &D, sizes: &Sizes, dtype: Dtype, seed: u64) -> Vec<Check> {
    let Sizes { hidden, inner, kv, .. } = *sizes;
    let (rng, reference) = (&mut Rng(seed), reference());
    // K is rounded up to whole blocks.
    let k = |k: usize| k.next_multiple_of(dtype.block());
    let shapes = [
        ("Q, K and V", hidden + 2 * kv, k(hidden), false),
        ("gate and up", 2 * inner, k(hidden), false),
        ("down", hidden, k(inner), true),
    ];
    let check = |(name, n_out, k, is_cut)| {
        let file = wide(rng, dtype, n_out, k);
        Wide { name, file, is_cut }.check(device, &reference, rng, sizes.rows)
    };
    shapes.into_iter().map(check).collect()
}

/// The product with the vocabulary's matrix.
pub fn head<D: Device>(device: &D, sizes: &Sizes, seed: u64) -> Check {
    let (rng, few) = (&mut Rng(seed), &sizes.rows[..sizes.rows.len() - 1]);
    let file = wide(rng, Dtype::BF16, sizes.vocab, sizes.hidden);
    Wide { name: "head", file, is_cut: false }.check(device, &reference(), rng, few)
}

/// Operations on each row alone, and draws.
pub fn rows<D: Device>(device: &D, sizes: &Sizes, seed: u64) -> Vec<Check> {
    let (rng, reference) = (&mut Rng(seed), reference());
    let n_rows = sizes.rows.last().copied().unwrap_or(1);
    let of_hidden = [Row::RmsNorm, Row::AddRmsNorm, Row::LayerNorm, Row::Bias, Row::Gelu, Row::Gather];
    let of_inner = [Row::Silu, Row::GeluMul];
    let of_vocab = [Row::Scale, Row::Cap];
    let of = |cols: usize| move |of: &Row| Rows { of: *of, cols };
    let all = of_hidden.iter().map(of(sizes.hidden)).chain(of_inner.iter().map(of(2 * sizes.inner)));
    let checks = all.chain(of_vocab.iter().map(of(sizes.vocab)));
    let mut checks: Vec<Check> = checks.map(|rows| rows.check(device, &reference, rng, n_rows)).collect();
    for n_rows in [1, sizes.company] {
        checks.push(draws(device, &reference, rng, [n_rows, sizes.vocab]));
    }
    checks
}

/// A mixture of experts.
pub fn experts<D: Device>(device: &D, sizes: &Sizes, seed: u64) -> Vec<Check> {
    let (rng, reference) = (&mut Rng(seed), reference());
    let [hidden, inner, n_experts, n_used] = sizes.experts;
    let check = |dtype: Dtype| {
        let mixture = Mixture {
            routing: Routing { n_experts, n_used, normalized: true, scoring: Scoring::Softmax },
            gate_up: (0..n_experts).map(|_| wide(rng, dtype, 2 * inner, hidden)).collect(),
            down: (0..n_experts).map(|_| wide(rng, dtype, hidden, inner)).collect(),
        };
        mixture.check(device, &reference, rng, sizes.company)
    };
    [Dtype::BF16, Dtype::Q4_0].into_iter().map(check).collect()
}

/// Sequences with long contexts, in one layer: earlier positions are stored, new ones attended.
struct Far {
    heads: AttentionHeads,
    lengths: Vec<usize>,
    n_new: usize,
    /// The sequences that are attended alone as well.
    alone: Vec<usize>,
}

/// Rows stored in one pass.
const STORED_ROWS: usize = 1024;

impl Far {
    fn name(&self) -> String {
        let (AttentionHeads { n_heads, n_kv_heads, head_dim, .. }, longest) = (self.heads, self.lengths.iter().max());
        let (n, longest) = (self.lengths.len(), longest.copied().unwrap_or(0));
        format!("{n} sequences up to {longest}, {n_heads}/{n_kv_heads} heads of {head_dim}, {} new", self.n_new)
    }

    fn n_blocks(&self, sequences: &[usize]) -> usize {
        sequences.iter().map(|length| blocks_for(*length as u32) as usize).sum()
    }

    /// A sequence's blocks are in descending order, after those of the sequences that follow it.
    fn batch(&self, ranges: &[(usize, Range<usize>)]) -> Batch {
        let mut batch = Batch { tables: vec![BlockTables::default()], ..Batch::default() };
        let n_blocks = self.n_blocks(&self.lengths);
        for (sequence, range) in ranges {
            let first = batch.n_rows() as u32;
            batch.tokens.extend(range.clone().map(|i| i as u32));
            batch.positions.extend(range.clone().map(|i| i as u32));
            let rows = first..first + range.len() as u32;
            batch.slices.push(PassSlice::new(rows, range.start as u32, Want::Nothing));
            let (before, table) = (self.n_blocks(&self.lengths[..*sequence]), &mut batch.tables[0]);
            let n = blocks_for(self.lengths[*sequence] as u32) as usize;
            table.blocks.extend((0..n).map(|i| BlockId((n_blocks - 1 - before - i) as u32)));
            table.bounds.push(table.blocks.len() as u32);
        }
        batch
    }

    /// Rows by sequence and position, whatever the pass.
    fn qkv<D: Device>(&self, device: &D, ranges: &[(usize, Range<usize>)], numbers: &[f32]) -> D::Buffer {
        let (cols, n_rows) = (self.heads.qkv_cols(), ranges.iter().map(|(_, range)| range.len()).sum());
        let mut qkv = Vec::with_capacity(n_rows * cols);
        for (sequence, range) in ranges {
            for position in range.clone() {
                let at = (sequence * 131_071 + position * 8191) % (numbers.len() - cols);
                qkv.extend_from_slice(&numbers[at..at + cols]);
            }
        }
        filled(device, n_rows, &qkv)
    }

    fn run<D: Device>(&self, device: &D, dtype: KvDtype, which: &[usize], numbers: &[f32]) -> Vec<f32> {
        let AttentionHeads { n_kv_heads, head_dim, .. } = self.heads;
        let context = self.lengths.iter().max().copied().unwrap_or(1);
        let n_new = |length: usize| self.n_new.min(length);
        let rows_max = STORED_ROWS.max(which.iter().map(|sequence| n_new(self.lengths[*sequence])).sum());
        device.reserve_batches(BatchLimits { rows_max, context: context as u32, n_groups: 1 }).unwrap();
        let n_blocks = self.n_blocks(&self.lengths);
        let mut kv = device
            .kv(KvSpec { n_layers: 1, n_blocks, layout: KvLayout::heads(n_kv_heads as u32, head_dim as u32), dtype })
            .unwrap();
        let turns: Vec<f32> = (0..context * head_dim / 2).map(|i| (i % 977) as f32 / 977.0).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) = turns.iter().map(|turn| (turn.cos(), turn.sin())).unzip();
        let rope = device.rope(&cos, &sin, head_dim / 2, RopeStyle::Halves).unwrap();
        let mut store = |ranges: &[(usize, Range<usize>)]| {
            let (batch, mut qkv) = (self.batch(ranges), self.qkv(device, ranges, numbers));
            device.begin_pass(&batch.pass());
            device.rope_store(
                &mut qkv,
                Some(&rope),
                &AttentionCall { pass: &batch.pass(), heads: &self.heads, group: 0, layer: 0 },
                &mut kv,
            );
            (batch, qkv)
        };
        for sequence in which {
            let end = self.lengths[*sequence] - n_new(self.lengths[*sequence]);
            for start in (0..end).step_by(STORED_ROWS) {
                store(&[(*sequence, start..end.min(start + STORED_ROWS))]);
            }
        }
        let range = |sequence: &usize| (*sequence, self.lengths[*sequence]);
        let ranges: Vec<_> = which.iter().map(range).map(|(i, n)| (i, n - n_new(n)..n)).collect();
        let (batch, mut qkv) = store(&ranges);
        let mut out = device.buffer(batch.n_rows(), self.heads.n_heads * head_dim).unwrap();
        device.attend(
            &mut qkv,
            &kv,
            &AttentionCall { pass: &batch.pass(), heads: &self.heads, group: 0, layer: 0 },
            &ScoreTerms::NONE,
            &mut out,
        );
        read(device, &out, batch.n_rows())
    }

    fn check<D: Device>(&self, device: &D, reference: &Cpu, numbers: &[f32]) -> Check {
        let all: Vec<usize> = (0..self.lengths.len()).collect();
        let got = self.run(device, KvDtype::Bf16, &all, numbers);
        let cols = self.heads.n_heads * self.heads.head_dim;
        let n_rows = |sequences: &[usize]| sequences.iter().map(|n| self.n_new.min(*n)).sum::<usize>();
        let is_same = |sequence: &usize| {
            let start = n_rows(&self.lengths[..*sequence]) * cols;
            let alone = self.run(device, KvDtype::Bf16, &[*sequence], numbers);
            same_bits(&alone, &got[start..start + alone.len()])
        };
        Check {
            name: self.name(),
            apart: apart(&got, &self.run(reference, KvDtype::F32, &all, numbers)),
            limit: PRODUCT,
            same_bits: self.alone.iter().all(is_same),
        }
    }
}

/// Attention: a few long sequences, many that decode together, and a chunk of a long prompt.
pub fn attention<D: Device>(device: &D, sizes: &Sizes, [n_heads, n_kv_heads, head_dim]: [usize; 3]) -> Vec<Check> {
    let Sizes { context, chunk, company, .. } = *sizes;
    let heads = AttentionHeads::whole(n_heads, n_kv_heads, head_dim, 1.0 / (head_dim as f32).sqrt());
    let numbers: Vec<f32> = Rng(head_dim as u64).floats(heads.qkv_cols() + 1_000_003).iter().map(|x| x * 1.5).collect();
    let spread = |n: usize| -> Vec<usize> { (0..n).map(|i| 1 + (i * 37 + 11) * 13 % (context / 4)).collect() };
    let all = [
        Far { heads, lengths: vec![context + 37, context / 4, 1, 17], n_new: 1, alone: vec![0, 1, 2, 3] },
        Far { heads, lengths: spread(company), n_new: 1, alone: vec![0, company / 2] },
        Far { heads, lengths: vec![context + chunk, 100.min(context)], n_new: chunk, alone: vec![0] },
    ];
    let reference = reference();
    all.iter().map(|far| far.check(device, &reference, &numbers)).collect()
}
