//! Commits the memory of a rank's KV cache piece by piece, so that a machine which lacks it says so instead of killing
//! a process that serves. Knows no thread and no stream: the session calls it, and says how far it is.

use backend::{CommitBlocks, KvSpec};
use std::ops::Range;
use types::{CacheGroup, KV_PARTS, blocks_committed};

/// The memory of one piece, of which a machine whose cores are all busy takes a tenth of a second to give it.
const PIECE_BYTES: u64 = 32 << 20;
/// What is left to the rest of the machine.
const KEPT_FREE: u64 = 64 << 20;

pub struct KvCommit {
    pools: Vec<CommittedPool>,
    /// How much of each pool there is memory for.
    parts: u32,
    /// The least that serves: one context.
    parts_min: u32,
    /// Taken at each piece.
    parts_each: u32,
    context: u32,
}

/// A cache group's pool and what has the system give its memory; None if it has.
struct CommittedPool {
    n_blocks: u32,
    block_bytes: u64,
    commit: Option<CommitBlocks>,
}

/// Why a machine does not give the memory that was planned.
#[derive(Debug, thiserror::Error)]
pub enum KvShort {
    #[error(
        "the KV cache needs {needed} more bytes for one context of {context} tokens and this machine has {left} to \
         give: ask for a shorter --context, or leave this machine more memory"
    )]
    Context { context: u32, needed: u64, left: u64 },
    #[error("the system does not give the memory of the KV cache: {0}")]
    System(#[from] std::io::Error),
}

/// What came of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Committed {
    /// It is there, and there is more to commit.
    Piece,
    All,
    /// The machine has no memory for another piece at this moment. What is committed is enough to serve.
    Short,
}

impl KvCommit {
    /// None if the system has given all.
    pub(super) fn new(
        commits: Vec<Option<CommitBlocks>>,
        specs: &[KvSpec],
        groups: &[CacheGroup],
        (context, slice_max): (u32, u32),
    ) -> Option<KvCommit> {
        let pool = |(commit, spec): (Option<CommitBlocks>, &KvSpec)| CommittedPool {
            n_blocks: spec.n_blocks as u32,
            block_bytes: spec.block_bytes(),
            commit,
        };
        let pools: Vec<CommittedPool> = commits.into_iter().zip(specs).map(pool).collect();
        let n_bytes: u64 = pools.iter().map(CommittedPool::n_bytes).sum();
        let parts_each = u64::from(KV_PARTS) * PIECE_BYTES / n_bytes.max(PIECE_BYTES);
        let of_context =
            |(pool, group): (&CommittedPool, &CacheGroup)| pool.parts_of(group.n_held_max(context, slice_max));
        let parts_min = pools.iter().zip(groups).map(of_context).max().unwrap_or(0);
        let commit = KvCommit { parts: 0, parts_min, parts_each: parts_each.max(1) as u32, context, pools };
        (n_bytes > 0 && !commit.pools.is_empty()).then_some(commit)
    }

    /// How much of each pool there is memory for.
    pub fn parts(&self) -> u32 {
        self.parts
    }

    pub fn n_bytes(&self) -> u64 {
        self.bytes_of(0..KV_PARTS)
    }

    pub fn committed_bytes(&self) -> u64 {
        self.bytes_of(0..self.parts)
    }

    /// Commits another piece, if the machine has so much `left` and something to spare. None: nobody knows what it has.
    pub fn go_on(&mut self, left: Option<u64>) -> Result<Committed, KvShort> {
        let piece = self.parts..(self.parts + self.parts_each).min(KV_PARTS);
        let needed = self.bytes_of(piece.clone());
        if let Some(left) = left.filter(|left| *left < needed + KEPT_FREE) {
            return self.short(left);
        }
        for pool in &self.pools {
            if let Some(commit) = &pool.commit {
                commit(pool.blocks(&piece))?;
            }
        }
        self.parts = piece.end;
        Ok(if self.parts == KV_PARTS { Committed::All } else { Committed::Piece })
    }

    /// Commits all, or as much as the machine gives.
    pub fn go_on_to_the_end(&mut self, left: impl Fn() -> Option<u64>) -> Result<Committed, KvShort> {
        loop {
            match self.go_on(left())? {
                Committed::Piece => {}
                ended => return Ok(ended),
            }
        }
    }

