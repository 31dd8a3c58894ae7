//! A tokenizer from the vocabulary that a GGUF carries. Knows how the pre-tokenizers are called there.

use crate::error::{Error, Fault, Result};
use crate::gguf::Gguf;
use crate::tokenizer::pieces::{Pieces, Spelling, missing_bytes};
use crate::tokenizer::{KIND_CONTROL, KIND_UNUSED, KIND_USER_DEFINED, Tokenizer, VOCAB_MAX};
use std::collections::HashMap;
use std::path::Path;
use tokenizers::SplitDelimiterBehavior;
use tokenizers::models::bpe::{BpeConfig, PipelineBPE};
use tokenizers::normalizers::NFC;
use tokenizers::pipeline::{
    NormalizerChain, PipelineModel, PipelineNormalizer, PipelinePostProcessor, PipelinePreTokenizer, PipelineTokenizer,
};
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::PipelineSequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::vocab::bucket_added_vocabulary::{AddedToken, AddedVocabulary};
use types::{Token, Tokens};

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|",
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// How a text is cut before it is merged, and what else goes with the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Recipe {
    /// Each digit stands alone, before anything else is cut.
    digits: bool,
    regex: &'static str,
    /// Equal characters are spelled equally first.
    nfc: bool,
    /// A piece that is a token is not merged.
    ignore_merges: bool,
    /// Where the file does not say.
    add_bos: bool,
}

const PLAIN: Recipe = Recipe { digits: false, regex: GPT2, nfc: false, ignore_merges: false, add_bos: false };

/// `tokenizer.ggml.pre`.
fn recipe(pre: &str) -> Option<Recipe> {
    Some(match pre {
        "gpt-2" | "gpt2" | "phi-2" | "mpt" | "olmo" | "jais" => PLAIN,
        "smollm" | "starcoder" | "refact" | "codeshell" | "exaone" => Recipe { digits: true, ..PLAIN },
        "command-r" => Recipe { digits: true, nfc: true, ..PLAIN },
        "llama-bpe" | "llama3" | "llama-v3" => Recipe { regex: LLAMA3, ignore_merges: true, add_bos: true, ..PLAIN },
        "qwen2" | "deepseek-r1-qwen" => Recipe { regex: QWEN2, nfc: true, ..PLAIN },
        "tekken" => Recipe { regex: TEKKEN, ignore_merges: true, add_bos: true, ..PLAIN },
        _ => return None,
    })
}

impl Tokenizer {
    pub(crate) fn from_gguf(gguf: &Gguf, bytes: &[u8], path: &Path) -> Result<Tokenizer> {
        let vocabulary = Vocabulary::read(gguf, bytes).map_err(Error::fault(path))?;
        let pipeline = vocabulary.pipeline()?;
        let pieces = vocabulary.pieces().map_err(Error::fault(path))?;
        Tokenizer::new(pipeline, pieces, vocabulary.before, vocabulary.after)
    }
}

/// What the keys of `tokenizer.ggml` say.
struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    /// As many as there are tokens.
    kinds: Vec<i64>,
    merges: Vec<(&'a str, &'a str)>,
    /// A text's id; the lower one where two tokens have the same text.
    ids: HashMap<&'a str, Token>,
    recipe: Recipe,
    before: Tokens,
    after: Tokens,
}

impl<'a> Vocabulary<'a> {
    fn read(gguf: &Gguf, bytes: &'a [u8]) -> std::result::Result<Vocabulary<'a>, Fault> {
        match gguf.text(bytes, "tokenizer.ggml.model")? {
            Some("gpt2") => {}
            Some(other) => return Fault::unsupported(format!("the tokenizer model {other}")),
            None => return Fault::malformed("there is no tokenizer in the file"),
        }
        let recipe = read_recipe(gguf, bytes)?;
        let tokens = gguf.texts(bytes, "tokenizer.ggml.tokens")?.unwrap_or_default();
        if tokens.is_empty() || tokens.len() > VOCAB_MAX {
            return Fault::malformed(format!("a vocabulary of {} tokens", tokens.len()));
        }
        let kinds = gguf.integers(bytes, "tokenizer.ggml.token_type")?.unwrap_or_else(|| vec![1; tokens.len()]);
        if kinds.len() != tokens.len() {
            return Fault::malformed(format!("{} token types for {} tokens", kinds.len(), tokens.len()));
        }
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            ids.entry(*token).or_insert(id as Token);
        }
        let merges = read_merges(gguf, bytes, &ids)?;
        let (before, after) = read_surroundings(gguf, recipe, tokens.len())?;
        Ok(Vocabulary { tokens, kinds, merges, ids, recipe, before, after })
    }

    fn added(&self, id: usize) -> bool {
        matches!(self.kinds[id], KIND_CONTROL | KIND_USER_DEFINED)
    }

    fn pieces(&self) -> std::result::Result<Pieces, Fault> {
        Pieces::collect(self.tokens.iter().enumerate().map(|(id, token)| {
            let bytes = match self.kinds[id] {
                KIND_UNUSED => Vec::new(),
                _ if self.added(id) => token.as_bytes().to_vec(),
                _ => Spelling::ByteLevel.bytes(token),
            };
            (bytes, self.kinds[id] == KIND_CONTROL)
        }))
    }

