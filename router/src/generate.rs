//! The one path from a request to its events. gRPC and HTTP both come here and speak `lockstep.v1`; neither knows the
//! replica, and this file knows neither of them.

use crate::Text;
use crate::admission::{Admission, Waiting};
use crate::attended::Attendance;
use crate::config::{Config, Limits};
use crate::generation::{Choice, Generation, Prompt};
use crate::link::{Adopts, Replica, Submit};
use crate::measure::Clock;
use crate::models::{By, Model, Models, offers};
use crate::pick::Need;
use crate::refusal::Refusal;
use crate::replicas::{Asking, Picked, Replicas};
use crate::resume::{Fingerprint, Handle, Marks, NoResume, Resume};
use crate::sampling::{Asked, random_seed, work};
use crate::stop::Stops;
use crate::tenants::{Charge, Tenant, Visit};
use crate::text::Assembly;
use proto::v1;
use proto::v1::generate_request::Input;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use telemetry::Carried;
use telemetry::spans::Traced;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;
use types::{Goal, Priority, Request, RequestId, Sampling, TenantId, Token, Tokens};

/// More than this is read, rendered and tokenized where it holds up no other request.
const BYTES_INLINE_MAX: usize = 64 << 10;
/// About as much text as a token has.
pub const TOKEN_TEXT_BYTES: usize = 4;
/// What a message costs a template besides its text.
const MESSAGE_BYTES: usize = 64;

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
    pub models: Models,
    pub replicas: Replicas,
    pub admission: Admission,
    /// Counts the generations that somebody still holds.
    pub streams: TaskTracker,
    /// Of those who read what the generations say.
    pub attendance: Arc<Attendance>,
    /// Places for work on long texts.
    pub long_texts: Arc<Semaphore>,
    /// Room for bodies that are read.
    pub bodies: Arc<Semaphore>,
    /// Part of every public id: two routers, or two lives of one, never give the same.
    pub nonce: u32,
}

/// A request as a face has parsed it.
pub struct Ask {
    /// May be empty: the model that is served.
    pub model: String,
    /// Each is answered on its own, so many times.
    pub prompts: Vec<Input>,
    pub n_choices: u32,
    pub first_choice: u32,
    pub purpose: Purpose,
    /// The prompts' texts are wanted back.
    pub echo: bool,
    pub priority: i32,
    pub deadline: Option<Instant>,
    pub tenant: TenantId,
    /// Requests with the same one belong together, as a client sees it.
    pub session: Option<u64>,
    /// The stream is gone on with, behind what the client has.
    pub resume: Option<Resume>,
    pub trace: Traced,
    pub room: Room,
    /// None where somebody else counts.
    pub clock: Option<Clock>,
}

/// Places in memory that a request's text takes until it is tokens.
pub type Room = Vec<OwnedSemaphorePermit>;

pub enum Purpose {
    Generate(Box<v1::Sampling>),
    Pool,
}

impl Purpose {
    /// What decides which of several versions answers: a session's requests are one version's, and so are those with
    /// the same seed. One that has none gets it here. Embeddings of two versions cannot be compared, so a tenant's are
    /// one version's.
    fn key(&mut self, session: Option<u64>, tenant: TenantId) -> u64 {
        match self {
            Purpose::Generate(sampling) => {
                let seed = *sampling.seed.get_or_insert_with(random_seed);
                session.unwrap_or(seed)
            }
            Purpose::Pool => tenant.0,
        }
    }

    /// How much it is to read, in bytes of text.
    fn work(&self) -> usize {
        match self {
            Purpose::Generate(sampling) => work(sampling),
            Purpose::Pool => 0,
        }
    }

