//! How many other replicas of its model a claim's holder has beside it, by the store.

use crate::state::StoreState;
use tokio::sync::watch;

/// The other replicas of one model. Clones read the same store.
#[derive(Clone, Debug)]
pub struct OtherReplicas {
    state: watch::Receiver<StoreState>,
    replica: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaCount {
    pub n: usize,
    /// Those that serve.
    pub n_ready: usize,
}

impl OtherReplicas {
    pub(crate) fn new(state: watch::Receiver<StoreState>, replica: &str) -> OtherReplicas {
        OtherReplicas { state, replica: replica.to_owned() }
    }

    /// How many there are at this moment.
    pub fn count(&self) -> ReplicaCount {
        let (state, replica) = (self.state.borrow(), self.replica.as_str());
        let model = state.members.get(replica).map(|own| &own.registration.model);
        let is_other = |name: &str, theirs: &String| name != replica && model.is_none_or(|ours| ours == theirs);
        let others = state.members.iter().filter(|(name, member)| is_other(name, &member.registration.model));
        others.fold(ReplicaCount::default(), |count, (_, member)| ReplicaCount {
            n: count.n + 1,
            n_ready: count.n_ready + usize::from(member.registration.ranks_ready > 0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryStore, Registration};

    #[test]
    fn other_replicas_of_the_same_model_are_counted_with_those_that_serve() {
        let store = MemoryStore::starting_at(0);
        let of = |model: &str| Registration { model: model.into(), ..Registration::default() };
        let own = store.claim_as("a", of("m"));
        let others = own.others();
        assert_eq!(others.count(), ReplicaCount::default());
        let _another_model = store.claim_as("b", of("n"));
        let mut other = store.claim_as("c", of("m"));
        assert_eq!(others.count(), ReplicaCount { n: 1, n_ready: 0 });
        other.update_registration(|registration| registration.ranks_ready = 2);
        assert_eq!(others.count(), ReplicaCount { n: 1, n_ready: 1 });
        drop(other);
        assert_eq!(others.count(), ReplicaCount::default());
    }
}
