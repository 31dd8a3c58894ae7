//! What happened lately, for people who look: requests with their timelines, and the last hour's load, both in bounded
//! rings. Written as things happen and by no timer, so that nobody pays for it while nobody looks. Knows no text, no
//! token and no key.
//!
//! A request's `Sighting` is written by whoever records it; `requests` and `load` are read by pages.

mod curve;
mod load;
mod requests;
mod texts;
mod timeline;

pub use load::{BIN, Bin, LastHour, WaitCounts};
pub use requests::{Sighting, Sightings};
pub use texts::{ShownFor, Texts, WatcherPlace};
pub use timeline::{Timeline, TimelineEvent, What};

use std::sync::Arc;
use types::TenantId;

/// Who asks for what, as it is known when a request comes.
#[derive(Clone, Debug)]
pub struct ArrivedRequest {
    pub face: &'static str,
    pub tenant: TenantId,
    /// The tenant's name in metrics: no key without a name is told.
    pub label: Arc<str>,
    pub unix_millis: u64,
}

/// What happened lately at this router.
#[derive(Default)]
pub struct History {
    pub requests: Sightings,
    pub load: Arc<LastHour>,
    pub texts: Texts,
}

impl History {
    /// A request has come.
    pub fn arrived(&self, arrival: ArrivedRequest) -> Sighting {
        self.requests.arrived(arrival, self.load.clone())
    }
}
