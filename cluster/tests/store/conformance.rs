//! The suite: each case gets two sides of one store, as two processes would have them. A store of given members shows
//! claims to their own process only and has no followers: it passes the cases about claims, and the one about given
//! members.

use super::{at, claim, gone, is, is_silent, next, open, until, within};
use crate::etcd::Etcd;
use cluster::{Claim, Error, MemoryStore, Post, Posts, Store};
use std::pin::Pin;
use std::time::Duration;

type Case = fn(Store, Store) -> Pin<Box<dyn Future<Output = ()>>>;

/// Cases for every store.
const CLAIMS: &[(&str, Case)] = &[
    ("fence", |one, other| Box::pin(a_second_claim_ends_the_first(one, other))),
    ("race", |one, other| Box::pin(async move { drop(of_many_claims_each_is_later(&one, &other).await) })),
    ("names", |one, other| Box::pin(names_that_are_none_are_refused(one, other))),
    ("health", |one, other| Box::pin(what_is_there_is_connected(one, other))),
];

/// Cases for stores that show claims to others.
const SHARED_CASES: &[(&str, Case)] = &[
    ("claim", |one, other| Box::pin(a_claim_is_seen_until_it_is_released(one, other))),
    ("seen-fence", |one, other| Box::pin(a_second_claim_fences_the_first(one, other))),
    ("order", |one, other| Box::pin(changes_come_in_order(one, other))),
    ("late", |one, other| Box::pin(late_watch_sees_all_members(one, other))),
    ("posts", |one, other| Box::pin(post_is_read_until_its_process_ends(one, other))),
    ("seen-race", |one, other| Box::pin(of_many_claims_the_last_stands(one, other))),
];

#[tokio::test]
async fn memory_conforms() {
    for (name, case) in CLAIMS.iter().chain(SHARED_CASES) {
        eprintln!("memory: {name}");
        let store = Store::Memory(MemoryStore::starting_at(100));
        case(store.clone(), store).await;
    }
}

