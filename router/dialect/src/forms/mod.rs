//! The forms in which families write calls. All but harmony use a frame of markers, and differ in the calls within.
//! Readers pass their results to a [`PieceSink`].

pub(crate) mod frame;
pub(crate) mod function;
pub(crate) mod harmony;
pub(crate) mod headed;
mod loose;
mod object;
mod plain;
mod raw;
mod typed;
pub(crate) mod xml;

pub(crate) use plain::PlainForm;

use crate::sink::PieceSink;

/// A longer name or key means that the text is no call.
const NAME_MAX: usize = 256;

/// A reader's result for the text in front of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum FormStep {
    /// This many bytes are read. None if only the state has changed.
    Took(usize),
    /// The text may continue as a marker, so no more of it can be read. Never returned for the last text.
    More,
}

/// Reads content and calls.
pub(crate) trait Form: Send {
    /// Reads the start of `rest`, which is not empty. If `last` is set, nothing comes after it.
    fn step(&mut self, rest: &str, last: bool, sink: &mut PieceSink) -> FormStep;

    /// Handles the end of the text, all of which was read.
    fn finish(&mut self, sink: &mut PieceSink);
}

/// When a text is a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum CallRule {
    /// After a marker: as soon as it has a name.
    Marked,
    /// Without a marker: as soon as it has a tool's name, and arguments.
    Bare,
}

/// The result of a call's reader for the text in front of it. Until a call has begun, its reader holds the text.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CallStep {
    Took(usize),
    /// As [`FormStep::More`].
    More,
    /// The call ends after this many bytes.
    Done(usize),
    /// This many more bytes were held, and it is no call.
    Failed(usize),
}
