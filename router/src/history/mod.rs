//! What happened lately, for the pages that people read: requests with their timelines, and the last hour's load, both
//! in bounded rings. They are written as things happen and by no timer, so that they cost nothing while no page reads
//! them. Knows no text, no token and no key.
//!
//! The recorder of a request writes its `TimelineRecorder`; pages read `requests` and `load`.

mod curve;
mod load;
mod requests;
mod texts;
mod timeline;

pub use load::{BIN, LastHour, LoadBin, WaitCounts};
pub use requests::{RequestTimelines, TimelineRecorder};
pub use texts::{SharedTexts, ShowDuration, WatcherPlace};
pub use timeline::{Timeline, TimelineEvent, TimelineEventKind};

use std::sync::Arc;
use types::TenantId;

/// A request's face and tenant, as they are known when it comes.
#[derive(Clone, Debug)]
pub struct ArrivedRequest {
    pub face: &'static str,
    pub tenant: TenantId,
    /// The tenant's name in metrics: a key without a name is never shown.
    pub label: Arc<str>,
    pub unix_millis: u64,
}

/// What happened lately at this router.
#[derive(Default)]
pub struct History {
    pub requests: RequestTimelines,
    pub load: Arc<LastHour>,
    pub texts: SharedTexts,
}

impl History {
    /// Adds a request that has come.
    pub fn add_request(&self, arrival: ArrivedRequest) -> TimelineRecorder {
        self.requests.add_request(arrival, self.load.clone())
    }
}
