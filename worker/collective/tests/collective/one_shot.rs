//! Ranks that sum over memory that their devices share, over a fake driver, in threads and in processes. The bits are
//! those of one rank. A rank that is gone, silent or stopped is named, though kernels wait. If memory cannot be shared,
//! all ranks use another carrier.

use crate::common::Rng;
use crate::device_sums::{HIDDEN, expected_sum, sum, sum_in};
use crate::fake_cuda::on_fake_cuda;
use crate::{common, device_sums};
use backend::cpu::{CpuConfig, Isa};
use backend::cuda::{Buffer, Cuda, CudaConfig};
use collective::{
    AbortHandle, CancelFlag, CarrierChoice, ChunkLimits, Error, ExchangeLimits, Mesh, MeshPlan, PeerListener, Ranks,
    WaitPolicy,
};
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::mpsc::channel;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};
use types::{Activations, Grid, Layout, NumericsMode, Rank};

const N_LEAVES: [u32; 3] = [8, 5, 3];
const ROWS: [usize; 3] = [1, 7, 19];
/// More numbers than one launch adds.
const ROWS_MAX: usize = 1700;
/// A deadline that a busy machine meets, where nothing should fail.
const PATIENT: Duration = Duration::from_secs(120);
const IMPATIENT: Duration = Duration::from_secs(4);
/// Each rank has its own device, and no usable NCCL.
const ALONE: [(&str, &str); 2] = [("FAKE_CUDA_DEVICES", "4"), ("FAKE_NCCL_VERSION", "20000")];

fn cuda(ordinal: u32, mode: NumericsMode) -> Cuda {
    let host = CpuConfig { threads: 1, activations: Activations::F32, isa: Isa::detect(), spin: false };
    Cuda::open(&CudaConfig { ordinal, cache: None, mode, host, graphs: false }).unwrap()
}

fn limits() -> ExchangeLimits {
    let chunks = ChunkLimits { small_max: 40, chunk_max: 3 * HIDDEN };
    let (rows_max, n_leaves) = (ROWS_MAX, N_LEAVES.into());
    ExchangeLimits { rows_max, hidden: HIDDEN, outputs_max: 1, n_vocab: 16, n_leaves, chunks }
}

fn even(tp: u16) -> Layout {
    Layout::even(Grid { tp, pp: 1 }, 1).unwrap()
}

fn take(mesh: Mesh, cuda: &Cuda, choice: CarrierChoice) -> Result<Ranks<Cuda>, Error> {
    Ranks::with_carrier(cuda, mesh, choice, &limits(), &CancelFlag::default())
}

/// Returns whether the rank exchanges through NCCL, and whether it sums over memory.
fn ways(rank: &Ranks<Cuda>) -> (bool, bool) {
    (rank.uses_carrier(CarrierChoice::Nccl), rank.uses_carrier(CarrierChoice::Ipc))
}

