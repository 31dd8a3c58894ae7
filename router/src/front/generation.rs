//! The way out: turns a running request's outputs into events. Knows tokens and text, and no face.

use crate::front::certificate::CertificateDraft;
use crate::front::deltas::DeltaSequence;
use crate::front::finished_answer::AnswerKeeper;
use crate::front::progress::{PromptProgress, WatchedPrompt};
use crate::front::recorder::Recorder;
use crate::front::resume::ReadMarks;
use crate::front::stop::Stops;
use crate::front::text::AnswerAssembly;
use crate::limits::admission::AdmissionPermit;
use crate::limits::tenants::{Charge, Visit};
use crate::link::request::SlotOutput;
use crate::link::ticket::Ticket;
use crate::link::view::ReplicaInfo;
use crate::refusal::{Refusal, ResumeError};
use crate::replicas::models::talk::AnswerParseContext;
use crate::replicas::models::text::ModelText;
use proto::cluster as wire;
use proto::v1;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::Sleep;
use tokio_stream::Stream;
use tokio_util::task::task_tracker::TaskTrackerToken;
use types::{Finish, Goal, PrefixReuse, Request, Token, Tokens};

/// An event of a stream, as in `lockstep.v1`. `Started` is known before the first event.
#[derive(Debug)]
pub enum GenerationEvent {
    Delta(v1::Delta),
    Finished(v1::Finished),
    Aside(SideOutput),
}

/// Reports beside the answer itself. A face sends those that its clients can request, and drops the rest.
#[derive(Debug)]
pub enum SideOutput {
    /// The prompt's logprobs: once, before the first delta, if the client requested them.
    Prompt(v1::PromptLogprobs),
    /// How far the prompt is, before the first delta, if the client requested that.
    Progress(PromptProgress),
    /// A delta that the client already has, because it resumed the stream.
    Replayed(v1::Delta),
    /// The hidden states of the prompt, if the client requested them.
    Pooled(Vec<f32>),
}

/// A prompt in the form for the replica.
#[derive(Clone)]
pub struct Prompt {
    pub ids: Tokens,
    /// Where the second text of a pair begins; 0: it is one text.
    pub second_text: u32,
    /// Its text, if that is to be echoed.
    pub text: Option<String>,
    /// How the answer to a chat is read.
    pub(crate) talk: Option<AnswerParseContext>,
}

/// A running request. Dropping it cancels all choices that have not finished.
pub struct Generation {
    pub started: v1::Started,
    /// The model's name for metrics, if there are several models.
    pub label: Option<Arc<str>>,
    pub text: Arc<ModelText>,
    pub replica: Arc<ReplicaInfo>,
    /// When the stream began, here or elsewhere, in seconds since 1970.
    pub created: u64,
    /// How much of the stream the client already has.
    pub marks: ReadMarks,
    /// The resume handle. None if there are too many choices to resume.
    pub handle: Option<String>,
    /// When ranks began with its first choice, if that was reported.
    pub scheduled: Option<Instant>,
    /// Each prompt's choices follow one another.
    pub prompts: Vec<Prompt>,
    // Dropped before `choices`: a link that learns of a dropped ticket finds this queue closed.
    pub(crate) outputs_rx: mpsc::Receiver<SlotOutput>,
    pub(crate) choices: Vec<Choice>,
    pub(crate) stops: Arc<Stops>,
    pub(crate) permit: Option<AdmissionPermit>,
    /// None for a part of a request, and where it is charged already.
    pub(crate) charge: Option<Charge>,
    /// None for a part of a request.
    pub(crate) visit: Option<Visit>,
    pub(crate) deadline: Option<Pin<Box<Sleep>>>,
    pub(crate) ready: VecDeque<(u32, GenerationEvent)>,
    pub(crate) failed: Option<Refusal>,
    pub(crate) recorder: Option<Recorder>,
    /// Present if a record or an audit takes the answer when it is over.
    pub(crate) keeper: Option<Box<AnswerKeeper>>,
    pub(crate) _counted: TaskTrackerToken,
}

