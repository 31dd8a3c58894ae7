//! The bytes of a model's tokens, read at the first request with a grammar, and the grammars compiled for them. Has no
//! knowledge of requests.

use crate::load::kept_matchers::MatcherCache;
use checkpoint::Checkpoint;
use grammar::{GrammarLimits, Matcher, MatcherError, TokenMask, Vocabulary};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use types::{Grammar, Token};

/// A model's vocabulary, made at its first use. It stays with the weights from one epoch to the next.
pub struct LazyVocabulary {
    model: PathBuf,
    n_vocab: usize,
    ends: Vec<Token>,
    made: Mutex<Option<Vocabulary>>,
    matchers: Mutex<MatcherCache>,
}

impl LazyVocabulary {
    pub fn new(model: &Path, n_vocab: u32, ends: &[Token]) -> LazyVocabulary {
        let (model, ends) = (model.to_owned(), ends.to_vec());
        LazyVocabulary { model, n_vocab: n_vocab as usize, ends, made: Mutex::new(None), matchers: Mutex::default() }
    }

    fn matchers(&self) -> MutexGuard<'_, MatcherCache> {
        self.matchers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a matcher at the start of an answer: a copy of an earlier one, or a new one.
    pub fn matcher(&self, grammar: &Grammar) -> Result<Matcher, MatcherError> {
        if let Some(copy) = self.matchers().copy_of(grammar) {
            return Ok(copy);
        }
        let vocabulary = self.get().map_err(MatcherError::Grammar)?;
        let mut matcher = Matcher::new(&vocabulary, grammar, &GrammarLimits::default())?;
        // The first mask is the same for all. Every matcher makes it, so that keeping copies changes no limit's count.
        matcher.fill_mask(&mut TokenMask::default())?;
        if let Some(copy) = matcher.copy() {
            self.matchers().keep(grammar, copy);
        }
        Ok(matcher)
    }

    /// Returns the vocabulary. A failed read is tried again for the next request.
    pub fn get(&self) -> Result<Vocabulary, String> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(vocabulary) = &*made {
            return Ok(vocabulary.clone());
        }
        let table = Checkpoint::open(&self.model).and_then(|checkpoint| checkpoint.token_table());
        let table = table.map_err(|error| error.to_string())?;
        let tokens = table.tokens().take(self.n_vocab);
        let vocabulary = Vocabulary::new(tokens, self.n_vocab, &self.ends).map_err(|error| error.to_string())?;
        *made = Some(vocabulary.clone());
        Ok(vocabulary)
    }
}
