//! The answer that a client expects, placed in front of the log, so that one search finds places in both.

use types::{Request, Token};

#[derive(Debug, Default)]
pub(super) struct ExpectedTokens {
    /// `expected · log`. Empty if the client expects nothing.
    tokens: Vec<Token>,
    n_expected: usize,
    n_prompt: usize,
}

impl ExpectedTokens {
    /// Restarts for a log of up to `n_tokens_max` tokens. Returns the most tokens of both together.
    pub fn restart(&mut self, request: &Request, n_tokens_max: usize) -> usize {
        self.tokens.clear();
        (self.n_expected, self.n_prompt) = (request.predicted.len(), request.prompt.len());
        if self.n_expected == 0 {
            return n_tokens_max;
        }
        self.tokens.reserve(self.n_expected + n_tokens_max);
        self.tokens.extend_from_slice(&request.predicted);
        self.n_expected + n_tokens_max
    }

    /// Returns the expected answer followed by the log.
    pub fn joined_with<'a>(&'a mut self, log: &'a [Token]) -> &'a [Token] {
        if self.n_expected == 0 {
            return log;
        }
        let n_known = self.tokens.len() - self.n_expected;
        self.tokens.extend_from_slice(log.get(n_known..).unwrap_or_default());
        &self.tokens
    }

    /// Returns the expected tokens behind the log, while the answer matches the expected one.
    pub fn next(&self, log: &[Token]) -> &[Token] {
        let (expected, answer) = (&self.tokens[..self.n_expected], log.get(self.n_prompt..).unwrap_or_default());
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
        assert_eq!(expected.restart(&request, 10), 13);
        assert_eq!(expected.joined_with(&[9, 8]), [1, 2, 3, 9, 8]);
        assert_eq!(expected.next(&[9, 8]), [1, 2, 3]);
        assert_eq!(expected.joined_with(&[9, 8, 1, 2]), [1, 2, 3, 9, 8, 1, 2]);
        assert_eq!(expected.next(&[9, 8, 1]), [2, 3]);
        assert_eq!(expected.next(&[9, 8, 1, 2, 3]), [] as [Token; 0]);
        assert_eq!(expected.next(&[9, 8, 2]), [] as [Token; 0]);
        // The next sequence expects nothing, so the log is all there is.
        assert_eq!(expected.restart(&Request { predicted: Vec::new(), ..request }, 10), 10);
        assert_eq!(expected.joined_with(&[9]), [9]);
        assert_eq!(expected.next(&[9]), [] as [Token; 0]);
    }
}
