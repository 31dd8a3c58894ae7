//! Unigram in a GGUF (`tokenizer.ggml.model` is `t5`): the tokens of a word with the highest sum of scores.

use crate::base64;
use crate::error::ParseError;
use crate::gguf::Gguf;
use crate::tokenizer::charsmap;
use crate::tokenizer::from_gguf::{GgufVocabulary, read_token_id};
use serde_json::{Value, json};
use tokenizers::SplitDelimiterBehavior;
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::metaspace::{MetaspaceNormalizer, PrependBehavior};
use tokenizers::normalizers::precompiled::PrecompiledNormalizer;
use tokenizers::pipeline::{PipelineModel, PipelineNormalizer, PipelinePreTokenizer};
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use types::Token;

pub(super) struct UnigramRules {
    scores: Vec<f64>,
    /// Replaces characters, as SentencePiece compiled it.
    charsmap: Option<Vec<u8>>,
    add_space_prefix: bool,
    /// Blanks only separate words. Each word then gets one `▁`.
    drop_blanks: bool,
    unknown: Token,
}

impl UnigramRules {
    pub fn read(gguf: &Gguf, bytes: &[u8], scores: Vec<f64>) -> Result<UnigramRules, ParseError> {
        if scores.iter().any(|score| !score.is_finite()) {
            return ParseError::malformed("a score of the vocabulary is not a finite number");
        }
        let flag = |name: &str| Ok(gguf.bool(&format!("tokenizer.ggml.{name}"))?.unwrap_or(false));
        let (add_space_prefix, drop_blanks) = (flag("add_space_prefix")?, flag("remove_extra_whitespaces")?);
        if drop_blanks && !add_space_prefix {
            let what = "a vocabulary with remove_extra_whitespaces and without add_space_prefix";
            return ParseError::unsupported(what);
        }
        let charsmap = read_charsmap(gguf, bytes)?;
        let unknown = read_token_id(gguf, &["unknown"], 2, scores.len())?;
        Ok(UnigramRules { scores, charsmap, add_space_prefix, drop_blanks, unknown })
    }

    pub fn normalizers(&self) -> tokenizers::Result<Vec<PipelineNormalizer>> {
        let charsmap = self.charsmap.as_ref().map(|map| PrecompiledNormalizer::from_charsmap(map)).transpose()?;
        let prepend = if self.add_space_prefix { PrependBehavior::Always } else { PrependBehavior::Never };
        let spaces = PipelineNormalizer::Metaspace(MetaspaceNormalizer::new('▁', prepend, self.drop_blanks));
        Ok(charsmap.map(PipelineNormalizer::Precompiled).into_iter().chain([spaces]).collect())
    }

    /// Cuts before each `▁`.
    pub fn pre_tokenizer() -> tokenizers::Result<PipelinePreTokenizer> {
        let mark = SplitPattern::String("▁".to_owned());
        Ok(PipelinePreTokenizer::Split(Split::new(mark, SplitDelimiterBehavior::MergedWithNext, false)?))
    }

    pub fn normalizer_json(&self) -> Value {
        match &self.charsmap {
            Some(map) => json!({ "type": "Precompiled", "precompiled_charsmap": base64::encode(map) }),
            None => Value::Null,
        }
    }

    pub fn pre_tokenizer_json(&self) -> Value {
        if self.drop_blanks {
            json!({ "type": "Sequence", "pretokenizers": [{ "type": "WhitespaceSplit" }, self.metaspace_json()] })
        } else {
            self.metaspace_json()
        }
    }

    pub fn metaspace_json(&self) -> Value {
        let scheme = if self.add_space_prefix { "always" } else { "never" };
        json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true })
    }
}

fn read_charsmap(gguf: &Gguf, bytes: &[u8]) -> Result<Option<Vec<u8>>, ParseError> {
    let key = "tokenizer.ggml.precompiled_charsmap";
    let Some(numbers) = gguf.integers(bytes, key)?.filter(|numbers| !numbers.is_empty()) else { return Ok(None) };
    // Signed and unsigned bytes are in use.
    let byte = |number: i64| u8::try_from(number).ok().or_else(|| Some(i8::try_from(number).ok()? as u8));
    let Some(map) = numbers.into_iter().map(byte).collect::<Option<Vec<u8>>>() else {
        return ParseError::malformed(format!("{key} is not a list of bytes"));
    };
    charsmap::check(&map)?;
    Ok(Some(map))
}

impl GgufVocabulary<'_> {
    /// Texts and scores by id. The score of an unknown character follows from the lowest score, so padding behind the
    /// vocabulary is left out. Other tokens that no text has keep their place under a text that no word contains.
    fn scored_tokens(&self, rules: &UnigramRules) -> Vec<(String, f64)> {
        let used = |id: usize| !self.is_unused(id) && !self.tokens[id].is_empty();
        let end = (0..self.tokens.len()).rev().find(|id| used(*id)).map_or(0, |last| last + 1);
        let token = |id: usize| {
            let text = self.tokens[id];
            let is_first = self.ids.get(text).is_some_and(|first| *first as usize == id);
            if !used(id) || !is_first {
                (format!("unused {id}"), 0.0)
            } else if self.is_added_token(id) {
                // Matched as a whole, before any score counts.
                (text.to_owned(), 0.0)
            } else {
                (text.to_owned(), rules.scores[id])
            }
        };
        (0..end.max(rules.unknown as usize + 1)).map(token).collect()
    }

    pub fn unigram_model(&self, rules: &UnigramRules) -> tokenizers::Result<PipelineModel> {
        let model = Unigram::from(self.scored_tokens(rules), Some(rules.unknown as usize), false)?;
        Ok(PipelineModel::Unigram(model))
    }

    pub fn unigram_model_json(&self, rules: &UnigramRules) -> Value {
        json!({
            "type": "Unigram", "unk_id": rules.unknown, "byte_fallback": false, "vocab": self.scored_tokens(rules),
        })
    }
}
