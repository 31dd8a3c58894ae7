//! The way in: from a request to its generation. All faces call this file with `lockstep.v1`. No face knows the
//! replica, and this file knows no face.
//!
//! A `ParsedRequest` is let in, its prompts become tokens and its sampling is checked (`PreparedRequest`). Then a
//! replica is picked (`Destination`), and each answer becomes one `Request` to it, which a link carries.

use crate::board::pick::ContinuationNeed;
use crate::front::calls::CallIds;
use crate::front::certificate::CertificateDraft;
use crate::front::finished_answer::AnswerSubscription;
use crate::front::frontend::{Frontend, unix_millis, unix_seconds};
use crate::front::generation::{Choice, Generation, Prompt};
use crate::front::parsed_request::{ParsedRequest, Purpose};
use crate::front::prepared::{PreparedRequest, longest, room};
use crate::front::progress::is_watched;
use crate::front::recorder::Recorder;
use crate::front::resume::{Fingerprint, ReadMarks, Resume, ResumeHandle};
use crate::front::sampling::AnswerTextSettings;
use crate::front::search::AnswerSearch;
use crate::front::structure;
use crate::front::text::AnswerAssembly;
use crate::limits::admission::AdmissionPermit;
use crate::limits::tenants::{Charge, TenantLimits};
use crate::link::request::{Adoption, ClientCall};
use crate::link::versions::ServedVersion;
use crate::link::view::ReplicaInfo;
use crate::refusal::{Refusal, ResumeError};
use crate::replicas::models::table::VersionSelector;
use crate::replicas::models::talk::AnswerParseContext;
use crate::replicas::models::text::{EncodedInput, ModelText};
use crate::replicas::pool::PickedReplica;
use grammar::GrammarSpec;
use proto::v1;
use proto::v1::generate_request::Input;
use std::collections::VecDeque;
use std::sync::Arc;
use telemetry::metrics::QueueLimit;
use telemetry::spans::TracedSpan;
use tokio::sync::mpsc;
use tokio::time::Instant;
use types::{Goal, Grammar, Priority, Request, RequestId, TokensHash};

impl Frontend {
    /// Lets a request in, sends it to a replica, and waits for its first answer, so that a refusal can still be the
    /// reply.
    pub async fn generate(self: &Arc<Self>, parsed: ParsedRequest, recorder: Recorder) -> Result<Generation, Refusal> {
        let mut generation = self.begin(parsed, recorder).await?;
        generation.wait_first_output(self.config.timeouts.first_answer_max).await?;
        Ok(generation)
    }

    /// Does the same without waiting for the first answer.
    pub async fn begin(self: &Arc<Self>, parsed: ParsedRequest, mut recorder: Recorder) -> Result<Generation, Refusal> {
        let tenant = self.config.keys.tenant_limits(parsed.tenant);
        let parsed = ParsedRequest { deadline: self.deadline(parsed.deadline), ..parsed };
        recorder.show_in_history(&self.history, parsed.tenant, tenant.label().clone());
        let visit = self.count_tenant_visit(&tenant).inspect_err(|refusal| recorder.record_refusal(refusal))?;
        recorder.record_request(&parsed);
        let begun = self.generate_part(parsed, &recorder.trace()).await;
        let mut generation = begun.inspect_err(|refusal| {
            recorder.record_refusal(refusal);
            tenant.count_refusal(refusal);
        })?;
        recorder.record_begun(&generation.started, generation.label.as_ref(), &generation.replica);
        if !generation.is_running() {
            // The client already had all of it.
            recorder.record_outcome("ok");
        }
        (generation.visit, generation.recorder) = (Some(visit), Some(recorder));
        Ok(generation)
    }

    /// Begins a part of a request that was counted already. Does not wait for an answer.
    pub async fn generate_part(
        self: &Arc<Self>,
        parsed: ParsedRequest,
        trace: &TracedSpan,
    ) -> Result<Generation, Refusal> {
        let priority = level(parsed.priority)?;
        let tenant = self.config.keys.tenant_limits(parsed.tenant);
        let (search, parsed) = AnswerSearch::from_request(parsed, &self.config.limits)?;
        parsed.purpose.check_sizes(&self.config.limits)?;
        let mut permit = self.admit(&parsed, priority, &tenant)?;
        let (prepared, resume) = self.prepare(parsed, priority, &tenant, trace).await?;
        let _placing = trace.placement_span();
        // This comes before each answer gets its own request, with a copy of prompt and lists.
        prepared.check_copies(self.config.limits.copies_bytes_max)?;
        self.admission.admit_tokens(&mut permit, prepared.n_waiting())?;
        let (destination, requests) = self.pick_destination(&prepared, resume)?;
        let charge = tenant.charge(tokens_max(&prepared.prompts, &requests))?;
        self.check_in_time(&prepared, &destination.picked, &tenant)?;
        let held = (Some(permit), Some(charge));
        match search {
            None => self.submit(prepared, destination, requests, held, trace),
            Some(search) => self.search(search, prepared, held, trace).await,
        }
    }

