//! From a model's name to its files, fetched if they are not here, with a bar while that takes.

use crate::args::Hub;
use anyhow::Context;
use checkpoint::catalogue::{self, Located, Progress, Sources};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::PathBuf;

/// Where models come from, out of what the user's machine says already.
pub fn sources(hub: &Hub) -> anyhow::Result<Sources> {
    let user_cache = || hub.xdg_cache_home.clone().or_else(|| hub.home.as_ref().map(|home| home.join(".cache")));
    let cache = hub.cache.clone().or_else(|| user_cache().map(|cache| cache.join("lockstep")));
    let mut sources = Sources::new(cache.context("there is no home folder to keep models in: give --cache DIR")?);
    sources.hub_token = hub.hf_token.clone();
    sources.hub_cache = hub_cache(hub);
    if let Some(endpoint) = &hub.hf_endpoint {
        sources.hub_endpoint = endpoint.clone();
    }
    Ok(sources)
}

/// Where Hugging Face's own tools keep what they fetched.
fn hub_cache(hub: &Hub) -> Option<PathBuf> {
    let hf_home = || hub.hf_home.clone().or_else(|| hub.home.as_ref().map(|home| home.join(".cache/huggingface")));
    hub.hf_hub_cache.clone().or_else(|| hf_home().map(|home| home.join("hub")))
}

/// The model's files, fetched first if need be.
pub fn ready(model: &str, hub: &Hub) -> anyhow::Result<Located> {
    let bar = ProgressBar::no_length();
    let result = catalogue::pull(model, &sources(hub)?, &mut |progress| show(&bar, progress));
    bar.finish_and_clear();
    Ok(result?)
}

fn show(bar: &ProgressBar, progress: Progress<'_>) {
    // A template that does not parse is a bug that the first fetch shows; plain progress serves until then.
    if bar.length() != progress.total {
        let template = match progress.total {
            Some(_) => "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{msg} {spinner} {bytes} {bytes_per_sec}",
        };
        bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
        if let Some(total) = progress.total {
            bar.set_length(total);
        }
    }
    bar.set_message(progress.what.to_owned());
    bar.set_position(progress.done);
}
