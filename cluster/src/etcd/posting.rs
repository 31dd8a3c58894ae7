//! Keeps one process's text in etcd under a lease, and writes it again whenever it changes, its lease has
//! ended, or etcd shows something else.

use super::line::{Failed, Line, Pause};
use super::written::{Next, REWRITE_MIN, Written};
use crate::Error;
use crate::state::State;
use etcd_client::PutOptions;
use std::convert::Infallible;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, sleep};
use tokio_util::sync::CancellationToken;

pub(super) struct Posting {
    pub line: Arc<Line>,
    pub state: watch::Receiver<State>,
    pub name: String,
    pub text: watch::Receiver<Option<String>>,
    pub lease: Option<i64>,
    /// None before there is a text.
    pub written: Option<Written>,
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
            match self.next(&mut beats).await {
                Next::Beat => self.line.keep_alive(lease).await?,
                Next::Write => self.write(lease).await?,
                Next::Amiss => {
                    sleep(REWRITE_MIN).await;
                    self.write(lease).await?;
                }
            }
        }
    }

    async fn next(&mut self, beats: &mut Interval) -> Next {
        let key = self.line.keys.post(&self.name);
        let is_amiss =
            |state: &State| self.written.is_some_and(|written| written.precedes(state) && !written.stands(&key, state));
        tokio::select! {
            _ = beats.tick() => Next::Beat,
            Ok(()) = self.text.changed() => Next::Write,
            Ok(_) = self.state.wait_for(is_amiss) => Next::Amiss,
        }
    }

    async fn write(&mut self, lease: i64) -> Result<(), Failed> {
        let Some(text) = self.text.borrow_and_update().clone() else { return Ok(()) };
        let listings = self.state.borrow().listings;
        let key = self.line.keys.post(&self.name);
        let options = || Some(PutOptions::new().with_lease(lease));
        let ask = |mut client: etcd_client::Client| {
            let (key, text) = (key.clone(), text.clone());
            async move { client.put(key, text, options()).await }
        };
        let done = self.line.call(ask).await?;
        self.written = Some(Written::at(done.header(), listings));
        Ok(())
    }
}
