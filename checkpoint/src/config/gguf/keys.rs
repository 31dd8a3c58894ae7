//! Reads typed values of a GGUF's metadata.

use crate::config::{LAYERS_MAX, length};
use crate::error::ParseError;
use crate::gguf::Gguf;

/// Reads keys `<prefix>.<key>`.
pub struct GgufKeys<'a> {
    pub gguf: &'a Gguf,
    pub bytes: &'a [u8],
    pub prefix: &'static str,
}

impl GgufKeys<'_> {
    pub fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    pub fn optional(&self, key: &str) -> Result<Option<u32>, ParseError> {
        let key = self.key(key);
        self.gguf.unsigned(&key)?.map(|number| length(&key, number)).transpose()
    }

    pub fn length(&self, key: &str) -> Result<u32, ParseError> {
        match self.optional(key)? {
            Some(length) => Ok(length),
            None => ParseError::malformed(format!("the metadata key {} is missing", self.key(key))),
        }
    }

    /// A number that a file may list for each layer. Zeros mean that a layer has no part of the kind.
    pub fn of_all_layers(&self, key: &str) -> Result<Option<u32>, ParseError> {
        let Some(list) = self.list(key)? else { return self.optional(key) };
        let mut others = list.iter().filter(|number| **number != 0);
        let first = others.next().copied().unwrap_or(0);
        match others.all(|number| *number == first) {
            true => Ok(Some(first)),
            false => ParseError::unsupported(format!("{} that differs between layers", self.key(key))),
        }
    }

    /// The same of one layer.
    pub fn of_layer(&self, key: &str, layer: u32) -> Result<Option<u32>, ParseError> {
        match self.list(key)? {
            None => self.optional(key),
            Some(list) => match list.get(layer as usize) {
                Some(number) => Ok(Some(*number)),
                None => ParseError::malformed(format!("{} has only {} layers", self.key(key), list.len())),
            },
        }
    }

    /// Whether a layer has something that a file lists for each; None without a list.
    pub fn bool_of_layer(&self, key: &str, layer: u32) -> Result<Option<bool>, ParseError> {
        let key = self.key(key);
        if !self.has_list(&key)? {
            return Ok(None);
        }
        let listed = self.gguf.bools(self.bytes, &key)?.unwrap_or_default();
        Ok(Some(listed.get(layer as usize).copied().unwrap_or(false)))
    }

    /// Whether there is a list under the whole key. One that is longer than any model is refused: it is read for each
    /// layer.
    fn has_list(&self, key: &str) -> Result<bool, ParseError> {
        match self.gguf.list_length(key) {
            None => Ok(false),
            Some(n) if n <= LAYERS_MAX => Ok(true),
            Some(n) => ParseError::malformed(format!("{key} has {n} layers, which exceed the limit of {LAYERS_MAX}")),
        }
    }

    /// The numbers of a list; None where the key has one number, or is missing.
    fn list(&self, key: &str) -> Result<Option<Vec<u32>>, ParseError> {
        let key = self.key(key);
        if !self.has_list(&key)? {
            return Ok(None);
        }
        let numbers = self.gguf.integers(self.bytes, &key)?.unwrap_or_default();
        let one = |number: i64| match u64::try_from(number) {
            Ok(number) => length(&key, number),
            Err(_) => ParseError::malformed(format!("{key} has the number {number}")),
        };
        numbers.into_iter().map(one).collect::<Result<_, _>>().map(Some)
    }

    /// A tensor with one number for each pair that a rope rotates.
    pub fn rope_factors(&self, name: &str, dim: u32) -> Result<Option<Vec<f32>>, ParseError> {
        let Some(entry) = self.gguf.tensor(name) else { return Ok(None) };
        let n = u64::from(dim / 2);
        if entry.dtype != types::Dtype::F32 || entry.dims.as_slice() != [n] || entry.file != 0 {
            return ParseError::malformed(format!("{name} is not {n} numbers of type F32 in the first part"));
        }
        let Some(bytes) = self.gguf.factors(name) else {
            return ParseError::malformed(format!("{name} has too many numbers for a rope"));
        };
        Ok(Some(bytes.as_chunks().0.iter().map(|number| f32::from_le_bytes(*number)).collect()))
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>, ParseError> {
        self.gguf.bool(&self.key(key))
    }

    pub fn float(&self, key: &str) -> Result<Option<f32>, ParseError> {
        Ok(self.gguf.float(&self.key(key))?.map(|number| number as f32))
    }

    /// A multiplier that is not one. Zero means that there is none.
    pub fn factor(&self, key: &str) -> Result<Option<f32>, ParseError> {
        Ok(self.float(key)?.filter(|factor| *factor != 1.0 && *factor != 0.0))
    }
}
