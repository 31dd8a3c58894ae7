//! The one path from a request to its events. gRPC and HTTP both come here and speak `lockstep.v1`; neither knows the
//! replica, and this file knows neither of them.

use crate::Text;
use crate::admission::{Admission, Waiting};
use crate::config::{Config, Limits};
use crate::link::{Link, Progress, Replica, Submit, Ticket, Told};
use crate::measure::{Clock, Face};
use crate::refusal::Refusal;
use crate::stop::Stops;
use crate::text::Assembly;
use proto::v1;
use proto::v1::generate_request::Input;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{Instant, Sleep};
use tokio_stream::Stream;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use types::{Finish, Priority, Request, Sampling, TenantId, Token, TokenOut, Tokens};

/// More than this is read, rendered and tokenized where it holds up no other request.
const BYTES_INLINE_MAX: usize = 64 << 10;
/// What a message costs a template besides its text.
const MESSAGE_BYTES: usize = 64;
/// Of a model's name that is not known, as an error repeats it.
const NAME_CHARS_MAX: usize = 100;

/// How much work an input is, in bytes of text.
fn length(input: &Input) -> usize {
    match input {
        Input::TokenIds(_) => 0,
        Input::Text(text) => text.len(),
        Input::Chat(chat) => {
            chat.messages.iter().map(|message| MESSAGE_BYTES + message.role.len() + message.content.len()).sum()
        }
    }
}

/// What every face of the router holds.
pub struct Front {
    pub config: Config,
    pub text: Text,
    pub link: Link,
    pub admission: Admission,
    /// Counts the generations that somebody still holds.
    pub streams: TaskTracker,
    /// Places for work on long texts.
    pub long_texts: Arc<Semaphore>,
    /// Part of every public id: two routers, or two lives of one, never give the same.
    pub nonce: u32,
}

/// A request as a face has parsed it.
pub struct Ask {
    pub request: v1::GenerateRequest,
    pub n_choices: u32,
    /// The call's own deadline. The request's, if any, is in the request.
    pub deadline: Option<Instant>,
    pub face: Face,
}

/// What a stream is made of. The same three as in `lockstep.v1`; `Started` is at hand before the first event.
#[derive(Debug)]
pub enum Event {
    Delta(v1::Delta),
    Finished(v1::Finished),
}

impl Front {
    /// Lets a request in, and sends it to the replica.
    pub async fn generate(self: &Arc<Self>, ask: Ask) -> Result<Generation, Refusal> {
        let mut clock = Clock::start(ask.face);
        let begun = self.begin(ask).await;
        match begun {
            Ok(mut generation) => {
                generation.clock = Some(clock);
                Ok(generation)
            }
            Err(refusal) => {
                clock.refused(&refusal);
                Err(refusal)
            }
        }
    }

    async fn begin(self: &Arc<Self>, ask: Ask) -> Result<Generation, Refusal> {
        let Ask { request, n_choices, deadline, .. } = ask;
        let limits = &self.config.limits;
        if n_choices == 0 || n_choices > limits.choices_max {
            return Err(Refusal::invalid("n", format!("must be 1 to {}, and is {n_choices}", limits.choices_max)));
        }
        let waiting = self.admission.admit(n_choices)?;
        let replica = self.replica()?;
        let model = self.model(&request.model, &replica)?;
        let deadline = [deadline, after(request.deadline_ms)].into_iter().flatten().min();
        let priority = priority(request.priority)?;
        let input = request.input.ok_or_else(|| Refusal::invalid("input", "one of text, chat and token_ids"))?;
        let asked = request.sampling.unwrap_or_default();
        let (mut sampling, stops) = self.sampling(asked)?;
        let prompt = self.tokens(input, true).await?;
        let room = (replica.context as usize).saturating_sub(prompt.len());
        if room == 0 {
            return Err(Refusal::TooLong { n_prompt: prompt.len(), context: replica.context });
        }
        // A longer answer than the context allows ends with `length`, as one that was asked to be so long would.
        sampling.tokens_max = sampling.tokens_max.min(room as u32);
        let request = Request { tenant: TenantId(0), prompt, sampling, priority, ..Request::default() };
        self.submit(request, n_choices, stops, deadline, Opened { waiting, replica, model })
    }

