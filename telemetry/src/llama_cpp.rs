//! The metric names of dashboards made for llama.cpp's server. They have no labels there, so each is a sum over our own
//! series, computed from the page on request. Has no knowledge of roles: a name is left out if the process has no
//! series for it.

use std::collections::HashMap;
use std::fmt::Write;

/// One of llama.cpp's metrics.
struct LlamaMetric {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    value: fn(&MetricsPage<'_>) -> Option<f64>,
}

const fn counter(name: &'static str, help: &'static str, value: fn(&MetricsPage<'_>) -> Option<f64>) -> LlamaMetric {
    LlamaMetric { name, kind: "counter", help, value }
}

const fn gauge(name: &'static str, help: &'static str, value: fn(&MetricsPage<'_>) -> Option<f64>) -> LlamaMetric {
    LlamaMetric { name, kind: "gauge", help, value }
}

/// The values of our own page, read once, and the number of requests in flight at this moment.
struct MetricsPage<'a> {
    /// The sum of all series of each name.
    sums: HashMap<&'a str, f64>,
    /// How many tokens were guessed directly after the last known one.
    first_guesses: Option<f64>,
    n_under_way: usize,
}

const ROWS: [LlamaMetric; 15] = [
    counter("prompt_tokens_total", "Prompt tokens of answered requests that had to be computed.", |page| {
        page.computed_prompt_tokens()
    }),
    counter(
        "prompt_tokens_cached_total",
        "Prompt tokens of answered requests that came from the prefix cache.",
        |page| page.sum("lockstep:prompt_tokens_cached_total"),
    ),
    counter("prompt_seconds_total", "Seconds in which prompts were computed.", |page| {
        page.sum("lockstep:request_prefill_seconds_sum")
    }),
    counter("tokens_predicted_total", "Answer tokens of answered requests.", |page| {
        page.sum("lockstep:request_generation_tokens_sum")
    }),
    counter("tokens_predicted_seconds_total", "Seconds from first tokens to the ends of their answers.", |page| {
        page.sum("lockstep:request_decode_seconds_sum")
    }),
    counter("n_decode_total", "Steps that were planned.", |page| page.sum("lockstep:step_tokens_count")),
    counter("n_tokens_max", "Most tokens of one answered request, prompt and answer.", |page| {
        page.sum("lockstep:request_tokens_largest")
    }),
    counter("spec_decode_num_draft_tokens_total", "Guessed tokens that steps have verified.", |page| {
        page.sum("lockstep:drafts_total")
    }),
    counter("spec_decode_num_accepted_tokens_total", "Guessed tokens that were right.", |page| {
        page.sum("lockstep:drafts_accepted_total")
    }),
    counter("spec_decode_num_drafts_total", "How often tokens were guessed.", |page| {
        page.first_guesses.or(page.sum("lockstep:drafts_total"))
    }),
    gauge("prompt_tokens_seconds", "Prompt tokens computed in a second, over all time.", |page| {
        Some(rate(page.computed_prompt_tokens()?, page.sum("lockstep:request_prefill_seconds_sum")?))
    }),
    gauge("predicted_tokens_seconds", "Answer tokens in a second of a request, over all time.", |page| {
        let n_tokens = page.sum("lockstep:request_generation_tokens_sum")?;
        Some(rate(n_tokens, page.sum("lockstep:request_decode_seconds_sum")?))
    }),
    gauge("requests_processing", "Requests under way that do not wait.", |page| {
        let n_waiting = page.sum("lockstep:requests_waiting").unwrap_or(0.0);
        Some((page.n_under_way as f64 - n_waiting).max(0.0))
    }),
    gauge("requests_deferred", "Requests that wait.", |page| page.sum("lockstep:requests_waiting")),
    gauge("n_busy_slots_per_decode", "Requests in a step, over all time.", |page| {
        Some(rate(page.sum("lockstep:step_requests_sum")?, page.sum("lockstep:step_requests_count")?))
    }),
];

/// The series that counts guessed tokens by their distance from the last known one, and the label of the nearest.
const GUESSES: &str = "lockstep:drafts_by_position_total";
const FIRST_GUESS: &str = "position=\"0\"";

impl<'a> MetricsPage<'a> {
    fn read(text: &'a str, n_under_way: usize) -> MetricsPage<'a> {
        let mut page = MetricsPage { sums: HashMap::new(), first_guesses: None, n_under_way };
        let is_own = |line: &&str| line.starts_with("lockstep:");
        for line in text.lines().filter(is_own) {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let Ok(value) = value.parse::<f64>() else { continue };
            let name = series.split('{').next().unwrap_or(series);
            *page.sums.entry(name).or_default() += value;
            if name == GUESSES && series.contains(FIRST_GUESS) {
                *page.first_guesses.get_or_insert_default() += value;
            }
        }
        page
    }

    /// Returns None if there is no series of this name.
    fn sum(&self, name: &str) -> Option<f64> {
        self.sums.get(name).copied()
    }

    fn computed_prompt_tokens(&self) -> Option<f64> {
        let n_cached = self.sum("lockstep:prompt_tokens_cached_total").unwrap_or(0.0);
        Some(self.sum("lockstep:request_prompt_tokens_sum")? - n_cached)
    }
}

/// Returns the rate, and 0 if no time has passed.
fn rate(n: f64, of: f64) -> f64 {
    if of > 0.0 { n / of } else { 0.0 }
}

/// Returns the lines to append to our own page, for this number of requests in flight.
pub fn page(own: &str, n_under_way: usize) -> String {
    let (page, mut out) = (MetricsPage::read(own, n_under_way), String::new());
    for LlamaMetric { name, kind, help, value } in &ROWS {
        if let Some(value) = value(&page) {
            // Writing to a string does not fail.
            let _written =
                write!(out, "# HELP llamacpp:{name} {help}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}\n");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "# TYPE lockstep:request_prompt_tokens histogram
lockstep:request_prompt_tokens_bucket{model_name=\"toy\",le=\"16\"} 2
lockstep:request_prompt_tokens_sum{model_name=\"toy\"} 30
lockstep:prompt_tokens_cached_total{model_name=\"toy\"} 16
lockstep:request_prefill_seconds_sum{replica=\"one\"} 0.5
lockstep:request_prefill_seconds_sum{replica=\"other\"} 1.5
lockstep:requests_waiting{replica=\"one\"} 2
lockstep:requests_waiting_by_reason{replica=\"one\",reason=\"capacity\"} 2
lockstep:drafts_total{replica=\"one\"} 12
lockstep:drafts_by_position_total{model_name=\"toy\",position=\"0\"} 5
lockstep:drafts_by_position_total{model_name=\"toy\",position=\"1\"} 4
";

    #[test]
    fn a_name_is_the_sum_of_our_own_series() {
        let page = page(OWN, 5);
        for line in [
            "llamacpp:prompt_tokens_total 14",
            "llamacpp:prompt_tokens_cached_total 16",
            "llamacpp:prompt_seconds_total 2",
            "llamacpp:prompt_tokens_seconds 7",
            "llamacpp:requests_processing 3",
            "llamacpp:requests_deferred 2",
            "llamacpp:spec_decode_num_draft_tokens_total 12",
            "llamacpp:spec_decode_num_drafts_total 5",
            "# TYPE llamacpp:requests_deferred gauge",
            "# TYPE llamacpp:prompt_seconds_total counter",
            "# HELP llamacpp:requests_deferred Requests that wait.",
        ] {
            assert!(page.lines().any(|page_line| page_line == line), "{line} is not in\n{page}");
        }
    }

    #[test]
    fn what_this_process_does_not_count_is_left_out() {
        let page = page("", 0);
        assert!(page.contains("llamacpp:requests_processing 0\n"), "{page}");
        assert!(!page.contains("n_decode_total"), "{page}");
    }
}
