//! Repositories as hubs have them: shards by any name, GGUFs in folders and beside files that are no model, models that
//! cannot be served, lists in pages, revisions.

use super::*;
use crate::Checkpoint;
use safetensors::SafeTensors;

const LIST: &str = "/api/models/org/m/tree/main";

fn path_of(name: &str) -> String {
    format!("/org/m/resolve/main/{name}")
}

/// Adds the list of these files.
pub fn listed(mut files: HashMap<String, Vec<u8>>) -> HashMap<String, Vec<u8>> {
    files.remove(LIST);
    let prefix = path_of("");
    let list: Vec<_> = files
        .iter()
        .map(|(path, bytes)| {
            let name = path.strip_prefix(&prefix).unwrap();
            serde_json::json!({"type": "file", "path": name, "size": bytes.len(), "oid": "0"})
        })
        .collect();
    files.insert(LIST.to_owned(), serde_json::Value::from(list).to_string().into_bytes());
    files
}

/// A hub's files for a folder of `tests/reference`.
pub fn files_of(folder: &str) -> HashMap<String, Vec<u8>> {
    let folder = reference(folder);
    let names = files::file_names(&folder).unwrap();
    listed(names.iter().map(|name| (path_of(name), std::fs::read(folder.join(name)).unwrap())).collect())
}

