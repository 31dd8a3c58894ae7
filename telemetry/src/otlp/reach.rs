//! The connection to a collector: plain text or TLS, and the headers. Has no knowledge of batches.

use crate::Error;
use http::{HeaderMap, HeaderName, HeaderValue, Uri, header};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

const CONNECT_MAX: Duration = Duration::from_secs(3);

/// Headers of every batch. Most are keys, so Debug does not show them.
#[derive(Clone, Default, PartialEq)]
pub struct ExportHeaders(HeaderMap);

impl ExportHeaders {
    /// Parses `name=value,name=value`, the format of `OTEL_EXPORTER_OTLP_HEADERS`, with special characters in values as
    /// %41.
    pub fn parse(text: &str) -> Result<ExportHeaders, Error> {
        let pairs = text.split(',').map(str::trim).filter(|pair| !pair.is_empty());
        let mut headers = HeaderMap::new();
        for (at, pair) in pairs.enumerate() {
            // A value may be a secret, even if it is invalid, so the error names only its position.
            let wrong = || Error::Headers { nth: at + 1 };
            let (name, value) = pair.split_once('=').ok_or_else(wrong)?;
            let name = HeaderName::from_bytes(name.trim().as_bytes()).map_err(|_| wrong())?;
            let value = unescaped(value.trim()).filter(|value| value.is_ascii()).ok_or_else(wrong)?;
            if is_reserved(&name) {
                return Err(wrong());
            }
            let mut value = HeaderValue::from_bytes(&value).map_err(|_| wrong())?;
            value.set_sensitive(true);
            headers.append(name, value);
        }
        Ok(ExportHeaders(headers))
    }

    pub(super) fn map(&self) -> &HeaderMap {
        &self.0
    }
}

impl fmt::Debug for ExportHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.keys()).finish()
    }
}

/// Returns true for headers that the request sets itself or that are not text.
fn is_reserved(name: &HeaderName) -> bool {
    const TAKEN: [HeaderName; 5] =
        [header::CONTENT_TYPE, header::CONTENT_LENGTH, header::TRANSFER_ENCODING, header::HOST, header::TE];
    TAKEN.contains(name) || name.as_str().starts_with("grpc-") || name.as_str().ends_with("-bin")
}

/// Decodes `%` sequences. Returns None if a % is not followed by two digits.
fn unescaped(text: &str) -> Option<Vec<u8>> {
    let mut bytes = text.bytes();
    let mut plain = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        plain.push(match byte {
            b'%' => (digit(bytes.next()?)? << 4) | digit(bytes.next()?)?,
            other => other,
        });
    }
    Some(plain)
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).map(|digit| digit as u8)
}

/// Returns the collector's address. Without a scheme it is in plain text, and then an authority is an error.
pub fn address(endpoint: &str, authority: Option<&[u8]>) -> Result<(String, Uri), Error> {
    let endpoint = if endpoint.contains("://") { endpoint.to_owned() } else { format!("http://{endpoint}") };
    let wrong = |why: String| Error::Collector { endpoint: endpoint.clone(), why };
    let uri: Uri = endpoint.parse().map_err(|error| wrong(format!("{error}")))?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.authority().is_none() {
        return Err(wrong("use http://host:port or https://host:port".into()));
    }
    if authority.is_some() && uri.scheme_str() != Some("https") {
        return Err(wrong("an authority is set, but the address has no TLS: use https://".into()));
    }
    Ok((endpoint, uri))
}

