//! Which tokens may come next, a bit each. Knows nothing of grammars.

use types::Token;

/// A bit for each token of the vocabulary, the lowest bit of the first word for token 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
    n_vocab: usize,
}

impl TokenMask {
    /// Nothing is allowed.
    pub fn none(n_vocab: usize) -> TokenMask {
        TokenMask { words: vec![0; n_vocab.div_ceil(32)], n_vocab }
    }

    /// As the engine made it, cut to the vocabulary.
    pub(crate) fn set(&mut self, words: &[u32], n_vocab: usize) {
        self.n_vocab = n_vocab;
        self.words.clear();
        self.words.extend_from_slice(&words[..words.len().min(n_vocab.div_ceil(32))]);
        self.words.resize(n_vocab.div_ceil(32), 0);
        self.clear_padding_bits();
    }

    pub(crate) fn clear(&mut self, n_vocab: usize) {
        self.set(&[], n_vocab);
    }

    /// Everything is allowed, also rows of the embedding that no token stands for: as without a mask.
    pub(crate) fn allow_all(&mut self, n_vocab: usize) {
        self.words.clear();
        self.words.resize(n_vocab.div_ceil(32), u32::MAX);
        self.n_vocab = n_vocab;
        self.clear_padding_bits();
    }

    /// Forbids all but one.
    pub(crate) fn allow_only(&mut self, token: Token) {
        self.words.fill(0);
        if let Some(word) = self.words.get_mut(token as usize / 32) {
            *word = 1 << (token % 32);
        }
    }

    /// Forbids all but these.
    pub fn allow_only_these(&mut self, tokens: &[Token], n_vocab: usize) {
        self.clear(n_vocab);
        for token in tokens.iter().filter(|token| (**token as usize) < n_vocab) {
            self.words[*token as usize / 32] |= 1 << (token % 32);
        }
    }

    fn clear_padding_bits(&mut self) {
        let n_vocab = self.n_vocab;
        if let Some(last) = self.words.last_mut().filter(|_| !n_vocab.is_multiple_of(32)) {
            *last &= (1 << (n_vocab % 32)) - 1;
        }
    }

    pub fn allows(&self, token: Token) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    pub fn n_allowed(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The one token that is allowed, if there is just one.
    pub fn only(&self) -> Option<Token> {
        let mut tokens = self.tokens();
        let first = tokens.next()?;
        tokens.next().is_none().then_some(first)
    }

    pub fn tokens(&self) -> impl Iterator<Item = Token> {
        let in_word = |(i, &word): (usize, &u32)| {
            let mut left = word;
            std::iter::from_fn(move || {
                let bit = (left != 0).then(|| left.trailing_zeros())?;
                left &= left - 1;
                Some(i as u32 * 32 + bit)
            })
        };
        self.words.iter().enumerate().flat_map(in_word)
    }

    pub fn n_vocab(&self) -> usize {
        self.n_vocab
    }

    pub fn words(&self) -> &[u32] {
        &self.words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_counts_and_names_what_it_allows() {
        let mut mask = TokenMask::none(70);
        assert_eq!((mask.n_allowed(), mask.only()), (0, None));
        mask.set(&[0, 0, 1 << 5], 70);
        assert_eq!((mask.n_allowed(), mask.only(), mask.allows(69), mask.allows(68)), (1, Some(69), true, false));
        mask.set(&[1, 0, 1 << 5 | 1 << 6], 70);
        assert_eq!((mask.only(), mask.tokens().collect::<Vec<_>>()), (None, vec![0, 69]));
        mask.set(&[u32::MAX; 4], 70);
        assert_eq!((mask.n_allowed(), mask.allows(69), mask.allows(70), mask.allows(1000)), (70, true, false, false));
        mask.allow_only_these(&[3, 69, 70], 70);
        assert_eq!(mask.tokens().collect::<Vec<_>>(), [3, 69]);
    }
}
