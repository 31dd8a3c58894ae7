//! Models in this program's cache and in a Hugging Face cache, both laid out by repository. Fetches nothing.

use crate::catalogue::entries::{CATALOGUE, CatalogueEntry};
use crate::catalogue::files::{all_parts, base_name, file_names, file_names_below, gguf_choices};
use crate::catalogue::model::{HubId, ListedModel, LocatedModel, ModelOrigin, ModelSources};
use crate::catalogue::others;
use crate::error::Result;
use crate::safetensors;
use crate::split::GgufPart;
use std::path::{Path, PathBuf};

pub fn find_entry(entry: &CatalogueEntry, sources: &ModelSources) -> Option<LocatedModel> {
    let ours = sources.folder(&entry.folder_name()).join(entry.file);
    let theirs = snapshots(HubId { repo: entry.hub_id, revision: None, variant: None }, sources)
        .into_iter()
        .map(|folder| folder.join(entry.file));
    let whole = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|metadata| metadata.len() == entry.bytes);
    let path = std::iter::once(ours).chain(theirs).find(whole)?;
    Some(LocatedModel { name: entry.name.to_owned(), path })
}

/// Finds a folder with a whole model, or the one GGUF of the requested variant.
pub fn find_hub(id: HubId<'_>, sources: &ModelSources) -> Result<Option<LocatedModel>> {
    let folders = std::iter::once(sources.folder(&id.folder_name())).chain(snapshots(id, sources));
    for folder in folders.filter(|folder| folder.is_dir()) {
        if let Some(path) = find_in(&folder, id)? {
            return Ok(Some(LocatedModel { name: id.name(), path }));
        }
    }
    // llama.cpp's folder has no revisions.
    let of_llama_cpp = id.revision.is_none().then(|| others::find_llama_cpp(id, sources)).flatten();
    Ok(of_llama_cpp.map(|path| LocatedModel { name: id.name(), path }))
}

fn find_in(folder: &Path, id: HubId<'_>) -> Result<Option<PathBuf>> {
    if id.variant.is_none() && is_whole(folder) {
        return Ok(Some(folder.to_owned()));
    }
    let files = file_names_below(folder)?;
    let is_here = |file: &&str| all_parts(file).iter().all(|part| files.contains(part));
    Ok(gguf_choices(&files, id.variant).into_iter().find(is_here).map(|file| folder.join(file)))
}

/// Whether a folder holds a complete safetensors model: every file of its index, each as long as its header requires.
pub fn is_whole(folder: &Path) -> bool {
    folder.join("config.json").exists() && safetensors::has_all_shards(folder)
}

/// Returns the revisions of a repository in the Hugging Face cache: the named one, or all, with the latest one of
/// `main` first.
fn snapshots(id: HubId<'_>, sources: &ModelSources) -> Vec<PathBuf> {
    let Some(cache) = &sources.hub_cache else { return Vec::new() };
    let root = cache.join(format!("models--{}", id.repo.replace('/', "--")));
    let revision_name = id.revision.unwrap_or("main");
    let commit = std::fs::read_to_string(root.join("refs").join(revision_name)).unwrap_or_default();
    let is_selected = |revision: &String| revision == commit.trim() || revision == revision_name;
    let revisions = file_names(&root.join("snapshots")).unwrap_or_default();
    let (mut first, others): (Vec<_>, Vec<_>) = revisions.into_iter().partition(is_selected);
    if id.revision.is_none() {
        first.extend(others);
    }
    first.into_iter().map(|revision| root.join("snapshots").join(revision)).collect()
}

pub fn list(sources: &ModelSources) -> Vec<ListedModel> {
    let folders = file_names(&sources.cache.join("models")).unwrap_or_default();
    // An unfinished fetch is not a model.
    folders.iter().filter(|name| !name.ends_with(".part")).flat_map(|folder| list_folder(folder, sources)).collect()
}

fn list_folder(name: &str, sources: &ModelSources) -> Vec<ListedModel> {
    if let Some(entry) = CATALOGUE.iter().find(|entry| entry.folder_name() == name) {
        let here = find_entry(entry, sources).into_iter();
        return here
            .map(|LocatedModel { name, path }| ListedModel { model: name, path, origin: ModelOrigin::Pulled })
            .collect();
    }
    let Some((org, rest)) = name.split_once("--") else { return Vec::new() };
    let (repo, variant) = rest.split_once("--").map_or((rest, None), |(repo, variant)| (repo, Some(variant)));
    let repo = format!("{org}/{}", repo.replace('+', "/"));
    // Under the name that it was fetched by, because a folder is found by no other name.
    let named = |file: &str| match variant {
        None => repo.clone(),
        Some(file) if file.ends_with(".gguf") => format!("{repo}:{}", file.replace("--", "/")),
        Some(variant) => format!("{repo}:{}", variant_of(file).unwrap_or(variant)),
    };
    list_in(&sources.folder(name), &repo, ModelOrigin::Pulled, named)
}

/// The models of the Hugging Face cache, each in the revision that its name resolves to.
pub fn list_hub(sources: &ModelSources) -> Vec<ListedModel> {
    let Some(cache) = &sources.hub_cache else { return Vec::new() };
    let folders = file_names(cache).unwrap_or_default().into_iter();
    let repos = folders.filter_map(|folder| Some(folder.strip_prefix("models--")?.replacen("--", "/", 1)));
    let newest = repos.filter_map(|repo| {
        let id = HubId { repo: &repo, revision: None, variant: None };
        Some((snapshots(id, sources).into_iter().next()?, repo))
    });
    let list = |(folder, repo): (PathBuf, String)| {
        let named = |file: &str| format!("{repo}:{}", variant_of(file).unwrap_or(file));
        list_in(&folder, &repo, ModelOrigin::HuggingFace, named)
    };
    newest.flat_map(list).collect()
}

/// Returns the models in a repository's folder: the whole model, or each of its GGUFs by the name from its file.
fn list_in(folder: &Path, repo: &str, origin: ModelOrigin, named: impl Fn(&str) -> String) -> Vec<ListedModel> {
    if is_whole(folder) {
        return vec![ListedModel { model: repo.to_owned(), path: folder.to_owned(), origin }];
    }
    let files = file_names_below(folder).unwrap_or_default();
    let is_here = |file: &&str| all_parts(file).iter().all(|part| files.contains(part));
    let here = gguf_choices(&files, None).into_iter().filter(is_here);
    here.map(|file| ListedModel { model: named(file), path: folder.join(file), origin }).collect()
}

/// `Q4_K_M` of `model-Q4_K_M.gguf`: what follows the last separator that is not part of the variant.
fn variant_of(file: &str) -> Option<&str> {
    let name = base_name(file);
    let stem = GgufPart::of(name).map_or(name.strip_suffix(".gguf")?, |part| part.stem);
    let variant = stem.rsplit(['-', '.']).next()?;
    (variant.len() < stem.len() && !variant.is_empty()).then_some(variant)
}
