//! Attention, and the storing of K and V before it: the contract's bits, for every cut of positions into steps and any
//! contents of other sequences and blocks.

use super::device::{Launch, Memory, ORDERS, bf16_rows, rounded};
use super::functions::{STEP, dot, exp, soft_cap};
use super::linear::by_lane;
use super::pointwise::HeadShape;
use crate::arguments;
use crate::numbers::{Rng, assert_bits, cpu, filled};
use backend::cpu::Isa;
use backend::{
    Attention, AttentionCall, AttentionHeads, Batch, BlockTables, KvPages, KvSpec, Memory as _, PassSlice, RopeStyle,
    ScoreTerms, Weights,
};
use std::ops::Range;
use types::{Activations, BlockId, KvDtype, KvLayout, Want};

const POSITIONS: usize = 16;
const TILE: usize = 256;
const CHUNK_TILES: usize = 16;
const CHUNK: usize = CHUNK_TILES * TILE;
/// A NaN, for memory that was never written.
const GARBAGE: u16 = 0x7fc1;

/// As `AttendItem`.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Item {
    row: u32,
    n_rows: u32,
    position: u32,
    table: u32,
}

/// A sequence and its blocks.
struct Sequence {
    /// [n_positions, qkv_cols]
    qkv: Vec<f32>,
    blocks: Vec<u32>,
}

/// Ranges of positions of some sequences, computed together.
type Step = [(usize, Range<usize>)];

struct Case {
    heads: AttentionHeads,
    /// One for each query head.
    sinks: Option<Vec<f32>>,
    sequences: Vec<Sequence>,
    n_blocks: usize,
}

/// The result for some positions: the largest score, the sum of weights, and the weighted values.
struct Part {
    largest: f32,
    sum: f32,
    acc: Vec<f32>,
}

impl Part {
    fn none(head_dim: usize) -> Part {
        Part { largest: f32::NEG_INFINITY, sum: 0.0, acc: vec![0.0; head_dim] }
    }

    /// Merges in the part that follows this one.
    fn then(self, next: &Part) -> Part {
        let largest = if self.largest > next.largest { self.largest } else { next.largest };
        let is_first = self.largest == f32::NEG_INFINITY;
        let (keep, take) =
            if is_first { (0.0, 1.0) } else { (exp(self.largest - largest), exp(next.largest - largest)) };
        let acc = self.acc.iter().zip(&next.acc).map(|(acc, next)| acc.mul_add(keep, next * take)).collect();
        Part { largest, sum: self.sum.mul_add(keep, next.sum * take), acc }
    }
}

impl Case {
    fn new(seed: u64, heads: AttentionHeads, lengths: &[usize]) -> Case {
        let rng = &mut Rng(seed);
        // Some blocks belong to no sequence.
        let n_blocks = lengths.iter().map(|n| n.div_ceil(POSITIONS)).sum::<usize>() + 8;
        let mut free: Vec<u32> = (0..n_blocks as u32).collect();
        let sequence = |n: &usize| Sequence {
            qkv: rng.floats(n * heads.qkv_cols()).iter().map(|x| x * 2.0).collect(),
            blocks: (0..n.div_ceil(POSITIONS)).map(|_| free.swap_remove(rng.below(free.len()))).collect(),
        };
        Case { heads, sinks: None, sequences: lengths.iter().map(sequence).collect(), n_blocks }
    }

    /// A sequence of two chunks and a little more, in which the first half of a head sums to nothing: the second chunk
    /// has the keys of the first with the opposite values. Tiles merged in any other way leave rounding errors.
    fn cancelling(seed: u64, heads: AttentionHeads) -> Case {
        let mut case = Case::new(seed, heads, &[2 * CHUNK + 20]);
        let (cols, dim) = (heads.qkv_cols(), heads.head_dim);
        let (keys, values) = (heads.n_heads * dim, (heads.n_heads + heads.n_kv_heads) * dim);
        let qkv = &mut case.sequences[0].qkv;
        for position in 0..CHUNK {
            let (from, to) = (position * cols, (position + CHUNK) * cols);
            qkv.copy_within(from + keys..from + values, to + keys);
            let is_first_half = |column: &usize| column % dim < dim / 2;
            (values..cols).filter(is_first_half).for_each(|column| qkv[to + column] = -qkv[from + column]);
        }
        for row in qkv[2 * CHUNK * cols..].chunks_mut(cols) {
            row[values..].chunks_mut(dim).for_each(|value| value[..dim / 2].fill(0.0));
        }
        case
    }

