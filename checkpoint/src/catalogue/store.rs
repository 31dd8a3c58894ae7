//! Models in this program's cache and in a Hugging Face cache. Fetches nothing.

use crate::catalogue::{CATALOGUE, Entry, HubId, Located, Sources};
use crate::error::{Error, Result};
use crate::split::Part;
use std::path::{Path, PathBuf};

pub fn find_entry(entry: &Entry, sources: &Sources) -> Option<Located> {
    let ours = sources.folder(entry.name).join(entry.file);
    let theirs = snapshots(entry.hub_id, sources).into_iter().map(|folder| folder.join(entry.file));
    let whole = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|metadata| metadata.len() == entry.bytes);
    let path = std::iter::once(ours).chain(theirs).find(whole)?;
    Some(Located { name: entry.name.to_owned(), path })
}

/// A folder that holds a whole model, or the one GGUF of the variant that is asked for.
pub fn find_hub(id: HubId<'_>, sources: &Sources) -> Result<Option<Located>> {
    let folders = std::iter::once(sources.folder(&id.folder_name())).chain(snapshots(id.repo, sources));
    for folder in folders.filter(|folder| folder.is_dir()) {
        if let Some(path) = find_in(&folder, id)? {
            let name = id.repo.rsplit('/').next().unwrap_or(id.repo).to_owned();
            return Ok(Some(Located { name, path }));
        }
    }
    Ok(None)
}

fn find_in(folder: &Path, id: HubId<'_>) -> Result<Option<PathBuf>> {
    let is_whole = folder.join("model.safetensors").exists() || folder.join("model.safetensors.index.json").exists();
    if id.variant.is_none() && folder.join("config.json").exists() && is_whole {
        return Ok(Some(folder.to_owned()));
    }
    let files = file_names(folder)?;
    let Some(file) = choose_gguf(&files, id.variant) else { return Ok(None) };
    let is_here = all_parts(file).iter().all(|part| files.contains(part));
    Ok(is_here.then(|| folder.join(file)))
}

/// A file, or all files of the split model that it is the first of.
pub fn all_parts(file: &str) -> Vec<String> {
    Part::of(file).map_or_else(|| vec![file.to_owned()], |part| part.names().collect())
}

/// The GGUF of a variant; without one, the only GGUF. Of a split model it is the first part.
pub fn choose_gguf<'a>(files: &'a [String], variant: Option<&str>) -> Option<&'a String> {
    let is_first = |file: &str| Part::of(file).is_none_or(|part| part.number == 1);
    let ggufs = files.iter().filter(|file| file.ends_with(".gguf") && is_first(file));
    let fits = |file: &&String| variant.is_none_or(|variant| is_variant(file, variant));
    let mut fitting = ggufs.filter(fits);
    match (fitting.next(), fitting.next()) {
        (Some(only), None) => Some(only),
        _ => None,
    }
}

/// `model-Q4_K_M.gguf` and `model.q4_k_m.gguf` are the variant Q4_K_M; `model-IQ4_K_M.gguf` is not.
fn is_variant(file: &str, variant: &str) -> bool {
    let stem = Part::of(file).map_or(file.trim_end_matches(".gguf"), |part| part.stem).to_ascii_lowercase();
    let before = stem.strip_suffix(&variant.to_ascii_lowercase());
    before.is_some_and(|before| before.is_empty() || before.ends_with(['-', '.', '_']))
}

fn file_names(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder))? {
        let entry = entry.map_err(Error::io(folder))?;
        names.extend(entry.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// The revisions of a repository in the Hugging Face cache, the one that `main` was last first.
fn snapshots(repo: &str, sources: &Sources) -> Vec<PathBuf> {
    let Some(cache) = &sources.hub_cache else { return Vec::new() };
    let root = cache.join(format!("models--{}", repo.replace('/', "--")));
    let main = std::fs::read_to_string(root.join("refs/main")).unwrap_or_default();
    let revisions = file_names(&root.join("snapshots")).unwrap_or_default();
    let (mut first, others): (Vec<_>, Vec<_>) = revisions.into_iter().partition(|revision| revision == main.trim());
    first.extend(others);
    first.into_iter().map(|revision| root.join("snapshots").join(revision)).collect()
}

pub fn list(sources: &Sources) -> Vec<Located> {
    let folders = file_names(&sources.cache.join("models")).unwrap_or_default();
    // What is still being fetched is no model.
    folders.iter().filter(|name| !name.ends_with(".part")).flat_map(|folder| list_folder(folder, sources)).collect()
}

fn list_folder(name: &str, sources: &Sources) -> Vec<Located> {
    if let Some(entry) = CATALOGUE.iter().find(|entry| entry.name == name) {
        return find_entry(entry, sources).into_iter().collect();
    }
    let folder = sources.folder(name);
    let Some((org, rest)) = name.split_once("--") else { return Vec::new() };
    let repo = rest.split_once("--").map_or(rest, |(repo, _variant)| repo);
    let whole = HubId { repo: &format!("{org}/{repo}"), variant: None };
    if let Ok(Some(path)) = find_in(&folder, whole) {
        return vec![Located { name: whole.repo.to_owned(), path }];
    }
    let ggufs = file_names(&folder).unwrap_or_default().into_iter().filter(|file| file.ends_with(".gguf"));
    ggufs.map(|file| Located { name: whole.repo.to_owned(), path: folder.join(file) }).collect()
}
