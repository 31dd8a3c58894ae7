//! Lists of items, each with an id, one page at a time. Has no knowledge of stores.

use router::refusal::Refusal;
use serde_json::{Map, Value, json};

/// How many items a list shows by default.
const LISTED: usize = 20;
const LISTED_MAX: usize = 100;

/// The requested part of a list.
pub struct PageQuery {
    limit: usize,
    is_ascending: bool,
    after: Option<String>,
}

impl PageQuery {
    /// Reads the part from the query.
    pub fn read(query: Option<&str>) -> Result<PageQuery, Refusal> {
        let limit = match query_param(query, "limit").map(str::parse) {
            None => LISTED,
            Some(Ok(n @ 1..=LISTED_MAX)) => n,
            Some(_) => return Err(Refusal::invalid("limit", format!("must be 1 to {LISTED_MAX}"))),
        };
        let is_ascending = match query_param(query, "order") {
            None | Some("desc") => false,
            Some("asc") => true,
            Some(_) => return Err(Refusal::invalid("order", "must be asc or desc")),
        };
        Ok(PageQuery { limit, is_ascending, after: query_param(query, "after").map(str::to_owned) })
    }

    /// Returns that part of all items, which are in their order.
    pub fn select(&self, mut items: Vec<Value>) -> Result<Value, Refusal> {
        if !self.is_ascending {
            items.reverse();
        }
        let begin = match &self.after {
            None => 0,
            Some(after) => match items.iter().position(|item| item["id"] == **after) {
                Some(at) => at + 1,
                None => return Err(Refusal::invalid("after", "does not match the id of any item")),
            },
        };
        let end = items.len().min(begin + self.limit);
        Ok(list(&items[begin..end], end < items.len()))
    }
}

pub fn list(items: &[Value], has_more: bool) -> Value {
    json!({
        "object": "list",
        "data": items,
        "first_id": items.first().map(|item| &item["id"]),
        "last_id": items.last().map(|item| &item["id"]),
        "has_more": has_more,
    })
}

/// Returns an item with an id: this one, unless the client gave it one. Text is in parts, as clients expect it.
pub fn listed_item(item: &Value, id: String) -> Value {
    let kind = item["type"].as_str().unwrap_or("message");
    let mut shown = Map::from_iter([("id".to_owned(), id.into()), ("type".to_owned(), kind.into())]);
    let given = item.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    shown.extend(given.map(|(name, value)| (name.clone(), value.clone())));
    if let Some(Value::String(text)) = shown.get("content") {
        let kind = if item["role"] == "assistant" { "output_text" } else { "input_text" };
        let mut part = json!({ "type": kind, "text": text });
        if kind == "output_text" {
            part["annotations"] = json!([]);
        }
        shown.insert("content".to_owned(), json!([part]));
    }
    shown.entry("status").or_insert_with(|| "completed".into());
    Value::Object(shown)
}

/// Returns a parameter of the query.
pub fn query_param<'a>(query: Option<&'a str>, name: &str) -> Option<&'a str> {
    let mut all = query?.split('&').filter_map(|one| one.split_once('='));
    all.find(|(of, _)| *of == name).map(|(_, value)| value)
}
