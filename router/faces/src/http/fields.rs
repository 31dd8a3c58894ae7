//! The fields of a JSON body, which an endpoint takes one by one. Each refusal names its field. `known` lists the
//! fields of each endpoint; fields that it does not list are ignored. Has no knowledge of endpoints.

use crate::http::biases;
use crate::http::error::HttpError;
use crate::http::known::{self, Endpoint, NeutralValues};
use crate::http::searches;
use http::StatusCode;
use proto::v1;
use router::board::pick::hashed;
use router::front::parameters::{NUMBERS, Number, NumberParameter};
use router::front::parsed_request::{ReplicaPreference, cache_hint, cache_salt, deadline_after};
use router::front::sampling_defaults;
use router::refusal::Refusal;
use router::replicas::models::truncation::{CutSide, Truncation};
use serde_json::{Map, Value};
use tokio::time::Instant;
use types::{CacheHint, CacheSalt};

/// Fields that name a session. The first one present counts.
const SESSION_FIELDS: [&str; 3] = ["session_id", "prompt_cache_key", "user"];

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

pub struct Fields(Map<String, Value>);

impl Fields {
    pub fn of(fields: Map<String, Value>) -> Fields {
        Fields(fields)
    }

    pub fn parse(body: &[u8]) -> Result<Fields, HttpError> {
        // Some editors and languages begin a file with this mark.
        match serde_json::from_slice(body.strip_prefix(BYTE_ORDER_MARK).unwrap_or(body)) {
            Ok(Value::Object(fields)) => Ok(Fields(fields)),
            Ok(_) => Err(HttpError::bad_request(StatusCode::BAD_REQUEST, "the body is JSON, but not an object")),
            Err(error) => {
                Err(HttpError::bad_request(StatusCode::BAD_REQUEST, format!("the body is not JSON: {error}")))
            }
        }
    }

    /// Returns the fields that were not taken.
    pub fn rest(self) -> Map<String, Value> {
        self.0
    }

