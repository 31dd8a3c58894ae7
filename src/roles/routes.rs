//! The models of a router besides its first: how to read the texts of their replicas, and the versions behind each
//! name. The file of routes is read again whenever it changes.

use super::keys;
use crate::models;
use crate::settings::RouteSettings;
use crate::settings::hub::HubSettings;
use anyhow::{Context, ensure};
use checkpoint::Checkpoint;
use router::ModelRoutes;
use std::future::Future;
use std::path::PathBuf;
use telemetry::metrics;

/// The models besides the first, and the routes. A router without them has none.
#[derive(Default)]
pub struct OtherModels {
    /// Checkpoints by the name that their replicas serve.
    pub models: Vec<(String, Checkpoint)>,
    pub routes: ModelRoutes,
    file: Option<PathBuf>,
}

impl OtherModels {
    /// Opens the other models and reads the routes. `first` is the name of the router's own model.
    pub fn of(own: &RouteSettings, first: &str, hub: &HubSettings) -> anyhow::Result<OtherModels> {
        let mut models: Vec<(String, Checkpoint)> = Vec::new();
        for word in own.text.iter().flatten() {
            let (name, model) = word.split_once('=').map_or((None, word.as_str()), |(name, of)| (Some(name), of));
            let located = models::locate_or_fetch(model.trim(), hub).with_context(|| format!("--text {word}"))?;
            let name = name.map_or(located.name, |name| name.trim().to_owned());
            ensure!(!name.is_empty(), "--text {word}: there is no name before `=`");
            let is_known = name == first || models.iter().any(|(known, _)| *known == name);
            ensure!(!is_known, "--text {word}: `{name}` already has a tokenizer");
            models.push((name, Checkpoint::open(&located.path)?));
        }
        let (routes, file) = (routes(own)?, own.routes.clone());
        Ok(OtherModels { models, routes, file })
    }

    /// Reads the file again for as long as this is polled. An invalid file is logged once, and the old routes stay.
    pub fn follow(&self) -> impl Future<Output = ()> + use<> {
        let (file, routes) = (self.file.clone(), self.routes.clone());
        async move {
            match file {
                // A pipe can be read only once.
                Some(path) if path.is_file() => {
                    let file = path.display().to_string();
                    keys::watch_file(path, |text, is_first| replace_routes(&file, text, &routes, is_first)).await;
                }
                _ => std::future::pending().await,
            }
        }
    }
}

fn routes(own: &RouteSettings) -> anyhow::Result<ModelRoutes> {
    let Some(path) = &own.routes else {
        let lines = own.route.iter().flatten().map(String::as_str);
        let lines = lines.map(check_route_line).collect::<anyhow::Result<Vec<_>>>()?;
        return ModelRoutes::parse(&lines.join("\n")).context("--route");
    };
    ensure!(own.route.is_none(), "give --route or --routes, not both: reading the file again replaces all routes");
    let what = || format!("routes in {}", path.display());
    let text = std::fs::read_to_string(path).with_context(what)?;
    ModelRoutes::parse(&text).with_context(what)
}

/// Checks a flag, which has the syntax of one line of the file.
fn check_route_line(line: &str) -> anyhow::Result<&str> {
    let routes = ModelRoutes::parse(line).map_err(|bad| anyhow::anyhow!("--route {line}: {}", bad.problem))?;
    ensure!(routes.table().len() == 1, "--route {line:?} is not a route");
    Ok(line)
}

fn replace_routes(file: &str, text: &Result<String, String>, routes: &ModelRoutes, is_first: bool) {
    let taken = text.as_ref().map_err(Clone::clone).and_then(|text| routes.replace(text).map_err(|e| e.to_string()));
    metrics::config_reload("routes", taken.is_ok());
    match taken {
        Ok(()) if is_first => {}
        Ok(()) => tracing::info!(file, names = routes.table().len(), "the routes were read again"),
        Err(problem) => tracing::warn!(file, problem, "the routes stay unchanged: the file cannot be used"),
    }
}
