//! WordPiece and Unigram vocabularies of GGUFs: the ids equal those of Hugging Face's tokenizers.
//! `tests/reference/make_words.py` made the expectations.

use super::{assert_ids, damage, documents, from_gguf, json, path};
use crate::gguf::Gguf;
use crate::tests::{Meta, Random, Temporary, Writer};
use crate::tokenizer::{Tokenizer, json_of_gguf};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::Path;
use tokenizers::pipeline::{EncodeOptions, Override, PipelineToken, PipelineTokenizer};

fn file(name: &str) -> Vec<u8> {
    std::fs::read(path(name)).unwrap()
}

fn assert_with_special(name: &str, tokenizer: &Tokenizer, expected: &Value) {
    let ids = tokenizer.encode("Naïve 漢字", true).unwrap();
    let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
    assert_eq!(ids.join(" "), expected["with_special"], "{name}");
}

/// The metadata of a file, to be written with changes.
fn rewritten(bytes: &[u8], model: &str) -> Writer {
    let gguf = Gguf::parse(bytes).unwrap();
    let texts = gguf.texts(bytes, "tokenizer.ggml.tokens").unwrap().unwrap().into_iter().map(str::to_owned).collect();
    let integers = |key: &str| gguf.integers(bytes, key).unwrap().unwrap_or_default().into_iter().map(|n| n as i32);
    let writer = Writer::default()
        .meta("tokenizer.ggml.tokens", Meta::Texts(texts))
        .meta("tokenizer.ggml.token_type", Meta::I32s(integers("tokenizer.ggml.token_type").collect()))
        .meta("tokenizer.ggml.model", Meta::Text(if model == "bert" { "bert" } else { "t5" }));
    let with_id = |writer: Writer, name: &str| {
        let key = format!("tokenizer.ggml.{name}_token_id");
        match gguf.unsigned(&key).unwrap() {
            Some(id) => writer.meta(&key, Meta::U32(id as u32)),
            None => writer,
        }
    };
    let writer = ["bos", "eos", "seperator", "unknown"].into_iter().fold(writer, with_id);
    if model == "bert" {
        return writer;
    }
    let scores = gguf.floats(bytes, "tokenizer.ggml.scores").unwrap().unwrap();
    let charsmap = integers("tokenizer.ggml.precompiled_charsmap").map(|byte| i32::from(byte as u8)).collect();
    writer
        .meta("tokenizer.ggml.scores", Meta::F32s(scores.into_iter().map(|score| score as f32).collect()))
        .meta("tokenizer.ggml.precompiled_charsmap", Meta::I32s(charsmap))
        .meta("tokenizer.ggml.add_space_prefix", Meta::Bool(true))
        .meta("tokenizer.ggml.remove_extra_whitespaces", Meta::Bool(true))
}

/// What a reader of `tokenizer.json` makes of the written vocabulary.
fn pipeline_of_written(gguf: &[u8]) -> PipelineTokenizer {
    let mut written = json_of_gguf(&Gguf::parse(gguf).unwrap(), gguf, Path::new("t.gguf")).unwrap();
    tokenizers::canonicalize_value(&mut written).unwrap();
    tokenizers::from_json(&written.to_string()).unwrap()
}

fn assert_written(name: &str, gguf: &[u8], documents: &[String], expected: &Value) {
    let pipeline = pipeline_of_written(gguf);
    let options = |add_special_tokens| EncodeOptions {
        add_special_tokens,
        encode_special_tokens: false,
        padding: Override::Off,
        truncation: Override::Off,
    };
    for (text, expected) in documents.iter().zip(expected["ids"].as_array().unwrap()) {
        let mut ids = Vec::new();
        pipeline.encode_into(text, &options(false), &mut ids).unwrap();
        let bytes: Vec<u8> = PipelineToken::cast_slice(&ids).iter().flat_map(|id| id.to_le_bytes()).collect();
        let digest = format!("{}:{}", ids.len(), &format!("{:x}", Sha256::digest(&bytes))[..16]);
        assert_eq!(digest, expected.as_str().unwrap(), "{name} as json");
    }
    let mut ids = Vec::new();
    pipeline.encode_into("Naïve 漢字", &options(true), &mut ids).unwrap();
    let ids: Vec<String> = PipelineToken::cast_slice(&ids).iter().map(u32::to_string).collect();
    assert_eq!(ids.join(" "), expected["with_special"], "{name} as json");
}

#[test]
fn word_piece_ids_are_those_of_tokenizers() {
    let (expected, documents, bytes) = (json("words.json"), documents(), file("bert.gguf"));
    let cased = rewritten(&bytes, "bert").meta("tokenizer.ggml.normalizer.lowercase", Meta::Bool(false)).bytes();
    for (name, bytes) in [("bert", bytes), ("bert cased", cased)] {
        let tokenizer = from_gguf(&bytes);
        assert_ids(name, &tokenizer, &documents, &expected[name]);
        assert_with_special(name, &tokenizer, &expected[name]);
        assert_written(name, &bytes, &documents, &expected[name]);
    }
}

