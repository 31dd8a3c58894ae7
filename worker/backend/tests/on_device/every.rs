//! Every kernel, with as few numbers as suffice: each kind of weight for each number of rows, each width of a head on
//! each way of attending, and operations that no model's pass covers.

use super::{Attended, Check, EXACT, Mixture, Operation, PRODUCT, Product, ROUNDED, apart, filled, read, same_bits};
use crate::numbers::{File, Rng, cpu};
use backend::cpu::{Cpu, Isa};
use backend::cuda::Cuda;
use backend::{
    AttentionHeads, Batch, Device, Draw, DrawMask, ElementOp, HeadNorms, Memory, PassSlice, Pointwise, Sample, Weights,
};
use types::leaves::sum_runs;
use types::{Activations, Dtype, KvDtype, Leaves, NumericsMode, Sampling, Want};

/// One of each kind of weight on the device.
pub const TYPES: [Dtype; 6] = [Dtype::BF16, Dtype::Q8_0, Dtype::Q6K, Dtype::Q4_0, Dtype::Q3K, Dtype::F8E4M3];
/// Widths of heads.
pub const WIDTHS: [usize; 8] = [32, 64, 96, 128, 160, 192, 224, 256];
/// Row counts for each kernel of few rows, and for those of many: with blocks for each piece of K, and without.
const ROWS: [usize; 6] = [5, 13, 29, 40, 200, 520];
/// As many rows as a block of 64 takes, where K is one piece.
const OF_ONE_LEAF: usize = 70;
/// As long as the widest blocks.
const K: usize = 256;

/// Rows looked up in a table.
struct Embedded {
    file: File,
}

impl Operation for Embedded {
    fn name(&self) -> String {
        format!("embedding of {:?}", self.file.dtype)
    }

    fn limit(&self) -> f32 {
        // Scales are rounded too.
        1.5 * ROUNDED
    }

    fn cols(&self) -> usize {
        1
    }

    fn run<D: Device>(&self, device: &D, x: &[f32], n_rows: usize) -> Vec<f32> {
        let tokens: Vec<u32> = x.iter().map(|x| x.to_bits() % self.file.rows as u32).collect();
        let (table, mut out) = (device.matrix(&[self.file.stored()]).unwrap(), device.buffer(n_rows, K).unwrap());
        device.embed(&table, 0, &tokens, &mut out);
        read(device, &out, n_rows)
    }
}

/// A product over K as one leaf.
struct OfOneLeaf {
    file: File,
}

impl Operation for OfOneLeaf {
    fn name(&self) -> String {
        format!("product with one leaf of {:?}", self.file.dtype)
    }

    fn limit(&self) -> f32 {
        PRODUCT
    }

    fn cols(&self) -> usize {
        K
    }

    fn run<D: Device>(&self, device: &D, x: &[f32], n_rows: usize) -> Vec<f32> {
        let w = device.matrix_leaves(self.file.stored(), &Leaves::on_grain(K as u32, 1), 0..1).unwrap();
        let (x, mut out) = (filled(device, n_rows, x), device.buffer(n_rows, self.file.rows).unwrap());
        device.linear_runs(&x, &w, n_rows, &mut out);
        read(device, &out, n_rows)
    }
}

/// Heads of Q and K, each with a norm of its own.
struct NormedHeads(AttentionHeads);

impl Operation for NormedHeads {
    fn name(&self) -> String {
        format!("norms of {} and {} heads of {}", self.0.n_heads, self.0.n_kv_heads, self.0.head_dim)
    }

    fn limit(&self) -> f32 {
        EXACT
    }

    fn cols(&self) -> usize {
        self.0.qkv_cols()
    }

    fn run<D: Device>(&self, device: &D, x: &[f32], n_rows: usize) -> Vec<f32> {
        let weight = |from: f32| -> Vec<f32> { (0..self.0.head_dim).map(|i| from + i as f32 / 99.0).collect() };
        let (q, k) = (device.vector(&weight(0.5)).unwrap(), device.vector(&weight(0.7)).unwrap());
        let mut qkv = filled(device, n_rows, x);
        device.norm_heads(&mut qkv, &self.0, &HeadNorms { q: &q, k: &k, v: None, eps: 1e-5 }, n_rows);
        read(device, &qkv, n_rows)
    }
}

fn reference() -> Cpu {
    cpu(Isa::detect(), 1, Activations::F32)
}

/// All operations with weights of this type. Under `fast` products of many rows are the library's.
pub fn of_type(device: &Cuda, dtype: Dtype, seed: u64) -> Vec<Check> {
    let (rng, reference) = (&mut Rng(seed), reference());
    let rows = if device.numerics_mode() == NumericsMode::Fast { &ROWS[..3] } else { &ROWS };
    let product = |n_rows: &usize| {
        let product = Product { file: File::random(rng, dtype, 20, K) };
        product.check(device, &reference, rng, *n_rows)
    };
    let mut checks: Vec<Check> = rows.iter().map(product).collect();
    if device.numerics_mode() == NumericsMode::Lockstep {
        let of_leaf = OfOneLeaf { file: File::random(rng, dtype, 20, K) };
        checks.push(of_leaf.check(device, &reference, rng, OF_ONE_LEAF));
    }
    checks.push(Embedded { file: File::random(rng, dtype, 7, K) }.check(device, &reference, rng, 5));
    checks.push(Mixture::new(rng, dtype, [K, K], 3, 2).check(device, &reference, rng, 3));
    checks
}

