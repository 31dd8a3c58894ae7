//! Makes a tokenizer from a GGUF's vocabulary: byte-level, SentencePiece, WordPiece or Unigram.

use crate::error::{Error, ParseError, Result};
use crate::gguf::Gguf;
use crate::tokenizer::parts::TokenizerParts;
use crate::tokenizer::pieces::{Spelling, TokenBytes, VOCAB_MAX, missing_bytes};
use crate::tokenizer::recipes::{PretokenizerRecipe, recipe};
use crate::tokenizer::unigram::UnigramRules;
use crate::tokenizer::word_piece::WordPieceRules;
use crate::tokenizer::{scores, word_piece};
use std::collections::HashMap;
use std::path::Path;
use tokenizers::models::bpe::{BpeConfig, PipelineBPE};
use tokenizers::normalizers::{NFC, Prepend, Replace};
use tokenizers::pipeline::{
    NormalizerChain, PipelineModel, PipelineNormalizer, PipelinePostProcessor, PipelinePreTokenizer, PipelineTokenizer,
};
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::vocab::bucket_added_vocabulary::{AddedToken, AddedVocabulary};
use types::{Token, Tokens};

/// The token kinds of a GGUF that matter: tokens that are matched as a whole, and tokens that are not text.
pub(crate) const KIND_CONTROL: i64 = 3;
const KIND_UNKNOWN: i64 = 2;
const KIND_USER_DEFINED: i64 = 4;
const KIND_UNUSED: i64 = 5;
const KIND_BYTE: i64 = 6;

pub(super) fn read_parts(gguf: &Gguf, bytes: &[u8], path: &Path) -> Result<TokenizerParts> {
    let vocabulary = GgufVocabulary::read(gguf, bytes).map_err(Error::with_path(path))?;
    let pipeline = vocabulary.pipeline()?;
    let pieces = vocabulary.pieces().map_err(Error::with_path(path))?;
    let doubles_end = matches!(vocabulary.model, ModelRules::Unigram(_));
    Ok(TokenizerParts { pipeline, pieces, before: vocabulary.before, after: vocabulary.after, doubles_end })
}

/// The content of the keys `tokenizer.ggml.*`.
pub(super) struct GgufVocabulary<'a> {
    pub tokens: Vec<&'a str>,
    /// One entry per token.
    kinds: Vec<i64>,
    /// A text's id; the lower one if two tokens have the same text.
    pub ids: HashMap<&'a str, Token>,
    pub model: ModelRules<'a>,
    pub before: Tokens,
    pub after: Tokens,
}

/// How a text becomes tokens, by `tokenizer.ggml.model`.
pub(super) enum ModelRules<'a> {
    /// `gpt2`: bytes are merged in the order of a list.
    ByteLevel { recipe: PretokenizerRecipe, merges: Vec<(&'a str, &'a str)> },
    /// `llama`, `gemma4`: characters are merged in an order; unknown ones fall back to bytes.
    SentencePiece { order: MergeOrder<'a>, add_space_prefix: bool },
    /// `bert`: the longest known parts of a word.
    WordPiece(WordPieceRules),
    /// `t5`: the tokens with the highest sum of scores.
    Unigram(UnigramRules),
}

/// The order in which characters are merged: that of scores, or that of a list.
pub(super) enum MergeOrder<'a> {
    Scores(Vec<f64>),
    Listed(Vec<(&'a str, &'a str)>),
}

