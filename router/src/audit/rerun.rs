//! Runs one request again at a replica that has room for it. Knows replicas by their names and their load.

use crate::board::pick::ContinuationNeed;
use crate::front::finished_answer::FinishedAnswer;
use crate::link::request::{ClientCall, SlotOutput};
use crate::replicas::pool::{IdleReplica, Replicas};
use std::sync::Arc;
use std::time::Duration;
use telemetry::TraceHeaders;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use types::{Goal, Priority, Request, TenantWeight, Tokens};

/// How often an audit checks whether a replica has become idle, or busy.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How long an audit waits for idle capacity, over all of its attempts.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// How long a request may run: there may be others to audit.
const RUN_MAX: Duration = Duration::from_secs(600);
const ATTEMPTS_MAX: u32 = 8;

pub struct Reruns<'a> {
    pub replicas: &'a Replicas,
}

/// The result of running a request again.
pub enum RerunOutcome {
    Finished(Tokens, RerunPlace),
    Busy,
    Lost,
}

/// The place where an answer was made.
pub struct RerunPlace {
    pub name: String,
    /// Hosts and devices of the replica's ranks.
    pub on: String,
}

/// How one attempt ended.
enum Attempt {
    Finished(Tokens),
    Interrupted,
    Lost,
}

impl Reruns<'_> {
    /// Runs a choice's request again, at a replica with a name that is not in `besides` if there is one.
    pub async fn rerun(&self, answer: &FinishedAnswer, slot: usize, besides: &[&str]) -> RerunOutcome {
        let request = request(answer, slot);
        let n_tokens = request.prompt.len() as u64 + u64::from(request.sampling.tokens_max);
        let (n_known, protocol) = (request.prompt.len() as u64, proto::needed(&request));
        let need = ContinuationNeed { digest: answer.replica.digest, n_tokens, n_known, protocol };
        let until = Instant::now() + WAIT_MAX;
        let mut n_attempts = 0;
        while Instant::now() < until && n_attempts < ATTEMPTS_MAX {
            let Some(idle) = self.replicas.idle(need, besides) else {
                sleep(LOOK_EVERY).await;
                continue;
            };
            n_attempts += 1;
            match self.attempt(&request, &idle).await {
                Attempt::Finished(tokens) => {
                    let name = idle.replica.name.clone();
                    return RerunOutcome::Finished(tokens, RerunPlace { on: self.ranks_of(&name), name });
                }
                Attempt::Interrupted => {}
                Attempt::Lost => return RerunOutcome::Lost,
            }
        }
        RerunOutcome::Busy
    }

    /// The hosts and devices of a replica's ranks, each once.
    pub fn ranks_of(&self, name: &str) -> String {
        self.replicas.ranks_of(name)
    }

    async fn attempt(&self, request: &Request, idle: &IdleReplica) -> Attempt {
        let (outputs, mut outputs_rx) = mpsc::channel(request.sampling.tokens_max as usize + 1);
        let call = ClientCall {
            first_key: idle.link.keys(1),
            deadline: Some(Instant::now() + RUN_MAX),
            digest: idle.replica.digest,
            n_cached: 0,
            trace: TraceHeaders::default(),
            needs_progress: false,
            outputs,
        };
        // Dropped with this future, and then the request is cancelled.
        let Ok(ticket) = idle.link.submit(request.clone(), 0, None, &Arc::new(call)) else {
            return Attempt::Interrupted;
        };
        let mut looks = interval(LOOK_EVERY);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut tokens = Tokens::new();
        let ended = loop {
            tokio::select! {
                output = outputs_rx.recv() => {
                    if let Some(ended) = apply_output(output, &mut tokens) {
                        break ended;
                    }
                }
                _ = looks.tick() => {
                    if !self.replicas.is_unchanged(idle) {
                        break Attempt::Lost;
                    }
                    if idle.has_other_requests() {
                        break Attempt::Interrupted;
                    }
                }
            }
        };
        match ended {
            // The replica may have moved in between: then these tokens cannot be attributed to a placement.
            Attempt::Finished(_) if !self.replicas.is_unchanged(idle) => Attempt::Lost,
            Attempt::Finished(tokens) => {
                ticket.finish();
                Attempt::Finished(tokens)
            }
            ended => ended,
        }
    }
}

/// Adds an output's tokens. Returns how the request has ended, if it has.
fn apply_output(output: Option<SlotOutput>, tokens: &mut Tokens) -> Option<Attempt> {
    let Some((_, Ok(output))) = output else { return Some(Attempt::Lost) };
    tokens.extend(output.tokens.iter().map(|out| out.token));
    match output.finished() {
        Ok(None) => None,
        Ok(Some(types::Finish::Stop | types::Finish::Length)) => Some(Attempt::Finished(std::mem::take(tokens))),
        // The replica cancelled the request by itself.
        Ok(Some(_)) | Err(_) => Some(Attempt::Lost),
    }
}

/// Returns a request that gives the same tokens: only as many of them, last in every queue, and apart from every cache.
fn request(answer: &FinishedAnswer, slot: usize) -> Request {
    let mut request = answer.request(slot);
    request.sampling.tokens_max = answer.choices.get(slot).map_or(1, |choice| choice.tokens.len() as u32);
    request.sampling.logprobs = None;
    Request {
        goal: Goal::Generate,
        priority: Priority(i8::MAX),
        weight: TenantWeight::default(),
        cache_bypass: true,
        cache_apart: true,
        ..request
    }
}
