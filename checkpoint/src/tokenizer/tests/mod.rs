//! A megabyte of mixed text through every kind of tokenizer: the ids equal those of transformers, whether the
//! vocabulary comes from a `tokenizer.json` or from a GGUF. `tests/reference/make_tokenizers.py` made the expectations.

mod ranked;
mod words;

use super::Tokenizer;
use crate::gguf::Gguf;
use crate::tests::{Meta, Random, Temporary, Writer};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

const N_DOCUMENTS: usize = 66;
const DOCUMENT_BYTES: usize = 16_000;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference/tokenizers").join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path(name)).unwrap()).unwrap()
}

/// The same documents as the script makes.
fn documents() -> Vec<String> {
    let snippets: Vec<String> = serde_json::from_value(json("corpus.json")).unwrap();
    let mut random = Random(2026);
    let document = |_| {
        let mut text = String::new();
        while text.len() < DOCUMENT_BYTES {
            let snippet = &snippets[random.below(snippets.len())];
            let n_chars = snippet.chars().count();
            let n = if random.below(4) == 0 { 1 + random.below(n_chars) } else { n_chars };
            text.extend(snippet.chars().take(n));
        }
        text
    };
    (0..N_DOCUMENTS).map(document).collect()
}

fn assert_ids(name: &str, tokenizer: &Tokenizer, documents: &[String], expected: &Value) {
    for (i, (text, expected)) in documents.iter().zip(expected["ids"].as_array().unwrap()).enumerate() {
        let ids = tokenizer.encode(text, false).unwrap_or_else(|error| panic!("{name}: {error}"));
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let digest = format!("{:x}", Sha256::digest(&bytes));
        let got = format!("{}:{}", ids.len(), &digest[..16]);
        let head = text.chars().take(60).collect::<String>();
        assert_eq!(got, expected.as_str().unwrap(), "{name}, document {i}, which begins with {head:?}");
    }
}

fn from_json(folder: &Temporary, base: &Value, form: &Value) -> crate::Result<Tokenizer> {
    let mut json = base.clone();
    for (key, value) in form["change"].as_object().unwrap() {
        json[key] = value.clone();
    }
    for (key, value) in form["model"].as_object().unwrap() {
        json["model"][key] = value.clone();
    }
    Tokenizer::from_file(&folder.write("tokenizer.json", json.to_string().as_bytes()))
}

fn from_gguf(bytes: &[u8]) -> Tokenizer {
    Tokenizer::from_gguf(&Gguf::parse(bytes).unwrap(), bytes, Path::new("t.gguf")).unwrap()
}

/// The same vocabulary as a GGUF stores it.
fn byte_level_gguf(base: &Value, pre: &str) -> Vec<u8> {
    let vocab = base["model"]["vocab"].as_object().unwrap();
    let added = base["added_tokens"].as_array().unwrap();
    let n = vocab.len() + added.iter().filter(|token| !vocab.contains_key(token["content"].as_str().unwrap())).count();
    let (mut tokens, mut kinds) = (vec![String::new(); n], vec![1; n]);
    for (text, id) in vocab {
        tokens[id.as_u64().unwrap() as usize].clone_from(text);
    }
    for token in added {
        let id = token["id"].as_u64().unwrap() as usize;
        tokens[id] = token["content"].as_str().unwrap().to_owned();
        kinds[id] = if token["special"].as_bool().unwrap() { 3 } else { 4 };
    }
    let writer = Writer::default()
        .meta("tokenizer.ggml.model", Meta::Text("gpt2"))
        .meta("tokenizer.ggml.pre", Meta::Text(pre))
        .meta("tokenizer.ggml.add_bos_token", Meta::Bool(false))
        .meta("tokenizer.ggml.tokens", Meta::Texts(tokens))
        .meta("tokenizer.ggml.token_type", Meta::I32s(kinds))
        .meta("tokenizer.ggml.merges", Meta::Texts(listed_merges(base)));
    writer.bytes()
}