    /// Whether a field is present and not empty.
    pub fn has(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| !value.is_null() && value.as_array().is_none_or(|all| !all.is_empty()))
    }

    /// Returns a field's value without taking it.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name)
    }

    pub fn put(&mut self, name: &str, value: Value) {
        self.0.insert(name.to_owned(), value);
    }

    /// Takes a field's value. Null counts as absent.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    pub fn string(&mut self, name: &'static str) -> Result<Option<String>, Refusal> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(name, "a string", &other)),
        }
    }

    pub fn boolean(&mut self, name: &'static str) -> Result<Option<bool>, Refusal> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(wrong_type(name, "true or false", &other)),
        }
    }

    pub fn number(&mut self, name: &'static str) -> Result<Option<f32>, Refusal> {
        let number = |value: Value| value.as_f64().map(|number| number as f32).ok_or(value);
        self.take(name).map(number).transpose().map_err(|value| wrong_type(name, "a number", &value))
    }

    pub fn integer(&mut self, name: &'static str) -> Result<Option<i64>, Refusal> {
        // 3.0 is an integer too: some clients write every number so.
        let whole = |n: f64| (n.fract() == 0.0 && n.abs() < 9e15).then_some(n as i64);
        let integer = |value: Value| value.as_i64().or_else(|| value.as_f64().and_then(whole)).ok_or(value);
        self.take(name).map(integer).transpose().map_err(|value| not_integer(name, &value))
    }

    pub fn unsigned(&mut self, name: &'static str) -> Result<Option<u32>, Refusal> {
        let fits = |n: i64| u32::try_from(n).map_err(|_| Refusal::invalid(name, format!("{n} is out of range")));
        self.integer(name)?.map(fits).transpose()
    }

    pub fn object(&mut self, name: &'static str) -> Result<Option<Fields>, Refusal> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(fields)) => Ok(Some(Fields(fields))),
            Some(other) => Err(wrong_type(name, "an object", &other)),
        }
    }

    pub fn token_ids(&mut self, name: &'static str) -> Result<Option<Vec<u32>>, Refusal> {
        self.take(name).map(|value| token_ids(name, value)).transpose()
    }

    /// Reads the sampling parameters that all generating endpoints share. Logprobs differ between endpoints.
    pub fn sampling(&mut self) -> Result<v1::Sampling, Refusal> {
        let newer = self.unsigned("max_completion_tokens")?;
        let older = self.unsigned("max_tokens")?;
        let of_llama_cpp = self.n_predict()?;
        let last_n = self.integer("repeat_last_n")?.or(self.integer("penalty_last_n")?);
        let mut sampling = v1::Sampling {
            seed: self.seed()?,
            max_tokens: newer.or(older).or(of_llama_cpp),
            min_tokens: self.unsigned("min_tokens")?.unwrap_or(0),
            stop: self.strings("stop")?,
            stop_token_ids: self.token_ids("stop_token_ids")?.unwrap_or_default(),
            ignore_eos: self.boolean("ignore_eos")?.unwrap_or(false),
            xtc: Some(v1::Xtc::default()),
            dry: Some(v1::Dry { sequence_breakers: self.strings("dry_sequence_breakers")?, ..v1::Dry::default() }),
            logit_bias: biases::read(self.take(biases::FIELD))?,
            allowed_token_ids: self.allowed_token_ids()?,
            bad_words: self.strings("bad_words")?,
            include_stop: self.boolean("include_stop_str_in_output")?.unwrap_or(false),
            show_special: !self.boolean("skip_special_tokens")?.unwrap_or(true),
            prompt_logprobs: self.unsigned("prompt_logprobs")?,
            beams: searches::beams(self)?,
            best_of: self.unsigned("best_of")?.unwrap_or(0),
            logprob_token_ids: self.token_ids("logprob_token_ids")?.unwrap_or_default(),
            defaults: self.sampling_defaults()?,
            ..v1::Sampling::default()
        };
        for parameter in NUMBERS {
            if let Some(number) = self.parameter(parameter)? {
                (parameter.request)(&mut sampling, number);
            }
        }
        limit_penalties(&mut sampling, last_n)?;
        Ok(sampling)
    }

    /// Reads a number under each of its names. The first one present counts.
    fn parameter(&mut self, parameter: &NumberParameter) -> Result<Option<Number>, Refusal> {
        let mut first = None;
        for (name, _) in parameter.names() {
            let is_minus_one = self.get(name).and_then(Value::as_f64) == Some(-1.0);
            let number = match parameter.neutral() {
                neutral if parameter.has_minus_one && is_minus_one => self.take(name).map(|_| neutral),
                Number::Real(_) => self.number(name)?.map(Number::Real),
                Number::Whole(_) => self.unsigned(name)?.map(Number::Whole),
            };
            first = first.or(number);
        }
        Ok(first)
    }

    /// Reads which server's defaults apply to absent parameters.
    fn sampling_defaults(&mut self) -> Result<i32, Refusal> {
        const FIELD: &str = "sampling_defaults";
        let Some(name) = self.string(FIELD)? else { return Ok(0) };
        let vendor = sampling_defaults::vendor(&name).map(i32::from);
        vendor.ok_or_else(|| Refusal::invalid(FIELD, format!("must be openai, llama.cpp or ollama, got {name:?}")))
    }

    /// Reads llama.cpp's name for `max_tokens`, in which a negative number means no limit.
    fn n_predict(&mut self) -> Result<Option<u32>, Refusal> {
        match self.integer("n_predict")? {
            Some(..0) => Ok(Some(u32::MAX)),
            Some(n) => Ok(Some(u32::try_from(n).unwrap_or(u32::MAX))),
            None => Ok(None),
        }
    }

    /// Reads a list of token ids. Without it all tokens are allowed. An empty list is refused, because it would allow
    /// none.
    fn allowed_token_ids(&mut self) -> Result<Vec<u32>, Refusal> {
        match self.token_ids("allowed_token_ids")? {
            Some(ids) if ids.is_empty() => Err(Refusal::invalid("allowed_token_ids", "an empty list allows no token")),
            ids => Ok(ids.unwrap_or_default()),
        }
    }

    /// Reads an integer of 64 bits, signed or unsigned.
    fn seed(&mut self) -> Result<Option<u64>, Refusal> {
        let seed = |value: Value| value.as_u64().or(value.as_i64().map(|seed| seed as u64)).ok_or(value);
        self.take("seed").map(seed).transpose().map_err(|value| not_integer("seed", &value))
    }

    /// Reads a string or a list of strings.
    pub fn strings(&mut self, name: &'static str) -> Result<Vec<String>, Refusal> {
        let string = |value: Value| match value {
            Value::String(text) => Ok(text),
            other => Err(wrong_type(name, "a string or a list of strings", &other)),
        };
        match self.take(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(all)) => all.into_iter().map(string).collect(),
            Some(one) => Ok(vec![string(one)?]),
        }
    }

    /// Refuses a field of other servers that this endpoint does not support and that would change the answer.
    pub fn check(&self, on: Endpoint) -> Result<(), Refusal> {
        self.0.iter().try_for_each(|(name, value)| known::check(name, value, on))
    }

    /// Refuses fields that another page supports and this one does not.
    pub fn refuse(&self, names: &[&'static str]) -> Result<(), Refusal> {
        let is_set =
            |name: &&&'static str| self.0.get(**name).is_some_and(|value| !NeutralValues::Empty.contain(value));
        match names.iter().find(is_set) {
            Some(name) => Err(Refusal::invalid(*name, "is not supported here")),
            None => Ok(()),
        }
    }

    /// Reads `stream`, and whether the last chunk carries the usage.
    pub fn stream_options(&mut self, sampling: &v1::Sampling) -> Result<Option<StreamOptions>, Refusal> {
        let stream = self.boolean("stream")?.unwrap_or(false);
        if stream && sampling.prompt_logprobs.is_some() {
            return Err(Refusal::invalid("prompt_logprobs", "is not supported in a stream"));
        }
        let options = self.object("stream_options")?;
        match (stream, options) {
            (false, Some(_)) => Err(Refusal::invalid("stream_options", "needs `stream` to be true")),
            (false, None) => Ok(None),
            (true, None) => Ok(Some(StreamOptions::default())),
            (true, Some(mut options)) => {
                let include_usage = options.boolean("include_usage")?.unwrap_or(false);
                // As in vLLM, it extends `include_usage` and has no effect without it.
                let each = options.boolean("continuous_usage_stats")?.unwrap_or(false);
                Ok(Some(StreamOptions { include_usage, usage_in_each: include_usage && each }))
            }
        }
    }

    /// Reads which parts the client requests in addition to the text. Requires `sampling` with its logprobs.
    pub fn request_options(&mut self, sampling: &v1::Sampling) -> Result<RequestOptions, Refusal> {
        let timings_in_each = self.boolean("timings_per_token")?.unwrap_or(false);
        Ok(RequestOptions {
            logprobs: sampling.logprobs.is_some(),
            prompt_logprobs: sampling.prompt_logprobs.is_some(),
            token_ids: self.boolean("return_token_ids")?.unwrap_or(false),
            tokens_as_ids: self.boolean("return_tokens_as_token_ids")?.unwrap_or(false),
            timings: timings_in_each,
            timings_in_each,
            ..RequestOptions::default()
        })
    }

    /// Reads whether the client requests the progress of its prompt, which only a stream can carry.
    pub fn needs_progress(&mut self, is_stream: bool) -> Result<bool, Refusal> {
        Ok(self.boolean("return_progress")?.unwrap_or(false) && is_stream)
    }

    /// Sets the session from the request's header, unless the body names one.
    pub fn set_default_session(&mut self, session: String) {
        self.0.entry(SESSION_FIELDS[0]).or_insert_with(|| session.into());
    }

    /// Sets the hint for the prefix cache from the request's header, unless the body has one.
    pub fn set_default_cache_hint(&mut self, hint: String) {
        self.0.entry("cache_hint").or_insert_with(|| hint.into());
    }

    /// Reads `truncate_prompt_tokens`, in which -1 keeps as many tokens as there is room for, and `truncation_side`,
    /// the side at which tokens are dropped. The default is `side`.
    pub fn truncation(&mut self, side: CutSide) -> Result<Option<Truncation>, Refusal> {
        const NAME: &str = "truncate_prompt_tokens";
        let side = match self.string("truncation_side")?.as_deref() {
            None => side,
            Some("left") => CutSide::Left,
            Some("right") => CutSide::Right,
            Some(_) => return Err(Refusal::invalid("truncation_side", "must be left or right")),
        };
        let n_max = match self.integer(NAME)? {
            None => return Ok(None),
            Some(-1) => None,
            Some(n) => match u32::try_from(n) {
                Ok(n) if n > 0 => Some(n),
                _ => return Err(Refusal::invalid(NAME, format!("must be -1 or at least 1, got {n}"))),
            },
        };
        Ok(Some(Truncation { n_max, side }))
    }

    /// Returns a hash of the session, which consecutive requests share. It changes no answer, so a value that is not
    /// text is ignored.
    fn session(&self) -> Option<u64> {
        SESSION_FIELDS.iter().find_map(|name| self.0.get(*name)?.as_str()).filter(|text| !text.is_empty()).map(hashed)
    }

    /// Reads the session, and `apart_from`: the name of a replica, beside which another is preferred.
    pub fn placement(&mut self) -> Result<ReplicaPreference, Refusal> {
        Ok(ReplicaPreference { session: self.session(), apart_from: self.string("apart_from")?.as_deref().map(hashed) })
    }

    pub fn priority(&mut self) -> Result<i32, Refusal> {
        let fits = |n: i64| i32::try_from(n).map_err(|_| Refusal::invalid("priority", format!("{n} is out of range")));
        self.integer("priority")?.map_or(Ok(0), fits)
    }

    /// Reads `cache_salt`: only requests with the same salt share cached blocks.
    pub fn cache_salt(&mut self) -> Result<CacheSalt, Refusal> {
        self.string("cache_salt")?.map_or(Ok(CacheSalt::default()), |text| cache_salt(&text))
    }

    /// Reads `cache_hint`, or else whether OpenAI's or Anthropic's field asks for a long retention.
    pub fn cache_hint(&mut self) -> Result<CacheHint, Refusal> {
        if let Some(hint) = self.string("cache_hint")? {
            return cache_hint(&hint);
        }
        let retention = self.get("prompt_cache_retention").and_then(Value::as_str);
        let ttl = self.get("cache_control").and_then(|control| control["ttl"].as_str());
        let is_long = retention == Some("24h") || ttl == Some("1h");
        Ok(if is_long { CacheHint::Retain } else { CacheHint::None })
    }

    /// Reads `deadline_ms`, as in `lockstep.v1`: after this many milliseconds the request ends or is refused.
    pub fn deadline(&mut self) -> Result<Option<Instant>, Refusal> {
        Ok(deadline_after(self.unsigned("deadline_ms")?.unwrap_or(0)))
    }

    /// Reads `n`, the number of choices of one prompt.
    pub fn n_choices(&mut self) -> Result<u32, Refusal> {
        Ok(self.unsigned("n")?.unwrap_or(1))
    }
}

