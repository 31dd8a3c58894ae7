//! A refusal in OpenAI's format.

use axum::Json;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_LENGTH, HeaderName, RETRY_AFTER};
use http::{Method, StatusCode};
use router::refusal::{Limit, Refusal, ResumeError, whole_millis, whole_seconds};
use serde_json::{Value, json};
use std::time::Duration;
use types::GrammarFault;

#[derive(Clone, Debug)]
pub struct HttpError {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
    hint: Option<ErrorHint>,
    /// A value of a small closed set, because it is a metric's label.
    label: &'static str,
}

/// Details that a client may act on.
#[derive(Clone, Copy, Debug)]
enum ErrorHint {
    RetryAfter(Duration),
    /// The prompt has more tokens than the context.
    TooLong {
        n_prompt: u32,
        context: u32,
    },
}

/// The header that OpenAI's clients read first.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
/// How many characters of an unknown id a refusal repeats.
const ID_CHARS_MAX: usize = 80;
const INVALID: &str = "invalid_request_error";
const SERVER: &str = "server_error";

/// The most characters of a path that an error repeats.
const PATH_CHARS_MAX: usize = 200;

fn truncated_path(path: &str) -> String {
    path.chars().take(PATH_CHARS_MAX).collect()
}

impl HttpError {
    pub fn bad_request(status: StatusCode, message: impl Into<String>) -> HttpError {
        let message = message.into();
        let (kind, label) = (INVALID, "invalid");
        HttpError { status, kind, code: None, param: None, message, hint: None, label }
    }

    pub fn too_large(bytes_max: usize) -> HttpError {
        let message = format!("the body is larger than {bytes_max} bytes");
        HttpError { code: Some("request_too_large"), ..HttpError::bad_request(StatusCode::PAYLOAD_TOO_LARGE, message) }
    }

    pub fn no_such_page(method: &Method, path: &str) -> HttpError {
        HttpError::bad_request(StatusCode::NOT_FOUND, format!("there is no {method} {} here", truncated_path(path)))
    }

    /// Refuses a page that other servers have and this one has not.
    pub fn unserved_page(message: &str) -> HttpError {
        HttpError { code: Some("not_supported"), ..HttpError::bad_request(StatusCode::NOT_FOUND, message) }
    }

    /// Refuses an operation that other servers do on a page of this name.
    pub fn not_supported(message: &str) -> HttpError {
        HttpError { code: Some("not_supported"), ..HttpError::bad_request(StatusCode::NOT_IMPLEMENTED, message) }
    }

    pub fn no_such_response(param: &str, id: &str) -> HttpError {
        let id: String = id.chars().take(ID_CHARS_MAX).collect();
        let message = format!(
            "Response with id `{id}` not found: it may have expired, belong to another key or be stored on another \
             router; send the conversation itself as `input`"
        );
        let error = HttpError::bad_request(StatusCode::NOT_FOUND, message);
        HttpError { code: Some("response_not_found"), param: Some(param.to_owned()), ..error }
    }

    pub fn no_such_conversation(param: &str, id: &str) -> HttpError {
        let id: String = id.chars().take(ID_CHARS_MAX).collect();
        let message = format!(
            "Conversation with id '{id}' not found: it may have expired, belong to another key or be stored on \
             another router"
        );
        let error = HttpError::bad_request(StatusCode::NOT_FOUND, message);
        HttpError { code: Some("conversation_not_found"), param: Some(param.to_owned()), ..error }
    }

    pub fn no_such_item(id: &str, conversation: &str) -> HttpError {
        let short = |id: &str| -> String { id.chars().take(ID_CHARS_MAX).collect() };
        let message = format!("Item with id '{}' not found in conversation '{}'.", short(id), short(conversation));
        let error = HttpError::bad_request(StatusCode::NOT_FOUND, message);
        HttpError { code: Some("item_not_found"), param: Some("item_id".to_owned()), ..error }
    }

