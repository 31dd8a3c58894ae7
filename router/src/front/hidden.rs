//! Drops the logprobs of thoughts that a client does not receive: they name the thoughts' tokens. Knows no dialect.

use dialect::Piece;
use proto::v1;

/// The content that a token reveals: the strongest kind of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Heard {
    /// The token is markup, or its text is held back.
    #[default]
    Nothing,
    Answer,
    Thought,
}

impl Heard {
    pub fn of(piece: &Piece) -> Heard {
        match piece {
            Piece::Reasoning(_) => Heard::Thought,
            _ => Heard::Answer,
        }
    }
}

/// The logprobs of an answer with hidden thoughts.
#[derive(Default)]
pub struct HiddenThoughts {
    /// What was read since the last token was sent or dropped.
    pub heard: Heard,
    /// Logprobs of tokens that may still turn out to belong to a thought.
    held: Vec<v1::Logprob>,
    is_in_thought: bool,
}

impl HiddenThoughts {
    /// Adds a token's logprob, and returns those that certainly belong to the answer. `in_thought`: a thought continues
    /// after this token.
    pub fn told(&mut self, own: Option<v1::Logprob>, in_thought: bool, is_over: bool) -> Vec<v1::Logprob> {
        self.held.extend(own);
        match std::mem::take(&mut self.heard) {
            Heard::Thought => {
                self.is_in_thought = in_thought;
                self.held.clear();
            }
            Heard::Answer => self.is_in_thought = false,
            Heard::Nothing if self.is_in_thought && !in_thought => {
                // Tokens that close the thought belong to the thought.
                self.is_in_thought = false;
                self.held.clear();
            }
            Heard::Nothing if is_over && !self.is_in_thought => {}
            Heard::Nothing => return Vec::new(),
        }
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nobody_knows_yet_is_told_with_the_answer_or_not_at_all() {
        let told = |all: &[(Heard, bool)]| {
            let mut hidden = HiddenThoughts::default();
            let numbered = (0..).zip(all);
            let told = numbered.flat_map(|(token_id, (heard, in_thought))| {
                hidden.heard = *heard;
                let own = v1::Logprob { token_id, ..v1::Logprob::default() };
                hidden.told(Some(own), *in_thought, token_id as usize + 1 == all.len())
            });
            told.map(|logprob| logprob.token_id).collect::<Vec<_>>()
        };
        use Heard::{Answer, Nothing, Thought};
        let (thought, out, said) = ((Thought, true), (Nothing, false), (Answer, false));
        let inside = (Nothing, true);
        // The token that closes a thought is not sent. Tokens held behind it are sent with the answer.
        assert_eq!(told(&[out, thought, inside, thought, out, said, out]), [5, 6]);
        assert_eq!(told(&[thought, inside, inside, out, out, out, said]), [4, 5, 6]);
        // Here the thought ends with its last token.
        assert_eq!(told(&[(Thought, false), out, said]), [1, 2]);
        assert_eq!(told(&[said, out, thought, inside]), [0]);
        assert_eq!(told(&[thought, inside]), [0; 0]);
        assert_eq!(told(&[out]), [0]);
    }
}
