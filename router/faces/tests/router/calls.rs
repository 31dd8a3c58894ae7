//! Tools, thoughts and structures from a client's request to the replica and back. The replica's tokens spell a text
//! that the test sets.

use crate::client::{Reply, post, post_after};
use crate::fake::Fake;
use crate::grpc::client;
use crate::{House, config, model, run, run_within};
use checkpoint::ChatTemplate;
use proto::v1;
use proto::v1::generate_reply::Event;
use proto::v1::generate_request::Input;
use serde_json::{Value, json};
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const PATIENCE: Duration = Duration::from_secs(120);
const CONTEXT: u32 = 4000;

/// Shows tools by their names, and calls as Hermes' models write them.
const TOOL_TEMPLATE: &str = "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}\
     {% for message in messages %}<|im_start|>{{ message.role }}:{{ message.content }}\
     {% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\
     <|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}";
/// A model that thinks first.
const THINKING_TEMPLATE: &str = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}\
     {% if add_generation_prompt %}<|im_start|>{% if enable_thinking is defined and not enable_thinking %}<think>\n\n\
     </think>\n\n{% else %}<think>\n{% endif %}{% endif %}";

const CALL: &str = "I look.<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Par\u{ed}s\"}}\n\
     </tool_call>\n<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>";
const ARGUMENTS: &str = "{\"city\": \"Par\u{ed}s\"}";

/// Opens a router with a model of this template, and its replica.
async fn open(template: &str, answer: &str) -> House {
    open_with_fake(template, Fake::start(), answer).await
}

async fn open_with_fake(template: &str, fake: Fake, answer: &str) -> House {
    fake.script(|script| script.context = CONTEXT);
    fake.answer(answer);
    fake.welcome();
    let members = vec![fake.coordinator()].into();
    let text = model::text().with_template(ChatTemplate::new(template, None, None).unwrap());
    let text = router::ModelText { trusts_templates: false, ..text };
    let house = House::with_texts(config(), vec![fake], members, text).await;
    house.wait_until_ready().await;
    house
}

fn tool(name: &str) -> Value {
    let parameters = json!({ "type": "object", "properties": { "city": { "type": "string" } } });
    json!({ "type": "function", "function": { "name": name, "parameters": parameters } })
}

fn custom(format: &Value) -> Value {
    json!({ "type": "custom", "custom": { "name": "patch", "description": "Changes a file.", "format": format } })
}

