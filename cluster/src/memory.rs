//! A store inside one process. Every change has a revision, and a claim's revision is the incarnation of its holder.

use crate::claim::{Claim, ClaimLost};
use crate::others::OtherReplicas;
use crate::post::{Post, PostKind};
use crate::state::{ClaimHolder, Member, MemberWatch, Members, Registration, StoreHealth, StoreState};
use std::sync::Arc;
use tokio::sync::watch;

#[derive(Clone, Debug)]
pub struct MemoryStore {
    state: Arc<watch::Sender<StoreState>>,
    /// The state that this clone sees: the state itself, or for a store from afar the result of its last `look`.
    seen: Arc<watch::Sender<StoreState>>,
    health: Arc<watch::Sender<StoreHealth>>,
}

impl MemoryStore {
    /// Revisions count from here. A process passes the time, so that its epochs are later than those of the process
    /// before it, whose ids a client may still hold.
    pub fn starting_at(revision: u64) -> MemoryStore {
        MemoryStore::with(StoreState { revision, ..StoreState::default() })
    }

    pub(crate) fn with(state: StoreState) -> MemoryStore {
        let state = Arc::new(watch::Sender::new(state));
        MemoryStore { seen: state.clone(), state, health: Arc::new(watch::Sender::new(StoreHealth::connected())) }
    }

    /// The same store over a connection that may be slow or cut: what is written here arrives there, but reads see only
    /// what the last `look` found.
    pub fn remote_view(&self) -> MemoryStore {
        let seen = Arc::new(watch::Sender::new(StoreState::default()));
        MemoryStore { state: self.state.clone(), seen, health: Arc::new(watch::Sender::new(StoreHealth::connected())) }
    }

    /// For a store from afar: reports to its users that it is cut off.
    pub fn report_away(&self) {
        self.health.send_replace(StoreHealth::away("it is cut off"));
    }

    pub fn health(&self) -> watch::Receiver<StoreHealth> {
        self.health.subscribe()
    }

    /// The revision of the last change.
    pub fn revision(&self) -> u64 {
        self.state.borrow().revision
    }

    /// For a store from afar: reads the present entries, except those whose lease `has_lapsed`.
    pub fn refresh(&self, has_lapsed: impl Fn(&Member) -> bool) {
        let mut state = self.state.borrow().clone();
        state.members.retain(|_, member| !has_lapsed(member));
        self.seen.send_if_modified(|seen| {
            let is_news = (&seen.members, &seen.held, &seen.posts) != (&state.members, &state.held, &state.posts);
            if is_news {
                *seen = state;
            }
            is_news
        });
    }

    /// Takes a replica from its holder. Epochs of that holder are older from now on.
    pub fn claim(&self, replica: &str, address: &str) -> Claim {
        self.claim_as(replica, Registration { address: address.into(), ..Registration::default() })
    }

    pub fn claim_as(&self, replica: &str, registration: Registration) -> Claim {
        let mut incarnation = 0;
        self.state.send_modify(|state| {
            state.revision += 1;
            incarnation = state.revision;
            let address = registration.address.clone();
            let held = ClaimHolder { incarnation, holder: incarnation.to_string(), address };
            state.held.insert(replica.into(), held);
            state.members.insert(replica.into(), Member { incarnation, registration: registration.clone() });
        });
        Claim::in_memory(self.clone(), replica, incarnation, registration)
    }

    pub fn members(&self) -> Members {
        self.seen.borrow().members.clone()
    }

    pub(crate) fn others(&self, replica: &str) -> OtherReplicas {
        OtherReplicas::new(self.seen.subscribe(), replica)
    }

    pub fn watch(&self) -> MemberWatch {
        MemberWatch::new(self.seen.subscribe())
    }

    pub fn post(&self, name: &str) -> Post {
        Post::new(name, (self.seen.subscribe(), self.health()), PostKind::Memory(self.state.clone()))
    }

    /// Changes the entry of the claim with this incarnation, if it is the last one.
    pub(crate) fn update_registration(&self, replica: &str, incarnation: u64, registration: &Registration) {
        self.state.send_if_modified(|state| {
            let Some(member) = state.members.get_mut(replica) else { return false };
            let is_news = member.incarnation == incarnation && member.registration != *registration;
            if is_news {
                member.registration = registration.clone();
                state.revision += 1;
            }
            is_news
        });
    }

    pub(crate) async fn wait_lost(&self, replica: &str, ours: u64) -> ClaimLost {
        let mut changes = self.seen.subscribe();
        let is_later = |state: &StoreState| state.held.get(replica).is_some_and(|held| held.incarnation > ours);
        let state = changes.wait_for(is_later).await.expect("the sender is held by self");
        let held = &state.held[replica];
        ClaimLost { replica: replica.into(), by: held.address.clone(), ours, theirs: held.incarnation }
    }

    pub(crate) fn release(&self, replica: &str, incarnation: u64) {
        self.state.send_if_modified(|state| {
            // A coordinator that took the replica over keeps it.
            let is_ours = state.members.get(replica).is_some_and(|member| member.incarnation == incarnation);
            if is_ours {
                state.members.remove(replica);
                state.revision += 1;
            }
            is_ours
        });
    }
}
