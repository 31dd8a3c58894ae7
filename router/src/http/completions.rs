//! `/v1/completions`.

use crate::generate::Front;
use crate::http::answer::{Asked, Shape, answer, token_text};
use crate::http::error::HttpError;
use crate::http::fields::{Fields, token_ids, wrong};
use crate::http::read;
use crate::refusal::Refusal;
use axum::extract::{Request, State};
use axum::response::Response;
use checkpoint::Tokenizer;
use proto::v1;
use proto::v1::generate_request::Input;
use serde_json::{Map, Value, json};
use std::sync::Arc;

pub async fn completions(State(front): State<Arc<Front>>, request: Request) -> Result<Response, HttpError> {
    let asked = ask(read(&front, request).await?)?;
    let offsets = vec![0; asked.n_choices.min(front.config.limits.choices_max) as usize];
    answer(front, asked, Completion { offsets }).await
}

fn ask(mut fields: Fields) -> Result<Asked, Refusal> {
    let mut sampling = fields.sampling()?;
    sampling.logprobs = fields.unsigned("logprobs")?;
    let prompt = fields.take("prompt").ok_or_else(|| Refusal::invalid("prompt", "is missing"))?;
    let request = v1::GenerateRequest {
        model: fields.string("model")?.unwrap_or_default(),
        input: Some(input(prompt)?),
        sampling: Some(sampling),
        priority: fields.priority()?,
        deadline_ms: 0,
    };
    let asked = Asked { request, n_choices: fields.n_choices()?, streaming: fields.stream()? };
    fields.finish()?;
    Ok(asked)
}

/// Text, token ids, or a list of one of these.
fn input(prompt: Value) -> Result<Input, Refusal> {
    match prompt {
        Value::String(text) => Ok(Input::Text(text)),
        Value::Array(mut prompts) if matches!(prompts.first(), Some(Value::String(_) | Value::Array(_))) => {
            match (prompts.len(), prompts.pop()) {
                (1, Some(prompt)) => input(prompt),
                (n, _) => Err(Refusal::invalid("prompt", format!("one prompt a request; there are {n}"))),
            }
        }
        ids @ Value::Array(_) => Ok(Input::TokenIds(v1::TokenIds { ids: token_ids("prompt", ids)? })),
        other => Err(wrong("prompt", "a string or token ids", &other)),
    }
}

struct Completion {
    /// Where the text of each choice's next token begins, in characters.
    offsets: Vec<usize>,
}

impl Shape for Completion {
    const ID_PREFIX: &'static str = "cmpl-";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";

    fn opening(&self) -> Option<(&'static str, Value)> {
        None
    }

    fn piece(&self, text: Option<&str>) -> (&'static str, Value) {
        ("text", text.unwrap_or_default().into())
    }

    fn whole(&self, text: &str) -> (&'static str, Value) {
        ("text", text.into())
    }

    fn logprobs(&mut self, tokenizer: &Tokenizer, choice: u32, logprobs: &[v1::Logprob]) -> Value {
        let offset = &mut self.offsets[choice as usize];
        let (mut tokens, mut offsets, mut top) = (Vec::new(), Vec::new(), Vec::new());
        for logprob in logprobs {
            let text = token_text(tokenizer, logprob.token_id);
            offsets.push(*offset);
            *offset += text.chars().count();
            // The drawn token is among them, likely or not.
            let both = logprob.top.iter().chain([logprob]);
            let named = both.map(|top| (token_text(tokenizer, top.token_id), top.logprob.into()));
            top.push(Value::Object(named.collect::<Map<String, Value>>()));
            tokens.push(text);
        }
        let token_logprobs: Vec<f32> = logprobs.iter().map(|logprob| logprob.logprob).collect();
        json!({ "text_offset": offsets, "token_logprobs": token_logprobs, "tokens": tokens, "top_logprobs": top })
    }
}
