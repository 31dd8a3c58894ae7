//! Sends the sampler's tokens to the first stage. Tokens go through the host on every device.

use crate::error::{Error, Result};
use crate::frame::{FRAME_WORDS_MAX, FrameKind};
use crate::mesh::Mesh;
use crate::transfer::{Direction, NO_OWNERS, Payload, Transfer};
use types::{StepId, Token};

/// Marks a row without a drawn token.
const NOTHING: u32 = u32::MAX;
/// The most rows of a step whose tokens fit one frame.
const TOKENS_MAX: usize = FRAME_WORDS_MAX - 1;

impl Mesh {
    pub(crate) fn send_tokens(&mut self, step: StepId, tokens: &[Option<Token>]) -> Result<()> {
        if !self.part().is_sampler() {
            return Err(Error::NoPeer("tokens to send, because it does not sample"));
        }
        if tokens.len() > TOKENS_MAX {
            return Err(types::Unsupported("a step that draws more than 16383 tokens").into());
        }
        let mut words = std::mem::take(&mut self.words);
        words.clear();
        words.push(tokens.len() as u32);
        words.extend(tokens.iter().map(|token| token.unwrap_or(NOTHING)));
        let me = usize::from(self.rank().0);
        for rank in (0..self.tp_size()).filter(|rank| *rank != me) {
            self.plan([Transfer::block(rank, Direction::Out, 1, 0..words.len())]);
        }
        let result = self.exchange(FrameKind::Tokens, step.0, NO_OWNERS, &mut WordRow(&words));
        self.words = words;
        result
    }

    pub(crate) fn recv_tokens(&mut self, step: StepId, tokens: &mut Vec<Option<Token>>) -> Result<()> {
        if !self.part().is_first() || self.part().is_sampler() {
            return Err(Error::NoPeer("sampler to receive tokens from"));
        }
        let rank = self.grid().sampler();
        self.plan([Transfer::block(rank.0.into(), Direction::HoldAny, 1, 0..1)]);
        self.exchange(FrameKind::Tokens, step.0, NO_OWNERS, &mut WordRow(&[]))?;
        tokens.clear();
        let result = match self.held_frame(rank.0.into()) {
            [n, words @ ..] if *n as usize == words.len() => {
                tokens.extend(words.iter().map(|word| (*word != NOTHING).then_some(*word)));
                Ok(())
            }
            _ => Err(Error::Garbage { rank, what: "a count that differs from the number of tokens" }),
        };
        self.release(rank.0.into());
        result
    }
}

/// One row of words to send.
struct WordRow<'a>(&'a [u32]);

impl Payload for WordRow<'_> {
    fn read(&mut self, _row: usize, col: usize, out: &mut [u32]) {
        out.copy_from_slice(&self.0[col..][..out.len()]);
    }

    fn write(&mut self, _peer: usize, _row: usize, _col: usize, _words: &[u32]) {
        unreachable!("received words stay in the ring");
    }
}
