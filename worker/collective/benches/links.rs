//! Measures the cost of a sealed connection: two processes send each other 8 KB, and 1 MB, over TCP, authenticated and
//! encrypted. Each round measures every kind, and the first kind twice: the difference between those two is noise.
//! Prints a table, then JSON.
//!
//! `cargo bench --workspace --bench links -- [ROUNDS]`
#![allow(clippy::unwrap_used, reason = "a measurement may panic")]

use backend::Memory;
use backend::cpu::{Cpu, CpuConfig, Isa};
use collective::{LinkEncryption, Mesh, MeshPlan, PeerListener, Ranks, WireChoice};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Instant;
use types::{Activations, Epoch, Grid, Layout, Rank};

const KINDS: [(&str, LinkEncryption); 3] = [
    ("authenticated", LinkEncryption::Off),
    ("control: the same", LinkEncryption::Off),
    ("encrypted", LinkEncryption::On),
];
/// The sizes that each side sends in one exchange, and how many exchanges are timed together.
const SIZES: [(&str, usize, usize); 2] = [("8 KB", 8 << 10, 2000), ("1 MB", 1 << 20, 60)];
/// Exchanges before a round is timed.
const N_WARM: usize = 10;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    match args.first().map(String::as_str) {
        Some("peer") => peer(args[1].parse().unwrap()),
        rounds => measure(rounds.map_or(7, |rounds| rounds.parse().expect("the number of rounds"))),
    }
}

/// Runs the other process: it does the same as the first one, untimed.
fn peer(n_rounds: usize) {
    let ranks = meet(1, |ours| {
        println!("{ours}");
        std::io::stdin().lines().next().unwrap().unwrap()
    });
    run(ranks, n_rounds);
}

fn measure(n_rounds: usize) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["peer", &n_rounds.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let (mut to_peer, from_peer) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut replies = BufReader::new(from_peer).lines().map(Result::unwrap);
    let ranks = meet(0, |ours| {
        writeln!(to_peer, "{ours}").unwrap();
        replies.next().unwrap()
    });
    let micros = run(ranks, n_rounds);
    child.wait().unwrap();
    report(&micros, n_rounds);
}

/// Returns this side's ranks, one of each kind. `exchange` sends our addresses to the other side and returns its own.
fn meet(number: u16, exchange: impl FnOnce(&str) -> String) -> Vec<Ranks<Cpu>> {
    let listeners = KINDS.map(|_| PeerListener::bind("127.0.0.1:0").unwrap());
    let ours = listeners.each_ref().map(|listener| listener.address().to_string());
    let theirs = exchange(&ours.join(" "));
    let join = |((listener, theirs), (_, encryption)): ((&PeerListener, &str), (&str, LinkEncryption))| {
        let mut peers = vec![listener.address().to_string(), theirs.to_owned()];
        peers.rotate_right(number.into());
        let layout = Layout::even(Grid { pp: 1, tp: 2 }, 1).unwrap();
        let plan = MeshPlan::new(Epoch::default(), Rank(number), layout, peers, [1; 32]);
        let plan = MeshPlan { wire: WireChoice::Socket, spin: true, encryption, ..plan };
        Ranks::over_host(Mesh::join(listener, plan).unwrap())
    };
    listeners.iter().zip(theirs.split(' ')).zip(KINDS).map(join).collect()
}

/// Microseconds of one exchange in each round, by size and kind.
type Micros = [[Vec<f64>; KINDS.len()]; SIZES.len()];

fn run(mut ranks: Vec<Ranks<Cpu>>, n_rounds: usize) -> Micros {
    let cpu =
        Cpu::new(CpuConfig { threads: 1, activations: Activations::F32, isa: Isa::detect(), spin: false }).unwrap();
    let mut buffers = SIZES.map(|(_, n_bytes, _)| cpu.buffer(2, n_bytes / 4).unwrap());
    let mut micros = Micros::default();
    for _ in 0..n_rounds {
        for (((_, _, n_ops), buffer), micros) in SIZES.iter().zip(&mut buffers).zip(&mut micros) {
            for (rank, micros) in ranks.iter_mut().zip(micros) {
                // Each side owns a row, and receives the other side's.
                let mut exchange = || rank.share_rows(&cpu, buffer, |row| row as u32, 2).unwrap();
                (0..N_WARM).for_each(|_| exchange());
                let begun = Instant::now();
                (0..*n_ops).for_each(|_| exchange());
                micros.push(begun.elapsed().as_secs_f64() * 1e6 / *n_ops as f64);
            }
        }
    }
    micros
}

fn report(micros: &Micros, n_rounds: usize) {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or("?").to_owned();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    println!("both ways at once over loopback, {n_rounds} rounds, {cores} cores, load {load}\n");
    println!("{:<26} {:>10} {:>21} {:>9}", "", "median us", "range us", "MB/s");
    let mut rows = Vec::new();
    for ((size, n_bytes, _), micros) in SIZES.iter().zip(micros) {
        for ((kind, _), micros) in KINDS.iter().zip(micros) {
            let [low, median, high] = [0.0, 0.5, 1.0].map(|q| quantile(micros, q));
            let rate = *n_bytes as f64 / median;
            println!(
                "{:<26} {median:>10.1} {:>21} {rate:>9.0}",
                format!("{size}, {kind}"),
                format!("{low:.1} - {high:.1}")
            );
            rows.push(format!(r#""{size}, {kind}":[{low:.1},{median:.1},{high:.1}]"#));
        }
    }
    println!("\n{{\"cores\":{cores},\"load\":\"{load}\",\"rounds\":{n_rounds},\"micros\":{{{}}}}}", rows.join(","));
}

fn quantile(values: &[f64], q: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * q) as usize]
}
