//! Tokenizers: `tokenizer.json` with changed values and pipeline parts, and a GGUF's vocabulary with changed bytes.

use super::{Scratch, reference, tokenize};
use crate::harness::{Random, Rounds, damage, mutate};
use checkpoint::{Checkpoint, Tokenizer};
use serde_json::{Value, json};

/// Parts that a pipeline may have and that are expensive or do not fit.
fn part(random: &mut Random) -> (&'static str, Value) {
    let regex = |pattern: &str| json!({ "Regex": pattern });
    let split =
        |pattern: Value| json!({ "type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false });
    let replace = |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    let growing = |n: usize| json!({ "type": "Sequence", "normalizers": vec![replace("e", "ee"); n] });
    let all = [
        ("pre_tokenizer", split(regex("(a+)+$"))),
        ("pre_tokenizer", split(regex("((\\p{L}{1,200}){1,200}){1,200}"))),
        ("pre_tokenizer", split(regex("("))),
        ("pre_tokenizer", split(regex("(?=x)|(?<!y)\\1"))),
        ("pre_tokenizer", split(regex(""))),
        ("pre_tokenizer", split(json!({ "String": "" }))),
        ("pre_tokenizer", json!({ "type": "Digits", "individual_digits": true })),
        ("pre_tokenizer", json!({ "type": "Sequence", "pretokenizers": [] })),
        ("pre_tokenizer", json!({ "type": "BertPreTokenizer" })),
        ("normalizer", growing(5)),
        ("normalizer", replace("", "x")),
        ("normalizer", json!({ "type": "Precompiled", "precompiled_charsmap": "AAAA" })),
        ("normalizer", json!({ "type": "NFKC" })),
        ("normalizer", json!({ "type": "Prepend", "prepend": "▁▁▁" })),
        ("post_processor", json!({ "type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {} })),
        ("post_processor", json!({ "type": "BertProcessing", "sep": ["x", 4_000_000_000u32], "cls": ["y", 0] })),
        ("truncation", json!({ "direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9 })),
        (
            "padding",
            json!({ "strategy": { "Fixed": 1u64 << 40 }, "direction": "Left", "pad_id": 0, "pad_type_id": 0,
            "pad_token": "<unk>", "pad_to_multiple_of": 0 }),
        ),
        ("decoder", json!({ "type": "Strip", "content": " ", "start": 1_000_000, "stop": 0 })),
    ];
    all[random.below(all.len())].clone()
}

fn read(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(reference(name)).unwrap()).unwrap()
}

/// A model around the tokenizer, which is opened only as part of one.
fn opened(scratch: &Scratch) -> Option<Tokenizer> {
    match Checkpoint::open(&scratch.0).unwrap().tokenizer() {
        Ok(tokenizer) => Some(tokenizer),
        Err(error) => {
            assert!(!error.to_string().is_empty());
            None
        }
    }
}

#[test]
fn tokenizer_json() {
    let kinds = ["tokenizers/bpe.json", "tokenizers/llama.json", "tokenizers/unigram.json", "gemma3/tokenizer.json"];
    let kinds = kinds.map(read);
    let scratch = Scratch::copy("tokenizer", &reference("llama-f32-tied"));
    let mut rounds = Rounds::of("tokenizer.json", 400);
    let mut n_opened = 0;
    while let Some(mut random) = rounds.next() {
        let mut json = kinds[random.below(kinds.len())].clone();
        for _ in 0..random.below(3) {
            // The vocabulary is most of the tree, and the part where least can be wrong.
            let place = random.one_of(&["added_tokens", "normalizer", "pre_tokenizer", "decoder", "model"]);
            mutate(&mut json[place], &mut random);
        }
        if random.one_in(2) {
            let (place, value) = part(&mut random);
            json[place] = value;
        }
        scratch.write("tokenizer.json", json.to_string().as_bytes());
        if let Some(tokenizer) = opened(&scratch) {
            n_opened += 1;
            tokenize(&tokenizer);
        }
    }
    assert!(!rounds.are_many() || (rounds.n() / 100..rounds.n() * 9 / 10).contains(&n_opened), "{n_opened} opened");
}

#[test]
fn vocabulary_of_a_gguf() {
    let fixtures = ["gguf-llama3", "gguf-phi3", "gguf-gemma3"];
    let fixtures = fixtures.map(|name| std::fs::read(reference(name).join("model.gguf")).unwrap());
    let ranges = fixtures.each_ref().map(|bytes| vocabulary(bytes));
    let scratch = Scratch::new("vocabulary");
    let mut rounds = Rounds::of("vocabulary of a GGUF", 400);
    let mut n_opened = 0;
    while let Some(mut random) = rounds.next() {
        let which = random.below(fixtures.len());
        let (mut bytes, (from, to)) = (fixtures[which].clone(), ranges[which]);
        // Keeps the length, so that what follows stays valid.
        let length = bytes.len();
        damage(&mut bytes, from, to, &mut random);
        bytes.resize(length, 0);
        let Ok(checkpoint) = Checkpoint::open(&scratch.write("model.gguf", &bytes)) else { continue };
        if let Ok(tokenizer) = checkpoint.tokenizer() {
            n_opened += 1;
            tokenize(&tokenizer);
        }
    }
    assert!(!rounds.are_many() || (rounds.n() / 100..rounds.n() * 9 / 10).contains(&n_opened), "{n_opened} opened");
}

/// The bytes from the tokenizer's first key to the first tensor's name.
fn vocabulary(bytes: &[u8]) -> (usize, usize) {
    let find = |word: &[u8]| bytes.windows(word.len()).position(|window| window == word).unwrap();
    (find(b"tokenizer.ggml."), find(b"blk.0."))
}
