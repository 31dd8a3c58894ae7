//! Reads the values of keywords as their required types. Knows nothing of their meaning.

use super::decimal::Decimal;
use super::values::kinds;
use crate::GrammarRefused;
use serde_json::{Map, Value};

/// A keyword of a schema with its path, for error messages.
pub(super) struct Keyword<'a> {
    pub(super) name: &'a str,
    pub(super) value: &'a Value,
    pub(super) at: String,
}

impl<'a> Keyword<'a> {
    fn wrong(&self, what: &str) -> GrammarRefused {
        GrammarRefused::invalid(&self.at, format!("it is not {what}"))
    }

    pub(super) fn unsupported(&self, what: &str) -> GrammarRefused {
        GrammarRefused::unsupported(&self.at, what)
    }

    pub(super) fn count(&self) -> Result<usize, GrammarRefused> {
        let whole = self.value.as_f64().filter(|n| n.fract() == 0.0 && (0.0..9e15).contains(n));
        whole.map(|n| n as usize).ok_or_else(|| self.wrong("a count"))
    }

    pub(super) fn number(&self) -> Result<Decimal, GrammarRefused> {
        let number = match self.value {
            Value::Number(number) => Decimal::of(number),
            _ => return Err(self.wrong("a number")),
        };
        number.ok_or_else(|| self.unsupported("a number with so many digits"))
    }

    pub(super) fn text(&self) -> Result<&'a str, GrammarRefused> {
        self.value.as_str().ok_or_else(|| self.wrong("a string"))
    }

    pub(super) fn flag(&self) -> Result<bool, GrammarRefused> {
        self.value.as_bool().ok_or_else(|| self.wrong("true or false"))
    }

    pub(super) fn list(&self) -> Result<&'a [Value], GrammarRefused> {
        self.value.as_array().map(Vec::as_slice).ok_or_else(|| self.wrong("a list"))
    }

    pub(super) fn object(&self) -> Result<&'a Map<String, Value>, GrammarRefused> {
        self.value.as_object().ok_or_else(|| self.wrong("an object"))
    }

    pub(super) fn texts(&self) -> Result<Vec<&'a str>, GrammarRefused> {
        texts(self.value).ok_or_else(|| self.wrong("a list of strings"))
    }

    pub(super) fn kinds(&self) -> Result<u8, GrammarRefused> {
        let names = if self.value.is_string() { vec![self.text()?] } else { self.texts()? };
        let mut kinds = names.iter().map(|name| match *name {
            "null" => Some(kinds::NULL),
            "boolean" => Some(kinds::TRUE | kinds::FALSE),
            "integer" => Some(kinds::INTEGER),
            "number" => Some(kinds::NUMBER),
            "string" => Some(kinds::STRING),
            "array" => Some(kinds::ARRAY),
            "object" => Some(kinds::OBJECT),
            _ => None,
        });
        kinds.try_fold(0, |all: u8, kind| Some(all | kind?)).ok_or_else(|| self.wrong("a type"))
    }
}

pub(super) fn texts(value: &Value) -> Option<Vec<&str>> {
    value.as_array()?.iter().map(Value::as_str).collect()
}
