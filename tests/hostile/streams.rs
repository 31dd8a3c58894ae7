//! Clients that stream during an attack: each repeats its request, and compares every answer with the first. They use
//! HTTP and server-sent events.

use crate::node::PATIENCE;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// An answer's tokens, with their logprobs as they were written, and why it ended.
pub type Answer = (Vec<u64>, Vec<String>, String);

/// The observations of a client.
#[derive(Default)]
pub struct Seen {
    pub n_answers: usize,
    /// Times between two events of one stream.
    pub gaps: Vec<Duration>,
    pub different: Option<String>,
}

pub struct Streams {
    end: Arc<AtomicBool>,
    clients: Vec<JoinHandle<Seen>>,
}

/// Returns the answer of each of so many clients without an attack.
pub fn expected(http: &str, n_streams: usize, tokens_max: u32) -> Vec<Answer> {
    let clients: Vec<_> = (0..n_streams)
        .map(|i| {
            let http = http.to_owned();
            std::thread::spawn(move || stream_answer(&http, &body(i, tokens_max), &mut Vec::new()).unwrap())
        })
        .collect();
    clients.into_iter().map(|client| client.join().unwrap()).collect()
}

/// Starts clients that repeat their requests until `end`.
pub fn begin(http: &str, tokens_max: u32, expected: &[Answer]) -> Streams {
    let end = Arc::new(AtomicBool::new(false));
    let client = |(i, expected): (usize, &Answer)| {
        let (http, end, expected) = (http.to_owned(), end.clone(), expected.clone());
        std::thread::spawn(move || {
            let mut seen = Seen::default();
            // A client that is ended before it begins still sends one request.
            loop {
                match stream_answer(&http, &body(i, tokens_max), &mut seen.gaps) {
                    Ok(answer) if answer == expected => seen.n_answers += 1,
                    Ok(answer) => seen.different = Some(format!("stream {i}: {answer:?} for {expected:?}")),
                    Err(error) => seen.different = Some(format!("stream {i}: {error}")),
                }
                if end.load(Relaxed) || seen.different.is_some() {
                    break;
                }
            }
            seen
        })
    };
    Streams { clients: expected.iter().enumerate().map(client).collect(), end }
}

impl Streams {
    /// Lets each client finish its current answer.
    pub fn end(self) -> Seen {
        self.end.store(true, Relaxed);
        let mut all = Seen::default();
        for client in self.clients {
            let seen = client.join().unwrap();
            all.n_answers += seen.n_answers;
            all.gaps.extend(seen.gaps);
            all.different = all.different.or(seen.different);
        }
        all.gaps.sort();
        all
    }
}

impl Seen {
    /// Returns the gap that so many of a hundred do not exceed, in milliseconds.
    pub fn within(&self, hundredth: usize) -> f64 {
        let at = (self.gaps.len() * hundredth / 100).min(self.gaps.len().saturating_sub(1));
        self.gaps.get(at).map_or(0.0, |gap| gap.as_secs_f64() * 1e3)
    }
}

fn body(i: usize, tokens_max: u32) -> Value {
    json!({
        "prompt": format!("stream {i} goes on"), "max_tokens": tokens_max, "stream": true, "return_token_ids": true,
        "ignore_eos": true, "temperature": 0.8, "seed": i, "logprobs": 1,
    })
}

fn stream_answer(http: &str, body: &Value, gaps: &mut Vec<Duration>) -> Result<Answer, String> {
    let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).build();
    let request = ureq::Agent::from(agent).post(format!("{http}/v1/completions"));
    let sent = request.header("content-type", "application/json").send(body.to_string());
    let mut response = sent.map_err(|error| error.to_string())?;
    let (mut answer, mut last_token_at) = (Answer::default(), None::<Instant>);
    for line in BufReader::new(response.body_mut().as_reader()).lines() {
        let line = line.map_err(|error| error.to_string())?;
        let Some(data) = line.strip_prefix("data: ").filter(|data| *data != "[DONE]") else { continue };
        let event: Value = serde_json::from_str(data).map_err(|error| error.to_string())?;
        let choice = &event["choices"][0];
        let Some(ids) = choice["token_ids"].as_array().filter(|ids| !ids.is_empty()) else {
            answer.2 = choice["finish_reason"].as_str().map_or(answer.2, str::to_owned);
            continue;
        };
        gaps.extend(last_token_at.replace(Instant::now()).map(|at| at.elapsed()));
        answer.0.extend(ids.iter().filter_map(Value::as_u64));
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().into_iter().flatten();
        answer.1.extend(logprobs.map(Value::to_string));
        answer.2 = choice["finish_reason"].as_str().map_or(answer.2, str::to_owned);
    }
    Ok(answer)
}
