//! Models that other programs have fetched: Ollama's store and llama.cpp's cache. Reads them in place and writes
//! nothing there.
//!
//! Ollama: `manifests/registry.ollama.ai/library/<name>/<tag>` is JSON whose layer of the type `..image.model` names a
//! GGUF in `blobs/`. llama.cpp: `<org>_<repo>_<file>.gguf` in one folder.

use crate::catalogue::files::{all_parts, file_names, gguf_choices};
use crate::catalogue::model::{HubId, ModelSources};
use crate::small_files::is_plain_name;
use serde_json::Value;
use std::path::{Path, PathBuf};

const OLLAMA_LIBRARY: &str = "manifests/registry.ollama.ai/library";
const OLLAMA_WEIGHTS: &str = "application/vnd.ollama.image.model";
/// The most bytes of a manifest; usual ones have a few hundred.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// Finds `name` or `name:tag` as Ollama does; without a tag it is `latest`.
pub fn find_ollama(model: &str, sources: &ModelSources) -> Option<PathBuf> {
    let store = sources.ollama.as_ref()?;
    let (name, tag) = model.split_once(':').unwrap_or((model, "latest"));
    if ![name, tag].into_iter().all(is_plain_name) {
        return None;
    }
    weights(store, &store.join(OLLAMA_LIBRARY).join(name).join(tag))
}

/// Every model of Ollama's library that is here, as `name:tag`.
pub fn list_ollama(sources: &ModelSources) -> Vec<(String, PathBuf)> {
    let Some(store) = &sources.ollama else { return Vec::new() };
    let library = store.join(OLLAMA_LIBRARY);
    let names = file_names(&library).unwrap_or_default().into_iter();
    let tagged = names.flat_map(|name| {
        let tags = file_names(&library.join(&name)).unwrap_or_default();
        tags.into_iter().map(move |tag| (name.clone(), tag))
    });
    let here = tagged.filter_map(|(name, tag)| {
        let path = weights(store, &library.join(&name).join(&tag))?;
        Some((format!("{name}:{tag}"), path))
    });
    here.collect()
}

fn weights(store: &Path, manifest: &Path) -> Option<PathBuf> {
    let is_small = std::fs::metadata(manifest).is_ok_and(|file| file.is_file() && file.len() <= MANIFEST_BYTES_MAX);
    let manifest: Value = serde_json::from_slice(&std::fs::read(manifest).ok().filter(|_| is_small)?).ok()?;
    let layer = manifest["layers"].as_array()?.iter().find(|layer| layer["mediaType"] == OLLAMA_WEIGHTS)?;
    let digest = layer["digest"].as_str()?.strip_prefix("sha256:")?;
    let is_digest = digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit());
    let path = store.join("blobs").join(format!("sha256-{digest}"));
    (is_digest && path.is_file()).then_some(path)
}

/// The file of a hub id in llama.cpp's cache.
pub fn find_llama_cpp(id: HubId<'_>, sources: &ModelSources) -> Option<PathBuf> {
    let folder = sources.llama_cpp.as_ref()?;
    let prefix = format!("{}_", id.repo.replace('/', "_"));
    let files = file_names(folder).ok()?;
    let of_repo: Vec<String> = files.iter().filter_map(|file| file.strip_prefix(&prefix)).map(str::to_owned).collect();
    let mut choices = gguf_choices(&of_repo, id.variant).into_iter().map(|file| format!("{prefix}{file}"));
    choices.find(|file| is_first(file, &files)).map(|file| folder.join(file))
}

/// Every GGUF in llama.cpp's cache; for a split one, the first part.
pub fn list_llama_cpp(sources: &ModelSources) -> Vec<PathBuf> {
    let Some(folder) = &sources.llama_cpp else { return Vec::new() };
    let files = file_names(folder).unwrap_or_default();
    let models = files.iter().filter(|file| file.ends_with(".gguf") && is_first(file, &files));
    models.map(|file| folder.join(file)).collect()
}

fn is_first(file: &str, files: &[String]) -> bool {
    let parts = all_parts(file);
    parts[0] == file && parts.iter().all(|part| files.contains(part))
}
