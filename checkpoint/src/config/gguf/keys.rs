//! Reads typed values of a GGUF's metadata.

use crate::config::length;
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
