//! GGUF: metadata and tensors in one file. Knows the container, not what a key or a tensor is for.
//!
//! ```text
//! magic · version · n_tensors · n_keys │ keys, values │ tensor names, dimensions, types, offsets │ pad │ tensor bytes
//! ```
//! Nothing in the file is trusted: each count, length and offset is checked against the bytes that exist before
//! anything is read or reserved for it. Only the file's header is read, in growing pieces, because its length is
//! unknown before its end.

use crate::error::{Error, Fault};
use crate::file::SourceFile;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use types::Dtype;

const MAGIC: &[u8; 4] = b"GGUF";
const ALIGNMENT_KEY: &str = "general.alignment";
const ALIGNMENT_DEFAULT: u64 = 32;
const ALIGNMENT_MAX: u64 = 1 << 20;
const DIMS_MAX: u32 = 4;
/// The longest key or tensor name; the format's own limit is the same for keys.
const NAME_BYTES_MAX: u64 = 65_535;
/// The bytes that are read at first: enough for most headers, vocabulary included.
const HEADER_BYTES: u64 = 2 << 20;
/// Each further read makes the loaded part this many times as long.
const HEADER_GROWTH: u64 = 4;
/// The longest header; a vocabulary takes tens of megabytes at most.
const HEADER_BYTES_MAX: u64 = 256 << 20;
/// Tensors of rope factors. They are part of the spec, not of the weights, and short.
const FACTORS: [&str; 3] = ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];
const FACTORS_BYTES_MAX: usize = 64 << 10;

