//! Products: every kernel and every kind of weight gives the contract's bits, whatever else is in the batch.

use super::device::{Launch, Memory, ORDERS, UNWRITTEN, bf16_rows, rounded};
use super::functions::dot;
use crate::arguments;
use crate::numbers::{Rng, assert_bits};
use half::{bf16, f16};
use std::ops::Range;
use types::Leaves;
use types::leaves::{Fold, aligned_runs, sum_runs};

pub const KINDS: [&str; 8] = ["bf16", "plain", "w8", "w8h", "w4", "w4h", "f8", "f8plain"];
/// Kernels, and the rows that a block of threads takes.
const KERNELS: [(&str, usize); 5] = [("r8", 8), ("r16", 16), ("r32", 32), ("r64", 64), ("r128", 128)];
/// Dynamic shared memory of the kernels with 128 rows for each block; `WIDE_SMEM`.
const WIDE_SHARED: usize = 4 * (256 + 128) * 64;
const PIECES_MAX: usize = 8;
const STRANDS: usize = 4;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    pub n: u32,
    pub n_groups: u32,
    end: [u32; PIECES_MAX],
    merges: [u8; PIECES_MAX],
    ends_run: [u8; PIECES_MAX],
}

impl Pieces {
    fn none(k: usize) -> Pieces {
        let n_groups = k.div_ceil(32) as u32;
        Pieces { n: 0, n_groups, end: [0; PIECES_MAX], merges: [0; PIECES_MAX], ends_run: [0; PIECES_MAX] }
    }

    fn push(&mut self, end: usize, merges: u32, ends_run: bool) {
        let i = self.n as usize;
        (self.end[i], self.merges[i], self.ends_run[i]) = (end as u32, merges as u8, u8::from(ends_run));
        self.n += 1;
    }

    fn run(&mut self, ends: &[usize]) {
        let (mut fold, mut depth) = (Fold::default(), 0);
        for (i, end) in ends.iter().enumerate() {
            let is_last = i + 1 == ends.len();
            let mut merges = fold.push(&(i as u32..i as u32 + 1));
            depth = depth + 1 - merges as usize;
            merges += if is_last { Fold::n_last(depth) as u32 } else { 0 };
            self.push(*end, merges, is_last);
        }
    }

    /// The pieces of a matrix that is not cut between ranks: strands.
    pub fn whole(k: usize) -> Pieces {
        let mut pieces = Pieces::none(k);
        let n_groups = pieces.n_groups as usize;
        let n = STRANDS.min(n_groups);
        (1..=n).for_each(|i| pieces.push(i * n_groups / n, u32::from(i > 1), i == n));
        pieces
    }

    /// The owned leaves of a row-parallel matrix.
    pub fn leaves(leaves: &Leaves, owned: Range<u32>) -> Pieces {
        let columns = leaves.elements(&owned);
        let mut pieces = Pieces::none(columns.len());
        for run in aligned_runs(owned, leaves.len() as u32) {
            let end = |leaf| (leaves.leaf(leaf as usize).end - columns.start).div_ceil(32) as usize;
            pieces.run(&run.map(end).collect::<Vec<_>>());
        }
        pieces
    }

    /// Jobs of so many pieces: the runs that they store, and these as pieces of the whole.
    pub fn split(&self, per_job: u32) -> (Pieces, Pieces) {
        let (mut parts, mut sums, mut waiting) = (*self, Pieces::none(0), 0);
        sums.n_groups = self.n_groups;
        for i in 0..self.n as usize {
            let (all, ends_job) = (self.merges[i], (i as u32 + 1).is_multiple_of(per_job));
            let merges = all.min(waiting);
            let is_stored = self.ends_run[i] != 0 || merges < all || ends_job;
            (parts.merges[i], parts.ends_run[i]) = (merges, u8::from(is_stored));
            waiting = waiting - merges + u8::from(!is_stored);
            if is_stored {
                assert_eq!(waiting, 0, "a job leaves one sum");
                sums.push(self.end[i] as usize, u32::from(all - merges), self.ends_run[i] != 0);
            }
        }
        (parts, sums)
    }

