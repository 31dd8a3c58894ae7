//! The state that questions are about, as text: the items of an input in OpenAI's form.

use router::refusal::Refusal;
use serde_json::Value;

/// Returns the text of an input: a text, or the texts of its items. Items of users alone have no marks; where there are
/// others, each begins with its role.
pub fn text_of_input(input: Value) -> Result<String, Refusal> {
    let items = match input {
        Value::String(text) => return Ok(text),
        Value::Array(items) => items,
        _ => return Err(Refusal::invalid("input", "must be a text or a list of items")),
    };
    let read = items.iter().map(item).collect::<Result<Vec<_>, _>>()?;
    let marks = read.iter().any(|(role, _)| role != "user");
    let text = |(role, text): (String, String)| if marks { format!("{role}: {text}") } else { text };
    Ok(read.into_iter().map(text).collect::<Vec<_>>().join("\n\n"))
}

/// Returns the role of an item, and its text.
fn item(item: &Value) -> Result<(String, String), Refusal> {
    let field = |name: &str| item[name].as_str().unwrap_or_default();
    let kind = item.get("type").map_or(Some("message"), Value::as_str);
    match (kind, item["role"].as_str()) {
        (Some("message"), Some(role @ ("user" | "system" | "developer" | "assistant"))) => {
            Ok((role.to_owned(), text_of_content("input", &item["content"])?))
        }
        (Some("message"), _) => Err(refusal("must have messages of user, developer, system or assistant")),
        (Some("function_call"), _) => {
            Ok(("assistant".to_owned(), format!("{}({})", field("name"), field("arguments"))))
        }
        (Some("custom_tool_call"), _) => Ok(("assistant".to_owned(), format!("{}({})", field("name"), field("input")))),
        (Some("function_call_output" | "custom_tool_call_output"), _) => {
            Ok(("tool".to_owned(), text_of_content("input", &item["output"])?))
        }
        _ => Err(refusal("must have messages, calls and their outputs")),
    }
}

fn refusal(why: &str) -> Refusal {
    Refusal::invalid("input", why)
}

/// Returns the text of a message's content or of instructions: a text, or parts of it, one in each line.
pub fn text_of_content(field: &'static str, content: &Value) -> Result<String, Refusal> {
    let part = |part: &Value| match (part["type"].as_str(), part["text"].as_str(), part["refusal"].as_str()) {
        (Some("input_text" | "output_text" | "text"), Some(text), _) => Ok(text.to_owned()),
        (Some("refusal"), _, Some(text)) => Ok(text.to_owned()),
        (Some("input_json"), ..) if part["data"].is_object() || part["data"].is_array() => Ok(part["data"].to_string()),
        (Some("input_image"), ..) => {
            Err(Refusal::invalid(field, "Decisions supports text input only; images are not supported"))
        }
        _ => Err(Refusal::invalid(field, "must have parts of the type input_text or input_json")),
    };
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => Ok(parts.iter().map(part).collect::<Result<Vec<_>, _>>()?.join("\n")),
        _ => Err(Refusal::invalid(field, "must have content that is a text or a list of parts")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn items_become_one_text_in_their_order() {
        let text = |input: Value| text_of_input(input).map_err(|refusal| refusal.to_string());
        let parts = json!([{ "type": "input_text", "text": "second" }, { "type": "input_text", "text": "third" }]);
        let users = json!([{ "role": "user", "content": "first" }, { "role": "user", "content": parts }]);
        assert_eq!(text(users), Ok("first\n\nsecond\nthird".to_owned()));
        let roles = json!([
            { "role": "system", "content": "Be kind." },
            { "type": "function_call", "call_id": "1", "name": "look", "arguments": "{}" },
            { "type": "function_call_output", "call_id": "1", "output": "a cat" },
        ]);
        assert_eq!(text(roles), Ok("system: Be kind.\n\nassistant: look({})\n\ntool: a cat".to_owned()));
        let data = json!([{ "role": "user", "content": [{ "type": "input_json", "data": { "a": 1 } }] }]);
        assert_eq!(text(data), Ok(r#"{"a":1}"#.to_owned()));
        for refused in [json!({}), json!([{ "role": "tool", "content": "x" }]), json!([{ "role": "user" }])] {
            assert!(text(refused.clone()).is_err(), "{refused}");
        }
        let image = json!([{ "role": "user", "content": [{ "type": "input_image", "image_url": "x" }] }]);
        assert!(text(image).unwrap_err().contains("text input only"));
    }
}
