//! `/records/{id}`: what this router has recorded of an answer. Shown to the tenant who asked for it.

use crate::faces::http::error::HttpError;
use crate::front::frontend::Frontend;
use crate::record::find;
use crate::refusal::Refusal;
use axum::Json;
use axum::extract::{Extension, Path, State};
use http::StatusCode;
use serde_json::Value;
use std::sync::Arc;
use types::TenantId;

pub async fn one(
    State(front): State<Arc<Frontend>>,
    Path(id): Path<String>,
    Extension(tenant): Extension<TenantId>,
) -> Result<Json<Value>, HttpError> {
    let none = |why: &str| HttpError::bad_request(StatusCode::NOT_FOUND, why);
    let Some(record) = &front.config.record else { return Err(none("this router records no answers (--record)")) };
    let dir = record.dir.clone();
    let found = front.on_a_thread(move || find(&dir, &id)).await?;
    let line = found.map_err(|error| Refusal::failed(format!("the record cannot be read: {error}")))?;
    let record = line.and_then(|line| serde_json::from_str::<Value>(&line).ok());
    let is_own = |record: &Value| record["tenant"] == format!("{:016x}", tenant.0);
    record.filter(is_own).map(Json).ok_or_else(|| none("there is no record of this answer"))
}