    pub fn n_planes(&self) -> usize {
        self.ends_run[..self.n as usize].iter().filter(|ends| **ends != 0).count()
    }

    fn n_slots(&self) -> usize {
        (self.n as usize).next_power_of_two()
    }
}

/// A packed matrix, and the numbers that it stands for.
pub struct Packed {
    pub kind: &'static str,
    pub n_out: usize,
    pub k: usize,
    pub digits: Memory<u8>,
    pub scales: Memory<u8>,
    /// [n_out, k], numbers that a bf16 holds.
    pub weights: Vec<f32>,
}

/// One row's group of thirty-two elements, before it is packed.
struct Group {
    digits: [u8; 32],
    /// (scale, minimum) of each sixteen elements.
    scales: [(f16, f16); 2],
}

impl Packed {
    pub fn random(rng: &mut Rng, kind: &'static str, n_out: usize, k: usize) -> Packed {
        let (n_tiles, n_groups) = (n_out.div_ceil(16), k.div_ceil(32));
        let (digit_bytes, scale_bytes) = sizes(kind);
        let mut digits = vec![0u8; n_tiles * n_groups * digit_bytes];
        let mut scales = vec![0u8; n_tiles * n_groups * scale_bytes];
        let mut weights = vec![0.0; n_out * k];
        for (row, weights) in weights.chunks_mut(k.max(1)).enumerate() {
            if kind == "plain" {
                weights.iter_mut().zip(digits[row * n_groups * 64..].as_chunks_mut::<2>().0).for_each(
                    |(weight, to)| {
                        let number = bf16::from_f32(rng.unit());
                        (*to, *weight) = (number.to_le_bytes(), number.to_f32());
                    },
                );
                continue;
            }
            for (group, weights) in weights.chunks_mut(32).enumerate() {
                if kind == "f8plain" {
                    let at = row / 16 * n_groups + group;
                    let scale = scale_of_eight_bits(rng, row % 16, &mut scales[at * scale_bytes..][..scale_bytes]);
                    for (weight, to) in weights.iter_mut().zip(&mut digits[(row * n_groups + group) * 32..]) {
                        *to = eight_bits(rng);
                        *weight = rounded(eight_bits_of(*to) * scale);
                    }
                    continue;
                }
                let at = row / 16 * n_groups + group;
                let to =
                    (&mut digits[at * digit_bytes..][..digit_bytes], &mut scales[at * scale_bytes..][..scale_bytes]);
                pack_group(rng, kind, row % 16, weights, to);
            }
        }
        Packed { kind, n_out, k, digits: Memory::of(&digits), scales: Memory::of(&scales), weights }
    }
}

/// Bytes of digits and of scales for each tile and group.
fn sizes(kind: &str) -> (usize, usize) {
    match kind {
        "bf16" | "plain" => (1024, 0),
        "w8" | "f8" | "f8plain" => (512, 64),
        "w8h" => (512, 128),
        "w4" => (256, 64),
        _ => (256, 128),
    }
}

