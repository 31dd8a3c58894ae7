//! Vocabularies that list tokens by rank: the ids equal those of the packages that define the formats.
//! `tests/reference/make_ranked.py` made the expectations.

use super::{assert_ids, damage, documents, json, path};
use crate::Checkpoint;
use crate::tests::{Random, Temporary};
use crate::tokenizer::{Tokenizer, json_of_folder};
use serde_json::{Value, json};
use std::path::Path;

fn tokens_of(text: &Value) -> Vec<u32> {
    text.as_str().unwrap().split(' ').map(|id| id.parse().unwrap()).collect()
}

/// The vocabulary written as a `tokenizer.json`.
fn from_written_json(folder: &Path, to: &Temporary) -> Tokenizer {
    let written = json_of_folder(folder).unwrap().unwrap();
    Tokenizer::from_file(&to.write("tokenizer.json", written.to_string().as_bytes())).unwrap()
}

#[test]
fn tekken_ids_are_those_of_mistral_common() {
    let (folder, written) = (Temporary::folder("tekken"), Temporary::folder("tekken-written"));
    folder.write("tekken.json", &std::fs::read(path("tekken.json")).unwrap());
    let (expected, documents) = (&json("ranked.json")["tekken"], documents());
    let tokenizer = Tokenizer::from_folder(&folder.0).unwrap();
    assert_eq!(tokenizer.n_vocab(), 980);
    for (name, tokenizer) in [("tekken", tokenizer), ("tekken as json", from_written_json(&folder.0, &written))] {
        assert_ids(name, &tokenizer, &documents, expected);
        assert_eq!(tokenizer.encode("naïve 漢字", true).unwrap(), tokens_of(&expected["with_bos"]), "{name}");
        let special: Vec<String> = (0..20).map(|id| tokenizer.decode(&[id], false)).collect();
        assert_eq!(special.join(" "), expected["special"], "{name}");
        assert!((0..20).all(|id| tokenizer.is_special(id)) && !tokenizer.is_special(20), "{name}");
        let text = &documents[0];
        assert_eq!(tokenizer.decode(&tokenizer.encode(text, false).unwrap(), false), *text, "{name}");
    }
}

#[test]
fn a_model_with_tekken_alone_has_a_tokenizer_and_a_bundle() {
    let folder = Temporary::folder("tekken-model");
    for name in ["config.json", "model.safetensors"] {
        folder.write(name, &std::fs::read(path("../qwen2").join(name)).unwrap());
    }
    folder.write("tekken.json", &std::fs::read(path("tekken.json")).unwrap());
    let checkpoint = Checkpoint::open(&folder.0).unwrap();
    assert_eq!(checkpoint.tokenizer().unwrap().added_token("[INST]"), Some(3));
    assert!(checkpoint.text_bundle().unwrap().zip.windows(14).any(|name| name == b"tokenizer.json"));
    folder.write("tokenizer.json", &std::fs::read(path("bpe.json")).unwrap());
    assert_eq!(checkpoint.tokenizer().unwrap().added_token("[INST]"), None, "tokenizer.json goes first");
}

#[test]
fn old_tekken_files_list_no_special_tokens() {
    let folder = Temporary::folder("tekken-old");
    let mut file = json("tekken.json");
    file.as_object_mut().unwrap().remove("special_tokens");
    file["config"]["version"] = "v3".into();
    folder.write("tekken.json", file.to_string().as_bytes());
    let tokenizer = Tokenizer::from_folder(&folder.0).unwrap();
    assert_eq!((tokenizer.added_token("<pad>"), tokenizer.added_token("[TOOL_CONTENT]")), (Some(11), Some(19)));
}

