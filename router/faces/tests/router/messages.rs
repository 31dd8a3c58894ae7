//! Anthropic's API with tools, thoughts and structures. The replica's tokens spell a text that the test sets.

use crate::client::{Reply, post, post_after};
use crate::fake::Fake;
use crate::{House, config, model, run, run_within};
use checkpoint::ChatTemplate;
use serde_json::{Value, json};
use std::time::Duration;

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";
const CONTEXT: u32 = 20_000;

/// Shows tools by their names, and whether the model is to think.
const TEMPLATE: &str = "{% for tool in tools or [] %}\
     ({{ tool.function.name }}:{{ tool.function.description }}){% endfor %}\
     {% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}\
     {% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}\
     {% for message in messages %}<|im_start|>{{ message.role }}:\
     {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}\
     {% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\
     <|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}";

const ANSWER: &str = "<think>\nso, \u{e9}h\n</think>\n\nI look.<tool_call>\n\
     {\"name\": \"weather\", \"arguments\": {\"city\": \"Par\u{ed}s\"}}\n</tool_call>\n\
     <tool_call>\n{\"name\": \"clock\", \"arguments\": {}}\n</tool_call>\nDone.";

async fn open(answer: &str) -> House {
    open_with_fake(TEMPLATE, Fake::start(), answer).await
}

async fn open_with_fake(template: &str, fake: Fake, answer: &str) -> House {
    fake.script(|script| script.context = CONTEXT);
    fake.answer(answer);
    fake.welcome();
    let members = vec![fake.coordinator()].into();
    let text = model::text().with_template(ChatTemplate::new(template, None, None).unwrap());
    let house = House::with_texts(config(), vec![fake], members, text).await;
    house.wait_until_ready().await;
    house
}

fn tool(name: &str) -> Value {
    let schema = json!({ "type": "object", "properties": { "city": { "type": "string" } } });
    json!({ "name": name, "description": "It looks.", "input_schema": schema })
}

fn request_body(more: Value) -> Value {
    let tools = json!([tool("weather"), tool("clock")]);
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    let mut body = json!({ "messages": messages, "max_tokens": 4096, "seed": 5, "tools": tools });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Returns the last prompt that the replica received; tokens that are no bytes are bars.
fn prompt(house: &House) -> String {
    let prompt = house.fake.submits().last().unwrap().prompt.clone();
    String::from_utf8(prompt.iter().map(|id| u8::try_from(*id).unwrap_or(b'|')).collect()).unwrap()
}

fn has_grammar(house: &House) -> bool {
    house.fake.submits().last().unwrap().constraint.is_some()
}

/// Returns a message as a client puts it together from its events.
fn collect_message(reply: &Reply) -> Value {
    let (mut message, mut input) = (Value::Null, String::new());
    for event in reply.events() {
        let event: Value = serde_json::from_str(&event).unwrap();
        let block = |message: &Value| {
            assert_eq!(event["index"], message["content"].as_array().unwrap().len() - 1, "{event}");
            message["content"].as_array().unwrap().len() - 1
        };
        match event["type"].as_str().unwrap() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                message["content"].as_array_mut().unwrap().push(event["content_block"].clone());
                block(&message);
            }
            "content_block_delta" => {
                let at = block(&message);
                let (delta, to) = (&event["delta"], &mut message["content"][at]);
                let add = |to: &mut Value, name: &str| {
                    to[name] = format!("{}{}", to[name].as_str().unwrap(), delta[name].as_str().unwrap()).into();
                };
                match delta["type"].as_str().unwrap() {
                    "text_delta" => add(to, "text"),
                    "thinking_delta" => add(to, "thinking"),
                    "signature_delta" => add(to, "signature"),
                    "input_json_delta" => input.push_str(delta["partial_json"].as_str().unwrap()),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" => {
                let at = block(&message);
                if message["content"][at]["type"] == "tool_use" {
                    message["content"][at]["input"] = serde_json::from_str(&std::mem::take(&mut input)).unwrap();
                }
            }
            "message_delta" => {
                let all = message.as_object_mut().unwrap();
                all.extend(event["delta"].as_object().unwrap().clone());
                let usage = all["usage"].as_object_mut().unwrap();
                usage.extend(event["usage"].as_object().unwrap().clone());
            }
            "message_stop" | "ping" => {}
            other => panic!("{other}"),
        }
    }
    message
}

