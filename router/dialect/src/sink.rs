//! Where forms say what they read: pieces that belong together are joined, calls are counted, and white space between
//! a thought, calls and content is left out. Knows no form.

use crate::Piece;

#[derive(Debug, Default)]
pub(crate) struct Sink {
    pieces: Vec<Piece>,
    n_calls: usize,
    call: Option<Call>,
    /// White space at the start of the answer or behind a call: said only if content follows.
    margin: String,
    in_content: bool,
    thought: Thought,
    /// Newlines of a thought that may be its last.
    n_newlines: usize,
    has_thought: bool,
}

#[derive(Debug)]
struct Call {
    has_arguments: bool,
}

#[derive(Debug, Default, PartialEq)]
enum Thought {
    #[default]
    Fresh,
    Begun,
}

impl Sink {
    /// A sink for a text in which no call can be: nothing of its content is held back.
    pub fn plain() -> Sink {
        Sink { in_content: true, ..Sink::default() }
    }

    pub fn content(&mut self, text: &str) {
        if !self.in_content {
            self.margin.push_str(text);
            if text.trim_start().is_empty() {
                return;
            }
            self.in_content = true;
            let text = std::mem::take(&mut self.margin);
            self.say_content(&text);
        } else if !text.is_empty() {
            self.say_content(text);
        }
    }

    fn say_content(&mut self, text: &str) {
        match self.pieces.last_mut() {
            Some(Piece::Content(said)) => said.push_str(text),
            _ => self.pieces.push(Piece::Content(text.to_owned())),
        }
    }

    /// Newlines at a thought's start and end are of its frame.
    pub fn reasoning(&mut self, text: &str) {
        let text = if self.thought == Thought::Fresh { text.trim_start_matches('\n') } else { text };
        if text.is_empty() {
            return;
        }
        if self.thought == Thought::Fresh && self.has_thought {
            self.say_reasoning("\n");
        }
        (self.thought, self.has_thought) = (Thought::Begun, true);
        let body = text.trim_end_matches('\n');
        let n_newlines = text.len() - body.len();
        if body.is_empty() {
            self.n_newlines += n_newlines;
            return;
        }
        self.say_newlines();
        self.say_reasoning(body);
        self.n_newlines = n_newlines;
    }

    fn say_newlines(&mut self) {
        if self.n_newlines > 0 {
            self.say_reasoning(&"\n".repeat(self.n_newlines));
            self.n_newlines = 0;
        }
    }

    fn say_reasoning(&mut self, text: &str) {
        match self.pieces.last_mut() {
            Some(Piece::Reasoning(said)) => said.push_str(text),
            _ => self.pieces.push(Piece::Reasoning(text.to_owned())),
        }
    }

    pub fn end_reasoning(&mut self) {
        (self.thought, self.n_newlines) = (Thought::Fresh, 0);
    }

    pub fn begin_call(&mut self, name: &str, id: Option<&str>) {
        debug_assert!(self.call.is_none(), "a call begins within a call");
        let index = self.n_calls;
        self.margin.clear();
        self.in_content = false;
        self.n_calls += 1;
        self.call = Some(Call { has_arguments: false });
        self.pieces.push(Piece::CallBegin { index, name: name.to_owned(), id: id.map(str::to_owned) });
    }

    pub fn arguments(&mut self, text: &str) {
        let Some(call) = &mut self.call else { return };
        if text.is_empty() {
            return;
        }
        call.has_arguments = true;
        match self.pieces.last_mut() {
            Some(Piece::CallArguments { text: said, .. }) => said.push_str(text),
            _ => self.pieces.push(Piece::CallArguments { index: self.n_calls - 1, text: text.to_owned() }),
        }
    }

    /// A call without arguments has none by name: an empty object.
    pub fn end_call(&mut self) {
        if self.call.as_ref().is_some_and(|call| !call.has_arguments) {
            self.arguments("{}");
        }
        if self.call.take().is_some() {
            self.pieces.push(Piece::CallEnd { index: self.n_calls - 1 });
        }
    }

    /// Ends the text. White space is content where nothing else was said.
    pub fn finish(&mut self) {
        self.say_newlines();
        if self.n_calls == 0 && !self.has_thought && !self.margin.is_empty() {
            let text = std::mem::take(&mut self.margin);
            self.say_content(&text);
        }
        self.margin.clear();
        self.call = None;
    }

    pub fn drain_into(&mut self, said: &mut Vec<Piece>) {
        said.append(&mut self.pieces);
    }
}
