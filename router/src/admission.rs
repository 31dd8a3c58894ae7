//! Lets requests in, or says why not, before anything is done for them. Knows counts only.

use crate::config::Limits;
use crate::refusal::Refusal;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

pub struct Admission {
    waiting: Arc<Semaphore>,
    draining: CancellationToken,
    retry_after: Duration,
}

/// A place among the requests that have no token yet. Free when it is dropped.
#[derive(Debug)]
pub struct Waiting {
    _places: OwnedSemaphorePermit,
}

impl Admission {
    pub fn new(limits: &Limits, draining: CancellationToken, retry_after: Duration) -> Admission {
        let places = limits.requests_waiting_max.min(Semaphore::MAX_PERMITS);
        Admission { waiting: Arc::new(Semaphore::new(places)), draining, retry_after }
    }

    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Places for all choices of a request, or for none.
    pub fn admit(&self, n_choices: u32) -> Result<Waiting, Refusal> {
        if self.is_draining() {
            return Err(Refusal::Draining { retry_after: self.retry_after });
        }
        match self.waiting.clone().try_acquire_many_owned(n_choices) {
            Ok(places) => Ok(Waiting { _places: places }),
            Err(_) => Err(Refusal::Full { retry_after: self.retry_after }),
        }
    }
}
