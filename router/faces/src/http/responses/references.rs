//! Items of the field `input` that only have the id of a stored item: an output or input item of a stored response, or
//! an item of a conversation. Has no knowledge of prompts.

use crate::http::error::HttpError;
use crate::http::page::ApiRequest;
use crate::http::responses::reply::id_of;
use crate::http::responses::stored::own_items;
use router::front::frontend::Frontend;
use router::front::stored::{StoredItem, StoredResponse};
use router::refusal::Refusal;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use types::TenantId;

const FIELD: &str = "input";
const KIND: &str = "item_reference";

/// Replaces references with their items, which take room beside the bodies that are being read, as if the client had
/// sent them.
pub async fn resolve(front: &Frontend, page: &mut ApiRequest) -> Result<(), HttpError> {
    let Some(Value::Array(items)) = page.fields.get(FIELD) else { return Ok(()) };
    let mut ids = HashSet::new();
    for (i, item) in items.iter().enumerate() {
        match referenced_id(item) {
            Some(id) => {
                ids.insert(id.to_owned());
            }
            None if item["type"] == KIND => {
                return Err(Refusal::invalid(format!("{FIELD}[{i}].id"), "must be the id of a stored item").into());
            }
            None => {}
        }
    }
    if ids.is_empty() {
        return Ok(());
    }
    let sources = ItemSources::find(front, page.tenant, &ids);
    page.reserve_body_bytes(front, sources.n_bytes())?;
    let found = front.texts.off_runtime(sources.n_bytes(), move || sources.read(&ids)).await?;
    let n_bytes = n_resolved_bytes(page.fields.get(FIELD), &found)?;
    if n_bytes > front.config.limits.body_bytes_max {
        let why = format!("with its stored items exceeds the limit of {} bytes", front.config.limits.body_bytes_max);
        return Err(Refusal::invalid(FIELD, why).into());
    }
    page.reserve_body_bytes(front, n_bytes)?;
    let mut input = page.fields.take(FIELD).unwrap_or_default();
    let replace = move || {
        for item in input.as_array_mut().into_iter().flatten() {
            if let Some(stored) = referenced_id(item).and_then(|id| found.get(id)) {
                *item = stored.value.clone();
            }
        }
        input
    };
    let input = front.texts.off_runtime(n_bytes, replace).await?;
    page.fields.put(FIELD, input);
    Ok(())
}

/// Returns the id of a reference. Its type may be absent, as in OpenAI's API.
fn referenced_id(item: &Value) -> Option<&str> {
    let is_reference = match &item["type"] {
        Value::Null => item.get("role").is_none() && item.get("content").is_none(),
        kind => kind == KIND,
    };
    item["id"].as_str().filter(|_| is_reference)
}

/// Returns the length of all items that replace a reference.
fn n_resolved_bytes(input: Option<&Value>, found: &HashMap<String, FoundItem>) -> Result<usize, HttpError> {
    let ids = input.and_then(Value::as_array).into_iter().flatten().filter_map(referenced_id);
    let n_bytes = ids.map(|id| found.get(id).map(|item| item.n_bytes).ok_or_else(|| HttpError::no_stored_item(id)));
    n_bytes.sum()
}

struct FoundItem {
    value: Value,
    n_bytes: usize,
}

/// The stored texts in which the items are.
struct ItemSources {
    responses: Vec<(String, Arc<StoredResponse>)>,
    items: Vec<Arc<StoredItem>>,
}

impl ItemSources {
    fn find(front: &Frontend, tenant: TenantId, ids: &HashSet<String>) -> ItemSources {
        let of_responses: HashSet<String> = ids.iter().filter_map(|id| response_of(id)).collect();
        let responses = of_responses.into_iter().filter_map(|id| {
            let stored = front.responses.get(tenant, &id)?;
            let is_over = stored.run.as_ref().is_none_or(|run| matches!(run.end(), Some("completed" | "incomplete")));
            is_over.then_some((id, stored))
        });
        ItemSources { responses: responses.collect(), items: front.responses.find_items(tenant, ids) }
    }

    fn n_bytes(&self) -> usize {
        let responses = self.responses.iter().map(|(_, stored)| stored.items.len() + stored.reply.len());
        responses.sum::<usize>() + self.items.iter().map(|item| item.text.len()).sum::<usize>()
    }

    fn read(&self, ids: &HashSet<String>) -> HashMap<String, FoundItem> {
        let mut found = HashMap::new();
        let mut add = |value: Value| {
            if let Some(id) = value["id"].as_str().filter(|id| ids.contains(*id)) {
                let n_bytes = value.to_string().len();
                found.insert(id.to_owned(), FoundItem { value, n_bytes });
            }
        };
        for (id, stored) in &self.responses {
            let mut reply: Value = serde_json::from_str(&stored.reply).unwrap_or_default();
            own_items(stored, id).into_iter().for_each(&mut add);
            reply["output"].as_array_mut().map(std::mem::take).into_iter().flatten().for_each(&mut add);
        }
        self.items.iter().filter_map(|item| serde_json::from_str(&item.text).ok()).for_each(add);
        found
    }
}

/// Returns the id of the response to which an item belongs. `OutputItems` and `own_items` make ids of items from it.
fn response_of(item: &str) -> Option<String> {
    let (_kind, rest) = item.split_once('_')?;
    let (answer, at) = rest.rsplit_once('_')?;
    let n = at.strip_prefix("in").unwrap_or(at);
    let is_number = !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| id_of(answer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ids_name_their_response() {
        for (item, response) in [
            ("msg_0a_0", Some("resp_0a")),
            ("fc_0a_12", Some("resp_0a")),
            ("item_0a_in3", Some("resp_0a")),
            ("msg_0a", None),
            ("msg_0a_", None),
            ("msg_0a_in", None),
            ("msg", None),
        ] {
            assert_eq!(response_of(item).as_deref(), response, "{item}");
        }
    }

    #[test]
    fn references_may_be_without_a_type() {
        for (item, id) in [
            (json!({ "type": "item_reference", "id": "a" }), Some("a")),
            (json!({ "type": null, "id": "a" }), Some("a")),
            (json!({ "id": "a" }), Some("a")),
            (json!({ "id": "a", "role": "user", "content": "Hi" }), None),
            (json!({ "id": "a", "type": "message" }), None),
            (json!({ "type": "item_reference" }), None),
            (json!("a"), None),
        ] {
            assert_eq!(referenced_id(&item), id, "{item}");
        }
    }
}
