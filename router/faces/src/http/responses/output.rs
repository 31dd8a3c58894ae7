//! The items of a response as they grow: thoughts, texts and calls in the order in which the model writes them, and
//! their events. The same code builds a whole answer and a stream. Has no knowledge of requests.

use crate::http::custom::InputReader;
use crate::http::format::{TokenNames, token_logprob_values};
use crate::http::responses::raw::RawMessages;
use proto::v1;
use router::replicas::models::text::ModelText;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::Arc;

/// The events of items, in order, if there is a reader.
#[derive(Default)]
pub struct ItemEvents(Option<Vec<Value>>);

impl ItemEvents {
    pub fn enabled() -> ItemEvents {
        ItemEvents(Some(Vec::new()))
    }

    pub fn disabled() -> ItemEvents {
        ItemEvents(None)
    }

    fn push(&mut self, event: impl FnOnce() -> Value) {
        if let Some(events) = &mut self.0 {
            events.push(event());
        }
    }

    pub fn into_list(self) -> Vec<Value> {
        self.0.unwrap_or_default()
    }
}

/// All items of an answer so far. Only the last one may still grow.
pub struct OutputItems {
    /// The answer's id, from which the ids of its items are made.
    id: String,
    thoughts_in_summary: bool,
    items: Vec<OutputItem>,
    is_open: bool,
    /// Tokens without text before the first item.
    n_leading: u32,
    n_thought_tokens: u32,
    /// The model whose tokens name the logprobs, if the client requested logprobs.
    names: Option<Arc<ModelText>>,
    /// Logprobs of tokens whose text is not sent yet.
    pending_logprobs: Vec<v1::Logprob>,
    /// Prompt and answer as tokens, if the client requested them.
    raw: Option<RawMessages>,
    /// The names of custom tools.
    custom: HashSet<String>,
}

struct OutputItem {
    id: String,
    status: &'static str,
    body: ItemBody,
}

enum ItemBody {
    Thought { text: String, in_summary: bool },
    Text { text: String, logprobs: Vec<Value> },
    Call { id: String, name: String, arguments: String },
    CustomCall { id: String, name: String, input: String, reader: InputReader },
}

const GROWS: &str = "in_progress";
const WHOLE: &str = "completed";
const CUT: &str = "incomplete";

impl OutputItems {
    pub fn new(id: String, thoughts_in_summary: bool) -> OutputItems {
        let (items, is_open) = (Vec::new(), false);
        let (names, pending_logprobs) = (None, Vec::new());
        let (n_leading, n_thought_tokens, raw) = (0, 0, None);
        OutputItems {
            id,
            thoughts_in_summary,
            items,
            is_open,
            n_leading,
            n_thought_tokens,
            names,
            pending_logprobs,
            raw,
            custom: HashSet::new(),
        }
    }

    /// The same, where calls of these tools have a text instead of arguments.
    pub fn with_custom_tools(self, custom: HashSet<String>) -> OutputItems {
        OutputItems { custom, ..self }
    }

    /// The same with logprobs of texts.
    pub fn with_logprobs(self, names: Option<Arc<ModelText>>) -> OutputItems {
        OutputItems { names, ..self }
    }

    /// The same with prompt and answer as tokens.
    pub fn with_raw(self, raw: Option<RawMessages>) -> OutputItems {
        OutputItems { raw, ..self }
    }

    /// Adds the raw messages to a reply.
    pub fn add_raw(&self, reply: &mut Value) {
        if let Some(raw) = &self.raw {
            raw.add_to(reply);
        }
    }

    pub fn n_thought_tokens(&self) -> u32 {
        self.n_thought_tokens
    }

    pub fn values(&self) -> Value {
        self.items.iter().map(OutputItem::value).collect()
    }

    /// Adds a delta: its thought first, then its text, then its calls.
    pub fn add(&mut self, delta: &v1::Delta, events: &mut ItemEvents) {
        if let Some(raw) = &mut self.raw {
            raw.add_delta(delta);
        }
        if !delta.reasoning.is_empty() {
            self.add_thought(&delta.reasoning, events);
        }
        self.count(delta);
        let logprobs = self.logprobs_of(delta);
        if !delta.text.is_empty() {
            self.add_text(&delta.text, logprobs, events);
        }
        for part in &delta.tool_calls {
            self.add_call(part, events);
        }
    }

