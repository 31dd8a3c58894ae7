//! Reads a text whole, by characters, with random cuts, and cut off anywhere. The results must always agree.

use dialect::{AnswerPiece, AnswerStart, Dialect, Tool, Tools};
use serde_json::{Value, json};

/// A short form of a text's pieces: `reasoning`, `content`, and calls as `name(arguments)`, with `..` if a call has no
/// end.
#[derive(Debug, Default, PartialEq)]
pub struct Answer {
    pub reasoning: String,
    pub content: String,
    pub calls: Vec<String>,
}

pub fn answer(reasoning: &str, content: &str, calls: &[&str]) -> Answer {
    let calls = calls.iter().map(|call| call.to_string()).collect();
    Answer { reasoning: reasoning.into(), content: content.into(), calls }
}

impl Answer {
    pub fn of(pieces: &[AnswerPiece]) -> Answer {
        let mut answer = Answer::default();
        for piece in pieces {
            match piece {
                AnswerPiece::Content(text) => answer.content.push_str(text),
                AnswerPiece::Reasoning(text) => answer.reasoning.push_str(text),
                AnswerPiece::CallBegin { index, name, id } => {
                    assert_eq!(*index, answer.calls.len(), "calls are counted");
                    let id = id.as_ref().map_or(String::new(), |id| format!("{id}="));
                    answer.calls.push(format!("{id}{name}(.."));
                }
                AnswerPiece::CallArguments { index, text } => {
                    assert_eq!(*index + 1, answer.calls.len(), "arguments belong to the last call");
                    let call = answer.calls.last_mut().unwrap();
                    call.truncate(call.len() - 2);
                    call.push_str(text);
                    call.push_str("..");
                }
                AnswerPiece::CallEnd { .. } => {
                    let call = answer.calls.last_mut().unwrap();
                    call.truncate(call.len() - 2);
                    call.push(')');
                }
            }
        }
        answer
    }
}

/// Tools with every type of parameter.
pub fn tools() -> Tools {
    let tool = |name: &str, properties: Value| Tool {
        name: name.into(),
        parameters: json!({"type": "object", "properties": properties}),
        strict: false,
    };
    Tools::new(vec![
        tool(
            "get_weather",
            json!({
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "exact": {"type": "boolean"},
                "spots": {"type": "array", "items": {"type": "string"}},
                "more": {"type": "object"},
                "note": {"type": ["string", "null"]},
            }),
        ),
        tool("get_time", json!({})),
    ])
}

/// Joins neighbours of one kind to one piece.
fn joined(pieces: Vec<AnswerPiece>) -> Vec<AnswerPiece> {
    let mut all: Vec<AnswerPiece> = Vec::new();
    for piece in pieces {
        match (all.last_mut(), piece) {
            (Some(AnswerPiece::Content(last_text)), AnswerPiece::Content(text))
            | (Some(AnswerPiece::Reasoning(last_text)), AnswerPiece::Reasoning(text))
            | (Some(AnswerPiece::CallArguments { text: last_text, .. }), AnswerPiece::CallArguments { text, .. }) => {
                last_text.push_str(&text)
            }
            (_, piece) => all.push(piece),
        }
    }
    all
}

fn is_prefix(some: &[AnswerPiece], all: &[AnswerPiece]) -> bool {
    let Some((last, whole)) = some.split_last() else { return true };
    let goes_on = match (last, all.get(whole.len())) {
        (AnswerPiece::Content(a), Some(AnswerPiece::Content(b)))
        | (AnswerPiece::Reasoning(a), Some(AnswerPiece::Reasoning(b))) => b.starts_with(a),
        (AnswerPiece::CallArguments { text: a, .. }, Some(AnswerPiece::CallArguments { text: b, .. })) => {
            b.starts_with(a)
        }
        (last, at) => Some(last) == at,
    };
    goes_on && all.starts_with(whole)
}

pub struct Reader {
    pub dialect: Dialect,
    pub tools: Tools,
    pub opening: AnswerStart,
}

impl Reader {
    pub fn new(calls: &str, thoughts: &str) -> Reader {
        let dialect = Dialect::NONE.with_call_form(calls).unwrap().with_thought_form(thoughts).unwrap();
        Reader { dialect, tools: tools(), opening: AnswerStart::Answer }
    }

    /// Returns the pieces after the cuts, and after the end.
    pub fn read<'a>(&self, pieces: impl IntoIterator<Item = &'a str>) -> (Vec<AnswerPiece>, Vec<AnswerPiece>) {
        let mut speech = self.dialect.answer_parser(&self.tools, self.opening);
        let mut output = Vec::new();
        pieces.into_iter().for_each(|piece| speech.push(piece, &mut output));
        let before = joined(output.clone());
        speech.finish(&mut output);
        (before, joined(output))
    }

    /// Checks that the text is read as `expect`, however it is cut, and that early pieces remain in the end.
    #[track_caller]
    pub fn check(&self, text: &str, expect: &Answer) {
        let (before, output) = self.read([text]);
        assert_eq!(&Answer::of(&output), expect, "{text}");
        self.check_cuts(text, &before, &output);
    }

    #[track_caller]
    pub fn check_cuts(&self, text: &str, before: &[AnswerPiece], output: &[AnswerPiece]) {
        let chars: Vec<&str> = text.split_inclusive(|_| true).collect();
        let read = |pieces: Vec<&str>| {
            let (early, late) = self.read(pieces.iter().copied());
            assert_eq!((&early[..], &late[..]), (before, output), "{text} in pieces {pieces:?}");
        };
        read(chars.clone());
        let mut random = Random(text.len() as u64);
        for _ in 0..20 {
            let mut pieces = vec![];
            let mut at = 0;
            while at < chars.len() {
                let n = (1 + random.below(12)).min(chars.len() - at);
                let start = chars[at].as_ptr() as usize - text.as_ptr() as usize;
                let len: usize = chars[at..at + n].iter().map(|c| c.len()).sum();
                pieces.push(&text[start..start + len]);
                at += n;
            }
            read(pieces);
        }
        for (cut, _) in text.char_indices() {
            let (early, late) = self.read([&text[..cut]]);
            assert!(is_prefix(&early, before), "{:?} gives {early:?}, and the whole {before:?}", &text[..cut]);
            assert!(is_prefix(&early, &late), "{:?} gives {early:?}, then {late:?}", &text[..cut]);
        }
    }
}

pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
}