/// Runs each rank on a thread with its own device, opened before any rank waits for another. Returns the answers in
/// rank order.
fn each<T: Send>(
    (layout, deadline, mode): (&Layout, Duration, NumericsMode),
    ordinal: impl Fn(u32) -> u32 + Sync,
    run: impl Fn(Mesh, &Cuda) -> T + Sync,
) -> Vec<T> {
    let ranks = Mesh::in_process_with(layout, WaitPolicy { deadline, spin: false }).unwrap();
    let are_open = Barrier::new(ranks.len());
    std::thread::scope(|scope| {
        let (run, are_open, ordinal) = (&run, &are_open, &ordinal);
        let start = |(i, mesh): (usize, Mesh)| {
            scope.spawn(move || {
                let cuda = cuda(ordinal(i as u32), mode);
                are_open.wait();
                run(mesh, &cuda)
            })
        };
        let threads: Vec<_> = ranks.into_iter().enumerate().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs small sums of several shapes, repeated, with a large one in between.
fn all_sums(rank: &mut Ranks<Cuda>, cuda: &Cuda) {
    all_sums_in(&mut room(cuda), rank, cuda);
}

/// Returns a buffer for the planes of the largest sum.
fn room(cuda: &Cuda) -> Buffer {
    device_sums::filled(cuda, 8 * ROWS[ROWS.len() - 1], HIDDEN, &[])
}

fn all_sums_in(buffer: &mut Buffer, rank: &mut Ranks<Cuda>, cuda: &Cuda) {
    for (n_leaves, n_rows) in N_LEAVES.into_iter().flat_map(|n| ROWS.map(|rows| (n, rows))) {
        let found = sum_in(buffer, rank, cuda, n_leaves, n_rows).unwrap();
        assert!(found == expected_sum(n_leaves, n_rows), "{n_leaves}, {n_rows}");
    }
}

#[test]
fn sums_over_memory_have_the_bits_of_one_rank() {
    on_fake_cuda("sums_over_memory_have_the_bits_of_one_rank", &ALONE, || {
        let mut rng = Rng(5);
        let layouts = [even(2), rng.layout(3, 1), rng.layout(4, 1), rng.layout(2, 2)];
        for (layout, mode) in layouts.iter().zip([NumericsMode::Lockstep, NumericsMode::Fast].into_iter().cycle()) {
            each(
                (layout, PATIENT, mode),
                |rank| rank,
                |mesh, cuda| {
                    let rank = &mut take(mesh, cuda, CarrierChoice::Auto).unwrap();
                    assert_eq!(ways(rank), (false, true), "{layout:?}");
                    assert!(rank.adds_on_device());
                    (0..2).for_each(|_| all_sums(rank, cuda));
                },
            );
        }
        each(
            (&even(2), PATIENT, NumericsMode::Lockstep),
            |rank| rank,
            |mesh, cuda| {
                let rank = &mut take(mesh, cuda, CarrierChoice::Auto).unwrap();
                assert!(sum(rank, cuda, 3, ROWS_MAX).unwrap() == expected_sum(3, ROWS_MAX), "of several launches");
                all_sums(rank, cuda);
            },
        );
    });
}

#[test]
fn a_device_serves_one_epoch_after_another() {
    on_fake_cuda("a_device_serves_one_epoch_after_another", &ALONE, || {
        let devices: Vec<_> = (0..2).map(|ordinal| cuda(ordinal, NumericsMode::Lockstep)).collect();
        let epoch = || {
            let ranks = Mesh::in_process_with(&even(2), WaitPolicy { deadline: PATIENT, spin: false }).unwrap();
            std::thread::scope(|scope| {
                for (mesh, cuda) in ranks.into_iter().zip(&devices) {
                    scope.spawn(move || {
                        let rank = &mut take(mesh, cuda, CarrierChoice::Ipc).unwrap();
                        assert_eq!(ways(rank), (false, true));
                        all_sums(rank, cuda);
                    });
                }
            });
            devices[0].free_bytes().unwrap()
        };
        let first = epoch();
        assert_eq!([epoch(), epoch()], [first; 2], "the buffers of an epoch are freed in the next");
    });
}

#[test]
fn beside_nccl_small_sums_go_over_memory() {
    on_fake_cuda("beside_nccl_small_sums_go_over_memory", &[("FAKE_CUDA_DEVICES", "2")], || {
        for (choice, expected) in [(CarrierChoice::Auto, (true, true)), (CarrierChoice::Nccl, (true, false))] {
            each(
                (&even(2), PATIENT, NumericsMode::Lockstep),
                |rank| rank,
                |mesh, cuda| {
                    let rank = &mut take(mesh, cuda, choice).unwrap();
                    assert_eq!(ways(rank), expected, "{choice:?}");
                    all_sums(rank, cuda);
                    assert!(sum(rank, cuda, 3, ROWS_MAX).unwrap() == expected_sum(3, ROWS_MAX));
                    all_sums(rank, cuda);
                },
            );
        }
    });
}

#[test]
fn device_is_shared_only_on_request() {
    on_fake_cuda("device_is_shared_only_on_request", &[("FAKE_CUDA_ORDER", "1")], || {
        each(
            (&even(2), PATIENT, NumericsMode::Lockstep),
            |_| 0,
            |mesh, cuda| {
                // An allocation might wait for the other rank's kernel, which waits for this rank.
                let mut buffer = room(cuda);
                let rank = &mut take(mesh, cuda, CarrierChoice::Ipc).unwrap();
                assert_eq!(ways(rank), (false, true));
                all_sums_in(&mut buffer, rank, cuda);
            },
        );
        each(
            (&even(2), PATIENT, NumericsMode::Lockstep),
            |_| 0,
            |mesh, cuda| {
                let rank = &mut take(mesh, cuda, CarrierChoice::Auto).unwrap();
                assert_eq!(ways(rank), (false, false));
                all_sums(rank, cuda);
            },
        );
    });
}

#[test]
fn unreachable_peer_memory_falls_back_to_host() {
    let screws = [ALONE[0], ALONE[1], ("FAKE_CUDA_PEERS", "0")];
    on_fake_cuda("unreachable_peer_memory_falls_back_to_host", &screws, || {
        each(
            (&even(2), PATIENT, NumericsMode::Lockstep),
            |rank| rank,
            |mesh, cuda| {
                let rank = &mut take(mesh, cuda, CarrierChoice::Auto).unwrap();
                assert_eq!(ways(rank), (false, false));
                all_sums(rank, cuda);
            },
        );
        each(
            (&even(2), PATIENT, NumericsMode::Lockstep),
            |rank| rank,
            |mesh, cuda| {
                let error = take(mesh, cuda, CarrierChoice::Ipc);
                assert!(matches!(error, Err(Error::Plan(why)) if why.contains("access")), "{error:?}");
            },
        );
    });
}

/// Returns the errors of the first ranks when the last does `instead` in place of its second sum, and then stays.
fn beside(tp: u16, deadline: Duration, instead: impl Fn(&mut Ranks<Cuda>) + Sync) -> Vec<Error> {
    let have_finished = Barrier::new(tp.into());
    let errors = each(
        (&even(tp), deadline, NumericsMode::Lockstep),
        |rank| rank,
        |mesh, cuda| {
            let rank = &mut take(mesh, cuda, CarrierChoice::Auto).unwrap();
            assert_eq!(sum(rank, cuda, 8, 2).unwrap(), expected_sum(8, 2));
            let is_last = rank.stage_rank() == u32::from(tp) - 1;
            let error = if is_last { None } else { sum(rank, cuda, 8, 2).err() };
            if is_last {
                instead(rank);
            }
            have_finished.wait();
            error
        },
    );
    errors.into_iter().flatten().collect()
}

#[test]
fn silent_rank_is_named_among_several() {
    on_fake_cuda("silent_rank_is_named_among_several", &ALONE, || {
        for tp in [2, 3] {
            let errors = beside(tp, IMPATIENT, |_| {});
            // One rank detects it first, and the other may receive that rank's report.
            let last = Rank(tp - 1);
            let is_named = |error: &Error| matches!(error, Error::Deadline { .. } | Error::PeerLost { .. });
            assert!(errors.iter().all(|error| is_named(error) && error.rank() == Some(last)), "{errors:?}");
            assert!(errors.iter().any(|error| matches!(error, Error::Deadline { .. })), "{errors:?}");
            assert_eq!(errors.len(), usize::from(tp) - 1);
        }
    });
}

#[test]
fn break_off_is_named_long_before_the_deadline() {
    on_fake_cuda("break_off_is_named_long_before_the_deadline", &ALONE, || {
        let begun = Instant::now();
        let errors = beside(3, PATIENT, |rank| rank.abort_handle().abort());
        assert!(begun.elapsed() < PATIENT / 2, "a stopped kernel ends before its own deadline");
        assert_eq!(errors.len(), 2);
        assert!(errors.iter().all(|error| matches!(error, Error::PeerLost { rank: Rank(2) })), "{errors:?}");
    });
}

#[test]
fn a_wait_of_a_kernel_is_ended_from_outside() {
    on_fake_cuda("a_wait_of_a_kernel_is_ended_from_outside", &ALONE, || {
        let (sender, handles) = channel();
        let sender = Mutex::new(Some(sender));
        let has_ended = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let handle: AbortHandle = handles.recv().unwrap();
                std::thread::sleep(Duration::from_millis(50));
                handle.abort();
            });
            each(
                (&even(2), PATIENT, NumericsMode::Lockstep),
                |rank| rank,
                |mesh, cuda| {
                    let rank = &mut take(mesh, cuda, CarrierChoice::Auto).unwrap();
                    if rank.stage_rank() == 0 {
                        sender.lock().unwrap().take().unwrap().send(rank.abort_handle()).unwrap();
                        let error = sum(rank, cuda, 8, 2).err().unwrap();
                        assert!(matches!(error, Error::Aborted), "{error}");
                        assert!(matches!(sum(rank, cuda, 8, 2), Err(Error::Aborted)), "it stays so");
                    }
                    has_ended.wait();
                },
            );
        });
    });
}