#[test]
fn word_piece_tokens_are_words_and_parts_of_words() {
    let tokenizer = from_gguf(&file("bert.gguf"));
    let ids = tokenizer.encode("the quick brown fox <tool>", true).unwrap();
    assert_eq!(tokenizer.decode(&ids, true), " the quick brown fox<tool>");
    assert!(tokenizer.is_special(ids[0]) && !tokenizer.is_special(tokenizer.added_token("<tool>").unwrap()));
}

#[test]
fn unigram_ids_from_a_gguf_are_those_of_tokenizers() {
    let (expected, documents, bytes) = (json("words.json"), documents(), file("t5.gguf"));
    let with_blanks =
        rewritten(&bytes, "t5").meta("tokenizer.ggml.remove_extra_whitespaces", Meta::Bool(false)).bytes();
    for (name, bytes) in [("t5", bytes), ("t5 with blanks", with_blanks)] {
        let tokenizer = from_gguf(&bytes);
        assert_ids(name, &tokenizer, &documents, &expected[name]);
        assert_with_special(name, &tokenizer, &expected[name]);
        assert_written(name, &bytes, &documents, &expected[name]);
    }
}

#[test]
fn damaged_word_vocabularies_are_errors() {
    let check = |writer: Writer, expect: &str| {
        let bytes = writer.bytes();
        let opened = Tokenizer::from_gguf(&Gguf::parse(&bytes).unwrap(), &bytes, Path::new("t.gguf"));
        let error = opened.err().unwrap().to_string();
        assert!(error.contains(expect) && error.contains("t.gguf"), "{error}");
    };
    let bert = || rewritten(&file("bert.gguf"), "bert");
    check(bert().meta("tokenizer.ggml.bos_token_id", Meta::U32(99_999)), "bos_token_id is 99999, which is not a token");
    check(bert().meta("tokenizer.ggml.seperator_token_id", Meta::U32(99_999)), "which is not a token");
    check(bert().meta("tokenizer.ggml.unknown_token_id", Meta::U32(u32::MAX)), "which is not a token");
    check(bert().meta("tokenizer.ggml.tokens", Meta::Texts(Vec::new())), "has 0 tokens");
    let t5 = || rewritten(&file("t5.gguf"), "t5");
    check(t5().meta("tokenizer.ggml.unknown_token_id", Meta::U32(99_999)), "which is not a token");
    check(t5().meta("tokenizer.ggml.scores", Meta::F32s(vec![1.0])), "1 scores for");
    let endless = vec![f32::NEG_INFINITY; from_gguf(&file("t5.gguf")).n_vocab()];
    check(t5().meta("tokenizer.ggml.scores", Meta::F32s(endless)), "not a finite number");
    check(t5().meta("tokenizer.ggml.add_space_prefix", Meta::Bool(false)), "without add_space_prefix");
    let charsmap = |map: Vec<i32>| t5().meta("tokenizer.ggml.precompiled_charsmap", Meta::I32s(map));
    check(charsmap(vec![256]), "is not a list of bytes");
    check(charsmap(vec![255; 64]), "leads outside of itself");
    check(charsmap(vec![8, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]), "leads outside of itself");
}

#[test]
fn a_map_of_characters_in_a_tokenizer_json_is_checked() {
    let folder = Temporary::folder("charsmap");
    let bytes = file("t5.gguf");
    let written = json_of_gguf(&Gguf::parse(&bytes).unwrap(), &bytes, Path::new("t.gguf")).unwrap();
    let open = |json: &Value| Tokenizer::from_file(&folder.write("tokenizer.json", json.to_string().as_bytes()));
    let (tokenizer, text) = (open(&written).unwrap(), "ﬁve ½ １２\t3");
    assert_eq!(tokenizer.encode(text, true).unwrap(), from_gguf(&bytes).encode(text, true).unwrap());
    for (map, expect) in [("/////w==", "leads outside of itself"), ("!", "not base64")] {
        let mut damaged = written.clone();
        let inner = serde_json::json!({ "type": "Precompiled", "precompiled_charsmap": map });
        damaged["normalizer"] = serde_json::json!({ "type": "Sequence", "normalizers": [inner] });
        let error = open(&damaged).err().unwrap().to_string();
        assert!(error.contains(expect), "{error}");
    }
}

/// The result of random damage is an error or another tokenizer, and never a panic.
#[test]
fn a_damaged_word_vocabulary_is_an_error_or_another() {
    let mut random = Random(6);
    let files = [file("bert.gguf"), file("t5.gguf")];
    let documents = documents();
    for round in 0..80 {
        let mut bytes = files[round % 2].clone();
        damage(&mut bytes, &mut random);
        let Ok(header) = Gguf::parse(&bytes) else { continue };
        if let Ok(tokenizer) = Tokenizer::from_gguf(&header, &bytes, Path::new("t.gguf")) {
            let ids = tokenizer.encode(&documents[round % 8], true).unwrap();
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.n_vocab()));
        }
    }
}
