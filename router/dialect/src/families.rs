//! The reader of each family's calls, and of each family's thoughts. Has no knowledge of names.

use crate::forms::frame::FrameStyle;
use crate::forms::harmony;
use crate::tag::CallLayout;
use crate::thoughts::ThoughtMarks;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CallForm {
    None,
    Framed(&'static FrameStyle),
    Harmony,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ThoughtForm {
    None,
    Marked(&'static ThoughtMarks),
    Harmony,
}

impl CallForm {
    /// Returns how its calls are written.
    pub fn layout(self) -> Option<CallLayout> {
        match self {
            CallForm::None => None,
            CallForm::Framed(style) => Some(style.layout()),
            CallForm::Harmony => Some(harmony::layout()),
        }
    }
}
