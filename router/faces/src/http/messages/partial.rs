//! The arguments of a call as an object. If the call was cut off, the object has the complete members.

use serde_json::{Map, Value};

/// Returns a call's input. Text that does not begin as JSON gives no members.
pub fn input_of(arguments: &str) -> Value {
    let whole = serde_json::from_str(arguments).ok().filter(Value::is_object);
    let cut = || serde_json::from_str(&close_brackets(arguments)?).ok().filter(Value::is_object);
    whole.or_else(cut).unwrap_or_else(|| Value::Object(Map::new()))
}

/// Returns the text up to its last complete member, with the open brackets closed. None if no bracket is open.
fn close_brackets(text: &str) -> Option<String> {
    let (mut open, mut best): (Vec<char>, Option<(usize, Vec<char>)>) = (Vec::new(), None);
    let (mut in_string, mut is_escaped) = (false, false);
    for (at, char) in text.char_indices() {
        match char {
            _ if is_escaped => is_escaped = false,
            '\\' if in_string => is_escaped = true,
            '"' => in_string = !in_string,
            _ if in_string => {}
            '{' | '[' => {
                open.push(if char == '{' { '}' } else { ']' });
                best = Some((at + 1, open.clone()));
            }
            '}' | ']' => {
                open.pop();
                best = Some((at + 1, open.clone()));
            }
            ',' => best = Some((at, open.clone())),
            _ => {}
        }
    }
    let (end, open) = best?;
    Some(text[..end].chars().chain(open.into_iter().rev()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_call_that_was_cut_off_has_its_whole_members() {
        for (arguments, expected) in [
            ("{\"a\": 1, \"b\": [1, 2]}", json!({ "a": 1, "b": [1, 2] })),
            ("{\"a\": 1, \"b\": [1, 2", json!({ "a": 1, "b": [1] })),
            ("{\"a\": \"x, {\\\"\", \"b\": \"y", json!({ "a": "x, {\"" })),
            ("{\"a\": {\"b\": [], \"c", json!({ "a": { "b": [] } })),
            ("{\"a\": ", json!({})),
            ("{", json!({})),
            ("", json!({})),
            ("12", json!({})),
            ("{'a': 1", json!({})),
            ("]}", json!({})),
        ] {
            assert_eq!(input_of(arguments), expected, "{arguments}");
        }
    }
}
