//! Keeps one process's text in etcd under a lease, and writes it again whenever it changes or its lease has ended.

use super::line::{Failed, Line, Pause};
use crate::Error;
use etcd_client::PutOptions;
use std::convert::Infallible;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use tokio_util::sync::CancellationToken;

pub(super) struct Posting {
    pub line: Arc<Line>,
    pub name: String,
    pub text: watch::Receiver<Option<String>>,
    pub lease: Option<i64>,
}

impl Posting {
    /// Runs until `end`; then its text is deleted.
    pub async fn run(mut self, end: CancellationToken) {
        end.run_until_cancelled(self.keep()).await;
        if let Some(lease) = self.lease {
            // If etcd is away, the text lapses with its lease.
            let _away = self.line.call(|mut client| async move { client.lease_revoke(lease).await }).await;
        }
    }

    async fn keep(&mut self) -> Infallible {
        let (mut pause, mut is_told) = (Pause::new(&self.line.waits), false);
        loop {
            let Err(failed) = self.hold(&mut pause, &mut is_told).await;
            if failed == Failed::LeaseGone {
                self.lease = None;
            } else if !std::mem::replace(&mut is_told, true) {
                tracing::warn!(name = self.name, why = %Error::from(failed), "the others are not told");
            }
            pause.wait().await;
        }
    }

    async fn hold(&mut self, pause: &mut Pause, is_told: &mut bool) -> Result<Infallible, Failed> {
        let lease = match self.lease {
            Some(lease) => lease,
            None => *self.lease.insert(self.line.grant().await?),
        };
        self.write(lease).await?;
        pause.reset();
        *is_told = false;
        let every = self.line.waits.beat_every;
        let mut beats = interval_at(Instant::now() + every, every);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = beats.tick() => self.line.keep_alive(lease).await?,
                Ok(()) = self.text.changed() => self.write(lease).await?,
            }
        }
    }

    async fn write(&mut self, lease: i64) -> Result<(), Failed> {
        let Some(text) = self.text.borrow_and_update().clone() else { return Ok(()) };
        let key = self.line.keys.post(&self.name);
        let options = || Some(PutOptions::new().with_lease(lease));
        let ask = |mut client: etcd_client::Client| {
            let (key, text) = (key.clone(), text.clone());
            async move { client.put(key, text, options()).await }
        };
        self.line.call(ask).await.map(drop)
    }
}
