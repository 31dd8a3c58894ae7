//! Properties of each policy, over random tables from a seed, and over a day of requests.

use super::tests::{pick, row};
use super::{PickInfo, PickPolicy, ReplicaRow, ReplicaStanding, scatter};
use std::collections::{BTreeMap, BTreeSet};

/// A seeded generator of numbers.
struct PropertyRng(u64);

impl PropertyRng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 += 1;
        scatter(self.0) % n
    }
}

fn tables(n: u64) -> impl Iterator<Item = (Vec<ReplicaRow>, PickInfo)> {
    (0..n).map(|seed| {
        let mut numbers = PropertyRng(seed << 32);
        let n_rows = 1 + numbers.below(9);
        let table = (0..n_rows).map(|id| ReplicaRow {
            context: 1000,
            n_running: numbers.below(4) as u32,
            tokens_free: Some(numbers.below(4000)),
            n_cached: 16 * numbers.below(8) as u32,
            n_names: numbers.below(100) as u32,
            id: scatter(id),
            ..row(ReplicaStanding::Ready, numbers.below(600))
        });
        let table = table.collect();
        (
            table,
            PickInfo {
                n_prompt: 150,
                session: Some(numbers.below(50)),
                apart_from: None,
                n_before: numbers.below(1000),
                version: None,
                protocol: 1,
            },
        )
    })
}

fn without_caches(table: &[ReplicaRow]) -> Vec<ReplicaRow> {
    table.iter().map(|row| ReplicaRow { n_cached: 0, tokens_free: None, n_names: 0, ..*row }).collect()
}

#[test]
fn a_prefix_is_followed_until_the_load_costs_more_than_it_saves() {
    let has_it = |work| ReplicaRow { n_cached: 96, context: 1000, ..row(ReplicaStanding::Ready, work) };
    let others = |work| ReplicaRow { context: 1000, ..row(ReplicaStanding::Ready, work) };
    let info = PickInfo { n_prompt: 100, ..PickInfo::default() };
    let picks = |work| pick(PickPolicy::Prefix, &[others(0), has_it(work), others(0)], &info);
    assert_eq!((picks(0), picks(95)), (Some(1), Some(1)));
    assert_eq!(picks(97), Some(0));
    // Blocks that would have to make room for the prompt count too.
    let full = ReplicaRow { tokens_free: Some(0), ..has_it(93) };
    assert_eq!(pick(PickPolicy::Prefix, &[others(0), full], &info), Some(0));
}

#[test]
fn with_prefixes_no_request_waits_longer_than_with_the_least_work() {
    let (mut n_better, mut n_same) = (0, 0);
    for (table, info) in tables(2000) {
        let table: Vec<ReplicaRow> = table.into_iter().map(|row| ReplicaRow { tokens_free: None, ..row }).collect();
        let wait = |idx: usize| table[idx].load() + u64::from(info.n_prompt - table[idx].n_cached);
        let [least, prefix] =
            [PickPolicy::LeastWork, PickPolicy::Prefix].map(|policy| pick(policy, &table, &info).unwrap());
        assert!(wait(prefix) <= wait(least), "{table:?}");
        n_better += usize::from(wait(prefix) < wait(least));
        n_same += usize::from(wait(prefix) == wait(least));
        let bare = without_caches(&table);
        let [least, prefix] = [PickPolicy::LeastWork, PickPolicy::Prefix].map(|policy| pick(policy, &bare, &info));
        assert_eq!(least, prefix, "without caches it is the same");
    }
    assert!(n_better > 100 && n_same > 100, "{n_better} {n_same}");
}

#[test]
fn a_session_stays_and_only_sessions_of_a_lost_replica_move() {
    let mut homes = BTreeMap::new();
    for (table, info) in tables(500) {
        // No replica has work, so none is passed over.
        let idle: Vec<ReplicaRow> = table.iter().map(|row| ReplicaRow { work: 0, n_running: 0, ..*row }).collect();
        for session in 0..50 {
            let session_info = PickInfo { session: Some(session), ..info };
            let home = pick(PickPolicy::Affinity, &idle, &session_info).unwrap();
            assert_eq!(homes.entry((idle.len(), session)).or_insert(idle[home].id), &idle[home].id);
            let less: Vec<ReplicaRow> =
                idle.iter().enumerate().filter(|(idx, _)| *idx != session as usize % 9).map(|(_, row)| *row).collect();
            if less.iter().any(|row| row.id == idle[home].id) {
                let after = pick(PickPolicy::Affinity, &less, &session_info).unwrap();
                assert_eq!(less[after].id, idle[home].id);
            }
        }
    }
    let of_nine: BTreeSet<u64> = (0..50).filter_map(|session| homes.get(&(9, session)).copied()).collect();
    assert!(of_nine.len() >= 8, "sessions are spread: {of_nine:?}");
}