    /// `seed` is what was drawn for a stream that is gone on with.
    fn read(self, of: &Text, seed: Option<u64>, limits: &Limits) -> Result<Asked, Refusal> {
        match self {
            Purpose::Generate(mut sampling) => {
                sampling.seed = sampling.seed.or(seed);
                of.sampling(*sampling, limits)
            }
            Purpose::Pool => Ok(Asked {
                sampling: Sampling { tokens_max: 1, ..Sampling::default() },
                goal: Goal::Pool,
                stops: Arc::new(Stops::new(Vec::new())),
                show_special: false,
            }),
        }
    }
}

impl Front {
    /// Lets a request in, and sends it to a replica.
    pub async fn generate(self: &Arc<Self>, ask: Ask) -> Result<Generation, Refusal> {
        let tenant = self.config.keys.of(ask.tenant);
        let mut ask = Ask { deadline: self.deadline(ask.deadline), ..ask };
        let visit = self.enter(&tenant).inspect_err(|refusal| {
            ask.clock.iter_mut().for_each(|clock| clock.refused(refusal));
        })?;
        let mut generation = self.generate_part(ask).await.inspect_err(|refusal| tenant.refused(refusal))?;
        generation.visit = Some(visit);
        Ok(generation)
    }

    /// A request's own, or the router's where that is sooner.
    pub fn deadline(&self, own: Option<Instant>) -> Option<Instant> {
        let ours = self.config.waits.request_max.and_then(|max| Instant::now().checked_add(max));
        own.into_iter().chain(ours).min()
    }

    /// The same for what is no generation, by whose tenant it is.
    pub fn visit(&self, tenant: TenantId) -> Result<Visit, Refusal> {
        self.enter(&self.config.keys.of(tenant))
    }

    /// Counts a request of a tenant, where it may come in.
    pub fn enter(&self, tenant: &Arc<Tenant>) -> Result<Visit, Refusal> {
        tenant.enter(self.config.waits.retry_after).inspect_err(|refusal| tenant.refused(refusal))
    }

    /// The same for what is a part of a request that was counted.
    pub async fn generate_part(self: &Arc<Self>, mut ask: Ask) -> Result<Generation, Refusal> {
        if let Some(mut clock) = ask.clock.take() {
            clock.asked(&ask);
            ask.clock = Some(clock);
        }
        let (mut clock, begun) = self.begin(ask).await;
        match begun {
            Ok(mut generation) => {
                if let Some(clock) = &mut clock {
                    clock.begun(&generation);
                    // All of it was said before.
                    if !generation.is_running() {
                        clock.finished("ok");
                    }
                }
                generation.clock = clock;
                Ok(generation)
            }
            Err(refusal) => {
                if let Some(clock) = &mut clock {
                    clock.refused(&refusal);
                }
                Err(refusal)
            }
        }
    }

    async fn begin(self: &Arc<Self>, ask: Ask) -> (Option<Clock>, Result<Generation, Refusal>) {
        let Ask { model, prompts, n_choices, first_choice, purpose, echo, priority, deadline, tenant, resume, .. } =
            ask;
        let (trace, clock, session) = (ask.trace, ask.clock, ask.session);
        let begun = async {
            let priority = level(priority)?;
            let tenant_of = self.config.keys.of(tenant);
            let mut waiting = self.let_in(prompts.len(), n_choices, priority, &tenant_of)?;
            let (mut purpose, seed) = (purpose, resume.as_ref().map(|resume| resume.opened.handle.seed));
            let by = match &resume {
                Some(resume) => By::Digest(resume.opened.handle.digest),
                None => By::Key(purpose.key(session, tenant)),
            };
            let model = self.model(&model, by)?;
            let asked = self.asked(purpose, &model.text, seed).await?;
            let preparing = trace.prepare();
            let mut read = Vec::with_capacity(prompts.len());
            for input in prompts {
                read.push(self.prompt(&model.text, input, echo).await?);
            }
            drop((preparing, ask.room));
            let _placing = trace.place();
            let weight = tenant_of.weight();
            let like = Request { tenant, weight, priority, goal: asked.goal, ..Request::default() };
            let numbers = first_choice..first_choice + n_choices;
            let wanted = Wanted { prompts: read, asked, like, numbers };
            // Before there is a request for each answer, with prompt and lists of its own.
            wanted.check_copies(self.config.limits.copies_bytes_max)?;
            self.admission.admit_tokens(&mut waiting, wanted.n_waiting())?;
            let placed = self.place(&wanted, session, &model, resume)?;
            let n_tokens = placed.requests.iter().map(Request::n_tokens);
            let charge = tenant_of.charge(tokens_max(&wanted, &placed))?;
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let wait = placed.picked.wait(n_tokens.max().unwrap_or(0) as u64);
            let own_wait = |wait| self.admission.own_wait(wait, &tenant_of, self.config.keys.weights_waiting());
            let wait = if left.is_some() { wait.map(own_wait) } else { None };
            self.admission.in_time(wait, left, priority)?;
            let trace = trace.carried();
            self.submit(wanted, placed, Opening { waiting, charge, model, deadline, trace })
        };
        (clock, begun.await)
    }

