//! Translates values of `vllm.grpc.engine` from and to the router's own. Has no knowledge of streams and replicas.

use checkpoint::SamplingDefaults;
use proto::v1;
use proto::v1::structure::{Choices, Form};
use proto::vllm as wire;
use proto::vllm::sampling_params::Constraint;
use router::front::parameters::{NumberDefaults, NumberParameter};
use router::front::structure::vllm_grammar;
use router::refusal::Refusal;
use serde_json::{Map, Value};
use std::collections::HashMap;
use types::Token;

#[derive(Clone, Copy)]
pub struct TokenCounts {
    pub prompt: u32,
    pub cached: u32,
}

/// Refuses by name each field that would change the answer and is not supported.
pub fn refuse_unserved(request: &wire::GenerateRequest) -> Result<(), Refusal> {
    let params = request.sampling_params.as_ref();
    let present = [
        ("kv_transfer_params", request.kv_transfer_params.is_some()),
        ("kv_transfer_params_json", request.kv_transfer_params_json.is_some()),
        ("mm_inputs", request.mm_inputs.is_some()),
        ("extra_mm_inputs", !request.extra_mm_inputs.is_empty()),
        ("media_refs", request.media_refs.is_some()),
        ("truncate_prompt_tokens", params.is_some_and(|params| params.truncate_prompt_tokens.is_some())),
    ];
    match present.into_iter().find(|(_, is_present)| *is_present) {
        Some((name, _)) => Err(Refusal::invalid(name, "is not supported yet")),
        None => Ok(()),
    }
}

/// Translates the sampling parameters. A zero that means another number is replaced. An absent value is the engine's
/// default and not the model's: a gateway reads the model's from `GetModelInfo`.
pub fn sampling(params: wire::SamplingParams) -> Result<v1::Sampling, Refusal> {
    let or_one = |value: f32| if value == 0.0 { 1.0 } else { value };
    Ok(v1::Sampling {
        temperature: Some(params.temperature.unwrap_or(1.0)),
        top_k: Some(params.top_k),
        top_p: Some(or_one(params.top_p)),
        min_p: Some(params.min_p),
        // Negative seeds are converted as over HTTP.
        seed: params.seed.map(|seed| i64::from(seed) as u64),
        max_tokens: params.max_tokens,
        min_tokens: params.min_tokens,
        stop: params.stop,
        stop_token_ids: params.stop_token_ids,
        ignore_eos: params.ignore_eos,
        logprobs: n_logprobs("logprobs", params.logprobs)?,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        repetition_penalty: Some(or_one(params.repetition_penalty)),
        logit_bias: bias(params.logit_bias)?,
        include_stop: params.include_stop_str_in_output,
        show_special: !params.skip_special_tokens,
        prompt_logprobs: n_logprobs("prompt_logprobs", params.prompt_logprobs)?,
        structure: params.constraint.map(|constraint| v1::Structure { form: Some(form(constraint)) }),
        ..v1::Sampling::default()
    })
}

fn form(constraint: Constraint) -> Form {
    match constraint {
        Constraint::JsonSchema(schema) => Form::JsonSchema(schema),
        Constraint::Regex(regex) => Form::Regex(regex),
        Constraint::Grammar(text) => vllm_grammar(text),
        Constraint::StructuralTag(tag) => Form::StructuralTag(tag),
        Constraint::JsonObject(is_enabled) => Form::JsonObject(is_enabled),
        Constraint::Choice(choice) => Form::Choice(Choices { texts: choice.choices }),
    }
}

/// Returns the field that a refusal of the structure names.
pub fn constraint_name(request: &wire::GenerateRequest) -> &'static str {
    let constraint = request.sampling_params.as_ref().and_then(|params| params.constraint.as_ref());
    match constraint {
        Some(Constraint::JsonSchema(_)) => "json_schema",
        Some(Constraint::Regex(_)) => "regex",
        Some(Constraint::Grammar(_)) => "grammar",
        Some(Constraint::StructuralTag(_)) => "structural_tag",
        Some(Constraint::JsonObject(_)) => "json_object",
        Some(Constraint::Choice(_)) => "choice",
        None => "constraint",
    }
}