/// One answer to one prompt.
pub(crate) struct Choice {
    /// Present until the choice has finished.
    ticket: Option<Ticket>,
    assembly: AnswerAssembly,
    stop_tokens: Tokens,
    /// The stop tokens that the client did not request.
    own_ends: Tokens,
    n_prompt: u32,
    /// How many tokens the client already has.
    n_sent: u32,
    n_cached: u32,
    /// Why the reuse of the prefix cache was not larger.
    reuse: PrefixReuse,
    /// Draft tokens: those that were right, and those that were not.
    n_accepted: u32,
    n_rejected: u32,
    /// Logprobs of the prompt so far, until all of them are passed on.
    scored: Option<Vec<v1::Logprob>>,
    /// Present until the first token, if its prompt is watched.
    watched: Option<WatchedPrompt>,
    /// Present if a certificate is requested.
    draft: Option<Box<CertificateDraft>>,
    /// The tokens so far, if a record or an audit takes them when the choice is over.
    kept: Option<Tokens>,
}

impl Generation {
    /// Waits for the first output that is new to the client, so that a refusal can be sent as an error. After
    /// `wait_max` the stream is opened without it.
    pub async fn wait_first_output(&mut self, wait_max: Duration) -> Result<(), Refusal> {
        let first = tokio::time::timeout(wait_max, poll_fn(|context| self.poll_outputs(context))).await;
        match first {
            Ok(()) => self.failed.take().map_or(Ok(()), Err),
            Err(_) => Ok(()),
        }
    }