/// Every type that a GGUF can name.
const TYPES: [(u32, &str); 33] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (8, "Q8_0"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (12, "Q4_K"),
    (13, "Q5_K"),
    (14, "Q6_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (30, "BF16"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

/// The content of the header; ranges point into its bytes.
#[derive(Clone, Debug, Default)]
pub struct Gguf {
    values: BTreeMap<String, Value>,
    tensors: BTreeMap<String, Entry>,
    /// The bytes of those of `FACTORS` that the file has.
    factors: BTreeMap<&'static str, Vec<u8>>,
    /// Where keys, values and names end.
    n_bytes: usize,
}

/// Why the beginning of a file is no valid header.
enum Stop {
    Fault(Fault),
    /// The header goes on behind what was read, at least up to here.
    Short(u64),
}

#[derive(Clone, Debug, PartialEq)]
enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(Range<usize>),
    Array { kind: Kind, n: u64, bytes: Range<usize> },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub dtype: Dtype,
    /// From the slowest dimension to the fastest: the reverse of the file's order.
    pub dims: Vec<u64>,
    /// The index of the split model's part that has the bytes.
    pub file: usize,
    pub bytes: Range<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl Gguf {
    /// Parses the header of a whole file.
    pub fn parse(bytes: &[u8]) -> Result<Gguf, Fault> {
        let mut gguf = Gguf::parse_start(bytes, bytes.len() as u64).map_err(|stop| match stop {
            Stop::Fault(fault) => fault,
            Stop::Short(_) => Fault::Malformed("the file ends within its header: is it cut off?".into()),
        })?;
        for (name, range) in gguf.factor_ranges() {
            gguf.factors.insert(name, bytes[range].to_vec());
        }
        Ok(gguf)
    }

    /// Reads a file's header, and of the tensors only `FACTORS`. Ranges of the header point into the returned bytes.
    pub(crate) fn read(file: &SourceFile) -> Result<(Gguf, Vec<u8>), Error> {
        let (mut bytes, mut n_wanted) = (Vec::new(), HEADER_BYTES);
        let mut gguf = loop {
            read_on(file, &mut bytes, n_wanted)?;
            match Gguf::parse_start(&bytes, file.n_bytes()) {
                Ok(gguf) => break gguf,
                Err(Stop::Fault(fault)) => return Err(Error::fault(file.path())(fault)),
                Err(Stop::Short(n)) => n_wanted = n.max(bytes.len() as u64 * HEADER_GROWTH),
            }
        };
        for (name, range) in gguf.factor_ranges() {
            let mut factors = vec![0; range.len()];
            file.read_at(range.start as u64, &mut factors)?;
            gguf.factors.insert(name, factors);
        }
        bytes.truncate(gguf.n_bytes);
        bytes.shrink_to_fit();
        Ok((gguf, bytes))
    }

    /// Parses the first bytes of a file of `n_bytes`.
    fn parse_start(bytes: &[u8], n_bytes: u64) -> Result<Gguf, Stop> {
        let mut cursor = Cursor { bytes, at: 0, n_bytes, short_of: None };
        Gguf::parse_header(&mut cursor).map_err(|fault| cursor.short_of.map_or(Stop::Fault(fault), Stop::Short))
    }

    fn parse_header(cursor: &mut Cursor<'_>) -> Result<Gguf, Fault> {
        if cursor.take(4, "the magic number")? != MAGIC {
            return Fault::malformed("this is not a GGUF file: it does not begin with GGUF");
        }
        let version = cursor.u32("the version")?;
        if version.swap_bytes() < 16 && version >= 16 {
            return Fault::unsupported("a big-endian GGUF");
        }
        if version != 2 && version != 3 {
            return Fault::unsupported(format!("GGUF version {version}"));
        }
        let n_tensors = cursor.u64("the number of tensors")?;
        let n_values = cursor.u64("the number of metadata keys")?;
        let values = read_values(cursor, n_values)?;
        let headers = read_tensor_headers(cursor, n_tensors)?;
        let alignment = alignment(&values)?;
        let data = place_data(cursor, alignment, headers.is_empty())?;
        let tensors = headers
            .into_iter()
            .map(|(name, header)| Ok((name.clone(), header.place(&name, data, alignment, cursor.n_bytes)?)))
            .collect::<Result<_, Fault>>()?;
        Ok(Gguf { values, tensors, factors: BTreeMap::new(), n_bytes: cursor.at })
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
    pub(crate) fn join(&mut self, part: Gguf, file: usize) -> Result<(), Fault> {
        if file == 0 {
            (self.values, self.factors) = (part.values, part.factors);
        }
        for (name, entry) in part.tensors {
            if self.tensors.contains_key(&name) {
                return Fault::malformed(format!("the tensor {name} is in another part too"));
            }
            self.tensors.insert(name, Entry { file, ..entry });
        }
        Ok(())
    }

    pub fn tensor(&self, name: &str) -> Option<&Entry> {
        self.tensors.get(name)
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.tensors.iter().map(|(name, entry)| (name.as_str(), entry))
    }

    pub fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    pub fn unsigned(&self, key: &str) -> Result<Option<u64>, Fault> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(number)) => Ok(Some(*number)),
            Some(Value::Signed(number)) if *number >= 0 => Ok(Some(number.unsigned_abs())),
            Some(_) => wrong_kind(key, "a number that is not negative"),
        }
    }

    pub fn float(&self, key: &str) -> Result<Option<f64>, Fault> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Float(number)) => Ok(Some(*number)),
            Some(_) => wrong_kind(key, "a floating-point number"),
        }
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>, Fault> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Bool(truth)) => Ok(Some(*truth)),
            Some(_) => wrong_kind(key, "true or false"),
        }
    }

    pub fn text<'a>(&self, bytes: &'a [u8], key: &str) -> Result<Option<&'a str>, Fault> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Text(range)) => utf8(&bytes[range.clone()], key).map(Some),
            Some(_) => wrong_kind(key, "text"),
        }
    }

    pub fn texts<'a>(&self, bytes: &'a [u8], key: &str) -> Result<Option<Vec<&'a str>>, Fault> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Array { kind: Kind::Text, n, bytes: range }) => {
                let mut cursor = Cursor::within(bytes, range);
                (0..*n).map(|_| utf8(cursor.text(u64::MAX, key)?, key)).collect::<Result<_, _>>().map(Some)
            }
            Some(_) => wrong_kind(key, "a list of texts"),
        }
    }

    pub fn integers(&self, bytes: &[u8], key: &str) -> Result<Option<Vec<i64>>, Fault> {
        self.numbers(bytes, key, "a list of whole numbers", |value| match value {
            Value::Unsigned(number) => i64::try_from(number).ok(),
            Value::Signed(number) => Some(number),
            _ => None,
        })
    }

    pub fn floats(&self, bytes: &[u8], key: &str) -> Result<Option<Vec<f64>>, Fault> {
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
    ) -> Result<Option<Vec<T>>, Fault> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::Array { kind, n, bytes: range }) => {
                let mut cursor = Cursor::within(bytes, range);
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

/// Reads on until `n_wanted` bytes from the file's beginning are there, or to its end.
fn read_on(file: &SourceFile, bytes: &mut Vec<u8>, n_wanted: u64) -> Result<(), Error> {
    let (n_had, n) = (bytes.len(), n_wanted.min(HEADER_BYTES_MAX).min(file.n_bytes()) as usize);
    if n <= n_had && n_had > 0 {
        let what = format!("a header of more than the {HEADER_BYTES_MAX} bytes that are read");
        return Err(Error::Malformed { path: file.path().to_owned(), what });
    }
    bytes.resize(n, 0);
    file.read_at(n_had as u64, &mut bytes[n_had..])
}

fn wrong_kind<T>(key: &str, expected: &str) -> Result<T, Fault> {
    Fault::malformed(format!("the metadata key {key} is not {expected}"))
}

fn utf8<'a>(bytes: &'a [u8], key: &str) -> Result<&'a str, Fault> {
    std::str::from_utf8(bytes)
        .map_err(|_| Fault::Malformed(format!("the metadata key {key} holds text that is not UTF-8")))
}

