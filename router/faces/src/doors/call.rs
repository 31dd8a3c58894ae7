//! The tenant and deadline of a gRPC call, and the status of a refusal. Has no knowledge of methods.

use http::HeaderMap;
use proto::StatusDetail;
use router::front::frontend::Frontend;
use router::refusal::{Refusal, ResumeError, whole_millis, whole_seconds};
use std::time::Duration;
use tokio::time::Instant;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};
use types::{GrammarFault, TenantId};

/// Returns the tenant of a call, by its key.
pub fn tenant(front: &Frontend, metadata: &MetadataMap) -> Result<TenantId, Refusal> {
    let authorization = metadata.get("authorization").and_then(|value| value.to_str().ok());
    front.config.keys.authorized(authorization).ok_or(Refusal::NoKey)
}

pub fn status(refusal: Refusal) -> Status {
    let code = match &refusal {
        Refusal::Invalid { .. } | Refusal::TooLong { .. } | Refusal::TooLarge { .. } => Code::InvalidArgument,
        Refusal::NoResume(ResumeError::OtherPolicy) => Code::FailedPrecondition,
        Refusal::NoResume(ResumeError::Forged) => Code::PermissionDenied,
        Refusal::NoResume(_) | Refusal::NoToken { .. } => Code::InvalidArgument,
        Refusal::Grammar { fault, .. } => match fault {
            GrammarFault::Late => Code::Unavailable,
            GrammarFault::TooComplex => Code::InvalidArgument,
            GrammarFault::Broken => Code::Internal,
        },
        Refusal::NoKey | Refusal::UnknownKey | Refusal::CertificateEnded => Code::Unauthenticated,
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
    let (message, details) = (refusal.to_string(), details(&refusal));
    let details = proto::status_details(code.into(), &message, &details);
    Status::with_details_and_metadata(code, message, details.into(), metadata)
}

/// Returns the details of a refusal for programs.
fn details(refusal: &Refusal) -> Vec<StatusDetail<'_>> {
    let field = match refusal {
        Refusal::Invalid { field, message } => Some(StatusDetail::Field { name: field, message }),
        _ => None,
    };
    field.into_iter().chain(refusal.retry_after().map(StatusDetail::RetryAfter)).collect()
}

/// How much sooner than the client's deadline a call ends: first its stream, then the gate in front of it. The
/// library's own timer comes last, and reports CANCELLED.
const STREAM_MARGIN: Duration = Duration::from_millis(4);
const GATE_MARGIN: Duration = Duration::from_millis(2);

/// Reads the deadline that the client's library put on the call.
pub fn call_deadline(metadata: &MetadataMap) -> Result<Option<Instant>, Refusal> {
    let Some(value) = metadata.get("grpc-timeout") else { return Ok(None) };
    let timeout = value.to_str().ok().and_then(parse_timeout);
    let timeout = timeout.ok_or_else(|| Refusal::invalid("grpc-timeout", "is not a valid timeout"))?;
    Ok(Instant::now().checked_add(subtract_margin(timeout, STREAM_MARGIN)))
}

/// Returns how long the gate waits for a call's answer. None: without a limit.
pub fn gate_timeout(headers: &HeaderMap) -> Option<Duration> {
    let requested = headers.get("grpc-timeout")?.to_str().ok().and_then(parse_timeout)?;
    Some(subtract_margin(requested, GATE_MARGIN))
}

fn subtract_margin(timeout: Duration, margin: Duration) -> Duration {
    timeout.saturating_sub(margin.min(timeout / 4))
}

/// Parses at most eight digits and a unit.
fn parse_timeout(value: &str) -> Option<Duration> {
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
    fn a_call_ends_before_the_library_s_clock() {
        for (header, gate) in [("1S", Duration::from_millis(998)), ("4m", Duration::from_millis(3))] {
            let headers = HeaderMap::from_iter([("grpc-timeout".parse().unwrap(), header.parse().unwrap())]);
            assert_eq!(gate_timeout(&headers), Some(gate));
            let stream = call_deadline(&MetadataMap::from_headers(headers)).unwrap().unwrap();
            assert!(stream < Instant::now() + gate);
        }
        assert_eq!(gate_timeout(&HeaderMap::new()), None);
    }

    #[test]
    fn timeouts() {
        let check = |text: &str, expected: Option<Duration>| assert_eq!(parse_timeout(text), expected, "{text:?}");
        check("1S", Some(Duration::from_secs(1)));
        check("250m", Some(Duration::from_millis(250)));
        check("99999999H", Some(Duration::from_secs(99_999_999 * 3600)));
        check("5u", Some(Duration::from_micros(5)));
        for bad in ["", "S", "1", "1s", "-1S", "123456789S", "1é"] {
            check(bad, None);
        }
    }
}
