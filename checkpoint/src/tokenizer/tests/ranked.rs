//! Vocabularies that list tokens by rank: the ids equal those of the packages that define the formats.
//! `tests/reference/make_ranked.py` made the expectations.

use super::{assert_ids, documents, json, path};
use crate::Checkpoint;
use crate::tests::Temporary;
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
