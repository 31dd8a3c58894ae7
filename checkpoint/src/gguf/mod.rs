//! GGUF: metadata and tensors in one file. Knows the container, not what a key or a tensor is for.
//!
//! ```text
//! magic · version · n_tensors · n_keys │ keys, values │ tensor names, dimensions, types, offsets │ pad │ tensor bytes
//! ```
//! Nothing in the file is trusted: each count, length and offset is checked against the bytes that exist before
//! anything is read or reserved for it. Only the file's header is read, in growing pieces, because its length is
//! unknown before its end.

use crate::error::{Error, ParseError};
use crate::file::SourceFile;
use cursor::{GgufCursor, utf8};
use std::collections::BTreeMap;
use std::ops::Range;
use tensors::{alignment, place_data, read_tensor_headers};
use values::{Value, ValueKind, read_value, read_values, wrong_kind};

mod cursor;
pub(crate) mod tensors;
mod values;

pub use tensors::{TensorEntry, type_number};

const MAGIC: &[u8; 4] = b"GGUF";
/// The bytes that are read at first: enough for most headers, vocabulary included.
const HEADER_BYTES: u64 = 2 << 20;
/// Each further read makes the loaded part this many times as long.
const HEADER_GROWTH: u64 = 4;
/// The longest header; a vocabulary takes tens of megabytes at most.
const HEADER_BYTES_MAX: u64 = 256 << 20;
/// Tensors of rope factors. They are part of the spec, not of the weights, and short.
const FACTORS: [&str; 3] = ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];
const FACTORS_BYTES_MAX: usize = 64 << 10;

/// The content of the header; ranges point into its bytes.
#[derive(Clone, Debug, Default)]
pub struct Gguf {
    values: BTreeMap<String, Value>,
    /// Each key in the file's order, with the range of key, type and value.
    raw_values: Vec<(String, Range<usize>)>,
    tensors: BTreeMap<String, TensorEntry>,
    /// The bytes of those of `FACTORS` that the file has.
    factors: BTreeMap<&'static str, Vec<u8>>,
    /// Where keys, values and names end.
    n_bytes: usize,
}

/// Why the beginning of a file is no valid header.
enum HeaderError {
    Fault(ParseError),
    /// The header goes on behind what was read, at least up to here.
    Short(u64),
}

impl Gguf {
    /// Parses the header of a whole file.
    pub fn parse(bytes: &[u8]) -> Result<Gguf, ParseError> {
        let mut gguf = Gguf::parse_start(bytes, bytes.len() as u64).map_err(|stop| match stop {
            HeaderError::Fault(fault) => fault,
            HeaderError::Short(_) => cut_off(),
        })?;
        for (name, range) in gguf.factor_ranges() {
            gguf.factors.insert(name, bytes[range].to_vec());
        }
        Ok(gguf)
    }

    /// Reads a file's header, and of the tensors only `FACTORS`. Ranges of the header point into the returned bytes.
    pub(crate) fn read(file: &SourceFile) -> Result<(Gguf, Vec<u8>), Error> {
        let read = Gguf::read_start(file, file.n_bytes())?;
        let (mut gguf, mut bytes) = read.ok_or_else(|| Error::with_path(file.path())(cut_off()))?;
        for (name, range) in gguf.factor_ranges() {
            let mut factors = vec![0; range.len()];
            file.read_at(range.start as u64, &mut factors)?;
            gguf.factors.insert(name, factors);
        }
        bytes.shrink_to_fit();
        Ok((gguf, bytes))
    }

    /// Parses the header of a file of `n_bytes` of which `start` holds the first. None if it goes on behind them.
    pub(crate) fn read_start(start: &SourceFile, n_bytes: u64) -> Result<Option<(Gguf, Vec<u8>)>, Error> {
        let (mut bytes, mut n_needed) = (Vec::new(), HEADER_BYTES);
        loop {
            read_on(start, &mut bytes, n_needed)?;
            match Gguf::parse_start(&bytes, n_bytes) {
                Ok(gguf) => {
                    bytes.truncate(gguf.n_bytes);
                    return Ok(Some((gguf, bytes)));
                }
                Err(HeaderError::Fault(fault)) => return Err(Error::with_path(start.path())(fault)),
                Err(HeaderError::Short(_)) if bytes.len() as u64 == start.n_bytes() => return Ok(None),
                Err(HeaderError::Short(n)) => n_needed = n.max(bytes.len() as u64 * HEADER_GROWTH),
            }
        }
    }

