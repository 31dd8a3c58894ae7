//! Models in this program's cache and in a Hugging Face cache, both laid out by repository. Fetches nothing.

use crate::catalogue::entries::{CATALOGUE, CatalogueEntry};
use crate::catalogue::files::{all_parts, choose_gguf, file_names};
use crate::catalogue::model::{HubId, Listed, Located, Origin, Sources};
use crate::catalogue::others;
use crate::error::Result;
use crate::split::GgufPart;
use std::path::{Path, PathBuf};

pub fn find_entry(entry: &CatalogueEntry, sources: &Sources) -> Option<Located> {
    let ours = sources.folder(&entry.folder_name()).join(entry.file);
    let theirs = snapshots(entry.hub_id, sources).into_iter().map(|folder| folder.join(entry.file));
    let whole = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|metadata| metadata.len() == entry.bytes);
    let path = std::iter::once(ours).chain(theirs).find(whole)?;
    Some(Located { name: entry.name.to_owned(), path })
}

/// Finds a folder with a whole model, or the one GGUF of the requested variant.
pub fn find_hub(id: HubId<'_>, sources: &Sources) -> Result<Option<Located>> {
    let folders = std::iter::once(sources.folder(&id.folder_name())).chain(snapshots(id.repo, sources));
    for folder in folders.filter(|folder| folder.is_dir()) {
        if let Some(path) = find_in(&folder, id)? {
            let name = id.repo.rsplit('/').next().unwrap_or(id.repo).to_owned();
            return Ok(Some(Located { name, path }));
        }
    }
    let name = id.repo.rsplit('/').next().unwrap_or(id.repo).to_owned();
    Ok(others::find_llama_cpp(id, sources).map(|path| Located { name, path }))
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

/// The revisions of a repository in the Hugging Face cache, first the one that `main` last was.
fn snapshots(repo: &str, sources: &Sources) -> Vec<PathBuf> {
    let Some(cache) = &sources.hub_cache else { return Vec::new() };
    let root = cache.join(format!("models--{}", repo.replace('/', "--")));
    let main = std::fs::read_to_string(root.join("refs/main")).unwrap_or_default();
    let revisions = file_names(&root.join("snapshots")).unwrap_or_default();
    let (mut first, others): (Vec<_>, Vec<_>) = revisions.into_iter().partition(|revision| revision == main.trim());
    first.extend(others);
    first.into_iter().map(|revision| root.join("snapshots").join(revision)).collect()
}

pub fn list(sources: &Sources) -> Vec<Listed> {
    let folders = file_names(&sources.cache.join("models")).unwrap_or_default();
    // An unfinished fetch is not a model.
    folders.iter().filter(|name| !name.ends_with(".part")).flat_map(|folder| list_folder(folder, sources)).collect()
}

fn list_folder(name: &str, sources: &Sources) -> Vec<Listed> {
    if let Some(entry) = CATALOGUE.iter().find(|entry| entry.folder_name() == name) {
        let here = find_entry(entry, sources).into_iter();
        return here.map(|Located { name, path }| Listed { model: name, path, origin: Origin::Pulled }).collect();
    }
    let Some((org, rest)) = name.split_once("--") else { return Vec::new() };
    let repo = rest.split_once("--").map_or(rest, |(repo, _variant)| repo);
    list_in(&sources.folder(name), &format!("{org}/{repo}"), Origin::Pulled)
}

/// The models of the Hugging Face cache, each in the revision that its name resolves to.
pub fn list_hub(sources: &Sources) -> Vec<Listed> {
    let Some(cache) = &sources.hub_cache else { return Vec::new() };
    let folders = file_names(cache).unwrap_or_default().into_iter();
    let repos = folders.filter_map(|folder| Some(folder.strip_prefix("models--")?.replacen("--", "/", 1)));
    let newest = repos.filter_map(|repo| Some((snapshots(&repo, sources).into_iter().next()?, repo)));
    newest.flat_map(|(folder, repo)| list_in(&folder, &repo, Origin::HuggingFace)).collect()
}

/// The models in a repository's folder: the whole model, or each of its GGUFs.
fn list_in(folder: &Path, repo: &str, origin: Origin) -> Vec<Listed> {
    let whole = HubId { repo, variant: None };
    if let Ok(Some(path)) = find_in(folder, whole) {
        let variant = path.file_name().and_then(|file| variant_of(file.to_str()?)).filter(|_| path.is_file());
        let model = variant.map_or_else(|| repo.to_owned(), |variant| format!("{repo}:{variant}"));
        return vec![Listed { model, path, origin }];
    }
    let files = file_names(folder).unwrap_or_default();
    let of_variant = |file: &String| {
        let variant = variant_of(file)?;
        let id = HubId { repo, variant: Some(variant) };
        let path = find_in(folder, id).ok()?.filter(|path| path.ends_with(file))?;
        Some(Listed { model: format!("{repo}:{variant}"), path, origin })
    };
    files.iter().filter_map(of_variant).collect()
}

/// `Q4_K_M` of `model-Q4_K_M.gguf`: what follows the last separator that is not part of the variant.
fn variant_of(file: &str) -> Option<&str> {
    let stem = GgufPart::of(file).map_or(file.strip_suffix(".gguf")?, |part| part.stem);
    let variant = stem.rsplit(['-', '.']).next()?;
    (variant.len() < stem.len() && !variant.is_empty()).then_some(variant)
}
