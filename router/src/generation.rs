//! A request under way: what the replica says of it, as events. Knows tokens and text, and neither face.

use crate::Text;
use crate::admission::Waiting;
use crate::link::{Progress, Replica, Told};
use crate::measure::Clock;
use crate::refusal::Refusal;
use crate::resume::{Marks, NoResume};
use crate::stop::Stops;
use crate::tenants::{Charge, Visit};
use crate::text::Assembly;
use crate::ticket::Ticket;
use proto::v1;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Sleep;
use tokio_stream::Stream;
use tokio_util::task::task_tracker::TaskTrackerToken;
use types::{Finish, Goal, Request, TokenOut, Tokens};

/// What a stream is made of. The same as in `lockstep.v1`; `Started` is at hand before the first event.
#[derive(Debug)]
pub enum Event {
    /// Once, before the first delta, if logprobs of the prompt were asked for.
    Prompt(v1::PromptLogprobs),
    Delta(v1::Delta),
    /// A delta that the client has already, because it goes on with a stream.
    Told(v1::Delta),
    /// The hidden states of the prompt, where nothing else was asked for.
    Pooled(Vec<f32>),
    Finished(v1::Finished),
}

/// A prompt as the replica has got it.
pub struct Prompt {
    pub ids: Tokens,
    /// Where it is to be echoed.
    pub text: Option<String>,
}

/// A request under way. Dropping it cancels what has not finished.
pub struct Generation {
    pub started: v1::Started,
    /// The model's name for metrics, where there are several models.
    pub label: Option<Arc<str>>,
    pub text: Arc<Text>,
    pub replica: Arc<Replica>,
    /// In seconds since 1970: when the stream began, here or elsewhere.
    pub created: u64,
    /// What the client has of it already.
    pub marks: Marks,
    /// None where there are too many choices to go on with.
    pub handle: Option<String>,
    /// Its choices follow one another, prompt by prompt.
    pub prompts: Vec<Prompt>,
    // Before `choices`: whoever hears of a dropped ticket finds the ear closed.
    pub(crate) heard: mpsc::Receiver<(u32, Told)>,
    pub(crate) choices: Vec<Choice>,
    pub(crate) stops: Arc<Stops>,
    pub(crate) waiting: Option<Waiting>,
    pub(crate) charge: Charge,
    /// None of what is a part of a request.
    pub(crate) visit: Option<Visit>,
    pub(crate) deadline: Option<Pin<Box<Sleep>>>,
    pub(crate) ready: VecDeque<(u32, Event)>,
    pub(crate) failed: Option<Refusal>,
    pub(crate) clock: Option<Clock>,
    pub(crate) _counted: TaskTrackerToken,
}

/// One answer to one prompt.
pub(crate) struct Choice {
    /// Present until the choice is finished.
    ticket: Option<Ticket>,
    assembly: Assembly,
    stop_tokens: Tokens,
    n_prompt: u32,
    /// Tokens that the client has already.
    n_told: u32,
    n_cached: u32,
    /// Logprobs of the prompt so far, until all of them are given out.
    scored: Option<Vec<v1::Logprob>>,
}

impl Generation {
    /// Waits for the first word of the replica that is new to the client, so that a refusal can be told as one. After
    /// `wait_max` the stream is opened without it.
    pub async fn answered(&mut self, wait_max: Duration) -> Result<(), Refusal> {
        let first = tokio::time::timeout(wait_max, poll_fn(|context| self.poll_heard(context))).await;
        match first {
            Ok(()) => self.failed.take().map_or(Ok(()), Err),
            Err(_) => Ok(()),
        }
    }