    /// Takes ones for the rope's factors: where only a header is known, they are not.
    pub(crate) fn assume_factors(&mut self) {
        for (name, range) in self.factor_ranges() {
            self.factors.insert(name, 1f32.to_le_bytes().repeat(range.len() / size_of::<f32>()));
        }
    }

    /// Parses the first bytes of a file of `n_bytes`.
    fn parse_start(bytes: &[u8], n_bytes: u64) -> Result<Gguf, HeaderError> {
        let mut cursor = GgufCursor { bytes, at: 0, n_bytes, short_of: None };
        Gguf::parse_header(&mut cursor)
            .map_err(|fault| cursor.short_of.map_or(HeaderError::Fault(fault), HeaderError::Short))
    }

    fn parse_header(cursor: &mut GgufCursor<'_>) -> Result<Gguf, ParseError> {
        if cursor.take(4, "the magic number")? != MAGIC {
            return ParseError::malformed("this is not a GGUF file: it does not begin with GGUF");
        }
        let version = cursor.u32("the version")?;
        if version.swap_bytes() < 16 && version >= 16 {
            return ParseError::unsupported("a big-endian GGUF");
        }
        if version != 2 && version != 3 {
            return ParseError::unsupported(format!("GGUF version {version}"));
        }
        let n_tensors = cursor.u64("the number of tensors")?;
        let n_values = cursor.u64("the number of metadata keys")?;
        let (values, raw_values) = read_values(cursor, n_values)?;
        let headers = read_tensor_headers(cursor, n_tensors)?;
        let alignment = alignment(&values)?;
        let data = place_data(cursor, alignment, headers.is_empty())?;
        let tensors = headers
            .into_iter()
            .map(|(name, header)| Ok((name.clone(), header.locate(&name, data, alignment, cursor.n_bytes)?)))
            .collect::<Result<_, ParseError>>()?;
        Ok(Gguf { values, raw_values, tensors, factors: BTreeMap::new(), n_bytes: cursor.at })
    }

    fn factor_ranges(&self) -> Vec<(&'static str, Range<usize>)> {
        let range = |name: &&'static str| Some((*name, self.tensors.get(*name)?.bytes.clone()));
        FACTORS.iter().filter_map(range).filter(|(_, range)| range.len() <= FACTORS_BYTES_MAX).collect()
    }

    /// The bytes of a tensor of `FACTORS`, if the first part has it.
    pub(crate) fn factors(&self, name: &str) -> Option<&[u8]> {
        self.factors.get(name).map(Vec::as_slice)
    }

    /// Adds the tensors of the next part; the metadata comes from the first.
    pub(crate) fn add_part(&mut self, part: Gguf, file: usize) -> Result<(), ParseError> {
        if file == 0 {
            (self.values, self.raw_values, self.factors) = (part.values, part.raw_values, part.factors);
        }
        for (name, entry) in part.tensors {
            if self.tensors.contains_key(&name) {
                return ParseError::malformed(format!("the tensor {name} is in another part too"));
            }
            self.tensors.insert(name, TensorEntry { file, ..entry });
        }
        Ok(())
    }

    /// Where keys, values and names end.
    #[cfg(test)]
    pub(crate) fn n_header_bytes(&self) -> usize {
        self.n_bytes
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(name)
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorEntry)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    /// All keys in the file's order, each with the range of the header's bytes that hold key, type and value.
    pub fn raw_values(&self) -> impl Iterator<Item = (&str, Range<usize>)> {
        self.raw_values.iter().map(|(key, range)| (key.as_str(), range.clone()))
    }

