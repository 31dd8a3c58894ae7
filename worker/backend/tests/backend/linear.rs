//! Products: every path gives the bits of the plain one, whatever else is in the batch and whichever rank owns a leaf.

use crate::numbers::{File, Rng, all, assert_bits, assert_close, cpu, cpus, filled, is_quantized, kinds};
use backend::cpu::{Cpu, Isa};
use backend::{Error, Linear, Memory, StoredMatrix, Weights};
use half::bf16;
use types::leaves::{aligned_runs, sum_runs};
use types::{Activations, DeviceClass, DigitBits, Dtype, GroupSize, GroupedDtype, Leaves, ScaleType};

const POLICIES: [Activations; 2] = [Activations::Int8, Activations::F32];

fn product(cpu: &Cpu, parts: &[&File], x: &[f32], n_rows: usize) -> Vec<f32> {
    let stored: Vec<StoredMatrix<'_>> = parts.iter().map(|part| part.stored()).collect();
    let matrix = cpu.matrix(&stored).unwrap();
    let n_out = parts.iter().map(|part| part.rows).sum();
    let mut out = cpu.buffer(n_rows, n_out).unwrap();
    cpu.linear(&filled(cpu, n_rows, x), &matrix, n_rows, &mut out);
    all(cpu, &out, n_rows)
}

/// A number as bf16 weights see it: the nearest bf16, and zero below 2^-55.
fn to_bf16(x: f32) -> f32 {
    if x.abs() < 2f32.powi(-55) { 0.0 } else { bf16::from_f32(x).to_f32() }
}

/// The activations as an int8 weight sees them: each block of 32 rounded to 127 steps of its largest magnitude.
fn rounded(x: &[f32]) -> Vec<f64> {
    let block = |block: &[f32]| {
        let largest = block.iter().fold(0f32, |m, x| m.max(x.abs()));
        let (d, inverse) = (largest / 127.0, if largest == 0.0 { 0.0 } else { 127.0 / largest });
        block.iter().map(|x| f64::from((x * inverse).round_ties_even()) * f64::from(d)).collect::<Vec<_>>()
    };
    x.chunks(32).flat_map(block).collect()
}

