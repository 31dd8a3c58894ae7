//! Ranks that exchange from device to device, over a fake driver and a fake NCCL. The bits are those of one rank,
//! however sums are cut. A rank that is gone, silent or failed causes an error, though communicators wait forever.

use crate::common::Rng;
use crate::device_sums::{HIDDEN, bits, expected_sum, filled, sum};
use crate::fake_cuda::on_fake_cuda;
use backend::Memory;
use backend::cpu::{CpuConfig, Isa};
use backend::cuda::{Cuda, CudaConfig, Driver};
use collective::{
    AbortHandle, CancelFlag, CarrierChoice, ChunkLimits, Error, ExchangeLimits, Mesh, NcclError, Ranks, WaitPolicy,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Barrier, Mutex};
use std::time::Duration;
use types::{Activations, Grid, Layout, NumericsMode, Rank};

const N_VOCAB: usize = 101;
const N_ROWS: usize = 7;
const N_LEAVES: [u32; 3] = [8, 5, 3];
/// A deadline that a busy machine meets, where nothing should fail.
const PATIENT: Duration = Duration::from_secs(120);
const IMPATIENT: Duration = Duration::from_secs(4);
/// A deadline that no test reaches.
const FOREVER: Duration = Duration::from_secs(24 * 3600);

/// One device for each rank: these tests allocate between exchanges, and on a shared device an allocation may wait for
/// a kernel that waits for the allocating rank.
const EACH: (&str, &str) = ("FAKE_CUDA_DEVICES", "4");

fn cuda(rank: u32, mode: NumericsMode) -> Cuda {
    let n_devices = Driver::find().unwrap().cards().unwrap().len() as u32;
    let ordinal = rank % n_devices;
    let host = CpuConfig { threads: 1, activations: Activations::F32, isa: Isa::detect(), spin: false };
    Cuda::open(&CudaConfig { ordinal, cache: None, mode, host, graphs: true }).unwrap()
}

fn limits(chunks: ChunkLimits) -> ExchangeLimits {
    let (rows_max, hidden, outputs_max, n_vocab) = (N_ROWS, HIDDEN, N_ROWS, N_VOCAB);
    ExchangeLimits { rows_max, hidden, outputs_max, n_vocab, n_leaves: N_LEAVES.into(), chunks }
}

fn ranks(layout: &Layout, deadline: Duration) -> Vec<Mesh> {
    Mesh::in_process_with(layout, WaitPolicy { deadline, spin: false }).unwrap()
}

/// Runs each rank on a thread with its own device, opened before any rank waits for another. Returns the answers in
/// rank order.
fn each<T: Send>(ranks: Vec<Mesh>, run: impl Fn(Mesh, &Cuda) -> T + Sync) -> Vec<T> {
    each_at(NumericsMode::Lockstep, ranks, run)
}