#[test]
fn damaged_tekken_files_are_errors() {
    let folder = Temporary::folder("tekken-bad");
    let check = |at: &str, value: Value, expect: &str| {
        let mut file = json("tekken.json");
        *file.pointer_mut(at).unwrap() = value;
        folder.write("tekken.json", file.to_string().as_bytes());
        let error = Tokenizer::from_folder(&folder.0).err().unwrap().to_string();
        assert!(error.contains(expect) && error.contains("tekken.json"), "{at}: {error}");
    };
    check("/vocab/300/token_bytes", json!("a?=="), "rank 300 is not base64");
    check("/vocab/300/token_bytes", json!(7), "rank 300 is not base64");
    check("/vocab/300/token_bytes", json!(""), "rank 300 has 0 bytes");
    check("/vocab/300/token_bytes", json!("AAAA".repeat(1000)), "rank 300 has 3000 bytes");
    check("/vocab/300/rank", json!(299), "rank 300 has the rank 299");
    check("/vocab/300/rank", json!(-1), "rank 300 has the rank -1");
    check("/vocab/300/token_bytes", json!("QQ=="), "the same bytes");
    check("/vocab/65/token_bytes", json!("Qg=="), "is not the byte 0x41");
    check("/vocab", json!([]), "does not have the 960 tokens");
    check("/vocab", json!("x"), "does not have the 960 tokens");
    check("/config/default_vocab_size", json!(100_000_000_000_u64), "must be at most");
    check("/config/default_vocab_size", json!(100), "no token for the byte 0x50");
    check("/config/default_vocab_size", json!(10), "20 special tokens in a vocabulary of 10");
    check("/config/default_num_special_tokens", json!(3), "default_num_special_tokens is 3");
    check("/config/pattern", json!("(?P<"), "Parsing error");
    check("/config/pattern", Value::Null, "config.pattern");
    check("/special_tokens/2/rank", json!(3), "not the one with rank 2");
    check("/special_tokens/2/token_str", json!("<s>"), "two special tokens have the text \"<s>\"");
    check("/special_tokens/2/token_str", json!(""), "or it is empty");
    check("/special_tokens", Value::Null, "must list special_tokens");
}

/// A folder with a tiktoken file and the config of its class.
fn tiktoken_folder(name: &str, file: &str, config: &Value) -> Temporary {
    let folder = Temporary::folder(name);
    folder.write(file, &std::fs::read(path("small.tiktoken")).unwrap());
    folder.write("tokenizer_config.json", config.to_string().as_bytes());
    folder
}

