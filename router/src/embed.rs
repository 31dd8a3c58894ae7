//! The one path from inputs to their embeddings: pooled by the replica, brought to length one here.

use crate::generate::{Ask, Front, Purpose};
use crate::generation::Event;
use crate::measure::Clock;
use crate::refusal::Refusal;
use proto::v1;
use proto::v1::generate_request::Input;
use std::sync::Arc;
use telemetry::spans::Traced;
use tokio::time::Instant;
use tokio_stream::StreamExt;
use types::TenantId;

pub struct EmbedAsk {
    pub model: String,
    pub inputs: Vec<Input>,
    pub deadline: Option<Instant>,
    pub tenant: TenantId,
}

impl Front {
    pub async fn embed(self: &Arc<Self>, ask: EmbedAsk, clock: &mut Clock) -> Result<v1::EmbedReply, Refusal> {
        clock.asked_to_embed(&ask);
        let tenant = self.config.keys.of(ask.tenant);
        let embedded = match self.enter(&tenant) {
            Ok(_visit) => {
                let embedded = self.embed_all(ask, &clock.trace()).await;
                embedded.inspect_err(|refusal| tenant.refused(refusal))
            }
            Err(refusal) => Err(refusal),
        };
        match &embedded {
            Ok(reply) => {
                clock.embedded(reply);
                clock.finished("ok");
            }
            Err(refusal) => clock.refused(refusal),
        }
        embedded
    }

    /// A few at a time, so that one request does not fill the queue for all.
    async fn embed_all(self: &Arc<Self>, ask: EmbedAsk, trace: &Traced) -> Result<v1::EmbedReply, Refusal> {
        let EmbedAsk { model, mut inputs, deadline, tenant } = ask;
        let deadline = self.deadline(deadline);
        let limits = &self.config.limits;
        let (n, n_max) = (inputs.len(), limits.embeddings_max);
        if n == 0 || n > n_max {
            return Err(Refusal::invalid("input", format!("must be 1 to {n_max} inputs, and there are {n}")));
        }
        let mut reply = v1::EmbedReply { usage: Some(v1::Usage::default()), ..v1::EmbedReply::default() };
        while !inputs.is_empty() {
            let n = inputs.len().min(limits.embeddings_at_once_max).min(self.admission.places() as usize).max(1);
            let ask = Ask {
                model: model.clone(),
                prompts: inputs.drain(..n).collect(),
                n_choices: 1,
                first_choice: 0,
                purpose: Purpose::Pool,
                echo: false,
                priority: 0,
                deadline,
                tenant,
                session: None,
                resume: None,
                trace: trace.clone(),
                room: Vec::new(),
                clock: None,
            };
            self.embed_some(ask, &mut reply).await?;
        }
        Ok(reply)
    }

    async fn embed_some(self: &Arc<Self>, ask: Ask, reply: &mut v1::EmbedReply) -> Result<(), Refusal> {
        let mut generation = self.generate_part(ask).await?;
        reply.model.clone_from(&generation.started.model);
        let first = reply.embeddings.len();
        reply.embeddings.resize_with(first + generation.prompts.len(), v1::Embedding::default);
        while let Some(event) = generation.next().await {
            match event? {
                (slot, Event::Pooled(values)) => reply.embeddings[first + slot as usize].values = normalized(values)?,
                (_, Event::Finished(finished)) => {
                    let usage = reply.usage.get_or_insert_default();
                    usage.prompt_tokens += finished.usage.map_or(0, |usage| usage.prompt_tokens);
                }
                (_, Event::Prompt(_) | Event::Told(_) | Event::Delta(_)) => {}
            }
        }
        match reply.embeddings[first..].iter().any(|embedding| embedding.values.is_empty()) {
            true => Err(Refusal::failed("the replica gave no hidden states")),
            false => Ok(()),
        }
    }
}

/// The same direction with length one; summed one by one, so that every router gives the same bits.
fn normalized(mut values: Vec<f32>) -> Result<Vec<f32>, Refusal> {
    let length = values.iter().fold(0.0, |sum, value| sum + f64::from(*value) * f64::from(*value)).sqrt();
    if !length.is_finite() {
        return Err(Refusal::failed("the hidden states hold what is no number"));
    }
    if length > 0.0 {
        values.iter_mut().for_each(|value| *value = (f64::from(*value) / length) as f32);
    }
    Ok(values)
}