/// The parts that a client requests in addition to the text, and their format.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestOptions {
    pub logprobs: bool,
    pub prompt_logprobs: bool,
    pub token_ids: bool,
    /// Tokens beside logprobs are written as their ids.
    pub tokens_as_ids: bool,
    /// The answer includes the prompt's text, for debugging.
    pub verbose: bool,
    /// The end of the answer includes the times.
    pub timings: bool,
    /// Each chunk of a stream includes the times.
    pub timings_in_each: bool,
    pub echo: bool,
    /// The client requests only the prompt: `max_tokens` was 0. One token is sampled all the same, and not sent.
    pub is_prompt_only: bool,
    /// None: the answer is sent whole.
    pub streaming: Option<StreamOptions>,
    /// The field that constrains the answer.
    pub structure_field: Option<&'static str>,
}

/// A client's options for a stream.
#[derive(Clone, Copy, Debug, Default)]
pub struct StreamOptions {
    pub include_usage: bool,
    /// Each chunk includes the usage so far.
    pub usage_in_each: bool,
}

pub fn token_ids(name: &'static str, value: Value) -> Result<Vec<u32>, Refusal> {
    let id = |value: &Value| match value.as_i64().map(u32::try_from) {
        Some(Ok(id)) => Ok(id),
        Some(Err(_)) => Err(Refusal::invalid(name, format!("{value} is out of vocabulary"))),
        None => Err(wrong_type(name, "token ids", value)),
    };
    match &value {
        Value::Array(ids) => ids.iter().map(id).collect(),
        other => Err(wrong_type(name, "a list of token ids", other)),
    }
}