fn request_body(more: Value) -> Value {
    let tools = json!([tool("weather"), tool("clock")]);
    let mut body = json!({ "messages": [{ "role": "user", "content": "Hi" }], "seed": 5, "tools": tools });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn prompt(house: &House, submit: usize) -> String {
    let prompt = house.fake.submits()[submit].prompt.clone();
    String::from_utf8(prompt.iter().map(|id| u8::try_from(*id).unwrap_or(b'|')).collect()).unwrap()
}

fn grammar(house: &House, submit: usize) -> Option<String> {
    house.fake.submits()[submit].constraint.clone().map(|bytes| String::from_utf8(bytes).unwrap())
}

/// Returns a choice's message as a client puts it together from chunks.
fn collect_message(reply: &Reply, index: u64) -> (Value, Value) {
    let (mut content, mut thought, mut calls, mut reason) =
        (String::new(), String::new(), Vec::<Value>::new(), json!(0));
    for chunk in reply.chunks() {
        let choice = &chunk["choices"][0];
        if choice["index"] != index {
            continue;
        }
        let delta = &choice["delta"];
        content.push_str(delta["content"].as_str().unwrap_or_default());
        thought.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            let at = part["index"].as_u64().unwrap() as usize;
            let (kind, text) = if part["custom"].is_object() { ("custom", "input") } else { ("function", "arguments") };
            if at == calls.len() {
                assert!(part["id"].is_string() && part[kind]["name"].is_string() && part["type"] == kind, "{part}");
                calls.push(json!({ "id": part["id"], "type": kind, kind: part[kind] }));
                continue;
            }
            assert!(part["id"].is_null() && part[kind]["name"].is_null(), "sent once: {part}");
            let before = calls[at][kind][text].as_str().unwrap().to_owned();
            calls[at][kind][text] = (before + part[kind][text].as_str().unwrap()).into();
        }
        if !choice["finish_reason"].is_null() {
            reason = choice["finish_reason"].clone();
        }
    }
    let content =
        if content.is_empty() && !(calls.is_empty() && thought.is_empty()) { Value::Null } else { content.into() };
    let mut message = json!({ "role": "assistant", "content": content, "refusal": null, "annotations": [] });
    if !thought.is_empty() {
        message["reasoning_content"] = thought.clone().into();
        message["reasoning"] = thought.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    (message, reason)
}

#[test]
fn a_call_its_result_and_the_next_turn() {
    run(async {
        let house = open(TOOL_TEMPLATE, CALL).await;
        let first = post(house.http, CHAT, &request_body(json!({}))).await.json();
        let choice = &first["choices"][0];
        assert_eq!(
            (&choice["finish_reason"], &choice["message"]["content"]),
            (&json!("tool_calls"), &json!("I look."))
        );
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls[0]["function"], json!({ "name": "weather", "arguments": ARGUMENTS }));
        assert_eq!(calls[1]["function"], json!({ "name": "clock", "arguments": "{}" }));
        assert_eq!((calls[0]["type"].as_str(), calls[0]["id"].as_str().unwrap().len()), (Some("function"), 9));
        assert_ne!(calls[0]["id"], calls[1]["id"]);
        assert!(prompt(&house, 0).starts_with("(weather)(clock)|user:Hi|"), "{}", prompt(&house, 0));
        // The model may call or not: nothing is enforced.
        assert_eq!(grammar(&house, 0), None);
        house.fake.answer("It is warm.");
        let messages = json!([
            { "role": "user", "content": "Hi" },
            choice["message"],
            { "role": "tool", "tool_call_id": calls[0]["id"], "content": [{ "type": "text", "text": "21" }] },
            { "role": "tool", "tool_call_id": calls[1]["id"], "content": "noon" },
        ]);
        let second = post(house.http, CHAT, &request_body(json!({ "messages": messages }))).await.json();
        let choice = &second["choices"][0];
        let expected = json!({ "role": "assistant", "content": "It is warm.", "refusal": null, "annotations": [] });
        assert_eq!((&choice["finish_reason"], &choice["message"]), (&json!("stop"), &expected));
        let shown = prompt(&house, 1);
        let call = "I look.<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Par\u{ed}s\"}}</tool_call>";
        assert!(shown.contains(call) && shown.contains("|tool:21||tool:noon|"), "{shown}");
        house.close().await;
    });
}

#[test]
fn in_chunks_the_message_is_the_same() {
    run(async {
        let house = open(TOOL_TEMPLATE, CALL).await;
        for (answer, n) in [(CALL, 1), (CALL, 2), (&CALL["I look.".len()..], 1), ("no <tool_call> at all", 1)] {
            house.fake.answer(answer);
            for tokens_per_frame in [1, 7, 1000] {
                house.fake.script(|script| script.tokens_per_frame = tokens_per_frame);
                let whole = post(house.http, CHAT, &request_body(json!({ "n": n }))).await.json();
                let chunks = post(house.http, CHAT, &request_body(json!({ "n": n, "stream": true }))).await;
                for index in 0..n {
                    let choice = &whole["choices"][index as usize];
                    let expected = (choice["message"].clone(), choice["finish_reason"].clone());
                    assert_eq!(collect_message(&chunks, index), expected, "{answer} by {tokens_per_frame}");
                }
            }
        }
        // Each choice has ids of its own.
        house.fake.answer(CALL);
        let both = post(house.http, CHAT, &request_body(json!({ "n": 2 }))).await.json();
        let id = |index: usize| both["choices"][index]["message"]["tool_calls"][0]["id"].clone();
        assert_ne!(id(0), id(1));
        house.close().await;
    });
}