    /// Reads outputs until there is an event for the client, or no more will come.
    fn poll_outputs(&mut self, context: &mut Context<'_>) -> Poll<()> {
        while !self.has_news() && self.failed.is_none() && self.is_running() {
            if self.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(context).is_ready()) {
                self.fail(Refusal::Deadline);
                break;
            }
            match ready!(self.outputs_rx.poll_recv(context)) {
                Some((choice, Ok(output))) => self.apply_output(choice, output),
                Some((_, Err(refusal))) => self.fail(refusal),
                None => self.fail(Refusal::failed("the link to the replica ended")),
            }
        }
        Poll::Ready(())
    }

    /// Whether there is an event that the client does not have.
    fn has_news(&self) -> bool {
        self.ready.iter().any(|(_, event)| !matches!(event, GenerationEvent::Aside(SideOutput::Replayed(_))))
    }

    /// Whether the next event is the end of this choice, so that the delta before it is the last one.
    pub fn ends_next(&self, choice_idx: u32) -> bool {
        let next = self.ready.front();
        next.is_some_and(|(choice, event)| *choice == choice_idx && matches!(event, GenerationEvent::Finished(_)))
    }

    pub fn is_running(&self) -> bool {
        self.choices.iter().any(|choice| choice.ticket.is_some())
    }

    /// Fails all choices, because the client requested all of them.
    fn fail(&mut self, refusal: Refusal) {
        if let Some(recorder) = &mut self.recorder {
            recorder.record_refusal(&refusal);
        }
        self.failed = Some(refusal);
        self.choices.iter_mut().for_each(|choice| choice.ticket = None);
    }

    fn apply_output(&mut self, choice_idx: u32, mut output: wire::Output) {
        let Some(choice) = self.choices.get_mut(choice_idx as usize) else { return };
        if choice.ticket.is_none() {
            // The choice ended at a stop string, and these tokens were already on their way.
            return;
        }
        let finish = match output.finished() {
            Ok(finish) => finish,
            Err(malformed) => return self.fail(Refusal::failed(malformed.to_string())),
        };
        let has_begun = !output.tokens.is_empty() || finish.is_some();
        // Progress of a prompt brings no token: until there is one, the request waits.
        if let Some(permit) = self.permit.take_if(|_| has_begun || choice.watched.is_none()) {
            permit.free_places();
            let n_prompt = self.prompts.iter().map(|prompt| prompt.ids.len() as u64).sum();
            self.charge.iter_mut().for_each(|charge| charge.begin_answer(n_prompt));
        }
        self.charge.iter_mut().for_each(|charge| charge.add_output(choice.n_new(&output)));
        if !choice.add_scores(output.scored_position, &output.scored) {
            return self.fail(Refusal::failed("the replica left a gap in the prompt's logprobs"));
        }
        record_passages((&mut self.scheduled, &mut self.recorder), choice_idx, &output);
        match finish {
            Some(Finish::Deadline) => return self.fail(Refusal::Deadline),
            Some(Finish::Failed) => return self.fail(Refusal::failed("the replica gave up the request")),
            Some(Finish::Outgrown) => {
                return self.fail(Refusal::failed("the request has outgrown the replica's ranks"));
            }
            Some(Finish::Cancelled) => return self.fail(Refusal::failed("the replica cancelled the request")),
            Some(Finish::NoToken) => return self.fail(Refusal::NoToken { position: output.position }),
            Some(Finish::Grammar(fault)) => return self.fail(Refusal::Grammar { position: output.position, fault }),
            Some(Finish::Stop | Finish::Length) | None => {}
        }
        let progress = record_progress(self.recorder.as_ref(), choice, &output, has_begun);
        self.ready.extend(progress.map(|event| (choice_idx, event)));
        if !has_begun {
            return;
        }
        choice.watched = None;
        if let Some(logprobs) = choice.scored.take() {
            self.ready
                .push_back((choice_idx, GenerationEvent::Aside(SideOutput::Prompt(v1::PromptLogprobs { logprobs }))));
        }
        let pooled = std::mem::take(&mut output.pooled);
        if !pooled.is_empty() {
            self.ready.push_back((choice_idx, GenerationEvent::Aside(SideOutput::Pooled(pooled))));
        }
        let has_finish = finish.is_some();
        let ChoiceAdvance { replayed, new, finished } = choice.advance(output, finish, &self.stops);
        let (end, position) = (choice.assembly.n_tokens(), choice.n_sent);
        if (has_finish || finished.is_some()) && end < position {
            return self.fail(ResumeError::Beyond { position, end }.into());
        }
        if let Some(recorder) = &mut self.recorder {
            new.iter().for_each(|delta| recorder.record_text(choice_idx, &delta.text));
        }
        let replayed = replayed.into_iter().map(|delta| GenerationEvent::Aside(SideOutput::Replayed(delta)));
        let new = new.into_iter().map(GenerationEvent::Delta);
        self.ready.extend(replayed.chain(new).map(|event| (choice_idx, event)));
        if let Some(mut finished) = finished {
            self.keep(choice_idx, &mut finished);
            if let Some(recorder) = &mut self.recorder {
                recorder.record_finish(choice_idx, &finished);
            }
            self.ready.push_back((choice_idx, GenerationEvent::Finished(finished)));
            self.record_finished();
        }
    }

    /// Hands the answer to its queues, once all choices are over.
    fn keep(&mut self, choice_idx: u32, finished: &mut v1::Finished) {
        let kept = self.choices.get_mut(choice_idx as usize).and_then(|choice| choice.kept.take());
        let (Some(mut keeper), Some(kept)) = (self.keeper.take(), kept) else { return };
        match keeper.finish_choice(choice_idx, finished, kept) {
            true => keeper.deliver(self.prompts.iter().map(|prompt| prompt.ids.clone()).collect()),
            false => self.keeper = Some(keeper),
        }
    }

    fn record_finished(&mut self) {
        if let (false, Some(recorder)) = (self.is_running(), &mut self.recorder) {
            recorder.record_outcome("ok");
        }
    }
}

/// Records the progress of a choice's prompt. Returns the event for its client.
fn record_progress(
    recorder: Option<&Recorder>,
    choice: &mut Choice,
    output: &wire::Output,
    has_begun: bool,
) -> Option<GenerationEvent> {
    let watched = choice.watched.as_mut()?;
    let progress = watched.update(output, has_begun)?;
    recorder.inspect(|recorder| recorder.record_computed(progress.processed));
    watched.for_client.then_some(GenerationEvent::Aside(SideOutput::Progress(progress)))
}

