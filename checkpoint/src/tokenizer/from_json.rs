//! Makes a tokenizer from `tokenizer.json`. The `tokenizers` crate reads the format; here are the checks that a file
//! has to pass first, and the table of bytes.

use crate::base64;
use crate::error::{Error, ParseError, Result};
use crate::small_files::read_json;
use crate::tokenizer::charsmap;
use crate::tokenizer::parts::TokenizerParts;
use crate::tokenizer::pieces::{INSIDE_OF_WORD, Spelling, TokenBytes, VOCAB_MAX, missing_bytes};
use serde_json::Value;
use std::collections::HashSet;
use std::path::Path;
use types::{Token, Tokens};

pub(super) fn read_parts(path: &Path) -> Result<TokenizerParts> {
    let mut json = read_json(path)?;
    let failed = |what: String| Error::Malformed { path: path.to_owned(), what };
    tokenizers::canonicalize_value(&mut json).map_err(|error| failed(error.to_string()))?;
    check_merges(&json).map_err(Error::with_path(path))?;
    check_charsmaps(&json["normalizer"]).map_err(Error::with_path(path))?;
    let table = JsonVocabulary::read(&json).map_err(Error::with_path(path))?;
    add_missing_bytes(&mut json, table.pieces.len());
    let pipeline = tokenizers::from_json(&json.to_string()).map_err(|error| failed(error.to_string()))?;
    for (text, id) in &table.added {
        if pipeline.get_added_vocabulary().token_to_id(text) != Some(*id) {
            return Err(failed(format!("the added token {text:?} cannot have the id {id}")));
        }
    }
    let (before, after) = (Tokens::new(), Tokens::new());
    Ok(TokenizerParts { pipeline, pieces: table.pieces, before, after, doubles_end: false })
}

/// Gives a byte-level vocabulary the bytes that it lacks, with ids from `n_vocab` on.
fn add_missing_bytes(json: &mut Value, n_vocab: usize) {
    let model = &mut json["model"];
    if model["byte_level"] == true
        && let Some(vocab) = model["vocab"].as_object_mut()
    {
        let missing = missing_bytes(|text| vocab.contains_key(text));
        vocab.extend(missing.into_iter().zip(n_vocab..).map(|(text, id)| (text, id.into())));
    }
}

struct JsonVocabulary {
    pieces: TokenBytes,
    added: Vec<(String, Token)>,
}

impl JsonVocabulary {
    fn read(json: &Value) -> std::result::Result<JsonVocabulary, ParseError> {
        let spelling = spelling(json)?;
        let mut tokens: Vec<(Vec<u8>, bool)> = Vec::new();
        let mut put = |id: u64, bytes: Vec<u8>, special: bool| {
            let Some(id) = usize::try_from(id).ok().filter(|id| *id < VOCAB_MAX) else {
                return ParseError::malformed(format!("a token has the id {id}: ids must be below {VOCAB_MAX}"));
            };
            if tokens.len() <= id {
                tokens.resize(id + 1, (Vec::new(), false));
            }
            tokens[id] = (bytes, special);
            Ok(())
        };
        for (text, id) in model_tokens(&json["model"])? {
            put(id, spelling.bytes(text), false)?;
        }
        let mut added = Vec::new();
        for token in json["added_tokens"].as_array().into_iter().flatten() {
            let (Some(id), Some(text)) = (token["id"].as_u64(), token["content"].as_str()) else {
                return ParseError::malformed(format!("the added token {token} has no id or no content"));
            };
            put(id, text.as_bytes().to_vec(), token["special"].as_bool().unwrap_or(false))?;
            if !text.is_empty() && !token["normalized"].as_bool().unwrap_or(false) {
                added.push((text.to_owned(), id as Token));
            }
        }
        Ok(JsonVocabulary { pieces: TokenBytes::collect(spelling, tokens.into_iter())?, added })
    }
}