#[test]
fn a_call_begins_with_its_name_and_no_arguments() {
    run(async {
        let house = open(TOOL_TEMPLATE, CALL).await;
        let chunks = post(house.http, CHAT, &request_body(json!({ "stream": true }))).await.chunks();
        let deltas = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]);
        let parts: Vec<&Value> =
            deltas.flat_map(|delta| delta["tool_calls"].as_array().into_iter().flatten()).collect();
        assert_eq!(parts[0]["function"], json!({ "name": "weather", "arguments": "" }));
        assert_eq!((&parts[0]["index"], &parts[0]["type"]), (&json!(0), &json!("function")));
        assert!(parts.len() > 10, "arguments come as they are drawn: {parts:?}");
        house.close().await;
    });
}

#[test]
fn a_stream_that_breaks_off_in_a_call_resumes_with_the_same_rest() {
    run_within(PATIENCE, async {
        let fake = Fake::start();
        let first = open_with_fake(TOOL_TEMPLATE, fake.clone(), CALL).await;
        let second = open_with_fake(TOOL_TEMPLATE, fake.clone(), CALL).await;
        for (tokens_per_frame, more) in [(1, json!({})), (5, json!({ "stop": "zzz", "logprobs": true }))] {
            fake.script(|script| script.tokens_per_frame = tokens_per_frame);
            let mut body = request_body(more);
            body["stream"] = true.into();
            let whole = post(first.http, CHAT, &body).await;
            for (cut, (id, _)) in whole.identified().iter().enumerate() {
                let rest = post_after(second.http, CHAT, id, &body).await;
                assert_eq!(rest.events(), whole.events()[cut + 1..], "behind event {cut}");
            }
            let (id, _) = whole.identified()[3].clone();
            // With another setting for the reading, it would be another stream.
            body["parallel_tool_calls"] = false.into();
            assert_eq!(post_after(second.http, CHAT, &id, &body).await.json()["error"]["code"], "resume_other_request");
        }
        first.close().await;
        second.close().await;
    });
}

/// The model calls a function with one argument, whose escapes the client does not see.
#[test]
fn a_custom_call_has_a_text_whole_in_chunks_and_resumed() {
    const INPUT: &str = "a \"b\"\n\u{e9}\u{1f600}";
    const ARGUMENTS: &str = "{\"input\": \"a \\\"b\\\"\\n\\u00e9\\ud83d\\ude00\"}";
    run_within(PATIENCE, async {
        let called = |name: &str, arguments: &str| {
            format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
        };
        let answer = ["I look.", &called("patch", ARGUMENTS), &called("weather", "{}"), &called("patch", ARGUMENTS)];
        let fake = Fake::start();
        let first = open_with_fake(TOOL_TEMPLATE, fake.clone(), &answer.concat()).await;
        let second = open_with_fake(TOOL_TEMPLATE, fake.clone(), &answer.concat()).await;
        let tools = json!([custom(&json!({ "type": "text" })), tool("weather")]);
        let body = |more: Value| {
            let mut body = request_body(more);
            body["tools"] = tools.clone();
            body
        };
        let whole = post(first.http, CHAT, &body(json!({}))).await.json()["choices"][0].clone();
        let calls = whole["message"]["tool_calls"].as_array().unwrap();
        let expected = json!({ "id": calls[0]["id"], "type": "custom", "custom": { "name": "patch", "input": INPUT } });
        assert_eq!((calls.len(), &calls[0], &calls[1]["type"]), (3, &expected, &json!("function")));
        assert_eq!((&calls[2]["custom"], &whole["finish_reason"]), (&expected["custom"], &json!("tool_calls")));
        for tokens_per_frame in [1, 5, 1000] {
            fake.script(|script| script.tokens_per_frame = tokens_per_frame);
            let body = body(json!({ "stream": true }));
            let chunks = post(first.http, CHAT, &body).await;
            assert_eq!(collect_message(&chunks, 0), (whole["message"].clone(), whole["finish_reason"].clone()));
            for (cut, (id, _)) in chunks.identified().iter().enumerate() {
                let rest = post_after(second.http, CHAT, id, &body).await;
                assert_eq!(rest.events(), chunks.events()[cut + 1..], "behind event {cut}");
            }
        }
        let result = json!({ "role": "tool", "tool_call_id": calls[0]["id"], "content": "done" });
        let history = json!([{ "role": "user", "content": "Hi" }, whole["message"], result]);
        let choice = json!({ "type": "custom", "custom": { "name": "patch" } });
        let n_before = fake.submits().len();
        let next = post(first.http, CHAT, &body(json!({ "messages": history, "tool_choice": choice }))).await;
        assert_eq!(next.status, 200, "{next:?}");
        let shown = prompt(&first, n_before);
        assert!(shown.contains("<tool_call>{\"name\": \"patch\", \"arguments\": {\"input\": \"a "), "{shown}");
        assert!(grammar(&first, n_before).is_some_and(|grammar| grammar.contains("input")));
        first.close().await;
        second.close().await;
    });
}

