//! Commits the memory of a rank's KV cache piece by piece, up to a target, so that a machine that lacks memory returns
//! an error instead of killing a serving process. Has no knowledge of threads or streams: the session calls it, and
//! reports the progress.

use backend::{BlockMemory, KvSpec};
use std::ops::Range;
use types::{CacheGroup, KV_PARTS, blocks_committed, parts_for};

/// The memory of one piece. A machine whose cores are all busy takes a tenth of a second to provide one piece.
const PIECE_BYTES: u64 = 32 << 20;
/// The memory left to the rest of the machine.
const KEPT_FREE: u64 = 64 << 20;
/// The positions for which a growing cache has memory when the rank is ready.
const FIRST_POSITIONS: u32 = 2048;

pub struct KvPoolMemory {
    pools: Vec<CommittedPool>,
    /// The committed part of each pool.
    parts: u32,
    /// The part of each pool to commit.
    parts_target: u32,
    /// The smallest part that can serve: one context. A machine without memory for it is rejected.
    parts_min: u32,
    /// The part with which a growing cache begins.
    parts_first: u32,
    /// The size of one piece.
    parts_each: u32,
    context: u32,
}

/// A cache group's pool and its memory; None if the system has given all of it.
struct CommittedPool {
    n_blocks: u32,
    block_bytes: u64,
    memory: Option<BlockMemory>,
}

/// Why a machine does not provide the planned memory.
#[derive(Debug, thiserror::Error)]
pub enum KvShortage {
    #[error(
        "the KV cache needs {needed} more bytes for one context of {context} tokens, but this machine has \
         {left} left: set a shorter --context, or free memory on this machine"
    )]
    Context { context: u32, needed: u64, left: u64 },
    #[error("the system refuses memory for the KV cache: {0}")]
    System(#[from] std::io::Error),
}

/// The result of committing a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitOutcome {
    /// The piece is committed, and there is more to commit.
    Piece,
    /// As much is committed as was requested.
    Enough,
    /// The machine has no memory for another piece at this moment. The committed part is enough to serve.
    Short,
}

impl KvPoolMemory {
    /// None if the system has given all.
    pub(super) fn new(
        memories: Vec<Option<BlockMemory>>,
        specs: &[KvSpec],
        groups: &[CacheGroup],
        (context, slice_max): (u32, u32),
    ) -> Option<KvPoolMemory> {
        let pool = |(memory, spec): (Option<BlockMemory>, &KvSpec)| CommittedPool {
            n_blocks: spec.n_blocks as u32,
            block_bytes: spec.block_bytes(),
            memory,
        };
        let pools: Vec<CommittedPool> = memories.into_iter().zip(specs).map(pool).collect();
        let n_bytes: u64 = pools.iter().map(CommittedPool::n_bytes).sum();
        let parts_each = u64::from(KV_PARTS) * PIECE_BYTES / n_bytes.max(PIECE_BYTES);
        let parts_of = |n_positions: u32| {
            let of_pool = |(pool, group): (&CommittedPool, &CacheGroup)| {
                let n_blocks = group.n_held_max(n_positions, slice_max.min(n_positions));
                parts_for(n_blocks.into(), pool.n_blocks)
            };
            pools.iter().zip(groups).map(of_pool).max().unwrap_or(0)
        };
        let commit = KvPoolMemory {
            parts: 0,
            parts_target: KV_PARTS,
            parts_min: parts_of(context),
            parts_first: parts_of(FIRST_POSITIONS.min(context)),
            parts_each: parts_each.max(1) as u32,
            context,
            pools,
        };
        (n_bytes > 0 && !commit.pools.is_empty()).then_some(commit)
    }

    /// Returns the committed part of each pool.
    pub fn parts(&self) -> u32 {
        self.parts
    }

    pub fn n_bytes(&self) -> u64 {
        self.bytes_of(0..KV_PARTS)
    }

    pub fn committed_bytes(&self) -> u64 {
        self.bytes_of(0..self.parts)
    }

    /// Commits the beginning of a growing cache, on a machine that could provide one context. From now on a lack of
    /// memory is `Short`, and never an error.
    pub fn begin_to_grow(&mut self, left: impl Fn() -> Option<u64>) -> Result<(), KvShortage> {
        let needed = self.bytes_of(0..self.parts_min);
        if let Some(left) = left().filter(|left| *left < needed + KEPT_FREE) {
            self.shortage(left)?;
        }
        self.parts_min = 0;
        self.parts_target = self.parts_first;
        self.commit_to_target(left).map(|_| ())
    }

    /// Sets how much to commit, and gives back what is above. No pass may use the blocks above meanwhile.
    pub fn set_target(&mut self, parts: u32) -> std::io::Result<()> {
        self.parts_target = parts.min(KV_PARTS);
        let above = self.parts_target..self.parts;
        if above.is_empty() {
            return Ok(());
        }
        self.parts = self.parts_target;
        let memories = self.pools.iter().filter_map(|pool| Some((pool.blocks(&above), pool.memory.as_ref()?)));
        memories.into_iter().try_for_each(|(blocks, memory)| (memory.release)(blocks))
    }

