//! Every metric: its name, the name that dashboards made for vLLM use, and the typed function that sets it.

use crate::usage::{PROVIDER, TokenUsage};
use metrics::{Histogram, Label, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// A metric's own name, and vLLM's name if it has one.
struct Metric {
    ours: &'static str,
    theirs: &'static [&'static str],
    /// The name in OpenTelemetry's conventions, and its unit; `ours` is how Prometheus writes that.
    conventional: Option<(&'static str, &'static str)>,
    help: &'static str,
}

const fn metric(ours: &'static str, help: &'static str) -> Metric {
    alias(ours, &[], help)
}

const fn alias(ours: &'static str, theirs: &'static [&'static str], help: &'static str) -> Metric {
    Metric { ours, theirs, conventional: None, help }
}

const fn conventional(ours: &'static str, theirs: &'static str, unit: &'static str, help: &'static str) -> Metric {
    Metric { ours, theirs: &[], conventional: Some((theirs, unit)), help }
}

const RUNNING: Metric =
    alias("lockstep:requests_running", &["vllm:num_requests_running"], "Requests that run: they hold KV blocks.");
const WAITING: Metric = alias(
    "lockstep:requests_waiting",
    &["vllm:num_requests_waiting"],
    "Requests that wait in the coordinator's queue.",
);
const WAITING_WHY: Metric = alias(
    "lockstep:requests_waiting_by_reason",
    &["vllm:num_requests_waiting_by_reason"],
    "Requests that wait in the coordinator's queue, by reason, which is always capacity.",
);
const KV_USAGE: Metric = alias(
    "lockstep:kv_usage_ratio",
    &["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"],
    "Fraction of the KV blocks that is in use, from 0 to 1.",
);
const BLOCKS: Metric = metric("lockstep:kv_blocks", "Number of KV blocks of the replica, in use or free.");
const EPOCH: Metric =
    metric("lockstep:epoch", "Number of the epoch: it grows when a placement begins and when one ends.");
const RANKS_READY: Metric = metric("lockstep:ranks_ready", "Number of ranks that can take steps.");
const RANK_SLOW: Metric =
    metric("lockstep:rank_slow", "1 while this rank needs much longer than the others for the same work, otherwise 0.");
const STORE_CONNECTED: Metric = metric("lockstep:store_connected", "1 while the cluster store answers, otherwise 0.");
const STORE_SINCE: Metric =
    metric("lockstep:store_since_seconds", "Unix time at which the cluster store last began or ceased to answer.");
const CACHE: Metric = alias(
    "lockstep:cache_config_info",
    &["vllm:cache_config_info"],
    "1 for the present layout of the KV cache, which the labels describe.",
);
const REPLICA_SHUNNED: Metric = metric(
    "lockstep:replica_shunned",
    "1 while this router sends the replica no new requests, because it is slow or breaks often; otherwise 0.",
);
const CERTIFICATE_ENDS: Metric = metric(
    "lockstep:certificate_expiry_timestamp_seconds",
    "Unix time at which the certificate in force expires: for clients (certificate) or for roles (tls_cert).",
);
const CONFIG_RELOAD_OK: Metric = metric(
    "lockstep:config_reload_ok",
    "1 if the file (api_keys, admin_keys, routes, certificate, tls_cert) was usable at the last read, else 0.",
);
const ROUTE_UNSERVED: Metric = metric(
    "lockstep:route_unserved",
    "1 while no replica serves this version of a routed name, and its other versions get its share.",
);
const GRAMMARS: Metric = metric("lockstep:grammars_running", "Requests with a grammar whose masks this rank computes.");
const REQUEST_LARGEST: Metric =
    metric("lockstep:request_tokens_largest", "Most tokens of one answered request so far, prompt and answer.");
const GAUGES: [&Metric; 19] = [
    &KV_DISK_BYTES,
    &KV_HOST_BYTES,
    &CERTIFICATE_ENDS,
    &CONFIG_RELOAD_OK,
    &REQUEST_LARGEST,
    &GRAMMARS,
    &REPLICA_SHUNNED,
    &ROUTE_UNSERVED,
    &RUNNING,
    &WAITING,
    &WAITING_WHY,
    &KV_USAGE,
    &BLOCKS,
    &EPOCH,
    &RANKS_READY,
    &RANK_SLOW,
    &STORE_CONNECTED,
    &STORE_SINCE,
    &CACHE,
];

const PREFIX_QUERIES: Metric = alias(
    "lockstep:prefix_queries_total",
    &["vllm:prefix_cache_queries_total"],
    "Prompt tokens looked up in the prefix cache.",
);
const PREFIX_HITS: Metric =
    alias("lockstep:prefix_hits_total", &["vllm:prefix_cache_hits_total"], "Prompt tokens found in the prefix cache.");
const PREEMPTIONS: Metric = alias(
    "lockstep:preemptions_total",
    &["vllm:num_preemptions_total"],
    "Preemptions: a sequence loses its KV blocks and waits again.",
);
const PROMPT_TOKENS: Metric =
    alias("lockstep:prompt_tokens_total", &["vllm:prompt_tokens_total"], "Prompt tokens of accepted requests.");
const GENERATION_TOKENS: Metric =
    alias("lockstep:generation_tokens_total", &["vllm:generation_tokens_total"], "Tokens drawn for answers.");
const DISCARDED_TOKENS: Metric =
    metric("lockstep:discarded_tokens_total", "Tokens drawn and discarded, because their request had already ended.");
const DRAWS_LATE: Metric =
    metric("lockstep:draws_late_total", "Draws that were planned again, because the mask of their grammar was late.");
const DRAFTS: Metric = alias(
    "lockstep:drafts_total",
    &["vllm:spec_decode_num_draft_tokens_total"],
    "Guessed tokens that steps have verified.",
);
const DRAFTS_ACCEPTED: Metric = alias(
    "lockstep:drafts_accepted_total",
    &["vllm:spec_decode_num_accepted_tokens_total"],
    "Guessed tokens that were right, and so needed no separate step.",
);
const DRAFTS_AT: Metric = metric(
    "lockstep:drafts_by_position_total",
    "Guessed tokens that a rank has verified, by their source and their place behind the last known token.",
);
const DRAFTS_ACCEPTED_AT: Metric = alias(
    "lockstep:drafts_accepted_by_position_total",
    &["vllm:spec_decode_num_accepted_tokens_per_pos_total"],
    "Guessed tokens that were right, by their source and their place behind the last known token.",
);
const KV_DISK_STORED: Metric = metric(
    "lockstep:kv_disk_stored_total",
    "Pages of the KV cache that a rank was to write to its folder, by what became of them.",
);
const KV_DISK_READ: Metric = metric(
    "lockstep:kv_disk_read_total",
    "Pages of the KV cache that a rank has read from its folder: hits, and misses by their reason.",
);
const KV_DISK_BYTES: Metric =
    metric("lockstep:kv_disk_bytes", "Bytes of the pages in a rank's folder, when it was last measured.");
const KV_FETCHES: Metric = metric(
    "lockstep:kv_fetches_total",
    "Fetches of prefixes from the tiers behind the pools: begun, of those late, and refused as slower than computing.",
);
const KV_FETCHED: Metric = metric(
    "lockstep:kv_fetched_pages_total",
    "Pages that fetches have brought into the pools, and those that some rank did not find.",
);
const KV_HOST_STORED: Metric = metric(
    "lockstep:kv_host_stored_total",
    "Pages of the KV cache that a rank was to keep in host memory, by what became of them.",
);
const KV_HOST_READ: Metric = metric(
    "lockstep:kv_host_read_total",
    "Pages of the KV cache that a rank has read from host memory: hits, and misses by their reason.",
);
const KV_HOST_BYTES: Metric = metric("lockstep:kv_host_bytes", "Bytes of the pages in a rank's host memory.");
const STEPS: Metric = metric("lockstep:steps_total", "Steps planned by the scheduler.");
const FINISHED: Metric =
    alias("lockstep:requests_finished_total", &["vllm:request_success_total"], "Finished requests, by reason.");
const REUSE_ENDED: Metric = metric(
    "lockstep:prompt_reuse_ended_total",
    "Finished requests, by the reason why no more of their prompts came from the prefix cache.",
);
const REFUSED: Metric = metric("lockstep:requests_refused_total", "Requests that the coordinator refused, by reason.");
const ADMISSION_REJECTED: Metric = alias(
    "lockstep:admission_rejections_total",
    &["vllm:admission_rejections_total"],
    "Requests that a full queue refused, by the limit that it had reached, under vLLM's names.",
);
const RANKS_LOST: Metric = metric("lockstep:ranks_lost_total", "Lost ranks, by cause.");
const REPLAYED_TOKENS: Metric = metric(
    "lockstep:replayed_tokens_total",
    "Positions computed again, because the ranks that held their KV were lost or changed.",
);
const REQUESTS: Metric = metric("lockstep:requests_total", "Requests from clients, by API (face) and outcome.");
const RANK_COMPUTE: Metric = metric("lockstep:rank_compute_micros_total", "Microseconds in which a rank computed.");
const RANK_WAIT: Metric =
    metric("lockstep:rank_wait_micros_total", "Microseconds in which a rank waited for its peers, within a step.");
const RANK_IDLE: Metric = metric("lockstep:rank_idle_micros_total", "Microseconds in which a rank had no step.");
const RANK_BUBBLE: Metric = metric(
    "lockstep:rank_bubble_micros_total",
    "Microseconds in which a rank did not compute although the replica had a step in flight.",
);
const PASSES: Metric = metric(
    "lockstep:cuda_passes_total",
    "Passes on a GPU, by the way of their launch: plain, recorded as a graph, replayed; and refused graphs.",
);
const STARVED: Metric =
    metric("lockstep:starved_total", "How often a stage was free and no step was left to plan for it.");
const STEPS_EARLY: Metric = metric(
    "lockstep:steps_early_total",
    "Steps that follow another of the same sequence by fewer steps than there are stages, so that a stage waits.",
);
const CHUNK_CUTS: Metric = metric(
    "lockstep:chunk_cuts_total",
    "Steps that compute less of the prompts than they could, by the limit: time (of streams beside), tokens, blocks.",
);
const SENT: Metric =
    metric("lockstep:otlp_sent_total", "Spans, logs and metric points that the collector accepted, by signal.");
const NOT_SENT: Metric = metric(
    "lockstep:otlp_dropped_total",
    "Spans, logs and metric points lost: the queue was full, or the collector refused them or was unreachable.",
);
const REPLICAS_SHUNNED: Metric = metric(
    "lockstep:replicas_shunned_total",
    "How often a router stopped sending a replica new requests for a while, by cause.",
);
const REPLICAS_SUSPECTED: Metric =
    metric("lockstep:replicas_suspected_total", "How often a router missed several heartbeats of a coordinator.");
const PANICS: Metric =
    metric("lockstep:panics_total", "Panics in this process; each ended one request, one link or one rank.");
const LOG_DROPPED: Metric = metric(
    "lockstep:log_dropped_total",
    "Log lines lost, because stderr was not read in time or could not be written.",
);
const TENANT_REQUESTS: Metric =
    metric("lockstep:tenant_requests_total", "Requests of a tenant that reached a router, including refused ones.");
const TENANT_REFUSED: Metric = metric("lockstep:tenant_refused_total", "Refused requests of a tenant, by reason.");
const TENANT_PROMPT_TOKENS: Metric =
    metric("lockstep:tenant_prompt_tokens_total", "Prompt tokens of a tenant, computed or found in the prefix cache.");
const TENANT_GENERATION_TOKENS: Metric = metric("lockstep:tenant_generation_tokens_total", "Tokens sent to a tenant.");
const RECORDS: Metric = metric(
    "lockstep:records_total",
    "Answers for --record, by outcome: written, dropped (full queue), failed, removed (deleted file).",
);
const AUDITS: Metric = metric(
    "lockstep:audits_total",
    "Answers of --audit, by outcome: equal at another replica, equal in place, different, dropped, failed.",
);
const SCRUBBED: Metric =
    metric("lockstep:scrubbed_bytes_total", "Bytes of weights that a worker with --scrub has hashed again.");
const PROMPT_CACHED: Metric = metric(
    "lockstep:prompt_tokens_cached_total",
    "Prompt tokens of answered requests that came from the prefix cache.",
);
const COUNTERS: [&Metric; 47] = [
    &KV_DISK_STORED,
    &KV_DISK_READ,
    &KV_FETCHES,
    &KV_FETCHED,
    &KV_HOST_STORED,
    &KV_HOST_READ,
    &PROMPT_CACHED,
    &SCRUBBED,
    &RECORDS,
    &AUDITS,
    &DRAFTS,
    &DRAFTS_AT,
    &DRAFTS_ACCEPTED_AT,
    &DRAFTS_ACCEPTED,
    &DRAWS_LATE,
    &PASSES,
    &PANICS,
    &LOG_DROPPED,
    &REPLICAS_SHUNNED,
    &REPLICAS_SUSPECTED,
    &PREFIX_QUERIES,
    &PREFIX_HITS,
    &PREEMPTIONS,
    &PROMPT_TOKENS,
    &GENERATION_TOKENS,
    &DISCARDED_TOKENS,
    &STEPS,
    &FINISHED,
    &REUSE_ENDED,
    &REFUSED,
    &ADMISSION_REJECTED,
    &RANKS_LOST,
    &REPLAYED_TOKENS,
    &REQUESTS,
    &RANK_COMPUTE,
    &RANK_WAIT,
    &RANK_IDLE,
    &RANK_BUBBLE,
    &STARVED,
    &STEPS_EARLY,
    &CHUNK_CUTS,
    &SENT,
    &NOT_SENT,
    &TENANT_REQUESTS,
    &TENANT_REFUSED,
    &TENANT_PROMPT_TOKENS,
    &TENANT_GENERATION_TOKENS,
];

const FIRST_TOKEN: Metric = alias(
    "lockstep:time_to_first_token_seconds",
    &["vllm:time_to_first_token_seconds"],
    "Time from a request's arrival to its first token.",
);
const BETWEEN_TOKENS: Metric = alias(
    "lockstep:inter_token_latency_seconds",
    &["vllm:inter_token_latency_seconds"],
    "Time from one token of a stream to the next.",
);
const REQUEST_SECONDS: Metric = alias(
    "lockstep:request_seconds",
    &["vllm:e2e_request_latency_seconds"],
    "Time from a request's arrival to its end.",
);
const STEP_SECONDS: Metric = metric("lockstep:step_seconds", "Time of a pass on the device.");
const STEP_RATIO: Metric =
    metric("lockstep:step_time_ratio", "Time from one step's answer to the next, divided by the predicted time.");
const MASK_SECONDS: Metric =
    metric("lockstep:mask_seconds", "Time to compute the mask of a grammar for one token, beside the pass.");
const RECOVERY_SECONDS: Metric = metric(
    "lockstep:recovery_seconds",
    "Time from the detection of a loss, or a requested change, until the replica serves again.",
);
const REQUEST_PROMPT: Metric =
    alias("lockstep:request_prompt_tokens", &["vllm:request_prompt_tokens"], "Prompt tokens of a request.");
const REQUEST_OUTPUT: Metric = alias(
    "lockstep:request_generation_tokens",
    &["vllm:request_generation_tokens"],
    "Answer tokens of a request, all choices together.",
);
const QUEUE_SECONDS: Metric = alias(
    "lockstep:request_queue_seconds",
    &["vllm:request_queue_time_seconds"],
    "Time from accepting a request at a replica to the first step that computes a part of it.",
);
const PREFILL_SECONDS: Metric = alias(
    "lockstep:request_prefill_seconds",
    &["vllm:request_prefill_time_seconds"],
    "Time from the first step that computes a part of a request to its first token.",
);
const DECODE_SECONDS: Metric = alias(
    "lockstep:request_decode_seconds",
    &["vllm:request_decode_time_seconds"],
    "Time from a request's first token to its end.",
);
const INFERENCE_SECONDS: Metric = alias(
    "lockstep:request_inference_seconds",
    &["vllm:request_inference_time_seconds"],
    "Time from the first step that computes a part of a request to its end: prefill and decode.",
);
const STEP_TOKENS: Metric =
    metric("lockstep:step_tokens", "Positions that a step computes, all requests together, drafts included.");
const ITERATION_TOKENS: Metric = alias(
    "lockstep:iteration_tokens",
    &["vllm:iteration_tokens_total"],
    "Tokens that a step answers: the drawn ones, and a request's prompt with its first token.",
);
const REQUEST_PREEMPTIONS: Metric =
    alias("lockstep:request_preemptions", &["vllm:request_num_preemptions"], "How often a request was preempted.");
const REQUEST_PER_TOKEN: Metric = alias(
    "lockstep:request_time_per_output_token_seconds",
    &["vllm:request_time_per_output_token_seconds"],
    "Time per token after the first, as the mean of a request.",
);
const REQUEST_LONGEST: Metric = alias(
    "lockstep:request_longest_choice_tokens",
    &["vllm:request_max_num_generation_tokens"],
    "Answer tokens of a request's longest choice.",
);
const STEP_REQUESTS: Metric = metric("lockstep:step_requests", "Requests of which a step computes tokens.");
const REQUESTED_TOKENS: Metric = alias(
    "lockstep:request_max_tokens",
    &["vllm:request_params_max_tokens"],
    "Maximum of answer tokens that a request sets, if it sets one.",
);
const REQUESTED_CHOICES: Metric =
    alias("lockstep:request_choices", &["vllm:request_params_n"], "Choices that a request sets for each prompt.");
const AI_REQUEST: Metric = conventional(
    "gen_ai_server_request_duration_seconds",
    "gen_ai.server.request.duration",
    "s",
    "Time from a request's arrival to its last byte.",
);
const AI_FIRST_TOKEN: Metric = conventional(
    "gen_ai_server_time_to_first_token_seconds",
    "gen_ai.server.time_to_first_token",
    "s",
    "Time to the first token, of successful requests.",
);
const AI_PER_TOKEN: Metric = conventional(
    "gen_ai_server_time_per_output_token_seconds",
    "gen_ai.server.time_per_output_token",
    "s",
    "Time per token after the first, of successful requests.",
);
const AI_TOKENS: Metric = conventional(
    "gen_ai_client_token_usage",
    "gen_ai.client.token.usage",
    "{token}",
    "Tokens of a request: of its input, and of its output.",
);
const TENANT_WAIT: Metric = metric(
    "lockstep:tenant_queue_seconds",
    "Time from admitting a tenant's request to a replica's first answer: in queues, and computing the prompt.",
);
const HISTOGRAMS: [(&Metric, &[f64]); 26] = [
    (&STEP_REQUESTS, &TOKENS),
    (&MASK_SECONDS, &MASK_SECONDS_BUCKETS),
    (&FIRST_TOKEN, &SECONDS),
    (&BETWEEN_TOKENS, &SECONDS),
    (&REQUEST_SECONDS, &SECONDS),
    (&STEP_SECONDS, &SECONDS),
    (&STEP_RATIO, &RATIOS),
    (&RECOVERY_SECONDS, &SECONDS),
    (&TENANT_WAIT, &SECONDS),
    (&REQUEST_PROMPT, &TOKENS),
    (&REQUEST_OUTPUT, &TOKENS),
    (&QUEUE_SECONDS, &SECONDS),
    (&PREFILL_SECONDS, &SECONDS),
    (&DECODE_SECONDS, &SECONDS),
    (&INFERENCE_SECONDS, &SECONDS),
    (&STEP_TOKENS, &TOKENS),
    (&ITERATION_TOKENS, &TOKENS),
    (&REQUEST_PREEMPTIONS, &PREEMPTION_COUNTS),
    (&REQUEST_PER_TOKEN, &SECONDS),
    (&REQUEST_LONGEST, &TOKENS),
    (&REQUESTED_TOKENS, &TOKENS),
    (&REQUESTED_CHOICES, &CHOICES),
    (&AI_REQUEST, &AI_REQUEST_SECONDS),
    (&AI_FIRST_TOKEN, &AI_FIRST_TOKEN_SECONDS),
    (&AI_PER_TOKEN, &AI_PER_TOKEN_SECONDS),
    (&AI_TOKENS, &TOKENS),
];

/// From half a millisecond to two minutes, about three buckets per factor of ten.
const SECONDS: [f64; 17] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0];

