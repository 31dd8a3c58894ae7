//! Ranks that exchange from device to device, over a driver and an NCCL that are faked: the bits are those of one rank,
//! however sums are cut; and who is gone, silent or failed is an error that comes, though communicators wait for ever.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;
#[path = "../../backend/tests/fake_cuda/mod.rs"]
mod fake_cuda;

use backend::cpu::{CpuConfig, Isa};
use backend::cuda::{Buffer, Cuda, CudaConfig};
use backend::{Activations, Memory};
use collective::{AbortHandle, Carrier, Collective, DirectLimits, Ended, Error, NcclError, Pieces, Waits};
use common::Rng;
use fake_cuda::on_fake_cuda;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Barrier, Mutex};
use std::time::Duration;
use types::leaves::{aligned_runs, sum_runs};
use types::{Grid, Layout, Pace, Rank};

const HIDDEN: usize = 80;
const N_VOCAB: usize = 101;
const N_ROWS: usize = 7;
const N_LEAVES: [u32; 3] = [8, 5, 3];
/// Long enough for a busy machine to get there, where nothing is to fail.
const PATIENT: Duration = Duration::from_secs(120);
const IMPATIENT: Duration = Duration::from_secs(4);
/// Nobody waits for this.
const FOREVER: Duration = Duration::from_secs(24 * 3600);

fn cuda(pace: Pace) -> Cuda {
    let host = CpuConfig { threads: 1, activations: Activations::F32, isa: Isa::detect(), spin: false };
    Cuda::open(&CudaConfig { ordinal: 0, cache: None, pace, host, graphs: true }).unwrap()
}

fn limits(pieces: Pieces) -> DirectLimits {
    let (rows_max, hidden, outputs_max, n_vocab) = (N_ROWS, HIDDEN, N_ROWS, N_VOCAB);
    DirectLimits { rows_max, hidden, outputs_max, n_vocab, n_leaves: N_LEAVES.into(), pieces }
}

fn ranks(layout: &Layout, deadline: Duration) -> Vec<Collective> {
    Collective::in_process_with(layout, Waits { deadline, spin: false }).unwrap()
}

/// A thread for each rank, and a device that it has opened before anybody waits for anybody; the answers by rank.
fn each<T: Send>(ranks: Vec<Collective>, run: impl Fn(&mut Collective, &Cuda) -> T + Sync) -> Vec<T> {
    each_at(Pace::Lockstep, ranks, run)
}

