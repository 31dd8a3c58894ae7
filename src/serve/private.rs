//! A server for one client within this process. No other process receives its ports, so it requires no key.

use super::{open_placeable, prepare, serve, start_and_check};
use crate::models;
use crate::roles::router::Listeners;
use crate::settings::{ConfigSource, LOG, ServeSettings};
use anyhow::{Context, anyhow};
use checkpoint::Checkpoint;
use checkpoint::catalogue::bytes_of;
use clap::ArgMatches;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tools::chat::ServedModel;

pub struct PrivateServer {
    settings: ServeSettings,
    checkpoint: Checkpoint,
    metrics: router::Render,
    /// The model's name, and its bytes on disk.
    name: String,
    n_bytes: u64,
}

/// Where a private server listens.
pub struct PrivateAddresses {
    pub http: SocketAddr,
    pub grpc: SocketAddr,
}

impl PrivateServer {
    /// Resolves the settings and finds the model, or prints the settings if a flag requests that.
    pub fn prepare(
        settings: ServeSettings,
        source: &ConfigSource,
        matches: &ArgMatches,
    ) -> anyhow::Result<Option<PrivateServer>> {
        let Some((mut settings, located)) = prepare(settings, source, matches)? else { return Ok(None) };
        let any_port = Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        (settings.router.http, settings.router.grpc) = (any_port, any_port);
        (settings.router.api_keys, settings.router.api_key) = (None, None);
        (settings.router.api_tls_cert, settings.router.api_tls_key, settings.router.api_client_ca) = (None, None, None);
        settings.router.answers.turn_off();
        if settings.watch.log == LOG {
            settings.watch.log = "warn".into();
        }
        let (metrics, checkpoint) = start_and_check(&settings, &located)?;
        let n_bytes = bytes_of(&located.path);
        Ok(Some(PrivateServer { settings, checkpoint, metrics, name: located.name, n_bytes }))
    }

    /// Returns the same server for another model, which is fetched and checked first.
    pub fn with_other_model(&self, model: &str, source: &ConfigSource) -> anyhow::Result<PrivateServer> {
        let mut settings = self.settings.clone();
        let located = models::locate_or_fetch(model, &source.hub)?;
        (settings.model.model, settings.model.served_model_name) = (model.to_owned(), None);
        settings.model.served_name_or(located.name.clone());
        let checkpoint = open_placeable(&settings, &located)?;
        let (metrics, n_bytes) = (self.metrics.clone(), bytes_of(&located.path));
        Ok(PrivateServer { settings, checkpoint, metrics, name: located.name, n_bytes })
    }

    pub fn model(&self) -> ServedModel<'_> {
        ServedModel { name: &self.name, n_bytes: self.n_bytes }
    }

    /// Starts the roles, runs the client, and stops the roles. The client waits until they are ready.
    pub fn serve_while<T>(&self, client: impl AsyncFnOnce(PrivateAddresses) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let PrivateServer { settings, checkpoint, metrics, .. } = self;
        let runtime = Runtime::new()?;
        let done = runtime.block_on(async {
            let listeners = Listeners::open(settings.router()).await?;
            let at = PrivateAddresses { http: listeners.http.local_addr()?, grpc: listeners.grpc.local_addr()? };
            let shutdown = CancellationToken::new();
            let mut served =
                pin!(serve(settings, checkpoint, metrics.clone().into(), listeners, Vec::new(), shutdown.clone()));
            let result = tokio::select! {
                reply = client(at) => reply,
                served = &mut served => return served.and(Err(anyhow!("the roles ended before the answer"))),
            };
            shutdown.cancel();
            let served = served.await.context("the roles ended with an error");
            result.and_then(|value| served.map(|()| value))
        });
        // A read of the terminal cannot be cancelled, and its line is of no use at this point.
        runtime.shutdown_background();
        done
    }
}
