//! The way in: from a request to its generation. All faces call this file with `lockstep.v1`. No face knows the
//! replica, and this file knows no face.
//!
//! A `ParsedRequest` is let in, its prompts become tokens and its sampling is checked (`PreparedRequest`). Then it is
//! submitted to a replica.

use crate::front::finished_answer::AnswerSubscription;
use crate::front::frontend::{Frontend, unix_seconds};
use crate::front::generation::{Generation, Prompt};
use crate::front::grammars::grammar_hash;
use crate::front::parsed_request::{ParsedRequest, Purpose};
use crate::front::prepared::{PreparedRequest, longest, room};
use crate::front::recorder::Recorder;
use crate::front::resume::Resume;
use crate::front::sampling::AnswerTextSettings;
use crate::front::search::AnswerSearch;
use crate::front::structure;
use crate::limits::admission::AdmissionPermit;
use crate::limits::tenants::TenantLimits;
use crate::link::versions::ServedVersion;
use crate::refusal::Refusal;
use crate::replicas::models::table::VersionSelector;
use crate::replicas::models::talk::AnswerParseContext;
use crate::replicas::models::text::{EncodeSettings, EncodedInput, ModelText};
use crate::replicas::pool::PickedReplica;
use grammar::GrammarSpec;
use proto::v1;
use proto::v1::generate_request::Input;
use std::sync::Arc;
use telemetry::metrics::QueueLimit;
use telemetry::spans::TracedSpan;
use tokio::time::Instant;
use types::{Goal, Grammar, Priority, Request};

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
            Some(search) => search.run(self, prepared, held, trace).await,
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
        let (certified, echo, truncation) = (parsed.certificate, parsed.echo, parsed.truncation);
        let (cache_salt, cache_hint) = (parsed.cache_salt, parsed.cache_hint);
        let resume = resume.map(|resume| self.complete_digest(resume));
        let handle = resume.as_ref().map(|resume| &resume.handle.unchecked);
        let (by, seed) = match handle {
            Some(handle) => (VersionSelector::Digest(handle.digest), Some(handle.seed)),
            None => (VersionSelector::Key(purpose.key(parsed.placement.session, tenant, self.config.seed)), None),
        };
        // A template may read the time. A resumed stream gets the time of its beginning, or its prompt would differ.
        let created = handle.map_or_else(unix_seconds, |handle| handle.created);
        let model = self.model(&model, by)?;
        let structure = purpose.take_structure();
        let subscription = self.subscribe_answer(&purpose);
        let (base_request, wording) = self.parse_purpose(purpose, &model.text, seed).await?;
        let preparing = trace.preparation_span();
        let room = room(model.replica.context, &base_request.goal);
        let cut = truncation.map(|truncation| truncation.within(room)).transpose()?;
        let settings = EncodeSettings { adds_special: parsed.adds_special, now: created, cut };
        let mut read = Vec::with_capacity(prompts.len());
        for input in prompts {
            read.push(self.prompt(&model.text, input, echo, settings).await?);
        }
        let spec = self.structure_of(structure, &read).await?;
        let subscription = subscription.map(|mut pending| {
            pending.sampling.structure = spec.as_ref().map(structure::to_structure);
            pending
        });
        let grammar = self.grammar_of(spec, &read).await?;
        let grammar_hash = match &grammar {
            Some(grammar) => Some(grammar_hash(&self.texts, &model.text, grammar).await?),
            None => None,
        };
        drop((preparing, parsed.body));
        let weight = tenant_of.weight();
        let base_request = Request { grammar, tenant, weight, priority, cache_salt, cache_hint, ..base_request };
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
            placement: parsed.placement,
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
        self.texts.off_runtime(purpose.work(), move || purpose.read(&of, seed, &limits)).await?
    }

    async fn prompt(
        &self,
        of: &Arc<ModelText>,
        input: Input,
        echo: bool,
        settings: EncodeSettings,
    ) -> Result<Prompt, Refusal> {
        let text = match &input {
            Input::Text(text) if echo => Some(text.clone()),
            _ => None,
        };
        let EncodedInput { ids, talk, second_text, is_cut } = self.texts.encoded(of, input, settings).await?;
        let text = match text.filter(|_| !is_cut) {
            None if echo => Some(self.texts.detokenize(of, ids.clone()).await?),
            text => text,
        };
        Ok(Prompt { ids, second_text, text, talk })
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
        self.texts.off_runtime(n_bytes, move || structure::grammar_spec(structure, talk.as_ref())).await?
    }

    /// Returns the grammar of the answers, with the limit of their thoughts before it.
    async fn grammar_of(&self, spec: Option<GrammarSpec>, prompts: &[Prompt]) -> Result<Option<Grammar>, Refusal> {
        let talk = prompts.first().and_then(|prompt| prompt.talk.as_ref());
        let grammar = match spec {
            Some(spec) => Some(self.grammars.grammar(spec, talk, &self.texts).await?),
            None => None,
        };
        Ok(match talk.and_then(AnswerParseContext::thinking_budget) {
            Some(budget) => Some(budget.to_grammar(grammar.as_ref())),
            None => grammar,
        })
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
}

/// Returns the most tokens that a request can cost: its prompts, and all that its choices may generate.
fn tokens_max(prompts: &[Prompt], requests: &[Request]) -> u64 {
    let n_prompt: usize = prompts.iter().map(|prompt| prompt.ids.len()).sum();
    let generating = requests.iter().filter(|request| request.goal != Goal::Pool);
    n_prompt as u64 + generating.map(|request| u64::from(request.sampling.tokens_max)).sum::<u64>()
}

fn level(priority: i32) -> Result<Priority, Refusal> {
    let out_of_range = |_| Refusal::invalid("priority", format!("must be -128 to 127, got {priority}"));
    i8::try_from(priority).map(Priority).map_err(out_of_range)
}
