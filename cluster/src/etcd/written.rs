//! When this process last wrote an entry, and whether etcd still has that entry: another value, a deletion and a write
//! without the lease all change the entry's revision.

use crate::state::StoreState;
use etcd_client::ResponseHeader;
use std::time::Duration;

/// Another process may keep changing an entry: it is not rewritten faster than this.
pub(super) const REWRITE_MIN: Duration = Duration::from_millis(200);

/// What keeps an entry up.
pub(super) enum KeepAction {
    Beat,
    Write,
    /// Etcd shows something other than what was written.
    Amiss,
}

/// Etcd's revision when an entry was written: older events do not show the entry.
#[derive(Clone, Copy, Default)]
pub(super) struct EntryRevision {
    revision: u64,
    /// How often the state had been read as a whole before the entry was written.
    listings: u64,
}

impl EntryRevision {
    pub fn at(header: Option<&ResponseHeader>, listings: u64) -> EntryRevision {
        EntryRevision { revision: header.map_or(0, |header| header.revision().unsigned_abs()), listings }
    }

    /// Whether the state is later than the write.
    pub fn precedes(self, state: &StoreState) -> bool {
        state.revision >= self.revision || state.listings != self.listings
    }

    /// Whether the entry under this key is still the one that was written.
    pub fn stands(self, key: &str, state: &StoreState) -> bool {
        state.revisions.get(key.as_bytes()) == Some(&self.revision)
    }
}
