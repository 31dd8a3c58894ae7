//! A repository of a hub: lists its files, chooses those of one model, and fetches them. Checks a model by its config
//! before it fetches any weight.

use crate::catalogue::files::{all_parts, base_name, gguf_choices, is_model};
use crate::catalogue::hub::{HubFile, fetch, file_url, get, part_of};
use crate::catalogue::landing::{check_free_space, sync_folder_of};
use crate::catalogue::model::{FetchProgress, HubId, LocatedModel, ModelSources};
use crate::catalogue::store::is_whole;
use crate::error::{Error, Result};
use crate::modules;
use crate::safetensors::{self, INDEX, SINGLE};
use crate::scaling::MODELOPT_FILE;
use crate::small_files::is_plain_name;
use std::io::Read;
use std::path::Path;

const LIST_BYTES_MAX: u64 = 16 << 20;
const FILES_MAX: usize = 4096;
/// The most pages of a list; a page has up to 1,000 files.
const PAGES_MAX: usize = 16;
/// The most names of files that an error lists.
const NAMED_MAX: usize = 12;

/// Files beside the weights. Only the first one must exist.
const SMALL_FILES: [&str; 8] = [
    CONFIG,
    modules::LIST,
    "generation_config.json",
    modules::PROMPTS,
    "tokenizer_config.json",
    "chat_template.jinja",
    MODELOPT_FILE,
    INDEX,
];
/// Files with a vocabulary, of which the first that exists is read.
const TOKENIZERS: [&str; 2] = ["tokenizer.json", "tekken.json"];
const CONFIG: &str = "config.json";
const MAIN: &str = "main";

type ProgressFn<'a> = &'a mut dyn FnMut(FetchProgress<'_>);

/// Fetches one GGUF, or all files of a safetensors model, whose folder gets its name last.
pub fn pull(id: HubId<'_>, sources: &ModelSources, progress: ProgressFn<'_>) -> Result<LocatedModel> {
    progress(FetchProgress { what: id.repo, done: 0, total: None });
    let repository = Repository::list(id, sources)?;
    let folder = sources.folder(&id.folder_name());
    if id.variant.is_none() && repository.has_safetensors() {
        return match repository.fetch_folder(&folder, sources, progress) {
            // Another process has fetched it while this one waited.
            Err(_) if is_whole(&folder) => Ok(LocatedModel { name: id.name(), path: folder }),
            fetched => fetched.map(|()| LocatedModel { name: id.name(), path: folder }),
        };
    }
    repository.fetch_gguf(&folder, sources, progress)
}

struct Repository<'a> {
    id: HubId<'a>,
    files: Vec<HubFile>,
}

