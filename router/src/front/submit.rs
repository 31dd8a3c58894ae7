//! The way to a replica: one is picked for a `PreparedRequest`, and each answer becomes one `Request` to it.
//! A link carries these. Knows no face.

use crate::board::pick::ContinuationNeed;
use crate::front::calls::CallIds;
use crate::front::certificate::CertificateDraft;
use crate::front::frontend::{Frontend, unix_millis};
use crate::front::generation::{Choice, Generation, Prompt};
use crate::front::prepared::{PreparedRequest, longest};
use crate::front::progress::is_watched;
use crate::front::resume::{Fingerprint, ReadMarks, Resume, ResumeHandle};
use crate::front::sampling::AnswerTextSettings;
use crate::front::text::AnswerAssembly;
use crate::limits::admission::AdmissionPermit;
use crate::limits::tenants::Charge;
use crate::link::request::{Adoption, ClientCall};
use crate::link::view::ReplicaInfo;
use crate::refusal::{Refusal, ResumeError};
use crate::replicas::models::text::ModelText;
use crate::replicas::pool::PickedReplica;
use proto::v1;
use std::collections::VecDeque;
use std::sync::Arc;
use telemetry::spans::TracedSpan;
use tokio::sync::mpsc;
use types::{Goal, Request, RequestId, TokensHash};

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

impl Frontend {
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
        let (outputs, outputs_rx) =
            mpsc::channel(unread_max(&requests, needs_progress, self.config.limits.outputs_unread_max));
        let (first_key, digest, trace) = (link.keys(requests.len() as u64), replica.digest, trace.trace_headers());
        let call = Arc::new(ClientCall { first_key, deadline, digest, n_cached, trace, needs_progress, outputs });
        let subscription = subscription.map(|pending| pending.for_requests(&requests, unix_millis()));
        let mut choices = Vec::new();
        for (slot, (request, mark)) in (0..).zip(requests.into_iter().zip(&marks.choices)) {
            let (of_prompt, n_had) = (slot as usize / numbers.len(), mark.n_tokens());
            let assembly = assembly(&model.text, (&prompts[of_prompt], hashes[of_prompt]), &request, &wording);
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

    /// Sends a part of a request to the replica that is best for it.
    pub(super) fn submit_part(
        self: &Arc<Self>,
        part: PreparedRequest,
        held: Held,
        trace: &TracedSpan,
    ) -> Result<Generation, Refusal> {
        let (destination, requests) = self.pick_destination(&part, None)?;
        self.submit(part, destination, requests, held, trace)
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
            None => (replica.context, (self.ids.nonce(), first_id)),
        };
        let (digest, incarnation, replica) = (replica.digest, replica.incarnation, replica.name.clone());
        ResumeHandle { digest, seed, context, public, created, first_id, incarnation, replica }
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

/// Returns how many outputs may be unread: each step brings a token, or scores or computes a part of the prompt,
/// and one place is kept for the end of each choice.
fn unread_max(requests: &[Request], needs_progress: bool, limit: usize) -> usize {
    let of = |request: &Request| {
        let is_reported = request.goal != Goal::Generate || needs_progress;
        let scores = if is_reported { request.prompt.len() } else { 0 };
        (request.sampling.tokens_max as usize).saturating_add(scores)
    };
    let n_steps = requests.iter().map(of).fold(0, usize::saturating_add);
    n_steps.min(limit) + requests.len()
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
