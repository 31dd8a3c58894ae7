//! Why a frame is refused, and the checks that all conversions share. Knows no message.

use std::str::FromStr;
use types::{NumberRange, UnknownWord, Unsupported};

/// A frame that decodes but whose content cannot be valid.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    #[error("not a frame: {0}")]
    Undecodable(#[from] prost::DecodeError),
    #[error("{field} is missing")]
    Missing { field: &'static str },
    #[error("{field} is out of range: {value}")]
    OutOfRange { field: &'static str, value: i64 },
    #[error("{field}: {unknown}")]
    Word { field: &'static str, unknown: UnknownWord },
    #[error("assign.stages: {0}")]
    Stages(Unsupported),
    #[error("{0}")]
    Unsupported(#[from] Unsupported),
    #[error("{field} is out of range: {value}")]
    Number { field: &'static str, value: f32 },
}

pub(crate) fn word<T: FromStr<Err = UnknownWord>>(field: &'static str, word: &str) -> Result<T, Malformed> {
    word.parse().map_err(|unknown| Malformed::Word { field, unknown })
}

pub(crate) fn out_of_range(field: &'static str, value: impl TryInto<i64>) -> Malformed {
    Malformed::OutOfRange { field, value: value.try_into().unwrap_or(i64::MAX) }
}

pub(crate) fn check_number(field: &'static str, value: f32, range: NumberRange) -> Result<(), Malformed> {
    if range.contains(value) { Ok(()) } else { Err(Malformed::Number { field, value }) }
}