/// Makes up a random group; writes its values to `weights`, and its packing to `digits` and `scales`.
fn pack_group(rng: &mut Rng, kind: &str, row: usize, weights: &mut [f32], (digits, scales): (&mut [u8], &mut [u8])) {
    let place = |e: usize| (row / 8, row % 8 * 4 + by_lane(e) / 8, by_lane(e) % 8); // h, lane, element of the lane
    if kind == "f8" {
        let scale = scale_of_eight_bits(rng, row, scales);
        for (e, weight) in weights.iter_mut().enumerate() {
            let ((h, lane, i), bits) = (place(e), eight_bits(rng));
            digits[(lane * 2 + h) * 8 + i] = bits;
            *weight = rounded(eight_bits_of(bits) * scale);
        }
        return;
    }
    if kind == "bf16" {
        for (e, weight) in weights.iter_mut().enumerate() {
            let (h, lane, _) = place(e);
            let number = bf16::from_f32(rng.unit());
            let at = ((e / 16 * 32 + lane) * 4 + e % 4 / 2 * 2 + h) * 2 + e % 2;
            digits[at * 2..][..2].copy_from_slice(&number.to_le_bytes());
            *weight = number.to_f32();
        }
        return;
    }
    let (bits, halves) = (if kind.starts_with("w8") { 8 } else { 4 }, kind.ends_with('h'));
    let group = Group::random(rng, bits, halves);
    for (e, weight) in weights.iter_mut().enumerate() {
        let ((h, lane, i), (scale, minimum)) = (place(e), group.scales[e / 16]);
        let digit = group.digits[e];
        match bits {
            8 => digits[(lane * 2 + h) * 8 + i] = digit,
            _ => digits[(lane * 2 + h) * 4 + i / 2] |= digit << (i % 2 * 4),
        }
        *weight = rounded(scale.to_f32().mul_add(f32::from(digit), minimum.to_f32()));
    }
    let mut put = |at: usize, (scale, minimum): (f16, f16)| {
        scales[at * 4..][..2].copy_from_slice(&scale.to_le_bytes());
        scales[at * 4 + 2..][..2].copy_from_slice(&minimum.to_le_bytes());
    };
    let n_halves = if halves { 2 } else { 1 };
    for half in 0..n_halves {
        put((row % 8 * n_halves + half) * 2 + row / 8, group.scales[half]);
    }
}

/// Where the contract has an element of a row that is stored by lane.
pub fn by_lane(e: usize) -> usize {
    e / 32 * 32 + e / 4 % 4 * 8 + e / 16 % 2 * 4 + e % 4
}

fn scale_of_eight_bits(rng: &mut Rng, row: usize, scales: &mut [u8]) -> f32 {
    let scale = (0.3 + rng.unit().abs()) / 448.0;
    scales[(row % 8 * 2 + row / 8) * 4..][..4].copy_from_slice(&scale.to_le_bytes());
    scale
}

/// A random E4M3 number.
fn eight_bits(rng: &mut Rng) -> u8 {
    (rng.below(0x7f) | rng.below(2) << 7) as u8
}

/// The value by the format's formula.
pub fn eight_bits_of(bits: u8) -> f32 {
    let (exponent, fraction) = (i32::from(bits >> 3 & 15), f32::from(bits & 7) / 8.0);
    let size = if exponent == 0 { fraction * 2f32.powi(-6) } else { (1.0 + fraction) * 2f32.powi(exponent - 7) };
    if bits & 0x80 == 0 { size } else { -size }
}

impl Group {
    fn random(rng: &mut Rng, bits: u32, halves: bool) -> Group {
        let largest = f32::from((1u16 << bits) - 1);
        let mut scale = || (f16::from_f32(rng.unit() * 2.0 / largest), f16::from_f32(rng.unit()));
        let first = scale();
        let scales = [first, if halves { scale() } else { first }];
        let mut digits = [0; 32];
        digits.iter_mut().for_each(|digit| *digit = (rng.next() % (1 << bits)) as u8);
        Group { digits, scales }
    }
}

/// The contract of strands, which are added from the left: [n_rows, n_out]
pub fn expected(x: &[f32], w: &Packed, pieces: &Pieces) -> Vec<f32> {
    planes(x, w, pieces, |strands| strands.iter().copied().reduce(|sum, strand| sum + strand).unwrap())
}

/// The contract of leaves, which are added by their tree: [n_planes, n_rows, n_out]
pub fn expected_of_leaves(x: &[f32], w: &Packed, pieces: &Pieces) -> Vec<f32> {
    planes(x, w, pieces, |leaves| {
        sum_runs(&(0u32..).zip(leaves).map(|(i, leaf)| (i..i + 1, *leaf)).collect::<Vec<_>>())
    })
}

