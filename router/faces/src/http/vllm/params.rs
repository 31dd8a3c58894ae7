//! `sampling_params`: sampling parameters as an object. An object that is written here is read back unchanged.

use crate::http::fields::Fields;
use crate::http::known::Endpoint;
use crate::http::structure::structure;
use proto::v1;
use proto::v1::structure::Form;
use router::front::parameters::NUMBERS;
use router::front::sampling_defaults::{self, last_n};
use router::refusal::Refusal;
use serde_json::{Map, Value, json};

/// Takes the object, and the number of answers.
pub fn read(fields: &mut Fields) -> Result<(v1::Sampling, u32), Refusal> {
    let mut params =
        fields.object("sampling_params")?.ok_or_else(|| Refusal::invalid("sampling_params", "is missing"))?;
    let (logprobs, n_choices) = (params.unsigned("logprobs")?, params.n_choices()?);
    let mut sampling = params.sampling()?;
    sampling.logprobs = logprobs;
    // As in vLLM: without detokenization there are no stop strings.
    if params.boolean("detokenize")? == Some(false) && !sampling.stop.is_empty() {
        return Err(Refusal::invalid("stop", "needs `detokenize` to be true"));
    }
    sampling.structure = structure(&mut params)?.map(|requested| requested.structure);
    params.check(Endpoint::Completions)?;
    params.refuse(&["suffix", "truncate_prompt_tokens"])?;
    Ok((sampling, n_choices))
}

/// Returns the object for these parameters.
pub fn value(sampling: &v1::Sampling, n_choices: u32) -> Value {
    let bias: Map<String, Value> =
        sampling.logit_bias.iter().map(|(id, bias)| (id.to_string(), (*bias).into())).collect();
    let all = json!({
        "n": n_choices,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "stop": sampling.stop,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
        // Zero is no window, and would disable penalties in llama.cpp's format.
        "repeat_last_n": sampling.penalty_window.filter(|window| *window > 0).map(last_n),
        "sampling_defaults": sampling_defaults::name(sampling.defaults()),
        "dry_sequence_breakers": sampling.dry.as_ref().map(|dry| dry.sequence_breakers.as_slice()),
        "logit_bias": bias,
        "bad_words": sampling.bad_words,
        "include_stop_str_in_output": sampling.include_stop,
        "skip_special_tokens": !sampling.show_special,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "logprob_token_ids": sampling.logprob_token_ids,
    });
    let Value::Object(mut all) = all else { return Value::Null };
    all.extend(NUMBERS.iter().map(|of| (of.name.to_owned(), (of.requested)(sampling).into())));
    // An empty list of these would allow nothing.
    if !sampling.allowed_token_ids.is_empty() {
        all.insert("allowed_token_ids".into(), sampling.allowed_token_ids.as_slice().into());
    }
    if let Some(form) = sampling.structure.as_ref().and_then(|structure| structure.form.as_ref()) {
        let (name, value) = structure_field(form);
        all.insert(name.into(), value);
    }
    all.retain(|_, value| !value.is_null());
    let mut all = Value::Object(all);
    shorten_floats(&mut all);
    all
}

/// Writes 32-bit numbers as short as the client did: 0.1 is not 0.10000000149.
fn shorten_floats(value: &mut Value) {
    match value {
        Value::Object(all) => all.values_mut().for_each(shorten_floats),
        Value::Number(number) if number.is_f64() => {
            let short = number.as_f64().and_then(|number| (number as f32).to_string().parse::<f64>().ok());
            if let Some(short) = short {
                *value = short.into();
            }
        }
        _ => {}
    }
}

/// Returns a structure as the field that is read back unchanged. `structured_outputs.grammar` requires a guess of the
/// language, so languages with a field of their own are written to that field.
fn structure_field(form: &Form) -> (&'static str, Value) {
    let output = |name: &str, value: Value| ("structured_outputs", json!({ name: value }));
    match form {
        Form::JsonObject(is_enabled) => output("json_object", (*is_enabled).into()),
        Form::JsonSchema(schema) => output("json", schema.as_str().into()),
        Form::Regex(pattern) => output("regex", pattern.as_str().into()),
        Form::Choice(choices) => output("choice", choices.texts.as_slice().into()),
        Form::Lark(text) => output("grammar", text.as_str().into()),
        Form::Ebnf(text) => ("ebnf", text.as_str().into()),
        Form::Gbnf(text) => ("grammar", text.as_str().into()),
        Form::StructuralTag(tag) => output("structural_tag", tag.as_str().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(sampling: &v1::Sampling) -> (v1::Sampling, u32) {
        let body = json!({ "sampling_params": value(sampling, 2) }).to_string();
        read(&mut Fields::parse(body.as_bytes()).unwrap()).unwrap()
    }

    #[test]
    fn what_is_written_is_read_as_the_same() {
        for body in [
            r#"{"max_tokens": 5}"#,
            r#"{"temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": 7, "max_tokens": 9,
                "min_tokens": 2, "stop": ["a"], "stop_token_ids": [1], "ignore_eos": true, "presence_penalty": 0.5,
                "frequency_penalty": 0.25, "repetition_penalty": 1.5, "repeat_last_n": 64,
                "typical_p": 0.5, "top_n_sigma": 2,
                "xtc_probability": 0.5, "xtc_threshold": 0.25, "dry_multiplier": 0.5, "dry_base": 2,
                "dry_allowed_length": 3, "dry_sequence_breakers": ["!"], "logit_bias": {"65": 1.5},
                "allowed_token_ids": [65, 66], "bad_words": ["x"], "include_stop_str_in_output": true,
                "skip_special_tokens": false, "prompt_logprobs": 1, "sampling_defaults": "ollama"}"#,
        ] {
            let mut sampling = Fields::parse(body.as_bytes()).unwrap().sampling().unwrap();
            sampling.logprobs = Some(2);
            assert_eq!(round_trip(&sampling), (sampling, 2), "{body}");
        }
        let text = || "root ::= \"a\"".to_owned();
        for form in [Form::Gbnf(text()), Form::Ebnf(text()), Form::Lark("start: \"a\"".into()), Form::JsonObject(true)]
        {
            let mut sampling = Fields::parse(br#"{"max_tokens": 5}"#).unwrap().sampling().unwrap();
            sampling.structure = Some(v1::Structure { form: Some(form) });
            assert_eq!(round_trip(&sampling), (sampling, 2));
        }
    }

    #[test]
    fn without_a_length_there_is_no_limit() {
        let mut fields = Fields::parse(br#"{"sampling_params": {}}"#).unwrap();
        assert_eq!(read(&mut fields).unwrap().0.max_tokens, None);
        for (body, field) in [
            ("{}", "sampling_params"),
            (r#"{"sampling_params": {"temperature": "hot"}}"#, "temperature"),
            (r#"{"sampling_params": {"structured_outputs": 1}}"#, "structured_outputs"),
        ] {
            let refused = read(&mut Fields::parse(body.as_bytes()).unwrap());
            assert!(matches!(refused, Err(Refusal::Invalid { field: named, .. }) if named == field), "{body}");
        }
    }
}
