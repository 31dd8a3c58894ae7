//! WordPiece in a GGUF (`tokenizer.ggml.model` is `bert`): words are lowercased and cut into the longest known parts.

use crate::error::ParseError;
use crate::gguf::Gguf;
use crate::tokenizer::from_gguf::{GgufVocabulary, read_token_id};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use tokenizers::models::wordpiece::{PipelineWordPiece, WordPiece};
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pipeline::{PipelineModel, PipelineNormalizer};
use types::{Token, Tokens};

/// Marks a part inside of a word. A GGUF marks the first part instead, with `▁`.
const INSIDE: &str = "##";
/// Longer words are unknown.
const WORD_CHARS_MAX: usize = 100;

#[derive(Clone, Copy)]
pub(super) struct WordPieceRules {
    lowercase: bool,
    strip_accents: bool,
    unknown: Token,
}

impl WordPieceRules {
    pub fn read(gguf: &Gguf, n_vocab: usize) -> Result<WordPieceRules, ParseError> {
        let lowercase = gguf.bool("tokenizer.ggml.normalizer.lowercase")?.unwrap_or(true);
        let strip_accents = gguf.bool("tokenizer.ggml.normalizer.strip_accents")?.unwrap_or(lowercase);
        let unknown = read_token_id(gguf, &["unknown"], 100, n_vocab)?;
        Ok(WordPieceRules { lowercase, strip_accents, unknown })
    }

    pub fn normalizer(self) -> PipelineNormalizer {
        PipelineNormalizer::Bert(BertNormalizer::new(true, true, Some(self.strip_accents), self.lowercase))
    }

    pub fn normalizer_json(self) -> Value {
        json!({
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": self.strip_accents, "lowercase": self.lowercase,
        })
    }
}

/// The tokens around a text: CLS and SEP. The keys are those of llama.cpp, and so is the spelling of the last.
pub(super) fn read_cls_and_sep(gguf: &Gguf, n_vocab: usize) -> Result<(Tokens, Tokens), ParseError> {
    let before = read_token_id(gguf, &["bos", "cls"], 101, n_vocab)?;
    Ok((vec![before], vec![read_token_id(gguf, &["seperator"], 102, n_vocab)?]))
}

impl GgufVocabulary<'_> {
    /// Texts as `tokenizer.json` writes them, and ids; the lower one if two tokens have the same text. `▁x` stands for
    /// `x`: the file cannot tell it from `##▁x`. But no word has an empty first part, so `▁` alone is `##▁`.
    fn word_pieces(&self) -> HashMap<String, Token> {
        let mut pieces = HashMap::with_capacity(self.tokens.len());
        for (id, token) in self.tokens.iter().enumerate().filter(|(id, _)| !self.is_unused(*id)) {
            let text = match token.strip_prefix('▁') {
                _ if self.is_added_token(id) => (*token).to_owned(),
                Some(first) if !first.is_empty() => first.to_owned(),
                _ => format!("{INSIDE}{token}"),
            };
            // The trie of the model ends texts with a zero byte.
            if !text.contains('\0') {
                pieces.entry(text).or_insert(id as Token);
            }
        }
        pieces
    }

    pub fn word_piece_model(&self, rules: WordPieceRules) -> tokenizers::Result<PipelineModel> {
        let model = WordPiece {
            vocab: self.word_pieces().into_iter().collect(),
            vocab_r: Default::default(),
            unk_token: self.tokens[rules.unknown as usize].to_owned(),
            continuing_subword_prefix: INSIDE.to_owned(),
            max_input_chars_per_word: WORD_CHARS_MAX,
        };
        Ok(PipelineModel::WordPiece(PipelineWordPiece::try_from(model)?))
    }

    pub fn word_piece_model_json(&self, rules: WordPieceRules) -> Value {
        let mut vocab: Vec<(String, Token)> = self.word_pieces().into_iter().collect();
        vocab.sort_unstable_by_key(|(_, id)| *id);
        json!({
            "type": "WordPiece",
            "unk_token": self.tokens[rules.unknown as usize],
            "continuing_subword_prefix": INSIDE,
            "max_input_chars_per_word": WORD_CHARS_MAX,
            "vocab": vocab.into_iter().map(|(text, id)| (text, id.into())).collect::<Map<_, _>>(),
        })
    }
}