/// One accumulator for each piece, and a plane for each run of pieces.
fn planes(x: &[f32], w: &Packed, pieces: &Pieces, add: fn(&[f32]) -> f32) -> Vec<f32> {
    let mut out = Vec::new();
    let mut first = 0;
    for plane in 0..pieces.n_planes() {
        let last = (first..).find(|i| pieces.ends_run[*i] != 0).unwrap();
        for i in 0..x.len() / w.k * w.n_out {
            let (x, w) = (&x[i / w.n_out * w.k..][..w.k], &w.weights[i % w.n_out * w.k..][..w.k]);
            let begin = |piece: usize| if piece == 0 { 0 } else { pieces.end[piece - 1] as usize * 32 };
            let piece = |i: usize| begin(i)..(pieces.end[i] as usize * 32).min(x.len());
            let sums: Vec<f32> = (first..=last).map(|i| dot(&x[piece(i)], &w[piece(i)])).collect();
            out.push(add(&sums));
        }
        assert!(plane + 1 < pieces.n_planes() || last + 1 == pieces.n as usize);
        first = last + 1;
    }
    out
}

fn grid(rows_each: usize, w: &Packed, n_rows: usize, pieces: &Pieces) -> [usize; 3] {
    let n_tiles = w.n_out.div_ceil(16);
    match rows_each {
        64 => [w.n_out.div_ceil(128), n_rows.div_ceil(64), 1],
        128 => [n_rows.div_ceil(128), w.n_out.div_ceil(256), 1],
        32 => [n_tiles.div_ceil(2 * 8 / pieces.n_slots()), n_rows.div_ceil(32), 1],
        _ => [n_tiles.div_ceil(8 / pieces.n_slots()), n_rows.div_ceil(rows_each), 1],
    }
}

/// x · wᵀ by one kernel: [n_planes, n_rows, n_out]
fn product(kernel: (&str, usize), x: &[f32], w: &Packed, pieces: &Pieces, order: i32) -> Vec<f32> {
    let n_rows = x.len() / w.k;
    let rows = Memory::of(&bf16_rows(x, w.k));
    let out = Memory::filled(pieces.n_planes() * n_rows * w.n_out, UNWRITTEN);
    let shared = if kernel.1 == 128 { WIDE_SHARED } else { 0 };
    let launch = Launch { order, shared, ..Launch::new(grid(kernel.1, w, n_rows, pieces), 256) };
    let (n_out, n) = (w.n_out as u32, n_rows as u32);
    launch.ok(
        &format!("linear_{}_{}", w.kind, kernel.0),
        arguments![w.digits.start(), w.scales.start(), rows.start(), out.start(), n_out, n_out, n, *pieces],
    );
    out.read()
}

/// The same with blocks of their own for each piece, whose sums another kernel adds.
fn split_product(x: &[f32], w: &Packed, pieces: &Pieces, order: i32) -> Vec<f32> {
    let n_rows = x.len() / w.k;
    let rows = Memory::of(&bf16_rows(x, w.k));
    let sums = Memory::filled(pieces.n as usize * n_rows * w.n_out, UNWRITTEN);
    let out = Memory::filled(pieces.n_planes() * n_rows * w.n_out, UNWRITTEN);
    let [x_blocks, y_blocks, _] = grid(128, w, n_rows, pieces);
    let grid = [x_blocks, y_blocks, pieces.n as usize];
    let launch = Launch { order, shared: WIDE_SHARED, ..Launch::new(grid, 256) };
    let (n_out, n) = (w.n_out as u32, n_rows as u32);
    launch.ok(
        &format!("linear_{}_r128", w.kind),
        arguments![w.digits.start(), w.scales.start(), rows.start(), sums.start(), n_out, n_out, n, *pieces],
    );
    let launch = Launch { order, ..Launch::new([w.n_out.div_ceil(256), n_rows, 1], 256) };
    launch.ok("fold_split", arguments![sums.start(), n, n_out, out.start(), n_out, *pieces]);
    out.read()
}

