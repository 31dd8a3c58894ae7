//! Finds a model's files by its name, and fetches them with a progress bar if they are not here.

mod fitting;
mod hub_name;
mod quantized;
mod remove;
mod show;

pub use fitting::Fits;
pub use quantized::{QuantizeCommand, write_quantized};
pub use remove::{RemoveCommand, remove};
pub use show::{ShowCommand, show};

use crate::settings::hub::{HubSettings, sources};
use anyhow::{Context, ensure};
use checkpoint::Checkpoint;
use checkpoint::catalogue::{self, CATALOGUE, CatalogueEntry, FetchProgress, ListedModel, LocatedModel, ModelOrigin};
use clap::Args;
use fitting::CatalogueFit;
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};
use telemetry::logs;
use tools::out;

#[derive(Args)]
pub struct PullCommand {
    /// Name from `lockstep models`, hub id such as org/name or org/name:Q4_K_M, or path of a local model
    pub model: String,
    /// Expected SHA-256 of the model's file
    ///
    /// For a model of several files it is that of `LC_ALL=C sha256sum * | sha256sum` in their folder.
    #[arg(long, value_name = "HEX")]
    pub sha256: Option<String>,
    #[command(flatten)]
    pub hub: HubSettings,
}

#[derive(Args)]
pub struct ModelsCommand {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Read every model completely, and compare it with the checksums of its download
    #[arg(long)]
    pub verify: bool,
    /// Show which models of the catalogue this machine has memory for: their weights, and KV beside them
    #[arg(long)]
    pub fit: bool,
    /// Context length that --fit makes room for, at most the model's
    #[arg(long, value_name = "N", default_value_t = CONTEXT_TO_FIT, requires = "fit")]
    pub context: u32,
    #[command(flatten)]
    pub hub: HubSettings,
}

/// The context that a model must have room for, to fit.
const CONTEXT_TO_FIT: u32 = 8192;

/// Returns the model's files, and fetches them first if they are not here.
pub fn locate_or_fetch(model: &str, hub: &HubSettings) -> anyhow::Result<LocatedModel> {
    let name = &*hub_name::to_hub_name(model);
    ensure!(
        !name.contains("://"),
        "{model} is not a hub id: give one such as org/name or org/name:Q4_K_M, or download the file and give its path"
    );
    let path = Path::new(name);
    ensure!(
        !path.is_dir() || path.join("config.json").exists(),
        "{name} is a folder without a config.json: give a model's folder, or a .gguf file"
    );
    if path.exists() {
        // A path needs no folder for models, and so no home folder.
        return Ok(catalogue::at_path(path)?);
    }
    let mut shown = FetchProgressDisplay::new();
    let result = catalogue::pull(name, &sources(hub)?, &mut |progress| shown.update(progress));
    shown.finish();
    Ok(result?)
}

pub fn pull(pull: &PullCommand) -> anyhow::Result<()> {
    let located = locate_or_fetch(&pull.model, &pull.hub)?;
    catalogue::verify_recorded(&located.path)?;
    // A local or fetched file is a model only if it can be opened.
    Checkpoint::open(&located.path).with_context(|| {
        let path = located.path.display();
        format!("{path} is not a supported model: give a .gguf file, or a folder with config.json")
    })?;
    if let Some(sha256) = &pull.sha256 {
        catalogue::verify(&located.path, sha256)?;
    }
    out::print_line(&located.path.display().to_string())
}

/// One model's row in the output of `models`.
struct ModelRow {
    listed: ListedModel,
    n_bytes: u64,
    /// Family and quantization, or the reason why the model cannot be served.
    opened: Result<(String, String), String>,
}