    /// Commits another piece if the machine has that much `left` and some to spare. None: the free memory is unknown.
    pub fn commit_piece(&mut self, left: Option<u64>) -> Result<CommitOutcome, KvShortage> {
        let piece = self.parts..(self.parts + self.parts_each).min(self.parts_target);
        if piece.is_empty() {
            return Ok(CommitOutcome::Enough);
        }
        let needed = self.bytes_of(piece.clone());
        if let Some(left) = left.filter(|left| *left < needed + KEPT_FREE) {
            return self.shortage(left);
        }
        for pool in &self.pools {
            if let Some(memory) = &pool.memory {
                (memory.commit)(pool.blocks(&piece))?;
            }
        }
        self.parts = piece.end;
        Ok(if self.parts == self.parts_target { CommitOutcome::Enough } else { CommitOutcome::Piece })
    }

    /// Commits the whole target, or as much as the machine provides.
    pub fn commit_to_target(&mut self, left: impl Fn() -> Option<u64>) -> Result<CommitOutcome, KvShortage> {
        loop {
            match self.commit_piece(left())? {
                CommitOutcome::Piece => {}
                ended => return Ok(ended),
            }
        }
    }

    fn shortage(&self, left: u64) -> Result<CommitOutcome, KvShortage> {
        if self.parts >= self.parts_min {
            return Ok(CommitOutcome::Short);
        }
        let needed = self.bytes_of(self.parts..self.parts_min);
        Err(KvShortage::Context { context: self.context, needed, left: left.saturating_sub(KEPT_FREE) })
    }

    fn bytes_of(&self, parts: Range<u32>) -> u64 {
        let bytes = |pool: &CommittedPool| pool.blocks(&parts).len() as u64 * pool.block_bytes;
        self.pools.iter().map(bytes).sum()
    }
}

impl CommittedPool {
    fn n_bytes(&self) -> u64 {
        u64::from(self.n_blocks) * self.block_bytes
    }

