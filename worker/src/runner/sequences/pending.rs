//! How a rank receives drawn tokens, and the draws whose tokens it still lacks. Has no knowledge of sequences.

use std::collections::VecDeque;
use types::{RankPart, RequestId, StepId, Token};

/// The source of a rank's drawn tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// The rank draws them.
    Draws,
    /// The rank embeds, and the sampler sends it the tokens: one message for each step with draws, in the order of
    /// steps. It receives a message when a row needs one of its tokens, or when more than `late_max` are on their way.
    Receives { late_max: usize },
    /// The rank neither embeds nor draws.
    NeverKnows,
}

impl TokenSource {
    pub fn of(part: &RankPart) -> TokenSource {
        match part.n_stages {
            _ if part.is_sampler() => TokenSource::Draws,
            _ if !part.is_first() => TokenSource::NeverKnows,
            // The message is the first thing that the sampler sends to its own stage.
            1 => TokenSource::Receives { late_max: 0 },
            // As many steps as are in flight: the oldest has been drawn by then, so no rank waits for it.
            n_stages => TokenSource::Receives { late_max: usize::from(n_stages) + 1 },
        }
    }
}

/// Stands in a log for a token that this rank does not have. Any token would do.
pub(super) const UNKNOWN: Token = 0;

/// Draws whose tokens this rank has not received.
#[derive(Debug, Default)]
pub(super) struct PendingDraws {
    /// Each step, and how many draws it has.
    pub steps: VecDeque<(StepId, usize)>,
    /// The draws of all these steps, one after another.
    pub draws: VecDeque<PendingDraw>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct PendingDraw {
    pub id: RequestId,
    pub life: u64,
    /// The position of its first token.
    pub position: u32,
    pub n_draft: u16,
}

/// The result of one draw, as the sampler sends it.
pub(super) struct DrawnTokens<'a> {
    /// None if no token was drawn.
    pub first: Option<Token>,
    /// The further tokens from drafts that held.
    pub more: &'a [Option<Token>],
    /// The tokens guessed behind those.
    pub guess: &'a [Option<Token>],
}

/// Adds the further results of a draw to a message, behind the first token of each draw.
///
///
/// `first token of each draw, or none · for each draw: more tokens, none, guessed tokens, none`
///
///
/// The second part is absent if it would be empty for all draws.
pub(super) fn append_rest(message: &mut Vec<Option<Token>>, more: impl Iterator<Item = Token>, guess: &[Token]) {
    message.extend(more.map(Some));
    message.push(None);
    message.extend(guess.iter().copied().map(Some));
    message.push(None);
}

/// Returns the draws of a message on `n_draws` of them; None if the message is malformed.
pub(super) fn read_message(words: &[Option<Token>], n_draws: usize) -> Option<impl Iterator<Item = DrawnTokens<'_>>> {
    let (first, rest) = words.split_at_checked(n_draws)?;
    let n_ends = rest.iter().filter(|word| word.is_none()).count();
    let is_whole = rest.is_empty() || (n_ends == 2 * n_draws && rest.last() == Some(&None));
    let mut runs = rest.split(Option::is_none);
    let draws = first.iter().map(move |first| DrawnTokens {
        first: *first,
        more: runs.next().unwrap_or_default(),
        guess: runs.next().unwrap_or_default(),
    });
    is_whole.then_some(draws)
}
