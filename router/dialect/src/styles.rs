//! The markers of each family around its calls: one constant for each, which `names.rs` lists.

use crate::forms::frame::CallKind::{Function, Headed, Object, Xml};
use crate::forms::frame::{FenceMarkers, FrameMarkup, FrameStyle};
use crate::forms::function::{FUNCTION_GEMMA as GEMMA_FUNCTION, GEMMA4 as GEMMA4_FUNCTION, PYTHON};
use crate::forms::headed::{self, DEEPSEEK_V3 as V3_CALL, DEEPSEEK_V31 as V31_CALL, KIMI as KIMI_CALL};
use crate::forms::xml::{self, DEEPSEEK_V32 as V32_CALL};

const BARE: FrameMarkup = FrameMarkup {
    open: "",
    separator: "\n",
    close: "",
    before: "",
    after: "",
    key: "arguments",
    trigger: "{\"name\": \"",
};

/// All calls within one pair of markers.
const fn around_all_calls(
    open: &'static str,
    separator: &'static str,
    close: &'static str,
    trigger: &'static str,
) -> FrameMarkup {
    FrameMarkup { open, separator, close, trigger, ..BARE }
}

/// Each call within a pair of markers.
const fn around_each_call(before: &'static str, after: &'static str, trigger: &'static str) -> FrameMarkup {
    FrameMarkup { before, after, trigger, ..BARE }
}

const JSON_FENCE: FenceMarkers = FenceMarkers { open: "```json", close: &["```"] };
const CALL_FENCE: FenceMarkers = FenceMarkers { open: "```tool_call", close: &["```"] };
const CODE_FENCE: FenceMarkers = FenceMarkers { open: "```\n", close: &["```"] };
/// Qwen2.5-Coder uses the tag in which its template lists the tools.
const TOOLS_FENCE: FenceMarkers = FenceMarkers { open: "<tools>", close: &["</tools>"] };

const MARKED: FrameStyle =
    FrameStyle { openers: &[], closers: &[], fences: &[], is_bare: false, kinds: &[Object], written: BARE };
/// The same for calls that are objects, which models also write without markers.
const OBJECTS: FrameStyle = FrameStyle { fences: &[JSON_FENCE, CALL_FENCE, CODE_FENCE, TOOLS_FENCE], ..MARKED };

pub(crate) const HERMES: FrameStyle = FrameStyle {
    openers: &["<tool_call>"],
    closers: &["</tool_call>"],
    written: around_each_call("<tool_call>\n", "\n</tool_call>", "<tool_call>"),
    ..OBJECTS
};
pub(crate) const LLAMA_JSON: FrameStyle = FrameStyle {
    openers: &["<|python_tag|>", "<|python_start|>"],
    closers: &["<|python_end|>"],
    is_bare: true,
    written: FrameMarkup { separator: "; ", key: "parameters", ..BARE },
    ..OBJECTS
};
pub(crate) const PHI: FrameStyle = FrameStyle {
    openers: &["<|tool_call|>", "functools"],
    closers: &["<|/tool_call|>"],
    written: around_all_calls("<|tool_call|>[", ", ", "]<|/tool_call|>", "<|tool_call|>"),
    ..OBJECTS
};
pub(crate) const PHI_FUNCTOOLS: FrameStyle =
    FrameStyle { written: around_all_calls("functools[", ", ", "]", "functools["), ..PHI };