/// Random numbers that fit a bf16.
pub fn numbers(rng: &mut Rng, n: usize) -> Vec<f32> {
    rng.floats(n).into_iter().map(rounded).collect()
}

#[test]
fn every_kernel_gives_the_contract() {
    let rng = &mut Rng(1);
    // n_out, k, rows: below a tile, a group and a strand, and above a block of each.
    let shapes = [(1, 32, 1), (7, 40, 7), (24, 96, 17), (40, 320, 9), (136, 64, 33), (17, 160, 70)];
    for (i, kind) in KINDS.into_iter().enumerate() {
        for (j, (n_out, k, n_rows)) in shapes.into_iter().enumerate() {
            let (w, x) = (Packed::random(rng, kind, n_out, k), numbers(rng, n_rows * k));
            let expected = expected(&x, &w, &Pieces::whole(k));
            for (n, kernel) in KERNELS.into_iter().enumerate() {
                let order = ORDERS[(i + j + n) % ORDERS.len()];
                let name = format!("{kind} {} of {n_rows} x {n_out} x {k} in order {order}", kernel.0);
                assert_bits(&name, &product(kernel, &x, &w, &Pieces::whole(k), order), &expected);
            }
            let split = split_product(&x, &w, &Pieces::whole(k), ORDERS[(i + j) % ORDERS.len()]);
            assert_bits(&format!("{kind} of {n_rows} x {n_out} x {k}, split"), &split, &expected);
        }
    }
}

#[test]
fn the_order_of_threads_does_not_matter() {
    let rng = &mut Rng(2);
    for kind in ["bf16", "w4h"] {
        let (w, x) = (Packed::random(rng, kind, 33, 192), numbers(rng, 9 * 192));
        let expected = expected(&x, &w, &Pieces::whole(192));
        for kernel in KERNELS {
            for order in ORDERS {
                assert_bits(kernel.0, &product(kernel, &x, &w, &Pieces::whole(192), order), &expected);
            }
        }
    }
}

#[test]
fn a_row_alone_is_that_row_in_a_batch() {
    let rng = &mut Rng(3);
    let (w, x) = (Packed::random(rng, "w8", 20, 256), numbers(rng, 66 * 256));
    let batch = product(("r64", 64), &x, &w, &Pieces::whole(256), 0);
    for row in [0, 1, 7, 31, 63, 65] {
        let alone = product(("r8", 8), &x[row * 256..][..256], &w, &Pieces::whole(256), 1);
        assert_bits(&format!("row {row}"), &alone, &batch[row * 20..][..20]);
    }
}

#[test]
fn leaf_sum_is_independent_of_cut() {
    let rng = &mut Rng(4);
    let (k, n_out, n_rows) = (32 * 11, 18, 9);
    let leaves = Leaves::on_grain(k as u32, 8);
    let (w, x) = (Packed::random(rng, "bf16", n_out, k), numbers(rng, n_rows * k));
    let all = Pieces::leaves(&leaves, 0..8);
    let whole = product(("r16", 16), &x, &w, &all, 0);
    assert_bits("one rank", &whole, &expected_of_leaves(&x, &w, &all));
    assert_bits("split", &split_product(&x, &w, &all, 1), &whole);
    let cut = Pieces::leaves(&leaves, 1..7);
    let (part, rows) = (columns_of(&w, leaves.elements(&(1..7))), columns_of_rows(&x, k, &leaves.elements(&(1..7))));
    assert_bits("split of runs", &split_product(&rows, &part, &cut, 2), &product(("r8", 8), &rows, &part, &cut, 0));
    for cut in 0..=8u32 {
        let kernel = KERNELS[cut as usize % KERNELS.len()];
        let mut planes = Vec::new();
        let mut runs = Vec::new();
        for owned in [0..cut, cut..8].into_iter().filter(|owned| !owned.is_empty()) {
            let columns = leaves.elements(&owned);
            let (w, x) = (columns_of(&w, columns.clone()), columns_of_rows(&x, k, &columns));
            planes.extend(product(kernel, &x, &w, &Pieces::leaves(&leaves, owned.clone()), cut as i32));
            runs.extend(aligned_runs(owned, 8));
        }
        assert_bits(&format!("cut at {cut}"), &fold(&planes, &runs, n_rows * n_out), &whole);
    }
}

