//! The forms by their names, ours and those of vLLM's `--tool-call-parser` and `--reasoning-parser`, and by what a chat
//! template says. Flat tables: the first row that fits counts.

use crate::dialect::CallForm::{self, Framed};
use crate::dialect::ThoughtForm::{self, Marked};
use crate::styles as calls;
use crate::thoughts as marks;

/// By `--tool-call-parser`.
pub(crate) const CALLS: &[(&str, CallForm)] = &[
    ("none", CallForm::None),
    ("generic", Framed(&calls::GENERIC)),
    ("deepseek_v3", Framed(&calls::DEEPSEEK_V3)),
    ("deepseek_v31", Framed(&calls::DEEPSEEK_V31)),
    ("deepseek_v32", Framed(&calls::DEEPSEEK_V32)),
    ("functiongemma", Framed(&calls::FUNCTION_GEMMA)),
    ("gemma3", Framed(&calls::GEMMA3)),
    ("gemma4", Framed(&calls::GEMMA4)),
    ("glm45", Framed(&calls::GLM)),
    ("glm47", Framed(&calls::GLM)),
    ("gpt_oss", CallForm::Harmony),
    ("granite", Framed(&calls::GRANITE)),
    ("granite4", Framed(&calls::HERMES)),
    ("harmony", CallForm::Harmony),
    ("hermes", Framed(&calls::HERMES)),
    ("kimi_k2", Framed(&calls::KIMI)),
    ("lfm2", Framed(&calls::LFM2)),
    ("llama3_json", Framed(&calls::LLAMA_JSON)),
    ("llama4_json", Framed(&calls::LLAMA_JSON)),
    ("llama4_pythonic", Framed(&calls::LLAMA_PYTHONIC)),
    ("mimo", Framed(&calls::QWEN_XML)),
    ("minimax_m2", Framed(&calls::MINIMAX)),
    ("mistral", Framed(&calls::MISTRAL)),
    ("mistral_list", Framed(&calls::MISTRAL_LIST)),
    ("olmo3", Framed(&calls::OLMO3)),
    ("openai", CallForm::Harmony),
    ("phi4_mini_json", Framed(&calls::PHI)),
    ("pythonic", Framed(&calls::PYTHONIC)),
    ("qwen3_coder", Framed(&calls::QWEN_XML)),
    ("qwen3_xml", Framed(&calls::QWEN_XML)),
    ("seed_oss", Framed(&calls::SEED)),
    ("step3p5", Framed(&calls::QWEN_XML)),
];

/// By `--reasoning-parser`.
pub(crate) const THOUGHTS: &[(&str, ThoughtForm)] = &[
    ("none", ThoughtForm::None),
    ("think", Marked(&marks::THINK)),
    ("cohere_command3", Marked(&marks::COHERE)),
    ("deepseek_r1", Marked(&marks::THINK)),
    ("deepseek_v3", Marked(&marks::THINK)),
    ("ernie45", Marked(&marks::THINK)),
    ("gemma4", Marked(&marks::GEMMA)),
    ("glm45", Marked(&marks::THINK)),
    ("glm47", Marked(&marks::THINK)),
    ("gpt_oss", ThoughtForm::Harmony),
    ("granite", Marked(&marks::GRANITE)),
    ("harmony", ThoughtForm::Harmony),
    ("holo2", Marked(&marks::THINK)),
    ("kimi_k2", Marked(&marks::KIMI)),
    ("mimo", Marked(&marks::THINK)),
    ("minimax_m2", Marked(&marks::THINK)),
    ("mistral", Marked(&marks::MISTRAL)),
    ("nemotron_v3", Marked(&marks::THINK)),
    ("olmo3", Marked(&marks::THINK)),
    ("openai_gptoss", ThoughtForm::Harmony),
    ("qwen3", Marked(&marks::THINK)),
    ("seed_oss", Marked(&marks::SEED)),
    ("step3", Marked(&marks::THINK)),
    ("step3p5", Marked(&marks::THINK)),
];

/// By what all must stand in the template.
pub(crate) const TEMPLATE_CALLS: &[(&[&str], CallForm)] = &[
    (&["<|channel|>", "<|message|>"], CallForm::Harmony),
    (&["<|tool_calls_section_begin|>"], Framed(&calls::KIMI)),
    (&["<｜DSML｜"], Framed(&calls::DEEPSEEK_V32)),
    (&["<｜tool▁call▁begin｜>", "```json"], Framed(&calls::DEEPSEEK_V3)),
    (&["<｜tool▁call▁begin｜>"], Framed(&calls::DEEPSEEK_V31)),
    (&["<start_function_call>"], Framed(&calls::FUNCTION_GEMMA)),
    (&["<|tool_call>", "<tool_call|>"], Framed(&calls::GEMMA4)),
    (&["<arg_key>"], Framed(&calls::GLM)),
    (&["<minimax:tool_call>"], Framed(&calls::MINIMAX)),
    (&["<seed:tool_call>"], Framed(&calls::SEED)),
    (&["<function=", "<parameter="], Framed(&calls::QWEN_XML)),
    (&["[TOOL_CALLS]", "[ARGS]"], Framed(&calls::MISTRAL)),
    (&["[TOOL_CALLS]"], Framed(&calls::MISTRAL_LIST)),
    (&["<|tool_call_start|>"], Framed(&calls::LFM2)),
    (&["<function_calls>"], Framed(&calls::OLMO3)),
    (&["<tool_call>"], Framed(&calls::HERMES)),
    (&["<|tool_call|>", "<|/tool_call|>"], Framed(&calls::PHI)),
    (&["<|tool_call|>"], Framed(&calls::GRANITE)),
    (&["functools"], Framed(&calls::PHI)),
    (&["<|python_start|>", "[func_name1("], Framed(&calls::LLAMA_PYTHONIC)),
    (&["[func_name1("], Framed(&calls::PYTHONIC)),
    (&["<|python_tag|>"], Framed(&calls::LLAMA_JSON)),
    (&["<|python_start|>"], Framed(&calls::LLAMA_JSON)),
    (&["{\"name\": function name, \"parameters\":"], Framed(&calls::LLAMA_JSON)),
    (&["tool_code"], Framed(&calls::GEMMA3)),
    (&["tools"], Framed(&calls::GENERIC)),
];

pub(crate) const TEMPLATE_THOUGHTS: &[(&[&str], ThoughtForm)] = &[
    (&["<|channel|>", "<|message|>"], ThoughtForm::Harmony),
    (&["[THINK]"], Marked(&marks::MISTRAL)),
    (&["<|channel>", "<channel|>"], Marked(&marks::GEMMA)),
    (&["<seed:think>"], Marked(&marks::SEED)),
    (&["<|START_THINKING|>"], Marked(&marks::COHERE)),
    (&["Here is my thought process"], Marked(&marks::GRANITE)),
    (&["<|tool_calls_section_begin|>", "think>"], Marked(&marks::KIMI)),
    (&["think>"], Marked(&marks::THINK)),
];
