//! One request to a server: sent, and its answer timed as it arrives. Knows OpenAI's completions and their event
//! stream.

use anyhow::{Context, anyhow, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

pub struct BenchClient {
    agent: ureq::Agent,
    url: String,
    pub model: String,
    key: Option<String>,
}

/// The request to the server.
pub struct BenchRequest {
    pub prompt: String,
    pub tokens_max: usize,
    pub stop_early: bool,
}

/// The arrival times of an answer's pieces, from the moment of sending.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestTiming {
    /// Times of events that carried text.
    pub pieces: Vec<Duration>,
    pub whole: Duration,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
}

/// The limit of an event's size. No correct server sends longer ones.
const EVENT_BYTES_MAX: u64 = 1 << 20;
const ERROR_BYTES_MAX: u64 = 4096;

impl BenchClient {
    pub fn find(
        url: &str,
        model: Option<&str>,
        key: Option<String>,
        agent: ureq::Agent,
    ) -> anyhow::Result<BenchClient> {
        let url = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let mut server = BenchClient { agent, url, model: String::new(), key };
        server.model = match model {
            Some(model) => model.to_owned(),
            None => server.first_model()?,
        };
        Ok(server)
    }

    fn first_model(&self) -> anyhow::Result<String> {
        let url = format!("{}/v1/models", self.url);
        let mut request = self.agent.get(&url);
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let mut response = request.call().with_context(|| format!("{url} does not answer"))?;
        let text = response.body_mut().read_to_string()?;
        let list: Value = serde_json::from_str(&text).with_context(|| format!("{url} does not answer with JSON"))?;
        let first = list["data"][0]["id"].as_str();
        first.map(str::to_owned).ok_or_else(|| anyhow!("{url} lists no model: name one with --model"))
    }

    pub fn request_completion(&self, bench_request: &BenchRequest) -> anyhow::Result<RequestTiming> {
        let body = json!({
            "model": self.model, "prompt": bench_request.prompt, "max_tokens": bench_request.tokens_max,
            "temperature": 0, "ignore_eos": !bench_request.stop_early, "stream": true,
            "stream_options": { "include_usage": true },
        });
        let mut request = self.agent.post(format!("{}/v1/completions", self.url));
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let begun = Instant::now();
        let mut response = request.content_type("application/json").send(body.to_string())?;
        let status = response.status();
        let mut reader = BufReader::new(response.body_mut().as_reader());
        if !status.is_success() {
            let mut text = String::new();
            reader.take(ERROR_BYTES_MAX).read_to_string(&mut text)?;
            bail!("{status}: {text}");
        }
        read_events(&mut reader, || begun.elapsed())
    }
}

fn read_events(reader: &mut impl BufRead, elapsed: impl Fn() -> Duration) -> anyhow::Result<RequestTiming> {
    let mut timed = RequestTiming::default();
    let mut line = String::new();
    loop {
        line.clear();
        if reader.take(EVENT_BYTES_MAX).read_line(&mut line)? == 0 {
            bail!("the stream ended without [DONE]");
        }
        // Comments keep a connection alive and carry nothing.
        let Some(event) = line.strip_prefix("data:").map(str::trim) else { continue };
        if event == "[DONE]" {
            timed.whole = elapsed();
            return timed.finish();
        }
        timed.add_event(event, &elapsed)?;
    }
}

impl RequestTiming {
    fn add_event(&mut self, event: &str, elapsed: impl Fn() -> Duration) -> anyhow::Result<()> {
        let event: Value = serde_json::from_str(event).with_context(|| format!("{event:?} is not JSON"))?;
        if !event["error"].is_null() {
            bail!("{}", event["error"]);
        }
        if event["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
            self.pieces.push(elapsed());
        }
        let usage = &event["usage"];
        if usage.is_object() {
            let count = |value: &Value| value.as_u64().unwrap_or(0);
            self.prompt_tokens = count(&usage["prompt_tokens"]);
            self.output_tokens = count(&usage["completion_tokens"]);
            self.cached_tokens = count(&usage["prompt_tokens_details"]["cached_tokens"]);
        }
        Ok(())
    }

    fn finish(mut self) -> anyhow::Result<RequestTiming> {
        if self.pieces.is_empty() {
            bail!("the answer holds no text");
        }
        // Without counts from the server, each event counts as one token.
        if self.output_tokens == 0 {
            self.output_tokens = self.pieces.len() as u64;
        }
        Ok(self)
    }

    pub fn time_to_first_token(&self) -> Duration {
        self.pieces.first().copied().unwrap_or(self.whole)
    }

    /// Times between one piece and the next.
    pub fn gaps(&self) -> impl Iterator<Item = Duration> + '_ {
        self.pieces.windows(2).map(|pair| pair[1].saturating_sub(pair[0]))
    }

    /// The mean time per token after the first; None without a second token.
    pub fn per_token(&self) -> Option<Duration> {
        let last = *self.pieces.last()?;
        let n_after = u32::try_from(self.output_tokens.checked_sub(1)?).ok().filter(|n| *n > 0)?;
        Some(last.saturating_sub(self.time_to_first_token()) / n_after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn read(text: &str) -> anyhow::Result<RequestTiming> {
        let at = Cell::new(0);
        read_events(&mut text.as_bytes(), || {
            at.set(at.get() + 10);
            Duration::from_millis(at.get())
        })
    }

    #[test]
    fn an_answer_is_timed_by_its_pieces() {
        let timed = read(concat!(
            ": keep-alive\n\n",
            "data: {\"choices\": [{\"text\": \"\"}]}\n\n",
            "data: {\"choices\": [{\"text\": \"a\"}]}\n\n",
            "data: {\"choices\": [{\"text\": \" b\"}]}\n\n",
            "data: {\"choices\": [], \"usage\": {\"prompt_tokens\": 7, \"completion_tokens\": 3}}\n\n",
            "data: [DONE]\n\n",
        ))
        .unwrap();
        assert_eq!((timed.prompt_tokens, timed.output_tokens), (7, 3));
        assert_eq!(timed.pieces, [10, 20].map(Duration::from_millis));
        assert_eq!(timed.whole, Duration::from_millis(30));
        assert_eq!(timed.per_token(), Some(Duration::from_millis(5)));
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        let cut = "data: {\"choices\": [{\"text\": \"a\"}]}\n\n";
        for text in ["", cut, "data: [DONE]\n", "data: {\"error\": {\"message\": \"no\"}}\n", "data: {\n"] {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
