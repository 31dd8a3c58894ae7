//! Finds earlier occurrences of a log's last tokens: chains of positions behind the same few tokens, newest first, as
//! in compressors. Memory is proportional to the log. The cost of a search is bounded, however often tokens repeat.

use types::{NgramLimits, Token};

/// No position.
const NONE: u32 = u32::MAX;
/// The most earlier places that one search compares.
const LOOKS_MAX: usize = 32;
/// The most chains of a long log; more would only take memory.
const CHAINS_MAX: usize = 1 << 16;

#[derive(Debug, Default)]
pub(super) struct NgramIndex {
    least: usize,
    most: usize,
    /// The newest position of each chain, by the hash of the `least` tokens that end there.
    newest: Vec<u32>,
    /// The position before this one in its chain.
    before: Vec<u32>,
}

/// An earlier place whose tokens equal the last ones of the log.
struct Match {
    /// The position behind it.
    end: usize,
    /// The number of equal tokens, as far as they were compared.
    n_same: usize,
}

impl NgramIndex {
    pub fn restart(&mut self, limits: NgramLimits, n_tokens_max: usize) {
        self.least = usize::from(limits.least.max(1));
        self.most = usize::from(limits.most).max(self.least);
        let n_chains = n_tokens_max.next_power_of_two().clamp(64, CHAINS_MAX);
        self.newest.clear();
        self.newest.resize(n_chains, NONE);
        self.before.clear();
        self.before.reserve(n_tokens_max);
    }

    /// Adds the tokens of a log that the index lacks.
    pub fn extend(&mut self, log: &[Token]) {
        for end in self.before.len() + 1..=log.len() {
            let newest = end.checked_sub(self.least).map(|start| self.chain_of(&log[start..end]));
            let position = end as u32 - 1;
            let before = newest.map_or(NONE, |chain| std::mem::replace(&mut self.newest[chain], position));
            self.before.push(before);
        }
    }

    fn chain_of(&self, tokens: &[Token]) -> usize {
        let mix =
            |hash: u64, token: &Token| (hash ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        let hash = tokens.iter().fold(0x51ed_270b, mix);
        (hash >> 7) as usize & (self.newest.len() - 1)
    }

    /// Guesses the tokens behind the earlier place with the longest match; the newest one if several are equally long.
    /// Guesses no more tokens than match, because a short match seldom goes on for long. At the log's end the guess
    /// continues with itself, because a repetition is likely to go on.
    pub fn guess(&self, log: &[Token], n_max: usize, out: &mut Vec<Token>) {
        let Some(Match { end, n_same }) = self.longest_match(log) else { return };
        for at in end..end + n_max.min(n_same) {
            let token = log.get(at).or_else(|| out.get(at - log.len()));
            out.extend(token.copied());
        }
    }

    /// Returns the earlier place that matches the log's end for longest.
    fn longest_match(&self, log: &[Token]) -> Option<Match> {
        let last = log.len().checked_sub(1)?;
        let (mut best, mut n_best) = (None, self.least - 1);
        let mut at = *self.before.get(last)?;
        for _ in 0..LOOKS_MAX {
            if at == NONE || n_best >= self.most {
                break;
            }
            let end = at as usize + 1;
            let pairs = log[..end].iter().rev().zip(log.iter().rev());
            let n_same = pairs.take(self.most).take_while(|(one, other)| one == other).count();
            if n_same > n_best {
                (best, n_best) = (Some(Match { end, n_same }), n_same);
            }
            at = self.before[at as usize];
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guessed(log: &[Token], least: u16, most: u16, n_max: usize) -> Vec<Token> {
        let mut index = NgramIndex::default();
        index.restart(NgramLimits { least, most }, 100);
        // In pieces, as a log grows.
        (1..=log.len()).for_each(|n| index.extend(&log[..n]));
        let mut out = Vec::new();
        index.guess(log, n_max, &mut out);
        out
    }

    #[test]
    fn what_followed_the_same_tokens_is_guessed() {
        assert_eq!(guessed(&[8, 2, 3, 4, 5, 9, 8, 2, 3], 2, 4, 3), [4, 5, 9]);
        assert_eq!(guessed(&[1, 2, 3, 4, 5, 9, 2, 3], 2, 4, 3), [4, 5], "no more than match");
        assert!(
            guessed(&[1, 2, 3, 4, 5, 9, 2, 3], 3, 4, 3).is_empty(),
            "two tokens are the same, and three are required"
        );
        assert!(guessed(&[1, 2, 3], 1, 4, 3).is_empty());
        assert!(guessed(&[], 1, 4, 3).is_empty());
    }

    #[test]
    fn the_longest_place_is_taken_and_of_equal_ones_the_newest() {
        let log = [1, 2, 3, 10, 9, 2, 3, 11, 8, 2, 3, 12, 1, 2, 3];
        assert_eq!(guessed(&log, 2, 4, 1), [10], "three tokens are the same");
        assert_eq!(guessed(&log, 2, 2, 1), [12], "two are compared, and the newest match is at 12");
    }

    #[test]
    fn what_repeats_itself_is_guessed_to_go_on() {
        let log = [7, 1, 2, 3, 1, 2, 3, 1, 2, 3];
        assert_eq!(guessed(&log, 3, 8, 7), [1, 2, 3, 1, 2, 3]);
        assert_eq!(guessed(&[5; 20], 2, 8, 4), [5; 4]);
    }

    #[test]
    fn a_second_log_finds_nothing_of_the_first() {
        let mut index = NgramIndex::default();
        let mut out = Vec::new();
        for log in [[1, 2, 3, 1, 2, 3], [9, 8, 7, 6, 2, 3]] {
            index.restart(NgramLimits { least: 2, most: 4 }, 100);
            index.extend(&log);
            out.clear();
            index.guess(&log, 3, &mut out);
        }
        assert!(out.is_empty());
    }
}