    fn dim(&self) -> usize {
        self.heads.head_dim.next_multiple_of(32)
    }

    fn n_kv(&self) -> usize {
        self.n_blocks * self.heads.n_kv_heads * 2 * POSITIONS * self.dim()
    }

    /// The index of an element of K (0) or V (1) at a position.
    fn at(&self, sequence: usize, position: usize, head: usize, of: usize, i: usize) -> usize {
        let (block, slot) = (self.sequences[sequence].blocks[position / POSITIONS] as usize, position % POSITIONS);
        let page = (block * self.heads.n_kv_heads + head) * 2 + of;
        page * POSITIONS * self.dim() + if of == 0 { slot * self.dim() + by_lane(i) } else { i * POSITIONS + slot }
    }

    /// A cache that holds the first positions of every sequence, and garbage elsewhere: behind them in the last block,
    /// in other sequences' blocks, and in blocks that no row sees any more.
    fn cache(&self, steps: &Step) -> Vec<u16> {
        let mut kv = vec![GARBAGE; self.n_kv()];
        for (sequence, range) in steps {
            let seen_first = self.seen(range.start).start / POSITIONS * POSITIONS;
            for position in seen_first..range.end {
                for head in 0..self.heads.n_kv_heads {
                    for i in 0..self.dim() {
                        kv[self.at(*sequence, position, head, 0, i)] = self.stored(*sequence, position, head, 0, i);
                        kv[self.at(*sequence, position, head, 1, i)] = self.stored(*sequence, position, head, 1, i);
                    }
                }
            }
        }
        kv
    }

    fn stored(&self, sequence: usize, position: usize, head: usize, of: usize, i: usize) -> u16 {
        let AttentionHeads { n_heads, n_kv_heads, head_dim, .. } = self.heads;
        let column = (n_heads + of * n_kv_heads + head) * head_dim + i;
        let row = &self.sequences[sequence].qkv[position * self.heads.qkv_cols()..][..self.heads.qkv_cols()];
        if i < head_dim { half::bf16::from_f32(row[column]).to_bits() } else { 0 }
    }

    fn seen(&self, position: usize) -> Range<usize> {
        self.heads.window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1
    }

    /// The rows of a step, their positions, the block tables, and where each sequence's table begins.
    fn rows(&self, step: &Step) -> (Vec<f32>, Vec<u32>, Vec<u32>, Vec<u32>) {
        let (mut qkv, mut positions, mut blocks, mut tables) = (vec![], vec![], vec![], vec![]);
        for (sequence, range) in step {
            let cols = self.heads.qkv_cols();
            qkv.extend(&self.sequences[*sequence].qkv[range.start * cols..range.end * cols]);
            positions.extend(range.clone().map(|position| position as u32));
            tables.push(blocks.len() as u32);
            blocks.extend(&self.sequences[*sequence].blocks);
        }
        (qkv, positions, blocks, tables)
    }

    /// Runs of a sequence's rows whose queries fit a block of threads, and one empty item.
    fn items(&self, step: &Step, queries: usize) -> Vec<Item> {
        let each = (queries / self.heads.per_kv).max(1);
        let (_, _, _, tables) = self.rows(step);
        let mut items = vec![Item { row: 0, n_rows: 0, position: 0, table: 0 }];
        let mut row = 0;
        for ((_, range), table) in step.iter().zip(tables) {
            for start in range.clone().step_by(each) {
                let n_rows = each.min(range.end - start) as u32;
                items.push(Item { row, n_rows, position: start as u32, table });
                row += n_rows;
            }
        }
        items
    }

