//! Steps and the answers of ranks, to the wire and back. Knows nothing of the sender, nor what is in a request.

use crate::cluster as wire;
use crate::malformed::{Malformed, out_of_range};
use crate::request::fault_from_wire;
use bytes::Bytes;
use prost::Message;
use types::{
    BlockId, Epoch, Failure, Request, RequestId, Slice, SliceDone, Step, StepDone, StepId, TierWork, TokenLogprob,
    TokenOut, Want,
};

/// Encodes a step once: the bytes are the same for every rank.
pub fn encode_step(step: &Step) -> Bytes {
    encode_traced_step(step, String::new())
}

/// The same, with the `traceparent` of the step's span; empty where no span is recorded.
pub fn encode_traced_step(step: &Step, traceparent: String) -> Bytes {
    wire::Step { traceparent, ..wire::Step::from(step) }.encode_to_vec().into()
}

pub fn decode_step(bytes: &[u8]) -> Result<Step, Malformed> {
    decode_traced_step(bytes).map(|(step, _)| step)
}

pub fn decode_traced_step(bytes: &[u8]) -> Result<(Step, String), Malformed> {
    let mut step = wire::Step::decode(bytes)?;
    let traceparent = std::mem::take(&mut step.traceparent);
    Ok((step.try_into()?, traceparent))
}

impl From<&Step> for wire::Step {
    fn from(step: &Step) -> Self {
        wire::Step {
            id: step.id.0,
            epoch_incarnation: step.epoch.incarnation,
            epoch_n: step.epoch.n,
            starts: step.starts.iter().map(wire::Request::from).collect(),
            slices: step.slices.iter().map(wire::Slice::from).collect(),
            blocks: step.blocks.iter().map(|block| block.0).collect(),
            ends: step.ends.iter().map(|id| id.0).collect(),
            traceparent: String::new(),
            tier: (!step.tier.is_empty()).then(|| wire::TierWork::from(&step.tier)),
        }
    }
}

impl TryFrom<wire::Step> for Step {
    type Error = Malformed;

    fn try_from(step: wire::Step) -> Result<Self, Malformed> {
        Ok(Step {
            id: StepId(step.id),
            epoch: Epoch { incarnation: step.epoch_incarnation, n: step.epoch_n },
            starts: step.starts.into_iter().map(Request::try_from).collect::<Result<_, _>>()?,
            slices: step.slices.into_iter().map(Slice::try_from).collect::<Result<_, _>>()?,
            blocks: step.blocks.into_iter().map(BlockId).collect(),
            ends: step.ends.into_iter().map(RequestId).collect(),
            tier: step.tier.map_or(Ok(TierWork::default()), TierWork::try_from)?,
        })
    }
}

impl From<&Slice> for wire::Slice {
    fn from(slice: &Slice) -> Self {
        let (want, top_n) = match slice.want {
            Want::Nothing => (wire::slice::Want::Nothing, 0),
            Want::Last => (wire::slice::Want::Last, 0),
            Want::All { top_n } => (wire::slice::Want::All, top_n.into()),
            Want::Pool => (wire::slice::Want::Pool, 0),
        };
        wire::Slice {
            id: slice.id.0,
            start: slice.range.start,
            end: slice.range.end,
            n_draft: slice.n_draft.into(),
            want: want.into(),
            top_n,
        }
    }
}

impl TryFrom<wire::Slice> for Slice {
    type Error = Malformed;

    fn try_from(slice: wire::Slice) -> Result<Self, Malformed> {
        if slice.start >= slice.end {
            return Err(out_of_range("slice.end", slice.end));
        }
        let want = wire::slice::Want::try_from(slice.want).map_err(|_| out_of_range("slice.want", slice.want))?;
        let want = match want {
            wire::slice::Want::Nothing => Want::Nothing,
            wire::slice::Want::Last => Want::Last,
            wire::slice::Want::Pool => Want::Pool,
            wire::slice::Want::All => {
                Want::All { top_n: u8::try_from(slice.top_n).map_err(|_| out_of_range("slice.top_n", slice.top_n))? }
            }
        };
        let n_draft = u16::try_from(slice.n_draft).map_err(|_| out_of_range("slice.n_draft", slice.n_draft))?;
        if slice.n_draft >= slice.end - slice.start {
            return Err(out_of_range("slice.n_draft", slice.n_draft));
        }
        Ok(Slice { id: RequestId(slice.id), range: slice.start..slice.end, n_draft, want })
    }
}

