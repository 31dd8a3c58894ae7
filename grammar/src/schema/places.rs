//! The schemas of a document: where each is, what refers to it. Nothing is fetched: what is not in the document is
//! refused.

use super::keywords;
use crate::{GrammarLimits, GrammarRefused};
use serde_json::Value;
use std::collections::HashMap;

/// A schema of the document, by its number.
pub(crate) type SchemaIdx = u32;

pub(crate) struct SchemaPlaces<'a> {
    all: Vec<SchemaPlace<'a>>,
    by_address: HashMap<*const Value, SchemaIdx>,
    /// Absolute addresses of `$id`, and with a fragment of `$anchor`.
    addresses: HashMap<String, SchemaIdx>,
    /// `$dynamicAnchor`s: their names, and how many places have one.
    dynamic: HashMap<String, Vec<SchemaIdx>>,
}

struct SchemaPlace<'a> {
    value: &'a Value,
    path: String,
    /// The resource that it belongs to: its root, and its address.
    root: SchemaIdx,
    base: String,
}

impl<'a> SchemaPlaces<'a> {
    pub(crate) fn of(
        documents: &[(&'a Value, &str)],
        limits: &GrammarLimits,
    ) -> Result<SchemaPlaces<'a>, GrammarRefused> {
        let mut places = SchemaPlaces {
            all: Vec::new(),
            by_address: HashMap::new(),
            addresses: HashMap::new(),
            dynamic: HashMap::new(),
        };
        for (document, path) in documents {
            places.add_document(document, (*path).to_owned(), limits)?;
        }
        Ok(places)
    }

    fn add_document(
        &mut self,
        document: &'a Value,
        path: String,
        limits: &GrammarLimits,
    ) -> Result<(), GrammarRefused> {
        let mut left = vec![(document, path, None::<SchemaIdx>)];
        while let Some((value, path, parent)) = left.pop() {
            if self.all.len() == limits.nodes_max {
                return Err(GrammarRefused::too_large("the number of schemas", limits.nodes_max));
            }
            let place = self.all.len() as SchemaIdx;
            let (mut root, mut base) = parent.map_or((place, String::new()), |parent| {
                let parent = &self.all[parent as usize];
                (parent.root, parent.base.clone())
            });
            if let Some(id) = value.get("$id").and_then(Value::as_str) {
                (root, base) = (place, resolve_address(&base, id.trim_end_matches('#')));
                if self.addresses.insert(base.clone(), place).is_some() {
                    return Err(GrammarRefused::invalid(path + "/$id", format!("{id} is the address of two schemas")));
                }
            }
            self.all.push(SchemaPlace { value, path, root, base });
            self.by_address.insert(value, place);
            self.note_anchors(place)?;
            let at = &self.all[place as usize];
            for (path, child) in keywords::subschemas(value, &at.path)? {
                left.push((child, path, Some(place)));
            }
        }
        Ok(())
    }

    fn note_anchors(&mut self, place: SchemaIdx) -> Result<(), GrammarRefused> {
        let SchemaPlace { value, base, path, .. } = &self.all[place as usize];
        for key in ["$anchor", "$dynamicAnchor"] {
            let Some(name) = value.get(key).and_then(Value::as_str) else { continue };
            if self.addresses.insert(format!("{base}#{name}"), place).is_some() {
                return Err(GrammarRefused::invalid(format!("{path}/{key}"), format!("{name} names two schemas")));
            }
            if key == "$dynamicAnchor" {
                self.dynamic.entry(name.to_owned()).or_default().push(place);
            }
        }
        Ok(())
    }

    pub(crate) fn value(&self, place: SchemaIdx) -> &'a Value {
        self.all[place as usize].value
    }

    pub(crate) fn path(&self, place: SchemaIdx) -> &str {
        &self.all[place as usize].path
    }

    /// The schema `false`, which is the first of the documents.
    pub(crate) fn false_schema(&self) -> SchemaIdx {
        0
    }

    /// The place of a schema that a keyword holds.
    pub(crate) fn schema_of(&self, value: &'a Value) -> Result<SchemaIdx, GrammarRefused> {
        self.place(value).ok_or_else(|| GrammarRefused::invalid("", "it is not a place for a schema"))
    }

    /// The place of a schema that lies in a known place.
    pub(crate) fn place(&self, value: &'a Value) -> Option<SchemaIdx> {
        self.by_address.get(&(value as *const Value)).copied()
    }

