//! Names of files in one folder: which of them are one model, and of which variant. Knows no repository.

use crate::error::{Error, Result};
use crate::split::GgufPart;
use std::path::{Path, PathBuf};

/// The file itself, or all parts of the split model whose first part it is.
pub fn all_parts(file: &str) -> Vec<String> {
    GgufPart::of(file).map_or_else(|| vec![file.to_owned()], |part| part.names().collect())
}

/// The GGUF of a variant; without a variant, the only GGUF. For a split model, its first part.
pub fn choose_gguf<'a>(files: &'a [String], variant: Option<&str>) -> Option<&'a String> {
    let is_first = |file: &str| GgufPart::of(file).is_none_or(|part| part.number == 1);
    let ggufs = files.iter().filter(|file| file.ends_with(".gguf") && is_first(file));
    let fits = |file: &&String| variant.is_none_or(|variant| is_variant(file, variant));
    let mut fitting = ggufs.filter(fits);
    match (fitting.next(), fitting.next()) {
        (Some(only), None) => Some(only),
        _ => None,
    }
}

/// `model-Q4_K_M.gguf` and `model.q4_k_m.gguf` are the variant Q4_K_M; `model-IQ4_K_M.gguf` is not.
pub fn is_variant(file: &str, variant: &str) -> bool {
    let stem = GgufPart::of(file).map_or(file.trim_end_matches(".gguf"), |part| part.stem).to_ascii_lowercase();
    let before = stem.strip_suffix(&variant.to_ascii_lowercase());
    before.is_some_and(|before| before.is_empty() || before.ends_with(['-', '.', '_']))
}

pub fn file_names(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder))? {
        let entry = entry.map_err(Error::io(folder))?;
        names.extend(entry.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// All files of a model: the parts of a split one, or the content of a folder.
pub fn files_of(path: &Path) -> Vec<PathBuf> {
    if path.is_dir() {
        return file_names(path).unwrap_or_default().into_iter().map(|file| path.join(file)).collect();
    }
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    all_parts(name).into_iter().map(|part| path.with_file_name(part)).collect()
}
