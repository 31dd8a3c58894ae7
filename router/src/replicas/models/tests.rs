//! Routes as lines, and which version gets which key.

use super::routes::{ModelRoutes, VersionPattern, VersionShare, heaviest, route};
use super::unserved::{RouteChange, UnservedVersions};
use crate::link::versions::{ServedVersion, versions};
use crate::link::view::{ReplicaInfo, ReplicaView};
use proto::cluster as wire;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use types::PolicyDigest;

fn view(model: &str, digest: u8, is_ready: bool) -> ReplicaView {
    let replica = ReplicaInfo::for_test(model, PolicyDigest([digest; 32]));
    let phase = if is_ready { wire::state::Phase::Ready } else { wire::state::Phase::Recovering };
    let state = Some(wire::State { phase: phase.into(), ..wire::State::default() });
    ReplicaView { replica: Some(Arc::new(replica)), state, ..ReplicaView::default() }
}

fn shares(line: &str) -> Vec<VersionShare> {
    let table = ModelRoutes::parse(line).unwrap().table();
    table.values().next().unwrap().clone()
}

/// Returns how many of the keys from 0 on each version gets.
fn counts(shares: &[VersionShare], versions: &[ServedVersion], n_keys: u64) -> Vec<usize> {
    let mut counts = vec![0; versions.len()];
    for key in 0..n_keys {
        let got = route(shares, versions, key).unwrap();
        counts[versions.iter().position(|version| version.id == got.id).unwrap()] += 1;
    }
    counts
}

#[test]
fn replicas_of_one_name_and_one_digest_are_a_version() {
    let views =
        [view("a", 1, false), ReplicaView::of("away"), view("a", 2, true), view("b", 1, true), view("a", 1, true)];
    let found = versions(&views);
    let of = |version: &ServedVersion| {
        (version.model().to_owned(), version.digest().0[0], version.n_ready, version.n_replicas)
    };
    let summaries: Vec<_> = found.iter().map(of).collect();
    assert_eq!(summaries, [("a".into(), 1, 1, 2), ("a".into(), 2, 1, 1), ("b".into(), 1, 1, 1)]);
}

#[test]
fn lines_are_read_as_they_are_meant() {
    let share = |model: &str, digest: &str, weight| {
        let of = VersionPattern { model: model.into(), digest: digest.into() };
        VersionShare { of, weight }
    };
    let check = |line: &str, expect: &[VersionShare]| assert_eq!(shares(line), expect, "{line}");
    check("chat=v1", &[share("v1", "", 1)]);
    check("chat = v1:90 , v2:10", &[share("v1", "", 90), share("v2", "", 10)]);
    check("chat=org/m:Q4_K_M:3,org/m:Q8_0", &[share("org/m:Q4_K_M", "", 3), share("org/m:Q8_0", "", 1)]);
    check("chat=m@0101:90,m@02AB:0", &[share("m", "0101", 90), share("m", "02ab", 0)]);
    let two = ModelRoutes::parse("# names\n\nchat=v1\ncode = v2:2").unwrap().table();
    assert_eq!(two.keys().collect::<Vec<_>>(), ["chat", "code"]);
    for (line, problem) in [
        ("chat", "a line is"),
        ("=v1", "no name"),
        ("chat=", "no name"),
        ("chat=v1,,v2", "no name"),
        ("chat=v1:1,v1:2", "twice"),
        ("chat=v1:0,v2:0", "weight 0"),
        ("chat=v1:1000001", "more than"),
        ("chat=v1:99999999999999999999", "more than"),
        ("chat=v1:", "a whole number"),
        ("chat=v1:-5", "a whole number"),
        ("chat=v1:0.9,v2:0.1", "a whole number"),
        ("chat=v1@", "policy digest"),
        ("chat=v1@blue:3", "policy digest"),
    ] {
        let bad = ModelRoutes::parse(line).unwrap_err();
        assert!(bad.problem.contains(problem), "{line}: {bad}");
    }
    assert_eq!(ModelRoutes::parse("a=v\n\na=w").unwrap_err().line, 3);
    let many: String = (0..=100).map(|i| format!("n{i}=v\n")).collect();
    assert_eq!(ModelRoutes::parse(&many).unwrap_err().line, 101);
    let routes = ModelRoutes::parse("a=v").unwrap();
    assert!(routes.replace("a=v:0").is_err() && routes.table().contains_key("a"));
    routes.replace("b=v").unwrap();
    assert!(!routes.table().contains_key("a"));
}

