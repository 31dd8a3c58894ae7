//! The error messages of an invalid command line: the role that a flag belongs to, the equivalent of another server's
//! flag, and plain words in place of a parser's. Does not change how valid lines are parsed.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;

/// The roles of a cluster. A flag given to the wrong role is attributed to the first of these that has it.
const ROLES: [&str; 4] = ["router", "coordinator", "worker", "serve"];

/// Flags of other servers that users try, with the alternative here. Flags with the same meaning are aliases instead.
const ELSEWHERE: [(&str, &str); 16] = [
    ("kv-offloading-size", ON_DISK),
    ("kv-offloading-backend", ON_DISK),
    ("swap-space", ON_DISK),
    ("slot-save-path", "--kv-disk DIR:BYTES keeps the cache of all prompts, without a request to save it"),
    ("dtype", "weights keep the dtype of their file; --activations and --kv-dtype set the others"),
    ("quantization", "weights keep the dtype of their file: give a quantized model, such as org/name:Q4_K_M"),
    ("quantize", "weights keep the dtype of their file: give a quantized model, such as org/name:Q4_K_M"),
    ("n-gpu-layers", "--device cuda computes all layers on GPUs"),
    ("draft-min", AUTO_DECIDES),
    ("draft-n-min", AUTO_DECIDES),
    ("spec-draft-n-min", AUTO_DECIDES),
    ("draft-p-min", AUTO_DECIDES),
    ("spec-draft-p-min", AUTO_DECIDES),
    ("spec-default", "--speculation auto is the default on a CPU"),
    ("draft-p-split", "drafts are one sequence of tokens, not a tree"),
    ("enforce-eager", "tokens are the same with CUDA graphs; --cuda-graphs off turns them off"),
];

const ON_DISK: &str = "--kv-host BYTES keeps more of a GPU's KV cache in host memory, --kv-disk DIR:BYTES on disk";

const AUTO_DECIDES: &str = "--speculation auto drafts as many tokens as make an answer faster; --draft-max limits them";

/// Messages of value parsers, and their replacements for users.
const PLAIN: [(&str, &str); 6] = [
    ("invalid digit found in string", "is not a whole number"),
    ("number too large to fit in target type", "is too large"),
    ("cannot parse integer from empty string", "is not a whole number"),
    ("invalid float literal", "is not a number"),
    ("invalid IP address syntax", "is not an IP address: give 127.0.0.1, or 0.0.0.0 for all of this machine"),
    ("invalid socket address syntax", "is not an address: give one such as 127.0.0.1:8000"),
];

/// Returns the same error with a message that helps the user to correct the line.
pub fn explained(error: clap::Error, lockstep: &mut clap::Command, words: &[OsString]) -> clap::Error {
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else { return error };
    let message = match error.kind() {
        ErrorKind::UnknownArgument => unknown(argument, lockstep, words),
        ErrorKind::ValueValidation => wrong_value(&error, argument),
        _ => None,
    };
    let kind = error.kind();
    message.map_or(error, |text| lockstep.error(kind, text))
}

fn unknown(argument: &str, lockstep: &clap::Command, words: &[OsString]) -> Option<String> {
    let flag = argument.split('=').next().and_then(|flag| flag.strip_prefix("--"))?;
    if let Some(message) = of_another_role(flag, lockstep, words) {
        return Some(message);
    }
    let (_, instead) = ELSEWHERE.iter().find(|(name, _)| *name == flag)?;
    Some(format!("--{flag} is not supported: {instead}"))
}

/// Returns a message if another role has the flag: each role accepts only the flags that it uses.
fn of_another_role(flag: &str, lockstep: &clap::Command, words: &[OsString]) -> Option<String> {
    let role = words.get(1).and_then(|word| word.to_str()).filter(|role| ROLES.contains(role))?;
    let takes_flag = |other: &&str| {
        let mut arguments = lockstep.find_subcommand(other).into_iter().flat_map(|role| role.get_arguments());
        arguments.any(|argument| {
            let aliases = argument.get_all_aliases().unwrap_or_default();
            argument.get_long() == Some(flag) || aliases.contains(&flag)
        })
    };
    let other = ROLES.into_iter().find(takes_flag)?;
    Some(format!("`lockstep {role}` has no --{flag}: it is for `lockstep {other}`"))
}

fn wrong_value(error: &clap::Error, argument: &str) -> Option<String> {
    let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue) else { return None };
    let why = std::error::Error::source(error)?.to_string();
    let (_, explanation) = PLAIN.iter().find(|(of_parser, _)| *of_parser == why)?;
    Some(format!("{argument}: {value:?} {explanation}"))
}
