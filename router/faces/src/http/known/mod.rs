//! Every field that OpenAI, Anthropic, vLLM, llama.cpp, Ollama and SGLang have in a request's body. For each field: the
//! endpoints to which it applies, whether it is supported there, and which values change nothing. Other values are
//! refused, and the refusal names the field. `docs/fields.md` is generated from the list. Has no knowledge of any
//! endpoint's code.

mod list;

use router::refusal::Refusal;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::LazyLock;

/// What reads a body with these fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Completions,
    Responses,
    Messages,
    CountTokens,
    Embeddings,
    /// Of `/v1/rerank` and `/v1/score`.
    Rank,
    Tokenize,
    Detokenize,
    /// The `sampling_parameters` of KServe's protocol.
    Infer,
}

type Endpoints = &'static [Endpoint];

/// A field of a body.
#[derive(Clone, Copy, Debug)]
pub struct KnownField {
    pub name: &'static str,
    /// The APIs that define the field: OpenAI, Anthropic, vLLM, llama.cpp (L), Ollama (M), SGLang, or our own (-).
    pub of: &'static str,
    /// Endpoints to which it applies. Others ignore it, like an unknown field.
    pub on: Endpoints,
    /// Whether these endpoints support it.
    pub is_done: bool,
    /// If it is not supported, the values that are accepted because they change nothing.
    pub neutral: NeutralValues,
    /// A value that has an effect, in JSON.
    pub meant: &'static str,
    /// The field to use instead.
    pub instead: Option<&'static str>,
}

#[derive(Clone, Copy, Debug)]
pub enum NeutralValues {
    None,
    /// Every value: the field changes no answer.
    All,
    /// An empty list, object or text.
    Empty,
    /// Values in JSON. A part of a listed object is neutral too. Null in a listed object stands for any value.
    These(&'static [&'static str]),
}

impl KnownField {
    fn refusal(&self) -> Refusal {
        let message = match (self.instead, self.neutral) {
            (Some(instead), _) => format!("is not supported here; use `{instead}`"),
            (None, NeutralValues::None) => "is not supported here".to_owned(),
            (None, _) => "is not supported yet, except with a value that changes nothing".to_owned(),
        };
        Refusal::invalid(self.name, message)
    }
}

impl NeutralValues {
    pub fn contain(self, value: &Value) -> bool {
        match (self, value) {
            (_, Value::Null) | (NeutralValues::All, _) => true,
            (NeutralValues::Empty, Value::Array(all)) => all.is_empty(),
            (NeutralValues::Empty, Value::Object(all)) => all.is_empty(),
            (NeutralValues::Empty, Value::String(text)) => text.is_empty(),
            (NeutralValues::Empty | NeutralValues::None, _) => false,
            (NeutralValues::These(all), _) => {
                all.iter().any(|one| serde_json::from_str(one).is_ok_and(|neutral| is_part(value, &neutral)))
            }
        }
    }
}

fn is_part(value: &Value, neutral: &Value) -> bool {
    match (value, neutral) {
        (Value::Null, _) | (_, Value::Null) => true,
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Object(some), Value::Object(all)) => {
            some.iter().all(|(name, value)| all.get(name).map_or(value.is_null(), |neutral| is_part(value, neutral)))
        }
        (a, b) => a == b,
    }
}

/// All known fields.
pub static KNOWN_FIELDS: LazyLock<Vec<KnownField>> = LazyLock::new(|| list::known_fields().collect());

static BY_NAME: LazyLock<HashMap<&'static str, Vec<&'static KnownField>>> = LazyLock::new(|| {
    let mut all: HashMap<&str, Vec<&KnownField>> = HashMap::new();
    KNOWN_FIELDS.iter().for_each(|known| all.entry(known.name).or_default().push(known));
    all
});

/// Refuses an unsupported field that would change the answer, or the parts that are sent with it.
pub fn check(name: &str, value: &Value, on: Endpoint) -> Result<(), Refusal> {
    let known = BY_NAME.get(name).and_then(|all| all.iter().find(|known| known.on.contains(&on)));
    match known {
        Some(known) if !known.is_done && !known.neutral.contain(value) => Err(known.refusal()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::NeutralValues::These;
    use super::*;
    use serde_json::json;

    #[test]
    fn every_row_can_be_read() {
        for known in KNOWN_FIELDS.iter() {
            let meant: Value = serde_json::from_str(known.meant).unwrap_or_else(|_| panic!("{known:?}"));
            let is_all = matches!(known.neutral, NeutralValues::All);
            assert_eq!(known.neutral.contain(&meant), is_all, "{known:?}");
            if let These(all) = known.neutral {
                all.iter().for_each(|one| drop(serde_json::from_str::<Value>(one).unwrap()));
            }
            let twice = KNOWN_FIELDS.iter().filter(|other| other.name == known.name);
            let of_row = |of: &Endpoint| twice.clone().filter(|other| other.on.contains(of)).count();
            assert!(known.on.iter().all(|of| of_row(of) == 1), "{known:?}");
        }
    }

    #[test]
    fn a_part_of_a_neutral_object_is_neutral() {
        let neutral = These(&[r#"{"effort": "none", "summary": null}"#, "1"]);
        for value in [json!({}), json!({ "effort": "none" }), json!({ "summary": "auto" }), json!(1.0), json!(null)] {
            assert!(neutral.contain(&value), "{value}");
        }
        for value in [json!({ "effort": "low" }), json!({ "other": 1 }), json!(2), json!("none"), json!([])] {
            assert!(!neutral.contain(&value), "{value}");
        }
    }
}
