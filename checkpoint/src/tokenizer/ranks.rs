//! Byte-level vocabularies that list tokens by rank, and no merges: `tekken.json` and tiktoken files. Two neighbours
//! become one token in the order of that token's rank. Knows neither file.

use crate::error::ParseError;
use crate::tokenizer::parts::TokenizerParts;
use crate::tokenizer::pieces::{Spelling, TokenBytes, VOCAB_MAX, spell_bytes};
use std::collections::{HashMap, HashSet};
use tokenizers::SplitDelimiterBehavior;
use tokenizers::models::bpe::{BpeConfig, PipelineBPE};
use tokenizers::normalizers::NFC;
use tokenizers::pipeline::{
    NormalizerChain, PipelineModel, PipelineNormalizer, PipelinePostProcessor, PipelinePreTokenizer, PipelineTokenizer,
};
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::vocab::bucket_added_vocabulary::{AddedToken, AddedVocabulary};
use types::{Token, Tokens};

/// Longer tokens are refused: every split of one is looked up.
const TOKEN_BYTES_MAX: usize = 1024;

/// Ordinary tokens by rank, and tokens that are matched in a text as a whole.
pub(super) struct RankedVocabulary {
    tokens: Vec<Vec<u8>>,
    /// The id of the token with rank 0; the others follow.
    first_id: usize,
    pub added: Vec<RankedAddedToken>,
    /// Each match is a word. Text between matches is dropped, as tiktoken does.
    pub pattern: String,
    /// Characters are first normalised to NFC.
    pub nfc: bool,
    pub before: Tokens,
}

#[derive(Clone, Debug)]
pub(super) struct RankedAddedToken {
    pub id: usize,
    pub text: String,
    pub is_special: bool,
}

/// The ranks of two tokens, and of the one that they make.
struct RankedMerge {
    rank: usize,
    left: usize,
    right: usize,
}

impl RankedVocabulary {
    /// Checks that all bytes have a token, and that no two tokens share an id or a text.
    pub fn new(
        tokens: Vec<Vec<u8>>,
        first_id: usize,
        added: Vec<RankedAddedToken>,
        pattern: String,
    ) -> Result<RankedVocabulary, ParseError> {
        let known: HashSet<&[u8]> = tokens.iter().map(Vec::as_slice).collect();
        if let Some(byte) = (0..=255u8).find(|byte| !known.contains(&[*byte][..])) {
            return ParseError::malformed(format!("the vocabulary has no token for the byte 0x{byte:02X}"));
        }
        if known.len() != tokens.len() {
            return ParseError::malformed("two tokens of the vocabulary have the same bytes");
        }
        if let Some(rank) = tokens.iter().position(|token| token.is_empty() || token.len() > TOKEN_BYTES_MAX) {
            let n = tokens[rank].len();
            let what = format!("the token with rank {rank} has {n} bytes: it must have 1 to {TOKEN_BYTES_MAX}");
            return ParseError::malformed(what);
        }
        let end = first_id.saturating_add(tokens.len());
        check_added(&added, first_id..end)?;
        Ok(RankedVocabulary { tokens, first_id, added, pattern, nfc: false, before: Tokens::new() })
    }

    pub fn added_id(&self, text: &str) -> Option<Token> {
        self.added.iter().find(|token| token.text == text).map(|token| token.id as Token)
    }

    pub fn into_parts(self) -> Result<TokenizerParts, ParseError> {
        let pieces = self.pieces()?;
        let pipeline = self.pipeline().map_err(|error| ParseError::Malformed(error.to_string()))?;
        Ok(TokenizerParts { pipeline, pieces, before: self.before, after: Tokens::new(), doubles_end: false })
    }

    fn n_vocab(&self) -> usize {
        let added = self.added.iter().map(|token| token.id + 1);
        added.chain([self.first_id + self.tokens.len()]).max().unwrap_or_default()
    }

    fn pieces(&self) -> Result<TokenBytes, ParseError> {
        let mut table = vec![(Vec::new(), false); self.n_vocab()];
        for (token, place) in self.tokens.iter().zip(&mut table[self.first_id..]) {
            place.0.clone_from(token);
        }
        for token in &self.added {
            table[token.id] = (token.text.clone().into_bytes(), token.is_special);
        }
        TokenBytes::collect(Spelling::ByteLevel, table.into_iter())
    }

    fn pipeline(&self) -> tokenizers::Result<PipelineTokenizer> {
        let words = Split::new(SplitPattern::Regex(self.pattern.clone()), SplitDelimiterBehavior::Removed, true)?;
        let ids: HashMap<&str, Token> = self.added.iter().map(|token| (&*token.text, token.id as Token)).collect();
        let added = self.added.iter().map(|token| AddedToken::from(&*token.text, token.is_special).normalized(false));
        let mut added_vocabulary = AddedVocabulary::new();
        let id_of = |text: &str| ids.get(text).copied();
        let normalizers = if self.nfc { vec![PipelineNormalizer::NFC(NFC)] } else { Vec::new() };
        added_vocabulary.add_tokens(added, self.n_vocab(), id_of, Some(&NormalizerChain(&normalizers)))?;
        Ok(PipelineTokenizer::from_parts(
            added_vocabulary,
            normalizers,
            PipelinePreTokenizer::Split(words.canonicalized_for_pipeline()?),
            PipelineModel::BPE(PipelineBPE::from_config(self.bpe())?),
            PipelinePostProcessor::default(),
            None,
            Default::default(),
            None,
            None,
        ))
    }

