//! Translates requests of `vllm.Inference` to the router's own, and logprobs and ends of answers from them. Has no
//! knowledge of streams and replicas.

use proto::v1;
use proto::v1::structure::{Choices, Form};
use proto::vllm_server as wire;
use proto::vllm_server::candidate_token_info::TokenInfo;
use proto::vllm_server::candidate_tokens::Select;
use proto::vllm_server::decoding_parameters::StructuredOutput;
use proto::vllm_server::finish_info::{FinishReason, StopReason};
use router::front::structure::vllm_grammar;
use router::refusal::Refusal;
use types::Token;

/// Refuses by name each field that would change the answer and is not supported.
pub fn refuse_unserved(request: &wire::GenerateRequest) -> Result<(), Refusal> {
    let kv = request.kv.as_ref();
    let (decoding, stopping) = (request.decoding.as_ref(), request.stopping.as_ref());
    let gate = request.engine_reasoning_gate.as_ref();
    let has_budget = |stopping: &wire::StoppingCriteria| stopping.thinking_token_budget.is_some_and(|n| n != -1);
    let present = [
        ("media", !request.media.is_empty()),
        ("lora_name", !request.lora_name.is_empty()),
        ("kv.bypass_prefix_cache", kv.is_some_and(|kv| kv.bypass_prefix_cache)),
        ("kv.kv_transfer_params", kv.is_some_and(|kv| kv.kv_transfer_params.is_some())),
        ("kv.ec_transfer_params", kv.is_some_and(|kv| kv.ec_transfer_params.is_some())),
        ("decoding.bad_words_token_ids", decoding.is_some_and(|decoding| !decoding.bad_words_token_ids.is_empty())),
        ("stopping.thinking_token_budget", stopping.is_some_and(has_budget)),
        ("engine_reasoning_gate.reasoning_ended", gate.is_some_and(|gate| gate.reasoning_ended == Some(false))),
    ];
    match present.into_iter().find(|(_, is_present)| *is_present) {
        Some((name, _)) => Err(Refusal::invalid(name, "is not supported")),
        None => Ok(()),
    }
}

/// Translates all that the tokens are drawn by. An absent temperature is zero, as in vLLM's server; all other absent
/// values have the model's defaults.
pub fn sampling(request: &mut wire::GenerateRequest) -> Result<v1::Sampling, Refusal> {
    let random = request.sampling.take().unwrap_or_default();
    let decoding = request.decoding.take().unwrap_or_default();
    let stopping = request.stopping.take().unwrap_or_default();
    let response = request.response.clone().unwrap_or_default();
    let of_output = candidates("response.output_candidates", response.output_logprobs, response.output_candidates)?;
    let of_prompt = candidates("response.prompt_candidates", response.prompt_logprobs, response.prompt_candidates)?;
    if !of_prompt.ids.is_empty() {
        return Err(Refusal::invalid("response.prompt_candidates", "does not support `token_ids`"));
    }
    let unless_zero = |n: u32| (n > 0).then_some(n);
    Ok(v1::Sampling {
        temperature: Some(request.temperature.unwrap_or(0.0)),
        top_k: random.top_k,
        top_p: random.top_p,
        min_p: random.min_p,
        // Negative seeds are converted as over HTTP.
        seed: random.seed.map(|seed| seed as u64),
        max_tokens: unless_zero(stopping.max_new_tokens),
        min_tokens: stopping.min_new_tokens,
        stop: stopping.stop_strings,
        stop_token_ids: stopping.stop_token_ids,
        ignore_eos: stopping.ignore_eos,
        include_stop: stopping.include_stop_strings,
        show_special: !response.skip_special_tokens.unwrap_or(true),
        logprobs: of_output.n,
        logprob_token_ids: of_output.ids,
        prompt_logprobs: of_prompt.n,
        presence_penalty: decoding.presence_penalty,
        frequency_penalty: decoding.frequency_penalty,
        repetition_penalty: (decoding.repetition_penalty != 0.0).then_some(decoding.repetition_penalty),
        logit_bias: decoding.logit_bias,
        allowed_token_ids: decoding.allowed_token_ids,
        structure: decoding.structured_output.and_then(form).map(|form| v1::Structure { form: Some(form) }),
        ..v1::Sampling::default()
    })
}

/// Which logprobs a request needs: none, or those of drawn tokens and of others beside them.
#[derive(Default)]
struct LogprobSelection {
    n: Option<u32>,
    ids: Vec<Token>,
}

fn candidates(
    field: &'static str,
    is_requested: bool,
    candidates: Option<wire::CandidateTokens>,
) -> Result<LogprobSelection, Refusal> {
    if !is_requested {
        return Ok(LogprobSelection::default());
    }
    match candidates.and_then(|candidates| candidates.select) {
        Some(Select::All(true)) => Err(Refusal::invalid(field, "does not support `all`")),
        Some(Select::TopN(n)) => Ok(LogprobSelection { n: Some(n), ids: Vec::new() }),
        Some(Select::TokenIds(ids)) => Ok(LogprobSelection { n: Some(0), ids: ids.ids }),
        Some(Select::All(false)) | None => Ok(LogprobSelection { n: Some(0), ids: Vec::new() }),
    }
}