pub(crate) const NEMOTRON: FrameStyle = FrameStyle {
    openers: &["<TOOLCALL>"],
    closers: &["</TOOLCALL>"],
    written: around_all_calls("<TOOLCALL>[", ", ", "]</TOOLCALL>", "<TOOLCALL>"),
    ..OBJECTS
};
pub(crate) const GRANITE: FrameStyle = FrameStyle {
    openers: &["<|tool_call|>", "<tool_call>"],
    closers: &["</tool_call>"],
    written: around_all_calls("<|tool_call|>[", ", ", "]", "<|tool_call|>"),
    ..OBJECTS
};
pub(crate) const TOOL_CALLS: FrameStyle = FrameStyle {
    openers: &["<tool_calls>"],
    closers: &["</tool_calls>"],
    written: around_all_calls("<tool_calls>[", ", ", "]</tool_calls>", "<tool_calls>"),
    ..OBJECTS
};
pub(crate) const MINIMAX_M1: FrameStyle =
    FrameStyle { written: around_all_calls("<tool_calls>\n", "\n", "\n</tool_calls>", "<tool_calls>"), ..TOOL_CALLS };
pub(crate) const LONGCAT: FrameStyle = FrameStyle {
    openers: &["<longcat_tool_call>"],
    closers: &["</longcat_tool_call>"],
    written: around_each_call("<longcat_tool_call>\n", "\n</longcat_tool_call>", "<longcat_tool_call>"),
    ..OBJECTS
};
pub(crate) const GRANITE_20B: FrameStyle = FrameStyle {
    openers: &["<function_call>"],
    written: around_each_call("<function_call> ", "", "<function_call>"),
    ..OBJECTS
};
pub(crate) const INTERNLM: FrameStyle = FrameStyle {
    openers: &["<|action_start|><|plugin|>"],
    closers: &["<|action_end|>"],
    written: FrameMarkup {
        key: "parameters",
        ..around_each_call("<|action_start|><|plugin|>\n", "<|action_end|>", "<|action_start|><|plugin|>")
    },
    ..OBJECTS
};
pub(crate) const GENERIC: FrameStyle = FrameStyle {
    closers: &["```", "</tool_call>"],
    fences: &[
        JSON_FENCE,
        CALL_FENCE,
        CODE_FENCE,
        TOOLS_FENCE,
        FenceMarkers { open: "<tool_call>", close: &["</tool_call>"] },
    ],
    is_bare: true,
    ..MARKED
};
pub(crate) const GEMMA3: FrameStyle = FrameStyle {
    openers: &[],
    closers: &["```"],
    fences: &[FenceMarkers { open: "```tool_code", close: &["```"] }, JSON_FENCE, CALL_FENCE],
    is_bare: true,
    kinds: &[Function(&PYTHON), Object],
    written: around_all_calls("```tool_code\n", "\n", "\n```", "```tool_code"),
};
pub(crate) const PYTHONIC: FrameStyle =
    FrameStyle { is_bare: true, kinds: &[Function(&PYTHON)], written: around_all_calls("[", ", ", "]", ""), ..MARKED };