    /// Returns the kernels' form of the shape, and the memory that it points to.
    fn shape(&self) -> (HeadShape, Option<Memory<f32>>) {
        let sinks = self.sinks.as_ref().map(|sinks| Memory::of(sinks));
        let at = sinks.as_ref().map_or(0, |sinks| sinks.start() as u64);
        (HeadShape { sinks: at, ..HeadShape::of(&self.heads) }, sinks)
    }

    /// The kernel's result: [n_rows, padded n_heads * head_dim].
    fn attend(&self, step: &Step, queries: usize, order: i32) -> Vec<u16> {
        let (rows, _, blocks, _) = self.rows(step);
        let n_rows = rows.len() / self.heads.qkv_cols();
        let (qkv, kv, blocks) = (Memory::of(&rows), Memory::of(&self.cache(step)), Memory::of(&blocks));
        let items = self.items(step, queries);
        let (shape, _sinks) = self.shape();
        let (at, out) = (Memory::of(&items), self.out(n_rows));
        let launch =
            Launch { order, shared: self.shared(queries), ..Launch::new(self.grid(items.len(), queries, 1), 128) };
        launch.ok(
            &format!("attend_d{}_q{queries}", self.dim()),
            arguments![qkv.start(), kv.start(), shape, at.start(), blocks.start(), out.start()],
        );
        let beside_q = |row: &[f32]| row[self.heads.n_heads * self.heads.head_dim..].to_vec();
        for (after, before) in qkv.read().chunks(self.heads.qkv_cols()).zip(rows.chunks(self.heads.qkv_cols())) {
            assert_bits("K and V of the rows", &beside_q(after), &beside_q(before));
        }
        out.read()
    }

    /// The result of tiles computed apart and then merged.
    fn attend_split(&self, step: &Step, order: i32) -> Vec<u16> {
        let (qkv, positions, blocks, _) = self.rows(step);
        let n_rows = qkv.len() / self.heads.qkv_cols();
        let (qkv, kv, blocks) = (Memory::of(&qkv), Memory::of(&self.cache(step)), Memory::of(&blocks));
        let items = self.items(step, 16);
        let first = positions.iter().map(|position| self.seen(*position as usize).start / TILE).min().unwrap_or(0);
        let end = positions.iter().map(|position| *position as usize / TILE + 1).max().unwrap_or(0);
        // One tile more than any row sees.
        let n_tiles = end - first + 1;
        let partial = Memory::filled(n_rows * self.heads.n_heads * n_tiles * (self.dim() + 2), f32::NAN);
        let (at, out, positions) = (Memory::of(&items), self.out(n_rows), Memory::of(&positions));
        let (heads, _sinks) = self.shape();
        let (tile_first, n) = (first as u32, n_tiles as u32);
        let grid = self.grid(items.len(), 16, n_tiles);
        Launch { order, shared: self.shared(16), ..Launch::new(grid, 128) }.ok(
            &format!("attend_split_d{}_q16", self.dim()),
            arguments![qkv.start(), kv.start(), heads, at.start(), blocks.start(), tile_first, n, partial.start(),],
        );
        partial.read();
        Launch { order, ..Launch::new([n_rows, self.heads.n_heads, 1], 32) }
            .ok("attend_merge", arguments![partial.start(), heads, positions.start(), tile_first, n, out.start()]);
        out.read()
    }

    fn out(&self, n_rows: usize) -> Memory<u16> {
        Memory::filled(n_rows * (self.heads.n_heads * self.heads.head_dim).next_multiple_of(32), GARBAGE)
    }

    fn shared(&self, queries: usize) -> usize {
        queries * (self.dim() * 2 + 64) + queries * 264 * 4 + queries * 9 * 4
    }

    fn grid(&self, n_items: usize, queries: usize, n_tiles: usize) -> [usize; 3] {
        [n_items, self.heads.n_kv_heads * self.heads.per_kv.div_ceil(queries), n_tiles]
    }

    /// The contract, position by position, for the padded rows of a step.
    fn expected(&self, step: &Step) -> Vec<u16> {
        self.in_chunks(step, CHUNK_TILES)
    }

