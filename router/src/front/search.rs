//! Looks for likely answers instead of drawing them: the likeliest of several draws, or the best of a beam search. The
//! answers are sent once all are known, as if a replica had just drawn them. Knows requests and their answers; `beams`
//! defines what a beam is worth.
//!
//! `prepared ── parts of it, each a request of its own ──▶ tokens and logprobs ── the best ──▶ generation`
//!
//! A step of a beam search is a request for one token after each partial answer. The partial answer lies in the prefix
//! cache, and a step that is lost with its replica is run again like any other request.

use crate::config::RouterLimits;
use crate::front::beams::{Beam, BeamRules, Beams, EarlyStopping};
use crate::front::frontend::Frontend;
use crate::front::generation::{Choice, Generation, GenerationEvent};
use crate::front::parameters::NUMBERS;
use crate::front::parsed_request::{ParsedRequest, Purpose};
use crate::front::prepared::PreparedRequest;
use crate::front::resume::ReadMarks;
use crate::front::sampling::AnswerTextSettings;
use crate::front::stop::Stops;
use crate::front::submit::{Held, assembly};
use crate::link::ticket::Ticket;
use crate::refusal::Refusal;
use proto::cluster as wire;
use proto::v1;
use std::sync::Arc;
use telemetry::spans::TracedSpan;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use types::{Finish, Goal, Request, Sampling, Tokens, TokensHash};

/// The kind of search of a request, and how many of the found answers are sent.
pub struct AnswerSearch {
    n_returned: u32,
    kind: SearchKind,
}

enum SearchKind {
    Beams { length_penalty: f32, patience: EarlyStopping },
    BestOf,
}

/// An answer that was found, and how it ends.
#[derive(Default)]
struct FoundAnswer {
    tokens: Vec<wire::TokenOut>,
    finish: wire::Finish,
    n_cached: u32,
}

impl AnswerSearch {
    /// Returns the search of a request, if it has one, and the request for as many answers as the search needs.
    pub fn from_request(
        mut parsed: ParsedRequest,
        limits: &RouterLimits,
    ) -> Result<(Option<AnswerSearch>, ParsedRequest), Refusal> {
        let Purpose::Generate(sampling) = &mut parsed.purpose else { return Ok((None, parsed)) };
        let (n_returned, best_of, beams) =
            (parsed.n_choices, std::mem::take(&mut sampling.best_of), sampling.beams.take());
        let n_kept = if best_of == 0 { n_returned } else { best_of };
        let kind = match beams {
            None if n_kept == n_returned => return Ok((None, parsed)),
            None => SearchKind::BestOf,
            Some(params) => {
                check_beam_fields(sampling)?;
                beam_search(params)?
            }
        };
        let most = limits.choices_max;
        if n_kept < n_returned || n_kept > most {
            let why = format!("must be from `n`, which is {n_returned}, to {most}, got {n_kept}");
            return Err(Refusal::invalid("best_of", why));
        }
        if parsed.certificate {
            return Err(Refusal::invalid("certificate", "is not supported with `best_of` or a beam search"));
        }
        if parsed.resume.is_some() {
            return Err(Refusal::invalid("resume", "is not supported with `best_of` or a beam search"));
        }
        Ok((Some(AnswerSearch { n_returned, kind }), ParsedRequest { n_choices: n_kept, ..parsed }))
    }

    /// Runs the search. All of its answers are sent once they are known.
    pub(super) async fn run(
        self,
        front: &Arc<Frontend>,
        prepared: PreparedRequest,
        held: Held,
        trace: &TracedSpan,
    ) -> Result<Generation, Refusal> {
        let n_returned = self.n_returned as usize;
        let (first, found) = match self.kind {
            SearchKind::BestOf => draw_best(front, &prepared, n_returned, held, trace).await?,
            SearchKind::Beams { length_penalty, patience } => {
                let rules = beam_rules(&prepared, length_penalty, patience)?;
                search_beams(front, &prepared, &rules, n_returned, held, trace).await?
            }
        };
        Ok(replay_answers(first, prepared, self.n_returned, found))
    }
}

fn beam_search(params: v1::BeamSearch) -> Result<SearchKind, Refusal> {
    let length_penalty = params.length_penalty.unwrap_or(1.0);
    if !(-10.0..=10.0).contains(&length_penalty) {
        return Err(Refusal::invalid("length_penalty", format!("must be -10 to 10, got {length_penalty}")));
    }
    let patience = match params.patience() {
        v1::beam_search::Patience::Unspecified => EarlyStopping::WhileBetter,
        v1::beam_search::Patience::UntilFull => EarlyStopping::UntilFull,
        v1::beam_search::Patience::WhilePossible => EarlyStopping::WhilePossible,
    };
    Ok(SearchKind::Beams { length_penalty, patience })
}

