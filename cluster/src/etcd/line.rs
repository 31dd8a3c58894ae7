//! Calls to etcd, each with a deadline. Classifies failures by what to do about them. Does not know what keys mean.

use super::config::{EtcdConfig, EtcdTimings, EtcdTls};
use super::keys::EtcdKeys;
use crate::Error;
use crate::state::StoreHealth;
use etcd_client::{Certificate, Client, ConnectOptions, Identity, TlsOptions};
use std::error::Error as _;
use std::future::Future;
use std::time::{Duration, SystemTime};
use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};

/// How often an idle connection is pinged. etcd forbids more than every five seconds.
const PING_EVERY: Duration = Duration::from_secs(10);
const PING_MAX: Duration = Duration::from_secs(5);
const CONNECT_MAX: Duration = Duration::from_secs(2);
/// The pause before the next member is called.
const NEXT_MEMBER: Duration = Duration::from_millis(50);

/// Why a call failed, by what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CallError {
    /// Another attempt would be refused too.
    Refused(String),
    Away(String),
    /// A new lease is needed.
    LeaseGone,
}

impl From<CallError> for Error {
    fn from(failed: CallError) -> Error {
        match failed {
            CallError::Refused(why) => Error::Refused(why),
            CallError::Away(why) => Error::Away(why),
            CallError::LeaseGone => Error::Away("the lease has ended".into()),
        }
    }
}

/// The health before the first answer.
pub(super) fn unreached_health() -> StoreHealth {
    StoreHealth { since: SystemTime::now(), away: Some("it was not reached yet".into()) }
}

pub(super) struct EtcdConnection {
    pub keys: EtcdKeys,
    pub waits: EtcdTimings,
    endpoints: Vec<String>,
    options: ConnectOptions,
    /// If there is a user, connecting requests a token from etcd.
    client: Mutex<Option<Client>>,
}

impl EtcdConnection {
    pub async fn new(config: EtcdConfig) -> Result<EtcdConnection, Error> {
        let endpoints = &config.endpoints;
        if endpoints.is_empty() {
            return Err(Error::Endpoint(String::new(), "no address is given".into()));
        }
        let bad =
            endpoints.iter().find_map(|endpoint| Some((endpoint, endpoint_error(endpoint, config.tls.is_some())?)));
        if let Some((endpoint, why)) = bad {
            return Err(Error::Endpoint(endpoint.clone(), why.into()));
        }
        let options = ConnectOptions::new()
            .with_keep_alive(PING_EVERY, PING_MAX)
            .with_connect_timeout(CONNECT_MAX)
            // A member that has lost the others then returns an error, instead of staying silent for ever.
            .with_require_leader(true);
        let options = match &config.tls {
            Some(tls) => options.with_tls(tls_options(tls)),
            None => options,
        };
        // Without a user nothing is sent: it only parses addresses and certificates.
        let checked = Client::connect(endpoints, Some(options.clone())).await;
        checked.map_err(|error| Error::Endpoint(endpoints.join(","), reason(&error)))?;
        let options = match config.user {
            Some((name, password)) => options.with_user(name, password).with_auto_token_refresh(true),
            None => options,
        };
        let (keys, client) = (EtcdKeys::under(&config.prefix), Mutex::new(None));
        Ok(EtcdConnection { keys, waits: config.waits, endpoints: config.endpoints, options, client })
    }

    /// Tries every member in turn before etcd counts as away: one may be down, and the choice of the member is random.
    pub async fn call<T, F>(&self, request: impl Fn(Client) -> F) -> Result<T, CallError>
    where
        F: Future<Output = Result<T, etcd_client::Error>>,
    {
        let mut turns_left = self.endpoints.len();
        loop {
            match self.try_call(&request).await {
                Err(CallError::Away(_)) if turns_left > 0 => {
                    turns_left -= 1;
                    sleep(NEXT_MEMBER).await;
                }
                done => return done,
            }
        }
    }

    pub async fn grant(&self) -> Result<i64, CallError> {
        let seconds = i64::try_from(self.waits.lease.as_secs()).unwrap_or(i64::MAX).max(1);
        Ok(self.call(|mut client| async move { client.lease_grant(seconds, None).await }).await?.id())
    }

    /// Opens a new stream for each sign of life, so that no stream can be lost.
    pub async fn keep_alive(&self, lease: i64) -> Result<(), CallError> {
        self.call(|mut client| async move { client.lease_keep_alive(lease).await.map(drop) }).await
    }