    /// One request at the replica per choice, all heard through one queue.
    fn submit(
        self: &Arc<Self>,
        request: Request,
        n_choices: u32,
        stops: Arc<Stops>,
        deadline: Option<Instant>,
        opened: Opened,
    ) -> Result<Generation, Refusal> {
        let Opened { waiting, replica, model } = opened;
        // Each step brings a token, and one place is kept for the end.
        let unread_max = (request.sampling.tokens_max as usize).min(self.config.limits.outputs_unread_max) + 1;
        let (ear, heard) = mpsc::channel(unread_max * n_choices as usize);
        let mut choices = Vec::new();
        for choice in 0..n_choices {
            let mut request = request.clone();
            request.sampling.choice = choice;
            let assembly = Assembly::new(&self.text.tokenizer, stops.clone(), request.sampling.tokens_min);
            let stop_tokens = request.sampling.stop.clone();
            let submit = Submit { request, deadline, digest: replica.digest, ear: ear.clone() };
            let ticket = self.link.submit(submit)?;
            choices.push(Choice { ticket: Some(ticket), assembly, stop_tokens, n_cached: 0 });
        }
        let started = self.started(&choices, &replica, model, &request);
        Ok(Generation {
            started,
            replica,
            heard,
            choices,
            stops,
            waiting: Some(waiting),
            deadline: deadline.map(|deadline| Box::pin(tokio::time::sleep_until(deadline))),
            ready: VecDeque::new(),
            failed: None,
            clock: None,
            _counted: self.streams.token(),
        })
    }

    fn started(&self, choices: &[Choice], replica: &Replica, model: String, request: &Request) -> v1::Started {
        let ticket = choices.first().and_then(|choice| choice.ticket.as_ref());
        let id = ticket.map_or(0, |ticket| ticket.id(replica).0);
        let seed = request.sampling.seed;
        let resume = v1::ResumeHandle {
            replica: replica.name.clone(),
            id: format!("{id:016x}"),
            seed,
            policy_digest: replica.digest.0.to_vec(),
            incarnation: replica.incarnation,
        };
        v1::Started {
            id: format!("{:08x}{id:016x}", self.nonce),
            model,
            seed,
            prompt_tokens: request.prompt.len() as u32,
            resume: Some(resume),
        }
    }

    /// The replica that serves now.
    pub fn replica(&self) -> Result<Arc<Replica>, Refusal> {
        self.link.replica().ok_or(Refusal::NotReady { retry_after: self.config.waits.retry_after })
    }

    /// The name that replies carry, if the model that a client names is the one that is served. No name means that one.
    pub fn model(&self, asked: &str, replica: &Replica) -> Result<String, Refusal> {
        let served = self.served(replica);
        let known = asked.is_empty() || asked == replica.model || self.config.names.iter().any(|name| name == asked);
        if known {
            Ok(served)
        } else {
            Err(Refusal::NoModel { model: asked.chars().take(NAME_CHARS_MAX).collect(), served })
        }
    }

    /// The model's name in replies.
    pub fn served(&self, replica: &Replica) -> String {
        self.config.names.first().unwrap_or(&replica.model).clone()
    }

    /// Whether a name is the served model's, for what needs no replica.
    pub fn named(&self, asked: &str) -> Result<(), Refusal> {
        match (asked, self.replica()) {
            ("", _) => Ok(()),
            (_, Ok(replica)) => self.model(asked, &replica).map(|_| ()),
            (_, Err(_)) if self.config.names.iter().any(|name| name == asked) => Ok(()),
            (_, Err(not_ready)) => Err(not_ready),
        }
    }