    pub fn no_stored_item(id: &str) -> HttpError {
        let id: String = id.chars().take(ID_CHARS_MAX).collect();
        let message = format!(
            "Item with id '{id}' not found: it may have expired, belong to another key, be stored on another router, \
             or be of a response with `store` set to false; send the item itself"
        );
        let error = HttpError::bad_request(StatusCode::NOT_FOUND, message);
        HttpError { code: Some("item_not_found"), param: Some("input".to_owned()), ..error }
    }

    pub fn conversation_locked() -> HttpError {
        let message = "Another process is currently operating on this conversation. Please retry in a few seconds.";
        let error = HttpError::bad_request(StatusCode::BAD_REQUEST, message);
        HttpError { code: Some("conversation_locked"), param: Some("conversation".to_owned()), ..error }
    }

    /// Refuses two fields that exclude each other.
    pub fn mutually_exclusive(one: &str, other: &str) -> HttpError {
        let message =
            format!("Mutually exclusive parameters. Ensure you are only providing one of: '{one}' or '{other}'.");
        let error = HttpError::bad_request(StatusCode::BAD_REQUEST, message);
        HttpError { code: Some("mutually_exclusive_parameters"), param: Some(other.to_owned()), ..error }
    }

    pub fn wrong_method(method: &Method, path: &str) -> HttpError {
        let message = format!("{} exists, but does not accept {method}", truncated_path(path));
        HttpError::bad_request(StatusCode::METHOD_NOT_ALLOWED, message)
    }

    pub fn status(&self) -> StatusCode {
        self.status
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    pub fn label(&self) -> &'static str {
        self.label
    }

    pub fn body(&self) -> Value {
        let Self { message, kind, param, code, .. } = self;
        let mut error = json!({ "message": message, "type": kind, "param": param, "code": code });
        if let Some(ErrorHint::TooLong { n_prompt, context }) = self.hint {
            (error["n_prompt_tokens"], error["n_ctx"]) = (n_prompt.into(), context.into());
        }
        json!({ "error": error })
    }

    /// The same in vLLM's format: the code is the status, and the field stands at the message's end.
    pub fn vllm_body(&self) -> Value {
        let kind = match self.status {
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::NOT_IMPLEMENTED => "NotImplementedError",
            StatusCode::UNAUTHORIZED => "AuthenticationError",
            status if status.is_client_error() => "BadRequestError",
            _ => "InternalServerError",
        };
        let with_field_last = |field: &String| {
            let message = self.message.strip_prefix(field.as_str())?.strip_prefix(": ")?;
            Some(format!("{message} (parameter={field})"))
        };
        let message = self.param.as_ref().and_then(with_field_last).unwrap_or_else(|| self.message.clone());
        json!({ "error": { "message": message, "type": kind, "param": self.param, "code": self.status.as_u16() } })
    }

    /// The same on llama.cpp's pages, whose clients decide by the error's type.
    #[must_use]
    pub fn with_llama_cpp_kind(self) -> HttpError {
        let kind = match self.status {
            _ if matches!(self.hint, Some(ErrorHint::TooLong { .. })) => "exceed_context_size_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_IMPLEMENTED => "not_supported_error",
            _ => self.kind,
        };
        HttpError { kind, ..self }
    }
}

/// Fields of `lockstep.v1` that have other names in OpenAI's API.
const NAMES: [(&str, &str); 3] = [("text", "prompt"), ("token_ids", "prompt"), ("chat", "messages")];

impl From<Refusal> for HttpError {
    fn from(refusal: Refusal) -> HttpError {
        HttpError::of(refusal.renamed(&NAMES))
    }
}

