//! The one path from inputs to their embeddings: the replica pools the hidden states, and this file normalises them to
//! length one. Knows no face.

use crate::front::frontend::Frontend;
use crate::front::generation::{GenerationEvent, SideOutput};
use crate::front::parsed_request::{ParsedRequest, Purpose};
use crate::front::recorder::Recorder;
use crate::refusal::Refusal;
use proto::v1;
use std::sync::Arc;
use telemetry::spans::TracedSpan;
use tokio_stream::StreamExt;

impl Frontend {
    /// Returns the embedding of each prompt. `ask` also gives the model, the deadline and the tenant.
    pub async fn embed(
        self: &Arc<Self>,
        parsed: ParsedRequest,
        recorder: &mut Recorder,
    ) -> Result<v1::EmbedReply, Refusal> {
        let parsed = ParsedRequest { purpose: Purpose::Pool, ..parsed };
        recorder.record_request(&parsed);
        let tenant = self.config.keys.tenant_limits(parsed.tenant);
        recorder.show_in_history(&self.history, parsed.tenant, tenant.label().clone());
        let embedded = match self.count_tenant_visit(&tenant) {
            Ok(_visit) => {
                let embedded = self.embed_all(parsed, &recorder.trace()).await;
                embedded.inspect_err(|refusal| tenant.count_refusal(refusal))
            }
            Err(refusal) => Err(refusal),
        };
        match &embedded {
            Ok(reply) => {
                recorder.embedded(reply);
                recorder.record_outcome("ok");
            }
            Err(refusal) => recorder.record_refusal(refusal),
        }
        embedded
    }

    /// Runs a few inputs at a time, so that one request does not fill the queue for all.
    async fn embed_all(self: &Arc<Self>, parsed: ParsedRequest, trace: &TracedSpan) -> Result<v1::EmbedReply, Refusal> {
        let ParsedRequest { model, prompts: mut inputs, truncation, deadline, priority, cache_salt, tenant, .. } =
            parsed;
        let deadline = self.deadline(deadline);
        let limits = &self.config.limits;
        let (n, n_max) = (inputs.len(), limits.embeddings_max);
        if n == 0 || n > n_max {
            return Err(Refusal::invalid("input", format!("must be 1 to {n_max} inputs, got {n}")));
        }
        let mut reply = v1::EmbedReply { usage: Some(v1::Usage::default()), ..v1::EmbedReply::default() };
        while !inputs.is_empty() {
            let n = inputs.len().min(limits.embeddings_at_once_max).min(self.admission.places() as usize).max(1);
            let (model, prompts) = (model.clone(), inputs.drain(..n).collect());
            let part = ParsedRequest {
                model,
                prompts,
                purpose: Purpose::Pool,
                truncation,
                deadline,
                priority,
                cache_salt,
                tenant,
                ..ParsedRequest::default()
            };
            self.embed_some(part, trace, &mut reply).await?;
        }
        Ok(reply)
    }

    async fn embed_some(
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
                    reply.embeddings[first + slot as usize].values = normalized(values)?
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

/// Scales the values to length one. The sum has a fixed order, so that every router gives the same bits.
fn normalized(mut values: Vec<f32>) -> Result<Vec<f32>, Refusal> {
    let length = values.iter().fold(0.0, |sum, value| sum + f64::from(*value) * f64::from(*value)).sqrt();
    if !length.is_finite() {
        return Err(Refusal::failed("the hidden states are not finite"));
    }
    if length > 0.0 {
        values.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
    Ok(values)
}