    pub fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// The number of values in a list; None where the key has one value, or is missing.
    pub fn list_length(&self, key: &str) -> Option<u64> {
        match self.values.get(key) {
            Some(Value::Array { n, .. }) => Some(*n),
            _ => None,
        }
    }

    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, ParseError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(number)) => Ok(Some(*number)),
            Some(Value::Signed(number)) if *number >= 0 => Ok(Some(number.unsigned_abs())),
            Some(_) => wrong_kind(key, "a number that is not negative"),
        }
    }

    pub fn signed(&self, key: &str) -> Result<Option<i64>, ParseError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Signed(number)) => Ok(Some(*number)),
            Some(Value::Unsigned(number)) => Ok(Some(i64::try_from(*number).unwrap_or(i64::MAX))),
            Some(_) => wrong_kind(key, "a whole number"),
        }
    }

    pub fn float(&self, key: &str) -> Result<Option<f64>, ParseError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Float(number)) => Ok(Some(*number)),
            Some(_) => wrong_kind(key, "a floating-point number"),
        }
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>, ParseError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Bool(truth)) => Ok(Some(*truth)),
            Some(_) => wrong_kind(key, "true or false"),
        }
    }

    pub fn text<'a>(&self, bytes: &'a [u8], key: &str) -> Result<Option<&'a str>, ParseError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Text(range)) => utf8(&bytes[range.clone()], key).map(Some),
            Some(_) => wrong_kind(key, "text"),
        }
    }

    pub fn texts<'a>(&self, bytes: &'a [u8], key: &str) -> Result<Option<Vec<&'a str>>, ParseError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Array { kind: ValueKind::Text, n, bytes: range }) => {
                let mut cursor = GgufCursor::within(bytes, range);
                (0..*n).map(|_| utf8(cursor.text(u64::MAX, key)?, key)).collect::<Result<_, _>>().map(Some)
            }
            Some(_) => wrong_kind(key, "a list of strings"),
        }
    }

    pub fn integers(&self, bytes: &[u8], key: &str) -> Result<Option<Vec<i64>>, ParseError> {
        self.numbers(bytes, key, "a list of whole numbers", |value| match value {
            Value::Unsigned(number) => i64::try_from(number).ok(),
            Value::Signed(number) => Some(number),
            _ => None,
        })
    }

    pub fn bools(&self, bytes: &[u8], key: &str) -> Result<Option<Vec<bool>>, ParseError> {
        self.numbers(bytes, key, "a list of booleans", |value| match value {
            Value::Bool(truth) => Some(truth),
            _ => None,
        })
    }

    pub fn floats(&self, bytes: &[u8], key: &str) -> Result<Option<Vec<f64>>, ParseError> {
        self.numbers(bytes, key, "a list of floating-point numbers", |value| match value {
            Value::Float(number) => Some(number),
            _ => None,
        })
    }

    fn numbers<T>(
        &self,
        bytes: &[u8],
        key: &str,
        expected: &str,
        number: impl Fn(Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ParseError> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Array { kind, n, bytes: range }) => {
                let mut cursor = GgufCursor::within(bytes, range);
                let mut numbers = Vec::new();
                for _ in 0..*n {
                    match number(read_value(&mut cursor, *kind, key)?) {
                        Some(number) => numbers.push(number),
                        None => return wrong_kind(key, expected),
                    }
                }
                Ok(Some(numbers))
            }
            Some(_) => wrong_kind(key, expected),
        }
    }
}

fn cut_off() -> ParseError {
    ParseError::Malformed("the file ends within its header: is it cut off?".into())
}

/// Reads on until `n_needed` bytes from the file's beginning are there, or to its end.
fn read_on(file: &SourceFile, bytes: &mut Vec<u8>, n_needed: u64) -> Result<(), Error> {
    let (n_had, n) = (bytes.len(), n_needed.min(HEADER_BYTES_MAX).min(file.n_bytes()) as usize);
    if n <= n_had && n_had > 0 {
        let what = format!("the header exceeds the limit of {HEADER_BYTES_MAX} bytes");
        return Err(Error::Malformed { path: file.path().to_owned(), what });
    }
    bytes.resize(n, 0);
    file.read_at(n_had as u64, &mut bytes[n_had..])
}
