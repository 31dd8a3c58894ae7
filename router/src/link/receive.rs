//! Handles a replica's frames: its welcome, its condition, and its requests' tokens.

use crate::link::place::LinkPlace;
use crate::link::request::LinkRequest;
use crate::link::task::LinkTask;
use crate::link::ticket::Cancel;
use crate::refusal::Refusal;
use proto::cluster as wire;
use proto::cluster::replica_frame::Frame;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Status;
use types::Finish;

impl LinkTask {
    /// Handles a frame. An error ends the stream.
    pub(super) fn receive_frame(&mut self, frame: Frame, now: Instant) -> Result<(), Status> {
        if self.replica.record_frame(now) {
            tracing::info!(place = self.place.number(), "a suspected replica responds again");
            self.place.update_view(|view| view.is_suspected = false);
        }
        match frame {
            Frame::Welcome(welcome) => self.receive_welcome(welcome)?,
            Frame::State(state) => self.receive_state(state),
            Frame::Refused(refused) => self.receive_refused(refused),
            Frame::Beat(beat) => self.receive_beat(&beat),
            Frame::Outputs(outputs) => outputs.outputs.into_iter().for_each(|output| self.receive_output(output, now)),
        }
        Ok(())
    }

    fn receive_welcome(&mut self, welcome: wire::Welcome) -> Result<(), Status> {
        let beat = Duration::from_millis(welcome.beat_millis.into());
        let replica = self.connection.read_welcome(welcome)?;
        if self.target.is_later_than(replica.incarnation) {
            return Err(Status::failed_precondition("the coordinator's claim is outdated"));
        }
        tracing::info!(replica = %replica.name, model = %replica.model, digest = %replica.digest, "attached");
        self.connection.record_attached(&replica);
        let replica = Arc::new(replica);
        self.replica.attach(replica.clone(), beat, Instant::now());
        self.place.update_view(|view| (view.name, view.replica) = (replica.name.clone(), Some(replica)));
        self.send_waiting();
        Ok(())
    }

    fn receive_state(&mut self, state: wire::State) {
        self.place.ledger().apply_state(&state);
        let (now, computed) = (Instant::now(), self.replica.computes());
        self.replica.apply_state(&state, now);
        // Requests at a replica that does not compute count as absent until it does.
        match (computed, self.replica.computes()) {
            (true, false) => self.requests.begin_absences(now),
            (false, true) => self.requests.end_absences(now),
            (true, true) | (false, false) => {}
        }
        self.place.update_view(|view| view.state = Some(state));
        if self.replica.accepts_requests() {
            self.send_waiting();
        } else {
            self.move_parked();
        }
        self.leave_if_better();
    }

    fn receive_beat(&mut self, beat: &wire::Beat) {
        beat.load.iter().for_each(|load| self.place.ledger().apply_load(load));
        let applied = beat.cached.as_ref().map_or(Ok(()), |report| self.place.apply_report(report));
        if applied.is_err() {
            tracing::warn!("names of cached blocks are missing: requesting all");
            self.outbox.push(wire::router_frame::Frame::Recite(wire::Recite {}));
        }
    }

    fn receive_refused(&mut self, refused: wire::Refused) {
        let Some(key) = self.replica.key(refused.id) else { return };
        let Some(entry) = self.requests.at_replica(key) else { return };
        let refusal = refusal(refused, entry.request.prompt.len(), self.retry_after);
        let has_begun = entry.has_begun();
        let Some(wait) = refusal.retry_after() else { return self.requests.end(key, refusal) };
        // A full replica was the one with the least work. If the replica drains or is not ready, there may be others.
        self.requests.retry_at(key, Instant::now() + wait);
        if !matches!(refusal, Refusal::Full { .. }) && self.move_one(key) {
            return;
        }
        // A stream that has begun is not given up while its replica is coming back.
        if !has_begun {
            self.requests.end(key, refusal);
        }
    }