fn fold(planes: &[f32], runs: &[Range<u32>], n: usize) -> Vec<f32> {
    let mut fold = Fold::default();
    let merges: Vec<u8> = runs.iter().map(|run| fold.push(run) as u8).collect();
    let (planes, merges, out) = (Memory::of(planes), Memory::of(&merges), Memory::filled(n, UNWRITTEN));
    Launch::new([n.div_ceil(256), 1, 1], 256)
        .ok("fold_planes", arguments![planes.start(), runs.len() as u32, merges.start(), n as u64, out.start()]);
    out.read()
}

/// A rank's columns of a matrix of bf16.
fn columns_of(w: &Packed, columns: Range<u32>) -> Packed {
    let (first, end) = (columns.start as usize, columns.end as usize);
    let (n_tiles, n_groups) = (w.n_out.div_ceil(16), w.k.div_ceil(32));
    let digits = w.digits.read();
    let of_tile = |tile: usize| {
        digits[(tile * n_groups + first / 32) * 1024..(tile * n_groups + end.div_ceil(32)) * 1024].to_vec()
    };
    let mine: Vec<u8> = (0..n_tiles).flat_map(of_tile).collect();
    let weights = columns_of_rows(&w.weights, w.k, &columns);
    Packed { kind: "bf16", n_out: w.n_out, k: end - first, digits: Memory::of(&mine), scales: Memory::of(&[]), weights }
}

fn columns_of_rows(x: &[f32], k: usize, columns: &Range<u32>) -> Vec<f32> {
    x.chunks(k).flat_map(|row| row[columns.start as usize..columns.end as usize].to_vec()).collect()
}

#[test]
fn planes_fold_by_the_tree() {
    for n_leaves in [1, 2, 5, 8, 37, 256u32] {
        let runs: Vec<_> =
            [0..n_leaves / 3, n_leaves / 3..n_leaves].into_iter().flat_map(|r| aligned_runs(r, n_leaves)).collect();
        let planes = Rng(u64::from(n_leaves)).floats(runs.len() * 300);
        let of = |i: usize| {
            sum_runs(&runs.iter().enumerate().map(|(j, run)| (run.clone(), planes[j * 300 + i])).collect::<Vec<_>>())
        };
        let expected: Vec<f32> = (0..300).map(of).collect();
        assert_bits(&format!("{n_leaves} leaves"), &fold(&planes, &runs, 300), &expected);
    }
}

#[test]
fn parts_of_a_stack_write_side_by_side() {
    let rng = &mut Rng(5);
    let (first, second) = (Packed::random(rng, "w4", 24, 64), Packed::random(rng, "w8h", 10, 64));
    let x = numbers(rng, 3 * 64);
    let (rows, out, pieces) = (Memory::of(&bf16_rows(&x, 64)), Memory::filled(3 * 34, UNWRITTEN), Pieces::whole(64));
    for (w, column) in [(&first, 0), (&second, 24)] {
        let to = out.start().wrapping_add(column);
        Launch::new(grid(8, w, 3, &pieces), 256).ok(
            &format!("linear_{}_r8", w.kind),
            arguments![w.digits.start(), w.scales.start(), rows.start(), to, 34u32, w.n_out as u32, 3u32, pieces],
        );
    }
    let (first, second) = (expected(&x, &first, &pieces), expected(&x, &second, &pieces));
    let stacked: Vec<f32> =
        (0..3).flat_map(|row| [&first[row * 24..][..24], &second[row * 10..][..10]].concat()).collect();
    assert_bits("stack", &out.read(), &stacked);
}

