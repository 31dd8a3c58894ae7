//! The forms in which families write calls. All but harmony stand in a frame of markers, and differ in the calls
//! within. What is read goes to a [`Sink`].

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

pub(crate) use plain::Plain;

use crate::sink::Sink;

/// A longer name or key makes a text no call.
const NAME_MAX: usize = 256;

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

/// When a text is a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rule {
    /// A marker stands before it: as soon as it has a name.
    Marked,
    /// Nothing stands before it: as soon as it has a tool's name, and arguments.
    Bare,
}

/// What a call's reader did with the text in front of it. Until a call has begun its reader holds what it reads.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Member {
    Took(usize),
    /// As [`Turn::More`].
    More,
    /// The call ends after so many bytes.
    Done(usize),
    /// So many more bytes were held, and it is no call.
    Failed(usize),
}
