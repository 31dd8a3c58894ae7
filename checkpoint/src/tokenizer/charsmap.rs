//! Checks SentencePiece's compiled map of characters before anything walks it: its reader indexes by numbers of the
//! file. `u32 bytes of the trie · trie of u32 units · replacements, each ending with a zero byte`

use crate::error::ParseError;

/// The bits of a unit, as SentencePiece's double array defines them.
fn offset_of(unit: u32) -> usize {
    ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize
}

fn has_leaf(unit: u32) -> bool {
    unit >> 8 & 1 == 1
}

fn label_of(unit: u32) -> u32 {
    unit & (1 << 31 | 0xff)
}

fn value_of(leaf: u32) -> usize {
    (leaf & !(1 << 31)) as usize
}

/// Whether every walk through the trie stays inside it, and ends at the beginning of a replacement.
pub(super) fn check(charsmap: &[u8]) -> Result<(), ParseError> {
    if is_sound(charsmap) {
        return Ok(());
    }
    ParseError::malformed("the map of characters (precompiled_charsmap) leads outside of itself")
}

fn is_sound(charsmap: &[u8]) -> bool {
    let Some((n_trie, rest)) = charsmap.split_first_chunk::<4>() else { return false };
    let Some((trie, replacements)) = rest.split_at_checked(u32::from_le_bytes(*n_trie) as usize) else { return false };
    let Ok(replacements) = std::str::from_utf8(replacements) else { return false };
    let (units, []) = trie.as_chunks::<4>() else { return false };
    let units: Vec<u32> = units.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
    let Some(root) = units.first() else { return false };
    let mut seen = vec![false; units.len()];
    // The places from which the next byte of a text is looked up.
    let mut places = vec![offset_of(*root)];
    while let Some(place) = places.pop() {
        // A byte changes the lowest eight bits of a place.
        if place | 0xff >= units.len() {
            return false;
        }
        if std::mem::replace(&mut seen[place], true) {
            continue;
        }
        for byte in 1..=0xff {
            let unit = units[place ^ byte];
            if label_of(unit) as usize != byte {
                continue;
            }
            let next = place ^ byte ^ offset_of(unit);
            let leaf = units.get(next);
            if has_leaf(unit) && !leaf.is_some_and(|leaf| replacements.is_char_boundary(value_of(*leaf))) {
                return false;
            }
            places.push(next);
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::is_sound;

    /// A map of `a` alone. Its unit is at 97, and `next` is where its value is.
    fn charsmap(next: u32, value: u32, replacements: &[u8]) -> Vec<u8> {
        let mut units = vec![0u32; 512];
        units[97] = ((97 ^ next) << 10) | 1 << 8 | 97;
        units[next as usize] = 1 << 31 | value;
        let units = units.iter().flat_map(|unit| unit.to_le_bytes());
        2048u32.to_le_bytes().into_iter().chain(units).chain(replacements.iter().copied()).collect()
    }

    #[test]
    fn a_map_that_leads_outside_is_refused() {
        let good = charsmap(256, 1, b"\0b\0");
        assert!(is_sound(&good));
        assert!(is_sound(&charsmap(256, 3, b"\0b\0")), "an empty replacement");
        assert!(!is_sound(&charsmap(256, 4, b"\0b\0")));
        assert!(!is_sound(&charsmap(256, 2, "\0é\0".as_bytes())), "inside of a character");
        assert!(!is_sound(&charsmap(256, 1, b"\0\xff\0")));
        let mut outside = good.clone();
        outside[4 + 97 * 4..][..4].copy_from_slice(&(1u32 << 20 | 1 << 8 | 97).to_le_bytes());
        assert!(!is_sound(&outside));
        for n_trie in [0, 1, 4, 2044, 4096, u32::MAX] {
            let mut cut = good.clone();
            cut[..4].copy_from_slice(&n_trie.to_le_bytes());
            assert!(!is_sound(&cut), "{n_trie}");
        }
        assert!(!is_sound(b"") && !is_sound(b"\0\0\0"));
    }
}
