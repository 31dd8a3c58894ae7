//! Repositories as the public hub has them, at the size of a test and with random weights: each is pulled by its name
//! and served, or refused by its config before any weight is requested. `tests/hub` has their configs, and the table
//! there what becomes of each.

mod small;
mod weights;

use crate::common::node::{BINARY, Folder, Node, complete};
use crate::loopback_hub::{Hub, hub};
use checkpoint::ModelSpec;
use checkpoint::names::FileKind;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::process::Command;
use weights::{NamePrefix, WeightForm, weight_files};

const VOCABULARY: &str = "tests/reference/gpt-oss/tokenizer.json";
/// The length of each answer.
const N_TOKENS: usize = 6;
/// Repositories whose experts are stored together.
const STACKED: [(&str, FileKind); 2] =
    [("gpt-oss-20b-bf16", FileKind::FolderOfTurnedStacks), ("qwen3.5-35b-a3b", FileKind::FolderOfStacks)];
/// Text models within others.
const WITHIN: [(&str, NamePrefix); 5] = [
    ("gemma-3-4b-it", NamePrefix::Outer),
    ("mistral-small-3.1", NamePrefix::Outer),
    ("devstral-small-2", NamePrefix::Outer),
    ("qwen3.5-27b", NamePrefix::Inner),
    ("qwen3.5-35b-a3b", NamePrefix::Inner),
];
/// JSON has no infinity, and Python writes one: a number that stands for it.
const INFINITY: [&str; 2] = ["Infinity", "1e300"];

/// A file of `tests/hub`, and its outcome in the table there.
struct PublishedModel {
    name: String,
    repository: String,
    outcome: String,
    file: Value,
}

fn published_models() -> Vec<PublishedModel> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hub");
    let table = std::fs::read_to_string(folder.join("README.md")).unwrap();
    let rows = table.lines().map(|line| line.split(" | ").collect::<Vec<_>>());
    let rows = rows.filter(|cells| cells.len() == 5 && !cells[0].starts_with("| file"));
    rows.map(|cells| {
        let name = cells[0].trim_start_matches("| ").to_owned();
        let text = std::fs::read_to_string(folder.join(format!("{name}.json"))).unwrap();
        // One has no published name.
        let has_name = cells[1].contains('/') && !cells[1].contains(' ');
        let repository = if has_name { cells[1].to_owned() } else { format!("tests/{name}") };
        let file = serde_json::from_str(&text.replace(INFINITY[0], INFINITY[1])).unwrap();
        PublishedModel { name, repository, outcome: cells[2].to_owned(), file }
    })
    .collect()
}

impl PublishedModel {
    fn refusal(&self) -> Option<&str> {
        self.outcome.strip_prefix("refused: ")
    }

    /// Returns the files of the repository, by their names.
    fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let listed: Vec<String> = serde_json::from_value(self.file["files"].clone()).unwrap_or_default();
        // What is not read may hold anything.
        let mut files: BTreeMap<String, Vec<u8>> = listed.iter().map(|name| (name.clone(), b"?".to_vec())).collect();
        let mut shards: Vec<String> = listed.into_iter().filter(|name| is_shard(name)).collect();
        if shards.is_empty() {
            shards = ["00001-of-00002", "00002-of-00002"].map(|n| format!("model-{n}.safetensors")).into();
        }
        let is_served = self.refusal().is_none();
        let config = if is_served { small::small_config(&self.file["config"]) } else { self.file["config"].clone() };
        if is_served {
            let spec = ModelSpec::of_config(&config, &self.name).unwrap();
            let kind = STACKED.iter().find(|(name, _)| *name == self.name).map_or(FileKind::Folder, |(_, kind)| *kind);
            let prefix = WITHIN.iter().find(|(name, _)| *name == self.name).map_or(NamePrefix::Plain, |(_, of)| *of);
            files.extend(weight_files(&spec, kind, WeightForm::of(&config), prefix, &shards));
        } else {
            files.extend(shards.into_iter().map(|name| (name, b"?".to_vec())));
            files.insert("model.safetensors.index.json".to_owned(), b"?".to_vec());
        }
        files.insert("config.json".to_owned(), json_bytes(&config));
        files.insert("tokenizer.json".to_owned(), std::fs::read(VOCABULARY).unwrap());
        for name in ["generation_config", "tokenizer_config"] {
            let mut content = self.file[name].clone();
            small::small_ids(&mut content);
            match content.is_null() {
                true => drop(files.remove(&format!("{name}.json"))),
                false => drop(files.insert(format!("{name}.json"), json_bytes(&content))),
            }
        }
        files
    }
}