impl<'a> GgufVocabulary<'a> {
    pub fn read(gguf: &Gguf, bytes: &'a [u8]) -> std::result::Result<GgufVocabulary<'a>, ParseError> {
        let model = match gguf.text(bytes, "tokenizer.ggml.model")? {
            Some(model @ ("gpt2" | "llama" | "gemma4" | "bert" | "t5")) => model,
            Some(other) => return ParseError::unsupported(format!("the tokenizer model {other}")),
            None => return ParseError::malformed("the file has no tokenizer"),
        };
        let recipe = if model == "gpt2" { Some(read_recipe(gguf, bytes)?) } else { None };
        let mut tokens = gguf.texts(bytes, "tokenizer.ggml.tokens")?.unwrap_or_default();
        if tokens.is_empty() || tokens.len() > VOCAB_MAX {
            return ParseError::malformed(format!(
                "the vocabulary has {} tokens: it must have 1 to {VOCAB_MAX}",
                tokens.len()
            ));
        }
        let kinds = gguf.integers(bytes, "tokenizer.ggml.token_type")?.unwrap_or_else(|| vec![1; tokens.len()]);
        if kinds.len() != tokens.len() {
            return ParseError::malformed(format!("{} token types for {} tokens", kinds.len(), tokens.len()));
        }
        if model == "bert" {
            // The mark of a word's first part is in these too.
            let added = tokens.iter_mut().zip(&kinds).filter(|(_, kind)| **kind == KIND_USER_DEFINED);
            added.for_each(|(token, _)| *token = token.strip_prefix('▁').unwrap_or(token));
        }
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            ids.entry(*token).or_insert(id as Token);
        }
        let n_vocab = tokens.len();
        let rules = match (recipe, model) {
            (Some(recipe), _) => ModelRules::ByteLevel { recipe, merges: read_merges(gguf, bytes, &ids)? },
            (None, "bert") => ModelRules::WordPiece(WordPieceRules::read(gguf, n_vocab)?),
            (None, "t5") => ModelRules::Unigram(UnigramRules::read(gguf, bytes, read_scores(gguf, bytes, n_vocab)?)?),
            (None, model) => {
                let order = match model {
                    "gemma4" => MergeOrder::Listed(read_merges(gguf, bytes, &ids)?),
                    _ => MergeOrder::Scores(read_scores(gguf, bytes, n_vocab)?),
                };
                let add_space_prefix = gguf.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(model != "gemma4");
                ModelRules::SentencePiece { order, add_space_prefix }
            }
        };
        let (before, after) = match &rules {
            ModelRules::ByteLevel { recipe, .. } => read_bos_and_eos(gguf, (recipe.add_bos, false), n_vocab)?,
            ModelRules::SentencePiece { .. } => read_bos_and_eos(gguf, (true, false), n_vocab)?,
            ModelRules::WordPiece(_) => word_piece::read_cls_and_sep(gguf, n_vocab)?,
            ModelRules::Unigram(_) => read_bos_and_eos(gguf, (false, true), n_vocab)?,
        };
        Ok(GgufVocabulary { tokens, kinds, ids, model: rules, before, after })
    }

    pub fn is_unused(&self, id: usize) -> bool {
        self.kinds[id] == KIND_UNUSED
    }

    /// Whether a token is matched in a text as a whole.
    pub fn is_added_token(&self, id: usize) -> bool {
        let is_unknown = self.kinds[id] == KIND_UNKNOWN && !matches!(self.model, ModelRules::ByteLevel { .. });
        is_unknown || matches!(self.kinds[id], KIND_CONTROL | KIND_USER_DEFINED)
    }

    fn pieces(&self) -> std::result::Result<TokenBytes, ParseError> {
        let is_byte_level = matches!(self.model, ModelRules::ByteLevel { .. });
        let spelling = if is_byte_level { Spelling::ByteLevel } else { Spelling::SentencePiece };
        let tokens = self.tokens.iter().enumerate().map(|(id, token)| {
            let bytes = match self.kinds[id] {
                KIND_UNUSED => Vec::new(),
                KIND_BYTE if !is_byte_level => Spelling::SentencePiece.bytes(token),
                _ if self.is_added_token(id) && is_byte_level => token.as_bytes().to_vec(),
                _ if is_byte_level => Spelling::ByteLevel.bytes(token),
                _ => token.replace('▁', " ").into_bytes(),
            };
            (bytes, matches!(self.kinds[id], KIND_CONTROL | KIND_UNKNOWN))
        });
        TokenBytes::collect(spelling, tokens)
    }