fn naive(parts: &[&File], x: &[f32], k: usize, activations: Activations) -> Vec<f64> {
    let mut out = Vec::new();
    for x in x.chunks(k) {
        for part in parts {
            let x = match activations {
                Activations::Int8 if is_quantized(part.dtype) => rounded(x),
                Activations::Int8 if part.dtype == Dtype::BF16 => x.iter().map(|x| f64::from(to_bf16(*x))).collect(),
                _ => x.iter().map(|x| f64::from(*x)).collect(),
            };
            let dot = |w: &[f32]| w.iter().zip(&x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
            out.extend(part.values.chunks(k).map(dot));
        }
    }
    out
}

#[test]
fn every_path_gives_the_bits_of_the_plain_one() {
    let mut rng = Rng(1);
    for activations in POLICIES {
        let cpus = cpus(activations);
        for (case, dtype) in Dtype::ALL.into_iter().cycle().take(90).enumerate() {
            let k = match dtype.block() {
                1 => 1 + rng.below(200),
                block => block * (1 + rng.below(288 / block + 1)),
            };
            let n_rows = 1 + rng.below(30);
            let n_out = 1 + rng.below(70);
            let file = File::random(&mut rng, dtype, n_out, k);
            let x = rng.floats(n_rows * k);
            let expected = product(&cpus[0].1, &[&file], &x, n_rows);
            let name = format!("case {case}: {dtype:?} {} x {k}, {n_rows} rows, {activations:?}", file.rows);
            assert_close(&name, &expected, &naive(&[&file], &x, k, activations), 1e-5 * k as f64);
            for (path, cpu) in &cpus[1..] {
                assert_bits(&format!("{name}, {path}"), &product(cpu, &[&file], &x, n_rows), &expected);
            }
        }
    }
}

/// Numbers for a product of bf16: each kind distinguishes its rules from similar ones.
#[derive(Clone, Copy, Debug)]
enum Numbers {
    Ordinary,
    /// Of all sizes at once: most of a sum is rounded away.
    Mixed,
    /// Such that many products would be subnormal, and some numbers are.
    Tiny,
    /// Such that some sums overflow.
    Huge,
    AnyBits,
}

impl Numbers {
    const ALL: [Numbers; 5] = [Numbers::Ordinary, Numbers::Mixed, Numbers::Tiny, Numbers::Huge, Numbers::AnyBits];

    fn draw(self, rng: &mut Rng) -> f32 {
        let mut sized = |least: i32, n: usize| rng.unit() * 2f32.powi(least + rng.below(n) as i32);
        match self {
            Numbers::Ordinary => rng.unit(),
            Numbers::Mixed => sized(-40, 80),
            Numbers::Tiny => sized(-75, 22) * 2f32.powi(-60 * (rng.below(9) == 0) as i32),
            Numbers::Huge => sized(50, 15),
            Numbers::AnyBits => f32::from_bits(rng.next() as u32),
        }
    }
}

/// Computes one product by the rules: the odd element of each pair first, each product added with one rounding.
fn of_pairs(w: &[f32], x: &[f32]) -> f32 {
    let at = |of: &[f32], k: usize| of.get(k).map_or(0.0, |x| to_bf16(*x));
    let add = |sum: f32, k: usize| at(w, k).mul_add(at(x, k), sum);
    (0..w.len()).step_by(2).fold(0.0, |sum, k| add(add(sum, k + 1), k))
}

/// The same in f32: one element after another, with unchanged activations.
fn in_order(w: &[f32], x: &[f32]) -> f32 {
    let at = |of: &[f32], k: usize| of.get(k).copied().unwrap_or(0.0);
    (0..w.len().next_multiple_of(2)).fold(0.0, |sum, k| to_bf16(at(w, k)).mul_add(at(x, k), sum))
}

#[test]
fn products_of_bf16_follow_the_letter() {
    let mut rng = Rng(6);
    for (case, numbers) in Numbers::ALL.into_iter().cycle().take(60).enumerate() {
        let (n_rows, n_out, k) = (1 + rng.below(14), 1 + rng.below(35), 1 + rng.below(150));
        let weights: Vec<f32> = (0..n_out * k).map(|_| bf16::from_f32(numbers.draw(&mut rng)).to_f32()).collect();
        let x: Vec<f32> = (0..n_rows * k).map(|_| numbers.draw(&mut rng)).collect();
        let bytes: Vec<u8> = weights.iter().flat_map(|w| bf16::from_f32(*w).to_le_bytes()).collect();
        let file = File { dtype: Dtype::BF16, rows: n_out, k, bytes, scales: None, values: weights };
        for (activations, sum) in
            [(Activations::Int8, of_pairs as fn(&[f32], &[f32]) -> f32), (Activations::F32, in_order)]
        {
            let row = |x: &[f32]| file.values.chunks(k).map(|w| sum(w, x)).collect::<Vec<f32>>();
            let expected: Vec<f32> = x.chunks(k).flat_map(row).collect();
            for (path, cpu) in cpus(activations) {
                let got = product(&cpu, &[&file], &x, n_rows);
                let name = format!("case {case}: {numbers:?}, {n_out} x {k}, {n_rows} rows, {activations:?}, {path}");
                // Any NaN counts as the same.
                let as_one = |y: &[f32]| y.iter().map(|y| if y.is_nan() { f32::NAN } else { *y }).collect::<Vec<f32>>();
                assert_bits(&name, &as_one(&got), &as_one(&expected));
                let is_kept = |y: &&f32| y.is_nan() || **y == 0.0 || y.abs() >= 2f32.powi(-124);
                assert!(activations == Activations::F32 || got.iter().all(|y| is_kept(&y)), "{name}: subnormal");
            }
        }
    }
}

#[test]
fn extreme_bytes_do_not_saturate() {
    let scales_at: [(Dtype, &[usize]); 6] = [
        (Dtype::Q8_0, &[0]),
        (Dtype::Q4_1, &[0, 2]),
        (Dtype::Q5_0, &[0]),
        (Dtype::Q5K, &[0, 2]),
        (Dtype::Q6K, &[208]),
        (Dtype::Q2K, &[80, 82]),
    ];
    for (dtype, scales) in scales_at {
        let (k, n_bytes) = (dtype.block(), dtype.block_bytes());
        for byte in [0u8, 0x7f, 0x80, 0x81, 0xff] {
            let mut bytes = vec![byte; n_bytes];
            for (at, value) in scales.iter().zip([half::f16::ONE, half::f16::NEG_ONE]) {
                bytes[*at..*at + 2].copy_from_slice(&value.to_le_bytes());
            }
            for sign in [1.0, -1.0] {
                let run = |cpu: &Cpu| {
                    let matrix = cpu.matrix(&[StoredMatrix::whole(dtype, 1, k, &bytes)]).unwrap();
                    let mut out = cpu.buffer(1, 1).unwrap();
                    cpu.linear(&filled(cpu, 1, &vec![sign; k]), &matrix, 1, &mut out);
                    all(cpu, &out, 1)
                };
                let cpus = cpus(Activations::Int8);
                let expected = run(&cpus[0].1);
                cpus.iter().for_each(|(path, cpu)| assert_bits(path, &run(cpu), &expected));
            }
        }
    }
}

#[test]
fn parts_of_different_types_stand_side_by_side() {
    let mut rng = Rng(2);
    let files = Dtype::ALL.map(|dtype| File::random(&mut rng, dtype, 5 + dtype.block_bytes() % 40, 256));
    let parts: Vec<&File> = files.iter().collect();
    let x = rng.floats(3 * 256);
    for activations in POLICIES {
        for (path, cpu) in cpus(activations) {
            let got = product(&cpu, &parts, &x, 3);
            assert_close(&path, &got, &naive(&parts, &x, 256, activations), 3e-3);
            let mut first_out = 0;
            let n_out: usize = parts.iter().map(|part| part.rows).sum();
            for part in &parts {
                let alone = product(&cpu, &[part], &x, 3);
                for row in 0..3 {
                    let columns = &got[row * n_out + first_out..][..part.rows];
                    assert_bits(&path, columns, &alone[row * part.rows..][..part.rows]);
                }
                first_out += part.rows;
            }
        }
    }
}

#[test]
fn a_row_does_not_know_its_neighbours() {
    let mut rng = Rng(3);
    for activations in POLICIES {
        for dtype in kinds() {
            let k = 96usize.next_multiple_of(dtype.block());
            let file = File::random(&mut rng, dtype, 37, k);
            let x = rng.floats(140 * k);
            for (path, cpu) in cpus(activations) {
                let alone: Vec<f32> = x.chunks(k).flat_map(|x| product(&cpu, &[&file], x, 1)).collect();
                for n_rows in (1..=27).chain([48, 67, 140]) {
                    let got = product(&cpu, &[&file], &x[..n_rows * k], n_rows);
                    assert_bits(&format!("{dtype:?} on {path}, {n_rows} rows"), &got, &alone[..n_rows * 37]);
                }
            }
        }
    }
}

/// The planes of a rank that owns some leaves: [n_runs][n_rows * n_out].
fn planes(cpu: &Cpu, file: &File, x: &[f32], leaves: &Leaves, owned: std::ops::Range<u32>) -> Vec<Vec<f32>> {
    let columns = leaves.elements(&owned);
    let columns = columns.start as usize..columns.end as usize;
    let n_rows = x.len() / file.k;
    let x: Vec<f32> = x.chunks(file.k).flat_map(|x| x[columns.clone()].to_vec()).collect();
    let n_runs = aligned_runs(owned.clone(), leaves.len() as u32).len();
    let matrix = cpu.matrix_leaves(file.stored().columns(columns.clone()).unwrap(), leaves, owned).unwrap();
    let mut input = cpu.buffer(n_rows, columns.len()).unwrap();
    if !x.is_empty() {
        cpu.write(&mut input, 0, &x);
    }
    let mut out = cpu.buffer(n_runs * n_rows, file.rows).unwrap();
    cpu.linear_runs(&input, &matrix, n_rows, &mut out);
    all(cpu, &out, n_runs * n_rows).chunks(n_rows * file.rows).map(<[f32]>::to_vec).collect()
}

#[test]
fn sum_is_independent_of_leaf_owners() {
    let mut rng = Rng(4);
    let heads = |n_heads, head_dim| Leaves::o_proj(DeviceClass::Cpu, n_heads, head_dim);
    let inner = |inner| Leaves::down_proj(DeviceClass::Cpu, inner);
    let mut cuts = vec![
        (heads(9, 64), Dtype::Q4_1),
        (heads(3, 80), Dtype::F16),
        (heads(3, 80), Dtype::BF16),
        (inner(1531), Dtype::BF16),
        (inner(1536), Dtype::Q8_0),
        (inner(32 * 43), Dtype::Q4_1),
    ];
    // Leaves of 96 columns, in blocks of 256.
    let blocks = [Dtype::Q2K, Dtype::Q3K, Dtype::Q4K, Dtype::Q5K, Dtype::Q6K];
    cuts.extend(blocks.map(|dtype| (inner(1536), dtype)));
    cuts.extend(blocks.map(|dtype| (heads(8, 96), dtype)));
    // Leaves of 96 columns cut groups of 128 too.
    let groups = [GroupSize::G64, GroupSize::G128].map(|size| {
        let grouped = GroupedDtype { digits: DigitBits::Four, scale: ScaleType::BF16, has_zeros: true, size };
        (heads(8, 96), Dtype::Grouped(grouped))
    });
    cuts.extend(groups);
    for (leaves, dtype) in &cuts {
        let dtype = *dtype;
        let total = leaves.len() as u32;
        let file = File::random(&mut rng, dtype, 19, leaves.k() as usize);
        for (n_rows, activations) in [5, 50].into_iter().flat_map(|n| POLICIES.map(|policy| (n, policy))) {
            let x = rng.floats(n_rows * file.k);
            let plain = cpu(Isa::Plain, 1, activations);
            let solo = planes(&plain, &file, &x, leaves, 0..total);
            assert_eq!(solo.len(), 1);
            assert_close("solo", &solo[0], &naive(&[&file], &x, file.k, activations), 1e-5 * file.k as f64);
            let fast = cpu(Isa::detect(), 2, activations);
            for [a, b] in [[0, total], [1, total], [total / 3, total / 2], [total / 2, total - 1], [0, 0]] {
                let mut runs = Vec::new();
                for owned in [0..a, a..b, b..total] {
                    let planes = planes(&fast, &file, &x, leaves, owned.clone());
                    runs.extend(aligned_runs(owned, total).into_iter().zip(planes));
                }
                let sum =
                    |i: usize| sum_runs(&runs.iter().map(|(run, plane)| (run.clone(), plane[i])).collect::<Vec<_>>());
                let got: Vec<f32> = (0..solo[0].len()).map(sum).collect();
                assert_bits(&format!("{dtype:?}, {total} leaves cut at {a} and {b}"), &got, &solo[0]);
            }
        }
    }
}

#[test]
fn a_run_of_rows_gives_its_columns_of_the_product() {
    let mut rng = Rng(5);
    let cpu = cpu(Isa::detect(), 2, Activations::Int8);
    for dtype in kinds() {
        let file = File::random(&mut rng, dtype, 37, 256);
        let x = rng.floats(3 * 256);
        let whole = product(&cpu, &[&file], &x, 3);
        for rows in [0..37, 0..1, 5..22, 36..37, 37..37, 9..9] {
            let stored = file.stored().rows(rows.clone()).unwrap();
            let matrix = cpu.matrix(&[stored]).unwrap();
            let mut out = cpu.buffer(3, rows.len()).unwrap();
            cpu.linear(&filled(&cpu, 3, &x), &matrix, 3, &mut out);
            let expected: Vec<f32> = whole.chunks(37).flat_map(|row| row[rows.clone()].to_vec()).collect();
            assert_bits(&format!("{dtype:?}, rows {rows:?}"), &all(&cpu, &out, 3), &expected);
        }
        assert!(file.stored().rows(5..38).is_err());
        let part = file.stored().columns(64..256).unwrap();
        assert_eq!(part.rows(3..7).unwrap().row(2), part.row(5));
        assert_eq!(part.rows(37..37).unwrap().rows, 0);
    }
}

#[test]
fn what_cannot_be_packed_is_refused() {
    let cpu = cpu(Isa::detect(), 2, Activations::Int8);
    let bytes = [0u8; 340];
    let pack = |dtype, rows, k| cpu.matrix(&[StoredMatrix::whole(dtype, rows, k, &bytes)]).map(|_| ());
    assert!(pack(Dtype::Q8_0, 10, 32).is_ok());
    assert!(matches!(pack(Dtype::Q8_0, 11, 32), Err(Error::Truncated { needed: 374, have: 340, .. })));
    assert!(matches!(pack(Dtype::Q8_0, 1, 33), Err(Error::Shape(_))));
    assert!(matches!(pack(Dtype::F32, 2, usize::MAX / 2), Err(Error::Shape(_) | Error::Truncated { .. })));
    let hostile = [(usize::MAX, 8), (usize::MAX / 2, 32), (1 << 40, 1 << 40), (8, usize::MAX & !31)];
    for (rows, k) in hostile {
        for dtype in Dtype::ALL {
            let stored = StoredMatrix { dtype, rows, k, first: 0, row_stride: 64, bytes: &bytes, scales: None };
            assert!(cpu.matrix(&[stored]).is_err(), "{dtype:?} {rows} x {k}");
        }
    }
    let (a, b) = (StoredMatrix::whole(Dtype::F32, 1, 8, &bytes), StoredMatrix::whole(Dtype::F32, 1, 9, &bytes));
    assert!(matches!(cpu.matrix(&[a, b]), Err(Error::Shape(_))));
    assert!(matches!(cpu.matrix_leaves(a, &Leaves::whole(8), 0..2), Err(Error::Shape(_))));
    assert!(matches!(cpu.matrix_leaves(a, &Leaves::whole(16), 0..1), Err(Error::Shape(_))));
    assert!(cpu.buffer(usize::MAX, 16).is_err() && cpu.buffer(1 << 50, 16).is_err());
}
