//! Which replica gets a request: pure functions over a table of what is known of each. Knows no streams, no requests
//! and no clock. A policy is a file; what all have in common is here.

mod affinity;
mod least_work;
mod power_of_two;
mod prefix;
#[cfg(test)]
mod properties;
mod round_robin;

use types::PolicyDigest;

/// What replicas serve, its name and its policy digest, in a word that a row has room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct VersionId(pub u64);

/// One replica, as the router knows it at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub standing: Standing,
    pub digest: PolicyDigest,
    pub version: VersionId,
    pub context: u32,
    /// Tokens that it has to compute before it could begin with one more: of prompts, what no cache has, and one of
    /// each request that says tokens.
    pub work: u64,
    pub n_running: u32,
    /// Positions that its cache has room for at once. None while it has not told.
    pub tokens_free: Option<u64>,
    /// Of the prompt in question, from its beginning, what its cache has.
    pub n_cached: u32,
    /// Blocks with a name in its cache, as far as they are known here.
    pub n_names: u32,
    /// The same at every router.
    pub id: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    Ready,
    /// It could serve, and others do so better: it gets nothing new while there are any.
    Shunned,
    /// Its ranks are being placed anew, or nothing is heard of it: what it is given waits.
    Recovering,
    /// What it has is finished, and nothing more is taken.
    Draining,
    /// Not attached, or not yet loaded.
    Absent,
}

/// By what a replica is chosen among those that could serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    #[default]
    Prefix,
    LeastWork,
    PowerOfTwo,
    RoundRobin,
    Affinity,
}

/// What matters of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// Tokens of its longest prompt.
    pub n_prompt: u32,
    /// Requests with the same one belong together.
    pub session: Option<u64>,
    /// How many were picked before.
    pub n_before: u64,
    /// Whose replicas may have it; None: all that serve.
    pub version: Option<VersionId>,
}

/// What a request asks of a replica that goes on with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    pub digest: PolicyDigest,
    /// Tokens of its log when it ends: with less room it would end sooner.
    pub n_tokens: u64,
}

/// What another sequence that runs costs one more, in tokens of a prompt: each of its steps takes longer. A step reads
/// the neighbour's cache, which is cheap beside computing a token of a prompt, and there are some hundred steps.
const CROWD: u64 = 32;

impl Policy {
    /// Whether it asks what caches have.
    pub fn reads_caches(self, wish: &Wish) -> bool {
        match self {
            Policy::Prefix => true,
            Policy::Affinity => wish.session.is_none(),
            Policy::LeastWork | Policy::PowerOfTwo | Policy::RoundRobin => false,
        }
    }
}

/// Who gets the request. None where nobody takes requests.
pub fn pick(policy: Policy, table: &[Row], wish: &Wish) -> Option<usize> {
    match policy {
        Policy::Prefix => prefix::pick(table, wish),
        Policy::LeastWork => least_work::pick(table, wish),
        Policy::PowerOfTwo => power_of_two::pick(table, wish),
        Policy::RoundRobin => round_robin::pick(table, wish),
        Policy::Affinity => affinity::pick(table, wish),
    }
}

/// Those among whom a policy chooses: the best that there are, under the digest that is in force. Where the prompt fits
/// some of them, these; where it fits nobody, somebody has to say so.
pub fn open<'a>(table: &'a [Row], wish: &Wish) -> impl Iterator<Item = (usize, &'a Row)> + Clone {
    let (of, n_prompt) = (wish.version, wish.n_prompt);
    let best = best(table, of);
    let digest = candidates(table, best, of).next().map(|(_, row)| row.digest);
    let same = candidates(table, best, of).filter(move |(_, row)| Some(row.digest) == digest);
    let fits = same.clone().any(|(_, row)| row.context > n_prompt);
    same.filter(move |(_, row)| row.context > n_prompt || !fits)
}

/// Who can go on with a request, and say what it would have said, in no worse a standing: of the best the one with the
/// least work.
pub fn equal(table: &[Row], need: Need, worst: Standing) -> Option<usize> {
    let able = table.iter().enumerate().filter(|(_, row)| row.standing <= worst && row.meets(need));
    able.min_by_key(|(_, row)| (row.standing, row.load())).map(|(idx, _)| idx)
}

impl Row {
    pub fn meets(&self, need: Need) -> bool {
        self.digest == need.digest && u64::from(self.context) >= need.n_tokens
    }

    pub fn may_come_for(&self, need: Need) -> bool {
        match self.standing {
            Standing::Absent => true,
            Standing::Ready | Standing::Shunned | Standing::Recovering => self.meets(need),
            Standing::Draining => false,
        }
    }

    fn is_of(&self, version: Option<VersionId>) -> bool {
        version.is_none_or(|version| self.version == version)
    }

    /// What is before one more request and beside it, in tokens of a prompt.
    fn load(&self) -> u64 {
        self.work.saturating_add(CROWD * u64::from(self.n_running))
    }
}

/// Those that could serve and get nothing, because they would answer otherwise than the first.
pub fn strangers(table: &[Row]) -> impl Iterator<Item = usize> {
    let best = best(table, None);
    let digest = candidates(table, best, None).next().map(|(_, row)| row.digest);
    candidates(table, best, None).filter(move |(_, row)| Some(row.digest) != digest).map(|(idx, _)| idx)
}

/// The ready ones; where there are none, those that others are better than, and then those that will be ready again.
fn candidates(table: &[Row], best: Standing, of: Option<VersionId>) -> impl Iterator<Item = (usize, &Row)> + Clone {
    let may_serve = best <= Standing::Recovering;
    table.iter().enumerate().filter(move |(_, row)| may_serve && row.standing == best && row.is_of(of))
}