    fn in_chunks(&self, step: &Step, chunk_tiles: usize) -> Vec<u16> {
        let mut out = Vec::new();
        for (sequence, range) in step {
            for position in range.clone() {
                let head = |head| self.head(*sequence, position, head, chunk_tiles);
                let heads: Vec<f32> = (0..self.heads.n_heads).flat_map(head).collect();
                out.extend(bf16_rows(&heads, self.heads.n_heads * self.heads.head_dim));
            }
        }
        out
    }

    fn head(&self, sequence: usize, position: usize, head: usize, chunk_tiles: usize) -> Vec<f32> {
        let dim = self.heads.head_dim;
        let from = &self.sequences[sequence].qkv[position * self.heads.qkv_cols() + head * dim..][..dim];
        let q: Vec<f32> = from.iter().copied().map(rounded).collect();
        let seen = self.seen(position);
        let tiles: Vec<usize> = (seen.start / TILE..seen.end.div_ceil(TILE)).collect();
        let chunk = |tiles: &[usize]| {
            let tiles = tiles.iter().map(|tile| self.tile(sequence, &q, head, *tile, &seen));
            tiles.fold(Part::none(dim), |chunk, tile| chunk.then(&tile))
        };
        let chunks = tiles.chunk_by(|a, b| a / chunk_tiles == b / chunk_tiles).map(chunk);
        let row = chunks.fold(Part::none(dim), |row, chunk| row.then(&chunk));
        row.acc.iter().map(|acc| acc / row.sum + 0.0).collect()
    }

    fn tile(&self, sequence: usize, q: &[f32], head: usize, tile: usize, seen: &Range<usize>) -> Part {
        let (dim, kv_head) = (self.heads.head_dim, self.heads.kv_head_of(head));
        let number = |position: usize, of: usize, i: usize| {
            half::bf16::from_bits(self.stored(sequence, position, kv_head, of, i)).to_f32()
        };
        let score = |position: usize| {
            if !seen.contains(&position) {
                return f32::NEG_INFINITY;
            }
            let k: Vec<f32> = (0..dim).map(|i| number(position, 0, i)).collect();
            let score = dot(q, &k) * self.heads.scale;
            self.heads.cap.map_or(score, |cap| soft_cap(score, cap))
        };
        let scores: Vec<f32> = (tile * TILE..(tile + 1) * TILE).map(score).collect();
        let is_first = seen.start / TILE == tile;
        let sink = self.sinks.as_ref().filter(|_| is_first).map(|sinks| sinks[head]);
        let largest = scores.iter().copied().fold(sink.unwrap_or(f32::NEG_INFINITY), f32::max);
        let p: Vec<f32> = scores.iter().map(|score| rounded(exp(score - largest))).collect();
        let mut lanes = [0.0f32; 16];
        p.iter().enumerate().for_each(|(i, p)| lanes[i % 16] += p);
        for half in [8, 4, 2, 1] {
            (0..half).for_each(|i| lanes[i] += lanes[i + half]);
        }
        let mut acc = vec![0.0f32; dim];
        for block in (0..TILE).step_by(POSITIONS) {
            for i in STEP {
                let position = tile * TILE + block + i;
                if seen.contains(&position) {
                    acc.iter_mut().enumerate().for_each(|(j, acc)| *acc += p[block + i] * number(position, 1, j));
                }
            }
        }
        let sum = sink.map_or(lanes[0], |sink| lanes[0] + exp(sink - largest));
        Part { largest, sum, acc }
    }
}

fn check(case: &Case, step: &Step, name: &str, orders: &[i32]) {
    let expected = case.expected(step);
    let many = if case.dim() <= 128 { 64 } else { 32 };
    for order in orders {
        assert_eq!(case.attend(step, 16, *order), expected, "{name}: few rows, order {order}");
        assert_eq!(case.attend(step, many, *order), expected, "{name}: many rows, order {order}");
        assert_eq!(case.attend_split(step, *order), expected, "{name}: split, order {order}");
    }
}

fn heads(n_heads: usize, n_kv_heads: usize, head_dim: usize) -> AttentionHeads {
    AttentionHeads::whole(n_heads, n_kv_heads, head_dim, 1.0 / (head_dim as f32).sqrt())
}