impl<'a> Repository<'a> {
    /// Lists the files of all folders. Leaves out a file whose name would not stay in our folder.
    fn list(id: HubId<'a>, sources: &ModelSources) -> Result<Repository<'a>> {
        let endpoint = sources.hub_endpoint.trim_end_matches('/');
        let revision = id.revision.unwrap_or(MAIN);
        let escaped = revision.replace('/', "%2F");
        let mut next = Some(format!("{endpoint}/api/models/{}/tree/{escaped}?recursive=true", id.repo));
        let mut files = Vec::new();
        for _ in 0..PAGES_MAX {
            let Some(url) = next else { break };
            let (page, link) = read_page(&url, sources).map_err(|why| id.failed(why))?;
            for file in page.as_array().into_iter().flatten() {
                let name = file["path"].as_str().filter(|name| file["type"] == "file" && stays_inside(name));
                let Some(name) = name.filter(|_| files.len() < FILES_MAX) else { continue };
                files.push(HubFile {
                    url: file_url(sources, id.repo, revision, name),
                    name: name.to_owned(),
                    bytes: file["size"].as_u64(),
                    sha256: file["lfs"]["oid"].as_str().map(str::to_owned),
                    is_judged: true,
                });
            }
            // Only a page of the same hub is followed.
            next = link.filter(|link| link.starts_with(&format!("{endpoint}/")));
        }
        Ok(Repository { id, files })
    }

    fn has_safetensors(&self) -> bool {
        self.file(CONFIG).is_some() && (self.file(SINGLE).is_some() || self.file(INDEX).is_some())
    }

    fn file(&self, name: &str) -> Option<&HubFile> {
        self.files.iter().find(|file| file.name == name)
    }

    fn not_found(&self, why: String) -> Error {
        Error::NotFound { model: self.id.repo.to_owned(), why }
    }

    fn fetch_folder(&self, folder: &Path, sources: &ModelSources, progress: ProgressFn<'_>) -> Result<()> {
        // A folder under its final name lacks some files: they are fetched into it.
        let is_named = folder.exists();
        let into = if is_named { folder.to_owned() } else { part_of(folder) };
        std::fs::create_dir_all(&into).map_err(Error::io(&into))?;
        let fetched = self.fetch_files(&into, sources, progress);
        if fetched.is_err() {
            // It stays if it holds something that another attempt can use.
            let _ = std::fs::remove_dir(&into);
        }
        fetched?;
        if is_named {
            return Ok(());
        }
        sync_folder_of(&into.join("."))?;
        std::fs::rename(&into, folder).map_err(Error::io(folder))?;
        sync_folder_of(folder)
    }

    /// Fetches the files beside the weights first: they show which weights exist, and whether the model is supported.
    fn fetch_files(&self, into: &Path, sources: &ModelSources, progress: ProgressFn<'_>) -> Result<()> {
        // A repository's other vocabulary is not read beside a tokenizer.json.
        let tokenizer = TOKENIZERS.into_iter().find(|name| self.file(name).is_some());
        for name in SMALL_FILES.into_iter().chain(tokenizer) {
            let Some(file) = self.file(name) else { continue };
            fetch(file, &into.join(name), sources, progress)?;
            if name == CONFIG {
                self.check_config(&into.join(CONFIG), sources).inspect_err(|_| discard(&into.join(CONFIG)))?;
            }
        }
        let modules = modules::files(into, |name| self.file(name).is_some())?;
        for folder in modules.iter().filter_map(|name| modules::folder_of(name)) {
            std::fs::create_dir_all(into.join(folder)).map_err(Error::io(into))?;
        }
        let weights = safetensors::shard_names(into)?;
        let weights = weights.iter().chain(&modules).map(|name| {
            let missing = || self.not_found(format!("{INDEX} lists {name}, which the repository does not have"));
            self.file(name).ok_or_else(missing)
        });
        let weights = weights.collect::<Result<Vec<_>>>()?;
        let missing = weights.iter().filter(|file| !into.join(&file.name).exists());
        check_free_space(into, missing.filter_map(|file| file.bytes).sum())?;
        weights.into_iter().try_for_each(|file| fetch(file, &into.join(&file.name), sources, progress))
    }

    /// Refuses an unsupported model.
    fn check_config(&self, path: &Path, sources: &ModelSources) -> Result<()> {
        (sources.checks.config)(path)?;
        if TOKENIZERS.iter().all(|name| self.file(name).is_none()) {
            let why = "it has no tokenizer.json or tekken.json, which a safetensors model requires; transformers' \
                       AutoTokenizer writes one (`save_pretrained`)";
            return Err(self.not_found(why.to_owned()));
        }
        Ok(())
    }

    fn fetch_gguf(&self, folder: &Path, sources: &ModelSources, progress: ProgressFn<'_>) -> Result<LocatedModel> {
        let names: Vec<String> = self.files.iter().map(|file| file.name.clone()).collect();
        let choices = gguf_choices(&names, self.id.variant);
        if choices.is_empty() {
            return Err(self.nothing_to_serve(&names));
        }
        std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
        let mut refused = None;
        for first in choices {
            match self.fetch_parts(first, folder, sources, progress) {
                Ok(()) => return Ok(LocatedModel { name: self.id.name(), path: folder.join(base_name(first)) }),
                // Another one may be of a supported type.
                Err(error @ (Error::Unsupported { .. } | Error::Malformed { .. } | Error::NoTensor { .. })) => {
                    refused.get_or_insert(error);
                }
                Err(error) => {
                    refused = Some(error);
                    break;
                }
            }
        }
        let _ = std::fs::remove_dir(folder);
        Err(refused.unwrap_or_else(|| self.nothing_to_serve(&names)))
    }

    fn fetch_parts(&self, first: &str, folder: &Path, sources: &ModelSources, progress: ProgressFn<'_>) -> Result<()> {
        for part in all_parts(first) {
            let missing = || self.not_found(format!("its part {part} is missing"));
            let file = self.file(&part).ok_or_else(missing)?;
            fetch(file, &folder.join(base_name(&part)), sources, progress)?;
        }
        Ok(())
    }

    /// Returns why no file of the repository is the requested model.
    fn nothing_to_serve(&self, names: &[String]) -> Error {
        let repo = self.id.repo;
        let ggufs: Vec<&str> = names.iter().map(String::as_str).filter(|name| name.ends_with(".gguf")).collect();
        let models: Vec<&str> = ggufs.iter().copied().filter(|name| is_model(name)).take(NAMED_MAX).collect();
        let has = |suffix: &str| names.iter().any(|name| name.ends_with(suffix));
        let has_bin = names.iter().any(|name| name.starts_with("pytorch_model") && name.ends_with(".bin"));
        let why = match self.id.variant {
            Some(variant) if !models.is_empty() => {
                format!("none of its GGUFs is {variant}; name one as {repo}:<VARIANT>: [{}]", models.join(", "))
            }
            Some(_) => "it has no GGUF: omit the variant to serve its safetensors, if it has any".to_owned(),
            None if self.file("adapter_config.json").is_some() => {
                "it is an adapter (LoRA) for another model, which is not served".to_owned()
            }
            None if has_bin => {
                "its weights are PyTorch's .bin files, which are not served; transformers writes safetensors \
                 (`save_pretrained`), and many models have a repository with safetensors or GGUF"
                    .to_owned()
            }
            None if has(".safetensors") => {
                format!("it has safetensors, but not {SINGLE} or {INDEX} beside a {CONFIG}")
            }
            None => "it has neither a GGUF of a text model nor safetensors".to_owned(),
        };
        self.not_found(why)
    }
}

impl HubId<'_> {
    fn failed(&self, why: String) -> Error {
        Error::Fetch { what: self.repo.to_owned(), why }
    }
}