    async fn try_call<T, F>(&self, request: impl Fn(Client) -> F) -> Result<T, CallError>
    where
        F: Future<Output = Result<T, etcd_client::Error>>,
    {
        let response = async { request(self.client().await?).await };
        match timeout(self.waits.call_max, response).await {
            Ok(answer) => answer.map_err(|error| to_call_error(&error)),
            Err(_) => Err(CallError::Away("it does not answer".into())),
        }
    }

    async fn client(&self) -> Result<Client, etcd_client::Error> {
        let mut client = self.client.lock().await;
        if let Some(client) = &*client {
            return Ok(client.clone());
        }
        let made = Client::connect(&self.endpoints, Some(self.options.clone())).await?;
        Ok(client.insert(made).clone())
    }
}

/// A pause that doubles up to its limit.
pub(super) struct Backoff {
    next: Duration,
    waits: EtcdTimings,
}

impl Backoff {
    pub fn new(waits: &EtcdTimings) -> Backoff {
        Backoff { next: waits.retry_min, waits: waits.clone() }
    }

    pub fn reset(&mut self) {
        self.next = self.waits.retry_min;
    }

    pub async fn wait(&mut self) {
        sleep(self.next).await;
        self.next = (self.next * 2).min(self.waits.retry_max);
    }
}

/// Why it cannot be an endpoint.
fn endpoint_error(endpoint: &str, has_tls: bool) -> Option<&'static str> {
    let (scheme, address) = endpoint.split_once("://").map_or((None, endpoint), |(s, rest)| (Some(s), rest));
    match scheme {
        Some("https") if !has_tls => Some("https needs the authority that has signed etcd's certificate"),
        Some("http") if has_tls => Some("certificates are set, but http does not use them"),
        Some("http" | "https") | None if crate::addresses::is_address(address) => None,
        _ => Some("use host:port, http://host:port or https://host:port"),
    }
}

fn tls_options(tls: &EtcdTls) -> TlsOptions {
    let options = TlsOptions::new().ca_certificate(Certificate::from_pem(&tls.authority));
    match &tls.identity {
        Some((certificate, key)) => options.identity(Identity::from_pem(certificate, key)),
        None => options,
    }
}

pub(super) fn to_call_error(error: &etcd_client::Error) -> CallError {
    // Codes of tonic, which this crate only uses through the client.
    const NOT_FOUND: i32 = 5;
    const PERMISSION_DENIED: i32 = 7;
    const UNAUTHENTICATED: i32 = 16;
    let why = reason(error);
    match error {
        etcd_client::Error::LeaseKeepAliveError(_) => CallError::LeaseGone,
        etcd_client::Error::GRpcStatus(status) => match i32::from(status.code()) {
            NOT_FOUND if status.message().contains("lease") => CallError::LeaseGone,
            PERMISSION_DENIED | UNAUTHENTICATED => CallError::Refused(why),
            // A wrong password, a missing user, or a user that etcd does not require.
            _ if ["authentication", "user name is empty"].iter().any(|part| status.message().contains(part)) => {
                CallError::Refused(why)
            }
            _ => CallError::Away(why),
        },
        _ => CallError::Away(why),
    }
}

/// Returns the whole chain of causes, each text once: the outermost often has the least detail.
fn reason(error: &etcd_client::Error) -> String {
    let (first, source): (String, Option<&dyn std::error::Error>) = match error {
        etcd_client::Error::GRpcStatus(status) => (status.message().to_owned(), status.source()),
        etcd_client::Error::TransportError(transport) => (transport.to_string(), transport.source()),
        other => (other.to_string(), other.source()),
    };
    let mut parts = vec![first];
    let mut next = source;
    while let Some(error) = next {
        let text = error.to_string();
        if !parts.iter().any(|part| part.contains(&text)) {
            parts.push(text);
        }
        next = error.source();
    }
    parts.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(endpoint: &str, has_tls: bool, fits: bool) {
        assert_eq!(endpoint_error(endpoint, has_tls).is_none(), fits, "{endpoint}");
    }

    #[test]
    fn endpoints_are_looked_at() {
        check("h:1", false, true);
        check("h:1", true, true);
        check("http://h:1", false, true);
        check("http://h:1", true, false);
        check("https://h:1", true, true);
        check("https://h:1", false, false);
        check("ftp://h:1", false, false);
        check("h", false, false);
    }

    #[tokio::test]
    async fn certificates_that_are_none_are_refused_at_once() {
        let tls = EtcdTls { authority: b"nonsense".to_vec(), identity: Some((vec![], vec![])) };
        let (endpoints, waits) = (vec!["https://127.0.0.1:1".to_owned()], EtcdTimings::default());
        let config = EtcdConfig { endpoints, prefix: "/x".into(), tls: Some(tls), user: None, waits };
        assert!(matches!(EtcdConnection::new(config).await.err(), Some(Error::Endpoint(..))));
    }
}
