//! Clients that stream and do not give up: a broken stream is resumed at the next router, after its last event. They
//! use HTTP and server-sent events.

use crate::node::PATIENCE;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Prompts for measuring the speed of a prefill.
const N_PROMPTS: usize = 8;
const PROMPT_REPEATS: usize = 12;
/// Limit for a whole stream, even on a busy machine that is ten times slower.
const STREAM_MAX: Duration = Duration::from_secs(600);
/// Pause between two attempts.
const BREATH: Duration = Duration::from_millis(50);

/// The whole answer of one choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    pub text: String,
    pub thought: String,
    /// Names and arguments of calls, one after another.
    pub calls: String,
    pub ids: Vec<u64>,
    /// Unchanged from the response: equal strings are equal bits. Of each token, and of the likely ones beside it.
    pub logprobs: [Vec<String>; 2],
    pub finish: Option<String>,
}

impl Choice {
    /// Adds the content of an event of completions, or of chats.
    fn read_content(&mut self, event: &Value) {
        let delta = &event["delta"];
        let text_of = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        self.text += &(text_of(&event["text"]) + &text_of(&delta["content"]));
        self.thought += &text_of(&delta["reasoning_content"]);
        for call in delta["tool_calls"].as_array().map_or(&[][..], Vec::as_slice) {
            self.calls += &(text_of(&call["function"]["name"]) + &text_of(&call["function"]["arguments"]));
        }
    }
}

/// The answers of one stream, by choice, and what happened to it.
#[derive(Clone, Debug, Default)]
pub struct StreamOutcome {
    pub choices: BTreeMap<u64, Choice>,
    pub n_resumed: usize,
    /// Rejections before it began.
    pub n_refused: usize,
    /// The longest time between two tokens, including resumptions.
    pub stood_still: Duration,
    last_token_at: Option<Instant>,
    last_id: Option<String>,
}

impl StreamOutcome {
    pub fn n_tokens(&self) -> usize {
        self.choices.values().map(|choice| choice.ids.len()).sum()
    }
}

/// A request for a stream: the path that takes it, and its body.
#[derive(Clone, Debug)]
pub struct StreamRequest {
    pub kind: &'static str,
    path: &'static str,
    pub body: Value,
}

/// The kinds of requests, used in turn. The first four work with the oldest protocol.
const KINDS: [&str; 7] = ["plain", "logprobs", "penalised", "two choices", "schema", "call", "thought"];
const N_OLD_KINDS: usize = 4;
const COMPLETIONS: &str = "/v1/completions";
const CHATS: &str = "/v1/chat/completions";

/// Requests of all kinds: plain, seeded with logprobs, penalised, with two choices, for an answer by a schema, for a
/// call, and for a thought before the answer.
pub fn requests(n_streams: usize, tokens_max: u32) -> Vec<StreamRequest> {
    (0..n_streams).map(|i| request(i, KINDS[i % KINDS.len()], tokens_max)).collect()
}

/// Requests of the kinds that the oldest protocol can carry.
pub fn old_requests(n_streams: usize, tokens_max: u32) -> Vec<StreamRequest> {
    (0..n_streams).map(|i| request(i, KINDS[i % N_OLD_KINDS], tokens_max)).collect()
}

