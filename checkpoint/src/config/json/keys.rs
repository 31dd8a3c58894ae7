//! Reads typed values of a JSON object.

use crate::config::length;
use crate::error::ParseError;
use serde_json::Value;

/// Keys of a JSON object; null counts as absent.
pub struct JsonKeys<'a>(pub &'a Value);

impl<'a> JsonKeys<'a> {
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    pub fn object(&self, key: &str) -> Option<&'a Value> {
        self.get(key).filter(|value| value.is_object())
    }

    pub fn optional(&self, key: &str) -> Result<Option<u32>, ParseError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(number) => length(key, number).map(Some),
            None => ParseError::malformed(format!("{key} is {value}, not a whole number")),
        }
    }

    pub fn length(&self, key: &str) -> Result<u32, ParseError> {
        match self.optional(key)? {
            Some(length) => Ok(length),
            None => ParseError::malformed(format!("{key} is missing in config.json")),
        }
    }

    pub fn float(&self, key: &str) -> Result<Option<f32>, ParseError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) => Ok(Some(number as f32)),
            None => ParseError::malformed(format!("{key} is {value}, not a number")),
        }
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>, ParseError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_bool() {
            Some(truth) => Ok(Some(truth)),
            None => ParseError::malformed(format!("{key} is {value}, not true or false")),
        }
    }

    pub fn list<T>(
        &self,
        key: &str,
        what: &str,
        one: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ParseError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_array().and_then(|list| list.iter().map(one).collect()) {
            Some(list) => Ok(Some(list)),
            None => ParseError::malformed(format!("{key} is not a list of {what}")),
        }
    }

    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ParseError> {
        self.list(key, "texts", Value::as_str)
    }

    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>, ParseError> {
        self.list(key, "numbers", |value| value.as_f64().map(|number| number as f32))
    }

    pub fn lengths(&self, key: &str) -> Result<Option<Vec<u32>>, ParseError> {
        self.list(key, "whole numbers", |value| value.as_u64().and_then(|number| u32::try_from(number).ok()))
    }

    pub fn text(&self, key: &str) -> Option<&'a str> {
        self.get(key).and_then(Value::as_str)
    }
}
