//! Picks the replica for a request: pure functions over a table of what is known of each. Knows no streams, no requests
//! and no clock. Each policy is a file; what they share is here and in `row`.
//!
//! A policy reads a thousand replicas for each request. So its input is stored in columns, and only for replicas that
//! are open to the request.

mod affinity;
mod hash;
mod least_work;
mod power_of_two;
mod prefix;
#[cfg(test)]
mod properties;
mod round_robin;
mod row;

pub use hash::{fnv, hashed, scatter};
pub use row::{
    ContinuationNeed, OpenReplicas, PickInfo, PickPolicy, ReplicaEligibility, ReplicaRow, ReplicaStanding, VersionId,
    load,
};

/// Returns the row of the replica that gets the request, or None if no replica is open to it.
pub fn pick(policy: PickPolicy, open: &OpenReplicas, info: &PickInfo) -> Option<usize> {
    let at = match policy {
        PickPolicy::Prefix => prefix::pick(open, info),
        PickPolicy::LeastWork => least_work::pick(open),
        PickPolicy::PowerOfTwo => power_of_two::pick(open, info),
        PickPolicy::RoundRobin => round_robin::pick(open, info),
        PickPolicy::Affinity => affinity::pick(open, info),
    };
    Some(open.rows[at?] as usize)
}

