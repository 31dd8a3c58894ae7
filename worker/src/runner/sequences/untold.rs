//! How a rank comes to know what is drawn, and the draws that it still has to be told of. Knows no sequence.

use std::collections::VecDeque;
use types::{Part, RequestId, StepId, Token};

/// How a rank comes to know what is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// It draws.
    Draws,
    /// It embeds, and the sampler tells it: one message for each step that draws at all, in the order of steps. A
    /// message is taken when a row needs a token of it, or when more than so many are on their way.
    IsTold { late_max: usize },
    /// It neither embeds nor draws.
    NeverKnows,
}

impl TokenSource {
    pub fn of(part: &Part) -> TokenSource {
        match part.n_stages {
            _ if part.is_sampler() => TokenSource::Draws,
            _ if !part.is_first() => TokenSource::NeverKnows,
            // Whatever else the sampler says to the rest of its own stage comes behind the message.
            1 => TokenSource::IsTold { late_max: 0 },
            // As many steps as are in flight: by then the oldest has been drawn, and nobody waits for it.
            n_stages => TokenSource::IsTold { late_max: usize::from(n_stages) + 1 },
        }
    }
}

/// What stands in a log for a token that nobody here knows. Any token would do.
pub(super) const UNKNOWN: Token = 0;

/// Draws of which this rank has not been told.
#[derive(Debug, Default)]
pub(super) struct Untold {
    /// The step, and how many draws it has.
    pub steps: VecDeque<(StepId, usize)>,
    /// Those of all these steps, one after another.
    pub draws: VecDeque<UntoldDraw>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct UntoldDraw {
    pub id: RequestId,
    pub life: u64,
    pub position: u32,
}