#[test]
fn an_answer_has_blocks_of_thoughts_texts_and_calls() {
    run(async {
        let house = open(ANSWER).await;
        let first = post(house.http, MESSAGES, &request_body(json!({}))).await.json();
        assert_eq!(first["stop_reason"], "tool_use", "{first}");
        let blocks = first["content"].as_array().unwrap();
        let kinds: Vec<&str> = blocks.iter().map(|block| block["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["thinking", "text", "tool_use", "tool_use", "text"]);
        assert_eq!((&blocks[0]["thinking"], &blocks[1]["text"]), (&json!("so, \u{e9}h"), &json!("I look.")));
        assert_eq!(blocks[0]["signature"].as_str().unwrap().len(), 64);
        let call = |i: usize| (blocks[i]["name"].as_str().unwrap(), blocks[i]["input"].clone());
        assert_eq!(call(2), ("weather", json!({ "city": "Par\u{ed}s" })));
        assert_eq!((call(3), &blocks[4]["text"]), (("clock", json!({})), &json!("\nDone.")));
        assert_ne!(blocks[2]["id"], blocks[3]["id"]);
        assert_eq!(first["usage"]["output_tokens_details"]["thinking_tokens"], 15);
        assert!(prompt(&house).starts_with("(weather:It looks.)(clock:It looks.)|user:Hi|"), "{}", prompt(&house));
        assert!(!has_grammar(&house));
        // The next turn has the message that the client received, and the results.
        house.fake.answer("It is warm.");
        let result =
            |id: &Value, content: Value| json!({ "type": "tool_result", "tool_use_id": id, "content": content });
        let failed = json!({ "type": "tool_result", "tool_use_id": blocks[3]["id"], "is_error": true });
        let warm = json!([{ "type": "text", "text": "21", "cache_control": { "type": "ephemeral" } }]);
        let messages = json!([
            { "role": "user", "content": "Hi" },
            { "role": "assistant", "content": blocks[..4] },
            { "role": "user", "content": [result(&blocks[2]["id"], warm), failed, { "type": "text", "text": "So?" }] },
        ]);
        let second = post(house.http, MESSAGES, &request_body(json!({ "messages": messages }))).await.json();
        assert_eq!(
            (&second["stop_reason"], &second["content"][0]["text"]),
            (&json!("end_turn"), &json!("It is warm."))
        );
        let call = "I look.<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Par\u{ed}s\"}}</tool_call>";
        let shown = prompt(&house);
        assert!(shown.contains(&format!("|assistant:<think>so, \u{e9}h</think>{call}")), "{shown}");
        assert!(shown.contains("|tool:21||tool:Error: ||user:So?|"), "{shown}");
        house.close().await;
    });
}

#[test]
fn in_events_the_message_is_the_same() {
    run(async {
        let house = open(ANSWER).await;
        for answer in [ANSWER, "", "Hi", "<tool_call>{\"name\": \"clock\"}</tool_call>", "no <tool_call> at all"] {
            house.fake.answer(answer);
            let mut all = Vec::new();
            for tokens_per_frame in [1, 7, 1000] {
                house.fake.script(|script| script.tokens_per_frame = tokens_per_frame);
                for more in [json!({}), json!({ "max_tokens": 20 })] {
                    let mut whole = post(house.http, MESSAGES, &request_body(more.clone())).await.json();
                    let mut body = request_body(more);
                    body["stream"] = true.into();
                    let mut streamed = collect_message(&post(house.http, MESSAGES, &body).await);
                    (whole["id"], streamed["id"]) = (Value::Null, Value::Null);
                    assert_eq!(streamed, whole, "{answer} by {tokens_per_frame}");
                    all.push(whole);
                }
            }
            assert!(all.chunks(2).all(|one| one == &all[..2]), "however many tokens come at once: {answer}");
        }
        house.close().await;
    });
}

#[test]
fn a_stream_that_breaks_off_in_any_block_resumes_with_the_same_rest() {
    run_within(Duration::from_secs(120), async {
        let fake = Fake::start();
        let first = open_with_fake(TEMPLATE, fake.clone(), ANSWER).await;
        let second = open_with_fake(TEMPLATE, fake.clone(), ANSWER).await;
        for (tokens_per_frame, more) in [(1, json!({})), (5, json!({ "stop_sequences": ["zzz"] }))] {
            fake.script(|script| script.tokens_per_frame = tokens_per_frame);
            let mut body = request_body(more);
            body["stream"] = true.into();
            let whole = post(first.http, MESSAGES, &body).await;
            let ids: Vec<Option<&str>> = whole.body.split_terminator("\n\n").map(id_of).collect();
            assert!(ids.iter().flatten().count() > 10, "{}", whole.body);
            let all = whole.events();
            for (cut, id) in ids.iter().enumerate().filter_map(|(cut, id)| Some((cut, (*id)?))) {
                let rest = post_after(second.http, MESSAGES, id, &body).await;
                let expected: Vec<&String> = all[cut + 1..].iter().filter(|event| !event.contains("ping")).collect();
                assert_eq!(rest.events().iter().collect::<Vec<_>>(), expected, "behind event {cut}");
            }
        }
        first.close().await;
        second.close().await;
    });
}

fn id_of(event: &str) -> Option<&str> {
    event.lines().find_map(|line| line.strip_prefix("id: "))
}

#[test]
fn what_must_be_called_is_enforced() {
    run(async {
        let house = open(ANSWER).await;
        let strict = {
            let mut tool = tool("weather");
            tool["strict"] = true.into();
            json!([tool])
        };
        for (more, is_enforced) in [
            (json!({}), false),
            (json!({ "tool_choice": { "type": "auto" } }), false),
            (json!({ "tool_choice": { "type": "none" } }), false),
            (json!({ "tool_choice": { "type": "any" } }), true),
            (json!({ "tool_choice": { "type": "tool", "name": "clock" } }), true),
            (json!({ "tools": strict }), true),
            (json!({ "tools": [], "output_config": { "format": { "type": "json_schema", "schema": {} } } }), true),
            (json!({ "tools": [], "output_format": { "type": "json_schema", "schema": {} } }), true),
        ] {
            let reply = post(house.http, MESSAGES, &request_body(more.clone())).await;
            assert_eq!((reply.status, has_grammar(&house)), (200, is_enforced), "{more}: {reply:?}");
        }
        let single = json!({ "tool_choice": { "type": "auto", "disable_parallel_tool_use": true } });
        let one = post(house.http, MESSAGES, &request_body(single)).await.json();
        let n_calls = one["content"].as_array().unwrap().iter().filter(|block| block["type"] == "tool_use").count();
        assert_eq!(n_calls, 1, "{one}");
        let none = post(house.http, MESSAGES, &request_body(json!({ "tool_choice": { "type": "none" } }))).await.json();
        assert_eq!(none["stop_reason"], "end_turn");
        assert!(prompt(&house).starts_with("|user:"), "without calls, the prompt has no tools: {}", prompt(&house));
        house.close().await;
    });
}

#[test]
fn a_call_that_is_cut_off_has_its_whole_members() {
    run(async {
        let house = open("<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}").await;
        let cut = post(house.http, MESSAGES, &request_body(json!({ "max_tokens": 65 }))).await.json();
        assert_eq!(
            (&cut["stop_reason"], &cut["content"][0]["input"]),
            (&json!("max_tokens"), &json!({ "city": "Oslo" }))
        );
        house.close().await;
    });
}

#[test]
fn thinking_options_reach_the_template() {
    run(async {
        let house = open(ANSWER).await;
        let status = async |more: Value| post(house.http, MESSAGES, &request_body(more)).await.status;
        let adaptive = json!({ "thinking": { "type": "adaptive" }, "output_config": { "effort": "low" } });
        assert_eq!(status(adaptive).await, 200);
        assert!(prompt(&house).contains("[True][low]|user"), "{}", prompt(&house));
        assert_eq!(status(json!({ "thinking": { "type": "disabled" } })).await, 200);
        assert!(prompt(&house).contains("[False][none]|user"), "{}", prompt(&house));
        // A budget is kept where the answer is drawn.
        assert!(!has_grammar(&house));
        assert_eq!(status(json!({ "thinking": { "type": "enabled", "budget_tokens": 2000 } })).await, 200);
        let limited = house.fake.submits().last().unwrap().constraint.clone().unwrap();
        let limited = String::from_utf8(limited).unwrap();
        assert!(limited.starts_with("// thinking {") && limited.contains("\"tokens_max\":2000"), "{limited}");
        // A client that requests no thoughts still learns that there was one.
        let omitted = json!({ "thinking": { "type": "adaptive", "display": "omitted" } });
        let shown = post(house.http, MESSAGES, &request_body(json!({}))).await.json();
        let hidden = post(house.http, MESSAGES, &request_body(omitted)).await.json();
        assert_eq!(
            (&hidden["content"][0]["thinking"], &hidden["content"][0]["type"]),
            (&json!(""), &json!("thinking"))
        );
        assert_eq!(hidden["content"][0]["signature"], shown["content"][0]["signature"]);
        for (more, part) in [
            (json!({ "thinking": { "type": "on" } }), "thinking.type"),
            (json!({ "thinking": { "type": "adaptive", "display": 5 } }), "thinking.display"),
            (json!({ "output_config": { "effort": "none" } }), "output_config.effort"),
            (json!({ "output_config": { "format": { "type": "json" } } }), "output_config.format.type"),
            (json!({ "output_config": { "format": { "type": "json_schema" } } }), "output_config.format.schema"),
            (json!({ "output_config": { "task_budget": {} } }), "output_config.task_budget"),
            (
                json!({ "tools": [], "output_format": { "type": "json_schema", "schema": { "unheardOf": 1 } } }),
                "output_format",
            ),
        ] {
            let reply = post(house.http, MESSAGES, &request_body(more.clone())).await;
            assert!(reply.status == 400 && reply.body.contains(part), "{more}: {reply:?}");
        }
        house.close().await;
    });
}

/// A model that never thinks keeps every budget. A model that always thinks cannot be switched off.
#[test]
fn a_template_without_a_switch_is_taken_at_its_word() {
    run(async {
        let plain = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}";
        let house = open_with_fake(plain, Fake::start(), "Hi").await;
        let enabled = json!({ "thinking": { "type": "enabled", "budget_tokens": 1024 }, "tools": [] });
        assert_eq!(post(house.http, MESSAGES, &request_body(enabled)).await.status, 200);
        assert!(!has_grammar(&house));
        let disabled = json!({ "thinking": { "type": "disabled" }, "tools": [] });
        assert_eq!(post(house.http, MESSAGES, &request_body(disabled.clone())).await.status, 200);
        house.close().await;
        let thinks = format!("{plain}{{% if add_generation_prompt %}}<think>\n{{% endif %}}</think>");
        let house = open_with_fake(&thinks, Fake::start(), "Hi").await;
        let refused = post(house.http, MESSAGES, &request_body(disabled)).await;
        assert!(refused.status == 400 && refused.body.contains("thinking: "), "{refused:?}");
        house.close().await;
    });
}

#[test]
fn an_answer_goes_on_with_its_beginning() {
    run(async {
        let house = open(" warm.").await;
        let messages = json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "It is" }]);
        let reply =
            post(house.http, MESSAGES, &request_body(json!({ "messages": messages, "tools": [] }))).await.json();
        assert_eq!(reply["content"][0]["text"], " warm.");
        assert!(prompt(&house).ends_with("|assistant:It is"), "{}", prompt(&house));
        let call = json!({ "type": "tool_use", "id": "a", "name": "f", "input": {} });
        let messages = json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": [call] }]);
        let reply = post(house.http, MESSAGES, &request_body(json!({ "messages": messages }))).await;
        assert!(reply.status == 400 && reply.body.contains("results are missing"), "{reply:?}");
        house.close().await;
    });
}

