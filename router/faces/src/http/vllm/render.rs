//! The requests of pages to a replica, without sending them: `/v1/chat/completions/render` and similar pages. The
//! answer is a body for `/inference/v1/generate`, or a list of them.

use crate::http::completions::{TOKENS_MAX, inputs};
use crate::http::conversation::conversation;
use crate::http::door::REQUEST_ID;
use crate::http::error::HttpError;
use crate::http::fields::Fields;
use crate::http::known::Endpoint;
use crate::http::page::{ApiRequest, read};
use crate::http::structure::structure;
use crate::http::vllm::params;
use crate::http::{messages, responses};
use axum::Json;
use axum::extract::{Request, State};
use proto::v1;
use proto::v1::generate_request::Input;
use router::front::frontend::{Frontend, unix_seconds};
use router::front::parsed_request::{ParsedRequest, Purpose};
use router::front::prepared::room;
use router::front::text_work::RenderedPrompt;
use router::refusal::Refusal;
use router::replicas::models::table::VersionSelector;
use router::replicas::models::text::EncodeSettings;
use router::replicas::models::truncation::CutSide;
use serde_json::{Value, json};
use std::sync::Arc;
use types::{Goal, TenantId};

const OFFSETS: &str = "return_token_offsets";

pub async fn chat(State(front): State<Arc<Frontend>>, request: Request) -> Result<Json<Value>, HttpError> {
    let (repeated, mut page) = read_page(&front, request, "chatcmpl-").await?;
    let fields = &mut page.fields;
    let needs_offsets = fields.boolean(OFFSETS)?.unwrap_or(false);
    fields.check(Endpoint::Chat)?;
    let mut sampling = fields.sampling()?;
    let needs_logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    sampling.logprobs = fields.unsigned("top_logprobs")?.or(Some(0)).filter(|_| needs_logprobs);
    sampling.structure = structure(fields)?.map(|requested| requested.structure);
    let prompts = vec![Input::Chat(conversation(fields)?)];
    let parsed = build_request(fields, prompts, sampling)?;
    single_body(&front, RepeatedFields { needs_offsets, ..repeated }, parsed).await
}

pub async fn completions(State(front): State<Arc<Frontend>>, request: Request) -> Result<Json<Value>, HttpError> {
    let (repeated, mut page) = read_page(&front, request, "cmpl-").await?;
    let fields = &mut page.fields;
    let needs_offsets = fields.boolean(OFFSETS)?.unwrap_or(false);
    fields.check(Endpoint::Completions)?;
    fields.refuse(&["suffix"])?;
    let mut sampling = fields.sampling()?;
    sampling.logprobs = fields.unsigned("logprobs")?;
    sampling.structure = structure(fields)?.map(|requested| requested.structure);
    sampling.max_tokens.get_or_insert(TOKENS_MAX);
    let prompt = fields.take("prompt").ok_or_else(|| Refusal::invalid("prompt", "is missing"))?;
    let parsed = build_request(fields, inputs("prompt", prompt)?, sampling)?;
    Ok(Json(bodies(&front, RepeatedFields { needs_offsets, ..repeated }, parsed).await?.into()))
}

pub async fn messages(State(front): State<Arc<Frontend>>, request: Request) -> Result<Json<Value>, HttpError> {
    let (repeated, page) = read_page(&front, request, "chatcmpl-").await?;
    let parsed = messages::to_parsed_request(&front, page)?;
    single_body(&front, repeated, parsed).await
}

pub async fn responses(State(front): State<Arc<Frontend>>, request: Request) -> Result<Json<Value>, HttpError> {
    let (repeated, page) = read_page(&front, request, "resp_").await?;
    // Stored items exist only in this router, and any router must be able to serve a rendered request.
    page.fields.refuse(&["previous_response_id", "conversation"])?;
    let parsed = responses::to_parsed_request(&front, page)?;
    single_body(&front, repeated, parsed).await
}

