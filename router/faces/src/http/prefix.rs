//! The path under which a proxy serves the pages. Knows no page.

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use http::Uri;
use std::sync::Arc;

/// Serves the pages with and without the prefix. An empty prefix changes nothing.
pub fn with_prefix(pages: Router, prefix: String) -> Router {
    if prefix.is_empty() {
        return pages;
    }
    let prefix: Arc<str> = prefix.into();
    // The layer is around a router of its own, because it must change the path before the pages are matched.
    Router::new().fallback_service(pages).layer(from_fn(move |mut request: Request, next: Next| {
        if let Some(uri) = without_prefix(request.uri(), &prefix) {
            *request.uri_mut() = uri;
        }
        next.run(request)
    }))
}

/// None if the path does not begin with the prefix.
fn without_prefix(uri: &Uri, prefix: &str) -> Option<Uri> {
    let rest = uri.path().strip_prefix(prefix).filter(|rest| rest.is_empty() || rest.starts_with('/'))?;
    with_path(uri, if rest.is_empty() { "/" } else { rest })
}

/// Returns the address with another path, and the same query.
pub fn with_path(uri: &Uri, path: &str) -> Option<Uri> {
    let whole = uri.query().map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"));
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(whole.parse().ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_removed_only_where_it_is_a_whole_part() {
        for (uri, rest) in [
            ("/llm/v1/models", Some("/v1/models")),
            ("/llm/v1/models?a=/llm", Some("/v1/models?a=/llm")),
            ("http://host:1/llm/v1", Some("http://host:1/v1")),
            ("/llm", Some("/")),
            ("/llm/llm/a", Some("/llm/a")),
            ("/llms/v1", None),
            ("/v1/llm", None),
            ("*", None),
        ] {
            let found = without_prefix(&uri.parse().unwrap(), "/llm").map(|uri| uri.to_string());
            assert_eq!(found.as_deref(), rest, "{uri}");
        }
    }
}
