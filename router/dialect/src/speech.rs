//! Reads a text that arrives in pieces: first a thought, then content and calls. The result depends on the text so far
//! and not on its pieces, so a replay or a resumed stream gives the same. Has no knowledge of forms and markers.
//!
//! `[0, said) given out · [said, len - unread) given out now, or held by a form until it is a call or none ·
//! [len - unread, len) may become a marker`

use crate::AnswerPiece;
use crate::forms::{Form, FormStep};
use crate::sink::PieceSink;
use crate::thoughts::{ThoughtReader, ThoughtStep};

/// No marker is longer, so at most this many bytes are read twice.
const UNREAD_MAX: usize = 64;
const IDLE_MAX: usize = 8;

/// The reader of one answer of a model.
pub struct AnswerParser {
    unread: String,
    thought: Option<ThoughtReader>,
    form: Box<dyn Form>,
    sink: PieceSink,
    is_finished: bool,
}

impl std::fmt::Debug for AnswerParser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Speech").field("unread", &self.unread).field("thought", &self.thought).finish_non_exhaustive()
    }
}

impl AnswerParser {
    pub(crate) fn new(thought: Option<ThoughtReader>, form: Box<dyn Form>, sink: PieceSink) -> AnswerParser {
        AnswerParser { unread: String::new(), thought, form, sink, is_finished: false }
    }

    /// Reads more text, and appends to `output` the pieces that are certain now. Text after the end is ignored.
    pub fn push(&mut self, text: &str, output: &mut Vec<AnswerPiece>) {
        if self.is_finished {
            return;
        }
        self.unread.push_str(text);
        self.advance(false);
        debug_assert!(self.unread.len() <= UNREAD_MAX, "{} bytes are unread", self.unread.len());
        self.sink.drain_into(output);
    }

    /// Ends the text: a possible marker becomes text, and a possible call becomes content.
    pub fn finish(&mut self, output: &mut Vec<AnswerPiece>) {
        if self.is_finished {
            return;
        }
        self.is_finished = true;
        self.advance(true);
        self.end_thought();
        self.advance(true);
        self.form.finish(&mut self.sink);
        self.sink.finish();
        self.sink.drain_into(output);
    }

    /// Whether part of a thought was emitted that has not ended.
    pub fn in_thought(&self) -> bool {
        self.sink.in_thought()
    }

    fn advance(&mut self, last: bool) {
        let mut at = 0;
        // The steps since the last progress: a form changes its state a few times before it continues to read.
        let (mut n_idle, mut read) = (0, 0);
        while at < self.unread.len() {
            n_idle = if at == read { n_idle + 1 } else { 0 };
            read = at;
            debug_assert!(n_idle < IDLE_MAX, "nothing reads {:?}", self.unread[at..].chars().take(UNREAD_MAX));
            let rest = &self.unread[at..];
            let Some(thought) = &mut self.thought else {
                match self.form.step(rest, last, &mut self.sink) {
                    FormStep::Took(n) => at += n,
                    FormStep::More => break,
                }
                continue;
            };
            match thought.step(rest, last, &mut self.sink) {
                ThoughtStep::Took(n) => at += n,
                ThoughtStep::More => break,
                ThoughtStep::Over => {
                    self.unread.drain(..at);
                    self.end_thought();
                    at = 0;
                }
            }
        }
        self.unread.drain(..at);
    }

    /// Lets the form read the text that the thought's reader has held back.
    fn end_thought(&mut self) {
        if let Some(thought) = self.thought.take() {
            self.unread.insert_str(0, thought.held());
        }
    }
}