    fn pipeline(&self) -> Result<PipelineTokenizer> {
        let failed = |error: tokenizers::Error| Error::Tokenizer(error.to_string());
        let bpe = |config: BpeConfig| PipelineBPE::from_config(config).map(PipelineModel::BPE).map_err(failed);
        let (normalizers, pre_tokenizer, model) = match &self.model {
            ModelRules::ByteLevel { recipe, merges } => {
                let normalizers = if recipe.nfc { vec![PipelineNormalizer::NFC(NFC)] } else { Vec::new() };
                let cuts = recipe.pre_tokenizer().map_err(failed)?;
                (normalizers, cuts, bpe(self.byte_level_bpe(*recipe, merges))?)
            }
            ModelRules::SentencePiece { order, add_space_prefix } => {
                let normalizers = space_normalizers(*add_space_prefix).map_err(failed)?;
                (normalizers, PipelinePreTokenizer::None, bpe(self.sentence_piece_bpe(order))?)
            }
            ModelRules::WordPiece(rules) => {
                let model = self.word_piece_model(*rules).map_err(failed)?;
                (vec![rules.normalizer()], PipelinePreTokenizer::Bert(BertPreTokenizer), model)
            }
            ModelRules::Unigram(rules) => {
                let cuts = UnigramRules::pre_tokenizer().map_err(failed)?;
                (rules.normalizers().map_err(failed)?, cuts, self.unigram_model(rules).map_err(failed)?)
            }
        };
        let added = (0..self.tokens.len()).filter(|id| self.is_added_token(*id)).map(|id| self.added_token(id));
        let mut added_vocabulary = AddedVocabulary::new();
        let id_of = |text: &str| self.ids.get(text).copied();
        added_vocabulary
            .add_tokens(added, self.tokens.len(), id_of, Some(&NormalizerChain(&normalizers)))
            .map_err(failed)?;
        Ok(PipelineTokenizer::from_parts(
            added_vocabulary,
            normalizers,
            pre_tokenizer,
            model,
            PipelinePostProcessor::default(),
            None,
            Default::default(),
            None,
            None,
        ))
    }

    pub fn added_token(&self, id: usize) -> AddedToken {
        AddedToken::from(self.tokens[id], self.kinds[id] != KIND_USER_DEFINED).normalized(false)
    }

    /// The tokens that merging may produce.
    fn merged_tokens(&self) -> impl Iterator<Item = (String, Token)> {
        let used = |id: Token| self.kinds[id as usize] != KIND_UNUSED;
        self.ids.iter().filter(move |(_, id)| used(**id)).map(|(text, id)| ((*text).to_owned(), *id))
    }

    pub fn byte_level_bpe(&self, recipe: PretokenizerRecipe, merges: &[(&str, &str)]) -> BpeConfig {
        let used = |text: &str| self.ids.get(text).is_some_and(|id| self.kinds[*id as usize] != KIND_UNUSED);
        let missing = missing_bytes(used).into_iter().zip(self.tokens.len() as Token..);
        BpeConfig {
            vocab: self.merged_tokens().chain(missing).collect(),
            merges: owned_pairs(merges),
            byte_level: true,
            ignore_merges: recipe.ignore_merges,
            ..BpeConfig::default()
        }
    }

    pub fn sentence_piece_bpe(&self, order: &MergeOrder<'_>) -> BpeConfig {
        let unknown = self.kinds.iter().position(|kind| *kind == KIND_UNKNOWN);
        let has_byte = |byte: u8| self.ids.contains_key(format!("<0x{byte:02X}>").as_str());
        let mut mergeable = self.ids.clone();
        mergeable.retain(|_, id| self.kinds[*id as usize] != KIND_UNUSED);
        let merges = match order {
            MergeOrder::Scores(scores) => scores::merges(&self.tokens, scores, &mergeable),
            MergeOrder::Listed(all) => owned_pairs(all),
        };
        BpeConfig {
            vocab: self.merged_tokens().collect(),
            merges: merges
                .into_iter()
                .filter(|(left, right)| mergeable.contains_key(format!("{left}{right}").as_str()))
                .collect(),
            unk_token: unknown.map(|id| self.tokens[id].to_owned()),
            fuse_unk: true,
            byte_fallback: (0..=255).all(has_byte),
            ..BpeConfig::default()
        }
    }
}

