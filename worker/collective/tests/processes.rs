//! Ranks as processes of one host, over shared memory and sockets: they give the bits of threads, and a killed or
//! stopped rank is named. This program is its own child: `rank N ..` makes it one.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "common/mod.rs"]
mod common;

use backend::Memory;
use backend::cpu::Cpu;
use collective::{Mesh, MeshPlan, PeerListener, Ranks, WireChoice};
use common::{Rng, cpu, each};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;
use types::leaves::aligned_runs;
use types::{Grid, Layout, Rank};

const N_RANKS: u16 = 3;
const WIRES: [WireChoice; 3] = [WireChoice::Memory, WireChoice::Socket, WireChoice::Any];
const OP: Duration = Duration::from_millis(500);

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|arg| arg == "rank") {
        return child(args[2].parse().unwrap(), WIRES[args[3].parse::<usize>().unwrap()]);
    }
    for (number, wire) in WIRES.iter().enumerate() {
        sums_are_those_of_threads(number);
        killed_rank_is_named(number);
        stopped_rank_is_named(number);
        println!("test processes over {wire:?} ... ok");
    }
}

fn layout() -> Layout {
    Layout::even(Grid { pp: 1, tp: N_RANKS }, 1).unwrap()
}

/// Runs small and large sums, and folds them into one number.
fn sums(rank: &mut Ranks<Cpu>, cpu: &Cpu) -> Result<u64, collective::Error> {
    let mut digest = 0u64;
    for (n_leaves, n_rows, n_cols) in [(9, 1, 576), (16, 200, 1024), (5, 2, 4096)] {
        let runs = aligned_runs(rank.owned_units(n_leaves), n_leaves);
        let mut planes = cpu.buffer(runs.len() * n_rows, n_cols).unwrap();
        let seed = u64::from(rank.stage_rank()) * 1000 + u64::from(n_leaves);
        cpu.write(&mut planes, 0, &Rng(seed).floats(runs.len() * n_rows * n_cols));
        rank.all_reduce(cpu, &mut planes, &runs, n_leaves, n_rows)?;
        let mut sum = vec![0.0; n_rows * n_cols];
        cpu.read(&planes, 0..n_rows, &mut sum);
        digest = sum.iter().fold(digest, |digest, value| digest.rotate_left(5) ^ u64::from(value.to_bits()));
    }
    Ok(digest)
}

/// Prints its address, reads those of all ranks, joins, and follows its instructions line by line.
fn child(rank: u16, wire: WireChoice) {
    let listener = PeerListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.address());
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    let peers = lines.next().unwrap().split(' ').map(str::to_string).collect();
    let mut plan = MeshPlan::new(common::EPOCH, Rank(rank), layout(), peers, [9; 32]);
    (plan.wire, plan.timeouts.op) = (wire, OP);
    let mut ranks = Ranks::over_host(Mesh::join(&listener, plan).unwrap());
    println!("joined");
    for _ in lines {
        match sums(&mut ranks, &cpu()) {
            Ok(digest) => println!("{digest}"),
            Err(error) => println!("{error:?}"),
        }
    }
}

struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(rank: u16, wire: usize) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["rank", &rank.to_string(), &wire.to_string()]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Process { child, lines }
    }

    fn read_line(&mut self) -> String {
        self.lines.next().unwrap().unwrap()
    }

    fn write_line(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(wire: usize) -> Vec<Process> {
    let mut processes: Vec<_> = (0..N_RANKS).map(|rank| Process::start(rank, wire)).collect();
    let addresses: Vec<_> = processes.iter_mut().map(Process::read_line).collect();
    processes.iter_mut().for_each(|process| process.write_line(&addresses.join(" ")));
    processes.iter_mut().for_each(|process| assert_eq!(process.read_line(), "joined"));
    processes
}

fn sums_are_those_of_threads(wire: usize) {
    let expected = each(common::over_host(Mesh::in_process(&layout())), |rank, cpu| sums(rank, cpu).unwrap());
    let mut processes = start(wire);
    for _ in 0..3 {
        processes.iter_mut().for_each(|process| process.write_line("sum"));
        for process in &mut processes {
            assert_eq!(process.read_line(), expected[0].to_string());
        }
    }
}

fn killed_rank_is_named(wire: usize) {
    let mut processes = start(wire);
    processes[0].write_line("sum");
    processes[2].write_line("sum");
    processes[1].signal(Signal::KILL);
    for rank in [0, 2] {
        assert_eq!(processes[rank].read_line(), "PeerLost { rank: Rank(1) }");
    }
}

fn stopped_rank_is_named(wire: usize) {
    let mut processes = start(wire);
    processes[2].signal(Signal::STOP);
    processes[0].write_line("sum");
    processes[1].write_line("sum");
    // One rank detects it first, and the other may receive that rank's report.
    for rank in [0, 1] {
        let error = processes[rank].read_line();
        assert!(["Deadline { rank: Rank(2) }", "PeerLost { rank: Rank(2) }"].contains(&error.as_str()), "{error}");
    }
}
