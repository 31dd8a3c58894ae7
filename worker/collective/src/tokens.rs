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

/// Sends the tokens of steps. All steps use the same buffer.
#[derive(Debug, Default)]
pub struct TokenSender {
    words: Vec<u32>,
}

impl TokenSender {
    pub fn send(&mut self, mesh: &mut Mesh, step: StepId, tokens: &[Option<Token>]) -> Result<()> {
        if !mesh.part().is_sampler() {
            return Err(Error::NoPeer("tokens to send, because it does not sample"));
        }
        if tokens.len() > TOKENS_MAX {
            return Err(types::Unsupported("a step that draws more than 16383 tokens").into());
        }
        self.words.clear();
        self.words.push(tokens.len() as u32);
        self.words.extend(tokens.iter().map(|token| token.unwrap_or(NOTHING)));
        let me = usize::from(mesh.rank().0);
        for rank in (0..mesh.tp_size()).filter(|rank| *rank != me) {
            mesh.plan([Transfer::block(rank, Direction::Out, 1, 0..self.words.len())]);
        }
        mesh.exchange(FrameKind::Tokens, step.0, NO_OWNERS, &mut WordRow(&self.words))
    }
}

/// Replaces `tokens` by those of the step. Reads them from the frame in which they arrive.
pub fn receive_tokens(mesh: &mut Mesh, step: StepId, tokens: &mut Vec<Option<Token>>) -> Result<()> {
    if !mesh.part().is_first() || mesh.part().is_sampler() {
        return Err(Error::NoPeer("sampler to receive tokens from"));
    }
    let rank = mesh.grid().sampler();
    mesh.plan([Transfer::block(rank.0.into(), Direction::HoldAny, 1, 0..1)]);
    mesh.exchange(FrameKind::Tokens, step.0, NO_OWNERS, &mut WordRow(&[]))?;
    tokens.clear();
    let result = match mesh.held_frame(rank.0.into()) {
        [n, words @ ..] if *n as usize == words.len() => {
            tokens.extend(words.iter().map(|word| (*word != NOTHING).then_some(*word)));
            Ok(())
        }
        _ => Err(Error::Garbage { rank, what: "a count that differs from the number of tokens" }),
    };
    mesh.release(rank.0.into());
    result
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
