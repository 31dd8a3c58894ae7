//! Requests in the format of a coding agent, to a server with a small random model: long prompts in blocks, a dozen
//! tools, forced calls, and their results in the next turn. A whole answer and its events are the same, and the turns
//! share the prefix cache.

use crate::common::node::{BINARY, Folder, Node, PATIENCE};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

const MODEL: &str = "tests/reference/smollm3";
const CONTEXT: u32 = 16_384;
const TEMPLATE: &str = "{% if tools %}<|system|># Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}\
     For each call write <tool_call>{\"name\": .., \"arguments\": ..}</tool_call><|end|>{% endif %}\
     {% for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>\
     {% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}\
     {% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\
     <|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

/// The small model with a long context and a template that lists tools: its folder, and the template's file.
pub fn talking_model(name: &str) -> (Folder, String) {
    let folder = Folder::new(name);
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(MODEL);
    for file in ["model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(root.join(file), folder.0.join(file)).unwrap();
    }
    let config = std::fs::read_to_string(root.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["max_position_embeddings"] = CONTEXT.into();
    folder.write("config.json", &config.to_string());
    let template = folder.write("template.jinja", TEMPLATE);
    (folder, template)
}

fn serve() -> (Folder, Node, String) {
    let (folder, template) = talking_model("messages");
    let model = folder.0.to_str().unwrap().to_owned();
    let mut command = Command::new(BINARY);
    command.args(["serve", &model, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--chat-template", &template]);
    let mut node = Node::spawn(command);
    let http = node.http();
    node.until_ready(&http);
    (folder, node, http)
}

/// Sends a request like the agent: with its version, its betas, and a key.
fn post(http: &str, path: &str, body: &Value) -> String {
    let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false).build();
    let request = ureq::Agent::from(agent).post(format!("{http}{path}?beta=true"));
    let request = request.header("content-type", "application/json").header("anthropic-version", "2023-06-01");
    let betas = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27";
    let mut reply = request.header("anthropic-beta", betas).header("x-api-key", "none").send(body.to_string()).unwrap();
    let text = reply.body_mut().read_to_string().unwrap();
    assert_eq!(reply.status(), 200, "{text}");
    text
}

fn whole(http: &str, body: &Value) -> Value {
    serde_json::from_str(&post(http, "/v1/messages", body)).unwrap()
}

/// The message that a client puts together from its events: blocks, reason and usage.
fn streamed(http: &str, body: &Value) -> Value {
    let mut body = body.clone();
    body["stream"] = true.into();
    let text = post(http, "/v1/messages", &body);
    let (mut blocks, mut input, mut last) = (Vec::<Value>::new(), String::new(), Value::Null);
    for line in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
        let event: Value = serde_json::from_str(line).unwrap();
        match event["type"].as_str().unwrap() {
            "content_block_start" => blocks.push(event["content_block"].clone()),
            "content_block_delta" => {
                let (delta, block) = (&event["delta"], blocks.last_mut().unwrap());
                match delta["text"].as_str() {
                    Some(text) => block["text"] = (block["text"].as_str().unwrap().to_owned() + text).into(),
                    None => input.push_str(delta["partial_json"].as_str().unwrap()),
                }
            }
            "content_block_stop" if !input.is_empty() => {
                blocks.last_mut().unwrap()["input"] = serde_json::from_str(&std::mem::take(&mut input)).unwrap();
            }
            "message_delta" => last = event,
            "error" => panic!("{event}"),
            _ => {}
        }
    }
    json!({ "content": blocks, "stop_reason": last["delta"]["stop_reason"], "usage": last["usage"] })
}

fn cached(text: &str) -> Value {
    json!({ "type": "text", "text": text, "cache_control": { "type": "ephemeral" } })
}

fn tool(i: usize) -> Value {
    let kinds = json!({ "type": "string", "enum": ["read", "write"], "description": "What to do with it." });
    let lines = json!({ "type": "array", "items": { "type": "integer", "enum": [1, 2, 3] }, "maxItems": 2 });
    let schema = json!({
        "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "additionalProperties": false,
        "properties": { "kind": kinds, "lines": lines }, "required": ["kind", "lines"],
    });
    let description = "Reads a file or writes it. ".repeat(3);
    json!({ "name": format!("Tool{i}"), "description": description, "input_schema": schema })
}

/// Forbids white space: a random model would choose it as often as anything else between the parts of a call.
fn no_blanks() -> Value {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(MODEL).join("tokenizer.json"));
    let tokenizer: Value = serde_json::from_str(&text.unwrap()).unwrap();
    // Space, newline, tab and return, as byte-level tokenizers write them.
    let ids =
        ["\u{120}", "\u{10a}", "\u{109}", "\u{10d}"].map(|letter| tokenizer["model"]["vocab"][letter].to_string());
    ids.into_iter().map(|id| (id, (-100).into())).collect::<serde_json::Map<_, _>>().into()
}

