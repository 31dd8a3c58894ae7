//! How the roles of this cluster trust each other: by a join token, by TLS, or, on loopback, without either. Resolved
//! here from flags; `wire` applies it, and `identity` provides certificates.

use super::{identity, secret};
use anyhow::{Context, bail, ensure};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;
use telemetry::metrics;
use tokio::sync::watch;
use wire::{JoinToken, Trust};

/// Interval between looks at the files of certificates. A mounted secret changes by links, which no watch reports.
const LOOK_EVERY: Duration = Duration::from_secs(2);

#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct TrustSettings {
    /// File with the cluster's join token, as `lockstep token` prints it
    #[arg(long, env = "LOCKSTEP_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Mutual TLS between roles [default: on, except over loopback]
    #[arg(long, env = "LOCKSTEP_TLS", value_enum)]
    pub tls: Option<TlsMode>,
    /// Certificate of this role towards other roles, as PEM, issued to lockstep.cluster (a router shows clients that of
    /// --api-tls-cert) [default: made from the join token]
    #[arg(long, env = "LOCKSTEP_TLS_CERT", value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    pub tls_cert: Option<PathBuf>,
    /// Private key of --tls-cert, as PEM
    #[arg(long, env = "LOCKSTEP_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// CA certificate that signed the certificates of all roles, as PEM
    #[arg(long, env = "LOCKSTEP_TLS_CA", value_name = "FILE", requires = "tls_cert")]
    pub tls_ca: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TlsMode {
    On,
    Off,
}

impl TrustSettings {
    /// Returns the trust of a role that listens on or dials `address`; `handed` is a token that did not come from a
    /// file.
    pub fn resolve(&self, role: &str, address: &str, handed: Option<JoinToken>) -> anyhow::Result<Trust> {
        let token = self.token()?.or(handed);
        let is_local = is_loopback(address);
        let files = self.files()?;
        let has_files = files.is_some();
        let wants_tls = self.tls.map_or(has_files || !is_local, |mode| mode == TlsMode::On);
        ensure!(
            is_local || token.is_some() || (has_files && wants_tls),
            "{address} is not loopback: give the cluster's join token with --token-file FILE (`lockstep token` makes \
             one), or certificates with --tls-cert, --tls-key and --tls-ca"
        );
        let tls = match (wants_tls, files, &token) {
            (false, _, _) => None,
            (true, Some((certificate, key, authority)), _) => {
                Some(identity::tls_of_files(certificate, key, authority)?)
            }
            (true, None, Some(token)) => Some(identity::tls_of_token(token, role)?),
            (true, None, None) => bail!("--tls on needs a join token or certificates"),
        };
        if tls.is_none() && !is_local {
            tracing::warn!(address, "traffic between roles is not encrypted: --tls is off");
        }
        Ok(Trust { token, tls })
    }

    /// Does the same for a role that listens, with the current contents of certificate files. An unusable file is
    /// logged once, and the earlier certificates stay in use.
    pub fn follow(&self, role: &'static str, address: String) -> anyhow::Result<watch::Receiver<Trust>> {
        let first = self.resolve(role, &address, None)?;
        let (trust_tx, trust) = watch::channel(first.clone());
        if first.tls.is_some() && self.files()?.is_some() {
            self.report_expiry();
            tokio::spawn(renew(self.without_token_file(), role, address, first.token, trust_tx));
        }
        Ok(trust)
    }

    /// Does the same for a role that dials, at each dial.
    pub fn at_each_dial(
        &self,
        role: &'static str,
        address: &str,
        handed: Option<JoinToken>,
    ) -> anyhow::Result<impl Fn() -> Trust + Send + Sync + use<>> {
        let first = self.resolve(role, address, handed)?;
        let again = self.files()?.map(|_| self.without_token_file());
        let address = address.to_owned();
        Ok(move || match again.as_ref().map(|settings| settings.resolve(role, &address, first.token.clone())) {
            None => first.clone(),
            Some(Ok(trust)) => trust,
            Some(Err(error)) => {
                tracing::warn!(role, error = format!("{error:#}"), "the certificates stay unchanged");
                first.clone()
            }
        })
    }