/// Around one.
const RATIOS: [f64; 10] = [0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.2, 1.5, 2.0, 4.0];

/// From ten microseconds to a second.
const MASK_SECONDS_BUCKETS: [f64; 11] =
    [0.00001, 0.000025, 0.0001, 0.00025, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0];

/// Powers of four, as the conventions require.
const TOKENS: [f64; 14] = [
    1.0,
    4.0,
    16.0,
    64.0,
    256.0,
    1024.0,
    4096.0,
    16_384.0,
    65_536.0,
    262_144.0,
    1_048_576.0,
    4_194_304.0,
    16_777_216.0,
    67_108_864.0,
];
/// The buckets of vLLM.
const PREEMPTION_COUNTS: [f64; 7] = [1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0];
const CHOICES: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];
const AI_REQUEST_SECONDS: [f64; 14] =
    [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92];
const AI_FIRST_TOKEN_SECONDS: [f64; 16] =
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
const AI_PER_TOKEN_SECONDS: [f64; 13] = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];

/// Pairs of a label's Prometheus name and its name in the conventions.
const LABELS: [(&str, &str); 6] = [
    ("gen_ai_operation_name", "gen_ai.operation.name"),
    ("gen_ai_provider_name", "gen_ai.provider.name"),
    ("gen_ai_request_model", "gen_ai.request.model"),
    ("gen_ai_response_model", "gen_ai.response.model"),
    ("gen_ai_token_type", "gen_ai.token.type"),
    ("error_type", "error.type"),
];

