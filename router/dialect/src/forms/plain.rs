//! Text without calls.

use super::{Form, Turn};
use crate::sink::Sink;

pub(crate) struct Plain;

impl Form for Plain {
    fn step(&mut self, rest: &str, _last: bool, sink: &mut Sink) -> Turn {
        sink.content(rest);
        Turn::Took(rest.len())
    }

    fn finish(&mut self, _sink: &mut Sink) {}
}