    fn admit(
        &self,
        parsed: &ParsedRequest,
        priority: Priority,
        tenant: &Arc<TenantLimits>,
    ) -> Result<AdmissionPermit, Refusal> {
        let (limits, n_prompts, n_choices) = (&self.config.limits, parsed.prompts.len(), parsed.n_choices);
        if n_choices == 0 || n_choices > limits.choices_max {
            return Err(Refusal::invalid("n", format!("must be 1 to {}, got {n_choices}", limits.choices_max)));
        }
        if n_prompts == 0 || n_prompts > limits.prompts_max {
            return Err(Refusal::invalid(
                "text",
                format!("must be 1 to {} prompts, got {n_prompts}", limits.prompts_max),
            ));
        }
        if !self.replicas.has_room() && !self.admission.is_draining() {
            // The request is refused before any of it is read.
            return Err(self.admission.rejected(QueueLimit::Requests));
        }
        self.admission.admit(n_prompts as u32 * n_choices, priority, tenant)
    }

    /// Tokenizes the prompts and checks the sampling. The memory of the text is freed when it has become tokens.
    async fn prepare(
        &self,
        parsed: ParsedRequest,
        priority: Priority,
        tenant_of: &TenantLimits,
        trace: &TracedSpan,
    ) -> Result<(PreparedRequest, Option<Resume>), Refusal> {
        let ParsedRequest { model, prompts, n_choices, first_choice, mut purpose, tenant, resume, .. } = parsed;
        let (certified, cache_salt, echo, truncation) =
            (parsed.certificate, parsed.cache_salt, parsed.echo, parsed.truncation);
        let resume = resume.map(|resume| self.complete_digest(resume));
        let handle = resume.as_ref().map(|resume| &resume.handle.unchecked);
        let (by, seed) = match handle {
            Some(handle) => (VersionSelector::Digest(handle.digest), Some(handle.seed)),
            None => (VersionSelector::Key(purpose.key(parsed.session, tenant, self.config.seed)), None),
        };
        // A template may read the time. A resumed stream gets the time of its beginning, or its prompt would differ.
        let created = handle.map_or_else(unix_seconds, |handle| handle.created);
        let model = self.model(&model, by)?;
        let structure = purpose.take_structure();
        let subscription = self.subscribe_answer(&purpose);
        let (base_request, wording) = self.parse_purpose(purpose, &model.text, seed).await?;
        let preparing = trace.preparation_span();
        let mut read = Vec::with_capacity(prompts.len());
        for input in prompts {
            let (mut prompt, of) = (self.prompt(&model.text, input, echo, created).await?, &model.text);
            if let Some(truncation) = truncation
                && truncation.cut(&mut prompt.ids, room(model.replica.context, &base_request.goal))?
                && echo
            {
                prompt.text = Some(self.detokenize(of, prompt.ids.clone()).await?);
            }
            read.push(prompt);
        }
        let spec = self.structure_of(structure, &read).await?;
        let subscription = subscription.map(|mut pending| {
            pending.sampling.structure = spec.as_ref().map(structure::to_structure);
            pending
        });
        let grammar = self.grammar_of(spec, &read).await?;
        let grammar_hash = match &grammar {
            Some(grammar) => Some(self.grammar_hash(&model.text, grammar).await?),
            None => None,
        };
        drop((preparing, parsed.body));
        let base_request =
            Request { grammar, tenant, weight: tenant_of.weight(), priority, cache_salt, ..base_request };
        let numbers = first_choice..first_choice + n_choices;
        let prepared = PreparedRequest {
            prompts: read,
            base_request,
            wording,
            numbers,
            certified,
            needs_progress: parsed.needs_progress,
            subscription,
            grammar_hash,
            model,
            session: parsed.session,
            deadline: parsed.deadline,
            created,
        };
        Ok((prepared, resume))
    }

    /// Completes the digest of a resume handle, which has only its beginning.
    fn complete_digest(&self, mut resume: Resume) -> Resume {
        resume.handle.complete_digest(self.replicas.versions().iter().map(ServedVersion::digest));
        resume
    }

