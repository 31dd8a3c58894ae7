//! The bytes of each token, and which tokens end an answer. Knows nothing of grammars.

use crate::TokenMask;
use crate::engine::{self, catch_panics};
use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use std::collections::HashMap;
use std::sync::Arc;
use thiserror::Error;
use toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use types::Token;

/// A model's tokens as bytes, shared by all matchers of the model.
#[derive(Clone)]
pub struct Vocabulary(Arc<VocabularyData>);

struct VocabularyData {
    factory: ParserFactory,
    ends: Vec<Token>,
    specials: HashMap<Vec<u8>, Token>,
    n_vocab: usize,
    hash: [u8; 32],
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BadVocabulary {
    #[error("the vocabulary has {0} tokens: it must have 1 to {max}", max = Vocabulary::TOKENS_MAX)]
    Size(usize),
    #[error("{0} tokens for a vocabulary of {1}")]
    TooMany(usize, usize),
    #[error("no token ends an answer")]
    NoEnd,
    #[error("token {0} ends an answer and is not in the vocabulary")]
    EndOutside(Token),
    #[error("the grammar engine cannot hold it: {0}")]
    Engine(String),
}

impl Vocabulary {
    /// The engine numbers tokens in 24 bits, and its tree holds two nodes for each.
    pub const TOKENS_MAX: usize = 1 << 21;
    /// A longer token is never allowed: the engine's tree is not deeper.
    pub const TOKEN_BYTES_MAX: usize = 1000;

    /// Takes the bytes of token 0, 1, .. and whether each is special, that is, not text. Ids from the last one up to
    /// `n_vocab` have no bytes, and are never allowed.
    pub fn new<'a>(
        tokens: impl Iterator<Item = (&'a [u8], bool)>,
        n_vocab: usize,
        ends: &[Token],
    ) -> Result<Vocabulary, BadVocabulary> {
        if n_vocab == 0 || n_vocab > Self::TOKENS_MAX {
            return Err(BadVocabulary::Size(n_vocab));
        }
        if let Some(end) = ends.iter().find(|end| **end as usize >= n_vocab) {
            return Err(BadVocabulary::EndOutside(*end));
        }
        let first_end = *ends.first().ok_or(BadVocabulary::NoEnd)?;
        let mut hasher = TokensDigest::default();
        let (mut words, mut specials) = (Vec::with_capacity(n_vocab), HashMap::new());
        for (id, (bytes, is_special)) in tokens.enumerate() {
            if id >= n_vocab {
                return Err(BadVocabulary::TooMany(id + 1, n_vocab));
            }
            hasher.push(bytes, is_special);
            if is_special {
                specials.entry(bytes.to_vec()).or_insert(id as Token);
            }
            words.push(word(bytes, is_special));
        }
        words.resize(n_vocab, Vec::new());
        let factory = factory(&words, first_end, ends)?;
        let hash = hasher.hash(n_vocab, ends);
        Ok(Vocabulary(Arc::new(VocabularyData { factory, ends: ends.to_vec(), specials, n_vocab, hash })))
    }

