//! The list of known fields, in the order in which a request is read. The code looks fields up in this flat list.

use super::Endpoint::{Chat, Completions, CountTokens, Detokenize, Embeddings, Infer, Messages, Responses, Tokenize};
use super::NeutralValues::{self, All, Empty, These};
use super::{Endpoints, KnownField};

const ALL: Endpoints = &[Chat, Completions, Responses, Messages, CountTokens, Embeddings, Tokenize, Detokenize, Infer];
/// Endpoints that generate.
const GENERATING: Endpoints = &[Chat, Completions, Responses, Messages, Infer];
/// Endpoints that generate, over HTTP.
const HTTP: Endpoints = &[Chat, Completions, Responses, Messages];
/// Endpoints that render a conversation, or whose clients may expect it.
const TALKS: Endpoints = &[Chat, Completions, Responses, Messages, CountTokens, Tokenize];
/// Endpoints that tokenize text.
const READS: Endpoints = &[Chat, Completions, Responses, Messages, CountTokens, Embeddings, Tokenize, Infer];
/// Endpoints that store nothing.
const UNSTORED: Endpoints = &[Chat, Completions, Messages, CountTokens, Embeddings, Tokenize, Detokenize, Infer];
const BOTH: Endpoints = &[Chat, Completions];
/// Endpoints that accept a structure in the format of every server.
const SHAPED: Endpoints = &[Chat, Completions, Infer];
/// Endpoints that name a model.
const NAMED: Endpoints = &[Chat, Completions, Responses, Messages, CountTokens, Embeddings, Tokenize, Detokenize];
/// Endpoints whose requests have a place in the queue and a deadline.
const QUEUED: Endpoints = &[Chat, Completions, Responses, Messages, Embeddings, Infer];
const STREAMS: Endpoints = &[Chat, Completions, Responses];

const fn done(name: &'static str, of: &'static str, on: Endpoints, meant: &'static str) -> KnownField {
    KnownField { name, of, on, is_done: true, neutral: NeutralValues::None, meant, instead: None }
}

const fn undone(name: &'static str, of: &'static str, on: Endpoints, meant: &'static str) -> KnownField {
    KnownField { is_done: false, ..done(name, of, on, meant) }
}

