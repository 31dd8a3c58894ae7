//! The common parts of fuzz targets: repeatable rounds, a limit of time and memory for each, and mutations of JSON.
//! Included by the tests of several crates; has no knowledge of the formats.
//!
//! `FUZZ_SECONDS=60` lets a target run for so long; without it each does a fixed number of rounds. Each round has a
//! random source of its own, so `FUZZ_ROUND=n` repeats one that failed.

#![expect(unsafe_code, reason = "a global allocator is unsafe to implement; this one counts and passes on")]

use serde_json::{Map, Value, json};
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The limit for all targets of a process together. Code that allocates more has trusted a number of its input.
const LIVE_BYTES_MAX: usize = 512 << 20;
/// A round that takes this long, even on the slowest machine, does not end.
const ROUND_SECONDS_MAX: u64 = 60;
const TARGETS_MAX: usize = 16;

struct Capped;

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);
/// The current round of each target, readable by the allocator without an allocation.
static ROUNDS: [AtomicU64; TARGETS_MAX] = [const { AtomicU64::new(IDLE) }; TARGETS_MAX];
const IDLE: u64 = u64::MAX;

fn may_grow_by(n_bytes: usize) -> bool {
    let live = LIVE_BYTES.fetch_add(n_bytes, Ordering::Relaxed).saturating_add(n_bytes);
    if live <= LIVE_BYTES_MAX {
        return true;
    }
    LIVE_BYTES.fetch_sub(n_bytes, Ordering::Relaxed);
    // Neither of these allocates.
    let mut stderr = std::io::stderr();
    for round in ROUNDS.iter().map(|round| round.load(Ordering::Relaxed)).filter(|round| *round != IDLE) {
        let _unheard =
            writeln!(stderr, "{n_bytes} bytes beyond {LIVE_BYTES_MAX} are requested, perhaps in round {round}");
    }
    false
}

// SAFETY: every call that is not refused is passed to the system's allocator unchanged; null is a refusal.
unsafe impl GlobalAlloc for Capped {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !may_grow_by(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, n_bytes: usize) -> *mut u8 {
        if !may_grow_by(n_bytes.saturating_sub(layout.size())) {
            return std::ptr::null_mut();
        }
        LIVE_BYTES.fetch_sub(layout.size().saturating_sub(n_bytes), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.realloc(at, layout, n_bytes) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Capped = Capped;

/// Reproducible random numbers, good enough to choose bytes.
pub struct Random(u64);

impl Random {
    fn of(target: &str, round: u64) -> Random {
        let seed = target.bytes().fold(round, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        // Neighbouring seeds differ in few bits, and so would their first numbers.
        for _ in 0..4 {
            random.below(2);
        }
        random
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn one_of<'a, T: ?Sized>(&mut self, all: &[&'a T]) -> &'a T {
        all[self.below(all.len())]
    }
}

/// The rounds of one target.
pub struct Rounds {
    target: &'static str,
    slot: usize,
    next: u64,
    last: u64,
    end: Option<Instant>,
    is_over: Arc<AtomicBool>,
}

impl Rounds {
    /// Makes `n_rounds` rounds, unless a variable sets another number.
    pub fn of(target: &'static str, n_rounds: u64) -> Rounds {
        static TARGETS: AtomicUsize = AtomicUsize::new(0);
        let env_number = |name| std::env::var(name).ok().and_then(|value: String| value.parse::<u64>().ok());
        let (end, next, last) = match (env_number("FUZZ_ROUND"), env_number("FUZZ_SECONDS")) {
            (Some(round), _) => (None, round, round + 1),
            (None, Some(seconds)) => (Some(Instant::now() + Duration::from_secs(seconds)), 0, u64::MAX),
            (None, None) => (None, 0, n_rounds),
        };
        let slot = TARGETS.fetch_add(1, Ordering::Relaxed);
        let is_over = Arc::new(AtomicBool::new(false));
        let is_watched = is_over.clone();
        std::thread::spawn(move || watch(target, slot, &is_watched));
        Rounds { target, slot, next, last, end, is_over }
    }

    /// The next round's random source; None after the last.
    pub fn next(&mut self) -> Option<Random> {
        let round = self.next;
        if round >= self.last || self.end.is_some_and(|end| end <= Instant::now()) {
            return None;
        }
        self.next += 1;
        ROUNDS[self.slot].store(round, Ordering::Relaxed);
        Some(Random::of(self.target, round))
    }

    /// Rounds begun so far.
    pub fn n(&self) -> u64 {
        self.next
    }

