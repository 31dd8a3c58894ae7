//! The forms by their names, ours and those of vLLM's `--tool-call-parser` and `--reasoning-parser`, and by what a chat
//! template says. Flat tables: the first row that fits counts.

use crate::dialect::CallForm::{self, Json};
use crate::dialect::ThoughtForm::{self, Marked};
use crate::forms::json::{JsonStyle, Written};
use crate::forms::object::Rule;
use crate::thoughts::{COHERE, GEMMA as GEMMA_THOUGHT, GRANITE as GRANITE_THOUGHT, KIMI, MISTRAL, SEED, THINK};

const HERMES: JsonStyle = JsonStyle {
    openers: &["<tool_call>"],
    closers: &["</tool_call>"],
    opened: Rule::Marked,
    is_bare: false,
    written: Written {
        separator: "\n",
        before: "<tool_call>\n",
        after: "\n</tool_call>",
        trigger: "<tool_call>",
        ..BARE
    },
};
const LLAMA: JsonStyle = JsonStyle {
    openers: &["<|python_tag|>", "<|python_start|>"],
    closers: &["<|python_end|>"],
    opened: Rule::Marked,
    is_bare: true,
    written: Written { separator: "; ", key: "parameters", ..BARE },
};
const PHI: JsonStyle = JsonStyle {
    openers: &["<|tool_call|>", "functools"],
    closers: &["<|/tool_call|>"],
    opened: Rule::Marked,
    is_bare: false,
    written: list("<|tool_call|>[", "]<|/tool_call|>"),
};
const GRANITE: JsonStyle = JsonStyle {
    openers: &["<|tool_call|>", "<tool_call>"],
    closers: &["</tool_call>"],
    opened: Rule::Marked,
    is_bare: false,
    written: list("<|tool_call|>[", "]"),
};
const GENERIC: JsonStyle = JsonStyle {
    openers: &["```json", "```tool_call"],
    closers: &["```"],
    opened: Rule::Bare,
    is_bare: true,
    written: BARE,
};

const BARE: Written =
    Written { open: "", separator: "\n", close: "", before: "", after: "", key: "arguments", trigger: "{\"name\": \"" };

const fn list(open: &'static str, close: &'static str) -> Written {
    Written { open, separator: ", ", close, trigger: open, ..BARE }
}

/// By `--tool-call-parser`.
pub(crate) const CALLS: &[(&str, CallForm)] = &[
    ("none", CallForm::None),
    ("generic", Json(&GENERIC)),
    ("hermes", Json(&HERMES)),
    ("llama3_json", Json(&LLAMA)),
    ("llama4_json", Json(&LLAMA)),
    ("phi4_mini_json", Json(&PHI)),
    ("granite", Json(&GRANITE)),
    ("granite4", Json(&HERMES)),
];

/// By `--reasoning-parser`.
pub(crate) const THOUGHTS: &[(&str, ThoughtForm)] = &[
    ("none", ThoughtForm::None),
    ("think", Marked(&THINK)),
    ("deepseek_r1", Marked(&THINK)),
    ("deepseek_v3", Marked(&THINK)),
    ("ernie45", Marked(&THINK)),
    ("gemma4", Marked(&GEMMA_THOUGHT)),
    ("glm45", Marked(&THINK)),
    ("glm47", Marked(&THINK)),
    ("granite", Marked(&GRANITE_THOUGHT)),
    ("holo2", Marked(&THINK)),
    ("kimi_k2", Marked(&KIMI)),
    ("mimo", Marked(&THINK)),
    ("minimax_m2", Marked(&THINK)),
    ("mistral", Marked(&MISTRAL)),
    ("nemotron_v3", Marked(&THINK)),
    ("olmo3", Marked(&THINK)),
    ("qwen3", Marked(&THINK)),
    ("seed_oss", Marked(&SEED)),
    ("step3", Marked(&THINK)),
    ("step3p5", Marked(&THINK)),
    ("cohere_command3", Marked(&COHERE)),
];

/// By what all must stand in the template.
pub(crate) const TEMPLATE_CALLS: &[(&[&str], CallForm)] = &[
    (&["<tool_call>"], Json(&HERMES)),
    (&["<|tool_call|>", "granite"], Json(&GRANITE)),
    (&["<|tool_call|>"], Json(&PHI)),
    (&["functools"], Json(&PHI)),
    (&["<|python_tag|>"], Json(&LLAMA)),
    (&["<|python_start|>"], Json(&LLAMA)),
    (&["tools"], Json(&GENERIC)),
];

pub(crate) const TEMPLATE_THOUGHTS: &[(&[&str], ThoughtForm)] = &[
    (&["[THINK]"], Marked(&MISTRAL)),
    (&["<|channel>", "<channel|>"], Marked(&GEMMA_THOUGHT)),
    (&["<seed:think>"], Marked(&SEED)),
    (&["<|START_THINKING|>"], Marked(&COHERE)),
    (&["Here is my thought process"], Marked(&GRANITE_THOUGHT)),
    (&["<|tool_calls_section_begin|>", "think>"], Marked(&KIMI)),
    (&["think>"], Marked(&THINK)),
];
