//! Finds the family of a `config.json`, and the text model's part in a config of a model for images.

use super::keys::JsonKeys;
use crate::error::ParseError;
use crate::families::{Family, FamilyDefinition, is_wrapper, wrapped_family};
use serde_json::Value;
use std::borrow::Cow;

/// Returns the text model's config: the whole, or the text part of a model for images, with the shared outer fields
/// added.
pub(super) fn text_config(config: &Value) -> Cow<'_, Value> {
    let takes_images = config["architectures"][0].as_str().is_some_and(is_wrapper);
    let part = config.get("text_config").and_then(Value::as_object).filter(|_| takes_images);
    let Some(part) = part else { return Cow::Borrowed(config) };
    let mut text = part.clone();
    text.remove("architectures");
    // The head belongs to the whole.
    if let Some(is_tied) = config.get("tie_word_embeddings").filter(|value| value.is_boolean()) {
        text.insert("tie_word_embeddings".to_owned(), is_tied.clone());
    }
    for key in ["bos_token_id", "eos_token_id", "quantization_config"] {
        if let Some(value) = config.get(key).filter(|_| text.get(key).is_none_or(Value::is_null)) {
            text.insert(key.to_owned(), value.clone());
        }
    }
    let family = text.get("model_type").and_then(Value::as_str).and_then(wrapped_family);
    for (key, value) in family.map_or(&[][..], |(_, defaults)| defaults) {
        if text.get(*key).is_none_or(Value::is_null) {
            text.insert((*key).to_owned(), (*value).into());
        }
    }
    Cow::Owned(Value::Object(text))
}

/// The end of a class with a classifier in place of a head.
pub(super) const CLASSIFIER: &str = "ForSequenceClassification";

/// Whether a config is that of a model that draws no tokens: only of its layers, or of one with a classifier.
pub(super) fn lacks_head(keys: &JsonKeys<'_>) -> bool {
    let class = keys.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    class.is_some_and(|class| class.ends_with(CLASSIFIER) || class.ends_with("Model"))
}

/// The family of a class: its own, or that of a model without a head or with a classifier.
fn of_class(keys: &JsonKeys<'_>, name: &str) -> Option<Family> {
    let is_it = |of: &FamilyDefinition| of.config.class == name || of.config.other_classes.contains(&name);
    let stem = || name.strip_suffix(CLASSIFIER).or_else(|| name.strip_suffix("Model"));
    // Of two sets of keys for one class, the config has one.
    let has_its_keys = |of: &FamilyDefinition| is_it(of) && keys.get(of.config.keys.hidden).is_some();
    Family::find(has_its_keys).or_else(|| Family::find(is_it)).or_else(|| {
        let usual = format!("{}ForCausalLM", stem()?);
        Family::find(|of| of.config.class == usual)
    })
}

pub(super) fn find_family(keys: &JsonKeys<'_>) -> Result<Family, ParseError> {
    let class = keys.get("architectures").and_then(|list| list.get(0)).and_then(Value::as_str);
    let of_type = |name: &str| wrapped_family(name).map(|(family, _)| family);
    let (found, name) = match (class, keys.text("model_type")) {
        // Some older configs of such models have the text model's keys beside the others.
        (Some(name), Some(own_type)) if is_wrapper(name) => (of_type(own_type), name),
        (Some(name), _) => (of_class(keys, name), name),
        (None, Some(name)) => (of_type(name), name),
        (None, None) => return ParseError::malformed("config.json does not name an architecture"),
    };
    found.map_or_else(|| ParseError::unsupported(format!("the architecture {name}")), Ok)
}
