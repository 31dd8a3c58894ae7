//! Writes the vocabulary of a GGUF, tekken.json or tiktoken file as an equivalent `tokenizer.json`, for programs that
//! read nothing else. Knows the format, and no file.

use crate::error::{Error, Result};
use crate::gguf::Gguf;
use crate::tokenizer::from_gguf::{GgufVocabulary, ModelRules};
use crate::tokenizer::ranks::RankedVocabulary;
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};
use std::path::Path;
use tokenizers::models::bpe::BpeConfig;
use types::Token;

pub(crate) fn json_of_gguf(gguf: &Gguf, bytes: &[u8], path: &Path) -> Result<Value> {
    let vocabulary = GgufVocabulary::read(gguf, bytes).map_err(Error::with_path(path))?;
    Ok(vocabulary.json())
}

impl GgufVocabulary<'_> {
    fn json(&self) -> Value {
        let added = (0..self.tokens.len()).filter(|id| self.is_added_token(*id));
        let (normalizer, pre_tokenizer, decoder, model) = match &self.model {
            ModelRules::ByteLevel { recipe, merges } => {
                let normalizer = if recipe.nfc { json!({ "type": "NFC" }) } else { Value::Null };
                // The words are cut by now; what is left is to spell their bytes.
                let mut cuts = recipe.cuts_as_json();
                cuts.push(byte_level());
                let pre_tokenizer = json!({ "type": "Sequence", "pretokenizers": cuts });
                (normalizer, pre_tokenizer, byte_level(), self.bpe_model(self.byte_level_bpe(*recipe, merges)))
            }
            ModelRules::SentencePiece { order, add_space_prefix } => {
                let (normalizer, decoder) =
                    (space_normalizer_json(*add_space_prefix), space_decoder_json(*add_space_prefix));
                (normalizer, Value::Null, decoder, self.bpe_model(self.sentence_piece_bpe(order)))
            }
            ModelRules::WordPiece(rules) => {
                let decoder = json!({ "type": "WordPiece", "prefix": "##", "cleanup": true });
                let cuts = json!({ "type": "BertPreTokenizer" });
                (rules.normalizer_json(), cuts, decoder, self.word_piece_model_json(*rules))
            }
            ModelRules::Unigram(rules) => {
                let model = self.unigram_model_json(rules);
                (rules.normalizer_json(), rules.pre_tokenizer_json(), rules.metaspace_json(), model)
            }
        };
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added.map(|id| self.added_json(id)).collect::<Vec<_>>(),
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": template_processing(&self.before, &self.after, |id| self.tokens[id as usize]),
            "decoder": decoder,
            "model": model,
        })
    }

    fn added_json(&self, id: usize) -> Value {
        added_json(id, self.tokens[id], self.added_token(id).special)
    }

    fn bpe_model(&self, mut bpe: BpeConfig) -> Value {
        // Ids behind the vocabulary stand for bytes that it lacks; no model knows them.
        bpe.vocab.retain(|_, id| (*id as usize) < self.tokens.len());
        bpe_json(bpe)
    }
}

impl RankedVocabulary {
    pub fn json(&self) -> Value {
        let words = json!({
            "type": "Split", "pattern": { "Regex": self.pattern }, "behavior": "Removed", "invert": true,
        });
        let texts: HashMap<Token, &str> = self.added.iter().map(|token| (token.id as Token, &*token.text)).collect();
        json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added.iter().map(|t| added_json(t.id, &t.text, t.is_special)).collect::<Vec<_>>(),
            "normalizer": if self.nfc { json!({ "type": "NFC" }) } else { Value::Null },
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": [words, byte_level()] },
            "post_processor": template_processing(&self.before, &[], |id| texts[&id]),
            "decoder": byte_level(),
            "model": bpe_json(self.bpe_with_added()),
        })
    }

    /// The model with the added tokens. Their ids may come first, and the format gives ids behind the model's only. A
    /// text that is an added token is no other token.
    fn bpe_with_added(&self) -> BpeConfig {
        let mut bpe = self.bpe();
        let texts: HashSet<&str> = self.added.iter().map(|token| &*token.text).collect();
        let is_added = |text: &str| texts.contains(text);
        bpe.merges.retain(|(left, right)| {
            !(is_added(left) || is_added(right) || texts.contains(format!("{left}{right}").as_str()))
        });
        bpe.vocab.extend(self.added.iter().map(|token| (token.text.clone(), token.id as Token)));
        bpe
    }
}

fn added_json(id: usize, text: &str, is_special: bool) -> Value {
    json!({
        "id": id, "content": text, "special": is_special, "normalized": false,
        "single_word": false, "lstrip": false, "rstrip": false,
    })
}

fn bpe_json(bpe: BpeConfig) -> Value {
    let mut vocab: Vec<(String, Token)> = bpe.vocab.into_iter().collect();
    vocab.sort_unstable_by_key(|(_, id)| *id);
    json!({
        "type": "BPE",
        "dropout": null,
        "unk_token": bpe.unk_token,
        "continuing_subword_prefix": null,
        "end_of_word_suffix": null,
        "fuse_unk": bpe.fuse_unk,
        "byte_fallback": bpe.byte_fallback,
        "ignore_merges": bpe.ignore_merges,
        "vocab": vocab.into_iter().map(|(text, id)| (text, id.into())).collect::<Map<_, _>>(),
        "merges": bpe.merges,
    })
}

/// The special tokens around a single text, and around a pair.
fn template_processing<'a>(before: &[Token], after: &[Token], text: impl Fn(Token) -> &'a str) -> Value {
    if before.is_empty() && after.is_empty() {
        return Value::Null;
    }
    let template = |sequence: &str, type_id: u32| {
        let special = |id: &Token| json!({ "SpecialToken": { "id": text(*id), "type_id": type_id } });
        let sequence = json!({ "Sequence": { "id": sequence, "type_id": type_id } });
        before.iter().map(special).chain([sequence]).chain(after.iter().map(special)).collect::<Vec<_>>()
    };
    let special = |id: &Token| (text(*id).to_owned(), json!({ "id": text(*id), "ids": [id], "tokens": [text(*id)] }));
    let pair = [template("A", 0), template("B", 1)].concat();
    json!({
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": pair,
        "special_tokens": before.iter().chain(after).map(special).collect::<Map<_, _>>(),
    })
}

fn byte_level() -> Value {
    json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false })
}

fn space_normalizer_json(add_space_prefix: bool) -> Value {
    let prefix = add_space_prefix.then(|| json!({ "type": "Prepend", "prepend": "▁" }));
    let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    let both: Vec<Value> = prefix.into_iter().chain([spaces]).collect();
    json!({ "type": "Sequence", "normalizers": both })
}

fn space_decoder_json(has_space_prefix: bool) -> Value {
    let strip = has_space_prefix.then(|| json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    let steps = [
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    json!({ "type": "Sequence", "decoders": steps.into_iter().chain(strip).collect::<Vec<_>>() })
}
