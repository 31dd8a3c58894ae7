//! Requests and their outcomes, to the wire and back. Knows nothing of the sender, nor how a token is drawn.

use crate::cluster as wire;
use crate::malformed::{Malformed, out_of_range};
use prost::Message;
use types::{
    CacheHint, CacheSalt, Finish, Goal, Grammar, GrammarFault, Micros, Priority, Request, RequestId, TenantId,
    TenantWeight, Unsupported,
};

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
            cache_apart: request.cache_apart,
            cache_salt: cache_salt_to_wire(request.cache_salt),
            adapter: None,
            constraint: request.grammar.as_ref().map(|grammar| grammar.as_str().as_bytes().to_vec()),
            spans: Vec::new(),
            traceparent: String::new(),
            tracestate: String::new(),
            needs_progress: false,
            predicted: request.predicted.clone(),
            cache_hint: cache_hint_to_wire(request.cache_hint),
            second_text: request.second_text,
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

/// The fields of a request that its stream is a function of, and no others: the same bytes for the same stream.
pub fn stream_key(request: &Request) -> Vec<u8> {
    let request = wire::Request { id: 0, output: Vec::new(), predicted: Vec::new(), ..request.into() };
    wire::Request { priority: 0, weight: 0, cache_hint: 0, ..request }.encode_to_vec()
}

/// A request within a step. Its deadline stays with the coordinator; one that is submitted goes through `received`.
impl TryFrom<wire::Request> for Request {
    type Error = Malformed;

    fn try_from(request: wire::Request) -> Result<Self, Malformed> {
        check_supported(&request)?;
        let priority = i8::try_from(request.priority).map_err(|_| out_of_range("priority", request.priority))?;
        Ok(Request {
            id: RequestId(request.id),
            tenant: TenantId(request.tenant),
            weight: weight_from_wire(request.weight)?,
            prompt: request.prompt,
            output: request.output,
            sampling: request.sampling.ok_or(Malformed::Missing { field: "sampling" })?.try_into()?,
            goal: goal_from_wire(request.goal)?,
            grammar: request.constraint.map(grammar_from_wire).transpose()?,
            priority: Priority(priority),
            deadline: None,
            cache_bypass: request.cache_bypass,
            cache_apart: request.cache_apart,
            cache_salt: cache_salt_from_wire(&request.cache_salt)?,
            predicted: request.predicted,
            cache_hint: cache_hint_from_wire(request.cache_hint)?,
            second_text: request.second_text,
        })
    }
}

/// Refuses by name what the wire can express and nothing serves yet.
fn check_supported(request: &wire::Request) -> Result<(), Malformed> {
    let unsupported = [(request.adapter.is_some(), "adapter"), (!request.spans.is_empty(), "spans")];
    let unserved = unsupported.into_iter().find(|(is_set, _)| *is_set);
    unserved.map_or(Ok(()), |(_, what)| Err(Unsupported(what).into()))
}

fn grammar_from_wire(constraint: Vec<u8>) -> Result<Grammar, Malformed> {
    let text = String::from_utf8(constraint).map_err(|bytes| out_of_range("constraint", bytes.into_bytes().len()))?;
    Ok(Grammar::new(text))
}

fn cache_hint_to_wire(hint: CacheHint) -> u32 {
    match hint {
        CacheHint::None => 0,
        CacheHint::Retain => 1,
        CacheHint::Demote => 2,
    }
}

fn cache_hint_from_wire(hint: u32) -> Result<CacheHint, Malformed> {
    match hint {
        0 => Ok(CacheHint::None),
        1 => Ok(CacheHint::Retain),
        2 => Ok(CacheHint::Demote),
        other => Err(out_of_range("cache_hint", other)),
    }
}

fn cache_salt_to_wire(salt: CacheSalt) -> Vec<u8> {
    if salt == CacheSalt::default() { Vec::new() } else { salt.0.to_vec() }
}

fn cache_salt_from_wire(bytes: &[u8]) -> Result<CacheSalt, Malformed> {
    match bytes.len() {
        0 => Ok(CacheSalt::default()),
        len => bytes.try_into().map(CacheSalt).map_err(|_| out_of_range("cache_salt", len)),
    }
}

fn weight_from_wire(weight: u32) -> Result<TenantWeight, Malformed> {
    u16::try_from(weight).map(|weight| TenantWeight(weight.max(1))).map_err(|_| out_of_range("weight", weight))
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

impl From<Finish> for wire::Finish {
    fn from(finish: Finish) -> Self {
        match finish {
            Finish::Stop => wire::Finish::Stop,
            Finish::Length => wire::Finish::Length,
            Finish::Cancelled => wire::Finish::Cancelled,
            Finish::Deadline => wire::Finish::Deadline,
            Finish::Failed => wire::Finish::Failed,
            Finish::Outgrown => wire::Finish::Outgrown,
            Finish::NoToken => wire::Finish::NoToken,
            Finish::Grammar(_) => wire::Finish::Grammar,
        }
    }
}

impl From<GrammarFault> for wire::GrammarFault {
    fn from(fault: GrammarFault) -> Self {
        match fault {
            GrammarFault::Late => wire::GrammarFault::Late,
            GrammarFault::TooComplex => wire::GrammarFault::TooComplex,
            GrammarFault::Broken => wire::GrammarFault::Unspecified,
        }
    }
}

impl From<Finish> for wire::GrammarFault {
    fn from(finish: Finish) -> Self {
        if let Finish::Grammar(fault) = finish { fault.into() } else { wire::GrammarFault::Unspecified }
    }
}

/// A fault that this build does not know still counts as one.
pub(crate) fn fault_from_wire(fault: i32) -> GrammarFault {
    match wire::GrammarFault::try_from(fault) {
        Ok(wire::GrammarFault::Late) => GrammarFault::Late,
        Ok(wire::GrammarFault::TooComplex) => GrammarFault::TooComplex,
        Ok(wire::GrammarFault::Unspecified) | Err(_) => GrammarFault::Broken,
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
            wire::Finish::NoToken => Some(Finish::NoToken),
            wire::Finish::Grammar => Some(Finish::Grammar(fault_from_wire(self.grammar_fault))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_salt_goes_there_and_back_and_half_of_one_is_refused() {
        for salt in [CacheSalt::default(), CacheSalt::of("mine")] {
            let request = Request { cache_salt: salt, ..Request::default() };
            let read = Request::try_from(wire::Request::from(&request)).unwrap();
            assert_eq!(read.cache_salt, salt);
        }
        let half = wire::Request { cache_salt: vec![1; 8], ..wire::Request::from(&Request::default()) };
        assert!(Request::try_from(half).is_err());
    }
}
