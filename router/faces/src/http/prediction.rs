//! `prediction`: the answer that a client expects, in OpenAI's format. The answer arrives sooner where the prediction
//! holds.

use crate::http::fields::{Fields, wrong_type};
use crate::http::single::text_of;
use router::refusal::Refusal;
use serde_json::Value;

const FIELD: &str = "prediction";

pub fn prediction(fields: &mut Fields) -> Result<String, Refusal> {
    read(fields.take(FIELD))
}

fn read(value: Option<Value>) -> Result<String, Refusal> {
    match value {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::Object(mut members)) if members.get("type").and_then(Value::as_str) == Some("content") => {
            text_of("prediction.content", members.remove("content"), &["text"])
        }
        Some(other) => Err(wrong_type(FIELD, "an object of the type `content`", &other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_prediction_is_a_text_or_parts_of_one() {
        assert_eq!(read(None).unwrap(), "");
        assert_eq!(read(Some(json!({"type": "content", "content": "a b"}))).unwrap(), "a b");
        let parts =
            json!({"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
        assert_eq!(read(Some(parts)).unwrap(), "a\nb");
        for wrong in
            [json!("a"), json!({"content": "a"}), json!({"type": "content"}), json!({"type": "x", "content": "a"})]
        {
            let message = read(Some(wrong.clone())).unwrap_err().to_string();
            assert!(message.contains("prediction"), "{wrong}: {message}");
        }
    }
}
