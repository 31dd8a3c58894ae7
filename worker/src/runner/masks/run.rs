//! Masks of consecutive draws, and the tokens between them. Has no knowledge of grammars.

use types::Token;

/// `mask 0 · token 0 · mask 1 · token 1 · .. · the last mask`
///
/// Each mask is for the draw behind the log and the tokens before it.
#[derive(Debug, Default)]
pub(super) struct MaskSeries {
    /// The number of the first draw; the output's first token has number 0. None without a mask.
    of: Option<u32>,
    tokens: Vec<Token>,
    words: Vec<u32>,
    words_each: usize,
}

impl MaskSeries {
    /// Creates a run with room for this many tokens.
    pub fn with_room(n_tokens: usize) -> MaskSeries {
        MaskSeries { tokens: Vec::with_capacity(n_tokens), ..MaskSeries::default() }
    }

    pub fn begin(&mut self, of: u32, mask: &[u32]) {
        self.tokens.clear();
        self.words.clear();
        self.words.extend_from_slice(mask);
        (self.of, self.words_each) = (Some(of), mask.len());
    }

    /// Adds the mask behind one more token.
    pub fn push(&mut self, token: Token, mask: &[u32]) {
        self.tokens.push(token);
        self.words.extend_from_slice(mask);
    }

    /// Keeps the masks behind the log and behind the first `n_tokens`.
    pub fn cut(&mut self, n_tokens: usize) {
        self.tokens.truncate(n_tokens);
        self.words.truncate((1 + n_tokens) * self.words_each);
    }

    pub fn forget(&mut self) {
        self.of = None;
    }

    pub fn is_of(&self, draw: u32) -> bool {
        self.of == Some(draw)
    }

    /// Returns how many of these tokens match the tokens between the masks, from the first one.
    pub fn n_matching(&self, tokens: &[Token]) -> usize {
        self.tokens.iter().zip(tokens).take_while(|(one, other)| one == other).count()
    }

    /// Returns the mask behind the first `n_tokens`.
    pub fn mask_after(&self, n_tokens: usize) -> Option<&[u32]> {
        self.of.filter(|_| n_tokens <= self.tokens.len())?;
        self.words.chunks_exact(self.words_each.max(1)).nth(n_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_found_by_the_tokens_before_them() {
        let mut run = MaskSeries::with_room(4);
        assert_eq!((run.mask_after(0), run.is_of(0)), (None, false));
        run.begin(7, &[1, 2]);
        run.push(50, &[3, 4]);
        run.push(51, &[5, 6]);
        let all = (run.mask_after(0), run.mask_after(1), run.mask_after(2), run.mask_after(3));
        assert_eq!(all, (Some(&[1, 2][..]), Some(&[3, 4][..]), Some(&[5, 6][..]), None));
        assert_eq!((run.n_matching(&[50, 52]), run.n_matching(&[50, 51, 52]), run.n_matching(&[])), (1, 2, 0));
        run.cut(1);
        assert_eq!((run.mask_after(1), run.mask_after(2)), (Some(&[3, 4][..]), None));
        run.forget();
        assert_eq!((run.mask_after(0), run.is_of(7)), (None, false));
    }
}