    fn let_in(
        &self,
        n_prompts: usize,
        n_choices: u32,
        priority: Priority,
        tenant: &Arc<Tenant>,
    ) -> Result<Waiting, Refusal> {
        let limits = &self.config.limits;
        if n_choices == 0 || n_choices > limits.choices_max {
            return Err(Refusal::invalid("n", format!("must be 1 to {}, and is {n_choices}", limits.choices_max)));
        }
        if n_prompts == 0 || n_prompts > limits.prompts_max {
            return Err(Refusal::invalid("text", format!("1 to {} prompts, and not {n_prompts}", limits.prompts_max)));
        }
        if !self.replicas.has_room() && !self.admission.is_draining() {
            // Before anything of it is read.
            return Err(self.admission.full());
        }
        self.admission.admit(n_prompts as u32 * n_choices, priority, tenant)
    }

    async fn asked(&self, purpose: Purpose, of: &Arc<Text>, seed: Option<u64>) -> Result<Asked, Refusal> {
        let (of, limits) = (of.clone(), self.config.limits.clone());
        self.off_runtime(purpose.work(), move || purpose.read(&of, seed, &limits)).await?
    }

    async fn prompt(&self, of: &Arc<Text>, input: Input, echo: bool) -> Result<Prompt, Refusal> {
        let text = match &input {
            Input::Text(text) if echo => Some(text.clone()),
            _ => None,
        };
        let ids = self.tokens(of, input, true).await?;
        let text = match text {
            None if echo => Some(self.detokenized(of, ids.clone()).await?),
            text => text,
        };
        Ok(Prompt { ids, text })
    }

    /// Picked when all is known of the request that matters for it, and as late as can be: by then others may be done.
    fn place(
        &self,
        wanted: &Wanted,
        session: Option<u64>,
        model: &Model,
        resume: Option<Resume>,
    ) -> Result<Placed, Refusal> {
        let Some(resume) = resume else {
            let picked = self.replicas.pick(&wanted.asking(session, model))?;
            let requests = wanted.requests(picked.replica.context)?;
            let print = wanted.print(&requests);
            let marks = Marks::none(requests.len());
            return Ok(Placed { picked, requests, print, before: None, marks });
        };
        let Resume { opened, marks } = resume;
        let requests = wanted.requests(opened.handle.context)?;
        let print = wanted.print(&requests);
        opened.check(&self.config.resume_key, &print, wanted.like.tenant)?;
        check_marks(&marks, &requests)?;
        let n_tokens = requests.iter().map(|request| request.prompt.len() + request.sampling.tokens_max as usize).max();
        let need = Need { digest: opened.handle.digest, n_tokens: n_tokens.unwrap_or(0) as u64 };
        let picked = self.replicas.pick_again(need, &opened.handle)?;
        Ok(Placed { picked, requests, print, before: Some(opened.handle), marks })
    }

