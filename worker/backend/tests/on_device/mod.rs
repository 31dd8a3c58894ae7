//! A device's operations beside the CPU's, on random numbers: how far apart they are, and whether a row's bits depend
//! on its neighbours. For tests over the fake driver, and on a real device.

#[allow(dead_code, reason = "each test binary uses a part of it")]
pub mod every;
#[allow(dead_code, reason = "each test binary uses a part of it")]
pub mod shapes;

use crate::numbers::{File, Rng, cpu, kinds};
use backend::cpu::{Cpu, Isa};
use backend::{
    AttentionCall, AttentionHeads, Batch, BlockTables, Device, Draw, DrawError, DrawMask, ElementOp, Expert,
    ExpertStack, Gate, KvSpec, MlpActivation, PassSlice, RopeStyle, Routing, ScoreTerms, Scoring,
};
use types::leaves::aligned_runs;
use types::{Activations, BlockId, Dtype, KvDtype, KvLayout, Leaves, Sampling, Want};

/// One comparison.
pub struct Check {
    pub name: String,
    /// The largest difference relative to the largest number.
    pub apart: f32,
    pub limit: f32,
    /// Whether rows have the same bits alone and among others.
    pub same_bits: bool,
}

impl Check {
    pub fn is_good(&self) -> bool {
        // A NaN is not below a limit.
        self.apart <= self.limit && self.same_bits
    }
}

/// Limit where weights and inputs are rounded to bf16.
const PRODUCT: f32 = 1.5e-2;
/// Limit where inputs are rounded to eight bits.
const EIGHT_BITS: f32 = 6e-2;
/// Limit where the output is rounded to bf16.
const ROUNDED: f32 = 4e-3;
const EXACT: f32 = 0.0;

