//! Which replicas have a block in their cache, by the block's short name. Coordinators report their names. Here the
//! names are inverted, so that one look-up of a prompt covers all replicas. Knows no tokens, no requests and no load.
//!
//! Each replica has a number in the sets, and gets a new one whenever it reports all names anew. The old number stays
//! in the sets, where it is ignored; when the numbers run out, all old ones are removed together.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Numbers that can be given to replicas, including void ones.
pub const IDS_MAX: usize = 2048;
const WORDS: usize = IDS_MAX / 64;
/// The most block names of all replicas together. Further names are not stored, and their blocks are not found.
pub const NAMES_MAX: usize = 4 << 20;

/// The number of one replica.
pub type Id = u16;

/// A set of replicas, as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaSet([u64; WORDS]);

impl Default for ReplicaSet {
    fn default() -> ReplicaSet {
        ReplicaSet([0; WORDS])
    }
}

impl ReplicaSet {
    #[inline]
    pub fn insert(&mut self, id: Id) {
        self.0[usize::from(id) / 64] |= 1 << (id % 64);
    }

    pub fn remove(&mut self, id: Id) {
        self.0[usize::from(id) / 64] &= !(1 << (id % 64));
    }

    pub fn contains(&self, id: Id) -> bool {
        self.0[usize::from(id) / 64] & (1 << (id % 64)) != 0
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.0 == [0; WORDS]
    }

    #[inline]
    fn is_within(&self, others: &ReplicaSet) -> bool {
        // The loop has no branch for each word, because it runs for every block of a prompt.
        self.0.iter().zip(&others.0).fold(0, |all, (word, other)| all | (word & !other)) == 0
    }

    fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    #[inline]
    fn minus(&self, others: &ReplicaSet) -> ReplicaSet {
        ReplicaSet(std::array::from_fn(|word| self.0[word] & !others.0[word]))
    }

    fn iter(&self) -> impl Iterator<Item = Id> + '_ {
        let ids = |(at, word): (usize, &u64)| {
            let mut rest = *word;
            std::iter::from_fn(move || {
                let bit = rest.checked_ilog2()?;
                rest ^= 1 << bit;
                Some((at * 64) as Id + bit as Id)
            })
        };
        self.0.iter().enumerate().flat_map(ids)
    }
}

/// The replicas that have a block: a few inline, more as an index into `many`.
#[derive(Clone, Copy, Debug)]
enum BlockHolders {
    Few { n: u8, ids: [Id; FEW] },
    Many(u32),
}

const FEW: usize = 3;
/// The number of names per look-up, so that their memory accesses overlap.
const AT_ONCE: usize = 16;

/// Uses a name as its own hash: it is a cryptographic hash already.
#[derive(Default)]
struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, name: u64) {
        self.0 = name;
    }
}

#[derive(Default)]
pub struct CacheIndex {
    names: HashMap<u64, BlockHolders, BuildHasherDefault<IdentityHasher>>,
    many: Vec<ReplicaSet>,
    /// The unused entries of `many`.
    many_free: Vec<u32>,
    given: ReplicaSet,
    void: ReplicaSet,
    /// How many names each number has.
    counts: Vec<u32>,
}

/// A report of the replica is missing: the present one does not follow the last.
#[derive(Debug, PartialEq, Eq)]
pub struct ReportGap;

/// The state of one replica's reports.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheReporter {
    pub id: Option<Id>,
    last_sequence: u64,
}

impl CacheIndex {
    /// Applies a replica's report. After a gap, the replica's blocks are unknown until it reports all names anew.
    pub fn apply(&mut self, reporter: &mut CacheReporter, report: &proto::cluster::Cached) -> Result<(), ReportGap> {
        if report.anew {
            self.forget(reporter);
            reporter.id = self.allocate_id();
        } else if report.sequence != reporter.last_sequence + 1 {
            self.forget(reporter);
            return Err(ReportGap);
        }
        reporter.last_sequence = report.sequence;
        if let Some(id) = reporter.id {
            report.added.iter().for_each(|name| self.add(id, *name));
            report.dropped.iter().for_each(|name| self.drop_name(id, *name));
        }
        Ok(())
    }

    pub fn forget(&mut self, reporter: &mut CacheReporter) {
        if let Some(id) = reporter.id.take() {
            self.void.insert(id);
        }
        reporter.last_sequence = u64::MAX - 1;
    }

    /// How many of a replica's reported names are stored.
    pub fn n_names(&self, id: Id) -> u32 {
        self.counts.get(usize::from(id)).copied().unwrap_or(0)
    }