    /// Whether there are enough rounds for statistics. Not if one round is repeated.
    pub fn are_many(&self) -> bool {
        self.next >= 100
    }
}

impl Drop for Rounds {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let round = ROUNDS[self.slot].swap(IDLE, Ordering::Relaxed);
        if std::thread::panicking() {
            eprintln!("{}: FUZZ_ROUND={round} repeats this", self.target);
        } else {
            println!("{}: {} rounds", self.target, self.next);
        }
    }
}

/// Ends the process if a round does not end.
fn watch(target: &str, slot: usize, is_over: &AtomicBool) {
    let (mut round, mut seconds) = (IDLE, 0);
    while !is_over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_secs(1));
        let now = ROUNDS[slot].load(Ordering::Relaxed);
        seconds = if now == round && now != IDLE { seconds + 1 } else { 0 };
        round = now;
        if seconds > ROUND_SECONDS_MAX {
            eprintln!("{target} hangs: FUZZ_ROUND={round} repeats this");
            std::process::abort();
        }
    }
}

/// Values on which JSON readers tend to fail.
fn nasty(random: &mut Random) -> Value {
    let all = [
        Value::Null,
        json!(true),
        json!(-1),
        json!(0),
        json!(1),
        json!(1e308),
        json!(-1e-320),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(1u64 << 40),
        json!(4_294_967_296u64),
        json!(2_147_483_648u32),
        json!(65_537),
        json!(0.5),
        json!(""),
        json!(" "),
        json!("NaN"),
        json!("\u{0}\u{ffff}\u{202e}😀"),
        json!("x".repeat(5000)),
        json!([]),
        json!({}),
        json!([[]]),
        json!([null]),
        json!([[[[1]]]]),
        json!({ "": null }),
        json!(vec!["a"; 300]),
        json!(vec![1; 300]),
        json!({ "type": "json_schema" }),
    ];
    all[random.below(all.len())].clone()
}

/// Changes one place of a tree: another value, a value from elsewhere in its list, a member removed or added.
pub fn mutate(value: &mut Value, random: &mut Random) {
    match value {
        Value::Object(members) if !members.is_empty() && !random.one_in(6) => mutate_member(members, random),
        Value::Array(items) if !items.is_empty() && !random.one_in(6) => {
            let (at, other) = (random.below(items.len()), random.below(items.len()));
            match random.below(8) {
                0 => drop(items.remove(at)),
                1 => items.swap(at, other),
                2 => items.insert(at, items[other].clone()),
                _ => mutate(&mut items[at], random),
            }
        }
        Value::String(text) if !text.is_empty() && random.one_in(2) => *text = scramble(text, random),
        Value::Number(number) if random.one_in(2) => {
            let near = number.as_i64().unwrap_or(0).wrapping_add(random.below(5) as i64 - 2);
            *value = near.into();
        }
        other => *other = nasty(random),
    }
}

fn mutate_member(members: &mut Map<String, Value>, random: &mut Random) {
    let Some(name) = members.keys().nth(random.below(members.len())).cloned() else { return };
    match random.below(10) {
        0 => drop(members.remove(&name)),
        1 => drop(members.insert(format!("{name}x"), nasty(random))),
        2 => drop(members.keys().nth(random.below(members.len())).cloned().and_then(|other| {
            let value = members[&other].clone();
            members.insert(name, value)
        })),
        _ => mutate(&mut members[&name], random),
    }
}

/// Changes, drops or doubles letters.
pub fn scramble(text: &str, random: &mut Random) -> String {
    let mut letters: Vec<char> = text.chars().collect();
    let at = random.below(letters.len());
    match random.below(3) {
        0 => letters[at] = ['"', '{', ']', '\\', '9', '\u{1}', 'é'][random.below(7)],
        1 => letters.truncate(at),
        _ => letters.insert(at, letters[at]),
    }
    letters.into_iter().collect()
}

/// Changes some of the bytes between `from` and `to`, or the file's length.
pub fn damage(bytes: &mut Vec<u8>, from: usize, to: usize, random: &mut Random) {
    for _ in 0..=random.below(4) {
        let to = to.min(bytes.len());
        if from + 8 >= to {
            return;
        }
        let at = from + random.below(to - from - 8);
        match random.below(8) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.below(256) as u8,
            2 => bytes[at..at + 8].copy_from_slice(&(u64::MAX >> random.below(64)).to_le_bytes()),
            3 => bytes[at..at + 4].fill(0),
            4 => bytes.copy_within(at..at + 8, from + (at - from) / 2),
            5 => drop(bytes.splice(at..at, [0; 8])),
            6 => drop(bytes.drain(at..at + 1 + random.below(8))),
            _ if random.one_in(8) => bytes.truncate(at),
            _ => bytes[at] = bytes[at].wrapping_add(1),
        }
    }
}