#[test]
fn a_stop_string_ends_a_call_as_it_ends_a_text() {
    run(async {
        let house = open(TOOL_TEMPLATE, CALL).await;
        let reply = post(house.http, CHAT, &request_body(json!({ "stop": "ar\u{ed}" }))).await.json();
        let choice = &reply["choices"][0];
        assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"city\": \"P");
        // The call is not whole.
        assert_eq!(choice["finish_reason"], "stop");
        let cut = post(house.http, CHAT, &request_body(json!({ "max_tokens": 60 }))).await.json();
        assert_eq!(cut["choices"][0]["finish_reason"], "length");
        house.close().await;
    });
}

#[test]
fn what_must_be_called_is_enforced() {
    run(async {
        let house = open(TOOL_TEMPLATE, CALL).await;
        let named = json!({ "type": "function", "function": { "name": "weather" } });
        let strict = |strict: bool| {
            let mut tool = tool("weather");
            tool["function"]["strict"] = strict.into();
            json!([tool])
        };
        for (i, (more, is_enforced)) in [
            (json!({}), false),
            (json!({ "tool_choice": "auto" }), false),
            (json!({ "tool_choice": "none" }), false),
            (json!({ "tool_choice": "required" }), true),
            (json!({ "tool_choice": named }), true),
            (json!({ "tools": strict(false) }), false),
            (json!({ "tools": strict(true) }), true),
        ]
        .into_iter()
        .enumerate()
        {
            let reply = post(house.http, CHAT, &request_body(more.clone())).await;
            assert_eq!(reply.status, 200, "{more}: {reply:?}");
            assert_eq!(grammar(&house, i).is_some(), is_enforced, "{more}");
        }
        // A model that must not call sees no tools, and its output is text.
        assert!(prompt(&house, 2).starts_with("|user:"), "{}", prompt(&house, 2));
        let reply = post(house.http, CHAT, &request_body(json!({ "tool_choice": "none" }))).await.json();
        assert_eq!(reply["choices"][0]["message"]["content"], CALL);
        let one = post(house.http, CHAT, &request_body(json!({ "parallel_tool_calls": false }))).await.json();
        assert_eq!(one["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);
        house.close().await;
    });
}

#[test]
fn functions_are_tools_by_an_older_name() {
    run(async {
        let house = open(TOOL_TEMPLATE, CALL).await;
        let call = json!({ "name": "weather", "arguments": "{}" });
        let body = json!({
            "messages": [
                { "role": "user", "content": "Hi" },
                { "role": "assistant", "content": null, "function_call": call },
                { "role": "function", "name": "weather", "content": "21" },
            ],
            "functions": [tool("weather")["function"]], "function_call": { "name": "weather" },
        });
        let reply = post(house.http, CHAT, &body).await.json();
        let choice = &reply["choices"][0];
        assert_eq!(choice["finish_reason"], "function_call", "{reply}");
        assert_eq!(choice["message"]["function_call"], json!({ "name": "weather", "arguments": ARGUMENTS }));
        let shown = prompt(&house, 0);
        assert!(shown.contains("<tool_call>{\"name\": \"weather\", \"arguments\": {}}</tool_call>"), "{shown}");
        assert!(grammar(&house, 0).is_some());
        house.close().await;
    });
}

#[test]
fn a_template_that_knows_no_tools_gets_them_as_text() {
    run(async {
        let plain = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}";
        let house = open(plain, "{\"name\": \"clock\", \"arguments\": {}}").await;
        let reply = post(house.http, CHAT, &request_body(json!({}))).await.json();
        let choice = &reply["choices"][0];
        assert_eq!(
            choice["message"]["tool_calls"][0]["function"],
            json!({ "name": "clock", "arguments": "{}" }),
            "{reply}"
        );
        let shown = prompt(&house, 0);
        assert!(shown.starts_with("|system:You can call functions."), "{shown}");
        assert!(shown.contains("{\"name\":\"weather\",\"parameters\":"), "{shown}");
        let forced = post(house.http, CHAT, &request_body(json!({ "tool_choice": "required" }))).await;
        assert!(forced.status == 200 && grammar(&house, 1).is_some(), "{forced:?}");
        house.close().await;
    });
}

/// Every name of the field sets the same budget, alone and before a structure. A model of a dialect without thoughts
/// gets a refusal.
#[test]
fn a_thinking_budget_goes_to_the_rank_with_the_texts_that_begin_and_end_thoughts() {
    run(async {
        let house = open(THINKING_TEMPLATE, "so</think>\n\n{\"a\": 1}").await;
        let body = |more: Value| {
            let mut body = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            body
        };
        let head = json!({
            "tokens_max": 7, "is_open": true, "repeats": false, "opens": ["<think>"], "closes": ["</think>"],
        });
        let limited = |n| {
            let text = grammar(&house, n).unwrap();
            let (head, rest) = text.strip_prefix("// thinking ").unwrap().split_once('\n').unwrap();
            (serde_json::from_str::<Value>(head).unwrap(), rest.to_owned())
        };
        let mut n = 0;
        for fields in [
            json!({ "thinking_token_budget": 7 }),
            json!({ "thinking_budget_tokens": 7 }),
            json!({ "thinking_budget": 7 }),
            json!({ "thinking": { "type": "enabled", "budget_tokens": 7 } }),
        ] {
            assert_eq!(post(house.http, CHAT, &body(fields.clone())).await.status, 200, "{fields}");
            assert_eq!(limited(n), (head.clone(), String::new()), "{fields}");
            n += 1;
        }
        let format = json!({ "response_format": { "type": "json_object" } });
        assert_eq!(post(house.http, CHAT, &body(format.clone())).await.status, 200);
        let mut both = body(format);
        both["thinking_token_budget"] = 7.into();
        assert_eq!(post(house.http, CHAT, &both).await.status, 200);
        assert_eq!(limited(n + 1), (head, grammar(&house, n).unwrap()));
        // If the prompt has ended the thought, there is nothing to limit.
        let over = json!({ "thinking_budget": 7, "chat_template_kwargs": { "enable_thinking": false } });
        assert_eq!(post(house.http, CHAT, &body(over)).await.status, 200);
        assert_eq!(grammar(&house, n + 2), None);
        let refused = post(house.http, CHAT, &body(json!({ "thinking_budget": 7, "thinking_token_budget": 8 }))).await;
        assert_eq!(refused.status, 400);
        house.close().await;
        let house = open(TOOL_TEMPLATE, "Hi").await;
        let refused = post(house.http, CHAT, &body(json!({ "thinking_budget": 7 }))).await;
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("thinking_token_budget")));
        // A model that does not think has no degrees of it.
        let effort = post(house.http, CHAT, &body(json!({ "reasoning_effort": "high" }))).await;
        assert_eq!((effort.status, grammar(&house, 0)), (200, None));
        let none = post(house.http, CHAT, &body(json!({ "thinking": { "type": "disabled" } }))).await;
        assert_eq!((none.status, grammar(&house, 1)), (200, None));
        house.close().await;
    });
}