// ---- processes --------------------------------------------------------------------------------------------------

const RANK: &str = "LOCKSTEP_TEST_RANK";
const FOLDER: &str = "LOCKSTEP_TEST_FOLDER";

/// Messages between processes: files that are either there whole or absent.
struct Board(PathBuf);

impl Board {
    fn post(&self, name: &str, word: &str) {
        std::fs::write(self.0.join("partial").with_extension(name), word).unwrap();
        std::fs::rename(self.0.join("partial").with_extension(name), self.0.join(name)).unwrap();
    }

    fn wait_for(&self, name: &str) -> String {
        let until = Instant::now() + PATIENT;
        loop {
            match std::fs::read_to_string(self.0.join(name)) {
                Ok(word) => return word,
                Err(_) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
                Err(error) => panic!("no error contains {name}: {error}"),
            }
        }
    }
}

struct Processes {
    board: Board,
    children: Vec<Child>,
}

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.children {
            // The child may have ended already.
            let _gone = child.kill();
            let _ended = child.wait();
        }
        let _gone = std::fs::remove_dir_all(&self.board.0);
    }
}

/// Runs this test again as `tp` processes, each a rank; `screws` are settings for the last one.
fn processes(test: &str, tp: u16, deadline: Duration, screws: &[(&str, &str)]) -> Processes {
    let folder = std::env::temp_dir().join(format!("lockstep-{test}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let start = |rank: u16| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([&*format!("one_shot::{test}"), "--exact", "--nocapture"]);
        command.env(RANK, format!("{rank} {tp} {}", deadline.as_secs()));
        let screws = screws.iter().copied().filter(|_| rank == tp - 1);
        command.env(FOLDER, &folder).envs(screws).spawn().unwrap()
    };
    Processes { children: (0..tp).map(start).collect(), board: Board(folder.clone()) }
}

/// Runs such a process: a sum of each kind, then one more on request, whose result it reports.
fn run_rank(arguments: &str) {
    let [rank, tp, seconds] = arguments.split(' ').map(|n| n.parse::<u16>().unwrap()).collect::<Vec<_>>()[..] else {
        panic!("three numbers")
    };
    let board = Board(Path::new(&std::env::var_os(FOLDER).unwrap()).to_owned());
    let listener = PeerListener::bind("127.0.0.1:0").unwrap();
    board.post(&format!("address{rank}"), &listener.address().to_string());
    let peers = (0..tp).map(|rank| board.wait_for(&format!("address{rank}"))).collect();
    let cuda = cuda(rank.into(), NumericsMode::Lockstep);
    let mut plan = MeshPlan::new(common::EPOCH, Rank(rank), even(tp), peers, [9; 32]);
    plan.timeouts.op = Duration::from_secs(seconds.into());
    let mut ranks = take(Mesh::join(&listener, plan).unwrap(), &cuda, CarrierChoice::Auto).unwrap();
    let (_, over_memory) = ways(&ranks);
    all_sums(&mut ranks, &cuda);
    board.post(&format!("summed{rank}"), &over_memory.to_string());
    let rows: usize = board.wait_for(&format!("sum{rank}")).parse().unwrap();
    let result = sum(&mut ranks, &cuda, 8, rows);
    let word = result.map_or_else(|error| format!("{error:?}"), |sum| (sum == expected_sum(8, rows)).to_string());
    board.post(&format!("said{rank}"), &word);
    board.wait_for("end");
}

fn as_processes(test: &str, run: impl FnOnce()) {
    on_fake_cuda(test, &ALONE, || match std::env::var(RANK) {
        Ok(arguments) => run_rank(&arguments),
        Err(_) => run(),
    });
}

#[test]
fn processes_add_over_memory() {
    const TEST: &str = "processes_add_over_memory";
    as_processes(TEST, || {
        // One rank that cannot open the others' buffers keeps all of them from using any.
        for (screws, over_memory) in [(&[][..], "true"), (&[("FAKE_CUDA_IPC", "0")][..], "false")] {
            let mut all = processes(TEST, 3, PATIENT, screws);
            for rank in 0..3 {
                assert_eq!(all.board.wait_for(&format!("summed{rank}")), over_memory);
            }
            (0..3).for_each(|rank| all.board.post(&format!("sum{rank}"), "11"));
            (0..3).for_each(|rank| assert_eq!(all.board.wait_for(&format!("said{rank}")), "true"));
            all.board.post("end", "");
            assert!(all.children.iter_mut().all(|child| child.wait().unwrap().success()));
        }
    });
}

/// Lets two ranks wait for a third, which receives `signal`. Returns their results.
fn results_of_survivors(test: &str, deadline: Duration, signal: Signal) -> Vec<String> {
    let all = processes(test, 3, deadline, &[]);
    (0..3).for_each(|rank| assert_eq!(all.board.wait_for(&format!("summed{rank}")), "true"));
    (0..2).for_each(|rank| all.board.post(&format!("sum{rank}"), "2"));
    // By then they wait, or soon will.
    std::thread::sleep(Duration::from_millis(200));
    kill_process(Pid::from_child(&all.children[2]), signal).unwrap();
    (0..2).map(|rank| all.board.wait_for(&format!("said{rank}"))).collect()
}

#[test]
fn a_process_that_is_killed_ends_the_waits_for_it() {
    const TEST: &str = "a_process_that_is_killed_ends_the_waits_for_it";
    as_processes(TEST, || {
        let begun = Instant::now();
        assert_eq!(results_of_survivors(TEST, PATIENT, Signal::KILL), ["PeerLost { rank: Rank(2) }"; 2]);
        assert!(begun.elapsed() < PATIENT / 2, "a stopped kernel ends before its own deadline");
    });
}

#[test]
fn a_process_that_is_stopped_is_a_deadline() {
    const TEST: &str = "a_process_that_is_stopped_is_a_deadline";
    as_processes(TEST, || {
        let results = results_of_survivors(TEST, IMPATIENT, Signal::STOP);
        let words = ["Deadline { rank: Rank(2) }", "PeerLost { rank: Rank(2) }"];
        assert!(results.iter().all(|result| words.contains(&result.as_str())), "{results:?}");
    });
}
