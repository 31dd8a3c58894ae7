//! Random tensors, and every way of computing on this machine.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use backend::cpu::{Buffer, Cpu, CpuConfig, Isa};
use backend::{Memory, Pointwise, StoredMatrix, Weights};
use half::{bf16, f16};
use types::{Activations, DigitBits, Dtype, GroupedDtype, ScaleType, Scales};

pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// A number in [-1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

/// Whether a weight of this type is multiplied by int8 activations, if the policy quantizes any.
pub fn is_quantized(dtype: Dtype) -> bool {
    dtype.block() > 1 && dtype != Dtype::F8E4M3
}

/// Every type; of groups one for each form of digits and heads, with a size of its own for each type of scales.
pub fn kinds() -> impl Iterator<Item = Dtype> {
    let is_one = |dtype: &Dtype| match dtype {
        Dtype::Grouped(grouped) => grouped.size as usize == grouped.scale as usize,
        _ => true,
    };
    Dtype::ALL.into_iter().filter(is_one)
}

/// The bytes of a file, and the numbers that they stand for.
pub struct File {
    pub dtype: Dtype,
    pub rows: usize,
    pub k: usize,
    pub bytes: Vec<u8>,
    /// Scales of E4M3 numbers: f32, and how many rows and columns share one.
    pub scales: Option<(Vec<u8>, [usize; 2])>,
    pub values: Vec<f32>,
}

impl File {
    /// The numbers are read back through an embedding, which `quants.rs` checks against another reader.
    pub fn random(rng: &mut Rng, dtype: Dtype, rows: usize, k: usize) -> File {
        let mut bytes = Vec::new();
        for _ in 0..rows * k / dtype.block() {
            bytes.extend(random_block(rng, dtype));
        }
        let block = [[1, k], [rows, k], [16, 64]][rng.below(3)];
        File::scaled(rng, dtype, [rows, k], bytes, block)
    }

    /// E4M3 numbers with a scale for each block of `block` rows and columns.
    pub fn in_eight_bits(rng: &mut Rng, rows: usize, k: usize, block: [usize; 2]) -> File {
        let bytes = (0..rows * k / 32).flat_map(|_| random_block(rng, Dtype::F8E4M3)).collect();
        File::scaled(rng, Dtype::F8E4M3, [rows, k], bytes, block)
    }

    fn scaled(rng: &mut Rng, dtype: Dtype, [rows, k]: [usize; 2], bytes: Vec<u8>, block: [usize; 2]) -> File {
        let scales = scales(rng, dtype, [rows, k], block);
        let mut file = File { dtype, rows, k, bytes, scales, values: Vec::new() };
        file.values = dequantized(&cpu(Isa::Plain, 1, Activations::F32), file.stored());
        file
    }

    pub fn stored(&self) -> StoredMatrix<'_> {
        let stored = StoredMatrix::whole(self.dtype, self.rows, self.k, &self.bytes);
        let Some((bytes, block)) = &self.scales else { return stored };
        let per_row = self.k.div_ceil(block[1]);
        stored.scaled(Scales { dtype: Dtype::F32, bytes, block: *block, per_row, first: [0, 0] })
    }
}

/// Scales for a matrix of E4M3 numbers.
pub fn scales(rng: &mut Rng, dtype: Dtype, [rows, k]: [usize; 2], block: [usize; 2]) -> Option<(Vec<u8>, [usize; 2])> {
    let n_scales = rows.div_ceil(block[0]) * k.div_ceil(block[1]);
    // The largest E4M3 number is 448.
    let scale = |_| ((0.5 + rng.unit().abs()) / 448.0).to_le_bytes();
    (dtype == Dtype::F8E4M3).then(|| ((0..n_scales).flat_map(scale).collect(), block))
}

