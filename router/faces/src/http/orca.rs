//! The load for gateways that balance by ORCA reports, in the header `endpoint-load-metrics`. Has no knowledge of
//! pages.

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use http::header::{HeaderName, HeaderValue};
use router::front::frontend::Frontend;
use serde_json::json;
use std::sync::Arc;

/// The header in which a gateway requests one of two formats, and the header of the report.
const FORMAT: HeaderName = HeaderName::from_static("endpoint-load-metrics-format");
const REPORT: HeaderName = HeaderName::from_static("endpoint-load-metrics");

/// Adds the load to an answer if the client requests it in a known format.
pub async fn report_load(State(front): State<Arc<Frontend>>, request: Request, next: Next) -> Response {
    let format = request.headers().get(FORMAT).and_then(|header| header.to_str().ok()).map(str::to_ascii_uppercase);
    let mut response = next.run(request).await;
    let load_report = format.and_then(|format| format_report(&format, &current_load(&front)));
    if let Some(value) = load_report.and_then(|text| HeaderValue::from_str(&text).ok()) {
        response.headers_mut().insert(REPORT, value);
    }
    response
}

/// The metrics that vLLM's servers report.
#[derive(Debug, PartialEq)]
struct LoadReport {
    /// The part of all replicas' KV cache that is in use.
    cache_used: f64,
    /// Requests of this router that have no token yet.
    n_waiting: u32,
}

fn current_load(front: &Frontend) -> LoadReport {
    let (mut used, mut total) = (0, 0);
    for replica in front.topologies().flat_map(|page| page.replicas) {
        used += u64::from(replica.blocks_used);
        total += u64::from(replica.blocks_total);
    }
    LoadReport { cache_used: used as f64 / total.max(1) as f64, n_waiting: front.history.requests.n_waiting() }
}

fn format_report(format: &str, load: &LoadReport) -> Option<String> {
    let LoadReport { cache_used, n_waiting } = load;
    match format {
        "TEXT" => Some(format!(
            "TEXT named_metrics.kv_cache_usage_perc={cache_used}, named_metrics.num_requests_waiting={n_waiting}"
        )),
        "JSON" => {
            let named = json!({ "kv_cache_usage_perc": cache_used, "num_requests_waiting": n_waiting });
            Some(format!("JSON {}", json!({ "named_metrics": named })))
        }
        _ => None,
    }
}
