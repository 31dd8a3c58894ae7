//! Collects the results of forms: joins pieces of one kind, counts calls, and drops white space between a thought,
//! calls and content. Has no knowledge of forms.

use crate::AnswerPiece;

#[derive(Debug, Default)]
pub(crate) struct PieceSink {
    pieces: Vec<AnswerPiece>,
    n_calls: usize,
    /// Whether the open call has arguments.
    has_arguments: Option<bool>,
    /// White space at the start of the answer or after a call, which is emitted only if content follows.
    margin: String,
    in_content: bool,
    in_thought: bool,
    /// Newlines of a thought that may be its last.
    n_newlines: usize,
    has_thought: bool,
}

impl PieceSink {
    /// Returns a sink for a text without calls: it holds back no content.
    pub fn plain() -> PieceSink {
        PieceSink { in_content: true, ..PieceSink::default() }
    }

    pub fn add_content(&mut self, text: &str) {
        if !self.in_content {
            self.margin.push_str(text);
            if text.trim_start().is_empty() {
                return;
            }
            self.in_content = true;
            let text = std::mem::take(&mut self.margin);
            self.push_content(&text);
        } else if !text.is_empty() {
            self.push_content(text);
        }
    }

    fn push_content(&mut self, text: &str) {
        match self.pieces.last_mut() {
            Some(AnswerPiece::Content(last_text)) => last_text.push_str(text),
            _ => self.pieces.push(AnswerPiece::Content(text.to_owned())),
        }
    }

    /// Adds to a thought. Newlines at its start and end are not part of it.
    pub fn add_reasoning(&mut self, text: &str) {
        let text = if self.in_thought { text } else { text.trim_start_matches('\n') };
        if text.is_empty() {
            return;
        }
        if !self.in_thought && self.has_thought {
            self.push_reasoning("\n");
        }
        (self.in_thought, self.has_thought) = (true, true);
        let body = text.trim_end_matches('\n');
        let n_newlines = text.len() - body.len();
        if body.is_empty() {
            self.n_newlines += n_newlines;
            return;
        }
        self.flush_newlines();
        self.push_reasoning(body);
        self.n_newlines = n_newlines;
    }

    fn flush_newlines(&mut self) {
        if self.n_newlines > 0 {
            self.push_reasoning(&"\n".repeat(self.n_newlines));
            self.n_newlines = 0;
        }
    }

    fn push_reasoning(&mut self, text: &str) {
        match self.pieces.last_mut() {
            Some(AnswerPiece::Reasoning(last_text)) => last_text.push_str(text),
            _ => self.pieces.push(AnswerPiece::Reasoning(text.to_owned())),
        }
    }

    pub fn in_thought(&self) -> bool {
        self.in_thought
    }

    pub fn end_reasoning(&mut self) {
        (self.in_thought, self.n_newlines) = (false, 0);
    }

    pub fn begin_call(&mut self, name: &str, id: Option<&str>) {
        debug_assert!(self.has_arguments.is_none(), "a call begins within a call");
        let index = self.n_calls;
        self.margin.clear();
        self.in_content = false;
        self.n_calls += 1;
        self.has_arguments = Some(false);
        self.pieces.push(AnswerPiece::CallBegin { index, name: name.to_owned(), id: id.map(str::to_owned) });
    }

    pub fn arguments(&mut self, text: &str) {
        if text.is_empty() || self.has_arguments.is_none() {
            return;
        }
        self.has_arguments = Some(true);
        match self.pieces.last_mut() {
            Some(AnswerPiece::CallArguments { text: last_text, .. }) => last_text.push_str(text),
            _ => self.pieces.push(AnswerPiece::CallArguments { index: self.n_calls - 1, text: text.to_owned() }),
        }
    }

    /// Ends the call. A call without arguments gets an empty object.
    pub fn end_call(&mut self) {
        if self.has_arguments == Some(false) {
            self.arguments("{}");
        }
        if self.has_arguments.take().is_some() {
            self.pieces.push(AnswerPiece::CallEnd { index: self.n_calls - 1 });
        }
    }

    /// Ends the text. If there was nothing else, white space is content.
    pub fn finish(&mut self) {
        self.flush_newlines();
        if self.n_calls == 0 && !self.has_thought && !self.margin.is_empty() {
            let text = std::mem::take(&mut self.margin);
            self.push_content(&text);
        }
        self.margin.clear();
        self.has_arguments = None;
    }

    pub fn drain_into(&mut self, output: &mut Vec<AnswerPiece>) {
        output.append(&mut self.pieces);
    }
}
