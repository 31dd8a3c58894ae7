//! Every known field on every endpoint: done, taken or refused, as the list defines; and `docs/fields.md`, made of it.

use crate::client::post;
use crate::{House, run};
use faces::{Endpoint, KNOWN_FIELDS, KnownField, NeutralValues};
use serde_json::{Value, json};
use std::net::SocketAddr;

/// The fields that build a prompt from a conversation.
const OF_TALK: [&str; 18] = [
    "messages",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "documents",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "reasoning_effort",
    "reasoning",
    "include_reasoning",
    "thinking",
    "thinking_token_budget",
    "thinking_budget_tokens",
    "thinking_budget",
];

fn base(endpoint: Endpoint, name: &str) -> Option<(&'static str, Value)> {
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    let of_talk = OF_TALK.contains(&name);
    Some(match endpoint {
        Endpoint::Chat => ("/v1/chat/completions", json!({ "messages": messages })),
        Endpoint::Completions => ("/v1/completions", json!({ "prompt": "Hi" })),
        Endpoint::Responses => ("/v1/responses", json!({ "model": "toy", "input": "Hi" })),
        Endpoint::Messages => ("/v1/messages", json!({ "messages": messages, "max_tokens": 9 })),
        Endpoint::CountTokens => ("/v1/messages/count_tokens", json!({ "messages": messages })),
        Endpoint::Embeddings if of_talk => ("/v1/embeddings", json!({ "messages": messages })),
        Endpoint::Embeddings => ("/v1/embeddings", json!({ "input": "Hi" })),
        Endpoint::Rank if name == "texts" => ("/v1/rerank", json!({ "query": "Hi" })),
        Endpoint::Rank if name == "return_text" => ("/v1/rerank", json!({ "query": "Hi", "texts": ["a"] })),
        Endpoint::Rank => ("/v1/rerank", json!({ "query": "Hi", "documents": ["a", "b"] })),
        Endpoint::Tokenize if of_talk => ("/tokenize", json!({ "messages": messages })),
        Endpoint::Tokenize => ("/tokenize", json!({ "prompt": "Hi" })),
        Endpoint::Detokenize => ("/detokenize", json!({ "tokens": [65] })),
        // It has no page; `kserve` has its tests.
        Endpoint::Infer => return None,
    })
}

/// Returns the fields without which this field means nothing.
fn required_fields(on: Endpoint, name: &str) -> Value {
    match name {
        "logprob_token_ids" if on == Endpoint::Chat => json!({ "logprobs": true }),
        "logprob_token_ids" if on == Endpoint::Completions => json!({ "logprobs": 1 }),
        "top_logprobs" if on == Endpoint::Chat => json!({ "logprobs": true }),
        "stream_options" => json!({ "stream": true }),
        "min_tokens" => json!({ "max_tokens": 9 }),
        _ => json!({}),
    }
}