fn n_logprobs(field: &'static str, n: Option<i32>) -> Result<Option<u32>, Refusal> {
    let all = |_| Refusal::invalid(field, "must not be negative: the whole vocabulary is not supported");
    n.map(u32::try_from).transpose().map_err(all)
}

fn bias(all: HashMap<i32, f32>) -> Result<HashMap<u32, f32>, Refusal> {
    let no_id = |_| Refusal::invalid("logit_bias", "its keys must be token ids");
    all.into_iter().map(|(token, bias)| Ok((u32::try_from(token).map_err(no_id)?, bias))).collect()
}

pub fn output_logprobs(logprobs: &[v1::Logprob]) -> wire::OutputLogProbs {
    wire::OutputLogProbs {
        token_logprobs: logprobs.iter().map(|one| one.logprob).collect(),
        token_ids: logprobs.iter().map(|one| one.token_id).collect(),
        top_logprobs: logprobs.iter().map(top).collect(),
    }
}

/// Returns the logprobs of all tokens of the prompt. The first has no prediction.
pub fn input_logprobs(prompt: &[Token], scored: &[v1::Logprob]) -> wire::InputLogProbs {
    let value = |one: &v1::Logprob| wire::InputTokenLogProb { value: Some(one.logprob) };
    let first = wire::InputTokenLogProb { value: None };
    wire::InputLogProbs {
        token_logprobs: [first].into_iter().chain(scored.iter().map(value)).collect(),
        token_ids: prompt.to_vec(),
        top_logprobs: [wire::TopLogProbs::default()].into_iter().chain(scored.iter().map(top)).collect(),
    }
}

fn top(one: &v1::Logprob) -> wire::TopLogProbs {
    wire::TopLogProbs {
        values: one.top.iter().map(|top| top.logprob).collect(),
        token_ids: one.top.iter().map(|top| top.token_id).collect(),
    }
}

/// Returns the sampling parameters that the model's authors recommend, as a JSON object; empty if there are none.
pub fn defaults_json(defaults: &SamplingDefaults) -> String {
    let member = |(parameter, own): (&NumberParameter, &NumberDefaults)| {
        Some((parameter.name.to_owned(), (own.recommended)(defaults)?.into()))
    };
    let object: Map<String, Value> = NumberParameter::with_recommendations().filter_map(member).collect();
    if object.is_empty() { String::new() } else { Value::Object(object).to_string() }
}

/// Returns the load of all replicas together.
pub fn total_load(pages: impl Iterator<Item = v1::Topology>) -> wire::SchedulerLoad {
    let replicas: Vec<v1::ReplicaTopology> = pages.flat_map(|page| page.replicas).collect();
    let sum = |of: fn(&v1::ReplicaTopology) -> u64| replicas.iter().map(of).sum::<u64>();
    let count = |n: u64| i32::try_from(n).unwrap_or(i32::MAX);
    let (running, waiting) = (sum(|one| one.n_running.into()), sum(|one| one.n_waiting.into()));
    let (used, total) = (sum(|one| one.blocks_used.into()), sum(|one| one.blocks_total.into()));
    let tokens = |n_blocks: u64| count(n_blocks * u64::from(types::BLOCK_TOKENS));
    wire::SchedulerLoad {
        dp_rank: 0,
        num_running_reqs: count(running),
        num_waiting_reqs: count(waiting),
        num_total_reqs: count(running + waiting),
        num_used_tokens: tokens(used),
        max_total_num_tokens: tokens(total),
        token_usage: used as f64 / total.max(1) as f64,
        gen_throughput: replicas.iter().filter_map(|one| one.busy_tokens_per_s).sum(),
        num_waiting_uncached_tokens: count(sum(|one| one.backlog_tokens)),
    }
}