    async fn parse_purpose(
        &self,
        purpose: Purpose,
        of: &Arc<ModelText>,
        seed: Option<u64>,
    ) -> Result<(Request, AnswerTextSettings), Refusal> {
        let (of, limits) = (of.clone(), self.config.limits.clone());
        self.off_runtime(purpose.work(), move || purpose.read(&of, seed, &limits)).await?
    }

    async fn prompt(&self, of: &Arc<ModelText>, input: Input, echo: bool, now: u64) -> Result<Prompt, Refusal> {
        let text = match &input {
            Input::Text(text) if echo => Some(text.clone()),
            _ => None,
        };
        let EncodedInput { ids, talk } = self.encoded(of, input, true, now).await?;
        let text = match text {
            None if echo => Some(self.detokenize(of, ids.clone()).await?),
            text => text,
        };
        Ok(Prompt { ids, text, talk })
    }

    /// Returns the queues that receive the answer when it is over, with the client's sampling.
    fn subscribe_answer(&self, purpose: &Purpose) -> Option<AnswerSubscription> {
        let Purpose::Generate(sampling) = purpose else { return None };
        self.answers.subscribers().map(|queues| AnswerSubscription::new(sampling.clone(), queues))
    }

    /// Returns what the answers must be. A chat has one prompt, so the first stands for all.
    async fn structure_of(
        &self,
        structure: Option<v1::Structure>,
        prompts: &[Prompt],
    ) -> Result<Option<GrammarSpec>, Refusal> {
        let talk = prompts.first().and_then(|prompt| prompt.talk.clone());
        let n_bytes = structure.as_ref().map_or(0, structure::n_bytes);
        self.off_runtime(n_bytes, move || structure::grammar_spec(structure, talk.as_ref())).await?
    }

    /// Returns the grammar of the answers, with the limit of their thoughts before it.
    async fn grammar_of(&self, spec: Option<GrammarSpec>, prompts: &[Prompt]) -> Result<Option<Grammar>, Refusal> {
        let talk = prompts.first().and_then(|prompt| prompt.talk.as_ref());
        let grammar = match spec {
            Some(spec) => Some(self.grammar(spec, talk).await?),
            None => None,
        };
        Ok(match talk.and_then(AnswerParseContext::thinking_budget) {
            Some(budget) => Some(budget.to_grammar(grammar.as_ref())),
            None => grammar,
        })
    }

    /// Picks the replica once everything that matters about the request is known, and as late as possible: by then
    /// other requests may have finished.
    pub(super) fn pick_destination(
        &self,
        prepared: &PreparedRequest,
        resume: Option<Resume>,
    ) -> Result<(Destination, Vec<Request>), Refusal> {
        let Some(Resume { handle, marks }) = resume else {
            let picked = self.replicas.pick(
                prepared.pick_info(),
                prepared.cached_prompt(),
                prepared.base_request.cache_owner(),
            )?;
            let requests = prepared.requests(picked.replica.context)?;
            let print = prepared.fingerprint(&requests);
            let marks = ReadMarks::none(requests.len());
            return Ok((Destination { picked, print, before: None, marks }, requests));
        };
        let requests = prepared.requests(handle.unchecked.context)?;
        let print = prepared.fingerprint(&requests);
        let handle = handle.check(&self.config.resume_key, &print, prepared.base_request.tenant)?;
        check_marks(&marks, &requests)?;
        let n_tokens = requests.iter().map(|request| request.prompt.len() + request.sampling.tokens_max as usize).max();
        let n_known = requests.iter().map(|request| request.prompt.len()).max().unwrap_or(0) as u64;
        let n_tokens = n_tokens.unwrap_or(0) as u64;
        let need = ContinuationNeed {
            digest: handle.digest,
            n_tokens,
            n_known,
            protocol: proto::needed(&prepared.base_request),
        };
        let picked = self.replicas.pick_resumed(need, |of| handle.is_of(&of.name, of.incarnation))?;
        Ok((Destination { picked, print, before: Some(handle), marks }, requests))
    }

    /// Refuses a request that would reach its deadline without an answer.
    fn check_in_time(
        &self,
        prepared: &PreparedRequest,
        picked: &PickedReplica,
        tenant: &TenantLimits,
    ) -> Result<(), Refusal> {
        let Some(deadline) = prepared.deadline else { return Ok(()) };
        let wait = picked.link.wait(longest(&prepared.prompts) as u64);
        let wait = wait.map(|wait| self.admission.own_wait(wait, tenant, self.config.keys.weights_waiting()));
        let left = deadline.saturating_duration_since(Instant::now());
        self.admission.in_time(wait, Some(left), prepared.base_request.priority)
    }