/// Returns the name of a shared field at an endpoint.
fn reported_name(endpoint: Endpoint, name: &'static str) -> &'static str {
    match (endpoint, name) {
        (Endpoint::Messages, "stop") => "stop_sequences",
        (Endpoint::Responses, "max_tokens") => "max_output_tokens",
        _ => name,
    }
}

/// Returns the refusal of a request with this field, or None.
async fn refusal_message(http: SocketAddr, on: Endpoint, name: &str, value: &Value) -> Option<String> {
    let (path, mut body) = base(on, name).unwrap();
    let all = body.as_object_mut().unwrap();
    all.extend(required_fields(on, name).as_object().unwrap().clone());
    all.insert(name.to_owned(), value.clone());
    let reply = post(http, path, &body).await;
    match reply.status {
        200 => None,
        400 => Some(reply.json()["error"]["message"].as_str().unwrap().to_owned()),
        _ => panic!("{path} {body}: {reply:?}"),
    }
}

fn neutral_values(known: &KnownField) -> Vec<Value> {
    let read = |text: &str| serde_json::from_str(text).unwrap();
    match known.neutral {
        NeutralValues::None => vec![],
        NeutralValues::All => vec![read(known.meant), json!([[[]]])],
        NeutralValues::Empty => vec![json!([]), json!({}), json!("")],
        NeutralValues::These(all) => all.iter().map(|one| read(one)).collect(),
    }
}

/// Returns the id of a response that can be continued.
async fn store_response(http: SocketAddr) -> Value {
    let (path, body) = base(Endpoint::Responses, "store").unwrap();
    post(http, path, &body).await.json()["id"].take()
}

async fn check(http: SocketAddr, known: &'static KnownField, on: Endpoint) {
    let name = reported_name(on, known.name);
    let is_named = |text: &str| match on {
        Endpoint::Rank => text.ends_with(&format!("(parameter={name})")),
        _ => text.starts_with(name),
    };
    let names = |refusal: Option<String>| refusal.is_some_and(|text| is_named(&text));
    let meant: Value = match known.name {
        "previous_response_id" => store_response(http).await,
        "conversation" => post(http, "/v1/conversations", &json!({})).await.json()["id"].take(),
        _ => serde_json::from_str(known.meant).unwrap(),
    };
    let of_meant = refusal_message(http, on, known.name, &meant).await;
    if known.is_done {
        assert_eq!(of_meant, None, "{on:?} {known:?}");
        // A supported field is read: a value of another kind is refused.
        let wrong = refusal_message(http, on, known.name, &json!([[[]]])).await;
        assert!(names(wrong.clone()), "{on:?} {known:?} {wrong:?}");
        return;
    }
    let is_neutral = matches!(known.neutral, NeutralValues::All);
    assert!(if is_neutral { of_meant.is_none() } else { names(of_meant.clone()) }, "{on:?} {known:?} {of_meant:?}");
    for value in neutral_values(known).into_iter().chain([Value::Null]) {
        assert_eq!(refusal_message(http, on, known.name, &value).await, None, "{on:?} {value} {known:?}");
    }
}

#[test]
fn every_known_field_is_done_or_taken_or_refused_by_its_name() {
    run(async {
        // The model has tokens for a text before a `suffix`.
        let house = House::coding().await;
        // The toy model gets its tools in a text that is longer than its context.
        house.fake.script(|script| script.context = 4000);
        house.fake.welcome();
        house.wait_until_ready().await;
        for known in KNOWN_FIELDS.iter() {
            for on in known.on.iter().filter(|on| base(**on, known.name).is_some()) {
                check(house.http, known, *on).await;
            }
        }
        assert_eq!(refusal_message(house.http, Endpoint::Chat, "unknown_field", &json!([1, 2])).await, None);
        house.close().await;
    });
}

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/fields.md");
const HEAD: &str = "# Fields of a request

Generated from `router/faces/src/http/known/list.rs` and `router/src/front/parameters.rs` (sampling parameters): change
it there, and run the faces' tests with `LOCKSTEP_WRITE=1`. The table lists the fields of the APIs of OpenAI,
Anthropic, vLLM, llama.cpp, Ollama and SGLang, and how the server treats each of them on each endpoint.
The server refuses an unsupported value with a 400 that names the field. It ignores fields that are not in this table,
and fields on endpoints that their row does not name. Null is the same as no field.

| field | known from | endpoints | values |
|---|---|---|---|
";

fn sources(of: &str) -> String {
    let name = |letter| match letter {
        "O" => "OpenAI",
        "A" => "Anthropic",
        "V" => "vLLM",
        "L" => "llama.cpp",
        "M" => "Ollama",
        "S" => "SGLang",
        _ => "Lockstep",
    };
    of.split(' ').map(name).collect::<Vec<_>>().join(", ")
}

fn places(on: &[Endpoint]) -> String {
    let name = |of: &Endpoint| match of {
        Endpoint::Chat => "chat",
        Endpoint::Completions => "completions",
        Endpoint::Responses => "responses",
        Endpoint::Messages => "messages",
        Endpoint::CountTokens => "count_tokens",
        Endpoint::Embeddings => "embeddings",
        Endpoint::Rank => "rank",
        Endpoint::Tokenize => "tokenize",
        Endpoint::Detokenize => "detokenize",
        Endpoint::Infer => "KServe",
    };
    if on.len() == 10 { "all".into() } else { on.iter().map(name).collect::<Vec<_>>().join(", ") }
}

fn values(known: &KnownField) -> String {
    let hint = known.instead.map_or(String::new(), |instead| format!("; use `{instead}`"));
    match known.neutral {
        _ if known.is_done => "supported".into(),
        NeutralValues::None => format!("refused{hint}"),
        NeutralValues::All => "any; no effect on the answer".into(),
        NeutralValues::Empty => format!("only empty{hint}"),
        NeutralValues::These(all) => {
            let quoted: Vec<String> = all.iter().map(|one| format!("`{one}`")).collect();
            format!("only {}{hint}", quoted.join(", "))
        }
    }
}

#[test]
fn the_page_of_fields_is_made_of_the_list() {
    let row = |known: &KnownField| {
        format!("| `{}` | {} | {} | {} |\n", known.name, sources(known.of), places(known.on), values(known))
    };
    let page = HEAD.to_owned() + &KNOWN_FIELDS.iter().map(row).collect::<String>();
    if std::env::var_os("LOCKSTEP_WRITE").is_some() {
        std::fs::write(PAGE, &page).unwrap();
    }
    assert!(std::fs::read_to_string(PAGE).unwrap() == page, "run the faces' tests with LOCKSTEP_WRITE=1");
}