    /// One request at the replica per prompt and choice, all heard through one queue.
    fn submit(self: &Arc<Self>, wanted: Wanted, placed: Placed, opening: Opening) -> Result<Generation, Refusal> {
        let Wanted { prompts, asked, like, .. } = wanted;
        // It was looked up for the first of them.
        let n_cached = if prompts.len() == 1 { placed.picked.n_cached } else { 0 };
        let Placed { picked, requests, print, before, marks } = placed;
        let Opening { waiting, charge, model, deadline, trace } = opening;
        let replica = picked.replica.clone();
        let (ear, heard) = mpsc::channel(self.unread_max(&requests));
        let first_key = picked.keys(requests.len() as u64);
        let mut choices = Vec::new();
        for (slot, (request, mark)) in requests.into_iter().zip(&marks.choices).enumerate() {
            let tokens_min = request.sampling.tokens_min;
            let assembly = Assembly::new(&model.text.tokenizer, asked.stops.clone(), tokens_min, asked.show_special);
            let key = first_key + slot as u64;
            let adopts =
                adopted(&request, before.as_ref(), &replica, slot).map(|of| Adopts { of, n_had: mark.n_tokens() });
            let mut choice = Choice::new(None, assembly, &request, mark.n_tokens());
            if !mark.has_ended() {
                let (digest, trace, ear) = (replica.digest, trace.clone(), ear.clone());
                let slot = slot as u32;
                let submit = Submit { key, request, slot, deadline, digest, n_cached, adopts, trace, ear };
                choice.begin(picked.submit(submit).map_err(|refusal| self.admission.again(refusal))?);
            }
            choices.push(choice);
        }
        let handle = self.handle(before, &replica, asked.sampling.seed, replica.id(first_key).0);
        let sealed = handle.seal(&self.config.resume_key, &print, like.tenant);
        let n_prompt = prompts.iter().map(|prompt| prompt.ids.len() as u32).sum();
        // Where there is one model, the page of metrics says so everywhere.
        let label = model.version.map(|_| Arc::from(model.name.as_str()));
        Ok(Generation {
            started: started(&handle, &sealed, model.name, n_prompt),
            label,
            text: model.text,
            created: handle.created,
            handle: Some(sealed).filter(|_| choices.len() <= self.config.limits.choices_resumed_max),
            marks,
            replica,
            prompts,
            heard,
            choices,
            stops: asked.stops,
            waiting: Some(waiting),
            charge,
            visit: None,
            deadline: deadline.map(|deadline| Box::pin(tokio::time::sleep_until(deadline))),
            ready: VecDeque::new(),
            failed: None,
            clock: None,
            _counted: self.streams.token(),
        })
    }

    /// What can be told of a stream from now on; the reply that it began as does not change.
    fn handle(&self, before: Option<Handle>, replica: &Replica, seed: u64, first_id: u64) -> Handle {
        let (context, public, created) = match before {
            Some(before) => (before.context, before.public, before.created),
            None => (replica.context, (self.nonce, first_id), unix_seconds()),
        };
        let (digest, incarnation, replica) = (replica.digest, replica.incarnation, replica.name.clone());
        Handle { digest, seed, context, public, created, first_id, incarnation, replica }
    }

    /// Each step brings a token or scores a part of the prompt; a place is kept for the end of each choice.
    fn unread_max(&self, requests: &[Request]) -> usize {
        let of = |request: &Request| {
            let scores = if request.goal == Goal::Generate { 0 } else { request.prompt.len() };
            (request.sampling.tokens_max as usize).saturating_add(scores)
        };
        let n_steps = requests.iter().map(of).fold(0, usize::saturating_add);
        n_steps.min(self.config.limits.outputs_unread_max) + requests.len()
    }

    /// The model that a client names, and the version of it that answers. No name means the first.
    pub fn model(&self, asked: &str, by: By) -> Result<Model, Refusal> {
        self.models.model(asked, by, &self.replicas)
    }

    /// How a model is read and written, for what needs no replica.
    pub fn text(&self, asked: &str) -> Result<Arc<Text>, Refusal> {
        self.models.text(asked, &self.replicas)
    }

