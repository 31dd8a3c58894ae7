//! How a rank comes to know what is drawn, and the draws that it still has to be told of. Knows no sequence.

use std::collections::VecDeque;
use types::{Part, RequestId, StepId, Token};

/// How a rank learns the drawn tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// It draws them.
    Draws,
    /// It embeds, and the sampler sends it the tokens: one message for each step with draws, in the order of steps. A
    /// message is received when a row needs one of its tokens, or when more than `late_max` are on their way.
    IsTold { late_max: usize },
    /// It neither embeds nor draws.
    NeverKnows,
}

impl TokenSource {
    pub fn of(part: &Part) -> TokenSource {
        match part.n_stages {
            _ if part.is_sampler() => TokenSource::Draws,
            _ if !part.is_first() => TokenSource::NeverKnows,
            // The message is the first thing that the sampler sends to its own stage.
            1 => TokenSource::IsTold { late_max: 0 },
            // As many steps as are in flight: the oldest has been drawn by then, and nobody waits for it.
            n_stages => TokenSource::IsTold { late_max: usize::from(n_stages) + 1 },
        }
    }
}

/// Stands in a log for a token that this rank does not know. Any token would do.
pub(super) const UNKNOWN: Token = 0;

/// Draws whose tokens this rank has not received.
#[derive(Debug, Default)]
pub(super) struct Untold {
    /// Each step, and how many draws it has.
    pub steps: VecDeque<(StepId, usize)>,
    /// The draws of all these steps, one after another.
    pub draws: VecDeque<UntoldDraw>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct UntoldDraw {
    pub id: RequestId,
    pub life: u64,
    pub position: u32,
}