impl KnownField {
    const fn but(self, neutral: NeutralValues) -> KnownField {
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
pub const KNOWN_FIELDS: &[KnownField] = &[
    // The prompt
    done("model", "O A V L M S", NAMED, r#""toy""#),
    done("messages", "O A V L M S", &[Chat, Messages, CountTokens, Tokenize], r#"[{"role": "user", "content": "Hi"}]"#),
    done("prompt", "O V L M S", &[Completions, Tokenize], r#""Hi""#),
    undone("prompt", "O V", &[Responses], r#"{"id": "pmpt_1"}"#).but(Empty),
    done("input", "O V M", &[Responses, Embeddings], r#""Hi""#),
    done("tokens", "V L", &[Detokenize], "[65]"),
    done("content", "L", &[Tokenize], r#""Hi""#),
    done("instructions", "O V", &[Responses], r#""Be short.""#),
    done("system", "A", &[Messages, CountTokens], r#""Be short.""#),
    undone("system", "M", BOTH, r#""Be short.""#).but(Empty),
    undone("prompt_embeds", "V", BOTH, r#""AAAA""#).but(Empty),
    undone("images", "M", BOTH, r#"["AAAA"]"#).but(Empty),
    undone("context", "M", BOTH, "[1]").but(Empty),
    // For models that have tokens for it.
    done("suffix", "O V M S", &[Completions], r#""end""#),
    undone("input_prefix", "L", &[Completions], r#""a""#).but(Empty),
    undone("input_suffix", "L", &[Completions], r#""a""#).but(Empty),
    undone("input_extra", "L", &[Completions], r#"[{"text": "a"}]"#).but(Empty),
    done("previous_response_id", "O V", &[Responses], r#""resp_1""#),
    undone("previous_input_messages", "V", &[Responses], "[{}]").but(Empty),
    undone("previous_response", "V", &[Responses], "{}"),
    done("conversation", "O", &[Responses], r#""conv_1""#),
    undone("thread", "A", &[Messages, CountTokens], r#"{"type": "create"}"#),
    undone("container", "A", HTTP, r#""c1""#).but(Empty),
    undone("context_management", "O", &[Responses], r#"[{"type": "compaction"}]"#).but(Empty),
    undone("context_management", "A", &[Messages, CountTokens], r#"{"edits": [{"type": "clear_tool_uses_20250919"}]}"#)
        .but(These(&["{}", r#"{"edits": []}"#, r#"{"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}"#])),
    // Rendering
    done("add_generation_prompt", "V S", &[Chat, Tokenize], "false"),
    undone("add_generation_prompt", "V S", &[Responses, Messages, CountTokens], "false").but(TRUE),
    done("continue_final_message", "V S", &[Chat, Tokenize], "false"),
    undone("continue_final_message", "V S", &[Completions, Responses, Messages, CountTokens], "true").but(FALSE),
    // Only if the operator allows it.
    done("chat_template", "V", &[Chat, Tokenize], r#""{{ 1 }}""#),
    undone("chat_template", "V", &[Completions, Responses, Messages, CountTokens], r#""{{ 1 }}""#),
    undone("template", "M", TALKS, r#""{{ 1 }}""#).but(Empty),
    undone("raw", "M", TALKS, "true").but(FALSE),
    done("chat_template_kwargs", "V L S", &[Chat, Responses, Tokenize], r#"{"a": 1}"#),
    undone("chat_template_kwargs", "V L S", &[Completions, Messages, CountTokens], r#"{"a": 1}"#).but(Empty),
    done("documents", "V", &[Chat, Tokenize], r#"[{"text": "a"}]"#),
    undone("documents", "V", &[Completions, Responses, Messages, CountTokens], r#"[{"text": "a"}]"#).but(Empty),
    undone("media_io_kwargs", "V", TALKS, r#"{"image": {}}"#).but(Empty),
    undone("mm_processor_kwargs", "V", READS, r#"{"a": 1}"#).but(Empty),
    // A template writes its special tokens itself, and plain text always gets them.
    done("add_special_tokens", "V", &[Tokenize], "false"),
    undone("add_special_tokens", "V", &[Completions, Embeddings, Infer], "false").but(TRUE),
    undone("add_special_tokens", "V", &[Chat, Responses, Messages, CountTokens], "true").but(FALSE),
    done("add_special", "L", &[Tokenize], "true"),
    undone("parse_special", "L", &[Tokenize], "false").but(TRUE),
    done("with_pieces", "L", &[Tokenize], "true"),
    done("return_token_strs", "V", &[Tokenize], "true"),
    done("truncate_prompt_tokens", "V", &[Chat, Completions, Embeddings], "2"),
    undone("truncate_prompt_tokens", "V", &[Responses, Messages, CountTokens, Tokenize, Infer], "2"),
    done("truncation_side", "V", &[Chat, Completions, Embeddings], r#""left""#),
    undone("truncation_side", "V", &[Responses, Messages, CountTokens, Tokenize, Infer], r#""left""#).but(All),
    undone("truncation", "O V", &[Responses], r#""x""#).but(These(&[r#""disabled""#, r#""auto""#])),
    undone("truncate", "M", READS, "true").but(FALSE),
    undone("n_keep", "L", GENERATING, "5").but(All),
    undone("n_discard", "L", GENERATING, "5").but(All),
    // Sampling
    done("temperature", "O A V L S", GENERATING, "0.5"),
    done("top_p", "O A V L S", GENERATING, "0.5"),
    done("top_k", "A V L S", GENERATING, "5"),
    done("min_p", "V L S", GENERATING, "0.5"),
    done("typical_p", "L", GENERATING, "0.5"),
    done("top_n_sigma", "L", GENERATING, "2"),
    done("xtc_probability", "L", GENERATING, "0.5"),
    done("xtc_threshold", "L", GENERATING, "0.2"),
    done("dry_multiplier", "L", GENERATING, "0.5"),
    done("dry_base", "L", GENERATING, "2"),
    done("dry_allowed_length", "L", GENERATING, "3"),
    done("dry_sequence_breakers", "L", GENERATING, r#"["!"]"#),
    undone("dry_penalty_last_n", "L", GENERATING, "5").but(UNLIMITED),
    done("presence_penalty", "O V L S", GENERATING, "0.5"),
    done("frequency_penalty", "O V L S", GENERATING, "0.5"),
    done("repetition_penalty", "V S", GENERATING, "1.5"),
    done("repeat_penalty", "L", GENERATING, "1.5"),
    done("repeat_last_n", "L", GENERATING, "5"),
    done("penalty_last_n", "L", GENERATING, "5"),
    done("sampling_defaults", "-", GENERATING, r#""llama.cpp""#),
    done("seed", "O V L S", GENERATING, "5"),
    done("logit_bias", "O V L S", GENERATING, r#"{"65": 1}"#),
    done("allowed_token_ids", "V", GENERATING, "[65]"),
    done("bad_words", "V", GENERATING, r#"["a"]"#),
    // Its target moves with the surprise of every earlier token, which the token log does not contain.
    undone("mirostat", "L", GENERATING, "2").but(ZERO),
    undone("mirostat_mode", "L", GENERATING, "2").but(ZERO),
    undone("mirostat_tau", "L", GENERATING, "5").but(All),
    undone("mirostat_eta", "L", GENERATING, "0.1").but(All),
    undone("dynatemp_range", "L", GENERATING, "0.5").but(ZERO),
    undone("dynatemp_exponent", "L", GENERATING, "2").but(All),
    undone("adaptive_target", "L", GENERATING, "0.5").but(UNLIMITED),
    undone("adaptive_decay", "L", GENERATING, "0.5").but(All),
    undone("min_keep", "L", GENERATING, "5").but(These(&["0", "1"])),
    undone("samplers", "L", GENERATING, r#"["top_k"]"#),
    undone("tfs_z", "M", GENERATING, "0.5").but(ONE),
    undone("penalize_nl", "L", GENERATING, "false").but(TRUE),
    undone("penalize_newline", "M", GENERATING, "false").but(TRUE),
    undone("options", "M", HTTP, r#"{"num_ctx": 1}"#).but(Empty),
    undone("logits_processors", "V", GENERATING, r#"["a"]"#).but(Empty),
    undone("custom_logit_processor", "S", GENERATING, r#""a""#).but(Empty),
    undone("custom_params", "S", GENERATING, r#"{"a": 1}"#).but(Empty),
    done("use_beam_search", "V", BOTH, "true"),
    undone("use_beam_search", "V", &[Responses, Messages, Infer], "true").but(FALSE),
    done("length_penalty", "V", BOTH, "1"),
    undone("length_penalty", "V", &[Responses, Messages, Infer], "2").but(ONE),
    done("early_stopping", "V", BOTH, "false"),
    undone("early_stopping", "V", &[Responses, Messages, Infer], "true").but(FALSE),
    undone("watermarking", "V", GENERATING, "true").but(FALSE),
    undone("lora", "L", GENERATING, r#"[{"id": 0, "scale": 1}]"#).but(Empty),
    undone("lora_path", "S", GENERATING, r#""a""#).but(Empty),
    undone("vllm_xargs", "V", GENERATING, r#"{"a": 1}"#).but(Empty),
    done("prediction", "O", BOTH, r#"{"type": "content", "content": "a"}"#),
    undone("prediction", "O", &[Responses, Messages], r#"{"type": "content", "content": "a"}"#).but(All),
    // Constraints
    done("response_format", "O V L S", SHAPED, r#"{"type": "json_object"}"#),
    undone("response_format", "O V L S", &[Responses, Messages], r#"{"type": "json_object"}"#)
        .but(These(&[r#"{"type": "text"}"#])),
    done("text", "O V", &[Responses], r#"{"format": {"type": "json_object"}}"#),
    done("output_config", "A", &[Messages, CountTokens], r#"{"effort": "low"}"#),
    done("output_format", "A", &[Messages, CountTokens], r#"{"type": "json_schema", "schema": {"type": "object"}}"#),
    undone("format", "M", GENERATING, r#""json""#).but(Empty),
    done("structured_outputs", "V", SHAPED, r#"{"regex": "a"}"#),
    undone("structured_outputs", "V", &[Responses, Messages], r#"{"regex": "a"}"#).but(Empty),
    done("guided_json", "V", SHAPED, "{}"),
    undone("guided_json", "V", &[Responses, Messages], "{}"),
    done("guided_regex", "V", SHAPED, r#""a""#),
    undone("guided_regex", "V", &[Responses, Messages], r#""a""#),
    done("guided_choice", "V", SHAPED, r#"["a"]"#),
    undone("guided_choice", "V", &[Responses, Messages], r#"["a"]"#),
    done("guided_grammar", "V", SHAPED, r#""start: \"a\"""#),
    undone("guided_grammar", "V", &[Responses, Messages], r#""start: \"a\"""#),
    undone("guided_decoding_backend", "V", GENERATING, r#""a""#).but(All),
    done("regex", "S", SHAPED, r#""a""#),
    undone("regex", "S", &[Responses, Messages], r#""a""#).but(Empty),
    done("ebnf", "S", SHAPED, r#""root ::= \"a\"""#),
    undone("ebnf", "S", &[Responses, Messages], r#""root ::= \"a\"""#).but(Empty),
    done("grammar", "L", SHAPED, r#""root ::= \"a\"""#),
    undone("grammar", "L", &[Responses, Messages], r#""root ::= \"a\"""#).but(Empty),
    undone("grammar_lazy", "L", GENERATING, "true").but(FALSE),
    done("json_schema", "L S", SHAPED, r#"{"type": "object"}"#),
    undone("json_schema", "L S", &[Responses, Messages], r#"{"type": "object"}"#).but(Empty),
    undone("verbosity", "O", HTTP, r#""low""#).but(All),
    undone("modalities", "O", HTTP, r#"["audio"]"#).but(These(&[r#"["text"]"#, "[]"])),
    undone("audio", "O", HTTP, r#"{"voice": "a"}"#).but(Empty),
    // Tools
    done("tools", "O V L M S", &[Chat, Tokenize], r#"[{"type": "function", "function": {"name": "f"}}]"#),
    done("tools", "A", &[Messages, CountTokens], r#"[{"name": "f", "input_schema": {"type": "object"}}]"#),
    done("tools", "O V L", &[Responses], r#"[{"type": "function", "name": "f"}]"#),
    undone("tools", "O V L M S", &[Completions], r#"[{"type": "function"}]"#).but(Empty),
    done("tool_choice", "O V L S", &[Chat, Responses, Tokenize], r#""none""#),
    undone("tool_choice", "O V L S", &[Completions], r#""required""#).but(These(&[r#""none""#, r#""auto""#])),
    done("tool_choice", "A", &[Messages, CountTokens], r#"{"type": "none"}"#),
    done("parallel_tool_calls", "O V L", &[Chat, Responses, Tokenize], "false"),
    undone("parallel_tool_calls", "O V L", &[Completions, Messages], "false").but(All),
    undone("max_tool_calls", "O V", &[Responses], "1").but(All),
    done("functions", "O", &[Chat, Tokenize], r#"[{"name": "f"}]"#),
    undone("functions", "O", &[Completions], r#"[{"name": "f"}]"#).but(Empty),
    done("function_call", "O", &[Chat, Tokenize], r#""auto""#),
    undone("function_call", "O", &[Completions], r#"{"name": "f"}"#).but(These(&[r#""none""#, r#""auto""#])),
    undone("parse_tool_calls", "L", &[Chat], "true").but(All),
    undone("web_search_options", "O", BOTH, "{}"),
    undone("mcp_servers", "A", &[Messages, CountTokens], r#"[{"url": "a"}]"#).but(Empty),
    // Thinking
    done("reasoning_effort", "O V L S", &[Chat, Tokenize], r#""high""#),
    undone("reasoning_effort", "O V L S", &[Completions, Responses, Messages], r#""high""#).but(These(&[r#""none""#])),
    done("reasoning", "O V", &[Chat, Responses, Tokenize], r#"{"effort": "high"}"#),
    undone("reasoning", "O V", &[Completions, Messages], r#"{"effort": "high"}"#)
        .but(These(&[r#"{"effort": "none", "summary": null, "generate_summary": null}"#])),
    // Accepted for models that do not think.
    done("thinking", "A", &[Chat, Tokenize], r#"{"type": "disabled"}"#),
    done("thinking", "A", &[Messages, CountTokens], r#"{"type": "enabled", "budget_tokens": 1024}"#),
    undone("thinking", "A", &[Completions, Responses], r#"{"type": "enabled", "budget_tokens": 1024}"#)
        .but(These(&[r#"{"type": "disabled"}"#])),
    undone("think", "M", HTTP, "true").but(FALSE),
    undone("enable_thinking", "S", TALKS, "true"),
    done("thinking_token_budget", "V", &[Chat, Responses, Tokenize], "0"),
    undone("thinking_token_budget", "V", &[Completions, Messages, Infer], "5").but(UNLIMITED),
    done("thinking_budget_tokens", "L", &[Chat, Responses, Tokenize], "0"),
    undone("thinking_budget_tokens", "L", &[Completions, Messages, Infer], "5").but(UNLIMITED),
    done("thinking_budget", "S", &[Chat, Responses, Tokenize], "0"),
    undone("thinking_budget", "S", &[Completions, Messages, Infer], "5").but(UNLIMITED),
    undone("reasoning_format", "L", HTTP, r#""deepseek""#).but(These(&[r#""none""#, r#""auto""#])),
    undone("thinking_forced_open", "L", HTTP, "true").but(FALSE),
    done("include_reasoning", "V", &[Chat, Tokenize], "false"),
    undone("include_reasoning", "V", &[Completions, Responses, Messages], "false").but(TRUE),
    undone("separate_reasoning", "S", HTTP, "false").but(TRUE),
    undone("stream_reasoning", "S", HTTP, "true").but(All),
    // Stop conditions
    done("max_tokens", "O A V L S", GENERATING, "5"),
    done("max_completion_tokens", "O V L S", GENERATING, "5"),
    done("max_output_tokens", "O V", &[Responses], "5"),
    undone("max_output_tokens", "O V", BOTH, "5").replaced_by("max_completion_tokens"),
    undone("max_new_tokens", "S", GENERATING, "5").replaced_by("max_tokens"),
    done("n_predict", "L", GENERATING, "5"),
    undone("num_predict", "M", GENERATING, "5").but(UNLIMITED).replaced_by("max_tokens"),
    done("min_tokens", "V", GENERATING, "2"),
    undone("min_new_tokens", "S", GENERATING, "5").but(ZERO).replaced_by("min_tokens"),
    done("stop", "O V L S", GENERATING, r#"["a"]"#),
    done("stop_sequences", "A", &[Messages], r#"["a"]"#),
    undone("stop_sequences", "A", &[Chat, Completions, Responses, Infer], r#"["a"]"#).but(Empty).replaced_by("stop"),
    done("stop_token_ids", "V S", GENERATING, "[65]"),
    undone("stop_regex", "S", GENERATING, r#""a""#).but(Empty),
    undone("no_stop_trim", "S", GENERATING, "true").but(FALSE).replaced_by("include_stop_str_in_output"),
    done("include_stop_str_in_output", "V", GENERATING, "true"),
    done("ignore_eos", "V L S", GENERATING, "true"),
    undone("repetition_detection", "V", GENERATING, r#"{"max_pattern_size": 5}"#),
    undone("t_max_predict_ms", "L", GENERATING, "5").but(These(&["0", "-1"])).replaced_by("deadline_ms"),
    undone("t_max_prompt_ms", "L", GENERATING, "5").but(These(&["0", "-1"])).replaced_by("deadline_ms"),
    undone("n_indent", "L", GENERATING, "5").but(ZERO),
    done("deadline_ms", "-", QUEUED, "60000"),
    // Parts of the answer
    done("n", "O V L S", BOTH, "2"),
    undone("n", "O V L S", &[Responses, Messages, Infer], "2").but(ONE),
    done("best_of", "O V", BOTH, "1"),
    undone("best_of", "O V", &[Responses, Messages, Infer], "2").but(ONE),
    undone("n_cmpl", "L", GENERATING, "2").but(ONE).replaced_by("n"),
    done("echo", "O V", BOTH, "true"),
    undone("echo", "V", &[Responses, Messages, Infer], "true").but(FALSE),
    done("logprobs", "O V L", &[Chat], "true"),
    done("logprobs", "O V L", &[Completions], "1"),
    undone("logprobs", "V", &[Responses, Messages, Infer], "1").but(FALSE),
    done("top_logprobs", "O V L", &[Chat], "1"),
    done("top_logprobs", "O V", &[Responses], "1"),
    done("prompt_logprobs", "V", BOTH, "1"),
    undone("prompt_logprobs", "V", &[Responses, Messages, Infer], "1"),
    done("logprob_token_ids", "V", BOTH, "[65]"),
    undone("logprob_token_ids", "V", &[Responses, Messages, Infer], "[65]").but(These(&["[]"])),
    undone("logprob_start_len", "S", GENERATING, "5").but(UNLIMITED),
    undone("top_logprobs_num", "S", GENERATING, "5").but(ZERO).replaced_by("top_logprobs"),
    undone("n_probs", "L", GENERATING, "5").but(ZERO).replaced_by("logprobs"),
    undone("post_sampling_probs", "L", GENERATING, "true").but(FALSE),
    done("include", "O V", &[Responses], r#"["reasoning.encrypted_content"]"#),
    done("return_token_ids", "V", BOTH, "true"),
    undone("return_token_ids", "V", &[Responses, Messages, Infer], "true").but(FALSE),
    undone("return_tokens", "L", GENERATING, "true").but(FALSE).replaced_by("return_token_ids"),
    done("return_tokens_as_token_ids", "V", BOTH, "true"),
    undone("return_tokens_as_token_ids", "V", &[Responses, Messages, Infer], "true").but(FALSE),
    undone("return_prompt_text", "V", GENERATING, "true").but(FALSE),
    undone("return_token_offsets", "V", GENERATING, "true").but(FALSE),
    undone("return_hidden_states", "S", GENERATING, "true").but(FALSE),
    undone("return_mm_kwargs", "V", GENERATING, "true").but(All),
    undone("routed_experts_prompt_start", "V", GENERATING, "1").but(ZERO),
    done("skip_special_tokens", "V S", GENERATING, "false"),
    undone("spaces_between_special_tokens", "V S", GENERATING, "false").but(All),
    undone("response_fields", "L", GENERATING, r#"["content"]"#).but(Empty),
    done("timings_per_token", "L", STREAMS, "true"),
    undone("timings_per_token", "L", &[Messages, Infer], "true").but(FALSE),
    done("verbose", "L", &[Chat], "true"),
    done("enable_response_messages", "V", &[Responses], "true"),
    done("return_progress", "L", STREAMS, "true"),
    undone("return_progress", "L", &[Messages, Infer], "true").but(FALSE),
    done("stream", "O A V L M S", HTTP, "true"),
    done("stream_options", "O V L S", STREAMS, r#"{"include_usage": true}"#),
    undone("stream_interval", "V", GENERATING, "5").but(All),
    undone("sse_ping_interval", "L", GENERATING, "5").but(All),
    done("certificate", "-", HTTP, "true"),
    undone("moderation", "O", HTTP, r#"{"model": "m"}"#),
    // Embeddings
    done("dimensions", "O V M", &[Embeddings], "32"),
    done("encoding_format", "O V L", &[Embeddings], r#""base64""#),
    undone("embed_dtype", "V", &[Embeddings], r#""float16""#).but(These(&[r#""float32""#])),
    undone("endianness", "V", &[Embeddings], r#""big""#).but(These(&[r#""little""#, r#""native""#])),
    undone("normalize", "V", &[Embeddings], "false").but(TRUE),
    undone("use_activation", "V", &[Embeddings], "false").but(TRUE),
    undone("embd_normalize", "L", &[Embeddings], "0").but(These(&["2"])),
    undone("padding", "V", &[Embeddings], r#""max_length""#).but(These(&[r#""do_not_pad""#])),
    undone("input_type", "V", &[Embeddings], r#""query""#).but(Empty),
    // Scheduling, session and cache
    done("priority", "V S", QUEUED, "1"),
    undone("user", "O V", ALL, r#""me""#).but(All),
    undone("prompt_cache_key", "O V", ALL, r#""me""#).but(All),
    undone("session_id", "V", ALL, r#""me""#).but(All),
    undone("safety_identifier", "O", ALL, r#""me""#).but(All),
    undone("user_profile_id", "A", ALL, r#""me""#).but(All),
    undone("metadata", "O A V", ALL, r#"{"a": "b"}"#).but(All),
    undone("request_id", "V", ALL, r#""me""#).but(All),
    undone("rid", "S", ALL, r#""me""#).but(All),
    done("store", "O V", &[Responses], "true"),
    undone("store", "O V", UNSTORED, "true").but(All),
    done("background", "O V", &[Responses], "true"),
    undone("service_tier", "O A V", ALL, r#""flex""#).but(All),
    undone("speed", "A", ALL, r#""fast""#).but(All),
    undone("inference_geo", "A", HTTP, r#""us""#).but(Empty),
    undone("fallbacks", "A", HTTP, r#"[{"model": "a"}]"#).but(Empty),
    undone("diagnostics", "A", HTTP, "{}").but(All),
    undone("prompt_cache_retention", "O", ALL, r#""24h""#).but(All),
    undone("prompt_cache_options", "O", ALL, "{}").but(All),
    undone("cache_control", "A", ALL, r#"{"type": "ephemeral"}"#).but(All),
    undone("cache_prompt", "L", ALL, "false").but(All),
    undone("n_cache_reuse", "L", ALL, "5").but(All),
    undone("id_slot", "L", ALL, "1").but(All),
    undone("keep_alive", "M", ALL, r#""5m""#).but(All),
    done("cache_salt", "V", QUEUED, r#""salt""#),
    undone("kv_transfer_params", "V", GENERATING, r#"{"a": 1}"#).but(Empty),
    undone("ec_transfer_params", "V", GENERATING, r#"{"a": 1}"#).but(Empty),
];
