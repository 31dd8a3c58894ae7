//! `/v1/responses` with tools, thoughts and structures: items and events, with the same content as a chat's.

use crate::client::{Reply, get, post, post_after, post_with_key, send};
use crate::fake::Fake;
use crate::{House, config, model, run, run_within};
use checkpoint::ChatTemplate;
use router::ApiKeys;
use serde_json::{Value, json};
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const PATIENCE: Duration = Duration::from_secs(120);
const CONTEXT: u32 = 4000;

/// Shows tools as they stand, thinks first, and calls as Hermes' models write it.
const TEMPLATE: &str = "{% for tool in tools or [] %}({{ tool | tojson }}){% endfor %}\
     {% for message in messages %}<|im_start|>{{ message.role }}:{% if message.reasoning_content %}<think>\
     {{ message.reasoning_content }}</think>{% endif %}{{ message.content }}\
     {% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\
     <|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}{{ reasoning_effort or '' }}\
     {{ mood or '' }}";

const THOUGHT: &str = "<think>\nso, \u{e9}h\n</think>\n\n";
const CALLS: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Par\u{ed}s\"}}\n\
     </tool_call>\n<tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>";

async fn open(answer: &str) -> House {
    open_with_fake(Fake::start(), answer).await
}

async fn open_with_fake(fake: Fake, answer: &str) -> House {
    fake.script(|script| script.context = CONTEXT);
    fake.answer(answer);
    fake.welcome();
    let members = vec![fake.coordinator()].into();
    let text = model::text().with_template(ChatTemplate::new(TEMPLATE, None, None).unwrap());
    let house = House::with_texts(config(), vec![fake], members, text).await;
    house.wait_until_ready().await;
    house
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn function(name: &str) -> Value {
    let parameters = json!({ "type": "object", "properties": { "city": { "type": "string" } } });
    json!({ "name": name, "description": "What it does.", "parameters": parameters })
}

/// As chat has it.
fn nested(name: &str) -> Value {
    json!({ "type": "function", "function": function(name) })
}

fn flat(name: &str) -> Value {
    with(json!({ "type": "function" }), function(name))
}

fn custom(format: Value) -> Value {
    json!({ "type": "custom", "name": "patch", "description": "Changes a file.", "format": format })
}

fn request_body(more: Value) -> Value {
    let tools = json!([flat("weather"), flat("clock")]);
    with(json!({ "model": "toy", "input": "Hi", "seed": 5, "tools": tools }), more)
}

fn chat_request_body(more: Value) -> Value {
    let tools = json!([nested("weather"), nested("clock")]);
    with(json!({ "messages": [{ "role": "user", "content": "Hi" }], "seed": 5, "tools": tools }), more)
}

fn prompts(house: &House) -> Vec<Vec<u32>> {
    house.fake.submits().iter().map(|submit| submit.prompt.clone()).collect()
}

fn grammars(house: &House) -> Vec<Option<Vec<u8>>> {
    house.fake.submits().iter().map(|submit| submit.constraint.clone()).collect()
}

fn events(reply: &Reply) -> Vec<Value> {
    let data: Vec<Value> = reply.events().iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let names = reply.body.lines().filter_map(|line| line.strip_prefix("event: "));
    assert!(names.eq(data.iter().map(|data| data["type"].as_str().unwrap())), "{}", reply.body);
    assert!(data.iter().enumerate().all(|(i, event)| event["sequence_number"] == i), "{}", reply.body);
    data
}

/// Returns the output as a client puts it together from events, each of which must fit those before it.
fn collect_output(events: &[Value]) -> Value {
    let mut items: Vec<Value> = Vec::new();
    for event in events {
        let kind = event["type"].as_str().unwrap().strip_prefix("response.").unwrap();
        if kind == "output_item.added" {
            assert_eq!(event["output_index"], items.len(), "{event}");
            assert!(items.last().is_none_or(|item| item["status"] != "in_progress"), "{event}");
            items.push(event["item"].clone());
            continue;
        }
        let Some(index) = event["output_index"].as_u64() else { continue };
        assert_eq!(index as usize + 1, items.len(), "{event}");
        let item = items.last_mut().unwrap();
        assert_eq!(item["status"], "in_progress", "{event}");
        if kind == "output_item.done" {
            let (text, parts) = (item["arguments"].clone(), [item["content"].clone(), item["summary"].clone()]);
            let input = item["input"].clone();
            *item = event["item"].clone();
            assert_eq!((&item["arguments"], [&item["content"], &item["summary"]]), (&text, [&parts[0], &parts[1]]));
            assert_eq!(item["input"], input);
            continue;
        }
        assert_eq!(event["item_id"], item["id"], "{event}");
        let place = if kind.starts_with("reasoning_summary") { "summary" } else { "content" };
        match kind.split_once('.').unwrap() {
            ("content_part" | "reasoning_summary_part", "added") => {
                assert_eq!((event["part"]["text"].as_str(), &item[place]), (Some(""), &json!([])));
                item[place] = json!([event["part"]]);
            }
            ("content_part" | "reasoning_summary_part", "done") => assert_eq!(event["part"], item[place][0]),
            ("function_call_arguments", "delta") => grow(&mut item["arguments"], &event["delta"]),
            ("function_call_arguments", "done") => {
                assert_eq!((&event["arguments"], &event["name"]), (&item["arguments"], &item["name"]));
            }
            ("custom_tool_call_input", "delta") => grow(&mut item["input"], &event["delta"]),
            ("custom_tool_call_input", "done") => assert_eq!(event["input"], item["input"]),
            (_, "delta") => grow(&mut item[place][0]["text"], &event["delta"]),
            (_, "done") => assert_eq!(event["text"], item[place][0]["text"]),
            other => panic!("{other:?}"),
        }
    }
    items.into()
}

fn grow(text: &mut Value, delta: &Value) {
    assert!(!delta.as_str().unwrap().is_empty());
    *text = (text.as_str().unwrap().to_owned() + delta.as_str().unwrap()).into();
}

/// Removes the fields that differ between requests: the id, and the time of the end.
fn plain(reply: &Value) -> Value {
    let id = reply["id"].as_str().unwrap().strip_prefix("resp_").unwrap();
    let mut reply: Value = serde_json::from_str(&reply.to_string().replace(id, "ID")).unwrap();
    for name in ["created_at", "completed_at"] {
        assert!(reply[name].is_u64() || name == "completed_at" && reply["status"] != "completed", "{reply}");
        reply[name] = Value::Null;
    }
    reply
}

/// Returns an answer's parts, as a chat has them.
fn response_parts(output: &Value) -> Value {
    let items = output.as_array().unwrap();
    let text = |kind: &str| -> String {
        let of_kind = items.iter().filter(|item| item["type"] == kind);
        of_kind.map(|item| item["content"][0]["text"].as_str().unwrap()).collect()
    };
    let calls = items.iter().filter(|item| item["type"] == "function_call");
    let call = |item: &Value| json!([item["call_id"], item["name"], item["arguments"]]);
    json!({ "reasoning": text("reasoning"), "content": text("message"), "calls": calls.map(call).collect::<Vec<_>>() })
}

fn chat_parts(reply: &Value) -> Value {
    let message = &reply["choices"][0]["message"];
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    let call = |call: &Value| json!([call["id"], call["function"]["name"], call["function"]["arguments"]]);
    json!({
        "reasoning": message["reasoning_content"].as_str().unwrap_or_default(),
        "content": message["content"].as_str().unwrap_or_default(),
        "calls": calls.map(call).collect::<Vec<_>>(),
    })
}

#[test]
fn response_has_same_content_and_calls_as_chat() {
    run_within(PATIENCE, async {
        let house = open("").await;
        for answer in [
            CALLS.to_owned(),
            format!("I look.{CALLS}"),
            format!("{THOUGHT}I look.{CALLS}"),
            format!("{THOUGHT}{CALLS}and now{CALLS}"),
            format!("{THOUGHT}no call"),
            CALLS[..60].to_owned(),
            String::new(),
        ] {
            house.fake.answer(&answer);
            let mut all = Vec::new();
            for tokens_per_frame in [1, 2, 7, 1000] {
                house.fake.script(|script| script.tokens_per_frame = tokens_per_frame);
                let expected = chat_parts(&post(house.http, CHAT, &chat_request_body(json!({}))).await.json());
                let whole = post(house.http, RESPONSES, &request_body(json!({}))).await.json();
                assert_eq!(response_parts(&whole["output"]), expected, "{answer} by {tokens_per_frame}");
                let events = events(&post(house.http, RESPONSES, &request_body(json!({ "stream": true }))).await);
                let last = &events.last().unwrap()["response"];
                assert_eq!(collect_output(&events), last["output"], "{answer} by {tokens_per_frame}");
                all.extend([plain(&whole), plain(last)]);
            }
            // The same object, however many tokens come at once, whole and in events.
            assert!(all.iter().all(|one| *one == all[0]), "{answer}: {all:#?}");
        }
        let prompts = prompts(&house);
        assert!(prompts.iter().all(|prompt| *prompt == prompts[0]));
        house.close().await;
    });
}

#[test]
fn truncated_answer_is_same_whole_and_streamed() {
    run_within(PATIENCE, async {
        let answer = format!("{THOUGHT}I.{CALLS}");
        let house = open(&answer).await;
        house.fake.script(|script| script.tokens_per_frame = 5);
        for n in 1..=answer.len() {
            let more = json!({ "max_tokens": n });
            let expected = chat_parts(&post(house.http, CHAT, &chat_request_body(more)).await.json());
            let whole = post(house.http, RESPONSES, &request_body(json!({ "max_output_tokens": n }))).await.json();
            assert_eq!(
                response_parts(&whole["output"]),
                expected,
                "{:?}",
                &answer.as_bytes()[..n].utf8_chunks().count()
            );
            let body = request_body(json!({ "max_output_tokens": n, "stream": true }));
            let events = events(&post(house.http, RESPONSES, &body).await);
            let last = &events.last().unwrap()["response"];
            assert_eq!((collect_output(&events), plain(last)), (last["output"].clone(), plain(&whole)), "{n}");
            // Nothing of a call that was cut off before its name is lost: it is text.
            let cut = String::from_utf8_lossy(&answer.as_bytes()[..n]).into_owned();
            let opened = cut.rfind("<tool_call>").filter(|at| !cut[*at..].contains("</tool_call>"));
            if let Some(at) = opened.filter(|at| cut[*at..].len() < "<tool_call>\n{\"name\": \"".len()) {
                assert!(expected["content"].as_str().unwrap().ends_with(&cut[at..]), "{n}: {expected}");
            }
        }
        house.close().await;
    });
}

#[test]
fn items_stand_in_the_order_in_which_they_were_written() {
    run(async {
        let house = open(&format!("{THOUGHT}I look.{CALLS}and so")).await;
        let reply = post(house.http, RESPONSES, &request_body(json!({}))).await.json();
        let items = reply["output"].as_array().unwrap();
        let kinds: Vec<&str> = items.iter().map(|item| item["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call", "message"]);
        assert!(items.iter().all(|item| item["status"] == "completed"), "{reply}");
        assert_eq!((&items[4]["content"][0]["text"], &reply["status"]), (&json!("and so"), &json!("completed")));
        let ids: std::collections::BTreeSet<&str> = items.iter().map(|item| item["id"].as_str().unwrap()).collect();
        assert_eq!(ids.len(), 5);
        // A byte is a token, the marks and newlines of the thought are some too.
        let n_thought = reply["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
        assert_eq!(n_thought as usize, THOUGHT.len());
        let cut = post(house.http, RESPONSES, &request_body(json!({ "max_output_tokens": 80 }))).await.json();
        assert_eq!((&cut["status"], &cut["output"][2]["status"]), (&json!("incomplete"), &json!("incomplete")));
        assert_eq!(cut["output"][1]["status"], "completed");
        house.close().await;
    });
}

#[test]
fn a_result_goes_back_as_it_does_in_a_chat() {
    run(async {
        let house = open(&format!("{THOUGHT}I look.{CALLS}")).await;
        let first = post(house.http, RESPONSES, &request_body(json!({ "instructions": "Be good." }))).await.json();
        let output = first["output"].as_array().unwrap().clone();
        let call_id = |i: usize| output[i]["call_id"].clone();
        let result =
            |i: usize, text: Value| json!({ "type": "function_call_output", "call_id": call_id(i), "output": text });
        let mut input = vec![json!({ "role": "user", "content": "Hi" })];
        input.extend(output.clone());
        input.push(result(2, json!("21")));
        input.push(result(3, json!([{ "type": "input_text", "text": "noon" }])));
        house.fake.answer("It is warm.");
        let second = request_body(json!({ "instructions": "Be good.", "input": input }));
        let second = post(house.http, RESPONSES, &second).await.json();
        assert_eq!(second["output"][0]["content"][0]["text"], "It is warm.");
        let chat_answer = chat_parts(&post(house.http, CHAT, &chat_request_body(json!({}))).await.json());
        assert_eq!(chat_answer["content"], "It is warm.");
        let call = |i: usize| {
            let function = json!({ "name": output[i]["name"], "arguments": output[i]["arguments"] });
            json!({ "id": output[i]["call_id"], "type": "function", "function": function })
        };
        let messages = json!([
            { "role": "developer", "content": "Be good." },
            { "role": "user", "content": "Hi" },
            { "role": "assistant", "content": "I look.", "reasoning_content": "so, \u{e9}h",
                "tool_calls": [call(2), call(3)] },
            { "role": "tool", "tool_call_id": output[2]["call_id"], "content": "21" },
            { "role": "tool", "tool_call_id": output[3]["call_id"], "content": "noon" },
        ]);
        post(house.http, CHAT, &chat_request_body(json!({ "messages": messages }))).await;
        let prompts = prompts(&house);
        assert_eq!(prompts[1], prompts[3]);
        house.close().await;
    });
}

#[test]
fn thoughts_are_returned_as_text_or_as_summary() {
    run(async {
        let house = open(&format!("{THOUGHT}yes")).await;
        let check = async |reasoning: Value, kind: &str| {
            let body = request_body(json!({ "reasoning": reasoning, "stream": true }));
            let events = events(&post(house.http, RESPONSES, &body).await);
            let last = &events.last().unwrap()["response"];
            let item = &last["output"][0];
            assert_eq!(collect_output(&events), last["output"]);
            let deltas = events.iter().filter(|event| event["type"] == format!("response.{kind}.delta")).count();
            assert!(deltas > 3, "{events:#?}");
            for name in ["effort", "summary"] {
                assert_eq!(last["reasoning"][name], reasoning[name]);
            }
            (item["content"].clone(), item["summary"].clone())
        };
        let text = json!([{ "type": "reasoning_text", "text": "so, \u{e9}h" }]);
        assert_eq!(check(json!({ "effort": "low" }), "reasoning_text").await, (text, json!([])));
        let text = json!([{ "type": "summary_text", "text": "so, \u{e9}h" }]);
        assert_eq!(check(json!({ "summary": "auto" }), "reasoning_summary_text").await, (json!([]), text));
        assert!(
            String::from_utf8_lossy(&prompts(&house)[0].iter().map(|id| *id as u8).collect::<Vec<_>>())
                .ends_with("low")
        );
        // The only model need not be named.
        let moody = json!({ "input": "Hi", "chat_template_kwargs": { "mood": "calm" } });
        let reply = post(house.http, RESPONSES, &moody).await;
        assert_eq!((reply.status, &reply.json()["model"]), (200, &json!("toy")));
        let last_prompt: String = prompts(&house).last().unwrap().iter().map(|id| char::from(*id as u8)).collect();
        assert!(last_prompt.ends_with("calm"), "{last_prompt}");
        house.close().await;
    });
}

#[test]
fn what_is_enforced_is_what_the_chat_enforces() {
    run(async {
        let house = open(CALLS).await;
        let strict = |mut tool: Value, is_nested: bool| {
            let of = if is_nested { &mut tool["function"] } else { &mut tool };
            of["strict"] = true.into();
            json!([tool])
        };
        let schema = json!({ "type": "object", "properties": { "a": { "type": "integer" } }, "required": ["a"] });
        let named = |of: Value| json!({ "tool_choice": of });
        let function = json!({ "name": "clock" });
        let of_text = |format: Value| json!({ "tools": [], "text": { "format": format } });
        let of_chat = |format: Value| json!({ "tools": [], "response_format": format });
        let json_schema = json!({ "name": "n", "schema": schema, "strict": true });
        let pairs = [
            (json!({}), json!({})),
            (json!({ "tool_choice": "required" }), json!({ "tool_choice": "required" })),
            (json!({ "tool_choice": "none" }), json!({ "tool_choice": "none" })),
            (
                json!({ "tool_choice": "required", "parallel_tool_calls": false }),
                json!({ "tool_choice": "required", "parallel_tool_calls": false }),
            ),
            (
                named(json!({ "type": "function", "name": "clock" })),
                named(json!({ "type": "function", "function": function })),
            ),
            (
                named(json!({ "type": "allowed_tools", "mode": "required",
                    "tools": [{ "type": "function", "name": "clock" }] })),
                json!({ "tools": [nested("clock")], "tool_choice": "required" }),
            ),
            (json!({ "tools": strict(flat("weather"), false) }), json!({ "tools": strict(nested("weather"), true) })),
            (of_text(json!({ "type": "json_object" })), of_chat(json!({ "type": "json_object" }))),
            (
                of_text(json!({ "type": "json_schema", "name": "n", "schema": schema, "strict": true })),
                of_chat(json!({ "type": "json_schema", "json_schema": json_schema })),
            ),
        ];
        for (i, (of_response, of_chat)) in pairs.iter().enumerate() {
            let reply = post(house.http, RESPONSES, &request_body(of_response.clone())).await;
            assert_eq!(reply.status, 200, "{of_response}: {reply:?}");
            assert_eq!(post(house.http, CHAT, &chat_request_body(of_chat.clone())).await.status, 200);
            let (grammars, prompts) = (grammars(&house), prompts(&house));
            assert_eq!(grammars[2 * i], grammars[2 * i + 1], "{of_response}");
            assert_eq!(prompts[2 * i], prompts[2 * i + 1], "{of_response}");
            let is_free = matches!(i, 0 | 2);
            assert_eq!(grammars[2 * i].is_none(), is_free, "{of_response}");
            let shown = reply.json();
            for (name, value) in of_response.as_object().unwrap().iter().filter(|(name, _)| *name == "tool_choice") {
                assert_eq!(&shown[name], value);
            }
        }
        house.close().await;
    });
}

#[test]
fn response_repeats_the_request_fields() {
    run(async {
        let house = open("yes").await;
        let schema = json!({ "type": "object" });
        let format = json!({ "type": "json_schema", "name": "n", "schema": schema });
        let more = json!({
            "metadata": { "a": "b" }, "user": "me", "safety_identifier": "s", "prompt_cache_key": "k",
            "max_tool_calls": 3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "top_p": 0.5,
            "text": { "format": format },
            "parallel_tool_calls": false, "service_tier": "auto", "truncation": "disabled", "include": [],
        });
        let reply = post(house.http, RESPONSES, &request_body(more)).await.json();
        let tool = with(flat("weather"), json!({ "strict": false }));
        let shown = json!({
            "metadata": { "a": "b" }, "user": "me", "safety_identifier": "s", "prompt_cache_key": "k",
            "max_tool_calls": 3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "top_p": 0.5,
            "parallel_tool_calls": false, "service_tier": "default", "truncation": "disabled", "top_logprobs": 0,
            "background": false, "error": null, "incomplete_details": null, "previous_response_id": null,
            "max_output_tokens": null, "instructions": null, "tool_choice": "auto",
            "reasoning": { "effort": null, "summary": null },
            "text": { "format": with(format, json!({ "description": null, "strict": false })), "verbosity": "medium" },
        });
        shown.as_object().unwrap().iter().for_each(|(name, value)| assert_eq!(&reply[name], value, "{name}"));
        assert_eq!(reply["tools"][0], tool);
        house.close().await;
    });
}

#[test]
fn what_cannot_be_done_is_refused_by_its_name() {
    run(async {
        let house = open("x").await;
        let tool = |more: Value| json!({ "tools": [with(flat("weather"), more)] });
        let allowed =
            |names: Value| json!({ "tool_choice": { "type": "allowed_tools", "mode": "auto", "tools": names } });
        let format = |of: Value| json!({ "tools": [], "text": { "format": of } });
        for (more, param) in [
            (json!({ "model": 5 }), "model"),
            (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
            (json!({ "tools": [flat("weather"), { "type": "local_shell" }] }), "tools[1].type"),
            (json!({ "tools": [{ "type": "custom" }] }), "tools[0].name"),
            (json!({ "tools": [custom(json!({ "type": "grammar", "syntax": "lark" }))] }), "tools[0].format.syntax"),
            (json!({ "tools": [nested("weather")] }), "tools[0].name"),
            (json!({ "tools": [flat("a"), flat("a")] }), "tools[1].name"),
            (tool(json!({ "parameters": [] })), "tools[0].parameters"),
            (tool(json!({ "strict": "yes" })), "tools[0].strict"),
            (with(tool(json!({ "strict": true, "parameters": { "unheardOf": 1 } })), json!({})), "tools[0].parameters"),
            (json!({ "tool_choice": "must" }), "tool_choice"),
            (json!({ "tool_choice": { "type": "web_search" } }), "tool_choice"),
            (json!({ "tool_choice": { "type": "function", "name": "unknown" } }), "tool_choice"),
            (json!({ "tools": [], "tool_choice": "required" }), "tool_choice"),
            (allowed(json!([{ "type": "function", "name": "unknown" }])), "tool_choice.tools"),
            (allowed(json!([{ "type": "web_search" }])), "tool_choice.tools"),
            (format(json!({ "type": "grammar" })), "text.format.type"),
            (format(json!({ "type": "json_schema", "name": "n" })), "text.format.schema"),
            (format(json!({ "type": "json_schema", "name": "n", "schema": { "unheardOf": 1 } })), "text.format"),
            (json!({ "text": { "verbosity": "loud" } }), "text.verbosity"),
            (json!({ "reasoning": { "summary": "concise" } }), "reasoning.summary"),
            (json!({ "include": ["message.thoughts"] }), "include[0]"),
            (json!({ "input": [{ "type": "item_reference" }] }), "input[0].id"),
            (json!({ "background": true, "store": false }), "background"),
        ] {
            let reply = post(house.http, RESPONSES, &request_body(more.clone())).await;
            assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(param)), "{more}: {reply:?}");
        }
        assert_eq!(house.fake.seen(), []);
        house.close().await;
    });
}

/// The model calls a function with one argument, whose escapes the client does not see.
#[test]
fn a_custom_call_has_a_text() {
    run(async {
        let written = "{\"input\": \"a \\\"b\\\"\\n\\u00e9\\ud83d\\ude00\"}";
        let call = format!("<tool_call>\n{{\"name\": \"patch\", \"arguments\": {written}}}\n</tool_call>");
        let house = open(&format!("{THOUGHT}{call}")).await;
        let tools = json!([custom(json!({ "type": "text" })), flat("weather")]);
        let body = |more| with(request_body(json!({ "tools": tools })), more);
        let whole = post(house.http, RESPONSES, &body(json!({}))).await.json();
        let item = &whole["output"][1];
        let expected = json!({
            "id": item["id"], "type": "custom_tool_call", "status": "completed", "call_id": item["call_id"],
            "name": "patch", "input": "a \"b\"\n\u{e9}\u{1f600}",
        });
        assert_eq!(item, &expected);
        assert!(item["id"].as_str().unwrap().starts_with("ctc_"), "{item}");
        assert_eq!(whole["tools"][0], tools[0]);
        let stream = post(house.http, RESPONSES, &body(json!({ "stream": true }))).await;
        let streamed = collect_output(&events(&stream));
        assert_eq!((&streamed[1]["input"], &streamed[1]["name"]), (&item["input"], &item["name"]));
        let result = json!({ "type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done" });
        let history = json!({ "input": [{ "role": "user", "content": "Hi" }, item, result], "store": false });
        assert_eq!(post(house.http, RESPONSES, &body(history)).await.status, 200);
        house.close().await;
    });
}

/// As it sends them: long instructions, messages of developers and users, functions, and a search that stays at home.
#[test]
fn a_request_of_codex() {
    run(async {
        let house = open(&format!("{THOUGHT}I look.{CALLS}")).await;
        let search = json!({ "type": "web_search", "external_web_access": false });
        let mut tools: Vec<Value> =
            (0..12).map(|i| with(flat(&format!("tool_{i}")), json!({ "strict": false }))).collect();
        tools.extend([flat("weather"), flat("clock"), search]);
        let text = |role: &str, text: &str| {
            let part = json!({ "type": "input_text", "text": text });
            json!({ "type": "message", "role": role, "content": [part] })
        };
        let mut input = vec![text("developer", "<permissions>"), text("user", "<environment>"), text("user", "Hi")];
        let body = |input: &Vec<Value>| {
            json!({
                "model": "toy", "instructions": "You are a coding agent.\n".repeat(20), "input": input, "tools": tools,
                "tool_choice": "auto", "parallel_tool_calls": false,
                "reasoning": { "effort": "low", "summary": "auto" },
                "store": false, "stream": true, "include": ["reasoning.encrypted_content"],
                "prompt_cache_key": "thread",
                "client_metadata": { "x-codex": "1" },
            })
        };
        for turn in 0..3 {
            let reply = post(house.http, RESPONSES, &body(&input)).await;
            assert_eq!(reply.status, 200, "{reply:?}");
            let events = events(&reply);
            assert_eq!(events.last().unwrap()["type"], "response.completed");
            let items = collect_output(&events).as_array().unwrap().clone();
            assert_eq!(items.iter().filter(|item| item["type"] == "function_call").count(), 1, "{turn}");
            for mut item in items {
                // It sends items back without their ids.
                item.as_object_mut().unwrap().remove("id");
                let call = item["call_id"].clone();
                input.push(item);
                if !call.is_null() {
                    input.push(json!({ "type": "function_call_output", "call_id": call, "output": "21" }));
                }
            }
        }
        let prompts = prompts(&house);
        // Each turn begins with the one before it, so its cache is of use.
        assert!(prompts.windows(2).all(|two| two[1].starts_with(&two[0][..two[0].len() - "low".len() - 1])));
        house.close().await;
    });
}

#[test]
fn a_stream_that_breaks_off_anywhere_resumes_with_the_same_rest() {
    run_within(PATIENCE, async {
        let answer = format!("{THOUGHT}I look.{CALLS}and so");
        let fake = Fake::start();
        let (first, second) =
            (open_with_fake(fake.clone(), &answer).await, open_with_fake(fake.clone(), &answer).await);
        for (tokens_per_frame, more) in [(1, json!({})), (5, json!({ "reasoning": { "summary": "auto" } }))] {
            fake.script(|script| script.tokens_per_frame = tokens_per_frame);
            let body = request_body(with(more, json!({ "stream": true })));
            let whole = post(first.http, RESPONSES, &body).await;
            let all = whole.events();
            events(&whole);
            let ids = whole
                .body
                .split_terminator("\n\n")
                .map(|event| event.lines().find_map(|line| line.strip_prefix("id: ")));
            for (i, id) in ids.enumerate().filter_map(|(i, id)| Some((i, id?))) {
                let rest = post_after(second.http, RESPONSES, id, &body).await;
                assert_eq!(rest.status, 200, "{rest:?}");
                let rest = rest.events();
                assert_eq!(rest.len(), all.len() - i - 1, "behind event {i}");
                for (one, expected) in rest.iter().zip(&all[i + 1..]) {
                    let read = |event: &str| {
                        let mut event: Value = serde_json::from_str(event).unwrap();
                        event["response"]["completed_at"] = Value::Null;
                        event
                    };
                    assert_eq!(read(one), read(expected), "behind event {i}");
                }
            }
        }
        first.close().await;
        second.close().await;
    });
}

async fn send_with_key(http: std::net::SocketAddr, method: &str, path: &str, key: &str) -> Reply {
    let head = format!("host: localhost\r\nconnection: close\r\nauthorization: Bearer {key}\r\ncontent-length: 0");
    send(http, &format!("{method} {path} HTTP/1.1\r\n{head}\r\n\r\n")).await
}

#[test]
fn a_stored_response_is_gone_on_with() {
    run(async {
        let house = open(&format!("{THOUGHT}I look.{CALLS}")).await;
        let first = post(house.http, RESPONSES, &request_body(json!({ "stream": true }))).await;
        let first = events(&first).last().unwrap()["response"].clone();
        assert_eq!(first["store"], true);
        let id = first["id"].as_str().unwrap();
        let output = first["output"].as_array().unwrap();
        let result =
            |i: usize| json!({ "type": "function_call_output", "call_id": output[i]["call_id"], "output": "21" });
        house.fake.answer("It is warm.");
        let more = json!({ "input": [result(2), result(3)], "previous_response_id": id, "instructions": "Now." });
        let second = post(house.http, RESPONSES, &request_body(more)).await.json();
        assert_eq!(second["previous_response_id"], id);
        let more = json!({ "input": "And now?", "previous_response_id": second["id"], "store": false });
        let third = post(house.http, RESPONSES, &request_body(more)).await.json();
        assert_eq!(third["store"], false);
        // All of it, sent at once. Instructions are of one response alone.
        let mut all = vec![json!({ "role": "user", "content": "Hi" })];
        all.extend(output.clone());
        all.extend([result(2), result(3)]);
        let whole = json!({ "input": all, "instructions": "Now." });
        assert_eq!(post(house.http, RESPONSES, &request_body(whole)).await.status, 200);
        all.extend(second["output"].as_array().unwrap().clone());
        all.push(json!({ "role": "user", "content": "And now?" }));
        assert_eq!(post(house.http, RESPONSES, &request_body(json!({ "input": all }))).await.status, 200);
        let prompts = prompts(&house);
        assert_eq!((&prompts[1], &prompts[2]), (&prompts[3], &prompts[4]));
        // A stored reply is read as it was sent.
        let page = |id: &Value| format!("{RESPONSES}/{}", id.as_str().unwrap());
        assert_eq!(get(house.http, &page(&first["id"])).await.json(), first);
        assert_eq!(get(house.http, &page(&second["id"])).await.json(), second);
        assert_eq!(get(house.http, &page(&third["id"])).await.status, 404);
        let input_items = get(house.http, &format!("{}/input_items?order=asc", page(&second["id"]))).await.json();
        let kinds: Vec<&Value> = input_items["data"].as_array().unwrap().iter().map(|item| &item["call_id"]).collect();
        assert_eq!(kinds, [&output[2]["call_id"], &output[3]["call_id"]]);
        let one = get(house.http, &format!("{}/input_items?limit=1", page(&second["id"]))).await.json();
        assert_eq!((&one["data"][0], &one["has_more"]), (&input_items["data"][1], &json!(true)));
        let after = format!("{}/input_items?after={}", page(&second["id"]), one["last_id"].as_str().unwrap());
        assert_eq!(get(house.http, &after).await.json()["data"], json!([input_items["data"][0]]));
        // The forgotten response is gone, and the responses that continued it are not.
        let gone = send_with_key(house.http, "DELETE", &page(&first["id"]), "").await.json();
        assert_eq!(gone, json!({ "id": id, "object": "response", "deleted": true }));
        assert_eq!(send_with_key(house.http, "DELETE", &page(&first["id"]), "").await.status, 404);
        let unknown = post(house.http, RESPONSES, &request_body(json!({ "previous_response_id": id }))).await;
        let error = &unknown.json()["error"];
        assert_eq!((unknown.status, &error["param"]), (404, &json!("previous_response_id")));
        assert!(error["message"].as_str().unwrap().contains("be stored on another router"), "{error}");
        let repeated = json!({ "previous_response_id": second["id"], "input": "And now?" });
        assert_eq!(post(house.http, RESPONSES, &request_body(repeated)).await.status, 200);
        assert_eq!(self::prompts(&house).last(), prompts.last());
        house.close().await;
    });
}

#[test]
fn what_cannot_be_done_with_a_stored_response_is_refused() {
    run(async {
        let house = open("yes").await;
        let stored = post(house.http, RESPONSES, &request_body(json!({}))).await.json();
        let page = format!("{RESPONSES}/{}", stored["id"].as_str().unwrap());
        for (method, path, status, word) in [
            ("POST", format!("{page}/cancel"), 400, "Cannot cancel a synchronous response"),
            ("POST", format!("{RESPONSES}/resp_1/cancel"), 404, "Response with id `resp_1` not found"),
            ("POST", format!("{RESPONSES}/compact"), 404, "compact"),
            ("GET", format!("{page}?stream=true"), 400, "stream"),
            ("GET", format!("{page}/input_items?limit=0"), 400, "limit"),
            ("GET", format!("{page}/input_items?order=up"), 400, "order"),
            ("GET", format!("{page}/input_items?after=x"), 400, "after"),
            ("GET", format!("{RESPONSES}/resp_1/input_items"), 404, "Response with id `resp_1` not found"),
        ] {
            let reply = send_with_key(house.http, method, &path, "").await;
            assert_eq!(reply.status, status, "{method} {path}: {reply:?}");
            assert!(reply.json()["error"]["message"].as_str().unwrap().contains(word), "{path}: {reply:?}");
        }
        house.close().await;
    });
}

#[test]
fn a_stored_response_is_its_keys_own() {
    run(async {
        let mut config = config();
        config.keys = ApiKeys::parse("alice:k1\nalice:k3\nbob:k2").unwrap();
        let house = House::open(config).await;
        let body = json!({ "model": "toy", "input": "Hi" });
        let stored = post_with_key(house.http, RESPONSES, "k1", &body).await.json();
        let page = format!("{RESPONSES}/{}", stored["id"].as_str().unwrap());
        let more = with(body.clone(), json!({ "previous_response_id": stored["id"] }));
        for (key, status) in [("k2", 404), ("k1", 200), ("k3", 200), ("none", 401)] {
            assert_eq!(send_with_key(house.http, "GET", &page, key).await.status, status, "{key}");
            assert_eq!(post_with_key(house.http, RESPONSES, key, &more).await.status, status, "{key}");
        }
        assert_eq!(send_with_key(house.http, "DELETE", &page, "k2").await.status, 404);
        assert_eq!(send_with_key(house.http, "DELETE", &page, "k3").await.status, 200);
        house.close().await;
    });
}

#[test]
fn response_without_room_is_not_stored_and_reports_it() {
    run(async {
        let mut config = config();
        config.limits.stored.responses_max = 2;
        config.limits.stored.bytes_max = 8192;
        let house = House::open(config).await;
        let body = json!({ "model": "toy", "input": "Hi" });
        let mut ids = Vec::new();
        for _ in 0..3 {
            let reply = post(house.http, RESPONSES, &body).await.json();
            assert_eq!(reply["store"], true);
            ids.push(reply["id"].as_str().unwrap().to_owned());
        }
        for (id, status) in ids.iter().zip([404, 200, 200]) {
            assert_eq!(get(house.http, &format!("{RESPONSES}/{id}")).await.status, status);
        }
        let large = with(body, json!({ "input": [{ "role": "user", "content": "Hi", "padding": "x".repeat(9000) }] }));
        let large_reply = post(house.http, RESPONSES, &large).await.json();
        assert_eq!((&large_reply["store"], &large_reply["status"]), (&json!(false), &json!("completed")));
        house.close().await;
    });
}

#[test]
fn a_conversation_is_no_larger_than_a_body_and_has_room_beside_them() {
    run(async {
        let large = || json!([{ "role": "user", "content": "Hi", "padding": "x".repeat(20_000) }]);
        let with_model = |more: Value| with(json!({ "model": "toy" }), more);
        let mut config = config();
        config.limits.body_bytes_max = 30_000;
        let house = House::open(config.clone()).await;
        let first = post(house.http, RESPONSES, &with_model(json!({ "input": large() }))).await.json();
        assert_eq!(first["store"], true);
        let more = |input: Value| with_model(json!({ "input": input, "previous_response_id": first["id"] }));
        let longer = post(house.http, RESPONSES, &more(large())).await.json();
        assert_eq!((&longer["store"], &longer["status"]), (&json!(false), &json!("completed")));
        assert_eq!(post(house.http, RESPONSES, &more(json!("And?"))).await.json()["store"], true);
        house.close().await;

        // There is room for one body, but not for the same text from the store beside another body.
        config.limits.bodies_bytes_max = 20_500;
        let house = House::open(config).await;
        let second = post(house.http, RESPONSES, &with_model(json!({ "input": large() }))).await.json();
        let more = with_model(json!({ "input": "And?", "previous_response_id": second["id"] }));
        let refused = post(house.http, RESPONSES, &more).await;
        assert_eq!(refused.status, 429, "{refused:?}");
        let page = format!("{RESPONSES}/{}", second["id"].as_str().unwrap());
        assert_eq!(get(house.http, &page).await.json(), second, "it is read without a copy");
        house.close().await;
    });
}