/// The merges of a `tokenizer.json`, as a GGUF lists them.
fn listed_merges(base: &Value) -> Vec<String> {
    let part = |pair: &Value, i: usize| pair[i].as_str().unwrap().to_owned();
    let merges = base["model"]["merges"].as_array().unwrap();
    merges.iter().map(|pair| format!("{} {}", part(pair, 0), part(pair, 1))).collect()
}

fn from_written_json(folder: &Temporary, gguf: &[u8]) -> crate::Result<Tokenizer> {
    let json = super::json_of_gguf(&Gguf::parse(gguf).unwrap(), gguf, Path::new("t.gguf")).unwrap();
    Tokenizer::from_file(&folder.write("written.json", json.to_string().as_bytes()))
}

/// Models whose `tokenizer.json` has regexes that its reader has no automaton for, and refuses.
const ONLY_FROM_GGUF: [&str; 5] = ["deepseek-llm", "deepseek-coder", "falcon", "bloom", "viking"];

#[test]
fn byte_level_ids_are_those_of_transformers() {
    let folder = Temporary::folder("ids-bytes");
    let (base, expected, documents) = (json("bpe.json"), json("expected.json"), documents());
    assert!(documents.iter().map(String::len).sum::<usize>() > 1_000_000);
    let mut n = 0;
    for (name, form) in expected.as_object().unwrap() {
        let Some(pre) = name.strip_prefix("bpe ") else { continue };
        match from_json(&folder, &base, form) {
            Ok(tokenizer) => assert_ids(&format!("{name} from json"), &tokenizer, &documents, form),
            Err(error) => assert!(ONLY_FROM_GGUF.contains(&pre), "{name}: {error}"),
        }
        let gguf = byte_level_gguf(&base, pre);
        assert_ids(&format!("{name} from gguf"), &from_gguf(&gguf), &documents, form);
        match from_written_json(&folder, &gguf) {
            Ok(tokenizer) => assert_ids(&format!("{name} from gguf as json"), &tokenizer, &documents, form),
            Err(error) => assert!(ONLY_FROM_GGUF.contains(&pre), "{name}: {error}"),
        }
        n += 1;
    }
    assert_eq!(n, 15);
}

#[test]
fn sentence_piece_ids_are_those_of_transformers() {
    let folder = Temporary::folder("ids-pieces");
    let (base, expected, documents) = (json("llama.json"), json("expected.json"), documents());
    for name in ["llama llama", "llama mistral", "llama gemma"] {
        assert_ids(name, &from_json(&folder, &base, &expected[name]).unwrap(), &documents, &expected[name]);
    }
    let file = std::fs::read(path("llama.gguf")).unwrap();
    assert_ids("llama from gguf", &from_gguf(&file), &documents, &expected["llama llama"]);
    let written = from_written_json(&folder, &file).unwrap();
    assert_ids("llama from gguf as json", &written, &documents, &expected["llama llama"]);
    assert_eq!(written.encode("a", true).unwrap(), from_gguf(&file).encode("a", true).unwrap());
    let header = Gguf::parse(&file).unwrap();
    let texts = |key: &str| header.texts(&file, key).unwrap().unwrap().into_iter().map(str::to_owned).collect();
    let kinds = header.integers(&file, "tokenizer.ggml.token_type").unwrap().unwrap();
    let scores = header.floats(&file, "tokenizer.ggml.scores").unwrap().unwrap();
    let without_prefix = |model: &'static str| {
        Writer::default()
            .meta("tokenizer.ggml.model", Meta::Text(model))
            .meta("tokenizer.ggml.add_space_prefix", Meta::Bool(false))
            .meta("tokenizer.ggml.add_bos_token", Meta::Bool(false))
            .meta("tokenizer.ggml.tokens", Meta::Texts(texts("tokenizer.ggml.tokens")))
            .meta("tokenizer.ggml.token_type", Meta::I32s(kinds.iter().map(|kind| *kind as i32).collect()))
    };
    let scores = Meta::F32s(scores.into_iter().map(|score| score as f32).collect());
    let by_scores = without_prefix("llama").meta("tokenizer.ggml.scores", scores).bytes();
    let merges = Meta::Texts(listed_merges(&base));
    let by_list = without_prefix("gemma4").meta("tokenizer.ggml.merges", merges).bytes();
    for (name, file) in [("gemma", by_scores), ("gemma 4", by_list)] {
        assert_ids(&format!("{name} from gguf"), &from_gguf(&file), &documents, &expected["llama gemma"]);
        let written = from_written_json(&folder, &file).unwrap();
        assert_ids(&format!("{name} from gguf as json"), &written, &documents, &expected["llama gemma"]);
    }
}

