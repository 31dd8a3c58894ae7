//! The one path from inputs to their embeddings or scores: the replica pools the hidden states and runs the layers
//! behind them, and this file makes them vectors of length one, or scores. Knows no face.

use crate::front::frontend::Frontend;
use crate::front::generation::{GenerationEvent, SideOutput};
use crate::front::parsed_request::{ParsedRequest, Purpose};
use crate::front::recorder::Recorder;
use crate::refusal::Refusal;
use checkpoint::{PoolingSpec, ScoreActivation};
use proto::v1;
use proto::v1::generate_request::Input;
use std::sync::Arc;
use telemetry::spans::TracedSpan;
use tokio_stream::StreamExt;

/// What becomes of a pooled vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readout {
    pub kind: ReadoutKind,
    /// What the model's layers return stays as it is: a vector of any length, or outputs without an activation.
    pub is_raw: bool,
    /// How many numbers of an embedding stay. None: all.
    pub dimensions: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadoutKind {
    /// A vector of length one.
    Embedding,
    /// The score of each of a classifier's labels.
    Scores,
}

impl Frontend {
    /// Returns the embedding of each prompt. `parsed` also has the model, the deadline and the tenant.
    pub async fn embed(
        self: &Arc<Self>,
        parsed: ParsedRequest,
        recorder: &mut Recorder,
    ) -> Result<v1::EmbedReply, Refusal> {
        self.pool(parsed, Readout::of(ReadoutKind::Embedding), recorder).await
    }

    /// Returns what becomes of each prompt's hidden states.
    pub async fn pool(
        self: &Arc<Self>,
        parsed: ParsedRequest,
        readout: Readout,
        recorder: &mut Recorder,
    ) -> Result<v1::EmbedReply, Refusal> {
        let parsed = ParsedRequest { purpose: Purpose::Pool, ..parsed };
        recorder.record_request(&parsed);
        let tenant = self.config.keys.tenant_limits(parsed.tenant);
        recorder.show_in_history(&self.history, parsed.tenant, tenant.label().clone());
        let pooled = match self.count_tenant_visit(&tenant) {
            Ok(_visit) => {
                let pooled = self.pool_all(parsed, readout, &recorder.trace()).await;
                pooled.inspect_err(|refusal| tenant.count_refusal(refusal))
            }
            Err(refusal) => Err(refusal),
        };
        match &pooled {
            Ok(reply) => {
                recorder.embedded(reply);
                recorder.record_outcome("ok");
            }
            Err(refusal) => recorder.record_refusal(refusal),
        }
        pooled
    }

    /// Runs a few inputs at a time, so that one request does not fill the queue for all.
    async fn pool_all(
        self: &Arc<Self>,
        parsed: ParsedRequest,
        readout: Readout,
        trace: &TracedSpan,
    ) -> Result<v1::EmbedReply, Refusal> {
        let mut inputs = parsed.prompts;
        let text = self.text(&parsed.model)?;
        let pooling = text.spec.pooling.clone();
        readout.check(&pooling, text.embedding_length())?;
        if !pooling.is_classifier() && inputs.iter().any(|input| matches!(input, Input::Pair(_))) {
            return Err(Refusal::invalid("pair", "needs a classifier, and this model embeds single texts"));
        }
        let deadline = self.deadline(parsed.deadline);
        let limits = &self.config.limits;
        let (n, n_max) = (inputs.len(), limits.embeddings_max);
        if n == 0 || n > n_max {
            return Err(Refusal::invalid("input", format!("must be 1 to {n_max} inputs, got {n}")));
        }
        let mut reply = v1::EmbedReply { usage: Some(v1::Usage::default()), ..v1::EmbedReply::default() };
        while !inputs.is_empty() {
            let n = inputs.len().min(limits.embeddings_at_once_max).min(self.admission.places() as usize).max(1);
            let part = ParsedRequest {
                model: parsed.model.clone(),
                prompts: inputs.drain(..n).collect(),
                purpose: Purpose::Pool,
                truncation: parsed.truncation,
                adds_special: parsed.adds_special,
                deadline,
                priority: parsed.priority,
                cache_salt: parsed.cache_salt,
                tenant: parsed.tenant,
                ..ParsedRequest::default()
            };
            self.pool_some(part, trace, &mut reply).await?;
        }
        for vector in &mut reply.embeddings {
            readout.finish(&pooling, &mut vector.values)?;
        }
        Ok(reply)
    }

