//! `options`: Ollama's names for sampling parameters. Has no knowledge of prompts.

use crate::http::fields::Fields;
use crate::http::known::Endpoint;
use crate::http::llama_words::{self, n_predict};
use proto::v1;
use router::refusal::Refusal;

/// Takes the options. Options for the hardware (`num_gpu`, `num_thread`, `use_mmap`) change no answer here, and neither
/// does `num_keep`, because no prompt is ever truncated.
pub fn sampling(fields: &mut Fields) -> Result<v1::Sampling, Refusal> {
    let defaults = v1::sampling::Defaults::Ollama.into();
    let Some(mut options) = fields.object("options")? else {
        return Ok(v1::Sampling { defaults, ..v1::Sampling::default() });
    };
    check_n_ctx(&mut options)?;
    let max_tokens = n_predict(options.integer("num_predict")?, "num_predict")?;
    let mut sampling = llama_words::sampling(&mut options)?;
    (sampling.max_tokens, sampling.prompt_logprobs, sampling.defaults) = (max_tokens, None, defaults);
    // The remaining fields are checked like those of OpenAI's page.
    options.check(Endpoint::Completions)?;
    Ok(sampling)
}

/// Checks `num_ctx`, which cannot change the server's context. A larger value gives the model's own context, as in
/// Ollama. With a smaller value, a prompt that fits the context is not truncated.
fn check_n_ctx(options: &mut Fields) -> Result<(), Refusal> {
    match options.integer("num_ctx")? {
        Some(..1) => Err(Refusal::invalid("num_ctx", "must be at least 1")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(options: &str) -> Result<v1::Sampling, String> {
        let mut fields = Fields::parse(format!(r#"{{"options": {options}}}"#).as_bytes()).unwrap();
        match sampling(&mut fields) {
            Ok(sampling) => Ok(sampling),
            Err(Refusal::Invalid { field, .. }) => Err(field.into_owned()),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn options_have_the_names_of_ollama() {
        let all = r#"{"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "seed": 7,
            "num_predict": 9, "stop": ["a", "b"], "repeat_penalty": 1.5, "presence_penalty": 0.5,
            "frequency_penalty": 0.25, "repeat_last_n": 64}"#;
        let read = read(all).unwrap();
        assert_eq!((read.temperature, read.top_k, read.top_p, read.min_p), (Some(0.5), Some(3), Some(0.9), Some(0.1)));
        assert_eq!((read.typical_p, read.seed, read.max_tokens), (Some(0.8), Some(7), Some(9)));
        assert_eq!((read.repetition_penalty, read.presence_penalty, read.frequency_penalty), (Some(1.5), 0.5, 0.25));
        assert_eq!((read.penalty_window, read.defaults()), (Some(64), v1::sampling::Defaults::Ollama));
        assert_eq!(read.stop, ["a", "b"]);
    }

    #[test]
    fn neutral_values_and_the_machines_options_are_taken() {
        for options in [
            "{}",
            "null",
            r#"{"num_predict": -1, "seed": -1, "num_ctx": 131072, "num_keep": 24, "num_gpu": 99, "num_thread": 8}"#,
            r#"{"num_predict": -2, "mirostat": 0, "mirostat_tau": 5.0, "tfs_z": 1.0, "penalize_newline": true}"#,
            r#"{"repeat_last_n": 64, "unheard_of": 1, "use_mmap": true, "low_vram": false, "numa": false}"#,
        ] {
            let read = read(options).unwrap();
            assert_eq!((read.max_tokens, read.seed), (None, None), "{options}");
        }
    }

    #[test]
    fn a_reach_of_nothing_turns_penalties_off() {
        let read = read(r#"{"repeat_last_n": 0, "repeat_penalty": 1.5, "presence_penalty": 1}"#).unwrap();
        assert_eq!((read.repetition_penalty, read.presence_penalty), (Some(1.0), 0.0));
    }

    #[test]
    fn what_would_change_the_answer_is_refused_by_name() {
        for (options, field) in [
            ("[]", "options"),
            (r#"{"mirostat": 2}"#, "mirostat"),
            (r#"{"tfs_z": 0.5}"#, "tfs_z"),
            (r#"{"penalize_newline": false}"#, "penalize_newline"),
            (r#"{"repeat_last_n": -2}"#, "repeat_last_n"),
            (r#"{"num_predict": 0}"#, "num_predict"),
            (r#"{"num_predict": -3}"#, "num_predict"),
            (r#"{"num_predict": "many"}"#, "num_predict"),
            (r#"{"num_ctx": 0}"#, "num_ctx"),
            (r#"{"temperature": "hot"}"#, "temperature"),
        ] {
            assert_eq!(read(options).unwrap_err(), field, "{options}");
        }
    }
}