/// Records when ranks began with the request, and what an output reports of a choice.
fn record_passages(
    (scheduled, recorder): (&mut Option<Instant>, &mut Option<Recorder>),
    choice_idx: u32,
    output: &wire::Output,
) {
    if scheduled.is_none() {
        let began = output.passages.iter().find(|passage| passage.kind() == wire::passage::Kind::Started);
        *scheduled = began.and_then(|began| Instant::now().checked_sub(Duration::from_micros(began.micros_ago)));
    }
    if let Some(recorder) = recorder {
        recorder.record_passages(choice_idx, &output.passages);
        if !output.tokens.is_empty() {
            recorder.record_tokens(choice_idx, output.tokens.len());
        }
    }
}

/// The events of all choices as they come, each with its choice. Ends when all have finished, or after one refusal.
impl Stream for Generation {
    type Item = Result<(u32, GenerationEvent), Refusal>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        ready!(this.poll_outputs(context));
        match this.ready.pop_front() {
            Some(event) => Poll::Ready(Some(Ok(event))),
            None => Poll::Ready(this.failed.take().map(Err)),
        }
    }
}

impl Choice {
    /// Returns a choice that has not begun. A choice that the client has to its end stays like this.
    pub fn new(
        assembly: AnswerAssembly,
        request: &Request,
        own_ends: &[Token],
        n_sent: u32,
        draft: Option<Box<CertificateDraft>>,
    ) -> Choice {
        let scored = matches!(request.goal, Goal::Score { .. }).then(Vec::new);
        let n_prompt = request.prompt.len() as u32;
        let stop_tokens = request.sampling.stop.clone();
        let own_ends = own_ends.to_vec();
        let (n_cached, n_accepted, n_rejected) = (0, 0, 0);
        Choice {
            ticket: None,
            assembly,
            stop_tokens,
            own_ends,
            n_prompt,
            n_sent,
            n_cached,
            reuse: PrefixReuse::default(),
            n_accepted,
            n_rejected,
            scored,
            watched: None,
            draft,
            kept: None,
        }
    }

    /// Keeps the choice's tokens until it is over, if a queue takes them.
    pub fn with_kept_tokens(self, is_needed: bool) -> Choice {
        Choice { kept: is_needed.then(Tokens::new), ..self }
    }

    /// Watches the progress of the choice's prompt until the first token, and reports it if its client requested that.
    pub fn with_watched_prompt(mut self, for_client: bool) -> Choice {
        self.watched = (self.n_sent == 0).then(|| WatchedPrompt::new(self.n_prompt, for_client));
        self
    }

    pub fn begin(&mut self, ticket: Ticket) {
        self.ticket = Some(ticket);
    }

    /// Returns how many of an output's tokens are new to the client. The others were charged when they were first sent.
    fn n_new(&self, output: &wire::Output) -> u64 {
        let end = output.position + output.tokens.len() as u32;
        end.saturating_sub(output.position.max(self.n_sent)).into()
    }

    /// Adds logprobs of the prompt. A replica that starts again sends them again. Returns false if some are missing.
    ///
    /// `[1, position) received before · [position, ..) received now`
    fn add_scores(&mut self, position: u32, scored: &[wire::TokenOut]) -> bool {
        let Some(known) = self.scored.as_mut().filter(|_| !scored.is_empty()) else { return true };
        let first = position.saturating_sub(1) as usize;
        let Some(n_twice) = known.len().checked_sub(first) else { return false };
        known.extend(scored.iter().skip(n_twice).cloned().filter_map(logprob));
        true
    }