fn read_values(cursor: &mut Cursor<'_>, n: u64) -> Result<BTreeMap<String, Value>, Fault> {
    let mut values = BTreeMap::new();
    for i in 0..n {
        let key = cursor.name(&format!("metadata key {i} of {n}"))?;
        let kind = cursor.u32(&key)?;
        let kind = Kind::of(kind)
            .ok_or_else(|| Fault::Malformed(format!("the metadata key {key} has the unknown type {kind}")))?;
        let value = read_value(cursor, kind, &key)?;
        if let Some(_twice) = values.insert(key.clone(), value) {
            return Fault::malformed(format!("the metadata key {key} occurs twice"));
        }
    }
    Ok(values)
}

fn read_value(cursor: &mut Cursor<'_>, kind: Kind, key: &str) -> Result<Value, Fault> {
    Ok(match kind {
        Kind::U8 => Value::Unsigned(cursor.array::<1>(key)?[0].into()),
        Kind::I8 => Value::Signed(i8::from_le_bytes(cursor.array(key)?).into()),
        Kind::U16 => Value::Unsigned(u16::from_le_bytes(cursor.array(key)?).into()),
        Kind::I16 => Value::Signed(i16::from_le_bytes(cursor.array(key)?).into()),
        Kind::U32 => Value::Unsigned(u32::from_le_bytes(cursor.array(key)?).into()),
        Kind::I32 => Value::Signed(i32::from_le_bytes(cursor.array(key)?).into()),
        Kind::U64 => Value::Unsigned(u64::from_le_bytes(cursor.array(key)?)),
        Kind::I64 => Value::Signed(i64::from_le_bytes(cursor.array(key)?)),
        Kind::F32 => Value::Float(f32::from_le_bytes(cursor.array(key)?).into()),
        Kind::F64 => Value::Float(f64::from_le_bytes(cursor.array(key)?)),
        Kind::Bool => Value::Bool(cursor.array::<1>(key)?[0] != 0),
        Kind::Text => {
            let len = cursor.text(u64::MAX, key)?.len();
            Value::Text(cursor.at - len..cursor.at)
        }
        Kind::Array => read_array(cursor, key)?,
    })
}