/// Returns OpenTelemetry's name of a metric or label of the page, and a metric's unit. Most names are the same.
pub(crate) fn convention(name: &str) -> (&str, &'static str) {
    let metric = HISTOGRAMS.iter().find(|(metric, _)| metric.ours == name);
    if let Some(name_and_unit) = metric.and_then(|(metric, _)| metric.conventional) {
        return name_and_unit;
    }
    let label = LABELS.iter().find(|(label, _)| *label == name).map_or(name, |(_, otel_label)| otel_label);
    (label, if name.ends_with("_seconds") { "s" } else { "" })
}

impl Metric {
    fn names(&self) -> impl Iterator<Item = &'static str> {
        [self.ours].into_iter().chain(self.theirs.iter().copied())
    }

    fn set(&self, value: f64, labels: &[Label]) {
        self.names().for_each(|name| gauge!(name, labels.iter()).set(value));
    }

    fn add(&self, n: u64, labels: &[Label]) {
        self.names().for_each(|name| counter!(name, labels.iter()).increment(n));
    }

    /// Sets a counter that another component counts and that only grows.
    fn total(&self, total: u64, labels: &[Label]) {
        self.names().for_each(|name| counter!(name, labels.iter()).absolute(total));
    }

    fn observe(&self, took: Duration, labels: &[Label]) {
        self.record(took.as_secs_f64(), labels);
    }

    /// Looks up the histograms of a value that is observed often.
    fn histograms(&self, labels: &[Label]) -> Vec<Histogram> {
        self.names().map(|name| histogram!(name, labels.iter())).collect()
    }

    fn record(&self, value: f64, labels: &[Label]) {
        self.names().for_each(|name| histogram!(name, labels.iter()).record(value));
    }
}

