//! Drops the logprobs of thoughts that a client does not receive: they name the thoughts' tokens. Knows no dialect.

use dialect::AnswerPiece;
use proto::v1;

/// The content that a token reveals: the strongest kind of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum TokenContent {
    /// The token is markup, or its text is held back.
    #[default]
    Nothing,
    Answer,
    Thought,
}

impl TokenContent {
    pub fn of(piece: &AnswerPiece) -> TokenContent {
        match piece {
            AnswerPiece::Reasoning(_) => TokenContent::Thought,
            _ => TokenContent::Answer,
        }
    }
}

/// The logprobs of an answer with hidden thoughts.
#[derive(Default)]
pub struct HiddenThoughts {
    /// What was read since the last token was sent or dropped.
    pub content: TokenContent,
    /// Logprobs of tokens that may still turn out to belong to a thought.
    held: Vec<v1::Logprob>,
    is_in_thought: bool,
}

impl HiddenThoughts {
    /// Adds a token's logprob, and returns those that certainly belong to the answer. `in_thought`: a thought continues
    /// after this token.
    pub fn push_logprob(&mut self, own: Option<v1::Logprob>, in_thought: bool, is_over: bool) -> Vec<v1::Logprob> {
        self.held.extend(own);
        match std::mem::take(&mut self.content) {
            TokenContent::Thought => {
                self.is_in_thought = in_thought;
                self.held.clear();
            }
            TokenContent::Answer => self.is_in_thought = false,
            TokenContent::Nothing if self.is_in_thought && !in_thought => {
                // Tokens that close the thought belong to the thought.
                self.is_in_thought = false;
                self.held.clear();
            }
            TokenContent::Nothing if is_over && !self.is_in_thought => {}
            TokenContent::Nothing => return Vec::new(),
        }
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn undecided_logprobs_come_with_the_answer_or_never() {
        let visible_ids = |all: &[(TokenContent, bool)]| {
            let mut hidden = HiddenThoughts::default();
            let numbered = (0..).zip(all);
            let logprobs = numbered.flat_map(|(token_id, (content, in_thought))| {
                hidden.content = *content;
                let own = v1::Logprob { token_id, ..v1::Logprob::default() };
                hidden.push_logprob(Some(own), *in_thought, token_id as usize + 1 == all.len())
            });
            logprobs.map(|logprob| logprob.token_id).collect::<Vec<_>>()
        };
        use TokenContent::{Answer, Nothing, Thought};
        let (thought, out, shown) = ((Thought, true), (Nothing, false), (Answer, false));
        let inside = (Nothing, true);
        // The token that closes a thought is not sent. Tokens held behind it are sent with the answer.
        assert_eq!(visible_ids(&[out, thought, inside, thought, out, shown, out]), [5, 6]);
        assert_eq!(visible_ids(&[thought, inside, inside, out, out, out, shown]), [4, 5, 6]);
        // Here the thought ends with its last token.
        assert_eq!(visible_ids(&[(Thought, false), out, shown]), [1, 2]);
        assert_eq!(visible_ids(&[shown, out, thought, inside]), [0]);
        assert_eq!(visible_ids(&[thought, inside]), [0; 0]);
        assert_eq!(visible_ids(&[out]), [0]);
    }
}