    /// The same vocabulary with merges. A word that is itself a token is not merged.
    pub fn bpe(&self) -> BpeConfig {
        let spelled: Vec<String> = self.tokens.iter().map(|token| spell_bytes(token)).collect();
        let pair = |merge: &RankedMerge| (spelled[merge.left].clone(), spelled[merge.right].clone());
        let merges = self.merges().iter().map(pair).collect();
        let vocab = spelled.into_iter().zip(self.first_id as Token..).collect();
        BpeConfig { vocab, merges, byte_level: true, ignore_merges: true, ..BpeConfig::default() }
    }

    /// Every pair of tokens that makes a token, by that token's rank.
    fn merges(&self) -> Vec<RankedMerge> {
        let ranks: HashMap<&[u8], usize> = self.tokens.iter().map(Vec::as_slice).zip(0..).collect();
        let mut merges = Vec::new();
        for (rank, token) in self.tokens.iter().enumerate() {
            let start = merges.len();
            for (left, right) in (1..token.len()).map(|at| token.split_at(at)) {
                if let (Some(left), Some(right)) = (ranks.get(left), ranks.get(right)) {
                    merges.push(RankedMerge { rank, left: *left, right: *right });
                }
            }
            merges[start..].sort_by_key(|merge| (merge.rank, merge.left, merge.right));
        }
        merges
    }
}

fn check_added(added: &[RankedAddedToken], ranked: std::ops::Range<usize>) -> Result<(), ParseError> {
    let (mut texts, mut ids) = (HashSet::new(), HashSet::new());
    for RankedAddedToken { id, text, .. } in added {
        if *id >= VOCAB_MAX || ranked.contains(id) || !ids.insert(*id) {
            return ParseError::malformed(format!("the special token {text:?} cannot have the id {id}"));
        }
        if text.is_empty() || !texts.insert(text) {
            return ParseError::malformed(format!("two special tokens have the text {text:?}, or it is empty"));
        }
    }
    if ranked.end > VOCAB_MAX {
        return ParseError::malformed(format!("the vocabulary has ids up to {}: {VOCAB_MAX} are allowed", ranked.end));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::Random;
    use crate::tokenizer::Tokenizer;

    /// tiktoken's algorithm: the leftmost pair of the lowest rank is merged first.
    fn merged(word: &[u8], ranks: &HashMap<&[u8], usize>) -> Vec<usize> {
        let mut parts: Vec<Vec<u8>> = match ranks.get(word) {
            Some(_) => vec![word.to_vec()],
            None => word.iter().map(|byte| vec![*byte]).collect(),
        };
        loop {
            let pairs = parts.windows(2).map(|pair| ranks.get(&*pair.concat()).copied());
            let best = pairs.enumerate().filter_map(|(at, rank)| Some((rank?, at))).min();
            let Some((_, at)) = best else { break };
            let right = parts.remove(at + 1);
            parts[at].extend(right);
        }
        parts.iter().map(|part| ranks[&part[..]]).collect()
    }

    /// Random joins of `a`, `b` and `c`, behind the bytes.
    fn random_tokens(random: &mut Random) -> Vec<Vec<u8>> {
        let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        while tokens.len() < 280 {
            let mut part = || {
                let letter = 97 + random.below(3);
                if random.below(2) == 0 { letter } else { tokens.len() - 1 - random.below(tokens.len() - 255) }
            };
            let token = [&tokens[part()][..], &tokens[part()]].concat();
            if token.len() < 12 && token.is_ascii() && !tokens.contains(&token) {
                tokens.push(token);
            }
        }
        tokens
    }

    #[test]
    fn words_are_merged_as_tiktoken_does() {
        let mut random = Random(3);
        for _ in 0..100 {
            let tokens = random_tokens(&mut random);
            let vocabulary = RankedVocabulary::new(tokens.clone(), 0, Vec::new(), ".+".into()).unwrap();
            let tokenizer = Tokenizer::new(vocabulary.into_parts().unwrap()).unwrap();
            let ranks: HashMap<&[u8], usize> = tokens.iter().map(Vec::as_slice).zip(0..).collect();
            for _ in 0..200 {
                let letters = 1 + random.below(30);
                let word: String = (0..letters).map(|_| char::from(b"abc"[random.below(3)])).collect();
                let ids: Vec<usize> =
                    tokenizer.encode(&word, false).unwrap().into_iter().map(|id| id as usize).collect();
                assert_eq!(ids, merged(word.as_bytes(), &ranks), "{word}");
            }
        }
    }
}
