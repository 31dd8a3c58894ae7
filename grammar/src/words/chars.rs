//! Sets of characters as ranges. Knows nothing of expressions.

/// Sorted ranges that do not touch, without surrogates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CharSet(Vec<(u32, u32)>);

const LAST: u32 = char::MAX as u32;

impl CharSet {
    pub(crate) fn of(ranges: impl IntoIterator<Item = (u32, u32)>) -> CharSet {
        let mut ranges: Vec<(u32, u32)> = ranges.into_iter().filter(|(from, to)| from <= to).collect();
        ranges.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::with_capacity(ranges.len());
        for (from, to) in ranges {
            match merged.last_mut() {
                Some(last) if from <= last.1.saturating_add(1) => last.1 = last.1.max(to),
                _ => merged.push((from, to)),
            }
        }
        CharSet(merged)
    }

    pub(crate) fn single(c: char) -> CharSet {
        CharSet(vec![(c as u32, c as u32)])
    }

    pub(crate) fn all() -> CharSet {
        CharSet(vec![(0, LAST)])
    }

    pub(crate) fn union(&self, other: &CharSet) -> CharSet {
        CharSet::of(self.0.iter().chain(&other.0).copied())
    }

    pub(crate) fn negated(&self) -> CharSet {
        let mut left = Vec::with_capacity(self.0.len() + 1);
        let mut next = 0;
        for &(from, to) in &self.0 {
            if from > next {
                left.push((next, from - 1));
            }
            next = to + 1;
        }
        if next <= LAST {
            left.push((next, LAST));
        }
        CharSet(left)
    }

    pub(crate) fn minus(&self, other: &CharSet) -> CharSet {
        self.negated().union(other).negated()
    }

    pub(crate) fn has(&self, c: char) -> bool {
        self.0.iter().any(|(from, to)| (*from..=*to).contains(&(c as u32)))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn ranges(&self) -> &[(u32, u32)] {
        &self.0
    }

    /// As a class of the engine's syntax, which skips surrogates by itself if no end of a range is one.
    pub(crate) fn class(&self) -> String {
        const SURROGATES: (u32, u32) = (0xd800, 0xdfff);
        let mut class = String::from("[");
        for &(from, to) in &self.0 {
            let from = if (SURROGATES.0..=SURROGATES.1).contains(&from) { SURROGATES.1 + 1 } else { from };
            let to = if (SURROGATES.0..=SURROGATES.1).contains(&to) { SURROGATES.0 - 1 } else { to };
            if from <= to {
                class += &format!("\\x{{{from:X}}}-\\x{{{to:X}}}");
            }
        }
        // A class without a member is no text at all.
        if class.len() == 1 { "[^\\x{0}-\\x{10FFFF}]".to_owned() } else { class + "]" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_are_joined_cut_and_negated() {
        let letters = CharSet::of([(b'a'.into(), b'f'.into()), (b'd'.into(), b'z'.into())]);
        assert_eq!(letters.ranges(), [(97, 122)]);
        assert_eq!(letters.minus(&CharSet::single('b')).ranges(), [(97, 97), (99, 122)]);
        assert_eq!(letters.negated().negated(), letters);
        assert!(CharSet::all().negated().is_empty());
        assert_eq!(CharSet::of([(0x61, 0x61), (0xd800, 0xe000)]).class(), "[\\x{61}-\\x{61}\\x{E000}-\\x{E000}]");
    }
}