#[test]
fn thoughts_are_separate_from_the_answer() {
    run(async {
        let house = open(THINKING_TEMPLATE, "so, \u{e9}h\n</think>\n\n{\"a\": 1}").await;
        let body = |more: Value| {
            let mut body = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            body
        };
        let reply = post(house.http, CHAT, &body(json!({}))).await.json();
        let message = &reply["choices"][0]["message"];
        assert_eq!((&message["content"], &message["reasoning_content"]), (&json!("{\"a\": 1}"), &json!("so, \u{e9}h")));
        assert_eq!(message["reasoning"], message["reasoning_content"]);
        // The thought's tokens are those of its text, two of which are one letter's.
        assert_eq!(reply["usage"]["completion_tokens_details"]["reasoning_tokens"], 7);
        let chunks = post(house.http, CHAT, &body(json!({ "stream": true }))).await;
        assert_eq!(collect_message(&chunks, 0).0, *message);
        let hidden = post(house.http, CHAT, &body(json!({ "include_reasoning": false }))).await.json();
        let expected = json!({ "role": "assistant", "content": "{\"a\": 1}", "refusal": null, "annotations": [] });
        assert_eq!(hidden["choices"][0]["message"], expected);
        // The logprobs of the thought's tokens are not sent either.
        let logprobs_request = body(json!({ "include_reasoning": false, "logprobs": true, "top_logprobs": 1 }));
        let mut streamed = logprobs_request.clone();
        streamed["stream"] = true.into();
        let tokens = |choice: &Value| {
            let content = choice["logprobs"]["content"].as_array().cloned().unwrap_or_default();
            content.iter().map(|entry| entry["token"].as_str().unwrap().to_owned()).collect::<String>()
        };
        let whole = tokens(&post(house.http, CHAT, &logprobs_request).await.json()["choices"][0]);
        let chunks = post(house.http, CHAT, &streamed).await.chunks();
        let in_parts: String = chunks.iter().map(|chunk| tokens(&chunk["choices"][0])).collect();
        // Nor are those of the closing token. Tokens after it may belong to the answer.
        assert_eq!(whole, "\n\n{\"a\": 1}<|im_end|>");
        assert_eq!(in_parts, whole);
        // A structure begins behind the thought.
        let format = json!({ "response_format": { "type": "json_object" } });
        assert_eq!(post(house.http, CHAT, &body(format.clone())).await.status, 200);
        let behind = grammar(&house, 5).unwrap();
        // Without a thought the structure covers all of the answer, and so does the text.
        house.fake.answer("{\"a\": 1}");
        let mut still = body(format);
        still["chat_template_kwargs"] = json!({ "enable_thinking": false });
        let reply = post(house.http, CHAT, &still).await.json();
        assert_eq!(reply["choices"][0]["message"]["content"], "{\"a\": 1}", "{reply}");
        assert_ne!(grammar(&house, 6).unwrap(), behind);
        let mut still = body(json!({ "reasoning_effort": "none" }));
        assert_eq!(post(house.http, CHAT, &still).await.status, 200);
        assert!(prompt(&house, 7).ends_with("</think>\n\n"));
        still["reasoning_effort"] = "high".into();
        assert_eq!(post(house.http, CHAT, &still).await.status, 200);
        assert!(prompt(&house, 8).ends_with("<think>\n"), "its template has a switch, but no levels");
        still["chat_template_kwargs"] = json!({ "enable_thinking": false });
        assert_eq!(post(house.http, CHAT, &still).await.status, 200);
        assert!(prompt(&house, 9).ends_with("</think>\n\n"), "the request's own value has priority");
        house.close().await;
    });
}

