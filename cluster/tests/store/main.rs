//! The requirements for every store, in memory and in etcd; and those for etcd's store when etcd itself fails.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod conformance;
#[path = "../../../tests/common/etcd.rs"]
mod etcd;
mod faults;
#[path = "../../../tests/common/ports.rs"]
mod ports;
mod proof;
mod proxy;

use cluster::{Claim, EtcdConfig, EtcdStore, EtcdTimings, MemberChange, MemberWatch, Registration, Store, StoreHealth};
use std::future::Future;
use std::time::Duration;

/// The limit for anything that must come; far beyond what it needs on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// As short as etcd allows.
const LEASE: Duration = Duration::from_secs(1);

async fn within<T>(what: &str, waited: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, waited).await {
        Ok(done) => done,
        Err(_) => panic!("never: {what}"),
    }
}

fn config(endpoints: Vec<String>, prefix: &str) -> EtcdConfig {
    EtcdConfig { endpoints, prefix: prefix.into(), tls: None, user: None, waits: EtcdTimings::with_lease(LEASE) }
}

async fn open(endpoints: Vec<String>, prefix: &str) -> Store {
    Store::Etcd(EtcdStore::open(config(endpoints, prefix)).await.unwrap())
}

fn at(address: &str) -> Registration {
    Registration { address: address.into(), model: "m".into(), ..Registration::default() }
}

async fn claim(store: &Store, replica: &str, address: &str) -> Claim {
    within("a claim", store.claim(replica, at(address))).await.unwrap()
}

/// The next change, as `name address incarnation` or `name gone`.
async fn next(watch: &mut MemberWatch) -> (String, Option<(String, u64)>) {
    match within("a change", watch.next()).await {
        MemberChange::Is(name, member) => (name, Some((member.registration.address, member.incarnation))),
        MemberChange::Gone(name) => (name, None),
    }
}

fn is(name: &str, address: &str, claim: &Claim) -> (String, Option<(String, u64)>) {
    (name.into(), Some((address.into(), claim.incarnation())))
}

fn gone(name: &str) -> (String, Option<(String, u64)>) {
    (name.into(), None)
}

async fn until(store: &Store, is_connected: bool) -> StoreHealth {
    let mut health = store.health();
    let result = within("the store's health", health.wait_for(|health| health.is_connected() == is_connected)).await;
    result.unwrap().clone()
}

async fn is_silent(watch: &mut MemberWatch) {
    let more = tokio::time::timeout(Duration::from_millis(200), watch.next()).await;
    assert!(more.is_err(), "{more:?}");
}