#[test]
fn no_replica_is_far_above_the_mean_for_a_session() {
    let mut loads = vec![0_u64; 8];
    let mut numbers = PropertyRng(1);
    for _ in 0..4000 {
        let table: Vec<ReplicaRow> = loads
            .iter()
            .enumerate()
            .map(|(idx, load)| ReplicaRow { context: 10_000, id: idx as u64, ..row(ReplicaStanding::Ready, *load) })
            .collect();
        // Half of all requests are of one session.
        let session = Some(numbers.below(2) * numbers.below(1000));
        let idx = pick(
            PickPolicy::Affinity,
            &table,
            &PickInfo { n_prompt: 100, session, apart_from: None, n_before: 0, version: None, protocol: 1 },
        )
        .unwrap();
        loads[idx] += 100;
        if numbers.below(3) == 0 {
            let done = numbers.below(8) as usize;
            loads[done] = loads[done].saturating_sub(300);
        }
        let mean = loads.iter().sum::<u64>() / 8;
        assert!(loads[idx] <= mean + mean / 4 + 250, "{loads:?}");
    }
}

#[test]
fn no_replica_starves_under_any_policy() {
    for policy in [
        PickPolicy::Prefix,
        PickPolicy::LeastWork,
        PickPolicy::PowerOfTwo,
        PickPolicy::RoundRobin,
        PickPolicy::Affinity,
    ] {
        let mut loads = vec![0_u64; 10];
        let mut n_picked = vec![0; 10];
        let mut numbers = PropertyRng(7);
        for n_before in 0..2000 {
            // All requests have the same prompt, and one replica has it in its cache.
            let table: Vec<ReplicaRow> = loads
                .iter()
                .enumerate()
                .map(|(idx, load)| ReplicaRow {
                    n_cached: if idx == 3 { 400 } else { 0 },
                    context: 10_000,
                    id: idx as u64,
                    ..row(ReplicaStanding::Ready, *load)
                })
                .collect();
            let session = Some(numbers.below(1000));
            let idx = pick(
                policy,
                &table,
                &PickInfo { n_prompt: 500, session, apart_from: None, n_before, version: None, protocol: 1 },
            )
            .unwrap();
            n_picked[idx] += 1;
            loads[idx] += 500;
            loads.iter_mut().for_each(|load| *load = load.saturating_sub(40));
        }
        assert!(n_picked.iter().all(|n| *n >= 60), "{policy:?} {n_picked:?}");
        assert!(loads.iter().all(|load| *load <= 40_000), "{policy:?} {loads:?}");
    }
}

#[test]
fn the_same_draws_give_the_same_picks_and_two_different_ones_are_compared() {
    let table: Vec<ReplicaRow> =
        (0..5).map(|id| ReplicaRow { id, ..row(ReplicaStanding::Ready, 10 * (id + 1)) }).collect();
    let picks = || {
        (0..1000).map(|n_before| {
            pick(PickPolicy::PowerOfTwo, &table, &PickInfo { n_before, ..PickInfo::default() }).unwrap()
        })
    };
    let count = |idx| picks().filter(|picked| *picked == idx).count();
    assert!(picks().eq(picks()));
    // The busiest replica is never the better of two.
    assert_eq!(count(4), 0);
    assert!((350..450).contains(&count(0)) && (50..150).contains(&count(3)), "{} {}", count(0), count(3));
    let turns: Vec<usize> = (0..7)
        .map(|n_before| pick(PickPolicy::RoundRobin, &table, &PickInfo { n_before, ..PickInfo::default() }).unwrap())
        .collect();
    assert_eq!(turns, [0, 1, 2, 3, 4, 0, 1]);
}