/// Returns a channel that dials when it is first used. `authority` is PEM and replaces the web's authorities.
pub fn channel(endpoint: &str, authority: Option<&[u8]>, answer_max: Duration) -> Result<Channel, Error> {
    let (endpoint, uri) = address(endpoint, authority)?;
    let wrong =
        |error: tonic::transport::Error| Error::Collector { endpoint: endpoint.clone(), why: error_chain(&error) };
    let mut dial = Endpoint::from_shared(endpoint.clone()).map_err(wrong)?;
    if uri.scheme_str() == Some("https") {
        let tls = match authority {
            Some(pem) => {
                // Checked here, because tonic skips invalid certificates.
                roots(&endpoint, Some(pem))?;
                ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem))
            }
            None => ClientTlsConfig::new().with_webpki_roots(),
        };
        dial = dial.tls_config(tls).map_err(wrong)?;
    }
    Ok(dial.connect_timeout(CONNECT_MAX).timeout(answer_max).connect_lazy())
}

/// Returns a connector for HTTP/1.1. `authority` is PEM and replaces the web's authorities.
pub fn connector(endpoint: &str, authority: Option<&[u8]>) -> Result<HttpsConnector<HttpConnector>, Error> {
    let (endpoint, _) = address(endpoint, authority)?;
    let wrong = |error: rustls::Error| Error::Collector { endpoint: endpoint.clone(), why: error.to_string() };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map_err(wrong)?;
    let config = config.with_root_certificates(roots(&endpoint, authority)?).with_no_client_auth();
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_connect_timeout(Some(CONNECT_MAX));
    tcp.set_nodelay(true);
    Ok(HttpsConnectorBuilder::new().with_tls_config(config).https_or_http().enable_http1().wrap_connector(tcp))
}

fn roots(endpoint: &str, authority: Option<&[u8]>) -> Result<RootCertStore, Error> {
    let Some(pem) = authority else {
        return Ok(RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() });
    };
    let wrong = |why: String| Error::Collector { endpoint: endpoint.into(), why };
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(|error| wrong(format!("its authority cannot be read: {error}")))?;
        roots.add(certificate).map_err(|error| wrong(format!("its authority cannot be used: {error}")))?;
    }
    if roots.is_empty() {
        return Err(wrong("its authority has no certificate".into()));
    }
    Ok(roots)
}

/// Formats an error with its causes, because the outermost error is just "connection error".
pub(super) fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_read_as_the_variable_s_standard_has_them() {
        let headers = ExportHeaders::parse(" api-key=a%20b%3D=c , X-Team = blue,,").unwrap();
        let value = |name: &str| headers.0.get(name).map(HeaderValue::as_bytes);
        assert_eq!((value("api-key"), value("x-team"), headers.0.len()), (Some(&b"a b==c"[..]), Some(&b"blue"[..]), 2));
        assert_eq!(format!("{headers:?}"), r#"["api-key", "x-team"]"#, "values are not shown");
        assert_eq!(ExportHeaders::parse("").unwrap(), ExportHeaders::default());
        for wrong in [
            "secret",
            "=secret",
            "a b=secret",
            "a=secret%4",
            "a=secret%zz",
            "a=secret%0a",
            "a=secret%C3%A9",
            "a-bin=secret",
            "host=secret",
        ] {
            let error = ExportHeaders::parse(&format!("fine=1,{wrong}")).unwrap_err().to_string();
            assert!(error.contains('2') && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn an_authority_of_what_is_sent_in_the_open_is_refused() {
        for endpoint in ["http://collector:4317", "collector:4317"] {
            let error = address(endpoint, Some(b"")).unwrap_err().to_string();
            assert!(error.contains("https"), "{error}");
            assert!(address(endpoint, None).is_ok());
        }
    }

    #[test]
    fn what_is_no_certificate_is_no_authority() {
        let none = b"-----BEGIN NOTHING-----\n-----END NOTHING-----\n";
        let broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        for authority in [&b""[..], none, broken] {
            let by_grpc = channel("https://collector:4317", Some(authority), CONNECT_MAX).map(|_| ());
            let by_http = connector("https://collector:4318", Some(authority)).map(|_| ());
            for error in [by_grpc, by_http].map(Result::unwrap_err) {
                assert!(error.to_string().contains("https://collector:431"), "{error}");
            }
        }
    }
}
