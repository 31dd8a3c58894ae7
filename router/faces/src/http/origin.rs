//! Which web pages may send requests through a browser. If the server requires keys, any page may: a foreign page has
//! no key, and there are no cookies. If the server requires none, a browser would send requests for whatever page it
//! shows, and nothing else would keep that page out. Then the page's origin must be this machine. On a loopback address
//! the server's name in the request must also be this machine's, because a page's own name may resolve to that address.
//! Has no knowledge of endpoints.

use crate::http::error::HttpError;
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, HOST, HeaderMap, HeaderValue, ORIGIN, VARY,
};
use http::uri::Authority;
use http::{Method, StatusCode, Uri};
use router::config::Config;
use router::limits::keys::ApiKeys;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// How many characters of a refused name an error repeats.
const NAME_CHARS_MAX: usize = 100;
/// In a list of names: any name.
const ANY: &str = "*";

/// The names and origins that a server accepts.
pub struct OriginPolicy {
    keys: ApiKeys,
    bound: IpAddr,
    hosts: Vec<String>,
    origins: Vec<String>,
}

/// The origins whose pages may read an answer.
enum AllowedReaders {
    All,
    /// The page that sent the request.
    This(HeaderValue),
    /// No page sent the request.
    None,
}

impl OriginPolicy {
    pub fn new(config: &Config, keys: ApiKeys, bound: SocketAddr) -> Arc<OriginPolicy> {
        let (hosts, origins) = (config.hosts_allowed.clone(), config.origins_allowed.clone());
        Arc::new(OriginPolicy { keys, bound: bound.ip().to_canonical(), hosts, origins })
    }

    /// Returns the pages that may read the answer, or the refusal.
    fn check(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<AllowedReaders, HttpError> {
        if !self.keys.is_open() {
            return Ok(headers.get(ORIGIN).map_or(AllowedReaders::All, |origin| AllowedReaders::This(origin.clone())));
        }
        let host = host(uri, headers)?;
        if let Some(host) = host.as_deref().filter(|host| self.bound.is_loopback() && !self.is_own(host)) {
            let host_name = truncated_name(host);
            let message =
                format!("`{host_name}` is not a name of this server: use localhost, or start it with --allowed-hosts");
            return Err(HttpError::bad_request(StatusCode::FORBIDDEN, message));
        }
        let Some(origin) = headers.get(ORIGIN) else {
            return match is_from_another_site(method, headers) {
                true => {
                    Err(HttpError::bad_request(StatusCode::FORBIDDEN, "pages of other sites may not send requests"))
                }
                false => Ok(AllowedReaders::None),
            };
        };
        let text = origin.to_str().unwrap_or_default();
        let of_page = text.parse::<Uri>().ok().and_then(|uri| uri.host().map(normalized_host));
        let is_known = of_page.is_some_and(|page| self.is_local_name(&page) || host.as_ref() == Some(&page));
        if is_known || contains(&self.origins, text.trim_end_matches('/')) {
            return Ok(AllowedReaders::This(origin.clone()));
        }
        let origin_name = truncated_name(text);
        let message =
            format!("pages of `{origin_name}` may not send requests: start the server with keys or --allowed-origins");
        Err(HttpError::bad_request(StatusCode::FORBIDDEN, message))
    }

    fn is_own(&self, host: &str) -> bool {
        self.is_local_name(host) || contains(&self.hosts, host)
    }

    /// Whether a name can only mean this machine, so that no foreign page can have it.
    fn is_local_name(&self, host: &str) -> bool {
        match host.parse::<IpAddr>() {
            Ok(ip) => ip.to_canonical().is_loopback() || ip.to_canonical() == self.bound,
            Err(_) => host == "localhost" || host.ends_with(".localhost"),
        }
    }
}

fn contains(list: &[String], name: &str) -> bool {
    list.iter().any(|known| known == ANY || known.trim_end_matches('/').eq_ignore_ascii_case(name))
}

/// Returns the server's name in the request, without its port. A client of HTTP/1.0 may send none.
fn host(uri: &Uri, headers: &HeaderMap) -> Result<Option<String>, HttpError> {
    if let Some(host) = uri.host() {
        return Ok(Some(normalized_host(host)));
    }
    let Some(host) = headers.get(HOST) else { return Ok(None) };
    let authority = host.to_str().ok().and_then(|text| text.parse::<Authority>().ok());
    let no_name = || HttpError::bad_request(StatusCode::BAD_REQUEST, "the host header is not a valid name");
    Ok(Some(normalized_host(authority.ok_or_else(no_name)?.host())))
}

/// Normalises a name for comparison: without brackets, capitals and the final dot.
fn normalized_host(host: &str) -> String {
    host.trim_start_matches('[').trim_end_matches(']').trim_end_matches('.').to_ascii_lowercase()
}

/// Whether a browser reports that a page of another site sends this request. Links from such a page are allowed.
fn is_from_another_site(method: &Method, headers: &HeaderMap) -> bool {
    let site = headers.get("sec-fetch-site").and_then(|site| site.to_str().ok());
    ![Method::GET, Method::HEAD].contains(method) && site.is_some_and(|site| site == "cross-site")
}

fn truncated_name(name: &str) -> String {
    name.chars().take(NAME_CHARS_MAX).collect()
}

/// Answers permitted requests, and names to browsers the pages that may read the answer.
pub async fn check_origin(State(visitors): State<Arc<OriginPolicy>>, request: Request, next: Next) -> Response {
    const EXPOSED: HeaderValue = HeaderValue::from_static(
        "retry-after, retry-after-ms, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, \
         x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, \
         x-lockstep-policy-digest, x-lockstep-seed, x-lockstep-prompt-hash, x-request-id, \
         endpoint-load-metrics",
    );
    let is_preflight =
        request.method() == Method::OPTIONS && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    let readers = match visitors.check(request.method(), request.uri(), request.headers()) {
        Ok(readers) => readers,
        // A browser that receives no origin sends no further request.
        Err(_) if is_preflight => return StatusCode::OK.into_response(),
        Err(error) => return error.into_response(),
    };
    let mut response = match is_preflight {
        true => preflight(request.headers().get(ACCESS_CONTROL_REQUEST_HEADERS).cloned()),
        false => next.run(request).await,
    };
    let headers = response.headers_mut();
    match readers {
        AllowedReaders::All => headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static(ANY)),
        AllowedReaders::This(origin) => {
            headers.insert(VARY, HeaderValue::from_static("origin"));
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin)
        }
        AllowedReaders::None => return response,
    };
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
    response
}

