//! The pieces of a text: content, reasoning, and calls in parts. Has no knowledge of forms.

/// A part of an answer. Consecutive pieces of one kind are one text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPiece {
    Content(String),
    Reasoning(String),
    /// A call begins. `id` is the model's own id of the call, if the family writes one.
    CallBegin {
        index: usize,
        name: String,
        id: Option<String>,
    },
    /// The next part of a JSON text. Other notations are converted to JSON. Invalid JSON stays as written.
    CallArguments {
        index: usize,
        text: String,
    },
    /// The call is complete. A call that the text broke off has no end.
    CallEnd {
        index: usize,
    },
}
