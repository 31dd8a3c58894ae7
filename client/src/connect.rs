//! The routers of a cluster, and how to reach them. Connections begin with the first call. Knows no answers.

use crate::answer::AnswerStream;
use crate::v1::GenerateRequest;
use crate::v1::inference_client::InferenceClient;
use std::sync::Arc;
use std::time::Duration;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Request, Status};

const CONNECT_MAX: Duration = Duration::from_secs(5);
/// How often an idle connection is tested, and how long its answer may take: a router that is cut off is noticed.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_MAX: Duration = Duration::from_secs(10);
/// A reply may have the logprobs of a long prompt.
const REPLY_BYTES_MAX: usize = 64 << 20;

/// The generated client of one router.
pub type RouterClient = InferenceClient<InterceptedService<Channel, ApiKeyHeader>>;

/// How to reach the routers.
#[derive(Clone)]
pub struct ConnectOptions {
    /// Sent with each call. None for a cluster without keys.
    pub api_key: Option<String>,
    /// Certificates in PEM that sign those of the routers. None for those that the web trusts. Only addresses with
    /// `https` use TLS.
    pub ca_pem: Option<Vec<u8>>,
    /// The name in the routers' certificate. None for the name in the address.
    pub server_name: Option<String>,
    /// How often an answer is continued without any new token before its error is returned.
    pub retries_max: u32,
}

impl Default for ConnectOptions {
    fn default() -> ConnectOptions {
        ConnectOptions { api_key: None, ca_pem: None, server_name: None, retries_max: 30 }
    }
}

/// An address or an option that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InvalidOption {
    #[error("there is no address of a router")]
    NoAddress,
    #[error("{address} is not an address of a router, such as http://127.0.0.1:50051")]
    Address { address: String, source: tonic::transport::Error },
    #[error("the API key has characters that a header cannot have")]
    ApiKey,
}

/// A client of the routers of one cluster. Clones share their connections.
#[derive(Clone)]
pub struct LockstepClient {
    routers: Arc<[RouterClient]>,
    retries_max: u32,
}

impl LockstepClient {
    /// Checks the addresses and options. Connects to no router yet.
    pub fn connect<A: Into<String>>(
        addresses: impl IntoIterator<Item = A>,
        options: &ConnectOptions,
    ) -> Result<LockstepClient, InvalidOption> {
        let header = ApiKeyHeader::of(options.api_key.as_deref())?;
        let router = |address: A| -> Result<RouterClient, InvalidOption> {
            let channel = channel(address.into(), options)?;
            let client = InferenceClient::with_interceptor(channel, header.clone());
            Ok(client.max_decoding_message_size(REPLY_BYTES_MAX))
        };
        let routers: Arc<[RouterClient]> = addresses.into_iter().map(router).collect::<Result<_, _>>()?;
        match routers.is_empty() {
            true => Err(InvalidOption::NoAddress),
            false => Ok(LockstepClient { routers, retries_max: options.retries_max }),
        }
    }

    /// Returns the answer to a request. The request is sent with the first read. Dropping the answer cancels it.
    pub fn generate(&self, request: GenerateRequest) -> AnswerStream {
        AnswerStream::new(self.clone(), request, self.retries_max)
    }

    /// Returns the generated client of the first router, for all other calls.
    pub fn inference(&self) -> RouterClient {
        self.router(0)
    }

    /// Returns the generated client of a router. Numbers beyond the last begin again with the first.
    pub(crate) fn router(&self, n: usize) -> RouterClient {
        self.routers[n % self.routers.len()].clone()
    }
}

fn channel(address: String, options: &ConnectOptions) -> Result<Channel, InvalidOption> {
    let invalid = |source| InvalidOption::Address { address: address.clone(), source };
    let endpoint = Endpoint::from_shared(address.clone()).map_err(invalid)?;
    let endpoint = endpoint
        .connect_timeout(CONNECT_MAX)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_MAX);
    let has_tls = endpoint.uri().scheme_str() == Some("https");
    let endpoint = if has_tls { endpoint.tls_config(tls(options)).map_err(invalid)? } else { endpoint };
    Ok(endpoint.connect_lazy())
}

fn tls(options: &ConnectOptions) -> ClientTlsConfig {
    let config = match &options.ca_pem {
        Some(pem) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)),
        None => ClientTlsConfig::new().with_webpki_roots(),
    };
    options.server_name.iter().fold(config, |config, name| config.domain_name(name))
}

/// Adds the API key to each call.
#[derive(Clone)]
pub struct ApiKeyHeader(Option<MetadataValue<Ascii>>);

impl ApiKeyHeader {
    fn of(api_key: Option<&str>) -> Result<ApiKeyHeader, InvalidOption> {
        let header = api_key.map(|key| format!("Bearer {key}").parse::<MetadataValue<Ascii>>());
        let mut header = header.transpose().map_err(|_| InvalidOption::ApiKey)?;
        // A sensitive header is not in logs.
        header.iter_mut().for_each(|value| value.set_sensitive(true));
        Ok(ApiKeyHeader(header))
    }
}

impl Interceptor for ApiKeyHeader {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(addresses: &[&str], options: &ConnectOptions) -> String {
        LockstepClient::connect(addresses.iter().copied(), options).err().unwrap().to_string()
    }

    #[tokio::test]
    async fn wrong_options_are_named() {
        let options = ConnectOptions::default();
        assert_eq!(refused(&[], &options), "there is no address of a router");
        assert!(refused(&["http://127.0.0.1:1", "not an address"], &options).starts_with("not an address is not"));
        let options = ConnectOptions { api_key: Some("a\nb".into()), ..options };
        assert!(refused(&["http://127.0.0.1:1"], &options).contains("API key"));
    }

    #[tokio::test]
    async fn https_is_accepted_with_and_without_own_certificates() {
        let options = ConnectOptions { server_name: Some("lockstep".into()), ..ConnectOptions::default() };
        assert!(LockstepClient::connect(["https://127.0.0.1:1"], &options).is_ok());
    }

    #[test]
    fn the_key_is_a_header_that_logs_do_not_show() {
        let mut header = ApiKeyHeader::of(Some("secret")).unwrap();
        let request = header.call(Request::new(())).unwrap();
        let value = request.metadata().get("authorization").unwrap();
        assert_eq!(value.to_str().unwrap(), "Bearer secret");
        assert!(!format!("{request:?}").contains("secret"));
        let without = ApiKeyHeader::of(None).unwrap().call(Request::new(())).unwrap();
        assert!(without.metadata().is_empty());
    }
}