    /// Returns the hash of a vocabulary of these tokens, for callers that make no masks.
    pub fn hash_of<'a>(tokens: impl Iterator<Item = (&'a [u8], bool)>, n_vocab: usize, ends: &[Token]) -> [u8; 32] {
        let mut hasher = TokensDigest::default();
        tokens.for_each(|(bytes, is_special)| hasher.push(bytes, is_special));
        hasher.hash(n_vocab, ends)
    }

    /// Two vocabularies with equal hashes have equal masks for the same grammar and version of the engine (`ENGINE`).
    pub fn hash(&self) -> [u8; 32] {
        self.0.hash
    }

    pub fn n_vocab(&self) -> usize {
        self.0.n_vocab
    }

    pub fn end_tokens(&self) -> &[Token] {
        &self.0.ends
    }

    /// Returns the special token with this text, if there is one.
    pub fn special(&self, text: &str) -> Option<Token> {
        self.0.specials.get(text.as_bytes()).copied()
    }

    /// Returns the bytes of a token, and whether it is a special token, which is not text.
    pub(crate) fn bytes(&self, token: Token) -> (&[u8], bool) {
        let trie = self.trie();
        let bytes = if (token as usize) < self.0.n_vocab { trie.token(token) } else { &[] };
        match bytes.strip_prefix(&[TokTrie::SPECIAL_TOKEN_MARKER]) {
            Some(special) => (special, true),
            None => (bytes, false),
        }
    }

    /// Returns tokens that spell a text: special ones where their texts occur, otherwise the longest first. None where
    /// a byte is in no token.
    pub(crate) fn spell(&self, text: &str) -> Option<Vec<Token>> {
        let mut tokens = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let starting = |(special, token): (&Vec<u8>, &Token)| {
                rest.as_bytes().starts_with(special).then_some((special.len(), *token))
            };
            if let Some((n, token)) = self.0.specials.iter().filter_map(starting).max() {
                tokens.push(token);
                rest = rest.get(n..)?;
                continue;
            }
            let of_special =
                |at: &usize| self.0.specials.keys().any(|special| rest.as_bytes()[*at..].starts_with(special));
            let n = (1..rest.len()).filter(|at| rest.is_char_boundary(*at)).find(of_special).unwrap_or(rest.len());
            tokens.extend(self.trie().greedy_tokenize(&rest.as_bytes()[..n]));
            rest = &rest[n..];
        }
        let spelled: Vec<u8> = tokens.iter().flat_map(|token| self.bytes(*token).0).copied().collect();
        (spelled == text.as_bytes()).then_some(tokens)
    }

    /// Returns the longest of a mask's tokens, if each of the others is a prefix of it.
    pub(crate) fn single_continuation(&self, mask: &TokenMask) -> Option<Token> {
        /// Few tokens are prefixes of one text.
        const TOKENS_MAX: usize = 64;
        if mask.n_allowed() > TOKENS_MAX {
            return None;
        }
        let longest = mask.tokens().max_by_key(|token| self.bytes(*token).0.len())?;
        let (text, is_special) = self.bytes(longest);
        let begins = |token| {
            let (bytes, of_special) = self.bytes(token);
            token == longest || (!is_special && !of_special && text.starts_with(bytes))
        };
        mask.tokens().all(begins).then_some(longest)
    }

    fn trie(&self) -> &TokTrie {
        self.0.factory.tok_env().tok_trie()
    }

    pub(crate) fn factory(&self) -> &ParserFactory {
        &self.0.factory
    }
}

/// The bytes of all tokens, hashed in their order.
struct TokensDigest(blake3::Hasher);

impl Default for TokensDigest {
    fn default() -> Self {
        TokensDigest(blake3::Hasher::new_derive_key("lockstep 2026 grammar vocabulary"))
    }
}

impl TokensDigest {
    fn push(&mut self, bytes: &[u8], is_special: bool) {
        self.0.update(&(bytes.len() as u64).to_le_bytes()).update(bytes).update(&[u8::from(is_special)]);
    }

    fn hash(mut self, n_vocab: usize, ends: &[Token]) -> [u8; 32] {
        self.0.update(&(n_vocab as u64).to_le_bytes());
        ends.iter().for_each(|end| _ = self.0.update(&end.to_le_bytes()));
        *self.0.finalize().as_bytes()
    }
}

/// Returns the token as the engine's tree holds it. A special token begins with a byte that occurs in no text.
fn word(bytes: &[u8], is_special: bool) -> Vec<u8> {
    match is_special {
        _ if bytes.is_empty() || bytes.len() > Vocabulary::TOKEN_BYTES_MAX => Vec::new(),
        true => [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat(),
        // A token of this single byte, which UTF-8 does not contain, would be read as the mark of a special token.
        false if bytes[0] == TokTrie::SPECIAL_TOKEN_MARKER => Vec::new(),
        false => bytes.to_vec(),
    }
}

fn factory(words: &[Vec<u8>], first_end: Token, ends: &[Token]) -> Result<ParserFactory, BadVocabulary> {
    let made = catch_panics(|| {
        let info = TokRxInfo::new(words.len() as u32, first_end);
        let trie = TokTrie::from(&info, words).with_eos_tokens(ends);
        let env: TokEnv = Arc::new(EngineEnv(trie));
        let slices = SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(|e| e.to_string())?;
        factory.quiet();
        Ok(factory)
    });
    made.and_then(|made| made).map_err(|why| BadVocabulary::Engine(engine::first_line(&why)))
}

/// The engine's view. It reports that it does not tokenize as the model's tokenizer does: a forced text may come in any
/// tokens that spell it.
struct EngineEnv(TokTrie);

impl TokenizerEnv for EngineEnv {
    fn tok_trie(&self) -> &TokTrie {
        &self.0
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<Token> {
        self.0.greedy_tokenize(bytes)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}
