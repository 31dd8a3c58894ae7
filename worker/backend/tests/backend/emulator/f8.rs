//! E4M3 numbers around a library's products: rows are rounded to the nearest, weights widened exactly, and products
//! scaled afterwards.

use super::device::{Launch, Memory, ORDERS, UNWRITTEN, bf16_rows, rounded};
use super::linear::{Packed, eight_bits_of};
use crate::arguments;
use crate::numbers::{Rng, assert_bits};
use half::bf16;

/// The nearest E4M3 number; of two, the one whose last bit is zero.
fn nearest(x: f32) -> u8 {
    let distance = |bits: u8| (f64::from(eight_bits_of(bits)) - f64::from(x.abs())).abs();
    let better = |best: u8, bits: u8| {
        let is_nearer = distance(bits) < distance(best);
        if is_nearer || (distance(bits) == distance(best) && bits & 1 == 0) { bits } else { best }
    };
    (1..0x7f).fold(0, better) | if x.is_sign_negative() { 0x80 } else { 0 }
}

/// The contract: the scale and the numbers of a row.
fn quantized(row: &[f32]) -> (f32, Vec<u8>) {
    let most = row.iter().fold(0.0f32, |most, x| if x.is_finite() { most.max(x.abs()) } else { f32::INFINITY });
    if !most.is_finite() {
        return (f32::NAN, vec![0; row.len()]);
    }
    let largest = most.max(2f32.powi(-100));
    let factor = 448.0 / largest;
    (largest / 448.0, row.iter().map(|x| nearest((x * factor).clamp(-448.0, 448.0))).collect())
}

#[test]
fn rows_are_rounded_to_the_nearest() {
    let rng = &mut Rng(1);
    for (i, cols) in [32, 40, 1000, 2080].into_iter().enumerate() {
        let sizes = [1.0, 1e-3, 0.0, 1e-34, 2e38, 7.0];
        let mut x: Vec<f32> =
            sizes.iter().flat_map(|size| rng.floats(cols).into_iter().map(move |x| x * size)).collect();
        // Some numbers are much smaller than the rest of their row, so that all exponents occur.
        x.iter_mut().step_by(3).for_each(|x| *x *= 2f32.powi(-(rng.below(20) as i32)));
        x[5 * cols + 3] = f32::INFINITY;
        x.extend((0..cols).map(|i| if i + 1 == cols { f32::NAN } else { 1.0 }));
        // Halfway between two.
        x.extend(
            (0..cols).map(|i| {
                if i == 0 { 448.0 } else { [17.0, 19.0, -1.0625, 2f32.powi(-10), -3.0 * 2f32.powi(-10)][i % 5] }
            }),
        );
        let x: Vec<f32> = x.into_iter().map(rounded).collect();
        let (n_rows, padded) = (x.len() / cols, cols.next_multiple_of(32));
        let (rows, scales) = (Memory::of(&bf16_rows(&x, cols)), Memory::filled(n_rows, UNWRITTEN));
        let out = Memory::filled(n_rows * padded, 0xffu8);
        Launch { order: ORDERS[i % ORDERS.len()], ..Launch::new([n_rows, 1, 1], 256) }
            .ok("quantize_rows", arguments![rows.start(), (padded / 32) as u32, out.start(), scales.start()]);
        let (out, scales) = (out.read(), scales.read());
        for (row, x) in x.chunks(cols).enumerate() {
            let (scale, mut numbers) = quantized(x);
            numbers.resize(padded, 0);
            assert_eq!(out[row * padded..][..padded], numbers, "row {row} of {cols}");
            assert!(scales[row].to_bits() == scale.to_bits() || scales[row].is_nan() && scale.is_nan(), "row {row}");
        }
    }
}

#[test]
fn products_are_scaled_behind_the_library() {
    let rng = &mut Rng(2);
    for (i, (n_out, ld_out, n_groups, n_rows)) in
        [(16, 16, 1, 3), (48, 100, 5, 2), (2064, 2064, 2, 5)].into_iter().enumerate()
    {
        let (products, of_rows) = (rng.floats(n_rows * ld_out), rng.floats(n_rows));
        let scales = rng.floats(n_out / 16 * n_groups * 16);
        let (out, rows_at, scales_at) = (Memory::of(&products), Memory::of(&of_rows), Memory::of(&scales));
        let grid = [n_out.div_ceil(1024), n_rows, 1];
        let (ld, n) = (ld_out as u32, n_out as u32);
        Launch { order: ORDERS[i], ..Launch::new(grid, 256) }
            .ok("scale_product", arguments![out.start(), ld, n, scales_at.start(), n_groups as u32, rows_at.start()]);
        let of = |column: usize| scales[column / 16 * n_groups * 16 + column % 8 * 2 + column % 16 / 8];
        let expected = |(i, product): (usize, &f32)| match i % ld_out {
            column if column < n_out => product * of(column) * of_rows[i / ld_out],
            _ => *product,
        };
        let expected: Vec<f32> = products.iter().enumerate().map(expected).collect();
        assert_bits(&format!("{n_out} of {ld_out}"), &out.read(), &expected);
    }
}

#[test]
fn widened_weights_are_what_the_kernels_multiply() {
    for (i, (n_out, k)) in [(1, 32), (20, 96), (33, 1056)].into_iter().enumerate() {
        let w = Packed::random(&mut Rng(3), "f8plain", n_out, k);
        let out = Memory::filled(n_out * k, bf16::NAN.to_bits());
        Launch { order: ORDERS[i], ..Launch::new([n_out, 1, 1], 256) }
            .ok("widen_weights", arguments![w.digits.start(), w.scales.start(), (k / 32) as u32, out.start()]);
        assert_eq!(out.read(), bf16_rows(&w.weights, k), "{n_out} x {k}");
    }
}
