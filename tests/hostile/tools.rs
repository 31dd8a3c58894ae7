//! Hostile tools, schemas and grammars: each is rejected with a typed error, or its answer is bounded. Uses HTTP.

use crate::node::PATIENCE;
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

/// The outcome of a kind.
#[derive(Debug)]
pub struct ToolOutcome {
    pub name: &'static str,
    pub status: u16,
    /// The error's message, or why the answer ended.
    pub detail: String,
    pub took: Duration,
}

const TOKENS_MAX: u32 = 40;

fn chat(more: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "go"}], "max_tokens": TOKENS_MAX, "temperature": 1.0, "seed": 7,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn schema(schema: Value) -> Value {
    chat(json!({"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}}))
}

fn regex(pattern: &str) -> Value {
    chat(json!({"structured_outputs": {"regex": pattern}}))
}

fn tool(name: &str, parameters: &Value) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": parameters, "strict": true}})
}

fn tools(tools: &[Value]) -> Value {
    chat(json!({"tools": tools, "tool_choice": "required"}))
}

fn properties(n: usize, required: bool) -> Value {
    let named: Map<String, Value> = (0..n).map(|i| (format!("property_{i}"), json!({"type": "integer"}))).collect();
    let names: Vec<&String> = named.keys().filter(|_| required).collect();
    json!({"type": "object", "required": names, "properties": named, "additionalProperties": false})
}

fn doubling(n: usize, word: &str) -> Value {
    let next = |i: usize| json!({"$ref": format!("#/$defs/d{}", i + 1)});
    let mut defs: Map<String, Value> =
        (0..n).map(|i| (format!("d{i}"), json!({word: [next(i), next(i), {"minimum": i}]}))).collect();
    defs.insert(format!("d{n}"), json!({"type": "integer"}));
    json!({"$ref": "#/$defs/d0", "$defs": defs})
}

fn deep(n: usize) -> Value {
    (0..n).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "minItems": 1, "items": inner}))
}

/// Returns each kind by its name, with its expected status.
pub fn kinds() -> Vec<(&'static str, u16, String)> {
    let word = json!({"type": "object", "properties": {"it": {"type": "string"}}, "required": ["it"]});
    let many: Vec<Value> = (0..10_000).map(|i| tool(&format!("tool_{i}"), &word)).collect();
    let list = json!({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]});
    let tree = json!({"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}});
    let odd = "\"quo\\ted\"\nand \u{2028}\u{0} <|im_end|> </tool_call>";
    let odd_names = json!({"type": "object", "properties": {odd: {"const": odd}}, "required": [odd]});
    let kinds = vec![
        ("a list that never ends", 400, schema(list)),
        ("a tree in itself", 200, schema(tree)),
        ("doubled alternatives", 400, schema(doubling(40, "anyOf"))),
        ("doubled exclusions", 400, schema(doubling(40, "oneOf"))),
        ("a schema of 10 MB", 413, schema(json!({"const": "x".repeat(10 << 20)}))),
        ("a schema of 3 MB", 400, schema(json!({"const": "x".repeat(3 << 20)}))),
        ("300 levels", 400, schema(deep(300))),
        ("10,000 tools", 400, tools(&many)),
        ("4,000 properties", 200, schema(properties(4000, false))),
        ("10,000 properties", 400, schema(properties(10_000, false))),
        ("10,000 required properties", 400, tools(&[tool("wide", &properties(10_000, true))])),
        ("counts of counts", 200, regex("((a{1,900}){1,900}){1,900}")),
        ("a pattern that could blow up", 200, regex("(a|b)*a(a|b){60}")),
        ("large masks", 200, regex("(a|b)*a(a|b){14}")),
        ("odd names of properties", 200, tools(&[tool("odd", &odd_names)])),
        ("an odd name of a tool", 400, tools(&[tool("a \"tool\"\n", &word)])),
        ("a call that never closes", 200, tools(&[tool("endless", &word)])),
        ("a call for ever", 200, tools(&[tool("many", &json!({"type": "object"}))])),
    ];
    kinds.into_iter().map(|(name, status, body)| (name, status, body.to_string())).collect()
}

pub fn send_request(http: &str, name: &'static str, body: &str) -> ToolOutcome {
    let agent = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false).build();
    let (agent, from) = (ureq::Agent::from(agent), Instant::now());
    let request = agent.post(format!("{http}/v1/chat/completions")).header("content-type", "application/json");
    let mut reply = request.send(body).unwrap();
    let answer: Value = serde_json::from_str(&reply.body_mut().read_to_string().unwrap()).unwrap();
    let detail = match &answer["error"]["message"] {
        Value::String(message) => message.clone(),
        _ => answer["choices"][0]["finish_reason"].to_string(),
    };
    ToolOutcome { name, status: reply.status().as_u16(), detail, took: from.elapsed() }
}