#[test]
fn every_head_width_gives_the_contract() {
    for (i, head_dim) in [20, 32, 64, 80, 128, 160, 192, 200, 256].into_iter().enumerate() {
        let case = Case::new(i as u64, heads(3, 1, head_dim), &[40]);
        check(&case, &[(0, 33..40)], &format!("heads of {head_dim}"), &ORDERS[i % 4..=i % 4]);
    }
}

#[test]
fn scores_add_sixteen_elements_at_once() {
    let mut case = Case::new(19, heads(1, 1, 32), &[40]);
    // The terms of a score between two numbers that cancel are mostly rounded away; the rest of the second step counts.
    for row in case.sequences[0].qkv.chunks_mut(96) {
        row[..32].fill(1.0);
        (row[32], row[32 + 16]) = (2f32.powi(24), -2f32.powi(24));
    }
    check(&case, &[(0, 33..40)], "keys that cancel", &[0]);
}

#[test]
fn tiles_are_merged_in_order() {
    let case = Case::new(20, heads(2, 1, 32), &[300, 1, 257, 17]);
    check(&case, &[(0, 299..300), (1, 0..1), (2, 256..257), (3, 15..17)], "several lengths", &ORDERS);
    check(&case, &[(0, 250..262)], "a slice over a tile's end", &[2]);
    check(&case, &[(2, 254..256), (0, 255..256)], "a tile's last position", &[77]);
}

#[test]
fn tiles_are_merged_by_chunks() {
    let case = Case::cancelling(27, heads(1, 1, 32));
    let step: &Step = &[(0, 2 * CHUNK + 19..2 * CHUNK + 20)];
    let expected = case.expected(step);
    assert!(expected[..16].iter().all(|x| *x == 0) && expected[16..].iter().all(|x| *x != 0), "{expected:?}");
    for chunk_tiles in [CHUNK_TILES / 2, 2 * CHUNK_TILES, usize::MAX] {
        assert_ne!(case.in_chunks(step, chunk_tiles), expected, "chunks of {chunk_tiles} tiles");
    }
    check(&case, step, "three chunks", &[2]);
}

#[test]
fn a_chunk_that_a_row_does_not_see_changes_nothing() {
    let case = Case::new(28, heads(3, 1, 20), &[CHUNK + 2]);
    check(&case, &[(0, CHUNK - 2..CHUNK + 2)], "rows before a chunk and in it", &[0]);
    let windowed = AttentionHeads { window: Some(20), ..heads(3, 1, 20) };
    let case = Case::new(29, windowed, &[CHUNK + 30]);
    check(&case, &[(0, CHUNK + 10..CHUNK + 30)], "windows from a chunk before and from this one", &[1]);
}

#[test]
fn steps_cut_anywhere_give_the_same_rows() {
    let case = Case::new(21, heads(4, 2, 32), &[70]);
    let whole = case.attend(&[(0, 0..70)], 64, 0);
    assert_eq!(whole, case.expected(&[(0, 0..70)]));
    let cols = 4 * 32;
    for cut in [1, 16, 37, 69] {
        let before = case.attend(&[(0, 0..cut)], 16, 1);
        let after = case.attend_split(&[(0, cut..70)], 2);
        assert_eq!([before, after].concat(), whole, "cut at {cut}");
    }
    assert_eq!(case.attend(&[(0, 42..43)], 16, 0), whole[42 * cols..43 * cols]);
}

#[test]
fn windows_caps_and_cut_groups_give_the_contract() {
    let windowed = AttentionHeads { window: Some(20), ..heads(2, 1, 32) };
    let case = Case::new(22, windowed, &[300, 50]);
    check(&case, &[(0, 298..300), (1, 3..5)], "a window", &[0, 1]);
    check(&case, &[(0, 250..290)], "a window over a tile's end", &[2]);
    let capped = AttentionHeads { cap: Some(5.0), ..heads(2, 2, 64) };
    check(&Case::new(23, capped, &[30]), &[(0, 20..30)], "a cap", &[0]);
    // Query heads 2..7 of three for each KV head: the first and the last group are cut.
    let cut = AttentionHeads { n_heads: 5, n_kv_heads: 3, per_kv: 3, first: 2, ..heads(3, 1, 32) };
    check(&Case::new(24, cut, &[40]), &[(0, 30..37)], "cut groups", &[0, 77]);
    // More query heads on one KV head than a block of threads has.
    check(&Case::new(25, heads(71, 1, 32), &[20]), &[(0, 18..20)], "many heads", &[1]);
}