impl ModelRow {
    fn of(listed: ListedModel, verify: bool) -> ModelRow {
        let whole = if verify { catalogue::verify_recorded(&listed.path).map(drop) } else { Ok(()) };
        let opened = whole.and_then(|()| Checkpoint::open(&listed.path)).map_err(|error| error.to_string());
        let opened = opened.map(|checkpoint| {
            let kinds: Vec<&str> = checkpoint.quantization().iter().map(|dtype| dtype.name()).collect();
            (checkpoint.spec().family.name().to_owned(), kinds.join("+"))
        });
        ModelRow { n_bytes: catalogue::bytes_of(&listed.path), listed, opened }
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
        let ListedModel { model, path, origin } = &self.listed;
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

fn origin_name(origin: ModelOrigin) -> &'static str {
    match origin {
        ModelOrigin::Pulled => "pulled",
        ModelOrigin::HuggingFace => "hugging face",
        ModelOrigin::LlamaCpp => "llama.cpp",
        ModelOrigin::Ollama => "ollama",
    }
}

/// Lists the models on this machine, and those of the catalogue with whether each fits.
pub fn machine(hub: &HubSettings, fits: Fits<'_>) -> anyhow::Result<Value> {
    Ok(page(&rows(hub, false)?, Some(&fitting::fit_catalogue(CONTEXT_TO_FIT, fits)?)))
}

fn rows(hub: &HubSettings, verify: bool) -> anyhow::Result<Vec<ModelRow>> {
    let here = catalogue::list(&sources(hub)?).into_iter();
    Ok(here.map(|listed| ModelRow::of(listed, verify)).collect())
}

/// Prints the models on this machine and those of the catalogue.
pub fn list(models: &ModelsCommand, fits: Fits<'_>) -> anyhow::Result<()> {
    let rows = rows(&models.hub, models.verify)?;
    let fitting = models.fit.then(|| fitting::fit_catalogue(models.context, fits)).transpose()?;
    match models.json {
        true => out::print_line(&format!("{:#}", page(&rows, fitting.as_deref()))),
        false => out::print(&format!("{}\n{}", table(&rows), catalogue_table(&rows, fitting.as_deref()))),
    }
}

fn is_here(rows: &[ModelRow], name: &str) -> bool {
    rows.iter().any(|row| row.listed.model == name)
}

fn page(rows: &[ModelRow], fitting: Option<&[CatalogueFit]>) -> Value {
    let entries = CATALOGUE.iter().enumerate().map(|(i, entry)| {
        let CatalogueEntry { name, also, about, licence, hub_id, file, bytes, .. } = *entry;
        let mut row = json!({
            "model": name, "also": also, "about": about, "licence": licence, "context": entry.figures.context,
            "bytes": bytes, "hub_id": hub_id, "file": file, "here": is_here(rows, name),
        });
        if let Some(fitting) = fitting {
            row["fit"] = fitting[i].json();
        }
        row
    });
    json!({ "models": rows.iter().map(ModelRow::json).collect::<Vec<_>>(), "catalogue": entries.collect::<Vec<_>>() })
}

fn table(rows: &[ModelRow]) -> String {
    let mut lines = vec![["MODEL", "FAMILY", "QUANTIZATION", "SIZE", "WHERE"].map(str::to_owned).to_vec()];
    lines.extend(rows.iter().map(|row| row.columns().to_vec()));
    padded(&lines, 3)
}

fn catalogue_table(rows: &[ModelRow], fitting: Option<&[CatalogueFit]>) -> String {
    let mut lines = vec![["NAME", "HERE", "CONTEXT", "SIZE", "LICENCE"].map(str::to_owned).to_vec()];
    for entry in &CATALOGUE {
        let name = entry.also.map_or_else(|| entry.name.to_owned(), |also| format!("{} ({also})", entry.name));
        let here = if is_here(rows, entry.name) { "yes" } else { "-" };
        let (context, size) = (entry.figures.context.to_string(), HumanBytes(entry.bytes).to_string());
        lines.push(vec![name, here.into(), context, size, entry.licence.into()]);
    }
    let about = std::iter::once("GOOD AT").chain(CATALOGUE.iter().map(|entry| entry.about));
    let fits = fitting.map(|fitting| std::iter::once("FITS".into()).chain(fitting.iter().map(ToString::to_string)));
    for (line, fits) in lines.iter_mut().zip(fits.into_iter().flatten()) {
        line.push(fits);
    }
    lines.iter_mut().zip(about).for_each(|(line, about)| line.push(about.into()));
    format!("To fetch with `lockstep pull NAME`:\n{}", padded(&lines, 3))
}

/// Pads each column to its widest cell, except the last; column `right` is aligned to the right.
fn padded(lines: &[Vec<String>], right: usize) -> String {
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let cell = |(column, cell): (usize, &String), last: usize| match column {
        _ if column == last => cell.clone(),
        _ if column == right => format!("{cell:>width$}  ", width = width(column)),
        _ => format!("{cell:<width$}  ", width = width(column)),
    };
    let line = |line: &Vec<String>| line.iter().enumerate().map(|at| cell(at, line.len() - 1)).collect::<String>();
    lines.iter().map(|cells| line(cells) + "\n").collect()
}

/// Shows the progress of a fetch: as a bar on a terminal, otherwise as a line every few seconds.
struct FetchProgressDisplay {
    bar: ProgressBar,
    /// The time of the next line, where there is no terminal.
    next_line: Instant,
    /// The subject of the last line.
    last: String,
}

impl FetchProgressDisplay {
    fn new() -> FetchProgressDisplay {
        FetchProgressDisplay { bar: ProgressBar::no_length(), next_line: Instant::now(), last: String::new() }
    }