    /// A token may come from a pipe, which can be read only once.
    fn without_token_file(&self) -> TrustSettings {
        TrustSettings { token_file: None, ..self.clone() }
    }

    fn report_expiry(&self) {
        metrics::certificate_ends("tls_cert", self.tls_cert.as_deref().and_then(identity::ends_at));
    }

    /// Returns the files' bytes, which show whether anything has changed.
    fn contents(&self) -> Vec<Option<Vec<u8>>> {
        let files = [&self.tls_cert, &self.tls_key, &self.tls_ca];
        files.map(|file| file.as_ref().and_then(|file| std::fs::read(file).ok())).into()
    }

    /// Returns the join token, if one is given.
    pub fn token(&self) -> anyhow::Result<Option<JoinToken>> {
        self.token_file.as_deref().map(read_token).transpose()
    }

    fn files(&self) -> anyhow::Result<Option<(&Path, &Path, &Path)>> {
        match (&self.tls_cert, &self.tls_key, &self.tls_ca) {
            (Some(certificate), Some(key), Some(authority)) => Ok(Some((certificate, key, authority))),
            (None, None, None) => Ok(None),
            _ => bail!("give all of --tls-cert, --tls-key and --tls-ca"),
        }
    }
}

async fn renew(
    settings: TrustSettings,
    role: &'static str,
    address: String,
    token: Option<JoinToken>,
    trust_tx: watch::Sender<Trust>,
) {
    let mut last = settings.contents();
    loop {
        tokio::select! {
            () = trust_tx.closed() => return,
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        let now = settings.contents();
        if now == last {
            continue;
        }
        let resolved = settings.resolve(role, &address, token.clone());
        metrics::config_reload("tls_cert", resolved.is_ok());
        match resolved {
            Ok(trust) => {
                trust_tx.send_replace(trust);
                settings.report_expiry();
                tracing::info!(role, "the certificates were read again");
            }
            // The certificates are three files, which may not match between two writes.
            Err(error) => tracing::warn!(role, error = format!("{error:#}"), "the certificates stay unchanged"),
        }
        last = now;
    }
}

fn read_token(path: &Path) -> anyhow::Result<JoinToken> {
    let text = secret::read_text(path)?;
    JoinToken::new(&text).with_context(|| format!("in {}", path.display()))
}

/// Whether an address is on this machine only. A name that does not resolve now may later be any machine.
fn is_loopback(address: &str) -> bool {
    let resolved = address.to_socket_addrs().map(|addresses| addresses.map(|a| a.ip()).collect::<Vec<IpAddr>>());
    resolved.is_ok_and(|ips| !ips.is_empty() && ips.iter().all(IpAddr::is_loopback))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_loopback_somebody_must_prove_something() {
        let open = TrustSettings::default();
        assert!(open.resolve("a", "127.0.0.1:1", None).is_ok_and(|trust| trust.tls.is_none()));
        let refused = open.resolve("a", "192.0.2.1:1", None).unwrap_err().to_string();
        assert!(refused.contains("--token-file"), "{refused}");
        let token = JoinToken::random().unwrap();
        let trust = open.resolve("a", "0.0.0.0:1", Some(token.clone())).unwrap();
        assert!(trust.tls.is_some() && trust.token.is_some());
        let off = TrustSettings { tls: Some(TlsMode::Off), ..open.clone() };
        assert!(off.resolve("a", "0.0.0.0:1", Some(token)).is_ok_and(|trust| trust.tls.is_none()));
        let on = TrustSettings { tls: Some(TlsMode::On), ..open };
        assert!(on.resolve("a", "127.0.0.1:1", None).is_err());
    }

    #[test]
    fn a_token_file_is_named_when_it_is_bad() {
        let missing = TrustSettings { token_file: Some("no/such/file".into()), ..TrustSettings::default() };
        let error = missing.resolve("a", "127.0.0.1:1", None).unwrap_err();
        assert!(format!("{error:#}").contains("no/such/file"));
    }
}
