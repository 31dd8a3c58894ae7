//! The kinds of store behind one type: memory within a process, addresses that were given as flags, etcd.

use crate::addresses::Addresses;
use crate::claim::Claim;
use crate::etcd::EtcdStore;
use crate::memory::MemoryStore;
use crate::post::Post;
use crate::state::{Member, MemberWatch, Registration, StoreHealth};
use crate::{Error, check_name};
use tokio::sync::watch;

/// Clones share one store.
#[derive(Clone, Debug)]
pub enum Store {
    Memory(MemoryStore),
    /// Members given as flags, which never change, named by their addresses. No other process sees a claim made here.
    Static {
        given: Addresses,
        own: MemoryStore,
    },
    Etcd(EtcdStore),
}

impl Store {
    /// A store of given members; claims of this process have later incarnations than `revision`.
    pub fn fixed(given: Addresses, revision: u64) -> Store {
        Store::Static { given, own: MemoryStore::starting_at(revision) }
    }

    pub fn kind(&self) -> &'static str {
        match self {
            Store::Memory(_) => "memory",
            Store::Static { .. } => "static",
            Store::Etcd(_) => "etcd",
        }
    }

    /// Takes a replica's name from its holder. Waits while the store is away; safe to drop at any point.
    pub async fn claim(&self, replica: &str, registration: Registration) -> Result<Claim, Error> {
        check_name(replica)?;
        match self {
            Store::Memory(store) | Store::Static { own: store, .. } => Ok(store.claim_as(replica, registration)),
            Store::Etcd(store) => store.claim(replica, registration).await,
        }
    }

    /// Returns this process's place among the posts of the cluster. None where no other process would read it.
    pub fn post(&self, name: &str) -> Result<Option<Post>, Error> {
        check_name(name)?;
        Ok(match self {
            Store::Memory(store) => Some(store.post(name)),
            Store::Static { .. } => None,
            Store::Etcd(store) => Some(store.post(name)),
        })
    }

    pub fn watch(&self) -> MemberWatch {
        match self {
            Store::Memory(store) => store.watch(),
            Store::Static { given: Addresses(addresses), .. } => {
                MemberWatch::given(addresses.iter().map(|address| fixed_member(address)).collect())
            }
            Store::Etcd(store) => store.watch(),
        }
    }

    /// Memory and given members are always reachable.
    pub fn health(&self) -> watch::Receiver<StoreHealth> {
        match self {
            Store::Memory(store) | Store::Static { own: store, .. } => store.health(),
            Store::Etcd(store) => store.health(),
        }
    }
}

/// The incarnation of a given address is unknown, so no epoch counts as too old.
fn fixed_member(address: &str) -> (String, Member) {
    let registration = Registration { address: address.to_owned(), ..Registration::default() };
    (address.to_owned(), Member { incarnation: 0, registration })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::MemberChange;

    #[tokio::test]
    async fn given_members_are_there_and_stay() {
        let store = Store::fixed("b:1,a:2".parse().unwrap(), 7);
        let mut watch = store.watch();
        // The order of the flags is kept: among equals the first is chosen.
        for expect in ["b:1", "a:2"] {
            let MemberChange::Is(name, member) = watch.next().await else { panic!("a given member is gone") };
            assert_eq!((name.as_str(), member.registration.address.as_str()), (expect, expect));
        }
        let claim = store.claim("mine", Registration::default()).await.unwrap();
        assert!(claim.incarnation() > 7);
        let more = tokio::time::timeout(std::time::Duration::from_millis(50), watch.next()).await;
        assert!(more.is_err(), "{more:?}");
        assert_eq!(store.claim("a/b", Registration::default()).await.unwrap_err(), Error::Name("a/b".into()));
    }
}
