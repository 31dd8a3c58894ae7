//! `/props`, `/slots`, `/lora-adapters` and `/apply-template`: the server's properties, and the rendered prompt of a
//! chat.

use crate::http::conversation::conversation;
use crate::http::error::HttpError;
use crate::http::known::Endpoint;
use crate::http::llama_cpp::settings::{self, RANDOM_SEED};
use crate::http::page::ApiRequest;
use axum::Json;
use axum::extract::{RawQuery, State};
use proto::v1;
use router::front::frontend::{Frontend, unix_seconds};
use router::replicas::models::table::VersionSelector;
use serde_json::{Value, json};
use std::sync::Arc;

pub async fn props(State(front): State<Arc<Frontend>>) -> Result<Json<Value>, HttpError> {
    let model = front.model("", VersionSelector::Weight)?;
    let (text, context) = (&model.text, model.replica.context);
    let special = |token: Option<&u32>| token.map(|token| text.tokenizer.decode(&[*token], false)).unwrap_or_default();
    let params = settings::resolved_settings(
        &settings::requested_settings(&v1::Sampling::default()),
        text,
        context,
        front.config.seed.unwrap_or(RANDOM_SEED),
    );
    Ok(Json(json!({
        "default_generation_settings": { "id": 0, "n_ctx": context, "is_processing": false, "params": params },
        "total_slots": front.config.limits.slots,
        "model_alias": model.name,
        "model_path": model.replica.model,
        "modalities": { "vision": false, "audio": false },
        "chat_template": text.template.as_ref().map(|template| template.source()).unwrap_or_default(),
        "bos_token": special(text.spec.bos.as_ref()),
        "eos_token": special(text.spec.eos.first()),
        "build_info": concat!("lockstep-", env!("CARGO_PKG_VERSION")),
        "is_sleeping": false,
    })))
}

/// Lists one slot for each request that may run at once, and one more for each request that waits. Slots hold no state:
/// all requests share what is cached.
pub async fn slots(State(front): State<Arc<Frontend>>, RawQuery(query): RawQuery) -> Result<Json<Value>, HttpError> {
    let has_room = front.replicas.has_room();
    let must_have = query.iter().flat_map(|query| query.split('&')).any(|field| field == "fail_on_no_slot=1");
    if must_have && !has_room {
        return Err(front.admission.full().into());
    }
    let context = front.model("", VersionSelector::Weight)?.replica.context;
    let n_busy = front.streams.len();
    let slot = |id: usize| json!({ "id": id, "n_ctx": context, "is_processing": id < n_busy, "speculative": false });
    Ok(Json((0..n_busy.max(front.config.limits.slots)).map(slot).collect()))
}

pub async fn refuse_slots() -> HttpError {
    HttpError::not_supported("this server reports no slots: it was started with --no-slots")
}

/// Refuses to save, restore or erase a slot: caches belong to all requests, and to no slot.
pub async fn refuse_slot_action() -> HttpError {
    HttpError::not_supported("this server's slots have no state to save, restore or erase")
}

pub async fn lora_adapters() -> Json<Value> {
    Json(json!([]))
}

pub async fn apply_template(State(front): State<Arc<Frontend>>, page: ApiRequest) -> Result<Json<Value>, HttpError> {
    let _visit = front.visit(page.tenant)?;
    let mut fields = page.fields;
    let text = front.text(&fields.string("model")?.unwrap_or_default())?;
    let chat = conversation(&mut fields)?;
    fields.check(Endpoint::Tokenize)?;
    Ok(Json(json!({ "prompt": front.texts.render_chat(&text, chat, unix_seconds()).await? })))
}