    /// Turns an output into events: first the part that the client already has, then the new part, and the end if it
    /// came.
    fn advance(&mut self, output: wire::Output, finish: Option<Finish>, stops: &Stops) -> ChoiceAdvance {
        let reuse = output.reuse();
        let wire::Output { position, tokens, cached_tokens, drafts_accepted, drafts_rejected, .. } = output;
        if position == 0 {
            self.n_cached = cached_tokens;
            self.reuse = reuse;
        }
        self.n_accepted += drafts_accepted;
        self.n_rejected += drafts_rejected;
        let has_order = self.assembly.separates_calls();
        let (mut replayed, mut new) = (DeltaSequence::new(has_order), DeltaSequence::new(has_order));
        let (n_tokens, mut stopped, mut stop_token) = (tokens.len(), None, None);
        for (i, out) in tokens.into_iter().enumerate() {
            let is_sent = position + (i as u32) < self.n_sent;
            let is_last = i + 1 == n_tokens;
            let mut delta = v1::Delta { position: position + i as u32, ..v1::Delta::default() };
            if let Some(draft) = &mut self.draft {
                draft.push(out.token);
            }
            if let Some(kept) = &mut self.kept {
                kept.push(out.token);
            }
            let ends = finish == Some(Finish::Stop) && is_last && self.stop_tokens.contains(&out.token);
            stop_token = Some(out.token).filter(|token| ends && !self.own_ends.contains(token));
            if ends && !stops.are_included() {
                self.assembly.push_stop_token();
            } else {
                stopped = self.assembly.push(out.token, &mut delta);
            }
            if stopped.is_none() && is_last && finish.is_some() {
                // A client that has the last token has this text too: they are sent together.
                stopped = self.assembly.finish(&mut delta);
            }
            delta.token_ids.push(out.token);
            // Tokens that the client already has may come with the id alone: it suffices to know where the next one
            // begins.
            let token_id = out.token;
            let bare = || v1::Logprob { token_id, ..v1::Logprob::default() };
            let own = logprob(out).or_else(|| (is_sent && !self.assembly.hides_thoughts()).then(bare));
            let is_over = stopped.is_some() || (is_last && finish.is_some());
            delta.logprobs = self.assembly.visible_logprobs(own, is_over);
            let run = if is_sent { &mut replayed } else { &mut new };
            run.add(delta);
            if stopped.is_some() {
                break;
            }
        }
        if n_tokens == 0 && finish.is_some() {
            let mut delta = v1::Delta { position: position.max(self.n_sent), ..v1::Delta::default() };
            stopped = self.assembly.finish(&mut delta);
            delta.logprobs = self.assembly.visible_logprobs(None, true);
            if has_content(&delta) || !delta.logprobs.is_empty() {
                let run = if self.assembly.n_tokens() <= self.n_sent { &mut replayed } else { &mut new };
                run.add(delta);
            }
        }
        let stop = stopped.map(|stop| stops.string(stop));
        let stop_token = stop_token.filter(|_| stop.is_none());
        let finished = self.end(finish, stop).map(|finished| v1::Finished { stop_token, ..finished });
        ChoiceAdvance { replayed: replayed.into_deltas(), new: new.into_deltas(), finished }
    }

    fn end(&mut self, finish: Option<Finish>, stop: Option<&str>) -> Option<v1::Finished> {
        if finish.is_none() && stop.is_none() {
            return None;
        }
        match (self.ticket.take(), finish) {
            (Some(ticket), Some(_)) => ticket.finish(),
            // The replica has no knowledge of stop strings.
            (Some(ticket), None) => ticket.stop(),
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
            reasoning_tokens: self.assembly.n_reasoning(),
            accepted_prediction_tokens: self.n_accepted,
            rejected_prediction_tokens: self.n_rejected,
            ..v1::Usage::default()
        };
        let usage = usage.with_reuse(self.reuse);
        let certificate = self.draft.as_ref().map(|draft| draft.finished(reason));
        let stop = stop.unwrap_or_default().to_owned();
        let tool_calls = self.assembly.n_calls();
        Some(v1::Finished {
            reason: reason.into(),
            stop,
            usage: Some(usage),
            certificate,
            tool_calls,
            stop_token: None,
            choice: 0,
        })
    }
}

/// What an output means for the client.
struct ChoiceAdvance {
    /// The deltas that the client has already.
    replayed: Vec<v1::Delta>,
    new: Vec<v1::Delta>,
    finished: Option<v1::Finished>,
}

/// Whether a delta has content besides tokens.
pub fn has_content(delta: &v1::Delta) -> bool {
    !delta.text.is_empty() || !delta.reasoning.is_empty() || !delta.tool_calls.is_empty()
}

fn logprob(out: wire::TokenOut) -> Option<v1::Logprob> {
    let logprob = out.logprob?;
    let top = |top: wire::TokenLogprob| v1::Logprob { token_id: top.token, logprob: top.logprob, top: Vec::new() };
    Some(v1::Logprob { token_id: out.token, logprob, top: out.top.into_iter().map(top).collect() })
}