/// Attention with heads of this width: many rows, and then one, within a tile and behind one.
pub fn of_width(device: &Cuda, head_dim: usize, seed: u64) -> Vec<Check> {
    let (rng, reference) = (&mut Rng(seed), reference());
    let heads = AttentionHeads::whole(2, 1, head_dim, 0.1);
    let of = |length| Attended { heads, lengths: vec![length], n_new: 1 };
    [of(20), of(258)].map(|attended| attended.check(device, KvDtype::Bf16, &reference, rng)).into()
}

/// Operations that no model's pass covers.
pub fn rest(device: &Cuda, seed: u64) -> Vec<Check> {
    let (rng, reference) = (&mut Rng(seed), reference());
    let normed = NormedHeads(AttentionHeads::whole(4, 2, 64, 1.0)).check(device, &reference, rng, 5);
    vec![normed, widened(device, rng), folded(device, rng), taken(device, rng)]
}

/// Rows of bf16 are widened to f32 in place.
fn widened(device: &Cuda, rng: &mut Rng) -> Check {
    const N_ROWS: usize = 6;
    let x = filled(device, N_ROWS, &rng.floats(N_ROWS * 70));
    let (weight, mut out) = (device.vector(&[1.0; 70]).unwrap(), device.buffer(N_ROWS, 70).unwrap());
    device.rms_norm(&x, &weight, 1e-5, N_ROWS, &mut out);
    let before = read(device, &out, N_ROWS);
    device.map(&mut out, ElementOp::Scale(1.0), N_ROWS);
    let after = read(device, &out, N_ROWS);
    let (apart, same_bits) = (apart(&after, &before), same_bits(&after, &before));
    Check { name: "rows that are widened".into(), apart, limit: EXACT, same_bits }
}

/// Planes summed by the tree.
fn folded(device: &Cuda, rng: &mut Rng) -> Check {
    const N: usize = 300;
    const MERGES: [u8; 5] = [0, 1, 0, 2, 0];
    let numbers = rng.floats(MERGES.len() * N);
    let (planes, out) = (filled(device, MERGES.len(), &numbers), device.buffer(1, N).unwrap());
    let merges = device.upload_words(&MERGES).unwrap();
    device.fold_planes(device.floats_of(&planes, MERGES.len()), MERGES.len(), &merges, device.floats_of(&out, 1));
    let got = read(device, &out, 1);
    let sum = |i: usize| {
        let runs: Vec<_> = (0..MERGES.len()).map(|p| (p as u32..p as u32 + 1, numbers[p * N + i])).collect();
        sum_runs(&runs)
    };
    let expected: Vec<f32> = (0..N).map(sum).collect();
    let (apart, same_bits) = (apart(&got, &expected), same_bits(&got, &expected));
    Check { name: "planes that are folded".into(), apart, limit: EXACT, same_bits }
}

/// Tokens drawn on the device enter its next pass without the host.
fn taken(device: &Cuda, rng: &mut Rng) -> Check {
    const N_VOCAB: usize = 50;
    let table = device.matrix(&[File::random(rng, Dtype::BF16, N_VOCAB, 64).stored()]).unwrap();
    let logits = filled(device, 3, &rng.floats(3 * N_VOCAB));
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    let draws: Vec<Draw<'_>> = (0..3)
        .map(|_| Draw { sampling: &sampling, prompt: &[], output: &[], score: None, mask: DrawMask::Open })
        .collect();
    let (mut results, mut out) = (Vec::new(), device.buffer(3, 64).unwrap());
    let drawing = device.begin_draws(&logits, &draws).unwrap();
    let slices = (0..3).map(|row| PassSlice::new(row..row + 1, 0, Want::Nothing)).collect();
    let drawn = vec![(0, 2), (1, 0), (2, 1)];
    let batch = Batch { tokens: vec![0; 3], positions: vec![0; 3], slices, drawn, ..Batch::default() };
    device.begin_pass(&batch.pass());
    device.embed_pass(&table, 0, &batch.pass(), &mut out);
    let got = read(device, &out, 3);
    device.collect_draws(&drawing, &draws, &mut results);
    let token = |i: usize| results[i].as_ref().map_or(0, |drawn| drawn.token);
    device.embed(&table, 0, &[2, 0, 1].map(token), &mut out);
    let expected = read(device, &out, 3);
    let (apart, same_bits) = (apart(&got, &expected), same_bits(&got, &expected) && results.iter().all(Result::is_ok));
    Check { name: "tokens that the device has drawn".into(), apart, limit: EXACT, same_bits }
}

/// Whether products of few rows have one order under `fast` too.
pub fn few_rows(fast: &Cuda, lockstep: &Cuda) -> Check {
    let of = |cuda: &Cuda| super::product_of(cuda, 64, 512, 32);
    let same_bits = of(fast) == of(lockstep);
    Check { name: "few rows under fast and under lockstep".into(), apart: 0.0, limit: EXACT, same_bits }
}