fn owned_pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(left, right)| ((*left).to_owned(), (*right).to_owned())).collect()
}

/// Words begin with `▁`, which stands for the space before them; the first word of a text may get one.
fn space_normalizers(add_space_prefix: bool) -> tokenizers::Result<Vec<PipelineNormalizer>> {
    let prefix = add_space_prefix.then(|| PipelineNormalizer::Prepend(Prepend::new("▁".to_owned())));
    let spaces = PipelineNormalizer::Replace(Replace::new(" ", "▁")?);
    Ok(prefix.into_iter().chain([spaces]).collect())
}

fn read_scores(gguf: &Gguf, bytes: &[u8], n_vocab: usize) -> std::result::Result<Vec<f64>, ParseError> {
    let scores = gguf.floats(bytes, "tokenizer.ggml.scores")?.unwrap_or_default();
    if scores.len() != n_vocab {
        return ParseError::malformed(format!("{} scores for {n_vocab} tokens", scores.len()));
    }
    Ok(scores)
}

fn read_recipe(gguf: &Gguf, bytes: &[u8]) -> std::result::Result<PretokenizerRecipe, ParseError> {
    let key = "tokenizer.ggml.pre";
    let Some(pre) = gguf.text(bytes, key)? else {
        // A guess would give other tokens than those of the training, without any error.
        return ParseError::unsupported(format!("a vocabulary without the name of its pre-tokenizer ({key})"));
    };
    match recipe(pre) {
        Some(recipe) => Ok(recipe),
        None => ParseError::unsupported(format!("the pre-tokenizer {pre} ({key})")),
    }
}

/// Returns pairs of tokens that each join to a token, as merging requires.
fn read_merges<'a>(
    gguf: &Gguf,
    bytes: &'a [u8],
    ids: &HashMap<&str, Token>,
) -> std::result::Result<Vec<(&'a str, &'a str)>, ParseError> {
    let mut merges = Vec::new();
    let mut joined = String::new();
    for merge in gguf.texts(bytes, "tokenizer.ggml.merges")?.unwrap_or_default() {
        let Some((left, right)) = merge.split_once(' ') else {
            return ParseError::malformed(format!("the merge {merge:?} is not two tokens"));
        };
        joined.clear();
        joined.extend([left, right]);
        if let Some(missing) = [left, right, &joined].into_iter().find(|token| !ids.contains_key(token)) {
            return ParseError::malformed(format!(
                "the merge {merge:?} needs {missing:?}, which is not in the vocabulary"
            ));
        }
        merges.push((left, right));
    }
    Ok(merges)
}

/// The id under the first of the names that the file has, or else llama.cpp's default.
pub(super) fn read_token_id(
    gguf: &Gguf,
    names: &[&str],
    default: Token,
    n_vocab: usize,
) -> std::result::Result<Token, ParseError> {
    let mut id = None;
    for name in names {
        id = id.or(gguf.unsigned(&format!("tokenizer.ggml.{name}_token_id"))?);
    }
    match id.unwrap_or(default.into()) {
        id if id < n_vocab as u64 => Ok(id as Token),
        id => ParseError::malformed(format!("tokenizer.ggml.{}_token_id is {id}, which is not a token", names[0])),
    }
}

/// The tokens around a text. `adds` are the defaults for both.
fn read_bos_and_eos(
    gguf: &Gguf,
    adds: (bool, bool),
    n_vocab: usize,
) -> std::result::Result<(Tokens, Tokens), ParseError> {
    let surrounding = |which: &str, default: bool| -> std::result::Result<Tokens, ParseError> {
        if !gguf.bool(&format!("tokenizer.ggml.add_{which}_token"))?.unwrap_or(default) {
            return Ok(Tokens::new());
        }
        let key = format!("tokenizer.ggml.{which}_token_id");
        match gguf.unsigned(&key)? {
            Some(id) if id < n_vocab as u64 => Ok(vec![id as Token]),
            _ => ParseError::malformed(format!("tokenizer.ggml.add_{which}_token is set, but {key} is not a token")),
        }
    };
    Ok((surrounding("bos", adds.0)?, surrounding("eos", adds.1)?))
}
