//! Every quantized type: the numbers of a packed block are the file's, bit for bit, wherever its columns are cut.

use crate::numbers::{File, Rng, assert_bits, cpus, dequantized};
use backend::{StoredMatrix, Weights};
use half::{bf16, f16};
use types::{Activations, DigitBits, Dtype, GroupedDtype, ScaleType, Scales};

const N: usize = 512;

/// The types in the order of the file that `make_quants.py` wrote.
const WRITTEN: [Dtype; 22] = [
    Dtype::Q4_0,
    Dtype::Q4_1,
    Dtype::Q5_0,
    Dtype::Q5_1,
    Dtype::Q8_0,
    Dtype::Q2K,
    Dtype::Q3K,
    Dtype::Q4K,
    Dtype::Q5K,
    Dtype::Q6K,
    Dtype::IQ4NL,
    Dtype::MXFP4,
    Dtype::IQ4XS,
    Dtype::TQ1_0,
    Dtype::TQ2_0,
    Dtype::IQ1S,
    Dtype::IQ1M,
    Dtype::IQ2XXS,
    Dtype::IQ2XS,
    Dtype::IQ2S,
    Dtype::IQ3XXS,
    Dtype::IQ3S,
];

/// Adding zero removes the sign of a zero.
fn without_signs_of_zero(numbers: impl IntoIterator<Item = f32>) -> Vec<f32> {
    numbers.into_iter().map(|number| number + 0.0).collect()
}

#[test]
fn a_packed_number_is_the_files() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/quants.bin");
    let file = std::fs::read(path).unwrap();
    let mut rest = &file[..];
    for dtype in WRITTEN {
        let (bytes, after) = rest.split_at(dtype.row_bytes(N));
        let (numbers, after) = after.split_at(4 * N);
        rest = after;
        let expected = without_signs_of_zero(numbers.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        for (path, cpu) in cpus(Activations::Int8) {
            let got = without_signs_of_zero(dequantized(&cpu, StoredMatrix::whole(dtype, 1, N, bytes)));
            assert_bits(&format!("{dtype:?}, {path}"), &got, &expected);
        }
    }
    assert!(rest.is_empty());
}

/// The numbers of a group by the letter of `types/src/grouped.rs`.
fn group(grouped: GroupedDtype, block: &[u8]) -> Vec<f32> {
    let two = |at: usize| [block[at], block[at + 1]];
    let scale = match grouped.scale {
        ScaleType::F16 => f16::from_le_bytes(two(0)).to_f32(),
        ScaleType::BF16 => bf16::from_le_bytes(two(0)).to_f32(),
        ScaleType::F32 => f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
    };
    let (head, middle) = (grouped.head_bytes(), f32::from(grouped.digits.middle()));
    let zero = if grouped.has_zeros { f16::from_le_bytes(two(head - 2)).to_f32() } else { middle };
    let digit = |i: usize| match grouped.digits {
        DigitBits::Eight => block[head + i],
        DigitBits::Four if i % 32 < 16 => block[head + i / 32 * 16 + i % 16] & 15,
        DigitBits::Four => block[head + i / 32 * 16 + i % 16] >> 4,
    };
    (0..grouped.size.n()).map(|i| scale * (f32::from(digit(i)) - zero)).collect()
}

#[test]
fn a_number_of_a_group_is_its_scale_times_its_distance_from_zero() {
    let mut rng = Rng(9);
    for grouped in GroupedDtype::ALL {
        let file = File::random(&mut rng, Dtype::Grouped(grouped), 18, 256);
        let numbers = file.bytes.chunks(grouped.block_bytes()).flat_map(|block| group(grouped, block));
        let expected = without_signs_of_zero(numbers);
        for (path, cpu) in cpus(Activations::Int8) {
            let got = without_signs_of_zero(dequantized(&cpu, file.stored()));
            assert_bits(&format!("{}, {path}", grouped.name()), &got, &expected);
        }
    }
}

/// A matrix takes as many bytes in memory as its blocks.
#[test]
fn a_groups_number_keeps_its_bits() {
    let cpu = &cpus(Activations::Int8)[0].1;
    let mut rng = Rng(10);
    for grouped in GroupedDtype::ALL {
        let file = File::random(&mut rng, Dtype::Grouped(grouped), 64, 512);
        let matrix = cpu.matrix(&[file.stored()]).unwrap();
        assert_eq!(cpu.matrix_bytes(&matrix), file.bytes.len(), "{}", grouped.name());
    }
}

#[test]
fn columns_may_be_cut_inside_a_block() {
    let mut rng = Rng(6);
    for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.block() > 1) {
        let file = File::random(&mut rng, dtype, 21, 768);
        for (path, cpu) in cpus(Activations::Int8) {
            for columns in [0..32, 32..768, 96..352, 224..288, 256..512, 736..768, 288..320] {
                let cut = file.stored().columns(columns.clone()).unwrap();
                let rows = file.values.chunks(768);
                let expected: Vec<f32> = rows.flat_map(|row| row[columns.clone()].to_vec()).collect();
                assert_bits(&format!("{dtype:?}, {columns:?}, {path}"), &dequantized(&cpu, cut), &expected);
            }
        }
        let twice = file.stored().columns(96..768).unwrap().columns(192..480).unwrap();
        let once = file.stored().columns(288..576).unwrap();
        assert_eq!((twice.first, twice.k, twice.row(20)), (once.first, once.k, once.row(20)));
        assert!(file.stored().columns(16..64).is_err() && file.stored().columns(0..800).is_err());
        assert!(file.stored().columns(768..768).unwrap().k == 0);
    }
}

