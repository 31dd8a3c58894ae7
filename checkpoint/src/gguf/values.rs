//! Metadata: keys, the types that a value can have, and values as they are read. Knows no key's meaning.

use crate::error::ParseError;
use crate::gguf::cursor::GgufCursor;
use std::collections::BTreeMap;
use std::ops::Range;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(Range<usize>),
    Array { kind: ValueKind, n: u64, bytes: Range<usize> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueKind {
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

/// Values by their keys, and the bytes of each key with its value in the file's order.
type ReadValues = (BTreeMap<String, Value>, Vec<(String, Range<usize>)>);

pub(super) fn read_values(cursor: &mut GgufCursor<'_>, n: u64) -> Result<ReadValues, ParseError> {
    let (mut values, mut ranges) = (BTreeMap::new(), Vec::new());
    for i in 0..n {
        let start = cursor.at;
        let key = cursor.name(&format!("metadata key {i} of {n}"))?;
        let kind = cursor.u32(&key)?;
        let kind = ValueKind::of(kind)
            .ok_or_else(|| ParseError::Malformed(format!("the metadata key {key} has the unknown type {kind}")))?;
        let value = read_value(cursor, kind, &key)?;
        if let Some(_twice) = values.insert(key.clone(), value) {
            return ParseError::malformed(format!("the metadata key {key} occurs twice"));
        }
        ranges.push((key, start..cursor.at));
    }
    Ok((values, ranges))
}

pub(super) fn read_value(cursor: &mut GgufCursor<'_>, kind: ValueKind, key: &str) -> Result<Value, ParseError> {
    Ok(match kind {
        ValueKind::U8 => Value::Unsigned(cursor.array::<1>(key)?[0].into()),
        ValueKind::I8 => Value::Signed(i8::from_le_bytes(cursor.array(key)?).into()),
        ValueKind::U16 => Value::Unsigned(u16::from_le_bytes(cursor.array(key)?).into()),
        ValueKind::I16 => Value::Signed(i16::from_le_bytes(cursor.array(key)?).into()),
        ValueKind::U32 => Value::Unsigned(u32::from_le_bytes(cursor.array(key)?).into()),
        ValueKind::I32 => Value::Signed(i32::from_le_bytes(cursor.array(key)?).into()),
        ValueKind::U64 => Value::Unsigned(u64::from_le_bytes(cursor.array(key)?)),
        ValueKind::I64 => Value::Signed(i64::from_le_bytes(cursor.array(key)?)),
        ValueKind::F32 => Value::Float(f32::from_le_bytes(cursor.array(key)?).into()),
        ValueKind::F64 => Value::Float(f64::from_le_bytes(cursor.array(key)?)),
        ValueKind::Bool => Value::Bool(cursor.array::<1>(key)?[0] != 0),
        ValueKind::Text => {
            let len = cursor.text(u64::MAX, key)?.len();
            Value::Text(cursor.at - len..cursor.at)
        }
        ValueKind::Array => read_array(cursor, key)?,
    })
}

fn read_array(cursor: &mut GgufCursor<'_>, key: &str) -> Result<Value, ParseError> {
    let kind = cursor.u32(key)?;
    let Some(kind) = ValueKind::of(kind) else {
        return ParseError::malformed(format!("the metadata key {key} is a list of the unknown type {kind}"));
    };
    let n = cursor.u64(key)?;
    let start = cursor.at;
    match kind.bytes() {
        Some(size) => {
            cursor.take(n.saturating_mul(size), key)?;
        }
        None if kind == ValueKind::Text => {
            for _ in 0..n {
                cursor.text(u64::MAX, key)?;
            }
        }
        None => return ParseError::unsupported(format!("the metadata key {key}, a list of lists,")),
    }
    Ok(Value::Array { kind, n, bytes: start..cursor.at })
}

impl ValueKind {
    fn of(number: u32) -> Option<ValueKind> {
        const KINDS: [ValueKind; 13] = [
            ValueKind::U8,
            ValueKind::I8,
            ValueKind::U16,
            ValueKind::I16,
            ValueKind::U32,
            ValueKind::I32,
            ValueKind::F32,
            ValueKind::Bool,
            ValueKind::Text,
            ValueKind::Array,
            ValueKind::U64,
            ValueKind::I64,
            ValueKind::F64,
        ];
        KINDS.get(number as usize).copied()
    }

    fn bytes(self) -> Option<u64> {
        match self {
            ValueKind::U8 | ValueKind::I8 | ValueKind::Bool => Some(1),
            ValueKind::U16 | ValueKind::I16 => Some(2),
            ValueKind::U32 | ValueKind::I32 | ValueKind::F32 => Some(4),
            ValueKind::U64 | ValueKind::I64 | ValueKind::F64 => Some(8),
            ValueKind::Text | ValueKind::Array => None,
        }
    }
}

pub(super) fn wrong_kind<T>(key: &str, expected: &str) -> Result<T, ParseError> {
    ParseError::malformed(format!("the metadata key {key} is not {expected}"))
}