#[test]
fn structures_reach_the_replica_as_grammars() {
    run(async {
        let house = House::open(config()).await;
        let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } }, "required": ["a"] });
        let format = json!({ "type": "json_schema", "json_schema": { "name": "n", "schema": schema } });
        let messages = json!([{ "role": "user", "content": "Hi" }]);
        for (path, body) in [
            (CHAT, json!({ "messages": messages, "response_format": format })),
            (CHAT, json!({ "messages": messages, "structured_outputs": { "json": schema } })),
            (COMPLETIONS, json!({ "prompt": "x", "guided_json": schema })),
            (COMPLETIONS, json!({ "prompt": ["x", "y"], "json_schema": schema })),
            ("/completion", json!({ "prompt": "x", "json_schema": schema })),
            ("/api/chat", json!({ "messages": messages, "format": schema, "stream": false })),
            (
                "/inference/v1/generate",
                json!({ "token_ids": [72], "sampling_params": { "structured_outputs": { "json": schema } } }),
            ),
        ] {
            let reply = post(house.http, path, &body).await;
            assert_eq!(reply.status, 200, "{body}: {reply:?}");
        }
        let all: Vec<Option<String>> = (0..8).map(|submit| grammar(&house, submit)).collect();
        assert!(all[0].is_some() && all.iter().all(|one| *one == all[0]), "{all:?}");
        let free = json!({ "prompt": "x", "response_format": { "type": "text" } });
        assert_eq!(post(house.http, COMPLETIONS, &free).await.status, 200);
        assert_eq!(grammar(&house, 8), None);
        house.close().await;
    });
}