fn each_at<T: Send>(mode: NumericsMode, ranks: Vec<Mesh>, run: impl Fn(Mesh, &Cuda) -> T + Sync) -> Vec<T> {
    let are_open = Barrier::new(ranks.len());
    std::thread::scope(|scope| {
        let (run, are_open) = (&run, &are_open);
        let start = |(i, mesh): (u32, Mesh)| {
            scope.spawn(move || {
                let cuda = cuda(i, mode);
                are_open.wait();
                run(mesh, &cuda)
            })
        };
        let threads: Vec<_> = (0..).zip(ranks).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns ranks over this carrier, with default chunk limits.
fn take(mesh: Mesh, cuda: &Cuda, choice: CarrierChoice) -> Result<Ranks<Cuda>, Error> {
    Ranks::with_carrier(cuda, mesh, choice, &limits(ChunkLimits::default()), &CancelFlag::default())
}

/// Runs all operations, within a stage and between stages, several times over, so that leftovers of one meet the next.
fn all_operations(rank: &mut Ranks<Cuda>, cuda: &Cuda) {
    for (n_leaves, n_rows) in N_LEAVES.into_iter().flat_map(|n| [1, N_ROWS].map(|rows| (n, rows))) {
        assert_eq!(sum(rank, cuda, n_leaves, n_rows).unwrap(), expected_sum(n_leaves, n_rows));
    }
    let stream: Vec<f32> = Rng(77).floats(N_ROWS * HIDDEN);
    let as_bits: Vec<u32> = stream.iter().map(|value| value.to_bits()).collect();
    let (part, n_units) = (rank.part().clone(), N_VOCAB as u32);
    let owner = |row: usize| u32::from(part.shares.owner(row as u32 * 37 % n_units, n_units));
    let own = |i: usize| if owner(i / HIDDEN) == rank.stage_rank() { stream[i] } else { -1.0 };
    let mut rows = filled(cuda, N_ROWS, HIDDEN, &(0..stream.len()).map(own).collect::<Vec<_>>());
    rank.share_rows(cuda, &mut rows, owner, N_ROWS).unwrap();
    assert_eq!(bits(cuda, &rows, N_ROWS, HIDDEN), as_bits);
    let logits = Rng(78).floats(N_ROWS * N_VOCAB);
    let cols = rank.owned_units(n_units);
    let mine = |row: usize| &logits[row * N_VOCAB..][cols.start as usize..cols.end as usize];
    let mine = filled(cuda, N_ROWS, cols.len(), &(0..N_ROWS).flat_map(mine).copied().collect::<Vec<_>>());
    let mut whole = filled(cuda, N_ROWS, N_VOCAB, &vec![-1.0; N_ROWS * N_VOCAB]);
    rank.gather_columns(cuda, &mine, &mut whole, n_units, N_ROWS).unwrap();
    let whole = bits(cuda, &whole, N_ROWS, N_VOCAB);
    assert!(rank.stage_rank() != 0 || whole == logits.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
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
    on_fake_cuda("every_operation_has_the_bits_of_one_rank", &[EACH], || {
        let mut rng = Rng(5);
        let small = ChunkLimits { small_max: 40, chunk_max: 3 * HIDDEN };
        let grids = [(2, 1, true), (3, 1, false), (1, 3, true), (2, 2, false), (4, 1, false)];
        for ((tp, pp, is_even), chunks) in grids.into_iter().zip([ChunkLimits::default(), small].into_iter().cycle()) {
            let grid = Grid { tp, pp };
            let even = || Layout::even(grid, pp.into()).unwrap();
            let layout = if is_even { even() } else { rng.layout(tp.into(), pp.into()) };
            for chunks in [chunks, small] {
                each(ranks(&layout, PATIENT), |mesh, cuda| {
                    let took =
                        Ranks::with_carrier(cuda, mesh, CarrierChoice::Nccl, &limits(chunks), &CancelFlag::default());
                    let mut rank = took.unwrap();
                    assert!(rank.uses_carrier(CarrierChoice::Nccl), "tp {tp}, pp {pp}");
                    (0..2).for_each(|_| all_operations(&mut rank, cuda));
                });
            }
        }
    });
}

#[test]
fn under_fast_sums_are_nccls() {
    on_fake_cuda("under_fast_sums_are_nccls", &[EACH], || {
        let mut rng = Rng(9);
        // In the last layout ranks own several runs, one, or none.
        for (tp, is_even) in [(2, true), (3, false), (4, false)] {
            let layout = if is_even { Layout::even(Grid { tp, pp: 1 }, 1).unwrap() } else { rng.layout(tp.into(), 1) };
            let sums = each_at(NumericsMode::Fast, ranks(&layout, PATIENT), |mesh, cuda| {
                let mut rank = take(mesh, cuda, CarrierChoice::Nccl).unwrap();
                assert!(rank.uses_carrier(CarrierChoice::Nccl), "tp {tp}");
                N_LEAVES.map(|n_leaves| sum(&mut rank, cuda, n_leaves, N_ROWS).unwrap())
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

/// Returns the error of the first of two ranks when the second does `instead` in place of its second sum, and then
/// stays.
fn first_beside(deadline: Duration, instead: impl Fn(&mut Ranks<Cuda>) + Sync) -> Error {
    let layout = Layout::even(Grid { tp: 2, pp: 1 }, 1).unwrap();
    let (end, wait) = channel::<()>();
    let (end, wait) = (Mutex::new(Some(end)), Mutex::new(wait));
    let mut errors = each(ranks(&layout, deadline), |mesh, cuda| {
        let rank = &mut take(mesh, cuda, CarrierChoice::Nccl).unwrap();
        assert_eq!(sum(rank, cuda, 8, 2).unwrap(), expected_sum(8, 2));
        if rank.stage_rank() == 1 {
            instead(rank);
            let _ended = wait.lock().unwrap().recv();
            return None;
        }
        let error = sum(rank, cuda, 8, 2).err();
        end.lock().unwrap().take();
        error
    });
    errors.swap_remove(0).unwrap()
}

#[test]
fn silent_rank_is_a_deadline() {
    on_fake_cuda("silent_rank_is_a_deadline", &[EACH], || {
        let error = first_beside(IMPATIENT, |_| {});
        assert!(matches!(error, Error::Deadline { rank: Rank(1) }), "{error}");
    });
}

#[test]
fn break_off_is_named_long_before_the_deadline() {
    on_fake_cuda("break_off_is_named_long_before_the_deadline", &[EACH], || {
        let error = first_beside(PATIENT, |rank| rank.abort_handle().abort());
        assert!(matches!(error, Error::PeerLost { rank: Rank(1) }), "{error}");
    });
}

/// The first of two ranks begins a sum that the second never begins, while NCCL connects the ranks for it.
fn lost_while_nccl_connects() {
    let error = first_beside(FOREVER, |rank| rank.abort_handle().abort());
    assert!(matches!(error, Error::PeerLost { rank: Rank(1) }), "{error}");
    let error = first_beside(IMPATIENT, |_| {});
    assert!(matches!(error, Error::Deadline { rank: Rank(1) }), "{error}");
}

#[test]
fn rank_lost_while_nccl_connects_is_named() {
    let screws = [EACH, ("FAKE_NCCL_CONNECTS", "1")];
    on_fake_cuda("rank_lost_while_nccl_connects_is_named", &screws, lost_while_nccl_connects);
}

#[test]
fn a_call_of_nccls_that_waits_for_a_peer_comes_back() {
    // Like an NCCL whose environment makes communicators block.
    let screws = [EACH, ("FAKE_NCCL_CONNECTS", "1"), ("FAKE_NCCL_BLOCKING", "1")];
    on_fake_cuda("a_call_of_nccls_that_waits_for_a_peer_comes_back", &screws, lost_while_nccl_connects);
}

/// A file of this test alone, removed afterwards.
struct Beside(String);

impl Beside {
    fn new(test: &str) -> Beside {
        let path = std::env::temp_dir().join(format!("lockstep-nccl-{test}-{}", std::process::id()));
        Beside(path.to_str().unwrap().into())
    }

    /// Returns the file that a setting names.
    fn of(screw: &str) -> PathBuf {
        std::env::var_os(screw).unwrap().into()
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // The file may never have been written.
        let _gone = fs::remove_file(&self.0);
    }
}

/// Returns how many lines of the trace are `what`.
fn times(trace: &Path, what: &str) -> usize {
    fs::read_to_string(trace).unwrap().lines().filter(|line| *line == what).count()
}

#[test]
fn nothing_remains_of_ranks_that_rejoin() {
    let trace = Beside::new("again");
    let screws = [EACH, ("FAKE_CUDA_TRACE", &*trace.0)];
    on_fake_cuda("nothing_remains_of_ranks_that_rejoin", &screws, || {
        let layout = Layout::even(Grid { tp: 2, pp: 2 }, 2).unwrap();
        let mut handles = Vec::new();
        let have_exchanged = Barrier::new(4);
        for round in 0..4 {
            let of_ranks = each(ranks(&layout, PATIENT), |mesh, cuda| {
                let rank = &mut take(mesh, cuda, CarrierChoice::Nccl).unwrap();
                assert!(rank.uses_carrier(CarrierChoice::Nccl));
                assert_eq!(sum(rank, cuda, 8, 2).unwrap(), expected_sum(8, 2));
                let handle = rank.abort_handle();
                // No rank breaks off before the others have its data.
                have_exchanged.wait();
                if round % 2 == 1 {
                    handle.abort();
                    // NCCL may have reported a peer's abort before this rank's own.
                    let result = sum(rank, cuda, 8, 2).map(drop);
                    let is_ended = matches!(result, Err(Error::Aborted | Error::PeerLost { .. } | Error::Nccl(_)));
                    assert!(is_ended, "{result:?}");
                }
                handle
            });
            handles.extend(of_ranks);
        }
        let trace = Beside::of("FAKE_CUDA_TRACE");
        // Two communicators per rank: its stage's, and one with the other stage.
        assert_eq!((times(&trace, "communicator"), times(&trace, "communicator ended")), (32, 32));
        // Every owner of a mark holds its device.
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
        let layout = Layout::even(Grid { tp: 2, pp: 2 }, 2).unwrap();
        let takes = |mesh: Mesh, cuda: &Cuda, choice: CarrierChoice| {
            take(mesh, cuda, choice).unwrap().uses_carrier(CarrierChoice::Nccl)
        };
        // The second stage goes through the host, and so does every exchange with it.
        each(ranks(&layout, PATIENT), |mesh, cuda| {
            let choice = if mesh.part().is_first() { CarrierChoice::Auto } else { CarrierChoice::Host };
            assert!(!takes(mesh, cuda, choice));
        });
        assert_eq!(times(&trace, "id"), 0);
        each(ranks(&layout, PATIENT), |mesh, cuda| assert!(takes(mesh, cuda, CarrierChoice::Nccl)));
        // One id per stage, and one per pair between them.
        assert_eq!(times(&trace, "id"), 4);
    });
}

#[test]
fn nccl_refusal_is_reported_despite_hung_shutdown() {
    let until = Beside::new("hold");
    let screws = [("FAKE_NCCL_DUPLICATE", "0"), ("FAKE_NCCL_HOLD", &*until.0)];
    on_fake_cuda("nccl_refusal_is_reported_despite_hung_shutdown", &screws, || {
        let layout = Layout::even(Grid { tp: 2, pp: 1 }, 1).unwrap();
        let errors = each(ranks(&layout, FOREVER), |mesh, cuda| take(mesh, cuda, CarrierChoice::Nccl).err().unwrap());
        let Error::Nccl(NcclError::Failed { code: 5, why }) = &errors[0] else { panic!("{errors:?}") };
        assert!(why.contains("invalid usage; Duplicate GPU detected"), "{why}");
        assert!(matches!(errors[1], Error::PeerLost { rank: Rank(0) }), "{errors:?}");
        fs::write(Beside::of("FAKE_NCCL_HOLD"), "").unwrap();
    });
}

#[test]
fn a_wait_of_the_device_is_ended_from_outside() {
    on_fake_cuda("a_wait_of_the_device_is_ended_from_outside", &[EACH], || {
        let layout = Layout::even(Grid { tp: 2, pp: 1 }, 1).unwrap();
        let (sender, handles) = channel();
        let sender = Mutex::new(Some(sender));
        let (end, wait) = channel::<()>();
        let (end, wait) = (Mutex::new(Some(end)), Mutex::new(wait));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let handle: AbortHandle = handles.recv().unwrap();
                std::thread::sleep(Duration::from_millis(50));
                handle.abort();
            });
            each(ranks(&layout, PATIENT), |mesh, cuda| {
                let rank = &mut take(mesh, cuda, CarrierChoice::Nccl).unwrap();
                if rank.stage_rank() == 1 {
                    let _ended = wait.lock().unwrap().recv();
                    return;
                }
                sender.lock().unwrap().take().unwrap().send(rank.abort_handle()).unwrap();
                let error = sum(rank, cuda, 8, 2).err().unwrap();
                assert!(matches!(error, Error::Aborted), "{error}");
                assert!(matches!(sum(rank, cuda, 8, 2), Err(Error::Aborted)), "it stays so");
                end.lock().unwrap().take();
            });
        });
    });
}

#[test]
fn communicator_error_is_reported() {
    on_fake_cuda("communicator_error_is_reported", &[EACH, ("FAKE_NCCL_FAIL", "15")], || {
        let layout = Layout::even(Grid { tp: 2, pp: 1 }, 1).unwrap();
        let errors = each(ranks(&layout, PATIENT), |mesh, cuda| {
            // After the trial exchanges.
            let rank = &mut take(mesh, cuda, CarrierChoice::Nccl).unwrap();
            (0..4).find_map(|_| sum(rank, cuda, 8, 2).err())
        });
        let failed = errors
            .iter()
            .flatten()
            .filter(|error| matches!(error, Error::Nccl(NcclError::Failed { code: 2, .. })))
            .count();
        let lost = errors.iter().flatten().filter(|error| matches!(error, Error::PeerLost { .. })).count();
        assert_eq!((failed, lost), (1, 1), "{errors:?}");
    });
}

#[test]
fn rank_absent_from_communicator_ends_the_wait() {
    on_fake_cuda("rank_absent_from_communicator_ends_the_wait", &[("FAKE_NCCL_ABSENT", "1")], || {
        let layout = Layout::even(Grid { tp: 2, pp: 1 }, 1).unwrap();
        let errors = each(ranks(&layout, IMPATIENT), |mesh, cuda| take(mesh, cuda, CarrierChoice::Nccl).err().unwrap());
        let is_named = |error: &Error| matches!(error, Error::Deadline { .. } | Error::PeerLost { .. });
        assert!(errors.iter().all(is_named), "{errors:?}");
        // A cancelled rank waits for no peer.
        let cancel = CancelFlag::default();
        cancel.cancel();
        let errors = each(ranks(&layout, PATIENT), |mesh, cuda| {
            let limits = limits(ChunkLimits::default());
            Ranks::with_carrier(cuda, mesh, CarrierChoice::Nccl, &limits, &cancel).err().unwrap()
        });
        assert!(errors.iter().any(|error| matches!(error, Error::Aborted)), "{errors:?}");
    });
}

#[test]
fn where_it_cannot_be_the_host_carries_or_it_is_refused() {
    on_fake_cuda("where_it_cannot_be_the_host_carries_or_it_is_refused", &[("FAKE_NCCL_VERSION", "22800")], || {
        let layout = Layout::even(Grid { tp: 2, pp: 1 }, 1).unwrap();
        each(ranks(&layout, PATIENT), |mesh, cuda| {
            // Both ranks are on one device, and this NCCL is too old for that.
            let rank = &mut take(mesh, cuda, CarrierChoice::Auto).unwrap();
            assert!(!rank.uses_carrier(CarrierChoice::Nccl));
            assert_eq!(sum(rank, cuda, 8, 2).unwrap(), expected_sum(8, 2));
        });
        each(ranks(&layout, PATIENT), |mesh, cuda| {
            let error = take(mesh, cuda, CarrierChoice::Nccl);
            assert!(matches!(error, Err(Error::Plan(why)) if why.contains("2.30")));
        });
    });
}