pub(crate) fn panicked(n: u64) {
    PANICS.add(n, &[]);
}

pub(crate) fn log_dropped(n: u64) {
    LOG_DROPPED.add(n, &[]);
}

/// The name of each histogram, with its buckets.
pub(crate) fn buckets() -> impl Iterator<Item = (&'static str, &'static [f64])> {
    HISTOGRAMS.iter().flat_map(|(metric, buckets)| metric.names().map(|name| (name, *buckets)))
}

/// Whether a line of the page belongs to an earlier layout of a cache. The registry removes no series, and readers of
/// `cache_config_info` take every series for a current one.
pub(crate) fn is_past(line: &str) -> bool {
    line.ends_with(" 0") && CACHE.names().any(|name| line.starts_with(name))
}

pub(crate) fn describe() {
    for metric in GAUGES {
        metric.names().for_each(|name| describe_gauge!(name, metric.help));
    }
    for metric in COUNTERS {
        metric.names().for_each(|name| describe_counter!(name, metric.help));
    }
    for (metric, _) in HISTOGRAMS {
        metric.names().for_each(|name| describe_histogram!(name, metric.help));
    }
}

// -- the coordinator's

/// The replica of a metric: a process may have several.
#[derive(Clone, Debug)]
pub struct ReplicaLabel(Arc<str>);

impl ReplicaLabel {
    pub fn replica(name: &str) -> ReplicaLabel {
        ReplicaLabel(name.into())
    }

    fn label(&self) -> Label {
        Label::new("replica", self.0.clone())
    }
}

/// The scheduler's load.
pub fn load(of: &ReplicaLabel, n_running: u32, n_waiting: u32, blocks_used: u32, blocks_total: u32) {
    let labels = [of.label()];
    RUNNING.set(n_running.into(), &labels);
    WAITING.set(n_waiting.into(), &labels);
    WAITING_WHY.set(n_waiting.into(), &[of.label(), Label::from_static_parts("reason", "capacity")]);
    BLOCKS.set(blocks_total.into(), &labels);
    KV_USAGE.set(f64::from(blocks_used) / f64::from(blocks_total.max(1)), &labels);
}

/// The layout of a replica's KV cache, under the names of vLLM's labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheLabels {
    pub block_size: u32,
    pub n_blocks: u32,
    pub dtype: String,
    pub prefix_caching: bool,
}

/// Replaces the layout `before` by `now`.
pub fn cache(of: &ReplicaLabel, before: Option<&CacheLabels>, now: &CacheLabels) {
    for (cache, is_so) in before.into_iter().map(|cache| (cache, 0.0)).chain([(now, 1.0)]) {
        let labels = [
            of.label(),
            Label::new("block_size", cache.block_size.to_string()),
            Label::new("num_gpu_blocks", cache.n_blocks.to_string()),
            Label::new("cache_dtype", cache.dtype.clone()),
            Label::from_static_parts("enable_prefix_caching", if cache.prefix_caching { "True" } else { "False" }),
        ];
        CACHE.set(is_so, &labels);
    }
}