impl HttpError {
    /// Converts a refusal without OpenAI's names for fields.
    pub fn of(refusal: Refusal) -> HttpError {
        let (status, kind, code) = match &refusal {
            Refusal::Invalid { .. } => (StatusCode::BAD_REQUEST, INVALID, None),
            Refusal::TooLong { .. } => (StatusCode::BAD_REQUEST, INVALID, Some("context_length_exceeded")),
            Refusal::TooLarge { .. } => (StatusCode::BAD_REQUEST, INVALID, Some("context_length_exceeded")),
            Refusal::NoKey | Refusal::UnknownKey => (StatusCode::UNAUTHORIZED, INVALID, Some("invalid_api_key")),
            Refusal::CertificateEnded => (StatusCode::UNAUTHORIZED, INVALID, Some("invalid_certificate")),
            Refusal::NoModel { .. } => (StatusCode::NOT_FOUND, INVALID, Some("model_not_found")),
            Refusal::Full { .. } => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("rate_limit_exceeded")),
            Refusal::Limited { limit, .. } => {
                (StatusCode::TOO_MANY_REQUESTS, limit_name(*limit), Some("rate_limit_exceeded"))
            }
            Refusal::TooLate { .. } => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("deadline_too_short")),
            Refusal::NotReady { .. } => (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("not_ready")),
            Refusal::Draining { .. } => (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("draining")),
            Refusal::Deadline => (StatusCode::GATEWAY_TIMEOUT, SERVER, Some("deadline_exceeded")),
            Refusal::Lost | Refusal::Away { .. } => (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("replica_lost")),
            Refusal::NoResume(why) => (resume_status(*why), INVALID, Some(why.label())),
            Refusal::LostTooOften { .. } => (StatusCode::INTERNAL_SERVER_ERROR, SERVER, Some("lost_too_often")),
            Refusal::SlowReader { .. } => (StatusCode::INTERNAL_SERVER_ERROR, SERVER, Some("slow_reader")),
            Refusal::NoToken { .. } => (StatusCode::BAD_REQUEST, INVALID, Some("no_token_left")),
            Refusal::Grammar { fault, .. } => match fault {
                GrammarFault::Late => (StatusCode::SERVICE_UNAVAILABLE, SERVER, Some("grammar_too_slow")),
                GrammarFault::TooComplex => (StatusCode::BAD_REQUEST, INVALID, Some("grammar_too_costly")),
                GrammarFault::Broken => (StatusCode::INTERNAL_SERVER_ERROR, SERVER, Some("grammar_failed")),
            },
            Refusal::Failed { .. } => (StatusCode::INTERNAL_SERVER_ERROR, SERVER, None),
        };
        let param = match &refusal {
            Refusal::Invalid { field, .. } => Some(field.to_string()),
            Refusal::NoModel { .. } => Some("model".to_owned()),
            Refusal::NoResume(_) => Some("Last-Event-ID".to_owned()),
            _ => None,
        };
        let hint = match refusal {
            Refusal::TooLong { n_prompt, context } => {
                Some(ErrorHint::TooLong { n_prompt: u32::try_from(n_prompt).unwrap_or(u32::MAX), context })
            }
            _ => refusal.retry_after().map(ErrorHint::RetryAfter),
        };
        HttpError { status, kind, code, param, message: refusal.to_string(), hint, label: refusal.label() }
    }
}

/// Returns OpenAI's name for the exceeded limit.
fn limit_name(limit: Limit) -> &'static str {
    match limit {
        Limit::Requests(_) | Limit::Concurrent(_) => "requests",
        Limit::Tokens(_) => "tokens",
    }
}

fn resume_status(why: ResumeError) -> StatusCode {
    match why {
        ResumeError::Forged => StatusCode::FORBIDDEN,
        ResumeError::OtherPolicy => StatusCode::CONFLICT,
        _ => StatusCode::BAD_REQUEST,
    }
}

/// Rewrites a refusal of any inner layer with the body that `body` returns.
pub fn with_error_body(response: Response, body: impl FnOnce(&HttpError) -> Value) -> Response {
    let Some(error) = response.extensions().get::<HttpError>().cloned() else { return response };
    let (mut head, _) = response.into_parts();
    head.headers.remove(CONTENT_LENGTH);
    Response::from_parts(head, Body::from(body(&error).to_string()))
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(ErrorHint::RetryAfter(wait)) = self.hint {
            response.headers_mut().insert(RETRY_AFTER, whole_seconds(wait).into());
            // Milliseconds, for clients that read them: with whole seconds, too many clients would return in the same
            // second.
            response.headers_mut().insert(RETRY_AFTER_MS, whole_millis(wait).into());
        }
        // A layer that rewrites errors reads this one from here.
        response.extensions_mut().insert(self);
        response
    }
}
