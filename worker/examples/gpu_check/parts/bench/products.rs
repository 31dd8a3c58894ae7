//! The products of a prefill, compared with cuBLASLt's largest on this device; and products of one row, compared with
//! copying speed.

use super::super::{Done, Finding, FindingSink, Options, cuda, modes};
use super::{Copies, ROUNDS, Shape, Spread, shares, text};
use crate::numbers::Rng;
use crate::on_device::shapes::wide;
use backend::cuda::{Buffer, Cuda, Matrix};
use backend::{Device, Linear, Memory, Pointwise, Weights};
use serde_json::json;
use types::{Dtype, NumericsMode};

/// Products in a row, so that the start of a product does not count.
const TIMES: usize = 10;
/// Aim under `fast`, as a fraction of the largest product's speed.
const AIM: f64 = 0.8;

/// A product ready to be run.
struct Product<'a> {
    cuda: &'a Cuda,
    w: Matrix,
    x: Buffer,
    out: Buffer,
    n_rows: usize,
}

impl Product<'_> {
    fn new(cuda: &Cuda, dtype: Dtype, [n_out, k, n_rows]: [usize; 3]) -> Result<Product<'_>, String> {
        let rng = &mut Rng(k as u64);
        let w = cuda.matrix(&[wide(rng, dtype, n_out, k).stored()]).map_err(text)?;
        let (mut raw, mut x) = (cuda.buffer(n_rows, k).map_err(text)?, cuda.buffer(n_rows, k).map_err(text)?);
        cuda.write(&mut raw, 0, &rng.floats(n_rows * k));
        let weight = cuda.vector(&vec![1.0; k]).map_err(text)?;
        // Normalised, so that the inputs are rounded as in a model.
        cuda.rms_norm(&raw, &weight, 1e-5, n_rows, &mut x);
        let mut product = Product { cuda, w, x, out: cuda.buffer(n_rows, n_out).map_err(text)?, n_rows };
        // The first call chooses an algorithm.
        product.seconds()?;
        Ok(product)
    }

    /// Returns the seconds of one product.
    fn seconds(&mut self) -> Result<f64, String> {
        let Product { cuda, w, x, out, n_rows } = self;
        let seconds = cuda.seconds(|| (0..TIMES).for_each(|_| cuda.linear(x, w, *n_rows, out)));
        cuda.take_failure().map_err(text)?;
        Ok(seconds.map_err(text)? / TIMES as f64)
    }
}

pub fn measure(options: &Options, report: FindingSink<'_>) -> Done {
    let (shape, (modes, lacking)) = (Shape::of(options), modes());
    if let Some(why) = lacking {
        report(Finding::not_run("products of a prefill under fast", &why));
    }
    let devices: Vec<(NumericsMode, Cuda)> =
        modes.into_iter().map(|mode| Ok((mode, cuda(options, mode)?))).collect::<Result<_, String>>()?;
    let Shape { hidden, inner, rows, .. } = shape;
    let products =
        [("Q, K and V", hidden + 2 * shape.kv(), hidden), ("gate and up", 2 * inner, hidden), ("down", hidden, inner)];
    for (name, n_out, k) in products {
        prefill(&devices, &shape, name, [n_out, k, rows], report)?;
    }
    let lockstep = devices.iter().find(|(mode, _)| *mode == NumericsMode::Lockstep).map(|(_, cuda)| cuda);
    lockstep.map_or(Ok(()), |cuda| of_one_row(options, cuda, &shape, report))
}

/// Measures one of the products in each mode and the largest product, in turns.
fn prefill(
    devices: &[(NumericsMode, Cuda)],
    shape: &Shape,
    name: &str,
    of: [usize; 3],
    report: FindingSink<'_>,
) -> Done {
    let operations = |[n_out, k, n_rows]: [usize; 3]| 2.0 * n_out as f64 * k as f64 * n_rows as f64;
    let largest = [shape.peak; 3];
    let fast = devices.iter().find(|(mode, _)| *mode == NumericsMode::Fast);
    let mut peak = fast.map(|(_, cuda)| Product::new(cuda, Dtype::BF16, largest)).transpose()?;
    let each = devices.iter().map(|(mode, cuda)| Ok((*mode, Product::new(cuda, Dtype::BF16, of)?)));
    let mut each = each.collect::<Result<Vec<_>, String>>()?;
    let (mut peaks, mut speeds) = (Vec::new(), vec![Vec::new(); each.len()]);
    for _ in 0..ROUNDS {
        if let Some(peak) = &mut peak {
            peaks.push(operations(largest) / peak.seconds()?);
        }
        for ((_, product), speeds) in each.iter_mut().zip(&mut speeds) {
            speeds.push(operations(of) / product.seconds()?);
        }
    }
    for ((mode, _), speeds) in each.iter().zip(speeds) {
        let of_peak = shares(&speeds, &peaks);
        let aim = if *mode == NumericsMode::Fast { AIM } else { 0.0 };
        let details = json!({
            "operations_per_second": Spread::of(speeds).to_json(),
            "largest_operations_per_second": Spread::of(peaks.clone()).to_json(),
            "of_the_largest": of_peak.to_json(),
            "shape": of,
            "aim": aim,
        });
        let name = format!("{}: {name} of {} rows", mode.name(), of[2]);
        report(Finding::aimed(name, of_peak.median(), aim, details));
    }
    Ok(())
}

/// Measures a product as large as the vocabulary's matrix, so that no cache holds it.
fn of_one_row(options: &Options, cuda: &Cuda, shape: &Shape, report: FindingSink<'_>) -> Done {
    let mut copies = Copies::new(options)?;
    for dtype in [Dtype::BF16, Dtype::Q8_0, Dtype::Q4_0] {
        let mut product = Product::new(cuda, dtype, [shape.vocab, shape.hidden, 1])?;
        let n_bytes = cuda.matrix_bytes(&product.w) as f64;
        let (mut speeds, mut copied) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            copied.push(copies.round()?);
            speeds.push(n_bytes / product.seconds()?);
        }
        let of_copy = shares(&speeds, &copied);
        let details = json!({ "bytes_per_second": Spread::of(speeds).to_json(), "of_copy": of_copy.to_json() });
        report(Finding::measured(format!("one row with {dtype:?}, {} x {}", shape.vocab, shape.hidden), details));
    }
    Ok(())
}
