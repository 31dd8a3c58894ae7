//! The step that the coordinator sends to the workers, and the answer of one of them. A step is a difference: a
//! request's tokens are sent once, at its start, and again only if a replay begins.

use crate::{BlockId, Epoch, Request, RequestId, StepId, TierWork, Token, Unsupported};
use alloc::vec::Vec;
use core::ops::Range;

/// One pass over the model for a set of slices.
///
/// A rank applies it in this order: ends, tier, starts, slices (each takes its new blocks from `blocks`), the pass.
/// Ends come first, so that a rank never holds more sequences than may run. A step has at most one slice per request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    pub id: StepId,
    pub epoch: Epoch,
    /// Requests that the ranks do not hold: new, or preempted and begun again with all of their output. A start for an
    /// id that a rank holds replaces the request that it holds.
    pub starts: Vec<Request>,
    pub slices: Vec<Slice>,
    /// The new blocks of every slice, one run after another in the order of `slices`, and within a slice one run per
    /// cache group. The length of a run is not sent: it is `group.n_blocks(range.end)` less the entries that the
    /// sequence holds, or none where it holds more, and a start holds none. So a sequence that starts with a prefix hit
    /// gets the shared blocks at the front of its first run; the hit is `range.start` of its first slice, equal in all
    /// groups. `blocks` is used up exactly.
    ///
    /// Blocks of a windowed group that no later query reads may be given to others without notice: a rank keeps its
    /// entry and must not follow it. In front of a prefix hit the entries that no query will read are `BlockId::NONE`
    /// (the first `group.n_passed(range.start)` of the run).
    ///
    /// So are entries in a slice's middle for the state of a recurrence (`group.may_lack`): a rank carries the state
    /// over such a block and writes it nowhere. Only blocks that a later slice may begin from are there, and those that
    /// the prefix cache is to keep.
    pub blocks: Vec<BlockId>,
    /// Sequences to forget before anything else of this step. None of them has a slice in this step, or after it unless
    /// a start brings the id back. Steps with slices of theirs may still be in flight: each rank runs steps in order,
    /// so their blocks may be given out from this step on.
    pub ends: Vec<RequestId>,
    /// What the tier behind the pools has to do.
    pub tier: TierWork,
}

impl Step {
    /// Empties the step and keeps its memory.
    pub fn clear(&mut self) {
        self.starts.clear();
        self.slices.clear();
        self.blocks.clear();
        self.ends.clear();
        self.tier.clear();
    }

    pub fn n_tokens(&self) -> usize {
        self.slices.iter().map(|slice| slice.range.len()).sum()
    }

    /// Refuses by name what a frame can express and no rank serves yet.
    pub fn supported(&self) -> Result<(), Unsupported> {
        self.slices.iter().try_for_each(Slice::supported)
    }

    /// The drafts of all slices.
    pub fn n_drafts(&self) -> usize {
        self.slices.iter().map(|slice| usize::from(slice.n_draft)).sum()
    }
}

/// Positions of one sequence to compute.
///
/// `[0, range.start) computed · [range.start, range.end) this slice · [range.end, ..) later`
///
/// Positions count from the start of the log. The tokens of the range are in the rank's log by the time the slice runs;
/// the last of them may be one that an earlier step has drawn. A slice that draws gives the token of position
/// `range.end` (with drafts: of `range.end - n_draft` and on, as far as they hold). A drawn token belongs to a
/// position: one for a position that the log already holds is ignored.
///
/// `[.., range.end - n_draft) the log · [range.end - n_draft, range.end) drafts, which stay as far as they hold`
///
/// A slice begins where the one before has ended. Only where a slice draws fewer tokens than it could, the last
/// position of the log is computed again; slices that were planned behind the missing token take their blocks and are
/// void. None is planned behind drafts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    pub id: RequestId,
    pub range: Range<u32>,
    /// How many of the range's last tokens are drafts to be verified: the first guesses that the sampling rank made
    /// behind the log and sent to the ranks that embed. At most `n_guess` of its last answer.
    pub n_draft: u16,
    pub want: Want,
}

impl Slice {
    /// A slice without drafts.
    pub const fn new(id: RequestId, range: Range<u32>, want: Want) -> Slice {
        Slice { id, range, n_draft: 0, want }
    }