fn agent_request(billing: &str, messages: &Value, choice: Value) -> Value {
    let head = format!("x-anthropic-billing-header: cc_version=2.1.7; cch={billing};");
    let system =
        [json!({ "type": "text", "text": head }), cached("You are an agent."), cached(&"Be careful. ".repeat(99))];
    json!({
        "max_tokens": 600, "temperature": 0, "seed": 7, "logit_bias": no_blanks(), "messages": messages,
        "system": system, "tools": (0..12).map(tool).collect::<Vec<_>>(), "tool_choice": choice,
        "metadata": { "user_id": "u" },
        "thinking": { "type": "enabled", "budget_tokens": 599 },
        "context_management": { "edits": [{ "type": "clear_thinking_20251015", "keep": "all" }] },
    })
}

fn n_prompt(usage: &Value) -> u64 {
    usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap()
}

#[test]
fn an_agents_turns_call_and_share_the_prefix_cache() {
    let (_folder, _node, http) = serve();
    let forced = || json!({ "type": "any", "disable_parallel_tool_use": true });
    let mut messages =
        json!([{ "role": "user", "content": [cached("<system-reminder>Now.</system-reminder>"), cached("Go.")] }]);
    for turn in 0..3 {
        let body = |billing: &str| agent_request(billing, &messages, forced());
        let answer = whole(&http, &body("00000"));
        // The line that differs in each request is no part of the prompt: all but the end is cached.
        let again = streamed(&http, &body("a1b2c"));
        assert_eq!(n_prompt(&again["usage"]), n_prompt(&answer["usage"]));
        assert!(again["usage"]["input_tokens"].as_u64().unwrap() < 64, "{again}");
        assert_eq!((&again["content"], &again["stop_reason"]), (&answer["content"], &answer["stop_reason"]));
        assert_eq!(answer["stop_reason"], "tool_use", "{answer}");
        let mut counted = body("0");
        counted.as_object_mut().unwrap().remove("max_tokens");
        let counted: Value = serde_json::from_str(&post(&http, "/v1/messages/count_tokens", &counted)).unwrap();
        assert_eq!(counted["input_tokens"], n_prompt(&answer["usage"]));
        let call = &answer["content"][0];
        assert!(call["name"].as_str().unwrap().starts_with("Tool") && call["input"]["lines"].is_array(), "{call}");
        if turn > 0 {
            assert!(answer["usage"]["cache_read_input_tokens"].as_u64().unwrap() > 2000, "{answer}");
        }
        let thought = json!({ "type": "thinking", "thinking": "I look.", "signature": "EqQB" });
        let result = json!({ "type": "tool_result", "tool_use_id": call["id"], "content": [cached("12 files")] });
        let turns = [
            json!({ "role": "assistant", "content": [thought, cached("Sure."), call] }),
            json!({ "role": "user", "content": [result, cached("Go on.")] }),
        ];
        messages.as_array_mut().unwrap().extend(turns);
    }
    let mut last = agent_request("0", &messages, json!({ "type": "none" }));
    last["max_tokens"] = 20.into();
    last["thinking"] = json!({ "type": "adaptive" });
    let answer = whole(&http, &last);
    assert!(answer["content"].as_array().unwrap().iter().all(|block| block["type"] == "text"), "{answer}");
}