    /// Returns the logprobs of a text and of tokens without text before it. Those of thoughts and calls are not sent.
    fn logprobs_of(&mut self, delta: &v1::Delta) -> Vec<Value> {
        let Some(names) = &self.names else { return Vec::new() };
        self.pending_logprobs.extend(delta.logprobs.iter().cloned());
        if !delta.reasoning.is_empty() || !delta.tool_calls.is_empty() {
            self.pending_logprobs.clear();
        }
        if delta.text.is_empty() {
            return Vec::new();
        }
        token_logprob_values(TokenNames::texts(&names.tokenizer), &std::mem::take(&mut self.pending_logprobs))
    }

    /// Counts tokens. Tokens without text belong to the item before them; the first ones belong to the first item.
    fn count(&mut self, delta: &v1::Delta) {
        let n = delta.token_ids.len() as u32;
        let is_thought = !delta.reasoning.is_empty();
        let is_silent = !is_thought && delta.text.is_empty() && delta.tool_calls.is_empty();
        let in_thought = matches!(self.open_item().map(|item| &item.body), Some(ItemBody::Thought { .. }));
        let n_leading = std::mem::take(&mut self.n_leading);
        if is_thought || (is_silent && in_thought) {
            self.n_thought_tokens += n_leading + n;
        } else if is_silent && self.items.is_empty() {
            self.n_leading = n_leading + n;
        }
    }

    /// Ends the answer. An answer without content is an empty text.
    pub fn end(&mut self, finished: &v1::Finished, events: &mut ItemEvents) {
        if self.items.is_empty() {
            self.begin(ItemBody::no_text(), events);
        }
        let n_calls = self.items.iter().filter(|item| item.body.is_call()).count();
        let is_call = self.items.last().is_some_and(|item| item.body.is_call());
        let is_cut = match is_call {
            true => n_calls > finished.tool_calls as usize,
            false => finished.reason() == v1::finished::Reason::Length,
        };
        self.close(if is_cut { CUT } else { WHOLE }, events);
    }

    /// Ends an incomplete answer.
    pub fn end_incomplete(&mut self, events: &mut ItemEvents) {
        self.close(CUT, events);
    }

    fn open_item(&mut self) -> Option<&mut OutputItem> {
        if self.is_open { self.items.last_mut() } else { None }
    }

    fn add_thought(&mut self, part: &str, events: &mut ItemEvents) {
        if !matches!(self.open_item().map(|item| &item.body), Some(ItemBody::Thought { .. })) {
            self.begin(ItemBody::Thought { text: String::new(), in_summary: self.thoughts_in_summary }, events);
        }
        self.extend_last(part, Vec::new(), events);
    }

    fn add_text(&mut self, part: &str, logprobs: Vec<Value>, events: &mut ItemEvents) {
        if !matches!(self.open_item().map(|item| &item.body), Some(ItemBody::Text { .. })) {
            self.begin(ItemBody::no_text(), events);
        }
        self.extend_last(part, logprobs, events);
    }

    fn add_call(&mut self, part: &v1::ToolCallDelta, events: &mut ItemEvents) {
        // Only a call's first part has its name.
        if !part.name.is_empty() {
            let (id, name) = (part.id.clone(), part.name.clone());
            let body = match self.custom.contains(&name) {
                true => ItemBody::CustomCall { id, name, input: String::new(), reader: InputReader::default() },
                false => ItemBody::Call { id, name, arguments: String::new() },
            };
            self.begin(body, events);
        }
        let read = match self.open_item().map(|item| &mut item.body) {
            Some(ItemBody::CustomCall { reader, .. }) => reader.push(&part.arguments),
            _ => part.arguments.clone(),
        };
        if !read.is_empty() {
            self.extend_last(&read, Vec::new(), events);
        }
    }