fn preflight(requested_headers: Option<HeaderValue>) -> Response {
    // 200 and not 204, which some proxies and older clients do not accept.
    let mut response = StatusCode::OK.into_response();
    let headers = response.headers_mut();
    headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, DELETE, OPTIONS"));
    // The requested headers are repeated unchanged, because `*` does not cover `authorization`.
    let allowed = requested_headers.unwrap_or(HeaderValue::from_static("authorization, content-type"));
    headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, allowed);
    headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("86400"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the server answers a request without a key, for this host and from a page of this origin.
    fn check(visitors: &OriginPolicy, host: &str, origin: &str) -> bool {
        let mut headers = HeaderMap::new();
        for (name, value) in [(HOST, host), (ORIGIN, origin)].into_iter().filter(|(_, value)| !value.is_empty()) {
            headers.insert(name, value.parse().unwrap());
        }
        visitors.check(&Method::POST, &Uri::from_static("/v1/models"), &headers).is_ok()
    }

    #[test]
    fn only_this_machine_s_names_and_pages_are_answered_without_a_key() {
        let bound =
            |address: &str, config: &Config| OriginPolicy::new(config, config.keys.clone(), address.parse().unwrap());
        let open = Config::default();
        let local = bound("127.0.0.1:8000", &open);
        for host in ["localhost:8000", "LOCALHOST.", "127.0.0.1:8000", "127.0.0.2", "[::1]:8000", "a.localhost", ""] {
            assert!(check(&local, host, ""), "{host}");
        }
        for host in ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "0.0.0.0:8000", "[::]"]
        {
            assert!(!check(&local, host, ""), "{host}");
        }
        for origin in ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:1"] {
            assert!(check(&local, "localhost", origin), "{origin}");
        }
        for origin in ["http://evil.example", "null", "file://", "http://localhost.evil.example", "http://10.0.0.1"] {
            assert!(!check(&local, "localhost", origin), "{origin}");
        }
        let named = Config {
            hosts_allowed: vec!["gpu.example".into()],
            origins_allowed: vec!["https://chat.example/".into()],
            ..Config::default()
        };
        let named = bound("127.0.0.1:8000", &named);
        assert!(check(&named, "GPU.example:8000", "https://chat.example") && !check(&named, "chat.example", ""));
        assert!(!check(&named, "gpu.example", "http://chat.example"), "another scheme is another origin");
        assert!(check(&named, "gpu.example", "https://gpu.example"), "its own pages");
        let all = Config { hosts_allowed: vec![ANY.into()], origins_allowed: vec![ANY.into()], ..Config::default() };
        assert!(check(&bound("127.0.0.1:1", &all), "evil.example", "http://evil.example"));
        // Behind a wildcard address the server has no knowledge of its names. Foreign pages are refused all the same.
        let anywhere = bound("0.0.0.0:8000", &open);
        assert!(check(&anywhere, "lockstep.svc:8000", "") && !check(&anywhere, "10.0.0.7", "http://evil.example"));
        // An older browser sends no origin, and a proxy may drop it.
        let (uri, sites) = (Uri::from_static("/api/chat"), ["cross-site", "same-origin", "none"]);
        let sent = |method: Method, site: &'static str| {
            let headers = [("host", "localhost"), ("sec-fetch-site", site)];
            let headers = headers.map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)));
            local.check(&method, &uri, &HeaderMap::from_iter(headers)).is_ok()
        };
        assert_eq!(sites.map(|site| sent(Method::POST, site)), [false, true, true]);
        assert_eq!(sites.map(|site| sent(Method::GET, site)), [true; 3], "a link may be followed");
        let keyed = Config { keys: ApiKeys::parse("k1").unwrap(), ..Config::default() };
        assert!(check(&bound("127.0.0.1:8000", &keyed), "evil.example", "http://evil.example"));
    }
}
