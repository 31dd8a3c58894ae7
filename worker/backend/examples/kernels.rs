//! How fast this machine computes: each kernel beside a plain read of the same memory in the same run.
//!
//! `cargo run -p backend --release --example kernels [INSTRUCTIONS] [threads] [all|attention|small|few]`
//!
//! Times are the calling thread's own, which computes as long as any: what else the machine does is not in them.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a program for measurements")]

use backend::cpu::{Cpu, CpuConfig, Isa};
use backend::{
    Attention, AttentionCall, AttentionHeads, Batch, BlockTables, KvPages, KvSpec, Linear, Memory, PassSlice,
    ScoreTerms, StoredMatrix, Weights,
};
use std::hint::black_box;
use std::time::Instant;
use types::{Activations, BlockId, Dtype, KvDtype, KvLayout, Want};

const REPEATS: usize = 15;

/// The processor time of this thread, which the kernel brings up to date when the thread yields.
fn thread_seconds() -> f64 {
    std::thread::yield_now();
    let stats = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    stats.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
}

/// The fastest and the median run, in seconds.
fn time(mut work: impl FnMut()) -> (f64, f64) {
    work();
    let run = |_| {
        let start = thread_seconds();
        work();
        thread_seconds() - start
    };
    let mut seconds: Vec<f64> = (0..REPEATS).map(run).collect();
    seconds.sort_by(f64::total_cmp);
    (seconds[0], seconds[REPEATS / 2])
}

fn report(name: &str, amount: f64, unit: &str, (best, median): (f64, f64)) {
    println!("{name:44} median {:8.1} best {:8.1} {unit}", amount / median / 1e9, amount / best / 1e9);
}

/// Sums memory on as many threads as the kernels use.
fn stream(bytes: &[u64], threads: usize) -> u64 {
    let sum = |part: &[u64]| part.iter().fold(0, |sum, word| sum ^ word);
    std::thread::scope(|scope| {
        let parts = bytes.chunks(bytes.len().div_ceil(threads));
        let others: Vec<_> = parts.map(|part| scope.spawn(move || sum(part))).collect();
        others.into_iter().map(|other| other.join().unwrap()).fold(0, |a, b| a ^ b)
    })
}

fn weights(dtype: Dtype, rows: usize, k: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..rows * dtype.row_bytes(k)).map(|i| (i * 31 % 251) as u8).collect();
    // Scales that are small numbers: 0x2c2c as f16 or bf16, or the f32 beside it.
    let block = dtype.block_bytes();
    let header = match dtype {
        Dtype::Q4_1 | Dtype::Q5_1 | Dtype::Q4K | Dtype::Q5K | Dtype::F32 => 0..4,
        Dtype::Q2K => 80..84,
        Dtype::Q3K => 108..110,
        Dtype::Q6K => 208..210,
        Dtype::MXFP4 => 0..1,
        Dtype::TQ1_0 => 52..54,
        Dtype::TQ2_0 => 64..66,
        Dtype::IQ1M => 48..56,
        _ => 0..2,
    };
    bytes.chunks_exact_mut(block).for_each(|block| block[header.clone()].fill(0x2c));
    bytes
}

fn linear(cpu: &Cpu, dtype: Dtype, n_out: usize, k: usize) {
    let file = weights(dtype, n_out, k);
    let start = Instant::now();
    let matrix = cpu.matrix(&[StoredMatrix::whole(dtype, n_out, k, &file)]).unwrap();
    let packing = start.elapsed().as_secs_f64();
    println!("-- {dtype:?} {n_out} x {k}: packed {:.1} MB in {packing:.3} s", file.len() as f64 / 1e6);
    let x = cpu.buffer(512, k).unwrap();
    let mut out = cpu.buffer(512, n_out).unwrap();
    for n_rows in [1, 2, 4, 8, 12, 32, 512] {
        let times = time(|| cpu.linear(&x, &matrix, n_rows, &mut out));
        let ops = 2.0 * (n_rows * n_out * k) as f64;
        if n_rows <= 4 {
            report(&format!("{dtype:?}, {n_rows} rows"), cpu.matrix_bytes(&matrix) as f64, "GB/s", times);
        }
        report(&format!("{dtype:?}, {n_rows} rows"), ops, "GOP/s", times);
    }
}