fn each_at<T: Send>(pace: Pace, ranks: Vec<Collective>, run: impl Fn(&mut Collective, &Cuda) -> T + Sync) -> Vec<T> {
    let are_open = Barrier::new(ranks.len());
    std::thread::scope(|scope| {
        let (run, are_open) = (&run, &are_open);
        let start = |mut rank: Collective| {
            scope.spawn(move || {
                let cuda = cuda(pace);
                are_open.wait();
                run(&mut rank, &cuda)
            })
        };
        let threads: Vec<_> = ranks.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn filled(cuda: &Cuda, n_rows: usize, n_cols: usize, values: &[f32]) -> Buffer {
    let mut buffer = cuda.buffer(n_rows.max(1), n_cols).unwrap();
    if n_cols > 0 && !values.is_empty() {
        cuda.write(&mut buffer, 0, values);
    }
    buffer
}

fn bits(cuda: &Cuda, buffer: &Buffer, n_rows: usize, n_cols: usize) -> Vec<u32> {
    let mut values = vec![0.0; n_rows * n_cols];
    cuda.read(buffer, 0..n_rows, &mut values);
    values.iter().map(|value| value.to_bits()).collect()
}

/// Of leaves that are single numbers times what the seed says: [n_rows * n_cols] for each leaf.
fn leaves(n_leaves: u32, n_rows: usize) -> Vec<Vec<f32>> {
    let mut rng = Rng(u64::from(n_leaves) * 100 + n_rows as u64);
    (0..n_leaves).map(|_| rng.floats(n_rows * HIDDEN)).collect()
}

fn sum_of(leaves: &[Vec<f32>], run: std::ops::Range<u32>) -> Vec<f32> {
    let leaf = |i: u32, at: usize| (i - run.start..i - run.start + 1, leaves[i as usize][at]);
    (0..leaves[0].len()).map(|at| sum_runs(&run.clone().map(|i| leaf(i, at)).collect::<Vec<_>>())).collect()
}

fn sum(rank: &mut Collective, cuda: &Cuda, n_leaves: u32, n_rows: usize) -> Result<Vec<u32>, Error> {
    let leaves = leaves(n_leaves, n_rows);
    let runs = aligned_runs(rank.owned(n_leaves), n_leaves);
    let planes: Vec<f32> = runs.iter().flat_map(|run| sum_of(&leaves, run.clone())).collect();
    let mut buffer = filled(cuda, runs.len().max(1) * n_rows, HIDDEN, &planes);
    rank.sum_leaves(cuda, &mut buffer, &runs, n_leaves, n_rows)?;
    let found = bits(cuda, &buffer, n_rows, HIDDEN);
    rank.settle().map(|()| found)
}

fn expected_sum(n_leaves: u32, n_rows: usize) -> Vec<u32> {
    sum_of(&leaves(n_leaves, n_rows), 0..n_leaves).iter().map(|value| value.to_bits()).collect()
}

/// All operations of a stage and between stages, several times over, so that what one leaves behind meets the next.
fn all_operations(rank: &mut Collective, cuda: &Cuda) {
    for (n_leaves, n_rows) in N_LEAVES.into_iter().flat_map(|n| [1, N_ROWS].map(|rows| (n, rows))) {
        assert_eq!(sum(rank, cuda, n_leaves, n_rows).unwrap(), expected_sum(n_leaves, n_rows));
    }
    let stream: Vec<f32> = Rng(77).floats(N_ROWS * HIDDEN);
    let as_bits: Vec<u32> = stream.iter().map(|value| value.to_bits()).collect();
    let (part, n_units) = (rank.part().clone(), N_VOCAB as u32);
    let owner = |row: usize| u32::from(part.shares.owner(row as u32 * 37 % n_units, n_units));
    let own = |i: usize| if owner(i / HIDDEN) == rank.rank() { stream[i] } else { -1.0 };
    let mut rows = filled(cuda, N_ROWS, HIDDEN, &(0..stream.len()).map(own).collect::<Vec<_>>());
    rank.share_rows(cuda, &mut rows, owner, N_ROWS).unwrap();
    assert_eq!(bits(cuda, &rows, N_ROWS, HIDDEN), as_bits);
    let logits = Rng(78).floats(N_ROWS * N_VOCAB);
    let cols = rank.owned(n_units);
    let mine = |row: usize| &logits[row * N_VOCAB..][cols.start as usize..cols.end as usize];
    let mine = filled(cuda, N_ROWS, cols.len(), &(0..N_ROWS).flat_map(mine).copied().collect::<Vec<_>>());
    let mut whole = filled(cuda, N_ROWS, N_VOCAB, &vec![-1.0; N_ROWS * N_VOCAB]);
    rank.gather_columns(cuda, &mine, &mut whole, n_units, N_ROWS).unwrap();
    let whole = bits(cuda, &whole, N_ROWS, N_VOCAB);
    assert!(rank.rank() != 0 || whole == logits.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
    for round in 0..3 {
        let n_rows = N_ROWS - round;
        let mut here = filled(cuda, N_ROWS, HIDDEN, &vec![-1.0; N_ROWS * HIDDEN]);
        match part.is_first() {
            true => cuda.write(&mut here, 0, &stream),
            false => rank.recv_rows(cuda, &mut here, n_rows).unwrap(),
        }
        if !part.is_last() {
            rank.send_rows(cuda, &here, n_rows).unwrap();
        }
        assert_eq!(bits(cuda, &here, n_rows, HIDDEN), as_bits[..n_rows * HIDDEN]);
    }
    rank.settle().unwrap();
}

#[test]
fn every_operation_has_the_bits_of_one_rank() {
    on_fake_cuda("every_operation_has_the_bits_of_one_rank", &[], || {
        let mut rng = Rng(5);
        let small = Pieces { small_max: 40, piece_max: 3 * HIDDEN };
        let grids = [(2, 1, true), (3, 1, false), (1, 3, true), (2, 2, false), (4, 1, false)];
        for ((tp, pp, is_even), pieces) in grids.into_iter().zip([Pieces::default(), small].into_iter().cycle()) {
            let grid = Grid { tp, pp, ep: 1 };
            let even = || Layout::even(grid, pp.into()).unwrap();
            let layout = if is_even { even() } else { rng.layout(tp.into(), pp.into()) };
            for pieces in [pieces, small] {
                each(ranks(&layout, PATIENT), |rank, cuda| {
                    let took = rank.take_device(cuda, Carrier::Nccl, &limits(pieces), &Ended::default());
                    assert!(took.unwrap(), "tp {tp}, pp {pp}");
                    (0..2).for_each(|_| all_operations(rank, cuda));
                });
            }
        }
    });
}

#[test]
fn under_fast_sums_are_nccls() {
    on_fake_cuda("under_fast_sums_are_nccls", &[], || {
        let mut rng = Rng(9);
        // Of the last, ranks own several runs, one, or nothing.
        for (tp, is_even) in [(2, true), (3, false), (4, false)] {
            let layout =
                if is_even { Layout::even(Grid { tp, pp: 1, ep: 1 }, 1).unwrap() } else { rng.layout(tp.into(), 1) };
            let sums = each_at(Pace::Fast, ranks(&layout, PATIENT), |rank, cuda| {
                let took = rank.take_device(cuda, Carrier::Nccl, &limits(Pieces::default()), &Ended::default());
                assert!(took.unwrap(), "tp {tp}");
                N_LEAVES.map(|n_leaves| sum(rank, cuda, n_leaves, N_ROWS).unwrap())
            });
            assert!(sums.iter().all(|of_rank| *of_rank == sums[0]), "tp {tp}: all ranks have the same bits");
            for (n_leaves, sum) in N_LEAVES.into_iter().zip(&sums[0]) {
                let floats = |bits: &[u32]| bits.iter().map(|bits| f32::from_bits(*bits)).collect::<Vec<_>>();
                let (sum, expected) = (floats(sum), floats(&expected_sum(n_leaves, N_ROWS)));
                let limit = expected.iter().fold(0.0f32, |largest, x| largest.max(x.abs())) * 1e-5;
                let near = |(got, expected): (&f32, &f32)| (got - expected).abs() <= limit;
                assert!(sum.iter().zip(&expected).all(near), "tp {tp}, {n_leaves} leaves");
            }
        }
    });
}

/// What the first of two ranks says when the second does `instead` of its second sum, and stays until then.
fn first_beside(deadline: Duration, instead: impl Fn(&mut Collective) + Sync) -> Error {
    let layout = Layout::even(Grid { tp: 2, pp: 1, ep: 1 }, 1).unwrap();
    let (end, wait) = channel::<()>();
    let (end, wait) = (Mutex::new(Some(end)), Mutex::new(wait));
    let mut said = each(ranks(&layout, deadline), |rank, cuda| {
        rank.take_device(cuda, Carrier::Nccl, &limits(Pieces::default()), &Ended::default()).unwrap();
        assert_eq!(sum(rank, cuda, 8, 2).unwrap(), expected_sum(8, 2));
        if rank.rank() == 1 {
            instead(rank);
            let _ended = wait.lock().unwrap().recv();
            return None;
        }
        let error = sum(rank, cuda, 8, 2).err();
        end.lock().unwrap().take();
        error
    });
    said.swap_remove(0).unwrap()
}

#[test]
fn who_is_silent_is_a_deadline() {
    on_fake_cuda("who_is_silent_is_a_deadline", &[], || {
        let error = first_beside(IMPATIENT, |_| {});
        assert!(matches!(error, Error::Deadline { rank: Rank(1) }), "{error}");
    });
}

#[test]
fn who_breaks_off_is_named_long_before_the_deadline() {
    on_fake_cuda("who_breaks_off_is_named_long_before_the_deadline", &[], || {
        let error = first_beside(PATIENT, |rank| rank.abort_handle().abort());
        assert!(matches!(error, Error::PeerLost { rank: Rank(1) }), "{error}");
    });
}

/// The first of two ranks begins what the second never does, while NCCL connects them for it.
fn lost_while_nccl_connects() {
    let error = first_beside(FOREVER, |rank| rank.abort_handle().abort());
    assert!(matches!(error, Error::PeerLost { rank: Rank(1) }), "{error}");
    let error = first_beside(IMPATIENT, |_| {});
    assert!(matches!(error, Error::Deadline { rank: Rank(1) }), "{error}");
}

#[test]
fn who_is_lost_while_nccl_connects_is_named() {
    let screws = [("FAKE_NCCL_CONNECTS", "1")];
    on_fake_cuda("who_is_lost_while_nccl_connects_is_named", &screws, lost_while_nccl_connects);
}

#[test]
fn a_call_of_nccls_that_waits_for_a_peer_comes_back() {
    // As where NCCL's own environment has communicators block.
    let screws = [("FAKE_NCCL_CONNECTS", "1"), ("FAKE_NCCL_BLOCKING", "1")];
    on_fake_cuda("a_call_of_nccls_that_waits_for_a_peer_comes_back", &screws, lost_while_nccl_connects);
}

/// A file beside those of other tests, gone afterwards.
struct Beside(String);

impl Beside {
    fn new(test: &str) -> Beside {
        let path = std::env::temp_dir().join(format!("lockstep-nccl-{test}-{}", std::process::id()));
        Beside(path.to_str().unwrap().into())
    }

    /// The one that a screw names.
    fn of(screw: &str) -> PathBuf {
        std::env::var_os(screw).unwrap().into()
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // It may never have been written.
        let _gone = fs::remove_file(&self.0);
    }
}

/// How often a line was told.
fn times(trace: &Path, what: &str) -> usize {
    fs::read_to_string(trace).unwrap().lines().filter(|line| *line == what).count()
}

#[test]
fn nothing_is_left_of_those_who_join_again() {
    let trace = Beside::new("again");
    let screws = [("FAKE_CUDA_TRACE", &*trace.0)];
    on_fake_cuda("nothing_is_left_of_those_who_join_again", &screws, || {
        let layout = Layout::even(Grid { tp: 2, pp: 2, ep: 1 }, 2).unwrap();
        let mut handles = Vec::new();
        let have_exchanged = Barrier::new(4);
        for round in 0..4 {
            let of_ranks = each(ranks(&layout, PATIENT), |rank, cuda| {
                assert!(rank.take_device(cuda, Carrier::Nccl, &limits(Pieces::default()), &Ended::default()).unwrap());
                assert_eq!(sum(rank, cuda, 8, 2).unwrap(), expected_sum(8, 2));
                let handle = rank.abort_handle();
                // Nobody breaks off before the others have what they need of it.
                have_exchanged.wait();
                if round % 2 == 1 {
                    handle.abort();
                    // NCCL may have told of a peer's abort before this rank's own.
                    let said = sum(rank, cuda, 8, 2).map(drop);
                    let is_ended = matches!(said, Err(Error::Aborted | Error::PeerLost { .. } | Error::Nccl(_)));
                    assert!(is_ended, "{said:?}");
                }
                handle
            });
            handles.extend(of_ranks);
        }
        let trace = Beside::of("FAKE_CUDA_TRACE");
        // Two of each rank: its stage's, and one with the other stage.
        assert_eq!((times(&trace, "communicator"), times(&trace, "communicator ended")), (32, 32));
        // Whatever holds a mark holds its device.
        assert_eq!((times(&trace, "retain"), times(&trace, "release")), (16, 16), "{} may abort", handles.len());
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        assert!(maps.contains("libnccl.so.2"), "its threads may still run");
    });
}

#[test]
fn a_name_is_made_when_all_have_agreed() {
    let trace = Beside::new("names");
    let screws = [("FAKE_CUDA_TRACE", &*trace.0)];
    on_fake_cuda("a_name_is_made_when_all_have_agreed", &screws, || {
        let trace = Beside::of("FAKE_CUDA_TRACE");
        let layout = Layout::even(Grid { tp: 2, pp: 2, ep: 1 }, 2).unwrap();
        let take = |rank: &mut Collective, cuda: &Cuda, carrier: Carrier| {
            rank.take_device(cuda, carrier, &limits(Pieces::default()), &Ended::default()).unwrap()
        };
        // The second stage goes through the host, and so does whoever exchanges with it.
        each(ranks(&layout, PATIENT), |rank, cuda| {
            let carrier = if rank.part().is_first() { Carrier::Auto } else { Carrier::Host };
            assert!(!take(rank, cuda, carrier));
        });
        assert_eq!(times(&trace, "id"), 0);
        each(ranks(&layout, PATIENT), |rank, cuda| assert!(take(rank, cuda, Carrier::Nccl)));
        // One of each stage, and one of each pair between them.
        assert_eq!(times(&trace, "id"), 4);
    });
}

#[test]
fn what_nccl_refuses_is_told_and_an_end_that_does_not_come_keeps_nobody() {
    let until = Beside::new("hold");
    let screws = [("FAKE_NCCL_DUPLICATE", "0"), ("FAKE_NCCL_HOLD", &*until.0)];
    on_fake_cuda("what_nccl_refuses_is_told_and_an_end_that_does_not_come_keeps_nobody", &screws, || {
        let layout = Layout::even(Grid { tp: 2, pp: 1, ep: 1 }, 1).unwrap();
        let said = each(ranks(&layout, FOREVER), |rank, cuda| {
            rank.take_device(cuda, Carrier::Nccl, &limits(Pieces::default()), &Ended::default()).err().unwrap()
        });
        let Error::Nccl(NcclError::Failed { code: 5, why }) = &said[0] else { panic!("{said:?}") };
        assert!(why.contains("invalid usage; Duplicate GPU detected"), "{why}");
        assert!(matches!(said[1], Error::PeerLost { rank: Rank(0) }), "{said:?}");
        fs::write(Beside::of("FAKE_NCCL_HOLD"), "").unwrap();
    });
}

#[test]
fn a_wait_of_the_device_is_ended_from_outside() {
    on_fake_cuda("a_wait_of_the_device_is_ended_from_outside", &[], || {
        let layout = Layout::even(Grid { tp: 2, pp: 1, ep: 1 }, 1).unwrap();
        let (say, handles) = channel();
        let say = Mutex::new(Some(say));
        let (end, wait) = channel::<()>();
        let (end, wait) = (Mutex::new(Some(end)), Mutex::new(wait));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let handle: AbortHandle = handles.recv().unwrap();
                std::thread::sleep(Duration::from_millis(50));
                handle.abort();
            });
            each(ranks(&layout, PATIENT), |rank, cuda| {
                rank.take_device(cuda, Carrier::Nccl, &limits(Pieces::default()), &Ended::default()).unwrap();
                if rank.rank() == 1 {
                    let _ended = wait.lock().unwrap().recv();
                    return;
                }
                say.lock().unwrap().take().unwrap().send(rank.abort_handle()).unwrap();
                let error = sum(rank, cuda, 8, 2).err().unwrap();
                assert!(matches!(error, Error::Aborted), "{error}");
                assert!(matches!(sum(rank, cuda, 8, 2), Err(Error::Aborted)), "it stays so");
                end.lock().unwrap().take();
            });
        });
    });
}