fn read_array(cursor: &mut Cursor<'_>, key: &str) -> Result<Value, Fault> {
    let kind = cursor.u32(key)?;
    let Some(kind) = Kind::of(kind) else {
        return Fault::malformed(format!("the metadata key {key} is a list of the unknown type {kind}"));
    };
    let n = cursor.u64(key)?;
    let start = cursor.at;
    match kind.bytes() {
        Some(size) => {
            cursor.take(n.saturating_mul(size), key)?;
        }
        None if kind == Kind::Text => {
            for _ in 0..n {
                cursor.text(u64::MAX, key)?;
            }
        }
        None => return Fault::unsupported(format!("the metadata key {key}, a list of lists,")),
    }
    Ok(Value::Array { kind, n, bytes: start..cursor.at })
}

/// A tensor's header, before its bytes are located.
struct Header {
    dtype: Dtype,
    dims: Vec<u64>,
    n_bytes: u64,
    offset: u64,
}

fn read_tensor_headers(cursor: &mut Cursor<'_>, n: u64) -> Result<Vec<(String, Header)>, Fault> {
    let mut names = HashSet::new();
    let mut headers = Vec::new();
    for i in 0..n {
        let name = cursor.name(&format!("the name of tensor {i} of {n}"))?;
        let header = read_tensor_header(cursor, &name)?;
        if !names.insert(name.clone()) {
            return Fault::malformed(format!("the tensor {name} occurs twice"));
        }
        headers.push((name, header));
    }
    Ok(headers)
}

fn read_tensor_header(cursor: &mut Cursor<'_>, name: &str) -> Result<Header, Fault> {
    let n_dims = cursor.u32(name)?;
    if n_dims == 0 || n_dims > DIMS_MAX {
        return Fault::malformed(format!("the tensor {name} has {n_dims} dimensions"));
    }
    let mut dims = (0..n_dims).map(|_| cursor.u64(name)).collect::<Result<Vec<u64>, Fault>>()?;
    dims.reverse();
    let kind = cursor.u32(name)?;
    let offset = cursor.u64(name)?;
    let Some((_, type_name)) = TYPES.iter().find(|row| row.0 == kind) else {
        return Fault::unsupported(format!("the tensor {name} has the unknown type {kind}, which"));
    };
    let Some(dtype) = served(type_name) else {
        return Fault::unsupported(format!("the tensor {name} has type {type_name}, which"));
    };
    if dims.contains(&0) {
        return Fault::malformed(format!("the tensor {name} has a dimension of zero"));
    }
    // Each row must be a whole number of blocks, not just the tensor.
    let cols = dims.last().copied().unwrap_or(1);
    let rows = dims.iter().rev().skip(1).try_fold(1u64, |rows, dim| rows.checked_mul(*dim));
    let n_bytes = rows.zip(dtype.bytes_of(cols)).and_then(|(rows, row)| rows.checked_mul(row));
    let Some(n_bytes) = n_bytes else {
        return Fault::malformed(format!("the tensor {name} cannot have the dimensions {dims:?} as {type_name}"));
    };
    if rows == Some(1) && dtype.block() > 1 {
        return Fault::unsupported(format!("the tensor {name}, a vector of type {type_name},"));
    }
    Ok(Header { dtype, dims, n_bytes, offset })
}

impl Header {
    fn place(self, name: &str, data: u64, alignment: u64, file: u64) -> Result<Entry, Fault> {
        if !self.offset.is_multiple_of(alignment) {
            let offset = self.offset;
            return Fault::malformed(format!("the tensor {name} lies at {offset}, not aligned to {alignment} bytes"));
        }
        let start = data.checked_add(self.offset);
        let end = start.and_then(|start| start.checked_add(self.n_bytes)).filter(|end| *end <= file);
        let (Some(start), Some(end)) = (start, end) else {
            let (n, at) = (self.n_bytes, self.offset);
            return Fault::malformed(format!(
                "the tensor {name} has {n} bytes at {at} of its data, past the end of the file of {file} bytes: \
                 is it cut off?"
            ));
        };
        Ok(Entry { dtype: self.dtype, dims: self.dims, file: 0, bytes: start as usize..end as usize })
    }
}

