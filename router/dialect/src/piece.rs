//! What is said of a text: content, reasoning, and calls that come in pieces. Knows no form.

/// A part of an answer. Pieces of one kind that follow each other are one text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    Content(String),
    Reasoning(String),
    /// A call begins. `id` is the model's own name of the call, where the family writes one.
    CallBegin {
        index: usize,
        name: String,
        id: Option<String>,
    },
    /// The next part of a JSON text. A model that writes no JSON is translated; JSON that is broken stays as written.
    CallArguments {
        index: usize,
        text: String,
    },
    /// The call is whole. A call that the text broke off has no end.
    CallEnd {
        index: usize,
    },
}
