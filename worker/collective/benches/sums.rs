//! Measures an `all_reduce` of 16 KB between two processes of one thread each, over shared memory and TCP, beside a
//! plain ping-pong of as many bytes through shared memory: the floor. Also measures how long a sequence's row takes to
//! the next stage, and its token back. The rounds are interleaved. Prints a table, then JSON.
//!
//! `cargo bench --workspace --bench sums -- [ROUNDS]`
#![allow(clippy::unwrap_used, reason = "a measurement may panic")]
#![allow(unsafe_code, reason = "the plain ping-pong is plain memory")]

use backend::Memory;
use backend::cpu::{Cpu, CpuConfig, Isa};
use collective::{ExchangeTimes, Mesh, MeshPlan, PeerListener, Ranks, WireChoice};
use rustix::fs::{MemfdFlags, Mode, OFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;
use types::{Activations, Epoch, Grid, Layout, Rank, StepId, Token};

const N_COLS: usize = 4096;
const N_LEAVES: u32 = 16;
/// Operations of one kind in one round.
const N_OPS: usize = 2000;
/// Operations that are not timed: they warm caches, branch predictors and the other side.
const N_WARM: usize = 100;
/// Length of a row that one stage hands to the next: the hidden size of a small model.
const N_HIDDEN: usize = 576;
const KINDS: [&str; 1 + MESHES.len()] =
    ["ping-pong", "sum, shm, spin", "sum, shm, sleep", "sum, tcp, spin", "row and token, shm", "row and token, tcp"];
/// The mesh of each kind but the floor: a wire, whether waiting ranks spin, how many stages.
const MESHES: [(WireChoice, bool, u16); 5] = [
    (WireChoice::Memory, true, 1),
    (WireChoice::Memory, false, 1),
    (WireChoice::Socket, true, 1),
    (WireChoice::Memory, true, 2),
    (WireChoice::Socket, true, 2),
];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    match args.first().map(String::as_str) {
        Some("peer") => peer(&args[1], &args[2]),
        rounds => measure(rounds.map_or(5, |rounds| rounds.parse().expect("the number of rounds"))),
    }
}

/// Runs the other process: it does the same as the first one, untimed.
fn peer(rounds: &str, floor: &str) {
    let rank = Wires::meet(1, |ours| {
        println!("{ours}");
        std::io::stdin().lines().map(Result::unwrap)
    });
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let floor = Floor::map(&rustix::fs::open(floor, flags, Mode::empty()).unwrap());
    run(rank, &floor, rounds.parse().unwrap());
}

fn measure(n_rounds: usize) {
    let fd = memfd_create("floor", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, Floor::N_BYTES as u64).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["peer", &n_rounds.to_string(), &path]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut replies = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let rank = Wires::meet(0, move |ours| {
        writeln!(stdin, "{ours}").unwrap();
        // Keeps the pipe open as long as the peer reads.
        std::mem::forget(stdin);
        std::iter::from_fn(move || replies.next())
    });
    let floor = Floor::map(&fd);
    let idle_before = idle_share();
    let results = run(rank, &floor, n_rounds);
    child.wait().unwrap();
    report(&results, n_rounds, idle_before);
}

/// One rank of two, on each wire.
struct Wires {
    number: u16,
    kinds: Vec<Ranks<Cpu>>,
}

impl Wires {
    /// `exchange` sends our addresses to the other side and returns its own.
    fn meet<I: Iterator<Item = String>>(number: u16, exchange: impl FnOnce(&str) -> I) -> Wires {
        let listeners = MESHES.map(|_| PeerListener::bind("127.0.0.1:0").unwrap());
        let ours = listeners.each_ref().map(|listener| listener.address().to_string());
        let theirs = exchange(&ours.join(" ")).next().unwrap();
        let join = |((listener, theirs), (wire, spin, pp)): ((&PeerListener, &str), (WireChoice, bool, u16))| {
            let mine = listener.address().to_string();
            let mut peers = vec![mine, theirs.to_string()];
            peers.rotate_right(number.into());
            let layout = Layout::even(Grid { pp, tp: 2 / pp }, pp.into()).unwrap();
            let plan = MeshPlan::new(Epoch::default(), Rank(number), layout, peers, [1; 32]);
            Ranks::over_host(Mesh::join(listener, MeshPlan { wire, spin, ..plan }).unwrap())
        };
        let kinds = listeners.iter().zip(theirs.split(' ')).zip(MESHES).map(join).collect();
        Wires { number, kinds }
    }

    /// Sends a row from the first stage to the second, and the token drawn from it back.
    fn hop(&mut self, kind: usize, cpu: &Cpu, row: &mut Row, step: StepId) {
        let rank = &mut self.kinds[kind];
        if self.number == 0 {
            rank.send_rows(cpu, &row.hidden, 1).unwrap();
            rank.recv_tokens(step, &mut row.tokens).unwrap();
        } else {
            rank.recv_rows(cpu, &mut row.hidden, 1).unwrap();
            rank.send_tokens(step, &[Some(7)]).unwrap();
        }
    }
}

/// The buffers of a row that moves between stages, and of the token that comes back.
struct Row {
    hidden: <Cpu as Memory>::Buffer,
    tokens: Vec<Option<Token>>,
}

/// Two buffers and two flags in shared memory, and nothing else.
struct Floor(*mut u8);

impl Floor {
    const N_BYTES: usize = 8192 + 4 * 4 * N_COLS;

    fn map(fd: &OwnedFd) -> Floor {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the system's choice.
        Floor(unsafe { mmap(std::ptr::null_mut(), Floor::N_BYTES, prot, flags, fd, 0).unwrap().cast() })
    }