    /// The live cluster, as people look at it: the page that begins at a place.
    pub fn topology(&self, from: u64) -> v1::Topology {
        self.replicas.topology(from, offers(self.models.offers(&self.replicas)))
    }

    /// All its pages, one after the other.
    pub fn topologies(&self) -> impl Iterator<Item = v1::Topology> {
        std::iter::successors(Some(self.topology(0)), |page| page.next.map(|from| self.topology(from)))
    }

    /// A prompt's tokens. `add_special` is for plain text; a template writes its special tokens itself.
    pub async fn tokens(&self, of: &Arc<Text>, input: Input, add_special: bool) -> Result<Tokens, Refusal> {
        let of = of.clone();
        self.off_runtime(length(&input), move || of.encode(input, add_special)).await?
    }

    /// Tokens that were checked, as text without what is special.
    pub async fn detokenized(&self, of: &Arc<Text>, ids: Tokens) -> Result<String, Refusal> {
        let of = of.clone();
        self.off_runtime(TOKEN_TEXT_BYTES * ids.len(), move || of.tokenizer.decode(&ids, false)).await
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
        let waits = &self.config.waits;
        let place = timeout(waits.body_max, self.long_texts.clone().acquire_owned()).await;
        let place = place.ok().and_then(Result::ok).ok_or(Refusal::Full { retry_after: waits.retry_after })?;
        let done = tokio::task::spawn_blocking(move || {
            let _place = place;
            work()
        });
        done.await.map_err(|_| Refusal::failed("the text could not be read"))
    }
}

/// A request that has been read.
struct Wanted {
    prompts: Vec<Prompt>,
    asked: Asked,
    /// What all have in common besides prompt and sampling.
    like: Request,
    numbers: std::ops::Range<u32>,
}

/// Of the lists of a request, what waits for nothing; the rest waits as tokens do.
const LISTS_BYTES_FREE: usize = 4 << 10;

impl Wanted {
    fn check_copies(&self, bytes_max: usize) -> Result<(), Refusal> {
        let (n_choices, lists) = (self.numbers.len() as u64, self.asked.sampling.lists_bytes() as u64);
        let each = |prompt: &Prompt| (prompt.ids.len() * size_of::<Token>()) as u64 + lists;
        let n_bytes = n_choices * self.prompts.iter().map(each).sum::<u64>();
        if n_bytes <= bytes_max as u64 {
            return Ok(());
        }
        let told = format!("its {n_choices} answers to {} prompts take {n_bytes} bytes", self.prompts.len());
        let message =
            format!("{told} with the lists of each (logit_bias, allowed_token_ids, words): at most {bytes_max}");
        Err(Refusal::invalid("n", message))
    }

    /// Tokens of all its requests, and what their lists take as if it were tokens.
    fn n_waiting(&self) -> usize {
        let n_listed = self.asked.sampling.lists_bytes().saturating_sub(LISTS_BYTES_FREE) / size_of::<Token>();
        let of_prompts = self.prompts.iter().map(|prompt| prompt.ids.len() + n_listed);
        self.numbers.len() * of_prompts.sum::<usize>()
    }

    /// One for each choice of each prompt, as a replica with such a context gets them.
    fn requests(&self, context: u32) -> Result<Vec<Request>, Refusal> {
        let n_prompt = longest(&self.prompts);
        if n_prompt >= context as usize {
            return Err(Refusal::TooLong { n_prompt, context });
        }
        let each = self.prompts.iter().flat_map(|prompt| self.numbers.clone().map(move |number| (prompt, number)));
        Ok(each.map(|(prompt, number)| self.request(prompt, number, context)).collect())
    }

