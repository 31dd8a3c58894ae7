//! The catalogue: its data agree with each other, and its names are located, fetched and removed as any model.

use super::*;
use crate::small_files::is_plain_name;
use std::collections::HashSet;

#[test]
fn names_and_folders_are_distinct() {
    let names: Vec<&str> = CATALOGUE.iter().flat_map(|entry| std::iter::once(entry.name).chain(entry.also)).collect();
    let folders: Vec<String> = CATALOGUE.iter().map(CatalogueEntry::folder_name).collect();
    assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "{names:?}");
    assert_eq!(folders.iter().collect::<HashSet<_>>().len(), folders.len(), "{folders:?}");
    // A hub's repository has `--` in its folder's name.
    assert!(folders.iter().all(|folder| !folder.contains("--") && !folder.contains(':')), "{folders:?}");
    for name in names {
        assert!(HubId::parse(name).is_none() && !is_meant_as_path(name), "{name} means something else");
        assert_eq!(name, name.to_lowercase());
    }
}

#[test]
fn entries_have_what_fetch_and_reader_need() {
    assert!(CATALOGUE.len() >= 20);
    let (smallest, largest) = (CATALOGUE[0].bytes, CATALOGUE[CATALOGUE.len() - 1].bytes);
    assert!(smallest < 200_000_000 && largest > 40_000_000_000, "from 0.1B to 70B");
    assert!(CATALOGUE.is_sorted_by_key(|entry| entry.bytes));
    let is_hex = |text: &str, n: usize| text.len() == n && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    for entry in &CATALOGUE {
        let name = entry.name;
        assert!(is_hex(entry.sha256, 64) && is_hex(entry.revision, 40), "{name}");
        assert!(HubId::parse(entry.hub_id).is_some_and(|id| id.variant.is_none()), "{name}");
        assert!(is_plain_name(entry.file) && entry.file.ends_with(".gguf"), "{name}");
        assert!(!entry.about.is_empty() && entry.about.len() <= 80 && !entry.licence.is_empty(), "{name}");
        assert!(entry.sampling.is_none_or(|card| card.temperature <= 2.0 && card.top_p <= 1.0), "{name}");
        // Files of one family have one size in their name: `qwen3:4b` is no file of 8B.
        let size = name.split(':').nth(1).unwrap_or("135m");
        let id_and_file = format!("{}{}", entry.hub_id, entry.file).to_lowercase();
        assert!(
            id_and_file.contains(size) || ["phi4-mini:3.8b", "phi4:14b", "mistral-nemo:12b"].contains(&name),
            "{name}"
        );
    }
    let hashes: HashSet<&str> = CATALOGUE.iter().map(|entry| entry.sha256).collect();
    assert_eq!(hashes.len(), CATALOGUE.len(), "no file is in it twice");
}

#[test]
fn a_name_and_its_second_name_are_one_model_in_one_folder() {
    let catalogue_entry = entry("qwen3:8b").unwrap();
    let sources = ModelSources { python: None, ..ModelSources::new(temporary("entries")) };
    let folder = sources.cache.join("models/qwen3-8b");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(catalogue_entry.file);
    // As long as the whole file, and without a byte on disk.
    std::fs::File::create(&path).unwrap().set_len(catalogue_entry.bytes).unwrap();
    for name in ["qwen3:8b", "qwen3"] {
        assert_eq!(locate(name, &sources).unwrap(), LocatedModel { name: "qwen3:8b".into(), path: path.clone() });
    }
    let listed = ListedModel { model: "qwen3:8b".into(), path: path.clone(), origin: ModelOrigin::Pulled };
    assert_eq!(list(&sources), [listed]);
    std::fs::File::create(&path).unwrap().set_len(catalogue_entry.bytes - 1).unwrap();
    let refused = locate("qwen3", &sources).unwrap_err().to_string();
    assert!(refused.contains("`lockstep pull qwen3`"), "{refused}");
    assert_eq!(list(&sources), [], "a part of a file is not a model");
    std::fs::remove_dir_all(&sources.cache).unwrap();
}

/// What a name fetches is the revision that the catalogue pins, and any other content is refused.
#[test]
fn a_name_is_pulled_from_its_repository_and_checked() {
    let catalogue_entry = entry("llama3.2").unwrap();
    let hub = hub_that(|request| Answer::file(&vec![0; 1000], request.from));
    let sources = sources("entry-pull", &hub);
    let refused = pull("llama3.2", &sources, &mut |_| {}).unwrap_err().to_string();
    assert!(refused.contains("it ended after 1000 of 2019377696 bytes"), "{refused}");
    let CatalogueEntry { hub_id, revision, file, .. } = *catalogue_entry;
    assert_eq!(
        *hub.requests.lock().unwrap(),
        [format!("/{hub_id}/resolve/{revision}/{file} 0")],
        "no list is requested"
    );
    assert!(
        sources.cache.join("models/llama3.2-3b").join(format!("{file}.part")).exists(),
        "the download can be resumed"
    );
    std::fs::remove_dir_all(&sources.cache).unwrap();
}

#[test]
fn what_ollama_has_by_a_name_of_the_catalogue_is_used() {
    let root = temporary("entries-ollama");
    let manifest = root.join("manifests/registry.ollama.ai/library/qwen3/4b");
    let digest = "ef".repeat(32);
    let layer =
        serde_json::json!({ "mediaType": "application/vnd.ollama.image.model", "digest": format!("sha256:{digest}") });
    std::fs::create_dir_all(manifest.parent().unwrap()).unwrap();
    std::fs::create_dir_all(root.join("blobs")).unwrap();
    std::fs::write(&manifest, serde_json::json!({ "layers": [layer] }).to_string()).unwrap();
    let blob = root.join(format!("blobs/sha256-{digest}"));
    std::fs::write(&blob, b"GGUF").unwrap();
    let sources = ModelSources { ollama: Some(root.clone()), ..ModelSources::new(root.join("cache")) };
    assert_eq!(locate("qwen3:4b", &sources).unwrap(), LocatedModel { name: "qwen3:4b".into(), path: blob });
    assert!(locate("qwen3:8b", &sources).is_err());
    std::fs::remove_dir_all(&root).unwrap();
}

fn temporary(name: &str) -> std::path::PathBuf {
    let folder = std::env::temp_dir().join(format!("lockstep-checkpoint-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}