fn request(i: usize, kind: &'static str, tokens_max: u32) -> StreamRequest {
    let text = format!("stream {i} says {}", "on and on ".repeat(i % 5));
    let n_tokens = tokens_max - (i as u32 % 7);
    let (path, more) = match kind {
        "logprobs" => (COMPLETIONS, json!({"temperature": 0.9, "seed": i, "top_p": 0.95, "logprobs": 2})),
        "penalised" => {
            let penalties = json!({"frequency_penalty": 0.7, "repetition_penalty": 1.1, "temperature": 0.8, "seed": i});
            (COMPLETIONS, penalties)
        }
        "two choices" => (COMPLETIONS, json!({"temperature": 1.0, "seed": i, "n": 2})),
        "schema" => {
            let structure = json!({"json": list(tokens_max)});
            (COMPLETIONS, json!({"temperature": 0.7, "seed": i, "structured_outputs": structure}))
        }
        "call" => {
            let parameters = json!({"type": "object", "properties": {"days": list(tokens_max)}, "required": ["days"]});
            let function = json!({"name": "forecast", "parameters": parameters, "strict": true});
            let tools = json!([{"type": "function", "function": function}]);
            // A random model may begin a thought.
            let forced = json!({
                "tools": tools, "tool_choice": "required", "parallel_tool_calls": false, "thinking_token_budget": 16,
            });
            (CHATS, forced)
        }
        "thought" => {
            let (budget, thinks) = (tokens_max / 2, json!({"enable_thinking": true}));
            let drawn = json!({
                "temperature": 0.6, "seed": i, "thinking_token_budget": budget, "chat_template_kwargs": thinks,
            });
            (CHATS, drawn)
        }
        _ => (COMPLETIONS, json!({})),
    };
    let mut body = json!({
        "max_tokens": n_tokens, "stream": true, "return_token_ids": true, "ignore_eos": true, "temperature": 0.0,
    });
    let fields = body.as_object_mut().unwrap();
    match path {
        CHATS => fields.insert("messages".into(), json!([{"role": "user", "content": text}])),
        _ => fields.insert("prompt".into(), text.into()),
    };
    fields.extend(more.as_object().unwrap().clone());
    StreamRequest { kind, path, body }
}

/// A schema whose shortest text has about as many characters as a stream has tokens.
fn list(tokens_max: u32) -> Value {
    let digit = json!({"type": "integer", "minimum": 0, "maximum": 9});
    json!({"type": "array", "items": digit, "minItems": tokens_max / 2, "maxItems": tokens_max / 2})
}

/// Prefill speed in tokens a second, with prompts on both replicas at once; by replica. No prompt is cached.
pub fn prefill_rate(doors: &[String]) -> f64 {
    static N_SENT: AtomicUsize = AtomicUsize::new(0);
    let send = |i: usize| {
        let (door, n) = (doors[i % doors.len()].clone(), N_SENT.fetch_add(1, Relaxed));
        let prompt = format!("{n} {}", "what has been said is said again, ".repeat(PROMPT_REPEATS));
        let body = json!({"prompt": prompt, "max_tokens": 1, "temperature": 0.0});
        std::thread::spawn(move || {
            let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).build();
            let request = ureq::Agent::from(agent).post(format!("{door}/v1/completions"));
            let mut answer = request.header("content-type", "application/json").send(body.to_string()).unwrap();
            let answer: Value = serde_json::from_str(&answer.body_mut().read_to_string().unwrap()).unwrap();
            answer["usage"]["prompt_tokens"].as_u64().unwrap()
        })
    };
    let begun = Instant::now();
    let clients: Vec<_> = (0..N_PROMPTS).map(send).collect();
    let n_tokens: u64 = clients.into_iter().map(|client| client.join().unwrap()).sum();
    n_tokens as f64 / begun.elapsed().as_secs_f64() / 2.0
}

/// Open streams.
pub struct Streams {
    clients: Vec<JoinHandle<StreamOutcome>>,
    /// The number of tokens that each has received.
    n_received: Vec<Arc<AtomicUsize>>,
}

/// The number of streams that had begun and had not ended: only these can be hit. `expected` are the tokens of each.
pub fn n_under_way(n_received: &[usize], expected: &[usize]) -> usize {
    n_received.iter().zip(expected).filter(|(received, expected)| (1..**expected).contains(*received)).count()
}

/// Starts each request on a thread of its own, spread over the routers.
pub fn start_streams(doors: &[String], requests: &[StreamRequest]) -> Streams {
    let n_received: Vec<_> = requests.iter().map(|_| Arc::new(AtomicUsize::new(0))).collect();
    let client = |(i, request): (usize, &StreamRequest)| {
        let (doors, request, n_received) = (doors.to_vec(), request.clone(), n_received[i].clone());
        std::thread::spawn(move || Client { doors, door: i, request, n_received }.run())
    };
    Streams { clients: requests.iter().enumerate().map(client).collect(), n_received }
}

impl Streams {
    /// Returns how many tokens each stream has received.
    pub fn n_received(&self) -> Vec<usize> {
        self.n_received.iter().map(|count| count.load(Relaxed)).collect()
    }

