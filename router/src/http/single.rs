//! What pages have in common whose answer is one text: a chat with one choice. Knows nobody's words for it.

use crate::generate::{Ask, Front, Purpose, Room};
use crate::generation::{Event, Generation};
use crate::http::Page;
use crate::http::fields::{Fields, Streaming, wrong};
use crate::measure::Clock;
use crate::refusal::Refusal;
use crate::resume::Resume;
use proto::v1;
use proto::v1::generate_request::Input;
use serde_json::Value;
use std::sync::Arc;
use tokio::time::Instant;
use tokio_stream::StreamExt;
use types::TenantId;

/// A kind that is not known, as a refusal repeats it.
const KIND_CHARS_MAX: usize = 40;

/// A request as a page has read it.
pub struct Single {
    pub model: String,
    pub chat: v1::Chat,
    pub sampling: v1::Sampling,
    pub is_stream: bool,
    pub priority: i32,
    pub deadline: Option<Instant>,
    pub tenant: TenantId,
    pub session: Option<u64>,
    pub room: Room,
    pub resume: Option<Resume>,
}

impl Single {
    /// What every such page reads alike, and then that nothing is left which would change the answer.
    pub fn read(
        front: &Front,
        mut page: Page,
        messages: Vec<v1::ChatMessage>,
        sampling: v1::Sampling,
    ) -> Result<Single, Refusal> {
        let fields = &mut page.fields;
        let (model, priority, deadline) = (fields.string("model")?, fields.priority()?, fields.deadline()?);
        let is_stream = fields.boolean("stream")?.unwrap_or(false);
        let streaming = is_stream.then_some(Streaming { include_usage: false });
        let session = fields.session();
        let resume = page.resume(streaming, &front.config.limits)?;
        let Page { fields, tenant, room, .. } = page;
        fields.finish()?;
        let (model, chat) = (model.unwrap_or_default(), v1::Chat { messages, add_generation_prompt: None });
        Ok(Single { model, chat, sampling, is_stream, priority, deadline, tenant, session, room, resume })
    }

    pub async fn begin(self, front: &Arc<Front>, clock: Clock) -> Result<Generation, Refusal> {
        let ask = Ask {
            model: self.model,
            prompts: vec![Input::Chat(self.chat)],
            n_choices: 1,
            first_choice: 0,
            purpose: Purpose::Generate(Box::new(self.sampling)),
            echo: false,
            priority: self.priority,
            deadline: self.deadline,
            tenant: self.tenant,
            session: self.session,
            resume: self.resume,
            trace: clock.trace(),
            room: self.room,
            clock: Some(clock),
        };
        let mut generation = front.generate(ask).await?;
        generation.answered(front.config.waits.first_answer_max).await?;
        Ok(generation)
    }
}

/// The whole answer and how it ended.
pub async fn whole(generation: &mut Generation) -> Result<(String, v1::Finished), Refusal> {
    let (mut text, mut last) = (String::new(), v1::Finished::default());
    while let Some(event) = generation.next().await {
        match event?.1 {
            Event::Delta(delta) => text.push_str(&delta.text),
            Event::Finished(finished) => last = finished,
            Event::Prompt(_) | Event::Told(_) | Event::Pooled(_) => {}
        }
    }
    Ok((text, last))
}

/// A text, or parts of text, which are lines of one. `kinds` are what a part of text may be called.
pub fn text_of(field: &str, content: Option<Value>, kinds: &[&str]) -> Result<String, Refusal> {
    let parts = match content {
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(parts)) => parts,
        None => return Err(invalid(field.to_owned(), "is missing")),
        Some(other) => return Err(wrong(field.to_owned(), "a string or a list of parts", &other)),
    };
    let text = |(j, part): (usize, &Value)| match (part["type"].as_str(), &part["text"]) {
        (Some(kind), Value::String(text)) if kinds.contains(&kind) => Ok(text.clone()),
        (Some(kind), _) if kinds.contains(&kind) => Err(invalid(format!("{field}[{j}].text"), "must be a string")),
        (Some(kind), _) => Err(unserved(format!("{field}[{j}].type"), kind)),
        (None, _) => Err(invalid(format!("{field}[{j}].type"), "is missing")),
    };
    let lines: Vec<String> = parts.iter().enumerate().map(text).collect::<Result<_, _>>()?;
    Ok(lines.join("\n"))
}

/// What others serve and this does not.
pub fn unserved(field: String, kind: &str) -> Refusal {
    let kind: String = kind.chars().take(KIND_CHARS_MAX).collect();
    invalid(field, &format!("`{kind}` is not supported yet; only text is"))
}

pub fn invalid(field: String, message: &str) -> Refusal {
    Refusal::Invalid { field: field.into(), message: message.to_owned() }
}

/// The members of a list that is not empty, and each is an object.
pub fn objects(field: &'static str, list: Option<Value>) -> Result<Vec<Fields>, Refusal> {
    let list = match list {
        Some(Value::Array(list)) if !list.is_empty() => list,
        Some(Value::Array(_)) => return Err(Refusal::invalid(field, "there are none")),
        Some(other) => return Err(wrong(field, "a list", &other)),
        None => return Err(Refusal::invalid(field, "is missing")),
    };
    let object = |(i, value): (usize, Value)| match value {
        Value::Object(members) => Ok(Fields::of(members)),
        other => Err(wrong(format!("{field}[{i}]"), "an object", &other)),
    };
    list.into_iter().enumerate().map(object).collect()
}