fn served(type_name: &str) -> Option<Dtype> {
    Dtype::ALL.into_iter().find(|dtype| dtype.name() == type_name)
}

fn alignment(values: &BTreeMap<String, Value>) -> Result<u64, Fault> {
    match values.get(ALIGNMENT_KEY) {
        None => Ok(ALIGNMENT_DEFAULT),
        Some(Value::Unsigned(alignment)) if alignment.is_power_of_two() && *alignment <= ALIGNMENT_MAX => {
            Ok(*alignment)
        }
        Some(Value::Unsigned(alignment)) => {
            Fault::malformed(format!("{ALIGNMENT_KEY} is {alignment}, not a small power of two"))
        }
        Some(_) => wrong_kind(ALIGNMENT_KEY, "a number that is not negative"),
    }
}

/// The position at which the tensors' bytes begin.
fn place_data(cursor: &Cursor<'_>, alignment: u64, empty: bool) -> Result<u64, Fault> {
    let data = (cursor.at as u64).next_multiple_of(alignment);
    if data > cursor.n_bytes && !empty {
        return Fault::malformed("the file ends before the bytes of its tensors: is it cut off?");
    }
    Ok(data)
}

impl Kind {
    fn of(number: u32) -> Option<Kind> {
        const KINDS: [Kind; 13] = [
            Kind::U8,
            Kind::I8,
            Kind::U16,
            Kind::I16,
            Kind::U32,
            Kind::I32,
            Kind::F32,
            Kind::Bool,
            Kind::Text,
            Kind::Array,
            Kind::U64,
            Kind::I64,
            Kind::F64,
        ];
        KINDS.get(number as usize).copied()
    }

    fn bytes(self) -> Option<u64> {
        match self {
            Kind::U8 | Kind::I8 | Kind::Bool => Some(1),
            Kind::U16 | Kind::I16 => Some(2),
            Kind::U32 | Kind::I32 | Kind::F32 => Some(4),
            Kind::U64 | Kind::I64 | Kind::F64 => Some(8),
            Kind::Text | Kind::Array => None,
        }
    }
}

/// `[0, at) taken · [at, bytes.len()) read · [bytes.len(), n_bytes) in the file`
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    n_bytes: u64,
    /// The end of a take that went beyond the bytes read so far.
    short_of: Option<u64>,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, n: u64, what: &str) -> Result<&'a [u8], Fault> {
        let left = self.n_bytes - self.at as u64;
        if n > left {
            return Fault::malformed(format!(
                "{what}: {n} bytes at {}, where {left} are left: is the file cut off?",
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
                Fault::malformed(format!("{what}: it ends at {end}, and is not read so far"))
            }
        }
    }

    /// A cursor over a range that was parsed before.
    fn within(bytes: &'a [u8], range: &Range<usize>) -> Cursor<'a> {
        Cursor { bytes: &bytes[..range.end], at: range.start, n_bytes: range.end as u64, short_of: None }
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Fault> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    fn u32(&mut self, what: &str) -> Result<u32, Fault> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, Fault> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn text(&mut self, bytes_max: u64, what: &str) -> Result<&'a [u8], Fault> {
        let len = self.u64(what)?;
        if len > bytes_max {
            return Fault::malformed(format!("{what}: a name of {len} bytes, longer than {bytes_max}"));
        }
        self.take(len, what)
    }

    fn name(&mut self, what: &str) -> Result<String, Fault> {
        let name = self.text(NAME_BYTES_MAX, what)?;
        utf8(name, what).map(str::to_owned)
    }
}
