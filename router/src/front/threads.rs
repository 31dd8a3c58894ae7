//! A few threads for long work, so that no stream waits for it. Knows nothing of the work.

use crate::config::Timeouts;
use crate::refusal::Refusal;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

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
            work()
        });
        done.await.map_err(|_| Refusal::failed("the text could not be processed"))
    }
}
