//! A store inside one process. Every change has a revision, and a claim's revision is the incarnation of whoever made
//! it.

use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

/// A replica and the coordinator that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub incarnation: u64,
    pub address: String,
}

type Members = BTreeMap<String, Member>;

#[derive(Clone, Debug)]
pub struct MemoryStore {
    state: Arc<watch::Sender<State>>,
}

#[derive(Debug)]
struct State {
    revision: u64,
    members: Members,
}

impl MemoryStore {
    /// Revisions count from here. A process passes the time, so that its epochs are later than those of the process
    /// before it, whose ids a client may still hold.
    pub fn starting_at(revision: u64) -> MemoryStore {
        MemoryStore { state: Arc::new(watch::Sender::new(State { revision, members: Members::new() })) }
    }

    /// Takes a replica, from whoever held it: their epoch is older from now on.
    pub fn claim(&self, replica: &str, address: &str) -> Claim {
        let mut incarnation = 0;
        self.state.send_modify(|state| {
            state.revision += 1;
            incarnation = state.revision;
            state.members.insert(replica.into(), Member { incarnation, address: address.into() });
        });
        Claim { store: self.clone(), replica: replica.into(), incarnation }
    }

    pub fn members(&self) -> BTreeMap<String, Member> {
        self.state.borrow().members.clone()
    }

    /// Waits for a state of the members that fits.
    pub async fn wait_for(&self, mut fits: impl FnMut(&BTreeMap<String, Member>) -> bool) -> BTreeMap<String, Member> {
        let mut changes = self.state.subscribe();
        let state = changes.wait_for(|state| fits(&state.members)).await.expect("the sender is held by self");
        state.members.clone()
    }
}

/// Holds a replica's entry until it is dropped.
#[derive(Debug)]
pub struct Claim {
    store: MemoryStore,
    replica: String,
    incarnation: u64,
}

impl Claim {
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.store.state.send_if_modified(|state| {
            // Whoever took the replica over keeps it.
            let is_ours = state.members.get(&self.replica).is_some_and(|member| member.incarnation == self.incarnation);
            if is_ours {
                state.members.remove(&self.replica);
                state.revision += 1;
            }
            is_ours
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_later_claim_has_a_later_incarnation_and_stays() {
        let store = MemoryStore::starting_at(100);
        let first = store.claim("a", "here");
        let second = store.claim("a", "there");
        assert!(second.incarnation() > first.incarnation() && first.incarnation() > 100);
        drop(first);
        assert_eq!(store.members()["a"].address, "there");
        drop(second);
        assert!(store.wait_for(BTreeMap::is_empty).await.is_empty());
    }
}
