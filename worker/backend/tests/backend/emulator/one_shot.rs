//! Sums over the memory of several devices. Each rank is a thread of the operating system, whose blocks meet those of
//! the others in any order. The bits are those of the leaves' tree in every sum, and a rank that waits in vain ends.
//!
//! Bugs planted in copies of the kernel, and caught: either barrier left out, a buffer of one side, a wait for the
//! previous sum, numbers taken from a rank that did not come, a flag raised by a rank that gave up. Not caught: the
//! warp's synchronization between signal and wait, without which lanes may signal late but no bit changes.

use super::device::{Launch, Memory, ORDERS, UNWRITTEN};
use crate::arguments;
use crate::numbers::Rng;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use types::leaves::{Fold, aligned_runs, sum_runs};

const RANKS: usize = 8;
const PLANES: usize = 128;
const BUFFER: usize = 2 << 20;
const REGION: usize = 2048;
const BLOCKS: usize = 64;
/// Longer than any wait that ends.
const PATIENT: Duration = Duration::from_secs(60);

/// `Ranks` of `kernels.cuh`, field by field.
#[repr(C)]
#[derive(Clone, Copy)]
struct Ranks {
    buffers: [u64; RANKS],
    n_ranks: u32,
    me: u32,
    n_planes: u32,
    per_block: u32,
    rank: [u8; PLANES],
    number: [u8; PLANES],
    merges: [u8; PLANES],
}

/// A stage: the leaves of each rank, and a buffer for each.
struct Stage {
    bounds: Vec<u32>,
    buffers: Vec<Memory<u8>>,
    controls: Vec<Memory<u32>>,
}

impl Stage {
    fn new(bounds: &[u32]) -> Stage {
        let n_ranks = bounds.len() - 1;
        let buffers = (0..n_ranks).map(|_| Memory::filled(BUFFER, 0u8)).collect();
        let controls = (0..n_ranks).map(|_| Memory::filled(2, 0u32)).collect();
        Stage { bounds: bounds.to_vec(), buffers, controls }
    }

    fn n_ranks(&self) -> usize {
        self.buffers.len()
    }

    fn runs(&self, rank: usize) -> Vec<std::ops::Range<u32>> {
        aligned_runs(self.bounds[rank]..self.bounds[rank + 1], *self.bounds.last().unwrap())
    }

    /// The most numbers of each plane that a block can have: those of all planes of a rank lie in one region.
    fn per_block_max(&self) -> usize {
        let n_planes = (0..self.n_ranks()).map(|rank| self.runs(rank).len());
        REGION / n_planes.max().unwrap_or(1).max(1)
    }

    /// The kernel's arguments; each block adds `per_block` numbers of each plane.
    fn ranks(&self, me: usize, per_block: usize) -> Ranks {
        assert!(per_block <= self.per_block_max(), "a block would write into the region of another");
        let mut ranks = Ranks {
            buffers: [0; RANKS],
            n_ranks: self.n_ranks() as u32,
            me: me as u32,
            n_planes: 0,
            per_block: per_block as u32,
            rank: [0; PLANES],
            number: [0; PLANES],
            merges: [0; PLANES],
        };
        ranks.buffers.iter_mut().zip(&self.buffers).for_each(|(at, buffer)| *at = buffer.start() as u64);
        let mut tree = Fold::default();
        for rank in 0..self.n_ranks() {
            for (number, run) in self.runs(rank).iter().enumerate() {
                let i = ranks.n_planes as usize;
                (ranks.rank[i], ranks.number[i], ranks.merges[i]) = (rank as u8, number as u8, tree.push(run) as u8);
                ranks.n_planes += 1;
            }
        }
        ranks
    }
}

/// The leaves of one sum: [n] numbers for each.
fn leaves(n_leaves: u32, n: usize, seed: u64) -> Vec<Vec<f32>> {
    let mut rng = Rng(seed);
    // Numbers of very different magnitudes, so that the order of a sum shows in its bits.
    let mut float = move || rng.unit() * 10f32.powi(rng.below(8) as i32 - 4);
    (0..n_leaves).map(|_| (0..n).map(|_| float()).collect()).collect()
}

fn sum_of(leaves: &[Vec<f32>], run: std::ops::Range<u32>) -> Vec<f32> {
    let leaf = |i: u32, at: usize| (i - run.start..i - run.start + 1, leaves[i as usize][at]);
    (0..leaves[0].len()).map(|at| sum_runs(&run.clone().map(|i| leaf(i, at)).collect::<Vec<_>>())).collect()
}

/// One rank's part of a sum, with planes `stride` apart.
#[derive(Clone, Copy)]
struct Sum {
    n: usize,
    per_block: usize,
    seed: u64,
    order: i32,
    patience: Duration,
}

fn sum(stage: &Stage, rank: usize, sum: Sum) -> Vec<u32> {
    const GAP: usize = 5;
    let (stride, runs) = (sum.n + GAP, stage.runs(rank));
    let leaves = leaves(*stage.bounds.last().unwrap(), sum.n, sum.seed);
    let mut planes = vec![UNWRITTEN; runs.len().max(1) * stride];
    for (plane, run) in planes.chunks_mut(stride).zip(&runs) {
        plane[..sum.n].copy_from_slice(&sum_of(&leaves, run.clone()));
    }
    let planes = Memory::of(&planes);
    let ranks = stage.ranks(rank, sum.per_block);
    let launch = Launch { order: sum.order, ..Launch::new([sum.n.div_ceil(sum.per_block), 1, 1], 256) };
    let patience = sum.patience.as_nanos() as u64;
    launch.ok(
        "sum_one_shot",
        arguments![planes.start(), stride as u64, sum.n as u32, ranks, stage.controls[rank].start(), patience],
    );
    let left = planes.read();
    assert!(
        left[sum.n..stride].iter().all(|x| x.to_bits() == UNWRITTEN.to_bits()),
        "the kernel wrote past the end of the sum"
    );
    left[..sum.n].iter().map(|x| x.to_bits()).collect()
}

