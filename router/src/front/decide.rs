//! Reads a model's decisions: for each of several questions behind one state, the probabilities of the labels that may
//! begin the answer. The state is computed once, because the questions share its blocks in the prefix cache. Knows no
//! face.
//!
//! A label is one token. Its probability is that of the model's whole vocabulary, before any sampling parameter, so it
//! does not depend on the batch, on the cache or on the grid.

use crate::front::frontend::{Frontend, unix_seconds};
use crate::front::generation::{Generation, GenerationEvent};
use crate::front::parsed_request::{ParsedRequest, Purpose};
use crate::front::recorder::Recorder;
use crate::refusal::Refusal;
use crate::replicas::models::table::VersionSelector;
use crate::replicas::models::text::{EncodeSettings, EncodedInput, ModelText};
use dialect::AnswerStart;
use proto::v1;
use proto::v1::generate_request::Input;
use std::sync::Arc;
use telemetry::spans::TracedSpan;
use tokio_stream::StreamExt;
use types::{Token, Tokens};

/// A question: the chat that ends with it, and the labels that may begin the answer.
pub struct LabelQuestion {
    pub chat: v1::Chat,
    pub labels: Vec<String>,
    /// How an error names it.
    pub name: String,
}

/// What the model has for a question's labels.
#[derive(Clone, Debug)]
pub struct LabelRead {
    /// For each label, as if no other token could follow.
    pub probabilities: Vec<f64>,
    /// What all labels have together in the whole vocabulary.
    pub mass: f64,
    /// The most likely token of all is one of them.
    pub is_likeliest: bool,
}

impl LabelRead {
    /// The first of the most likely labels.
    pub fn top(&self) -> usize {
        let better = |best: usize, i: usize| if self.probabilities[i] > self.probabilities[best] { i } else { best };
        (0..self.probabilities.len()).fold(0, better)
    }

    /// The probability of that label in the whole vocabulary.
    pub fn confidence(&self) -> f64 {
        self.probabilities[self.top()] * self.mass
    }

    /// From the logprobs of the labels and of the likeliest token.
    fn of(logprobs: &[f32], likeliest: f32) -> LabelRead {
        let largest = logprobs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |logprob: &f32| libm::exp(f64::from(*logprob) - f64::from(largest));
        let sum: f64 = logprobs.iter().map(weight).sum();
        LabelRead {
            probabilities: logprobs.iter().map(|logprob| weight(logprob) / sum).collect(),
            mass: logprobs.iter().map(|logprob| libm::exp(f64::from(*logprob))).sum(),
            is_likeliest: largest >= likeliest,
        }
    }
}

/// The answers to all questions, in their order.
pub struct Decisions {
    pub model: String,
    pub reads: Vec<LabelRead>,
    pub usage: v1::Usage,
}

/// A question as tokens, and its labels.
struct LabelPrompt {
    ids: Tokens,
    labels: Tokens,
}

/// More options than letters have two letters, of which only some are one token.
const LETTERS: std::ops::RangeInclusive<char> = 'A'..='Z';

/// Returns labels for so many options: letters, and then pairs of letters that the tokenizer has as one token.
pub fn option_labels(of: &ModelText, n: usize) -> Result<Vec<String>, Refusal> {
    let is_one = |label: &String| of.tokenizer.encode(label, false).is_ok_and(|ids| ids.len() == 1);
    let pairs = LETTERS.flat_map(|a| LETTERS.map(move |b| format!("{a}{b}"))).filter(is_one);
    let labels: Vec<String> = LETTERS.map(String::from).chain(pairs).take(n).collect();
    match labels.len() == n {
        true => Ok(labels),
        false => {
            let why = format!("This model supports at most {} choices per question", labels.len());
            Err(Refusal::invalid("choices", why))
        }
    }
}

/// Reads the decisions of all questions. `parsed` has everything but the prompts.
pub async fn decide(
    front: &Arc<Frontend>,
    parsed: ParsedRequest,
    questions: Vec<LabelQuestion>,
    recorder: &mut Recorder,
) -> Result<Decisions, Refusal> {
    let parsed = ParsedRequest { purpose: Purpose::Read(Tokens::new()), ..parsed };
    recorder.record_request(&parsed);
    let tenant = front.config.keys.tenant_limits(parsed.tenant);
    recorder.show_in_history(&front.history, parsed.tenant, tenant.label().clone());
    let decided = match front.count_tenant_visit(&tenant) {
        Ok(_visit) => {
            let decided = decide_all(front, parsed, questions, &recorder.trace()).await;
            decided.inspect_err(|refusal| tenant.count_refusal(refusal))
        }
        Err(refusal) => Err(refusal),
    };
    match &decided {
        Ok(Decisions { model, usage, .. }) => {
            let reply = v1::EmbedReply { model: model.clone(), usage: Some(*usage), ..Default::default() };
            recorder.embedded(&reply);
            recorder.record_outcome("ok");
        }
        Err(refusal) => recorder.record_refusal(refusal),
    }
    decided
}