    /// Waits until `n` tokens have arrived, and returns how many each stream has then.
    pub fn wait_for_tokens(&self, n: usize) -> Vec<usize> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let each = self.n_received();
            let all: usize = each.iter().sum();
            if all >= n {
                return each;
            }
            let have_ended = self.clients.iter().all(JoinHandle::is_finished);
            assert!(Instant::now() < deadline && !have_ended, "{all} tokens of {n} in time, all ended: {have_ended}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn wait(self) -> Vec<StreamOutcome> {
        self.clients.into_iter().map(|client| client.join().unwrap()).collect()
    }
}

/// Sends a request until it is answered whole, first at this router. `n_received` counts the tokens of this answer.
pub fn run_client(
    doors: &[String],
    door: usize,
    request: &StreamRequest,
    n_received: &Arc<AtomicUsize>,
) -> StreamOutcome {
    n_received.store(0, Relaxed);
    Client { doors: doors.to_vec(), door, request: request.clone(), n_received: n_received.clone() }.run()
}

struct Client {
    doors: Vec<String>,
    door: usize,
    request: StreamRequest,
    n_received: Arc<AtomicUsize>,
}

impl Client {
    fn run(mut self) -> StreamOutcome {
        let mut outcome = StreamOutcome::default();
        let deadline = Instant::now() + STREAM_MAX;
        while let Err(why) = self.attempt(&mut outcome) {
            assert!(Instant::now() < deadline, "the client gave up: {why}");
            self.door += 1;
            std::thread::sleep(BREATH);
        }
        outcome
    }

    /// Reads to the stream's end, or returns why it broke. Panics on a rejection that another attempt cannot change.
    fn attempt(&self, outcome: &mut StreamOutcome) -> Result<(), String> {
        let door = &self.doors[self.door % self.doors.len()];
        let agent = ureq::Agent::config_builder().timeout_global(Some(STREAM_MAX)).http_status_as_error(false).build();
        let mut request = ureq::Agent::from(agent).post(format!("{door}{}", self.request.path));
        request = request.header("content-type", "application/json");
        if let Some(id) = &outcome.last_id {
            request = request.header("last-event-id", id);
        }
        let mut answer = request.send(self.request.body.to_string()).map_err(|error| error.to_string())?;
        let status = answer.status().as_u16();
        if status != 200 {
            let why = answer.body_mut().read_to_string().unwrap_or_default();
            assert!(matches!(status, 429 | 502 | 503), "{status}: {why}");
            outcome.n_refused += 1;
            return Err(why);
        }
        // A stream without an event yet is requested again from the start.
        outcome.n_resumed += usize::from(outcome.last_id.is_some());
        let mut next_id = None;
        for line in BufReader::new(answer.into_body().into_reader()).lines() {
            let line = line.map_err(|error| error.to_string())?;
            if let Some(id) = line.strip_prefix("id:") {
                // The id counts once its event's data arrives.
                next_id = Some(id.trim().to_owned());
            } else if line == "data: [DONE]" {
                return Ok(());
            } else if let Some(event) = line.strip_prefix("data: ") {
                let stood_still = outcome.last_token_at.replace(Instant::now()).map(|at| at.elapsed());
                outcome.stood_still = outcome.stood_still.max(stood_still.unwrap_or_default());
                self.event(&serde_json::from_str(event).unwrap(), outcome)?;
                outcome.last_id = next_id.take().or(outcome.last_id.take());
            }
        }
        Err("the stream broke off".into())
    }

    fn event(&self, event: &Value, outcome: &mut StreamOutcome) -> Result<(), String> {
        if !event["error"].is_null() {
            return Err(event.to_string());
        }
        for choice_json in event["choices"].as_array().unwrap() {
            let choice = outcome.choices.entry(choice_json["index"].as_u64().unwrap()).or_default();
            choice.read_content(choice_json);
            let ids = choice_json["token_ids"].as_array().map_or(&[][..], Vec::as_slice);
            choice.ids.extend(ids.iter().map(|id| id.as_u64().unwrap()));
            self.n_received.fetch_add(ids.len(), Relaxed);
            for (list, name) in choice.logprobs.iter_mut().zip(["token_logprobs", "top_logprobs"]) {
                let values = choice_json["logprobs"][name].as_array().map_or(&[][..], Vec::as_slice);
                list.extend(values.iter().map(Value::to_string));
            }
            if let Some(finish) = choice_json["finish_reason"].as_str() {
                assert_eq!(choice.finish, None, "an end comes once");
                choice.finish = Some(finish.to_owned());
            }
        }
        Ok(())
    }
}
