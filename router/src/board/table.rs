//! The table from which a choice picks a replica: what is known of each, counters that change by themselves, and which
//! blocks each has cached. Knows no links, and nothing of what people are shown.

use crate::board::caches::{CacheIndex, CacheReporter, IDS_MAX, Id, ReplicaSet, ReportGap};
use crate::board::circuit::{Circuit, CircuitChange, MedianTimes};
use crate::board::ledger::{Ledger, Ledgers, Loads};
use crate::board::pick::{
    self, OpenReplicas, PickInfo, PickPolicy, ReplicaEligibility, ReplicaRow, ReplicaStanding, VersionId,
};
use proto::cluster as wire;
use std::sync::Arc;
use types::{BLOCK_TOKENS, BlockHash, CacheOwner, PolicyDigest, Token};

/// Replicas derive the names of their blocks from their cluster's secret, the salt. Caches are looked up for at most
/// this many different salts.
const SALTS_MAX: usize = 4;

/// The root of a replica's block names.
pub type Salt = [u8; 16];

#[derive(Default)]
pub struct ReplicaTable {
    /// One entry per replica, in the order in which they came.
    entries: Vec<ReplicaEntry>,
    /// What every choice reads of each entry, kept apart so that a thousand replicas are few cache lines.
    summary: Vec<EntrySummary>,
    /// The digests that the numbers in `summary` stand for.
    digests: Vec<PolicyDigest>,
    salts: Vec<Salt>,
    caches: CacheIndex,
    ledgers: Ledgers,
}

struct ReplicaEntry {
    place: usize,
    facts: ReplicaFacts,
    ledger: Arc<Ledger>,
    reporter: CacheReporter,
    circuit: Circuit,
}

struct EntrySummary {
    loads: Loads,
    id: u64,
    version: VersionId,
    /// The context, or as much of it as the ranks have room for.
    context: u32,
    reporter: Option<Id>,
    protocol: u32,
    digest: u16,
    salt: u16,
    standing: ReplicaStanding,
    /// Its circuit lets every request through.
    is_trusted: bool,
}

/// The fields of a replica's view that a choice needs.
#[derive(Clone, Copy, Debug)]
pub struct ReplicaFacts {
    pub standing: ReplicaStanding,
    pub digest: PolicyDigest,
    pub version: VersionId,
    pub context: u32,
    /// How much of the context the ranks have room for at present.
    pub room: u32,
    pub salt: Salt,
    /// A number of the replica that is the same at every router.
    pub id: u64,
    /// The newest protocol that its coordinator, its ranks and this router speak.
    pub protocol: u32,
}

/// Memory that is reused, so that a choice allocates nothing.
pub struct ChoiceBuffers {
    open: OpenReplicas,
    /// For each salt, the open replicas that name their blocks from it.
    salts: Vec<(u16, ReplicaSet)>,
    depths: Box<[u32; IDS_MAX]>,
}