/// The scheduler's counts since it began.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlannerCounts {
    pub steps: u64,
    pub preemptions: u64,
    pub tokens_out: u64,
    pub tokens_discarded: u64,
    pub draws_late: u64,
    pub drafts: u64,
    pub drafts_accepted: u64,
    pub prefix_hit_tokens: u64,
    pub starved: u64,
    pub steps_early: u64,
    /// Steps whose chunks were cut, by what limited them.
    pub cut_by_time: u64,
    pub cut_by_tokens: u64,
    pub cut_by_blocks: u64,
    /// Fetches from the tiers behind the pools, those that would have taken longer than computing, and late ones.
    pub fetches: u64,
    pub fetches_refused: u64,
    pub fetches_late: u64,
    /// The pages that they brought, and those that they did not find.
    pub pages_fetched: u64,
    pub pages_missing: u64,
}

pub fn planned(of: &ReplicaLabel, planned: PlannerCounts) {
    let labels = [of.label()];
    STEPS.total(planned.steps, &labels);
    PREEMPTIONS.total(planned.preemptions, &labels);
    GENERATION_TOKENS.total(planned.tokens_out, &labels);
    DISCARDED_TOKENS.total(planned.tokens_discarded, &labels);
    DRAWS_LATE.total(planned.draws_late, &labels);
    DRAFTS.total(planned.drafts, &labels);
    DRAFTS_ACCEPTED.total(planned.drafts_accepted, &labels);
    PREFIX_HITS.total(planned.prefix_hit_tokens, &labels);
    STARVED.total(planned.starved, &labels);
    STEPS_EARLY.total(planned.steps_early, &labels);
    let PlannerCounts { cut_by_time, cut_by_tokens, cut_by_blocks, .. } = planned;
    for (reason, n) in [("time", cut_by_time), ("tokens", cut_by_tokens), ("blocks", cut_by_blocks)] {
        CHUNK_CUTS.total(n, &[of.label(), Label::from_static_parts("reason", reason)]);
    }
    let PlannerCounts { fetches, fetches_refused, fetches_late, pages_fetched, pages_missing, .. } = planned;
    for (outcome, n) in [("begun", fetches), ("refused", fetches_refused), ("late", fetches_late)] {
        KV_FETCHES.total(n, &[of.label(), Label::from_static_parts("outcome", outcome)]);
    }
    for (outcome, n) in [("hit", pages_fetched), ("missing", pages_missing)] {
        KV_FETCHED.total(n, &[of.label(), Label::from_static_parts("outcome", outcome)]);
    }
}

/// A request was accepted; `looks_up` means that it may read the prefix cache.
pub fn taken(of: &ReplicaLabel, n_prompt: usize, looks_up: bool) {
    let labels = [of.label()];
    PROMPT_TOKENS.add(n_prompt as u64, &labels);
    if looks_up {
        PREFIX_QUERIES.add(n_prompt as u64, &labels);
    }
}

pub fn refused(of: &ReplicaLabel, reason: &'static str) {
    REFUSED.add(1, &[of.label(), Label::from_static_parts("reason", reason)]);
}

/// The limit that a queue had reached when it rejected a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueLimit {
    Requests,
    Tokens,
}

/// A full queue rejected a request: a replica's queue, or else the router's own.
pub fn admission_rejected(of: Option<&ReplicaLabel>, limit: QueueLimit) {
    let reason = match limit {
        QueueLimit::Requests => "max_num_queued_reqs",
        QueueLimit::Tokens => "max_num_queued_tokens",
    };
    let of_replica = of.map(ReplicaLabel::label);
    let labels: Vec<Label> = of_replica.into_iter().chain([Label::from_static_parts("reason", reason)]).collect();
    ADMISSION_REJECTED.add(1, &labels);
}

/// The label is `finished_reason`, as in vLLM.
pub fn finished(of: &ReplicaLabel, reason: &'static str) {
    FINISHED.add(1, &[of.label(), Label::from_static_parts("finished_reason", reason)]);
}

pub fn reuse_ended(of: &ReplicaLabel, reason: &'static str) {
    REUSE_ENDED.add(1, &[of.label(), Label::from_static_parts("reason", reason)]);
}

pub fn epoch(of: &ReplicaLabel, n: u32, n_ranks_ready: u32) {
    let labels = [of.label()];
    EPOCH.set(n.into(), &labels);
    RANKS_READY.set(n_ranks_ready.into(), &labels);
}

/// The label `rank` has few values: as many as the largest grid has ranks.
pub fn rank_lost(of: &ReplicaLabel, rank: u16, cause: &'static str) {
    let labels = [&of_rank(of, rank)[..], &[Label::from_static_parts("cause", cause)]].concat();
    RANKS_LOST.add(1, &labels);
}

/// The replica serves again.
pub fn recovered(of: &ReplicaLabel, cause: &'static str, took: Duration, n_tokens_replayed: u64) {
    RECOVERY_SECONDS.observe(took, &[of.label(), Label::from_static_parts("cause", cause)]);
    REPLAYED_TOKENS.add(n_tokens_replayed, &[of.label()]);
}

pub fn rank_slow(of: &ReplicaLabel, rank: u16, is_slow: bool) {
    RANK_SLOW.set(f64::from(u8::from(is_slow)), &of_rank(of, rank));
}

/// Adds the growth of a rank's own counters.
pub fn rank(of: &ReplicaLabel, rank: u16, compute_micros: u64, wait_micros: u64, idle_micros: u64) {
    let labels = of_rank(of, rank);
    RANK_COMPUTE.add(compute_micros, &labels);
    RANK_WAIT.add(wait_micros, &labels);
    RANK_IDLE.add(idle_micros, &labels);
}

/// Adds the time in which steps were in flight and this rank did not compute.
pub fn bubble(of: &ReplicaLabel, rank: u16, micros: u64) {
    RANK_BUBBLE.add(micros, &of_rank(of, rank));
}

fn of_rank(of: &ReplicaLabel, rank: u16) -> [Label; 2] {
    [of.label(), Label::new("rank", rank.to_string())]
}

/// The times of a request at a replica, from its acceptance to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestDurations {
    pub queue: Duration,
    pub prefill: Duration,
    pub decode: Duration,
    pub n_preemptions: u32,
}