    async fn pool_some(
        self: &Arc<Self>,
        parsed: ParsedRequest,
        trace: &TracedSpan,
        reply: &mut v1::EmbedReply,
    ) -> Result<(), Refusal> {
        let mut generation = self.generate_part(parsed, trace).await?;
        reply.model.clone_from(&generation.started.model);
        let first = reply.embeddings.len();
        reply.embeddings.resize_with(first + generation.prompts.len(), v1::Embedding::default);
        while let Some(event) = generation.next().await {
            match event? {
                (slot, GenerationEvent::Aside(SideOutput::Pooled(values))) => {
                    reply.embeddings[first + slot as usize].values = values;
                }
                (_, GenerationEvent::Finished(finished)) => {
                    let usage = reply.usage.get_or_insert_default();
                    usage.prompt_tokens += finished.usage.map_or(0, |usage| usage.prompt_tokens);
                }
                (_, GenerationEvent::Delta(_) | GenerationEvent::Aside(_)) => {}
            }
        }
        match reply.embeddings[first..].iter().any(|embedding| embedding.values.is_empty()) {
            true => Err(Refusal::failed("the replica returned no hidden states")),
            false => Ok(()),
        }
    }
}

impl Readout {
    pub fn of(kind: ReadoutKind) -> Readout {
        Readout { kind, is_raw: false, dimensions: None }
    }

    /// Refuses what the model does not have.
    fn check(self, of: &PoolingSpec, n_outputs: u32) -> Result<(), Refusal> {
        let is_prefix = |n: &u32| of.prefixes.contain(*n, n_outputs);
        match (self.kind, of.is_classifier()) {
            (ReadoutKind::Embedding, true) => {
                Err(Refusal::invalid("model", "is a classifier, which embeds nothing: use /classify or /v1/rerank"))
            }
            (ReadoutKind::Scores, false) => {
                Err(Refusal::invalid("model", "has no classifier: use /v1/embeddings, /v1/score or /v1/rerank"))
            }
            _ => match self.dimensions.filter(|n| !is_prefix(n)) {
                Some(n) => {
                    let why = format!("must be {n_outputs}, the model's size ({}), got {n}", of.prefixes);
                    Err(Refusal::invalid("dimensions", why))
                }
                None => Ok(()),
            },
        }
    }

    fn finish(self, of: &PoolingSpec, values: &mut Vec<f32>) -> Result<(), Refusal> {
        values.truncate(self.dimensions.map_or(values.len(), |n| n as usize));
        match self.kind {
            _ if self.is_raw => Ok(()),
            ReadoutKind::Embedding => normalize(values),
            ReadoutKind::Scores => {
                activate(of.scores, values);
                Ok(())
            }
        }
    }
}

/// Scales the values to length one. The sum has a fixed order, so that every router gives the same bits.
pub(crate) fn normalize(values: &mut [f32]) -> Result<(), Refusal> {
    let length = values.iter().fold(0.0, |sum, value| sum + f64::from(*value) * f64::from(*value)).sqrt();
    if !length.is_finite() {
        return Err(Refusal::failed("the hidden states are not finite"));
    }
    if length > 0.0 {
        values.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
    Ok(())
}

/// Turns a classifier's outputs into scores, by portable arithmetic in a fixed order.
fn activate(by: ScoreActivation, values: &mut [f32]) {
    match by {
        ScoreActivation::None => {}
        ScoreActivation::Sigmoid => {
            values.iter_mut().for_each(|x| *x = (1.0 / (1.0 + libm::exp(-f64::from(*x)))) as f32);
        }
        ScoreActivation::Softmax => {
            let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weight = |x: &f32| libm::exp(f64::from(*x) - f64::from(largest));
            let sum: f64 = values.iter().map(weight).sum();
            values.iter_mut().for_each(|x| *x = (weight(x) / sum) as f32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_become_scores() {
        let scores = |by, mut values: Vec<f32>| {
            activate(by, &mut values);
            values
        };
        assert_eq!(scores(ScoreActivation::None, vec![1.5, -2.0]), [1.5, -2.0]);
        assert_eq!(scores(ScoreActivation::Sigmoid, vec![0.0, 1000.0, -1000.0]), [0.5, 1.0, 0.0]);
        assert_eq!(scores(ScoreActivation::Softmax, vec![3.0, 3.0]), [0.5, 0.5]);
        assert_eq!(scores(ScoreActivation::Softmax, vec![0.0, 2000.0]), [0.0, 1.0]);
    }
}