    /// A prompt's tokens. `add_special` is for plain text; a template writes its special tokens itself.
    pub async fn tokens(self: &Arc<Self>, input: Input, add_special: bool) -> Result<Tokens, Refusal> {
        let front = self.clone();
        self.off_runtime(length(&input), move || front.encode(input, add_special)).await?
    }

    /// Does what is as much work as so many bytes: at once if they are few, and otherwise on a thread of its own, so
    /// that nobody's stream waits for it. There are few such threads.
    pub async fn off_runtime<T: Send + 'static>(
        &self,
        n_bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        if n_bytes <= BYTES_INLINE_MAX {
            return Ok(work());
        }
        let full = |_| Refusal::Full { retry_after: self.config.waits.retry_after };
        let place = self.long_texts.clone().try_acquire_owned().map_err(full)?;
        let done = tokio::task::spawn_blocking(move || {
            let _place = place;
            work()
        });
        done.await.map_err(|_| Refusal::failed("the text could not be read"))
    }

    fn encode(&self, input: Input, add_special: bool) -> Result<Tokens, Refusal> {
        let (field, text, add_special) = match input {
            Input::TokenIds(ids) => return self.checked(ids.ids),
            Input::Text(text) => ("text", text, add_special),
            Input::Chat(chat) => ("chat", self.render(chat)?, false),
        };
        let tokens = self.text.tokenizer.encode(&text, add_special);
        let tokens = tokens.map_err(|error| Refusal::invalid(field, format!("cannot be tokenized: {error}")))?;
        if tokens.is_empty() {
            return Err(Refusal::invalid(field, "the prompt is empty"));
        }
        // A tokenizer may know more than the model has rows for.
        self.check_ids(field, &tokens)?;
        Ok(tokens)
    }

    fn checked(&self, ids: Vec<Token>) -> Result<Tokens, Refusal> {
        if ids.is_empty() {
            return Err(Refusal::invalid("token_ids", "the prompt is empty"));
        }
        self.check_ids("token_ids", &ids)?;
        Ok(ids)
    }

    pub fn check_ids(&self, field: &'static str, ids: &[Token]) -> Result<(), Refusal> {
        let n_vocab = self.text.spec.vocab;
        match ids.iter().find(|id| **id >= n_vocab) {
            Some(id) => Err(Refusal::invalid(field, format!("{id} is no token: the vocabulary has {n_vocab}"))),
            None => Ok(()),
        }
    }

    fn render(&self, chat: v1::Chat) -> Result<String, Refusal> {
        let no_template = || Refusal::invalid("chat", "the model has no chat template; send text instead");
        let template = self.text.template.as_ref().ok_or_else(no_template)?;
        if chat.messages.is_empty() {
            return Err(Refusal::invalid("chat", "there are no messages"));
        }
        let message = |message: v1::ChatMessage| checkpoint::Message { role: message.role, content: message.content };
        let messages: Vec<checkpoint::Message> = chat.messages.into_iter().map(message).collect();
        let rendered = template.render(&messages, chat.add_generation_prompt.unwrap_or(true));
        rendered.map_err(|error| Refusal::invalid("chat", error.to_string()))
    }

    /// What was asked, checked, with the model's defaults for what was not.
    fn sampling(&self, asked: v1::Sampling) -> Result<(Sampling, Arc<Stops>), Refusal> {
        let defaults = &self.text.defaults;
        let limits = &self.config.limits;
        let temperature = asked.temperature.or(defaults.temperature).unwrap_or(1.0);
        let top_p = asked.top_p.or(defaults.top_p).unwrap_or(1.0);
        let min_p = asked.min_p.or(defaults.min_p).unwrap_or(0.0);
        check("temperature", temperature, (0.0..=2.0).contains(&temperature), "0 to 2")?;
        check("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1")?;
        check("min_p", min_p, (0.0..=1.0).contains(&min_p), "0 to 1")?;
        let tokens_max = asked.max_tokens.unwrap_or(u32::MAX);
        check("max_tokens", tokens_max, tokens_max > 0, "at least 1")?;
        check("min_tokens", asked.min_tokens, asked.min_tokens <= tokens_max, "at most max_tokens")?;
        self.check_ids("stop_token_ids", &asked.stop_token_ids)?;
        let logprobs = asked.logprobs.unwrap_or(0);
        check("logprobs", logprobs, logprobs <= limits.logprobs_max, &format!("at most {}", limits.logprobs_max))?;
        let stops = stops(asked.stop, limits)?;
        let sampling = Sampling {
            temperature,
            top_k: asked.top_k.or(defaults.top_k).unwrap_or(0),
            top_p,
            min_p,
            seed: asked.seed.unwrap_or_else(random_seed),
            choice: 0,
            tokens_max,
            tokens_min: asked.min_tokens,
            stop: self.stop_tokens(asked.stop_token_ids, asked.ignore_eos),
            logprobs: asked.logprobs.map(|n| n as u8),
        };
        Ok((sampling, stops))
    }

    fn stop_tokens(&self, mut stop: Tokens, ignore_eos: bool) -> Tokens {
        if !ignore_eos {
            stop.extend_from_slice(&self.text.spec.eos);
        }
        stop.sort_unstable();
        stop.dedup();
        stop
    }
}

