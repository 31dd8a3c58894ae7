//! The folders and servers that models are kept in and fetched from, as configured on the user's machine.

use anyhow::Context;
use checkpoint::catalogue::ModelSources;
use clap::Args;
use std::path::PathBuf;

/// Where models are kept and fetched from. The variables are those that other tools use, so most are set already.
#[derive(Args, Clone)]
pub struct HubSettings {
    /// Folder for fetched models [default: lockstep in the user's cache folder, usually ~/.cache/lockstep]
    #[arg(long, env = "LOCKSTEP_CACHE", value_name = "DIR")]
    pub cache: Option<PathBuf>,
    #[arg(long, env = "HF_TOKEN", hide = true, hide_env_values = true)]
    pub hf_token: Option<String>,
    #[arg(long, env = "HF_ENDPOINT", hide = true)]
    pub hf_endpoint: Option<String>,
    #[arg(long, env = "HF_HOME", hide = true)]
    pub hf_home: Option<PathBuf>,
    #[arg(long, env = "HF_HUB_CACHE", hide = true)]
    pub hf_hub_cache: Option<PathBuf>,
    /// Ollama's models are used where they are.
    #[arg(long, env = "OLLAMA_MODELS", hide = true)]
    pub ollama_models: Option<PathBuf>,
    /// llama.cpp's models are used where they are.
    #[arg(long, env = "LLAMA_CACHE", hide = true)]
    pub llama_cache: Option<PathBuf>,
    #[arg(long, env = "XDG_CACHE_HOME", hide = true)]
    pub xdg_cache_home: Option<PathBuf>,
    #[arg(long, env = "HOME", hide = true)]
    pub home: Option<PathBuf>,
}

/// Returns the sources of models, as configured on the user's machine.
pub fn sources(hub: &HubSettings) -> anyhow::Result<ModelSources> {
    let mut sources = ModelSources::new(cache(hub)?);
    sources.hub_token = hub.hf_token.clone();
    sources.hub_cache = hub_cache(hub);
    let in_home = |path: &str| hub.home.as_ref().map(|home| home.join(path));
    sources.ollama = hub.ollama_models.clone().or_else(|| in_home(".ollama/models"));
    sources.llama_cpp = hub.llama_cache.clone().or_else(|| user_cache(hub).map(|cache| cache.join("llama.cpp")));
    if let Some(endpoint) = &hub.hf_endpoint {
        sources.hub_endpoint = endpoint.clone();
    }
    Ok(sources)
}

/// Returns the folder for files that this program fetches and keeps.
pub fn cache(hub: &HubSettings) -> anyhow::Result<PathBuf> {
    let cache = hub.cache.clone().or_else(|| user_cache(hub).map(|cache| cache.join("lockstep")));
    cache.context("there is no home folder to keep models in: give --cache DIR")
}

/// Returns the folder for compiled kernels, if there is one.
pub fn kernels(hub: &HubSettings) -> Option<PathBuf> {
    cache(hub).ok().map(|cache| cache.join("kernels"))
}

/// Returns the folder for packed weights, if there is one.
pub fn packed(hub: &HubSettings) -> Option<PathBuf> {
    cache(hub).ok().map(|cache| cache.join("packed"))
}

fn user_cache(hub: &HubSettings) -> Option<PathBuf> {
    hub.xdg_cache_home.clone().or_else(|| hub.home.as_ref().map(|home| home.join(".cache")))
}

/// Returns the folder in which Hugging Face's own tools keep their files.
fn hub_cache(hub: &HubSettings) -> Option<PathBuf> {
    let hf_home = || hub.hf_home.clone().or_else(|| hub.home.as_ref().map(|home| home.join(".cache/huggingface")));
    hub.hf_hub_cache.clone().or_else(|| hf_home().map(|home| home.join("hub")))
}
