//! HTTP for clients: the APIs of OpenAI, Anthropic, Ollama, llama.cpp and vLLM, and pages for operators. Each page
//! translates for `front`.
//!
//! Has no knowledge of replicas, except for lists of models. Read `server`, `origin` and `door` (connections, browsers
//! and keys), `page`, `fields` and `known` (the client's request; `conversation`, `tools` and `structure` read parts of
//! it, and `custom` a kind of tools), then an endpoint. OpenAI's `chat` and `completions` share `answer`,
//! `answer_content`, `format` and `chunks`. `responses`, Anthropic's `messages` and other APIs have a folder each.
//! `kept` and `records` are for recorded answers, `browser` for the page, `orca` for gateways that balance load. All
//! answers' streams go through `sse`. One table, `apis`, lists all pages.

mod answer;
mod answer_content;
mod biases;
mod browser;
mod certificate;
mod chat;
mod chunks;
mod completions;
mod conversation;
mod custom;
mod decisions;
mod door;
mod embeddings;
mod error;
pub mod fields;
pub mod format;
mod infill;
pub mod kept;
pub mod known;
mod llama_cpp;
mod llama_words;
mod messages;
mod models;
mod ollama;
mod openapi;
mod orca;
mod origin;
mod packed;
mod page;
mod pooled;
mod pooling;
mod prediction;
mod prefix;
mod ranking;
mod records;
mod responses;
mod searches;
mod server;
mod single;
mod sse;
mod stopwatch;
pub mod structure;
mod table;
pub mod thinking;
mod timings;
mod tokens;
mod tools;
mod vectors;
mod vllm;

use crate::doors::unread;
use crate::http::error::HttpError;
use crate::http::origin::OriginPolicy;
use crate::http::responses::conversations::{self, CONVERSATION};
use crate::http::responses::stored::{RESPONSE, delete_stored};
use crate::http::table::{ApiRoutes, KeyRequirement, Route, delete, get, head, post};
use crate::listeners::{Error, HttpListeners};
use axum::Router;
use axum::extract::State;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use http::{Method, Uri};
use router::config::{Config, DisabledPages};
use router::front::frontend::Frontend;
use router::limits::keys::ApiKeys;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub async fn serve(front: Arc<Frontend>, listeners: HttpListeners, shutdown: CancellationToken) -> Result<(), Error> {
    let HttpListeners { clients, operators } = listeners;
    let for_operators = async {
        let Some((listener, keys)) = operators.zip(front.config.operators.clone()) else { return Ok(()) };
        // Its clients, a kubelet's probe or Prometheus, are within the cluster and have no client certificate.
        serve_pages(front.clone(), listener, keys, None, operator_routes, shutdown.clone()).await
    };
    let (keys, tls) = (front.config.keys.clone(), front.config.tls.clone());
    let for_clients = serve_pages(front.clone(), clients, keys, tls, routes, shutdown.clone());
    tokio::try_join!(for_clients, for_operators).map(|_| ())
}

async fn serve_pages(
    front: Arc<Frontend>,
    listener: TcpListener,
    keys: ApiKeys,
    tls: Option<wire::OfferedTls>,
    routes: fn(Arc<Frontend>, Arc<OriginPolicy>) -> Router,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let (limits, timeouts) = (front.config.limits.clone(), front.config.timeouts.clone());
    let visitors = OriginPolicy::new(&front.config, keys, listener.local_addr().map_err(Error::Http)?);
    server::serve(routes(front, visitors), server::HttpConnections::of(listener, tls), &limits, &timeouts, shutdown)
        .await
}

/// The pages of a port for operators only.
fn operator_routes(front: Arc<Frontend>, visitors: Arc<OriginPolicy>) -> Router {
    let pages = |rows: Vec<Route>| -> Router<Arc<Frontend>> {
        rows.into_iter().fold(Router::new(), |pages, row| pages.route(row.path, row.serve))
    };
    let off = front.config.pages_off;
    let keyed = vec![vec![metrics_page(off), cluster_page()], browser::tenant_routes(), browser::operator_routes()];
    let keyed = pages(keyed.into_iter().flatten().collect());
    let keyed = keyed.route_layer(from_fn_with_state(front.clone(), door::authorize_operator));
    with_layers(pages(probe_routes()).merge(pages(browser::page_routes(!off.ui))).merge(keyed), front, visitors)
}

