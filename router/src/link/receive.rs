//! Handles a replica's frames: its welcome, its condition, and its requests' tokens.

use crate::link::beats::BeatMonitor;
use crate::link::connection::up;
use crate::link::task::LinkTask;
use crate::link::ticket::Cancel;
use crate::link::view::{ReplicaInfo, room};
use crate::refusal::Refusal;
use proto::cluster as wire;
use proto::cluster::replica_frame::Frame;
use std::sync::Arc;
use std::time::Duration;
use telemetry::metrics;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Status;
use types::Finish;

impl LinkTask {
    pub(super) fn receive(&mut self, frame: Frame) {
        let now = Instant::now();
        if self.beats.record_frame(now) {
            tracing::info!(place = self.place, "a suspected replica responds again");
            self.peers.update_view(self.place, |view| view.is_suspected = false);
        }
        match frame {
            Frame::Welcome(welcome) => self.receive_welcome(welcome),
            Frame::State(state) => self.receive_state(state),
            Frame::Refused(refused) => self.receive_refused(refused),
            Frame::Beat(beat) => self.receive_beat(&beat),
            Frame::Outputs(outputs) => outputs.outputs.into_iter().for_each(|output| self.receive_output(output, now)),
        }
    }

    pub(super) fn receive_beat(&mut self, beat: &wire::Beat) {
        beat.load.iter().for_each(|load| self.ledger.apply_load(load));
        let applied = beat.cached.as_ref().map_or(Ok(()), |report| self.peers.apply_report(self.place, report));
        if applied.is_err() {
            tracing::warn!("names of cached blocks are missing: requesting all");
            self.outbox.push_back(up(wire::router_frame::Frame::Recite(wire::Recite {})));
        }
    }

    /// Suspects a silent replica: it may be dead, stopped or cut off. Its requests move to other replicas that can
    /// continue them at once; the others wait, because it may still come back.
    pub(super) fn suspect(&mut self) {
        tracing::warn!(requests = self.table.len(), "a replica is silent: suspecting it");
        self.ledger.record_break();
        metrics::replica_suspected(self.replica.as_ref().map_or("", |replica| &replica.name));
        self.peers.update_view(self.place, |view| view.is_suspected = true);
        self.leave_if_better();
    }

    pub(super) fn receive_state(&mut self, state: wire::State) {
        self.ledger.apply_state(&state);
        let now = Instant::now();
        self.room = room(&state);
        self.set_condition(self.condition.after_state(&state, now, self.timeouts.recovery_max), now);
        self.peers.update_view(self.place, |view| view.state = Some(state));
        if self.accepts_requests() {
            self.send_all();
        } else {
            self.move_away();
        }
        self.leave_if_better();
    }

    pub(super) fn receive_welcome(&mut self, welcome: wire::Welcome) {
        let welcome_beats = u64::from(welcome.beat_millis);
        let replica = match ReplicaInfo::of(welcome, &self.speaks) {
            Ok(replica) => replica,
            Err(status) => return self.receive_lost(&status),
        };
        if replica.incarnation < self.target.borrow().incarnation {
            return self.receive_lost(&Status::failed_precondition("the coordinator's claim is outdated"));
        }
        tracing::info!(replica = %replica.name, model = %replica.model, digest = %replica.digest, "attached");
        self.reattach = self.timeouts.reattach_min;
        // The former number is sent when this router attaches again, so that the replica does not compute for a stream
        // that is gone.
        self.beats =
            BeatMonitor::every(Duration::from_millis(welcome_beats), self.timeouts.beats_missed_max, Instant::now());
        self.former = Some(wire::FormerNumber { incarnation: replica.incarnation, router: replica.first_id.router() });
        let replica = Arc::new(replica);
        self.replica = Some(replica.clone());
        self.peers.update_view(self.place, |view| (view.name, view.replica) = (replica.name.clone(), Some(replica)));
        self.send_all();
    }

    /// Returns the key of this router's request with this id at the replica.
    pub(super) fn key(&self, id: u64) -> Option<u64> {
        let key = id.checked_sub(self.replica.as_ref()?.first_id.0)?;
        let has_it = self.table.contains_key(&key) && !self.parked.contains_key(&key);
        has_it.then_some(key)
    }