#[test]
fn experts_multiply_the_rows_that_chose_them() {
    let rng = &mut Rng(6);
    let (n_out, k, n_rows, n_used, n_experts) = (20, 96, 19, 2, 4);
    for kind in KINDS {
        let experts: Vec<Packed> = (0..n_experts).map(|_| Packed::random(rng, kind, n_out, k)).collect();
        // No row chose expert 2; the rank has experts 1 to 3.
        let chosen: Vec<u32> = (0..n_rows).flat_map(|row| if row % 3 == 0 { [0, 1] } else { [1, 3] }).collect();
        let (starts, order, _) = grouped(&chosen, n_experts);
        let x = numbers(rng, n_rows * k);
        let digits = Memory::of(&experts[1..].iter().map(|w| w.digits.start() as u64).collect::<Vec<_>>());
        let scales = Memory::of(&experts[1..].iter().map(|w| w.scales.start() as u64).collect::<Vec<_>>());
        let (rows, pieces) = (Memory::of(&bf16_rows(&x, k)), Pieces::whole(k));
        let (starts_at, order_at) = (Memory::of(&starts), Memory::of(&order));
        let out = Memory::filled(n_rows * n_used * n_out, UNWRITTEN);
        let grid = [n_out.div_ceil(16).div_ceil(8 / pieces.n_slots()), n_rows.div_ceil(16), 3];
        let (n, ld) = (n_out as u32, n_out as u32);
        Launch { order: 5, ..Launch::new(grid, 256) }.ok(
            &format!("linear_grouped_{kind}"),
            arguments![
                digits.start(),
                scales.start(),
                rows.start(),
                out.start(),
                ld,
                n,
                starts_at.start(),
                1u32,
                order_at.start(),
                n_used as u32,
                pieces,
            ],
        );
        let of = |i: usize| {
            let (choice, expert) = (order[i] as usize, chosen[order[i] as usize] as usize);
            let x = &x[choice / n_used * k..][..k];
            if expert == 0 { vec![UNWRITTEN; n_out] } else { expected(x, &experts[expert], &pieces) }
        };
        let by_choice: Vec<f32> = (0..n_rows * n_used).flat_map(of).collect();
        assert_bits(kind, &out.read(), &by_choice);
        // Rows that are already in order of expert.
        let sorted: Vec<f32> =
            order.iter().flat_map(|choice| x[*choice as usize / n_used * k..][..k].to_vec()).collect();
        let (rows, again) = (Memory::of(&bf16_rows(&sorted, k)), Memory::filled(n_rows * n_used * n_out, UNWRITTEN));
        Launch { order: 1, ..Launch::new([grid[0], (n_rows * n_used).div_ceil(16), 3], 256) }.ok(
            &format!("linear_grouped_{kind}"),
            arguments![
                digits.start(),
                scales.start(),
                rows.start(),
                again.start(),
                ld,
                n,
                starts_at.start(),
                1u32,
                std::ptr::null::<u32>(),
                1u32,
                pieces,
            ],
        );
        assert_bits(kind, &again.read(), &by_choice);
    }
}

/// The contract of `group_choices`: where each expert's choices start, their order, and the place of each.
pub fn grouped(chosen: &[u32], n_experts: usize) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let mut order: Vec<u32> = (0..chosen.len() as u32).collect();
    order.sort_by_key(|choice| (chosen[*choice as usize], *choice));
    let before = |expert: usize| chosen.iter().filter(|e| (**e as usize) < expert).count() as u32;
    let mut place = vec![0; chosen.len()];
    order.iter().enumerate().for_each(|(i, choice)| place[*choice as usize] = i as u32);
    ((0..=n_experts).map(before).collect(), order, place)
}