#[test]
fn what_nccl_says_of_a_communicator_is_heard() {
    on_fake_cuda("what_nccl_says_of_a_communicator_is_heard", &[("FAKE_NCCL_FAIL", "15")], || {
        let layout = Layout::even(Grid { tp: 2, pp: 1, ep: 1 }, 1).unwrap();
        let said = each(ranks(&layout, PATIENT), |rank, cuda| {
            // Behind what is tried out.
            rank.take_device(cuda, Carrier::Nccl, &limits(Pieces::default()), &Ended::default()).unwrap();
            (0..4).find_map(|_| sum(rank, cuda, 8, 2).err())
        });
        let failed = said
            .iter()
            .flatten()
            .filter(|error| matches!(error, Error::Nccl(NcclError::Failed { code: 2, .. })))
            .count();
        let lost = said.iter().flatten().filter(|error| matches!(error, Error::PeerLost { .. })).count();
        assert_eq!((failed, lost), (1, 1), "{said:?}");
    });
}

#[test]
fn who_never_comes_to_the_communicator_ends_the_wait() {
    on_fake_cuda("who_never_comes_to_the_communicator_ends_the_wait", &[("FAKE_NCCL_ABSENT", "1")], || {
        let layout = Layout::even(Grid { tp: 2, pp: 1, ep: 1 }, 1).unwrap();
        let said = each(ranks(&layout, IMPATIENT), |rank, cuda| {
            rank.take_device(cuda, Carrier::Nccl, &limits(Pieces::default()), &Ended::default()).err().unwrap()
        });
        let is_named = |error: &Error| matches!(error, Error::Deadline { .. } | Error::PeerLost { .. });
        assert!(said.iter().all(is_named), "{said:?}");
        // Whom nobody wants any more waits for nobody.
        let ended = Ended::default();
        ended.end();
        let said = each(ranks(&layout, PATIENT), |rank, cuda| {
            rank.take_device(cuda, Carrier::Nccl, &limits(Pieces::default()), &ended).err().unwrap()
        });
        assert!(said.iter().any(|error| matches!(error, Error::Aborted)), "{said:?}");
    });
}

#[test]
fn where_it_cannot_be_the_host_carries_or_it_is_refused() {
    on_fake_cuda("where_it_cannot_be_the_host_carries_or_it_is_refused", &[("FAKE_NCCL_VERSION", "22800")], || {
        let layout = Layout::even(Grid { tp: 2, pp: 1, ep: 1 }, 1).unwrap();
        each(ranks(&layout, PATIENT), |rank, cuda| {
            // Both are on one device, and this NCCL is too old for that.
            let took = rank.take_device(cuda, Carrier::Auto, &limits(Pieces::default()), &Ended::default());
            assert!(!took.unwrap());
            assert_eq!(sum(rank, cuda, 8, 2).unwrap(), expected_sum(8, 2));
        });
        each(ranks(&layout, PATIENT), |rank, cuda| {
            let error = rank.take_device(cuda, Carrier::Nccl, &limits(Pieces::default()), &Ended::default());
            assert!(matches!(error, Err(Error::Plan(why)) if why.contains("2.30")));
        });
    });
}
