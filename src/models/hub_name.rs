//! A model's name as people copy it: an address of the hub's page, or what Ollama's users write for a hub's model.

/// The hosts of the public hub.
const HOSTS: [&str; 3] = ["hf.co/", "huggingface.co/", "www.huggingface.co/"];

/// `org/name` or `org/name:VARIANT` out of an address; anything else as it is.
pub fn named(model: &str) -> &str {
    let bare = ["https://", "http://"].iter().find_map(|scheme| model.strip_prefix(scheme)).unwrap_or(model);
    let Some(id) = HOSTS.iter().find_map(|host| bare.strip_prefix(host)) else { return model };
    let id = id.split(['?', '#']).next().unwrap_or(id).trim_end_matches('/');
    // What follows the first two parts is a place within the repository's page.
    let mut slashes = id.match_indices('/').map(|(at, _)| at);
    match (slashes.next(), slashes.next()) {
        (Some(_), Some(end)) if id[end..] == *"/tree/main" => &id[..end],
        _ => id,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_hub_are_names_there() {
        for (said, expect) in [
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
            // A file or another revision is not silently another model.
            ("hf.co/org/name/blob/main/a.gguf", "org/name/blob/main/a.gguf"),
            ("hf.co/org/name/tree/v2", "org/name/tree/v2"),
        ] {
            assert_eq!(named(said), expect, "{said}");
        }
    }
}
