//! Products of tiles of rows, which Hopper's kernels read: the bits are those of every other kernel.

use super::device::{Launch, Memory, ORDERS, UNWRITTEN, bf16_rows};
use super::linear::{Packed, Pieces, expected, expected_of_leaves, numbers};
use crate::arguments;
use crate::numbers::{Rng, assert_bits};
use types::Leaves;

const KINDS: [&str; 6] = ["bf16", "w8", "w8h", "w4", "w4h", "f8"];
/// Rows and outputs of a block, and its shared memory, `WARPGROUPS_SMEM`.
const ROWS: usize = 256;
const OUTPUTS: usize = 128;
const SHARED: usize = 8 * (ROWS + OUTPUTS) * 64 + 1024;

/// How a product is launched.
#[derive(Clone, Copy, Debug)]
struct How {
    n_blocks: usize,
    order: i32,
    /// The pieces of a job; all of them if none.
    per_job: Option<u32>,
}

/// x · wᵀ: [n_planes, n_rows, n_out]
fn product(x: &[f32], w: &Packed, whole: &Pieces, how: How) -> Vec<f32> {
    let How { n_blocks, order, per_job } = how;
    let (n_rows, n_groups) = (x.len() / w.k, whole.n_groups as usize);
    let rows = Memory::of(&bf16_rows(x, w.k));
    // What a kernel leaves there may be anything.
    let tiles = Memory::filled(n_rows.div_ceil(ROWS) * n_groups * ROWS * 32, 0x7fc0_u16);
    let grid = [n_rows.div_ceil(32), n_groups.div_ceil(4), 1];
    let (n_out, n) = (w.n_out as u32, n_rows as u32);
    Launch { order, ..Launch::new(grid, 256) }
        .ok("tile_rows", arguments![rows.start(), n, n_groups as u32, tiles.start()]);
    let (pieces, sums) = per_job.map_or((*whole, None), |per_job| {
        let (parts, sums) = whole.split(per_job);
        (parts, Some(sums))
    });
    let out = Memory::filled(pieces.n_planes() * n_rows * w.n_out, UNWRITTEN);
    Launch { order, shared: SHARED, ..Launch::new([n_blocks, 1, 1], 384) }.ok(
        &format!("linear_{}_r256", w.kind),
        arguments![
            w.digits.start(),
            w.scales.start(),
            tiles.start(),
            out.start(),
            n_out,
            n_out,
            n,
            n,
            per_job.unwrap_or(whole.n),
            pieces,
        ],
    );
    let Some(sums) = sums else { return out.read() };
    let folded = Memory::filled(whole.n_planes() * n_rows * w.n_out, UNWRITTEN);
    let launch = Launch { order, ..Launch::new([w.n_out.div_ceil(256), n_rows, 1], 256) };
    launch.ok("fold_split", arguments![out.start(), n, n_out, folded.start(), n_out, sums]);
    folded.read()
}

#[test]
fn every_kind_gives_the_contract() {
    let rng = &mut Rng(11);
    // n_out, k, rows: below a tile and a group, more than one block of outputs and of rows, more groups than stages.
    let shapes = [(1, 32, 1), (40, 160, 70), (136, 72, 259), (24, 1184, 9)];
    for (i, kind) in KINDS.into_iter().enumerate() {
        for (j, (n_out, k, n_rows)) in shapes.into_iter().enumerate() {
            let (w, x) = (Packed::random(rng, kind, n_out, k), numbers(rng, n_rows * k));
            let (pieces, order) = (Pieces::whole(k), ORDERS[(i + j) % ORDERS.len()]);
            let expected = expected(&x, &w, &pieces);
            let per_job = [None, Some(1), Some(2)][(i + j) % 3].filter(|per_job| pieces.n.is_multiple_of(*per_job));
            let how = How { n_blocks: 1 + (i + 2 * j) % 3, order, per_job };
            let name = format!("{kind} of {n_rows} x {n_out} x {k}, {how:?}");
            assert_bits(&name, &product(&x, &w, &pieces, how), &expected);
        }
    }
}

#[test]
fn the_order_of_threads_does_not_matter() {
    let rng = &mut Rng(12);
    let (w, x) = (Packed::random(rng, "w4h", 130, 640), numbers(rng, 3 * 640));
    let expected = expected(&x, &w, &Pieces::whole(640));
    for order in ORDERS {
        for per_job in [None, Some(1), Some(2)] {
            let how = How { n_blocks: 1, order, per_job };
            assert_bits(&format!("{how:?}"), &product(&x, &w, &Pieces::whole(640), how), &expected);
        }
    }
}

#[test]
fn leaves_are_added_by_their_tree() {
    let rng = &mut Rng(13);
    let k = 32 * 11;
    let leaves = Leaves::on_grain(k as u32, 8);
    // All leaves, and those of a rank, which end in several runs.
    for owned in [0..8, 1..7] {
        let k = leaves.elements(&owned).len();
        let (w, x) = (Packed::random(rng, "bf16", 18, k), numbers(rng, 9 * k));
        let pieces = Pieces::leaves(&leaves, owned);
        let whole = product(&x, &w, &pieces, How { n_blocks: 1, order: 2, per_job: None });
        assert_bits("leaves", &whole, &expected_of_leaves(&x, &w, &pieces));
        for per_job in [1, 2, 4].into_iter().filter(|per_job| pieces.n.is_multiple_of(*per_job)) {
            let split = product(&x, &w, &pieces, How { n_blocks: 2, order: 1, per_job: Some(per_job) });
            assert_bits(&format!("leaves, {per_job} for each job"), &split, &whole);
        }
    }
}
