//! What a gRPC call carries beside its message: its tenant and deadline; and how a refusal becomes its status. Knows no
//! method.

use crate::front::frontend::Frontend;
use crate::refusal::{NoResume, Refusal, whole_millis, whole_seconds};
use std::time::Duration;
use tokio::time::Instant;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};
use types::TenantId;

/// The tenant of a call, by its key.
pub fn tenant(front: &Frontend, metadata: &MetadataMap) -> Result<TenantId, Refusal> {
    let authorization = metadata.get("authorization").and_then(|value| value.to_str().ok());
    front.config.keys.authorized(authorization).ok_or(Refusal::NoKey)
}

pub fn status(refusal: Refusal) -> Status {
    let code = match &refusal {
        Refusal::Invalid { .. } | Refusal::TooLong { .. } | Refusal::TooLarge { .. } => Code::InvalidArgument,
        Refusal::NoResume(NoResume::OtherPolicy) => Code::FailedPrecondition,
        Refusal::NoResume(NoResume::Forged) => Code::PermissionDenied,
        Refusal::NoResume(_) => Code::InvalidArgument,
        Refusal::NoKey => Code::Unauthenticated,
        Refusal::NoModel { .. } => Code::NotFound,
        Refusal::Full { .. } | Refusal::Limited { .. } | Refusal::TooLate { .. } => Code::ResourceExhausted,
        Refusal::NotReady { .. } | Refusal::Draining { .. } | Refusal::Lost | Refusal::Away { .. } => Code::Unavailable,
        Refusal::Deadline => Code::DeadlineExceeded,
        Refusal::SlowReader { .. } => Code::Aborted,
        Refusal::Failed { .. } | Refusal::LostTooOften { .. } => Code::Internal,
    };
    let mut metadata = MetadataMap::new();
    if let Some(wait) = refusal.retry_after() {
        metadata.insert("retry-after", MetadataValue::from(whole_seconds(wait)));
        metadata.insert("retry-after-ms", MetadataValue::from(whole_millis(wait)));
    }
    Status::with_metadata(code, refusal.to_string(), metadata)
}

/// The deadline that the client's library put on the call.
pub fn call_deadline(metadata: &MetadataMap) -> Result<Option<Instant>, Refusal> {
    let Some(value) = metadata.get("grpc-timeout") else { return Ok(None) };
    let timeout = value.to_str().ok().and_then(timeout);
    let timeout = timeout.ok_or_else(|| Refusal::invalid("grpc-timeout", "is no timeout"))?;
    Ok(Instant::now().checked_add(timeout))
}

/// Parses at most eight digits and a unit.
fn timeout(value: &str) -> Option<Duration> {
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let n = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(n * 3600)),
        "M" => Some(Duration::from_secs(n * 60)),
        "S" => Some(Duration::from_secs(n)),
        "m" => Some(Duration::from_millis(n)),
        "u" => Some(Duration::from_micros(n)),
        "n" => Some(Duration::from_nanos(n)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts() {
        let check = |text: &str, expected: Option<Duration>| assert_eq!(timeout(text), expected, "{text:?}");
        check("1S", Some(Duration::from_secs(1)));
        check("250m", Some(Duration::from_millis(250)));
        check("99999999H", Some(Duration::from_secs(99_999_999 * 3600)));
        check("5u", Some(Duration::from_micros(5)));
        for bad in ["", "S", "1", "1s", "-1S", "123456789S", "1é"] {
            check(bad, None);
        }
    }
}
