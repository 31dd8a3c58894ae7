//! The forms in which families write calls, a reader for each. What a form reads it says to a [`Sink`].

pub(crate) mod json;
pub(crate) mod object;
mod plain;

pub(crate) use plain::Plain;

use crate::sink::Sink;

/// What a reader did with the text in front of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Turn {
    /// So many bytes are read. None, if only the state has changed.
    Took(usize),
    /// The text may go on as a marker: no more of it can be read. Never said of the last text.
    More,
}

/// Reads content and calls.
pub(crate) trait Form: Send {
    /// Reads the start of `rest`, which is not empty. `last` says that nothing comes after it.
    fn step(&mut self, rest: &str, last: bool, sink: &mut Sink) -> Turn;

    /// Ends the text, all of which was read.
    fn finish(&mut self, sink: &mut Sink);
}
