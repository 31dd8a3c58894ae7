//! Text without calls.

use super::{Form, FormStep};
use crate::sink::Sink;

pub(crate) struct PlainForm;

impl Form for PlainForm {
    fn step(&mut self, rest: &str, _last: bool, sink: &mut Sink) -> FormStep {
        sink.content(rest);
        FormStep::Took(rest.len())
    }

    fn finish(&mut self, _sink: &mut Sink) {}
}
