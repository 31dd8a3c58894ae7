//! Converts pieces of an answer to parts of a delta. A call's id is a function of the answer's own id, so a stream that
//! is resumed or run again has the same ids. Knows no dialect.

use dialect::AnswerPiece;
use proto::v1;
use types::TokensHash;

const PURPOSE: &str = "lockstep 2026 tool call id";
/// The templates of Mistral's models take ids of nine letters and digits, and no other template requires more.
const ID_CHARS: usize = 9;
const LETTERS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Where the ids of one choice's calls come from.
#[derive(Clone, Copy, Debug)]
pub struct CallIds {
    pub seed: u64,
    pub choice: u32,
    /// The next turn of a chat has another prompt, and so other ids under the same seed.
    pub prompt: TokensHash,
}

impl CallIds {
    fn id(&self, index: u32) -> String {
        let mut hasher = blake3::Hasher::new_derive_key(PURPOSE);
        hasher.update(&self.seed.to_le_bytes()).update(&self.choice.to_le_bytes()).update(&self.prompt.0);
        hasher.update(&index.to_le_bytes());
        let hash = hasher.finalize();
        hash.as_bytes()[..ID_CHARS].iter().map(|byte| char::from(LETTERS[usize::from(*byte) % LETTERS.len()])).collect()
    }
}

/// Writes the deltas of one answer, and counts its calls.
pub struct DeltaWriter {
    ids: CallIds,
    /// If this is false, only the first call counts.
    is_parallel: bool,
    includes_reasoning: bool,
    n_whole: u32,
}

impl DeltaWriter {
    pub fn new(ids: CallIds, is_parallel: bool, includes_reasoning: bool) -> DeltaWriter {
        DeltaWriter { ids, is_parallel, includes_reasoning, n_whole: 0 }
    }

    pub fn n_whole(&self) -> u32 {
        self.n_whole
    }

    pub fn add(&mut self, piece: AnswerPiece, delta: &mut v1::Delta) {
        match piece {
            AnswerPiece::Content(text) => delta.text.push_str(&text),
            AnswerPiece::Reasoning(text) if self.includes_reasoning => delta.reasoning.push_str(&text),
            AnswerPiece::Reasoning(_) => {}
            AnswerPiece::CallBegin { index, name, id } => {
                if let Some(index) = self.counted(index) {
                    let id = id.unwrap_or_else(|| self.ids.id(index));
                    delta.tool_calls.push(v1::ToolCallDelta { index, id, name, arguments: String::new() });
                }
            }
            AnswerPiece::CallArguments { index, text } => {
                if let Some(index) = self.counted(index) {
                    part_of(delta, index).arguments.push_str(&text);
                }
            }
            AnswerPiece::CallEnd { index } => self.n_whole += u32::from(self.counted(index).is_some()),
        }
    }

    fn counted(&self, index: usize) -> Option<u32> {
        u32::try_from(index).ok().filter(|index| self.is_parallel || *index == 0)
    }
}

/// Returns the part of a delta for a call: one for each call.
fn part_of(delta: &mut v1::Delta, index: u32) -> &mut v1::ToolCallDelta {
    let at = delta.tool_calls.iter().position(|part| part.index == index).unwrap_or_else(|| {
        delta.tool_calls.push(v1::ToolCallDelta { index, ..v1::ToolCallDelta::default() });
        delta.tool_calls.len() - 1
    });
    &mut delta.tool_calls[at]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(seed: u64, choice: u32, prompt: &[u32]) -> CallIds {
        CallIds { seed, choice, prompt: TokensHash::of(prompt) }
    }

    #[test]
    fn an_id_is_of_its_answer_alone_and_as_templates_take_it() {
        let of = ids(7, 0, &[1, 2]);
        assert_eq!(of.id(0), ids(7, 0, &[1, 2]).id(0));
        for other in [of.id(1), ids(8, 0, &[1, 2]).id(0), ids(7, 1, &[1, 2]).id(0), ids(7, 0, &[1]).id(0)] {
            assert_ne!(of.id(0), other);
            assert!(other.len() == ID_CHARS && other.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{other}");
        }
    }

    #[test]
    fn pieces_become_one_part_for_each_call() {
        let mut writer = DeltaWriter::new(ids(7, 0, &[1]), true, false);
        let mut delta = v1::Delta::default();
        let begin = |index, name: &str, id: Option<&str>| AnswerPiece::CallBegin {
            index,
            name: name.into(),
            id: id.map(str::to_owned),
        };
        let arguments = |index, text: &str| AnswerPiece::CallArguments { index, text: text.into() };
        for piece in [
            AnswerPiece::Reasoning("hm".into()),
            AnswerPiece::Content("a".into()),
            begin(0, "f", Some("own")),
            arguments(0, "{"),
            arguments(0, "}"),
            AnswerPiece::CallEnd { index: 0 },
            begin(1, "g", None),
            arguments(1, "{"),
        ] {
            writer.add(piece, &mut delta);
        }
        assert_eq!((delta.text.as_str(), delta.reasoning.as_str(), writer.n_whole()), ("a", "", 1));
        let part = |part: &v1::ToolCallDelta| (part.index, part.name.clone(), part.arguments.clone());
        let expected = [(0, "f".to_owned(), "{}".to_owned()), (1, "g".to_owned(), "{".to_owned())];
        assert_eq!(delta.tool_calls.iter().map(part).collect::<Vec<_>>(), expected);
        assert_eq!((delta.tool_calls[0].id.as_str(), delta.tool_calls[1].id.len()), ("own", ID_CHARS));
    }

    #[test]
    fn without_parallel_calls_only_first_call_is_kept() {
        let mut writer = DeltaWriter::new(ids(7, 0, &[1]), false, true);
        let mut delta = v1::Delta::default();
        for index in 0..2 {
            writer.add(AnswerPiece::CallBegin { index, name: "f".into(), id: None }, &mut delta);
            writer.add(AnswerPiece::CallEnd { index }, &mut delta);
        }
        assert_eq!((delta.tool_calls.len(), writer.n_whole()), (1, 1));
    }
}
