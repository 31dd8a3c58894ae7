//! JSON values as JSON Schema compares them. Knows nothing of schemas.

use super::decimal::Decimal;
use serde_json::Value;

/// Kinds of values, a bit each. An integer is a number without a fraction, also where it is written with one.
pub(super) mod kinds {
    pub const NULL: u8 = 1;
    pub const FALSE: u8 = 2;
    pub const TRUE: u8 = 4;
    pub const INTEGER: u8 = 8;
    pub const FRACTION: u8 = 16;
    pub const STRING: u8 = 32;
    pub const ARRAY: u8 = 64;
    pub const OBJECT: u8 = 128;
    pub const NUMBER: u8 = INTEGER | FRACTION;
    pub const ALL: u8 = 255;
}

/// The kinds of one value each, as it is written.
pub(super) const LITERALS: [(u8, &str); 3] = [(kinds::NULL, "null"), (kinds::FALSE, "false"), (kinds::TRUE, "true")];

/// Equal as JSON Schema means it: 1 is 1.0.
pub(super) fn json_equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        // Most numbers differ already as floats, which is quick to see.
        (Value::Number(a), Value::Number(b)) if a.as_f64() != b.as_f64() => false,
        (Value::Number(a), Value::Number(b)) => {
            a == b || Decimal::of(a).is_some_and(|of_a| Decimal::of(b).is_some_and(|of_b| of_a == of_b))
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| json_equal(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| json_equal(a, b)))
        }
        (a, b) => a == b,
    }
}

/// Which kind of value it is.
pub(super) fn kind(value: &Value) -> u8 {
    match value {
        Value::Null => kinds::NULL,
        Value::Bool(false) => kinds::FALSE,
        Value::Bool(true) => kinds::TRUE,
        Value::Number(number) => match Decimal::of(number) {
            Some(number) if !number.is_integer() => kinds::FRACTION,
            _ => kinds::INTEGER,
        },
        Value::String(_) => kinds::STRING,
        Value::Array(_) => kinds::ARRAY,
        Value::Object(_) => kinds::OBJECT,
    }
}