fn routes(front: Arc<Frontend>, visitors: Arc<OriginPolicy>) -> Router {
    let mut all = Router::new();
    for api in api_table(&front.config) {
        let rows = api.routes.into_iter();
        let pages: Router<Arc<Frontend>> = rows.fold(Router::new(), |pages, row| pages.route(row.path, row.serve));
        let reported = from_fn_with_state(front.clone(), orca::report_load);
        // Within the layer of keys: a client without a key gets no information.
        let pages = match api.keys {
            KeyRequirement::NotRequired => pages,
            KeyRequirement::Bearer => {
                pages.route_layer(reported).route_layer(from_fn_with_state(front.clone(), door::authorize))
            }
            KeyRequirement::Operator => pages.route_layer(from_fn_with_state(front.clone(), door::authorize_cluster)),
            KeyRequirement::BearerOrBare => pages
                .route_layer(reported)
                .route_layer(from_fn_with_state(front.clone(), door::authorize_bearer_or_bare)),
        };
        // This layer is outermost, so that a client without a key also gets its error in its API's format.
        all = all.merge(match api.name {
            ANTHROPIC => pages.route_layer(from_fn(messages::rewrite_errors)),
            OPENAI_OR_ANTHROPIC => pages.route_layer(from_fn(messages::rewrite_errors_for_anthropic)),
            LLAMA_CPP => pages.route_layer(from_fn(llama_cpp::rewrite_errors)),
            OLLAMA => pages.route_layer(from_fn(ollama::rewrite_errors)),
            VLLM => pages.route_layer(from_fn(vllm::rewrite_errors)),
            _ => pages,
        });
    }
    let root_path = front.config.root_path.clone();
    prefix::with_prefix(with_layers(all, front, visitors), root_path)
}

fn with_layers(pages: Router<Arc<Frontend>>, front: Arc<Frontend>, visitors: Arc<OriginPolicy>) -> Router {
    pages
        .fallback(|method: Method, uri: Uri| async move {
            let response = HttpError::no_such_page(&method, uri.path()).into_response();
            // An unknown page has no API whose layer would write the error.
            let is_anthropic = uri.path().starts_with("/v1/messages");
            if is_anthropic { messages::with_anthropic_error(response) } else { response }
        })
        .method_not_allowed_fallback(
            |method: Method, uri: Uri| async move { HttpError::wrong_method(&method, uri.path()) },
        )
        .layer(from_fn(door::catch_panics))
        .layer(from_fn(door::end_with_certificate))
        .layer(from_fn_with_state(visitors, origin::check_origin))
        .layer(from_fn_with_state(front.clone(), door::set_request_id))
        .layer(from_fn(unread::discard_unread_body))
        .with_state(front)
}

const ANTHROPIC: &str = "Anthropic";
const OPENAI_OR_ANTHROPIC: &str = "OpenAI, Anthropic";
const OLLAMA: &str = "Ollama";
const LLAMA_CPP: &str = "llama.cpp";
const VLLM: &str = "vLLM";

/// Returns the table of all pages for clients. A row's API determines its layers. Operators' pages may be on a port of
/// their own.
fn api_table(config: &Config) -> Vec<ApiRoutes> {
    let bearer = |name, routes| ApiRoutes { name, keys: KeyRequirement::Bearer, routes };
    let mut all = vec![
        ApiRoutes { name: "Lockstep", keys: KeyRequirement::NotRequired, routes: probe_routes() },
        ApiRoutes {
            name: "Lockstep",
            keys: KeyRequirement::NotRequired,
            routes: browser::page_routes(!config.pages_off.ui),
        },
        bearer("Lockstep", browser::tenant_routes()),
        bearer("Lockstep", vec![get("/records/{id}", "a recorded answer", records::get_record)]),
        bearer("OpenAI", openai_routes()),
        ApiRoutes { name: OPENAI_OR_ANTHROPIC, keys: KeyRequirement::BearerOrBare, routes: model_list() },
        ApiRoutes { name: ANTHROPIC, keys: KeyRequirement::BearerOrBare, routes: anthropic_routes() },
        bearer(OLLAMA, ollama::routes()),
        ApiRoutes {
            name: LLAMA_CPP,
            keys: KeyRequirement::BearerOrBare,
            routes: llama_cpp::routes(!config.pages_off.slots),
        },
        bearer(VLLM, vllm::routes()),
    ];
    if config.operators.is_none() {
        all.push(ApiRoutes {
            name: "Lockstep",
            keys: KeyRequirement::NotRequired,
            routes: vec![metrics_page(config.pages_off)],
        });
        let mut routes = browser::operator_routes();
        routes.push(cluster_page());
        all.push(ApiRoutes { name: "Lockstep", keys: KeyRequirement::Operator, routes });
    }
    all
}

