//! The details that a gRPC status carries beside its text, as `google.rpc` has them. Knows no refusal.

use prost::Message;
use std::time::Duration;

/// A detail of a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusDetail<'a> {
    /// The field that is not valid, and why.
    Field { name: &'a str, message: &'a str },
    /// When to come again.
    RetryAfter(Duration),
}

/// `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<AnyMessage>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Message)]
struct AnyMessage {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct BadRequest {
    #[prost(message, repeated, tag = "1")]
    field_violations: Vec<FieldViolation>,
}

#[derive(Clone, PartialEq, Message)]
struct FieldViolation {
    #[prost(string, tag = "1")]
    field: String,
    #[prost(string, tag = "2")]
    description: String,
}

#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<RetryDelay>,
}

/// `google.protobuf.Duration`.
#[derive(Clone, PartialEq, Message)]
struct RetryDelay {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

/// Returns the content of `grpc-status-details-bin` beside a code and a message. Empty if there is no detail.
pub fn status_details(code: i32, message: &str, details: &[StatusDetail<'_>]) -> Vec<u8> {
    if details.is_empty() {
        return Vec::new();
    }
    let details = details.iter().map(any).collect();
    RpcStatus { code, message: message.to_owned(), details }.encode_to_vec()
}

fn any(detail: &StatusDetail<'_>) -> AnyMessage {
    let (name, value) = match *detail {
        StatusDetail::Field { name, message } => {
            let violation = FieldViolation { field: name.to_owned(), description: message.to_owned() };
            ("BadRequest", BadRequest { field_violations: vec![violation] }.encode_to_vec())
        }
        StatusDetail::RetryAfter(wait) => {
            let seconds = i64::try_from(wait.as_secs()).unwrap_or(i64::MAX);
            let delay = RetryDelay { seconds, nanos: wait.subsec_nanos() as i32 };
            ("RetryInfo", RetryInfo { retry_delay: Some(delay) }.encode_to_vec())
        }
    };
    AnyMessage { type_url: format!("type.googleapis.com/google.rpc.{name}"), value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_are_encoded_as_google_rpc_messages() {
        assert!(status_details(3, "no", &[]).is_empty());
        let all = [
            StatusDetail::Field { name: "top_p", message: "is too large" },
            StatusDetail::RetryAfter(Duration::from_millis(1500)),
        ];
        let status = RpcStatus::decode(status_details(3, "no", &all).as_slice()).unwrap();
        assert_eq!((status.code, status.message.as_str(), status.details.len()), (3, "no", 2));
        let of = |i: usize| (status.details[i].type_url.as_str(), status.details[i].value.as_slice());
        // As any other library would encode them: a field of length 21 with two texts, and 1.5 seconds.
        let field = b"\x0a\x15\x0a\x05top_p\x12\x0cis too large";
        assert_eq!(of(0), ("type.googleapis.com/google.rpc.BadRequest", &field[..]));
        let delay = b"\x0a\x08\x08\x01\x10\x80\xca\xb5\xee\x01";
        assert_eq!(of(1), ("type.googleapis.com/google.rpc.RetryInfo", &delay[..]));
    }
}