    fn request(&self, prompt: &Prompt, choice: u32, context: u32) -> Request {
        let sampling = &self.asked.sampling;
        let room = context - prompt.ids.len() as u32;
        let sampling = Sampling { choice, tokens_max: sampling.tokens_max.min(room), ..sampling.clone() };
        let cache_bypass = self.like.goal != Goal::Generate;
        Request { prompt: prompt.ids.clone(), sampling, cache_bypass, ..self.like.clone() }
    }

    fn asking(&self, session: Option<u64>, model: &Model) -> Asking<'_> {
        Asking {
            n_prompt: longest(&self.prompts),
            prompt: self.prompts.first().map_or(&[], |prompt| &prompt.ids),
            tenant: self.like.tenant,
            session,
            reads_cache: self.like.goal == Goal::Generate,
            version: model.version,
        }
    }

    fn print(&self, requests: &[Request]) -> Fingerprint {
        let stops = &self.asked.stops;
        let flags = [stops.are_included(), self.asked.show_special];
        let flags = flags.map(|flag| if flag { "yes" } else { "no" });
        Fingerprint::of(requests.iter(), flags.into_iter().chain(stops.strings()))
    }
}

/// What becomes of a request, and where.
struct Placed {
    picked: Picked,
    requests: Vec<Request>,
    print: Fingerprint,
    /// Of the stream that is gone on with.
    before: Option<Handle>,
    marks: Marks,
}

/// What a request has got on its way to being submitted.
struct Opening {
    waiting: Waiting,
    charge: Charge,
    model: Model,
    deadline: Option<Instant>,
    trace: Carried,
}

/// What a request can cost: its prompts, and all that its choices may say.
fn tokens_max(wanted: &Wanted, placed: &Placed) -> u64 {
    let n_prompt: usize = wanted.prompts.iter().map(|prompt| prompt.ids.len()).sum();
    let says = placed.requests.iter().filter(|request| request.goal != Goal::Pool);
    n_prompt as u64 + says.map(|request| u64::from(request.sampling.tokens_max)).sum::<u64>()
}

fn check_marks(marks: &Marks, requests: &[Request]) -> Result<(), NoResume> {
    let (expected, got) = (requests.len(), marks.choices.len());
    if expected != got {
        return Err(NoResume::OtherChoices { expected, got });
    }
    let ends = requests.iter().map(|request| request.sampling.tokens_max);
    let beyond = marks.choices.iter().zip(ends).find(|(mark, end)| mark.n_tokens() > *end);
    beyond.map_or(Ok(()), |(mark, end)| Err(NoResume::Beyond { position: mark.n_tokens(), end }))
}

/// The id under which the same life of the same replica may still have the request.
fn adopted(request: &Request, before: Option<&Handle>, replica: &Replica, slot: usize) -> Option<RequestId> {
    let before = before.filter(|before| before.is_of(&replica.name, replica.incarnation))?;
    // Whoever is told what stands beside its prompt's tokens is told that again.
    (request.goal == Goal::Generate).then_some(RequestId(before.first_id + slot as u64))
}

fn started(handle: &Handle, sealed: &str, model: String, prompt_tokens: u32) -> v1::Started {
    let (nonce, id) = handle.public;
    let resume = v1::ResumeHandle {
        replica: handle.replica.clone(),
        id: format!("{:016x}", handle.first_id),
        seed: handle.seed,
        policy_digest: handle.digest.0.to_vec(),
        incarnation: handle.incarnation,
        handle: sealed.to_owned(),
    };
    v1::Started { id: format!("{nonce:08x}{id:016x}"), model, seed: handle.seed, prompt_tokens, resume: Some(resume) }
}

pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn longest(prompts: &[Prompt]) -> usize {
    prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0)
}

fn level(priority: i32) -> Result<Priority, Refusal> {
    let out_of_range = |_| Refusal::invalid("priority", format!("must be -128 to 127, and is {priority}"));
    i8::try_from(priority).map(Priority).map_err(out_of_range)
}

pub fn after(millis: u32) -> Option<Instant> {
    (millis > 0).then(|| Instant::now() + Duration::from_millis(millis.into()))
}
