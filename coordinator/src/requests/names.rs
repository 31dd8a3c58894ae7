//! How routers learn the names that the cache has gained and lost: as differences; and in pieces as a whole, if they
//! are new or have missed some.

use scheduler::BlockNameChange;

/// How many blocks' names a beat carries for a router that has to learn them all.
pub(crate) const BLOCKS_RECITED_MAX: u32 = 4096;

/// The changes since the last beat. Reused for its memory.
#[derive(Default)]
pub(crate) struct BlockNameChanges {
    pub raw: Vec<BlockNameChange>,
    pub added: Vec<u64>,
    pub dropped: Vec<u64>,
}

impl BlockNameChanges {
    /// Reduces all changes to their outcome: for each name the last change counts. The order among names does not.
    pub fn fold(&mut self) {
        // Stable, so that each name's last change stays its last.
        self.raw.sort_by_key(|change| change.name);
        self.added.clear();
        self.dropped.clear();
        for of_name in self.raw.chunk_by(|a, b| a.name == b.name) {
            match of_name.last() {
                Some(BlockNameChange { name, is_added: true }) => self.added.push(*name),
                Some(BlockNameChange { name, is_added: false }) => self.dropped.push(*name),
                None => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_name_the_last_change_counts() {
        let raw = [(3, true), (1, true), (3, false), (2, false), (1, false), (1, true)];
        let raw = raw.map(|(name, is_added)| BlockNameChange { name, is_added }).to_vec();
        let mut changes = BlockNameChanges { raw, ..BlockNameChanges::default() };
        changes.fold();
        assert_eq!((changes.added.as_slice(), changes.dropped.as_slice()), ([1].as_slice(), [2, 3].as_slice()));
    }
}
