//! Reads tiktoken files: lines of a token in base64 and its rank. Such a file states neither how a text is split nor
//! the special tokens. They are those of the class that `tokenizer_config.json` names, from that class's Python code.

use crate::base64;
use crate::error::{Error, ParseError, Result};
use crate::small_files::{read_json_if_there, read_text};
use crate::tokenizer::pieces::VOCAB_MAX;
use crate::tokenizer::ranks::{RankedAddedToken, RankedVocabulary};
use crate::tokenizer::recipes::{LLAMA3, QWEN2};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// `tokenization_kimi.py`: runs of Han characters, then GPT-4o's words without Han characters.
const KIMI: &str = concat!(
    r"[\p{Han}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|",
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// What a Python class adds to a file of ranks.
struct TokenizerClass {
    name: &'static str,
    /// The Python module, if other repositories use the same class name.
    module: Option<&'static str>,
    pattern: &'static str,
    nfc: bool,
    /// The special tokens behind the ranks, in the order of their ids.
    special: &'static [&'static str],
    /// Further special tokens: their names before and behind a number.
    numbered: NumberedTokens,
    /// The special tokens before a text.
    before: &'static [&'static str],
}

enum NumberedTokens {
    None,
    /// So many, with numbers from 0.
    FromZero(&'static str, usize),
    /// So many behind the ranks, each with its id as number.
    ById(&'static str, usize),
}

const KIMI_CLASS: TokenizerClass = TokenizerClass {
    name: "TikTokenTokenizer",
    module: Some("tokenization_kimi."),
    pattern: KIMI,
    nfc: false,
    special: &[],
    numbered: NumberedTokens::ById("<|reserved_token_", 256),
    before: &[],
};

const CLASSES: [TokenizerClass; 4] = [
    KIMI_CLASS,
    // The same as transformers contains it.
    TokenizerClass { name: "Kimi2_6Tokenizer", module: None, ..KIMI_CLASS },
    TokenizerClass {
        name: "QWenTokenizer",
        module: None,
        pattern: QWEN2,
        nfc: true,
        special: &["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        numbered: NumberedTokens::FromZero("<|extra_", 205),
        before: &[],
    },
    TokenizerClass {
        name: "ChatGLM4Tokenizer",
        module: None,
        pattern: LLAMA3,
        nfc: false,
        special: &[
            "<|endoftext|>",
            "[MASK]",
            "[gMASK]",
            "[sMASK]",
            "<sop>",
            "<eop>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|observation|>",
            "<|begin_of_image|>",
            "<|end_of_image|>",
            "<|begin_of_video|>",
            "<|end_of_video|>",
        ],
        numbered: NumberedTokens::None,
        before: &["[gMASK]", "<sop>"],
    },
];

/// The folder's tiktoken file, if it has one. `tokenizer.model` is SentencePiece's name too: the class decides.
pub(super) fn find(folder: &Path) -> Result<Option<PathBuf>> {
    let named = folder.join("tiktoken.model");
    if named.exists() {
        return Ok(Some(named));
    }
    let entries = std::fs::read_dir(folder).map_err(Error::io(folder))?;
    let mut found: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    found.retain(|path| path.extension().is_some_and(|kind| kind == "tiktoken"));
    if let [first, second, ..] = &found[..] {
        let what = format!("the folder has a second tiktoken file, {}", second.display());
        return Err(Error::Malformed { path: first.clone(), what });
    }
    if let Some(only) = found.pop() {
        return Ok(Some(only));
    }
    let model = folder.join("tokenizer.model");
    if !model.exists() {
        return Ok(None);
    }
    let config = read_json_if_there(&folder.join("tokenizer_config.json"))?;
    Ok((config["tokenizer_class"] == "ChatGLM4Tokenizer").then_some(model))
}

pub(super) fn read_vocabulary(path: &Path) -> Result<RankedVocabulary> {
    let config = read_json_if_there(&path.with_file_name("tokenizer_config.json"))?;
    let class = class_of(&config).map_err(Error::with_path(path))?;
    let text = read_text(path)?;
    vocabulary_of(&text, class, &config).map_err(Error::with_path(path))
}

fn class_of(config: &Value) -> std::result::Result<&'static TokenizerClass, ParseError> {
    let Some(name) = config["tokenizer_class"].as_str() else {
        let what =
            "a tiktoken vocabulary without a tokenizer_class in tokenizer_config.json, which names its split pattern,";
        return ParseError::unsupported(what);
    };
    let in_map = match &config["auto_map"]["AutoTokenizer"] {
        Value::Array(names) => names.first().and_then(Value::as_str),
        name => name.as_str(),
    };
    let is_same = |class: &&TokenizerClass| {
        let module_fits = |module: &str| in_map.is_none_or(|path| path.contains(module));
        class.name == name && class.module.is_none_or(module_fits)
    };
    match CLASSES.iter().find(is_same) {
        Some(class) => Ok(class),
        None => ParseError::unsupported(format!(
            "a tiktoken vocabulary of the tokenizer class {}, whose split pattern is not known,",
            in_map.unwrap_or(name)
        )),
    }
}

/// Ids: `[0, n_ranks) ranks · [n_ranks, ..) special tokens`.
fn vocabulary_of(
    text: &str,
    class: &TokenizerClass,
    config: &Value,
) -> std::result::Result<RankedVocabulary, ParseError> {
    let tokens = ranked_tokens(text)?;
    let added = special_tokens(class, config, tokens.len())?;
    let mut vocabulary = RankedVocabulary::new(tokens, 0, added, class.pattern.to_owned())?;
    vocabulary.nfc = class.nfc;
    vocabulary.before = class.before.iter().filter_map(|text| vocabulary.added_id(text)).collect();
    Ok(vocabulary)
}

fn ranked_tokens(text: &str) -> std::result::Result<Vec<Vec<u8>>, ParseError> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    if lines.len() > VOCAB_MAX {
        return ParseError::malformed(format!("{} tokens: {VOCAB_MAX} are allowed", lines.len()));
    }
    let mut tokens = vec![None; lines.len()];
    for line in lines {
        let Some((token, rank)) = line.trim().split_once(' ') else {
            return ParseError::malformed(format!("the line {line:?} is not a token and a rank"));
        };
        let Some(bytes) = base64::decode(token) else {
            return ParseError::malformed(format!("the token in the line {line:?} is not base64"));
        };
        let place = rank.parse().ok().and_then(|rank: usize| tokens.get_mut(rank));
        match place {
            Some(place @ None) => *place = Some(bytes),
            Some(_) => return ParseError::malformed(format!("the line {line:?} has the rank of an earlier line")),
            None => return ParseError::malformed(format!("the line {line:?} has no rank below the number of lines")),
        }
    }
    // There are as many places as lines, so none is empty.
    Ok(tokens.into_iter().flatten().collect())
}

/// The special tokens of the class. Those that `added_tokens_decoder` lists take their places.
fn special_tokens(
    class: &TokenizerClass,
    config: &Value,
    n_ranks: usize,
) -> std::result::Result<Vec<RankedAddedToken>, ParseError> {
    let numbered: Vec<String> = match class.numbered {
        NumberedTokens::None => Vec::new(),
        NumberedTokens::FromZero(name, n) => (0..n).map(|i| format!("{name}{i}|>")).collect(),
        NumberedTokens::ById(name, n) => (n_ranks..n_ranks + n).map(|id| format!("{name}{id}|>")).collect(),
    };
    let texts = class.special.iter().map(|text| (*text).to_owned()).chain(numbered);
    let mut tokens: BTreeMap<usize, (String, bool)> = (n_ranks..).zip(texts.map(|text| (text, true))).collect();
    for (id, token) in config["added_tokens_decoder"].as_object().into_iter().flatten() {
        match (id.parse(), token["content"].as_str()) {
            (Ok(id), Some(text)) => {
                let is_special = token["special"].as_bool().unwrap_or(true);
                tokens.insert(id, (text.to_owned(), is_special));
            }
            _ => {
                let what = format!("added_tokens_decoder of tokenizer_config.json has {id:?}: {token}");
                return ParseError::malformed(what);
            }
        }
    }
    let token = |(id, (text, is_special))| RankedAddedToken { id, text, is_special };
    Ok(tokens.into_iter().map(token).collect())
}
