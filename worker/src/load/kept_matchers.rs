//! Compiled grammars of one vocabulary, each at the start of an answer: the next request with the same grammar begins
//! with a copy. Has no knowledge of requests or threads.

use grammar::Matcher;
use std::collections::HashMap;
use types::Grammar;

/// How much is kept in addition to the running requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatcherCacheLimits {
    pub grammars_max: usize,
    /// Bytes of texts and compiled grammars together, as far as the engine reports them.
    pub bytes_max: usize,
}

impl Default for MatcherCacheLimits {
    fn default() -> Self {
        MatcherCacheLimits { grammars_max: 256, bytes_max: 64 << 20 }
    }
}

/// The grammars that were used last.
#[derive(Default)]
pub(super) struct MatcherCache {
    limits: MatcherCacheLimits,
    kept: HashMap<Grammar, CachedMatcher>,
    n_bytes: usize,
    n_uses: u64,
}

struct CachedMatcher {
    matcher: Matcher,
    n_bytes: usize,
    /// The number of its last use.
    used: u64,
}

impl MatcherCache {
    /// Returns a matcher at the start of an answer, or None if this grammar is not kept.
    pub fn copy_of(&mut self, grammar: &Grammar) -> Option<Matcher> {
        self.n_uses += 1;
        let kept = self.kept.get_mut(grammar)?;
        kept.used = self.n_uses;
        kept.matcher.copy()
    }

    /// Keeps a matcher at the start of an answer. If there is no room, it drops the least recently used ones.
    pub fn keep(&mut self, grammar: &Grammar, matcher: Matcher) {
        self.n_uses += 1;
        let n_bytes = matcher.n_bytes() + grammar.n_bytes();
        let kept = CachedMatcher { matcher, n_bytes, used: self.n_uses };
        self.n_bytes += n_bytes;
        // Two requests that came together have compiled the same grammar.
        if let Some(same) = self.kept.insert(grammar.clone(), kept) {
            self.n_bytes -= same.n_bytes;
        }
        while self.kept.len() > self.limits.grammars_max || self.n_bytes > self.limits.bytes_max {
            let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.used).map(|(grammar, _)| grammar.clone());
            let Some(gone) = oldest.and_then(|oldest| self.kept.remove(&oldest)) else { return };
            self.n_bytes -= gone.n_bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use grammar::{GrammarLimits, GrammarSpec, Vocabulary};

    fn compiled(text: &str) -> (Grammar, Matcher) {
        let words: Vec<[u8; 1]> = (0..=255).map(|byte| [byte]).collect();
        let words = words.iter().map(|word| (word.as_slice(), false));
        let vocabulary = Vocabulary::new(words, 257, &[256]).unwrap();
        let limits = GrammarLimits::default();
        let grammar = grammar::compile(&GrammarSpec::Choice(vec![text.into()]), &limits).unwrap();
        let matcher = Matcher::new(&vocabulary, &grammar, &limits).unwrap();
        (grammar, matcher)
    }

    #[test]
    fn what_was_used_longest_ago_goes_first_and_nothing_is_counted_twice() {
        let (a, of_a) = compiled("a");
        let (b, of_b) = compiled("b");
        let (c, of_c) = compiled("c");
        let of_one = of_a.n_bytes() + a.n_bytes();
        let of_two = of_one + of_c.n_bytes() + c.n_bytes();
        assert!(of_one > 2 * a.n_bytes(), "{of_one}");
        let limits = MatcherCacheLimits { grammars_max: 2, bytes_max: usize::MAX };
        let mut kept = MatcherCache { limits, ..MatcherCache::default() };
        let again = of_a.copy().unwrap();
        kept.keep(&a, of_a);
        kept.keep(&a, again);
        assert_eq!((kept.kept.len(), kept.n_bytes), (1, of_one));
        kept.keep(&b, of_b);
        assert!(kept.copy_of(&a).is_some());
        let copy = of_c.copy().unwrap();
        kept.keep(&c, of_c);
        assert_eq!([&a, &b, &c].map(|grammar| kept.kept.contains_key(grammar)), [true, false, true]);
        assert_eq!(kept.n_bytes, of_two);
        // The limit in bytes also rejects a single larger grammar.
        kept.limits.bytes_max = a.n_bytes();
        kept.keep(&c, copy);
        assert_eq!((kept.kept.len(), kept.n_bytes), (0, 0));
    }

    #[test]
    fn a_copy_begins_at_the_start_whatever_others_have_taken() {
        let (grammar, matcher) = compiled("ab");
        let mut kept = MatcherCache::default();
        kept.keep(&grammar, matcher);
        for _ in 0..2 {
            let mut copy = kept.copy_of(&grammar).unwrap();
            assert!(copy.accept(b'b'.into()).is_err());
            copy.accept(b'a'.into()).unwrap();
            copy.accept(b'b'.into()).unwrap();
        }
    }
}
