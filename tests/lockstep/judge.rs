//! Decisions, ranks and classes over HTTP: their numbers have the bits of a single idle rank, cold and warm, beside
//! others, on a grid, and over a lost worker.

use crate::common::node::Node;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};

const DECODER: &str = "tests/reference/llama-f32-tied";
const RANKER: &str = "tests/reference/bert-rank";
const DOORS: [&str; 6] = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--threads", "1"];

fn start(model: &str, more: &[&str]) -> (Node, String) {
    let mut node = Node::start(&[&["serve", model, "--activations", "f32"], &DOORS[..], more].concat());
    let http = node.http();
    node.until_ready(&http);
    (node, http)
}

/// Repeated, what questions are about.
const STATE: &str = "the state is the same ";

/// The status of a reply, and its body without what differs between equal requests.
fn post(http: &str, page: &str, body: &Value) -> (u16, Value) {
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let request = agent.post(format!("{http}{page}")).header("content-type", "application/json");
    let mut reply = request.send(body.to_string()).unwrap();
    let mut value: Value = serde_json::from_str(&reply.body_mut().read_to_string().unwrap()).unwrap();
    if let Some(fields) = value.as_object_mut() {
        fields.remove("id");
        fields.remove("created");
    }
    (reply.status().as_u16(), value)
}

fn ok(http: &str, page: &str, body: &Value) -> Value {
    let (status, value) = post(http, page, body);
    assert_eq!(status, 200, "{page}: {value}");
    value
}

/// Twenty questions of all kinds behind one state.
fn decisions() -> Value {
    let question = |i: usize| match i % 3 {
        0 => json!({ "type": "predicate", "instructions": format!("Is it {i}?"), "name": format!("q{i}") }),
        1 => json!({ "type": "choice", "instructions": format!("Which {i}?"),
            "choices": [{ "value": "a" }, { "value": "b", "description": "it" }, { "value": true }] }),
        _ => json!({ "type": "score", "instructions": "How?", "levels": [{ "label": "low" }, { "label": "high" }] }),
    };
    let input = json!([{ "role": "user", "content": STATE.repeat(10) }]);
    json!({ "input": input, "questions": (0..20).map(question).collect::<Vec<_>>() })
}

/// All requests for numbers of a classifier of pairs.
fn ranks() -> Vec<(&'static str, Value)> {
    let documents = ["dogs", "cats are pets", "a long text of several words, and more", "x"];
    vec![
        ("/v1/rerank", json!({ "query": "cats", "documents": documents })),
        ("/v2/rerank", json!({ "query": "pets", "documents": documents, "top_n": 2 })),
        ("/rerank", json!({ "query": "pets", "texts": documents, "return_text": true })),
        ("/v1/score", json!({ "text_1": "cats", "text_2": documents })),
        ("/score", json!({ "queries": documents, "documents": documents, "use_activation": false })),
        ("/classify", json!({ "input": documents })),
        ("/pooling", json!({ "input": documents, "encoding_format": "base64" })),
    ]
}

#[test]
fn decisions_compute_a_state_once_and_have_the_same_bits_everywhere() {
    let (_cold, cold) = start(DECODER, &["--prefix-cache", "false"]);
    let (_warm, warm) = start(DECODER, &[]);
    let (grid, on_grid) = start(DECODER, &["--tp", "2"]);
    let expected = ok(&cold, "/v1/decisions", &decisions());
    let answers = expected["answers"].as_array().unwrap();
    assert_eq!((answers.len(), &answers[0]["name"], &answers[1]["name"]), (20, &json!("q0"), &Value::Null));
    let cached = |reply: &Value| reply["usage"]["input_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert_eq!((cached(&expected), &expected["usage"]["output_tokens"]), (0, &json!(20)));
    // The other questions find the full blocks of the state, and later all questions do.
    let state = ok(&warm, "/tokenize", &json!({ "prompt": STATE.repeat(10), "add_special_tokens": false }));
    let in_blocks = state["count"].as_u64().unwrap() / 16 * 16;
    let first = ok(&warm, "/v1/decisions", &decisions());
    assert_eq!(first["answers"], expected["answers"]);
    assert!(in_blocks > 100 && cached(&first) >= 19 * in_blocks, "{in_blocks}: {}", first["usage"]);
    let again = ok(&warm, "/v1/decisions", &decisions());
    assert_eq!(again["answers"], expected["answers"]);
    assert!(cached(&again) >= 20 * in_blocks, "{in_blocks}: {}", again["usage"]);
    let is_over = AtomicBool::new(false);
    let chat = json!({ "prompt": "hello", "max_tokens": 200, "ignore_eos": true });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                ok(&warm, "/v1/completions", &chat);
            }
        });
        for _ in 0..3 {
            assert_eq!(ok(&warm, "/v1/decisions", &decisions())["answers"], expected["answers"], "beside a chat");
        }
        is_over.store(true, Ordering::Relaxed);
    });
    assert_eq!(ok(&on_grid, "/v1/decisions", &decisions())["answers"], expected["answers"], "tp 2");
    kill_process(Pid::from_raw(grid.workers()[1].cast_signed()).unwrap(), Signal::KILL).unwrap();
    assert_eq!(ok(&on_grid, "/v1/decisions", &decisions())["answers"], expected["answers"], "after a loss");
}