pub fn random_block(rng: &mut Rng, dtype: Dtype) -> Vec<u8> {
    let x = rng.unit();
    match dtype {
        Dtype::F32 => return x.to_le_bytes().into(),
        Dtype::F16 => return f16::from_f32(x).to_le_bytes().into(),
        Dtype::BF16 => return bf16::from_f32(x).to_le_bytes().into(),
        _ => {}
    }
    if dtype == Dtype::F8E4M3 {
        return (0..32).map(|_| (rng.below(0x7f) | rng.below(2) << 7) as u8).collect();
    }
    if let Dtype::Grouped(grouped) = dtype {
        return random_group(rng, grouped);
    }
    let mut block: Vec<u8> = (0..dtype.block_bytes()).map(|_| rng.next() as u8).collect();
    // The offsets of its scale and its minimum, and a scale that makes numbers near one.
    let (scale_at, minimum_at, size) = match dtype {
        Dtype::Q4_0 | Dtype::Q5_0 => (0, None, 0.1),
        Dtype::Q4_1 | Dtype::Q5_1 => (0, Some((2, 1.0)), 0.1),
        Dtype::Q2K => (80, Some((82, 0.05)), 0.02),
        Dtype::Q3K => (108, None, 0.01),
        Dtype::Q4K | Dtype::Q5K => (0, Some((2, 0.01)), 0.001),
        Dtype::Q6K => (208, None, 0.0005),
        Dtype::IQ4XS => (0, None, 0.0003),
        Dtype::TQ1_0 => (52, None, 1.0),
        Dtype::TQ2_0 => (64, None, 1.0),
        Dtype::IQ1S => (0, None, 0.1),
        Dtype::IQ2XXS | Dtype::IQ2XS | Dtype::IQ2S => (0, None, 0.002),
        Dtype::IQ3XXS => (0, None, 0.001),
        Dtype::IQ3S => (0, None, 0.005),
        Dtype::MXFP4 => {
            block[0] = 118 + rng.below(8) as u8;
            return block;
        }
        Dtype::IQ1M => {
            // The upper four bits of four words are the scale.
            let d = f16::from_f32(x * 0.1).to_bits();
            for (i, word) in block[48..].as_chunks_mut::<2>().0.iter_mut().enumerate() {
                word[1] = word[1] & 15 | (d >> (4 * i) << 4) as u8;
            }
            return block;
        }
        _ => (0, None, 0.01),
    };
    let mut put = |at: usize, x: f32| block[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
    put(scale_at, x * size);
    if let Some((at, size)) = minimum_at {
        put(at, rng.unit() * size);
    }
    block
}

/// A scale that makes numbers near one, any whole zero, any digits.
fn random_group(rng: &mut Rng, grouped: GroupedDtype) -> Vec<u8> {
    let n = 1usize << grouped.digits.bits();
    let scale = rng.unit() * if grouped.digits == DigitBits::Four { 0.1 } else { 0.006 };
    let mut block = match grouped.scale {
        ScaleType::F16 => f16::from_f32(scale).to_le_bytes().to_vec(),
        ScaleType::BF16 => bf16::from_f32(scale).to_le_bytes().to_vec(),
        ScaleType::F32 => scale.to_le_bytes().to_vec(),
    };
    if grouped.has_zeros {
        block.extend(f16::from_f32(rng.below(n + 1) as f32).to_le_bytes());
    }
    block.extend((block.len()..grouped.block_bytes()).map(|_| rng.next() as u8));
    block
}

/// All numbers of a matrix, as an embedding reads them.
pub fn dequantized(cpu: &Cpu, stored: StoredMatrix<'_>) -> Vec<f32> {
    let table = cpu.matrix(&[stored]).unwrap();
    let mut out = cpu.buffer(stored.rows, stored.k).unwrap();
    let rows: Vec<u32> = (0..stored.rows as u32).collect();
    cpu.embed(&table, 0, &rows, &mut out);
    all(cpu, &out, stored.rows)
}

pub fn cpu(isa: Isa, threads: usize, activations: Activations) -> Cpu {
    Cpu::new(CpuConfig { threads, activations, isa, spin: true }).unwrap()
}

/// Every instruction set with several thread counts; the reference first.
pub fn cpus(activations: Activations) -> Vec<(String, Cpu)> {
    let threads = [
        (Isa::Plain, [1, 2]),
        (Isa::Avx2, [1, 3]),
        (Isa::Avx512, [1, 2]),
        (Isa::Avx512Bf16, [1, 2]),
        (Isa::Amx, [1, 2]),
    ];
    let ways = threads.into_iter().flat_map(|(isa, threads)| threads.map(|threads| (isa, threads)));
    ways.filter(|(isa, _)| isa.is_supported())
        .map(|(isa, threads)| (format!("{isa:?} on {threads}"), cpu(isa, threads, activations)))
        .collect()
}

pub fn filled(cpu: &Cpu, rows: usize, values: &[f32]) -> Buffer {
    let mut buffer = cpu.buffer(rows, values.len() / rows.max(1)).unwrap();
    if !values.is_empty() {
        cpu.write(&mut buffer, 0, values);
    }
    buffer
}

pub fn all(cpu: &Cpu, buffer: &Buffer, n_rows: usize) -> Vec<f32> {
    let mut out = vec![0.0; n_rows * buffer.cols()];
    cpu.read(buffer, 0..n_rows, &mut out);
    out
}

pub fn assert_bits(name: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{name}");
    let differs = got.iter().zip(expected).position(|(got, expected)| got.to_bits() != expected.to_bits());
    if let Some(i) = differs {
        panic!("{name}: element {i} is {} and should be {}", got[i], expected[i]);
    }
}

pub fn assert_close(name: &str, got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{name}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(*got) - expected).abs();
        assert!(error <= tolerance, "{name}: element {i} is {got} and should be {expected}");
    }
}
