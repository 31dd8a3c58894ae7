//! Beam search and `best_of` over HTTP: beams are those of transformers, the best of several draws is one of them, and
//! a grid that loses a worker meanwhile gives the same.

use crate::common::node::{Node, complete, post};
use crate::common::{reference_folder, smollm2};
use crate::processes::DOORS;
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use serde_json::{Value, json};
use std::time::Duration;
use types::Tokens;

const FAMILIES: [&str; 4] = ["llama-f32-tied", "qwen3-moe", "gemma2", "lfm2"];
/// Scores closer to each other than this may change places.
const NEAR: f64 = 1e-3;
/// One in so many of the default model's searches runs, unless `LOCKSTEP_TEST_BEAMS` is set for all.
const ONE_IN: usize = 12;

#[derive(Deserialize)]
struct Reference {
    cases: Vec<SearchCase>,
}

/// The results of transformers: `tests/reference/make_beams.py` writes them.
#[derive(Deserialize)]
struct SearchCase {
    model: String,
    prompt: Tokens,
    width: usize,
    tokens_max: u32,
    stop: Tokens,
    early_stopping: Value,
    length_penalty: f64,
    answers: Vec<FoundByPeer>,
}

#[derive(Deserialize)]
struct FoundByPeer {
    tokens: Tokens,
    score: f64,
}

fn cases(model: &str) -> Vec<SearchCase> {
    let text = std::fs::read_to_string(reference_folder("beams.json")).unwrap();
    let reference: Reference = serde_json::from_str(&text).unwrap();
    let cases: Vec<_> = reference.cases.into_iter().filter(|case| case.model == model).collect();
    assert_eq!(cases.len(), 60, "{model}");
    cases
}

fn serve(model: &str, more: &[&str]) -> (Node, String) {
    let exact = ["--activations", "f32", "--kv-dtype", "f32"];
    let mut node = Node::start(&[&["serve", model], &exact[..], &DOORS, more].concat());
    let http = node.http();
    node.until_ready(&http);
    (node, http)
}

impl SearchCase {
    fn body(&self) -> Value {
        json!({
            "prompt": self.prompt, "use_beam_search": true, "n": self.width, "max_tokens": self.tokens_max,
            "ignore_eos": true, "stop_token_ids": self.stop, "early_stopping": self.early_stopping,
            "length_penalty": self.length_penalty, "logprobs": 0, "return_token_ids": true,
        })
    }

    /// Whether all answers are the peer's, in its order. Answers with nearly equal scores may be in another order.
    fn holds(&self, choices: &Value) {
        let found: Vec<Tokens> = choices.as_array().unwrap().iter().map(token_ids).collect();
        let expected: Vec<Tokens> = self.answers.iter().map(|answer| answer.tokens.clone()).collect();
        assert_eq!(found.len(), self.width);
        for (i, tokens) in found.iter().enumerate().filter(|(i, tokens)| expected[*i] != **tokens) {
            let scores = |peer: &FoundByPeer| (peer.score - self.answers[i].score).abs() < NEAR;
            let is_near = self.answers.iter().any(|peer| peer.tokens == *tokens && scores(peer));
            let what = format!("{} after {:?}, {} beams", self.model, self.prompt, self.width);
            assert!(is_near, "{what}: the {i}th is {tokens:?}, and not {:?}", expected[i]);
        }
        for (choice, answer) in choices.as_array().unwrap().iter().zip(&self.answers) {
            let is_stop = answer.tokens.last().is_some_and(|token| self.stop.contains(token));
            let sum: f64 = logprobs(choice).sum();
            let score = sum / (token_ids(choice).len() as f64).powf(self.length_penalty);
            assert!((score - answer.score).abs() < NEAR, "{score} and {}", answer.score);
            let reason = if is_stop { "stop" } else { "length" };
            assert!(choice["finish_reason"] == reason || found != expected, "{choice}");
        }
    }
}

fn token_ids(choice: &Value) -> Tokens {
    serde_json::from_value(choice["token_ids"].clone()).unwrap()
}

fn logprobs(choice: &Value) -> impl Iterator<Item = f64> {
    choice["logprobs"]["token_logprobs"].as_array().unwrap().iter().map(|logprob| logprob.as_f64().unwrap())
}

#[test]
fn beams_are_those_of_transformers() {
    for family in FAMILIES {
        let (_node, http) = serve(reference_folder(family).to_str().unwrap(), &["--context", "128"]);
        let cases = cases(family);
        cases.iter().for_each(|case| case.holds(&complete(&http, &case.body())));
        let is_whole = |case: &SearchCase, answer: &FoundByPeer| answer.tokens.len() < case.tokens_max as usize;
        let n_whole = |case: &SearchCase| case.answers.iter().filter(|answer| is_whole(case, answer)).count();
        let n_whole: usize = cases.iter().map(n_whole).sum();
        assert!(n_whole > 20, "{family}: {n_whole} answers end before the longest");
    }
}

#[test]
fn beams_of_the_default_model_are_those_of_transformers() {
    let one_in = if std::env::var_os("LOCKSTEP_TEST_BEAMS").is_some() { 1 } else { ONE_IN };
    let (_node, http) = serve(smollm2().to_str().unwrap(), &["--context", "1024"]);
    let cases = cases("smollm2");
    let mut n_searches = 0;
    for (i, case) in cases.iter().enumerate().filter(|(i, _)| i % one_in == i / one_in % one_in) {
        case.holds(&complete(&http, &case.body()));
        n_searches = i + 1;
    }
    println!("{n_searches} searches of the default model");
    assert!(n_searches > 0);
}

fn body(rest: Value) -> Value {
    let mut body = json!({"prompt": "the grid is the same", "max_tokens": 24, "return_token_ids": true, "seed": 5});
    let Value::Object(rest) = rest else { panic!("no object") };
    body.as_object_mut().unwrap().extend(rest);
    body
}

