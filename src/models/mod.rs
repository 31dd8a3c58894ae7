//! Finds a model's files by its name, and fetches them with a progress bar if they are not here.

mod hub_name;
mod remove;
mod show;

pub use remove::{RemoveCommand, remove};
pub use show::{ShowCommand, show};

use crate::out;
use crate::settings::hub::{Hub, sources};
use anyhow::Context;
use checkpoint::Checkpoint;
use checkpoint::catalogue::{self, CATALOGUE, Listed, Located, Origin, Progress};
use clap::Args;
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use serde_json::{Value, json};

#[derive(Args)]
pub struct PullCommand {
    /// Name from `lockstep models`, hub id such as org/name or org/name:Q4_K_M, or path of a model that is here
    pub model: String,
    /// Expected SHA-256 of the model's file
    ///
    /// For a model of several files it is that of `LC_ALL=C sha256sum * | sha256sum` in their folder.
    #[arg(long, value_name = "HEX")]
    pub sha256: Option<String>,
    #[command(flatten)]
    pub hub: Hub,
}

#[derive(Args)]
pub struct ModelsCommand {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Read every model whole, and compare it with the checksums that it had when it was fetched
    #[arg(long)]
    pub verify: bool,
    #[command(flatten)]
    pub hub: Hub,
}

/// The model's files, fetched first if need be.
pub fn ready(model: &str, hub: &Hub) -> anyhow::Result<Located> {
    let bar = ProgressBar::no_length();
    let result = catalogue::pull(hub_name::named(model), &sources(hub)?, &mut |progress| draw(&bar, progress));
    bar.finish_and_clear();
    Ok(result?)
}

pub fn pull(pull: &PullCommand) -> anyhow::Result<()> {
    let located = ready(&pull.model, &pull.hub)?;
    catalogue::verify_recorded(&located.path)?;
    // What stood at a path, or came from a hub, is a model only if it opens.
    Checkpoint::open(&located.path).with_context(|| {
        let path = located.path.display();
        format!("{path} is here and is no model that can be served: give a .gguf file, or a folder with config.json")
    })?;
    if let Some(sha256) = &pull.sha256 {
        catalogue::verify(&located.path, sha256)?;
    }
    out::line(&located.path.display().to_string())
}

/// One model's row in the output of `models`.
struct Row {
    listed: Listed,
    n_bytes: u64,
    /// Family and quantization, or why it cannot be served.
    opened: Result<(String, String), String>,
}

impl Row {
    fn of(listed: Listed, verify: bool) -> Row {
        let whole = if verify { catalogue::verify_recorded(&listed.path).map(drop) } else { Ok(()) };
        let opened = whole.and_then(|()| Checkpoint::open(&listed.path)).map_err(|error| error.to_string());
        let opened = opened.map(|checkpoint| {
            let kinds: Vec<&str> = checkpoint.quantization().iter().map(|dtype| dtype.name()).collect();
            (checkpoint.spec().family.name().to_owned(), kinds.join("+"))
        });
        Row { n_bytes: catalogue::bytes_of(&listed.path), listed, opened }
    }

    fn columns(&self) -> [String; 5] {
        let path = self.listed.path.display();
        let (family, quantization, place) = match &self.opened {
            Ok((family, quantization)) => (family.clone(), quantization.clone(), path.to_string()),
            Err(why) => ("-".into(), "-".into(), format!("{path} (not served: {why})")),
        };
        [self.listed.model.clone(), family, quantization, HumanBytes(self.n_bytes).to_string(), place]
    }

    fn json(&self) -> Value {
        let Listed { model, path, origin } = &self.listed;
        let opened = self.opened.as_ref();
        json!({
            "model": model,
            "path": path.display().to_string(),
            "origin": origin_name(*origin),
            "bytes": self.n_bytes,
            "family": opened.ok().map(|(family, _)| family),
            "quantization": opened.ok().map(|(_, quantization)| quantization),
            "error": opened.err(),
        })
    }
}

fn origin_name(origin: Origin) -> &'static str {
    match origin {
        Origin::Pulled => "pulled",
        Origin::HuggingFace => "hugging face",
        Origin::LlamaCpp => "llama.cpp",
        Origin::Ollama => "ollama",
    }
}

/// Lists the models that are here, and what the catalogue knows besides.
pub fn list(models: &ModelsCommand) -> anyhow::Result<()> {
    let here = catalogue::list(&sources(&models.hub)?).into_iter();
    let rows: Vec<Row> = here.map(|listed| Row::of(listed, models.verify)).collect();
    match models.json {
        true => out::line(&format!("{:#}", page(&rows))),
        false => out::print(&table(&rows)),
    }
}

fn is_here(rows: &[Row], name: &str) -> bool {
    rows.iter().any(|row| row.listed.model == name)
}

fn page(rows: &[Row]) -> Value {
    let entries = CATALOGUE.iter().map(|entry| {
        let is_here = is_here(rows, entry.name);
        let (model, about, hub_id) = (entry.name, entry.about, entry.hub_id);
        json!({ "model": model, "about": about, "bytes": entry.bytes, "hub_id": hub_id, "here": is_here })
    });
    json!({ "models": rows.iter().map(Row::json).collect::<Vec<_>>(), "catalogue": entries.collect::<Vec<_>>() })
}

fn table(rows: &[Row]) -> String {
    let mut lines = vec![["MODEL", "FAMILY", "QUANTIZATION", "SIZE", "WHERE"].map(str::to_owned)];
    lines.extend(rows.iter().map(Row::columns));
    for entry in CATALOGUE.iter().filter(|entry| !is_here(rows, entry.name)) {
        let what = format!("not here: `lockstep pull {}` fetches {}", entry.name, entry.about);
        lines.push([entry.name.into(), "-".into(), "-".into(), HumanBytes(entry.bytes).to_string(), what]);
    }
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths = [0, 1, 2, 3].map(width);
    let padded = |[model, family, quantization, size, place]: &[String; 5]| {
        let [a, b, c, d] = widths;
        format!("{model:<a$}  {family:<b$}  {quantization:<c$}  {size:>d$}  {place}\n")
    };
    lines.iter().map(padded).collect()
}

fn draw(bar: &ProgressBar, progress: Progress<'_>) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        pull: PullCommand,
    }

    fn pulled(model: &str) -> String {
        let line = Line::parse_from(["pull", model, "--cache", "nowhere", "--hf-endpoint", "http://127.0.0.1:9"]);
        format!("{:#}", pull(&line.pull).unwrap_err())
    }

    #[test]
    fn what_is_no_model_is_refused_by_its_name() {
        let folder = std::env::temp_dir().join(format!("lockstep-pull-{}", std::process::id()));
        let file = folder.join("notes.gguf");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(&file, "no weights").unwrap();
        for path in [&folder, &file] {
            let path = path.display().to_string();
            let refused = pulled(&path);
            assert!(refused.starts_with(&path) && refused.contains("is no model"), "{refused}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
        // None of these exists, wherever the test runs.
        for name in ["org/..", "org/a--b", "no-such-model"] {
            let refused = pulled(name);
            assert!(refused.contains(&format!("there is no model {name}: no path")), "{refused}");
        }
        for name in ["../../no/such", "../org", "./nofile.gguf", "/no/folder", "model.safetensors"] {
            let refused = pulled(name);
            assert!(refused.contains(&format!("there is no model {name}: no such file")), "{refused}");
        }
    }
}
