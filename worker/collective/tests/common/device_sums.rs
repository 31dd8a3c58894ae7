//! Sums by ranks that each have a device, and the expected results.
#![allow(dead_code, reason = "each test uses its part")]

use crate::common::Rng;
use backend::Memory;
use backend::cuda::{Buffer, Cuda};
use collective::{Error, Ranks};
use types::leaves::{aligned_runs, sum_runs};

pub const HIDDEN: usize = 80;

pub fn filled(cuda: &Cuda, n_rows: usize, n_cols: usize, values: &[f32]) -> Buffer {
    let mut buffer = cuda.buffer(n_rows.max(1), n_cols).unwrap();
    if n_cols > 0 && !values.is_empty() {
        cuda.write(&mut buffer, 0, values);
    }
    buffer
}

pub fn bits(cuda: &Cuda, buffer: &Buffer, n_rows: usize, n_cols: usize) -> Vec<u32> {
    let mut values = vec![0.0; n_rows * n_cols];
    cuda.read(buffer, 0..n_rows, &mut values);
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns random leaves of [n_rows * n_cols] numbers each.
pub fn leaves(n_leaves: u32, n_rows: usize) -> Vec<Vec<f32>> {
    let mut rng = Rng(u64::from(n_leaves) * 100 + n_rows as u64);
    (0..n_leaves).map(|_| rng.floats(n_rows * HIDDEN)).collect()
}

fn sum_of(leaves: &[Vec<f32>], run: std::ops::Range<u32>) -> Vec<f32> {
    let leaf = |i: u32, at: usize| (i - run.start..i - run.start + 1, leaves[i as usize][at]);
    (0..leaves[0].len()).map(|at| sum_runs(&run.clone().map(|i| leaf(i, at)).collect::<Vec<_>>())).collect()
}

pub fn sum(rank: &mut Ranks<Cuda>, cuda: &Cuda, n_leaves: u32, n_rows: usize) -> Result<Vec<u32>, Error> {
    let n_runs = aligned_runs(rank.owned_units(n_leaves), n_leaves).len();
    sum_in(&mut filled(cuda, n_runs.max(1) * n_rows, HIDDEN, &[]), rank, cuda, n_leaves, n_rows)
}

/// Sums in a buffer with room for the planes. Ranks that share a device allocate their buffers beforehand and keep
/// them.
pub fn sum_in(
    buffer: &mut Buffer,
    rank: &mut Ranks<Cuda>,
    cuda: &Cuda,
    n_leaves: u32,
    n_rows: usize,
) -> Result<Vec<u32>, Error> {
    let leaves = leaves(n_leaves, n_rows);
    let runs = aligned_runs(rank.owned_units(n_leaves), n_leaves);
    let planes: Vec<f32> = runs.iter().flat_map(|run| sum_of(&leaves, run.clone())).collect();
    if !planes.is_empty() {
        cuda.write(buffer, 0, &planes);
    }
    rank.all_reduce(cuda, buffer, &runs, n_leaves, n_rows)?;
    let found = bits(cuda, buffer, n_rows, HIDDEN);
    rank.settle().map(|()| found)
}

pub fn expected_sum(n_leaves: u32, n_rows: usize) -> Vec<u32> {
    sum_of(&leaves(n_leaves, n_rows), 0..n_leaves).iter().map(|value| value.to_bits()).collect()
}
