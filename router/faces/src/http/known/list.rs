//! The list of known fields, in the order in which a request is read. Numbers of the sampling are in the table of
//! `front::parameters`.

use super::Endpoint::{
    Chat, Completions, CountTokens, Detokenize, Embeddings, Infer, Messages, Rank, Responses, Tokenize,
};
use super::NeutralValues::{self, All, Empty, These};
use super::{Endpoints, KnownField};
use router::front::parameters::{NUMBERS, NumberParameter};

const ALL: Endpoints =
    &[Chat, Completions, Responses, Messages, CountTokens, Embeddings, Rank, Tokenize, Detokenize, Infer];
/// Endpoints that generate.
const GENERATING: Endpoints = &[Chat, Completions, Responses, Messages, Infer];
/// Endpoints that generate, over HTTP.
const HTTP: Endpoints = &[Chat, Completions, Responses, Messages];
/// Endpoints that render a conversation, or whose clients may expect it.
const TALKS: Endpoints = &[Chat, Completions, Responses, Messages, CountTokens, Tokenize];
/// Endpoints that tokenize text.
const READS: Endpoints = &[Chat, Completions, Responses, Messages, CountTokens, Embeddings, Tokenize, Infer];
/// Endpoints that store nothing.
const UNSTORED: Endpoints = &[Chat, Completions, Messages, CountTokens, Embeddings, Rank, Tokenize, Detokenize, Infer];
const BOTH: Endpoints = &[Chat, Completions];
/// Endpoints that accept a structure in the format of every server.
const SHAPED: Endpoints = &[Chat, Completions, Infer];
/// Endpoints that name a model.
const NAMED: Endpoints = &[Chat, Completions, Responses, Messages, CountTokens, Embeddings, Rank, Tokenize, Detokenize];
/// Endpoints whose requests have a place in the queue and a deadline.
const QUEUED: Endpoints = &[Chat, Completions, Responses, Messages, Embeddings, Rank, Infer];
const STREAMS: Endpoints = &[Chat, Completions, Responses];

const fn supported(name: &'static str, of: &'static str, on: Endpoints, meant: &'static str) -> KnownField {
    KnownField { name, of, on, is_done: true, neutral: NeutralValues::None, meant, instead: None }
}

const fn unsupported(name: &'static str, of: &'static str, on: Endpoints, meant: &'static str) -> KnownField {
    KnownField { is_done: false, ..supported(name, of, on, meant) }
}

impl KnownField {
    const fn with_neutral(self, neutral: NeutralValues) -> KnownField {
        KnownField { neutral, ..self }
    }

    const fn replaced_by(self, instead: &'static str) -> KnownField {
        KnownField { instead: Some(instead), ..self }
    }
}

const FALSE: NeutralValues = These(&["false"]);
const TRUE: NeutralValues = These(&["true"]);
const ZERO: NeutralValues = These(&["0"]);
const ONE: NeutralValues = These(&["1"]);
const UNLIMITED: NeutralValues = These(&["-1"]);

/// A field has two entries if its meaning differs between endpoints.
pub fn known_fields() -> impl Iterator<Item = KnownField> {
    let number =
        |row: &'static NumberParameter| row.names().map(|(name, of)| supported(name, of, GENERATING, row.example));
    let numbers = NUMBERS.iter().flat_map(number);
    PROMPT_FIELDS.iter().copied().chain(numbers).chain(OTHER_FIELDS.iter().copied())
}