    /// Writes into `depths`, by number, how many of these names in a row each replica of `among` has, counted from the
    /// first name. Reads names until no replica has one, and a few more.
    pub fn depths(&self, names: impl IntoIterator<Item = u64>, mut among: ReplicaSet, depths: &mut [u32; IDS_MAX]) {
        let mut names = names.into_iter().fuse();
        let mut n_found = 0;
        let mut n_among = among.len();
        loop {
            // Each look-up waits for memory; batching lets the waits overlap.
            let found: [Option<Option<&BlockHolders>>; AT_ONCE] =
                std::array::from_fn(|_| names.next().map(|name| self.names.get(&name)));
            for holders in found {
                let Some(holders) = holders else {
                    return among.iter().for_each(|id| depths[usize::from(id)] = n_found);
                };
                // Usually the replicas that had the last block have this one too: then no new set is needed.
                if !holders.is_some_and(|holders| self.have(&among, n_among, holders)) {
                    let lost = holders.map_or(among, |holders| self.without_block(&among, holders));
                    lost.iter().for_each(|id| depths[usize::from(id)] = n_found);
                    among = among.minus(&lost);
                    n_among = among.len();
                }
                if n_among == 0 {
                    return;
                }
                n_found += 1;
            }
        }
    }

    /// Whether all of `among` have the block.
    #[inline]
    fn have(&self, among: &ReplicaSet, n_among: usize, holders: &BlockHolders) -> bool {
        match holders {
            BlockHolders::Many(at) => among.is_within(&self.many[*at as usize]),
            BlockHolders::Few { n, ids } => {
                ids[..usize::from(*n)].iter().filter(|id| among.contains(**id)).count() == n_among
            }
        }
    }

    /// Those of `among` that do not have the block.
    fn without_block(&self, among: &ReplicaSet, holders: &BlockHolders) -> ReplicaSet {
        match holders {
            BlockHolders::Many(at) => among.minus(&self.many[*at as usize]),
            BlockHolders::Few { n, ids } => {
                let mut left = *among;
                ids[..usize::from(*n)].iter().for_each(|id| left.remove(*id));
                left
            }
        }
    }

    fn add(&mut self, id: Id, name: u64) {
        let is_full = self.names.len() >= NAMES_MAX;
        let is_new = match self.names.get_mut(&name) {
            None if is_full => false,
            None => {
                self.names.insert(name, BlockHolders::Few { n: 1, ids: [id, 0, 0] });
                true
            }
            Some(BlockHolders::Many(at)) => {
                let many = &mut self.many[*at as usize];
                let is_new = !many.contains(id);
                many.insert(id);
                is_new
            }
            Some(BlockHolders::Few { n, ids }) if ids[..usize::from(*n)].contains(&id) => false,
            Some(BlockHolders::Few { n, ids }) if usize::from(*n) < FEW => {
                ids[usize::from(*n)] = id;
                *n += 1;
                true
            }
            Some(holders @ BlockHolders::Few { .. }) => {
                let mut all = ReplicaSet::default();
                if let BlockHolders::Few { ids, .. } = holders {
                    ids.iter().for_each(|id| all.insert(*id));
                }
                all.insert(id);
                let at = match self.many_free.pop() {
                    Some(at) => at,
                    None => {
                        self.many.push(ReplicaSet::default());
                        (self.many.len() - 1) as u32
                    }
                };
                self.many[at as usize] = all;
                *holders = BlockHolders::Many(at);
                true
            }
        };
        self.counts[usize::from(id)] += u32::from(is_new);
    }

    fn drop_name(&mut self, id: Id, name: u64) {
        let Some(holders) = self.names.get_mut(&name) else { return };
        let (had_it, is_empty) = match holders {
            BlockHolders::Many(at) => {
                let many = &mut self.many[*at as usize];
                let had_it = many.contains(id);
                many.remove(id);
                (had_it, many.is_empty())
            }
            BlockHolders::Few { n, ids } => match ids[..usize::from(*n)].iter().position(|of| *of == id) {
                None => (false, false),
                Some(at) => {
                    *n -= 1;
                    ids[at] = ids[usize::from(*n)];
                    (true, *n == 0)
                }
            },
        };
        self.counts[usize::from(id)] -= u32::from(had_it);
        if is_empty && let Some(BlockHolders::Many(at)) = self.names.remove(&name) {
            self.many_free.push(at);
        }
    }

    /// Returns an unused number, or None if there are more replicas than numbers.
    fn allocate_id(&mut self) -> Option<Id> {
        if self.first_free().is_none() {
            self.sweep();
        }
        let id = self.first_free()?;
        self.given.insert(id);
        let n_counts = self.counts.len().max(usize::from(id) + 1);
        self.counts.resize(n_counts, 0);
        self.counts[usize::from(id)] = 0;
        Some(id)
    }

    fn first_free(&self) -> Option<Id> {
        let (at, word) = self.given.0.iter().enumerate().find(|(_, word)| **word != u64::MAX)?;
        Some((at * 64) as Id + word.trailing_ones() as Id)
    }

