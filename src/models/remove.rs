//! `rm`: removes models that this program has fetched. Does not touch the files of other programs.

use super::hub_name::to_hub_name;
use crate::settings::hub::{HubSettings, cache, packed, sources};
use anyhow::{Context, anyhow, bail};
use checkpoint::Checkpoint;
use checkpoint::catalogue::{self, ListedModel, ModelOrigin};
use clap::Args;
use indicatif::HumanBytes;
use std::path::{Path, PathBuf};
use tools::out;

#[derive(Args)]
pub struct RemoveCommand {
    /// Names as `lockstep list` shows them
    #[arg(required = true)]
    pub models: Vec<String>,
    #[command(flatten)]
    pub hub: HubSettings,
}

pub fn remove(command: &RemoveCommand) -> anyhow::Result<()> {
    let ours = cache(&command.hub)?.join("models");
    for model in &command.models {
        let here = catalogue::list(&sources(&command.hub)?);
        let name = &*to_hub_name(model);
        let found = find(catalogue::entry(name).map_or(name, |entry| entry.name), &here)?;
        let folder = folder_of(found, &ours)?;
        let mut n_bytes = catalogue::bytes_of(&found.path);
        let kept = packed(&command.hub).zip(Checkpoint::open(&found.path).ok());
        if let Some((folder, checkpoint)) = kept {
            // Most models have no packed weights: only those that were served here.
            n_bytes += worker::remove_packed(&folder, &checkpoint).unwrap_or(0);
        }
        std::fs::remove_dir_all(&folder).with_context(|| format!("{} cannot be removed", folder.display()))?;
        out::print_line(&format!("removed {} ({})", found.model, HumanBytes(n_bytes)))?;
    }
    Ok(())
}

fn find<'a>(model: &str, here: &'a [ListedModel]) -> anyhow::Result<&'a ListedModel> {
    let ours = |listed: &&ListedModel| listed.origin == ModelOrigin::Pulled;
    let same = |listed: &&ListedModel| listed.model == model;
    // Of two models with this name, the one that this program fetched is removed.
    let found = here.iter().filter(ours).find(same).or_else(|| here.iter().find(same));
    found.ok_or_else(|| {
        if Path::new(model).exists() {
            return anyhow!(
                "{model} is a path: `rm` removes only models that were fetched, by the names of `lockstep list`"
            );
        }
        let like = router::nearest(model, here.iter().map(|listed| &*listed.model));
        let like = like.map_or_else(String::new, |like| format!("; did you mean {like}?"));
        anyhow!("there is no model {model} here: `lockstep list` shows all{like}")
    })
}

/// Returns the folder that holds only this model, if this program keeps it.
fn folder_of(found: &ListedModel, ours: &Path) -> anyhow::Result<PathBuf> {
    let inside = found.path.strip_prefix(ours).ok().and_then(|inside| inside.components().next());
    match inside {
        Some(folder) => Ok(ours.join(folder)),
        None => {
            let (model, path) = (&found.model, found.path.display());
            let owner = match found.origin {
                ModelOrigin::Ollama => "Ollama",
                ModelOrigin::LlamaCpp => "llama.cpp",
                ModelOrigin::HuggingFace | ModelOrigin::Pulled => "Hugging Face's tools",
            };
            bail!("{model} was fetched by {owner} and is in {path}: remove it there")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct RemoveLine {
        #[command(flatten)]
        remove: RemoveCommand,
    }

    fn rm(cache: &Path, model: &str) -> anyhow::Result<()> {
        let cache = cache.to_str().unwrap();
        let words = ["rm", model, "--cache", cache, "--hf-hub-cache", &format!("{cache}/hub"), "--home", cache];
        remove(&RemoveLine::parse_from(words).remove)
    }

    #[test]
    fn what_was_fetched_goes_and_what_others_keep_stays() {
        let cache = std::env::temp_dir().join(format!("lockstep-rm-{}", std::process::id()));
        let folder = cache.join("models/org--name--Q4_0");
        let theirs = cache.join("hub/models--org--other/snapshots/1");
        for (folder, file) in [(&folder, "a-Q4_0.gguf"), (&theirs, "b-Q8_0.gguf")] {
            std::fs::create_dir_all(folder).unwrap();
            std::fs::write(folder.join(file), "x").unwrap();
        }
        let error_of = |model: &str| format!("{:#}", rm(&cache, model).unwrap_err());
        assert!(error_of("org/nme:Q4_0").contains("did you mean org/name:Q4_0?"), "{}", error_of("org/nme:Q4_0"));
        assert!(
            error_of("org/other:Q8_0").contains("fetched by Hugging Face's tools"),
            "{}",
            error_of("org/other:Q8_0")
        );
        assert!(error_of("/").contains("/ is a path"), "{}", error_of("/"));
        assert!(theirs.join("b-Q8_0.gguf").exists());
        rm(&cache, "hf.co/org/name:Q4_0").unwrap();
        assert!(!folder.exists() && cache.join("models").exists());
        std::fs::remove_dir_all(&cache).unwrap();
    }
}
