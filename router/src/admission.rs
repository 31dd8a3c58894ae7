//! Lets requests in, or says why not, before anything is done for them. Knows counts only.

use crate::config::Limits;
use crate::refusal::Refusal;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

pub struct Admission {
    waiting: Arc<Semaphore>,
    places: u32,
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
        let waiting = Arc::new(Semaphore::new(places));
        Admission { waiting, places: u32::try_from(places).unwrap_or(u32::MAX), draining, retry_after }
    }

    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// As many as may wait when nobody else does.
    pub fn places(&self) -> u32 {
        self.places
    }

    /// Places for all choices of a request, or for none.
    pub fn admit(&self, n_choices: u32) -> Result<Waiting, Refusal> {
        if self.is_draining() {
            return Err(Refusal::Draining { retry_after: self.retry_after });
        }
        if n_choices > self.places {
            let most = self.places;
            let message = format!("{n_choices} answers at once are more than this server ever takes, which is {most}");
            return Err(Refusal::invalid("n", message));
        }
        match self.waiting.clone().try_acquire_many_owned(n_choices) {
            Ok(places) => Ok(Waiting { _places: places }),
            Err(_) => Err(Refusal::Full { retry_after: self.retry_after }),
        }
    }
}
