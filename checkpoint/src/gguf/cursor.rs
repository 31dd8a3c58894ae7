//! Takes bytes of a header one after another, and never more than there are. Knows no key, type or tensor.

use crate::error::ParseError;
use std::ops::Range;

/// The longest key or tensor name; the format's own limit is the same for keys.
const NAME_BYTES_MAX: u64 = 65_535;

/// `[0, at) taken · [at, bytes.len()) read · [bytes.len(), n_bytes) in the file`
pub(super) struct GgufCursor<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
    pub n_bytes: u64,
    /// The end of a take that went beyond the bytes read so far.
    pub short_of: Option<u64>,
}

impl<'a> GgufCursor<'a> {
    pub fn take(&mut self, n: u64, what: &str) -> Result<&'a [u8], ParseError> {
        let left = self.n_bytes - self.at as u64;
        if n > left {
            return ParseError::malformed(format!(
                "{what} needs {n} bytes at {}, but {left} are left: is the file cut off?",
                self.at
            ));
        }
        let end = self.at as u64 + n;
        match self.bytes.get(self.at..).and_then(|rest| rest.get(..usize::try_from(n).ok()?)) {
            Some(taken) => {
                self.at += taken.len();
                Ok(taken)
            }
            None => {
                self.short_of = Some(end);
                ParseError::malformed(format!("{what} ends at {end}, which was not read yet"))
            }
        }
    }

    /// A cursor over a range that was parsed before.
    pub fn within(bytes: &'a [u8], range: &Range<usize>) -> GgufCursor<'a> {
        GgufCursor { bytes: &bytes[..range.end], at: range.start, n_bytes: range.end as u64, short_of: None }
    }

    pub fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], ParseError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    pub fn u32(&mut self, what: &str) -> Result<u32, ParseError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: &str) -> Result<u64, ParseError> {
        self.array(what).map(u64::from_le_bytes)
    }

    pub fn text(&mut self, bytes_max: u64, what: &str) -> Result<&'a [u8], ParseError> {
        let len = self.u64(what)?;
        if len > bytes_max {
            return ParseError::malformed(format!(
                "{what} has a name of {len} bytes, which exceeds the limit of {bytes_max}"
            ));
        }
        self.take(len, what)
    }

    pub fn name(&mut self, what: &str) -> Result<String, ParseError> {
        let name = self.text(NAME_BYTES_MAX, what)?;
        utf8(name, what).map(str::to_owned)
    }
}

pub(super) fn utf8<'a>(bytes: &'a [u8], key: &str) -> Result<&'a str, ParseError> {
    std::str::from_utf8(bytes)
        .map_err(|_| ParseError::Malformed(format!("the metadata key {key} holds text that is not UTF-8")))
}