#[test]
fn a_bf16_is_read_back_unless_it_is_below_the_least() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let bytes: Vec<u8> = all.iter().flat_map(|bits| bits.to_le_bytes()).collect();
    for (path, cpu) in cpus(Activations::Int8) {
        let got = dequantized(&cpu, StoredMatrix::whole(Dtype::BF16, 1, all.len(), &bytes));
        for (bits, got) in all.iter().zip(got) {
            let number = f32::from_bits(u32::from(*bits) << 16);
            let expected = if number.abs() < 2f32.powi(-55) { 0.0 } else { number };
            let is_right = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
            assert!(is_right, "{path}: {number:e} is read as {got:e}");
        }
    }
}

/// The formula of E4M3: a sign, four bits of exponent, three of fraction, and one NaN.
fn eight_bits(bits: u8) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let size = match exponent {
        0 => fraction / 8.0 * 2f32.powi(-6),
        _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
    };
    let size = if bits & 0x7f == 0x7f { f32::NAN } else { size };
    if bits & 0x80 == 0 { size } else { -size }
}

#[test]
fn all_eight_bit_floats_match_the_format() {
    let all: Vec<u8> = (0..=255).filter(|bits| bits & 0x7f != 0x7f).chain([0, 0]).collect();
    assert_eq!((eight_bits(0x7e), eight_bits(0x08), eight_bits(0x81)), (448.0, 2f32.powi(-6), -2f32.powi(-9)));
    let expected: Vec<f32> = all.iter().map(|bits| eight_bits(*bits)).collect();
    for (path, cpu) in cpus(Activations::Int8) {
        assert_bits(&path, &dequantized(&cpu, StoredMatrix::whole(Dtype::F8E4M3, 1, 256, &all)), &expected);
        let mut one_is_none = all.clone();
        one_is_none[40] = 0xff;
        let got = dequantized(&cpu, StoredMatrix::whole(Dtype::F8E4M3, 1, 256, &one_is_none));
        assert!(got[32..64].iter().all(|x| x.is_nan()), "{path}: a NaN scale makes all weights NaN");
        assert_bits(&path, &got[64..], &expected[64..]);
    }
}

#[test]
fn scales_are_found_wherever_a_matrix_is_cut() {
    let (rows, k) = (150usize, 320usize);
    let bytes: Vec<u8> = (0..rows * k).map(|i| (i * 7 % 0x7f) as u8).collect();
    let scales: Vec<f32> = (0..100 * k).map(|i| 1.0 + i as f32 / 64.0).collect();
    for block in [[rows, k], [1, k], [128, 128], [64, 96], [7, 32]] {
        let per_row = k.div_ceil(block[1]);
        let of = |row: usize, column: usize| scales[row / block[0] * per_row + column / block[1]];
        let number = |row: usize, column: usize| eight_bits(bytes[row * k + column]) * of(row, column);
        let of_bytes = bytemuck::cast_slice(&scales);
        let beside = Scales { dtype: Dtype::F32, bytes: of_bytes, block, per_row, first: [0, 0] };
        let whole = StoredMatrix::whole(Dtype::F8E4M3, rows, k, &bytes).scaled(beside);
        for (path, cpu) in cpus(Activations::F32) {
            for (r, c) in [(0..rows, 0..k), (13..150, 0..k), (0..rows, 96..k), (127..129, 96..192), (20..90, 288..320)]
            {
                let cut = whole.rows(r.clone()).unwrap().columns(c.clone()).unwrap();
                let expected: Vec<f32> = r
                    .clone()
                    .flat_map(|row| c.clone().map(move |at| (row, at)))
                    .map(|(row, at)| number(row, at))
                    .collect();
                assert_bits(&format!("{block:?}, {r:?} x {c:?}, {path}"), &dequantized(&cpu, cut), &expected);
            }
        }
        let cpu = &cpus(Activations::F32)[0].1;
        let n_scales = rows.div_ceil(block[0]) * per_row;
        let with = |bytes| StoredMatrix { scales: Some(Scales { bytes, ..beside }), ..whole };
        assert!(cpu.matrix(&[with(&of_bytes[..4 * n_scales])]).is_ok());
        assert!(cpu.matrix(&[with(&of_bytes[..4 * n_scales - 1])]).is_err(), "{block:?} with one scale too few");
        let odd = Scales { block: [1, 48], per_row: 7, ..beside };
        assert!(cpu.matrix(&[StoredMatrix { scales: Some(odd), ..whole }]).is_err());
        let none = Scales { block: [0, 0], ..beside };
        assert!(cpu.matrix(&[StoredMatrix { scales: Some(none), ..whole }]).is_err());
    }
}
