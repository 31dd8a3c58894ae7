//! How long an answer took, in the formats of llama.cpp and vLLM. Has no knowledge of pages.

use crate::http::stopwatch::Stopwatch;
use proto::v1;
use router::front::progress::PromptProgress;
use serde_json::{Value, json};
use std::time::Duration;

/// Returns the times so far. How much of the prompt was cached is known at the end, from `usage`.
pub fn timings(watch: &Stopwatch, usage: Option<&v1::Usage>, n_predicted: u32) -> Value {
    let times = watch.times();
    // The first token came with the prompt: the time begins after it.
    let predicted = TokenRate::of(times.answer, n_predicted.saturating_sub(1));
    let mut value = json!({
        "predicted_n": n_predicted,
        "predicted_ms": predicted.ms,
        "predicted_per_token_ms": predicted.per_token_ms,
        "predicted_per_second": predicted.per_second,
    });
    let n_prompt = usage.map(|usage| usage.prompt_tokens.saturating_sub(usage.cached_tokens));
    let prompt = TokenRate::of(times.prompt, n_prompt.unwrap_or(0));
    value["prompt_ms"] = prompt.ms.into();
    if let (Some(n_prompt), Some(usage)) = (n_prompt, usage) {
        value["cache_n"] = usage.cached_tokens.into();
        value["prompt_n"] = n_prompt.into();
        value["prompt_per_token_ms"] = prompt.per_token_ms.into();
        value["prompt_per_second"] = prompt.per_second.into();
    }
    value
}

/// Adds the progress of a prompt, and the times so far if each event includes them.
pub fn add_progress(to: &mut Value, watch: &mut Stopwatch, progress: PromptProgress, with_timings: bool) {
    let PromptProgress { total, cached, processed } = progress;
    watch.mark_computing();
    // Cached tokens took no time.
    let is_begun = processed > cached;
    let prompt = if is_begun { watch.times().prompt } else { Duration::ZERO };
    let millis = prompt.as_millis() as u64;
    to["prompt_progress"] = json!({ "total": total, "cache": cached, "processed": processed, "time_ms": millis });
    if with_timings {
        let usage = v1::Usage { prompt_tokens: processed, cached_tokens: cached, ..v1::Usage::default() };
        to["timings"] = timings(watch, Some(&usage), 0);
        if !is_begun {
            to["timings"]["prompt_ms"] = 0.0.into();
        }
    }
}

/// The same in vLLM's format, for an answer that waited for this long. One token has no time between tokens.
pub fn metrics(watch: &Stopwatch, waited: Duration, n_tokens: u32) -> Value {
    let times = watch.times();
    // The measured wait may be a little older than the first token.
    let first = times.prompt.saturating_sub(waited);
    let answer = TokenRate::of(times.answer, n_tokens.saturating_sub(1));
    let mut value = json!({
        "time_to_first_token_ms": first.as_secs_f64() * 1e3,
        "generation_time_ms": answer.ms,
        "queue_time_ms": waited.min(times.prompt).as_secs_f64() * 1e3,
        "tokens_per_second": TokenRate::of(first + times.answer, n_tokens).per_second,
    });
    if n_tokens > 1 {
        value["mean_itl_ms"] = answer.per_token_ms.into();
    }
    value
}

struct TokenRate {
    ms: f64,
    per_token_ms: f64,
    per_second: f64,
}

impl TokenRate {
    /// Returns a rate. Without tokens or time the rate is 0.
    fn of(time: Duration, n_tokens: u32) -> TokenRate {
        let (seconds, n) = (time.as_secs_f64(), f64::from(n_tokens));
        let over = |part: f64, all: f64| if all > 0.0 { part / all } else { 0.0 };
        TokenRate { ms: seconds * 1e3, per_token_ms: over(seconds * 1e3, n), per_second: over(n, seconds) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_time_is_not_counted_as_work() {
        let mut watch = Stopwatch::start();
        std::thread::sleep(Duration::from_millis(4));
        watch.mark_first_token();
        let measured = metrics(&watch, Duration::from_millis(3), 2);
        let [first, queue] = ["time_to_first_token_ms", "queue_time_ms"].map(|name| measured[name].as_f64().unwrap());
        assert!(
            queue == 3.0 && first >= 1.0 && (first + queue) * 1e-3 <= watch.times().total().as_secs_f64(),
            "{measured}"
        );
        assert_eq!(measured["mean_itl_ms"], measured["generation_time_ms"]);
        assert!(metrics(&watch, Duration::from_secs(9), 1).get("mean_itl_ms").is_none());
    }

    #[test]
    fn the_first_token_has_no_rate() {
        let mut watch = Stopwatch::start();
        watch.mark_first_token();
        std::thread::sleep(Duration::from_millis(1));
        let one = timings(&watch, None, 1);
        assert_eq!((&one["predicted_per_second"], &one["predicted_per_token_ms"]), (&json!(0.0), &json!(0.0)));
        let four = timings(&watch, None, 4);
        let [ms, per_token] = ["predicted_ms", "predicted_per_token_ms"].map(|name| four[name].as_f64().unwrap());
        assert!(ms >= 1.0 && (ms - 3.0 * per_token).abs() < 1e-6, "{four}");
        assert_eq!(four["predicted_n"], 4);
    }
}