#[test]
fn keys_are_divided_by_weight_and_a_version_that_is_given_more_keeps_what_it_had() {
    let both = versions(&[view("v1", 1, true), view("v2", 2, true)]);
    assert_eq!(counts(&shares("chat=v1:90,v2:10"), &both, 1000), [900, 100]);
    assert_eq!(counts(&shares("chat=v1:1,v2:1"), &both, 1000), [500, 500]);
    assert_eq!(counts(&shares("chat=v1:1,v2:0"), &both, 1000), [1000, 0]);
    let (few, more) = (shares("chat=v1:90,v2:10"), shares("chat=v1:60,v2:40"));
    for key in (0..1000).map(|key: u64| key.wrapping_mul(0x1234_5678_9abc_def1)) {
        if route(&few, &both, key).unwrap().model() == "v2" {
            assert_eq!(route(&more, &both, key).unwrap().model(), "v2", "{key}");
        }
    }
}

#[test]
fn the_share_of_a_version_without_a_ready_replica_goes_to_the_others_by_weight() {
    let shares = shares("chat=v1:50,v2:30,v3:20");
    let all = versions(&[view("v1", 1, true), view("v2", 2, true), view("v3", 3, true)]);
    let less = versions(&[view("v1", 1, false), view("v2", 2, true), view("v3", 3, true)]);
    let counts = counts(&shares, &less, 10_000);
    assert_eq!(counts[0], 0);
    assert!((5900..6100).contains(&counts[1]), "{counts:?}");
    for key in 0..1000 {
        let before = route(&shares, &all, key).unwrap();
        let now = route(&shares, &less, key).unwrap();
        assert!(before.model() == "v1" || now.id == before.id, "a key keeps its version");
    }
    // No replica is ready: those of the intended version may come back. Without any replica, there is no version to
    // choose.
    let none = versions(&[view("v1", 1, false), view("v2", 2, false), view("v3", 3, false)]);
    assert!((0..100).all(|key| route(&shares, &none, key).unwrap().id == route(&shares, &all, key).unwrap().id));
    assert!(route(&shares, &[], 7).is_none());
    assert_eq!(heaviest(&shares, &less).unwrap().model(), "v2");
    assert_eq!(heaviest(&shares, &all).unwrap().model(), "v1");
}

#[test]
fn the_ready_digest_that_most_have_answers_under_a_name_unless_a_route_names_one() {
    let both = versions(&[view("m", 1, false), view("m", 2, true), view("m", 1, true), view("m", 3, true)]);
    let few = versions(&[view("m", 1, true), view("m", 2, true), view("m", 2, true)]);
    assert_eq!(route(&shares("chat=m"), &few, 7).map(|version| version.digest().0[0]), Some(2));
    let got = |line: &str| route(&shares(line), &both, 7).map(|version| version.digest().0[0]);
    assert_eq!(
        (got("chat=m"), got("chat=m@02"), got("chat=m@0303"), got("chat=m@04")),
        (Some(1), Some(2), Some(3), None)
    );
}

#[test]
fn persistently_unserved_version_is_reported_once() {
    let routes = ModelRoutes::parse("chat=smollm2:90,smollm-2:10\nsoon=v3:1,v4:0\ndigest=smollm2@02").unwrap();
    let served = versions(&[view("smollm2", 1, false)]);
    let (mut unserved, start) = (UnservedVersions::default(), Instant::now());
    let mut look = |routes: &ModelRoutes, served: &[ServedVersion], after| {
        unserved.update_missed(&routes.table(), served, start + Duration::from_secs(after))
    };
    let change = |name: &str, version: &str, is_served, like: Option<&str>| RouteChange {
        name: name.into(),
        version: version.into(),
        is_served,
        like: like.map(str::to_owned),
    };
    assert_eq!(look(&routes, &[], 0), [], "a router that has just begun knows no replica");
    assert_eq!(look(&routes, &served, 9), []);
    let other = format!("smollm2@{}", PolicyDigest([1; 32]));
    let missed = [
        change("chat", "smollm-2", false, Some("smollm2")),
        change("digest", "smollm2@02", false, Some(&other)),
        change("soon", "v3", false, None),
    ];
    assert_eq!(look(&routes, &served, 10), missed);
    assert_eq!(look(&routes, &served, 100), [], "a change is reported once");
    // The line is corrected, and a replica of the other version comes.
    routes.replace("chat=smollm2:90\nsoon=v3\ndigest=smollm2@02").unwrap();
    let more = versions(&[view("smollm2", 1, false), view("v3", 3, true)]);
    assert_eq!(look(&routes, &more, 101), [change("chat", "smollm-2", true, None), change("soon", "v3", true, None)]);
    // A replica that goes is missed from then on.
    assert_eq!(look(&routes, &served, 102), []);
    assert_eq!(look(&routes, &served, 112), [change("soon", "v3", false, None)]);
}