    fn receive_output(&mut self, mut output: wire::Output, now: Instant) {
        let Some(key) = self.replica.key(output.id) else { return };
        let Some(entry) = self.requests.at_replica(key) else { return };
        match apply_output(entry, &mut output, &self.place, now) {
            OutputEffect::Silent => {}
            OutputEffect::Delivers => match entry.call.outputs.try_send((entry.slot, Ok(output))) {
                Ok(()) => {}
                Err(mpsc::error::TrySendError::Closed(_)) => self.cancel(Cancel { key, stopped: false }),
                Err(mpsc::error::TrySendError::Full(_)) => {
                    self.end_at_replica(key, Refusal::SlowReader { unread: self.outputs_unread_max });
                }
            },
            OutputEffect::Finishes(finish) => self.requests.finish(key, output, finish),
            OutputEffect::Continues => self.move_or_retry(key),
            OutputEffect::Breaks(message) => self.end_at_replica(key, Refusal::failed(message)),
        }
    }

    /// Ends a request that its replica has not ended.
    fn end_at_replica(&mut self, key: u64, refusal: Refusal) {
        self.send_cancel(Cancel { key, stopped: false });
        self.requests.end(key, refusal);
    }
}

/// What an output does to its request.
enum OutputEffect {
    /// The output has nothing new for the client.
    Silent,
    Delivers,
    Finishes(Finish),
    /// The replica cancelled the request, and not this router: it drains and ends its remaining requests. Others can
    /// continue them.
    Continues,
    /// The replica has sent something impossible.
    Breaks(String),
}

/// Adds an output to its request's log, and leaves in it what is new to the client.
fn apply_output(entry: &mut LinkRequest, output: &mut wire::Output, place: &LinkPlace, now: Instant) -> OutputEffect {
    let finish = match output.finished() {
        Ok(Some(Finish::Cancelled | Finish::Outgrown)) => return OutputEffect::Continues,
        Ok(finish) => finish,
        Err(error) => return OutputEffect::Breaks(error.to_string()),
    };
    let n_sent = entry.request.output.len() as u32;
    if !splice(n_sent, output) {
        let message = format!("the replica left a gap: position {} after {n_sent}", output.position);
        return OutputEffect::Breaks(message);
    }
    if !output.tokens.is_empty() {
        apply_tokens(entry, &output.tokens, place, now);
    }
    let finish = finish.or_else(|| entry.known_finish());
    let is_silent = output.tokens.is_empty() && output.scored.is_empty() && output.computed.is_none();
    if is_silent && finish.is_none() {
        return OutputEffect::Silent;
    }
    entry.report_events(output, now);
    let Some(finish) = finish else { return OutputEffect::Delivers };
    match finish {
        Finish::Failed => place.ledger().record_break(),
        _ => place.ledger().record_done(),
    }
    OutputEffect::Finishes(finish)
}

/// Adds new tokens to a request's log, and records how long they took.
fn apply_tokens(entry: &mut LinkRequest, tokens: &[wire::TokenOut], place: &LinkPlace, now: Instant) {
    let is_first = entry.request.output.is_empty();
    entry.request.output.extend(tokens.iter().map(|out| out.token));
    entry.work.mark_prompt_computed();
    (entry.n_lost, entry.n_coordinators_lost) = (0, 0);
    entry.absence.forget();
    match entry.last_token_at.replace(now) {
        Some(last) => place.ledger().record_token_gap(tokens.len(), now.saturating_duration_since(last)),
        None => {
            place.record_answer();
            // A request that had begun elsewhere did not wait only for this replica.
            if is_first {
                place.ledger().record_first_token(now.saturating_duration_since(entry.since));
            }
        }
    }
}

fn refusal(refused: wire::Refused, n_prompt: usize, retry_after: Duration) -> Refusal {
    use proto::cluster::refused::Reason;
    let retry_after = match refused.retry_after_ms {
        0 => retry_after,
        millis => Duration::from_millis(millis.into()),
    };
    match refused.reason() {
        Reason::Full => Refusal::Full { retry_after },
        Reason::Draining => Refusal::Draining { retry_after },
        Reason::NotReady => Refusal::NotReady { retry_after, why: refused.message },
        Reason::TooLong => Refusal::TooLarge { n_prompt, message: refused.message },
        Reason::Deadline => Refusal::Deadline,
        Reason::Unsupported | Reason::Invalid => Refusal::Invalid { field: "request".into(), message: refused.message },
        Reason::Duplicate | Reason::Unspecified => Refusal::failed(refused.message),
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