/// Probes and monitoring use these pages without a key.
fn probe_routes() -> Vec<Route> {
    vec![
        get("/livez", "whether the process is alive", || async { "alive\n" }),
        get("/health", "whether a replica can serve", models::health),
        get("/ready", "whether the server accepts a request now", models::ready),
        get("/ping", "the same, for vLLM's clients", models::health),
        post("/ping", "the same", models::health),
        head("/", "whether the server listens, for Ollama's clients", || async {}),
        get("/openapi.json", "this description", openapi::document),
    ]
}

fn metrics_page(off: DisabledPages) -> Route {
    match off.metrics {
        false => get("/metrics", "metrics for Prometheus", metrics),
        true => get("/metrics", "refused: disabled by --no-metrics", || async {
            HttpError::not_supported("this server reports no metrics: it was started with --no-metrics")
        }),
    }
}

fn cluster_page() -> Route {
    get("/cluster", "replicas, ranks and models", models::cluster)
}

fn openai_routes() -> Vec<Route> {
    vec![
        post("/v1/chat/completions", "an answer to a chat", chat::chat),
        post("/v1/chat/completions/input_tokens", "how many tokens a chat has", chat::input_tokens),
        post("/v1/completions", "an answer to a text", completions::completions),
        post("/v1/responses", "an answer to a chat, as items", responses::responses),
        post("/v1/responses/input_tokens", "how many tokens its prompt has", responses::input_tokens),
        post("/v1/responses/compact", "refused: compaction is not supported", responses::stored::refuse_compact),
        get("/v1/responses/{id}", "a stored response", responses::stored::get_response),
        delete("/v1/responses/{id}", "deletes a stored response", |a, b, c| delete_stored(&RESPONSE, a, b, c)),
        get("/v1/responses/{id}/input_items", "the input items of a response", responses::stored::input_items),
        post("/v1/responses/{id}/cancel", "cancels a background response", responses::stored::cancel),
        post("/v1/conversations", "creates a conversation", conversations::create),
        get("/v1/conversations/{id}", "the metadata of a conversation", conversations::get_conversation),
        post("/v1/conversations/{id}", "replaces its metadata", conversations::update),
        delete("/v1/conversations/{id}", "deletes it", |a, b, c| delete_stored(&CONVERSATION, a, b, c)),
        post("/v1/conversations/{id}/items", "appends items to it", conversations::add_items),
        get("/v1/conversations/{id}/items", "its items", conversations::items),
        get("/v1/conversations/{id}/items/{item_id}", "one of them", conversations::item),
        delete("/v1/conversations/{id}/items/{item_id}", "deletes one of them", conversations::forget_item),
        post("/v1/embeddings", "a vector for each text", embeddings::embeddings),
        post("/v1/decisions", "the probabilities of answers to questions about a text", decisions::decisions),
        post("/tokenize", "the tokens of a text or of a chat", tokens::tokenize),
        post("/detokenize", "the text of tokens", tokens::detokenize),
    ]
}

/// Clients of OpenAI and Anthropic use the same path.
fn model_list() -> Vec<Route> {
    vec![get("/v1/models", "the served models", models::list), get("/v1/models/{*id}", "one model", models::get_model)]
}

fn anthropic_routes() -> Vec<Route> {
    vec![
        post("/v1/messages", "an answer to a chat", messages::messages),
        post("/v1/messages/count_tokens", "the number of a chat's tokens", messages::count_tokens),
    ]
}

/// The content type of Prometheus' text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4";
/// The start time in seconds since 1970, as llama.cpp reports it.
const STARTED: &str = "process-start-time-unix";

async fn metrics(State(front): State<Arc<Frontend>>) -> Response {
    let own = (front.config.metrics)();
    let llama = telemetry::llama_cpp::page(&own, front.streams.len());
    let headers = [("content-type", PROMETHEUS.to_owned()), (STARTED, front.since.to_string())];
    (headers, own + &llama).into_response()
}
