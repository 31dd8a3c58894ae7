//! What references are made of. The CPU's functions, written once more, as the backend keeps its own to itself:
//! `attention.rs` sees through them; that they are the CPU's is held by `pointwise.rs`, whose gates go through the same
//! kernels' functions. And the sums of tensor cores.

/// The order in which the emulator adds the sixteen products of a step.
pub const STEP: [usize; 16] = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15];

/// On the tensor cores: one accumulator, and sixteen elements a step, ascending.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sum = 0.0f32;
    for (a, b) in a.chunks(STEP.len()).zip(b.chunks(STEP.len())) {
        STEP.into_iter().filter(|i| *i < a.len()).for_each(|i| sum += a[i] * b[i]);
    }
    sum
}

/// e^x
pub fn exp(x: f32) -> f32 {
    let x = (if -104.0 > x { -104.0 } else { x }).min(89.0);
    let n = (x * std::f32::consts::LOG2_E).round_ties_even();
    let r = n.mul_add(-0.693_359_4, x);
    let r = n.mul_add(2.121_944_4e-4, r);
    let of = [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    let p = of.into_iter().fold(1.987_569_1e-4f32, |p, c| p.mul_add(r, c));
    let p = p.mul_add(r * r, r) + 1.0;
    let half = (n * 0.5).round_ties_even();
    let pow2 = |n: f32| f32::from_bits(((n as i32 + 127) as u32) << 23);
    p * pow2(half) * pow2(n - half)
}

/// cap * tanh(x / cap)
pub fn soft_cap(x: f32, cap: f32) -> f32 {
    let x = x / cap;
    let z = x * x;
    let of = [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1];
    let p = of.into_iter().fold(-5.704_988_7e-3f32, |p, c| p.mul_add(z, c));
    let small = (p * z).mul_add(x, x);
    let large = 1.0 - 2.0 / (exp(x.abs() + x.abs()) + 1.0);
    let large = if x < 0.0 { 0.0 - large } else { large };
    cap * if x.abs() < 0.625 { small } else { large }
}