/// Sinks above, among and below all scores; of a window that begins in a later tile, and of a group that is cut.
#[test]
fn sinks_count_in_the_first_tile_that_is_seen() {
    let with = |heads: AttentionHeads, seed: u64, lengths: &[usize], sinks: &[f32]| Case {
        sinks: Some(sinks.to_vec()),
        ..Case::new(seed, heads, lengths)
    };
    let case = with(heads(3, 1, 32), 41, &[530, 40], &[-30.0, 0.5, 6.0]);
    check(&case, &[(0, 525..530), (1, 3..5)], "sinks", &[0, 1]);
    let windowed = AttentionHeads { window: Some(20), ..heads(2, 1, 64) };
    check(&with(windowed, 42, &[300], &[1.0, 9.0]), &[(0, 250..290)], "sinks and a window", &[2]);
    let cut = AttentionHeads { n_heads: 5, n_kv_heads: 3, per_kv: 3, first: 2, ..heads(3, 1, 32) };
    check(&with(cut, 43, &[40], &[0.0, 1.0, 2.0, 3.0, -1.0]), &[(0, 30..37)], "sinks of cut groups", &[0]);
}

#[test]
fn attention_is_near_the_cpus() {
    let case = Case::new(26, heads(4, 2, 64), &[280]);
    let step: &Step = &[(0, 270..280)];
    let (qkv, _, _, _) = case.rows(&[(0, 0..280)]);
    let cpu = cpu(Isa::Plain, 1, Activations::F32);
    let spec = KvSpec { n_layers: 1, n_blocks: case.n_blocks, layout: KvLayout::heads(2, 64), dtype: KvDtype::F32 };
    let (mut kv, mut x) = (cpu.kv(spec).unwrap(), filled(&cpu, 280, &qkv));
    let blocks = case.sequences[0].blocks.iter().copied().map(BlockId).collect::<Vec<_>>();
    let bounds = vec![0, blocks.len() as u32];
    let batch = Batch {
        tokens: vec![0; 280],
        positions: (0..280).collect(),
        slices: vec![PassSlice::new(0..280, 0, Want::Nothing)],
        tables: vec![BlockTables { blocks, bounds }],
        ..Batch::default()
    };
    cpu.rope_store(
        &mut x,
        None,
        &AttentionCall { pass: &batch.pass(), heads: &case.heads, group: 0, layer: 0 },
        &mut kv,
    );
    let mut out = cpu.buffer(280, 4 * 64).unwrap();
    cpu.attend(
        &mut x,
        &kv,
        &AttentionCall { pass: &batch.pass(), heads: &case.heads, group: 0, layer: 0 },
        &ScoreTerms::NONE,
        &mut out,
    );
    let got = case.attend(step, 16, 0);
    for (row, got) in got.chunks(4 * 64).enumerate() {
        for (expected, got) in out.row(270 + row).iter().zip(got) {
            let got = half::bf16::from_bits(*got).to_f32();
            assert!((expected - got).abs() < 0.02, "{got} and should be near {expected}");
        }
    }
}

#[test]
fn positions_turn_as_on_the_cpu_and_are_stored() {
    for (style, style_id, half_dim, head_dim) in [
        (RopeStyle::Halves, 0u32, 32, 64),
        (RopeStyle::Pairs, 1, 32, 64),
        (RopeStyle::Halves, 0, 8, 40),
        (RopeStyle::Pairs, 1, 1, 2),
    ] {
        let case = Case::new(30, heads(3, 1, head_dim), &[40, 20]);
        let step: &Step = &[(0, 30..37), (1, 0..3)];
        let rng = &mut Rng(31);
        let (cos, sin) = (rng.floats(40 * half_dim), rng.floats(40 * half_dim));
        for (order, has_rope) in ORDERS.into_iter().zip([true, false, true, true]) {
            stored(&case, step, (&cos, &sin, half_dim), (style, style_id), has_rope, order);
        }
    }
}

