//! `/records/{id}`: this router's record of an answer, for the tenant that requested the answer.

use crate::http::error::HttpError;
use axum::Json;
use axum::extract::{Extension, Path, State};
use http::StatusCode;
use router::front::frontend::Frontend;
use router::record::find;
use router::refusal::Refusal;
use serde_json::Value;
use std::sync::Arc;
use types::TenantId;

/// The hexadecimal digits of a router's number and its count.
const ID_DIGITS: usize = 24;

pub async fn get_record(
    State(front): State<Arc<Frontend>>,
    Path(id): Path<String>,
    Extension(tenant): Extension<TenantId>,
) -> Result<Json<Value>, HttpError> {
    let none = |why: &str| HttpError::bad_request(StatusCode::NOT_FOUND, why);
    let Some(record) = &front.config.record else { return Err(none("this router records no answers (--record)")) };
    let no_record = || none("there is no record of this answer");
    if !is_id(&id) {
        return Err(no_record());
    }
    let dir = record.dir.clone();
    let found = front.record_threads.run(move || find(&dir, &id)).await?;
    let line = found.map_err(|error| Refusal::failed(format!("the record cannot be read: {error}")))?;
    let record = line.and_then(|line| serde_json::from_str::<Value>(&line).ok());
    let is_own = |record: &Value| record["tenant"] == format!("{:016x}", tenant.0);
    record.filter(is_own).map(Json).ok_or_else(no_record)
}

/// Whether it is an id in the format of routers, with or without the prefix of its page. No file is read for anything
/// else.
fn is_id(id: &str) -> bool {
    let bare = id.rsplit(['-', '_']).next().unwrap_or_default();
    bare.len() == ID_DIGITS && bare.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[test]
fn what_is_no_id_is_not_looked_for() {
    assert!(is_id(&"5a".repeat(12)) && is_id(&format!("chatcmpl-{}", "0f".repeat(12))));
    for other in ["", "0", "-", "cmpl-", "..", "../../etc/passwd", &"5a".repeat(11), &"g".repeat(24), &"é".repeat(12)]
    {
        assert!(!is_id(other), "{other:?}");
    }
}