pub fn request_durations(of: &ReplicaLabel, took: &RequestDurations) {
    let labels = [of.label()];
    QUEUE_SECONDS.observe(took.queue, &labels);
    PREFILL_SECONDS.observe(took.prefill, &labels);
    DECODE_SECONDS.observe(took.decode, &labels);
    INFERENCE_SECONDS.observe(took.prefill + took.decode, &labels);
    REQUEST_PREEMPTIONS.record(took.n_preemptions.into(), &labels);
}

pub fn step_planned(of: &ReplicaLabel, n_requests: usize, n_tokens: u64) {
    STEP_REQUESTS.record(n_requests as f64, &[of.label()]);
    STEP_TOKENS.record(n_tokens as f64, &[of.label()]);
}

/// A step was answered, with this many tokens.
pub fn step_answered(of: &ReplicaLabel, n_tokens: u64) {
    ITERATION_TOKENS.record(n_tokens as f64, &[of.label()]);
}

pub fn step(of: &ReplicaLabel, took: Duration) {
    STEP_SECONDS.observe(took, &[of.label()]);
}

/// A step took so many times as long as was predicted.
pub fn step_ratio(of: &ReplicaLabel, ratio: f64) {
    STEP_RATIO.record(ratio, &[of.label()]);
}

// -- of a worker

/// Adds the growth of a GPU's counts of passes.
pub fn cuda_passes(way: &'static str, n: u64) {
    PASSES.add(n, &[Label::from_static_parts("way", way)]);
}

/// Pages were written to the folder behind the pools, dropped for lack of time, or could not be written.
pub fn kv_disk_stored(outcome: &'static str, n: u64) {
    KV_DISK_STORED.add(n, &[Label::from_static_parts("outcome", outcome)]);
}

/// Pages were read from the folder behind the pools; `outcome` is a hit or the reason of a miss.
pub fn kv_disk_read(outcome: &'static str, n: u64) {
    KV_DISK_READ.add(n, &[Label::from_static_parts("outcome", outcome)]);
}

pub fn kv_disk_bytes(n_bytes: u64) {
    KV_DISK_BYTES.set(n_bytes as f64, &[]);
}

/// Pages were kept in host memory behind the pools, or dropped.
pub fn kv_host_stored(outcome: &'static str, n: u64) {
    KV_HOST_STORED.add(n, &[Label::from_static_parts("outcome", outcome)]);
}

/// Pages were read from host memory behind the pools; `outcome` is a hit or the reason of a miss.
pub fn kv_host_read(outcome: &'static str, n: u64) {
    KV_HOST_READ.add(n, &[Label::from_static_parts("outcome", outcome)]);
}

pub fn kv_host_bytes(n_bytes: u64) {
    KV_HOST_BYTES.set(n_bytes as f64, &[]);
}

/// Drafts at one place behind the last known token were verified.
pub fn drafts_at(source: &'static str, position: usize, proposed: u64, accepted: u64) {
    let labels = [Label::from_static_parts("source", source), Label::new("position", position.to_string())];
    DRAFTS_AT.add(proposed, &labels);
    DRAFTS_ACCEPTED_AT.add(accepted, &labels);
}

/// A grammar's mask was made.
pub fn mask_made(took: Duration) {
    MASK_SECONDS.observe(took, &[]);
}

/// The number of requests whose masks this rank makes.
pub fn grammars_running(n: usize) {
    GRAMMARS.set(n as f64, &[]);
}

// -- of both

/// Whether the membership store is reachable, and since when, as Unix time.
pub fn store(is_connected: bool, since: Duration) {
    STORE_CONNECTED.set(f64::from(u8::from(is_connected)), &[]);
    STORE_SINCE.set(since.as_secs_f64().floor(), &[]);
}

/// Adds bytes of weights that were hashed again.
pub fn scrubbed(n_bytes: u64) {
    SCRUBBED.add(n_bytes, &[]);
}

// -- the router's

/// The outcome of running an answer again.
pub fn audit(outcome: &'static str) {
    AUDITS.add(1, &[Label::from_static_parts("outcome", outcome)]);
}

/// Exports the counter at zero: an alert needs an increase, and a series that begins with one shows none.
pub fn audits_begin() {
    AUDITS.add(0, &[Label::from_static_parts("outcome", "different")]);
}

/// The outcome of answers that were to be recorded.
pub fn records(outcome: &'static str, n: u64) {
    RECORDS.add(n, &[Label::from_static_parts("outcome", outcome)]);
}

/// Exports the counters at zero: an alert needs an increase, and a series that begins with one shows none.
pub fn records_begin() {
    ["failed", "dropped", "removed"].into_iter().for_each(|outcome| records(outcome, 0));
}

/// Sets when the certificate of a file expires, in seconds since 1970. A certificate without a readable end has no
/// series.
pub fn certificate_ends(file: &'static str, at: Option<i64>) {
    if let Some(at) = at {
        CERTIFICATE_ENDS.set(at as f64, &[Label::from_static_parts("file", file)]);
    }
}

/// Sets whether a file that is read repeatedly was usable at its last read.
pub fn config_reload(file: &'static str, is_ok: bool) {
    CONFIG_RELOAD_OK.set(f64::from(u8::from(is_ok)), &[Label::from_static_parts("file", file)]);
}

/// Sets why the replica gets no new requests, or that it gets them again.
pub fn replica_shunned(name: &str, cause: Option<&'static str>) {
    let replica = Label::new("replica", name.to_owned());
    REPLICA_SHUNNED.set(f64::from(u8::from(cause.is_some())), std::slice::from_ref(&replica));
    if let Some(cause) = cause {
        REPLICAS_SHUNNED.add(1, &[replica, Label::from_static_parts("cause", cause)]);
    }
}

/// Sets whether a version that a route names lacks a replica.
pub fn route_unserved(name: &str, version: &str, is_unserved: bool) {
    let labels = [Label::new("route", name.to_owned()), Label::new("version", version.to_owned())];
    ROUTE_UNSERVED.set(f64::from(u8::from(is_unserved)), &labels);
}

pub fn replica_suspected(name: &str) {
    REPLICAS_SUSPECTED.add(1, &[Label::new("replica", name.to_owned())]);
}

fn tenant(label: &Arc<str>) -> Label {
    Label::new("tenant", label.clone())
}

/// The label is the name of the tenant's key; the router limits their number.
pub fn tenant_request(label: &Arc<str>) {
    TENANT_REQUESTS.add(1, &[tenant(label)]);
}

pub fn tenant_refused(label: &Arc<str>, reason: &'static str) {
    TENANT_REFUSED.add(1, &[tenant(label), Label::from_static_parts("reason", reason)]);
}

pub fn tenant_tokens(label: &Arc<str>, n_prompt: u64, n_output: u64) {
    TENANT_PROMPT_TOKENS.add(n_prompt, &[tenant(label)]);
    TENANT_GENERATION_TOKENS.add(n_output, &[tenant(label)]);
}