/// Texts and ids: from an object, or from a list of pairs of text and score.
fn model_tokens(model: &Value) -> std::result::Result<Vec<(&str, u64)>, ParseError> {
    match &model["vocab"] {
        Value::Object(vocab) => vocab
            .iter()
            .map(|(text, id)| match id.as_u64() {
                Some(id) => Ok((text.as_str(), id)),
                None => ParseError::malformed(format!("the token {text:?} has the id {id}")),
            })
            .collect(),
        Value::Array(vocab) => (0..)
            .zip(vocab)
            .map(|(id, pair)| match pair[0].as_str() {
                Some(text) => Ok((text, id)),
                None => ParseError::malformed(format!("the token {id} has no text")),
            })
            .collect(),
        _ => ParseError::malformed("the tokenizer has no vocabulary"),
    }
}

fn spelling(json: &Value) -> std::result::Result<Spelling, ParseError> {
    let model = &json["model"];
    if model["byte_level"].as_bool() == Some(true) {
        return Ok(Spelling::ByteLevel);
    }
    match model["type"].as_str() {
        Some("WordPiece") => Ok(Spelling::WordPiece),
        Some("BPE" | "Unigram") => decoder_is_sentence_piece(&json["decoder"]).map(|()| Spelling::SentencePiece),
        Some(other) => ParseError::unsupported(format!("the tokenizer model {other}")),
        None => ParseError::malformed("the tokenizer's model has no type"),
    }
}

/// Checks that decoding does exactly what the table of bytes does.
fn decoder_is_sentence_piece(decoder: &Value) -> std::result::Result<(), ParseError> {
    match decoder["type"].as_str() {
        Some("Sequence") => {
            decoder["decoders"].as_array().into_iter().flatten().try_for_each(decoder_is_sentence_piece)
        }
        Some("ByteFallback" | "Fuse" | "Strip") => Ok(()),
        Some("Replace") if decoder["pattern"]["String"] == "▁" && decoder["content"] == " " => Ok(()),
        Some("Metaspace") if decoder["replacement"] == "▁" => Ok(()),
        Some(other) => ParseError::unsupported(format!("the decoder {other} of the tokenizer")),
        None => ParseError::unsupported("a tokenizer without a decoder"),
    }
}

/// Checks the maps of characters, in a sequence too: their reader trusts them.
fn check_charsmaps(normalizer: &Value) -> std::result::Result<(), ParseError> {
    if normalizer["type"] == "Precompiled" {
        let Some(map) = normalizer["precompiled_charsmap"].as_str().and_then(base64::decode) else {
            return ParseError::malformed("precompiled_charsmap is not base64");
        };
        charsmap::check(&map)?;
    }
    normalizer["normalizers"].as_array().into_iter().flatten().try_for_each(check_charsmaps)
}

/// Checks that parts inside of words are marked as the table of bytes expects.
fn check_word_piece(model: &Value) -> std::result::Result<(), ParseError> {
    match model["continuing_subword_prefix"].as_str() {
        None | Some(INSIDE_OF_WORD) => Ok(()),
        Some(other) => ParseError::unsupported(format!("WordPiece with the mark {other:?} inside of words")),
    }
}

/// Checks that each merge joins two tokens to a token and no affix is added, which merging relies on.
fn check_merges(json: &Value) -> std::result::Result<(), ParseError> {
    let model = &json["model"];
    // WordPiece joins nothing.
    if model["type"] == "WordPiece" {
        return check_word_piece(model);
    }
    for affix in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model[affix].as_str().is_some_and(|affix| !affix.is_empty()) {
            return ParseError::unsupported(format!("a tokenizer with {affix}"));
        }
    }
    let (Some(vocab), Some(merges)) = (model["vocab"].as_object(), model["merges"].as_array()) else {
        return Ok(());
    };
    let known: HashSet<&str> = vocab.keys().map(String::as_str).collect();
    for merge in merges {
        let (Some(left), Some(right)) = (merge[0].as_str(), merge[1].as_str()) else {
            return ParseError::malformed(format!("the merge {merge} is not two tokens"));
        };
        let joined = format!("{left}{right}");
        if let Some(missing) = [left, right, &joined].into_iter().find(|token| !known.contains(token)) {
            return ParseError::malformed(format!(
                "the merge {merge} needs {missing:?}, which is not in the vocabulary"
            ));
        }
    }
    Ok(())
}
