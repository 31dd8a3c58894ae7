//! Failures of etcd: leases that lapse, connections that are cut, members that die, data that is lost. A claim keeps
//! its incarnation unless another coordinator has claimed the replica.

use super::proxy::Proxy;
use super::{LEASE, claim, config, gone, is, is_silent, next, open, until, within};
use crate::etcd::Etcd;
use cluster::{EtcdStore, EtcdTimings, Store};
use etcd_client::Client;
use std::time::Duration;

const PREFIX: &str = "/faults";

/// The test's own client of one member.
async fn client(etcd: &Etcd, i: usize) -> Client {
    Client::connect([etcd.endpoint(i)], None).await.unwrap()
}

/// Calls again until etcd answers.
async fn retried<T, F: Future<Output = Result<T, etcd_client::Error>>>(what: &str, request: impl Fn() -> F) -> T {
    within(what, async {
        loop {
            match tokio::time::timeout(Duration::from_secs(2), request()).await {
                Ok(Ok(done)) => return done,
                _ => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_lapses_is_made_anew_under_the_same_incarnation() {
    let etcd = Etcd::start(1);
    // No sign of life for an hour: the lease ends again and again.
    let waits = EtcdTimings { beat_every: Duration::from_secs(3600), ..EtcdTimings::with_lease(LEASE) };
    let paused = EtcdStore::open(cluster::EtcdConfig { waits, ..config(etcd.endpoints(), PREFIX) }).await.unwrap();
    let mut held = claim(&Store::Etcd(paused), "a", "h:1").await;
    let router = open(etcd.endpoints(), PREFIX).await;
    let mut watch = router.watch();
    assert_eq!(next(&mut watch).await, is("a", "h:1", &held));
    for _ in 0..2 {
        assert_eq!(next(&mut watch).await, gone("a"));
        assert_eq!(next(&mut watch).await, is("a", "h:1", &held));
    }
    let lost = tokio::time::timeout(Duration::from_millis(50), held.wait_lost()).await;
    assert!(lost.is_err(), "{lost:?}");
    held.release().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_that_dies_and_comes_back_is_a_pause() {
    let mut etcd = Etcd::start(1);
    let (coordinator, router) = (open(etcd.endpoints(), PREFIX).await, open(etcd.endpoints(), PREFIX).await);
    let mut watch = router.watch();
    let held = claim(&coordinator, "a", "h:1").await;
    assert_eq!(next(&mut watch).await, is("a", "h:1", &held));
    until(&router, true).await;
    etcd.kill(0);
    for store in [&router, &coordinator] {
        let away = until(store, false).await;
        assert!(away.away.is_some_and(|why| !why.is_empty()));
    }
    // Members that are there stay, and a new one waits.
    is_silent(&mut watch).await;
    let joins = coordinator.clone();
    let joins = tokio::spawn(async move { claim(&joins, "b", "h:2").await });
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!joins.is_finished());
    etcd.start_again(0);
    let joined = within("the claim that waited", joins).await.unwrap();
    assert!(joined.incarnation() > held.incarnation());
    // The lease may have lapsed, if the machine was slow; it is never another incarnation.
    loop {
        match next(&mut watch).await {
            seen if seen == is("b", "h:2", &joined) => break,
            seen => assert!(seen == gone("a") || seen == is("a", "h:1", &held), "{seen:?}"),
        }
    }
    until(&router, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_that_missed_compaction_sees_the_outcome() {
    let etcd = Etcd::start(1);
    let proxy = Proxy::to(etcd.port(0)).await;
    let (router, coordinator) =
        (open(vec![proxy.endpoint.clone()], PREFIX).await, open(etcd.endpoints(), PREFIX).await);
    let mut watch = router.watch();
    let (a, mut b) = (claim(&coordinator, "a", "h:1").await, claim(&coordinator, "b", "h:2").await);
    assert_eq!(next(&mut watch).await, is("a", "h:1", &a));
    assert_eq!(next(&mut watch).await, is("b", "h:2", &b));
    proxy.cut();
    until(&router, false).await;
    let mut near = coordinator.watch();
    a.release().await;
    b.update_registration(|registration| registration.address = "h:3".into());
    let c = claim(&coordinator, "c", "h:4").await;
    // Seen nearby, so it is written.
    while next(&mut near).await != is("c", "h:4", &c) {}
    compact(&etcd).await;
    proxy.mend();
    assert_eq!(next(&mut watch).await, gone("a"));
    assert_eq!(next(&mut watch).await, is("b", "h:3", &b));
    assert_eq!(next(&mut watch).await, is("c", "h:4", &c));
}

/// Makes etcd forget all older revisions.
async fn compact(etcd: &Etcd) {
    let direct = client(etcd, 0).await;
    let now = retried("a revision", || {
        let mut direct = direct.clone();
        async move { direct.get("x", None).await }
    });
    let now = now.await.header().unwrap().revision();
    retried("a compaction", || {
        let mut direct = direct.clone();
        async move { direct.compact(now, None).await }
    })
    .await;
}

/// A follower has read everything, and requests later changes when etcd has compacted them: the watch is refused over a
/// healthy connection, and all is read again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_etcd_refuses_for_a_compaction_begins_again() {
    const ROUNDS: u32 = 10;
    let etcd = Etcd::start(1);
    let proxy = Proxy::to(etcd.port(0)).await;
    let waits = EtcdTimings { call_max: Duration::from_secs(20), ..EtcdTimings::with_lease(LEASE) };
    let far = cluster::EtcdConfig { waits, ..config(vec![proxy.endpoint.clone()], PREFIX) };
    let router = Store::Etcd(EtcdStore::open(far).await.unwrap());
    let coordinator = open(etcd.endpoints(), PREFIX).await;
    let (mut watch, mut near) = (router.watch(), coordinator.watch());
    let mut held = claim(&coordinator, "a", "h:1").await;
    assert_eq!(next(&mut watch).await, is("a", "h:1", &held));
    for round in 2..ROUNDS {
        proxy.cut();
        until(&router, false).await;
        proxy.hold_behind("/faults/", 1);
        proxy.mend();
        within("the listing is read, and the watch is requested", proxy.until_held()).await;
        let n_connections = proxy.n_connections();
        for address in [format!("h:{round}1"), format!("h:{round}2")] {
            held.update_registration(|registration| registration.address.clone_from(&address));
            while next(&mut near).await != is("a", &address, &held) {}
        }
        compact(&etcd).await;
        proxy.let_on();
        while next(&mut watch).await != is("a", &format!("h:{round}2"), &held) {}
        // On a busy machine the connection may have been given up meanwhile; otherwise it was the refusal.
        if proxy.n_connections() == n_connections {
            return;
        }
    }
    panic!("no connection lasted from the listing to the watch in {ROUNDS} rounds");
}

/// A coordinator that is cut off for longer than its lease, and what another one does meanwhile.
async fn cut_off(replaced: bool) {
    let etcd = Etcd::start(1);
    let proxy = Proxy::to(etcd.port(0)).await;
    let (far, near) = (open(vec![proxy.endpoint.clone()], PREFIX).await, open(etcd.endpoints(), PREFIX).await);
    let mut watch = near.watch();
    let mut held = claim(&far, "a", "h:1").await;
    assert_eq!(next(&mut watch).await, is("a", "h:1", &held));
    proxy.cut();
    assert_eq!(next(&mut watch).await, gone("a"));
    let later = if replaced { Some(claim(&near, "a", "h:2").await) } else { None };
    if let Some(later) = &later {
        assert_eq!(next(&mut watch).await, is("a", "h:2", later));
    }
    proxy.mend();
    match later {
        None => assert_eq!(next(&mut watch).await, is("a", "h:1", &held)),
        Some(later) => {
            let lost = within("the claim is lost", held.wait_lost()).await;
            assert_eq!((lost.theirs, lost.by.as_str()), (later.incarnation(), "h:2"));
            is_silent(&mut watch).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_off_claim_returns_with_same_incarnation() {
    cut_off(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_claim_is_fenced_after_cut_off() {
    cut_off(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claim_that_etcd_forgot_is_registered_again() {
    let mut etcd = Etcd::start(1);
    let (coordinator, router) = (open(etcd.endpoints(), PREFIX).await, open(etcd.endpoints(), PREFIX).await);
    // Some history, so that the new etcd counts from far below.
    for _ in 0..10 {
        claim(&coordinator, "old", "h:9").await.release().await;
    }
    let mut held = claim(&coordinator, "a", "h:1").await;
    let mut watch = router.watch();
    while next(&mut watch).await != is("a", "h:1", &held) {}
    etcd.kill(0);
    etcd.start_empty(0);
    // The member is gone until its coordinator registers it again.
    let mut seen = next(&mut watch).await;
    if seen == gone("a") {
        seen = next(&mut watch).await;
    }
    assert_eq!(seen, is("a", "h:1", &held));
    let lost = tokio::time::timeout(Duration::from_millis(50), held.wait_lost()).await;
    assert!(lost.is_err(), "{lost:?}");
    // And a later claim is later, whatever the new etcd counts.
    let later = claim(&router, "a", "h:2").await;
    assert!(later.incarnation() > held.incarnation());
    assert_eq!(within("the claim is lost", held.wait_lost()).await.theirs, later.incarnation());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_entry_that_another_program_writes_is_written_again() {
    let etcd = Etcd::start(1);
    let (coordinator, router) = (open(etcd.endpoints(), PREFIX).await, open(etcd.endpoints(), PREFIX).await);
    let held = claim(&coordinator, "a", "h:1").await;
    let (post, reader) = (coordinator.post("p").unwrap().unwrap(), router.post("q").unwrap().unwrap());
    post.publish("text".into());
    let mut other = client(&etcd, 0).await;
    let keys = ["members/a", "posts/p"].map(|key| format!("{PREFIX}/{key}"));
    let mut entries = Vec::new();
    for key in &keys {
        let written = within("it is written", async {
            loop {
                match other.get(key.as_str(), None).await.unwrap().take_kvs().pop() {
                    Some(written) => return written,
                    None => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            }
        });
        entries.push(written.await);
    }
    let elsewhere = String::from_utf8(entries[0].value().to_vec()).unwrap().replace("h:1", "h:2");
    // Another address, no registration at all, and the same value without the lease, which would outlive its process.
    for (key, value) in [
        (&keys[0], elsewhere.as_bytes()),
        (&keys[0], b"{"),
        (&keys[0], entries[0].value()),
        (&keys[1], b"other"),
        (&keys[1], entries[1].value()),
    ] {
        other.put(key.as_str(), value, None).await.unwrap();
        let before = entries.iter().find(|entry| entry.key() == key.as_bytes()).unwrap();
        let again = async {
            loop {
                let now = other.get(key.as_str(), None).await.unwrap().take_kvs().pop().unwrap();
                if (now.value(), now.lease()) == (before.value(), before.lease()) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LEASE, again).await.expect("it is written again within a lease");
    }
    within("others read it", async {
        while reader.others().get("p").is_none_or(|text| text != "text") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    drop(post);
    held.release().await;
    for key in &keys {
        within("it ends with its lease", async {
            while !other.get(key.as_str(), None).await.unwrap().kvs().is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_dies_is_a_pause() {
    let mut etcd = Etcd::start(3);
    let (coordinator, router) = (open(etcd.endpoints(), PREFIX).await, open(etcd.endpoints(), PREFIX).await);
    let mut watch = router.watch();
    let mut held = claim(&coordinator, "a", "h:1").await;
    assert_eq!(next(&mut watch).await, is("a", "h:1", &held));
    for round in 0..2 {
        let leader = leader(&etcd).await;
        etcd.kill(leader);
        let name = format!("b{round}");
        let joined = claim(&coordinator, &name, "h:2").await;
        assert!(joined.incarnation() > held.incarnation());
        // On a slow machine the election may take longer than the lease.
        while next(&mut watch).await != is(&name, "h:2", &joined) {}
        joined.release().await;
        while next(&mut watch).await != gone(&name) {}
        etcd.start_again(leader);
    }
    let lost = tokio::time::timeout(Duration::from_millis(50), held.wait_lost()).await;
    assert!(lost.is_err(), "{lost:?}");
    held.update_registration(|registration| registration.address = "h:3".into());
    while next(&mut watch).await != is("a", "h:3", &held) {}
}

/// The index of the leader.
async fn leader(etcd: &Etcd) -> usize {
    within("a leader", async {
        loop {
            for i in 0..3 {
                let request = async { client(etcd, i).await.status().await };
                if let Ok(Ok(status)) = tokio::time::timeout(Duration::from_secs(1), request).await
                    && status.leader() != 0
                    && status.leader() == status.header().unwrap().member_id()
                {
                    return i;
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
    .await
}