    fn pipeline(&self) -> Result<PipelineTokenizer> {
        let failed = |error: tokenizers::Error| Error::Tokenizer(error.to_string());
        let normalizers = if self.recipe.nfc { vec![PipelineNormalizer::NFC(NFC)] } else { Vec::new() };
        let added = (0..self.tokens.len()).filter(|id| self.added(*id)).map(|id| self.added_token(id));
        let mut added_vocabulary = AddedVocabulary::new();
        let id_of = |text: &str| self.ids.get(text).copied();
        added_vocabulary
            .add_tokens(added, self.tokens.len(), id_of, Some(&NormalizerChain(&normalizers)))
            .map_err(failed)?;
        Ok(PipelineTokenizer::from_parts(
            added_vocabulary,
            normalizers,
            self.pre_tokenizer().map_err(failed)?,
            PipelineModel::BPE(PipelineBPE::from_config(self.bpe()).map_err(failed)?),
            PipelinePostProcessor::default(),
            None,
            Default::default(),
            None,
            None,
        ))
    }

    fn added_token(&self, id: usize) -> AddedToken {
        AddedToken::from(self.tokens[id], self.kinds[id] == KIND_CONTROL).normalized(false)
    }

    fn pre_tokenizer(&self) -> tokenizers::Result<PipelinePreTokenizer> {
        let pattern = SplitPattern::Regex(self.recipe.regex.to_owned());
        let split = PipelinePreTokenizer::Split(Split::native(pattern, SplitDelimiterBehavior::Isolated, false)?);
        if !self.recipe.digits {
            return Ok(split);
        }
        let digits = PipelinePreTokenizer::Digits(Digits::new(true));
        Ok(PipelinePreTokenizer::Sequence(PipelineSequence::new(vec![digits, split])))
    }

    fn bpe(&self) -> BpeConfig {
        let used = |text: &str| self.ids.get(text).is_some_and(|id| self.kinds[*id as usize] != KIND_UNUSED);
        let ids = self.ids.iter().filter(|(text, _)| used(text)).map(|(text, id)| ((*text).to_owned(), *id));
        let missing = missing_bytes(used).into_iter().zip(self.tokens.len() as Token..);
        BpeConfig {
            vocab: ids.chain(missing).collect(),
            merges: self.merges.iter().map(|(left, right)| ((*left).to_owned(), (*right).to_owned())).collect(),
            byte_level: true,
            ignore_merges: self.recipe.ignore_merges,
            ..BpeConfig::default()
        }
    }
}

fn read_recipe(gguf: &Gguf, bytes: &[u8]) -> std::result::Result<Recipe, Fault> {
    let key = "tokenizer.ggml.pre";
    let Some(pre) = gguf.text(bytes, key)? else {
        // Guessing one would give other tokens than the model was trained on, and nobody would see it.
        return Fault::unsupported(format!("a vocabulary without the name of its pre-tokenizer ({key})"));
    };
    match recipe(pre) {
        Some(recipe) => Ok(recipe),
        None => Fault::unsupported(format!("the pre-tokenizer {pre} ({key})")),
    }
}

/// Pairs of tokens, each of which makes a token: what the merging relies on.
fn read_merges<'a>(
    gguf: &Gguf,
    bytes: &'a [u8],
    ids: &HashMap<&str, Token>,
) -> std::result::Result<Vec<(&'a str, &'a str)>, Fault> {
    let mut merges = Vec::new();
    let mut joined = String::new();
    for merge in gguf.texts(bytes, "tokenizer.ggml.merges")?.unwrap_or_default() {
        let Some((left, right)) = merge.split_once(' ') else {
            return Fault::malformed(format!("the merge {merge:?} is not two tokens"));
        };
        joined.clear();
        joined.extend([left, right]);
        if let Some(missing) = [left, right, &joined].into_iter().find(|token| !ids.contains_key(token)) {
            return Fault::malformed(format!("the merge {merge:?} needs {missing:?}, which is not in the vocabulary"));
        }
        merges.push((left, right));
    }
    Ok(merges)
}

fn read_surroundings(gguf: &Gguf, recipe: Recipe, n_vocab: usize) -> std::result::Result<(Tokens, Tokens), Fault> {
    let surrounding = |which: &str, default: bool| -> std::result::Result<Tokens, Fault> {
        if !gguf.bool(&format!("tokenizer.ggml.add_{which}_token"))?.unwrap_or(default) {
            return Ok(Tokens::new());
        }
        let key = format!("tokenizer.ggml.{which}_token_id");
        match gguf.unsigned(&key)? {
            Some(id) if id < n_vocab as u64 => Ok(vec![id as Token]),
            _ => Fault::malformed(format!("{which} is to be added to texts, and {key} does not say what it is")),
        }
    };
    Ok((surrounding("bos", recipe.add_bos)?, surrounding("eos", false)?))
}