impl From<&StepDone> for wire::StepDone {
    fn from(done: &StepDone) -> Self {
        wire::StepDone {
            id: done.id.0,
            epoch_incarnation: done.epoch.incarnation,
            epoch_n: done.epoch.n,
            slices: done.slices.iter().map(wire::SliceDone::from).collect(),
            micros: done.micros,
        }
    }
}

impl From<wire::StepDone> for StepDone {
    fn from(done: wire::StepDone) -> Self {
        StepDone {
            id: StepId(done.id),
            epoch: Epoch { incarnation: done.epoch_incarnation, n: done.epoch_n },
            slices: done.slices.into_iter().map(SliceDone::from).collect(),
            micros: done.micros,
        }
    }
}

impl From<&SliceDone> for wire::SliceDone {
    fn from(slice: &SliceDone) -> Self {
        wire::SliceDone {
            tokens: slice.tokens.iter().map(wire::TokenOut::from).collect(),
            failed: slice.failed.is_some(),
            scored: slice.scored.iter().map(wire::TokenOut::from).collect(),
            pooled: slice.pooled.clone(),
            failure: slice.failed.map_or(wire::Finish::Unspecified, failure_to_wire).into(),
            n_guess: slice.n_guess.into(),
            n_hit: slice.n_hit.into(),
            grammar_fault: slice.failed.map_or(wire::GrammarFault::Unspecified, fault_of_failure).into(),
        }
    }
}

impl From<wire::SliceDone> for SliceDone {
    fn from(slice: wire::SliceDone) -> Self {
        SliceDone {
            tokens: slice.tokens.into_iter().map(TokenOut::from).collect(),
            failed: slice.failed.then(|| failure_from_wire(slice.failure, slice.grammar_fault)),
            scored: slice.scored.into_iter().map(TokenOut::from).collect(),
            pooled: slice.pooled,
            // More than any slice has counts as the most.
            n_guess: slice.n_guess.try_into().unwrap_or(u16::MAX),
            n_hit: slice.n_hit.try_into().unwrap_or(u16::MAX),
        }
    }
}

fn failure_to_wire(failure: Failure) -> wire::Finish {
    match failure {
        Failure::Computation => wire::Finish::Unspecified,
        Failure::NoToken => wire::Finish::NoToken,
        Failure::Grammar(_) => wire::Finish::Grammar,
    }
}

fn fault_of_failure(failure: Failure) -> wire::GrammarFault {
    match failure {
        Failure::Grammar(fault) => fault.into(),
        Failure::Computation | Failure::NoToken => wire::GrammarFault::Unspecified,
    }
}

/// A reason that this build does not know is still a failure.
fn failure_from_wire(failure: i32, fault: i32) -> Failure {
    match wire::Finish::try_from(failure) {
        Ok(wire::Finish::NoToken) => Failure::NoToken,
        Ok(wire::Finish::Grammar) => Failure::Grammar(fault_from_wire(fault)),
        _ => Failure::Computation,
    }
}

impl From<&TokenOut> for wire::TokenOut {
    fn from(out: &TokenOut) -> Self {
        let top = out.top.iter().map(|top| wire::TokenLogprob { token: top.token, logprob: top.logprob }).collect();
        wire::TokenOut { token: out.token, logprob: out.logprob, top }
    }
}

impl From<wire::TokenOut> for TokenOut {
    fn from(out: wire::TokenOut) -> Self {
        let top = out.top.into_iter().map(|top| TokenLogprob { token: top.token, logprob: top.logprob }).collect();
        TokenOut { token: out.token, logprob: out.logprob, top }
    }
}
