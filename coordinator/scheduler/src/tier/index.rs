//! The names of the pages that the tier should have: a table of a fixed size, so that naming never allocates. A name
//! that others have pushed out is not found, and its page is computed. A name whose page is gone leads to a fetch that
//! misses, and is removed by it.

use alloc::vec;
use alloc::vec::Vec;
use types::{BlockHash, PageKey};

/// The places among which a name is looked for.
const WAYS: usize = 8;
/// The group of a place that is empty. No model has so many groups.
const EMPTY: PageKey = PageKey { group: u8::MAX, name: BlockHash([0; 16]) };

pub(crate) struct PageIndex {
    places: Vec<PageKey>,
    n_pushed_out: usize,
}

impl PageIndex {
    /// An index of at most so many names.
    pub fn new(n_names: u32) -> PageIndex {
        let n_sets = (n_names as usize).div_ceil(WAYS);
        let n_sets = if n_sets == 0 { 0 } else { n_sets.next_power_of_two() };
        PageIndex { places: vec![EMPTY; n_sets * WAYS], n_pushed_out: 0 }
    }

    /// Whether it has no places, because there is no tier.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    pub fn has(&self, key: &PageKey) -> bool {
        self.set(key).is_some_and(|set| self.places[set..set + WAYS].contains(key))
    }

    /// Returns whether it is new.
    pub fn insert(&mut self, key: PageKey) -> bool {
        let Some(set) = self.set(&key).filter(|_| !self.has(&key)) else { return false };
        let empty = self.places[set..set + WAYS].iter().position(|place| *place == EMPTY);
        let at = empty.unwrap_or_else(|| {
            self.n_pushed_out += 1;
            self.n_pushed_out % WAYS
        });
        self.places[set + at] = key;
        true
    }

    pub fn remove(&mut self, key: &PageKey) {
        let Some(set) = self.set(key) else { return };
        let places = self.places[set..set + WAYS].iter_mut();
        places.filter(|place| *place == key).for_each(|place| *place = EMPTY);
    }

    /// Returns the first of the places of a name; none in an index without places.
    fn set(&self, key: &PageKey) -> Option<usize> {
        let n_sets = self.places.len() / WAYS;
        // The pages of all groups have one name, and would fill a set.
        let spread = u64::from(key.group).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (n_sets > 0).then(|| (key.name.short().wrapping_add(spread) as usize & (n_sets - 1)) * WAYS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(group: u8, n: u8) -> PageKey {
        PageKey { group, name: BlockHash([n; 16]) }
    }

    #[test]
    fn names_are_found_until_they_are_removed_or_pushed_out() {
        let mut index = PageIndex::new(WAYS as u32);
        assert!(index.insert(key(0, 1)) && !index.insert(key(0, 1)) && index.insert(key(1, 1)));
        assert!(index.has(&key(0, 1)) && index.has(&key(1, 1)) && !index.has(&key(2, 1)));
        index.remove(&key(0, 1));
        assert!(!index.has(&key(0, 1)) && index.has(&key(1, 1)));
        (2..2 + WAYS as u8).for_each(|n| assert!(index.insert(key(0, n))));
        let n_found = (1..2 + WAYS as u8).flat_map(|n| [key(0, n), key(1, n)]).filter(|key| index.has(key)).count();
        assert_eq!(n_found, WAYS);
    }

    #[test]
    fn names_of_many_groups_do_not_push_each_other_out() {
        let mut index = PageIndex::new(1024);
        // These names alone would be in one set.
        let alike = |n| BlockHash([0, 0, 0, 0, 0, 0, 0, n, n, n, n, n, n, n, n, n]);
        let of_group = |group| (0..4).map(move |n| PageKey { group, name: alike(n) });
        let keys: Vec<PageKey> = (0..8).flat_map(of_group).collect();
        assert!(keys.iter().all(|&key| index.insert(key)) && keys.iter().all(|key| index.has(key)));
    }

    #[test]
    fn an_index_without_places_has_nothing() {
        let mut index = PageIndex::new(0);
        assert!(!index.insert(key(0, 1)) && !index.has(&key(0, 1)));
        index.remove(&key(0, 1));
    }
}
