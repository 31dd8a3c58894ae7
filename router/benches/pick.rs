//! Measures how long a choice among 1,000 replicas takes for a prompt of 8,192 tokens, with their caches: with block
//! names that exist already, and with names that are computed during the choice. The choice may not allocate memory.
//! Prints a table of medians and 99th percentiles.
//!
//! `cargo bench --workspace --bench pick`
#![allow(clippy::unwrap_used, reason = "a measurement may panic")]
#![allow(unsafe_code, reason = "a global allocator is unsafe to implement; this one counts and passes on")]

use proto::cluster::Cached;
use router::board::pick::{PickInfo, PickPolicy, ReplicaStanding, VersionId};
use router::board::{ChoiceBuffers, ReplicaFacts, ReplicaTable, Salt, names};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use types::{PolicyDigest, TenantId, Token};

const N_REPLICAS: usize = 1000;
const N_PROMPT: u32 = 8192;
/// Blocks in the cache of each replica that no other replica has.
const N_OWN: u64 = 2000;
const N_ROUNDS: usize = 2000;
const SALT: Salt = [1; 16];

struct Counting;

static N_ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        N_ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn name(n: u64) -> u64 {
    n.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// All replicas have the first blocks of the prompt up to `shared`; three have 300 blocks, and one has all.
fn board(prompt: &[u64], shared: usize) -> ReplicaTable {
    let mut board = ReplicaTable::default();
    for place in 0..N_REPLICAS {
        let ledger = board.ledger();
        board.add_replica(place, ledger);
        let digest = PolicyDigest::default();
        let (standing, version, id) = (ReplicaStanding::Ready, VersionId::default(), name(place as u64));
        let facts =
            ReplicaFacts { standing, digest, version, context: 1 << 17, room: u32::MAX, salt: SALT, id, protocol: 1 };
        board.update_facts(place, &facts);
        let n_known = match place {
            500 => prompt.len(),
            200 | 400 | 600 => shared.max(300),
            _ => shared,
        };
        let first = place as u64 * N_OWN;
        let added = (first..first + N_OWN).map(name).chain(prompt[..n_known].iter().copied()).collect();
        board.apply_report(place, &Cached { sequence: 1, anew: true, added, dropped: Vec::new() }).unwrap();
    }
    board
}

fn measure(what: &str, mut choose: impl FnMut(u64) -> Option<usize>) {
    let mut took: Vec<Duration> = Vec::with_capacity(N_ROUNDS);
    for round in 0..100 {
        choose(round);
    }
    let before = N_ALLOCATIONS.load(Relaxed);
    let mut picked = None;
    for round in 0..N_ROUNDS as u64 {
        let began = Instant::now();
        picked = choose(round);
        took.push(began.elapsed());
    }
    let n_allocations = N_ALLOCATIONS.load(Relaxed) - before;
    took.sort_unstable();
    let [median, late] = [N_ROUNDS / 2, N_ROUNDS * 99 / 100].map(|at| took[at].as_secs_f64() * 1e6);
    println!("{what:<44} {median:>8.1} us {late:>8.1} us   replica {picked:?}, {n_allocations} allocations");
    assert_eq!(n_allocations, 0, "{what}");
}

fn main() {
    let prompt: Vec<Token> = (0..N_PROMPT).collect();
    let known: Vec<u64> = names(&prompt, TenantId(0).into(), &PolicyDigest::default(), &SALT).collect();
    let info = |n_before| PickInfo {
        n_prompt: N_PROMPT,
        session: Some(7),
        apart_from: None,
        n_before,
        version: None,
        protocol: 1,
    };
    println!("{:<44} {:>11} {:>11}", "choice", "median", "p99");
    for (what, shared) in [("64 blocks are at all", 64), ("all blocks are at all", known.len())] {
        let (board, mut scratch) = (board(&known, shared), ChoiceBuffers::default());
        measure(&format!("prefix, {what}, names known"), |round| {
            let names = |_: &PolicyDigest, _: &Salt| known.iter().copied();
            board.choose(PickPolicy::Prefix, &info(round), Some(names), &mut scratch).map(|chosen| chosen.place)
        });
        measure(&format!("prefix, {what}, named on the way"), |round| {
            let names = |digest: &PolicyDigest, salt: &Salt| names(&prompt, TenantId(0).into(), digest, salt);
            board.choose(PickPolicy::Prefix, &info(round), Some(names), &mut scratch).map(|chosen| chosen.place)
        });
    }
    let (board, mut scratch) = (board(&known, 0), ChoiceBuffers::default());
    for policy in [PickPolicy::LeastWork, PickPolicy::PowerOfTwo, PickPolicy::RoundRobin, PickPolicy::Affinity] {
        measure(&format!("{policy:?}"), |round| {
            let names = |_: &PolicyDigest, _: &Salt| known.iter().copied();
            board.choose(policy, &info(round), Some(names), &mut scratch).map(|chosen| chosen.place)
        });
    }
}