fn expected(n_leaves: u32, n: usize, seed: u64) -> Vec<u32> {
    sum_of(&leaves(n_leaves, n, seed), 0..n_leaves).iter().map(|x| x.to_bits()).collect()
}

/// Runs a thread for each rank that takes part.
fn each<T: Send>(ranks: &[usize], run: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || run(*rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

// SAFETY: memory shared by several devices: what two threads do to it is what is tested.
unsafe impl Sync for Stage {}

#[test]
fn sums_have_the_bits_of_the_tree() {
    // Even, uneven, with several runs per rank, and with a rank that owns nothing.
    let stages: [&[u32]; 6] = [
        &[0, 4, 8],
        &[0, 3, 8],
        &[0, 1, 5, 5, 9],
        &[0, 1, 2, 3, 4, 5, 6, 7, 8],
        &[0, 5, 7],
        &[0, 7, 29, 64, 64, 100, 127, 128],
    ];
    for (bounds, order) in stages.iter().zip(ORDERS.into_iter().cycle()) {
        let stage = Stage::new(bounds);
        let all: Vec<usize> = (0..stage.n_ranks()).collect();
        // Sums of many blocks, of one, and cut otherwise, so that leftovers of one meet the next.
        let sums = [(1, 512), (700, 96), (33, 512), (64, 32), (700, 96), (1, 512), (600, 512), (288, 96)];
        each(&all, |rank| {
            let mut rng = Rng(rank as u64);
            for (seed, (n, per_block)) in sums.into_iter().enumerate() {
                // A different rank is late each time.
                std::thread::sleep(Duration::from_micros(rng.next() % 2000));
                let per_block = per_block.min(stage.per_block_max());
                let of = Sum { n, per_block, seed: seed as u64, order, patience: PATIENT };
                let expected = expected(*bounds.last().unwrap(), n, of.seed);
                assert_eq!(sum(&stage, rank, of), expected, "rank {rank} of {bounds:?}, sum {seed}");
            }
        });
        assert!(stage.controls.iter().all(|control| control.read() == [0, 0]));
    }
}

#[test]
fn the_largest_fill_their_places_and_no_more() {
    let stage = Stage::new(&[0, 4, 8]);
    let (n, per_block) = (BLOCKS * REGION - 3, REGION);
    each(&[0, 1], |rank| {
        for seed in [7, 8, 9] {
            let of = Sum { n, per_block, seed, order: 0, patience: PATIENT };
            assert!(sum(&stage, rank, of) == expected(8, n, seed), "rank {rank}");
        }
    });
    // The guards of both buffers are as they were.
    stage.buffers.iter().for_each(|buffer| drop(buffer.read()));
}

#[test]
fn timed_out_sum_ends_and_writes_nothing() {
    let stage = Stage::new(&[0, 3, 6, 8]);
    let of = |seed, patience| Sum { n: 300, per_block: 96, seed, order: 2, patience };
    each(&[0, 1, 2], |rank| assert_eq!(sum(&stage, rank, of(1, PATIENT)), expected(8, 300, 1)));
    // Rank 2 does not come.
    let own = |rank: usize, seed| {
        let leaves = leaves(8, 300, seed);
        sum_of(&leaves, stage.runs(rank)[0].clone()).iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    };
    let short = Duration::from_millis(100);
    let found = each(&[0, 1], |rank| sum(&stage, rank, of(2, short)));
    assert_eq!(found, [own(0, 2), own(1, 2)], "no sum is written");
    assert_eq!(
        [0, 1].map(|rank: usize| stage.controls[rank].read()),
        [[0, 3]; 2],
        "the control names the missing rank"
    );
    // The next sum ends at once, whatever its patience, and no rank uses data of one that gave up.
    let late = sum(&stage, 0, of(3, PATIENT));
    assert_eq!((late, stage.controls[0].read()[1]), (own(0, 3), 3));
    let found = each(&[1, 2], |rank| sum(&stage, rank, of(if rank == 2 { 2 } else { 3 }, short)));
    assert_eq!(found[0], own(1, 3));
    // Rank 1 can still finish the sum that it missed, as all had shown their planes; after that it waits in vain.
    assert_eq!(found[1], expected(8, 300, 2));
    assert_eq!(sum(&stage, 2, of(3, short)), own(2, 3));
    assert_eq!(stage.controls[2].read(), [0, 1]);
}

#[test]
fn the_host_ends_a_wait() {
    let stage = Stage::new(&[0, 4, 8]);
    let stop = |stage: &Stage| {
        std::thread::sleep(Duration::from_millis(50));
        // SAFETY: a word that only the kernel reads.
        unsafe { AtomicU32::from_ptr(stage.controls[0].start()) }.store(1, Ordering::Release);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| stop(&stage));
        let of = Sum { n: 40, per_block: 512, seed: 1, order: 0, patience: PATIENT };
        assert_ne!(sum(&stage, 0, of), expected(8, 40, 1));
    });
    assert_eq!(stage.controls[0].read(), [1, 2]);
}