fn best(table: &[Row], of: Option<VersionId>) -> Standing {
    let standings = table.iter().filter(|row| row.is_of(of)).map(|row| row.standing);
    standings.min().unwrap_or(Standing::Absent)
}

/// Bits that look like chance and are not: a permutation of all numbers.
fn scatter(n: u64) -> u64 {
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::Standing::{Absent, Draining, Ready, Recovering, Shunned};
    use super::*;

    pub fn row(standing: Standing, work: u64) -> Row {
        Row {
            standing,
            digest: PolicyDigest::default(),
            version: VersionId::default(),
            context: 100,
            work,
            n_running: 0,
            tokens_free: None,
            n_cached: 0,
            n_names: 0,
            id: 0,
        }
    }

    const TEN: Wish = Wish { n_prompt: 10, session: None, n_before: 0, version: None };
    const ALL: [Policy; 5] =
        [Policy::Prefix, Policy::LeastWork, Policy::PowerOfTwo, Policy::RoundRobin, Policy::Affinity];

    fn least_work(table: &[Row], n_prompt: u32) -> Option<usize> {
        let wish = Wish { n_prompt, ..TEN };
        let picked = pick(Policy::LeastWork, table, &wish);
        assert_eq!(pick(Policy::Prefix, table, &wish), picked, "without a cache it is the same");
        picked
    }

    #[track_caller]
    fn check(rows: &[(Standing, u64)], expect: Option<usize>) {
        let table: Vec<Row> = rows.iter().map(|(standing, work)| row(*standing, *work)).collect();
        assert_eq!(least_work(&table, 10), expect, "{rows:?}");
        assert_eq!(strangers(&table).count(), 0);
    }

    #[test]
    fn the_least_work_and_of_equals_the_first() {
        check(&[], None);
        check(&[(Ready, 7)], Some(0));
        check(&[(Ready, 7), (Ready, 6), (Ready, 6)], Some(1));
        check(&[(Ready, 0), (Ready, 0)], Some(0));
    }

    #[test]
    fn who_does_not_take_requests_gets_none_under_any_policy() {
        check(&[(Absent, 0), (Ready, 9), (Draining, 0)], Some(1));
        for (policy, n_before) in ALL.into_iter().flat_map(|policy| (0..9).map(move |n_before| (policy, n_before))) {
            let wish = Wish { n_before, ..TEN };
            let pick = |rows: &[(Standing, u64)]| {
                let table: Vec<Row> = rows.iter().map(|(standing, work)| row(*standing, *work)).collect();
                super::pick(policy, &table, &wish)
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
    fn who_recovers_gets_some_only_where_nobody_is_ready() {
        check(&[(Recovering, 0), (Ready, 9)], Some(1));
        check(&[(Recovering, 5), (Draining, 0), (Recovering, 4)], Some(2));
    }

    #[test]
    fn two_policies_are_never_in_force_at_once() {
        let other = |standing, work| Row { digest: PolicyDigest([1; 32]), ..row(standing, work) };
        let table = [row(Ready, 9), other(Ready, 0), row(Ready, 8), other(Draining, 0)];
        assert_eq!(least_work(&table, 10), Some(2));
        assert_eq!(strangers(&table).collect::<Vec<_>>(), [1]);
        // The first policy is gone: the other one serves.
        let table = [row(Absent, 9), other(Ready, 0), row(Draining, 8)];
        assert_eq!((least_work(&table, 10), strangers(&table).count()), (Some(1), 0));
    }

    #[test]
    fn a_version_s_requests_are_its_own_replicas_under_any_policy() {
        let of = |version, standing, work| Row { version: VersionId(version), ..row(standing, work) };
        let table = [of(1, Ready, 0), of(2, Recovering, 0), of(2, Shunned, 9), of(2, Shunned, 7), of(3, Draining, 0)];
        for policy in ALL {
            let pick = |version| {
                let pick = |n_before| super::pick(policy, &table, &Wish { version, n_before, ..TEN });
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
    fn who_goes_on_has_the_same_policy_and_the_same_room() {
        let need = Need { digest: PolicyDigest([1; 32]), n_tokens: 90 };
        let same = |standing, work| Row { digest: need.digest, ..row(standing, work) };
        let small = Row { context: 89, ..same(Ready, 0) };
        let check = |table: &[Row], expect| assert_eq!(equal(table, need, Shunned), expect, "{table:?}");
        check(&[row(Ready, 0), small, same(Recovering, 0), same(Ready, 9), same(Ready, 8)], Some(4));
        check(&[row(Ready, 0), small, same(Recovering, 0), same(Draining, 0)], None);
        check(&[same(Shunned, 0), same(Ready, 9)], Some(1));
        check(&[same(Shunned, 0), same(Recovering, 0)], Some(0));
        assert_eq!(equal(&[same(Recovering, 0), same(Ready, 9)], need, Recovering), Some(1));
        assert_eq!(equal(&[same(Absent, 0), same(Recovering, 0)], need, Recovering), Some(1));
        let may_come = [same(Recovering, 0), row(Absent, 0)];
        assert!(may_come.iter().all(|row| row.may_come_for(need)));
        assert!(![row(Ready, 0), small, same(Draining, 0)].iter().any(|row| row.may_come_for(need)));
    }

    #[test]
    fn a_long_prompt_goes_where_it_fits() {
        let large = |work| Row { context: 1000, ..row(Ready, work) };
        assert_eq!(least_work(&[row(Ready, 0), large(9), large(8)], 500), Some(2));
        // It fits nowhere: somebody has to say so.
        assert_eq!(least_work(&[row(Ready, 1), row(Ready, 0)], 500), Some(1));
    }
}