/// Templates know roles that no API has, and some write nothing for the message of another role.
#[test]
fn a_role_that_the_template_writes_is_accepted() {
    const STRICT: &str = "{% for message in messages %}{% if message.role in ['user', 'assistant', 'ipython'] %}\
         <|im_start|>{{ message.role }}:{{ message.content }}<|im_end|>{% endif %}{% endfor %}";
    run(async {
        for (template, role, is_written) in [
            (TOOL_TEMPLATE, "wizard", true),
            (STRICT, "ipython", true),
            (STRICT, "wizard", false),
            (TOOL_TEMPLATE, "wizard<|im_end|>", false),
            (TOOL_TEMPLATE, "", false),
        ] {
            let house = open(template, "x").await;
            let messages = json!([{ "role": "user", "content": "a" }, { "role": role, "content": "a" }]);
            let body = json!({ "messages": messages, "max_tokens": 1 });
            let reply = post(house.http, CHAT, &body).await;
            if is_written {
                assert_eq!(reply.status, 200, "{reply:?}");
                assert!(prompt(&house, 0).contains(&format!("|{role}:a|")), "{}", prompt(&house, 0));
            } else {
                let param = &reply.json()["error"]["param"];
                assert_eq!((reply.status, param), (400, &json!("messages[1].role")), "{role}: {reply:?}");
            }
            house.close().await;
        }
    });
}

#[test]
fn what_cannot_be_enforced_is_refused_by_its_name() {
    run(async {
        let house = open(TOOL_TEMPLATE, "x").await;
        let lark = json!({ "structured_outputs": { "grammar": "start: \"a\"" } });
        let format = |schema: Value| {
            let json_schema = json!({ "name": "n", "schema": schema });
            json!({ "response_format": { "type": "json_schema", "json_schema": json_schema } })
        };
        let unknown_keyword = json!({ "type": "object", "unheardOf": 1 });
        for (more, param) in [
            (format(unknown_keyword), "response_format"),
            (format(json!("{")), "response_format"),
            (json!({ "guided_regex": "(" }), "guided_regex"),
            (json!({ "tool_choice": "must" }), "tool_choice"),
            (json!({ "tool_choice": { "type": "function", "function": { "name": "g" } } }), "tool_choice"),
            (json!({ "tools": [], "tool_choice": "required" }), "tool_choice"),
            (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
            (json!({ "tools": [{ "type": "custom" }] }), "tools[0].custom"),
            (json!({ "tools": [{ "type": "custom", "custom": {} }] }), "tools[0].custom.name"),
            (
                json!({ "tools": [custom(&json!({ "type": "grammar", "grammar": { "syntax": "lark" } }))] }),
                "tools[0].custom.format.grammar.syntax",
            ),
            (json!({ "tool_choice": { "type": "custom", "custom": { "name": "patch" } } }), "tool_choice"),
            (json!({ "tools": [{ "type": "function", "function": {} }] }), "tools[0].function.name"),
            (json!({ "chat_template": "x" }), "chat_template"),
            (json!({ "chat_template_kwargs": { "messages": 1 } }), "chat_template_kwargs"),
            // Beside tools, which the answer may call, a form is needed that can stand beside them.
            (lark, "structured_outputs"),
        ] {
            let reply = post(house.http, CHAT, &request_body(more.clone())).await;
            assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)), "{more}: {reply:?}");
        }
        assert_eq!(house.fake.seen(), []);
        house.close().await;
    });
}