    /// Ready when there is something to give out, or nothing will come.
    fn poll_heard(&mut self, context: &mut Context<'_>) -> Poll<()> {
        while !self.has_news() && self.failed.is_none() && self.is_running() {
            if self.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(context).is_ready()) {
                self.fail(Refusal::Deadline);
                break;
            }
            match ready!(self.heard.poll_recv(context)) {
                Some((choice, Told::Tokens(progress))) => self.progress(choice, progress),
                Some((_, Told::Refused(refusal))) => self.fail(refusal),
                None => self.fail(Refusal::failed("the link to the replica ended")),
            }
        }
        Poll::Ready(())
    }

    /// Something that the client does not have.
    fn has_news(&self) -> bool {
        self.ready.iter().any(|(_, event)| !matches!(event, Event::Told(_)))
    }

    pub fn is_running(&self) -> bool {
        self.choices.iter().any(|choice| choice.ticket.is_some())
    }

    /// One choice that fails takes the others with it: their sum was asked for.
    fn fail(&mut self, refusal: Refusal) {
        if let Some(clock) = &mut self.clock {
            clock.refused(&refusal);
        }
        self.failed = Some(refusal);
        self.choices.iter_mut().for_each(|choice| choice.ticket = None);
    }

    fn progress(&mut self, choice_idx: u32, mut progress: Progress) {
        let Some(choice) = self.choices.get_mut(choice_idx as usize) else { return };
        if choice.ticket.is_none() {
            // It ended with a stop string, and these were already on their way.
            return;
        }
        if let Some(waiting) = self.waiting.take() {
            waiting.served();
            self.charge.began(self.prompts.iter().map(|prompt| prompt.ids.len() as u64).sum());
        }
        self.charge.said(choice.n_new(&progress));
        if !choice.hear_scores(progress.scored_position, &progress.scored) {
            return self.fail(Refusal::failed("the replica left a gap in the prompt's logprobs"));
        }
        if let (Some(clock), false) = (&mut self.clock, progress.tokens.is_empty()) {
            clock.tokens(progress.tokens.len());
        }
        match progress.finish {
            Some(Finish::Deadline) => return self.fail(Refusal::Deadline),
            Some(Finish::Failed) => return self.fail(Refusal::failed("the replica gave it up")),
            Some(Finish::Cancelled) => return self.fail(Refusal::failed("the replica cancelled it")),
            Some(Finish::Stop | Finish::Length) | None => {}
        }
        if progress.tokens.is_empty() && progress.finish.is_none() {
            return;
        }
        if let Some(logprobs) = choice.scored.take() {
            self.ready.push_back((choice_idx, Event::Prompt(v1::PromptLogprobs { logprobs })));
        }
        let pooled = std::mem::take(&mut progress.pooled);
        if !pooled.is_empty() {
            self.ready.push_back((choice_idx, Event::Pooled(pooled)));
        }
        let has_finish = progress.finish.is_some();
        let (told, delta, finished) = choice.advance(progress, &self.stops);
        let (end, position) = (choice.assembly.n_tokens(), choice.n_told);
        if (has_finish || finished.is_some()) && end < position {
            return self.fail(NoResume::Beyond { position, end }.into());
        }
        let says = |delta: &v1::Delta| !delta.token_ids.is_empty() || !delta.text.is_empty();
        if let Some(clock) = &mut self.clock {
            clock.said(choice_idx, &delta.text);
        }
        let told = Some(told).filter(says).map(Event::Told);
        let delta = Some(delta).filter(says).map(Event::Delta);
        self.ready.extend([told, delta].into_iter().flatten().map(|event| (choice_idx, event)));
        if let Some(finished) = finished {
            if let Some(clock) = &mut self.clock {
                clock.heard(choice_idx, &finished);
            }
            self.ready.push_back((choice_idx, Event::Finished(finished)));
            self.finished();
        }
    }

    fn finished(&mut self) {
        if let (false, Some(clock)) = (self.is_running(), &mut self.clock) {
            clock.finished("ok");
        }
    }
}

/// Events of all choices as they come, each with its choice. Ends when all have finished, or after one refusal.
impl Stream for Generation {
    type Item = Result<(u32, Event), Refusal>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        ready!(this.poll_heard(context));
        match this.ready.pop_front() {
            Some(event) => Poll::Ready(Some(Ok(event))),
            None => Poll::Ready(this.failed.take().map(Err)),
        }
    }
}

impl Choice {
    /// Without a ticket, of one that has ended before.
    pub fn new(ticket: Option<Ticket>, assembly: Assembly, request: &Request, n_told: u32) -> Choice {
        let scored = matches!(request.goal, Goal::Score { .. }).then(Vec::new);
        let n_prompt = request.prompt.len() as u32;
        Choice { ticket, assembly, stop_tokens: request.sampling.stop.clone(), n_prompt, n_told, n_cached: 0, scored }
    }

