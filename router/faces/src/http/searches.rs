//! `use_beam_search` and its parameters, in vLLM's format: `best_of` is the number of beams.

use crate::http::fields::{Fields, wrong_type};
use proto::v1::BeamSearch;
use proto::v1::beam_search::Patience;
use router::refusal::Refusal;
use serde_json::Value;

pub fn beams(fields: &mut Fields) -> Result<Option<BeamSearch>, Refusal> {
    let is_beam_search = fields.boolean("use_beam_search")?.unwrap_or(false);
    let length_penalty = fields.number("length_penalty")?;
    let patience = patience(fields.take("early_stopping"))?;
    if is_beam_search {
        return Ok(Some(BeamSearch { length_penalty, patience: patience.into() }));
    }
    let alone = [
        ("length_penalty", length_penalty.is_some_and(|penalty| penalty != 1.0)),
        ("early_stopping", patience != Patience::Unspecified),
    ];
    match alone.into_iter().find(|(_, changes)| *changes) {
        Some((field, _)) => Err(Refusal::invalid(field, "needs `use_beam_search` to be true")),
        None => Ok(None),
    }
}

/// Reads when a search ends: `false`, `true` or `"never"`, as in transformers.
fn patience(value: Option<Value>) -> Result<Patience, Refusal> {
    match value {
        None | Some(Value::Null | Value::Bool(false)) => Ok(Patience::Unspecified),
        Some(Value::Bool(true)) => Ok(Patience::UntilFull),
        Some(Value::String(word)) if word == "never" => Ok(Patience::WhilePossible),
        Some(other) => Err(wrong_type("early_stopping", "true, false or \"never\"", &other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: Value) -> Result<Option<BeamSearch>, String> {
        let Value::Object(members) = body else { panic!("no object") };
        beams(&mut Fields::of(members)).map_err(|refusal| refusal.to_string())
    }

    #[test]
    fn a_search_has_the_words_of_peers() {
        let search = |length_penalty, patience: Patience| BeamSearch { length_penalty, patience: patience.into() };
        let of = |rest: Value| {
            let mut body = json!({"use_beam_search": true});
            let Value::Object(rest) = rest else { panic!("no object") };
            body.as_object_mut().unwrap().extend(rest);
            read(body).unwrap().unwrap()
        };
        assert_eq!(of(json!({})), search(None, Patience::Unspecified));
        assert_eq!(of(json!({"early_stopping": true})), search(None, Patience::UntilFull));
        let never = json!({"early_stopping": "never", "length_penalty": 0.5});
        assert_eq!(of(never), search(Some(0.5), Patience::WhilePossible));
        assert!(
            read(json!({"use_beam_search": true, "early_stopping": "late"})).unwrap_err().contains("early_stopping")
        );
    }

    #[test]
    fn without_a_search_its_words_are_refused_where_they_would_matter() {
        assert_eq!(read(json!({"length_penalty": 1.0, "early_stopping": false, "use_beam_search": false})), Ok(None));
        assert!(read(json!({"length_penalty": 2.0})).unwrap_err().contains("use_beam_search"));
        assert!(read(json!({"early_stopping": "never"})).unwrap_err().contains("use_beam_search"));
    }
}
