//! Arguments that are already JSON, which are passed on unchanged. Finds where they end. Has no knowledge of calls.

use crate::json::{ScanResult, ValueScan};
use crate::marker::{MarkerPrefix, match_prefix};
use std::borrow::Cow;

#[derive(Debug, Default)]
pub(super) struct RawValue {
    scan: ValueScan,
    /// A number or a word, held until its end: `null` means no arguments.
    word: String,
    is_begun: bool,
}

/// The result of a step: this many bytes, which contain `text`.
pub(super) struct RawStep<'t> {
    pub n: usize,
    pub text: Cow<'t, str>,
    pub is_whole: bool,
}

impl RawValue {
    pub fn is_begun(&self) -> bool {
        self.is_begun
    }

    /// Reads the value up to its end, or to a closing marker where JSON cannot continue. Reads nothing where such a
    /// marker may begin.
    pub fn step<'t>(&mut self, rest: &'t str, closers: &[&str], last: bool) -> Option<RawStep<'t>> {
        let (n, is_whole) = match self.scan.scan(rest) {
            ScanResult::Whole(n) => (n, true),
            ScanResult::Open => (rest.len(), false),
            ScanResult::Foreign(0) => match match_prefix(rest, closers, last) {
                MarkerPrefix::With(_) => (0, true),
                MarkerPrefix::Perhaps => return None,
                // Invalid JSON stays as it was written.
                MarkerPrefix::No => (rest.chars().next().map_or(0, char::len_utf8), false),
            },
            ScanResult::Foreign(n) => (n, false),
        };
        self.is_begun |= n > 0;
        let text = self.emit_text(&rest[..n], is_whole);
        Some(RawStep { n, text, is_whole })
    }

    fn emit_text<'t>(&mut self, text: &'t str, is_whole: bool) -> Cow<'t, str> {
        if !self.scan.is_scalar() {
            return text.into();
        }
        self.word.push_str(text);
        if is_whole { self.rest().into() } else { "".into() }
    }

    /// Returns the held text when the text ends.
    pub fn rest(&mut self) -> String {
        let word = std::mem::take(&mut self.word);
        if word == "null" { String::new() } else { word }
    }
}