pub(crate) const LLAMA_PYTHONIC: FrameStyle = FrameStyle {
    openers: &["<|python_start|>", "<|python_tag|>"],
    closers: &["<|python_end|>"],
    is_bare: true,
    kinds: &[Function(&PYTHON)],
    written: around_all_calls("<|python_start|>[", ", ", "]<|python_end|>", "<|python_start|>"),
    ..MARKED
};
pub(crate) const LFM2: FrameStyle = FrameStyle {
    openers: &["<|tool_call_start|>"],
    closers: &["<|tool_call_end|>"],
    kinds: &[Function(&PYTHON), Object],
    written: around_all_calls("<|tool_call_start|>[", ", ", "]<|tool_call_end|>", "<|tool_call_start|>"),
    ..MARKED
};
pub(crate) const OLMO3: FrameStyle = FrameStyle {
    openers: &["<function_calls>"],
    closers: &["</function_calls>"],
    kinds: &[Function(&PYTHON)],
    written: around_all_calls("<function_calls>\n", "\n", "\n</function_calls>", "<function_calls>"),
    ..MARKED
};
pub(crate) const FUNCTION_GEMMA: FrameStyle = FrameStyle {
    openers: &["<start_function_call>"],
    // After its calls the model requests their results.
    closers: &["<end_function_call>", "<start_function_response>"],
    kinds: &[Function(&GEMMA_FUNCTION)],
    written: FrameMarkup {
        separator: "",
        ..around_each_call("<start_function_call>", "<end_function_call>", "<start_function_call>")
    },
    ..MARKED
};
pub(crate) const GEMMA4: FrameStyle = FrameStyle {
    openers: &["<|tool_call>"],
    closers: &["<tool_call|>", "<|tool_response>"],
    kinds: &[Function(&GEMMA4_FUNCTION)],
    written: FrameMarkup { separator: "", ..around_each_call("<|tool_call>", "<tool_call|>", "<|tool_call>") },
    ..MARKED
};
pub(crate) const QWEN_XML: FrameStyle = FrameStyle {
    openers: &["<tool_call>", "<function="],
    closers: &["</tool_call>"],
    kinds: &[Xml(&xml::QWEN)],
    written: around_each_call("<tool_call>\n", "\n</tool_call>", "<tool_call>"),
    ..MARKED
};
pub(crate) const SEED: FrameStyle = FrameStyle {
    openers: &["<seed:tool_call>"],
    closers: &["</seed:tool_call>"],
    kinds: &[Xml(&xml::SEED)],
    written: around_each_call("<seed:tool_call>\n", "\n</seed:tool_call>", "<seed:tool_call>"),
    ..MARKED
};
pub(crate) const GLM: FrameStyle = FrameStyle {
    openers: &["<tool_call>"],
    closers: &["</tool_call>"],
    kinds: &[Xml(&xml::GLM)],
    written: around_each_call("<tool_call>", "</tool_call>", "<tool_call>"),
    ..MARKED
};
pub(crate) const MINIMAX: FrameStyle = FrameStyle {
    openers: &["<minimax:tool_call>"],
    closers: &["</minimax:tool_call>"],
    kinds: &[Xml(&xml::MINIMAX)],
    written: around_all_calls("<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>", "<minimax:tool_call>"),
    ..MARKED
};
pub(crate) const DEEPSEEK_V32: FrameStyle = FrameStyle {
    openers: &["<｜DSML｜function_calls>"],
    closers: &["</｜DSML｜function_calls>"],
    kinds: &[Xml(&V32_CALL)],
    written: around_all_calls(
        "<｜DSML｜function_calls>\n",
        "\n",
        "\n</｜DSML｜function_calls>",
        "<｜DSML｜function_calls>",
    ),
    ..MARKED
};
pub(crate) const MISTRAL: FrameStyle = FrameStyle {
    openers: &["[TOOL_CALLS]"],
    kinds: &[Headed(&headed::MISTRAL), Object],
    written: FrameMarkup { separator: "", ..around_each_call("[TOOL_CALLS]", "", "[TOOL_CALLS]") },
    ..MARKED
};
pub(crate) const MISTRAL_LIST: FrameStyle = FrameStyle {
    kinds: &[Object, Headed(&headed::MISTRAL)],
    written: around_all_calls("[TOOL_CALLS][", ", ", "]", "[TOOL_CALLS]"),
    ..MISTRAL
};
pub(crate) const KIMI: FrameStyle = FrameStyle {
    openers: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    closers: &["<|tool_calls_section_end|>"],
    kinds: &[Headed(&KIMI_CALL)],
    written: around_all_calls(
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|>",
    ),
    ..MARKED
};
pub(crate) const DEEPSEEK_V31: FrameStyle = FrameStyle {
    openers: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    closers: &["<｜tool▁calls▁end｜>"],
    kinds: &[Headed(&V31_CALL)],
    written: around_all_calls("<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜>"),
    ..MARKED
};
pub(crate) const DEEPSEEK_V3: FrameStyle = FrameStyle {
    kinds: &[Headed(&V3_CALL)],
    written: around_all_calls("<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜>"),
    ..DEEPSEEK_V31
};
