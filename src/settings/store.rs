//! The cluster store of a role, from flags. `cluster` is the store itself.

use super::secret;
use anyhow::{Context, bail, ensure};
use clap::Args;
use cluster::{EtcdConfig, EtcdStore, EtcdTimings, EtcdTls, Store};
use serde::{Deserialize, Deserializer, Serialize};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

#[derive(Args, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct StoreSettings {
    /// Addresses of the etcd in which coordinators register, and where routers and workers find them
    #[arg(long, env = "LOCKSTEP_ETCD_ENDPOINTS", value_name = "HOST:PORT", value_delimiter = ',')]
    #[serde(default, deserialize_with = "one_or_many")]
    pub etcd_endpoints: Option<Vec<String>>,
    /// Prefix of this cluster's keys in etcd [default: /lockstep]
    #[arg(long, env = "LOCKSTEP_ETCD_PREFIX", value_name = "PREFIX")]
    pub etcd_prefix: Option<String>,
    /// CA certificate of etcd, as PEM; turns on TLS
    #[arg(long, env = "LOCKSTEP_ETCD_CA", value_name = "FILE")]
    pub etcd_ca: Option<PathBuf>,
    /// Client certificate for etcd, as PEM
    #[arg(long, env = "LOCKSTEP_ETCD_CERT", value_name = "FILE")]
    pub etcd_cert: Option<PathBuf>,
    /// Private key of --etcd-cert, as PEM
    #[arg(long, env = "LOCKSTEP_ETCD_KEY", value_name = "FILE")]
    pub etcd_key: Option<PathBuf>,
    /// User name for etcd
    #[arg(long, env = "LOCKSTEP_ETCD_USER", value_name = "NAME")]
    pub etcd_user: Option<String>,
    /// File with the password of --etcd-user
    #[arg(long, env = "LOCKSTEP_ETCD_PASSWORD_FILE", value_name = "FILE")]
    pub etcd_password_file: Option<PathBuf>,
    /// Seconds without contact after which etcd drops a coordinator; its open streams continue [default: 10]
    #[arg(long, env = "LOCKSTEP_ETCD_LEASE_SECONDS", value_name = "N")]
    pub etcd_lease_seconds: Option<u64>,
}

const PREFIX: &str = "/lockstep";

impl StoreSettings {
    pub fn is_given(&self) -> bool {
        self.etcd_endpoints.is_some()
    }

    /// Rejects settings that have no effect without etcd.
    pub fn check(&self) -> anyhow::Result<()> {
        let given = [
            ("prefix", self.etcd_prefix.is_some()),
            ("ca", self.etcd_ca.is_some()),
            ("cert", self.etcd_cert.is_some()),
            ("key", self.etcd_key.is_some()),
            ("user", self.etcd_user.is_some()),
            ("password-file", self.etcd_password_file.is_some()),
            ("lease-seconds", self.etcd_lease_seconds.is_some()),
        ];
        let idle = given.iter().find(|(_, is_given)| *is_given && !self.is_given());
        ensure!(idle.is_none(), "--etcd-{} needs --etcd-endpoints HOST:PORT", idle.map_or("", |(name, _)| name));
        ensure!(self.etcd_lease_seconds != Some(0), "--etcd-lease-seconds is 0; it must be at least 1");
        Ok(())
    }

    /// Returns the store for etcd, if it is configured. Needs a runtime; does not connect yet.
    pub async fn open(&self) -> anyhow::Result<Option<Store>> {
        self.check()?;
        let Some(endpoints) = self.etcd_endpoints.clone() else { return Ok(None) };
        let lease = self.etcd_lease_seconds.map(Duration::from_secs);
        let config = EtcdConfig {
            endpoints,
            prefix: self.etcd_prefix.clone().unwrap_or_else(|| PREFIX.into()),
            tls: self.tls()?,
            user: self.user()?,
            waits: lease.map_or_else(EtcdTimings::default, EtcdTimings::with_lease),
        };
        let store = Store::Etcd(EtcdStore::open(config).await.context("--etcd-endpoints")?);
        tokio::spawn(record_reachability(store.clone()));
        Ok(Some(store))
    }

    fn tls(&self) -> anyhow::Result<Option<EtcdTls>> {
        let identity = match (&self.etcd_cert, &self.etcd_key) {
            (Some(certificate), Some(key)) => Some((read(certificate)?, secret::read_text(key)?.into_bytes())),
            (None, None) => None,
            _ => bail!("give both --etcd-cert and --etcd-key"),
        };
        match &self.etcd_ca {
            Some(authority) => Ok(Some(EtcdTls { authority: read(authority)?, identity })),
            None if identity.is_some() => bail!("--etcd-cert needs --etcd-ca FILE, the CA of etcd's certificate"),
            None => Ok(None),
        }
    }

    fn user(&self) -> anyhow::Result<Option<(String, String)>> {
        match (&self.etcd_user, &self.etcd_password_file) {
            (Some(name), Some(file)) => {
                let password = secret::read_text(file)?;
                Ok(Some((name.clone(), password.trim_end_matches(['\r', '\n']).to_owned())))
            }
            (None, None) => Ok(None),
            _ => bail!("give both --etcd-user and --etcd-password-file"),
        }
    }
}

/// Records in the metrics whether the store can be reached, and since when. Ends with the process.
async fn record_reachability(store: Store) {
    let mut health = store.health();
    loop {
        let (is_connected, since) = {
            let health = health.borrow_and_update();
            (health.is_connected(), health.since.duration_since(UNIX_EPOCH).unwrap_or_default())
        };
        telemetry::metrics::store(is_connected, since);
        if health.changed().await.is_err() {
            return;
        }
    }
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Parses a list. A file may give one value in place of a list of one.
pub fn one_or_many<'a, D: Deserializer<'a>>(value: D) -> Result<Option<Vec<String>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMany {
        One(String),
        Many(Vec<String>),
    }
    Ok(Some(match OneOrMany::deserialize(value)? {
        OneOrMany::One(one) => vec![one],
        OneOrMany::Many(many) => many,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(settings: &StoreSettings, expect: Result<bool, &str>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let opened = runtime.block_on(settings.open()).map(|store| store.is_some()).map_err(|e| format!("{e:#}"));
        match expect {
            Ok(expect) => assert_eq!(opened, Ok(expect)),
            Err(part) => assert!(opened.clone().is_err_and(|e| e.contains(part)), "{part}: {opened:?}"),
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused_before_anybody_is_reached() {
        let none = StoreSettings::default();
        let etcd = StoreSettings { etcd_endpoints: Some(vec!["127.0.0.1:1".into()]), ..none.clone() };
        let somewhere = || Some(PathBuf::from("no/such/file"));
        check(&none, Ok(false));
        check(&etcd, Ok(true));
        check(&StoreSettings { etcd_user: Some("a".into()), ..none }, Err("--etcd-user needs --etcd-endpoints"));
        check(&StoreSettings { etcd_user: Some("a".into()), ..etcd.clone() }, Err("give both"));
        check(&StoreSettings { etcd_cert: somewhere(), ..etcd.clone() }, Err("give both"));
        check(&StoreSettings { etcd_ca: somewhere(), ..etcd.clone() }, Err("no/such/file"));
        check(&StoreSettings { etcd_lease_seconds: Some(0), ..etcd.clone() }, Err("at least 1"));
        let unsafe_ca = StoreSettings { etcd_endpoints: Some(vec!["https://h:1".into()]), ..etcd };
        check(&unsafe_ca, Err("authority"));
    }
}