/// The shape of Claude Code's requests: the count is of the prompt that the message has, and the text for Anthropic's
/// accounting is not part of the prompt.
#[test]
fn a_coding_agents_request_is_counted_as_it_is_answered() {
    run(async {
        let house = open(ANSWER).await;
        let block =
            |text: &str| json!({ "type": "text", "text": text, "cache_control": { "type": "ephemeral", "ttl": "1h" } });
        let agent = |billing: &str| {
            let tools: Vec<Value> = (0..14).map(|i| tool(&format!("Tool{i}"))).collect();
            let call = json!({ "type": "tool_use", "id": "toolu_01", "name": "Tool1", "input": { "city": "Oslo" } });
            let result = json!({ "type": "tool_result", "tool_use_id": "toolu_01", "content": [block("12 files")],
                "is_error": false });
            let thought = json!({ "type": "thinking", "thinking": "I list them.", "signature": "EqQB" });
            json!({
                "model": "toy",
                "system": [
                    { "type": "text", "text": billing },
                    block("You are Claude Code."),
                    block(&"Be careful. ".repeat(400)),
                ],
                "messages": [
                    { "role": "user", "content": [block("<system-reminder>Now</system-reminder>"), block("List.")] },
                    { "role": "assistant", "content": [thought, block("Sure."), call] },
                    { "role": "user", "content": [result, block("Go on.")] },
                ],
                "tools": tools,
                "thinking": { "type": "adaptive" },
                "context_management": { "edits": [{ "type": "clear_thinking_20251015", "keep": "all" }] },
                "output_config": { "effort": "medium" },
            })
        };
        let mut prompts = Vec::new();
        for billing in
            ["x-anthropic-billing-header: cc_version=2.1.7; cch=0a1b2;", "x-anthropic-billing-header: cch=9;"]
        {
            let mut body = agent(billing);
            let counted = post(house.http, &format!("{COUNT}?beta=true"), &body).await.json();
            body.as_object_mut().unwrap().extend(
                json!({ "max_tokens": 100, "stream": true, "metadata": { "user_id": "u" },
                "stop_sequences": [], "service_tier": "auto" })
                .as_object()
                .unwrap()
                .clone(),
            );
            let streamed = collect_message(&post(house.http, &format!("{MESSAGES}?beta=true"), &body).await);
            assert_eq!(streamed["usage"]["input_tokens"], counted["input_tokens"]);
            assert_eq!(streamed["stop_reason"], "max_tokens");
            prompts.push(prompt(&house));
        }
        assert_eq!(prompts[0], prompts[1]);
        assert!(prompts[0].contains("|system:You are Claude Code.\nBe careful."), "{}", prompts[0]);
        assert!(prompts[0].contains("|tool:12 files||user:Go on.|"), "{}", prompts[0]);
        let edits = json!({ "edits": [{ "type": "clear_tool_uses_20250919" }] });
        let refused = post(house.http, MESSAGES, &request_body(json!({ "context_management": edits }))).await;
        assert!(refused.status == 400 && refused.body.contains("context_management"), "{refused:?}");
        house.close().await;
    });
}