const PROMPT_FIELDS: &[KnownField] = &[
    // The prompt
    supported("model", "O A V L M S", NAMED, r#""toy""#),
    supported(
        "messages",
        "O A V L M S",
        &[Chat, Messages, CountTokens, Embeddings, Tokenize],
        r#"[{"role": "user", "content": "Hi"}]"#,
    ),
    supported("prompt", "O V L M S", &[Completions, Tokenize], r#""Hi""#),
    unsupported("prompt", "O V", &[Responses], r#"{"id": "pmpt_1"}"#).with_neutral(Empty),
    supported("input", "O V M", &[Responses, Embeddings], r#""Hi""#),
    supported("tokens", "V L", &[Detokenize], "[65]"),
    supported("content", "L", &[Tokenize], r#""Hi""#),
    supported("instructions", "O V", &[Responses], r#""Be short.""#),
    supported("system", "A", &[Messages, CountTokens], r#""Be short.""#),
    unsupported("system", "M", BOTH, r#""Be short.""#).with_neutral(Empty),
    unsupported("prompt_embeds", "V", BOTH, r#""AAAA""#).with_neutral(Empty),
    unsupported("images", "M", BOTH, r#"["AAAA"]"#).with_neutral(Empty),
    unsupported("context", "M", BOTH, "[1]").with_neutral(Empty),
    // For models that have tokens for it.
    supported("suffix", "O V M S", &[Completions], r#""end""#),
    unsupported("input_prefix", "L", &[Completions], r#""a""#).with_neutral(Empty),
    unsupported("input_suffix", "L", &[Completions], r#""a""#).with_neutral(Empty),
    unsupported("input_extra", "L", &[Completions], r#"[{"text": "a"}]"#).with_neutral(Empty),
    supported("previous_response_id", "O V", &[Responses], r#""resp_1""#),
    unsupported("previous_input_messages", "V", &[Responses], "[{}]").with_neutral(Empty),
    unsupported("previous_response", "V", &[Responses], "{}"),
    supported("conversation", "O", &[Responses], r#""conv_1""#),
    unsupported("thread", "A", &[Messages, CountTokens], r#"{"type": "create"}"#),
    unsupported("container", "A", HTTP, r#""c1""#).with_neutral(Empty),
    unsupported("context_management", "O", &[Responses], r#"[{"type": "compaction"}]"#).with_neutral(Empty),
    unsupported(
        "context_management",
        "A",
        &[Messages, CountTokens],
        r#"{"edits": [{"type": "clear_tool_uses_20250919"}]}"#,
    )
    .with_neutral(These(&[
        "{}",
        r#"{"edits": []}"#,
        r#"{"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}"#,
    ])),
    // Rendering
    supported("add_generation_prompt", "V S", &[Chat, Embeddings, Tokenize], "false"),
    unsupported("add_generation_prompt", "V S", &[Responses, Messages, CountTokens], "false").with_neutral(TRUE),
    supported("continue_final_message", "V S", &[Chat, Embeddings, Tokenize], "false"),
    unsupported("continue_final_message", "V S", &[Completions, Responses, Messages, CountTokens], "true")
        .with_neutral(FALSE),
    // Only if the operator allows it.
    supported("chat_template", "V", &[Chat, Embeddings, Tokenize], r#""{{ 1 }}""#),
    unsupported("chat_template", "V", &[Completions, Responses, Messages, CountTokens], r#""{{ 1 }}""#),
    unsupported("template", "M", TALKS, r#""{{ 1 }}""#).with_neutral(Empty),
    unsupported("raw", "M", TALKS, "true").with_neutral(FALSE),
    supported("chat_template_kwargs", "V L S", &[Chat, Responses, Embeddings, Tokenize], r#"{"a": 1}"#),
    unsupported("chat_template_kwargs", "V L S", &[Completions, Messages, CountTokens], r#"{"a": 1}"#)
        .with_neutral(Empty),
    supported("documents", "V", &[Chat, Tokenize], r#"[{"text": "a"}]"#),
    unsupported("documents", "V", &[Completions, Responses, Messages, CountTokens], r#"[{"text": "a"}]"#)
        .with_neutral(Empty),
    unsupported("media_io_kwargs", "V", TALKS, r#"{"image": {}}"#).with_neutral(Empty),
    unsupported("mm_processor_kwargs", "V", READS, r#"{"a": 1}"#).with_neutral(Empty),
    // By default plain text gets special tokens, and a template writes its own.
    supported("add_special_tokens", "V", &[Chat, Completions, Embeddings, Tokenize], "false"),
    unsupported("add_special_tokens", "V", &[Infer], "false").with_neutral(TRUE),
    unsupported("add_special_tokens", "V", &[Responses, Messages, CountTokens], "true").with_neutral(FALSE),
    supported("add_special", "L", &[Tokenize], "true"),
    unsupported("parse_special", "L", &[Tokenize], "false").with_neutral(TRUE),
    supported("with_pieces", "L", &[Tokenize], "true"),
    supported("return_token_strs", "V", &[Tokenize], "true"),
    supported("truncate_prompt_tokens", "V", &[Chat, Completions, Embeddings, Rank], "2"),
    unsupported("truncate_prompt_tokens", "V", &[Responses, Messages, CountTokens, Tokenize, Infer], "2"),
    supported("truncation_side", "V", &[Chat, Completions, Embeddings, Rank], r#""left""#),
    unsupported("truncation_side", "V", &[Responses, Messages, CountTokens, Tokenize, Infer], r#""left""#)
        .with_neutral(All),
    unsupported("truncation", "O V", &[Responses], r#""x""#).with_neutral(These(&[r#""disabled""#, r#""auto""#])),
    unsupported("truncate", "M", READS, "true").with_neutral(FALSE),
    unsupported("n_keep", "L", GENERATING, "5").with_neutral(All),
    unsupported("n_discard", "L", GENERATING, "5").with_neutral(All),
];

const OTHER_FIELDS: &[KnownField] = &[
    // Sampling
    supported("dry_sequence_breakers", "L", GENERATING, r#"["!"]"#),
    unsupported("dry_penalty_last_n", "L", GENERATING, "5").with_neutral(UNLIMITED),
    supported("repeat_last_n", "L", GENERATING, "5"),
    supported("penalty_last_n", "L", GENERATING, "5"),
    supported("sampling_defaults", "-", GENERATING, r#""llama.cpp""#),
    supported("seed", "O V L S", GENERATING, "5"),
    supported("logit_bias", "O V L S", GENERATING, r#"{"65": 1}"#),
    supported("allowed_token_ids", "V", GENERATING, "[65]"),
    supported("bad_words", "V", GENERATING, r#"["a"]"#),
    // Its target moves with the surprise of every earlier token, which the token log does not contain.
    unsupported("mirostat", "L", GENERATING, "2").with_neutral(ZERO),
    unsupported("mirostat_mode", "L", GENERATING, "2").with_neutral(ZERO),
    unsupported("mirostat_tau", "L", GENERATING, "5").with_neutral(All),
    unsupported("mirostat_eta", "L", GENERATING, "0.1").with_neutral(All),
    unsupported("dynatemp_range", "L", GENERATING, "0.5").with_neutral(ZERO),
    unsupported("dynatemp_exponent", "L", GENERATING, "2").with_neutral(All),
    unsupported("adaptive_target", "L", GENERATING, "0.5").with_neutral(UNLIMITED),
    unsupported("adaptive_decay", "L", GENERATING, "0.5").with_neutral(All),
    unsupported("min_keep", "L", GENERATING, "5").with_neutral(These(&["0", "1"])),
    unsupported("samplers", "L", GENERATING, r#"["top_k"]"#),
    unsupported("tfs_z", "M", GENERATING, "0.5").with_neutral(ONE),
    unsupported("penalize_nl", "L", GENERATING, "false").with_neutral(TRUE),
    unsupported("penalize_newline", "M", GENERATING, "false").with_neutral(TRUE),
    unsupported("options", "M", HTTP, r#"{"num_ctx": 1}"#).with_neutral(Empty),
    unsupported("logits_processors", "V", GENERATING, r#"["a"]"#).with_neutral(Empty),
    unsupported("custom_logit_processor", "S", GENERATING, r#""a""#).with_neutral(Empty),
    unsupported("custom_params", "S", GENERATING, r#"{"a": 1}"#).with_neutral(Empty),
    supported("use_beam_search", "V", BOTH, "true"),
    unsupported("use_beam_search", "V", &[Responses, Messages, Infer], "true").with_neutral(FALSE),
    supported("length_penalty", "V", BOTH, "1"),
    unsupported("length_penalty", "V", &[Responses, Messages, Infer], "2").with_neutral(ONE),
    supported("early_stopping", "V", BOTH, "false"),
    unsupported("early_stopping", "V", &[Responses, Messages, Infer], "true").with_neutral(FALSE),
    unsupported("watermarking", "V", GENERATING, "true").with_neutral(FALSE),
    unsupported("lora", "L", GENERATING, r#"[{"id": 0, "scale": 1}]"#).with_neutral(Empty),
    unsupported("lora_path", "S", GENERATING, r#""a""#).with_neutral(Empty),
    unsupported("vllm_xargs", "V", GENERATING, r#"{"a": 1}"#).with_neutral(Empty),
    supported("prediction", "O", BOTH, r#"{"type": "content", "content": "a"}"#),
    unsupported("prediction", "O", &[Responses, Messages], r#"{"type": "content", "content": "a"}"#).with_neutral(All),
    // Constraints
    supported("response_format", "O V L S", SHAPED, r#"{"type": "json_object"}"#),
    unsupported("response_format", "O V L S", &[Responses, Messages], r#"{"type": "json_object"}"#)
        .with_neutral(These(&[r#"{"type": "text"}"#])),
    supported("text", "O V", &[Responses], r#"{"format": {"type": "json_object"}}"#),
    supported("output_config", "A", &[Messages, CountTokens], r#"{"effort": "low"}"#),
    supported(
        "output_format",
        "A",
        &[Messages, CountTokens],
        r#"{"type": "json_schema", "schema": {"type": "object"}}"#,
    ),
    unsupported("format", "M", GENERATING, r#""json""#).with_neutral(Empty),
    supported("structured_outputs", "V", SHAPED, r#"{"regex": "a"}"#),
    unsupported("structured_outputs", "V", &[Responses, Messages], r#"{"regex": "a"}"#).with_neutral(Empty),
    supported("guided_json", "V", SHAPED, "{}"),
    unsupported("guided_json", "V", &[Responses, Messages], "{}"),
    supported("guided_regex", "V", SHAPED, r#""a""#),
    unsupported("guided_regex", "V", &[Responses, Messages], r#""a""#),
    supported("guided_choice", "V", SHAPED, r#"["a"]"#),
    unsupported("guided_choice", "V", &[Responses, Messages], r#"["a"]"#),
    supported("guided_grammar", "V", SHAPED, r#""start: \"a\"""#),
    unsupported("guided_grammar", "V", &[Responses, Messages], r#""start: \"a\"""#),
    unsupported("guided_decoding_backend", "V", GENERATING, r#""a""#).with_neutral(All),
    supported("regex", "S", SHAPED, r#""a""#),
    unsupported("regex", "S", &[Responses, Messages], r#""a""#).with_neutral(Empty),
    supported("ebnf", "S", SHAPED, r#""root ::= \"a\"""#),
    unsupported("ebnf", "S", &[Responses, Messages], r#""root ::= \"a\"""#).with_neutral(Empty),
    supported("grammar", "L", SHAPED, r#""root ::= \"a\"""#),
    unsupported("grammar", "L", &[Responses, Messages], r#""root ::= \"a\"""#).with_neutral(Empty),
    unsupported("grammar_lazy", "L", GENERATING, "true").with_neutral(FALSE),
    supported("json_schema", "L S", SHAPED, r#"{"type": "object"}"#),
    unsupported("json_schema", "L S", &[Responses, Messages], r#"{"type": "object"}"#).with_neutral(Empty),
    unsupported("verbosity", "O", HTTP, r#""low""#).with_neutral(All),
    unsupported("modalities", "O", HTTP, r#"["audio"]"#).with_neutral(These(&[r#"["text"]"#, "[]"])),
    unsupported("audio", "O", HTTP, r#"{"voice": "a"}"#).with_neutral(Empty),
    // Tools
    supported("tools", "O V L M S", &[Chat, Tokenize], r#"[{"type": "function", "function": {"name": "f"}}]"#),
    supported("tools", "A", &[Messages, CountTokens], r#"[{"name": "f", "input_schema": {"type": "object"}}]"#),
    supported("tools", "O V L", &[Responses], r#"[{"type": "function", "name": "f"}]"#),
    unsupported("tools", "O V L M S", &[Completions], r#"[{"type": "function"}]"#).with_neutral(Empty),
    supported("tool_choice", "O V L S", &[Chat, Responses, Tokenize], r#""none""#),
    unsupported("tool_choice", "O V L S", &[Completions], r#""required""#)
        .with_neutral(These(&[r#""none""#, r#""auto""#])),
    supported("tool_choice", "A", &[Messages, CountTokens], r#"{"type": "none"}"#),
    supported("parallel_tool_calls", "O V L", &[Chat, Responses, Tokenize], "false"),
    unsupported("parallel_tool_calls", "O V L", &[Completions, Messages], "false").with_neutral(All),
    unsupported("max_tool_calls", "O V", &[Responses], "1").with_neutral(All),
    supported("functions", "O", &[Chat, Tokenize], r#"[{"name": "f"}]"#),
    unsupported("functions", "O", &[Completions], r#"[{"name": "f"}]"#).with_neutral(Empty),
    supported("function_call", "O", &[Chat, Tokenize], r#""auto""#),
    unsupported("function_call", "O", &[Completions], r#"{"name": "f"}"#)
        .with_neutral(These(&[r#""none""#, r#""auto""#])),
    unsupported("parse_tool_calls", "L", &[Chat], "true").with_neutral(All),
    unsupported("web_search_options", "O", BOTH, "{}"),
    unsupported("mcp_servers", "A", &[Messages, CountTokens], r#"[{"url": "a"}]"#).with_neutral(Empty),
    // Thinking
    supported("reasoning_effort", "O V L S", &[Chat, Tokenize], r#""high""#),
    unsupported("reasoning_effort", "O V L S", &[Completions, Responses, Messages], r#""high""#)
        .with_neutral(These(&[r#""none""#])),
    supported("reasoning", "O V", &[Chat, Responses, Tokenize], r#"{"effort": "high"}"#),
    unsupported("reasoning", "O V", &[Completions, Messages], r#"{"effort": "high"}"#)
        .with_neutral(These(&[r#"{"effort": "none", "summary": null, "generate_summary": null}"#])),
    // Accepted for models that do not think.
    supported("thinking", "A", &[Chat, Tokenize], r#"{"type": "disabled"}"#),
    supported("thinking", "A", &[Messages, CountTokens], r#"{"type": "enabled", "budget_tokens": 1024}"#),
    unsupported("thinking", "A", &[Completions, Responses], r#"{"type": "enabled", "budget_tokens": 1024}"#)
        .with_neutral(These(&[r#"{"type": "disabled"}"#])),
    unsupported("think", "M", HTTP, "true").with_neutral(FALSE),
    unsupported("enable_thinking", "S", TALKS, "true"),
    supported("thinking_token_budget", "V", &[Chat, Responses, Tokenize], "0"),
    unsupported("thinking_token_budget", "V", &[Completions, Messages, Infer], "5").with_neutral(UNLIMITED),
    supported("thinking_budget_tokens", "L", &[Chat, Responses, Tokenize], "0"),
    unsupported("thinking_budget_tokens", "L", &[Completions, Messages, Infer], "5").with_neutral(UNLIMITED),
    supported("thinking_budget", "S", &[Chat, Responses, Tokenize], "0"),
    unsupported("thinking_budget", "S", &[Completions, Messages, Infer], "5").with_neutral(UNLIMITED),
    unsupported("reasoning_format", "L", HTTP, r#""deepseek""#).with_neutral(These(&[r#""none""#, r#""auto""#])),
    unsupported("thinking_forced_open", "L", HTTP, "true").with_neutral(FALSE),
    supported("include_reasoning", "V", &[Chat, Tokenize], "false"),
    unsupported("include_reasoning", "V", &[Completions, Responses, Messages], "false").with_neutral(TRUE),
    unsupported("separate_reasoning", "S", HTTP, "false").with_neutral(TRUE),
    unsupported("stream_reasoning", "S", HTTP, "true").with_neutral(All),
    // Stop conditions
    supported("max_tokens", "O A V L S", GENERATING, "5"),
    supported("max_completion_tokens", "O V L S", GENERATING, "5"),
    supported("max_output_tokens", "O V", &[Responses], "5"),
    unsupported("max_output_tokens", "O V", BOTH, "5").replaced_by("max_completion_tokens"),
    unsupported("max_new_tokens", "S", GENERATING, "5").replaced_by("max_tokens"),
    supported("n_predict", "L", GENERATING, "5"),
    unsupported("num_predict", "M", GENERATING, "5").with_neutral(UNLIMITED).replaced_by("max_tokens"),
    supported("min_tokens", "V", GENERATING, "2"),
    unsupported("min_new_tokens", "S", GENERATING, "5").with_neutral(ZERO).replaced_by("min_tokens"),
    supported("stop", "O V L S", GENERATING, r#"["a"]"#),
    supported("stop_sequences", "A", &[Messages], r#"["a"]"#),
    unsupported("stop_sequences", "A", &[Chat, Completions, Responses, Infer], r#"["a"]"#)
        .with_neutral(Empty)
        .replaced_by("stop"),
    supported("stop_token_ids", "V S", GENERATING, "[65]"),
    unsupported("stop_regex", "S", GENERATING, r#""a""#).with_neutral(Empty),
    unsupported("no_stop_trim", "S", GENERATING, "true").with_neutral(FALSE).replaced_by("include_stop_str_in_output"),
    supported("include_stop_str_in_output", "V", GENERATING, "true"),
    supported("ignore_eos", "V L S", GENERATING, "true"),
    unsupported("repetition_detection", "V", GENERATING, r#"{"max_pattern_size": 5}"#),
    unsupported("t_max_predict_ms", "L", GENERATING, "5").with_neutral(These(&["0", "-1"])).replaced_by("deadline_ms"),
    unsupported("t_max_prompt_ms", "L", GENERATING, "5").with_neutral(These(&["0", "-1"])).replaced_by("deadline_ms"),
    unsupported("n_indent", "L", GENERATING, "5").with_neutral(ZERO),
    supported("deadline_ms", "-", QUEUED, "60000"),
    // Parts of the answer
    supported("n", "O V L S", BOTH, "2"),
    unsupported("n", "O V L S", &[Responses, Messages, Infer], "2").with_neutral(ONE),
    supported("best_of", "O V", BOTH, "1"),
    unsupported("best_of", "O V", &[Responses, Messages, Infer], "2").with_neutral(ONE),
    unsupported("n_cmpl", "L", GENERATING, "2").with_neutral(ONE).replaced_by("n"),
    supported("echo", "O V", BOTH, "true"),
    unsupported("echo", "V", &[Responses, Messages, Infer], "true").with_neutral(FALSE),
    supported("logprobs", "O V L", &[Chat], "true"),
    supported("logprobs", "O V L", &[Completions], "1"),
    unsupported("logprobs", "V", &[Responses, Messages, Infer], "1").with_neutral(FALSE),
    supported("top_logprobs", "O V L", &[Chat], "1"),
    supported("top_logprobs", "O V", &[Responses], "1"),
    supported("prompt_logprobs", "V", BOTH, "1"),
    unsupported("prompt_logprobs", "V", &[Responses, Messages, Infer], "1"),
    supported("logprob_token_ids", "V", BOTH, "[65]"),
    unsupported("logprob_token_ids", "V", &[Responses, Messages, Infer], "[65]").with_neutral(These(&["[]"])),
    unsupported("logprob_start_len", "S", GENERATING, "5").with_neutral(UNLIMITED),
    unsupported("top_logprobs_num", "S", GENERATING, "5").with_neutral(ZERO).replaced_by("top_logprobs"),
    unsupported("n_probs", "L", GENERATING, "5").with_neutral(ZERO).replaced_by("logprobs"),
    unsupported("post_sampling_probs", "L", GENERATING, "true").with_neutral(FALSE),
    supported("include", "O V", &[Responses], r#"["reasoning.encrypted_content"]"#),
    supported("return_token_ids", "V", BOTH, "true"),
    unsupported("return_token_ids", "V", &[Responses, Messages, Infer], "true").with_neutral(FALSE),
    unsupported("return_tokens", "L", GENERATING, "true").with_neutral(FALSE).replaced_by("return_token_ids"),
    supported("return_tokens_as_token_ids", "V", BOTH, "true"),
    unsupported("return_tokens_as_token_ids", "V", &[Responses, Messages, Infer], "true").with_neutral(FALSE),
    unsupported("return_prompt_text", "V", GENERATING, "true").with_neutral(FALSE),
    unsupported("return_token_offsets", "V", GENERATING, "true").with_neutral(FALSE),
    unsupported("return_hidden_states", "S", GENERATING, "true").with_neutral(FALSE),
    unsupported("return_mm_kwargs", "V", GENERATING, "true").with_neutral(All),
    unsupported("routed_experts_prompt_start", "V", GENERATING, "1").with_neutral(ZERO),
    supported("skip_special_tokens", "V S", GENERATING, "false"),
    unsupported("spaces_between_special_tokens", "V S", GENERATING, "false").with_neutral(All),
    unsupported("response_fields", "L", GENERATING, r#"["content"]"#).with_neutral(Empty),
    supported("timings_per_token", "L", STREAMS, "true"),
    unsupported("timings_per_token", "L", &[Messages, Infer], "true").with_neutral(FALSE),
    supported("verbose", "L", &[Chat], "true"),
    supported("enable_response_messages", "V", &[Responses], "true"),
    supported("return_progress", "L", STREAMS, "true"),
    unsupported("return_progress", "L", &[Messages, Infer], "true").with_neutral(FALSE),
    supported("stream", "O A V L M S", HTTP, "true"),
    supported("stream_options", "O V L S", STREAMS, r#"{"include_usage": true}"#),
    unsupported("stream_interval", "V", GENERATING, "5").with_neutral(All),
    unsupported("sse_ping_interval", "L", GENERATING, "5").with_neutral(All),
    supported("certificate", "-", HTTP, "true"),
    unsupported("moderation", "O", HTTP, r#"{"model": "m"}"#),
    // Embeddings
    supported("dimensions", "O V M", &[Embeddings], "32"),
    supported("encoding_format", "O V L", &[Embeddings], r#""base64""#),
    // Pairs of texts
    supported("query", "V L", &[Rank], r#""Hi""#),
    supported("documents", "V L", &[Rank], r#"["Hi"]"#),
    supported("texts", "L", &[Rank], r#"["Hi"]"#),
    supported("top_n", "V L", &[Rank], "1"),
    supported("return_documents", "V", &[Rank], "false"),
    supported("return_text", "L", &[Rank], "true"),
    supported("raw_scores", "L", &[Rank], "true"),
    supported("use_activation", "V", &[Embeddings, Rank], "false"),
    supported("max_tokens_per_doc", "V", &[Rank], "9"),
    supported("max_tokens_per_query", "V", &[Rank], "9"),
    unsupported("instruction", "V", &[Rank], r#""Find it.""#).with_neutral(Empty),
    supported("embed_dtype", "V", &[Embeddings], r#""float16""#),
    supported("endianness", "V", &[Embeddings], r#""big""#),
    unsupported("normalize", "V", &[Embeddings], "false").with_neutral(TRUE),
    unsupported("embd_normalize", "L", &[Embeddings], "0").with_neutral(These(&["2"])),
    unsupported("padding", "V", &[Embeddings], r#""max_length""#).with_neutral(These(&[r#""do_not_pad""#])),
    supported("input_type", "V", &[Embeddings], r#""search_query""#),
    // Scheduling, session and cache
    supported("priority", "V S", QUEUED, "1"),
    unsupported("user", "O V", ALL, r#""me""#).with_neutral(All),
    unsupported("prompt_cache_key", "O V", ALL, r#""me""#).with_neutral(All),
    unsupported("session_id", "V", ALL, r#""me""#).with_neutral(All),
    unsupported("safety_identifier", "O", ALL, r#""me""#).with_neutral(All),
    unsupported("user_profile_id", "A", ALL, r#""me""#).with_neutral(All),
    unsupported("metadata", "O A V", ALL, r#"{"a": "b"}"#).with_neutral(All),
    unsupported("request_id", "V", ALL, r#""me""#).with_neutral(All),
    unsupported("rid", "S", ALL, r#""me""#).with_neutral(All),
    supported("store", "O V", &[Responses], "true"),
    unsupported("store", "O V", UNSTORED, "true").with_neutral(All),
    supported("background", "O V", &[Responses], "true"),
    unsupported("service_tier", "O A V", ALL, r#""flex""#).with_neutral(All),
    unsupported("speed", "A", ALL, r#""fast""#).with_neutral(All),
    unsupported("inference_geo", "A", HTTP, r#""us""#).with_neutral(Empty),
    unsupported("fallbacks", "A", HTTP, r#"[{"model": "a"}]"#).with_neutral(Empty),
    unsupported("diagnostics", "A", HTTP, "{}").with_neutral(All),
    unsupported("prompt_cache_retention", "O", ALL, r#""24h""#).with_neutral(All),
    unsupported("prompt_cache_options", "O", ALL, "{}").with_neutral(All),
    unsupported("cache_control", "A", ALL, r#"{"type": "ephemeral"}"#).with_neutral(All),
    unsupported("cache_prompt", "L", ALL, "false").with_neutral(All),
    unsupported("n_cache_reuse", "L", ALL, "5").with_neutral(All),
    unsupported("id_slot", "L", ALL, "1").with_neutral(All),
    unsupported("keep_alive", "M", ALL, r#""5m""#).with_neutral(All),
    supported("cache_salt", "V", QUEUED, r#""salt""#),
    supported("apart_from", "-", GENERATING, r#""a replica""#),
    supported("cache_hint", "-", GENERATING, r#""retain""#),
    unsupported("kv_transfer_params", "V", GENERATING, r#"{"a": 1}"#).with_neutral(Empty),
    unsupported("ec_transfer_params", "V", GENERATING, r#"{"a": 1}"#).with_neutral(Empty),
];
