//! Names of files in one folder: which of them are one model, and of which variant. Knows no repository.

use crate::error::{Error, Result};
use crate::split::GgufPart;
use std::path::{Path, PathBuf};

/// The file itself, or all parts of the split model whose first part it is.
pub fn all_parts(file: &str) -> Vec<String> {
    GgufPart::of(file).map_or_else(|| vec![file.to_owned()], |part| part.names().collect())
}

/// The variants that are taken where none is named, the best first. Behind them comes any other.
const PREFERRED: [&str; 2] = ["Q4_K_M", "Q8_0"];

/// Words in the names of GGUFs that are no model of text: image encoders, calibration data, heads that draft.
const PARTS_OF_MODELS: [&str; 8] = ["mmproj", "imatrix", "mtp", "draft", "eagle", "eagle3", "medusa", "dflash"];

/// The GGUFs that a variant may mean, the likeliest first; for a split model, its first part. Without a variant these
/// are all models, in the order in which they are tried.
pub fn gguf_choices<'a>(files: &'a [String], variant: Option<&str>) -> Vec<&'a str> {
    let is_first = |file: &str| GgufPart::of(file).is_none_or(|part| part.number == 1);
    let ggufs = files.iter().map(String::as_str).filter(|file| file.ends_with(".gguf") && is_first(file));
    if let Some(path) = variant.filter(|variant| variant.ends_with(".gguf")) {
        // A fetched file has no folder, and a name may leave the folder out.
        let is_like = |file: &&str| base_name(file) == path || *file == base_name(path);
        let named: Vec<&str> = ggufs.clone().filter(|file| *file == path).collect();
        return if named.is_empty() { ggufs.filter(is_like).collect() } else { named };
    }
    let models = ggufs.filter(|file| is_model(file));
    match variant {
        Some(variant) => {
            let mut fitting: Vec<&str> = models.filter(|file| is_variant(file, variant)).collect();
            // `m-Q4_K_M` is that variant before `m-UD-Q4_K_M` is.
            fitting.sort_by_key(|file| base_name(file).len());
            fitting
        }
        None => {
            let rank = |file: &&str| PREFERRED.iter().position(|variant| is_variant(file, variant));
            let mut all: Vec<&str> = models.collect();
            all.sort_by_key(|file| (rank(file).unwrap_or(PREFERRED.len()), base_name(file).len()));
            all
        }
    }
}

/// Whether a GGUF's name is that of a model, and not of a part that stands beside one.
pub fn is_model(file: &str) -> bool {
    let name = base_name(file).to_ascii_lowercase();
    !name.split(['-', '.', '_']).any(|word| PARTS_OF_MODELS.contains(&word))
}

/// `model-Q4_K_M.gguf` and `model.q4_k_m.gguf` are the variant Q4_K_M, and so is `Q4_K_M/model.gguf`;
/// `model-IQ4_K_M.gguf` is not.
pub fn is_variant(file: &str, variant: &str) -> bool {
    let stem = GgufPart::of(file).map_or(file.trim_end_matches(".gguf"), |part| part.stem).to_ascii_lowercase();
    let variant = variant.to_ascii_lowercase();
    let ends = |text: &str| {
        let before = text.strip_suffix(&variant);
        before.is_some_and(|before| before.is_empty() || before.ends_with(['-', '.', '_', '/']))
    };
    ends(&stem) || stem.rsplit_once('/').is_some_and(|(folder, _)| ends(folder))
}

/// The name of a file without the folders before it.
pub fn base_name(file: &str) -> &str {
    file.rsplit('/').next().unwrap_or(file)
}

/// The names in a folder, and in its folders as `folder/name`.
pub fn file_names_below(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for name in file_names(folder)? {
        if folder.join(&name).is_dir() {
            names.extend(file_names(&folder.join(&name))?.into_iter().map(|inner| format!("{name}/{inner}")));
        } else {
            names.push(name);
        }
    }
    Ok(names)
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