impl Default for ChoiceBuffers {
    fn default() -> ChoiceBuffers {
        ChoiceBuffers {
            open: OpenReplicas::default(),
            salts: Vec::with_capacity(SALTS_MAX),
            depths: Box::new([0; IDS_MAX]),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaChoice {
    pub place: usize,
    /// How many tokens of the prompt its cache has.
    pub n_cached: u32,
    /// Another replica that could have served as well, but under another digest: it would answer differently, and gets
    /// no request.
    pub stranger: Option<usize>,
}

impl ReplicaTable {
    /// Returns the ledger of a new replica.
    pub fn ledger(&mut self) -> Arc<Ledger> {
        Arc::new(self.ledgers.open())
    }

    pub fn add_replica(&mut self, place: usize, ledger: Arc<Ledger>) {
        debug_assert!(self.entries.last().is_none_or(|last| last.place < place), "places must ascend");
        let (digest, salt, standing) = (PolicyDigest::default(), Salt::default(), ReplicaStanding::Absent);
        let version = VersionId::default();
        let facts = ReplicaFacts { standing, digest, version, context: 0, room: 0, salt, id: 0, protocol: 0 };
        let (loads, reporter, circuit) = (ledger.loads().clone(), CacheReporter::default(), Circuit::default());
        self.entries.push(ReplicaEntry { place, facts, ledger, reporter, circuit });
        let (id, context, reporter_id, is_trusted) = (0, 0, None, true);
        self.summary.push(EntrySummary {
            loads,
            id,
            version,
            context,
            reporter: reporter_id,
            protocol: 0,
            digest: 0,
            salt: 0,
            standing,
            is_trusted,
        });
        self.renumber();
    }

    pub fn remove_replica(&mut self, place: usize) {
        self.reset_reports(place);
        if let Some(at) = self.row_index(place) {
            self.entries.remove(at);
            self.summary.remove(at);
            self.renumber();
        }
    }

    pub fn update_facts(&mut self, place: usize, facts: &ReplicaFacts) {
        let Some(at) = self.row_index(place) else { return };
        let before = std::mem::replace(&mut self.entries[at].facts, *facts);
        let summary = &mut self.summary[at];
        (summary.standing, summary.context, summary.id) = (facts.standing, facts.room.min(facts.context), facts.id);
        (summary.version, summary.protocol) = (facts.version, facts.protocol);
        if (before.digest, before.salt) != (facts.digest, facts.salt) {
            self.renumber();
        }
    }

    /// Replaces digests and salts by numbers, which compare faster.
    fn renumber(&mut self) {
        let ReplicaTable { entries, summary, digests, salts, .. } = self;
        digests.clear();
        salts.clear();
        for (entry, summary) in entries.iter().zip(summary) {
            summary.digest = index_of(digests, entry.facts.digest);
            summary.salt = index_of(salts, entry.facts.salt);
        }
    }

    /// Another stream to the replica begins: its cache's content is no longer known.
    pub fn reset_reports(&mut self, place: usize) {
        if let Some(at) = self.row_index(place) {
            self.caches.forget(&mut self.entries[at].reporter);
            self.entries[at].reporter = CacheReporter::default();
            self.summary[at].reporter = None;
        }
    }

    pub fn apply_report(&mut self, place: usize, report: &wire::Cached) -> Result<(), ReportGap> {
        let Some(at) = self.row_index(place) else { return Ok(()) };
        let result = self.caches.apply(&mut self.entries[at].reporter, report);
        self.summary[at].reporter = self.entries[at].reporter.id;
        result
    }

    /// Judges all replicas, once a second. Returns which ones get no new requests for a while, and which ones are tried
    /// or trusted again.
    pub fn judge(&mut self, second: u64) -> Vec<(usize, CircuitChange)> {
        let windows: Vec<_> = self.entries.iter().map(|entry| entry.ledger.take_window()).collect();
        let mut n_shunned = self.summary.iter().filter(|summary| !summary.is_trusted).count();
        let n_ready = self.summary.iter().filter(|summary| summary.standing <= ReplicaStanding::Shunned).count();
        let mut turns = Vec::new();
        for (at, (entry, summary)) in self.entries.iter_mut().zip(&mut self.summary).enumerate() {
            let usual = MedianTimes::of_others(&windows, at);
            let is_open = entry.circuit.is_open();
            // At most half of all are shunned: if most of them are worse than before, shunning gains nothing.
            let may_open = is_open || (n_shunned + 1) * 2 <= n_ready;
            if let Some(turn) = entry.circuit.judge_window(second, &windows[at], &usual, may_open) {
                n_shunned += usize::from(!is_open && entry.circuit.is_open());
                turns.push((entry.place, turn));
            }
            summary.is_trusted = !entry.circuit.is_open();
        }
        turns
    }

    pub fn row_of(&self, place: usize) -> Option<ReplicaRow> {
        Some(self.row(self.row_index(place)?))
    }

    pub fn rows(&self) -> impl Iterator<Item = (usize, ReplicaRow)> + '_ {
        self.entries.iter().enumerate().map(|(at, entry)| (entry.place, self.row(at)))
    }

    /// Picks the replica that gets a request. `names` derives the names of the prompt's blocks from a digest and a
    /// salt.
    pub fn choose<I: Iterator<Item = u64>>(
        &self,
        policy: PickPolicy,
        info: &PickInfo,
        names: Option<impl Fn(&PolicyDigest, &Salt) -> I>,
        scratch: &mut ChoiceBuffers,
    ) -> Option<ReplicaChoice> {
        let all = self.summary.iter().enumerate().map(|(at, summary)| ReplicaEligibility {
            // For this request, a replica counts as absent if it has another version, or a build without a feature that
            // the request uses.
            standing: match info.matches(summary.version, summary.protocol) {
                true => self.standing(at, summary),
                false => ReplicaStanding::Absent,
            },
            digest: summary.digest,
            context: summary.context,
        });
        let stranger = scratch.open.find(all, info.n_prompt).map(|at| self.entries[at].place);
        if let Some(id) = info.apart_from {
            scratch.open.leave_out(|row| self.summary[row as usize].id == id);
        }
        self.fill(&mut scratch.open);
        // A single open replica gets the request whatever its cache has.
        if let Some(names) = names.filter(|_| policy.reads_caches(info) && scratch.open.len() > 1) {
            self.fill_prefix_depths(info, names, scratch);
        }
        let at = pick::pick(policy, &scratch.open, info)?;
        let n_cached = scratch.open.n_cached[scratch.open.rows.binary_search(&(at as u32)).ok()?];
        // With several versions, a replica under another digest is not a stranger: it serves other requests.
        let stranger = stranger.filter(|_| info.version.is_none());
        Some(ReplicaChoice { place: self.entries[at].place, n_cached, stranger })
    }

    /// Fills the columns of the open replicas, except what caches have.
    fn fill(&self, open: &mut OpenReplicas) {
        let OpenReplicas { rows, loads, tokens_free, n_cached, n_names, ids } = open;
        let summaries = || rows.iter().map(|row| &self.summary[*row as usize]);
        loads.clear();
        tokens_free.clear();
        loads.extend(summaries().map(|summary| pick::load(summary.loads.work(), summary.loads.n_running())));
        tokens_free.extend(summaries().map(|summary| summary.loads.tokens_free()));
        n_names.clear();
        n_names.extend(summaries().map(|summary| self.n_names(summary)));
        ids.clear();
        ids.extend(summaries().map(|summary| summary.id));
        n_cached.clear();
        n_cached.resize(rows.len(), 0);
    }

    /// Finds how much of the prompt the cache of each open replica has.
    fn fill_prefix_depths<I: Iterator<Item = u64>>(
        &self,
        info: &PickInfo,
        names: impl Fn(&PolicyDigest, &Salt) -> I,
        scratch: &mut ChoiceBuffers,
    ) {
        let ChoiceBuffers { open, salts, depths } = scratch;
        salts.clear();
        depths.fill(0);
        let Some(first) = open.rows.first().map(|row| &self.summary[*row as usize]) else { return };
        for row in &open.rows {
            let EntrySummary { salt, reporter, .. } = &self.summary[*row as usize];
            let Some(id) = reporter else { continue };
            let known = salts.iter().position(|(of, _)| of == salt);
            if known.is_none() && salts.len() < SALTS_MAX {
                salts.push((*salt, ReplicaSet::default()));
            }
            let at = known.unwrap_or(salts.len() - 1);
            if salts[at].0 == *salt {
                salts[at].1.insert(*id);
            }
        }
        let digest = &self.digests[usize::from(first.digest)];
        for (salt, among) in salts.iter() {
            self.caches.depths(names(digest, &self.salts[usize::from(*salt)]), *among, depths);
        }
        let n_cached_max = info.n_prompt.saturating_sub(1);
        for (row, n_cached) in open.rows.iter().zip(&mut open.n_cached) {
            let depth = self.summary[*row as usize].reporter.map_or(0, |id| depths[usize::from(id)]);
            *n_cached = (depth * BLOCK_TOKENS).min(n_cached_max);
        }
    }

    fn row_index(&self, place: usize) -> Option<usize> {
        self.entries.binary_search_by_key(&place, |entry| entry.place).ok()
    }

    #[inline]
    fn standing(&self, at: usize, summary: &EntrySummary) -> ReplicaStanding {
        let admits = || summary.is_trusted || self.entries[at].circuit.admits(summary.loads.n_own());
        match summary.standing {
            ReplicaStanding::Ready if !admits() => ReplicaStanding::Shunned,
            standing => standing,
        }
    }

    #[inline]
    fn n_names(&self, summary: &EntrySummary) -> u32 {
        summary.reporter.map_or(0, |id| self.caches.n_names(id))
    }

    fn row(&self, at: usize) -> ReplicaRow {
        let (summary, ReplicaFacts { digest, version, context, room, id, protocol, .. }) =
            (&self.summary[at], self.entries[at].facts);
        let (loads, n_names) = (&summary.loads, self.n_names(summary));
        let (standing, work, n_running) = (self.standing(at, summary), loads.work(), loads.n_running());
        let tokens_free = Some(loads.tokens_free()).filter(|free| *free != u64::MAX);
        ReplicaRow {
            standing,
            digest,
            version,
            context,
            room,
            work,
            n_running,
            tokens_free,
            n_cached: 0,
            n_names,
            id,
            protocol,
        }
    }
}

/// The index of a value among the known ones.
fn index_of<T: PartialEq>(known: &mut Vec<T>, value: T) -> u16 {
    let at = known.iter().position(|of| *of == value).unwrap_or_else(|| {
        known.push(value);
        known.len() - 1
    });
    u16::try_from(at).unwrap_or(u16::MAX)
}

/// A replica's names for the blocks of a prompt that it could have cached. The last token is always computed, so its
/// block is excluded.
pub fn names<'a>(
    prompt: &'a [Token],
    owner: CacheOwner,
    digest: &PolicyDigest,
    salt: &Salt,
) -> impl Iterator<Item = u64> + use<'a> {
    let n_blocks = prompt.len().saturating_sub(1) / BLOCK_TOKENS as usize;
    let blocks = prompt.chunks_exact(BLOCK_TOKENS as usize).take(n_blocks);
    let root = BlockHash::root(digest, owner, salt);
    blocks.scan(root, |name, block| {
        *name = name.child(block.iter().copied());
        Some(name.short())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::TenantId;

    fn facts(salt: u8, id: u64) -> ReplicaFacts {
        let (digest, version) = (PolicyDigest::default(), VersionId::default());
        let (standing, context, room, protocol) = (ReplicaStanding::Ready, 4096, u32::MAX, 1);
        ReplicaFacts { standing, digest, version, context, room, salt: [salt; 16], id, protocol }
    }

    fn board(salts: &[u8]) -> ReplicaTable {
        let mut board = ReplicaTable::default();
        for (place, salt) in salts.iter().enumerate() {
            board.add_replica(place, Arc::default());
            board.update_facts(place, &facts(*salt, place as u64));
        }
        board
    }

    fn report_cached(board: &mut ReplicaTable, place: usize, sequence: u64, prompt: &[Token], salt: u8) {
        let added = names(prompt, CacheOwner::default(), &PolicyDigest::default(), &[salt; 16]).collect();
        let report = wire::Cached { sequence, anew: sequence == 1, added, dropped: Vec::new() };
        board.apply_report(place, &report).unwrap();
    }

    fn choose(board: &ReplicaTable, prompt: &[Token]) -> (usize, u32) {
        let info = PickInfo { n_prompt: prompt.len() as u32, ..PickInfo::default() };
        let names = |digest: &PolicyDigest, salt: &Salt| names(prompt, CacheOwner::default(), digest, salt);
        let chosen = board.choose(PickPolicy::Prefix, &info, Some(names), &mut ChoiceBuffers::default()).unwrap();
        (chosen.place, chosen.n_cached)
    }

    #[test]
    fn the_replica_that_has_the_prompt_cached_gets_it_until_it_has_too_much_work() {
        let mut board = board(&[1, 2, 1]);
        let prompt: Vec<Token> = (0..100).collect();
        assert_eq!(choose(&board, &prompt), (0, 0));
        report_cached(&mut board, 1, 1, &prompt[..50], 2);
        assert_eq!(choose(&board, &prompt), (1, 48));
        report_cached(&mut board, 2, 1, &prompt, 1);
        assert_eq!(choose(&board, &prompt), (2, 96));
        // The same prompt of another tenant has other names.
        let others = |digest: &PolicyDigest, salt: &Salt| names(&prompt, TenantId(9).into(), digest, salt);
        let info = PickInfo { n_prompt: 100, ..PickInfo::default() };
        let chosen = board.choose(PickPolicy::Prefix, &info, Some(others), &mut ChoiceBuffers::default()).unwrap();
        assert_eq!((chosen.place, chosen.n_cached), (0, 0));
        let ledger = board.entries[2].ledger.clone();
        let busy = ledger.add_work(49);
        assert_eq!(choose(&board, &prompt), (1, 48));
        drop(busy);
        assert_eq!(choose(&board, &prompt), (2, 96));
        // A new stream has reported nothing yet.
        board.reset_reports(2);
        assert_eq!(choose(&board, &prompt), (1, 48));
        board.remove_replica(1);
        assert_eq!(choose(&board, &prompt), (0, 0));
    }

    #[test]
    fn what_only_a_newer_protocol_has_goes_to_a_replica_that_speaks_it() {
        let mut board = board(&[1, 1]);
        let chosen_place = |board: &ReplicaTable, protocol: u32| {
            let info = PickInfo { n_prompt: 9, protocol, ..PickInfo::default() };
            let nothing = |_: &PolicyDigest, _: &Salt| std::iter::empty();
            let chosen = board.choose(PickPolicy::LeastWork, &info, Some(nothing), &mut ChoiceBuffers::default());
            chosen.map(|chosen| chosen.place)
        };
        assert_eq!((chosen_place(&board, 1), chosen_place(&board, 2)), (Some(0), None));
        board.update_facts(1, &ReplicaFacts { protocol: 2, ..facts(1, 1) });
        assert_eq!((chosen_place(&board, 1), chosen_place(&board, 2)), (Some(0), Some(1)));
    }

    #[test]
    fn a_second_answer_comes_from_another_replica_if_there_is_one() {
        let mut board = board(&[1, 1]);
        let chosen_place = |board: &ReplicaTable, apart_from: Option<u64>| {
            let info = PickInfo { n_prompt: 9, apart_from, protocol: 1, ..PickInfo::default() };
            let nothing = |_: &PolicyDigest, _: &Salt| std::iter::empty();
            let chosen = board.choose(PickPolicy::LeastWork, &info, Some(nothing), &mut ChoiceBuffers::default());
            chosen.map(|chosen| chosen.place)
        };
        let places = [None, Some(0), Some(1), Some(9)].map(|apart_from| chosen_place(&board, apart_from));
        assert_eq!(places, [Some(0), Some(1), Some(0), Some(0)]);
        let another_digest = PolicyDigest([7; 32]);
        board.add_replica(2, Arc::default());
        board.update_facts(2, &ReplicaFacts { digest: another_digest, ..facts(1, 2) });
        board.remove_replica(1);
        assert_eq!(chosen_place(&board, Some(0)), Some(0), "it is the only one of its digest");
    }

    #[test]
    fn at_most_all_but_the_last_token_of_a_prompt_is_cached() {
        let mut board = board(&[1, 1]);
        let prompt: Vec<Token> = (0..33).collect();
        report_cached(&mut board, 1, 1, &prompt, 1);
        assert_eq!((choose(&board, &prompt), choose(&board, &prompt[..32])), ((1, 32), (1, 16)));
        assert_eq!(choose(&board, &prompt[..16]), (0, 0));
    }
}