#[tokio::test]
async fn given_addresses_conform() {
    let store = || Store::fixed("h:7,[::1]:8".parse().unwrap(), 100);
    for (name, case) in CLAIMS {
        eprintln!("static: {name}");
        let store = store();
        case(store.clone(), store).await;
    }
    eprintln!("static: given");
    let store = store();
    claims_do_not_change_given_members(store.clone(), store).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_conforms() {
    let etcd = Etcd::start(1);
    for (name, case) in CLAIMS.iter().chain(SHARED_CASES) {
        eprintln!("etcd: {name}");
        let prefix = format!("/conformance/{name}");
        case(open(etcd.endpoints(), &prefix).await, open(etcd.endpoints(), &prefix).await).await;
    }
}

async fn a_claim_is_seen_until_it_is_released(one: Store, other: Store) {
    let mut watches = [one.watch(), other.watch()];
    let held = claim(&one, "a", "h:1").await;
    for watch in &mut watches {
        assert_eq!(next(watch).await, is("a", "h:1", &held));
    }
    let before = held.incarnation();
    held.release().await;
    for watch in &mut watches {
        assert_eq!(next(watch).await, gone("a"));
    }
    let again = claim(&other, "a", "h:2").await;
    assert!(again.incarnation() > before);
    assert_eq!(next(&mut watches[0]).await, is("a", "h:2", &again));
    // Dropped without a release, as at the end of a process that has no time.
    drop(again);
    assert_eq!(next(&mut watches[0]).await, gone("a"));
}

async fn a_second_claim_fences_the_first(one: Store, other: Store) {
    let mut watch = one.watch();
    let mut first = claim(&one, "a", "h:1").await;
    assert_eq!(next(&mut watch).await, is("a", "h:1", &first));
    let second = claim(&other, "a", "h:2").await;
    assert!(second.incarnation() > first.incarnation());
    let lost = within("the claim is lost", first.wait_lost()).await;
    assert_eq!((lost.replica.as_str(), lost.by.as_str()), ("a", "h:2"));
    assert_eq!((lost.ours, lost.theirs), (first.incarnation(), second.incarnation()));
    // Its entry may go before the other's comes.
    let mut seen = next(&mut watch).await;
    if seen == gone("a") {
        seen = next(&mut watch).await;
    }
    assert_eq!(seen, is("a", "h:2", &second));
    // Whatever the first still does changes nothing.
    first.update_registration(|registration| registration.address = "h:9".into());
    first.release().await;
    is_silent(&mut watch).await;
    second.release().await;
    assert_eq!(next(&mut watch).await, gone("a"));
}

async fn changes_come_in_order(one: Store, other: Store) {
    let mut watch = other.watch();
    let mut a = claim(&one, "a", "h:1").await;
    assert_eq!(next(&mut watch).await, is("a", "h:1", &a));
    let b = claim(&other, "b", "h:2").await;
    assert_eq!(next(&mut watch).await, is("b", "h:2", &b));
    for n in 3..8 {
        let address = format!("h:{n}");
        a.update_registration(|registration| registration.address.clone_from(&address));
        assert_eq!(next(&mut watch).await, is("a", &address, &a));
    }
    // A registration that is repeated is no change.
    a.update_registration(|registration| registration.address = "h:7".into());
    is_silent(&mut watch).await;
    b.release().await;
    assert_eq!(next(&mut watch).await, gone("b"));
    a.release().await;
    assert_eq!(next(&mut watch).await, gone("a"));
}

async fn late_watch_sees_all_members(one: Store, other: Store) {
    let first = claim(&one, "z", "h:1").await;
    let second = claim(&one, "a", "h:2").await;
    let mut seen = other.watch();
    // Two writes; a reader between them sees only the first. Either way each comes once.
    let mut both = vec![next(&mut seen).await, next(&mut seen).await];
    both.sort();
    assert_eq!(both, [is("a", "h:2", &second), is("z", "h:1", &first)]);
    // By then all are there, and come in the order of the claims.
    let mut late = other.watch();
    assert_eq!(next(&mut late).await, is("z", "h:1", &first));
    assert_eq!(next(&mut late).await, is("a", "h:2", &second));
    is_silent(&mut late).await;
}

async fn post_is_read_until_its_process_ends(one: Store, other: Store) {
    let post = |store: &Store, name: &str| store.post(name).unwrap().expect("others read it");
    let (first, second) = (post(&one, "first"), post(&other, "second"));
    let posts =
        |entries: &[(&str, &str)]| entries.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect();
    first.publish("a".into());
    wait_for_posts(&second, posts(&[("first", "a")])).await;
    second.publish("b".into());
    first.publish("c".into());
    wait_for_posts(&first, posts(&[("second", "b")])).await;
    wait_for_posts(&second, posts(&[("first", "c")])).await;
    // A reader that comes late, and a process without a text.
    let third = post(&other, "third");
    wait_for_posts(&third, posts(&[("first", "c"), ("second", "b")])).await;
    drop(first);
    wait_for_posts(&third, posts(&[("second", "b")])).await;
    assert!(matches!(one.post("a/b"), Err(Error::Name(_))));
}

async fn wait_for_posts(post: &Post, expect: Posts) {
    let all = async {
        while post.others() != expect || !post.is_connected() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within("the posts of the others", all).await;
}

async fn a_second_claim_ends_the_first(one: Store, other: Store) {
    let mut first = claim(&one, "a", "h:1").await;
    let beside = claim(&one, "b", "h:1").await;
    let second = claim(&other, "a", "h:2").await;
    assert!(first.incarnation() < beside.incarnation() && beside.incarnation() < second.incarnation());
    let lost = within("the claim is lost", first.wait_lost()).await;
    assert_eq!((lost.replica.as_str(), lost.by.as_str()), ("a", "h:2"));
    assert_eq!((lost.ours, lost.theirs), (first.incarnation(), second.incarnation()));
    first.release().await;
    // A fenced claim ends no other claim, and the next coordinator can take a name that is given back.
    second.release().await;
    let third = claim(&one, "a", "h:3").await;
    assert!(third.incarnation() > beside.incarnation());
    third.release().await;
    beside.release().await;
}

async fn what_is_there_is_connected(one: Store, other: Store) {
    for store in [one, other] {
        assert!(until(&store, true).await.away.is_none());
    }
}

/// Given members come in their order to every watch, and no others.
async fn claims_do_not_change_given_members(one: Store, other: Store) {
    let given = |address: &str| (address.to_owned(), Some((address.to_owned(), 0)));
    let mut early = other.watch();
    let held = claim(&one, "h:7", "h:9").await;
    let mut late = one.watch();
    held.release().await;
    for watch in [&mut early, &mut late] {
        assert_eq!([next(watch).await, next(watch).await], [given("h:7"), given("[::1]:8")]);
        is_silent(watch).await;
    }
}

/// Returns the last of the claims.
async fn of_many_claims_each_is_later(one: &Store, other: &Store) -> Claim {
    const N: usize = 8;
    let mut claims = Vec::new();
    let contenders: Vec<_> = (0..N).map(|i| if i % 2 == 0 { one.clone() } else { other.clone() }).collect();
    let tasks: Vec<_> = contenders
        .into_iter()
        .enumerate()
        .map(|(i, store)| tokio::spawn(async move { claim(&store, "a", &format!("h:{}", i + 1)).await }))
        .collect();
    for task in tasks {
        claims.push(task.await.unwrap());
    }
    claims.sort_by_key(cluster::Claim::incarnation);
    claims.windows(2).for_each(|pair| assert!(pair[0].incarnation() < pair[1].incarnation()));
    let last = claims.pop().unwrap();
    for earlier in &mut claims {
        let lost = within("an earlier claim is lost", earlier.wait_lost()).await;
        assert!(lost.theirs > lost.ours);
    }
    last
}

async fn of_many_claims_the_last_stands(one: Store, other: Store) {
    let last = of_many_claims_each_is_later(&one, &other).await;
    let mut watch = one.watch();
    let stands = |(_, member): &(String, Option<(String, u64)>)| {
        member.as_ref().is_some_and(|(_, incarnation)| *incarnation == last.incarnation())
    };
    while !stands(&next(&mut watch).await) {}
    is_silent(&mut watch).await;
}

async fn names_that_are_none_are_refused(one: Store, _other: Store) {
    for name in ["", "a/b", "a b", "ä", &"x".repeat(cluster::NAME_BYTES_MAX + 1)] {
        let refused = within("a refusal", one.claim(name, at("h:1"))).await;
        assert_eq!(refused.unwrap_err(), Error::Name(name.into()));
    }
}
