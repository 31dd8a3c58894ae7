//! Turns tokens into text that can be shown: whole characters only and nothing of a stop string. In a chat's answer,
//! calls and thoughts are split from the text. Knows nothing of requests.
//!
//! `tokens ── detokenizer ──▶ characters ── stop filter ──▶ text ── dialect ──▶ content, reasoning, calls`

use crate::front::calls::{CallIds, DeltaWriter};
use crate::front::hidden::{HiddenThoughts, TokenContent};
use crate::front::stop::{StopFilter, Stops};
use crate::replicas::models::talk::AnswerParseContext;
use checkpoint::{Detokenizer, Tokenizer};
use dialect::AnswerParser;
use proto::v1;
use std::sync::Arc;
use types::Token;

/// The text of one choice as it grows.
pub struct AnswerAssembly {
    detokenizer: Detokenizer,
    filter: StopFilter,
    /// How many tokens at the beginning cannot complete a stop string.
    n_unstoppable: u32,
    n_tokens: u32,
    /// How many tokens had come at the last piece of reasoning.
    n_reasoning: u32,
    /// None if the answer is text and nothing else.
    reader: Option<Box<ChatAnswerReader>>,
    /// None if thoughts are shown.
    hidden: Option<HiddenThoughts>,
    /// The text that the filter has let through, empty between calls.
    shown: String,
}

/// How the text of a chat's answer becomes content, reasoning and calls.
struct ChatAnswerReader {
    speech: AnswerParser,
    writer: DeltaWriter,
}

impl AnswerAssembly {
    pub fn new(tokenizer: &Tokenizer, stops: Arc<Stops>, tokens_min: u32, show_special: bool) -> AnswerAssembly {
        let detokenizer = if show_special { tokenizer.stream_with_special() } else { tokenizer.stream() };
        AnswerAssembly {
            detokenizer,
            filter: StopFilter::new(stops),
            n_unstoppable: tokens_min,
            n_tokens: 0,
            n_reasoning: 0,
            reader: None,
            hidden: None,
            shown: String::new(),
        }
    }

    /// Reads the answer of a chat.
    pub fn of_chat(self, talk: &AnswerParseContext, ids: CallIds) -> AnswerAssembly {
        let Some(speech) = talk.answer_parser() else { return self };
        let writer = DeltaWriter::new(ids, talk.is_parallel, talk.includes_reasoning);
        let detokenizer = self.detokenizer.with_visible_tokens(talk.markers.clone());
        let hidden = (!talk.includes_reasoning).then(HiddenThoughts::default);
        AnswerAssembly { detokenizer, reader: Some(Box::new(ChatAnswerReader { speech, writer })), hidden, ..self }
    }

    /// Whether calls and thoughts are split from the text.
    pub fn separates_calls(&self) -> bool {
        self.reader.is_some()
    }

    /// How many tokens count: all up to and including the one that completed a stop string.
    pub fn n_tokens(&self) -> u32 {
        self.n_tokens
    }

    /// How many of the tokens belong to a thought, which comes before the answer.
    pub fn n_reasoning(&self) -> u32 {
        self.n_reasoning
    }

    /// How many whole calls the answer has.
    pub fn n_calls(&self) -> u32 {
        self.reader.as_ref().map_or(0, |reader| reader.writer.n_whole())
    }

    /// Adds to `delta` the content that this token reveals. Returns the index of a stop string that it completed: then
    /// the text is over.
    pub fn push(&mut self, token: Token, delta: &mut v1::Delta) -> Option<usize> {
        self.n_tokens += 1;
        let piece = self.detokenizer.push(token);
        let stop = if self.n_tokens <= self.n_unstoppable {
            self.shown.push_str(piece);
            None
        } else {
            self.filter.push(piece, &mut self.shown)
        };
        self.show(stop.is_some(), delta);
        stop
    }

    /// Counts the token that ends the text, which is not part of it.
    pub fn push_stop_token(&mut self) {
        self.n_tokens += 1;
    }

    /// Ends the text. A character that was cut off is shown as a replacement character, and may still complete a stop
    /// string.
    pub fn finish(&mut self, delta: &mut v1::Delta) -> Option<usize> {
        let stop = self.filter.push(self.detokenizer.finish(), &mut self.shown);
        self.filter.finish(&mut self.shown);
        self.show(true, delta);
        stop
    }

    /// Returns the logprobs that may be sent after this token, which has its own: not those of hidden thoughts.
    pub fn visible_logprobs(&mut self, own: Option<v1::Logprob>, is_over: bool) -> Vec<v1::Logprob> {
        match &mut self.hidden {
            Some(hidden) => {
                let in_thought = self.reader.as_ref().is_some_and(|reader| reader.speech.in_thought());
                hidden.push_logprob(own, in_thought, is_over)
            }
            None => own.into_iter().collect(),
        }
    }

    /// Whether the client receives no thoughts.
    pub fn hides_thoughts(&self) -> bool {
        self.hidden.is_some()
    }

    fn show(&mut self, is_last: bool, delta: &mut v1::Delta) {
        match &mut self.reader {
            Some(reader) => {
                let content = reader.read(&self.shown, is_last, delta);
                if content == TokenContent::Thought {
                    self.n_reasoning = self.n_tokens;
                }
                if let Some(hidden) = &mut self.hidden {
                    hidden.content = hidden.content.max(content);
                }
            }
            None => delta.text.push_str(&self.shown),
        }
        self.shown.clear();
    }
}

impl ChatAnswerReader {
    fn read(&mut self, text: &str, is_last: bool, delta: &mut v1::Delta) -> TokenContent {
        let mut pieces = Vec::new();
        if !text.is_empty() {
            self.speech.push(text, &mut pieces);
        }
        if is_last {
            self.speech.finish(&mut pieces);
        }
        let content = pieces.iter().map(TokenContent::of).max().unwrap_or_default();
        pieces.into_iter().for_each(|piece| self.writer.add(piece, delta));
        content
    }
}