fn stored(
    case: &Case,
    step: &Step,
    (cos, sin, half_dim): (&[f32], &[f32], usize),
    (style, style_id): (RopeStyle, u32),
    has_rope: bool,
    order: i32,
) {
    let (qkv, positions, _, _) = case.rows(step);
    let AttentionHeads { n_heads, n_kv_heads, head_dim, .. } = case.heads;
    let slot = |(sequence, range): &(usize, Range<usize>)| {
        let blocks = case.sequences[*sequence].blocks.clone();
        range.clone().map(move |position| blocks[position / 16] * 16 + position as u32 % 16)
    };
    let slots: Vec<u32> = step.iter().flat_map(slot).collect();
    let (x, kv) = (Memory::of(&qkv), Memory::filled(case.n_kv(), GARBAGE));
    let (cos_at, sin_at, none) = (Memory::of(cos), Memory::of(sin), std::ptr::null_mut());
    let cos_start = if has_rope { cos_at.start() } else { none };
    let (positions_at, slots_at) = (Memory::of(&positions), Memory::of(&slots));
    Launch { order, ..Launch::new([positions.len(), n_heads + 2 * n_kv_heads, 1], 32) }.ok(
        "rope_store",
        arguments![
            x.start(),
            cos_start,
            sin_at.start(),
            half_dim as u32,
            style_id,
            HeadShape::of(&case.heads),
            positions_at.start(),
            slots_at.start(),
            kv.start(),
        ],
    );
    let turned = on_cpu(case, step, &qkv, has_rope.then_some((cos, sin, half_dim, style)));
    assert_bits("turned", &x.read(), &turned);
    let mut expected = vec![GARBAGE; case.n_kv()];
    let rows = step.iter().flat_map(|(sequence, range)| range.clone().map(move |position| (*sequence, position)));
    for ((sequence, position), row) in rows.zip(turned.chunks(case.heads.qkv_cols())) {
        for (head, of) in (0..n_kv_heads).flat_map(|head| [(head, 0), (head, 1)]) {
            for i in 0..case.dim() {
                let number = if i < head_dim { row[(n_heads + of * n_kv_heads + head) * head_dim + i] } else { 0.0 };
                expected[case.at(sequence, position, head, of, i)] = half::bf16::from_f32(number).to_bits();
            }
        }
    }
    assert_eq!(kv.read(), expected);
}

/// The rows after the CPU's rope.
fn on_cpu(case: &Case, step: &Step, qkv: &[f32], rope: Option<(&[f32], &[f32], usize, RopeStyle)>) -> Vec<f32> {
    let AttentionHeads { n_kv_heads, head_dim, .. } = case.heads;
    let cpu = cpu(Isa::Plain, 1, Activations::F32);
    let spec = KvSpec {
        n_layers: 1,
        n_blocks: case.n_blocks,
        layout: KvLayout::heads(n_kv_heads as u32, head_dim as u32),
        dtype: KvDtype::F32,
    };
    let mut kv = cpu.kv(spec).unwrap();
    let mut batch = Batch { tables: vec![BlockTables::default()], ..Batch::default() };
    for (sequence, range) in step {
        let first = batch.tokens.len() as u32;
        batch.tokens.extend(range.clone().map(|_| 0));
        batch.slices.push(PassSlice::new(first..first + range.len() as u32, range.start as u32, Want::Nothing));
        batch.tables[0].blocks.extend(case.sequences[*sequence].blocks.iter().copied().map(BlockId));
        let end = batch.tables[0].blocks.len() as u32;
        batch.tables[0].bounds.push(end);
    }
    let n_rows = batch.n_rows();
    let rope = rope.map(|(cos, sin, half_dim, style)| cpu.rope(cos, sin, half_dim, style).unwrap());
    let mut x = filled(&cpu, n_rows, qkv);
    cpu.rope_store(
        &mut x,
        rope.as_ref(),
        &AttentionCall { pass: &batch.pass(), heads: &case.heads, group: 0, layer: 0 },
        &mut kv,
    );
    crate::numbers::all(&cpu, &x, n_rows)
}