    /// What `$ref` refers to.
    pub(crate) fn resolve_ref(&self, from: SchemaIdx, reference: &str) -> Result<SchemaIdx, GrammarRefused> {
        let SchemaPlace { base, root, path, .. } = &self.all[from as usize];
        let unknown = |why: &str| GrammarRefused::unsupported(format!("{path}/$ref"), format!("{reference:?}, {why},"));
        let (address, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let root = if address.is_empty() {
            *root
        } else {
            let address = resolve_address(base, address);
            *self.addresses.get(&address).ok_or_else(|| unknown("which is not in the document"))?
        };
        let fragment = percent_decoded(fragment).ok_or_else(|| unknown("whose fragment is not UTF-8"))?;
        if fragment.is_empty() {
            return Ok(root);
        }
        if !fragment.starts_with('/') {
            let address = format!("{}#{fragment}", self.all[root as usize].base);
            return self.addresses.get(&address).copied().ok_or_else(|| unknown("an anchor that does not exist"));
        }
        let value = self.value(root).pointer(&fragment).ok_or_else(|| unknown("which points to no value"))?;
        self.place(value).ok_or_else(|| unknown("which points to no schema"))
    }

    /// What `$dynamicRef` refers to, where that is the same from everywhere: the initial target, if it is not
    /// dynamic, or if no other place has its anchor.
    pub(crate) fn resolve_dynamic_ref(&self, from: SchemaIdx, reference: &str) -> Result<SchemaIdx, GrammarRefused> {
        let target = self.resolve_ref(from, reference)?;
        let name = reference.split_once('#').map_or("", |(_, fragment)| fragment);
        let is_dynamic = self.value(target).get("$dynamicAnchor").and_then(Value::as_str) == Some(name);
        if is_dynamic && self.dynamic.get(name).is_some_and(|places| places.len() > 1) {
            let at = format!("{}/$dynamicRef", self.path(from));
            return Err(GrammarRefused::unsupported(
                at,
                format!("{reference:?}, an anchor that several schemas have,"),
            ));
        }
        Ok(target)
    }
}

fn percent_decoded(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let (mut decoded, mut i) = (Vec::with_capacity(bytes.len()), 0);
    while i < bytes.len() {
        if bytes[i] == b'%' {
            let digits = std::str::from_utf8(bytes.get(i + 1..i + 3)?).ok()?;
            decoded.push(u8::from_str_radix(digits, 16).ok()?);
            i += 3;
        } else {
            decoded.push(bytes[i]);
            i += 1;
        }
    }
    String::from_utf8(decoded).ok()
}

/// A reference against a base, as far as names need it: an address is only ever compared.
fn resolve_address(base: &str, reference: &str) -> String {
    let has_scheme = reference.split_once(':').is_some_and(|(scheme, _)| {
        !scheme.is_empty() && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
    });
    if has_scheme || base.is_empty() {
        return reference.to_owned();
    }
    let host_at = base.find("://").map_or(0, |at| at + 3);
    let path_at = base[host_at..].find('/').map_or(base.len(), |at| host_at + at);
    let (host, path) = base.split_at(path_at);
    if reference.starts_with("//") {
        return format!("{}{reference}", base.split_once("//").map_or("", |(scheme, _)| scheme));
    }
    let joined = match reference.strip_prefix('/') {
        Some(_) => reference.to_owned(),
        None => format!("{}/{reference}", path.rsplit_once('/').map_or("", |(folder, _)| folder)),
    };
    let mut parts: Vec<&str> = Vec::new();
    for part in joined.split('/').skip(1) {
        match part {
            "." => {}
            ".." => _ = parts.pop(),
            part => parts.push(part),
        }
    }
    format!("{host}/{}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::resolve_address;

    #[test]
    fn references_are_joined_with_their_base() {
        let cases = [
            ("http://a/b/c.json", "d.json", "http://a/b/d.json"),
            ("http://a/b/c.json", "/d.json", "http://a/d.json"),
            ("http://a/b/c/", "../d", "http://a/b/d"),
            ("http://a", "d", "http://a/d"),
            ("", "d", "d"),
            ("http://a/b", "urn:x:y", "urn:x:y"),
        ];
        for (base, reference, expect) in cases {
            assert_eq!(resolve_address(base, reference), expect, "{base} {reference}");
        }
    }
}
