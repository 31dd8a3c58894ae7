//! Which replica gets a request: pure functions over a table of what is known of each. Knows no streams, no requests
//! and no clock. A policy is a file; what all have in common is here.
//!
//! A policy goes through a thousand replicas for each request, so what it reads stands in columns, and only of those
//! that are open to the request.

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

/// Those among whom a policy chooses, in columns of one length. Kept for its memory.
#[derive(Debug, Default)]
pub struct Open {
    /// Of each its row, less to more.
    pub rows: Vec<u32>,
    /// What is before one more request and beside it, in tokens of a prompt.
    pub loads: Vec<u64>,
    /// The largest number while it has not told.
    pub tokens_free: Vec<u64>,
    pub n_cached: Vec<u32>,
    pub n_names: Vec<u32>,
    pub ids: Vec<u64>,
}

/// What of a replica says whether it is open to a request. Digests are compared and may be numbers.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<D> {
    pub standing: Standing,
    pub digest: D,
    pub context: u32,
}

impl Open {
    /// The best that there are, under the digest that is in force. Where the prompt fits some of them, these; where it
    /// fits nobody, somebody has to say so. Gives the first who could serve as well and would answer otherwise.
    pub fn find<D: Copy + PartialEq>(
        &mut self,
        all: impl Iterator<Item = Candidate<D>> + Clone,
        n_prompt: u32,
    ) -> Option<usize> {
        self.rows.clear();
        let best = all.clone().map(|candidate| candidate.standing).min();
        let best = best.filter(|best| *best <= Standing::Recovering)?;
        let candidates = all.enumerate().filter(|(_, candidate)| candidate.standing == best);
        let digest = candidates.clone().next().map(|(_, candidate)| candidate.digest);
        let (mut stranger, mut n_fit) = (None, 0);
        for (row, candidate) in candidates.clone() {
            if Some(candidate.digest) != digest {
                stranger.get_or_insert(row);
                continue;
            }
            self.rows.push(row as u32);
            n_fit += usize::from(candidate.context > n_prompt);
        }
        if 0 < n_fit && n_fit < self.rows.len() {
            let fit = candidates.filter(|(_, of)| Some(of.digest) == digest && of.context > n_prompt);
            self.rows.clear();
            self.rows.extend(fit.map(|(row, _)| row as u32));
        }
        stranger
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The first of those for whom it is least.
    fn least<K: Ord>(&self, key: impl Fn(usize) -> K) -> Option<usize> {
        (0..self.len()).min_by_key(|&at| key(at))
    }
}

/// Who gets the request: its row. None where nobody is open to it.
pub fn pick(policy: Policy, open: &Open, wish: &Wish) -> Option<usize> {
    let at = match policy {
        Policy::Prefix => prefix::pick(open, wish),
        Policy::LeastWork => least_work::pick(open),
        Policy::PowerOfTwo => power_of_two::pick(open, wish),
        Policy::RoundRobin => round_robin::pick(open, wish),
        Policy::Affinity => affinity::pick(open, wish),
    };
    Some(open.rows[at?] as usize)
}

/// What is before one more request and beside it, in tokens of a prompt.
pub fn load(work: u64, n_running: u32) -> u64 {
    work.saturating_add(CROWD * u64::from(n_running))
}

/// Who can go on with a request, and say what it would have said, in no worse a standing: of the best the one with the
/// least work.
pub fn equal(table: &[Row], need: Need, worst: Standing) -> Option<usize> {
    let able = table.iter().enumerate().filter(|(_, row)| row.standing <= worst && row.meets(need));
    able.min_by_key(|(_, row)| (row.standing, row.load())).map(|(idx, _)| idx)
}

impl Wish {
    pub fn is_for(&self, version: VersionId) -> bool {
        self.version.is_none_or(|wanted| wanted == version)
    }
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

    fn load(&self) -> u64 {
        load(self.work, self.n_running)
    }
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

    /// As a board would have it.
    pub fn open(table: &[Row], wish: &Wish) -> (Open, Option<usize>) {
        let mut open = Open::default();
        let candidate = |row: &Row| {
            let standing = if wish.is_for(row.version) { row.standing } else { Absent };
            Candidate { standing, digest: row.digest, context: row.context }
        };
        let stranger = open.find(table.iter().map(candidate), wish.n_prompt);
        let rows: Vec<Row> = open.rows.iter().map(|row| table[*row as usize]).collect();
        open.loads = rows.iter().map(Row::load).collect();
        open.tokens_free = rows.iter().map(|row| row.tokens_free.unwrap_or(u64::MAX)).collect();
        open.n_cached = rows.iter().map(|row| row.n_cached).collect();
        open.n_names = rows.iter().map(|row| row.n_names).collect();
        open.ids = rows.iter().map(|row| row.id).collect();
        (open, stranger)
    }

    pub fn pick(policy: Policy, table: &[Row], wish: &Wish) -> Option<usize> {
        super::pick(policy, &open(table, wish).0, wish)
    }

    fn stranger(table: &[Row]) -> Option<usize> {
        open(table, &TEN).1
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
    fn who_does_not_take_requests_gets_none_under_any_policy() {
        check(&[(Absent, 0), (Ready, 9), (Draining, 0)], Some(1));
        for (policy, n_before) in ALL.into_iter().flat_map(|policy| (0..9).map(move |n_before| (policy, n_before))) {
            let wish = Wish { n_before, ..TEN };
            let pick = |rows: &[(Standing, u64)]| {
                let table: Vec<Row> = rows.iter().map(|(standing, work)| row(*standing, *work)).collect();
                pick(policy, &table, &wish)
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
        assert_eq!(stranger(&table), Some(1));
        // The first policy is gone: the other one serves.
        let table = [row(Absent, 9), other(Ready, 0), row(Draining, 8)];
        assert_eq!((least_work(&table, 10), stranger(&table)), (Some(1), None));
    }

    #[test]
    fn a_version_s_requests_are_its_own_replicas_under_any_policy() {
        let of = |version, standing, work| Row { version: VersionId(version), ..row(standing, work) };
        let table = [of(1, Ready, 0), of(2, Recovering, 0), of(2, Shunned, 9), of(2, Shunned, 7), of(3, Draining, 0)];
        for policy in ALL {
            let pick = |version| {
                let pick = |n_before| pick(policy, &table, &Wish { version, n_before, ..TEN });
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
