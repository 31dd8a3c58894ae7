//! The content of a store at one moment, and how readers follow it: each gets the difference to what it has read. A
//! slow reader misses intermediate states but no outcome, so nothing piles up.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::time::SystemTime;
use tokio::sync::watch;

/// A coordinator's registration of its replica.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Registration {
    /// `host:port`, where routers and workers reach it.
    pub address: String,
    pub model: String,
    /// Empty until it is known.
    pub policy_digest: String,
    pub tp: u16,
    pub pp: u16,
    pub ranks_ready: u16,
}

/// A replica and the coordinator that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub incarnation: u64,
    pub registration: Registration,
}

/// The last text of each process, by its name.
pub type Posts = BTreeMap<String, String>;

/// Members by name.
pub type Members = BTreeMap<String, Member>;

/// The holder of a replica's name, present or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClaimHolder {
    pub incarnation: u64,
    /// Distinguishes claims of one incarnation, which only a store that lost its data could give twice.
    pub holder: String,
    pub address: String,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct StoreState {
    /// The revision of the last change.
    pub revision: u64,
    /// How often it was read as a whole. The revision may then be lower: a store can lose its data.
    pub listings: u64,
    pub members: Members,
    pub held: BTreeMap<String, ClaimHolder>,
    /// The texts that processes publish to each other.
    pub posts: Posts,
    /// The revision of each entry's last write, by its key: for stores whose entries other programs may write.
    pub revisions: BTreeMap<Vec<u8>, u64>,
}

/// Whether the store can be reached. If not, no member joins or leaves, and all else goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreHealth {
    pub since: SystemTime,
    /// Why it cannot be reached.
    pub away: Option<String>,
}

impl StoreHealth {
    pub(crate) fn connected() -> StoreHealth {
        StoreHealth { since: SystemTime::now(), away: None }
    }

    pub(crate) fn away(why: &str) -> StoreHealth {
        StoreHealth { since: SystemTime::now(), away: Some(why.into()) }
    }

    pub fn is_connected(&self) -> bool {
        self.away.is_none()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberChange {
    /// A member is new or has changed.
    Is(String, Member),
    /// A suspicion, not a death.
    Gone(String),
}

/// Follows the members: first those that exist, then each change.
pub struct MemberWatch {
    state: watch::Receiver<StoreState>,
    reported: Members,
    due: VecDeque<MemberChange>,
    has_looked: bool,
}

impl MemberWatch {
    pub(crate) fn new(state: watch::Receiver<StoreState>) -> MemberWatch {
        MemberWatch { state, reported: Members::new(), due: VecDeque::new(), has_looked: false }
    }

    /// A watch of members that never change, in this order.
    pub(crate) fn given(members: Vec<(String, Member)>) -> MemberWatch {
        let reported = members.iter().cloned().collect();
        let due = members.into_iter().map(|(name, member)| MemberChange::Is(name, member)).collect();
        MemberWatch { state: watch::channel(StoreState::default()).1, reported, due, has_looked: true }
    }

    /// The changes that are already available.
    pub fn take_available(&mut self) -> Vec<MemberChange> {
        if !self.has_looked || self.state.has_changed().unwrap_or(false) {
            self.refresh();
        }
        self.due.drain(..).collect()
    }

    /// Waits for the next change; for ever where no more can come. Safe to drop at any point.
    pub async fn next(&mut self) -> MemberChange {
        loop {
            if let Some(change) = self.due.pop_front() {
                return change;
            }
            if self.has_looked && self.state.changed().await.is_err() {
                return std::future::pending().await;
            }
            self.refresh();
        }
    }

    fn refresh(&mut self) {
        self.has_looked = true;
        let members = self.state.borrow_and_update().members.clone();
        // Changes that are due already count as delivered.
        self.due.extend(diff_members(&self.reported, &members));
        self.reported = members;
    }
}

fn diff_members(reported: &Members, now: &Members) -> VecDeque<MemberChange> {
    let gone = reported.keys().filter(|name| !now.contains_key(*name));
    let gone = gone.map(|name| MemberChange::Gone(name.clone()));
    let mut news: Vec<_> = now.iter().filter(|(name, member)| reported.get(*name) != Some(*member)).collect();
    // In the order in which they were claimed.
    news.sort_by_key(|(_, member)| member.incarnation);
    gone.chain(news.into_iter().map(|(name, member)| MemberChange::Is(name.clone(), member.clone()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn slow_reader_sees_the_final_state() {
        let member = |incarnation| Member { incarnation, registration: Registration::default() };
        let state = watch::Sender::new(StoreState::default());
        let mut watch = MemberWatch::new(state.subscribe());
        state.send_modify(|state| drop(state.members.insert("a".into(), member(1))));
        assert_eq!(watch.next().await, MemberChange::Is("a".into(), member(1)));
        state.send_modify(|state| drop(state.members.insert("b".into(), member(2))));
        state.send_modify(|state| drop(state.members.remove("b")));
        state.send_modify(|state| drop(state.members.insert("c".into(), member(3))));
        state.send_modify(|state| drop(state.members.remove("a")));
        assert_eq!(watch.next().await, MemberChange::Gone("a".into()));
        assert_eq!(watch.next().await, MemberChange::Is("c".into(), member(3)));
    }
}