fn attention(cpu: &Cpu, n_slices: usize, n_rows: usize, start: usize) {
    let heads = AttentionHeads::whole(9, 3, 64, 0.125);
    let n_blocks = (start + n_rows).div_ceil(16);
    let kv = KvSpec { n_layers: 1, n_blocks: n_blocks * n_slices, layout: KvLayout::heads(3, 64), dtype: KvDtype::F16 };
    let kv = cpu.kv(kv).unwrap();
    let total = n_rows * n_slices;
    let mut batch = Batch { tokens: vec![0; total], ..Batch::default() };
    let mut table = BlockTables { blocks: Vec::new(), bounds: vec![0] };
    for i in 0..n_slices {
        let rows = (i * n_rows) as u32..((i + 1) * n_rows) as u32;
        batch.slices.push(PassSlice::new(rows, start as u32, Want::Nothing));
        table.blocks.extend((0..n_blocks).map(|block| BlockId((i * n_blocks + block) as u32)));
        table.bounds.push(table.blocks.len() as u32);
    }
    batch.tables.push(table);
    let mut qkv = cpu.buffer(total, heads.qkv_cols()).unwrap();
    let mut out = cpu.buffer(total, 576).unwrap();
    let times = time(|| {
        cpu.attend(
            &mut qkv,
            &kv,
            &AttentionCall { pass: &batch.pass(), heads: &heads, group: 0, layer: 0 },
            &ScoreTerms::NONE,
            &mut out,
        )
    });
    let positions: usize = (0..n_rows).map(|row| start + row + 1).sum::<usize>() * n_slices;
    let ops = (positions * 9 * 64 * 4) as f64;
    report(&format!("attention, {n_slices} x {n_rows} rows from {start}"), ops, "GFLOP/s", times);
}

fn main() {
    let mut args = std::env::args().skip(1);
    let named = |name: String| Isa::ALL.into_iter().find(|isa| isa.name() == name);
    let isa = args.next().map_or_else(Isa::detect, |name| named(name).expect("an instruction set"));
    let threads = args.next().map_or(2, |n| n.parse().unwrap());
    match args.next().as_deref() {
        None | Some("all") => all(isa, threads),
        Some("attention") => every_attention(&cpu(isa, threads, Activations::F32)),
        Some("small") => small_products(&cpu(isa, threads, Activations::Int8)),
        Some("few") => few_bits(&cpu(isa, threads, Activations::Int8)),
        Some(other) => panic!("unknown part {other}: set all, attention, small or few"),
    }
}

fn cpu(isa: Isa, threads: usize, activations: Activations) -> Cpu {
    Cpu::new(CpuConfig { threads, activations, isa, spin: true }).unwrap()
}

fn every_attention(cpu: &Cpu) {
    for (n_slices, n_rows, start) in [(1, 1, 500), (1, 1, 4096), (32, 1, 500), (1, 512, 0), (1, 512, 3584)] {
        attention(cpu, n_slices, n_rows, start);
    }
}

/// The shapes of a model of 135 million weights.
fn small_products(cpu: &Cpu) {
    for (n_out, k) in [(960, 576), (576, 576), (3072, 576), (576, 1536)] {
        linear(cpu, Dtype::Q4_1, n_out, k);
    }
    for dtype in [Dtype::Q4_0, Dtype::Q8_0, Dtype::Q4K, Dtype::Q6K, Dtype::BF16] {
        linear(cpu, dtype, 3072, 512);
    }
}

/// Types of at most four bits, beside each other, on as many rows as caches do not hold.
fn few_bits(cpu: &Cpu) {
    for dtype in [
        Dtype::Q4_0,
        Dtype::Q4K,
        Dtype::Q3K,
        Dtype::Q2K,
        Dtype::TQ2_0,
        Dtype::TQ1_0,
        Dtype::IQ4NL,
        Dtype::IQ4XS,
        Dtype::MXFP4,
        Dtype::IQ3S,
        Dtype::IQ3XXS,
        Dtype::IQ2XXS,
        Dtype::IQ1S,
        Dtype::Q8_0,
    ] {
        linear(cpu, dtype, 8 * 8960, 1536);
    }
}

fn all(isa: Isa, threads: usize) {
    let memory = vec![1u64; 64 << 20];
    for activations in [Activations::Int8, Activations::F32] {
        println!("== {isa:?}, {threads} threads, {activations:?}");
        let cpu = cpu(isa, threads, activations);
        let mut sum = 0;
        report("stream read", memory.len() as f64 * 8.0, "GB/s", time(|| sum ^= black_box(stream(&memory, threads))));
        let empty = cpu.buffer(4, 16).unwrap();
        let mut out = cpu.buffer(4, 16).unwrap();
        let norm = cpu.vector(&[1.0; 16]).unwrap();
        let small =
            time(|| (0..1000).for_each(|_| backend::Pointwise::rms_norm(&cpu, &empty, &norm, 1e-5, 4, &mut out)));
        println!("a dispatch of four rows: {:.2} us", small.1 * 1e3);
        linear(&cpu, Dtype::Q4_1, 16384, 8192);
        linear(&cpu, Dtype::Q8_0, 16384, 4096);
        for dtype in [Dtype::Q4_0, Dtype::Q4K, Dtype::Q5K, Dtype::Q6K, Dtype::Q2K] {
            linear(&cpu, dtype, 16384, 4096);
        }
        linear(&cpu, Dtype::Q4_1, 3072, 576);
        linear(&cpu, Dtype::Q8_0, 49152, 576);
        linear(&cpu, Dtype::BF16, 8192, 4096);
        if activations == Activations::F32 {
            linear(&cpu, Dtype::F32, 4096, 4096);
            every_attention(&cpu);
        }
    }
}