    /// `[0, parts.start) already committed · [parts.start, parts.end) these · the rest`
    fn blocks(&self, parts: &Range<u32>) -> Range<u32> {
        blocks_committed(self.n_blocks, parts.start)..blocks_committed(self.n_blocks, parts.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend::ChangeBlocks;
    use std::sync::{Arc, Mutex};
    use types::{KvDtype, KvLayout};

    /// Returns a spec with blocks of 1 MiB.
    fn spec(n_blocks: usize) -> KvSpec {
        KvSpec { n_layers: 1, n_blocks, layout: KvLayout::heads(256, 64), dtype: KvDtype::F16 }
    }

    /// The ranges that were committed, and those that were released.
    type Changes = Arc<Mutex<[Vec<Range<u32>>; 2]>>;

    /// Returns the commit of one pool, for a context of this many blocks, and the changes that it makes.
    fn commit(n_blocks: usize, context: u32) -> (KvPoolMemory, Changes) {
        let changes = Changes::default();
        let [commit, release] = [0, 1].map(|which| {
            let log = changes.clone();
            Box::new(move |blocks: Range<u32>| {
                log.lock().unwrap()[which].push(blocks);
                Ok(())
            }) as ChangeBlocks
        });
        let memory = BlockMemory { commit, release };
        let commit = KvPoolMemory::new(vec![Some(memory)], &[spec(n_blocks)], &[CacheGroup::FULL], (context * 16, 16));
        (commit.unwrap(), changes)
    }

    fn n_blocks(ranges: &[Range<u32>]) -> u64 {
        ranges.iter().map(|blocks| blocks.len() as u64).sum()
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn all_blocks_are_committed_at_once_without_reports() {
        let (mut commit, changes) = commit(200, 10);
        assert_eq!(commit.commit_to_target(|| Some(1 << 40)).unwrap(), CommitOutcome::Enough);
        assert_eq!(n_blocks(&changes.lock().unwrap()[0]), 200);
        // A machine that lacks memory provides what it has, if that is enough for one context.
        let (mut commit, changes) = self::commit(200, 10);
        let left = || Some((120 - n_blocks(&changes.lock().unwrap()[0])) * MIB);
        assert_eq!(commit.commit_to_target(left).unwrap(), CommitOutcome::Short);
        assert!((10..120).contains(&(commit.committed_bytes() / MIB)), "{}", commit.committed_bytes());
    }

    #[test]
    fn every_block_is_committed_once_before_its_report() {
        let (mut commit, changes) = commit(200, 10);
        assert_eq!((commit.n_bytes(), commit.committed_bytes(), commit.parts()), (200 * MIB, 0, 0));
        let mut n_pieces = 0;
        loop {
            n_pieces += 1;
            let went = commit.commit_piece(Some(1 << 40)).unwrap();
            let n_committed = n_blocks(&changes.lock().unwrap()[0]);
            assert_eq!(commit.committed_bytes(), n_committed * MIB);
            assert_eq!(blocks_committed(200, commit.parts()), n_committed as u32);
            if went == CommitOutcome::Enough {
                break;
            }
        }
        let ranges = &changes.lock().unwrap()[0];
        assert!((6..=8).contains(&n_pieces), "{n_pieces} pieces of 32 MiB");
        assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start), "{ranges:?}");
        assert_eq!((ranges[0].start, ranges[ranges.len() - 1].end), (0, 200));
    }

    #[test]
    fn error_names_memory_missing_for_a_context() {
        let (mut commit, changes) = commit(200, 100);
        assert_eq!(commit.commit_piece(Some(200 * MIB)).unwrap(), CommitOutcome::Piece);
        let error = commit.commit_piece(Some(90 * MIB)).unwrap_err().to_string();
        let n_missing = 100 - n_blocks(&changes.lock().unwrap()[0]);
        assert!(error.contains(&format!("needs {} more bytes", n_missing * MIB)), "{error}");
        assert!(error.contains(&format!("has {} left", 26 * MIB)) && error.contains("1600 tokens"), "{error}");
        assert_eq!(changes.lock().unwrap()[0].len(), 1, "nothing is committed if the system has nothing left");
    }

    #[test]
    fn behind_a_context_less_is_promised_and_more_when_there_is_more() {
        let (mut commit, _) = commit(200, 20);
        assert_eq!(commit.commit_piece(None).unwrap(), CommitOutcome::Piece);
        let parts = commit.parts();
        assert_eq!(commit.commit_piece(Some(90 * MIB)).unwrap(), CommitOutcome::Short);
        assert_eq!(commit.parts(), parts);
        assert_eq!(commit.commit_piece(Some(200 * MIB)).unwrap(), CommitOutcome::Piece);
        assert!(commit.parts() > parts);
    }

    #[test]
    fn a_system_that_refuses_is_believed() {
        let refuse = || Box::new(|_| Err(std::io::ErrorKind::OutOfMemory.into())) as ChangeBlocks;
        let memory = BlockMemory { commit: refuse(), release: refuse() };
        let commit = KvPoolMemory::new(vec![Some(memory)], &[spec(3)], &[CacheGroup::FULL], (48, 16));
        let mut commit = commit.unwrap();
        assert!(matches!(commit.commit_piece(None), Err(KvShortage::System(_))));
        assert_eq!(commit.parts(), 0);
    }

    #[test]
    fn cache_grows_and_shrinks_to_its_target() {
        // A context of 4,096 positions, of which 2,048 are there at first.
        let (mut commit, changes) = commit(2048, 256);
        commit.begin_to_grow(|| Some(1 << 40)).unwrap();
        let committed = |commit: &KvPoolMemory| blocks_committed(2048, commit.parts());
        assert_eq!((committed(&commit), n_blocks(&changes.lock().unwrap()[0])), (128, 128));
        assert_eq!(commit.commit_piece(Some(1 << 40)).unwrap(), CommitOutcome::Enough);
        commit.set_target(KV_PARTS / 8).unwrap();
        assert_eq!(commit.commit_to_target(|| Some(1 << 40)).unwrap(), CommitOutcome::Enough);
        assert_eq!(committed(&commit), 256);
        commit.set_target(KV_PARTS / 32).unwrap();
        assert_eq!((committed(&commit), changes.lock().unwrap()[1].last().cloned()), (64, Some(64..256)));
        // What was given back is committed again.
        commit.set_target(KV_PARTS / 16).unwrap();
        assert_eq!(commit.commit_to_target(|| Some(1 << 40)).unwrap(), CommitOutcome::Enough);
        assert_eq!(changes.lock().unwrap()[0].last(), Some(&(96..128)));
        assert_eq!(n_blocks(&changes.lock().unwrap()[0]), 128 + 128 + 64);
    }

    #[test]
    fn a_cache_that_grows_needs_room_for_a_context_when_it_begins_and_is_never_an_error_later() {
        let (mut refused, changes) = commit(2048, 256);
        let error = refused.begin_to_grow(|| Some(200 * MIB)).unwrap_err().to_string();
        assert!(error.contains(&format!("needs {} more bytes", 256 * MIB)), "{error}");
        assert!(changes.lock().unwrap()[0].is_empty());
        let (mut commit, _) = commit(2048, 256);
        commit.begin_to_grow(|| Some(400 * MIB)).unwrap();
        commit.set_target(KV_PARTS).unwrap();
        let parts = commit.parts();
        assert_eq!(commit.commit_piece(Some(0)).unwrap(), CommitOutcome::Short);
        assert_eq!(commit.parts(), parts);
    }
}