#[test]
fn unigram_ids_are_those_of_transformers() {
    let folder = Temporary::folder("ids-unigram");
    let (base, expected) = (json("unigram.json"), json("expected.json"));
    let tokenizer = from_json(&folder, &base, &expected["unigram"]).unwrap();
    assert_ids("unigram", &tokenizer, &documents(), &expected["unigram"]);
}

#[test]
fn a_sentence_piece_vocabulary_from_a_gguf() {
    let file = std::fs::read(path("llama.gguf")).unwrap();
    let tokenizer = from_gguf(&file);
    let text = "naïve 漢字 😀\n\n  x\u{0}";
    let ids = tokenizer.encode(text, true).unwrap();
    assert_eq!(ids[0], 1, "such a vocabulary begins texts with its BOS");
    assert_eq!(tokenizer.decode(&ids, true), format!(" {text}"));
    assert_eq!(tokenizer.encode("<s>a", true).unwrap()[..2], tokenizer.encode("a", true).unwrap()[..2]);
    assert_eq!(tokenizer.encode("<s>a", true).unwrap(), tokenizer.encode("<s>a", false).unwrap());
    assert!(tokenizer.is_special(0) && tokenizer.is_special(1) && !tokenizer.is_special(3));
    assert_eq!(tokenizer.added_token("<tool>"), Some(3));
}

/// Bytes are flipped, cut out, doubled and moved: the result is an error or another tokenizer, and never a panic.
#[test]
fn a_damaged_vocabulary_is_an_error_or_another() {
    let folder = Temporary::folder("ids-damaged");
    let mut random = Random(9);
    let files = ["llama.gguf", "llama.json", "unigram.json", "bpe.json"].map(|name| std::fs::read(path(name)).unwrap());
    let mut n_opened = 0;
    for round in 0..120 {
        let mut bytes = files[round % files.len()].clone();
        for _ in 0..=random.below(3) {
            damage(&mut bytes, &mut random);
        }
        let opened = if round % files.len() == 0 {
            let file = Path::new("t.gguf");
            Gguf::parse(&bytes).ok().and_then(|header| Tokenizer::from_gguf(&header, &bytes, file).ok())
        } else {
            Tokenizer::from_file(&folder.write("tokenizer.json", &bytes)).ok()
        };
        if let Some(tokenizer) = opened {
            n_opened += 1;
            let ids = tokenizer.encode("hello <s> naïve 漢字 \n\n 12", true).unwrap_or_default();
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.n_vocab()));
            let _ = tokenizer.decode(&ids, false);
        }
    }
    assert!(n_opened > 0, "some damage is in a token's text");
}

fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    let (at, n) = (random.below(bytes.len() - 64), 1 + random.below(48));
    match random.below(5) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = b"[]{}\",:0-e\\"[random.below(11)],
        2 => drop(bytes.drain(at..at + n)),
        3 => bytes.extend_from_within(at..at + n),
        _ => {
            let copied = bytes[at..at + n].to_vec();
            let to = random.below(bytes.len());
            bytes.splice(to..to, copied);
        }
    }
}

#[test]
fn deep_json_is_an_error() {
    let folder = Temporary::folder("ids-deep");
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        let deep = format!("{}0{}", open.repeat(100_000), close.repeat(100_000));
        let error = Tokenizer::from_file(&folder.write("tokenizer.json", deep.as_bytes())).err().unwrap().to_string();
        assert!(error.contains("recursion limit"), "{error}");
    }
}