#[test]
fn tool_without_strict_accepts_unenforceable_schema() {
    run(async {
        let house = open(TOOL_TEMPLATE, CALL).await;
        let city = json!({ "type": "string", "nullable": true, "pattern": "^(?!x)", "format": "password" });
        let with = |strict: bool, city: &Value| {
            let parameters = json!({ "type": "object", "properties": { "city": city, "n": { "multipleOf": 7 } } });
            let function = json!({ "name": "weather", "parameters": parameters, "strict": strict });
            json!([tool("clock"), { "type": "function", "function": function }])
        };
        let named = json!({ "type": "function", "function": { "name": "weather" } });
        for choice in [json!("required"), named, json!("auto")] {
            let body = request_body(json!({ "tools": with(false, &city), "tool_choice": choice }));
            let reply = post(house.http, CHAT, &body).await;
            assert_eq!(reply.status, 200, "{choice}: {reply:?}");
        }
        let wrong = json!({ "type": "words" });
        let named = |tools: &Value, format: fn(&Value, &Value) -> Value| {
            tools.as_array().unwrap().iter().map(|tool| format(&tool["function"], tool)).collect::<Vec<Value>>()
        };
        let flat = |function: &Value, _: &Value| {
            let mut function = function.clone();
            function["type"] = json!("function");
            function
        };
        let anthropic =
            |function: &Value, _: &Value| json!({ "name": function["name"], "input_schema": function["parameters"] });
        let ours = |_: &Value, tool: &Value| tool.clone();
        let messages = json!([{ "role": "user", "content": "Hi" }]);
        let tools = with(false, &wrong);
        for (page, body, field) in [
            (
                CHAT,
                json!({ "messages": messages, "tools": named(&tools, ours), "tool_choice": "required" }),
                "function.parameters",
            ),
            (
                "/v1/responses",
                json!({ "input": "Hi", "tools": named(&tools, flat), "tool_choice": "required" }),
                "parameters",
            ),
            (
                "/v1/messages",
                json!({ "max_tokens": 9, "messages": messages, "tools": named(&tools, anthropic),
                    "tool_choice": { "type": "any" } }),
                "input_schema",
            ),
            (CHAT, request_body(json!({ "tools": with(true, &city) })), "function.parameters"),
        ] {
            let reply = post(house.http, page, &body).await;
            let message = reply.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
            assert_eq!(reply.status, 400, "{page}: {reply:?}");
            assert!(message.starts_with(&format!("tools[1].{field}: /properties/city/")), "{page}: {message}");
        }
        house.close().await;
    });
}

#[test]
fn over_grpc_calls_come_in_parts_too() {
    run_within(PATIENCE, async {
        let house = open(TOOL_TEMPLATE, CALL).await;
        let message = v1::ChatMessage { role: "user".into(), content: "Hi".into(), ..Default::default() };
        let chat = v1::Chat { messages: vec![message], tools: vec![tool("weather").to_string()], ..Default::default() };
        let sampling = v1::Sampling { seed: Some(5), ..Default::default() };
        let request = v1::GenerateRequest {
            input: Some(Input::Chat(chat)),
            sampling: Some(sampling),
            ..v1::GenerateRequest::default()
        };
        let mut replies = client(&house).generate(request).await.unwrap().into_inner();
        let (mut text, mut parts, mut finished) = (String::new(), Vec::new(), v1::Finished::default());
        while let Some(reply) = replies.message().await.unwrap() {
            match reply.event.unwrap() {
                Event::Delta(delta) => {
                    text.push_str(&delta.text);
                    parts.extend(delta.tool_calls);
                }
                Event::Finished(end) => finished = end,
                Event::Started(_) | Event::PromptLogprobs(_) | Event::PromptProgress(_) => {}
            }
        }
        assert_eq!((text.as_str(), parts[0].name.as_str(), parts[0].id.len()), ("I look.", "weather", 9));
        let of_first = parts.iter().filter(|part| part.index == 0);
        assert_eq!(of_first.map(|part| part.arguments.as_str()).collect::<String>(), ARGUMENTS);
        assert_eq!((finished.reason(), finished.tool_calls), (v1::finished::Reason::Stop, 2));
        house.close().await;
    });
}

#[test]
fn ollama_show_lists_model_capabilities() {
    run(async {
        for (template, expected) in
            [(TOOL_TEMPLATE, ["completion", "tools"]), (THINKING_TEMPLATE, ["completion", "thinking"])]
        {
            let house = open(template, "x").await;
            let shown = post(house.http, "/api/show", &json!({ "model": "toy" })).await.json();
            assert_eq!(shown["capabilities"], json!(expected), "{template}");
            house.close().await;
        }
    });
}
