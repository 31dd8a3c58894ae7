//! Which replica gets a request: pure functions over a table of what is known of each. Knows no streams, no requests
//! and no clock.

use crate::peers::Need;
use types::PolicyDigest;

/// One replica, as the router knows it at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub standing: Standing,
    pub digest: PolicyDigest,
    pub context: u32,
    /// Tokens that it has to compute before it could begin with one more: of prompts, what no cache has, and one of
    /// each request that says tokens.
    pub work: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    Ready,
    /// Its ranks are being placed anew: what it is given waits.
    Recovering,
    /// What it has is finished, and nothing more is taken.
    Draining,
    /// Not attached, or not yet loaded.
    Absent,
}

/// The replica with the least work; of equals the first, so that one client after the other finds the caches of the one
/// before. None where nobody takes requests.
pub fn least_work(table: &[Row], n_prompt: u32) -> Option<usize> {
    let key = |row: &Row| (row.context <= n_prompt, row.work);
    let open = candidates(table).filter(|(_, row)| Some(row.digest) == digest(table));
    open.min_by_key(|(_, row)| key(row)).map(|(idx, _)| idx)
}

/// Who can go on with a request, and say what it would have said, in no worse a standing: of the best the one with the
/// least work.
pub fn equal(table: &[Row], need: Need, worst: Standing) -> Option<usize> {
    let able = table.iter().enumerate().filter(|(_, row)| row.standing <= worst && row.meets(need));
    able.min_by_key(|(_, row)| (row.standing, row.work)).map(|(idx, _)| idx)
}

impl Row {
    pub fn meets(&self, need: Need) -> bool {
        self.digest == need.digest && u64::from(self.context) >= need.n_tokens
    }

    pub fn may_come_for(&self, need: Need) -> bool {
        match self.standing {
            Standing::Absent => true,
            Standing::Ready | Standing::Recovering => self.meets(need),
            Standing::Draining => false,
        }
    }
}

/// Those that could serve and get nothing, because they would answer otherwise than the first.
pub fn strangers(table: &[Row]) -> impl Iterator<Item = usize> {
    candidates(table).filter(|(_, row)| Some(row.digest) != digest(table)).map(|(idx, _)| idx)
}

/// Under two policies one question would have two answers, so that one is in force: that of the first that could serve.
fn digest(table: &[Row]) -> Option<PolicyDigest> {
    candidates(table).next().map(|(_, row)| row.digest)
}

/// The ready ones; where there are none, those that will be again.
fn candidates(table: &[Row]) -> impl Iterator<Item = (usize, &Row)> {
    let best = table.iter().map(|row| row.standing).min().unwrap_or(Standing::Absent);
    let may_serve = matches!(best, Standing::Ready | Standing::Recovering);
    table.iter().enumerate().filter(move |(_, row)| may_serve && row.standing == best)
}

#[cfg(test)]
mod tests {
    use super::Standing::{Absent, Draining, Ready, Recovering};
    use super::*;

    fn row(standing: Standing, work: u64) -> Row {
        Row { standing, digest: PolicyDigest::default(), context: 100, work }
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
    fn who_does_not_take_requests_gets_none() {
        check(&[(Absent, 0), (Ready, 9), (Draining, 0)], Some(1));
        check(&[(Draining, 0), (Draining, 0)], None);
        check(&[(Absent, 0), (Draining, 0)], None);
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
    fn who_goes_on_has_the_same_policy_and_the_same_room() {
        let need = Need { digest: PolicyDigest([1; 32]), n_tokens: 90 };
        let same = |standing, work| Row { digest: need.digest, ..row(standing, work) };
        let small = Row { context: 89, ..same(Ready, 0) };
        let check = |table: &[Row], expect| assert_eq!(equal(table, need, Ready), expect, "{table:?}");
        check(&[row(Ready, 0), small, same(Recovering, 0), same(Ready, 9), same(Ready, 8)], Some(4));
        check(&[row(Ready, 0), small, same(Recovering, 0), same(Draining, 0)], None);
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