/// Refuses fields that change the tokens of a draw and that a search does not support. Temperature and filters only
/// matter among likely tokens.
fn check_beam_fields(requested: &v1::Sampling) -> Result<(), Refusal> {
    let fields = [
        ("stop", !requested.stop.is_empty()),
        ("min_tokens", requested.min_tokens > 0),
        ("logit_bias", !requested.logit_bias.is_empty()),
        ("allowed_token_ids", !requested.allowed_token_ids.is_empty()),
        ("bad_words", !requested.bad_words.is_empty()),
        ("prompt_logprobs", requested.prompt_logprobs.is_some()),
        ("logprob_token_ids", !requested.logprob_token_ids.is_empty()),
        ("structure", requested.structure.is_some()),
    ];
    let numbers = NUMBERS.iter().map(|parameter| (parameter.name, parameter.prevents_search(requested)));
    match numbers.chain(fields).find(|(_, is_set)| *is_set) {
        Some((field, _)) => Err(Refusal::invalid(field, "is not supported in a beam search")),
        None => Ok(()),
    }
}

/// Draws all answers, and keeps the likeliest of each prompt: those with the largest sum of logprobs.
async fn draw_best(
    front: &Arc<Frontend>,
    prepared: &PreparedRequest,
    n_returned: usize,
    held: Held,
    trace: &TracedSpan,
) -> Result<(Generation, Vec<FoundAnswer>), Refusal> {
    let mut base_request = prepared.base_request.clone();
    let needs_logprobs = base_request.sampling.logprobs.is_some();
    base_request.sampling.logprobs.get_or_insert(0);
    let prompts = prepared.prompts.iter().map(|prompt| prompt.ids.clone()).collect();
    let part = prepared.part(prompts, base_request, prepared.wording.clone(), prepared.numbers.clone());
    let mut generation = front.submit_part(part, held, trace)?;
    let drawn = collect_answers(&mut generation).await?;
    let mut best = Vec::new();
    let mut drawn = drawn.into_iter();
    for _ in &prepared.prompts {
        let mut of_prompt: Vec<FoundAnswer> = drawn.by_ref().take(prepared.numbers.len()).collect();
        // Equals stay in the order of their numbers.
        of_prompt.sort_by(|a, b| b.likelihood().total_cmp(&a.likelihood()));
        of_prompt.truncate(n_returned);
        best.extend(of_prompt);
    }
    if !needs_logprobs {
        best.iter_mut().flat_map(|answer| &mut answer.tokens).for_each(|token| token.logprob = None);
    }
    Ok((generation, best))
}

/// Searches after each prompt in turn.
async fn search_beams(
    front: &Arc<Frontend>,
    prepared: &PreparedRequest,
    rules: &BeamRules,
    n_returned: usize,
    mut held: Held,
    trace: &TracedSpan,
) -> Result<(Generation, Vec<FoundAnswer>), Refusal> {
    let (mut first, mut found) = (None, Vec::new());
    for prompt in &prepared.prompts {
        let mut beams = Beams::new(BeamRules { stop: rules.stop.clone(), ..*rules });
        let mut n_cached = None;
        while !beams.running().is_empty() {
            let prompts = beams.running().iter().map(|beam| [&*prompt.ids, &beam.tokens].concat()).collect();
            let mut step = front.submit_part(one_token(prepared, rules, prompts), held, trace)?;
            let tops = collect_answers(&mut step).await?;
            n_cached.get_or_insert_with(|| tops.first().map_or(0, |answer| answer.n_cached));
            beams.advance(&next_tokens(tops)?);
            held = (None, step.charge.take());
            first.get_or_insert(step);
        }
        let needs_logprobs = prepared.base_request.sampling.logprobs.is_some();
        let n_cached = n_cached.unwrap_or(0);
        found.extend(beams.best(n_returned).into_iter().map(|beam| FoundAnswer::of(beam, needs_logprobs, n_cached)));
    }
    first.map(|first| (first, found)).ok_or_else(|| Refusal::failed("a search without a prompt"))
}

fn beam_rules(prepared: &PreparedRequest, length_penalty: f32, patience: EarlyStopping) -> Result<BeamRules, Refusal> {
    let (sampling, context) = (&prepared.base_request.sampling, prepared.model.replica.context);
    if prepared.base_request.grammar.is_some() {
        return Err(Refusal::invalid("use_beam_search", "is not supported with a constraint on the answer"));
    }
    let n_prompt = prepared.prompts.iter().map(|prompt| prompt.ids.len() as u32).max().unwrap_or(0);
    let rules = BeamRules {
        width: prepared.numbers.len(),
        length_penalty,
        patience,
        tokens_max: sampling.tokens_max.min(context.saturating_sub(n_prompt)),
        stop: sampling.stop.clone(),
        n_logprobs: sampling.logprobs.unwrap_or(0).into(),
    };
    match u8::try_from(rules.n_top()) {
        Ok(_) => Ok(rules),
        Err(_) => Err(Refusal::invalid("best_of", "is too large with this number of stop tokens")),
    }
}