    fn update(&mut self, progress: FetchProgress<'_>) {
        match self.bar.is_hidden() {
            false => draw(&self.bar, progress),
            true => self.print(progress),
        }
    }

    fn print(&mut self, progress: FetchProgress<'_>) {
        let is_another = self.last != progress.what;
        let is_begun = progress.done > 0 || progress.total.is_some();
        if !is_begun || (!is_another && Instant::now() < self.next_line) {
            return;
        }
        self.next_line = Instant::now() + LINE_EVERY;
        progress.what.clone_into(&mut self.last);
        logs::write_line(&progress_line(progress));
    }

    fn finish(self) {
        self.bar.finish_and_clear();
    }
}

/// The time between two lines of progress where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

fn progress_line(progress: FetchProgress<'_>) -> String {
    let FetchProgress { what, done, total } = progress;
    match total.filter(|total| *total > 0) {
        Some(total) => {
            format!("fetching {what}: {}% of {}", 100 * u128::from(done) / u128::from(total), HumanBytes(total))
        }
        None => format!("fetching {what}"),
    }
}

fn draw(bar: &ProgressBar, progress: FetchProgress<'_>) {
    // An invalid template is a bug that the first fetch shows; the bar then falls back to a plain one.
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

    #[test]
    fn progress_line_shows_file_and_percentage() {
        let line = |done, total| progress_line(FetchProgress { what: "model.gguf", done, total });
        assert_eq!(line(1 << 20, Some(4 << 20)), "fetching model.gguf: 25% of 4.00 MiB");
        assert_eq!(line(u64::MAX, Some(u64::MAX)), "fetching model.gguf: 100% of 16.00 EiB");
        assert_eq!((line(7, None), line(7, Some(0))), ("fetching model.gguf".into(), "fetching model.gguf".into()));
    }
    use clap::Parser;

    #[derive(Parser)]
    struct PullLine {
        #[command(flatten)]
        pull: PullCommand,
    }

    fn pulled(model: &str) -> String {
        let line = PullLine::parse_from(["pull", model, "--cache", "nowhere", "--hf-endpoint", "http://127.0.0.1:9"]);
        format!("{:#}", pull(&line.pull).unwrap_err())
    }

    /// The name is known, so the file of the catalogue is requested from the hub.
    #[test]
    fn names_of_the_catalogue_are_pulled_from_their_repositories() {
        for name in ["qwen3:4b", "qwen3", "llama3.2:1b"] {
            let refused = pulled(name);
            assert!(refused.contains("-Q4_K_M.gguf could not be fetched"), "{name}: {refused}");
        }
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
            assert!(refused.starts_with(&path) && refused.contains("a .gguf file"), "{refused}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
        let slip = pulled("qwen3:5b");
        assert!(
            slip.contains("similar names are qwen3:4b, ") && slip.contains("`lockstep models` lists all"),
            "{slip}"
        );
        // None of these exists on any machine.
        for name in ["org/..", "org/a--b", "no-such-model"] {
            let refused = pulled(name);
            assert!(refused.contains(&format!("there is no model {name}: not a path")), "{refused}");
        }
        for name in ["../../no/such", "../org", "./nofile.gguf", "/no/folder", "model.safetensors"] {
            let refused = pulled(name);
            assert!(refused.contains(&format!("there is no model {name}: no such file")), "{refused}");
        }
    }
}
