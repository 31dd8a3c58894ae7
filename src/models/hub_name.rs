//! A model's name as users copy it: the address of its page at the hub, or Ollama's notation for a model of the hub.

use std::borrow::Cow;

/// The hosts of the public hub.
const HOSTS: [&str; 3] = ["hf.co/", "huggingface.co/", "www.huggingface.co/"];

/// Returns `org/name` for an address, with `@REVISION` and `:VARIANT` if the address has them. Other names stay
/// unchanged.
pub fn to_hub_name(model: &str) -> Cow<'_, str> {
    let bare = ["https://", "http://"].iter().find_map(|scheme| model.strip_prefix(scheme)).unwrap_or(model);
    let Some(id) = HOSTS.iter().find_map(|host| bare.strip_prefix(host)) else { return model.into() };
    let id = id.split(['?', '#']).next().unwrap_or(id).trim_end_matches('/');
    model_of_page(id).map_or(id.into(), Cow::Owned)
}

/// Returns the model of a page within a repository: `org/name/tree/REVISION`, or `/blob/` or `/resolve/` and the path
/// of a file there.
fn model_of_page(id: &str) -> Option<String> {
    let mut parts = id.splitn(5, '/');
    let (org, name, kind, revision) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let revision = if revision == "main" { String::new() } else { format!("@{revision}") };
    match (kind, parts.next()) {
        ("tree", None) => Some(format!("{org}/{name}{revision}")),
        ("blob" | "resolve", Some(file)) if file.ends_with(".gguf") => Some(format!("{org}/{name}{revision}:{file}")),
        // Any other file of a repository means its model.
        ("blob" | "resolve", Some(file)) if !file.contains('/') => Some(format!("{org}/{name}{revision}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_hub_are_names_there() {
        for (address, expect) in [
            ("hf.co/org/name", "org/name"),
            ("hf.co/org/name:Q4_K_M", "org/name:Q4_K_M"),
            ("https://huggingface.co/org/name", "org/name"),
            ("https://huggingface.co/org/name/", "org/name"),
            ("https://huggingface.co/org/name/tree/main", "org/name"),
            ("https://hf.co/org/name?library=x#y", "org/name"),
            ("smollm2", "smollm2"),
            ("org/name", "org/name"),
            ("./hf.co/org/name", "./hf.co/org/name"),
            ("https://elsewhere/org/name", "https://elsewhere/org/name"),
            ("hf.co/org/name@v2:Q8_0", "org/name@v2:Q8_0"),
            ("hf.co/org/name/blob/main/a.gguf", "org/name:a.gguf"),
            ("https://huggingface.co/org/name/resolve/main/q4/a.gguf?download=true", "org/name:q4/a.gguf"),
            ("https://huggingface.co/org/name/blob/v2/a.gguf", "org/name@v2:a.gguf"),
            ("https://huggingface.co/org/name/blob/main/model.safetensors", "org/name"),
            ("hf.co/org/name/tree/v2", "org/name@v2"),
            // A folder within a repository is no model.
            ("hf.co/org/name/tree/main/q4", "org/name/tree/main/q4"),
        ] {
            assert_eq!(to_hub_name(address), expect, "{address}");
        }
    }
}
