//! Reads `tekken.json`, Mistral's format of a byte-level vocabulary. The rules are those of mistral-common's
//! `Tekkenizer`.

use crate::base64;
use crate::error::{Error, ParseError, Result};
use crate::small_files::read_json;
use crate::tokenizer::pieces::VOCAB_MAX;
use crate::tokenizer::ranks::{RankedAddedToken, RankedVocabulary};
use serde_json::Value;
use std::path::Path;

/// The special tokens of the versions whose files list none.
const OLD_SPECIAL: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];
const OLD_VERSIONS: [&str; 4] = ["v1", "v2", "v3", "v7"];

pub(super) fn read_vocabulary(path: &Path) -> Result<RankedVocabulary> {
    vocabulary_of(&read_json(path)?).map_err(Error::with_path(path))
}

/// Ids: `[0, n_special) special tokens · [n_special, default_vocab_size) ranks`.
fn vocabulary_of(json: &Value) -> std::result::Result<RankedVocabulary, ParseError> {
    let config = &json["config"];
    let count = |key: &str| match config[key].as_u64() {
        Some(n) if n <= VOCAB_MAX as u64 => Ok(n as usize),
        _ => ParseError::malformed(format!("config.{key} is {}: it must be at most {VOCAB_MAX}", config[key])),
    };
    let (n_vocab, n_special) = (count("default_vocab_size")?, count("default_num_special_tokens")?);
    let Some(n_ranks) = n_vocab.checked_sub(n_special) else {
        return ParseError::malformed(format!("{n_special} special tokens in a vocabulary of {n_vocab}"));
    };
    let Some(pattern) = config["pattern"].as_str() else {
        return ParseError::malformed("config.pattern is not a text");
    };
    let Some(vocab) = json["vocab"].as_array().and_then(|vocab| vocab.get(..n_ranks)) else {
        return ParseError::malformed(format!(
            "the vocabulary does not have the {n_ranks} tokens of default_vocab_size"
        ));
    };
    let tokens =
        vocab.iter().enumerate().map(|(rank, token)| bytes_of(rank, token)).collect::<std::result::Result<_, _>>()?;
    let added = special_tokens(json, n_special)?;
    let mut vocabulary = RankedVocabulary::new(tokens, n_special, added, pattern.to_owned())?;
    vocabulary.before = vocabulary.added_id("<s>").into_iter().collect();
    Ok(vocabulary)
}

fn bytes_of(rank: usize, token: &Value) -> std::result::Result<Vec<u8>, ParseError> {
    if token["rank"].as_u64() != Some(rank as u64) {
        return ParseError::malformed(format!("the token with rank {rank} has the rank {} in the file", token["rank"]));
    }
    let bytes = token["token_bytes"].as_str().and_then(base64::decode);
    match bytes {
        Some(bytes) if rank >= 256 || bytes == [rank as u8] => Ok(bytes),
        Some(_) => ParseError::malformed(format!("the token with rank {rank} is not the byte 0x{rank:02X}")),
        None => ParseError::malformed(format!("the token with rank {rank} is not base64: {}", token["token_bytes"])),
    }
}

/// The listed special tokens, then unnamed ones up to the number that the file promises.
fn special_tokens(json: &Value, n_special: usize) -> std::result::Result<Vec<RankedAddedToken>, ParseError> {
    let mut texts: Vec<String> = Vec::new();
    if let Some(listed) = json["special_tokens"].as_array() {
        for (rank, token) in listed.iter().enumerate() {
            match (token["rank"].as_u64(), token["token_str"].as_str()) {
                (Some(id), Some(text)) if id == rank as u64 => texts.push(text.to_owned()),
                _ => {
                    return ParseError::malformed(format!("the special token {token} is not the one with rank {rank}"));
                }
            }
        }
    } else if json["config"]["version"].as_str().is_some_and(|version| OLD_VERSIONS.contains(&version)) {
        texts.extend(OLD_SPECIAL.map(str::to_owned));
    } else {
        return ParseError::malformed(format!("version {} must list special_tokens", json["config"]["version"]));
    }
    if texts.len() > n_special {
        return ParseError::malformed(format!(
            "{} special tokens, but default_num_special_tokens is {n_special}",
            texts.len()
        ));
    }
    texts.extend((texts.len()..n_special).map(|id| format!("<SPECIAL_{id}>")));
    Ok(texts.into_iter().enumerate().map(|(id, text)| RankedAddedToken { id, text, is_special: true }).collect())
}
