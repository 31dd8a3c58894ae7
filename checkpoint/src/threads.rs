//! Several threads for reading and hashing. Knows nothing of the work's content.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// More threads are no faster than a disk.
const THREADS_MAX: usize = 4;

/// Checked by each thread before each piece of its work.
pub type StopFn<'a> = &'a (dyn Fn() -> bool + Sync);

/// Returns the result of `work` for each item, in order; None for those that were not reached before it was over.
pub fn in_threads<T: Sync, R: Send>(all: &[T], is_over: StopFn<'_>, work: impl Fn(&T) -> R + Sync) -> Vec<Option<R>> {
    let n_threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(THREADS_MAX));
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(all.len())));
    let of_thread = || {
        while let Some((i, one)) = Some(next.fetch_add(1, Relaxed)).and_then(|i| Some((i, all.get(i)?))) {
            if is_over() {
                break;
            }
            let result = work(one);
            done.lock().unwrap_or_else(PoisonError::into_inner).push((i, result));
        }
    };
    std::thread::scope(|scope| (0..n_threads).for_each(|_| drop(scope.spawn(of_thread))));
    let mut results: Vec<Option<R>> = all.iter().map(|_| None).collect();
    for (i, result) in done.into_inner().unwrap_or_else(PoisonError::into_inner) {
        results[i] = Some(result);
    }
    results
}

#[test]
fn results_stand_in_the_order_of_the_work_and_end_when_it_is_over() {
    let all: Vec<usize> = (0..100).collect();
    let doubled = in_threads(&all, &|| false, |n| 2 * n);
    assert_eq!(doubled, all.iter().map(|n| Some(2 * n)).collect::<Vec<_>>());
    assert!(in_threads(&all, &|| true, |n| 2 * n).iter().all(Option::is_none));
    let n_done = AtomicUsize::new(0);
    let some = in_threads(&all, &|| n_done.load(Relaxed) >= 10, |_| n_done.fetch_add(1, Relaxed));
    let n_some = some.iter().flatten().count();
    assert!((10..10 + THREADS_MAX).contains(&n_some), "{n_some}");
}