    fn flag(&self, side: usize) -> &AtomicU32 {
        // SAFETY: within the mapping, aligned, and only used as an atomic.
        unsafe { &*self.0.add(side * 4096).cast() }
    }

    /// Both sides write, and each reads what the other one wrote.
    fn exchange(&self, side: usize, seq: u32, ours: &[f32], theirs: &mut [f32]) {
        // Each side alternates between two buffers: the other side may still read the last one.
        let buffer = |side: usize| 8192 + (side * 2 + seq as usize % 2) * 4 * N_COLS;
        // SAFETY: within the mapping; the flags determine whose turn it is.
        unsafe { self.0.add(buffer(side)).cast::<f32>().copy_from_nonoverlapping(ours.as_ptr(), N_COLS) };
        self.flag(side).store(seq, Ordering::Release);
        while self.flag(1 - side).load(Ordering::Acquire) < seq {
            std::hint::spin_loop();
        }
        // SAFETY: as above.
        unsafe { self.0.add(buffer(1 - side)).cast::<f32>().copy_to_nonoverlapping(theirs.as_mut_ptr(), N_COLS) };
    }
}

/// Microseconds of each operation, by kind, and the collectives' times.
struct Results {
    micros: [Vec<f64>; KINDS.len()],
    times: Vec<ExchangeTimes>,
}

fn run(mut ranks: Wires, floor: &Floor, n_rounds: usize) -> Results {
    let side = usize::from(ranks.number);
    let cpu =
        Cpu::new(CpuConfig { threads: 1, activations: Activations::F32, isa: Isa::detect(), spin: false }).unwrap();
    let mut planes = cpu.buffer(1, N_COLS).unwrap();
    let run = N_LEAVES / 2 * side as u32..N_LEAVES / 2 * (side as u32 + 1);
    let (ours, mut theirs) = (vec![1.0; N_COLS], vec![0.0; N_COLS]);
    let mut micros: [Vec<f64>; KINDS.len()] = Default::default();
    let mut row = Row { hidden: cpu.buffer(1, N_HIDDEN).unwrap(), tokens: Vec::new() };
    let mut seq = 0;
    for _ in 0..n_rounds {
        for (kind, micros) in micros.iter_mut().enumerate() {
            let is_hop = kind > 0 && MESHES[kind - 1].2 > 1;
            for i in 0..N_WARM + N_OPS {
                if !is_hop {
                    cpu.write(&mut planes, 0, &ours);
                }
                let begun = Instant::now();
                if kind == 0 {
                    seq += 1;
                    floor.exchange(side, seq, &ours, &mut theirs);
                } else if is_hop {
                    ranks.hop(kind - 1, &cpu, &mut row, StepId(micros.len() as u64));
                } else {
                    let rank = &mut ranks.kinds[kind - 1];
                    rank.all_reduce(&cpu, &mut planes, std::slice::from_ref(&run), N_LEAVES, 1).unwrap();
                }
                let elapsed = begun.elapsed().as_secs_f64() * 1e6;
                if i >= N_WARM {
                    micros.push(elapsed);
                }
            }
        }
    }
    let mut sum = vec![0.0; N_COLS];
    cpu.read(&planes, 0..1, &mut sum);
    assert!(sum.iter().all(|value| *value == 2.0) && theirs == ours);
    Results { micros, times: ranks.kinds.iter().map(Ranks::times).collect() }
}

/// Returns the idle time of all cores, in the system's ticks, and the total time.
fn idle_share() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks: Vec<u64> =
        text.lines().next().unwrap_or("").split_whitespace().skip(1).map(|tick| tick.parse().unwrap_or(0)).collect();
    (ticks.iter().skip(3).take(2).sum(), ticks.iter().take(8).sum())
}

fn report(results: &Results, n_rounds: usize, (idle_before, all_before): (u64, u64)) {
    let (idle, all) = idle_share();
    let idle = (idle - idle_before) as f64 / (all - all_before).max(1) as f64;
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let load = load.split(' ').next().unwrap_or("?").to_string();
    println!(
        "16 KB between two processes, {n_rounds} x {N_OPS} operations, {cores} cores, load {load}, idle {idle:.2}\n"
    );
    println!("{:<20} {:>9} {:>9} {:>9} {:>9}  microseconds", "", "median", "p90", "p99", "of floor");
    let mut rows = Vec::new();
    let floor = quantile(&results.micros[0], 0.5);
    for (kind, micros) in KINDS.iter().zip(&results.micros) {
        let [median, p90, p99] = [0.5, 0.9, 0.99].map(|q| quantile(micros, q));
        println!("{kind:<20} {median:>9.2} {p90:>9.2} {p99:>9.2} {:>9.2}", median / floor);
        rows.push(format!(r#""{kind}":{{"median":{median:.2},"p90":{p90:.2},"p99":{p99:.2}}}"#));
    }
    let n_ops = (n_rounds * (N_OPS + N_WARM)) as f64;
    for (kind, times) in KINDS.iter().skip(1).zip(&results.times) {
        let [waiting, moving, folding] = [times.waiting, times.moving, times.folding].map(|t| t as f64 / n_ops);
        println!("{kind:<20} mean: waiting {waiting:.2}, moving {moving:.2}, folding {folding:.2}");
    }
    println!(
        "\n{{\"bytes\":16384,\"cores\":{cores},\"load\":\"{load}\",\"idle\":{idle:.2},\"micros\":{{{}}}}}",
        rows.join(",")
    );
}

fn quantile(values: &[f64], q: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * q) as usize]
}
