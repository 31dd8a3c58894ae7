//! A pool of threads that runs one job at a time.
//!
//! The caller opens a job. Threads that are awake enter it and take ranges, as the caller also does. The caller then
//! closes the job and waits for the threads inside. It does not wait for a thread that sleeps or was descheduled, so a
//! team with more threads than cores is only slower in proportion.

use std::any::Any;
use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// Rounds of spinning before a thread sleeps: some tens of microseconds, longer than the gaps inside a step.
const SPINS_MAX: u32 = 4000;
/// Ranges per thread: more of them balance the end of a job, fewer keep each thread's memory together.
const RANGES_PER_THREAD: usize = 4;

pub(crate) struct Team {
    shared: Arc<TeamShared>,
    threads: Vec<JoinHandle<()>>,
    /// Held by the caller whose job runs: one job at a time.
    turn: Mutex<()>,
}

struct TeamShared {
    /// `generation << 32 | flags | number of threads inside`
    word: AtomicU64,
    /// The open job, read only by threads inside.
    job: UnsafeCell<*const Job<'static>>,
    /// One flag per thread but the caller: whether it must be woken.
    asleep: Vec<AtomicBool>,
    n_started: AtomicUsize,
    spins_max: u32,
}

// SAFETY: `job` is written only while no thread is inside, and read only by threads that entered after that.
unsafe impl Sync for TeamShared {}
// SAFETY: as above; the pointer is followed only inside.
unsafe impl Send for TeamShared {}

const GENERATION: u64 = 1 << 32;
const OPEN: u64 = 1 << 31;
/// The caller sleeps until the last thread leaves.
const AWAITED: u64 = 1 << 30;
const STOP: u64 = 1 << 29;
const INSIDE: u64 = STOP - 1;

struct Job<'a> {
    work: &'a (dyn Fn(Range<usize>) + Sync),
    n_items: usize,
    range_len: usize,
    next: AtomicUsize,
    caller: Thread,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Job<'_> {
    /// Takes ranges until there are none. A panic ends the job for all threads.
    fn help(&self) {
        let result = catch_unwind(AssertUnwindSafe(|| {
            while let Some(range) = self.next_range() {
                (self.work)(range);
            }
        }));
        if let Err(panic) = result {
            self.next.store(self.n_items, Ordering::Relaxed);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
    }

    fn next_range(&self) -> Option<Range<usize>> {
        let start = self.next.fetch_add(self.range_len, Ordering::Relaxed);
        (start < self.n_items).then(|| start..(start + self.range_len).min(self.n_items))
    }
}

impl Team {
    pub fn new(n_threads: usize, spin: bool) -> std::io::Result<Team> {
        let n_others = n_threads.saturating_sub(1);
        let n_cores = thread::available_parallelism().map_or(1, |n| n.get());
        let shared = Arc::new(TeamShared {
            word: AtomicU64::new(0),
            job: UnsafeCell::new(std::ptr::null()),
            asleep: (0..n_others).map(|_| AtomicBool::new(false)).collect(),
            n_started: AtomicUsize::new(0),
            // With more threads than cores, a spinning thread takes the core from one that works.
            spins_max: if !spin || n_threads > n_cores { 0 } else { SPINS_MAX },
        });
        let mut team = Team { shared, threads: Vec::with_capacity(n_others), turn: Mutex::new(()) };
        for i in 0..n_others {
            let shared = Arc::clone(&team.shared);
            team.threads.push(thread::Builder::new().name(format!("cpu-{}", i + 1)).spawn(move || shared.serve(i))?);
        }
        // A starting thread allocates, and a step must not.
        while team.shared.n_started.load(Ordering::Acquire) < n_others {
            thread::yield_now();
        }
        Ok(team)
    }

    /// Calls `work` on all threads with ranges that together are `0..n_items`, each item once; returns when all are
    /// done. A panic inside is passed on. `work` must not call the team.
    pub fn run(&self, n_items: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
        let n_threads = self.threads.len() + 1;
        match n_items {
            0 => {}
            _ if n_items == 1 || n_threads == 1 => work(0..n_items),
            _ => self.share(Job {
                work,
                n_items,
                range_len: n_items.div_ceil(n_threads * RANGES_PER_THREAD),
                next: AtomicUsize::new(0),
                caller: thread::current(),
                panic: Mutex::new(None),
            }),
        }
    }

    fn share(&self, job: Job<'_>) {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.open(&job);
        job.help();
        self.close();
        drop(turn);
        if let Some(panic) = job.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }

    fn open(&self, job: &Job<'_>) {
        let generation = self.shared.word.load(Ordering::Relaxed) & !(GENERATION - 1);
        // SAFETY: this thread holds the turn, and the last job was closed and left: nothing reads. The lifetime is
        // erased only until `close`, which returns when no thread is inside.
        unsafe { *self.shared.job.get() = std::ptr::from_ref(job).cast() };
        self.shared.word.store(generation.wrapping_add(GENERATION) | OPEN, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        for (asleep, thread) in self.shared.asleep.iter().zip(&self.threads) {
            if asleep.load(Ordering::SeqCst) && asleep.swap(false, Ordering::SeqCst) {
                thread.thread().unpark();
            }
        }
    }

    /// Lets no thread enter any more, and waits for those inside.
    fn close(&self) {
        let word = &self.shared.word;
        let mut n_inside = word.fetch_and(!OPEN, Ordering::AcqRel) & INSIDE;
        let mut n_spins = 0;
        while n_inside > 0 {
            if n_spins < self.shared.spins_max {
                n_spins += 1;
                std::hint::spin_loop();
                n_inside = word.load(Ordering::Acquire) & INSIDE;
            } else if word.fetch_or(AWAITED, Ordering::AcqRel) & INSIDE > 0 {
                thread::park();
                n_inside = word.load(Ordering::Acquire) & INSIDE;
            } else {
                n_inside = 0;
            }
        }
    }
}

impl TeamShared {
    /// The main function of the i-th thread besides the caller.
    fn serve(&self, i: usize) {
        self.n_started.fetch_add(1, Ordering::Release);
        let mut last = 0;
        loop {
            let word = self.next_word(i, last);
            if word & STOP != 0 {
                return;
            }
            let entered = self.word.compare_exchange(word, word + 1, Ordering::AcqRel, Ordering::Relaxed);
            if entered.is_ok() {
                last = word & !(GENERATION - 1);
                self.help_with_job();
            }
        }
    }

    fn help_with_job(&self) {
        // SAFETY: this thread is inside, so the caller has not returned, and the job lives.
        let job = unsafe { &**self.job.get() };
        job.help();
        // After leaving, the job may be gone.
        let caller = job.caller.clone();
        let before = self.word.fetch_sub(1, Ordering::AcqRel);
        if before & AWAITED != 0 && before & INSIDE == 1 {
            caller.unpark();
        }
    }

    /// Waits for a job after generation `last`, or for the end.
    fn next_word(&self, i: usize, last: u64) -> u64 {
        let mut n_spins = 0;
        loop {
            let word = self.word.load(Ordering::SeqCst);
            let is_new = word & OPEN != 0 && word & !(GENERATION - 1) != last;
            if is_new || word & STOP != 0 {
                self.asleep[i].store(false, Ordering::Relaxed);
                return word;
            }
            if n_spins < self.spins_max {
                n_spins += 1;
                std::hint::spin_loop();
            } else if self.asleep[i].swap(true, Ordering::SeqCst) {
                // The flag is set, and the word was read again since: a caller that opens a job from now on wakes this
                // thread.
                thread::park();
            }
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.word.fetch_or(STOP, Ordering::SeqCst);
        self.threads.iter().for_each(|thread| thread.thread().unpark());
        for thread in self.threads.drain(..) {
            // A panic in work is caught, so a thread's result carries no information.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn each_item_is_done_once_by_teams_of_any_size() {
        for n_threads in [1, 2, 4, 8] {
            let team = Team::new(n_threads, true).unwrap();
            for n_items in [0, 1, 2, 3, 7, 64, 1000] {
                let counts: Vec<AtomicU32> = (0..n_items).map(|_| AtomicU32::new(0)).collect();
                for _ in 0..50 {
                    team.run(n_items, &|range| {
                        for item in range {
                            counts[item].fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 50), "{n_threads} x {n_items}");
            }
        }
    }

    fn add(n: &AtomicU32, range: Range<usize>) {
        n.fetch_add(range.len() as u32, Ordering::Relaxed);
    }

    #[test]
    fn a_team_wakes_from_sleep() {
        let team = Team::new(3, true).unwrap();
        let n = AtomicU32::new(0);
        for _ in 0..5 {
            thread::sleep(std::time::Duration::from_millis(3));
            team.run(30, &|range| add(&n, range));
        }
        assert_eq!(n.into_inner(), 150);
    }

    #[test]
    fn a_panic_comes_out_and_the_team_goes_on() {
        let team = Team::new(4, true).unwrap();
        for bad in [0, 5, 99] {
            let work = |range: Range<usize>| assert!(!range.contains(&bad), "item {bad}");
            assert!(catch_unwind(AssertUnwindSafe(|| team.run(100, &work))).is_err());
            let n = AtomicU32::new(0);
            team.run(100, &|range| add(&n, range));
            assert_eq!(n.into_inner(), 100);
        }
    }

    #[test]
    fn callers_take_turns() {
        let team = Team::new(2, true).unwrap();
        let n = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        team.run(10, &|range| add(&n, range));
                    }
                });
            }
        });
        assert_eq!(n.into_inner(), 6000);
    }
}
