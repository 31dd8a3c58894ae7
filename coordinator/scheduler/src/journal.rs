//! The changes among the names of blocks since the last read, in memory of a fixed size. A reader that reads too seldom
//! gets an error, and reads all names instead. Knows no blocks.

use alloc::vec::Vec;

/// More than some steps can name and drop together.
const CHANGES_MAX: usize = 4096;

/// A block's shortened name that was added or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockNameChange {
    pub name: u64,
    pub is_added: bool,
}

pub(crate) struct BlockNameJournal {
    changes: Vec<BlockNameChange>,
    /// Changes are missing: the first read comes late, or the last one is too long ago.
    is_torn: bool,
}

impl BlockNameJournal {
    pub fn new() -> BlockNameJournal {
        BlockNameJournal { changes: Vec::with_capacity(CHANGES_MAX), is_torn: true }
    }

    pub fn note(&mut self, name: u64, is_added: bool) {
        if self.is_torn {
            return;
        }
        if self.changes.len() == CHANGES_MAX {
            self.changes.clear();
            self.is_torn = true;
            return;
        }
        self.changes.push(BlockNameChange { name, is_added });
    }

    /// Returns the changes since the last read, in order. False: some are missing; from now on they are complete again.
    pub fn take(&mut self, out: &mut Vec<BlockNameChange>) -> bool {
        out.clear();
        out.append(&mut self.changes);
        !core::mem::replace(&mut self.is_torn, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_looked_at_for_too_long_is_torn_and_whole_again_after_a_look() {
        let (mut journal, mut seen) = (BlockNameJournal::new(), Vec::new());
        journal.note(1, true);
        assert!(!journal.take(&mut seen) && seen.is_empty(), "changes before the first look are unknown");
        journal.note(1, true);
        journal.note(1, false);
        assert!(journal.take(&mut seen));
        assert_eq!(
            seen.iter().map(|change| (change.name, change.is_added)).collect::<Vec<_>>(),
            [(1, true), (1, false)]
        );
        let capacity = journal.changes.capacity();
        (0..=CHANGES_MAX as u64).for_each(|name| journal.note(name, true));
        assert!(!journal.take(&mut seen) && seen.is_empty());
        assert_eq!(journal.changes.capacity(), capacity);
        journal.note(7, true);
        assert!(journal.take(&mut seen) && seen.len() == 1);
    }
}