fn form(output: StructuredOutput) -> Option<Form> {
    Some(match output {
        StructuredOutput::Json(schema) => Form::JsonSchema(schema),
        StructuredOutput::Regex(regex) => Form::Regex(regex),
        StructuredOutput::Choice(choices) => Form::Choice(Choices { texts: choices.choices }),
        StructuredOutput::Grammar(text) => vllm_grammar(text),
        StructuredOutput::JsonObject(false) => return None,
        StructuredOutput::JsonObject(true) => Form::JsonObject(true),
        StructuredOutput::StructuralTag(tag) => Form::StructuralTag(tag),
    })
}

/// Returns the tokens beside the drawn one, at each position. Only the most likely ones have ranks.
pub fn candidate_tokens(logprobs: &[v1::Logprob], has_ranks: bool) -> Vec<wire::CandidateTokenInfo> {
    let info = |(place, top): (usize, &v1::Logprob)| TokenInfo {
        id: top.token_id,
        logprob: top.logprob,
        rank: if has_ranks { place as u32 + 1 } else { 0 },
    };
    let position =
        |one: &v1::Logprob| wire::CandidateTokenInfo { tokens: one.top.iter().enumerate().map(info).collect() };
    logprobs.iter().map(position).collect()
}

/// Returns the end of a sequence. `last` is its last token.
pub fn finish_info(finished: &v1::Finished, last: Option<Token>) -> wire::FinishInfo {
    let usage = finished.usage.unwrap_or_default();
    let is_length = finished.reason() == v1::finished::Reason::Length;
    let stop_reason = match (finished.stop.as_str(), finished.stop_token) {
        _ if is_length => None,
        ("", Some(token)) => Some(StopReason::StopTokenId(token)),
        ("", None) => last.map(StopReason::EosTokenId),
        (stop, _) => Some(StopReason::StopString(stop.to_owned())),
    };
    wire::FinishInfo {
        num_output_tokens: usage.completion_tokens,
        finish_reason: if is_length { FinishReason::Length } else { FinishReason::Stop }.into(),
        num_cached_tokens: Some(usage.cached_tokens),
        stop_reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut wire::GenerateRequest)) -> String {
        let mut request = wire::GenerateRequest::default();
        change(&mut request);
        refuse_unserved(&request).and_then(|()| sampling(&mut request).map(|_| ())).unwrap_err().to_string()
    }

    #[test]
    fn unserved_fields_are_refused_by_name() {
        let kv = |kv| move |request: &mut wire::GenerateRequest| request.kv = Some(kv);
        let default = wire::KvCacheParameters::default;
        let unserved = Some(wire::Unserved {});
        assert!(refused(|request| request.media = vec![wire::Unserved {}]).starts_with("media: "));
        assert!(refused(|request| request.lora_name = "a".into()).starts_with("lora_name: "));
        let bypass = wire::KvCacheParameters { bypass_prefix_cache: true, ..default() };
        assert!(refused(kv(bypass)).starts_with("kv.bypass_prefix_cache: "));
        let transfer = wire::KvCacheParameters { kv_transfer_params: unserved, ..default() };
        assert!(refused(kv(transfer)).starts_with("kv.kv_transfer_params: "));
        let gate = wire::EngineReasoningGate { reasoning_ended: Some(false), ..Default::default() };
        let gated = refused(|request| request.engine_reasoning_gate = Some(gate));
        assert!(gated.starts_with("engine_reasoning_gate.reasoning_ended: "), "{gated}");
        let all = Some(wire::CandidateTokens { select: Some(Select::All(true)) });
        let response = wire::ResponseOptions { output_logprobs: true, output_candidates: all, ..Default::default() };
        assert!(refused(|request| request.response = Some(response)).starts_with("response.output_candidates: "));
    }

    #[test]
    fn absent_values_are_greedy_and_the_models_own() {
        let sampling = sampling(&mut wire::GenerateRequest::default()).unwrap();
        assert_eq!(
            (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p),
            (Some(0.0), None, None, None)
        );
        assert_eq!((sampling.repetition_penalty, sampling.max_tokens, sampling.seed), (None, None, None));
        assert_eq!((sampling.logprobs, sampling.show_special), (None, false));
    }

    #[test]
    fn constraints_are_structures() {
        let check = |output: StructuredOutput, expect: Option<Form>| {
            let decoding = wire::DecodingParameters { structured_output: Some(output), ..Default::default() };
            let mut request = wire::GenerateRequest { decoding: Some(decoding), ..Default::default() };
            assert_eq!(sampling(&mut request).unwrap().structure.and_then(|structure| structure.form), expect);
        };
        check(StructuredOutput::Regex("a".into()), Some(Form::Regex("a".into())));
        check(StructuredOutput::Json("{}".into()), Some(Form::JsonSchema("{}".into())));
        check(StructuredOutput::JsonObject(false), None);
        check(StructuredOutput::Grammar("start: \"a\"".into()), Some(Form::Lark("start: \"a\"".into())));
    }

    #[test]
    fn ends_name_what_ended_them() {
        let finished = |reason: v1::finished::Reason, stop: &str, stop_token| v1::Finished {
            reason: reason.into(),
            stop: stop.into(),
            stop_token,
            ..Default::default()
        };
        use v1::finished::Reason;
        for (finished, expect) in [
            (finished(Reason::Stop, "", None), Some(StopReason::EosTokenId(9))),
            (finished(Reason::Stop, "", Some(9)), Some(StopReason::StopTokenId(9))),
            (finished(Reason::Stop, "x", None), Some(StopReason::StopString("x".into()))),
            (finished(Reason::Length, "", None), None),
        ] {
            assert_eq!(finish_info(&finished, Some(9)).stop_reason, expect);
        }
    }
}
