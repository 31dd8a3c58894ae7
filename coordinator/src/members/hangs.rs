//! Finds the rank that hangs when a step takes too long, from the ranks' own reports. Knows no time.

use crate::WorkerId;
use types::Rank;

/// A rank's last report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RankReport {
    pub worker: WorkerId,
    pub rank: Rank,
    /// Steps done since it got its rank.
    pub n_steps: u64,
    pub in_step: bool,
    pub waits_for: Option<Rank>,
    /// Whether it answers steps to the coordinator.
    pub is_sampler: bool,
}

/// Returns the workers of which one hangs. A single one hangs for certain; several cannot be distinguished by their
/// reports.
///
/// A rank that hangs is in a step and waits for no other rank; a rank that waits reports for which one. Of several that
/// compute, those with the fewest steps done hold up the others.
pub(crate) fn hang_suspects(ranks: &[RankReport]) -> Vec<WorkerId> {
    let computing = |rank: &&RankReport| rank.in_step && rank.waits_for.is_none();
    let idle = |rank: &&RankReport| !rank.in_step && is_waited_for(ranks, rank);
    // If none computes: an idle rank that others wait for, because its step has not arrived; then the two ends of a
    // broken link.
    let mut found = furthest_behind(ranks.iter().filter(computing));
    if found.is_empty() {
        found = furthest_behind(ranks.iter().filter(idle));
    }
    if found.is_empty() {
        found = earliest_waiting_pairs(ranks);
    }
    // All steps are done, and the answer has not come.
    if found.is_empty() {
        found = furthest_behind(ranks.iter());
        let sampler = ranks.iter().find(|rank| rank.is_sampler && found.contains(&rank.worker));
        found = sampler.map_or(found, |sampler| vec![sampler.worker]);
    }
    found
}

/// Whether a rank that has done as many steps or more waits for it.
fn is_waited_for(ranks: &[RankReport], rank: &RankReport) -> bool {
    ranks.iter().any(|other| other.waits_for == Some(rank.rank) && other.n_steps >= rank.n_steps)
}

/// The waiting ranks with the fewest steps done, and the ranks that they wait for.
fn earliest_waiting_pairs(ranks: &[RankReport]) -> Vec<WorkerId> {
    let behind = furthest_behind(ranks.iter().filter(|rank| rank.in_step));
    let waits_for = |rank: &RankReport| {
        ranks.iter().any(|other| other.waits_for == Some(rank.rank) && behind.contains(&other.worker))
    };
    let is_end = |rank: &&RankReport| behind.contains(&rank.worker) || waits_for(rank);
    ranks.iter().filter(is_end).map(|rank| rank.worker).collect()
}

fn furthest_behind<'a>(ranks: impl Iterator<Item = &'a RankReport> + Clone) -> Vec<WorkerId> {
    let fewest = ranks.clone().map(|rank| rank.n_steps).min();
    ranks.filter(|rank| Some(rank.n_steps) == fewest).map(|rank| rank.worker).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMPUTES: (bool, Option<u16>) = (true, None);
    const IDLE: (bool, Option<u16>) = (false, None);

    fn waits(rank: u16) -> (bool, Option<u16>) {
        (true, Some(rank))
    }

    /// `ranks` by steps done and activity, in order; the last one samples. Expects these suspects.
    fn check(ranks: &[(u64, (bool, Option<u16>))], expect: &[u64]) {
        let n = ranks.len();
        let report = |(i, &(n_steps, (in_step, waits_for))): (usize, &(u64, (bool, Option<u16>)))| RankReport {
            worker: WorkerId(i as u64),
            rank: Rank(i as u16),
            n_steps,
            in_step,
            waits_for: waits_for.map(Rank),
            is_sampler: i + 1 == n,
        };
        let mut rank_reports: Vec<RankReport> = ranks.iter().enumerate().map(report).collect();
        let expect: Vec<WorkerId> = expect.iter().copied().map(WorkerId).collect();
        assert_eq!(hang_suspects(&rank_reports), expect, "{ranks:?}");
        // The order of the reports does not matter.
        rank_reports.reverse();
        let mut found = hang_suspects(&rank_reports);
        found.sort_unstable();
        assert_eq!(found, expect, "{ranks:?}");
    }

    #[test]
    fn computing_rank_hangs_and_waiting_rank_does_not() {
        check(&[(5, COMPUTES)], &[0]);
        // All have done as many steps: their activity decides.
        check(&[(5, waits(1)), (5, COMPUTES)], &[1]);
        check(&[(5, COMPUTES), (5, waits(0))], &[0]);
        // Two stages of two: the second stage's rank 0 hangs; the first stage has gone on and waits for tokens.
        check(&[(7, waits(2)), (7, waits(2)), (6, COMPUTES), (6, waits(2))], &[2]);
        // Two compute: the one that is behind holds up the other.
        check(&[(7, COMPUTES), (6, COMPUTES)], &[1]);
    }

    #[test]
    fn without_computing_ranks_the_awaited_one_is_suspect() {
        // Rank 1 has not got its step.
        check(&[(5, waits(1)), (5, IDLE)], &[1]);
        // Two wait for each other: the link between them.
        check(&[(5, waits(1)), (5, waits(0))], &[0, 1]);
        check(&[(6, IDLE), (5, waits(2)), (5, waits(1))], &[1, 2]);
        // One waits for what the other reports as sent.
        check(&[(6, IDLE), (5, waits(0))], &[0, 1]);
        // No rank is in a step: the sampler has not answered.
        check(&[(6, IDLE), (6, IDLE)], &[1]);
        check(&[(5, IDLE), (6, IDLE)], &[0]);
    }

    #[test]
    fn tied_ranks_are_all_suspects() {
        check(&[(5, COMPUTES), (5, COMPUTES)], &[0, 1]);
        check(&[], &[]);
    }
}