    /// Sends the requests, one per prompt and choice, to the replica; all outputs come through one queue.
    pub(super) fn submit(
        self: &Arc<Self>,
        prepared: PreparedRequest,
        destination: Destination,
        requests: Vec<Request>,
        (permit, charge): Held,
        trace: &TracedSpan,
    ) -> Result<Generation, Refusal> {
        let PreparedRequest { prompts, base_request, wording, numbers, subscription, grammar_hash, .. } = prepared;
        let (for_client, certified) = (prepared.needs_progress, prepared.certified);
        let needs_progress = is_watched(longest(&prompts), for_client);
        let (model, deadline, created) = (prepared.model, prepared.deadline, prepared.created);
        let Destination { picked: PickedReplica { link, replica, n_cached }, print, before, marks } = destination;
        let hashes: Vec<TokensHash> = prompts.iter().map(|prompt| TokensHash::of(&prompt.ids)).collect();
        // Caches were looked up only for the first prompt.
        let n_cached = if prompts.len() == 1 { n_cached } else { 0 };
        let (outputs, outputs_rx) = mpsc::channel(self.unread_max(&requests, needs_progress));
        let (first_key, digest, trace) = (link.keys(requests.len() as u64), replica.digest, trace.trace_headers());
        let call = Arc::new(ClientCall { first_key, deadline, digest, n_cached, trace, needs_progress, outputs });
        let subscription = subscription.map(|pending| pending.for_requests(&requests, unix_millis()));
        let mut choices = Vec::new();
        for (slot, (request, mark)) in (0..).zip(requests.into_iter().zip(&marks.choices)) {
            let of_prompt = slot as usize / numbers.len();
            let assembly = assembly(&model.text, (&prompts[of_prompt], hashes[of_prompt]), &request, &wording);
            let n_had = mark.n_tokens();
            let adopts = adopted(&request, before.as_ref(), &replica, slot).map(|of| Adoption { of, n_had });
            let draft = || CertificateDraft::new(replica.digest, &request, hashes[of_prompt], grammar_hash);
            let draft = (certified || subscription.is_some()).then(|| Box::new(draft()));
            let choice = Choice::new(assembly, &request, &wording.own_ends, n_had, draft);
            let mut choice = choice.with_kept_tokens(subscription.is_some());
            if needs_progress {
                choice = choice.with_watched_prompt(for_client);
            }
            if !mark.has_ended() {
                let ticket = link.submit(request, slot, adopts, &call);
                choice.begin(ticket.map_err(|refusal| self.admission.with_retry_after(refusal))?);
            }
            choices.push(choice);
        }
        let handle = self.handle(before, &replica, base_request.sampling.seed, replica.id(first_key).0, created);
        let sealed = handle.seal(&self.config.resume_key, &print, base_request.tenant);
        // If there is only one model, all metrics already have its name.
        let label = model.version.map(|_| Arc::from(model.name.as_str()));
        let started = started_event(&handle, &sealed, model.name, &prompts, &hashes);
        let keeper = subscription
            .map(|pending| Box::new(pending.into_keeper(base_request, &started, &replica, numbers, certified)));
        Ok(Generation {
            started,
            label,
            text: model.text,
            created: handle.created,
            scheduled: None,
            handle: Some(sealed).filter(|_| choices.len() <= self.config.limits.choices_resumed_max),
            marks,
            replica,
            prompts,
            outputs_rx,
            choices,
            stops: wording.stops,
            permit,
            charge,
            visit: None,
            deadline: deadline.map(|deadline| Box::pin(tokio::time::sleep_until(deadline))),
            ready: VecDeque::new(),
            failed: None,
            recorder: None,
            keeper,
            _counted: self.streams.token(),
        })
    }

    /// Returns the handle of the stream from now on. A resumed stream keeps its reply's first id.
    fn handle(
        &self,
        before: Option<ResumeHandle>,
        replica: &ReplicaInfo,
        seed: u64,
        first_id: u64,
        created: u64,
    ) -> ResumeHandle {
        let (context, public) = match before {
            Some(before) => (before.context, before.public),
            None => (replica.context, (self.nonce, first_id)),
        };
        let (digest, incarnation, replica) = (replica.digest, replica.incarnation, replica.name.clone());
        ResumeHandle { digest, seed, context, public, created, first_id, incarnation, replica }
    }

