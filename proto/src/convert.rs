//! Conversions between `types` and the wire. Knows nothing of who sends.

use crate::cluster as wire;
use bytes::Bytes;
use prost::Message;
use std::str::FromStr;
use types::{
    Activations, BlockCopy, BlockId, DeviceKind, Dry, Epoch, Finish, Goal, KvDtype, Layout, Micros, Mode, Penalties,
    PolicyDigest, Priority, Rank, Request, RequestId, Sampling, Shares, Slice, SliceDone, Stage, Step, StepDone,
    StepId, TenantId, TokenLogprob, TokenOut, Tokens, UnknownWord, Unsupported, Want, Weight, Xtc,
};

/// A frame that decodes but whose content cannot be valid.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    #[error("not a frame: {0}")]
    Undecodable(#[from] prost::DecodeError),
    #[error("{field} is missing")]
    Missing { field: &'static str },
    #[error("{field} is out of range: {value}")]
    OutOfRange { field: &'static str, value: i64 },
    #[error("{field}: {unknown}")]
    Word { field: &'static str, unknown: UnknownWord },
    #[error("assign.stages: {0}")]
    Stages(Unsupported),
    #[error("{0}")]
    Unsupported(#[from] Unsupported),
    #[error("{field} is out of range: {value}")]
    Number { field: &'static str, value: f32 },
}

fn word<T: FromStr<Err = UnknownWord>>(field: &'static str, word: &str) -> Result<T, Malformed> {
    word.parse().map_err(|unknown| Malformed::Word { field, unknown })
}

pub(crate) fn out_of_range(field: &'static str, value: impl TryInto<i64>) -> Malformed {
    Malformed::OutOfRange { field, value: value.try_into().unwrap_or(i64::MAX) }
}

/// NaN fails every range.
fn check_number(field: &'static str, value: f32, in_range: impl Fn(f32) -> bool) -> Result<(), Malformed> {
    match value.is_finite() && in_range(value) {
        true => Ok(()),
        false => Err(Malformed::Number { field, value }),
    }
}

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

impl From<&Request> for wire::Request {
    /// The deadline is left out: it is a time on the sender's clock. `with_deadline` sends what is left of it.
    fn from(request: &Request) -> Self {
        wire::Request {
            id: request.id.0,
            tenant: request.tenant.0,
            // A weight of one needs no bytes. A step's starts carry it too, though no rank reads it.
            weight: if request.weight.0 > 1 { request.weight.0.into() } else { 0 },
            prompt: request.prompt.clone(),
            output: request.output.clone(),
            sampling: Some((&request.sampling).into()),
            goal: goal_to_wire(request.goal),
            priority: request.priority.0.into(),
            deadline_micros: None,
            cache_bypass: request.cache_bypass,
            adapter: None,
            constraint: None,
            spans: Vec::new(),
            traceparent: String::new(),
            tracestate: String::new(),
        }
    }
}

impl wire::Request {
    /// Adds how much time is left until a deadline on the sender's clock.
    pub fn with_deadline(mut self, deadline: Option<Micros>, now: Micros) -> Self {
        self.deadline_micros = deadline.map(|deadline| deadline.since(now).0);
        self
    }

    /// A submitted request, with its deadline on the receiver's clock.
    pub fn received(self, now: Micros) -> Result<Request, Malformed> {
        let deadline = self.deadline_micros.map(|left| now.plus(left));
        Ok(Request { deadline, ..self.try_into()? })
    }
}

impl wire::WorkerHello {
    /// The device that the worker computes on.
    pub fn device(&self) -> Result<DeviceKind, Malformed> {
        word("hello.device", &self.device)
    }
}

impl wire::Assign {
    /// The rank, and the layout of the grid that it belongs to.
    pub fn layout(&self) -> Result<(Rank, Layout), Malformed> {
        let stage = |stage: &wire::Stage| {
            let layers = stage.layer_start..stage.layer_end;
            Shares::new(stage.share_bounds.clone()).map(|shares| Stage { layers, shares })
        };
        let stages = self.stages.iter().map(stage).collect::<Result<Vec<_>, _>>();
        let layout = stages.and_then(Layout::new).map_err(Malformed::Stages)?;
        match u16::try_from(self.rank) {
            Ok(rank) if rank < layout.grid().n_ranks() => Ok((Rank(rank), layout)),
            _ => Err(out_of_range("assign.rank", self.rank)),
        }
    }

    /// The policy that the replica serves under, if it is known.
    pub fn policy(&self) -> Result<Option<PolicyDigest>, Malformed> {
        match self.policy_digest.is_empty() {
            true => Ok(None),
            false => policy_digest(&self.policy_digest).map(Some),
        }
    }

    pub fn activations(&self) -> Result<Activations, Malformed> {
        word("assign.activations", &self.activations)
    }

    pub fn kv_dtype(&self) -> Result<KvDtype, Malformed> {
        word("assign.kv_dtype", &self.kv_dtype)
    }

    /// The mode of the order of sums. A coordinator that says nothing knows only one mode.
    pub fn mode(&self) -> Result<Mode, Malformed> {
        if self.numerics.is_empty() { Ok(Mode::default()) } else { word("assign.numerics", &self.numerics) }
    }

    /// The epoch's secret. Empty stands for zeros: a rank alone has nobody to prove anything to.
    pub fn secret(&self) -> Result<[u8; 32], Malformed> {
        match self.mesh_secret.len() {
            0 => Ok([0; 32]),
            len => self.mesh_secret.as_slice().try_into().map_err(|_| out_of_range("assign.mesh_secret", len)),
        }
    }
}

impl From<&Stage> for wire::Stage {
    fn from(stage: &Stage) -> wire::Stage {
        wire::Stage {
            layer_start: stage.layers.start,
            layer_end: stage.layers.end,
            share_bounds: stage.shares.bounds().to_vec(),
        }
    }
}

/// The fields of a request that its stream is a function of, and no others: the same bytes for the same stream.
pub fn said(request: &Request) -> Vec<u8> {
    let request = wire::Request { id: 0, output: Vec::new(), priority: 0, weight: 0, ..request.into() };
    request.encode_to_vec()
}

/// A digest as frames and handles carry it.
pub fn policy_digest(bytes: &[u8]) -> Result<PolicyDigest, Malformed> {
    bytes.try_into().map(PolicyDigest).map_err(|_| out_of_range("policy_digest", bytes.len()))
}

/// A request within a step. Its deadline stays with the coordinator; one that is submitted goes through `received`.
impl TryFrom<wire::Request> for Request {
    type Error = Malformed;

    fn try_from(request: wire::Request) -> Result<Self, Malformed> {
        served(&request)?;
        let priority = i8::try_from(request.priority).map_err(|_| out_of_range("priority", request.priority))?;
        Ok(Request {
            id: RequestId(request.id),
            tenant: TenantId(request.tenant),
            weight: weight_from_wire(request.weight)?,
            prompt: request.prompt,
            output: request.output,
            sampling: request.sampling.ok_or(Malformed::Missing { field: "sampling" })?.try_into()?,
            goal: goal_from_wire(request.goal)?,
            priority: Priority(priority),
            deadline: None,
            cache_bypass: request.cache_bypass,
        })
    }
}

/// Refuses by name what the wire can say and nothing serves yet.
fn served(request: &wire::Request) -> Result<(), Malformed> {
    let said = [
        (request.adapter.is_some(), "adapter"),
        (request.constraint.is_some(), "constraint"),
        (!request.spans.is_empty(), "spans"),
    ];
    let unserved = said.into_iter().find(|(is_said, _)| *is_said);
    unserved.map_or(Ok(()), |(_, what)| Err(Unsupported(what).into()))
}

fn weight_from_wire(weight: u32) -> Result<Weight, Malformed> {
    u16::try_from(weight).map(|weight| Weight(weight.max(1))).map_err(|_| out_of_range("weight", weight))
}

/// Zero generates, one pools, and n from two on scores with n - 2 likely tokens beside each.
fn goal_to_wire(goal: Goal) -> u32 {
    match goal {
        Goal::Generate => 0,
        Goal::Pool => 1,
        Goal::Score { top_n } => 2 + u32::from(top_n),
    }
}

fn goal_from_wire(goal: u32) -> Result<Goal, Malformed> {
    match goal {
        0 => Ok(Goal::Generate),
        1 => Ok(Goal::Pool),
        n => Ok(Goal::Score { top_n: u8::try_from(n - 2).map_err(|_| out_of_range("goal", goal))? }),
    }
}

impl From<&Sampling> for wire::Sampling {
    fn from(sampling: &Sampling) -> Self {
        wire::Sampling {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: sampling.seed,
            choice: sampling.choice,
            tokens_max: sampling.tokens_max,
            tokens_min: sampling.tokens_min,
            stop: sampling.stop.clone(),
            logprobs: sampling.logprobs.map(u32::from),
            typical_p: (sampling.typical_p != 1.0).then_some(sampling.typical_p),
            top_n_sigma: sampling.top_n_sigma,
            xtc: (sampling.xtc != Xtc::default()).then(|| sampling.xtc.into()),
            penalties: (sampling.penalties != Penalties::default()).then(|| sampling.penalties.into()),
            dry: (sampling.dry != Dry::default()).then(|| (&sampling.dry).into()),
            bias_tokens: sampling.bias.iter().map(|(token, _)| *token).collect(),
            bias: sampling.bias.iter().map(|(_, bias)| *bias).collect(),
            allowed: sampling.allowed.clone(),
            bad_words: runs_to_wire(&sampling.bad_words),
        }
    }
}

impl TryFrom<wire::Sampling> for Sampling {
    type Error = Malformed;

    fn try_from(sampling: wire::Sampling) -> Result<Self, Malformed> {
        check_number("sampling.temperature", sampling.temperature, |t| t >= 0.0)?;
        check_number("sampling.top_p", sampling.top_p, |p| p > 0.0 && p <= 1.0)?;
        check_number("sampling.min_p", sampling.min_p, |p| (0.0..=1.0).contains(&p))?;
        let typical_p = sampling.typical_p.unwrap_or(1.0);
        check_number("sampling.typical_p", typical_p, |p| p > 0.0 && p <= 1.0)?;
        check_number("sampling.top_n_sigma", sampling.top_n_sigma, |n| n >= 0.0)?;
        let logprobs = match sampling.logprobs {
            Some(n) => Some(u8::try_from(n).map_err(|_| out_of_range("sampling.logprobs", n))?),
            None => None,
        };
        Ok(Sampling {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            seed: sampling.seed,
            choice: sampling.choice,
            tokens_max: sampling.tokens_max,
            tokens_min: sampling.tokens_min,
            stop: sampling.stop,
            logprobs,
            typical_p,
            top_n_sigma: sampling.top_n_sigma,
            xtc: sampling.xtc.map_or(Ok(Xtc::default()), Xtc::try_from)?,
            penalties: sampling.penalties.map_or(Ok(Penalties::default()), Penalties::try_from)?,
            dry: sampling.dry.map_or(Ok(Dry::default()), Dry::try_from)?,
            bias: bias_from_wire(sampling.bias_tokens, sampling.bias)?,
            allowed: sampling.allowed,
            bad_words: runs_from_wire("sampling.bad_words", sampling.bad_words)?,
        })
    }
}

impl From<Xtc> for wire::Xtc {
    fn from(xtc: Xtc) -> Self {
        wire::Xtc { probability: xtc.probability, threshold: xtc.threshold }
    }
}

impl TryFrom<wire::Xtc> for Xtc {
    type Error = Malformed;

    fn try_from(xtc: wire::Xtc) -> Result<Self, Malformed> {
        check_number("xtc.probability", xtc.probability, |p| (0.0..=1.0).contains(&p))?;
        check_number("xtc.threshold", xtc.threshold, |p| (0.0..=1.0).contains(&p))?;
        Ok(Xtc { probability: xtc.probability, threshold: xtc.threshold })
    }
}

impl From<Penalties> for wire::Penalties {
    fn from(penalties: Penalties) -> Self {
        let Penalties { presence, frequency, repetition } = penalties;
        wire::Penalties { presence, frequency, repetition }
    }
}

impl TryFrom<wire::Penalties> for Penalties {
    type Error = Malformed;

    fn try_from(penalties: wire::Penalties) -> Result<Self, Malformed> {
        let wire::Penalties { presence, frequency, repetition } = penalties;
        check_number("penalties.presence", presence, |_| true)?;
        check_number("penalties.frequency", frequency, |_| true)?;
        check_number("penalties.repetition", repetition, |r| r > 0.0)?;
        Ok(Penalties { presence, frequency, repetition })
    }
}

impl From<&Dry> for wire::Dry {
    fn from(dry: &Dry) -> Self {
        wire::Dry {
            multiplier: dry.multiplier,
            base: dry.base,
            length_allowed: dry.length_allowed,
            breakers: runs_to_wire(&dry.breakers),
        }
    }
}

impl TryFrom<wire::Dry> for Dry {
    type Error = Malformed;

    fn try_from(dry: wire::Dry) -> Result<Self, Malformed> {
        check_number("dry.multiplier", dry.multiplier, |multiplier| multiplier >= 0.0)?;
        check_number("dry.base", dry.base, |base| base >= 1.0)?;
        Ok(Dry {
            multiplier: dry.multiplier,
            base: dry.base,
            length_allowed: dry.length_allowed,
            breakers: runs_from_wire("dry.breakers", dry.breakers)?,
        })
    }
}

fn bias_from_wire(tokens: Tokens, bias: Vec<f32>) -> Result<Vec<(u32, f32)>, Malformed> {
    if tokens.len() != bias.len() {
        return Err(out_of_range("sampling.bias", bias.len()));
    }
    bias.iter().try_for_each(|bias| check_number("sampling.bias", *bias, |_| true))?;
    Ok(tokens.into_iter().zip(bias).collect())
}

fn runs_to_wire(runs: &[Tokens]) -> Vec<wire::TokenRun> {
    runs.iter().map(|tokens| wire::TokenRun { tokens: tokens.clone() }).collect()
}

/// Refuses an empty run, which would match everywhere.
fn runs_from_wire(field: &'static str, runs: Vec<wire::TokenRun>) -> Result<Vec<Tokens>, Malformed> {
    let run = |run: wire::TokenRun| if run.tokens.is_empty() { Err(out_of_range(field, 0)) } else { Ok(run.tokens) };
    runs.into_iter().map(run).collect()
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
            copies: step.copies.iter().flat_map(|copy| [copy.from.0, copy.to.0]).collect(),
            ends: step.ends.iter().map(|id| id.0).collect(),
            traceparent: String::new(),
        }
    }
}

impl TryFrom<wire::Step> for Step {
    type Error = Malformed;

    fn try_from(step: wire::Step) -> Result<Self, Malformed> {
        if !step.copies.len().is_multiple_of(2) {
            return Err(out_of_range("step.copies", step.copies.len()));
        }
        let pair = |pair: &[u32]| BlockCopy { from: BlockId(pair[0]), to: BlockId(pair[1]) };
        Ok(Step {
            id: StepId(step.id),
            epoch: Epoch { incarnation: step.epoch_incarnation, n: step.epoch_n },
            starts: step.starts.into_iter().map(Request::try_from).collect::<Result<_, _>>()?,
            slices: step.slices.into_iter().map(Slice::try_from).collect::<Result<_, _>>()?,
            blocks: step.blocks.into_iter().map(BlockId).collect(),
            copies: step.copies.chunks_exact(2).map(pair).collect(),
            ends: step.ends.into_iter().map(RequestId).collect(),
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
            failed: slice.failed,
            scored: slice.scored.iter().map(wire::TokenOut::from).collect(),
            pooled: slice.pooled.clone(),
        }
    }
}

impl From<wire::SliceDone> for SliceDone {
    fn from(slice: wire::SliceDone) -> Self {
        SliceDone {
            tokens: slice.tokens.into_iter().map(TokenOut::from).collect(),
            failed: slice.failed,
            scored: slice.scored.into_iter().map(TokenOut::from).collect(),
            pooled: slice.pooled,
        }
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

impl From<Finish> for wire::Finish {
    fn from(finish: Finish) -> Self {
        match finish {
            Finish::Stop => wire::Finish::Stop,
            Finish::Length => wire::Finish::Length,
            Finish::Cancelled => wire::Finish::Cancelled,
            Finish::Deadline => wire::Finish::Deadline,
            Finish::Failed => wire::Finish::Failed,
            Finish::Outgrown => wire::Finish::Outgrown,
        }
    }
}

impl wire::Output {
    /// Why the stream ended, if it did.
    pub fn finished(&self) -> Result<Option<Finish>, Malformed> {
        let finish = wire::Finish::try_from(self.finish).map_err(|_| out_of_range("output.finish", self.finish))?;
        Ok(match finish {
            wire::Finish::Unspecified => None,
            wire::Finish::Stop => Some(Finish::Stop),
            wire::Finish::Length => Some(Finish::Length),
            wire::Finish::Cancelled => Some(Finish::Cancelled),
            wire::Finish::Deadline => Some(Finish::Deadline),
            wire::Finish::Failed => Some(Finish::Failed),
            wire::Finish::Outgrown => Some(Finish::Outgrown),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::DeviceClass;

    #[test]
    fn words_that_nobody_knows_are_refused_by_the_fields_name() {
        let assign = |activations: &str, kv_dtype: &str, numerics: &str| wire::Assign {
            activations: activations.into(),
            kv_dtype: kv_dtype.into(),
            numerics: numerics.into(),
            ..wire::Assign::default()
        };
        let old = assign("int8", "f16", "");
        assert_eq!(old.activations().unwrap(), Activations::Int8);
        assert_eq!((old.kv_dtype().unwrap(), old.mode().unwrap()), (KvDtype::F16, Mode::Lockstep));
        assert_eq!(assign("", "", "fast").mode().unwrap(), Mode::Fast);
        let wrong = assign("int4", "", "slow");
        assert!(wrong.activations().unwrap_err().to_string().starts_with("assign.activations: \"int4\" is no"));
        assert!(wrong.kv_dtype().unwrap_err().to_string().starts_with("assign.kv_dtype: \"\" is no"));
        assert!(wrong.mode().unwrap_err().to_string().starts_with("assign.numerics: \"slow\" is no"));
        let hello = |device: &str| wire::WorkerHello { device: device.into(), ..wire::WorkerHello::default() }.device();
        assert_eq!(hello("").unwrap().class(), DeviceClass::Cpu);
        assert!(hello("gpu").unwrap_err().to_string().starts_with("hello.device: \"gpu\" is no device"));
    }
}
