//! Keeps one process's text in etcd under a lease, and writes it again whenever it changes, its lease has
//! ended, or etcd shows something else.

use super::line::{Backoff, CallError, EtcdConnection};
use super::written::{EntryRevision, KeepAction, REWRITE_MIN};
use crate::Error;
use crate::state::StoreState;
use etcd_client::PutOptions;
use std::convert::Infallible;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, sleep};
use tokio_util::sync::CancellationToken;

pub(super) struct PostKeeper {
    pub line: Arc<EtcdConnection>,
    pub state: watch::Receiver<StoreState>,
    pub name: String,
    pub text: watch::Receiver<Option<String>>,
    pub lease: Option<i64>,
    /// None before there is a text.
    pub written: Option<EntryRevision>,
}

impl PostKeeper {
    /// Runs until `end`; then its text is deleted.
    pub async fn run(mut self, end: CancellationToken) {
        end.run_until_cancelled(self.keep()).await;
        if let Some(lease) = self.lease {
            // If etcd is away, the text lapses with its lease.
            let _away = self.line.call(|mut client| async move { client.lease_revoke(lease).await }).await;
        }
    }

    async fn keep(&mut self) -> Infallible {
        let (mut pause, mut is_logged) = (Backoff::new(&self.line.waits), false);
        loop {
            let Err(failed) = self.hold(&mut pause, &mut is_logged).await;
            if failed == CallError::LeaseGone {
                self.lease = None;
            } else if !std::mem::replace(&mut is_logged, true) {
                tracing::warn!(name = self.name, why = %Error::from(failed), "the post cannot be kept in etcd");
            }
            pause.wait().await;
        }
    }

    async fn hold(&mut self, pause: &mut Backoff, is_logged: &mut bool) -> Result<Infallible, CallError> {
        let lease = match self.lease {
            Some(lease) => lease,
            None => *self.lease.insert(self.line.grant().await?),
        };
        self.write(lease).await?;
        pause.reset();
        *is_logged = false;
        let every = self.line.waits.beat_every;
        let mut beats = interval_at(Instant::now() + every, every);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            match self.next(&mut beats).await {
                KeepAction::Beat => self.line.keep_alive(lease).await?,
                KeepAction::Write => self.write(lease).await?,
                KeepAction::Amiss => {
                    sleep(REWRITE_MIN).await;
                    self.write(lease).await?;
                }
            }
        }
    }

    async fn next(&mut self, beats: &mut Interval) -> KeepAction {
        let key = self.line.keys.post(&self.name);
        let is_amiss = |state: &StoreState| {
            self.written.is_some_and(|written| written.precedes(state) && !written.stands(&key, state))
        };
        tokio::select! {
            _ = beats.tick() => KeepAction::Beat,
            Ok(()) = self.text.changed() => KeepAction::Write,
            Ok(_) = self.state.wait_for(is_amiss) => KeepAction::Amiss,
        }
    }

    async fn write(&mut self, lease: i64) -> Result<(), CallError> {
        let Some(text) = self.text.borrow_and_update().clone() else { return Ok(()) };
        let listings = self.state.borrow().listings;
        let key = self.line.keys.post(&self.name);
        let options = || Some(PutOptions::new().with_lease(lease));
        let request = |mut client: etcd_client::Client| {
            let (key, text) = (key.clone(), text.clone());
            async move { client.put(key, text, options()).await }
        };
        let done = self.line.call(request).await?;
        self.written = Some(EntryRevision::at(done.header(), listings));
        Ok(())
    }
}
