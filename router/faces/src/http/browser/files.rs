//! The page's files from `router/faces/page`, in readable form and within the binary. Their policy lets a browser run
//! and request nothing else.

use crate::http::error::HttpError;
use crate::http::table::{Route, get};
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, HeaderName, HeaderValue, IF_NONE_MATCH,
};
use http::{HeaderMap, Method, StatusCode};

/// Allows scripts, styles and requests of the page's own origin alone: no inline code, no frames, no forms.
const POLICY: &str = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
    object-src 'none'; require-trusted-types-for 'script'; trusted-types 'none'";
const TEXT: &str = "text/html; charset=utf-8";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const PICTURE: &str = "image/svg+xml";

struct PageFile {
    kind: &'static str,
    bytes: &'static [u8],
}

/// One row for each file. A handler finds its file by its type, so the table needs no second list of paths.
macro_rules! rows {
    ($($path:literal $name:literal $kind:ident)*) => {
        vec![$(get($path, concat!("the page: ", $name), |headers: HeaderMap| async move {
            let bytes = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/page/", $name));
            file_response(&headers, &PageFile { kind: $kind, bytes })
        })),*]
    };
}

/// Returns the routes of the page, or one that refuses it.
pub fn page_routes(are_served: bool) -> Vec<Route> {
    match are_served {
        true => file_routes(),
        // Ollama's clients may send HEAD to the same path.
        false => {
            vec![get("/", "refused: the page is disabled", || async { HttpError::no_such_page(&Method::GET, "/") })]
        }
    }
}

fn file_routes() -> Vec<Route> {
    rows![
        "/" "index.html" TEXT
        "/page/look.css" "look.css" STYLE
        "/page/icon.svg" "icon.svg" PICTURE
        "/page/main.js" "main.js" SCRIPT
        "/page/dom.js" "dom.js" SCRIPT
        "/page/server.js" "server.js" SCRIPT
        "/page/icons.js" "icons.js" SCRIPT
        "/page/theme.js" "theme.js" SCRIPT
        "/page/commands.js" "commands.js" SCRIPT
        "/page/markdown.js" "markdown.js" SCRIPT
        "/page/code.js" "code.js" SCRIPT
        "/page/math.js" "math.js" SCRIPT
        "/page/near.js" "near.js" SCRIPT
        "/page/list.js" "list.js" SCRIPT
        "/page/chart.js" "chart.js" SCRIPT
        "/page/cluster.js" "cluster.js" SCRIPT
        "/page/requests.js" "requests.js" SCRIPT
        "/page/waterfall.js" "waterfall.js" SCRIPT
        "/page/load.js" "load.js" SCRIPT
        "/page/models.js" "models.js" SCRIPT
        "/page/chat.js" "chat.js" SCRIPT
        "/page/conversationlist.js" "conversationlist.js" SCRIPT
        "/page/conversations.js" "conversations.js" SCRIPT
        "/page/settings.js" "settings.js" SCRIPT
        "/page/turn.js" "turn.js" SCRIPT
        "/page/probabilities.js" "probabilities.js" SCRIPT
        "/page/reuse.js" "reuse.js" SCRIPT
        "/page/runs.js" "runs.js" SCRIPT
        "/page/answer.js" "answer.js" SCRIPT
    ]
}

/// Returns the file, or 304 if the browser has it already. The browser revalidates each time, so that a new server's
/// page shows at once.
fn file_response(headers: &HeaderMap, file: &PageFile) -> Response {
    let tag = format!("\"{}\"", &blake3::hash(file.bytes).to_hex()[..32]);
    let has_it =
        headers.get_all(IF_NONE_MATCH).iter().any(|given| given.to_str().is_ok_and(|given| given.contains(&tag)));
    let mut response = match has_it {
        true => StatusCode::NOT_MODIFIED.into_response(),
        false => Body::from(file.bytes).into_response(),
    };
    let response_headers = [
        (CONTENT_TYPE, file.kind),
        (CACHE_CONTROL, "no-cache"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (HeaderName::from_static("x-content-type-options"), "nosniff"),
        (HeaderName::from_static("referrer-policy"), "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ];
    for (name, value) in response_headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    if let Ok(tag) = HeaderValue::from_str(&tag) {
        response.headers_mut().insert(ETAG, tag);
    }
    response
}