    fn begin(&mut self, body: ItemBody, events: &mut ItemEvents) {
        self.close(WHOLE, events);
        let (index, prefix) = (self.items.len(), body.prefix());
        let item = OutputItem { id: format!("{prefix}_{}_{index}", self.id), status: GROWS, body };
        events.push(
            || json!({ "type": "response.output_item.added", "output_index": index, "item": item.empty_value() }),
        );
        if let Some((kind, part)) = item.body.part() {
            events.push(|| item.event(index, &format!("{kind}_part.added"), "part", part));
        }
        self.items.push(item);
        self.is_open = true;
    }

    fn extend_last(&mut self, part: &str, logprobs: Vec<Value>, events: &mut ItemEvents) {
        let index = self.items.len().saturating_sub(1);
        let Some(item) = self.open_item() else { return };
        item.body.text_mut().push_str(part);
        events.push(|| {
            let mut event = item.event(index, &format!("{}.delta", item.body.event_name()), "delta", part.into());
            if let ItemBody::Text { .. } = &item.body {
                event["logprobs"] = logprobs.clone().into();
            }
            event
        });
        if let ItemBody::Text { logprobs: all, .. } = &mut item.body {
            all.extend(logprobs);
        }
    }

    fn close(&mut self, status: &'static str, events: &mut ItemEvents) {
        let index = self.items.len().saturating_sub(1);
        let Some(item) = self.open_item() else { return };
        item.status = status;
        events.push(|| {
            let (name, text) = (item.body.text_member(), item.body.text().into());
            let mut event = item.event(index, &format!("{}.done", item.body.event_name()), name, text);
            if let ItemBody::Text { logprobs, .. } = &item.body {
                event["logprobs"] = logprobs.as_slice().into();
            }
            if let ItemBody::Call { name, .. } = &item.body {
                event["name"] = name.as_str().into();
            }
            event
        });
        if let Some((kind, part)) = item.body.part() {
            events.push(|| item.event(index, &format!("{kind}_part.done"), "part", part));
        }
        events.push(|| json!({ "type": "response.output_item.done", "output_index": index, "item": item.value() }));
        self.is_open = false;
    }
}

impl OutputItem {
    fn value(&self) -> Value {
        let parts: Vec<Value> = self.body.part().into_iter().map(|(_, part)| part).collect();
        self.with_parts(parts)
    }

    /// Returns the item before any content.
    fn empty_value(&self) -> Value {
        self.with_parts(Vec::new())
    }

    fn with_parts(&self, parts: Vec<Value>) -> Value {
        let OutputItem { id, status, body } = self;
        match body {
            ItemBody::Text { .. } => {
                json!({ "id": id, "type": "message", "status": status, "role": "assistant", "content": parts })
            }
            ItemBody::Thought { in_summary, .. } => {
                let (summary, content) = if *in_summary { (parts, Vec::new()) } else { (Vec::new(), parts) };
                json!({ "id": id, "type": "reasoning", "status": status, "summary": summary, "content": content })
            }
            ItemBody::Call { id: call_id, name, arguments } => json!({
                "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
                "arguments": arguments,
            }),
            ItemBody::CustomCall { id: call_id, name, input, .. } => json!({
                "id": id, "type": "custom_tool_call", "status": status, "call_id": call_id, "name": name,
                "input": input,
            }),
        }
    }

    /// Returns an event about the item's text.
    fn event(&self, index: usize, kind: &str, name: &str, value: Value) -> Value {
        let mut event = json!({ "type": format!("response.{kind}"), "item_id": self.id, "output_index": index });
        match &self.body {
            ItemBody::Call { .. } | ItemBody::CustomCall { .. } => {}
            ItemBody::Thought { in_summary: true, .. } => event["summary_index"] = 0.into(),
            ItemBody::Thought { .. } | ItemBody::Text { .. } => event["content_index"] = 0.into(),
        }
        event[name] = value;
        event
    }
}

impl ItemBody {
    fn no_text() -> ItemBody {
        ItemBody::Text { text: String::new(), logprobs: Vec::new() }
    }

