//! Finds the tokenizer of a model's folder: `tokenizer.json`, or else a vocabulary in another format.

use crate::error::{Error, Result};
use crate::tokenizer::parts::TokenizerParts;
use crate::tokenizer::ranks::RankedVocabulary;
use crate::tokenizer::{from_json, tekken, tiktoken};
use serde_json::Value;
use std::path::{Path, PathBuf};

pub(super) fn read_parts(folder: &Path) -> Result<TokenizerParts> {
    match read_ranked(folder)? {
        Some((path, vocabulary)) => vocabulary.into_parts().map_err(Error::with_path(&path)),
        None => from_json::read_parts(&folder.join("tokenizer.json")),
    }
}

/// A `tokenizer.json` equivalent to the folder's vocabulary, if the folder has no `tokenizer.json`.
pub(crate) fn json_of_folder(folder: &Path) -> Result<Option<Value>> {
    Ok(read_ranked(folder)?.map(|(_, vocabulary)| vocabulary.json()))
}

/// The folder's vocabulary without merges, and the file that has it.
fn read_ranked(folder: &Path) -> Result<Option<(PathBuf, RankedVocabulary)>> {
    if folder.join("tokenizer.json").exists() {
        return Ok(None);
    }
    let tekken = folder.join("tekken.json");
    if tekken.exists() {
        let vocabulary = tekken::read_vocabulary(&tekken)?;
        return Ok(Some((tekken, vocabulary)));
    }
    if let Some(ranks) = tiktoken::find(folder)? {
        let vocabulary = tiktoken::read_vocabulary(&ranks)?;
        return Ok(Some((ranks, vocabulary)));
    }
    if folder.join("tokenizer.model").exists() {
        let what = "a folder with a tokenizer.model and no tokenizer.json (saving its tokenizer with transformers \
                    writes one), which"
            .to_owned();
        return Err(Error::Unsupported { path: folder.to_owned(), what });
    }
    Ok(None)
}
