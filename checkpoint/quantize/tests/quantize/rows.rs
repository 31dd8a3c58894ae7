//! Rows of every type: bits of the format, the error on normal numbers beside llama.cpp's, and numbers at the edges.

use quantize::{EncodeError, can_decode, decode_row, encode_row};
use types::Dtype;

const ENCODED: [Dtype; 14] = [
    Dtype::F32,
    Dtype::F16,
    Dtype::BF16,
    Dtype::Q8_0,
    Dtype::Q4_0,
    Dtype::Q4_1,
    Dtype::Q5_0,
    Dtype::Q5_1,
    Dtype::IQ4NL,
    Dtype::Q2K,
    Dtype::Q3K,
    Dtype::Q4K,
    Dtype::Q5K,
    Dtype::Q6K,
];

/// Numbers between zero and one, the same on every machine.
fn uniform(seed: u64) -> impl FnMut() -> f64 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f64 + 0.5) / f64::from(1u32 << 24)
    }
}

fn normal(n: usize, seed: u64) -> Vec<f32> {
    let mut uniform = uniform(seed);
    (0..n).map(|_| ((-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32).collect()
}

fn laplace(n: usize, seed: u64) -> Vec<f32> {
    let mut uniform = uniform(seed);
    let mut sign = || if uniform() < 0.5 { -1.0 } else { 1.0 };
    let signs: Vec<f64> = (0..n).map(|_| sign()).collect();
    signs.into_iter().map(|sign| (sign * uniform().ln() * 0.5f64.sqrt()) as f32).collect()
}

fn round_trip(dtype: Dtype, row: &[f32], importance: Option<&[f32]>) -> Vec<f32> {
    let mut bytes = vec![0; dtype.row_bytes(row.len())];
    encode_row(dtype, row, importance, &mut bytes).unwrap();
    let mut numbers = vec![f32::NAN; row.len()];
    decode_row(dtype, &bytes, &mut numbers);
    numbers
}

fn mean_square(row: &[f32], other: &[f32]) -> f64 {
    row.iter().zip(other).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / row.len() as f64
}

/// The same file shows that `backend` reads these numbers.
#[test]
fn decoders_read_what_the_package_gguf_reads() {
    const N: usize = 512;
    const WRITTEN: [Dtype; 15] = [
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
    ];
    let file = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/reference/quants.bin")).unwrap();
    let mut rest = &file[..];
    for dtype in WRITTEN {
        let (bytes, after) = rest.split_at(dtype.row_bytes(N));
        let (numbers, after) = after.split_at(4 * N);
        rest = after;
        let mut got = vec![f32::NAN; N];
        decode_row(dtype, bytes, &mut got);
        for (i, (got, expected)) in got.iter().zip(numbers.as_chunks::<4>().0).enumerate() {
            let expected = f32::from_le_bytes(*expected);
            assert!(*got == expected, "{dtype:?}, number {i}: {got} is not {expected}");
        }
    }
    let of_runs = [Dtype::IQ1S, Dtype::IQ1M, Dtype::IQ2XXS, Dtype::IQ2XS, Dtype::IQ2S, Dtype::IQ3XXS, Dtype::IQ3S];
    assert!(of_runs.iter().all(|dtype| !can_decode(*dtype)), "types that only `backend` reads");
    assert_eq!(rest.len(), of_runs.iter().map(|dtype| dtype.row_bytes(N) + 4 * N).sum::<usize>());
}

/// The mean squared errors of llama.cpp's `quantize_*` functions on a million numbers with the variance one: of a
/// normal distribution, and of Laplace's, which has more large numbers.
const MEAN_SQUARES: [(Dtype, [f64; 2]); 11] = [
    (Dtype::Q8_0, [2.8545e-5, 4.5322e-5]),
    (Dtype::Q4_0, [7.3684e-3, 1.1442e-2]),
    (Dtype::Q4_1, [6.1079e-3, 8.4017e-3]),
    (Dtype::Q5_0, [1.8172e-3, 2.8545e-3]),
    (Dtype::Q5_1, [1.4307e-3, 1.9718e-3]),
    (Dtype::IQ4NL, [5.7907e-3, 7.7383e-3]),
    (Dtype::Q2K, [8.7770e-2, 1.1814e-1]),
    (Dtype::Q3K, [2.2739e-2, 3.1048e-2]),
    (Dtype::Q4K, [5.0835e-3, 7.1537e-3]),
    (Dtype::Q5K, [1.3020e-3, 1.8320e-3]),
    (Dtype::Q6K, [3.1390e-4, 4.6972e-4]),
];

#[test]
fn errors_are_at_most_those_of_llama_cpp() {
    let rows = [normal(1 << 18, 3), laplace(1 << 18, 6)];
    for (dtype, references) in MEAN_SQUARES {
        let ratios: Vec<f64> = rows
            .iter()
            .zip(references)
            .map(|(row, reference)| mean_square(row, &round_trip(dtype, row, None)) / reference)
            .collect();
        println!("{}: {ratios:.3?} of llama.cpp's error", dtype.name());
        assert!(ratios.iter().all(|ratio| *ratio <= 1.02), "{dtype:?}: {ratios:?}");
    }
}

#[test]
fn zeros_are_zeros() {
    for dtype in ENCODED {
        assert!(round_trip(dtype, &[0.0; 512], None).iter().all(|number| *number == 0.0), "{dtype:?}");
        // Too small for a scale of 16 bits, and for a sum of squares in 32.
        assert!(round_trip(dtype, &[1e-30; 512], None).iter().all(|number| number.abs() <= 1e-30), "{dtype:?}");
    }
}

#[test]
fn one_large_number_stays_and_leaves_zeros() {
    for dtype in ENCODED {
        for large in [3000.0, -3000.0] {
            let mut row = [0.0; 512];
            row[300] = large;
            let got = round_trip(dtype, &row, None);
            assert!((got[300] - large).abs() <= 0.01 * large.abs(), "{dtype:?}: {} of {large}", got[300]);
            let others = got.iter().enumerate().filter(|(i, _)| *i != 300);
            let furthest = others.map(|(_, number)| number.abs()).fold(0.0, f32::max);
            // IQ4_NL has no zero: its least is 1 of 127. With a minimum, zero is a sum of two rounded numbers.
            let limit = match dtype {
                Dtype::IQ4NL => large.abs() / 100.0,
                Dtype::Q4_1 | Dtype::Q5_1 | Dtype::Q2K | Dtype::Q4K | Dtype::Q5K => large.abs() / 1000.0,
                _ => 0.0,
            };
            assert!(furthest <= limit, "{dtype:?}: {furthest} beside {large}");
        }
    }
}

#[test]
fn equal_numbers_stay_equal() {
    for dtype in ENCODED {
        for number in [0.125, -0.125] {
            let got = round_trip(dtype, &[number; 256], None);
            assert!(got.iter().all(|got| (got - number).abs() <= 0.01 * number.abs()), "{dtype:?}: {got:?}");
        }
    }
}

#[test]
fn what_has_no_blocks_is_refused() {
    let error = |dtype: Dtype, row: &[f32]| {
        let mut bytes = vec![0; dtype.row_bytes(row.len())];
        encode_row(dtype, row, None, &mut bytes).unwrap_err()
    };
    for dtype in ENCODED {
        for number in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut row = [1.0; 512];
            row[257] = number;
            let refused = error(dtype, &row);
            assert!(matches!(refused, EncodeError::NotFinite { column: 257, .. }), "{dtype:?}: {refused}");
        }
    }
    for dtype in ENCODED.into_iter().filter(|dtype| !matches!(dtype, Dtype::F32 | Dtype::BF16)) {
        for large in [1e9, 3e38] {
            let mut row = [1.0; 512];
            row[257] = large;
            let refused = error(dtype, &row);
            let expected = if dtype.block() == 1 { 257 } else { 256 };
            let is_right = matches!(refused, EncodeError::TooLarge { column, dtype: of } if of == dtype
                && (column == expected || column == 257));
            assert!(is_right, "{dtype:?}: {refused}");
        }
    }
    assert_eq!(error(Dtype::IQ4XS, &[1.0; 256]), EncodeError::NoEncoder { dtype: Dtype::IQ4XS });
}

/// A column that counts a hundred times as much gets a smaller error.
#[test]
fn important_columns_are_closer() {
    let row = normal(1 << 14, 4);
    let importance: Vec<f32> = (0..row.len()).map(|i| if i % 8 == 0 { 100.0 } else { 1.0 }).collect();
    let error_of = |numbers: &[f32]| {
        let pick = |all: &[f32]| all.iter().step_by(8).copied().collect::<Vec<f32>>();
        mean_square(&pick(&row), &pick(numbers))
    };
    for dtype in ENCODED.into_iter().filter(|dtype| dtype.block() > 1 && *dtype != Dtype::Q8_0) {
        let (with, without) = (round_trip(dtype, &row, Some(&importance)), round_trip(dtype, &row, None));
        assert!(error_of(&with) < 0.8 * error_of(&without), "{dtype:?}");
    }
}

/// Numbers that a block can hold exactly come back as they were, or almost.
#[test]
fn a_second_round_changes_little() {
    let row = normal(1 << 14, 5);
    for dtype in ENCODED {
        let once = round_trip(dtype, &row, None);
        let twice = round_trip(dtype, &once, None);
        let (first, second) = (mean_square(&row, &once), mean_square(&once, &twice));
        assert!(second <= 0.25 * first, "{dtype:?}: {second:.3e} after {first:.3e}");
    }
}