    fn supported(&self) -> Result<(), Unsupported> {
        if self.n_draft != 0 && self.want != Want::Last {
            return Err(Unsupported("drafts of a slice that scores, pools or draws nothing"));
        }
        if usize::from(self.n_draft) >= self.range.len().max(1) {
            return Err(Unsupported("drafts without a token before them"));
        }
        Ok(())
    }

    /// The position of the first token that it draws, if it draws.
    pub const fn first_drawn(&self) -> u32 {
        self.range.end - self.n_draft as u32
    }
}

/// The purpose of a slice, besides its KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// A chunk of a prompt that has more chunks.
    Nothing,
    /// The token after the range.
    Last,
    /// Logprobs of the prompt's tokens at `range.start + 1 ..= range.end`; and, where the range ends the log, the token
    /// after it.
    All { top_n: u8 },
    /// The hidden states of the range, pooled.
    Pool,
}

/// The most rows of one step that are scored or draw behind a draft. Memory for logits is made for as many beside one
/// row of each slice.
pub const SCORED_ROWS_MAX: u32 = 64;

/// The most drafts of one step. The other half of `SCORED_ROWS_MAX` is left to rows that are scored.
pub const DRAFT_ROWS_MAX: u32 = SCORED_ROWS_MAX / 2;

/// The answer to a step, from the one rank that samples.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepDone {
    pub id: StepId,
    pub epoch: Epoch,
    /// As many as the step had, in the step's order.
    pub slices: Vec<SliceDone>,
    /// Time of the pass on the device, by which the scheduler learns what steps cost.
    pub micros: u32,
}

/// The outcome of one slice: no token for a chunk, or for a draw that has to wait and is planned again; one token, or
/// as many as a verified draft allows. The log grows by what was drawn.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SliceDone {
    /// `tokens[i]` is the token of position `range.end - n_draft + i`.
    pub tokens: Vec<TokenOut>,
    /// Why the request alone cannot go on; its neighbours can.
    pub failed: Option<Failure>,
    /// For a slice that scores, `Want::All`: entry i is the token at `range.start + 1 + i`.
    pub scored: Vec<TokenOut>,
    /// For a slice that pools, `Want::Pool`: present with the last chunk.
    pub pooled: Vec<f32>,
    /// How many tokens the rank has guessed behind the log: as many drafts the next slice may have.
    pub n_guess: u16,
    /// How many of `tokens`, the first ones, it had guessed, whether or not they were drafts.
    pub n_hit: u16,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenOut {
    pub token: Token,
    /// Present if the request has `logprobs`: the drawn token's logprob before temperature and filters, by our own
    /// log-sum-exp.
    pub logprob: Option<f32>,
    pub top: Vec<TokenLogprob>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    pub token: Token,
    pub logprob: f32,
}

/// Why one request cannot go on, on ranks that are well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// For example, its logits were not numbers.
    Computation,
    /// Its grammar and what else it forbids leave no token to draw.
    NoToken,
    /// Its grammar cannot be followed.
    Grammar(GrammarFault),
}

/// Why a grammar cannot be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GrammarFault {
    /// A mask was not made in the time that one may take.
    Late,
    /// A mask needs more work or memory than a grammar may have.
    TooComplex,
    /// The rank's grammar cannot go on: it does not compile for the model's tokens, its log breaks it, or the engine
    /// failed.
    Broken,
}

impl From<Failure> for Finish {
    fn from(failure: Failure) -> Finish {
        match failure {
            Failure::Computation => Finish::Failed,
            Failure::NoToken => Finish::NoToken,
            Failure::Grammar(fault) => Finish::Grammar(fault),
        }
    }
}

/// Why a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Finish {
    /// A stop token was drawn; it is the last token of the output.
    Stop,
    /// `tokens_max`, or the end of the context.
    Length,
    Cancelled,
    Deadline,
    /// This request could not be computed.
    Failed,
    /// Its log has become longer than the present ranks can hold. More ranks could go on with it.
    Outgrown,
    /// Its grammar and what else it forbids left no token to draw.
    NoToken,
    /// Its grammar could not be followed.
    Grammar(GrammarFault),
}
