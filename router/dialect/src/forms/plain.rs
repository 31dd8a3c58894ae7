//! Text without calls.

use super::{Form, FormStep};
use crate::sink::PieceSink;

pub(crate) struct PlainForm;

impl Form for PlainForm {
    fn step(&mut self, rest: &str, _last: bool, sink: &mut PieceSink) -> FormStep {
        sink.add_content(rest);
        FormStep::Took(rest.len())
    }

    fn finish(&mut self, _sink: &mut PieceSink) {}
}