/// Returns the row of a replica that can continue a request with the same tokens. Its standing is at least `worst`.
/// Among the replicas of the best standing, those with room for the whole request come first, and then those with the
/// least work.
pub fn pick_equivalent(table: &[ReplicaRow], need: ContinuationNeed, worst: ReplicaStanding) -> Option<usize> {
    let able = table.iter().enumerate().filter(|(_, row)| row.standing <= worst && row.meets(need));
    let is_narrow = |row: &ReplicaRow| u64::from(row.room) < need.n_tokens;
    able.min_by_key(|(_, row)| (row.standing, is_narrow(row), row.load())).map(|(idx, _)| idx)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::ReplicaStanding::{Absent, Draining, Ready, Recovering, Shunned};
    use super::*;
    use types::PolicyDigest;

    pub fn row(standing: ReplicaStanding, work: u64) -> ReplicaRow {
        ReplicaRow {
            standing,
            digest: PolicyDigest::default(),
            version: VersionId::default(),
            context: 100,
            room: u32::MAX,
            work,
            n_running: 0,
            tokens_free: None,
            n_cached: 0,
            n_names: 0,
            id: 0,
            protocol: 1,
        }
    }

    /// The open replicas and the stranger, as a board finds them.
    pub fn open(table: &[ReplicaRow], info: &PickInfo) -> (OpenReplicas, Option<usize>) {
        let mut open = OpenReplicas::default();
        let candidate = |row: &ReplicaRow| {
            let standing = if info.matches(row.version, row.protocol) { row.standing } else { Absent };
            ReplicaEligibility { standing, digest: row.digest, context: row.context }
        };
        let stranger = open.find(table.iter().map(candidate), info.n_prompt);
        let rows: Vec<ReplicaRow> = open.rows.iter().map(|row| table[*row as usize]).collect();
        open.loads = rows.iter().map(ReplicaRow::load).collect();
        open.tokens_free = rows.iter().map(|row| row.tokens_free.unwrap_or(u64::MAX)).collect();
        open.n_cached = rows.iter().map(|row| row.n_cached).collect();
        open.n_names = rows.iter().map(|row| row.n_names).collect();
        open.ids = rows.iter().map(|row| row.id).collect();
        (open, stranger)
    }

    pub fn pick(policy: PickPolicy, table: &[ReplicaRow], info: &PickInfo) -> Option<usize> {
        super::pick(policy, &open(table, info).0, info)
    }

    fn stranger(table: &[ReplicaRow]) -> Option<usize> {
        open(table, &TEN).1
    }

    const TEN: PickInfo =
        PickInfo { n_prompt: 10, session: None, apart_from: None, n_before: 0, version: None, protocol: 1 };
    const ALL: [PickPolicy; 5] = [
        PickPolicy::Prefix,
        PickPolicy::LeastWork,
        PickPolicy::PowerOfTwo,
        PickPolicy::RoundRobin,
        PickPolicy::Affinity,
    ];

    fn least_work(table: &[ReplicaRow], n_prompt: u32) -> Option<usize> {
        let info = PickInfo { n_prompt, ..TEN };
        let picked = pick(PickPolicy::LeastWork, table, &info);
        assert_eq!(pick(PickPolicy::Prefix, table, &info), picked, "without a cache it is the same");
        picked
    }

    #[track_caller]
    fn check(rows: &[(ReplicaStanding, u64)], expect: Option<usize>) {
        let table: Vec<ReplicaRow> = rows.iter().map(|(standing, work)| row(*standing, *work)).collect();
        assert_eq!(least_work(&table, 10), expect, "{rows:?}");
        assert_eq!(stranger(&table), None);
    }

    #[test]
    fn the_least_work_and_of_equals_the_first() {
        check(&[], None);
        check(&[(Ready, 7)], Some(0));
        check(&[(Ready, 7), (Ready, 6), (Ready, 6)], Some(1));
        check(&[(Ready, 0), (Ready, 0)], Some(0));
    }

    #[test]
    fn a_replica_that_takes_no_requests_gets_none_under_any_policy() {
        check(&[(Absent, 0), (Ready, 9), (Draining, 0)], Some(1));
        for (policy, n_before) in ALL.into_iter().flat_map(|policy| (0..9).map(move |n_before| (policy, n_before))) {
            let info = PickInfo { n_before, ..TEN };
            let pick = |rows: &[(ReplicaStanding, u64)]| {
                let table: Vec<ReplicaRow> = rows.iter().map(|(standing, work)| row(*standing, *work)).collect();
                pick(policy, &table, &info)
            };
            assert_eq!(pick(&[(Absent, 0), (Ready, 9), (Draining, 0)]), Some(1), "{policy:?}");
            assert_eq!(pick(&[(Shunned, 0), (Ready, 9), (Recovering, 0)]), Some(1), "{policy:?}");
            assert_eq!(pick(&[(Draining, 0), (Shunned, 1), (Recovering, 0)]), Some(1), "{policy:?}: never the last");
            assert_eq!(pick(&[(Draining, 0), (Draining, 0)]), None, "{policy:?}");
            assert_eq!(pick(&[(Absent, 0), (Draining, 0)]), None, "{policy:?}");
            assert_eq!(pick(&[]), None, "{policy:?}");
        }
    }

    #[test]
    fn a_recovering_replica_gets_requests_only_where_none_is_ready() {
        check(&[(Recovering, 0), (Ready, 9)], Some(1));
        check(&[(Recovering, 5), (Draining, 0), (Recovering, 4)], Some(2));
    }

    #[test]
    fn only_one_policy_digest_is_in_force_at_once() {
        let other = |standing, work| ReplicaRow { digest: PolicyDigest([1; 32]), ..row(standing, work) };
        let table = [row(Ready, 9), other(Ready, 0), row(Ready, 8), other(Draining, 0)];
        assert_eq!(least_work(&table, 10), Some(2));
        assert_eq!(stranger(&table), Some(1));
        // The replicas of the first policy digest are gone, so those of the other serve.
        let table = [row(Absent, 9), other(Ready, 0), row(Draining, 8)];
        assert_eq!((least_work(&table, 10), stranger(&table)), (Some(1), None));
    }

    #[test]
    fn of_two_digests_the_one_that_most_replicas_have_is_served() {
        let of = |digest, standing| ReplicaRow { digest: PolicyDigest([digest; 32]), ..row(standing, 0) };
        // The first replica is damaged.
        let table = [of(1, Ready), of(2, Ready), of(2, Ready)];
        assert_eq!((least_work(&table, 10), stranger(&table)), (Some(1), Some(0)));
        // One of the two others recovers: no other digest is served because of that.
        let table = [of(1, Ready), of(2, Recovering), of(2, Ready)];
        assert_eq!((least_work(&table, 10), stranger(&table)), (Some(2), Some(0)));
        // No replica of digest 2 is ready. Below, one of them is gone for good: of equal counts, the digest that was
        // known first serves.
        let table = [of(1, Ready), of(2, Recovering), of(2, Recovering)];
        assert_eq!((least_work(&table, 10), stranger(&table)), (Some(0), None));
        for gone in [Draining, Absent] {
            let table = [of(1, Ready), of(2, gone), of(2, Ready)];
            assert_eq!((least_work(&table, 10), stranger(&table)), (Some(0), Some(2)), "{gone:?}");
        }
        // There are more digests than are counted, and still one replica serves.
        let table: Vec<ReplicaRow> =
            (1..40).map(|digest| of(digest, if digest < 30 { Recovering } else { Ready })).collect();
        assert_eq!(least_work(&table, 10), Some(29));
    }

    #[test]
    fn a_version_s_requests_go_to_its_own_replicas_under_any_policy() {
        let of = |version, standing, work| ReplicaRow { version: VersionId(version), ..row(standing, work) };
        let table = [of(1, Ready, 0), of(2, Recovering, 0), of(2, Shunned, 9), of(2, Shunned, 7), of(3, Draining, 0)];
        for policy in ALL {
            let pick = |version| {
                let pick = |n_before| pick(policy, &table, &PickInfo { version, n_before, ..TEN });
                (0..9).map(pick).collect::<std::collections::BTreeSet<_>>()
            };
            assert!(pick(None).iter().all(|idx| *idx == Some(0)), "{policy:?}");
            assert!(pick(Some(VersionId(1))).iter().all(|idx| *idx == Some(0)), "{policy:?}");
            assert!(pick(Some(VersionId(2))).iter().all(|idx| matches!(idx, Some(2 | 3))), "{policy:?}");
            assert!(pick(Some(VersionId(3))).iter().all(Option::is_none), "{policy:?}");
            assert!(pick(Some(VersionId(4))).iter().all(Option::is_none), "{policy:?}");
        }
    }

    #[test]
    fn only_a_replica_of_the_same_policy_and_room_takes_a_request_over() {
        let need = ContinuationNeed { digest: PolicyDigest([1; 32]), n_tokens: 90, n_known: 40, protocol: 1 };
        let same = |standing, work| ReplicaRow { digest: need.digest, ..row(standing, work) };
        let small = ReplicaRow { context: 89, ..same(Ready, 0) };
        let check =
            |table: &[ReplicaRow], expect| assert_eq!(pick_equivalent(table, need, Shunned), expect, "{table:?}");
        check(&[row(Ready, 0), small, same(Recovering, 0), same(Ready, 9), same(Ready, 8)], Some(4));
        check(&[row(Ready, 0), small, same(Recovering, 0), same(Draining, 0)], None);
        check(&[same(Shunned, 0), same(Ready, 9)], Some(1));
        check(&[same(Shunned, 0), same(Recovering, 0)], Some(0));
        assert_eq!(pick_equivalent(&[same(Recovering, 0), same(Ready, 9)], need, Recovering), Some(1));
        assert_eq!(pick_equivalent(&[same(Absent, 0), same(Recovering, 0)], need, Recovering), Some(1));
        let may_come = [same(Recovering, 0), row(Absent, 0)];
        assert!(may_come.iter().all(|row| row.may_come_for(need)));
        assert!(![row(Ready, 0), small, same(Draining, 0)].iter().any(|row| row.may_come_for(need)));
        let newer = ContinuationNeed { protocol: 2, ..need };
        let older = same(Ready, 0);
        assert!(older.meets(need) && !older.meets(newer) && ReplicaRow { protocol: 2, ..older }.meets(newer));
        assert!(older.may_come_for(newer), "its ranks may be replaced");
        // With fewer ranks there is less room: a replica with enough comes first, and it must be more than there is
        // now.
        let narrow = |room| ReplicaRow { room, ..same(Ready, 0) };
        check(&[narrow(41), same(Ready, 9), narrow(90)], Some(2));
        check(&[narrow(40), narrow(41)], Some(1));
        check(&[narrow(40)], None);
        assert!(narrow(40).may_come_for(need));
    }

    #[test]
    fn a_long_prompt_goes_where_it_fits() {
        let large = |work| ReplicaRow { context: 1000, ..row(Ready, work) };
        assert_eq!(least_work(&[row(Ready, 0), large(9), large(8)], 500), Some(2));
        // The request fits nowhere, so one of the replicas has to refuse it.
        assert_eq!(least_work(&[row(Ready, 1), row(Ready, 0)], 500), Some(1));
    }
}
