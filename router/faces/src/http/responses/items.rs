//! Items of a conversation: the client's items after checks, and the stored format. Has no knowledge of responses.

use crate::http::fields::{Fields, wrong_type};
use crate::http::responses::input;
use crate::http::responses::lists::listed_item;
use router::front::frontend::Frontend;
use router::front::stored::StoredItem;
use router::refusal::Refusal;
use serde_json::{Map, Value};

/// How many items a client may add at once.
const ITEMS_AT_ONCE_MAX: usize = 20;
const PAIRS_MAX: usize = 16;
const KEY_CHARS_MAX: usize = 64;
const VALUE_CHARS_MAX: usize = 512;

/// Takes the items of the field `items`; None without it.
pub fn read(fields: &mut Fields) -> Result<Option<Vec<Value>>, Refusal> {
    let items = match fields.take("items") {
        None => return Ok(None),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong_type("items", "a list of items", &other)),
    };
    if items.len() > ITEMS_AT_ONCE_MAX {
        let why = format!("has {} items; at most {ITEMS_AT_ONCE_MAX} can be added at once", items.len());
        return Err(Refusal::invalid("items", why));
    }
    if let Some((i, other)) = items.iter().enumerate().find(|(_, item)| !item.is_object()) {
        return Err(wrong_type(format!("items[{i}]"), "an object", other));
    }
    input::messages(&items, 0, ("conversation", "items"))?;
    Ok(Some(items))
}

/// Takes the field `metadata` as text; None without it.
pub fn metadata(fields: &mut Fields) -> Result<Option<String>, Refusal> {
    let pairs = match fields.take("metadata") {
        None => return Ok(None),
        Some(Value::Object(members)) => members,
        Some(other) => return Err(wrong_type("metadata", "an object", &other)),
    };
    if pairs.len() > PAIRS_MAX {
        let why = format!("has {} pairs; at most {PAIRS_MAX} are allowed", pairs.len());
        return Err(Refusal::invalid("metadata", why));
    }
    for (name, value) in &pairs {
        let value = value.as_str().ok_or_else(|| Refusal::invalid("metadata", "all values must be strings"))?;
        if name.chars().count() > KEY_CHARS_MAX || value.chars().count() > VALUE_CHARS_MAX {
            let why = format!("a name may have at most {KEY_CHARS_MAX} characters, and a value {VALUE_CHARS_MAX}");
            return Err(Refusal::invalid("metadata", why));
        }
    }
    Ok(Some(Value::Object(pairs).to_string()))
}

/// Returns items in the stored format. Each gets a unique id, whatever id its client gave it.
pub fn stored_items<'a>(front: &Frontend, items: impl Iterator<Item = &'a Value>) -> Vec<StoredItem> {
    let stored = |item: &Value| {
        let id = format!("{}_{}", prefix(item), front.ids.next_kept());
        let mut item = item.as_object().cloned().unwrap_or_else(Map::new);
        item.remove("id");
        StoredItem { text: listed_item(&Value::Object(item), id.clone()).to_string(), id }
    };
    items.map(stored).collect()
}

fn prefix(item: &Value) -> &'static str {
    match item["type"].as_str() {
        Some("reasoning") => "rs",
        Some("function_call") => "fc",
        Some("function_call_output") => "fco",
        Some("custom_tool_call") => "ctc",
        Some("custom_tool_call_output") => "ctco",
        _ => "msg",
    }
}