#[test]
fn tiktoken_ids_are_those_of_the_package() {
    let (expected, documents) = (json("ranked.json"), documents());
    let kimi = json!({
        "tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": expected["added_tokens_decoder"],
        "auto_map": { "AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null] },
    });
    for (file, config) in [
        ("tiktoken.model", kimi),
        ("qwen.tiktoken", json!({ "tokenizer_class": "QWenTokenizer" })),
        ("tokenizer.model", json!({ "tokenizer_class": "ChatGLM4Tokenizer" })),
    ] {
        let class = config["tokenizer_class"].as_str().unwrap();
        let folder = tiktoken_folder("tiktoken", file, &config);
        let expected = &expected[class];
        let tokenizer = Tokenizer::from_folder(&folder.0).unwrap();
        assert_ids(class, &tokenizer, &documents, expected);
        let last = tokenizer.n_vocab() as u32 - 1;
        assert_eq!(u64::from(last) + 1, expected["n_vocab"].as_u64().unwrap(), "{class}");
        assert_eq!(tokenizer.decode(&[last], false), expected["last"], "{class}");
        if class == "ChatGLM4Tokenizer" {
            assert_eq!(tokenizer.encode("", true).unwrap(), [1502, 1504]);
        }
        let written = Temporary::folder("tiktoken-written");
        // The reader of tokenizer.json has an automaton for each of these patterns.
        assert_ids(class, &from_written_json(&folder.0, &written), &documents, expected);
    }
}

#[test]
fn tokens_of_a_tiktoken_config_may_be_text() {
    let added = &json("ranked.json")["added_tokens_decoder"];
    let config = json!({ "tokenizer_class": "Kimi2_6Tokenizer", "added_tokens_decoder": added });
    let tokenizer = Tokenizer::from_folder(&tiktoken_folder("tiktoken-text", "tiktoken.model", &config).0).unwrap();
    let tool = tokenizer.added_token("<tool>").unwrap();
    assert!(!tokenizer.is_special(tool) && tokenizer.is_special(tokenizer.added_token("[BOS]").unwrap()));
}

#[test]
fn an_unknown_split_pattern_is_refused_by_the_name_of_the_file() {
    let check = |config: &Value, expect: &str| {
        let folder = tiktoken_folder("tiktoken-unknown", "x.tiktoken", config);
        let error = Tokenizer::from_folder(&folder.0).err().unwrap().to_string();
        assert!(error.contains("x.tiktoken") && error.contains(expect), "{error}");
    };
    check(&json!({ "tokenizer_class": "Mine" }), "the tokenizer class Mine, whose split pattern is not known");
    check(&json!({}), "without a tokenizer_class");
    let other =
        json!({ "tokenizer_class": "TikTokenTokenizer", "auto_map": { "AutoTokenizer": ["my.TikTokenTokenizer"] } });
    check(&other, "the tokenizer class my.TikTokenTokenizer, whose split pattern is not known");
}

#[test]
fn damaged_tiktoken_files_are_errors() {
    let config = json!({ "tokenizer_class": "QWenTokenizer" });
    let folder = tiktoken_folder("tiktoken-bad", "qwen.tiktoken", &config);
    let whole = std::fs::read_to_string(path("small.tiktoken")).unwrap();
    let check = |from: &str, to: &str, expect: &str| {
        assert!(whole.contains(from));
        folder.write("qwen.tiktoken", whole.replacen(from, to, 1).as_bytes());
        let error = Tokenizer::from_folder(&folder.0).err().unwrap().to_string();
        assert!(error.contains(expect) && error.contains("qwen.tiktoken"), "{error}");
    };
    check("QQ== 65\n", "QQ= 65\n", "is not base64");
    check("QQ== 65\n", "QQ==\n", "is not a token and a rank");
    check("QQ== 65\n", "QQ== 66\n", "has the rank of an earlier line");
    check("QQ== 65\n", "QQ== 99999999999999999999\n", "has no rank below the number of lines");
    check("QQ== 65\n", "QQ== -1\n", "has no rank below the number of lines");
    check("QQ== 65\n", "QUFBQUFBQUE= 65\n", "no token for the byte 0x41");
    check("QQ== 65\n", "", "has no rank below the number of lines");
    check(&whole, "", "no token for the byte 0x00");
    let with_added = |added: Value, expect: &str| {
        let config = json!({ "tokenizer_class": "QWenTokenizer", "added_tokens_decoder": added });
        let folder = tiktoken_folder("tiktoken-added", "qwen.tiktoken", &config);
        let error = Tokenizer::from_folder(&folder.0).err().unwrap().to_string();
        assert!(error.contains(expect), "{error}");
    };
    with_added(json!({ "7": { "content": "<x>" } }), "\"<x>\" cannot have the id 7");
    with_added(json!({ "99999999": { "content": "<x>" } }), "cannot have the id 99999999");
    with_added(json!({ "x": { "content": "<x>" } }), "added_tokens_decoder");
    with_added(json!({ "1600": { "content": "<|im_end|>" } }), "two special tokens have the text");
}

/// The result of random damage is an error or another tokenizer, and never a panic.
#[test]
fn a_damaged_list_of_ranks_is_an_error_or_another() {
    let mut random = Random(5);
    let config = json!({ "tokenizer_class": "QWenTokenizer" });
    let (tekken, tiktoken) = (Temporary::folder("ranks-damaged"), tiktoken_folder("ranks", "qwen.tiktoken", &config));
    let files = [(&tekken, "tekken.json", "tekken.json"), (&tiktoken, "small.tiktoken", "qwen.tiktoken")];
    for round in 0..60 {
        let (folder, from, to) = files[round % 2];
        let mut bytes = std::fs::read(path(from)).unwrap();
        damage(&mut bytes, &mut random);
        folder.write(to, &bytes);
        if let Ok(tokenizer) = Tokenizer::from_folder(&folder.0) {
            let ids = tokenizer.encode("hello <s> naïve 漢字 \n\n 12", true).unwrap();
            assert!(ids.iter().all(|id| (*id as usize) < tokenizer.n_vocab()));
        }
    }
}
