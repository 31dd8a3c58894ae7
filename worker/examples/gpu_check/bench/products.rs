//! The products of a prefill, beside the largest that cuBLASLt makes on this device: operations a second.

use super::{BATCH_TOKENS_MAX, Shape, finding};
use crate::Finding;
use backend::cuda::Cuda;
use backend::{Device, Linear, Memory, Pointwise, Stored, StoredType};
use serde_json::{Value, json};
use std::path::Path;
use types::Pace;

/// In a row, so that beginning one does not count.
const TIMES: usize = 10;
const ROUNDS: usize = 5;

pub fn measure(shape: Shape, paces: &[Pace], cache: &Path) -> Result<Vec<Finding>, String> {
    let Shape { hidden, inner, kv, vocab, peak, .. } = shape;
    let products = [
        ("qkv", hidden + 2 * kv, hidden),
        ("gate and up", 2 * inner, hidden),
        ("down", hidden, inner),
        ("head", vocab, hidden),
    ];
    let mut findings = Vec::new();
    let mut peak_speed = None;
    // The library's first: its largest product is what all others are measured by.
    for pace in paces.iter().rev() {
        let cuda = crate::cuda(cache, *pace)?;
        if *pace == Pace::Fast {
            let speed = speed(&cuda, peak, peak, peak)?;
            peak_speed = Some(speed);
            findings.push(finding("the largest product", json!({ "operations_per_second": speed, "n": peak })));
        }
        let rows = BATCH_TOKENS_MAX as usize;
        let told = products.iter().map(|(name, n_out, k)| {
            let speed = speed(&cuda, *n_out, *k, rows)?;
            let of_peak = peak_speed.map(|peak| speed / peak);
            Ok(json!({ "product": name, "operations_per_second": speed, "of_the_largest": of_peak }))
        });
        let told: Result<Vec<Value>, String> = told.collect();
        findings.push(finding(&format!("{}: products of {rows} rows", pace.name()), Value::Array(told?)));
    }
    Ok(findings)
}

/// Operations a second of [n_rows, k] times [n_out, k] in bf16, the best of several rounds.
fn speed(cuda: &Cuda, n_out: usize, k: usize, n_rows: usize) -> Result<f64, String> {
    let text = |error: backend::Error| error.to_string();
    let bytes = random(n_out * k);
    let w = cuda.matrix(&[Stored::whole(StoredType::BF16, n_out, k, &bytes)]).map_err(text)?;
    let (mut raw, mut x) = (cuda.buffer(n_rows, k).map_err(text)?, cuda.buffer(n_rows, k).map_err(text)?);
    let mut out = cuda.buffer(n_rows, n_out).map_err(text)?;
    let row: Vec<f32> = (0..k).map(|i| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0).collect();
    (0..n_rows).for_each(|i| cuda.write(&mut raw, i, &row));
    let weight = cuda.vector(&vec![1.0; k]).map_err(text)?;
    // Rounded once, as what feeds a product is.
    cuda.rms_norm(&raw, &weight, 1e-5, n_rows, &mut x);
    // A way is looked for at the first.
    cuda.linear(&x, &w, n_rows, &mut out);
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let seconds = cuda.seconds(|| (0..TIMES).for_each(|_| cuda.linear(&x, &w, n_rows, &mut out)));
        best = best.min(seconds.map_err(text)?);
    }
    cuda.settle().map_err(text)?;
    Ok((2 * TIMES * n_rows) as f64 * n_out as f64 * k as f64 / best)
}

/// So many bf16 around 1/64, of either sign.
fn random(n: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (0x3c80 | state as u16 & 0x807f).to_le_bytes()
    };
    (0..n).flat_map(|_| next()).collect()
}
