//! How a worker finds its coordinator: at a given address, or at the address of its replica in the cluster store. Has
//! no knowledge of what a worker computes.

use crate::settings::{StoreSettings, TrustSettings};
use anyhow::{Context, ensure};
use cluster::{Addresses, LastClaim, follow_last_claim};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use wire::{DialTarget, JoinToken};

/// The coordinator's address, now and as it changes.
pub struct FoundCoordinator {
    pub address: String,
    pub channel: Channel,
}

/// The source that the flags choose.
pub enum CoordinatorSource<'a> {
    At(&'a str),
    InStore { store: &'a StoreSettings, replica: &'a str },
}

impl<'a> CoordinatorSource<'a> {
    pub fn of(join: Option<&'a str>, replica: Option<&'a str>, store: &'a StoreSettings) -> anyhow::Result<Self> {
        store.check()?;
        ensure!(replica.is_none() || store.is_given(), "--replica needs --etcd-endpoints HOST:PORT");
        ensure!(
            join.is_some() != store.is_given(),
            "give either --join HOST:PORT, the coordinator's address, or --etcd-endpoints HOST:PORT with --replica NAME"
        );
        match join {
            Some(address) => {
                address.parse::<Addresses>().context("--join")?;
                Ok(CoordinatorSource::At(address))
            }
            None => {
                let replica = replica.context("--etcd-endpoints needs --replica NAME")?;
                Ok(CoordinatorSource::InStore { store, replica })
            }
        }
    }

    /// Waits until the address is known. `handed` is a token from standard input in place of a file.
    pub async fn find(self, trust: TrustSettings, handed: Option<JoinToken>) -> anyhow::Result<FoundCoordinator> {
        match self {
            CoordinatorSource::At(address) => {
                let address = address.to_owned();
                let trust = trust.at_each_dial("worker", &address, handed)?;
                let (found, until) = (address.clone(), CancellationToken::new());
                let now = move || Ok(DialTarget { address: address.clone(), trust: trust(), until: until.clone() });
                Ok(FoundCoordinator { address: found, channel: wire::channel_to_where(now) })
            }
            CoordinatorSource::InStore { store, replica } => {
                let store = store.open().await?.context("--etcd-endpoints is missing")?;
                tracing::info!(replica, store = store.kind(), "looking for the coordinator of this replica");
                let claim_rx = follow_last_claim(store.watch(), replica.to_owned()).await;
                let address = claim_rx.borrow().address.clone();
                // An invalid setting is reported now, and not at the first dial.
                trust.resolve("worker", &address, handed.clone())?;
                let now = move || {
                    let LastClaim { address, superseded: until, .. } = claim_rx.borrow().clone();
                    let trust = trust.resolve("worker", &address, handed.clone()).map_err(|e| format!("{e:#}"))?;
                    Ok(DialTarget { address, trust, until })
                };
                Ok(FoundCoordinator { address, channel: wire::channel_to_where(now) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_way_to_find_it() {
        let none = StoreSettings::default();
        let etcd = StoreSettings { etcd_endpoints: Some(vec!["127.0.0.1:1".into()]), ..none.clone() };
        let check = |join, replica, store, expect: Result<bool, &str>| match (
            CoordinatorSource::of(join, replica, store),
            expect,
        ) {
            (Ok(found), Ok(is_in_store)) => assert_eq!(matches!(found, CoordinatorSource::InStore { .. }), is_in_store),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (found, expect) => panic!("{}, expected {expect:?}", found.is_ok()),
        };
        check(Some("a:1"), None, &none, Ok(false));
        check(None, Some("name"), &etcd, Ok(true));
        check(None, None, &none, Err("--join HOST:PORT"));
        check(None, None, &etcd, Err("--replica NAME"));
        check(Some("a:1"), Some("name"), &etcd, Err("give either"));
        check(Some("a:1"), Some("name"), &none, Err("--replica needs"));
    }
}
