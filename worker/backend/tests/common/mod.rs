//! Random tensors, and every way to compute on this machine.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use backend::cpu::{Buffer, Cpu, CpuConfig, Isa};
use backend::{Activations, Memory, Stored, StoredType};
use half::{bf16, f16};

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

    /// In [-1, 1).
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

pub const TYPES: [StoredType; 5] =
    [StoredType::F32, StoredType::F16, StoredType::BF16, StoredType::Q8_0, StoredType::Q4_1];

/// The bytes of a file, and what they stand for.
pub struct File {
    pub dtype: StoredType,
    pub rows: usize,
    pub k: usize,
    pub bytes: Vec<u8>,
    pub values: Vec<f32>,
}

impl File {
    pub fn random(rng: &mut Rng, dtype: StoredType, rows: usize, k: usize) -> File {
        let mut file = File { dtype, rows, k, bytes: Vec::new(), values: Vec::new() };
        for _ in 0..rows * k / dtype.block().0 {
            file.push_block(rng);
        }
        file
    }

    fn push_block(&mut self, rng: &mut Rng) {
        let x = rng.unit();
        match self.dtype {
            StoredType::F32 => self.push(&x.to_le_bytes(), &[x]),
            StoredType::F16 => self.push(&f16::from_f32(x).to_le_bytes(), &[f16::from_f32(x).to_f32()]),
            StoredType::BF16 => self.push(&bf16::from_f32(x).to_le_bytes(), &[bf16::from_f32(x).to_f32()]),
            StoredType::Q8_0 => {
                let scale = f16::from_f32(x / 100.0);
                let q: [u8; 32] = std::array::from_fn(|_| rng.next() as u8);
                let values = q.map(|q| scale.to_f32() * f32::from(q as i8));
                self.push(&[&scale.to_le_bytes()[..], &q].concat(), &values);
            }
            StoredType::Q4_1 => {
                let (scale, minimum) = (f16::from_f32(x / 10.0), f16::from_f32(rng.unit()));
                let q: [u8; 16] = std::array::from_fn(|_| rng.next() as u8);
                let value = |q: u8| scale.to_f32().mul_add(f32::from(q), minimum.to_f32());
                let values: Vec<f32> = q.iter().map(|q| value(q & 15)).chain(q.iter().map(|q| value(q >> 4))).collect();
                self.push(&[&scale.to_le_bytes()[..], &minimum.to_le_bytes(), &q].concat(), &values);
            }
        }
    }

    fn push(&mut self, bytes: &[u8], values: &[f32]) {
        self.bytes.extend(bytes);
        self.values.extend(values);
    }

    pub fn stored(&self) -> Stored<'_> {
        Stored::whole(self.dtype, self.rows, self.k, &self.bytes)
    }
}

pub fn cpu(isa: Isa, threads: usize, activations: Activations) -> Cpu {
    Cpu::new(CpuConfig { threads, activations, isa, spin: true }).unwrap()
}

/// The reference first.
pub fn cpus(activations: Activations) -> Vec<(String, Cpu)> {
    [(Isa::Plain, 1), (Isa::Plain, 2), (Isa::Avx2, 1), (Isa::Avx2, 3), (Isa::Avx512, 1), (Isa::Avx512, 2)]
        .into_iter()
        .filter(|(isa, _)| isa.is_supported())
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