/// The same model in two shards of these names.
fn sharded(names: [&str; 2]) -> HashMap<String, Vec<u8>> {
    let mut files = files_of("llama-f32-tied");
    let whole = files.remove(&path_of("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&whole).unwrap();
    let mut weight_map = serde_json::Map::new();
    for (i, file) in names.into_iter().enumerate() {
        let of_shard = tensors.iter().enumerate().filter(|(n, _)| n % 2 == i).map(|(_, tensor)| tensor);
        let of_shard: Vec<_> = of_shard.collect();
        weight_map.extend(of_shard.iter().map(|(name, _)| (name.to_string(), file.into())));
        files.insert(path_of(file), safetensors::serialize(of_shard, None).unwrap());
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": weight_map});
    files.insert(path_of("model.safetensors.index.json"), index.to_string().into_bytes());
    listed(files)
}

fn pulled(model: &str, sources: &ModelSources) -> Result<PathBuf> {
    pull(model, sources, &mut |_| {}).map(|located| located.path)
}

/// What is left in the folder of fetched models.
fn kept(sources: &ModelSources) -> Vec<String> {
    files::file_names_below(&sources.cache.join("models")).unwrap_or_default()
}

fn remove(sources: &ModelSources) {
    let _ = std::fs::remove_dir_all(&sources.cache);
}

#[test]
fn shards_have_the_names_of_the_index_and_what_is_missing_is_fetched_again() {
    let names = ["model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors"];
    let hub = hub(sharded(names));
    let sources = sources("shards", &hub);
    let folder = pulled("org/m", &sources).unwrap();
    Checkpoint::open(&folder).unwrap();
    let second = folder.join(names[1]);
    let whole = std::fs::read(&second).unwrap();
    for damage in [None, Some(&whole[..whole.len() - 1])] {
        std::fs::remove_file(&second).unwrap();
        damage.iter().for_each(|bytes| std::fs::write(&second, bytes).unwrap());
        assert!(locate("org/m", &sources).is_err(), "the model is incomplete");
        let n_before = hub.file_requests().len();
        assert_eq!(pulled("org/m", &sources).unwrap(), folder);
        assert_eq!(hub.file_requests()[n_before..], [format!("{} 0", path_of(names[1]))], "fetched files stay");
        Checkpoint::open(&folder).unwrap();
    }
    remove(&sources);
}

#[test]
fn a_shard_that_the_repository_lacks_is_named_before_any_is_fetched() {
    let names = ["one.safetensors", "two.safetensors"];
    let mut files = sharded(names);
    files.remove(&path_of(names[1]));
    let hub = hub(listed(files));
    let sources = sources("lacks", &hub);
    let error = pulled("org/m", &sources).unwrap_err().to_string();
    assert!(error.contains("model.safetensors.index.json lists two.safetensors"), "{error}");
    assert!(
        !hub.file_requests().iter().any(|request| request.contains("one.safetensors")),
        "{:?}",
        hub.file_requests()
    );
    remove(&sources);
}

#[test]
fn a_model_that_is_not_served_is_refused_by_its_config_and_leaves_nothing() {
    let mut files = files_of("llama-f32-tied");
    let config = br#"{"architectures": ["FancyForCausalLM"], "hidden_size": 8}"#;
    files.insert(path_of("config.json"), config.to_vec());
    let hub = hub(listed(files));
    let sources = sources("config", &hub);
    let error = pulled("org/m", &sources).unwrap_err().to_string();
    assert!(error.contains("the architecture FancyForCausalLM is not supported"), "{error}");
    assert_eq!(hub.file_requests(), [format!("{} 0", path_of("config.json"))]);
    assert_eq!(kept(&sources), [""; 0]);
    remove(&sources);
}

/// A GGUF of ten megabytes whose architecture has this name, as long as `llama`.
fn large_gguf(architecture: &str) -> Vec<u8> {
    let mut bytes = FILE.clone();
    let at = bytes.windows(5).position(|bytes| bytes == b"llama").unwrap();
    bytes[at..at + 5].copy_from_slice(architecture.as_bytes());
    bytes.resize(10 << 20, 1);
    bytes
}

#[test]
fn a_gguf_that_is_not_served_is_refused_by_its_header() {
    let files = HashMap::from([(path_of("m-Q8_0.gguf"), large_gguf("fancy"))]);
    let hub = hub(listed(files));
    let sources = sources("header", &hub);
    let mut most = 0;
    let error = pull("org/m", &sources, &mut |progress| most = most.max(progress.done)).unwrap_err().to_string();
    assert!(error.contains("the architecture fancy is not supported"), "{error}");
    assert!(error.contains(&format!("{}{}", hub.endpoint, path_of("m-Q8_0.gguf"))), "{error}");
    assert!(most < 1 << 20, "{most} bytes");
    assert_eq!(kept(&sources), [""; 0]);
    remove(&sources);
}

#[test]
fn another_file_is_taken_where_the_preferred_one_is_not_served() {
    let files = [("m-Q4_K_M.gguf", large_gguf("fancy")), ("m-Q5_0.gguf", FILE.clone())];
    let files = files.map(|(name, bytes)| (path_of(name), bytes));
    let hub = hub(listed(HashMap::from(files)));
    let sources = sources("other", &hub);
    assert!(pulled("org/m", &sources).unwrap().ends_with("org--m/m-Q5_0.gguf"));
    remove(&sources);
}

#[test]
fn error_names_files_of_repository_without_model() {
    let cases = [
        (vec!["config.json", "pytorch_model.bin"], "PyTorch's .bin files"),
        (vec!["adapter_config.json", "adapter_model.safetensors"], "it is an adapter"),
        (vec!["m-mmproj-F16.gguf"], "neither a GGUF of a text model nor safetensors"),
        (vec!["consolidated.safetensors", "params.json"], "it has safetensors, but not model.safetensors"),
        (vec!["config.json", "model.safetensors"], "architecture"),
    ];
    for (names, expect) in cases {
        let hub = hub(listed(names.iter().map(|name| (path_of(name), b"{}".to_vec())).collect()));
        let sources = sources("nothing", &hub);
        let error = pulled("org/m", &sources).unwrap_err().to_string();
        assert!(error.contains(expect), "{names:?}: {error}");
        assert_eq!(kept(&sources), [""; 0], "{names:?}");
        remove(&sources);
    }
    let mut files = files_of("llama-f32-tied");
    files.remove(&path_of("tokenizer.json"));
    let hub = hub(listed(files));
    let sources = sources("no-tokenizer", &hub);
    let error = pulled("org/m", &sources).unwrap_err().to_string();
    assert!(error.contains("it has no tokenizer.json"), "{error}");
    remove(&sources);
}

#[test]
fn tekken_is_fetched_only_without_a_tokenizer_json() {
    for without_json in [true, false] {
        let mut files = files_of("llama-f32-tied");
        files.insert(path_of("tekken.json"), b"{}".to_vec());
        if without_json {
            files.remove(&path_of("tokenizer.json"));
        }
        let hub = hub(listed(files));
        let sources = sources("tekken", &hub);
        let folder = pulled("org/m", &sources).unwrap();
        assert_eq!(folder.join("tekken.json").exists(), without_json);
        assert_eq!(folder.join("tokenizer.json").exists(), !without_json);
        remove(&sources);
    }
}

#[test]
fn the_usual_gguf_is_chosen_and_what_is_no_model_is_left_out() {
    let check = |names: &[&str], variant: Option<&str>, expect: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
        assert_eq!(files::gguf_choices(&names, variant), expect, "{names:?} {variant:?}");
    };
    let usual =
        ["m-BF16.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-Q8_0.gguf", "m.imatrix.gguf", "m-mtp-Q4_K_M.gguf"];
    check(&usual, None, &["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-BF16.gguf"]);
    check(&usual, Some("q8_0"), &["m-Q8_0.gguf"]);
    check(&usual, Some("mmproj-Q8_0.gguf"), &["mmproj-Q8_0.gguf"]);
    let folders = ["BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf", "Q8_0/m.gguf"];
    check(&folders, None, &["Q8_0/m.gguf", "BF16/m-BF16-00001-of-00002.gguf"]);
    check(&folders, Some("bf16"), &["BF16/m-BF16-00001-of-00002.gguf"]);
    check(&folders, Some("Q8_0/m.gguf"), &["Q8_0/m.gguf"]);
    check(&["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"], Some("Q4_K_M"), &["m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf"]);
    check(&["m-IQ4_K_M.gguf"], Some("Q4_K_M"), &[]);
}

#[test]
fn files_in_folders_and_of_revisions_are_fetched_and_found() {
    let list = |names: &[&str]| {
        let file = |name: &&str| serde_json::json!({"type": "file", "path": name, "size": FILE.len()});
        serde_json::Value::from(names.iter().map(file).collect::<Vec<_>>()).to_string().into_bytes()
    };
    let hub = hub(HashMap::from([
        (LIST.to_owned(), list(&["Q4_0/m-Q4_0.gguf", "Q8_0/m-Q8_0.gguf"])),
        (path_of("Q4_0/m-Q4_0.gguf"), FILE.clone()),
        (path_of("Q8_0/m-Q8_0.gguf"), FILE.clone()),
        ("/api/models/org/m/tree/v2".to_owned(), list(&["n-Q4_0.gguf"])),
        ("/org/m/resolve/v2/n-Q4_0.gguf".to_owned(), FILE.clone()),
    ]));
    let sources = sources("folders", &hub);
    for (model, expect) in [
        ("org/m", "org--m/m-Q8_0.gguf"),
        ("org/m:Q4_0", "org--m--Q4_0/m-Q4_0.gguf"),
        ("org/m:Q4_0/m-Q4_0.gguf", "org--m--Q4_0--m-Q4_0.gguf/m-Q4_0.gguf"),
        ("org/m@v2", "org--m@v2/n-Q4_0.gguf"),
        ("org/m@v2:Q4_0", "org--m@v2--Q4_0/n-Q4_0.gguf"),
    ] {
        let path = pulled(model, &sources).unwrap();
        assert_eq!(path, sources.cache.join("models").join(expect), "{model}");
        assert_eq!(locate(model, &sources).unwrap().path, path, "{model}");
    }
    let models = list_names(&sources);
    assert!(models.iter().all(|model| locate(model, &sources).is_ok()), "{models:?}");
    assert!(models.contains(&"org/m@v2:Q4_0".to_owned()), "{models:?}");
    remove(&sources);
}

fn list_names(sources: &ModelSources) -> Vec<String> {
    super::list(sources).into_iter().map(|listed| listed.model).collect()
}

#[test]
fn a_gated_repository_leaves_nothing_and_its_error_names_the_address() {
    let list = files_of("llama-f32-tied").remove(LIST).unwrap();
    let hub = hub_that(move |request| match request.path.starts_with(LISTS) {
        true => Answer::new("200 OK", &list),
        false => Answer::new("401 Unauthorized", b""),
    });
    let sources = sources("gated", &hub);
    let error = pulled("org/m", &sources).unwrap_err().to_string();
    let address = format!("{}{}", hub.endpoint, path_of("config.json"));
    assert!(error.contains(&address) && error.contains("HF_TOKEN"), "{error}");
    assert_eq!(kept(&sources), [""; 0]);
    remove(&sources);
}

#[test]
fn a_list_of_several_pages_is_read_to_its_end() {
    let file = |name: &str| serde_json::json!([{"type": "file", "path": name, "size": FILE.len()}]).to_string();
    let (first, second) = (file("m-Q5_0.gguf"), file("m-Q4_K_M.gguf"));
    let hub = hub_that(move |request| match (&*request.path, request.host.as_str()) {
        (LIST, host) => {
            let headers = format!("link: <http://{host}/api/more?cursor=x>; rel=\"next\"\r\n");
            Answer { headers, ..Answer::new("200 OK", first.as_bytes()) }
        }
        ("/api/more", _) => Answer::new("200 OK", second.as_bytes()),
        _ => Answer::new("200 OK", &FILE),
    });
    let sources = sources("pages", &hub);
    assert!(pulled("org/m", &sources).unwrap().ends_with("m-Q4_K_M.gguf"));
    remove(&sources);
}

/// The files of a sentence-transformers model are in subfolders: how it pools, and what follows.
#[test]
fn modules_in_subfolders_come_with_a_model() {
    let mut files = HashMap::new();
    let folder = reference("gemma-embedding");
    let names = files::file_names_below(&folder).unwrap();
    assert!(names.iter().any(|name| name == "2_Dense/model.safetensors"), "{names:?}");
    files.extend(names.iter().map(|name| (path_of(name), std::fs::read(folder.join(name)).unwrap())));
    files.insert(path_of("onnx/model.onnx"), vec![0; 9]);
    let hub = hub(listed(files));
    let sources = sources("modules", &hub);
    let path = pulled("org/m", &sources).unwrap();
    let [ours, theirs] = [&path, &folder].map(|path| Checkpoint::open(path).unwrap());
    assert_eq!(ours.fingerprint().unwrap(), theirs.fingerprint().unwrap());
    assert_eq!(ours.spec().pooling.layers.len(), 2);
    assert!(!path.join("onnx").exists());
    remove(&sources);
}