#[test]
fn the_best_of_several_draws_is_the_likeliest() {
    let (_node, http) = serve(crate::processes::MODEL, &[]);
    let drawn = complete(&http, &body(json!({"n": 6, "logprobs": 1})));
    let drawn = drawn.as_array().unwrap();
    let sum = |choice: &&Value| logprobs(choice).sum::<f64>();
    let mut ranked: Vec<&Value> = drawn.iter().collect();
    ranked.sort_by(|a, b| sum(b).total_cmp(&sum(a)));
    let best = complete(&http, &body(json!({"n": 2, "best_of": 6, "logprobs": 1})));
    for (found, drawn) in best.as_array().unwrap().iter().zip(&ranked) {
        assert_eq!((token_ids(found), &found["text"]), (token_ids(drawn), &drawn["text"]));
        assert_eq!((&found["logprobs"], &found["finish_reason"]), (&drawn["logprobs"], &drawn["finish_reason"]));
    }
    assert_eq!(best.as_array().unwrap().len(), 2);
    // Logprobs that were not requested are not sent, and a stop string ends the same draws.
    let bare = complete(&http, &body(json!({"best_of": 6})));
    assert_eq!((token_ids(&bare[0]), &bare[0]["logprobs"]), (token_ids(ranked[0]), &Value::Null));
    let as_drawn = complete(&http, &body(json!({"n": 6, "best_of": 6})));
    assert_eq!(
        as_drawn.as_array().unwrap().iter().map(token_ids).collect::<Vec<_>>(),
        drawn.iter().map(token_ids).collect::<Vec<_>>()
    );
}

#[test]
fn streamed_search_equals_the_whole_one() {
    let (_node, http) = serve(crate::processes::MODEL, &[]);
    for search in [json!({"n": 2, "best_of": 5}), json!({"n": 2, "best_of": 4, "use_beam_search": true})] {
        let whole = complete(&http, &body(search.clone()));
        let mut request = body(search.clone());
        request["stream"] = true.into();
        let text = post(&http, &request).body_mut().read_to_string().unwrap();
        let mut streamed = [Tokens::new(), Tokens::new()];
        for line in text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]") {
            let chunk: Value = serde_json::from_str(line).unwrap();
            for choice in chunk["choices"].as_array().unwrap().iter().filter(|choice| !choice["token_ids"].is_null()) {
                streamed[choice["index"].as_u64().unwrap() as usize].extend(token_ids(choice));
            }
        }
        assert_eq!(streamed, [token_ids(&whole[0]), token_ids(&whole[1])], "{search}");
        assert_ne!(streamed[0], streamed[1]);
    }
}

fn refusal(http: &str, rest: Value) -> String {
    let mut answer = post(http, &body(rest));
    let text = answer.body_mut().read_to_string().unwrap();
    assert_eq!(answer.status(), 400, "{text}");
    text
}

#[test]
fn what_a_search_cannot_do_is_refused_by_name() {
    let (_node, http) = serve(crate::processes::MODEL, &[]);
    let refused = [
        (json!({"n": 3, "best_of": 2}), "best_of"),
        (json!({"best_of": 1000}), "best_of"),
        (json!({"best_of": 3, "certificate": true}), "certificate"),
        (json!({"length_penalty": 2.0}), "length_penalty"),
    ];
    for (rest, field) in refused {
        assert!(refusal(&http, rest.clone()).contains(field), "{rest}");
    }
    let beside = [
        ("stop", json!("x")),
        ("min_tokens", json!(3)),
        ("presence_penalty", json!(0.5)),
        ("repetition_penalty", json!(1.2)),
        ("logit_bias", json!({"5": 1.0})),
        ("bad_words", json!(["x"])),
        ("response_format", json!({"type": "json_object"})),
        ("length_penalty", json!(11.0)),
        ("early_stopping", json!("soon")),
    ];
    for (field, value) in beside {
        let mut rest = json!({"use_beam_search": true, "n": 2});
        rest[field] = value;
        let message = refusal(&http, rest);
        let named = if field == "response_format" { "structure" } else { field };
        assert!(message.contains(named) || message.contains(field), "{field}: {message}");
    }
}

/// The same beams and draws on every grid, with a chunk that cuts the prompts, and after a worker was lost on the way.
#[test]
fn a_search_finds_the_same_on_every_grid_and_after_a_kill() {
    let searches = [
        body(json!({"n": 4, "use_beam_search": true, "max_tokens": 120, "ignore_eos": true, "logprobs": 2})),
        body(json!({"n": 2, "best_of": 6, "max_tokens": 120, "ignore_eos": true, "logprobs": 2})),
    ];
    let (_node, http) = serve(crate::processes::MODEL, &[]);
    let alone: Vec<Value> = searches.iter().map(|search| complete(&http, search)).collect();
    for more in [&["--tp", "2"][..], &["--pp", "2"], &["--tp", "2", "--pp", "2", "--max-chunk-tokens", "7"]] {
        let (node, http) = serve(crate::processes::MODEL, more);
        for (search, alone) in searches.iter().zip(&alone) {
            assert_eq!(complete(&http, search), *alone, "{more:?}");
        }
        let (door, search) = (http.clone(), searches[0].clone());
        let client = std::thread::spawn(move || complete(&door, &search));
        std::thread::sleep(Duration::from_millis(100));
        let lost = Pid::from_raw(node.workers()[0] as i32).unwrap();
        kill_process(lost, Signal::KILL).unwrap();
        assert!(!client.is_finished(), "{more:?}: it ended before a worker was lost");
        assert_eq!(client.join().unwrap(), alone[0], "{more:?}, after a kill");
    }
}