/// The largest difference over the largest number; NaN if any number is NaN.
fn apart(got: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(got.len(), expected.len(), "both have equally many numbers");
    let largest = expected.iter().fold(1e-20f32, |largest, x| largest.max(x.abs()));
    let differs = |worst: f32, (got, expected): (&f32, &f32)| {
        let difference = (got - expected).abs();
        if difference.is_nan() || worst.is_nan() { f32::NAN } else { worst.max(difference) }
    };
    got.iter().zip(expected).fold(0.0, differs) / largest
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn filled<D: Device>(device: &D, rows: usize, values: &[f32]) -> D::Buffer {
    let mut buffer = device.buffer(rows, values.len() / rows).unwrap();
    device.write(&mut buffer, 0, values);
    buffer
}

fn read<D: Device>(device: &D, buffer: &D::Buffer, rows: usize) -> Vec<f32> {
    let mut out = vec![0.0; rows * device.cols(buffer)];
    device.read(buffer, 0..rows, &mut out);
    device.take_failure().unwrap();
    out
}

/// An operation on rows, on any device.
trait Operation {
    fn name(&self) -> String;
    fn limit(&self) -> f32;
    /// Columns of the input.
    fn cols(&self) -> usize;
    fn run<D: Device>(&self, device: &D, x: &[f32], n_rows: usize) -> Vec<f32>;

    fn check<D: Device>(&self, device: &D, reference: &Cpu, rng: &mut Rng, n_rows: usize) -> Check {
        let x: Vec<f32> = rng.floats(n_rows * self.cols()).iter().map(|x| x * 2.0).collect();
        let got = self.run(device, &x, n_rows);
        let row = n_rows / 2;
        let alone = self.run(device, &x[row * self.cols()..][..self.cols()], 1);
        let cols = got.len() / n_rows;
        Check {
            name: format!("{} on {n_rows} rows", self.name()),
            apart: apart(&got, &self.run(reference, &x, n_rows)),
            limit: self.limit(),
            same_bits: same_bits(&alone, &got[row * cols..][..cols]),
        }
    }
}

struct Product {
    file: File,
}

impl Operation for Product {
    fn name(&self) -> String {
        format!("product with {:?}", self.file.dtype)
    }

    fn limit(&self) -> f32 {
        PRODUCT
    }

    fn cols(&self) -> usize {
        self.file.k
    }

    fn run<D: Device>(&self, device: &D, x: &[f32], n_rows: usize) -> Vec<f32> {
        let (x, w) = (filled(device, n_rows, x), device.matrix(&[self.file.stored()]).unwrap());
        let mut out = device.buffer(n_rows, self.file.rows).unwrap();
        device.linear(&x, &w, n_rows, &mut out);
        read(device, &out, n_rows)
    }
}

/// Products under `fast` beside the CPU's; a repeated product has the same bits.
pub fn fast_checks<D: Device>(device: &D, rows: &[usize], seed: u64) -> Vec<Check> {
    let (rng, reference) = (&mut Rng(seed), cpu(Isa::detect(), 1, Activations::F32));
    let shapes = [(Dtype::BF16, 96, 160), (Dtype::F32, 33, 256), (Dtype::F16, 130, 32)];
    let mut checks = Vec::new();
    for ((dtype, n_out, k), n_rows) in shapes.into_iter().flat_map(|shape| rows.iter().map(move |n| (shape, *n))) {
        let file = File::random(rng, dtype, n_out, k);
        checks.push(fast_check(&Product { file }, device, &reference, rng, n_rows));
        let file = File::random(rng, dtype, n_out, 32 * 11);
        checks.push(fast_check(&Leafed { file }, device, &reference, rng, n_rows));
    }
    // A scale for each row, one for all, an odd number of rows, and a scale for each block: with more and with fewer
    // rows than make widening the weights worthwhile.
    let many: Vec<usize> = rows.iter().copied().chain([530]).collect();
    for (n_out, k, block) in [(96, 160, [1, 160]), (112, 64, [112, 64]), (33, 96, [1, 96]), (48, 352, [16, 128])] {
        for n_rows in if n_out > 50 { rows } else { &many[..] } {
            let file = File::in_eight_bits(rng, n_out, k, block);
            let check = fast_check(&Product { file }, device, &reference, rng, *n_rows);
            checks.push(Check { limit: EIGHT_BITS, ..check });
            let file = File::in_eight_bits(rng, n_out, 32 * 11, [block[0], if block[0] == 16 { 64 } else { 32 * 11 }]);
            let check = fast_check(&Leafed { file }, device, &reference, rng, *n_rows);
            checks.push(Check { limit: EIGHT_BITS, ..check });
        }
    }
    checks
}

fn fast_check<D: Device>(of: &impl Operation, device: &D, reference: &Cpu, rng: &mut Rng, n_rows: usize) -> Check {
    let x: Vec<f32> = rng.floats(n_rows * of.cols()).iter().map(|x| x * 2.0).collect();
    let (got, again) = (of.run(device, &x, n_rows), of.run(device, &x, n_rows));
    Check {
        name: format!("fast {} on {n_rows} rows", of.name()),
        apart: apart(&got, &of.run(reference, &x, n_rows)),
        limit: of.limit(),
        same_bits: same_bits(&got, &again),
    }
}

/// The bits of one product, on any device.
pub fn product_of<D: Device>(device: &D, n_out: usize, k: usize, n_rows: usize) -> Vec<u32> {
    let rng = &mut Rng(7);
    let file = File::random(rng, Dtype::BF16, n_out, k);
    let x = rng.floats(n_rows * k);
    Product { file }.run(device, &x, n_rows).into_iter().map(f32::to_bits).collect()
}

/// Planes of two ranks, summed by the tree.
struct Leafed {
    file: File,
}

impl Operation for Leafed {
    fn name(&self) -> String {
        format!("planes of {:?}", self.file.dtype)
    }

    fn limit(&self) -> f32 {
        PRODUCT
    }

    fn cols(&self) -> usize {
        self.file.k
    }

    fn run<D: Device>(&self, device: &D, x: &[f32], n_rows: usize) -> Vec<f32> {
        let (leaves, k) = (Leaves::on_grain(self.file.k as u32, 8), self.file.k);
        let n_leaves = leaves.len() as u32;
        let mut planes = Vec::new();
        for owned in [0..3, 3..n_leaves] {
            let columns = leaves.elements(&owned);
            let columns = columns.start as usize..columns.end as usize;
            let part: Vec<f32> = x.chunks_exact(k).flat_map(|row| row[columns.clone()].to_vec()).collect();
            let x = filled(device, n_rows, &part);
            let stored = self.file.stored().columns(columns).unwrap();
            let w = device.matrix_leaves(stored, &leaves, owned.clone()).unwrap();
            let runs = aligned_runs(owned, n_leaves);
            let mut out = device.buffer(n_rows * runs.len(), self.file.rows).unwrap();
            device.linear_runs(&x, &w, n_rows, &mut out);
            let made = read(device, &out, n_rows * runs.len());
            let size = n_rows * self.file.rows;
            planes.extend(runs.into_iter().zip(made.chunks_exact(size).map(<[f32]>::to_vec)));
        }
        let element = |i: usize| {
            let runs: Vec<_> = planes.iter().map(|(run, plane)| (run.clone(), plane[i])).collect();
            types::leaves::sum_runs(&runs)
        };
        (0..n_rows * self.file.rows).map(element).collect()
    }
}

#[derive(Clone, Copy, Debug)]
enum Row {
    RmsNorm,
    AddRmsNorm,
    LayerNorm,
    Silu,
    GeluMul,
    Gelu,
    Bias,
    Scale,
    Cap,
    Gather,
}

struct Rows {
    of: Row,
    cols: usize,
}

impl Operation for Rows {
    fn name(&self) -> String {
        format!("{:?} over {} columns", self.of, self.cols)
    }

    fn limit(&self) -> f32 {
        match self.of {
            Row::Gelu | Row::Bias | Row::Scale | Row::Cap | Row::Gather => EXACT,
            _ => ROUNDED,
        }
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn run<D: Device>(&self, device: &D, x: &[f32], n_rows: usize) -> Vec<f32> {
        let cols = self.cols;
        let weight: Vec<f32> = (0..cols).map(|i| 0.5 + (i % 80) as f32 / 64.0).collect();
        let (vector, mut x) = (device.vector(&weight).unwrap(), filled(device, n_rows, x));
        let is_gated = matches!(self.of, Row::Silu | Row::GeluMul);
        let mut out = device.buffer(n_rows, if is_gated { cols / 2 } else { cols }).unwrap();
        match self.of {
            Row::RmsNorm => device.rms_norm(&x, &vector, 1e-5, n_rows, &mut out),
            Row::AddRmsNorm => {
                let residual: Vec<f32> = (0..n_rows * cols).map(|i| (i % cols % 80) as f32 / 90.0 - 0.4).collect();
                let mut residual = filled(device, n_rows, &residual);
                device.add_rms_norm(&x, &mut residual, &vector, 1e-5, n_rows, &mut out);
                device.add(&out, &mut residual, n_rows);
                return read(device, &residual, n_rows);
            }
            Row::LayerNorm => device.layer_norm(&x, &vector, &vector, 1e-5, n_rows, &mut out),
            Row::Silu => device.apply_gate(&x, Gate::Silu, n_rows, &mut out),
            Row::GeluMul => device.apply_gate(&x, Gate::Gelu, n_rows, &mut out),
            Row::Gather => {
                let rows: Vec<u32> = (0..n_rows as u32).rev().collect();
                device.gather(&x, &rows, &mut out);
                device.gather(&out, &rows, &mut x);
                return read(device, &x, n_rows);
            }
            Row::Gelu => device.map(&mut x, ElementOp::Gelu, n_rows),
            Row::Bias => device.add_bias(&mut x, &vector, n_rows),
            Row::Scale => device.map(&mut x, ElementOp::Scale(0.3), n_rows),
            Row::Cap => device.map(&mut x, ElementOp::SoftCap(1.5), n_rows),
        }
        match self.of {
            Row::Gelu | Row::Bias | Row::Scale | Row::Cap => read(device, &x, n_rows),
            _ => read(device, &out, n_rows),
        }
    }
}

struct Mixture {
    routing: Routing,
    gate_up: Vec<File>,
    down: Vec<File>,
}

impl Mixture {
    fn new(rng: &mut Rng, dtype: Dtype, [hidden, inner]: [usize; 2], n_experts: usize, n_used: usize) -> Mixture {
        Mixture {
            routing: Routing { n_experts, n_used, normalized: true, scoring: Scoring::Softmax },
            gate_up: (0..n_experts).map(|_| File::random(rng, dtype, 2 * inner, hidden)).collect(),
            down: (0..n_experts).map(|_| File::random(rng, dtype, hidden, inner)).collect(),
        }
    }
}

impl Operation for Mixture {
    fn name(&self) -> String {
        let Routing { n_experts, n_used, .. } = self.routing;
        format!("{n_used} of {n_experts} experts of {:?}", self.down[0].dtype)
    }

    fn limit(&self) -> f32 {
        2.0 * PRODUCT
    }

    fn cols(&self) -> usize {
        self.gate_up[0].k
    }

    fn run<D: Device>(&self, device: &D, x: &[f32], n_rows: usize) -> Vec<f32> {
        let (hidden, inner) = (self.gate_up[0].k, self.down[0].k);
        // Scores so far apart that no rounding reorders them.
        let scores: Vec<f32> = x.chunks_exact(hidden).flat_map(|x| x[..self.routing.n_experts].to_vec()).collect();
        let scores = filled(device, n_rows, &scores);
        let mut routes = device.routes(n_rows, hidden, inner, self.routing).unwrap();
        device.route(&scores, None, n_rows, &mut routes);
        let matrix = |file: &File| device.matrix(&[file.stored()]).unwrap();
        let experts = self.gate_up.iter().zip(&self.down);
        let all: Vec<Expert<D>> =
            experts.map(|(gate_up, down)| Expert { gate_up: matrix(gate_up), down: matrix(down) }).collect();
        let experts = ExpertStack { all, activation: MlpActivation::Gated(Gate::Silu), biases: None };
        let n_experts = self.routing.n_experts as u32;
        let mut out = device.buffer(n_rows, hidden).unwrap();
        let whole = aligned_runs(0..n_experts, n_experts);
        device.apply_experts(&filled(device, n_rows, x), &experts, &whole, n_rows, &mut routes, &mut out);
        read(device, &out, n_rows)
    }
}

/// Sequences of one layer, attended together and one by one.
struct Attended {
    heads: AttentionHeads,
    lengths: Vec<usize>,
    /// Rows of each sequence computed now; earlier ones were stored by an earlier pass.
    n_new: usize,
}

const N_BLOCKS: usize = 64;

impl Attended {
    fn name(&self) -> String {
        let AttentionHeads { n_heads, n_kv_heads, head_dim, window, cap, .. } = self.heads;
        format!(
            "attention of {n_heads}/{n_kv_heads} heads of {head_dim}, window {window:?}, cap {cap:?}, {} new of {:?}",
            self.n_new, self.lengths
        )
    }

    fn batch(&self, which: &[usize], rows: impl Fn(usize) -> std::ops::Range<usize>) -> Batch {
        let mut batch = Batch { tables: vec![BlockTables::default()], ..Batch::default() };
        for sequence in which {
            let range = rows(self.lengths[*sequence]);
            let first = batch.n_rows() as u32;
            batch.tokens.extend(range.clone().map(|i| i as u32));
            batch.positions.extend(range.clone().map(|i| i as u32));
            let rows = first..first + range.len() as u32;
            batch.slices.push(PassSlice::new(rows, range.start as u32, Want::Nothing));
            let n = self.lengths[*sequence].div_ceil(16);
            let table = &mut batch.tables[0];
            table.blocks.extend((0..n).map(|i| BlockId((N_BLOCKS - 1 - 3 * i - sequence) as u32)));
            table.bounds.push(table.blocks.len() as u32);
        }
        batch
    }

    fn pass<D: Device>(&self, device: &D, kv: &mut D::Kv, rope: &D::Rope, batch: &Batch, numbers: &[f32]) -> Vec<f32> {
        let (n_rows, cols) = (batch.n_rows(), self.heads.qkv_cols());
        // By sequence and position, whatever the pass: the first block identifies a sequence.
        let rows = batch.slices.iter().enumerate().flat_map(|(i, slice)| {
            let seed = batch.tables[0].blocks_of(i)[0].0 as usize * 131;
            batch.positions[slice.rows.start as usize..slice.rows.end as usize]
                .iter()
                .flat_map(move |position| (0..cols).map(move |c| (seed + *position as usize * 17 + c) % numbers.len()))
        });
        let qkv: Vec<f32> = rows.map(|i| numbers[i]).collect();
        let mut qkv = filled(device, n_rows, &qkv);
        let mut out = device.buffer(n_rows, self.heads.n_heads * self.heads.head_dim).unwrap();
        device.begin_pass(&batch.pass());
        device.rope_store(
            &mut qkv,
            Some(rope),
            &AttentionCall { pass: &batch.pass(), heads: &self.heads, group: 0, layer: 0 },
            kv,
        );
        device.attend(
            &mut qkv,
            kv,
            &AttentionCall { pass: &batch.pass(), heads: &self.heads, group: 0, layer: 0 },
            &ScoreTerms::NONE,
            &mut out,
        );
        read(device, &out, n_rows)
    }

    fn run<D: Device>(&self, device: &D, dtype: KvDtype, which: &[usize], numbers: &[f32]) -> Vec<f32> {
        let AttentionHeads { n_kv_heads, head_dim, .. } = self.heads;
        let mut kv = device
            .kv(KvSpec {
                n_layers: 1,
                n_blocks: N_BLOCKS,
                layout: KvLayout::heads(n_kv_heads as u32, head_dim as u32),
                dtype,
            })
            .unwrap();
        let turns: Vec<f32> = (0..1024 * head_dim / 2).map(|i| (i % 977) as f32 / 977.0).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) = turns.iter().map(|turn| (turn.cos(), turn.sin())).unzip();
        let rope = device.rope(&cos, &sin, head_dim / 2, RopeStyle::Halves).unwrap();
        let before = self.batch(which, |n| 0..n - self.n_new.min(n));
        if before.n_rows() > 0 {
            self.pass(device, &mut kv, &rope, &before, numbers);
        }
        self.pass(device, &mut kv, &rope, &self.batch(which, |n| n - self.n_new.min(n)..n), numbers)
    }

    fn check<D: Device>(&self, device: &D, dtype: KvDtype, reference: &Cpu, rng: &mut Rng) -> Check {
        let numbers: Vec<f32> = rng.floats(4093).iter().map(|x| x * 1.5).collect();
        let all: Vec<usize> = (0..self.lengths.len()).collect();
        let got = self.run(device, dtype, &all, &numbers);
        let alone: Vec<f32> = all.iter().flat_map(|i| self.run(device, dtype, &[*i], &numbers)).collect();
        Check {
            name: self.name(),
            apart: apart(&got, &self.run(reference, KvDtype::F32, &all, &numbers)),
            limit: PRODUCT,
            same_bits: same_bits(&alone, &got),
        }
    }
}

fn attentions() -> Vec<Attended> {
    let heads = |n_heads, n_kv_heads, head_dim| AttentionHeads::whole(n_heads, n_kv_heads, head_dim, 0.2);
    let of = |heads, lengths: &[usize], n_new| Attended { heads, lengths: lengths.to_vec(), n_new };
    vec![
        of(heads(4, 2, 16), &[5, 30], 100),
        of(heads(6, 2, 64), &[40, 270], 1),
        of(heads(6, 2, 64), &[290], 21),
        of(AttentionHeads { window: Some(24), ..heads(4, 4, 80) }, &[70, 12], 3),
        of(AttentionHeads { cap: Some(2.0), ..heads(2, 1, 128) }, &[33], 20),
        of(AttentionHeads { first: 1, n_heads: 3, n_kv_heads: 2, ..heads(4, 2, 32) }, &[20], 4),
    ]
}

/// Blocks that are cleared hold zeros in every layer, and no other block is touched.
fn cleared<D: Device>(device: &D, dtype: KvDtype, rng: &mut Rng) -> Check {
    const N_LAYERS: usize = 3;
    const N_ROWS: usize = 90;
    let heads = AttentionHeads::whole(2, 2, 64, 0.2);
    let batch = Attended { heads, lengths: vec![N_ROWS], n_new: N_ROWS }.batch(&[0], |n| 0..n);
    let spec = KvSpec { n_layers: N_LAYERS, n_blocks: N_BLOCKS, layout: KvLayout::heads(2, 64), dtype };
    let mut kv = device.kv(spec).unwrap();
    let mut qkv = filled(device, N_ROWS, &rng.floats(N_ROWS * heads.qkv_cols()));
    device.begin_pass(&batch.pass());
    (0..N_LAYERS).for_each(|layer| {
        device.rope_store(
            &mut qkv,
            None,
            &AttentionCall { pass: &batch.pass(), heads: &heads, group: 0, layer },
            &mut kv,
        )
    });
    let read = |kv: &D::Kv| -> Vec<Vec<u8>> {
        let places = (0..N_LAYERS).flat_map(|layer| (0..N_BLOCKS as u32).map(move |block| (layer, BlockId(block))));
        places.map(|(layer, block)| device.read_block(kv, layer, block)).collect()
    };
    let is_zero = |block: &[u8]| block.iter().all(|byte| *byte == 0);
    let before = read(&kv);
    // One written block alone, and two neighbours.
    let blocks = [BlockId(51), BlockId(57), BlockId(58)];
    device.clear(&mut kv, &blocks);
    let after = read(&kv);
    device.take_failure().unwrap();
    let is_right = |(place, (before, after)): (usize, (&Vec<u8>, &Vec<u8>))| {
        let block = BlockId((place % N_BLOCKS) as u32);
        let was_written = batch.tables[0].blocks_of(0).contains(&block);
        let is_as_it_should = if blocks.contains(&block) { is_zero(after) } else { after == before };
        is_as_it_should && was_written != is_zero(before)
    };
    let same_bits = before.iter().zip(&after).enumerate().all(is_right);
    Check { name: "blocks that are cleared".into(), apart: 0.0, limit: EXACT, same_bits }
}

/// Draws from the same logits must be the same tokens.
fn draws<D: Device>(device: &D, reference: &Cpu, rng: &mut Rng, [n_rows, n_vocab]: [usize; 2]) -> Check {
    let logits: Vec<f32> = rng.floats(n_rows * n_vocab).iter().map(|x| x * 9.0).collect();
    let sampling = |i: u64| Sampling {
        temperature: [0.0, 0.8, 1.4][i as usize % 3],
        min_p: [0.0, 0.05][i as usize % 2],
        top_k: [0, 0, 0, 7, 20][i as usize % 5],
        top_p: [1.0, 1.0, 1.0, 0.7][i as usize % 4],
        seed: i * 77 + 5,
        // Logprobs make the host answer, with or without a filter.
        logprobs: [None, Some(0), Some(1), None][i as usize % 4],
        ..Sampling::default()
    };
    let samplings: Vec<Sampling> = (0..n_rows as u64).map(sampling).collect();
    let prompt = [1, 2, 3];
    // Every fifth row has a mask of every third token.
    let words: Vec<u32> = (0..n_vocab.div_ceil(32) as u32).map(|i| 0x4924_9249u32.rotate_left(i)).collect();
    let mask = |i: usize| if i % 5 == 4 { DrawMask::Of(&words) } else { DrawMask::Open };
    let draw = |(i, sampling)| Draw { sampling, prompt: &prompt, output: &[], score: None, mask: mask(i) };
    let row_draws: Vec<Draw<'_>> = samplings.iter().enumerate().map(draw).collect();
    fn drawn<D: Device>(
        device: &D,
        n: usize,
        logits: &[f32],
        row_draws: &[Draw<'_>],
    ) -> Vec<Result<types::TokenOut, DrawError>> {
        let mut out = Vec::new();
        device.draw(&filled(device, n, logits), row_draws, &mut out);
        device.take_failure().unwrap();
        out
    }
    let (got, expected) = (drawn(device, n_rows, &logits, &row_draws), drawn(reference, n_rows, &logits, &row_draws));
    let same_bits = got == expected && got.iter().all(Result::is_ok);
    Check { name: format!("draws from {n_rows} rows of {n_vocab}"), apart: 0.0, limit: EXACT, same_bits }
}

/// All checks. `n_rows` are the row counts for products.
pub fn checks<D: Device>(device: &D, dtype: KvDtype, n_rows: &[usize], seed: u64) -> Vec<Check> {
    let (mut rng, reference) = (Rng(seed), cpu(Isa::detect(), 1, Activations::F32));
    let rng = &mut rng;
    let mut checks = Vec::new();
    for (i, dtype) in kinds().enumerate() {
        let file = File::random(rng, dtype, 37, 256);
        checks.push(Product { file }.check(device, &reference, rng, n_rows[i % n_rows.len()]));
    }
    for dtype in [Dtype::BF16, Dtype::Q4_0] {
        let file = File::random(rng, dtype, 20, 320);
        checks.push(Leafed { file }.check(device, &reference, rng, 3));
    }
    let rows = [Row::RmsNorm, Row::AddRmsNorm, Row::LayerNorm, Row::Silu, Row::GeluMul, Row::Gelu, Row::Bias];
    for row in rows.into_iter().chain([Row::Scale, Row::Cap, Row::Gather]) {
        checks.push(Rows { of: row, cols: 80 }.check(device, &reference, rng, 5));
    }
    for (dtype, n_experts, n_used) in [(Dtype::BF16, 4, 2), (Dtype::Q8_0, 7, 3)] {
        checks.push(Mixture::new(rng, dtype, [64, 32], n_experts, n_used).check(device, &reference, rng, 9));
    }
    checks.extend(attentions().iter().map(|attended| attended.check(device, dtype, &reference, rng)));
    checks.push(draws(device, &reference, rng, [12, 700]));
    checks.push(cleared(device, dtype, rng));
    checks
}
