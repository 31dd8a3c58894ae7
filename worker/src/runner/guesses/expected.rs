//! The answer that a client expects, and its recent answers, placed in front of the log, so that one search finds
//! places in all of them.

use types::{Request, Token};

#[derive(Debug, Default)]
pub(super) struct ExpectedTokens {
    /// `recent · expected · log`. Empty if the client expects nothing and has no recent answers.
    tokens: Vec<Token>,
    n_recent: usize,
    n_expected: usize,
    n_prompt: usize,
}

impl ExpectedTokens {
    /// Restarts for a log of up to `n_tokens_max` tokens. Returns the most tokens of all together.
    pub fn restart(&mut self, request: &Request, recent: &[Token], n_tokens_max: usize) -> usize {
        self.tokens.clear();
        (self.n_recent, self.n_expected) = (recent.len(), request.predicted.len());
        self.n_prompt = request.prompt.len();
        if self.n_before() == 0 {
            return n_tokens_max;
        }
        self.tokens.reserve(self.n_before() + n_tokens_max);
        self.tokens.extend_from_slice(recent);
        self.tokens.extend_from_slice(&request.predicted);
        self.n_before() + n_tokens_max
    }

    /// Returns the number of tokens before the log.
    fn n_before(&self) -> usize {
        self.n_recent + self.n_expected
    }

    /// Returns recent answers and the expected one, followed by the log.
    pub fn joined_with<'a>(&'a mut self, log: &'a [Token]) -> &'a [Token] {
        if self.n_before() == 0 {
            return log;
        }
        let n_known = self.tokens.len() - self.n_before();
        self.tokens.extend_from_slice(log.get(n_known..).unwrap_or_default());
        &self.tokens
    }

    /// Returns the expected tokens behind the log, while the answer matches the expected one.
    pub fn next(&self, log: &[Token]) -> &[Token] {
        if self.n_expected == 0 {
            return &[];
        }
        let expected = &self.tokens[self.n_recent..self.n_before()];
        let answer = log.get(self.n_prompt..).unwrap_or_default();
        expected.strip_prefix(answer).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_expected_goes_on_until_the_answer_differs() {
        let request = Request { prompt: vec![9, 8], predicted: vec![1, 2, 3], ..Request::default() };
        let mut expected = ExpectedTokens::default();
        assert_eq!(expected.restart(&request, &[], 10), 13);
        assert_eq!(expected.joined_with(&[9, 8]), [1, 2, 3, 9, 8]);
        assert_eq!(expected.next(&[9, 8]), [1, 2, 3]);
        assert_eq!(expected.joined_with(&[9, 8, 1, 2]), [1, 2, 3, 9, 8, 1, 2]);
        assert_eq!(expected.next(&[9, 8, 1]), [2, 3]);
        assert_eq!(expected.next(&[9, 8, 1, 2, 3]), [] as [Token; 0]);
        assert_eq!(expected.next(&[9, 8, 2]), [] as [Token; 0]);
        // The next sequence expects nothing, so the log is all there is.
        let unexpected = Request { predicted: Vec::new(), ..request.clone() };
        assert_eq!(expected.restart(&unexpected, &[], 10), 10);
        assert_eq!(expected.joined_with(&[9]), [9]);
        assert_eq!(expected.next(&[9]), [] as [Token; 0]);
        // A search finds recent answers, and none of them is expected from its beginning.
        assert_eq!(expected.restart(&unexpected, &[5, 6], 10), 12);
        assert_eq!(expected.joined_with(&[9, 8]), [5, 6, 9, 8]);
        assert_eq!(expected.next(&[9, 8]), [] as [Token; 0]);
        assert_eq!(expected.restart(&request, &[5, 6], 10), 15);
        assert_eq!(expected.joined_with(&[9, 8, 1]), [5, 6, 1, 2, 3, 9, 8, 1]);
        assert_eq!(expected.next(&[9, 8, 1]), [2, 3]);
    }
}