    /// Frees all void numbers.
    fn sweep(&mut self) {
        let void = std::mem::take(&mut self.void);
        let CacheIndex { names, many, many_free, given, .. } = self;
        names.retain(|_, holders| match holders {
            BlockHolders::Few { n, ids } => {
                let left = ids[..usize::from(*n)].iter().filter(|id| !void.contains(**id)).count();
                let mut kept = [0; FEW];
                let all = ids[..usize::from(*n)].iter().filter(|id| !void.contains(**id));
                kept.iter_mut().zip(all).for_each(|(kept, id)| *kept = *id);
                (*n, *ids) = (left as u8, kept);
                left > 0
            }
            BlockHolders::Many(at) => {
                let set = &mut many[*at as usize];
                *set = set.minus(&void);
                if set.is_empty() {
                    many_free.push(*at);
                }
                !set.is_empty()
            }
        });
        void.iter().for_each(|id| given.remove(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::cluster::Cached;
    use std::collections::BTreeSet;

    fn report(sequence: u64, anew: bool, added: &[u64], dropped: &[u64]) -> Cached {
        Cached { sequence, anew, added: added.to_vec(), dropped: dropped.to_vec() }
    }

    fn depth(caches: &CacheIndex, reporter: &CacheReporter, names: &[u64]) -> u32 {
        let (mut among, mut depths) = (ReplicaSet::default(), [0; IDS_MAX]);
        let Some(id) = reporter.id else { return 0 };
        among.insert(id);
        caches.depths(names.iter().copied(), among, &mut depths);
        depths[usize::from(id)]
    }

    #[test]
    fn reported_names_are_found_and_gaps_are_detected() {
        let (mut caches, mut reporter) = (CacheIndex::default(), CacheReporter::default());
        assert_eq!(
            caches.apply(&mut reporter, &report(1, false, &[1], &[])),
            Ok(()),
            "a reporter without earlier names has no gap"
        );
        let (mut one, mut two) = (CacheReporter::default(), CacheReporter::default());
        caches.apply(&mut one, &report(1, true, &[1, 2, 3], &[])).unwrap();
        caches.apply(&mut two, &report(1, true, &[1], &[])).unwrap();
        assert_eq!((depth(&caches, &one, &[1, 2, 9, 3]), depth(&caches, &two, &[1, 2])), (2, 1));
        caches.apply(&mut one, &report(2, false, &[9], &[1])).unwrap();
        assert_eq!((depth(&caches, &one, &[1, 2]), depth(&caches, &one, &[2, 9, 3])), (0, 3));
        assert_eq!((depth(&caches, &two, &[1]), caches.n_names(one.id.unwrap())), (1, 3));
        // A report is missing: nothing is known until all names are reported.
        assert_eq!(caches.apply(&mut one, &report(4, false, &[5], &[])), Err(ReportGap));
        assert_eq!(depth(&caches, &one, &[2]), 0);
        assert_eq!(caches.apply(&mut one, &report(5, false, &[5], &[])), Err(ReportGap));
        caches.apply(&mut one, &report(6, true, &[5], &[])).unwrap();
        caches.apply(&mut one, &report(7, false, &[6], &[])).unwrap();
        assert_eq!((depth(&caches, &one, &[5, 6]), depth(&caches, &one, &[2])), (2, 0));
    }

    #[test]
    fn caches_know_what_plain_sets_would() {
        let mut caches = CacheIndex::default();
        let mut reporters: Vec<(CacheReporter, BTreeSet<u64>, u64)> = (0..9).map(|_| Default::default()).collect();
        let mut state = 1_u64;
        let mut draw = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        for _ in 0..30_000 {
            let (reporter, knows, last_sequence) = &mut reporters[draw(9) as usize];
            let anew = *last_sequence == 0 || draw(8) == 0;
            let added: Vec<u64> = (0..draw(6)).map(|_| draw(40)).collect();
            let dropped: Vec<u64> = (0..draw(6)).map(|_| draw(40)).filter(|name| !added.contains(name)).collect();
            if anew {
                knows.clear();
            }
            knows.extend(&added);
            knows.retain(|name| !dropped.contains(name));
            *last_sequence += 1;
            caches.apply(reporter, &report(*last_sequence, anew, &added, &dropped)).unwrap();
            assert_eq!(caches.n_names(reporter.id.unwrap()), knows.len() as u32);
            let prompt_names: Vec<u64> = (0..4).map(|_| draw(40)).collect();
            let (mut among, mut depths) = (ReplicaSet::default(), [0; IDS_MAX]);
            reporters.iter().filter_map(|(reporter, ..)| reporter.id).for_each(|id| among.insert(id));
            caches.depths(prompt_names.iter().copied(), among, &mut depths);
            for (reporter, knows, _) in &reporters {
                let expect = prompt_names.iter().take_while(|name| knows.contains(name)).count() as u32;
                assert_eq!(reporter.id.map_or(0, |id| depths[usize::from(id)]), expect);
            }
        }
        // The sets have been swept more than once, and what is left is what was reported.
        let all: BTreeSet<u64> = reporters.iter().flat_map(|(_, knows, _)| knows.iter().copied()).collect();
        caches.sweep();
        assert_eq!(caches.names.len(), all.len());
        assert_eq!(caches.given.iter().count(), 9);
        let n_many = caches.names.values().filter(|holders| matches!(holders, BlockHolders::Many(_))).count();
        assert_eq!(caches.many.len(), n_many + caches.many_free.len());
    }
}
