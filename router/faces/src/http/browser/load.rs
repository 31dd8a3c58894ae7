//! `/load/hour`: the last hour's load, which the router records itself, so that the page needs no Prometheus. Bins
//! without any request are absent, and values without a measurement are null.

use axum::Json;
use axum::extract::State;
use router::front::frontend::Frontend;
use router::history::{BIN, LoadBin, WaitCounts};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Instant;

pub async fn hour(State(front): State<Arc<Frontend>>) -> Json<Value> {
    Json(load_json(&front))
}

pub fn load_json(front: &Frontend) -> Value {
    let (bins, now, lives) = front.history.load.bins(Instant::now());
    json!({
        "bin_seconds": BIN.as_secs(),
        "now": now,
        "seconds": lives.as_secs(),
        "bins": bins.iter().map(bin).collect::<Vec<_>>(),
    })
}

fn bin(bin: &LoadBin) -> Value {
    let tenants: Map<String, Value> = bin.tenants.iter().map(|(name, n)| (name.to_string(), (*n).into())).collect();
    let waits = |of: &WaitCounts| json!({ "p50": of.quantile(0.5), "p99": of.quantile(0.99) });
    json!({
        "number": bin.number,
        "arrived": bin.n_arrived,
        "ended": bin.n_ended,
        "refused": bin.n_refused,
        "broken": bin.n_broken,
        "prompt": bin.n_prompt,
        "cached": bin.n_cached,
        "output": bin.n_output,
        "waiting_max": bin.waiting_max,
        "running_max": bin.running_max,
        "first_token_s": waits(&bin.first_token),
        "between_tokens_s": waits(&bin.between_tokens),
        "tenants": tenants,
    })
}