    fn short(&self, left: u64) -> Result<Committed, KvShort> {
        if self.parts >= self.parts_min {
            return Ok(Committed::Short);
        }
        let needed = self.bytes_of(self.parts..self.parts_min);
        Err(KvShort::Context { context: self.context, needed, left: left.saturating_sub(KEPT_FREE) })
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

    /// `[0, parts.start) there already · [parts.start, parts.end) these · the rest`
    fn blocks(&self, parts: &Range<u32>) -> Range<u32> {
        blocks_committed(self.n_blocks, parts.start)..blocks_committed(self.n_blocks, parts.end)
    }

    /// The parts that are at least so many blocks, or all.
    fn parts_of(&self, n_blocks: u32) -> u32 {
        let parts = (u64::from(n_blocks) * u64::from(KV_PARTS)).div_ceil(u64::from(self.n_blocks.max(1)));
        parts.min(KV_PARTS.into()) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use types::{KvDtype, KvLayout};

    /// A block of 1 MiB.
    fn spec(n_blocks: usize) -> KvSpec {
        KvSpec { n_layers: 1, n_blocks, layout: KvLayout::heads(256, 64), dtype: KvDtype::F16 }
    }

    type Asked = Arc<Mutex<Vec<Range<u32>>>>;

    /// The commit of one pool, for a context of so many blocks, and what it asked the system for.
    fn commit(n_blocks: usize, context: u32) -> (KvCommit, Asked) {
        let asked = Asked::default();
        let log = asked.clone();
        let ask: CommitBlocks = Box::new(move |blocks| {
            log.lock().unwrap().push(blocks);
            Ok(())
        });
        let commit = KvCommit::new(vec![Some(ask)], &[spec(n_blocks)], &[CacheGroup::FULL], (context * 16, 16));
        (commit.unwrap(), asked)
    }

    const MIB: u64 = 1 << 20;

    #[test]
    fn where_nobody_hears_of_parts_all_blocks_are_committed_at_once() {
        let (mut commit, asked) = commit(200, 10);
        assert_eq!(commit.go_on_to_the_end(|| Some(1 << 40)).unwrap(), Committed::All);
        assert_eq!(asked.lock().unwrap().iter().map(|blocks| blocks.len()).sum::<usize>(), 200);
        // A machine that lacks some gives what it has, as long as that is enough for one context.
        let (mut commit, asked) = self::commit(200, 10);
        let left =
            || Some(((120 - asked.lock().unwrap().iter().map(|blocks| blocks.len()).sum::<usize>()) as u64) * MIB);
        assert_eq!(commit.go_on_to_the_end(left).unwrap(), Committed::Short);
        assert!((10..120).contains(&(commit.committed_bytes() / MIB)), "{}", commit.committed_bytes());
    }

    #[test]
    fn every_block_is_committed_once_in_pieces_before_it_is_said_to_be() {
        let (mut commit, asked) = commit(200, 10);
        assert_eq!((commit.n_bytes(), commit.committed_bytes(), commit.parts()), (200 * MIB, 0, 0));
        let mut n_pieces = 0;
        loop {
            n_pieces += 1;
            let went = commit.go_on(Some(1 << 40)).unwrap();
            let n_asked: u64 = asked.lock().unwrap().iter().map(|blocks| blocks.len() as u64).sum();
            assert_eq!(commit.committed_bytes(), n_asked * MIB);
            assert_eq!(blocks_committed(200, commit.parts()), n_asked as u32);
            if went == Committed::All {
                break;
            }
        }
        let asked = asked.lock().unwrap();
        assert!((6..=8).contains(&n_pieces), "{n_pieces} pieces of 32 MiB");
        assert!(asked.windows(2).all(|pair| pair[0].end == pair[1].start), "{asked:?}");
        assert_eq!((asked[0].start, asked[asked.len() - 1].end), (0, 200));
    }

    #[test]
    fn a_machine_without_memory_for_a_context_is_told_how_much_it_lacks() {
        let (mut commit, asked) = commit(200, 100);
        assert_eq!(commit.go_on(Some(200 * MIB)).unwrap(), Committed::Piece);
        let error = commit.go_on(Some(90 * MIB)).unwrap_err().to_string();
        let n_missing = 100 - u64::from(asked.lock().unwrap()[0].end);
        assert!(error.contains(&format!("needs {} more bytes", n_missing * MIB)), "{error}");
        assert!(error.contains(&format!("has {} to give", 26 * MIB)) && error.contains("1600 tokens"), "{error}");
        assert_eq!(asked.lock().unwrap().len(), 1, "nothing was asked of a system that has nothing");
    }

    #[test]
    fn behind_a_context_less_is_promised_and_more_when_there_is_more() {
        let (mut commit, _) = commit(200, 20);
        assert_eq!(commit.go_on(None).unwrap(), Committed::Piece);
        let parts = commit.parts();
        assert_eq!(commit.go_on(Some(90 * MIB)).unwrap(), Committed::Short);
        assert_eq!(commit.parts(), parts);
        assert_eq!(commit.go_on(Some(200 * MIB)).unwrap(), Committed::Piece);
        assert!(commit.parts() > parts);
    }

    #[test]
    fn a_system_that_refuses_is_believed() {
        let refuse: CommitBlocks = Box::new(|_| Err(std::io::Error::from(std::io::ErrorKind::OutOfMemory)));
        let commit = KvCommit::new(vec![Some(refuse)], &[spec(3)], &[CacheGroup::FULL], (48, 16));
        let mut commit = commit.unwrap();
        assert!(matches!(commit.go_on(None), Err(KvShort::System(_))));
        assert_eq!(commit.parts(), 0);
    }
}