/// What a request has got on its way to being submitted.
struct Opened {
    waiting: Waiting,
    replica: Arc<Replica>,
    model: String,
}

fn check(field: &'static str, value: impl std::fmt::Display, holds: bool, must: &str) -> Result<(), Refusal> {
    if holds { Ok(()) } else { Err(Refusal::invalid(field, format!("must be {must}, and is {value}"))) }
}

fn stops(strings: Vec<String>, limits: &Limits) -> Result<Arc<Stops>, Refusal> {
    let (n, n_bytes) = (strings.len(), strings.iter().map(String::len).sum::<usize>());
    check("stop", n, n <= limits.stop_strings_max, &format!("at most {} strings", limits.stop_strings_max))?;
    check("stop", n_bytes, n_bytes <= limits.stop_bytes_max, &format!("at most {} bytes", limits.stop_bytes_max))?;
    if strings.iter().any(String::is_empty) {
        return Err(Refusal::invalid("stop", "an empty string would stop everything"));
    }
    Ok(Arc::new(Stops::new(strings)))
}

fn priority(priority: i32) -> Result<Priority, Refusal> {
    let out_of_range = |_| Refusal::invalid("priority", format!("must be -128 to 127, and is {priority}"));
    i8::try_from(priority).map(Priority).map_err(out_of_range)
}

fn after(millis: u32) -> Option<Instant> {
    (millis > 0).then(|| Instant::now() + Duration::from_millis(millis.into()))
}

/// Below 2^53, so that a client in any language can send it back as it came.
fn random_seed() -> u64 {
    // The standard library's only source of random bits: keys from the system, another for each.
    RandomState::new().hash_one(std::time::Instant::now()) >> 11
}

pub fn random_nonce() -> u32 {
    random_seed() as u32
}

/// A request under way. Dropping it cancels what has not finished.
pub struct Generation {
    pub started: v1::Started,
    pub replica: Arc<Replica>,
    // Before `choices`: whoever hears of a dropped ticket finds the ear closed.
    heard: mpsc::Receiver<(u32, Told)>,
    choices: Vec<Choice>,
    stops: Arc<Stops>,
    waiting: Option<Waiting>,
    deadline: Option<Pin<Box<Sleep>>>,
    ready: VecDeque<(u32, Event)>,
    failed: Option<Refusal>,
    clock: Option<Clock>,
    _counted: TaskTrackerToken,
}