    pub(super) fn receive_refused(&mut self, refused: wire::Refused) {
        let Some(key) = self.key(refused.id) else { return };
        let Some(entry) = self.table.get(&key) else { return };
        let refusal = self.refusal(&refused, entry.request.prompt.len());
        let has_begun = entry.has_begun();
        let Some(wait) = refusal.retry_after() else { return self.end(key, refusal) };
        // A full replica was the one with the least work. If the replica drains or is not ready, there may be others.
        self.parked.insert(key, Some(Instant::now() + wait));
        if !matches!(refusal, Refusal::Full { .. }) && self.move_one(key) {
            return;
        }
        // A stream that has begun is not given up while its replica is coming back.
        if !has_begun {
            self.end(key, refusal);
        }
    }

    pub(super) fn refusal(&self, refused: &wire::Refused, n_prompt: usize) -> Refusal {
        use proto::cluster::refused::Reason;
        let retry_after = match refused.retry_after_ms {
            0 => self.timeouts.retry_after,
            millis => Duration::from_millis(millis.into()),
        };
        match refused.reason() {
            Reason::Full => Refusal::Full { retry_after },
            Reason::Draining => Refusal::Draining { retry_after },
            Reason::NotReady => Refusal::NotReady { retry_after, why: refused.message.clone() },
            Reason::TooLong => Refusal::TooLarge { n_prompt, message: refused.message.clone() },
            Reason::Deadline => Refusal::Deadline,
            Reason::Unsupported | Reason::Invalid => {
                Refusal::Invalid { field: "request".into(), message: refused.message.clone() }
            }
            Reason::Duplicate | Reason::Unspecified => Refusal::failed(refused.message.clone()),
        }
    }

    pub(super) fn receive_output(&mut self, mut output: wire::Output, now: Instant) {
        // This runs for every token: the table is looked up once, and `parked` only if it has entries.
        let Some(key) = self.replica.as_ref().and_then(|replica| output.id.checked_sub(replica.first_id.0)) else {
            return;
        };
        if !self.parked.is_empty() && self.parked.contains_key(&key) {
            return;
        }
        let Some(entry) = self.table.get_mut(&key) else { return };
        let finish = match output.finished() {
            // The replica cancelled the request, and not this router: it drains and ends its remaining requests. Others
            // can continue them.
            Ok(Some(Finish::Cancelled | Finish::Outgrown)) => return self.move_or_retry(key),
            Ok(finish) => finish,
            Err(error) => return self.end_broken(key, error.to_string()),
        };
        let n_sent = entry.request.output.len() as u32;
        if !splice(n_sent, &mut output) {
            return self
                .end_broken(key, format!("the replica left a gap: position {} after {n_sent}", output.position));
        }
        entry.request.output.extend(output.tokens.iter().map(|out| out.token));
        if !output.tokens.is_empty() {
            entry.work.mark_prompt_computed();
            (entry.n_lost, entry.n_coordinators_lost) = (0, 0);
            entry.absence.forget();
            match entry.last_token_at.replace(now) {
                Some(last) => self.ledger.record_token_gap(output.tokens.len(), now.saturating_duration_since(last)),
                None => {
                    self.peers.budget.record_answer();
                    // A request that had begun elsewhere did not wait only for this replica.
                    if n_sent == 0 {
                        self.ledger.record_first_token(now.saturating_duration_since(entry.since));
                    }
                }
            }
        }
        let finish = finish.or_else(|| entry.known_finish());
        let is_silent = output.tokens.is_empty() && output.scored.is_empty() && output.computed.is_none();
        if is_silent && finish.is_none() {
            return;
        }
        entry.report_events(&mut output, now);
        if let Some(finish) = finish {
            match finish {
                Finish::Failed => self.ledger.record_break(),
                _ => self.ledger.record_done(),
            }
            return self.finish(key, output, finish);
        }
        match entry.call.outputs.try_send((entry.slot, Ok(output))) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Closed(_)) => self.cancel(Cancel { key, stopped: false }),
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.send_cancel(Cancel { key, stopped: false });
                self.end(key, Refusal::SlowReader { unread: self.outputs_unread_max });
            }
        }
    }

    /// Ends a request after its replica has sent something impossible.
    pub(super) fn end_broken(&mut self, key: u64, message: String) {
        self.send_cancel(Cancel { key, stopped: false });
        self.end(key, Refusal::failed(message));
    }
}

/// Keeps the new part of an output, and sets the position to where that begins. Returns false if tokens are missing
/// between the known ones and these.
///
/// `[0, position) known · [position, n_sent) received twice · [n_sent, ..) new`
pub(super) fn splice(n_sent: u32, output: &mut wire::Output) -> bool {
    let Some(n_twice) = n_sent.checked_sub(output.position) else { return false };
    output.tokens.drain(..output.tokens.len().min(n_twice as usize));
    output.position = n_sent;
    true
}