pub fn tenant_waited(label: &Arc<str>, took: Duration) {
    TENANT_WAIT.observe(took, &[tenant(label)]);
}

/// Overrides the page's own label if a router serves several models; the router limits their number.
fn model_name(label: Option<&Arc<str>>) -> impl Iterator<Item = Label> {
    label.map(|label| Label::new("model_name", label.clone())).into_iter()
}

pub fn first_token(model: Option<&Arc<str>>, after: Duration) {
    FIRST_TOKEN.observe(after, &model_name(model).collect::<Vec<_>>());
}

/// Histograms of the time between two tokens of a stream: looked up once, and not for each token.
#[derive(Debug)]
pub struct TokenIntervals(Vec<Histogram>);

pub fn between_tokens_of_a_stream(model: Option<&Arc<str>>) -> TokenIntervals {
    let all = BETWEEN_TOKENS.histograms(&model_name(model).collect::<Vec<_>>());
    TokenIntervals(all)
}

impl TokenIntervals {
    pub fn observe(&self, apart: Duration) {
        self.0.iter().for_each(|histogram| histogram.record(apart.as_secs_f64()));
    }
}

pub fn request(model: Option<&Arc<str>>, face: &'static str, outcome: &'static str, took: Duration) {
    let labels = [Label::from_static_parts("face", face), Label::from_static_parts("outcome", outcome)];
    let labels: Vec<Label> = model_name(model).chain(labels).collect();
    REQUESTS.add(1, &labels);
    REQUEST_SECONDS.observe(took, &model_name(model).collect::<Vec<_>>());
}

/// Records the parameters of a request that has been read. Without a given length it is the rest of the context.
pub fn record_request_params(tokens_max: Option<u32>, n_choices: u32) {
    if let Some(tokens_max) = tokens_max {
        REQUESTED_TOKENS.record(tokens_max.into(), &[]);
    }
    REQUESTED_CHOICES.record(n_choices.into(), &[]);
}

/// A request that has been read.
#[derive(Clone, Debug, Default)]
pub struct RequestMetrics<'a> {
    pub operation: &'static str,
    /// Set where there are several models.
    pub label: Option<&'a Arc<str>>,
    /// The model's served name; None if the request named an unknown one.
    pub model: Option<&'a str>,
    /// The name that the replicas use, if it may differ.
    pub version: Option<&'a str>,
    pub outcome: &'static str,
    pub took: Duration,
    pub first_token: Option<Duration>,
    pub last_token: Option<Duration>,
    pub n_choices: u64,
    pub usage: TokenUsage,
    /// Tokens of the longest choice.
    pub n_longest: u64,
}

/// The tokens of the largest answered request of this process.
static LARGEST: AtomicU64 = AtomicU64::new(0);

/// Counts the end of a request, as OpenTelemetry's conventions do.
pub fn answered(answer: &RequestMetrics<'_>) {
    let mut labels = vec![
        Label::from_static_parts("gen_ai_operation_name", answer.operation),
        Label::from_static_parts("gen_ai_provider_name", PROVIDER),
    ];
    labels.extend(model_name(answer.label));
    if let Some(model) = answer.model {
        labels.push(Label::new("gen_ai_request_model", model.to_owned()));
        labels.push(Label::new("gen_ai_response_model", answer.version.unwrap_or(model).to_owned()));
    }
    let TokenUsage { n_prompt, n_cached, n_output } = answer.usage;
    for (kind, n) in [("input", n_prompt), ("output", n_output)] {
        if n > 0 {
            let kind = Label::from_static_parts("gen_ai_token_type", kind);
            AI_TOKENS.record(n as f64, &[&labels[..], &[kind]].concat());
        }
    }
    if answer.outcome != "ok" {
        let failed = Label::from_static_parts("error_type", answer.outcome);
        return AI_REQUEST.observe(answer.took, &[&labels[..], &[failed]].concat());
    }
    AI_REQUEST.observe(answer.took, &labels);
    REQUEST_PROMPT.record(n_prompt as f64, &[]);
    REQUEST_OUTPUT.record(n_output as f64, &[]);
    REQUEST_LONGEST.record(answer.n_longest as f64, &[]);
    PROMPT_CACHED.add(n_cached, &[]);
    let largest = LARGEST.fetch_max(n_prompt + n_output, Relaxed).max(n_prompt + n_output);
    REQUEST_LARGEST.set(largest as f64, &[]);
    let Some(first) = answer.first_token else { return };
    AI_FIRST_TOKEN.observe(first, &labels);
    // Choices are generated in parallel, each with its own first token.
    let n_behind = n_output.saturating_sub(answer.n_choices);
    if let (Some(last), true) = (answer.last_token, n_behind > 0) {
        let apart = last.saturating_sub(first).as_secs_f64() * answer.n_choices as f64 / n_behind as f64;
        AI_PER_TOKEN.record(apart, &labels);
        REQUEST_PER_TOKEN.record(apart, &[]);
    }
}

// -- of the connection to a collector

pub(crate) fn sent(signal: &'static str, n: u64) {
    SENT.add(n, &[Label::from_static_parts("signal", signal)]);
}