fn is_shard(name: &str) -> bool {
    name.starts_with("model-") && name.ends_with(".safetensors")
}

fn json_bytes(value: &Value) -> Vec<u8> {
    value.to_string().replace(INFINITY[1], INFINITY[0]).into_bytes()
}

/// A hub that has all of these repositories.
fn hub_of(models: &[PublishedModel]) -> Hub {
    let mut all = HashMap::new();
    for model in models {
        let (repository, files) = (&model.repository, model.files());
        let list = files.iter().map(|(name, bytes)| json!({"type": "file", "path": name, "size": bytes.len()}));
        let list: Vec<Value> = list.collect();
        all.insert(format!("/api/models/{repository}/tree/main"), Value::from(list).to_string().into_bytes());
        all.extend(files.into_iter().map(|(name, bytes)| (format!("/{repository}/resolve/main/{name}"), bytes)));
    }
    hub(all)
}

/// The command with an empty cache, and no other source than this hub.
fn command(endpoint: &str, cache: &Path, repository: &str) -> Command {
    let mut command = Command::new(BINARY);
    let doors = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--threads", "1", "--context", "256"];
    command.args(["serve", repository]).args(doors);
    for variable in ["LOCKSTEP_CACHE", "HF_HOME", "OLLAMA_MODELS"] {
        command.env(variable, cache);
    }
    command.env("HF_ENDPOINT", endpoint);
    command
}

/// Serves a model by its name, and returns the tokens of an answer.
fn serve(model: &PublishedModel, endpoint: &str) -> Vec<u64> {
    let cache = Folder::new(&model.name);
    let mut node = Node::spawn(command(endpoint, &cache.0, &model.repository));
    let http = node.http();
    node.until_ready(&http);
    let body = json!({ "model": model.repository, "prompt": "the grid is the same", "max_tokens": N_TOKENS,
        "temperature": 0, "ignore_eos": true, "return_token_ids": true });
    let choices = complete(&http, &body);
    let ids = choices[0]["token_ids"].as_array().into_iter().flatten();
    ids.map(|id| id.as_u64().unwrap()).collect()
}

#[test]
fn repositories_are_served_by_their_names() {
    let models: Vec<_> = published_models().into_iter().filter(|model| model.refusal().is_none()).collect();
    assert!(models.len() >= 40, "{} models", models.len());
    let hub = hub_of(&models);
    let serve_every_other = &|first: usize| -> Vec<(&str, Vec<u64>)> {
        let mine = models.iter().skip(first).step_by(2);
        mine.map(|model| (&*model.name, serve(model, &hub.endpoint))).collect()
    };
    let answers: BTreeMap<&str, Vec<u64>> = std::thread::scope(|scope| {
        let threads = [0, 1].map(|first| scope.spawn(move || serve_every_other(first)));
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(answers.values().all(|tokens| tokens.len() == N_TOKENS), "{answers:?}");
    let distinct: BTreeSet<&Vec<u64>> = answers.values().collect();
    assert!(distinct.len() > models.len() / 2, "answers depend on the weights: {answers:?}");
}

#[test]
fn repositories_that_are_not_served_are_refused_before_their_weights_are_fetched() {
    let models: Vec<_> = published_models().into_iter().filter(|model| model.refusal().is_some()).collect();
    assert!(models.len() >= 5, "{} models", models.len());
    let hub = hub_of(&models);
    for model in &models {
        let cache = Folder::new(&model.name);
        let output = command(&hub.endpoint, &cache.0, &model.repository).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        let reason = model.refusal().unwrap();
        assert!(!output.status.success() && error.contains(reason), "{}: expected {reason}: {error}", model.name);
    }
    let configs: Vec<String> =
        models.iter().map(|model| format!("/{}/resolve/main/config.json 0", model.repository)).collect();
    assert_eq!(hub.file_requests(), configs, "only configs were fetched");
}
