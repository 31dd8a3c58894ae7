//! Finds the family of a `config.json`, and the text model's part in a config of a model for images.

use super::keys::JsonKeys;
use crate::error::ParseError;
use crate::families::Family;
use serde_json::Value;
use std::borrow::Cow;

/// Returns the text model's config: the whole, or the text part of a model for images, with the shared outer fields
/// added.
pub(super) fn text_config(config: &Value) -> Cow<'_, Value> {
    let class = config["architectures"][0].as_str();
    let takes_images = || class.is_some() && Family::find(|of| of.config.image_class == class).is_some();
    let part = config.get("text_config").and_then(Value::as_object).filter(|_| takes_images());
    let Some(part) = part else { return Cow::Borrowed(config) };
    let mut text = part.clone();
    text.remove("architectures");
    for key in ["tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config"] {
        if let Some(value) = config.get(key).filter(|_| text.get(key).is_none_or(Value::is_null)) {
            text.insert(key.to_owned(), value.clone());
        }
    }
    let family = text.get("model_type").and_then(Value::as_str).and_then(of_model_type);
    for (key, value) in family.map_or(&[][..], |family| family.definition().config.text_defaults) {
        if text.get(*key).is_none_or(Value::is_null) {
            text.insert((*key).to_owned(), (*value).into());
        }
    }
    Cow::Owned(Value::Object(text))
}

fn of_model_type(name: &str) -> Option<Family> {
    Family::find(|of| of.config.model_type == name)
}

pub(super) fn find_family(keys: &JsonKeys<'_>) -> Result<Family, ParseError> {
    let class = keys.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let (found, name) = match (class, keys.text("model_type")) {
        (Some(name), _) => (Family::find(|of| of.config.class == name), name),
        (None, Some(name)) => (of_model_type(name), name),
        (None, None) => return ParseError::malformed("config.json does not name an architecture"),
    };
    found.map_or_else(|| ParseError::unsupported(format!("the architecture {name}")), Ok)
}