/// The parts of the request that a rendered request repeats.
struct RepeatedFields {
    /// The client's request id, or one of this router.
    id: String,
    tenant: TenantId,
    is_stream: bool,
    stream_options: Option<Value>,
    /// Whether the client requests each token's place in the text.
    needs_offsets: bool,
}

/// Reads a request and the parts that are only repeated. An id in the header has precedence over one in the body.
async fn read_page(
    front: &Frontend,
    request: Request,
    prefix: &str,
) -> Result<(RepeatedFields, ApiRequest), HttpError> {
    let in_header = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok()).map(str::to_owned);
    let mut page = read(front, request).await?;
    let fields = &mut page.fields;
    let own = || format!("{:08x}{:016x}", front.ids.nonce(), front.ids.next_request());
    let name = in_header.or(fields.string("request_id")?).unwrap_or_else(own);
    let is_stream = fields.get("stream") == Some(&Value::Bool(true));
    let stream_options = fields.get("stream_options").filter(|_| is_stream).cloned();
    let (id, tenant) = (format!("{prefix}{name}"), page.tenant);
    Ok((RepeatedFields { id, tenant, is_stream, stream_options, needs_offsets: false }, page))
}

fn build_request(fields: &mut Fields, prompts: Vec<Input>, sampling: v1::Sampling) -> Result<ParsedRequest, Refusal> {
    Ok(ParsedRequest {
        model: fields.string("model")?.unwrap_or_default(),
        prompts,
        n_choices: fields.n_choices()?,
        truncation: fields.truncation(CutSide::Left)?,
        adds_special: fields.boolean("add_special_tokens")?,
        priority: fields.priority()?,
        purpose: Purpose::Generate(Box::new(sampling)),
        ..ParsedRequest::default()
    })
}

async fn single_body(
    front: &Frontend,
    repeated: RepeatedFields,
    parsed: ParsedRequest,
) -> Result<Json<Value>, HttpError> {
    let mut bodies = bodies(front, repeated, parsed).await?;
    Ok(Json(bodies.remove(0)))
}

/// Returns one body for each prompt.
async fn bodies(front: &Frontend, repeated: RepeatedFields, parsed: ParsedRequest) -> Result<Vec<Value>, HttpError> {
    let _visit = front.visit(repeated.tenant)?;
    let ParsedRequest { model, prompts, n_choices, priority, purpose, truncation, adds_special, .. } = parsed;
    let sampling = match purpose {
        Purpose::Generate(sampling) => *sampling,
        Purpose::Pool | Purpose::Read(_) => v1::Sampling::default(),
    };
    let (n_prompts, n_prompts_max) = (prompts.len(), front.config.limits.prompts_max);
    if n_prompts > n_prompts_max {
        return Err(Refusal::invalid("prompt", format!("there are more than {n_prompts_max}")).into());
    }
    let text = front.text(&model)?;
    let context = front.model(&model, VersionSelector::Weight).map_or(text.spec.context, |model| model.replica.context);
    let room = room(context, &Goal::Generate);
    let cut = truncation.map(|truncation| truncation.within(room)).transpose()?;
    let settings = EncodeSettings { adds_special, now: unix_seconds(), cut };
    let mut bodies = Vec::with_capacity(n_prompts);
    for (i, input) in prompts.into_iter().enumerate() {
        let requested_structure = sampling.structure.clone();
        let rendered =
            front.texts.render_request(&text, input, requested_structure, repeated.needs_offsets, settings).await?;
        let RenderedPrompt { ids, places, structure } = rendered;
        let params = params::value(&v1::Sampling { structure, ..sampling.clone() }, n_choices);
        let id = if n_prompts == 1 { repeated.id.clone() } else { format!("{}-{i}", repeated.id) };
        bodies.push(json!({
            "model": model,
            "request_id": id,
            "token_ids": ids,
            "token_offsets": places,
            "sampling_params": params,
            "stream": repeated.is_stream,
            "stream_options": repeated.stream_options,
            "priority": priority,
        }));
    }
    Ok(bodies)
}
