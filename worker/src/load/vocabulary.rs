//! The bytes of a model's tokens, read when the first request with a grammar comes. Knows no grammar.

use checkpoint::Checkpoint;
use grammar::Vocabulary;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use types::Token;

/// A model's vocabulary, which is made once it is wanted. It stays with the weights from one epoch to the next.
pub struct LazyVocabulary {
    model: PathBuf,
    n_vocab: usize,
    ends: Vec<Token>,
    made: Mutex<Option<Vocabulary>>,
}

impl LazyVocabulary {
    pub fn new(model: &Path, n_vocab: u32, ends: &[Token]) -> LazyVocabulary {
        let (model, ends) = (model.to_owned(), ends.to_vec());
        LazyVocabulary { model, n_vocab: n_vocab as usize, ends, made: Mutex::new(None) }
    }

    /// What cannot be read is tried again for the next request.
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