    fn prefix(&self) -> &'static str {
        match self {
            ItemBody::Thought { .. } => "rs",
            ItemBody::Text { .. } => "msg",
            ItemBody::Call { .. } => "fc",
            ItemBody::CustomCall { .. } => "ctc",
        }
    }

    /// Returns the name of the events that carry its text.
    fn event_name(&self) -> &'static str {
        match self {
            ItemBody::Thought { in_summary: true, .. } => "reasoning_summary_text",
            ItemBody::Thought { .. } => "reasoning_text",
            ItemBody::Text { .. } => "output_text",
            ItemBody::Call { .. } => "function_call_arguments",
            ItemBody::CustomCall { .. } => "custom_tool_call_input",
        }
    }

    /// Returns the member of an event that has the whole text.
    fn text_member(&self) -> &'static str {
        match self {
            ItemBody::Call { .. } => "arguments",
            ItemBody::CustomCall { .. } => "input",
            ItemBody::Thought { .. } | ItemBody::Text { .. } => "text",
        }
    }

    fn is_call(&self) -> bool {
        matches!(self, ItemBody::Call { .. } | ItemBody::CustomCall { .. })
    }

    fn text(&self) -> &str {
        match self {
            ItemBody::Thought { text, .. } | ItemBody::Text { text, .. } => text,
            ItemBody::Call { arguments: text, .. } | ItemBody::CustomCall { input: text, .. } => text,
        }
    }

    fn text_mut(&mut self) -> &mut String {
        match self {
            ItemBody::Thought { text, .. } | ItemBody::Text { text, .. } => text,
            ItemBody::Call { arguments: text, .. } | ItemBody::CustomCall { input: text, .. } => text,
        }
    }

    /// Returns its only part and the event name of that part. A call has no parts.
    fn part(&self) -> Option<(&'static str, Value)> {
        match self {
            ItemBody::Thought { text, in_summary: true } => {
                Some(("reasoning_summary", json!({ "type": "summary_text", "text": text })))
            }
            ItemBody::Thought { text, .. } => Some(("content", json!({ "type": "reasoning_text", "text": text }))),
            ItemBody::Text { text, logprobs } => {
                let part = json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": logprobs });
                Some(("content", part))
            }
            ItemBody::Call { .. } | ItemBody::CustomCall { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thought(text: &str, n: usize) -> v1::Delta {
        v1::Delta { reasoning: text.into(), token_ids: vec![1; n], ..v1::Delta::default() }
    }

    fn silent(n: usize) -> v1::Delta {
        v1::Delta { token_ids: vec![1; n], ..v1::Delta::default() }
    }

    fn text(text: &str) -> v1::Delta {
        v1::Delta { text: text.into(), token_ids: vec![1], ..v1::Delta::default() }
    }

    fn n_thought_tokens(deltas: &[v1::Delta]) -> u32 {
        let mut items = OutputItems::new("1".into(), false);
        deltas.iter().for_each(|delta| items.add(delta, &mut ItemEvents::disabled()));
        items.n_thought_tokens()
    }

    #[test]
    fn tokens_of_thoughts_are_counted_however_they_come() {
        assert_eq!(n_thought_tokens(&[silent(2), thought("a", 1), silent(1), thought("b", 1), text("c")]), 5);
        assert_eq!(n_thought_tokens(&[silent(2), thought("ab", 3), text("c"), silent(4)]), 5);
        assert_eq!(n_thought_tokens(&[silent(2), text("c"), silent(4)]), 0);
        assert_eq!(n_thought_tokens(&[text("c"), thought("a", 3), silent(1)]), 4);
    }

    #[test]
    fn a_call_that_was_cut_off_is_no_whole_one() {
        let part = v1::ToolCallDelta { name: "f".into(), arguments: "{".into(), ..Default::default() };
        let delta = v1::Delta { tool_calls: vec![part], ..v1::Delta::default() };
        for (n_whole, status) in [(0, CUT), (1, WHOLE)] {
            let mut items = OutputItems::new("1".into(), false);
            items.add(&delta, &mut ItemEvents::disabled());
            items.end(&v1::Finished { tool_calls: n_whole, ..Default::default() }, &mut ItemEvents::disabled());
            assert_eq!(items.values()[0]["status"], status);
        }
    }
}