pub(crate) fn not_sent(signal: &'static str, reason: &'static str, n: u64) {
    let labels = [Label::from_static_parts("signal", signal), Label::from_static_parts("reason", reason)];
    NOT_SENT.add(n, &labels);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exporter::install;

    fn cache_of(n_blocks: u32) -> CacheLabels {
        CacheLabels { block_size: 16, n_blocks, dtype: "f16".into(), prefix_caching: true }
    }

    fn happen(one: &ReplicaLabel, other: &ReplicaLabel) {
        load(one, 3, 2, 1, 4);
        load(other, 9, 0, 0, 4);
        planned(
            one,
            PlannerCounts {
                steps: 7,
                prefix_hit_tokens: 5,
                starved: 2,
                steps_early: 3,
                cut_by_time: 4,
                ..PlannerCounts::default()
            },
        );
        planned(other, PlannerCounts { steps: 2, ..PlannerCounts::default() });
        finished(one, "stop");
        reuse_ended(one, "differs");
        first_token(None, Duration::from_millis(3));
        let (before, now) = (cache_of(8), cache_of(9));
        cache(one, None, &before);
        cache(one, Some(&before), &now);
        let usage = TokenUsage { n_prompt: 5, n_cached: 0, n_output: 9 };
        let (first, last) = (Some(Duration::from_millis(15)), Some(Duration::from_millis(95)));
        let answer = RequestMetrics {
            operation: "chat",
            model: Some("toy"),
            outcome: "ok",
            n_choices: 1,
            usage,
            n_longest: 9,
            ..RequestMetrics::default()
        };
        answered(&RequestMetrics {
            first_token: first,
            last_token: last,
            took: Duration::from_millis(100),
            ..answer.clone()
        });
        answered(&RequestMetrics { outcome: "full", model: None, usage: TokenUsage::default(), ..answer });
        not_sent("logs", "full", 3);
        let millis = Duration::from_millis;
        request_durations(
            one,
            &RequestDurations { queue: millis(1), prefill: millis(20), decode: millis(300), n_preemptions: 2 },
        );
        step_planned(one, 3, 40);
        step_answered(one, 41);
        step_ratio(one, 1.05);
        admission_rejected(Some(one), QueueLimit::Tokens);
        admission_rejected(None, QueueLimit::Requests);
        record_request_params(Some(100), 2);
        record_request_params(None, 1);
    }

    #[test]
    fn the_page_has_both_names_and_buckets() {
        let exporter = install(&[("model_name", "toy")]).unwrap();
        happen(&ReplicaLabel::replica("one"), &ReplicaLabel::replica("other"));
        let page = exporter.render();
        let gen_ai = "model_name=\"toy\",gen_ai_operation_name=\"chat\",gen_ai_provider_name=\"lockstep\"";
        let of_toy = format!("{gen_ai},gen_ai_request_model=\"toy\",gen_ai_response_model=\"toy\"");
        for line in [
            format!("gen_ai_server_request_duration_seconds_bucket{{{of_toy},le=\"0.16\"}} 1"),
            format!("gen_ai_server_request_duration_seconds_count{{{gen_ai},error_type=\"full\"}} 1"),
            format!("gen_ai_server_time_to_first_token_seconds_bucket{{{of_toy},le=\"0.02\"}} 1"),
            format!("gen_ai_server_time_per_output_token_seconds_bucket{{{of_toy},le=\"0.01\"}} 1"),
            format!("gen_ai_client_token_usage_sum{{{of_toy},gen_ai_token_type=\"output\"}} 9"),
            "lockstep:otlp_dropped_total{model_name=\"toy\",signal=\"logs\",reason=\"full\"} 3".into(),
        ] {
            assert!(page.contains(&line), "{line} is not in\n{page}");
        }
        let cache = "cache_dtype=\"f16\",enable_prefix_caching=\"True\"";
        for name in CACHE.names() {
            let lines: Vec<&str> = page.lines().filter(|line| line.starts_with(name)).collect();
            let labels = format!("model_name=\"toy\",replica=\"one\",block_size=\"16\",num_gpu_blocks=\"9\",{cache}");
            assert_eq!(lines, [format!("{name}{{{labels}}} 1")], "the earlier layout is still on the page\n{page}");
        }
        for line in [
            "vllm:num_requests_running{model_name=\"toy\",replica=\"one\"} 3",
            "vllm:num_requests_running{model_name=\"toy\",replica=\"other\"} 9",
            "lockstep:requests_waiting{model_name=\"toy\",replica=\"one\"} 2",
            "vllm:gpu_cache_usage_perc{model_name=\"toy\",replica=\"one\"} 0.25",
            "vllm:kv_cache_usage_perc{model_name=\"toy\",replica=\"one\"} 0.25",
            "lockstep:steps_total{model_name=\"toy\",replica=\"one\"} 7",
            "lockstep:steps_total{model_name=\"toy\",replica=\"other\"} 2",
            "vllm:prefix_cache_hits_total{model_name=\"toy\",replica=\"one\"} 5",
            "lockstep:starved_total{model_name=\"toy\",replica=\"one\"} 2",
            "lockstep:steps_early_total{model_name=\"toy\",replica=\"one\"} 3",
            "lockstep:chunk_cuts_total{model_name=\"toy\",replica=\"one\",reason=\"time\"} 4",
            "lockstep:step_time_ratio_bucket{model_name=\"toy\",replica=\"one\",le=\"1.1\"} 1",
            "vllm:request_success_total{model_name=\"toy\",replica=\"one\",finished_reason=\"stop\"} 1",
            "lockstep:prompt_reuse_ended_total{model_name=\"toy\",replica=\"one\",reason=\"differs\"} 1",
            "vllm:time_to_first_token_seconds_bucket{model_name=\"toy\",le=\"0.005\"} 1",
            "vllm:num_requests_waiting_by_reason{model_name=\"toy\",replica=\"one\",reason=\"capacity\"} 2",
            "vllm:request_queue_time_seconds_bucket{model_name=\"toy\",replica=\"one\",le=\"0.001\"} 1",
            "vllm:request_prefill_time_seconds_bucket{model_name=\"toy\",replica=\"one\",le=\"0.025\"} 1",
            "vllm:request_decode_time_seconds_bucket{model_name=\"toy\",replica=\"one\",le=\"0.25\"} 0",
            "vllm:request_inference_time_seconds_bucket{model_name=\"toy\",replica=\"one\",le=\"0.5\"} 1",
            "lockstep:step_tokens_sum{model_name=\"toy\",replica=\"one\"} 40",
            "vllm:iteration_tokens_total_sum{model_name=\"toy\",replica=\"one\"} 41",
            "vllm:request_num_preemptions_bucket{model_name=\"toy\",replica=\"one\",le=\"1\"} 0",
            "vllm:request_num_preemptions_bucket{model_name=\"toy\",replica=\"one\",le=\"2\"} 1",
            "vllm:request_time_per_output_token_seconds_sum{model_name=\"toy\"} 0.01",
            "vllm:request_max_num_generation_tokens_sum{model_name=\"toy\"} 9",
            "vllm:admission_rejections_total{model_name=\"toy\",replica=\"one\",reason=\"max_num_queued_tokens\"} 1",
            "vllm:admission_rejections_total{model_name=\"toy\",reason=\"max_num_queued_reqs\"} 1",
            "vllm:request_params_max_tokens_count{model_name=\"toy\"} 1",
            "vllm:request_params_n_bucket{model_name=\"toy\",le=\"1\"} 1",
        ] {
            assert!(page.contains(line), "{line} is not in\n{page}");
        }
    }

    /// A row without a series would be omitted silently.
    #[test]
    fn llama_cpp_names_use_existing_series() {
        let metrics = GAUGES.iter().chain(&COUNTERS).chain(HISTOGRAMS.iter().map(|(metric, _)| metric));
        let lines = metrics.flat_map(|metric| ["", "_sum", "_count"].map(|part| format!("{}{part} 1\n", metric.ours)));
        let page = crate::llama_cpp::page(&lines.collect::<String>(), 1);
        assert_eq!(page.lines().filter(|line| line.starts_with("llamacpp:")).count(), 15, "{page}");
    }
}