    /// Returns how many outputs may be unread: each step brings a token, or scores or computes a part of the prompt,
    /// and one place is kept for the end of each choice.
    fn unread_max(&self, requests: &[Request], needs_progress: bool) -> usize {
        let of = |request: &Request| {
            let is_reported = request.goal != Goal::Generate || needs_progress;
            let scores = if is_reported { request.prompt.len() } else { 0 };
            (request.sampling.tokens_max as usize).saturating_add(scores)
        };
        let n_steps = requests.iter().map(of).fold(0, usize::saturating_add);
        n_steps.min(self.config.limits.outputs_unread_max) + requests.len()
    }
}

/// Returns how the answer to a prompt becomes text.
pub(super) fn assembly(
    text: &ModelText,
    (prompt, hash): (&Prompt, TokensHash),
    request: &Request,
    wording: &AnswerTextSettings,
) -> AnswerAssembly {
    let (tokens_min, stops) = (request.sampling.tokens_min, wording.stops.clone());
    let assembly = AnswerAssembly::new(&text.tokenizer, stops, tokens_min, wording.show_special);
    match &prompt.talk {
        Some(talk) => assembly.of_chat(talk, call_ids(request, hash)),
        None => assembly,
    }
}

fn call_ids(request: &Request, prompt: TokensHash) -> CallIds {
    CallIds { seed: request.sampling.seed, choice: request.sampling.choice, prompt }
}

/// What a request holds: the first until it has a token, the second until it is over. A part of a request holds
/// nothing.
pub(super) type Held = (Option<AdmissionPermit>, Option<Charge>);

/// The replica for a client's request, and the stream that continues there.
pub(super) struct Destination {
    pub picked: PickedReplica,
    print: Fingerprint,
    /// The handle of the resumed stream.
    before: Option<ResumeHandle>,
    marks: ReadMarks,
}

/// Returns the most tokens that a request can cost: its prompts, and all that its choices may generate.
fn tokens_max(prompts: &[Prompt], requests: &[Request]) -> u64 {
    let n_prompt: usize = prompts.iter().map(|prompt| prompt.ids.len()).sum();
    let generating = requests.iter().filter(|request| request.goal != Goal::Pool);
    n_prompt as u64 + generating.map(|request| u64::from(request.sampling.tokens_max)).sum::<u64>()
}

fn check_marks(marks: &ReadMarks, requests: &[Request]) -> Result<(), ResumeError> {
    let (expected, got) = (requests.len(), marks.choices.len());
    if expected != got {
        return Err(ResumeError::OtherChoices { expected, got });
    }
    let ends = requests.iter().map(|request| request.sampling.tokens_max);
    let beyond = marks.choices.iter().zip(ends).find(|(mark, end)| mark.n_tokens() > *end);
    beyond.map_or(Ok(()), |(mark, end)| Err(ResumeError::Beyond { position: mark.n_tokens(), end }))
}

/// Returns the id under which the same replica, in the same incarnation, may still have the request.
fn adopted(request: &Request, before: Option<&ResumeHandle>, replica: &ReplicaInfo, slot: u32) -> Option<RequestId> {
    let before = before.filter(|before| before.is_of(&replica.name, replica.incarnation))?;
    // A request that scores or pools its prompt is run again, because all of its results are sent again.
    (request.goal == Goal::Generate).then_some(RequestId(before.first_id + u64::from(slot)))
}

fn started_event(
    handle: &ResumeHandle,
    sealed: &str,
    model: String,
    prompts: &[Prompt],
    hashes: &[TokensHash],
) -> v1::Started {
    let (nonce, id) = handle.public;
    let resume = v1::ResumeHandle {
        replica: handle.replica.clone(),
        id: format!("{:016x}", handle.first_id),
        seed: handle.seed,
        policy_digest: handle.digest.0.to_vec(),
        incarnation: handle.incarnation,
        handle: sealed.to_owned(),
    };
    // With several prompts, each answer's certificate has its own prompt hash.
    let prompt_hash = if let [hash] = hashes { hash.0.to_vec() } else { Vec::new() };
    v1::Started {
        id: format!("{nonce:08x}{id:016x}"),
        model,
        seed: handle.seed,
        prompt_tokens: prompts.iter().map(|prompt| prompt.ids.len() as u32).sum(),
        resume: Some(resume),
        prompt_hash,
    }
}

fn level(priority: i32) -> Result<Priority, Refusal> {
    let out_of_range = |_| Refusal::invalid("priority", format!("must be -128 to 127, got {priority}"));
    i8::try_from(priority).map(Priority).map_err(out_of_range)
}