/// Returns a step: a request for the likeliest tokens after each of these partial answers. Which of them is drawn does
/// not matter.
fn one_token(prepared: &PreparedRequest, rules: &BeamRules, prompts: Vec<Tokens>) -> PreparedRequest {
    let sampling = Sampling {
        seed: prepared.base_request.sampling.seed,
        tokens_max: 1,
        logprobs: u8::try_from(rules.n_top()).ok(),
        ..Sampling::default()
    };
    let base_request =
        Request { sampling, goal: Goal::Generate, predicted: Tokens::new(), ..prepared.base_request.clone() };
    let wording =
        AnswerTextSettings { stops: Arc::new(Stops::new(Vec::new())), show_special: false, own_ends: Tokens::new() };
    prepared.part(prompts, base_request, wording, 0..1)
}

/// Returns the answers to a part, once all of it has arrived.
async fn collect_answers(generation: &mut Generation) -> Result<Vec<FoundAnswer>, Refusal> {
    let mut answers: Vec<FoundAnswer> = Vec::new();
    answers.resize_with(generation.choices.len(), FoundAnswer::default);
    while let Some(event) = generation.next().await {
        let (slot, event) = event?;
        let Some(answer) = answers.get_mut(slot as usize) else { continue };
        match event {
            GenerationEvent::Delta(delta) => answer.tokens.extend(delta.logprobs.into_iter().map(token_out)),
            GenerationEvent::Finished(finished) => {
                answer.n_cached = finished.usage.map_or(0, |usage| usage.cached_tokens);
                answer.finish = match finished.reason() {
                    v1::finished::Reason::Length => wire::Finish::from(Finish::Length),
                    _ => wire::Finish::from(Finish::Stop),
                };
            }
            GenerationEvent::Aside(_) => {}
        }
    }
    Ok(answers)
}

fn token_out(logprob: v1::Logprob) -> wire::TokenOut {
    let top = |top: v1::Logprob| wire::TokenLogprob { token: top.token_id, logprob: top.logprob };
    wire::TokenOut {
        token: logprob.token_id,
        logprob: Some(logprob.logprob),
        top: logprob.top.into_iter().map(top).collect(),
    }
}

/// Returns the likely tokens after each partial answer.
fn next_tokens(steps: Vec<FoundAnswer>) -> Result<Vec<wire::TokenOut>, Refusal> {
    let next = |step: FoundAnswer| step.tokens.into_iter().next();
    let all: Option<Vec<wire::TokenOut>> = steps.into_iter().map(next).collect();
    all.ok_or_else(|| Refusal::failed("the replica returned no likely tokens"))
}

impl FoundAnswer {
    fn of(beam: Beam, needs_logprobs: bool, n_cached: u32) -> FoundAnswer {
        let finish = if beam.ends_at_stop { Finish::Stop } else { Finish::Length };
        let to_output = |token: Arc<wire::TokenOut>| match needs_logprobs {
            true => Arc::unwrap_or_clone(token),
            false => wire::TokenOut { token: token.token, ..wire::TokenOut::default() },
        };
        FoundAnswer { tokens: beam.outputs.into_iter().map(to_output).collect(), finish: finish.into(), n_cached }
    }

    fn likelihood(&self) -> f64 {
        self.tokens.iter().filter_map(|token| token.logprob).map(f64::from).sum()
    }
}

/// Sends the found answers as if they were just being drawn. `first` is the first part of the request that was
/// answered.
fn replay_answers(
    mut first: Generation,
    prepared: PreparedRequest,
    n_returned: u32,
    found: Vec<FoundAnswer>,
) -> Generation {
    let PreparedRequest { ref prompts, ref wording, ref model, .. } = prepared;
    let hashes: Vec<TokensHash> = prompts.iter().map(|prompt| TokensHash::of(&prompt.ids)).collect();
    let (outputs, outputs_rx) = mpsc::channel(found.len().max(1));
    let mut choices = Vec::new();
    for (slot, answer) in (0..).zip(found) {
        let of_prompt = (slot / n_returned) as usize;
        let request = prepared.request(&prompts[of_prompt], slot % n_returned, first.replica.context);
        let assembly = assembly(&model.text, (&prompts[of_prompt], hashes[of_prompt]), &request, wording);
        let mut choice = Choice::new(assembly, &request, &wording.own_ends, 0, None);
        choice.begin(Ticket::detached());
        choices.push(choice);
        let FoundAnswer { tokens, finish, n_cached } = answer;
        let output = wire::Output { tokens, finish: finish.into(), cached_tokens: n_cached, ..wire::Output::default() };
        // There is room for each of them, and `heard` is here.
        let _ = outputs.try_send((slot, Ok(output)));
    }
    first.started.prompt_tokens = prompts.iter().map(|prompt| prompt.ids.len() as u32).sum();
    first.started.resume = None;
    Generation {
        handle: None,
        marks: ReadMarks::none(choices.len()),
        outputs_rx,
        choices,
        stops: wording.stops.clone(),
        permit: None,
        charge: None,
        prompts: prepared.prompts,
        ..first
    }
}