struct Choice {
    /// Present until the choice is finished.
    ticket: Option<Ticket>,
    assembly: Assembly,
    stop_tokens: Tokens,
    n_cached: u32,
}

impl Generation {
    /// Waits for the first word of the replica, so that a refusal can be told as one. After `wait_max` the stream is
    /// opened without it.
    pub async fn answered(&mut self, wait_max: Duration) -> Result<(), Refusal> {
        let first = tokio::time::timeout(wait_max, poll_fn(|context| self.poll_heard(context))).await;
        match first {
            Ok(()) => self.failed.take().map_or(Ok(()), Err),
            Err(_) => Ok(()),
        }
    }

    /// Ready when there is something to give out, or nothing will come.
    fn poll_heard(&mut self, context: &mut Context<'_>) -> Poll<()> {
        while self.ready.is_empty() && self.failed.is_none() && self.is_running() {
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

    fn is_running(&self) -> bool {
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

    fn progress(&mut self, choice_idx: u32, progress: Progress) {
        let Some(choice) = self.choices.get_mut(choice_idx as usize) else { return };
        if choice.ticket.is_none() {
            // It ended with a stop string, and these were already on their way.
            return;
        }
        self.waiting = None;
        if let (Some(clock), false) = (&mut self.clock, progress.tokens.is_empty()) {
            clock.tokens(progress.tokens.len());
        }
        match progress.finish {
            Some(Finish::Deadline) => return self.fail(Refusal::Deadline),
            Some(Finish::Failed) => return self.fail(Refusal::failed("the replica gave it up")),
            Some(Finish::Cancelled) => return self.fail(Refusal::failed("the replica cancelled it")),
            Some(Finish::Stop | Finish::Length) | None => {}
        }
        let (delta, finished) = choice.advance(progress, self.started.prompt_tokens, &self.stops);
        if !delta.token_ids.is_empty() || !delta.text.is_empty() {
            self.ready.push_back((choice_idx, Event::Delta(delta)));
        }
        if let Some(finished) = finished {
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
    /// What the tokens say, and whether that is the end.
    fn advance(&mut self, progress: Progress, n_prompt: u32, stops: &Stops) -> (v1::Delta, Option<v1::Finished>) {
        let Progress { position, tokens, n_cached, finish } = progress;
        if position == 0 {
            self.n_cached = n_cached;
        }
        let mut delta = v1::Delta { position, ..v1::Delta::default() };
        let mut stopped = None;
        let n_tokens = tokens.len();
        for (i, out) in tokens.into_iter().enumerate() {
            let ends = finish == Some(Finish::Stop) && i + 1 == n_tokens && self.stop_tokens.contains(&out.token);
            if ends {
                self.assembly.push_stop_token();
            } else {
                stopped = self.assembly.push(out.token, &mut delta.text);
            }
            delta.token_ids.push(out.token);
            delta.logprobs.extend(logprob(out));
            if stopped.is_some() {
                break;
            }
        }
        if stopped.is_none() && finish.is_some() {
            stopped = self.assembly.finish(&mut delta.text);
        }
        let finished = self.end(finish, stopped.map(|stop| stops.string(stop)), n_prompt);
        (delta, finished)
    }

    fn end(&mut self, finish: Option<Finish>, stop: Option<&str>, n_prompt: u32) -> Option<v1::Finished> {
        if finish.is_none() && stop.is_none() {
            return None;
        }
        // Dropped as it is, the ticket cancels: after a stop string the replica does not know that the text is over.
        if let (Some(mut ticket), true) = (self.ticket.take(), finish.is_some()) {
            ticket.over();
        }
        let reason = match (stop, finish) {
            (None, Some(Finish::Length)) => v1::finished::Reason::Length,
            _ => v1::finished::Reason::Stop,
        };
        let usage = v1::Usage {
            prompt_tokens: n_prompt,
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
