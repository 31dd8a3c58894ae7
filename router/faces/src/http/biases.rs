//! Reads `logit_bias`: by token ids, and on llama.cpp's pages also by texts. Has no knowledge of other fields.

use crate::http::fields::{Fields, wrong_type};
use proto::v1::generate_request::Input;
use router::front::frontend::{Frontend, unix_seconds};
use router::refusal::Refusal;
use router::replicas::models::text::ModelText;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

pub const FIELD: &str = "logit_bias";
/// The bias that excludes a token.
const NEVER: f32 = -100.0;
/// How many invalid keys a refusal lists, and how many characters of each.
const LISTED_MAX: usize = 5;
const CHARS_MAX: usize = 40;

/// Reads an object whose keys are token ids as strings, or llama.cpp's list of pairs of token id and bias.
pub fn read(value: Option<Value>) -> Result<HashMap<u32, f32>, Refusal> {
    let all = match value {
        None => return Ok(HashMap::new()),
        Some(Value::Object(all)) => all,
        Some(Value::Array(pairs)) => return pairs.iter().map(parse_pair).collect(),
        Some(other) => return Err(wrong_type(FIELD, "an object", &other)),
    };
    let strange: Vec<&str> = all.keys().map(String::as_str).filter(|key| parse_token_id(key).is_none()).collect();
    if !strange.is_empty() {
        return Err(invalid_keys(&strange));
    }
    let one = |(key, bias): (&String, &Value)| {
        let number = bias.as_f64().ok_or_else(|| wrong_type(FIELD, "a number for each token", bias))?;
        Ok((parse_token_id(key).unwrap_or_default(), number as f32))
    };
    all.iter().map(one).collect()
}

fn parse_token_id(key: &str) -> Option<u32> {
    key.parse().ok()
}

fn invalid_keys(keys: &[&str]) -> Refusal {
    let listed = keys.iter().take(LISTED_MAX).map(|key| key.chars().take(CHARS_MAX).collect::<String>());
    let listed = listed.collect::<Vec<_>>().join("`, `");
    Refusal::invalid(FIELD, format!("its members must be token ids, got `{listed}`"))
}

/// Reads a token and its bias; `false` excludes the token.
fn parse_pair(pair: &Value) -> Result<(u32, f32), Refusal> {
    let wrong = || Refusal::invalid(FIELD, "its members must be pairs of a token id and a number, or false");
    let [token, bias] = pair.as_array().map(Vec::as_slice).unwrap_or_default() else { return Err(wrong()) };
    let id = token.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(wrong)?;
    let bias = if bias == &Value::Bool(false) { Some(NEVER) } else { bias.as_f64().map(|bias| bias as f32) };
    Ok((id, bias.ok_or_else(wrong)?))
}

/// Replaces each text by its tokens, and gives each token the text's bias. Stops when there are more biases than the
/// limit allows, and the later check refuses them: pairs of tokens take many times the memory of the text.
pub async fn texts_to_tokens(front: &Frontend, of: &Arc<ModelText>, fields: &mut Fields) -> Result<(), Refusal> {
    let n_max = front.config.limits.logit_bias_max;
    let n_biases = match fields.get(FIELD) {
        Some(Value::Object(all)) => all.len(),
        Some(Value::Array(all)) => all.len(),
        _ => 0,
    };
    if n_biases > n_max {
        return Ok(());
    }
    let pairs: Vec<(Value, Value)> = match fields.get(FIELD) {
        Some(Value::Object(all)) => all.iter().map(|(key, bias)| (key_value(key), bias.clone())).collect(),
        Some(Value::Array(all)) if all.iter().any(|pair| pair[0].is_string()) => {
            all.iter().map(|pair| (pair[0].clone(), pair[1].clone())).collect()
        }
        _ => return Ok(()),
    };
    let mut by_token = TokenBiases::default();
    for (token, bias) in pairs {
        // A later check refuses a value that is no bias. Null keeps it from being copied for each token before that.
        let bias = if bias.is_number() || bias.is_boolean() { bias } else { Value::Null };
        match token {
            Value::String(text) => {
                let ids = front.texts.tokens(of, Input::Text(text), false, unix_seconds()).await?;
                for id in ids {
                    if by_token.put(id, &bias) > n_max {
                        break;
                    }
                }
            }
            id => match id.as_u64().and_then(|id| u32::try_from(id).ok()) {
                Some(id) => {
                    by_token.put(id, &bias);
                }
                None => by_token.pairs.push(json!([id, bias])),
            },
        }
    }
    fields.put(FIELD, by_token.pairs.into());
    Ok(())
}

/// One pair for each token. A later pair replaces an earlier one.
#[derive(Default)]
struct TokenBiases {
    pairs: Vec<Value>,
    places: HashMap<u32, usize>,
}

impl TokenBiases {
    /// Returns how many pairs there are now.
    fn put(&mut self, id: u32, bias: &Value) -> usize {
        let pair = json!([id, bias]);
        match self.places.entry(id) {
            Entry::Occupied(place) => self.pairs[*place.get()] = pair,
            Entry::Vacant(place) => {
                place.insert(self.pairs.len());
                self.pairs.push(pair);
            }
        }
        self.pairs.len()
    }
}

fn key_value(key: &str) -> Value {
    parse_token_id(key).map_or_else(|| key.into(), Value::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_bias_of_a_token_wins() {
        let mut by_token = TokenBiases::default();
        assert_eq!([(7, 1), (8, 2), (7, 3)].map(|(id, bias)| by_token.put(id, &bias.into())), [1, 2, 2]);
        assert_eq!(by_token.pairs, [json!([7, 3]), json!([8, 2])]);
    }
}
