//! The blocks of an answer: thoughts, texts and calls, one after another. Events and the whole message are built from
//! the same parts, so they agree. Has no knowledge of messages and streams.

use crate::http::messages::partial::input_of;
use proto::v1;
use serde_json::{Value, json};
use types::Hex;

const SIGNATURE_PURPOSE: &str = "lockstep 2026 thought";

/// A change of a block.
#[derive(Clone, Debug, PartialEq)]
pub enum ContentBlockEvent {
    Started { index: u32, block: Value },
    Delta { index: u32, part: BlockDeltaKind, text: String },
    Stopped { index: u32 },
}

/// The member of a block that a piece of text extends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockDeltaKind {
    Text,
    Thinking,
    Signature,
    Input,
}

impl BlockDeltaKind {
    fn names(self) -> (&'static str, &'static str) {
        match self {
            BlockDeltaKind::Text => ("text_delta", "text"),
            BlockDeltaKind::Thinking => ("thinking_delta", "thinking"),
            BlockDeltaKind::Signature => ("signature_delta", "signature"),
            BlockDeltaKind::Input => ("input_json_delta", "partial_json"),
        }
    }
}

impl ContentBlockEvent {
    pub fn value(&self) -> Value {
        match self {
            ContentBlockEvent::Started { index, block } => {
                json!({ "type": "content_block_start", "index": index, "content_block": block })
            }
            ContentBlockEvent::Delta { index, part, text } => {
                let (kind, name) = part.names();
                json!({ "type": "content_block_delta", "index": index, "delta": { "type": kind, name: text } })
            }
            ContentBlockEvent::Stopped { index } => json!({ "type": "content_block_stop", "index": index }),
        }
    }
}

/// Divides an answer into blocks as it arrives.
pub struct ContentBlockSplitter {
    n_begun: u32,
    open: Option<OpenBlock>,
    shows_thoughts: bool,
}

enum OpenBlock {
    Text,
    /// With a hash of the thought so far.
    Thinking(Box<blake3::Hasher>),
    Call(u32),
}

impl ContentBlockSplitter {
    /// If `shows_thoughts` is false, a thought's block is empty.
    pub fn new(shows_thoughts: bool) -> ContentBlockSplitter {
        ContentBlockSplitter { n_begun: 0, open: None, shows_thoughts }
    }

    /// Adds a delta. A delta that begins with the rest of an open call extends that call.
    pub fn add_delta(&mut self, delta: &v1::Delta) -> Vec<ContentBlockEvent> {
        let mut events = Vec::new();
        let (new, open): (Vec<&v1::ToolCallDelta>, _) = delta.tool_calls.iter().partition(|part| !part.name.is_empty());
        open.into_iter().for_each(|part| self.add_arguments(part, &mut events));
        if !delta.reasoning.is_empty() {
            self.add_thought(&delta.reasoning, &mut events);
        }
        if !delta.text.is_empty() {
            self.add_text(&delta.text, &mut events);
        }
        new.into_iter().for_each(|part| self.add_call(part, &mut events));
        events
    }

    /// Ends the answer.
    pub fn end(&mut self) -> Vec<ContentBlockEvent> {
        let mut events = Vec::new();
        self.close(&mut events);
        events
    }

    fn add_thought(&mut self, text: &str, events: &mut Vec<ContentBlockEvent>) {
        if !matches!(self.open, Some(OpenBlock::Thinking(_))) {
            let hasher = Box::new(blake3::Hasher::new_derive_key(SIGNATURE_PURPOSE));
            let block = json!({ "type": "thinking", "thinking": "", "signature": "" });
            self.begin(OpenBlock::Thinking(hasher), block, events);
        }
        if let Some(OpenBlock::Thinking(hasher)) = &mut self.open {
            hasher.update(text.as_bytes());
        }
        if self.shows_thoughts {
            events.push(self.delta_event(BlockDeltaKind::Thinking, text.to_owned()));
        }
    }

    fn add_text(&mut self, text: &str, events: &mut Vec<ContentBlockEvent>) {
        if !matches!(self.open, Some(OpenBlock::Text)) {
            self.begin(OpenBlock::Text, json!({ "type": "text", "text": "", "citations": null }), events);
        }
        events.push(self.delta_event(BlockDeltaKind::Text, text.to_owned()));
    }

    fn add_call(&mut self, part: &v1::ToolCallDelta, events: &mut Vec<ContentBlockEvent>) {
        let caller = json!({ "type": "direct" });
        let block = json!({ "type": "tool_use", "id": part.id, "name": part.name, "input": {}, "caller": caller });
        self.begin(OpenBlock::Call(part.index), block, events);
        self.add_arguments(part, events);
    }

    fn add_arguments(&mut self, part: &v1::ToolCallDelta, events: &mut Vec<ContentBlockEvent>) {
        let is_open = matches!(self.open, Some(OpenBlock::Call(index)) if index == part.index);
        if is_open && !part.arguments.is_empty() {
            events.push(self.delta_event(BlockDeltaKind::Input, part.arguments.clone()));
        }
    }

    fn begin(&mut self, block: OpenBlock, value: Value, events: &mut Vec<ContentBlockEvent>) {
        self.close(events);
        events.push(ContentBlockEvent::Started { index: self.n_begun, block: value });
        self.n_begun += 1;
        self.open = Some(block);
    }

    /// Closes the open block. A thought's signature is its hash. Clients send it back, and the server ignores it.
    fn close(&mut self, events: &mut Vec<ContentBlockEvent>) {
        let Some(open) = self.open.take() else { return };
        if let OpenBlock::Thinking(hasher) = open {
            events.push(self.delta_event(BlockDeltaKind::Signature, Hex(hasher.finalize().as_bytes()).to_string()));
        }
        events.push(ContentBlockEvent::Stopped { index: self.n_begun - 1 });
    }

    /// Returns the event that extends the newest block.
    fn delta_event(&self, part: BlockDeltaKind, text: String) -> ContentBlockEvent {
        ContentBlockEvent::Delta { index: self.n_begun - 1, part, text }
    }
}

/// The blocks of a whole message, assembled as a client does it.
#[derive(Default)]
pub struct BlockAssembler {
    blocks: Vec<Value>,
    input: String,
}

impl BlockAssembler {
    pub fn apply(&mut self, event: ContentBlockEvent) {
        match event {
            ContentBlockEvent::Started { block, .. } => self.blocks.push(block),
            ContentBlockEvent::Delta { part: BlockDeltaKind::Input, text, .. } => self.input.push_str(&text),
            ContentBlockEvent::Delta { part, text, .. } => {
                if let Some(Value::String(content)) = self.blocks.last_mut().map(|block| &mut block[part.names().1]) {
                    content.push_str(&text);
                }
            }
            ContentBlockEvent::Stopped { .. } => {
                if let Some(block) = self.blocks.last_mut().filter(|block| block["type"] == "tool_use") {
                    block["input"] = input_of(&std::mem::take(&mut self.input));
                }
            }
        }
    }

    pub fn into_blocks(self) -> Vec<Value> {
        self.blocks
    }
}
