//! A few threads for long work, so that no stream waits for it. The work gets less of a busy core than a stream. Knows
//! nothing of the work.

use crate::config::Timeouts;
use crate::refusal::Refusal;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// What is added to the niceness of a thread with work: beside a stream's thread on the same core it gets a quarter of
/// the time. On other systems a niceness belongs to the whole process.
const NICENESS: i32 = if cfg!(target_os = "linux") { 5 } else { 0 };

pub struct LimitedThreads {
    permits: Arc<Semaphore>,
    /// Work that gets no thread for so long is refused.
    wait_max: Duration,
    retry_after: Duration,
}

impl LimitedThreads {
    pub fn new(n_threads: usize, timeouts: &Timeouts) -> LimitedThreads {
        let permits = Arc::new(Semaphore::new(n_threads.clamp(1, Semaphore::MAX_PERMITS)));
        LimitedThreads { permits, wait_max: timeouts.body_max, retry_after: timeouts.retry_after }
    }

    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Refusal> {
        let permit = timeout(self.wait_max, self.permits.clone().acquire_owned()).await;
        let permit = permit.ok().and_then(Result::ok).ok_or(Refusal::Full { retry_after: self.retry_after })?;
        let done = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            run_at_low_priority(work)
        });
        done.await.ok().and_then(Result::ok).ok_or_else(|| Refusal::failed("the text could not be processed"))
    }
}

/// Runs work on a thread of its own: a thread that lowered its priority may not raise it, so it is not one of the
/// runtime's. The runtime's thread waits for it, which stops a test's clock meanwhile.
fn run_at_low_priority<T: Send>(work: impl FnOnce() -> T + Send) -> std::thread::Result<T> {
    let work = || {
        lower_priority();
        work()
    };
    std::thread::scope(|scope| scope.spawn(work).join())
}

fn lower_priority() {
    let niceness = rustix::process::getpriority_process(None).unwrap_or(0);
    // If it fails, the work has the priority of the streams.
    rustix::process::setpriority_process(None, niceness + NICENESS).ok();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_has_a_lower_priority_and_its_panic_is_a_refusal() {
        let threads = LimitedThreads::new(1, &Timeouts::default());
        let of_thread = || rustix::process::getpriority_process(None).unwrap();
        let before = of_thread();
        let within = threads.run(of_thread).await.unwrap();
        assert_eq!((within, of_thread()), (before + NICENESS, before));
        let refused = threads.run(|| panic!("a bug")).await;
        assert!(matches!(refused, Err(Refusal::Failed { .. })), "{refused:?}");
        // The thread is free again.
        assert_eq!(threads.run(|| 7).await.unwrap(), 7);
    }
}