fn not_integer(name: &'static str, value: &Value) -> Refusal {
    match value.as_f64().is_some_and(|number| number.fract() == 0.0) {
        true => Refusal::invalid(name, "is out of range"),
        false => wrong_type(name, "a whole number", value),
    }
}

/// The refusal names the value's kind and does not repeat the value, which may be long or private.
pub fn wrong_type(name: impl Into<std::borrow::Cow<'static, str>>, must: &str, value: &Value) -> Refusal {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(number) if number.is_f64() && number.as_f64().is_some_and(|n| n.fract() != 0.0) => {
            "a number with a fraction"
        }
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    Refusal::Invalid { field: name.into(), message: format!("must be {must}, got {kind}") }
}

/// Limits penalties to the last `last_n` tokens: -1 means all, and 0 disables the penalties.
fn limit_penalties(sampling: &mut v1::Sampling, last_n: Option<i64>) -> Result<(), Refusal> {
    match last_n {
        None => {}
        Some(-1) => sampling.penalty_window = Some(u32::MAX),
        Some(0) => {
            (sampling.presence_penalty, sampling.frequency_penalty) = (0.0, 0.0);
            sampling.repetition_penalty = Some(1.0);
        }
        Some(n) => {
            let n = u32::try_from(n).map_err(|_| {
                Refusal::invalid("repeat_last_n", format!("must be -1, 0 or a number of tokens, got {n}"))
            })?;
            sampling.penalty_window = Some(n);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(body: &str) -> Option<String> {
        let mut fields = Fields::parse(body.as_bytes()).unwrap();
        let read = fields.check(Endpoint::Chat).and_then(|()| fields.sampling());
        let read = read.and_then(|sampling| fields.n_choices().map(|_| sampling));
        match read.and_then(|sampling| fields.stream_options(&sampling).map(|_| ())) {
            Ok(()) => None,
            Err(Refusal::Invalid { field, .. }) => Some(field.into_owned()),
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn fields_that_change_nothing_are_taken() {
        for body in [
            "{}",
            r#"{"temperature": 0.5, "top_k": -1, "seed": -3, "stop": "x", "n": 2, "best_of": 3}"#,
            r#"{"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "logit_bias": {}}"#,
            r#"{"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "echo": false}"#,
            r#"{"user": "someone", "metadata": {"a": 1}, "unheard_of": [1, 2], "suffix": null, "top_p": null}"#,
            r#"{"stream": true, "stream_options": {"include_usage": true}, "stop": null, "stop_token_ids": []}"#,
        ] {
            assert_eq!(refused(body), None, "{body}");
        }
    }

    #[test]
    fn a_number_is_refused_for_what_it_is() {
        let check = |body: &str, message: &str| {
            let mut fields = Fields::parse(body.as_bytes()).unwrap();
            assert_eq!(fields.sampling().unwrap_err().to_string(), message, "{body}");
        };
        check(r#"{"max_tokens": 18446744073709551616}"#, "max_tokens: is out of range");
        check(r#"{"max_tokens": 1e30}"#, "max_tokens: is out of range");
        check(r#"{"max_tokens": 4294967296}"#, "max_tokens: 4294967296 is out of range");
        check(r#"{"max_tokens": 1.5}"#, "max_tokens: must be a whole number, got a number with a fraction");
        check(r#"{"seed": 18446744073709551616}"#, "seed: is out of range");
        check(r#"{"seed": 0.5}"#, "seed: must be a whole number, got a number with a fraction");
        check(r#"{"stop": 5}"#, "stop: must be a string or a list of strings, got a number");
    }

    #[test]
    fn a_session_is_the_bodys_or_else_the_headers() {
        let session = |body: &str, header: Option<&str>| {
            let mut fields = Fields::parse(body.as_bytes()).unwrap();
            header.into_iter().for_each(|header| fields.set_default_session(header.to_owned()));
            fields.session()
        };
        let mine = Some(hashed("mine"));
        assert_eq!(session(r#"{"session_id": "mine", "user": "me"}"#, None), mine);
        assert_eq!(session(r#"{"session_id": "mine"}"#, Some("other")), mine);
        assert_eq!(session(r#"{"user": "me"}"#, Some("mine")), mine);
        assert_eq!(session(r#"{"session_id": 5}"#, None), None);
    }

    #[test]
    fn a_hint_for_the_cache_is_the_bodys_or_the_headers_or_another_servers() {
        let hint = |body: &str, header: Option<&str>| {
            let mut fields = Fields::parse(body.as_bytes()).unwrap();
            header.into_iter().for_each(|header| fields.set_default_cache_hint(header.to_owned()));
            fields.cache_hint().map_err(|refusal| refusal.to_string())
        };
        assert_eq!(hint("{}", None), Ok(CacheHint::None));
        assert_eq!(hint(r#"{"cache_hint": "demote"}"#, Some("retain")), Ok(CacheHint::Demote));
        assert_eq!(hint(r#"{"prompt_cache_retention": "24h"}"#, None), Ok(CacheHint::Retain));
        assert_eq!(hint(r#"{"prompt_cache_retention": "in_memory"}"#, Some("retain")), Ok(CacheHint::Retain));
        assert_eq!(hint(r#"{"cache_control": {"type": "ephemeral", "ttl": "1h"}}"#, None), Ok(CacheHint::Retain));
        assert_eq!(hint(r#"{"cache_control": {"type": "ephemeral", "ttl": "5m"}}"#, None), Ok(CacheHint::None));
        let refused = hint("{}", Some("pin")).unwrap_err();
        assert!(refused.contains("cache_hint") && refused.contains("`retain` or `demote`"), "{refused}");
    }

    #[test]
    fn a_body_may_begin_with_a_byte_order_mark() {
        assert!(Fields::parse("\u{feff}{\"n\": 1}".as_bytes()).is_ok());
        assert!(Fields::parse("{\"n\": 1}\u{feff}".as_bytes()).is_err());
    }

    #[test]
    fn fields_that_would_change_the_answer_are_refused_by_name() {
        for (body, field) in [
            (r#"{"temperature": "hot"}"#, "temperature"),
            (r#"{"top_k": 1.5}"#, "top_k"),
            (r#"{"max_tokens": -1}"#, "max_tokens"),
            (r#"{"max_tokens": 5000000000}"#, "max_tokens"),
            (r#"{"seed": "7"}"#, "seed"),
            (r#"{"stop": ["a", 1]}"#, "stop"),
            (r#"{"stop_token_ids": [-1]}"#, "stop_token_ids"),
            (r#"{"stream": "yes"}"#, "stream"),
            (r#"{"stream_options": {"include_usage": true}}"#, "stream_options"),
            (r#"{"thinking_forced_open": true}"#, "thinking_forced_open"),
            (r#"{"logit_bias": {"five": -100}}"#, "logit_bias"),
            (r#"{"logit_bias": {"5": "much"}}"#, "logit_bias"),
            (r#"{"logit_bias": [5]}"#, "logit_bias"),
            (r#"{"presence_penalty": "much"}"#, "presence_penalty"),
            (r#"{"allowed_token_ids": []}"#, "allowed_token_ids"),
            (r#"{"bad_words": [1]}"#, "bad_words"),
            (r#"{"dry_multiplier": []}"#, "dry_multiplier"),
            (r#"{"mirostat": 2}"#, "mirostat"),
        ] {
            assert_eq!(refused(body).as_deref(), Some(field), "{body}");
        }
    }
}