    pub fn begin(&mut self, ticket: Ticket) {
        self.ticket = Some(ticket);
    }

    /// Tokens that the client does not have: those before were paid for where they were said.
    fn n_new(&self, progress: &Progress) -> u64 {
        let end = progress.position + progress.tokens.len() as u32;
        end.saturating_sub(progress.position.max(self.n_told)).into()
    }

    /// A replica that begins again says them again. False where some are missing.
    ///
    /// `[1, position) said before · [position, ..) said now`
    fn hear_scores(&mut self, position: u32, scored: &[TokenOut]) -> bool {
        let Some(known) = self.scored.as_mut().filter(|_| !scored.is_empty()) else { return true };
        let first = position.saturating_sub(1) as usize;
        let Some(n_twice) = known.len().checked_sub(first) else { return false };
        known.extend(scored.iter().skip(n_twice).cloned().filter_map(logprob));
        true
    }

    /// What the tokens say, of it first what the client has already, and whether that is the end.
    fn advance(&mut self, progress: Progress, stops: &Stops) -> (v1::Delta, v1::Delta, Option<v1::Finished>) {
        let Progress { position, tokens, n_cached, finish, .. } = progress;
        if position == 0 {
            self.n_cached = n_cached;
        }
        let mut told = v1::Delta { position, ..v1::Delta::default() };
        let mut delta = v1::Delta { position: position.max(self.n_told), ..v1::Delta::default() };
        let mut stopped = None;
        let n_tokens = tokens.len();
        for (i, out) in tokens.into_iter().enumerate() {
            let is_told = position + (i as u32) < self.n_told;
            let delta = if is_told { &mut told } else { &mut delta };
            let ends = finish == Some(Finish::Stop) && i + 1 == n_tokens && self.stop_tokens.contains(&out.token);
            if ends && !stops.are_included() {
                self.assembly.push_stop_token();
            } else {
                stopped = self.assembly.push(out.token, &mut delta.text);
            }
            delta.token_ids.push(out.token);
            // Of what the client has the token alone may be said again: enough to know where the next one stands.
            let token_id = out.token;
            let bare = || v1::Logprob { token_id, ..v1::Logprob::default() };
            delta.logprobs.extend(logprob(out).or_else(|| is_told.then(bare)));
            if stopped.is_some() {
                break;
            }
        }
        if stopped.is_none() && finish.is_some() {
            // Who has the last token has this too: they are told together.
            let has_all = self.assembly.n_tokens() <= self.n_told;
            stopped = self.assembly.finish(if has_all { &mut told.text } else { &mut delta.text });
        }
        let finished = self.end(finish, stopped.map(|stop| stops.string(stop)));
        (told, delta, finished)
    }

    fn end(&mut self, finish: Option<Finish>, stop: Option<&str>) -> Option<v1::Finished> {
        if finish.is_none() && stop.is_none() {
            return None;
        }
        match (self.ticket.take(), finish) {
            (Some(ticket), Some(_)) => ticket.over(),
            // The replica does not know of stop strings.
            (Some(ticket), None) => ticket.stopped(),
            (None, _) => {}
        }
        let reason = match (stop, finish) {
            (None, Some(Finish::Length)) => v1::finished::Reason::Length,
            _ => v1::finished::Reason::Stop,
        };
        let usage = v1::Usage {
            prompt_tokens: self.n_prompt,
            cached_tokens: self.n_cached,
            completion_tokens: self.assembly.n_tokens(),
        };
        Some(v1::Finished { reason: reason.into(), stop: stop.unwrap_or_default().to_owned(), usage: Some(usage) })
    }
}

fn logprob(out: TokenOut) -> Option<v1::Logprob> {
    let top = out.top.iter();
    let top = top.map(|top| v1::Logprob { token_id: top.token, logprob: top.logprob, top: Vec::new() }).collect();
    out.logprob.map(|logprob| v1::Logprob { token_id: out.token, logprob, top })
}