/// Returns a page of a list of files, and the address of the next page.
fn read_page(url: &str, sources: &ModelSources) -> std::result::Result<(serde_json::Value, Option<String>), String> {
    let response = get(url, 0, sources)?;
    let link = response.headers().get("link").and_then(|link| link.to_str().ok()).and_then(next_link);
    let mut text = String::new();
    let mut body = response.into_body();
    body.as_reader().take(LIST_BYTES_MAX).read_to_string(&mut text).map_err(|error| format!("{url}: {error}"))?;
    let page = serde_json::from_str(&text).map_err(|error| format!("{url} is not a list of files: {error}"))?;
    Ok((page, link))
}

/// `<address>; rel="next"` of a Link header.
fn next_link(header: &str) -> Option<String> {
    let next = header.split(',').find(|link| link.contains("rel=\"next\""))?;
    let (_, rest) = next.split_once('<')?;
    rest.split_once('>').map(|(address, _)| address.to_owned())
}

/// Whether a path of a repository stays in its folder.
fn stays_inside(path: &str) -> bool {
    path.split('/').all(is_plain_name)
}

/// Removes a fetched file and its record. Ignores failures.
fn discard(path: &Path) {
    let _ = crate::catalogue::landing::remove_with_record(path);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_page_is_the_link_with_rel_next() {
        let check = |header: &str, expect: Option<&str>| assert_eq!(next_link(header).as_deref(), expect, "{header}");
        check("<https://hub/a?cursor=1>; rel=\"next\"", Some("https://hub/a?cursor=1"));
        check("<https://hub/0>; rel=\"prev\", <https://hub/2>; rel=\"next\"", Some("https://hub/2"));
        check("<https://hub/0>; rel=\"prev\"", None);
        check("", None);
    }

    #[test]
    fn paths_that_leave_the_folder_are_left_out() {
        for (path, expect) in [("a", true), ("a/b.gguf", true), ("../a", false), ("a/../b", false), ("/a", false)] {
            assert_eq!(stays_inside(path), expect, "{path}");
        }
    }
}
