//! Follows all entries under the prefix: reads them as a whole, then each change from that revision on. Begins again
//! whenever the stream is lost, whatever the reason: a lost leader, a compaction, an etcd that was restored.

use super::keys::{StoreEntry, read_claim, read_member, read_post};
use super::line::{Backoff, CallError, EtcdConnection, to_call_error};
use crate::state::{StoreHealth, StoreState};
use etcd_client::{Event, EventType, GetOptions, KeyValue, WatchOptions, WatchStream};
use std::sync::Arc;
use std::time::SystemTime;
use tokio::sync::watch;
use tokio::time::Instant;

pub(super) struct StoreFollower {
    pub line: Arc<EtcdConnection>,
    pub state: watch::Sender<StoreState>,
    pub health: watch::Sender<StoreHealth>,
}

impl StoreFollower {
    /// Runs until its task is aborted.
    pub async fn run(self) {
        let mut pause = Backoff::new(&self.line.waits);
        let mut is_logged = false;
        loop {
            match self.open_watch().await {
                Ok(stream) => {
                    self.report_connected();
                    is_logged = false;
                    let began = Instant::now();
                    let why = self.follow(stream).await;
                    // Perhaps only this member is down: etcd counts as away when no member answers.
                    tracing::debug!(why, "the watch is lost");
                    if began.elapsed() > self.line.waits.retry_max {
                        pause.reset();
                    }
                }
                Err(failed) => self.report_away(failed, &mut is_logged),
            }
            pause.wait().await;
        }
    }

    async fn open_watch(&self) -> Result<WatchStream, CallError> {
        let root = &self.line.keys.root;
        let options = || Some(GetOptions::new().with_prefix());
        let listing = self.line.call(|mut client| async move { client.get(root.as_str(), options()).await }).await?;
        let revision = listing.header().map_or(0, |header| header.revision());
        self.apply_listing(listing.kvs(), revision);
        let options = || Some(WatchOptions::new().with_prefix().with_start_revision(revision + 1));
        self.line.call(|mut client| async move { client.watch(root.as_str(), options()).await }).await
    }

    fn apply_listing(&self, entries: &[KeyValue], revision: i64) {
        self.state.send_modify(|state| {
            let listings = state.listings + 1;
            *state = StoreState { revision: revision.unsigned_abs(), listings, ..StoreState::default() };
            entries.iter().for_each(|entry| self.put(state, entry));
        });
    }

    /// Returns why it ended.
    async fn follow(&self, mut stream: WatchStream) -> String {
        loop {
            let response = match stream.message().await {
                Ok(Some(response)) => response,
                Ok(None) => return "etcd ended the stream".into(),
                Err(error) => return format!("{:?}", to_call_error(&error)),
            };
            if response.canceled() {
                let (why, compacted) = (response.cancel_reason(), response.compact_revision());
                return format!("etcd ended the watch: {why} (compacted up to {compacted})");
            }
            if !response.events().is_empty() {
                self.state.send_modify(|state| response.events().iter().for_each(|event| self.apply(state, event)));
            }
        }
    }

    fn apply(&self, state: &mut StoreState, event: &Event) {
        let Some(entry) = event.kv() else { return };
        // The header's revision may be ahead of the events that have arrived.
        state.revision = entry.mod_revision().unsigned_abs();
        match event.event_type() {
            EventType::Put => self.put(state, entry),
            EventType::Delete => self.delete(state, entry.key()),
        }
    }

    fn put(&self, state: &mut StoreState, entry: &KeyValue) {
        state.revisions.insert(entry.key().to_vec(), entry.mod_revision().unsigned_abs());
        match self.line.keys.entry(entry.key()) {
            Some(StoreEntry::Claim(name)) => {
                state.held.insert(name.into(), read_claim(entry.value(), entry.mod_revision()));
            }
            Some(StoreEntry::Post(name)) => match read_post(entry.value()) {
                Some(text) => drop(state.posts.insert(name.into(), text)),
                None => drop(state.posts.remove(name)),
            },
            Some(StoreEntry::Member(name)) => match read_member(entry.value()) {
                Some(member) => drop(state.members.insert(name.into(), member)),
                None => {
                    tracing::warn!(replica = name, "its entry in etcd cannot be read");
                    state.members.remove(name);
                }
            },
            None => {}
        }
    }

    fn delete(&self, state: &mut StoreState, key: &[u8]) {
        state.revisions.remove(key);
        match self.line.keys.entry(key) {
            Some(StoreEntry::Claim(name)) => drop(state.held.remove(name)),
            Some(StoreEntry::Member(name)) => drop(state.members.remove(name)),
            Some(StoreEntry::Post(name)) => drop(state.posts.remove(name)),
            None => {}
        }
    }

    fn report_connected(&self) {
        self.health.send_if_modified(|health| {
            let was_away = !health.is_connected();
            if was_away {
                let n_members = self.state.borrow().members.len();
                tracing::info!(n_members, away_s = seconds_since(health.since), "etcd is connected");
                *health = StoreHealth::connected();
            }
            was_away
        });
    }

    /// Logs it once: the reason may change with the member that is called.
    fn report_away(&self, failed: CallError, is_logged: &mut bool) {
        let why = match failed {
            CallError::Refused(why) => format!("it refuses this user: {why}"),
            CallError::Away(why) => why,
            CallError::LeaseGone => "the lease has ended".into(),
        };
        if !std::mem::replace(is_logged, true) {
            tracing::warn!(
                why,
                "etcd is unreachable: no member joins or leaves until it returns, but serving continues"
            );
        }
        self.health.send_if_modified(|health| {
            if health.away.as_ref() == Some(&why) {
                return false;
            }
            let since = if health.is_connected() { SystemTime::now() } else { health.since };
            *health = StoreHealth { since, away: Some(why) };
            true
        });
    }
}

fn seconds_since(since: SystemTime) -> u64 {
    since.elapsed().unwrap_or_default().as_secs()
}