async fn decide_all(
    front: &Arc<Frontend>,
    parsed: ParsedRequest,
    questions: Vec<LabelQuestion>,
    trace: &TracedSpan,
) -> Result<Decisions, Refusal> {
    let text = front.text(&parsed.model)?;
    text.check_generates()?;
    let deadline = front.deadline(parsed.deadline);
    let served = front.model(&parsed.model, VersionSelector::Weight);
    let context = served.map_or(text.spec.context, |model| model.replica.context);
    let prompts = label_prompts(front, &text, questions, context).await?;
    let at_once = front.config.limits.embeddings_at_once_max.min(front.admission.places() as usize).max(1);
    let mut all = Decisions { model: String::new(), reads: Vec::new(), usage: v1::Usage::default() };
    // A few at a time, so that one request does not fill the queue for all.
    for some in prompts.chunks(at_once) {
        let mut running = Vec::new();
        for LabelPrompt { ids, labels } in some {
            let part = ParsedRequest {
                model: parsed.model.clone(),
                prompts: vec![Input::TokenIds(v1::TokenIds { ids: ids.clone() })],
                purpose: Purpose::Read(labels.clone()),
                deadline,
                priority: parsed.priority,
                cache_salt: parsed.cache_salt,
                cache_hint: parsed.cache_hint,
                tenant: parsed.tenant,
                placement: parsed.placement,
                ..ParsedRequest::default()
            };
            running.push(front.generate_part(part, trace).await?);
        }
        for (mut generation, prompt) in running.into_iter().zip(some) {
            all.model.clone_from(&generation.started.model);
            all.reads.push(label_read(&mut generation, &prompt.labels, &mut all.usage).await?);
        }
    }
    Ok(all)
}

/// Renders the questions, and finds the tokens of their labels. The first that is too long ends it, so that a long text
/// is not read once for each question.
async fn label_prompts(
    front: &Frontend,
    of: &Arc<ModelText>,
    questions: Vec<LabelQuestion>,
    context: u32,
) -> Result<Vec<LabelPrompt>, Refusal> {
    let (settings, mut prompts) = (EncodeSettings::at(unix_seconds()), Vec::with_capacity(questions.len()));
    let mut known: Option<(Tokens, Vec<String>, Tokens)> = None;
    for LabelQuestion { chat, labels, name } in questions {
        let EncodedInput { ids, talk, .. } = front.texts.encoded(of, Input::Chat(chat), settings).await?;
        if talk.is_some_and(|talk| talk.opening == AnswerStart::Thought) {
            let why = "a decision is the first token of the answer, and this chat template opens a thought there";
            return Err(Refusal::invalid("model", why));
        }
        if ids.len() >= context as usize {
            return Err(Refusal::TooLong { n_prompt: ids.len(), context });
        }
        let tail = tail(of, &ids);
        let found = match known.take().filter(|(of_tail, of_labels, _)| of_tail == tail && *of_labels == labels) {
            Some(known) => known,
            None => {
                let tokens = label_tokens(of, tail, &labels, &name)?;
                (tail.to_vec(), labels, tokens)
            }
        };
        let tokens = found.2.clone();
        known = Some(found);
        prompts.push(LabelPrompt { ids, labels: tokens });
    }
    Ok(prompts)
}

/// The tokens behind the last control token: what a label may merge with.
fn tail<'a>(of: &ModelText, ids: &'a [Token]) -> &'a [Token] {
    let begins = ids.iter().rposition(|id| of.tokenizer.is_special(*id)).map_or(0, |last| last + 1);
    &ids[begins..]
}

/// The token of each label behind this tail. Refuses labels that are not one token each, all different.
fn label_tokens(of: &ModelText, tail: &[Token], labels: &[String], name: &str) -> Result<Tokens, Refusal> {
    let text = of.tokenizer.decode(tail, false);
    let mut tokens = Tokens::new();
    for label in labels {
        let ids = of.tokenizer.encode(&format!("{text}{label}"), false).unwrap_or_default();
        match ids.split_last() {
            Some((token, before)) if before == tail && !tokens.contains(token) => tokens.push(*token),
            _ => {
                let why = format!("{name}: label {label:?} is not one distinct token after this model's chat prompt");
                return Err(Refusal::invalid("questions", why));
            }
        }
    }
    Ok(tokens)
}

/// Waits for an answer of one token, and reads the labels' logprobs at its position.
async fn label_read(
    generation: &mut Generation,
    labels: &[Token],
    usage: &mut v1::Usage,
) -> Result<LabelRead, Refusal> {
    let mut read = None;
    while let Some(event) = generation.next().await {
        match event? {
            (_, GenerationEvent::Delta(delta)) => {
                if let Some(drawn) = delta.logprobs.first() {
                    let logprob = |label: &Token| {
                        let requested = drawn.top.iter().chain([drawn]);
                        requested.clone().find(|of| of.token_id == *label).map(|of| of.logprob)
                    };
                    let logprobs = labels.iter().map(logprob).collect::<Option<Vec<f32>>>();
                    read = logprobs.map(|logprobs| LabelRead::of(&logprobs, drawn.logprob));
                }
            }
            (_, GenerationEvent::Finished(finished)) => {
                let of = finished.usage.unwrap_or_default();
                usage.prompt_tokens += of.prompt_tokens;
                usage.cached_tokens += of.cached_tokens;
                usage.completion_tokens += of.completion_tokens;
            }
            (_, GenerationEvent::Aside(_)) => {}
        }
    }
    read.ok_or_else(|| Refusal::failed("the replica returned no logprobs of the labels"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_among_labels_and_the_mass_is_of_all_tokens() {
        let read = LabelRead::of(&[0.2f32.ln(), 0.6f32.ln()], 0.6f32.ln());
        assert!((read.probabilities[0] - 0.25).abs() < 1e-6 && (read.mass - 0.8).abs() < 1e-6);
        assert_eq!((read.top(), read.is_likeliest), (1, true));
        assert!((read.confidence() - 0.6).abs() < 1e-6);
        assert!(!LabelRead::of(&[-3.0, -2.0], -0.5).is_likeliest);
        // Labels that no model would write still have probabilities.
        let far = LabelRead::of(&[-1000.0, -1000.0], 0.0);
        assert_eq!((far.probabilities, far.mass), (vec![0.5, 0.5], 0.0));
    }
}