#[test]
fn decisions_that_cannot_be_read_are_refused_by_name() {
    let (_node, http) = start(DECODER, &[]);
    let refused = |page: &str, body: Value| {
        let (status, value) = post(&http, page, &body);
        assert_eq!(status, 400, "{value}");
        value["error"]["message"].as_str().unwrap().to_owned()
    };
    let noul = json!({ "state": "s", "questions": { "angry": { "type": "noul" } } });
    let message = refused("/v1/systemone", noul);
    assert!(message.contains("question 'angry': label \"yes\" is not one distinct token"), "{message}");
    let questions = |n: usize| vec![json!({ "type": "predicate", "instructions": "Is it?" }); n];
    let message = refused("/v1/decisions", json!({ "input": "s", "questions": questions(401) }));
    assert!(message.contains("must be 1 to 400 questions, got 401"), "{message}");
    let long = json!({ "input": "x".repeat(600), "questions": questions(400) });
    let message = refused("/v1/decisions", long);
    assert!(message.contains("a context of 512"), "{message}");
    let choice = |choices: Value| {
        json!({ "input": "s", "questions": [{ "type": "choice", "instructions": "x",
        "choices": choices }] })
    };
    let message = refused("/v1/decisions", choice(json!([{ "value": "a" }, { "value": "a" }])));
    assert!(message.contains("choice values must be distinct"), "{message}");
    let many: Vec<Value> = (0..27).map(|i| json!({ "value": i.to_string() })).collect();
    let message = refused("/v1/decisions", choice(many.into()));
    assert!(message.contains("at most 26 choices"), "{message}");
    let score = json!({ "state": "s", "questions": { "q": { "type": "score", "criteria": ["low", "high"] } } });
    let reply = ok(&http, "/v1/systemone", &score);
    let of = &reply["answers"]["q"]["probabilities"];
    assert!((of["0"].as_f64().unwrap() + of["1"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{reply}");
    assert!(reply["diagnostics"]["q"]["label_mass"].as_f64().unwrap() > 0.0, "{reply}");
}

#[test]
fn ranks_have_the_same_bits_everywhere() {
    let (_alone, alone) = start(RANKER, &[]);
    let (grid, on_grid) = start(RANKER, &["--tp", "2"]);
    let expected: Vec<Value> = ranks().iter().map(|(page, body)| ok(&alone, page, body)).collect();
    let [by_cats, two, list, scores, raw, ..] = &expected[..] else { panic!("there are seven") };
    let results = by_cats["results"].as_array().unwrap();
    assert!(results.is_sorted_by(|a, b| a["relevance_score"].as_f64() >= b["relevance_score"].as_f64()), "{by_cats}");
    for result in results {
        let index = result["index"].as_u64().unwrap() as usize;
        assert_eq!(result["relevance_score"], scores["data"][index]["score"]);
        let outputs = raw["data"][index]["score"].as_f64().unwrap();
        assert!(outputs.is_finite() && outputs != scores["data"][index]["score"].as_f64().unwrap());
    }
    assert_eq!((two["results"].as_array().unwrap().len(), list[0]["score"].is_f64()), (2, true));
    let all_are_expected = |http: &str, way: &str| {
        for ((page, body), expected) in ranks().iter().zip(&expected) {
            assert_eq!(&ok(http, page, body), expected, "{page}, {way}");
        }
    };
    all_are_expected(&alone, "again");
    all_are_expected(&on_grid, "tp 2");
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4).map(|_| scope.spawn(|| all_are_expected(&on_grid, "beside others"))).collect();
        kill_process(Pid::from_raw(grid.workers()[1].cast_signed()).unwrap(), Signal::KILL).unwrap();
        clients.into_iter().for_each(|client| client.join().unwrap());
    });
    all_are_expected(&on_grid, "after a loss");
}

#[test]
fn what_a_model_lacks_is_refused() {
    let (_alone, http) = start(RANKER, &[]);
    let refused = |page: &str, body: Value| {
        let (status, value) = post(&http, page, &body);
        assert_eq!(status, 400, "{value}");
        value["error"]["message"].as_str().unwrap().to_owned()
    };
    assert!(refused("/v1/completions", json!({ "prompt": "x" })).contains("draws no tokens"));
    assert!(refused("/v1/embeddings", json!({ "input": "x" })).contains("is a classifier"));
    assert!(refused("/v1/decisions", decisions()).contains("draws no tokens"));
    assert!(refused("/v1/rerank", json!({ "query": "x", "documents": [] })).contains("at least one text"));
    let unequal = json!({ "text_1": ["a", "b"], "text_2": ["a", "b", "c"] });
    assert!(refused("/v1/score", unequal).contains("Input lengths must be either 1:1, 1:N or N:N"));
    let long = json!({ "query": "x".repeat(400), "documents": ["y"] });
    assert!(refused("/v1/rerank", long).contains("a context of 320"));
    assert!(
        refused("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": "x" }] }))
            .contains("draws no tokens")
    );
}

/// The line with an example suits the model: a chat, a rank, a class or a vector.
#[test]
fn servers_print_a_request_that_their_model_answers() {
    for model in [DECODER, RANKER, "tests/reference/bert-cls", "tests/reference/nomic-bert"] {
        let mut node = Node::start(&[&["serve", model][..], &DOORS].concat());
        let command = node.until(&["try: "]).split_once("try: ").unwrap().1.to_owned();
        let ran = std::process::Command::new("sh").args(["-c", &command]).output().unwrap();
        let reply: Value = serde_json::from_slice(&ran.stdout).unwrap();
        assert!(reply["error"].is_null() && reply.is_object(), "{model}: {command}: {reply}");
    }
}