/// Formats a time in ISO 8601, in UTC.
pub fn timestamp(unix_seconds: u64) -> String {
    let (days, seconds) = (unix_seconds / 86_400, unix_seconds % 86_400);
    // Years begin in March here, so that a leap day is the last of its year. All eras of 400 years have the same
    // length.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}+00:00")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_of_several_is_their_sum() {
        let replica = |n_running, blocks_used| v1::ReplicaTopology {
            n_running,
            n_waiting: 1,
            blocks_used,
            blocks_total: 8,
            ..v1::ReplicaTopology::default()
        };
        let page = v1::Topology { replicas: vec![replica(2, 3), replica(1, 1)], ..v1::Topology::default() };
        let load = total_load(std::iter::once(page));
        assert_eq!((load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs), (3, 2, 5));
        assert_eq!((load.num_used_tokens, load.max_total_num_tokens, load.token_usage), (64, 256, 0.25));
    }

    #[test]
    fn timestamps() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00+00:00"),
            (951_782_399, "2000-02-28T23:59:59+00:00"),
            (951_782_400, "2000-02-29T00:00:00+00:00"),
            (1_795_219_200, "2026-11-21T00:00:00+00:00"),
            (4_107_542_400, "2100-03-01T00:00:00+00:00"),
        ] {
            assert_eq!(timestamp(seconds), text);
        }
    }

    #[test]
    fn zeros_become_values_that_change_nothing() {
        let sampling = sampling(wire::SamplingParams::default()).unwrap();
        assert_eq!((sampling.temperature, sampling.top_p), (Some(1.0), Some(1.0)));
        assert_eq!((sampling.repetition_penalty, sampling.top_k), (Some(1.0), Some(0)));
        assert_eq!((sampling.max_tokens, sampling.seed, sampling.logprobs), (None, None, None));
        let greedy = wire::SamplingParams { temperature: Some(0.0), seed: Some(-1), ..Default::default() };
        let greedy = super::sampling(greedy).unwrap();
        assert_eq!((greedy.temperature, greedy.seed), (Some(0.0), Some(u64::MAX)));
    }

    #[test]
    fn unserved_fields_are_refused_by_name() {
        let check = |change: fn(&mut wire::GenerateRequest), name: &str| {
            let mut request = wire::GenerateRequest::default();
            change(&mut request);
            let refusal = refuse_unserved(&request)
                .and_then(|()| sampling(request.sampling_params.unwrap_or_default()).map(|_| ()));
            assert!(matches!(refusal, Err(Refusal::Invalid { field, .. }) if field == name), "{name}");
        };
        check(|request| request.mm_inputs = Some(wire::Unserved {}), "mm_inputs");
        check(|request| request.kv_transfer_params_json = Some("{}".into()), "kv_transfer_params_json");
        check(
            |request| {
                request.sampling_params = Some(wire::SamplingParams { logprobs: Some(-1), ..Default::default() });
            },
            "logprobs",
        );
        check(
            |request| {
                let logit_bias = HashMap::from([(-5, 1.0)]);
                request.sampling_params = Some(wire::SamplingParams { logit_bias, ..Default::default() });
            },
            "logit_bias",
        );
    }

    #[test]
    fn constraints_are_structures() {
        let check = |constraint: Constraint, name: &str, form: Form| {
            let params = wire::SamplingParams { constraint: Some(constraint), ..Default::default() };
            let request = wire::GenerateRequest { sampling_params: Some(params.clone()), ..Default::default() };
            assert_eq!((refuse_unserved(&request), constraint_name(&request)), (Ok(()), name));
            assert_eq!(sampling(params).unwrap().structure.unwrap().form, Some(form), "{name}");
        };
        let text = |text: &str| text.to_owned();
        check(Constraint::Regex(text("a")), "regex", Form::Regex(text("a")));
        check(Constraint::JsonObject(true), "json_object", Form::JsonObject(true));
        check(Constraint::JsonSchema(text("{}")), "json_schema", Form::JsonSchema(text("{}")));
        check(Constraint::Grammar(text("root ::= \"a\"")), "grammar", Form::Ebnf(text("root ::= \"a\"")));
        check(Constraint::Grammar(text("start: \"a\"")), "grammar", Form::Lark(text("start: \"a\"")));
    }
}
